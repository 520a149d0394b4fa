//! The control socket of a running machine or ublk server: one JSON object per line in, one per line out.
//!
//! `request` is the language, `server` answers it, `client` speaks it. docs/control.md is its reference.

mod client;
mod request;
mod server;
#[cfg(test)]
pub(crate) mod tests;

pub use client::{AskError, ask, ask_for_locks, ask_within};
pub use request::{DiskKeys, Request};
pub use server::{AfterAnswer, Control, Handler, Locks, Server};
