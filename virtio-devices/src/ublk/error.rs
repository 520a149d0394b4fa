//! Errors of a device's life: of adding or recovering it, of resizing it and of closing it.
//!
//! Invariant: each says what state the device is left in, because a device outlives the call, and may outlive the process.

use std::io;
use std::time::Duration;

use block::worker::{StartWorkerError, WorkerGone};
use block::{IoError, OpenQueueError};

use super::abi::{DeviceState, Flags};
use super::channel::Transport;
use super::control::CommandError;
use super::params::ParamsError;

/// The longest time that queues may take to drain when their device was stopped.
pub(super) const DRAIN: Duration = Duration::from_secs(30);

/// An error of creating or recovering a device. No new device is left behind, except with [`AddError::CleanUp`].
#[derive(Debug, thiserror::Error)]
pub enum AddError {
    /// A number is out of range.
    #[error("{what} is {found}; expected {expected}")]
    Range {
        /// The name of the value.
        what: &'static str,
        /// The value.
        found: u64,
        /// The permitted range.
        expected: &'static str,
    },
    /// The kernel has not what was asked for by name.
    #[error("this kernel's ublk driver has no {what} ({since}); see `ringdisk ublk features`")]
    Unsupported {
        /// The feature.
        what: &'static str,
        /// The kernel version that introduced it.
        since: &'static str,
    },
    /// This takes rights that the process has not.
    #[error(
        "an unprivileged user's device supports --transport copy only, not {0}; leave --transport out, or run as root"
    )]
    Rights(Transport),
    /// The driver refused a command.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// The driver dropped a flag.
    #[error("the driver ignored the requested flags {0:?}")]
    Flags(Flags),
    /// The driver dropped a parameter.
    #[error(transparent)]
    Params(#[from] ParamsError),
    /// The character device cannot be used.
    #[error("cannot open {path}{}", owner(source))]
    CharDevice {
        /// Its path.
        path: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A worker could not be started.
    #[error("cannot start the worker of queue {queue}")]
    Worker {
        /// The queue.
        queue: u16,
        /// The cause.
        #[source]
        source: StartWorkerError,
    },
    /// A queue could not be started.
    #[error("cannot start queue {queue}")]
    Queue {
        /// The queue.
        queue: u16,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The disk cannot be used on a worker.
    #[error(transparent)]
    Disk(#[from] OpenQueueError),
    /// A worker ended.
    #[error(transparent)]
    Gone(#[from] WorkerGone),
    /// The device to recover is not in need of it.
    #[error("/dev/ublkb{device} is {state}; only a device whose server is gone can be recovered")]
    NotRecoverable {
        /// The device.
        device: u32,
        /// Its state.
        state: DeviceState,
    },
    /// A recovery of the device has stopped half way, and cannot be brought to where another one may begin.
    #[error("cannot clean up an interrupted recovery of /dev/ublkb{device}")]
    HalfRecovered {
        /// The device.
        device: u32,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The device has another size than the disk.
    #[error("/dev/ublkb{device} has {device_bytes} bytes, and the disk {disk_bytes}: is it the right image?")]
    Size {
        /// The device.
        device: u32,
        /// Its size.
        device_bytes: u64,
        /// The disk's.
        disk_bytes: u64,
    },
    /// It failed, and then so did taking it down.
    #[error("{failure}; and /dev/ublkb{device} cannot be removed: {clean_up}")]
    CleanUp {
        /// The device.
        device: u32,
        /// The first failure.
        failure: Box<AddError>,
        /// And then.
        clean_up: CommandError,
    },
}

/// An error of closing a device.
#[derive(Debug, thiserror::Error)]
pub enum CloseError {
    /// A queue holds requests that do not end.
    #[error("the queues of /dev/ublkb{device} have not drained in {} s", DRAIN.as_secs())]
    Undrained {
        /// The device.
        device: u32,
    },
    /// The driver refused a command.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// A worker has ended.
    #[error(transparent)]
    Worker(#[from] WorkerGone),
    /// The disk says so.
    #[error("cannot close the disk cleanly")]
    Disk(#[from] IoError),
}

/// An error of a resize; the device keeps its size.
#[derive(Debug, thiserror::Error)]
pub enum ResizeError {
    /// The driver cannot change sizes.
    #[error("this kernel's ublk driver cannot resize a device that is served; it needs Linux 6.16")]
    Unsupported,
    /// The disk does not grow so.
    #[error("cannot resize the disk to {size_bytes} bytes")]
    Disk {
        /// The size asked for.
        size_bytes: u64,
        /// The cause.
        #[source]
        source: IoError,
    },
    /// The disk has grown, and the driver refused.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// A worker has ended.
    #[error(transparent)]
    Worker(#[from] WorkerGone),
}

/// Returns advice about a device of another user, in brackets.
fn owner(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EACCES) => " (run as root, or install the udev rules for users: docs/howto-ublk.md)",
        _ => "",
    }
}
