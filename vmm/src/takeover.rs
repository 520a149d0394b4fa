//! Replacing a running vhost-user server, or taking some of its disks, while its guests continue: `--takeover`.
//!
//! A running server has, beside its first socket, a control socket of its own, the *takeover socket*: the same name with `.takeover`
//! appended. A new server of the same user connects to it and sends [`HandOver`](crate::control::Request::HandOver) with the
//! sockets that it wants to serve. Then the disks move, a few at the same time: the old server drains a client's queues, closes
//! the image cleanly, and hands over its locks and the client's connection with the client's state; the new one serves it at once.
//! Clients notice only a pause, each for as long as its own disk takes; no request is lost, because none is in flight.
//!
//! ```text
//! new ── hand-over, a line: the sockets, the time ──▶ old
//! new ◀── ok, a line; the takeover socket and the control socket, if they go with the disks; the socket of each disk ── old
//! new ── 'r', with lanes: it is ready ──▶ old
//! new ◀── disks, one after the other on each lane (`moves`) ── old
//! new ── 'c', or 'k' with the control socket: it has all ──▶ old: exits, or goes on with the others
//! ```
//!
//! If a disk cannot move, or the time is over, those that have moved are given back, and the old server continues. If the new server
//! dies, the old one serves the sockets again of what has moved; if the old one dies, the new one serves the rest, as after a restart.
//!
//! The locks are open file descriptions that both servers hold until one of them exits. They keep other programs out all the
//! time, but not one of the two servers: that is done by the order of messages.
//!
//! Invariants: a disk is served by at most one of the two; an image is locked all the time, and open in at most one of them.
//!
//! `message` is the form of messages, `moves` how one disk moves, `offer` the new server's side, `successor` the old server's.

mod error;
mod message;
mod moves;
mod offer;
mod successor;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::time::Duration;

pub use error::{TakeoverError, not_adopted};
pub use message::ControlSocket;
pub use moves::{Given, Moves, MovingDisk, Next};
pub use offer::{Handed, Offer, Wish};
pub use successor::{Asked, Successor, Taken, takeover_path};

/// The time that a takeover may take, unless it is told another one.
pub const WITHIN: Duration = Duration::from_secs(60);
/// The longest time that one may be given.
pub const WITHIN_MAX: Duration = Duration::from_secs(3600);

/// The options of a takeover on a command line.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct TakeoverArguments {
    /// Take over from the server that serves these disks now, whose users do not notice
    ///
    /// With SOCKET, a control socket of that server, it may have other disks, too, which it goes on with (vhost-user only). If the new
    /// server cannot take over, the old one continues.
    #[arg(long, value_name = "SOCKET", num_args = 0..=1, require_equals = true)]
    takeover: Option<Option<PathBuf>>,
    /// Longest time in seconds in which the disks may move; otherwise the old server continues with all [default: 60]
    #[arg(long, value_name = "SECONDS", requires = "takeover", value_parser = clap::value_parser!(u64).range(1..=WITHIN_MAX.as_secs()))]
    within: Option<u64>,
}

impl TakeoverArguments {
    /// Returns true if there is to be one.
    pub(crate) fn is_wanted(&self) -> bool {
        self.takeover.is_some()
    }

    /// Returns the control socket of the server to take over from, if it was given.
    pub(crate) fn from(&self) -> Option<&Path> {
        self.takeover.as_ref()?.as_deref()
    }

    /// Returns the time that it may take.
    pub(crate) fn within(&self) -> Duration {
        self.within.map_or(WITHIN, Duration::from_secs)
    }
}
