//! Replacing a running vhost-user server while its guests continue: `--takeover`.
//!
//! A running server has, beside its first socket, a *takeover socket*: the same name with `.takeover`
//! appended, mode 0600, for processes of the same user only. A new server connects to it and names the sockets that it
//! wants to serve. The old server drains its clients' queues, closes its images cleanly, and hands over the image locks, its
//! listening sockets, and its clients' connections with the state of each client. Clients notice only a pause; no request is
//! lost, because none is in flight.
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
//! Invariants: the old server never serves after 'a', the new one never before. After any earlier failure the old server
//! reopens its images and continues with the same clients. An image is locked all the time, and open in at most one of the
//! two. A server of the previous version, old or new, gets no locks: then the old server releases them, and the one that
//! opens the image takes them.
//!
//! `message` is the form of messages, `offer` the new server's side, `successor` the old server's.

mod error;
mod message;
mod offer;
mod successor;
#[cfg(test)]
mod tests;

pub use error::{TakeoverError, not_adopted};
pub use message::ControlSocket;
pub use offer::{Handed, Offer, take_over};
pub use successor::{Successor, Taken, TakeoverListener, TakeoverSocket};
