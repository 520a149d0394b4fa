//! Guest memory as one queue sees it: checked handles instead of pointers.
//!
//! A [`Slice`] names bytes of one region by region number, offset and length. Every access goes through
//! [`QueueMemory`], which checks the handle against its own table again, so a wrong handle is a panic in
//! this process and never an access outside the map. The table remembers the two regions it found last:
//! a guest's headers often lie in one and its data in another.
//!
//! While the guest migrates, a [log](super::DirtyLog) is told of every page that was written: of what is written here, here; of what the
//! kernel wrote for a request, by [`QueueMemory::written`] when the request has ended.
//!
//! Invariants: the mapping lives at least as long as this table and every buffer made from it; both hold it. No
//! reference to guest memory is ever made.

#![expect(unsafe_code, reason = "guest memory is reached through raw pointers")]

use std::cell::Cell;
use std::fmt;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;

use block::Buffer;
use block::buffer::MemoryHold;
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use super::{ChainDefect, DirtyLog};

/// Bytes inside one region of guest memory. Only [`QueueMemory`] makes them.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Slice {
    region: u32,
    len: u32,
    offset: u64,
}

impl Slice {
    /// The length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "no chain has an empty slice")]
    #[must_use]
    #[inline]
    pub fn len(self) -> u32 {
        self.len
    }

    /// All but the first `bytes`.
    pub(crate) fn skip(self, bytes: u32) -> Self {
        let bytes = bytes.min(self.len);
        Self {
            region: self.region,
            len: self.len - bytes,
            offset: self.offset + u64::from(bytes),
        }
    }

    /// The last byte and what comes before it; `None` if there is no byte.
    #[inline]
    pub(crate) fn split_last(self) -> Option<(Self, Self)> {
        let rest = self.len.checked_sub(1)?;
        Some((Self { len: rest, ..self }, self.skip(rest)))
    }
}

/// One descriptor, as it was when it was read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Descriptor {
    pub(crate) address: u64,
    pub(crate) len: u32,
    pub(crate) flags: u16,
    pub(crate) next: u16,
}

/// The size of a descriptor, in bytes.
pub(crate) const DESCRIPTOR_BYTES: u32 = 16;

#[derive(Clone, Copy)]
struct Region {
    guest: u64,
    len: u64,
    host: *mut u8,
}

/// Asks the processor to have a cache line at hand soon.
#[inline]
fn prefetch(pointer: NonNull<u8>) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch is a hint: it reads nothing that the program could see and never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(pointer.as_ptr().cast()) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = pointer;
}

/// The memory map of one queue.
pub struct QueueMemory {
    /// Sorted by guest address, not overlapping.
    regions: Box<[Region]>,
    recent: [Cell<usize>; 2],
    hold: MemoryHold,
    log: Option<Arc<DirtyLog>>,
}

impl fmt::Debug for QueueMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QueueMemory({} regions)", self.regions.len())
    }
}

impl QueueMemory {
    /// A view of `memory`, which it keeps mapped.
    pub(crate) fn new(memory: GuestMemoryMmap) -> Self {
        let mut regions: Vec<Region> = memory
            .iter()
            .map(|region| Region {
                guest: region.start_addr().0,
                len: region.len(),
                host: region.as_ptr(),
            })
            .collect();
        regions.sort_by_key(|region| region.guest);
        Self {
            regions: regions.into_boxed_slice(),
            recent: [Cell::new(0), Cell::new(0)],
            hold: Rc::new(memory),
            log: None,
        }
    }

    /// From now on written pages are marked in `log`.
    pub(super) fn log_writes(&mut self, log: Arc<DirtyLog>) {
        self.log = Some(log);
    }

    /// Returns true if written pages are marked.
    #[inline]
    pub(crate) fn is_logged(&self) -> bool {
        self.log.is_some()
    }

    /// Marks the bytes of `slice`, which were written.
    #[inline]
    fn mark(&self, slice: Slice) {
        if let Some(log) = &self.log {
            Self::mark_in(
                log,
                &self.regions[slice.region as usize],
                slice.offset,
                slice.len.into(),
            );
        }
    }

    #[cold]
    fn mark_in(log: &DirtyLog, region: &Region, offset: u64, len: u64) {
        log.mark(region.guest + offset, len);
    }

    /// Marks all of a buffer of this memory, which a request may have written.
    #[cold]
    pub(crate) fn written(&self, buffer: &Buffer) {
        let Some(log) = &self.log else { return };
        buffer.for_each_slice(|slice| {
            // A stretch goes on in the next region where the two are mapped side by side.
            let (mut at, mut left) = (slice.ptr().addr() as u64, slice.len() as u64);
            while left > 0 {
                let found = self.regions.iter().find_map(|region| {
                    let offset = at.checked_sub(region.host.addr() as u64)?;
                    (offset < region.len).then_some((region, offset))
                });
                let Some((region, offset)) = found else {
                    debug_assert!(false, "a buffer of another memory");
                    return;
                };
                let part = left.min(region.len - offset);
                Self::mark_in(log, region, offset, part);
                at += part;
                left -= part;
            }
        });
    }

    /// The number of the region that `address` is in.
    #[inline]
    fn find(&self, address: u64) -> Option<usize> {
        for recent in &self.recent {
            let index = recent.get();
            let region = self.regions.get(index)?;
            if address.wrapping_sub(region.guest) < region.len {
                return Some(index);
            }
        }
        self.search(address)
    }

    #[cold]
    fn search(&self, address: u64) -> Option<usize> {
        let after = self.regions.partition_point(|region| region.guest <= address);
        let index = after.checked_sub(1)?;
        let region = self.regions.get(index)?;
        if address - region.guest < region.len {
            self.recent[1].set(self.recent[0].replace(index));
            return Some(index);
        }
        None
    }

    /// Turns a guest range into slices, several if it lies in several adjacent regions.
    #[inline]
    pub(crate) fn translate(
        &self,
        address: u64,
        len: u32,
        mut out: impl FnMut(Slice),
    ) -> Result<(), ChainDefect> {
        match self.contiguous(address, len) {
            Some(slice) => {
                out(slice);
                Ok(())
            }
            None => self.translate_parts(address, len, out),
        }
    }

    #[cold]
    fn translate_parts(&self, address: u64, len: u32, mut out: impl FnMut(Slice)) -> Result<(), ChainDefect> {
        let outside = ChainDefect::OutsideMemory { address, len };
        let (mut at, mut left) = (address, len);
        while left > 0 {
            let index = self.find(at).ok_or(outside)?;
            let region = &self.regions[index];
            let offset = at - region.guest;
            let part = u64::from(left).min(region.len - offset) as u32;
            out(Slice {
                region: index as u32,
                len: part,
                offset,
            });
            left -= part;
            if left > 0 {
                at = at.checked_add(u64::from(part)).ok_or(outside)?;
            }
        }
        Ok(())
    }

    /// A guest range that lies in one region.
    #[inline]
    pub(crate) fn contiguous(&self, address: u64, len: u32) -> Option<Slice> {
        let index = self.find(address)?;
        let region = &self.regions[index];
        let offset = address - region.guest;
        (u64::from(len) <= region.len - offset).then_some(Slice {
            region: index as u32,
            len,
            offset,
        })
    }

    /// Returns the address of bytes `at..at + len` of `slice`. They are mapped, and contiguous, while `self` lives.
    ///
    /// # Panics
    ///
    /// If they are not inside the slice, or the slice is not of this memory.
    #[must_use]
    #[inline]
    pub fn pointer(&self, slice: Slice, at: u32, len: u32) -> NonNull<u8> {
        let region = &self.regions[slice.region as usize];
        let inside = u64::from(at) + u64::from(len) <= u64::from(slice.len)
            && slice.offset + u64::from(slice.len) <= region.len;
        assert!(inside, "bytes {at}+{len} of {slice:?}");
        let pointer = region.host.wrapping_add((slice.offset + u64::from(at)) as usize);
        NonNull::new(pointer).expect("no mapping contains the null address")
    }

    /// Sixteen bytes from `at` on, each read once, as two little-endian words.
    #[inline]
    fn load_16(&self, slice: Slice, at: u32) -> [u64; 2] {
        let pointer = self.pointer(slice, at, 16);
        if pointer.addr().get() & 7 == 0 {
            let words = pointer.cast::<u64>();
            // SAFETY: `pointer` names 16 mapped bytes (`QueueMemory::pointer`) and is a multiple of 8.
            // The guest may write them meanwhile; every value is a valid u64.
            return unsafe {
                [
                    u64::from_le(words.read_volatile()),
                    u64::from_le(words.add(1).read_volatile()),
                ]
            };
        }
        let mut bytes = [0; 16];
        self.read(slice, at, &mut bytes);
        let word = |range: std::ops::Range<usize>| {
            bytes[range]
                .iter()
                .rev()
                .fold(0, |word, &byte| word << 8 | u64::from(byte))
        };
        [word(0..8), word(8..16)]
    }

    /// Descriptor `index` of a table.
    #[inline]
    pub(crate) fn descriptor(&self, table: Slice, index: u16) -> Descriptor {
        let [address, rest] = self.load_16(table, u32::from(index) * DESCRIPTOR_BYTES);
        Descriptor {
            address,
            len: rest as u32,
            flags: (rest >> 32) as u16,
            next: (rest >> 48) as u16,
        }
    }

    /// Asks the processor to have descriptor `index` of a table at hand soon.
    #[inline]
    pub(crate) fn prefetch_descriptor(&self, table: Slice, index: u16) {
        prefetch(self.pointer(table, u32::from(index) * DESCRIPTOR_BYTES, DESCRIPTOR_BYTES));
    }

    /// Asks the processor to have what descriptor `index` of a table names at hand soon.
    #[inline]
    pub(crate) fn prefetch_target(&self, table: Slice, index: u16) {
        let address = self.descriptor(table, index).address;
        if let Some(target) = self.contiguous(address, 1) {
            prefetch(self.pointer(target, 0, 1));
        }
    }

    /// Fills `out` with bytes of `slice` from `at` on, each read once.
    fn read(&self, slice: Slice, at: u32, out: &mut [u8]) {
        let pointer = self.pointer(slice, at, out.len() as u32);
        for (index, byte) in out.iter_mut().enumerate() {
            // SAFETY: `index < out.len()`, and that many bytes are mapped from `pointer` on.
            *byte = unsafe { pointer.add(index).read_volatile() };
        }
    }

    /// Sixteen bytes of the concatenated `slices` from `at` on, as two little-endian words; `None` if
    /// there are fewer.
    #[inline]
    pub(crate) fn load_16_across(&self, slices: &[Slice], at: u64) -> Option<[u64; 2]> {
        if let Some(first) = slices.first()
            && at + 16 <= u64::from(first.len)
        {
            return Some(self.load_16(*first, at as u32));
        }
        let mut bytes = [0; 16];
        let (mut skip, mut filled) = (at, 0);
        for slice in slices {
            if skip >= u64::from(slice.len) {
                skip -= u64::from(slice.len);
                continue;
            }
            let part = ((u64::from(slice.len) - skip) as usize).min(16 - filled);
            self.read(*slice, skip as u32, &mut bytes[filled..filled + part]);
            filled += part;
            skip = 0;
            if filled == 16 {
                let (low, high) = bytes.split_at(8);
                let word = |half: &[u8]| {
                    half.iter()
                        .rev()
                        .fold(0, |word, &byte| word << 8 | u64::from(byte))
                };
                return Some([word(low), word(high)]);
            }
        }
        None
    }

    /// Writes `bytes` to the start of the concatenated `slices`, as far as they go, and returns how many
    /// were written.
    pub(crate) fn write_across(&self, slices: &[Slice], bytes: &[u8]) -> usize {
        let mut left = bytes;
        for slice in slices {
            let (now, later) = left.split_at(left.len().min(slice.len as usize));
            let pointer = self.pointer(*slice, 0, now.len() as u32);
            for (index, byte) in now.iter().enumerate() {
                // SAFETY: `index < now.len()`, and that many bytes are mapped from `pointer` on.
                unsafe { pointer.add(index).write_volatile(*byte) };
            }
            self.mark(*slice);
            left = later;
        }
        bytes.len() - left.len()
    }

    /// Writes the first byte of `slice`.
    #[inline]
    pub(crate) fn write_byte(&self, slice: Slice, value: u8) {
        // SAFETY: `pointer` names one mapped byte, which only the guest shares.
        unsafe { self.pointer(slice, 0, 1).write_volatile(value) };
        self.mark(slice);
    }

    /// The slices as the buffer of a request. The buffer holds the mapping.
    #[inline]
    pub(crate) fn buffer(&self, slices: &[Slice]) -> Buffer {
        let mut builder = Buffer::guest(Rc::clone(&self.hold));
        for slice in slices {
            let pointer = self.pointer(*slice, 0, slice.len);
            // SAFETY: `pointer` names `slice.len` bytes, mapped readable and writable as long as the
            // mapping lives; the builder was given a hold on that mapping. No reference covers guest
            // memory anywhere (module rule).
            unsafe { builder.push(pointer.as_ptr(), slice.len as usize) };
        }
        builder.build()
    }
}
