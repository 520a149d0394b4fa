//! The command language of `ringdisk io`: the data commands of `qemu-io`.
//!
//! A line is a command, flags and arguments separated by spaces: `write -P 0xaa 0 64k`. The parser knows
//! nothing of the disk; the engine checks that a range lies inside it.

use crate::size::{SizeError, parse_bytes};

/// Maximum size of a command's buffer in bytes, as in `qemu-io`.
pub const MAX_BUFFER_BYTES: u64 = (1 << 31) - 512;
/// The byte that `write` fills with when no `-P` is given.
pub const DEFAULT_PATTERN: u8 = 0xcd;

/// Bytes `offset..offset + len` of the disk. The end does not overflow.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Range {
    /// The first byte.
    pub offset: u64,
    /// The length in bytes.
    pub len: u64,
}

/// A part of what was read, and the byte it must consist of.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Check {
    /// The byte.
    pub pattern: u8,
    /// The start of the part in the buffer, in bytes.
    pub start: u64,
    /// The length of the part in bytes.
    pub len: u64,
}

/// The data of a write.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Content {
    /// This byte, over and over.
    Pattern(u8),
    /// Zeros, without sending them.
    Zeroes {
        /// The disk may give the space back.
        unmap: bool,
    },
}

/// The kind of a data command.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Transfer {
    /// Read, and perhaps verify and show.
    Read {
        /// The expected contents.
        check: Option<Check>,
        /// Show the bytes.
        dump: bool,
    },
    /// Write.
    Write {
        /// The data.
        content: Content,
        /// Durable when answered.
        fua: bool,
    },
    /// Discard.
    Discard,
}

/// One parsed line.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Command {
    /// A data command on a range.
    Transfer {
        /// The command's name.
        name: &'static str,
        /// Its kind.
        transfer: Transfer,
        /// The bytes of the disk.
        range: Range,
        /// Without the statistics, and without showing what was read.
        quiet: bool,
        /// Started, and not waited for.
        background: bool,
    },
    /// Makes what was written durable.
    Flush,
    /// Waits for everything started in the background.
    AioFlush,
    /// Shows the size of the disk.
    Length,
    /// Shows which parts of the disk its own image holds.
    Map,
    /// Lists the commands.
    Help,
    /// Ends the session.
    Quit,
}

/// An invalid line.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum CommandError {
    /// No such command.
    #[error("command \"{name}\" not found; `help` lists the commands")]
    Unknown {
        /// The unknown name.
        name: String,
    },
    /// A flag the command does not have.
    #[error("{command}: unknown flag -{flag}; usage: {usage}")]
    Flag {
        /// The command.
        command: &'static str,
        /// The flag.
        flag: char,
        /// Its usage.
        usage: &'static str,
    },
    /// A flag without its value.
    #[error("{command}: -{flag} needs a value; usage: {usage}")]
    FlagValue {
        /// The command.
        command: &'static str,
        /// The flag.
        flag: char,
        /// Its usage.
        usage: &'static str,
    },
    /// Too few or too many arguments.
    #[error("{command}: bad argument count {count}; usage: {usage}")]
    Arguments {
        /// The command.
        command: &'static str,
        /// The number of arguments.
        count: usize,
        /// Its usage.
        usage: &'static str,
    },
    /// An offset or length that is none.
    #[error("{command}: {what} `{text}`: {source}")]
    Number {
        /// The command.
        command: &'static str,
        /// The argument.
        what: &'static str,
        /// Its text.
        text: String,
        /// The parse error.
        source: SizeError,
    },
    /// A pattern that is no byte.
    #[error("{command}: `{text}` is not a valid pattern byte; -P takes 0 to 255 or 0x0 to 0xff")]
    Pattern {
        /// The command.
        command: &'static str,
        /// Its text.
        text: String,
    },
    /// The range is longer than may be, or its end overflows.
    #[error("{command}: length cannot exceed {max}, given {len}")]
    TooLong {
        /// The command.
        command: &'static str,
        /// The limit in bytes.
        max: u64,
        /// The length in bytes.
        len: u128,
    },
    /// Flags that exclude or need each other.
    #[error("{command}: {rule}")]
    Combination {
        /// The command.
        command: &'static str,
        /// The rule that was broken.
        rule: &'static str,
    },
}

/// The name, flags and usage of a command.
struct Spec {
    name: &'static str,
    /// Flags without a value.
    switches: &'static str,
    /// Flags with one.
    valued: &'static str,
    /// Arguments: at least, and at most.
    arguments: (usize, usize),
    usage: &'static str,
    about: &'static str,
}

/// Maximum number of lengths in a line; bounds the memory for one line.
const MANY: usize = 1024;

static SPECS: &[Spec] = &[
    Spec {
        name: "read",
        switches: "qv",
        valued: "Psl",
        arguments: (2, 2),
        usage: "read [-qv] [-P pattern [-s off] [-l len]] off len",
        about: "reads bytes; -P verifies them against a pattern, -s and -l only a part, -v prints them",
    },
    Spec {
        name: "readv",
        switches: "qv",
        valued: "P",
        arguments: (2, MANY),
        usage: "readv [-qv] [-P pattern] off len [len..]",
        about: "reads bytes; the length is the sum of all lengths",
    },
    Spec {
        name: "aio_read",
        switches: "qv",
        valued: "P",
        arguments: (2, MANY),
        usage: "aio_read [-qv] [-P pattern] off len [len..]",
        about: "starts a read and does not wait for it",
    },
    Spec {
        name: "write",
        switches: "fquz",
        valued: "P",
        arguments: (2, 2),
        usage: "write [-fquz] [-P pattern] off len",
        about: "writes a pattern (default 0xcd) or zeros (-z); -u allows zeros to free space, -f makes the write durable (FUA)",
    },
    Spec {
        name: "writev",
        switches: "fq",
        valued: "P",
        arguments: (2, MANY),
        usage: "writev [-fq] [-P pattern] off len [len..]",
        about: "writes a pattern; the length is the sum of all lengths",
    },
    Spec {
        name: "aio_write",
        switches: "fquz",
        valued: "P",
        arguments: (2, MANY),
        usage: "aio_write [-fquz] [-P pattern] off len [len..]",
        about: "starts a write and does not wait for it",
    },
    Spec {
        name: "aio_flush",
        switches: "",
        valued: "",
        arguments: (0, 0),
        usage: "aio_flush",
        about: "waits for every aio_read and aio_write",
    },
    Spec {
        name: "discard",
        switches: "q",
        valued: "",
        arguments: (2, 2),
        usage: "discard [-q] off len",
        about: "discards bytes",
    },
    Spec {
        name: "flush",
        switches: "",
        valued: "",
        arguments: (0, 0),
        usage: "flush",
        about: "makes every completed write durable",
    },
    Spec {
        name: "length",
        switches: "",
        valued: "",
        arguments: (0, 0),
        usage: "length",
        about: "prints the size of the disk",
    },
    Spec {
        name: "map",
        switches: "",
        valued: "",
        arguments: (0, 0),
        usage: "map",
        about: "prints which parts of the disk are allocated in its image, and which are not",
    },
    Spec {
        name: "help",
        switches: "",
        valued: "",
        arguments: (0, MANY),
        usage: "help",
        about: "lists the commands",
    },
    Spec {
        name: "quit",
        switches: "",
        valued: "",
        arguments: (0, 0),
        usage: "quit",
        about: "waits for requests in flight and exits",
    },
];

/// Returns the output of `help`, one command per line.
#[must_use]
pub fn help() -> String {
    SPECS
        .iter()
        .map(|spec| format!("{} -- {}\n", spec.usage, spec.about))
        .collect()
}

impl Command {
    /// Parses one line. Returns `None` if it is empty.
    ///
    /// # Errors
    ///
    /// [`CommandError`], naming the command, the argument and what it takes.
    pub fn parse(line: &str) -> Result<Option<Self>, CommandError> {
        let mut words = line.split_whitespace();
        let Some(name) = words.next() else { return Ok(None) };
        let name = if name == "q" { "quit" } else { name };
        let spec = SPECS
            .iter()
            .find(|spec| spec.name == name)
            .ok_or_else(|| CommandError::Unknown {
                name: name.to_owned(),
            })?;
        let words = Words::sort(spec, words)?;
        match spec.name {
            "flush" => Ok(Some(Self::Flush)),
            "aio_flush" => Ok(Some(Self::AioFlush)),
            "length" => Ok(Some(Self::Length)),
            "map" => Ok(Some(Self::Map)),
            "help" => Ok(Some(Self::Help)),
            "quit" => Ok(Some(Self::Quit)),
            _ => words.transfer().map(Some),
        }
    }
}

/// The words of a line, sorted into switches, values and arguments.
struct Words<'a> {
    spec: &'static Spec,
    switches: Vec<char>,
    values: Vec<(char, &'a str)>,
    arguments: Vec<&'a str>,
}

impl<'a> Words<'a> {
    /// Sorts the words of a line. Flags may be joined (`-zu`), a value may directly follow its flag (`-P0xaa`), and
    /// flags may come after arguments.
    fn sort(spec: &'static Spec, mut words: impl Iterator<Item = &'a str>) -> Result<Self, CommandError> {
        let mut sorted = Self {
            spec,
            switches: Vec::new(),
            values: Vec::new(),
            arguments: Vec::new(),
        };
        while let Some(word) = words.next() {
            let Some(flags) = word.strip_prefix('-').filter(|flags| !flags.is_empty()) else {
                sorted.arguments.push(word);
                continue;
            };
            for (at, flag) in flags.char_indices() {
                if spec.switches.contains(flag) {
                    sorted.switches.push(flag);
                } else if spec.valued.contains(flag) {
                    let rest = &flags[at + flag.len_utf8()..];
                    let value = if rest.is_empty() { words.next() } else { Some(rest) };
                    let missing = CommandError::FlagValue {
                        command: spec.name,
                        flag,
                        usage: spec.usage,
                    };
                    sorted.values.push((flag, value.ok_or(missing)?));
                    break;
                } else {
                    return Err(CommandError::Flag {
                        command: spec.name,
                        flag,
                        usage: spec.usage,
                    });
                }
            }
        }
        let count = sorted.arguments.len();
        if !(spec.arguments.0..=spec.arguments.1).contains(&count) {
            return Err(CommandError::Arguments {
                command: spec.name,
                count,
                usage: spec.usage,
            });
        }
        Ok(sorted)
    }

    fn has(&self, switch: char) -> bool {
        self.switches.contains(&switch)
    }

    /// Returns the value of a flag; the last one counts.
    fn value(&self, flag: char) -> Option<&'a str> {
        self.values
            .iter()
            .rev()
            .find(|(name, _)| *name == flag)
            .map(|(_, value)| *value)
    }

    fn number(&self, what: &'static str, text: &str) -> Result<u64, CommandError> {
        parse_bytes(text).map_err(|source| CommandError::Number {
            command: self.spec.name,
            what,
            text: text.to_owned(),
            source,
        })
    }

    fn pattern(&self) -> Result<Option<u8>, CommandError> {
        let Some(text) = self.value('P') else {
            return Ok(None);
        };
        parse_bytes(text)
            .ok()
            .filter(|_| !text.ends_with(|last: char| last.is_ascii_alphabetic()) || text.starts_with("0x"))
            .and_then(|number| u8::try_from(number).ok())
            .map(Some)
            .ok_or_else(|| CommandError::Pattern {
                command: self.spec.name,
                text: text.to_owned(),
            })
    }

    fn combination<T>(&self, rule: &'static str) -> Result<T, CommandError> {
        Err(CommandError::Combination {
            command: self.spec.name,
            rule,
        })
    }

    /// Returns the range from the offset, with the sum of all lengths.
    fn range(&self, has_buffer: bool) -> Result<Range, CommandError> {
        let offset = self.number("offset", self.arguments[0])?;
        let mut len = 0_u128;
        for text in &self.arguments[1..] {
            len += u128::from(self.number("length", text)?);
        }
        // Sizes are below 2^63, so the end of the range cannot overflow.
        let max = if has_buffer {
            MAX_BUFFER_BYTES
        } else {
            i64::MAX as u64
        };
        match u64::try_from(len) {
            Ok(len) if len <= max => Ok(Range { offset, len }),
            _ => Err(CommandError::TooLong {
                command: self.spec.name,
                max,
                len,
            }),
        }
    }

    fn transfer(&self) -> Result<Command, CommandError> {
        let background = self.spec.name.starts_with("aio_");
        let pattern = self.pattern()?;
        let (transfer, range) = match self.spec.name {
            "discard" => (Transfer::Discard, self.range(false)?),
            "read" | "readv" | "aio_read" => {
                let range = self.range(true)?;
                (
                    Transfer::Read {
                        check: self.check(pattern, range)?,
                        dump: self.has('v'),
                    },
                    range,
                )
            }
            _ => {
                let content = match (self.has('z'), self.has('u'), pattern) {
                    (true, _, Some(_)) => {
                        return self.combination("-z and -P cannot be specified at the same time");
                    }
                    (false, true, _) => return self.combination("-u requires -z to be specified"),
                    (true, unmap, None) => Content::Zeroes { unmap },
                    (false, false, pattern) => Content::Pattern(pattern.unwrap_or(DEFAULT_PATTERN)),
                };
                let range = self.range(matches!(content, Content::Pattern(_)))?;
                (
                    Transfer::Write {
                        content,
                        fua: self.has('f'),
                    },
                    range,
                )
            }
        };
        Ok(Command::Transfer {
            name: self.spec.name,
            transfer,
            range,
            quiet: self.has('q'),
            background,
        })
    }

    /// Returns the check that `-P`, `-s` and `-l` ask for.
    fn check(&self, pattern: Option<u8>, range: Range) -> Result<Option<Check>, CommandError> {
        let (start, len) = (self.value('s'), self.value('l'));
        let Some(pattern) = pattern else {
            if start.is_some() || len.is_some() {
                return self.combination("-s and -l are only for use with -P");
            }
            return Ok(None);
        };
        let start = start.map_or(Ok(0), |text| self.number("-s", text))?;
        let rest = range.len.checked_sub(start);
        let len = match len {
            Some(text) => self.number("-l", text)?,
            None => rest.unwrap_or(0),
        };
        if rest.is_none_or(|rest| len > rest) {
            return self.combination("the range to verify lies outside what is read");
        }
        Ok(Some(Check { pattern, start, len }))
    }
}

#[cfg(test)]
mod tests;
