//! The client of a control socket.
//!
//! Invariant: with a time limit, the whole exchange ends within it for each read and write, whatever the other side does.

use std::io::{self, BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use virtio_devices::connect::{Cancel, connect_within};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use super::request::{Request, send_line};
use crate::error::CommandFailure;

/// The longest time that a machine may take to accept a client that has no limit of its own: one that runs accepts at
/// once.
const CONNECT_MAX: Duration = Duration::from_secs(10);

/// An error of a request to a control socket.
#[derive(Debug)]
pub enum AskError {
    /// There is no answer.
    Unanswered(io::Error),
    /// It was refused, with this reason.
    Refused(String),
}

/// Asks the machine behind the socket at `path`; answers what it says.
///
/// # Errors
///
/// A failure that names the socket, or what the machine refused.
pub fn ask(path: &Path, request: &Request) -> Result<Value, CommandFailure> {
    ask_within(path, request, None).map_err(|error| match error {
        AskError::Unanswered(error) => CommandFailure::about(
            format!("no machine or server answers at {}", path.display()),
            error,
        ),
        AskError::Refused(message) => CommandFailure::Failed(message.into()),
    })
}

/// Sends a request that is answered with one line after the other, and calls `each` with each but the first, until the other side ends.
///
/// # Errors
///
/// As [`ask`], or what `each` says.
pub fn follow(
    path: &Path,
    request: &Request,
    mut each: impl FnMut(Value) -> Result<(), CommandFailure>,
) -> Result<(), CommandFailure> {
    let unanswered = |error| {
        CommandFailure::about(
            format!("no machine or server answers at {}", path.display()),
            error,
        )
    };
    let stream = send_request(path, request, None).map_err(unanswered)?;
    for (number, line) in BufReader::new(stream).lines().enumerate() {
        let value: Value =
            serde_json::from_str(&line.map_err(unanswered)?).map_err(|error| unanswered(error.into()))?;
        match value["error"].as_str() {
            Some(error) if number == 0 => return Err(CommandFailure::Failed(error.to_owned().into())),
            _ if number == 0 => {}
            _ => each(value)?,
        }
    }
    Ok(())
}

/// Sends a request like [`ask`], with a limit for the whole exchange.
///
/// # Errors
///
/// [`AskError`]; `TimedOut` if it took too long.
pub fn ask_within(path: &Path, request: &Request, patience: Option<Duration>) -> Result<Value, AskError> {
    let stream = send_request(path, request, patience).map_err(unanswered)?;
    read_answer(&stream, String::new())
}

/// Asks the server of block devices behind the socket at `path` for the locks of its images.
///
/// # Errors
///
/// As [`ask_within`].
pub fn ask_for_locks(path: &Path, patience: Duration) -> Result<Vec<OwnedFd>, AskError> {
    let stream = send_request(path, &Request::PassLocks {}, Some(patience)).map_err(unanswered)?;
    let mut locks = Vec::new();
    let mut byte = [0];
    loop {
        match stream
            .recv_with_fd(&mut byte)
            .map_err(|error| unanswered(error.into()))?
        {
            (0, _) => return Err(unanswered(io::ErrorKind::UnexpectedEof.into())),
            (_, Some(lock)) => locks.push(lock.into()),
            (_, None) => break,
        }
    }
    read_answer(&stream, String::from_utf8_lossy(&byte).into_owned())?;
    Ok(locks)
}

fn unanswered(error: io::Error) -> AskError {
    match error.kind() {
        io::ErrorKind::WouldBlock => AskError::Unanswered(io::ErrorKind::TimedOut.into()),
        _ => AskError::Unanswered(error),
    }
}

/// Sends a request.
fn send_request(path: &Path, request: &Request, patience: Option<Duration>) -> io::Result<UnixStream> {
    let stream = connect_within(path, patience.unwrap_or(CONNECT_MAX), &Cancel::never())?;
    stream.set_read_timeout(patience)?;
    stream.set_write_timeout(patience)?;
    send_line(&stream, &serde_json::to_value(request)?)?;
    Ok(stream)
}

/// Waits for the answer, of which `line` is there already.
fn read_answer(stream: &UnixStream, mut line: String) -> Result<Value, AskError> {
    BufReader::new(stream).read_line(&mut line).map_err(unanswered)?;
    let answer: Value = serde_json::from_str(&line).map_err(|error| unanswered(error.into()))?;
    if answer["ok"] == Value::Bool(true) {
        return Ok(answer);
    }
    let message = answer["error"]
        .as_str()
        .unwrap_or("it says nothing that makes sense");
    Err(AskError::Refused(message.to_owned()))
}
