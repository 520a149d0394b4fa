//! Going to the background: another process does the work, and this one waits until it says what is there.
//!
//! The other process is this program with the same arguments; what it prints until it is ready, this one prints. If it
//! fails, it has said why on the standard error that both share. It is nobody's child here: whoever looks after orphans, a
//! service manager for its services, hears of its end even if that comes while this one still waits.

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
            writeln!(std::io::stdout(), "{line}")?;
        }
    }
    // It has said why.
    Err(CommandFailure::Told(EXIT_FAILURE))
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

/// Leaves the session of whoever started us, so that its end is not ours.
///
/// # Errors
///
/// The error of the system call.
pub(crate) fn leave_session() -> std::io::Result<()> {
    rustix::process::setsid().map(drop).map_err(Into::into)
}
