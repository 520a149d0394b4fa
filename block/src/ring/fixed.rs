//! A ring's table of registered buffers: what is in it when the ring begins, and who has which place.
//!
//! A place is taken with [`Ring::lease_fixed`] and given back when the last buffer that has it is gone, which is
//! when the last op has ended that names it. So a driver that is about to put other pages into a place finds out
//! first whether the old ones are still in use.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

use super::{FileHandle, Ring};
use crate::buffer::IoSlice;

/// What the table of a ring holds when the ring begins.
#[derive(Debug, Default)]
pub struct FixedTable {
    /// Empty where a driver of the kernel is going to put pages.
    pub(super) places: Vec<IoSlice>,
    /// How many places there are behind these that the kernel knows nothing of.
    doors: u16,
}

impl FixedTable {
    /// So many places, for a driver of the kernel to put pages into.
    #[must_use]
    pub fn sparse(places: u16) -> Self {
        Self {
            places: vec![IoSlice::new(std::ptr::null_mut(), 0); places.into()],
            doors: 0,
        }
    }

    /// The same, and so many places behind them for which no buffer is ever registered: their bytes are reached through
    /// their doors alone, by calls that the worker makes itself. That is for disks that are in memory.
    #[must_use]
    pub fn with_doors(self, doors: u16) -> Self {
        Self { doors, ..self }
    }

    /// One place for each of these stretches of memory, which no Rust reference covers while the ring lives.
    pub(crate) fn of_memory(places: Vec<IoSlice>) -> Self {
        Self { places, doors: 0 }
    }

    /// How many places there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.places.len() + usize::from(self.doors)
    }

    /// Whether there is no place.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Which places are leased.
#[derive(Debug)]
pub(super) struct Leases {
    taken: RefCell<Vec<bool>>,
}

impl Leases {
    pub(super) fn new(places: usize) -> Rc<Self> {
        Rc::new(Self {
            taken: RefCell::new(vec![false; places]),
        })
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

/// A place in a ring's table, and the right to what is there. Dropped, others may have it.
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

    pub(super) fn is_of(&self, leases: &Rc<Leases>) -> bool {
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
    pub(super) file: FileHandle,
}

impl Door {
    /// The door that this file is; it is registered with the ring whose table the buffers are in.
    #[must_use]
    pub fn new(file: FileHandle) -> Self {
        Self { file }
    }
}

impl Ring {
    /// Takes a place in the table, which nobody else has.
    ///
    /// # Errors
    ///
    /// [`LeaseError`] if somebody has it, or there is none.
    pub fn lease_fixed(&self, index: u16) -> Result<FixedBuffer, LeaseError> {
        let leases = &self.inner.leases;
        let mut taken = leases.taken.borrow_mut();
        let places = taken.len();
        match taken.get_mut(usize::from(index)) {
            None => Err(LeaseError::NoPlace { index, places }),
            Some(true) => Err(LeaseError::InUse { index }),
            Some(place) => {
                *place = true;
                Ok(FixedBuffer {
                    leases: Rc::clone(leases),
                    index,
                })
            }
        }
    }
}
