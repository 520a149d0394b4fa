//! A ring's table of registered buffers: what is in it when the ring begins, and [leases](crate::door) of its places.
//!
//! A driver that is about to put other pages into a place takes a lease first, and so finds out whether the old ones are still
//! in use.

use super::Ring;
use crate::buffer::IoSlice;
use crate::door::{FixedBuffer, LeaseError};

/// What the table of a ring holds when the ring begins.
#[derive(Debug, Default)]
pub struct FixedTable {
    /// Empty where a driver of the kernel is going to put pages.
    pub(super) places: Vec<IoSlice>,
}

impl FixedTable {
    /// So many places, for a driver of the kernel to put pages into.
    #[must_use]
    pub fn sparse(places: u16) -> Self {
        Self {
            places: vec![IoSlice::new(std::ptr::null_mut(), 0); places.into()],
        }
    }

    /// One place for each of these stretches of memory, which no Rust reference covers while the ring lives.
    pub(crate) fn of_memory(places: Vec<IoSlice>) -> Self {
        Self { places }
    }

    /// How many places there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Whether there is no place.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }
}

impl Ring {
    /// Takes a place in the table, which nobody else has.
    ///
    /// # Errors
    ///
    /// [`LeaseError`] if somebody has it, or there is none.
    pub fn lease_fixed(&self, index: u16) -> Result<FixedBuffer, LeaseError> {
        self.inner.leases.take(index)
    }
}
