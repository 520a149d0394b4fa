//! A ring's buffer table: its initial contents, and [leases](crate::door) on its slots.
//!
//! Before a driver puts other pages into a slot, it must take a lease, which fails while the old pages are in use.

#![expect(unsafe_code, reason = "registers memory by its address")]

use super::Ring;
use crate::buffer::IoSlice;
use crate::door::{FixedBuffer, LeaseError};

/// Initial contents of a ring's buffer table.
#[derive(Debug, Default)]
pub struct FixedTable {
    /// One stretch for each slot; empty if a kernel driver is going to put pages there.
    pub(super) places: Vec<IoSlice>,
}

impl FixedTable {
    /// Makes a table of `places` empty slots, for a kernel driver to put pages into.
    #[must_use]
    pub fn sparse(places: u16) -> Self {
        Self {
            places: vec![IoSlice::new(std::ptr::null_mut(), 0); places.into()],
        }
    }

    /// Makes a table with a slot for each of these stretches of memory.
    ///
    /// # Safety
    ///
    /// The stretches must be mapped, readable and writable when a ring is made with the table, which pins their pages. No
    /// Rust reference may cover them as long as that ring lives.
    #[doc(hidden)]
    #[must_use]
    pub unsafe fn of_memory(places: Vec<IoSlice>) -> Self {
        Self { places }
    }

    /// Returns the number of slots.
    #[must_use]
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Returns true if there are no slots.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }
}

impl Ring {
    /// Leases a slot of the buffer table.
    ///
    /// # Errors
    ///
    /// [`LeaseError`] if it is in use, or does not exist.
    pub fn lease_fixed(&self, index: u16) -> Result<FixedBuffer, LeaseError> {
        self.in_flight.leases.take(index)
    }
}
