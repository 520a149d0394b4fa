//! Leases on the slots of a ring's buffer table, and the doors beside registered buffers.
//!
//! Invariant: a slot is leased to one buffer at a time. It is released when the last buffer that holds the lease is
//! gone, which is when the last op that names it has ended.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

use crate::handle::FileHandle;

/// Lease states of the slots of a ring's buffer table.
#[derive(Debug)]
pub(crate) struct Leases {
    taken: RefCell<Vec<bool>>,
}

impl Leases {
    /// Makes a table of `places` slots, none of them leased.
    pub(crate) fn new(places: usize) -> Rc<Self> {
        Rc::new(Self {
            taken: RefCell::new(vec![false; places]),
        })
    }

    /// Leases a slot, unless it is leased already.
    pub(crate) fn take(self: &Rc<Self>, index: u16) -> Result<FixedBuffer, LeaseError> {
        let mut taken = self.taken.borrow_mut();
        let places = taken.len();
        match taken.get_mut(usize::from(index)) {
            None => Err(LeaseError::NoPlace { index, places }),
            Some(true) => Err(LeaseError::InUse { index }),
            Some(place) => {
                *place = true;
                Ok(FixedBuffer {
                    leases: Rc::clone(self),
                    index,
                })
            }
        }
    }
}

/// Error: a slot of a ring's buffer table cannot be leased.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum LeaseError {
    /// The table has no such slot.
    #[error("the ring has no registered buffer {index}: its table has {places}")]
    NoPlace {
        /// The slot.
        index: u16,
        /// The number of slots.
        places: usize,
    },
    /// An op or a buffer still names it.
    #[error("registered buffer {index} is still in use")]
    InUse {
        /// The slot.
        index: u16,
    },
}

/// A lease on a slot of a ring's buffer table, released on drop.
pub struct FixedBuffer {
    leases: Rc<Leases>,
    index: u16,
}

impl FixedBuffer {
    /// Returns the index of the slot.
    #[must_use]
    pub fn index(&self) -> u16 {
        self.index
    }

    pub(crate) fn is_of(&self, leases: &Rc<Leases>) -> bool {
        Rc::ptr_eq(&self.leases, leases)
    }
}

impl fmt::Debug for FixedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FixedBuffer({})", self.index)
    }
}

impl Drop for FixedBuffer {
    fn drop(&mut self) {
        if let Some(taken) = self.leases.taken.borrow_mut().get_mut(usize::from(self.index)) {
            *taken = false;
        }
    }
}

/// A file through which the bytes of registered buffers are read and written. Cheap to clone.
///
/// Unlike an image's file it does not read as zeros past its end: missing bytes are an error.
#[derive(Clone, Debug)]
pub struct Door {
    pub(crate) file: FileHandle,
}

impl Door {
    /// Makes a door of `file`, which must be registered with the ring whose table holds the buffers.
    #[must_use]
    pub fn new(file: FileHandle) -> Self {
        Self { file }
    }
}
