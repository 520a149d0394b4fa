//! Failures of commands: the exit code, and one line for standard error.

use std::error::Error;
use std::fmt;
use std::io;

/// The exit code of a command that did its work.
pub const EXIT_OK: u8 = 0;
/// The exit code of a command that failed.
pub const EXIT_FAILURE: u8 = 1;
/// The exit code of an invalid command line.
pub const EXIT_USAGE: u8 = 2;

/// The failure of a command.
#[derive(Debug)]
pub enum CommandFailure {
    /// The command line is invalid; nothing was opened.
    Usage(String),
    /// The command line is valid, the work failed.
    Failed(Box<dyn Error + Send + Sync>),
    /// Standard output was closed by its reader; nothing is reported.
    OutputClosed,
    /// A child process has reported the failure already; this is the exit code.
    Reported(u8),
}

impl CommandFailure {
    /// Returns a failure with its subject in front: `what: the error: its source: …`.
    pub fn about(what: impl fmt::Display, error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Failed(Box::new(About {
            what: what.to_string(),
            source: error.into(),
        }))
    }

    /// Returns the exit code.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) => EXIT_USAGE,
            Self::Failed(_) | Self::OutputClosed => EXIT_FAILURE,
            Self::Reported(code) => *code,
        }
    }

    /// Returns the line for standard error, without the program's name; `None` if there is nothing to report.
    #[must_use]
    pub fn line(&self) -> Option<String> {
        match self {
            Self::Usage(message) => Some(one_line(message)),
            Self::Failed(error) => Some(one_line(&chain(error.as_ref()))),
            Self::OutputClosed | Self::Reported(_) => None,
        }
    }
}

/// An error of writing to standard output.
impl From<io::Error> for CommandFailure {
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe {
            return Self::OutputClosed;
        }
        Self::about("cannot write to standard output", error)
    }
}

/// An error with its subject.
#[derive(Debug)]
struct About {
    what: String,
    source: Box<dyn Error + Send + Sync>,
}

impl fmt::Display for About {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl Error for About {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(self.source.as_ref())
    }
}

/// Returns the error and its sources, joined by `: `. A source whose text is included already is left out.
#[must_use]
pub fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        let said = source.to_string();
        if !text.contains(&said) {
            text.push_str(": ");
            text.push_str(&said);
        }
        next = source.source();
    }
    text
}

/// Returns the text as one line, with control characters (of file names) replaced.
fn one_line(text: &str) -> String {
    let words: Vec<&str> = text
        .split(['\n', '\r'])
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect();
    words
        .join(" ")
        .chars()
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("outer of {0}")]
    struct Repeats(#[source] io::Error);

    #[derive(Debug, thiserror::Error)]
    #[error("outer of {0} (header byte 20)")]
    struct InTheMiddle(#[source] io::Error);

    #[test]
    fn failure_is_one_line_with_its_sources() {
        let source = io::Error::from_raw_os_error(libc::ENOENT);
        let failure = CommandFailure::about("cannot open\nx\u{1b}[1m", source);
        assert_eq!(
            failure.line().expect("a line"),
            "cannot open x\u{fffd}[1m: No such file or directory (os error 2)"
        );
        assert_eq!(failure.exit_code(), 1);
        assert_eq!(CommandFailure::Usage("--x is wrong".to_owned()).exit_code(), 2);
    }

    #[test]
    fn chain_omits_a_source_its_parent_already_quotes() {
        let error = Repeats(io::Error::other("inner"));
        assert_eq!(chain(&error), "outer of inner");
        let error = InTheMiddle(io::Error::other("inner"));
        assert_eq!(chain(&error), "outer of inner (header byte 20)");
    }

    #[test]
    fn closed_pipe_is_a_quiet_failure() {
        let failure = CommandFailure::from(io::Error::from(io::ErrorKind::BrokenPipe));
        assert_eq!((failure.line(), failure.exit_code()), (None, 1));
    }
}
