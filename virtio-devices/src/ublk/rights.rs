//! The capability `CAP_SYS_ADMIN`, which decides what kind of device the driver makes, and whether it scans for partitions.
//!
//! Invariant: a capability is dropped for the calling thread only, and never taken.

use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

/// Drops `CAP_SYS_ADMIN` of the calling thread. A driver without a flag against partition scans does not scan if the
/// serving threads lack this capability.
pub(super) fn give_up_admin() {
    let given_up = capabilities(None).and_then(|mut sets| {
        sets.effective.remove(CapabilitySet::SYS_ADMIN);
        set_capabilities(None, sets)
    });
    if let Err(error) = given_up {
        tracing::warn!(%error, "cannot drop CAP_SYS_ADMIN: the host may scan this disk for partitions");
    }
}

/// Returns true if the calling thread may create privileged devices.
#[must_use]
pub fn may_administer() -> bool {
    capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN))
}
