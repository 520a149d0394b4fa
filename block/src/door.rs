//! Registered buffers: who has which place in a ring's table, and the doors beside them.
//!
//! What must stay true: a place is leased to one buffer at a time. It is given back when the last buffer that has it is
//! gone, which is when the last op has ended that names it.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

use crate::handle::FileHandle;

/// Which places of a ring's table are leased.
#[derive(Debug)]
pub(crate) struct Leases {
    taken: RefCell<Vec<bool>>,
}

impl Leases {
    /// So many places, none of them leased.
    pub(crate) fn new(places: usize) -> Rc<Self> {
        Rc::new(Self {
            taken: RefCell::new(vec![false; places]),
        })
    }

    /// Leases a place that nobody else has.
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

/// Why a place in a ring's table cannot be had.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum LeaseError {
    /// There is no such place.
    #[error("place {index} of a table of {places} registered buffers")]
    NoPlace {
        /// The place.
        index: u16,
        /// How many there are.
        places: usize,
    },
    /// An op or a buffer still names it.
    #[error("registered buffer {index} is still in use")]
    InUse {
        /// The place.
        index: u16,
    },
}

/// A lease on a place in a ring's table, given back on drop.
pub struct FixedBuffer {
    leases: Rc<Leases>,
    index: u16,
}

impl FixedBuffer {
    /// The number of the place.
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

/// A file at which the bytes of registered buffers are read and written. Cheap to clone.
///
/// Unlike an image's file it has no end past which there are zeros: bytes that it does not have are an error.
#[derive(Clone, Debug)]
pub struct Door {
    pub(crate) file: FileHandle,
}

impl Door {
    /// The door that this file is; it is registered with the ring whose table the buffers are in.
    #[must_use]
    pub fn new(file: FileHandle) -> Self {
        Self { file }
    }
}
