//! Checker for the memory of ops: memory that is freed, unmapped or reused under an op is a fault.
//!
//! A simulated driver records each stretch of memory an op names, from its submission to its completion, and
//! touches it late, at the moment the op takes effect. Three faults are detected meanwhile:
//!
//! - memory of the heap that is freed, if the program allocates with a [`GuardAlloc`]. It is then filled
//!   with [`POISON`] and kept for ever, so that later accesses are wrong but defined;
//! - a [`GuestRegion`] that is dropped, which is kept too;
//! - an op that writes into memory that another op in flight uses.
//!
//! Everything is per thread, as a simulated world is.

#![expect(unsafe_code, reason = "wraps the allocator, and owns mapped memory")]

use std::alloc::{GlobalAlloc, Layout};
use std::cell::{Cell, RefCell};
use std::fmt;
use std::ops::Range;
use std::rc::Rc;

use block::buffer::{AlignedBuf, Buffer};

/// Fill byte of memory that was freed under an op.
pub const POISON: u8 = 0xDB;

#[derive(Clone, Debug)]
struct Held {
    op: u64,
    range: Range<usize>,
    written: bool,
}

thread_local! {
    static HELD: RefCell<Vec<Held>> = const { RefCell::new(Vec::new()) };
    /// The lowest and the highest address held since the list was last empty; an empty range when no memory is held.
    static SPAN: Cell<(usize, usize)> = const { Cell::new((usize::MAX, 0)) };
    /// The allocations of this thread, as far as a [`GuardAlloc`] saw them.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    static FAULTS: Cell<[Option<MemoryFault>; 4]> = const { Cell::new([None; 4]) };
}

/// Fault: memory was freed, unmapped or reused while an op held it.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum MemoryFault {
    /// It was given back to the allocator.
    #[error("memory of op {op} was freed while the op was in flight")]
    Freed {
        /// The op's number in the trace.
        op: u64,
    },
    /// A guest's region was dropped.
    #[error("guest memory of op {op} was unmapped while the op was in flight")]
    Unmapped {
        /// The op's number in the trace.
        op: u64,
    },
    /// It was given to a second op.
    #[error("ops {first} and {second} use the same memory, and one of them writes it")]
    Shared {
        /// The op that had it first.
        first: u64,
        /// The op that was given it too.
        second: u64,
    },
}

pub(super) fn report(fault: MemoryFault) {
    FAULTS.with(|faults| {
        let mut list = faults.get();
        if let Some(place) = list.iter_mut().find(|place| place.is_none()) {
            *place = Some(fault);
        }
        faults.set(list);
    });
}

/// Returns the first faults on this thread since the last call.
#[must_use]
pub fn take_faults() -> Vec<MemoryFault> {
    FAULTS.with(|faults| faults.take().into_iter().flatten().collect())
}

/// Records that `op` holds `range`; `written` if it writes there.
pub(super) fn hold(op: u64, range: Range<usize>, written: bool) {
    if range.is_empty() {
        return;
    }
    let other = HELD.with_borrow_mut(|held| {
        let other = held.iter().find(|held| {
            held.op != op
                && (held.written || written)
                && held.range.start < range.end
                && range.start < held.range.end
        });
        let other = other.map(|held| held.op);
        held.push(Held {
            op,
            range: range.clone(),
            written,
        });
        other
    });
    SPAN.with(|span| {
        let (low, high) = span.get();
        span.set((low.min(range.start), high.max(range.end)));
    });
    if let Some(first) = other {
        report(MemoryFault::Shared { first, second: op });
    }
}

/// Records that `op` has ended.
pub(super) fn let_go(op: u64) {
    HELD.with_borrow_mut(|held| {
        held.retain(|held| held.op != op);
        if held.is_empty() {
            SPAN.set((usize::MAX, 0));
        }
    });
}

/// Returns the op of this thread's worlds that holds some of the memory at these addresses, if one does.
#[must_use]
pub fn holder(range: Range<usize>) -> Option<u64> {
    // Outside a simulation, and for nearly all memory, this check is enough.
    let (low, high) = SPAN.try_with(Cell::get).unwrap_or((usize::MAX, 0));
    if range.end <= low || high <= range.start {
        return None;
    }
    HELD.try_with(|held| {
        // Already borrowed: the list itself is growing.
        let held = held.try_borrow().ok()?;
        let found = held
            .iter()
            .find(|held| held.range.start < range.end && range.start < held.range.end);
        found.map(|held| held.op)
    })
    .ok()
    .flatten()
}

/// Returns the number of allocations that this thread has made, growths included, if the program allocates with a
/// [`GuardAlloc`].
#[must_use]
pub fn allocations() -> u64 {
    ALLOCATIONS.get()
}

fn count_allocation() {
    ALLOCATIONS.set(ALLOCATIONS.get() + 1);
}

/// An allocator that detects memory freed under an op in flight, and counts each thread's allocations.
///
/// ```text
/// #[global_allocator]
/// static ALLOCATOR: GuardAlloc<std::alloc::System> = GuardAlloc(std::alloc::System);
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct GuardAlloc<A>(pub A);

// SAFETY: every call goes to `A` with the same arguments, except for memory an op holds: that is never freed,
// so it stays allocated, which no caller can tell.
unsafe impl<A: GlobalAlloc> GlobalAlloc for GuardAlloc<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count_allocation();
        // SAFETY: the caller's contract is `A`'s.
        unsafe { self.0.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count_allocation();
        // SAFETY: the caller's contract is `A`'s.
        unsafe { self.0.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        let start = ptr.addr();
        if let Some(op) = holder(start..start + layout.size()) {
            // SAFETY: the caller gives up `layout.size()` bytes at `ptr`, and nobody gets them again.
            unsafe { ptr.write_bytes(POISON, layout.size()) };
            report(MemoryFault::Freed { op });
            return;
        }
        // SAFETY: the caller's contract is `A`'s.
        unsafe { self.0.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count_allocation();
        let start = ptr.addr();
        if holder(start..start + layout.size()).is_none() {
            // SAFETY: the caller's contract is `A`'s.
            return unsafe { self.0.realloc(ptr, layout, new_size) };
        }
        let Ok(new_layout) = Layout::from_size_align(new_size, layout.align()) else {
            return std::ptr::null_mut();
        };
        // SAFETY: `realloc` asks for a size that is not zero.
        let new = unsafe { self.0.alloc(new_layout) };
        if !new.is_null() {
            // SAFETY: both are allocated, distinct, and at least so long.
            unsafe { new.copy_from_nonoverlapping(ptr, layout.size().min(new_size)) };
            // SAFETY: the caller gives up `ptr`, which has this layout.
            unsafe { self.dealloc(ptr, layout) };
        }
        new
    }
}

/// A stretch of a simulated guest's memory. Buffers made of it keep it mapped, if made so.
pub struct GuestRegion {
    memory: Option<AlignedBuf>,
    start: usize,
}

impl fmt::Debug for GuestRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GuestRegion({} bytes)", self.len())
    }
}

impl GuestRegion {
    /// Makes a region of `len` zero bytes.
    #[must_use]
    pub fn new(len: usize) -> Rc<Self> {
        let mut memory = AlignedBuf::zeroed(len);
        let start = memory.as_mut_ptr().expose_provenance();
        Rc::new(Self {
            memory: Some(memory),
            start,
        })
    }

    fn len(&self) -> usize {
        self.memory.as_ref().map_or(0, |memory| memory.len())
    }

    fn ptr(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(
            offset <= self.len() && len <= self.len() - offset,
            "inside the region"
        );
        std::ptr::with_exposed_provenance_mut(self.start + offset)
    }

    /// Makes a buffer over the stretches (offset, length), which keeps the region mapped.
    #[must_use]
    pub fn buffer(self: &Rc<Self>, stretches: &[(usize, usize)]) -> Buffer {
        self.build(Rc::clone(self) as Rc<dyn std::any::Any>, stretches)
    }

    /// As [`GuestRegion::buffer`], but the region may be dropped while the buffer lives: for tests of the detector.
    #[cfg(test)]
    fn unheld_buffer(&self, stretches: &[(usize, usize)]) -> Buffer {
        self.build(Rc::new(()), stretches)
    }

    fn build(&self, hold: Rc<dyn std::any::Any>, stretches: &[(usize, usize)]) -> Buffer {
        let mut builder = Buffer::guest(hold);
        for &(offset, len) in stretches {
            // SAFETY: `ptr` checked that the stretch lies in the region, whose memory is only ever reached
            // through raw pointers. It stays while the hold does; without a hold (tests) a region that is
            // dropped under an op is leaked, see `Drop`.
            unsafe { builder.push(self.ptr(offset, len), len) };
        }
        builder.build()
    }

    /// Copies bytes out, as a guest would.
    ///
    /// # Panics
    ///
    /// If they are not inside the region.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        let from = self.ptr(offset, out.len());
        // SAFETY: `ptr` checked the range; the memory is initialised; no other thread is involved.
        unsafe { std::ptr::copy_nonoverlapping(from.cast_const(), out.as_mut_ptr(), out.len()) };
    }

    /// Copies bytes in, as a guest would.
    ///
    /// # Panics
    ///
    /// If they are not inside the region.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        let to = self.ptr(offset, bytes.len());
        // SAFETY: as for `read`.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }
}

impl Drop for GuestRegion {
    fn drop(&mut self) {
        if let Some(op) = holder(self.start..self.start + self.len()) {
            report(MemoryFault::Unmapped { op });
            // The op will still touch it.
            if let Some(memory) = self.memory.take() {
                Box::leak(Box::new(memory));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Profile, SimWorld};
    use block::request::{Op, Request};

    fn world() -> (SimWorld, block::Context, block::file::FileView) {
        let world = SimWorld::new(1, Profile::default());
        let cx = world.context(16);
        let view = world.file("disk", true).view(&cx).expect("a view");
        (world, cx, view)
    }

    #[test]
    fn memory_left_alone_during_an_op_is_no_fault() {
        let (world, _cx, view) = world();
        let region = GuestRegion::new(4096);
        let buffer = region.buffer(&[(0, 512), (2048, 512)]);
        let (request, _answer) = Request::local(Op::Write { fua: false }, 0, 1024, buffer);
        view.submit(0, request).expect("room");
        // The buffer keeps the region: dropping our hold is no fault.
        drop(region);
        while world.step() {}
        view.context().ring().turn(false).expect("a turn");
        assert_eq!(take_faults(), []);
    }

    #[test]
    fn region_unmapped_under_an_op_is_a_fault() {
        let (world, _cx, view) = world();
        let region = GuestRegion::new(4096);
        let buffer = region.unheld_buffer(&[(512, 512)]);
        let (request, _answer) = Request::local(Op::Read, 0, 512, buffer);
        view.submit(0, request).expect("room");
        drop(region);
        assert!(matches!(take_faults()[..], [MemoryFault::Unmapped { .. }]));
        while world.step() {}
    }

    #[test]
    fn heap_memory_freed_under_an_op_is_a_fault() {
        let (world, _cx, view) = world();
        let memory = AlignedBuf::zeroed(512);
        let mut builder = Buffer::guest(Rc::new(()));
        // SAFETY: the tests' allocator keeps memory that is freed under an op.
        unsafe { builder.push(memory.as_ptr().cast_mut(), 512) };
        let (request, _answer) = Request::local(Op::Write { fua: false }, 0, 512, builder.build());
        view.submit(0, request).expect("room");
        drop(memory);
        assert!(matches!(take_faults()[..], [MemoryFault::Freed { .. }]));
        while world.step() {}
        // And the disk holds what the memory held then, not what it was meant to.
        let mut bytes = [0; 512];
        world.contents("disk").read(0, &mut bytes);
        assert_eq!(bytes, [POISON; 512]);
    }

    #[test]
    fn buffer_written_by_two_ops_is_a_fault() {
        let (world, _cx, view) = world();
        let region = GuestRegion::new(4096);
        for _ in 0..2 {
            let (request, _answer) = Request::local(Op::Read, 0, 512, region.buffer(&[(0, 512)]));
            view.submit(0, request).expect("room");
        }
        assert!(matches!(take_faults()[..], [MemoryFault::Shared { .. }]));
        while world.step() {}
    }
}
