//! Going to the background: a second process does the work, and this one waits until it says what is there.
//!
//! The second process is this program with the same arguments; what it prints until it is ready, this one prints. If it
//! fails, it has said why on the standard error that both share, and its exit code is ours.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use crate::error::{CommandFailure, EXIT_FAILURE, EXIT_OK};

/// What the process in the background says when it is ready.
pub(super) const READY: &str = "ready";

/// Starts the second process and waits for it to be ready, or to fail.
///
/// # Errors
///
/// If it cannot be started.
pub(super) fn start() -> Result<u8, CommandFailure> {
    let failed = |error: std::io::Error| CommandFailure::about("cannot go to the background", error);
    let arguments = std::env::args_os()
        .skip(1)
        .filter(|argument| argument != "--daemonize");
    let program = std::env::current_exe().map_err(failed)?;
    let mut child = Command::new(program)
        .args(arguments)
        .arg("--detached")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    if let Some(output) = child.stdout.take() {
        for line in BufReader::new(output).lines() {
            let line = line.map_err(failed)?;
            if line == READY {
                return Ok(EXIT_OK);
            }
            writeln!(std::io::stdout(), "{line}")?;
        }
    }
    let status = child.wait().map_err(failed)?;
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    // It has said why, and its code is not 0: it was never ready.
    Err(CommandFailure::Told(
        code.filter(|&code| code != EXIT_OK).unwrap_or(EXIT_FAILURE),
    ))
}

/// Leaves the session of whoever started us, so that its end is not ours.
///
/// # Errors
///
/// What the system said.
pub(super) fn leave_session() -> std::io::Result<()> {
    rustix::process::setsid().map(drop).map_err(Into::into)
}
