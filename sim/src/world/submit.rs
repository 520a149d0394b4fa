//! The submission of ops: the checks that a kernel makes at once, and the delays that a slow disk adds.
//!
//! Invariant: an op that is refused here names no memory any more, and every other one holds its memory from here on.

#![expect(unsafe_code, reason = "reads the slice lists of ops")]

use std::ops::Range;
use std::rc::Rc;

use block::buffer::IoSlice;
use block::ring::driver::{KernelOp, Kind};

use super::World;
use super::op::{HELD, SimOp};
use crate::memory;
use crate::pages::{Pages, Way};
use crate::trace::What;

/// A slot in a ring's buffer table.
#[derive(Debug)]
pub(crate) struct FixedPlace {
    pub(crate) pages: Rc<Pages>,
    /// Its bytes in the pages.
    pub(crate) range: Range<usize>,
    /// The kernel's name for the first of them.
    pub(crate) base: u64,
}

impl FixedPlace {
    /// Returns the memory behind a stretch that an op names; `None` past its end, or if ops must not go this way.
    pub(super) fn find(&self, stretch: &IoSlice, way: Way) -> Option<IoSlice> {
        let skip = (stretch.ptr().addr() as u64).checked_sub(self.base)?;
        let skip = usize::try_from(skip).ok()?;
        let start = self.range.start + skip;
        let inside = skip.checked_add(stretch.len())? <= self.range.len();
        let allowed = inside && self.pages.allows(&(start..start + stretch.len()), way);
        allowed.then(|| self.pages.stretch(start, stretch.len()))
    }
}

impl World {
    /// Submits an op.
    ///
    /// # Safety
    ///
    /// As for [`block::ring::driver::Driver::push`].
    pub(crate) unsafe fn submit(&mut self, ring: u32, op: &KernelOp, user_data: u64) {
        self.time += 1;
        let id = self.next_op;
        self.next_op += 1;
        self.canaries.submit(ring);
        let mut slices: &[IoSlice] = if op.slice_count == 0 {
            &[]
        } else {
            // SAFETY: `slices` points at `slice_count` valid entries (contract of `push`).
            unsafe { std::slice::from_raw_parts(op.slices, op.slice_count) }
        };
        let transfer = matches!(op.kind, Kind::Read | Kind::Write { .. });
        let len = if transfer {
            slices.iter().map(|slice| slice.len() as u64).sum()
        } else {
            op.len
        };
        if ring < self.first_alive {
            self.push_completion(ring, user_data, -libc::ECANCELED);
            return;
        }
        let Some(file) = op.file.fixed else {
            self.push_completion(ring, user_data, -libc::EBADF);
            return;
        };
        let mut behind = None;
        if let Some(fixed) = op.fixed {
            let named = slices.first();
            let named = named.map(|&named| self.canaries.stretch(ring, user_data, named));
            let place = self.fixed[ring as usize].get(usize::from(fixed.index));
            let way = match op.kind {
                Kind::Read => Way::Filled,
                _ => Way::Taken,
            };
            behind = place.and_then(|place| place.find(&named?, way));
            if behind.is_none() || slices.len() != 1 {
                // As in Linux for a slot that is empty, ends before the stretch does, or is for the other direction.
                self.push_completion(ring, user_data, -libc::EFAULT);
                return;
            }
            slices = behind.as_slice();
        }
        let align = self.files[file as usize].alignment;
        let aligned = |slice: &IoSlice| {
            slice.ptr().addr().is_multiple_of(align.memory)
                && (slice.len() as u64).is_multiple_of(align.offset)
        };
        // As in Linux, a read past the end is answered before its alignment is checked.
        let past_end = op.kind == Kind::Read && op.offset >= self.files[file as usize].len();
        if transfer && !past_end && !(op.offset.is_multiple_of(align.offset) && slices.iter().all(aligned)) {
            self.push_completion(ring, user_data, -libc::EINVAL);
            return;
        }
        for slice in slices {
            let start = slice.ptr().addr();
            memory::hold(id, start..start + slice.len(), op.kind == Kind::Read);
        }
        if let Some(pages) = &self.files[file as usize].pages
            && transfer
            && op.offset + len <= pages.len() as u64
        {
            let start = op.offset as usize;
            let way = match op.kind {
                Kind::Read => Way::Taken,
                _ => Way::Filled,
            };
            if !pages.allows(&(start..start + len as usize), way) {
                self.push_completion(ring, user_data, -libc::EACCES);
                return;
            }
            let stretch = pages.stretch(start, len as usize);
            let start = stretch.ptr().addr();
            memory::hold(id, start..start + stretch.len(), op.kind != Kind::Read);
        }
        let mut op = SimOp {
            id,
            ring,
            user_data,
            kind: op.kind,
            file: file as usize,
            offset: op.offset,
            len,
            slices: op.slices,
            slice_count: op.slice_count,
            fixed: behind,
            submitted: self.time,
            not_before: self.time,
            fate: None,
            done: 0,
            result: None,
            cancelled: false,
            completed_with: None,
        };
        self.note(&op, What::Submitted);
        if self.profile.immediate {
            op.fate = Some(self.bounds(&op));
            self.take_effect(&mut op, u64::MAX);
            self.complete(op);
            return;
        }
        let late_reads = if op.kind == Kind::Read {
            self.profile.late_reads
        } else {
            0
        };
        if self.random.chance(self.profile.late) || self.random.chance(late_reads) {
            op.not_before += 20 + self.random.below(400);
        }
        let hold = self.hold.take();
        self.hold = hold.and_then(|ops| ops.checked_sub(1));
        if hold == Some(0) {
            op.not_before = HELD;
        }
        self.complete_early(&mut op);
        self.ops.push(op);
    }
}
