//! The choice of a ring's driver: io_uring, plain system calls, or none.
//!
//! If io_uring is refused (seccomp, old kernels, `kernel.io_uring_disabled`), a ring falls back to plain system
//! calls, unless its owner insists.

use std::io;

use super::driver::Driver;
use super::{FixedTable, null, syscall, uring};
use crate::logged_once::LoggedOnce;

/// Driver of a ring.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum RingKind {
    /// io_uring if the kernel allows it, plain system calls otherwise.
    #[default]
    Auto,
    /// io_uring or an error.
    IoUring,
    /// io_uring that can submit driver commands too, or an error.
    IoUringCommands,
    /// Plain system calls, one op at a time.
    Syscalls,
    /// Ops that succeed at once and do nothing, for measuring.
    Null,
}

/// Error: a ring could not be made.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    /// The kernel refuses io_uring to this process.
    #[error(
        "io_uring is refused here (is kernel.io_uring_disabled set, or a seccomp filter in force?); use the \
         system-call driver"
    )]
    Refused {
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// The eventfd that wakes the worker could not be created: the process has no descriptor left.
    #[error("cannot create the eventfd that wakes a worker")]
    Wake {
        /// The reason.
        #[source]
        source: io::Error,
    },
}

impl From<RingError> for io::Error {
    fn from(error: RingError) -> Self {
        match error {
            RingError::Refused { source } | RingError::Wake { source } => source,
        }
    }
}

/// Returns the number of ops that a ring has room for, if `depth` are requested.
pub(super) fn depth_within_bounds(depth: u32) -> u32 {
    depth.clamp(16, 16384)
}

/// Makes the driver of a ring with room for `depth` ops.
///
/// # Errors
///
/// If io_uring was requested and is refused.
pub fn driver_of(kind: RingKind, depth: u32, table: &FixedTable) -> Result<Box<dyn Driver>, RingError> {
    let entries = depth_within_bounds(depth).next_power_of_two();
    Ok(match kind {
        RingKind::IoUring => {
            Box::new(uring::UringDriver::new(entries, table).map_err(|source| RingError::Refused { source })?)
        }
        RingKind::IoUringCommands => {
            let driver = uring::UringDriver::with_commands(entries, table);
            Box::new(driver.map_err(|source| RingError::Refused { source })?)
        }
        RingKind::Auto => match uring::UringDriver::new(entries, table) {
            Ok(driver) => Box::new(driver),
            Err(error) => {
                // Every worker finds this out again; log it once.
                static REFUSED: LoggedOnce = LoggedOnce::new();
                if REFUSED.admit() {
                    tracing::warn!(%error, "io_uring is refused here; using plain system calls");
                }
                Box::new(syscall::SyscallDriver::default())
            }
        },
        RingKind::Syscalls => Box::new(syscall::SyscallDriver::default()),
        RingKind::Null => Box::new(null::NullDriver::default()),
    })
}
