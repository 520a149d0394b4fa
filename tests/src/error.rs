//! Errors of the lab, each with what a person needs to act on it.

use std::error::Error as _;
use std::fmt;
use std::path::PathBuf;

use crate::fault;
use crate::results::{PANICKED, RESTARTED};

/// Anything that keeps the lab from doing what a test asked.
///
/// Its `Debug` is its message and the chain of causes: that is what a test that returns it shows.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A program the lab runs is not on this machine.
    #[error("the lab needs `{tool}` (Debian package {package}); run `make setup` as root")]
    MissingTool {
        /// The program.
        tool: &'static str,
        /// The Debian package that has it.
        package: &'static str,
    },
    /// The kernel and the root file system of the guests were not built.
    #[error("the lab's guest is not ready; run `make setup` as root: {message}")]
    GuestNotBuilt {
        /// The output of `tests/setup.sh --where`.
        message: String,
    },
    /// The newer kernel cannot be had on this machine, and no installing helps.
    #[error("{why}")]
    NewerKernelUnavailable {
        /// The output of `tests/setup.sh --newer`.
        why: String,
    },
    /// The `ringdisk` binary was not found.
    #[error("no `ringdisk` binary in {looked}; run `cargo build --release -p ringdisk`, or set RINGDISK_BIN")]
    RingdiskNotBuilt {
        /// The places searched.
        looked: String,
    },
    /// A program could not be started.
    #[error("cannot start `{command}`")]
    Spawn {
        /// The command line.
        command: String,
        /// The cause.
        source: std::io::Error,
    },
    /// A file of the lab could not be read or written.
    #[error("cannot {action} {}", path.display())]
    File {
        /// The action that was tried, as a verb.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A tool ran and did not succeed.
    #[error("`{command}` ended with {status}:\n{output}")]
    Tool {
        /// The command line.
        command: String,
        /// Its exit status.
        status: String,
        /// Its output.
        output: String,
    },
    /// `qemu-img check` found more than the test allows.
    #[error("qemu-img check of {} found {found}:\n{report}", path.display())]
    Unsound {
        /// The image.
        path: PathBuf,
        /// `leaks` or `errors`.
        found: &'static str,
        /// The report of `qemu-img`.
        report: String,
    },
    /// A log of dm-log-writes cannot be understood.
    #[error("the write log {} is wrong at offset {offset}: {problem}", path.display())]
    WriteLog {
        /// The log.
        path: PathBuf,
        /// The offset in it, in bytes.
        offset: u64,
        /// The fault there, and what would be right.
        problem: String,
    },
    /// Something did not happen in time.
    #[error("{what} did not happen within {seconds} s; the log ends:\n{log}")]
    Timeout {
        /// The event that was waited for.
        what: String,
        /// The length of the wait, in seconds.
        seconds: u64,
        /// The end of the log of who should have done it.
        log: String,
    },
    /// A process ended when it should not have, or not as it should have.
    #[error("`{command}` ended with {status}, {expected}; its log ends:\n{log}")]
    Ended {
        /// The command line.
        command: String,
        /// Its exit status.
        status: String,
        /// The end that was expected instead.
        expected: &'static str,
        /// The end of its log.
        log: String,
    },
    /// A guest panicked, stopped early, or its script failed.
    #[error("the guest {what}; its script said:\n{lines}\nits console ends:\n{console}")]
    Guest {
        /// The event, as a verb phrase with the guest as its subject.
        what: String,
        /// The end of the script's output.
        lines: String,
        /// The end of the kernel's console.
        console: String,
        /// The part that failed, if the console shows a known fault of the guest's own kernel.
        kernels_fault: Option<&'static str>,
    },
}

impl Error {
    /// Returns true if a guest failed as a whole: it panicked, restarted by itself, or was too slow. An emulated guest with
    /// real KVM does, now and then. A benchmark may begin again then; a test must look closer.
    #[must_use]
    pub fn is_of_whole_guest(&self) -> bool {
        match self {
            Self::Timeout { .. } => true,
            Self::Guest { what, .. } => what == PANICKED || what == RESTARTED,
            _ => self.reason_to_begin_again().is_some(),
        }
    }

    /// Returns true if the emulator cannot run a machine in its guest that writes CR8, as firmware does, although it should.
    #[must_use]
    pub fn is_of_emulated_cr8(&self) -> bool {
        matches!(self, Self::Ended { command, status, log, .. } if fault::is_of_cr8(command, status, log))
    }

    /// Returns what failed, if it was a known fault of the emulator or of the guest's own kernel: then, and only then,
    /// may a test [begin again](crate::begun_again).
    #[must_use]
    pub fn reason_to_begin_again(&self) -> Option<&'static str> {
        match self {
            Self::Ended {
                command, status, log, ..
            } => fault::of_emulator(command, status, log),
            Self::Guest { kernels_fault, .. } => *kernels_fault,
            _ => None,
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")?;
        let mut cause = self.source();
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_of_whole_guest_tells_guests_from_scripts() {
        let guest = |what: &str| Error::Guest {
            what: what.to_owned(),
            lines: "the guest panicked".to_owned(),
            console: String::new(),
            kernels_fault: None,
        };
        assert!(guest(PANICKED).is_of_whole_guest());
        assert!(guest(RESTARTED).is_of_whole_guest());
        assert!(!guest("script ended with 1").is_of_whole_guest());
    }

    #[test]
    fn error_shows_its_message_and_cause() {
        let source = std::io::Error::from(std::io::ErrorKind::PermissionDenied);
        let error = Error::Spawn {
            command: "qemu-img check".to_owned(),
            source,
        };
        assert_eq!(
            format!("{error:?}"),
            "cannot start `qemu-img check`: permission denied"
        );
    }
}
