//! Seats for the clients of a socket: how many are served at a time.
//!
//! Invariant: a seat is free again when its client's thread ends, however it ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A client's place among those at a time, until it is dropped.
pub(crate) struct Seat(Arc<AtomicUsize>);

impl Seat {
    /// Takes one of `most`; `None` if `clients` has as many.
    pub(crate) fn take(clients: &Arc<AtomicUsize>, most: usize) -> Option<Self> {
        let seat = Self(Arc::clone(clients));
        (clients.fetch_add(1, Ordering::SeqCst) < most).then_some(seat)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}
