//! The control socket of a server: one JSON object per line in, one per line out.
//!
//! `request` is the language, `server` answers it, `gate` and `clients` let clients in, `watch` tells them what happens, `client` speaks
//! it, `table` and `stats` show answers to people.
//! docs/control.md is its reference.

mod client;
mod clients;
mod gate;
mod request;
mod server;
mod stats;
mod table;
#[cfg(test)]
pub(crate) mod tests;
mod watch;

pub use client::{AskError, HandedOver, answer_with, ask, ask_for_disks, ask_within, follow};
pub use request::{DiskKeys, HAND_OVER, LogLevel, Request};
pub use server::{AfterAnswer, Control, HandOver, Handler, Server};
pub use stats::{DiskStatistics, Statistics};
pub use table::{line, table};
pub(crate) use watch::WatchLayer;
