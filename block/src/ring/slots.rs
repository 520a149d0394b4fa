//! The in-flight slots: the state of each op from submission until its completion is reaped.
//!
//! The slots of ops are allocated once per ring and never move, because the kernel may read a slot's slice list while the op is being
//! started. Watches have slots of their own, as many as there are watches: so a full ring can still be woken. `user_data` is a slot's
//! index and its generation, so that a stale completion is detected. Life cycle of a slot: `Free → InFlight → (Finished →) Free`.

use std::rc::Rc;
use std::task::Waker;

use smallvec::SmallVec;

use super::command_sink::CommandSink;
use super::driver::{FixedOp, KernelOp, Kind};
use crate::buffer::{BUFFER_ALIGN, Buffer, FixedRange, IoSlice, IoSlices, Memory, append_zeros};
use crate::door::Door;
use crate::error::IoError;
use crate::handle::FileHandle;
use crate::request::Request;
use crate::sync::WaitList;

/// Token that a watch reports.
pub type EventToken = u64;

/// Recipient of an op's result, which also owns the op's memory.
#[derive(Debug)]
pub(super) enum Owner {
    /// None: the slot is free.
    Free,
    /// A request, answered with the result.
    Request(Request),
    /// A future, woken at the end.
    Waiting(Option<Waker>),
    /// A future that has not fetched the result yet.
    Finished(Result<(), IoError>),
    /// None, as the future was dropped; the memory is freed when the op has ended.
    Orphan,
    /// A watch, which reports under this token.
    Watch(EventToken),
    /// A command, whose result goes to this sink under this tag.
    Command(Rc<CommandSink>, u64),
}

/// Kind of memory that the stretches of an op name.
#[derive(Debug, Default)]
pub(super) enum Named {
    /// Addresses of this process.
    #[default]
    Memory,
    /// One stretch of a registered buffer, by the kernel's names for its bytes.
    Fixed {
        index: u16,
        door: Door,
        /// The difference between the position at the door and the kernel's name.
        to_door: u64,
    },
    /// Zeros, for the rest of a registered buffer that was read into past the end of this file.
    PastEnd { _read: Option<FileHandle> },
}

#[derive(Debug)]
pub(super) struct Slot {
    pub(super) generation: u32,
    pub(super) owner: Owner,
    pub(super) kind: Kind,
    /// Keeps the file registered.
    pub(super) file: Option<FileHandle>,
    /// The file offset at which the op continues, in bytes.
    pub(super) offset: u64,
    /// The length of an allocation, or the bytes of a transfer still to do.
    pub(super) left: u64,
    pub(super) slices: IoSlices,
    pub(super) named: Named,
    /// True if the file is the door of registered buffers, which does not read as zeros past its end.
    pub(super) at_door: bool,
    /// The first slice that is not done; its start and length cover only the rest of it.
    pub(super) first_slice: usize,
    /// The bytes of that slice that are done.
    within_slice: usize,
    /// The number of bytes done.
    done: u64,
    pub(super) retries: u8,
    /// Keeps the memory of `slices` if the owner does not.
    pub(super) keep: SmallVec<[Rc<Buffer>; 2]>,
}

/// The number of times that an op is retried if the kernel asks for that.
const RETRIES_MAX: u8 = 100;

/// Next step after a completion.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Step {
    /// The op has ended.
    End(Result<(), IoError>),
    /// The rest must be submitted again.
    Again,
}

impl Slot {
    fn new() -> Self {
        Self {
            generation: 0,
            owner: Owner::Free,
            kind: Kind::DataSync,
            file: None,
            offset: 0,
            left: 0,
            slices: IoSlices::new(),
            named: Named::Memory,
            at_door: false,
            first_slice: 0,
            within_slice: 0,
            done: 0,
            retries: 0,
            keep: SmallVec::new(),
        }
    }

    /// Adds bytes of this process's memory to those the op reads into or writes from.
    #[inline]
    pub(super) fn name_memory(&mut self, memory: Memory<'_>, offset: usize, len: usize) {
        memory.for_each(offset, len, |slice| self.slices.push(slice));
    }

    /// Lets the op read into, or write from, `len` bytes of a registered buffer only.
    #[inline(never)]
    pub(super) fn name_fixed(&mut self, range: &FixedRange<'_>, len: usize) {
        // A number for the kernel: never a pointer to us.
        let address = usize::try_from(range.address).unwrap_or(usize::MAX);
        self.slices
            .push(IoSlice::new(std::ptr::without_provenance_mut(address), len));
        self.named = Named::Fixed {
            index: range.fixed.index(),
            door: range.door.clone(),
            to_door: range.door_offset.wrapping_sub(range.address),
        };
    }

    /// Returns the op for a driver; `None` if the slot has no file, which every started op has.
    #[inline]
    pub(super) fn kernel_op(&self) -> Option<KernelOp> {
        let slices = &self.slices[self.first_slice.min(self.slices.len())..];
        Some(KernelOp {
            kind: self.kind,
            file: self.file.as_ref()?.slot(),
            offset: self.offset,
            len: self.left,
            slices: slices.as_ptr(),
            slice_count: slices.len(),
            at_door: self.at_door,
            fixed: match &self.named {
                Named::Memory | Named::PastEnd { .. } => None,
                Named::Fixed { index, door, to_door } => Some(FixedOp {
                    index: *index,
                    door: door.file.slot(),
                    door_offset: to_door.wrapping_add(self.address()),
                }),
            },
        })
    }

    /// Counts the op, which has ended, if it may have changed its file.
    #[inline]
    pub(super) fn count_change(&self) {
        if self.kind.may_change_file()
            && let Some(file) = &self.file
        {
            file.count_change();
        }
    }

    /// Returns the kernel's name for the first byte of a registered buffer that is not done.
    fn address(&self) -> u64 {
        self.slices
            .get(self.first_slice)
            .map_or(0, |slice| slice.ptr().addr() as u64)
    }

    /// Processes one completion. A short transfer continues where it stopped; a read at the end
    /// of the file is completed with zeros; a write that makes no progress fails.
    #[inline]
    pub(super) fn advance(&mut self, result: i32) -> Step {
        let transfers = matches!(self.kind, Kind::Read | Kind::Write { .. });
        if transfers && self.left > 0 && u64::try_from(result) == Ok(self.left) {
            self.left = 0;
            return Step::End(Ok(()));
        }
        self.advance_part(result)
    }

    /// Processes the completion of an op that failed, ended short, or transfers nothing.
    fn advance_part(&mut self, result: i32) -> Step {
        if result < 0 {
            let errno = result.saturating_neg();
            if matches!(errno, libc::EAGAIN | libc::EINTR) && self.retries < RETRIES_MAX {
                self.retries += 1;
                return Step::Again;
            }
            if errno == libc::EINVAL && self.step_back() {
                self.retries += 1;
                return Step::Again;
            }
            return Step::End(Err(IoError::from_errno(errno)));
        }
        let moved = u64::from(result.unsigned_abs());
        match self.kind {
            Kind::Read | Kind::Write { .. } => {}
            _ => return Step::End(Ok(())),
        }
        if moved > self.left {
            return Step::End(Err(IoError::Host { errno: libc::EIO }));
        }
        if moved == 0 && self.left > 0 {
            if self.kind == Kind::Read && !self.at_door {
                return self.past_end();
            }
            return Step::End(Err(IoError::Host { errno: libc::EIO }));
        }
        self.left -= moved;
        if self.left == 0 {
            return Step::End(Ok(()));
        }
        self.offset += moved;
        self.done += moved;
        let mut skip = usize::try_from(moved).unwrap_or(usize::MAX);
        while let Some(slice) = self.slices.get_mut(self.first_slice) {
            if skip < slice.len() {
                *slice = slice.skip(skip);
                self.within_slice += skip;
                break;
            }
            skip -= slice.len();
            // Restored to its full length, for `step_back`.
            *slice = slice.unskip(self.within_slice);
            self.within_slice = 0;
            self.first_slice += 1;
        }
        Step::Again
    }

    /// Completes a read that has reached the end of its file with zeros. For a registered buffer that is I/O of its
    /// own: the op continues as a write at the door.
    fn past_end(&mut self) -> Step {
        match std::mem::take(&mut self.named) {
            Named::Memory | Named::PastEnd { .. } => {
                crate::buffer::zero_slices(&self.slices[self.first_slice..]);
                Step::End(Ok(()))
            }
            Named::Fixed { door, to_door, .. } => {
                self.offset = to_door.wrapping_add(self.address());
                self.slices.clear();
                append_zeros(usize::try_from(self.left).unwrap_or(usize::MAX), &mut self.slices);
                (self.first_slice, self.within_slice, self.done, self.retries) = (0, 0, 0, 0);
                self.kind = Kind::Write { dsync: false };
                self.at_door = true;
                // The file that was read stays registered as long as the slot is busy.
                self.named = Named::PastEnd {
                    _read: self.file.replace(door.file),
                };
                Step::Again
            }
        }
    }

    /// Goes back to the start of a block, or of the op. Direct I/O ends short in the middle of a block only
    /// at the end of the file; if the file has grown meanwhile, continuing from there is refused. Returns
    /// false if it cannot go back.
    fn step_back(&mut self) -> bool {
        let back = (self.offset % BUFFER_ALIGN as u64).min(self.done);
        if self.kind != Kind::Read || back == 0 || self.retries >= RETRIES_MAX {
            return false;
        }
        self.offset -= back;
        self.done -= back;
        self.left += back;
        let mut back = usize::try_from(back).unwrap_or_default();
        while back > 0 {
            let part = back.min(self.within_slice);
            if let Some(slice) = self.slices.get_mut(self.first_slice) {
                *slice = slice.unskip(part);
            }
            self.within_slice -= part;
            back -= part;
            if back > 0 {
                // All of the slice before is done.
                self.first_slice -= 1;
                let before = self.slices.get_mut(self.first_slice);
                self.within_slice = before.map_or(0, |slice| {
                    let len = slice.len();
                    *slice = slice.skip(len);
                    len
                });
            }
        }
        true
    }
}

/// All slots of a ring.
#[derive(Debug)]
pub(super) struct Slots {
    /// Those of ops.
    list: Vec<Slot>,
    free: Vec<u32>,
    /// Those of watches, whose indices follow those of ops. The kernel reads nothing of them.
    watches: Vec<Slot>,
    free_watches: Vec<u32>,
    /// Futures that wait for a free slot.
    waiters: WaitList,
}

impl Slots {
    /// Makes slots for `count` ops.
    pub(super) fn new(count: u32) -> Self {
        Self {
            list: (0..count).map(|_| Slot::new()).collect(),
            free: (0..count).rev().collect(),
            watches: Vec::new(),
            free_watches: Vec::new(),
            waiters: WaitList::default(),
        }
    }

    /// Takes a free slot for an op, without an owner yet.
    pub(super) fn take(&mut self) -> Option<u32> {
        self.free.pop()
    }

    /// Takes a slot for a watch, without an owner yet. `None` if there are as many as can be numbered.
    pub(super) fn take_for_watch(&mut self) -> Option<u32> {
        if let Some(index) = self.free_watches.pop() {
            return Some(index);
        }
        let index = u32::try_from(self.list.len() + self.watches.len()).ok()?;
        self.watches.push(Slot::new());
        Some(index)
    }

    pub(super) fn get(&self, index: u32) -> Option<&Slot> {
        match self.list.get(index as usize) {
            Some(slot) => Some(slot),
            None => self.watch(index),
        }
    }

    pub(super) fn get_mut(&mut self, index: u32) -> Option<&mut Slot> {
        if (index as usize) < self.list.len() {
            return self.list.get_mut(index as usize);
        }
        self.watch_mut(index)
    }

    #[cold]
    fn watch(&self, index: u32) -> Option<&Slot> {
        self.watches.get(index as usize - self.list.len())
    }

    #[cold]
    fn watch_mut(&mut self, index: u32) -> Option<&mut Slot> {
        self.watches.get_mut(index as usize - self.list.len())
    }

    #[cold]
    fn free_watch(&mut self, index: u32) {
        let Some(slot) = self.watch_mut(index) else { return };
        let generation = slot.generation.wrapping_add(1);
        *slot = Slot::new();
        slot.generation = generation;
        self.free_watches.push(index);
    }

    /// Wakes `waker` when a slot becomes free.
    pub(super) fn wait(&mut self, waker: &Waker) {
        self.waiters.register(waker);
    }

    /// Frees a slot and everything it held, and returns its owner.
    #[inline]
    pub(super) fn release(&mut self, index: u32) -> Owner {
        let Some(slot) = self.get_mut(index) else {
            return Owner::Free;
        };
        let owner = std::mem::replace(&mut slot.owner, Owner::Free);
        self.free(index);
        owner
    }

    /// Frees a slot, its owner and everything it held.
    #[inline]
    pub(super) fn free(&mut self, index: u32) {
        let Some(slot) = self.list.get_mut(index as usize) else {
            return self.free_watch(index);
        };
        slot.owner = Owner::Free;
        slot.generation = slot.generation.wrapping_add(1);
        slot.file = None;
        slot.slices.clear();
        slot.named = Named::Memory;
        slot.at_door = false;
        slot.first_slice = 0;
        slot.within_slice = 0;
        slot.done = 0;
        slot.retries = 0;
        if !slot.keep.is_empty() {
            slot.keep.clear();
        }
        self.free.push(index);
        // All of them: a waker on the list may belong to a task that no longer waits, and one of
        // the others would then sleep for ever.
        if !self.waiters.is_empty() {
            self.waiters.wake_all();
        }
    }

    /// Closes the files of commands in flight, and returns their memory, which the kernel may still write. The files
    /// must not stay open for it.
    pub(super) fn abandon(&mut self) -> Vec<Rc<Buffer>> {
        let mut memory = Vec::new();
        for slot in &mut self.list {
            if matches!(slot.owner, Owner::Command(..)) {
                slot.owner = Owner::Free;
                slot.file = None;
                memory.extend(slot.keep.drain(..));
            }
        }
        memory
    }

    /// Returns all slots with an op in flight, with their indices.
    pub(super) fn busy(&self) -> impl Iterator<Item = (u32, &Slot)> {
        (0u32..)
            .zip(self.list.iter().chain(&self.watches))
            .filter(|(_, slot)| !matches!(slot.owner, Owner::Free | Owner::Finished(_)))
    }
}

/// Packs a slot's index and its generation into one number.
pub(super) fn user_data(index: u32, generation: u32) -> u64 {
    u64::from(generation) << 32 | u64::from(index)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::IoSlice;

    fn transfer(kind: Kind, lens: &[usize], memory: &mut [u8]) -> Slot {
        let mut slot = Slot::new();
        slot.kind = kind;
        let mut at = 0;
        for &len in lens {
            slot.slices.push(IoSlice::new(memory[at..].as_mut_ptr(), len));
            at += len;
        }
        slot.left = at as u64;
        slot
    }

    #[test]
    fn short_read_continues_inside_a_slice() {
        let mut memory = [1u8; 64];
        let mut slot = transfer(Kind::Read, &[16, 16, 32], &mut memory);
        assert_eq!(slot.advance(20), Step::Again);
        assert_eq!((slot.offset, slot.left, slot.first_slice), (20, 44, 1));
        assert_eq!(slot.slices[1].len(), 12);
        assert_eq!(slot.advance(44), Step::End(Ok(())));
    }

    #[test]
    fn read_at_end_of_file_is_filled_with_zeros() {
        let mut memory = [1u8; 64];
        let mut slot = transfer(Kind::Read, &[32, 32], &mut memory);
        assert_eq!(slot.advance(40), Step::Again);
        assert_eq!(slot.advance(0), Step::End(Ok(())));
        assert!(memory[..40].iter().all(|&byte| byte == 1));
        assert!(memory[40..].iter().all(|&byte| byte == 0));
    }

    #[test]
    fn write_without_progress_fails() {
        let mut memory = [1u8; 64];
        let mut slot = transfer(Kind::Write { dsync: false }, &[64], &mut memory);
        assert_eq!(
            slot.advance(0),
            Step::End(Err(IoError::Host { errno: libc::EIO }))
        );
    }

    /// The file ended inside a block and has grown since: direct I/O refuses to continue from there.
    #[test]
    fn read_refused_inside_a_block_restarts_at_its_start() {
        let mut memory = vec![1u8; 9000];
        let start = memory.as_ptr();
        let mut slot = transfer(Kind::Read, &[4000, 100, 4092], &mut memory);
        assert_eq!(slot.advance(4096 + 500), Step::Again);
        assert_eq!((slot.offset, slot.left, slot.first_slice), (4596, 3596, 2));
        assert_eq!(slot.advance(-libc::EINVAL), Step::Again);
        assert_eq!((slot.offset, slot.left, slot.first_slice), (4096, 4096, 1));
        assert_eq!(slot.slices[1].len(), 4);
        assert_eq!(slot.slices[1].ptr().addr() - start.addr(), 4096);
        assert_eq!(slot.slices[2].len(), 4092);
        assert_eq!(slot.slices[2].ptr().addr() - start.addr(), 4100);
        assert_eq!(slot.advance(4096), Step::End(Ok(())));
        // Refused where it began, it is refused.
        let mut slot = transfer(Kind::Read, &[4096], &mut memory);
        let refused = Step::End(Err(IoError::Host { errno: libc::EINVAL }));
        assert_eq!(slot.advance(-libc::EINVAL), refused);
    }

    #[test]
    fn op_gives_up_after_repeated_eagain() {
        let mut memory = [1u8; 64];
        let mut slot = transfer(Kind::Read, &[64], &mut memory);
        let ended = (0..1000).find(|_| slot.advance(-libc::EAGAIN) != Step::Again);
        assert!(ended.is_some());
    }
}
