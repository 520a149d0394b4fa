//! Asynchronous block I/O for virtual disks: the foundation of formats and frontends, which knows neither.
//!
//! ```text
//!  frontend ──Request──▶ DiskQueue ──pieces──▶ FileView ──ops──▶ Ring ──▶ io_uring, system calls
//!  (guest, host)         (raw, qcow2)          alignment         slots    or the simulated world
//!           ◀───Done──── completion sink ◀─────────────── CQE ───┘
//!  └────────────── one Worker: a thread, its ring, its tasks and its frontends ──────────────┘
//! ```
//!
//! Memory of an I/O is in [`buffer`], a request in [`request`], the traits of a disk in [`disk`], the only code that asks
//! the kernel for I/O in [`ring`]. A worker is made of [`task`] (executor) and [`worker`] (thread). [`mod@file`] owns an
//! image file and its alignment rules, [`raw`] is the raw format, [`chain`] the index of long chains, [`lock`] the image locks,
//! [`epoch`] grace periods,
//! [`throttle`] rate limits, [`delay`] waits that a drain ends, [`rounds`] work that callers share, [`report`] log limits,
//! [`timer`] time, [`event`] what wakes a thread. [`sync`] names locks, atomics and lists of waiting tasks that a model checker
//! replaces. The simulated world
//! is a crate of its own, `ringdisk-simulator`.
//!
//! A sector is written durably to a raw disk and read back, on plain system calls:
//!
//! ```
//! use block::file::{FileOptions, ImageFile};
//! use block::raw::RawDisk;
//! use block::{AlignedBuf, Context, Disk, Op, ask};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let file = tempfile::NamedTempFile::new()?;
//! file.as_file().set_len(1 << 20)?;
//!
//! let cx = Context::syscalls();
//! let options = FileOptions { write: true, direct: false };
//! let disk = RawDisk::open(ImageFile::open(file.path(), options)?, true, &cx)?;
//! let queue = disk.open_queue(&cx)?;
//!
//! let data = AlignedBuf::from_slice(&[0xaa; 512]);
//! cx.block_on(ask(&*queue, Op::Write { fua: true }, 4096, 512, data.into()))??;
//!
//! let room = AlignedBuf::zeroed(512).into();
//! let read = cx.block_on(ask(&*queue, Op::Read, 4096, 512, room))??;
//! assert_eq!(read.into_owned().expect("our buffer")[..], [0xaa; 512]);
//! # Ok(())
//! # }
//! ```
//!
//! Invariants: an op owns its buffers until its completion is reaped; every request is answered exactly once; a short
//! result is never success.

pub mod buffer;
#[doc(hidden)]
pub mod canary;
pub mod chain;
mod changes;
pub mod delay;
pub mod disk;
mod door;
pub mod epoch;
pub mod error;
pub mod event;
pub mod file;
mod handle;
mod join;
pub mod lock;
mod logged_once;
pub mod open;
pub mod pool;
pub mod raw;
pub mod report;
pub mod request;
pub mod ring;
pub mod rounds;
mod sleeper;
pub mod status;
pub mod sync;
mod sync_history;
mod sync_rounds;
pub mod task;
pub mod throttle;
pub mod timer;
pub mod worker;

pub use buffer::{AlignedBuf, Buffer, RegisteredSlot, Registration, RegistrationError};
pub use disk::{Disk, DiskInfo, DiskQueue, OpenQueueError, ask};
pub use error::IoError;
pub use join::join_all;
pub use request::{CompletionSink, Done, Op, Request};
pub use task::{Context, LocalBoxFuture};
