//! The bytes that the table caches of several images may hold together, and those that they hold.

use std::sync::Arc;

use block::sync::atomic::{AtomicU64, Ordering};

/// A budget that table caches share. Its copies are the same budget.
///
/// Caches ask before they grow, and two of them may do so at once. So what they hold may be past the limit by a slice for each
/// cache, and by the slices that no cache can drop.
#[derive(Clone, Debug)]
pub(crate) struct TableBudget(Arc<Budget>);

#[derive(Debug)]
struct Budget {
    limit_bytes: AtomicU64,
    used_bytes: AtomicU64,
}

impl Default for TableBudget {
    /// A budget without a limit.
    fn default() -> Self {
        Self(Arc::new(Budget {
            limit_bytes: AtomicU64::new(u64::MAX),
            used_bytes: AtomicU64::new(0),
        }))
    }
}

impl TableBudget {
    pub(crate) fn set_limit_bytes(&self, bytes: u64) {
        self.0.limit_bytes.store(bytes, Ordering::Relaxed);
    }

    pub(crate) fn limit_bytes(&self) -> u64 {
        self.0.limit_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn used_bytes(&self) -> u64 {
        self.0.used_bytes.load(Ordering::Relaxed)
    }

    /// Returns true if a cache that grows must drop something first.
    pub(crate) fn is_full(&self) -> bool {
        self.used_bytes() >= self.limit_bytes()
    }

    /// Returns true if the caches hold more than they may.
    pub(crate) fn is_exceeded(&self) -> bool {
        self.used_bytes() > self.limit_bytes()
    }

    pub(super) fn take(&self, bytes: usize) {
        self.0.used_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(super) fn give_back(&self, bytes: usize) {
        self.0.used_bytes.fetch_sub(bytes as u64, Ordering::Relaxed);
    }
}
