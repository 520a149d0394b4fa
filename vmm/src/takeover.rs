//! Replacing a running vhost-user server while its guests continue: `--takeover`.
//!
//! A running server has, beside its first socket, a *takeover socket*: the same name with `.takeover`
//! appended, mode 0600, for processes of the same user only. A new server connects to it and names the sockets that it
//! wants to serve. The disks move one at a time: the old server drains a client's queues, closes the image cleanly, and hands over its
//! locks and the client's connection with the client's state; the new one serves it at once. Clients notice only a pause, each for
//! as long as its own disk takes; no request is lost, because none is in flight.
//!
//! ```text
//! new ── greeting, paths ──▶ old
//! new ◀── 'o', the takeover socket, the control socket if there is one; the socket of each disk ── old
//! new ── 'r': it is ready ──▶ old
//! new ◀── disks, one at a time (`moves`) ── old
//! new ── 'c', or 'k' with the control socket: it has all ──▶ old: exits
//! ```
//!
//! If a disk cannot move, those that have moved are given back, and the old server continues. If the new server dies, the
//! old one serves the sockets again of what has moved; if the old one dies, the new one serves the rest, as after a restart.
//!
//! **With a server of the version before**, old or new, all disks are handed over at once:
//!
//! ```text
//! new ── greeting, paths ──▶ old: drains, flushes, closes
//! new ◀── 'o', the takeover socket, the token, the control socket if there is one; the locks; ── old
//!         for each disk its socket, its client and the client's state
//! new: takes the token, opens the images under their locks, adopts the clients
//! new ── 'c', or 'k' with the control socket: nothing can fail any more ──▶ old
//! new ◀── 'a' ── old: exits
//! new: serves
//! ```
//!
//! The locks are open file descriptions that both servers hold until one of them exits. They keep other programs out all the
//! time, but not one of the two servers. The *token* does that: an eventfd whose 1 only one of them can read. The new server
//! reads it before it opens an image. To get its images back, the old server reads it, or else waits for the end of
//! the connection, which the new one closes after its images.
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

pub use error::{TakeoverError, not_adopted};
pub use message::ControlSocket;
pub use moves::{Given, Moves, MovingDisk, Next};
pub use offer::{Handed, Offer, take_over};
pub use successor::{Successor, Taken, TakeoverListener, TakeoverSocket};
