//! Answers as tables, for people.
//!
//! Works on any answer: plain fields become lines, and each list of objects becomes a table with a column for each field that one
//! of them has.

use serde_json::{Map, Value};

/// Columns and lines that come first, in this order; the others follow by name.
const FIRST: [&str; 13] = [
    "state", "id", "name", "path", "address", "place", "format", "size", "readonly", "queues", "open", "io",
    "removing",
];

/// Returns an answer's fields as text of whole lines; `done` if it has none.
#[must_use]
pub fn table(answer: &Value) -> String {
    let empty = Map::new();
    let fields = answer.as_object().unwrap_or(&empty);
    let keys = order(fields.keys().filter(|key| *key != "ok"));
    let (lists, plain): (Vec<&str>, Vec<&str>) = keys.into_iter().partition(|key| is_list(&fields[*key]));
    let lines: Vec<Vec<String>> = plain
        .iter()
        .map(|key| vec![(*key).to_owned(), cell(&fields[*key])])
        .collect();
    let mut text = aligned(&lines);
    for key in &lists {
        if !text.is_empty() {
            text.push('\n');
        }
        text += &objects(key, fields[*key].as_array().map_or(&[], Vec::as_slice));
    }
    if text.is_empty() {
        "done\n".to_owned()
    } else {
        text
    }
}

/// Returns the fields of an object as text on one line: the value of `first`, and then each as `name=value`.
#[must_use]
pub fn line(object: &Value, first: &str) -> String {
    let fields = object.as_object().into_iter().flatten();
    let others = fields.filter(|(key, _)| *key != first && *key != "time");
    let shown = others.map(|(key, value)| format!(" {key}={}", cell(value)));
    cell(&object[first]) + &shown.collect::<String>()
}

/// Returns true for a list of objects, and for one that is empty.
fn is_list(value: &Value) -> bool {
    value
        .as_array()
        .is_some_and(|items| items.iter().all(Value::is_object))
}

/// Returns a list of objects as a table.
fn objects(name: &str, items: &[Value]) -> String {
    if items.is_empty() {
        return format!("no {name}\n");
    }
    let keys = order(items.iter().filter_map(Value::as_object).flat_map(Map::keys));
    let mut lines = vec![keys.iter().map(|key| key.to_uppercase()).collect::<Vec<_>>()];
    lines.extend(
        items
            .iter()
            .map(|item| keys.iter().map(|key| cell(&item[*key])).collect()),
    );
    aligned(&lines)
}

/// Returns each key once: first those of [`FIRST`].
fn order<'a>(keys: impl Iterator<Item = &'a String>) -> Vec<&'a str> {
    let mut keys: Vec<&str> = keys.map(String::as_str).collect();
    let rank = |key: &str| {
        FIRST
            .iter()
            .position(|first| *first == key)
            .unwrap_or(FIRST.len())
    };
    keys.sort_unstable_by_key(|key| (rank(key), *key));
    keys.dedup();
    keys
}

/// Returns a value on one line. A control character in a name cannot reach the terminal.
fn cell(value: &Value) -> String {
    let text = match value {
        Value::Null => "-".to_owned(),
        Value::Bool(true) => "yes".to_owned(),
        Value::Bool(false) => "no".to_owned(),
        Value::Number(number) => number.to_string(),
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(cell).collect::<Vec<_>>().join(", "),
        Value::Object(fields) => {
            let fields = fields.iter().map(|(key, value)| format!("{key} {}", cell(value)));
            fields.collect::<Vec<_>>().join(", ")
        }
    };
    let plain = text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c });
    match plain.collect::<String>() {
        text if text.is_empty() => "-".to_owned(),
        text => text,
    }
}

/// Returns lines of cells, with all columns but the last as wide as their widest cell.
fn aligned(lines: &[Vec<String>]) -> String {
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = lines.iter().filter_map(|line| line.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for line in lines {
        let cells = line
            .iter()
            .zip(&widths)
            .map(|(cell, &width)| format!("{cell:width$}"));
        text += cells.collect::<Vec<_>>().join("  ").trim_end();
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn table_shows_fields_as_lines_and_lists_as_tables() {
        let answer = json!({"ok": true, "memory": 7, "state": "running", "exits": {"memory": 1, "ports": 2}, "disks": [
            {"id": "a", "size": 512, "readonly": false}, {"id": "long name", "size": 1024, "compaction": {"state": "done"}},
        ]});
        assert_eq!(
            table(&answer),
            "state   running\nexits   memory 1, ports 2\nmemory  7\n\n\
             ID         SIZE  READONLY  COMPACTION\na          512   no        -\nlong name  1024  -         state done\n"
        );
        assert_eq!(table(&json!({"ok": true})), "done\n");
        assert_eq!(table(&json!({"ok": true, "snapshots": []})), "no snapshots\n");
    }

    #[test]
    fn table_lets_no_control_character_through() {
        let answer = json!({"ok": true, "snapshots": [{"id": "1", "name": "a\u{1b}[31m\nb"}]});
        assert_eq!(table(&answer), "ID  NAME\n1   a\u{fffd}[31m\u{fffd}b\n");
    }
}
