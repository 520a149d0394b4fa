//! File handles, by which the ops of a ring name files.
//!
//! Invariant: a file stays open and registered with its ring while a handle or an op holds it.

use std::fmt;
use std::os::fd::{OwnedFd, RawFd};
use std::rc::{Rc, Weak};

use crate::changes::ChangeCounter;
use crate::error::IoError;

/// A file as a ring's driver knows it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct FileSlot {
    /// The descriptor, open as long as the slot is registered.
    pub fd: RawFd,
    /// Its index among the driver's registered files, if it has one.
    pub fixed: Option<u32>,
}

/// Operation of an op on its file.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kind {
    /// Read into the slices.
    Read,
    /// Write from the slices; `dsync` makes this write durable before it completes.
    Write {
        /// Durable before it completes.
        dsync: bool,
    },
    /// Make all completed writes of the file, and the metadata needed to read them back, durable.
    DataSync,
    /// `fallocate(2)` with these mode bits on `offset..offset + len`.
    Allocate {
        /// `FALLOC_FL_…`; 0 reserves space.
        mode: i32,
    },
    /// Set the file's length to `len` bytes.
    Truncate,
    /// Report every time the descriptor becomes readable.
    Watch,
    /// A command of the file's own driver (`IORING_OP_URING_CMD`): its code and its data.
    Command {
        /// The driver's number for it.
        code: u32,
        /// Its data.
        data: [u8; 16],
    },
}

impl Kind {
    /// Returns true if an op of this kind is cancelled when its ring drains.
    pub(crate) fn ends_when_cancelled(self) -> bool {
        !matches!(self, Self::Watch | Self::Command { .. })
    }

    /// Returns true if an op of this kind may change its file, even if it fails.
    #[inline]
    pub(crate) fn may_change_file(self) -> bool {
        matches!(self, Self::Write { .. } | Self::Allocate { .. } | Self::Truncate)
    }
}

/// Observer of the ops on a file that the host fails, whoever submitted them.
pub(crate) trait Observer {
    /// Records that an op of this kind has failed at this byte of the file.
    fn failed(&self, kind: Kind, offset: u64, error: IoError);
}

/// A ring's interface for its files.
pub(crate) trait Registry {
    /// Unregisters a file that no op uses any more.
    fn unregister(&self, slot: FileSlot);
}

struct Registered {
    observer: Option<Rc<dyn Observer>>,
    changes: Option<ChangeCounter>,
    fd: Rc<OwnedFd>,
    slot: FileSlot,
    registry: Weak<dyn Registry>,
}

impl Drop for Registered {
    fn drop(&mut self) {
        if let Some(registry) = self.registry.upgrade() {
            registry.unregister(self.slot);
        }
    }
}

/// A file that ops of one ring can use. It stays open and registered while a clone or an op holds it.
#[derive(Clone)]
pub struct FileHandle {
    registered: Rc<Registered>,
}

impl FileHandle {
    /// Makes a handle of `fd`, registered with `registry` as `slot` until the last clone is dropped. That of a `view` has
    /// its failures observed and its changes counted.
    pub(crate) fn new(
        fd: OwnedFd,
        slot: FileSlot,
        view: Option<(Rc<dyn Observer>, ChangeCounter)>,
        registry: Weak<dyn Registry>,
    ) -> Self {
        let (observer, changes) = view.unzip();
        Self {
            registered: Rc::new(Registered {
                observer,
                changes,
                fd: Rc::new(fd),
                slot,
                registry,
            }),
        }
    }

    #[inline]
    pub(crate) fn slot(&self) -> FileSlot {
        self.registered.slot
    }

    /// Counts an op that has ended and may have changed the file, before it is answered.
    #[inline]
    pub(crate) fn count_change(&self) {
        if let Some(changes) = &self.registered.changes {
            changes.add();
        }
    }

    pub(crate) fn observer(&self) -> Option<&Rc<dyn Observer>> {
        self.registered.observer.as_ref()
    }

    /// Returns the descriptor, for calls that are not ops.
    #[must_use]
    pub fn fd(&self) -> &OwnedFd {
        &self.registered.fd
    }
}

impl fmt::Debug for FileHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FileHandle({:?})", self.registered.slot)
    }
}
