//! The guest's memory, as those want it described who run its queues elsewhere: another program, or the kernel.

use vhost::VhostUserMemoryRegionInfo;
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

/// Returns the regions of `memory`.
///
/// # Errors
///
/// The guest address of one that is not mapped from a file.
pub(super) fn regions(memory: &GuestMemoryMmap) -> Result<Vec<VhostUserMemoryRegionInfo>, u64> {
    let described = memory.iter().map(|region| {
        VhostUserMemoryRegionInfo::from_guest_region(region).map_err(|_| region.start_addr().0)
    });
    described.collect()
}
