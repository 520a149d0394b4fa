//! The command blocks of a Markdown document: `sh`, and units of systemd (`ini`).

use std::ffi::OsString;

use crate::shell;

/// The use to be made of a block.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum Use {
    /// Run it.
    Run,
    /// Start it and leave it running.
    Serves,
    /// Parse it only; why.
    NotRun(String),
}

/// A fenced block.
#[derive(Clone, Debug)]
pub(crate) struct Block {
    /// Its document and line.
    pub(crate) place: String,
    /// The use to be made of it.
    pub(crate) usage: Use,
    /// Its lines, without the indentation of the fence.
    pub(crate) text: String,
}

const FENCE: &str = "```";

/// Returns the command blocks of a document, or what is wrong with one.
pub(crate) fn parse(document: &str, text: &str) -> Result<Vec<Block>, String> {
    let default = text
        .lines()
        .find_map(|line| line.strip_prefix("<!-- commands: ")?.strip_suffix(" -->"));
    let mut blocks = Vec::new();
    let mut lines = (1..).zip(text.lines());
    while let Some((number, line)) = lines.next() {
        let Some(info) = line.trim_start().strip_prefix(FENCE) else {
            continue;
        };
        let place = format!("{document}:{number}");
        let indentation = line.len() - line.trim_start().len();
        let mut body = String::new();
        loop {
            let (_, line) = lines
                .next()
                .ok_or_else(|| format!("{place}: the block is not closed"))?;
            if line.trim() == FENCE {
                break;
            }
            body += line.get(indentation..).unwrap_or_default();
            body.push('\n');
        }
        let (language, info) = info.split_once(' ').unwrap_or((info, ""));
        if language == "ini" {
            let usage = Use::NotRun("is for a service manager".to_owned());
            let text = service_commands(&body);
            blocks.push(Block { place, usage, text });
        } else if language == "sh" {
            let info = if info.is_empty() {
                default.unwrap_or_default()
            } else {
                info
            };
            let usage = usage(info).map_err(|error| format!("{place}: {error}"))?;
            let text = body;
            blocks.push(Block { place, usage, text });
        }
    }
    Ok(blocks)
}

/// The commands of a unit, as a script.
fn service_commands(unit: &str) -> String {
    let commands = unit.lines().filter_map(|line| {
        let command = line
            .strip_prefix("ExecStart=")
            .or(line.strip_prefix("ExecReload="));
        Some(format!("{}\n", command?))
    });
    commands.collect()
}

fn usage(info: &str) -> Result<Use, String> {
    match (info, info.strip_prefix("not-run:").map(str::trim)) {
        ("", _) => Ok(Use::Run),
        ("serves", _) => Ok(Use::Serves),
        (_, Some("")) => Err("not-run: needs a reason".to_owned()),
        (_, Some(reason)) => Ok(Use::NotRun(reason.to_owned())),
        _ => Err(format!(
            "`{info}`: expected nothing, `serves` or `not-run: REASON`"
        )),
    }
}

impl Block {
    /// Parses the block's `ringdisk` commands as the program does, and returns how many there are.
    pub(crate) fn check_commands(&self) -> Result<usize, String> {
        let commands = self.commands()?;
        for words in &commands {
            ringdisk::cli::check(words.iter().map(OsString::from)).map_err(|failure| {
                let line = failure.line().unwrap_or_default();
                format!("{}: {}: {line}", self.place, words.join(" "))
            })?;
        }
        Ok(commands.len())
    }

    /// The block's `ringdisk` commands.
    pub(crate) fn commands(&self) -> Result<Vec<Vec<String>>, String> {
        let commands = shell::commands(&self.text).map_err(|error| format!("{}: {error}", self.place))?;
        let own = commands.into_iter().filter_map(|mut words| {
            while words.first().is_some_and(|word| word == "sudo" || word == "exec") {
                words.remove(0);
            }
            words
                .first()
                .is_some_and(|word| word == "ringdisk" || word.ends_with("/ringdisk"))
                .then_some(words)
        });
        Ok(own.collect())
    }
}
