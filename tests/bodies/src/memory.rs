//! A guest's memory between pages that nobody may touch: a step outside ends the process.

#![expect(unsafe_code, reason = "maps memory with guards around it")]

use std::ptr::NonNull;

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect};
use vm_memory::{GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

/// The first address of guest memory. There are two regions, the second right behind the first for the guest, and with
/// a guard between them for us.
pub const BASE: u64 = 0x1_0000;
/// The length of each region and of each guard, in bytes.
pub const REGION_BYTES: u64 = 1 << 16;
/// The first address of the second region.
pub const EDGE: u64 = BASE + REGION_BYTES;
/// The first guest address that is not memory.
pub const END: u64 = BASE + 2 * REGION_BYTES;

/// A mapping for the whole life of the process: guard, region, guard, region, guard.
#[derive(Clone, Copy, Debug)]
pub struct GuardedMemory {
    start: NonNull<u8>,
}

impl GuardedMemory {
    /// Maps it.
    ///
    /// # Panics
    ///
    /// If the kernel refuses.
    #[must_use]
    pub fn new() -> Self {
        let region = REGION_BYTES as usize;
        let (protection, flags) = (ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a new mapping wherever there is room; nobody else knows of it, and it is never unmapped.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), 5 * region, protection, flags) };
        let start = NonNull::new(start.expect("address space").cast()).expect("an address");
        let memory = Self { start };
        for index in 0..2 {
            let access = MprotectFlags::READ | MprotectFlags::WRITE;
            // SAFETY: whole pages inside the mapping made above.
            unsafe { mprotect(memory.region(index).as_ptr().cast(), region, access) }.expect("memory");
        }
        memory
    }

    fn region(self, index: usize) -> NonNull<u8> {
        // SAFETY: regions are the second and the fourth of the five parts of the mapping.
        unsafe { self.start.add((2 * index + 1) * REGION_BYTES as usize) }
    }

    /// The guest's memory, all zeros. What was made before of the same mapping must be gone.
    ///
    /// # Panics
    ///
    /// If the regions are not accepted.
    #[must_use]
    pub fn zeroed(self) -> GuestMemoryMmap {
        let region = |index: usize| {
            let (start, len) = (self.region(index), REGION_BYTES as usize);
            let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
            // SAFETY: the region is mapped for reading and writing and stays so; no reference to it exists.
            let mapped = unsafe {
                start.write_bytes(0, len);
                MmapRegion::build_raw(start.as_ptr(), len, protection.bits() as i32, flags.bits() as i32)
            };
            let base = GuestAddress(BASE + index as u64 * REGION_BYTES);
            GuestRegionMmap::new(mapped.expect("a region"), base).expect("a guest address")
        };
        GuestMemoryMmap::from_regions(vec![region(0), region(1)]).expect("two regions")
    }
}

impl Default for GuardedMemory {
    fn default() -> Self {
        Self::new()
    }
}
