//! The shape of `key=value,…` texts: items, quotes and brackets, without any meaning.
//!
//! `--disk` and `image create -o` share it, so that quoting works the same everywhere.

/// A text that is not made of `key=value` items.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("`{item}`: {problem}")]
pub struct SyntaxError {
    /// The item, or what was left of the text when it stopped making sense.
    pub item: String,
    /// The error.
    pub problem: &'static str,
}

/// Splits `key=value,key=value` into pairs, in order.
///
/// A value in double quotes loses them and may hold commas; one that starts with `[` ends at the
/// matching `]`. Anywhere else brackets and quotes are ordinary characters, as in file names.
///
/// # Errors
///
/// [`SyntaxError`] with the item that is not `key=value`, or whose quote or bracket is not closed.
pub fn items(text: &str) -> Result<Vec<(&str, &str)>, SyntaxError> {
    let mut pairs = Vec::new();
    let mut rest = text;
    loop {
        let wrong = |item: &str, problem| SyntaxError {
            item: item.to_owned(),
            problem,
        };
        let until_comma = rest.split(',').next().unwrap_or(rest);
        let Some((key, _)) = until_comma.split_once('=') else {
            let problem = match (until_comma.is_empty(), pairs.is_empty()) {
                (true, true) => "expected key=value, found nothing",
                (false, true) => "expected key=value",
                (true, false) => {
                    "expected key=value, found nothing; a value with a comma goes in double quotes, key=\"a,b\""
                }
                (false, false) => {
                    "expected key=value; a value with a comma goes in double quotes, key=\"a,b\""
                }
            };
            return Err(wrong(until_comma, problem));
        };
        let after = &rest[key.len() + 1..];
        let (value, value_len) = match after.as_bytes().first() {
            Some(b'"') => {
                let close = after[1..]
                    .find('"')
                    .ok_or_else(|| wrong(rest, "the quote is not closed"))?;
                (&after[1..=close], close + 2)
            }
            Some(b'[') => {
                let len = bracketed_len(after).ok_or_else(|| wrong(rest, "the bracket is not closed"))?;
                (&after[..len], len)
            }
            _ => {
                let value = after.split(',').next().unwrap_or(after);
                (value, value.len())
            }
        };
        pairs.push((key, value));
        let item_len = key.len() + 1 + value_len;
        match rest.as_bytes().get(item_len) {
            None => return Ok(pairs),
            Some(b',') => rest = &rest[item_len + 1..],
            Some(_) => return Err(wrong(rest, "expected a comma after the closing quote or bracket")),
        }
    }
}

/// The items of `[a,b,[c,d]]`: `a`, `b` and `[c,d]`. `None` if it is no list or has an empty item.
#[must_use]
pub fn list(text: &str) -> Option<Vec<&str>> {
    if bracketed_len(text)? != text.len() {
        return None;
    }
    let inner = &text[1..text.len() - 1];
    let mut found = Vec::new();
    let (mut depth, mut start) = (0_usize, 0);
    for (at, byte) in inner.bytes().enumerate() {
        match byte {
            b'[' => depth += 1,
            b']' => depth -= 1,
            b',' if depth == 0 => {
                found.push(&inner[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    found.push(&inner[start..]);
    found.iter().all(|item| !item.is_empty()).then_some(found)
}

/// Returns the length in bytes of the bracketed text at the start of `text`, brackets included.
fn bracketed_len(text: &str) -> Option<usize> {
    if !text.starts_with('[') {
        return None;
    }
    let mut depth = 0_usize;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'[' => depth += 1,
            b']' if depth == 1 => return Some(at + 1),
            b']' => depth -= 1,
            _ => {}
        }
    }
    None
}
