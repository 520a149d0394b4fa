//! The client of a control socket.
//!
//! Invariant: with a time limit, the whole exchange ends within it for each read and write, whatever the other side does.

use std::io::{self, BufRead, BufReader};
use std::os::fd::{AsRawFd, OwnedFd};
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

/// The longest answer to a request for disks, in bytes.
const ANSWER_MAX: usize = 1 << 20;

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
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line).map_err(unanswered)?;
    understood(&line)
}

/// The answer of a server that hands disks over.
#[derive(Debug)]
pub struct HandedOver {
    /// The fields of the answer.
    pub answer: Value,
    /// The descriptors that came with it.
    pub locks: Vec<OwnedFd>,
}

/// Asks the server at the other end of `connection` for disks, by a [`Request::HandOver`]. It may say more on the connection, of which
/// nothing is read.
///
/// # Errors
///
/// As [`ask_within`].
pub fn ask_for_disks(
    connection: &UnixStream,
    request: &Request,
    patience: Duration,
) -> Result<HandedOver, AskError> {
    say(connection, request, Some(patience)).map_err(unanswered)?;
    let (mut line, mut locks) = (Vec::new(), Vec::new());
    while line.last() != Some(&b'\n') {
        let mut byte = [0];
        let received = connection.recv_with_fd(&mut byte);
        let (count, descriptor) = received.map_err(|error| unanswered(error.into()))?;
        if count == 0 || line.len() > ANSWER_MAX {
            return Err(unanswered(io::ErrorKind::UnexpectedEof.into()));
        }
        line.extend(byte);
        locks.extend(descriptor.map(OwnedFd::from));
    }
    let answer = understood(&String::from_utf8_lossy(&line))?;
    Ok(HandedOver { answer, locks })
}

/// Answers a [`Request::HandOver`], with descriptors: each comes with a space before the line.
///
/// # Errors
///
/// If whoever asked has gone, or does not read.
pub fn answer_with(connection: &UnixStream, answer: &Value, descriptors: &[OwnedFd]) -> io::Result<()> {
    for descriptor in descriptors {
        connection.send_with_fd(&b" "[..], descriptor.as_raw_fd())?;
    }
    send_line(connection, answer)
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
    say(&stream, request, patience)?;
    Ok(stream)
}

/// Sends a request on a connection, of which each read and write has this limit from then on.
fn say(stream: &UnixStream, request: &Request, patience: Option<Duration>) -> io::Result<()> {
    stream.set_read_timeout(patience)?;
    stream.set_write_timeout(patience)?;
    send_line(stream, &serde_json::to_value(request)?)
}

/// Returns what a line answers.
fn understood(line: &str) -> Result<Value, AskError> {
    let answer: Value = serde_json::from_str(line).map_err(|error| unanswered(error.into()))?;
    if answer["ok"] == Value::Bool(true) {
        return Ok(answer);
    }
    let message = answer["error"]
        .as_str()
        .unwrap_or("it says nothing that makes sense");
    Err(AskError::Refused(message.to_owned()))
}
