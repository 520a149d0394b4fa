//! Asynchronous block I/O for virtual disks.
//!
//! This crate knows no image format and no guest. It owns what both lean on: memory that an I/O may
//! touch ([`buffer`]), one request and its must-complete token ([`request`]), the disk traits
//! ([`disk`]), the only code that talks to the kernel about I/O ([`ring`]), the per-worker executor
//! ([`task`]), the worker thread ([`worker`]), files with their alignment rules ([`mod@file`]), the raw
//! format ([`raw`]), grace periods ([`epoch`]), image locks ([`lock`]), time ([`timer`]), what is told of an
//! image's troubles ([`report`]), rate limits ([`throttle`]), waits that end when a disk is to drain ([`hold`]), work
//! that callers share ([`rounds`]), what threads share by names that a model checker can replace ([`sync`]), and a
//! simulated world to try all of it in ([`sim`]).
//!
//! What must stay true: an op owns its buffers until its completion is reaped, every request is
//! answered exactly once, and a short result is never success.

pub mod buffer;
#[doc(hidden)]
pub mod canary;
pub mod disk;
mod door;
mod durable;
pub mod epoch;
pub mod error;
pub mod file;
mod handle;
pub mod hold;
mod join;
pub mod lock;
pub mod raw;
pub mod report;
pub mod request;
pub mod ring;
pub mod rounds;
pub mod sim;
pub mod sync;
pub mod task;
pub mod throttle;
pub mod timer;
pub mod worker;

pub use buffer::{AlignedBuf, Buffer, Registration, RegistrationError};
pub use disk::{Disk, DiskInfo, DiskQueue, LocalBoxFuture, OpenQueueError};
pub use error::IoError;
pub use join::join_all;
pub use request::{CompletionSink, Done, Op, Request};
pub use task::Context;
