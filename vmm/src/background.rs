//! Continuing in the background: another process serves, and this one waits until it reports that it is ready.
//!
//! The other process is this program with the same arguments. This process prints the other's output until it is ready. A
//! failure is reported on the standard error that both share. An intermediate process exits at once, so that the background
//! process is adopted by init or by the service manager, which learns of its exit even while this process still waits.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};

use crate::error::{CommandFailure, EXIT_FAILURE, EXIT_OK};

/// The line by which the background process reports that it is ready.
pub(crate) const READY: &str = "ready";

/// Starts this program again, one step further on its way.
fn step(output: Stdio) -> std::io::Result<Child> {
    let arguments = std::env::args_os()
        .skip(1)
        .filter(|argument| argument != "--daemonize");
    Command::new(std::env::current_exe()?)
        .args(arguments)
        .arg("--detached")
        .stdin(Stdio::null())
        .stdout(output)
        .spawn()
}

fn failed(error: std::io::Error) -> CommandFailure {
    CommandFailure::about("cannot go to the background", error)
}

/// Starts the process in the background and waits for it to be ready, or to fail.
///
/// # Errors
///
/// If it cannot be started, or fails.
pub(crate) fn start() -> Result<u8, CommandFailure> {
    let mut child = step(Stdio::piped()).map_err(failed)?;
    let output = child.stdout.take();
    // It ends at once, and its own child goes on.
    child.wait().map_err(failed)?;
    if let Some(output) = output {
        for line in BufReader::new(output).lines() {
            let line = line.map_err(failed)?;
            if line == READY {
                return Ok(EXIT_OK);
            }
            // It serves as well if nobody reads this.
            writeln!(std::io::stdout(), "{line}").unwrap_or_default();
        }
    }
    // It has said why.
    Err(CommandFailure::Reported(EXIT_FAILURE))
}

/// The process in between: starts the one that stays, and ends.
///
/// # Errors
///
/// If it cannot be started.
pub(crate) fn pass_on() -> Result<u8, CommandFailure> {
    step(Stdio::inherit()).map_err(failed)?;
    Ok(EXIT_OK)
}

/// Starts a new session, so that the end of the caller's session does not end this process.
///
/// # Errors
///
/// The error of the system call.
pub(crate) fn leave_session() -> std::io::Result<()> {
    rustix::process::setsid().map(drop).map_err(Into::into)
}
