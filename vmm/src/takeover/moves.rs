//! Disks that move from one server to another, one at a time on each lane: a socket pair of the two.
//!
//! ```text
//! giver ── 'd', its place in the request; its locks; its client ──▶ taker: opens the image, adopts the client
//! giver ◀── 'y': it is served there, for good; or 'n' and why not: it is not open there ── taker
//! giver ── 'e': there is nothing more ──▶ taker; or 'x' and why: it goes no further
//! ```
//!
//! Disks are given back the same way, in the other direction, on the connection of the takeover.
//!
//! Invariants: the image of a disk is open with the taker only after 'd', and with the giver again only after 'n' or the end of
//! the connection; its lock has an owner all the time.

use std::io;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use virtio_devices::vhost_user::ClientState;

use super::message::{SEND_MAX, receive, receive_client, receive_locks, send, send_client, send_locks};

/// The longest wait for an answer: an image may need repair, or the host may be slow.
const ANSWER_MAX: Duration = Duration::from_secs(20);
/// The longest wait for the next disk, whose requests in flight may take their time.
const NEXT_MAX: Duration = Duration::from_secs(60);

const DISK: u8 = b'd';
const TAKEN: u8 = b'y';
const NOT_TAKEN: u8 = b'n';
const END: u8 = b'e';
const NO_FURTHER: u8 = b'x';

/// A connection of two servers between which disks move.
#[derive(Debug)]
pub struct Moves(UnixStream);

/// A disk on its way, whose image is closed.
#[derive(Debug)]
pub struct MovingDisk {
    /// Its place in the request.
    pub place: usize,
    /// The locks of its image.
    pub locks: Vec<OwnedFd>,
    /// The client that is connected, if one is.
    pub client: Option<ClientState>,
}

/// The next message of a giver.
#[derive(Debug)]
pub enum Next {
    /// A disk, which waits for an answer.
    Disk(MovingDisk),
    /// All have come.
    End,
    /// The others stay, for this reason, and those which have come are wanted back.
    NoFurther(String),
}

/// The fate of a disk that was given.
#[derive(Debug)]
pub enum Given {
    /// The taker serves it, for good.
    Taken,
    /// The taker has not, for this reason, and its image is closed there.
    Refused(String),
    /// The connection has ended before an answer: the taker has not served it, and never will.
    Lost,
}

impl Moves {
    pub(super) fn new(connection: UnixStream) -> Self {
        Self(connection)
    }

    /// Returns a lane, and its other end.
    ///
    /// # Errors
    ///
    /// If the process has no descriptor left.
    pub fn lane() -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_write_timeout(Some(SEND_MAX))?;
        Ok((Self(ours), theirs.into()))
    }

    /// Returns the other end of a lane.
    pub(super) fn other_end(lane: OwnedFd) -> io::Result<Self> {
        let lane = UnixStream::from(lane);
        lane.set_write_timeout(Some(SEND_MAX))?;
        Ok(Self(lane))
    }

    /// Gives a disk, and waits for what becomes of it.
    ///
    /// # Errors
    ///
    /// Nobody knows: the taker does not answer, and does not end. The image is not to be opened.
    pub fn give(&self, disk: MovingDisk) -> io::Result<Given> {
        let place = u32::try_from(disk.place).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut message = vec![DISK];
        message.extend(place.to_ne_bytes());
        let sent = send(&self.0, &message, &[])
            .and_then(|()| send_locks(&self.0, &disk.locks))
            .and_then(|()| send_client(&self.0, disk.client.as_ref()));
        // What it has of them ends with this process's.
        drop(disk);
        match sent.and_then(|()| self.answer(ANSWER_MAX)) {
            Ok((TAKEN, _)) => Ok(Given::Taken),
            Ok((NOT_TAKEN, reason)) => Ok(Given::Refused(reason)),
            Ok(_) => Err(io::ErrorKind::InvalidData.into()),
            Err(error) if has_ended(&error) => Ok(Given::Lost),
            Err(error) => self.wait_for_end(error),
        }
    }

    /// Waits for the end of the connection, after an error of it.
    fn wait_for_end(&self, error: io::Error) -> io::Result<Given> {
        // It waits for this one, perhaps, and is to open nothing.
        self.0.shutdown(Shutdown::Write).unwrap_or_default();
        match self.answer(ANSWER_MAX) {
            // It came after all.
            Ok((TAKEN, _)) => Ok(Given::Taken),
            Err(ended) if has_ended(&ended) => Ok(Given::Lost),
            _ => Err(error),
        }
    }

    /// Receives what comes next.
    ///
    /// # Errors
    ///
    /// The connection has ended, or nothing has come for long.
    pub fn next(&self) -> io::Result<Next> {
        self.0.set_read_timeout(Some(NEXT_MAX))?;
        let (message, _) = receive(&self.0)?;
        match message.split_first() {
            Some((&DISK, place)) => {
                let place = place.try_into().map_err(|_| io::ErrorKind::InvalidData)?;
                Ok(Next::Disk(MovingDisk {
                    place: u32::from_ne_bytes(place) as usize,
                    locks: receive_locks(&self.0)?,
                    client: receive_client(&self.0)?,
                }))
            }
            Some((&END, _)) => Ok(Next::End),
            Some((&NO_FURTHER, reason)) => Ok(Next::NoFurther(String::from_utf8_lossy(reason).into_owned())),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Says that a disk is served here from now on.
    ///
    /// # Errors
    ///
    /// The connection has ended.
    pub fn take(&self) -> io::Result<()> {
        send(&self.0, &[TAKEN], &[])
    }

    /// Says that a disk is not taken, whose image is closed here.
    ///
    /// # Errors
    ///
    /// The connection has ended.
    pub fn refuse(&self, reason: &str) -> io::Result<()> {
        self.say(NOT_TAKEN, reason)
    }

    /// Says that no more disks come.
    ///
    /// # Errors
    ///
    /// The connection has ended.
    pub fn end(&self) -> io::Result<()> {
        self.say(END, "")
    }

    /// Says that no more disks come, and that those which have come are wanted back.
    ///
    /// # Errors
    ///
    /// The connection has ended.
    pub fn go_no_further(&self, reason: &str) -> io::Result<()> {
        self.say(NO_FURTHER, reason)
    }

    fn say(&self, what: u8, reason: &str) -> io::Result<()> {
        let mut message = vec![what];
        message.extend(reason.bytes().take(1000));
        send(&self.0, &message, &[])
    }

    /// Sends one byte that the two have agreed upon.
    pub(super) fn say_byte(&self, byte: u8) -> io::Result<()> {
        send(&self.0, &[byte], &[])
    }

    /// Receives an answer of one byte, and the text behind it.
    pub(super) fn answer(&self, patience: Duration) -> io::Result<(u8, String)> {
        self.0.set_read_timeout(Some(patience))?;
        let (message, _) = receive(&self.0)?;
        let (what, text) = message.split_first().ok_or(io::ErrorKind::InvalidData)?;
        Ok((*what, String::from_utf8_lossy(text).into_owned()))
    }

    pub(super) fn connection(&self) -> &UnixStream {
        &self.0
    }
}

/// Returns true if an error of a connection is its end.
fn has_ended(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), UnexpectedEof | BrokenPipe | ConnectionReset)
}
