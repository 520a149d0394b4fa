//! The in-flight slots: what an op holds from submission until its completion is reaped.
//!
//! Slots are made once per ring and never move, because the kernel may read a slot's slice list while
//! the op is being started. `user_data` is a slot's index and its generation, so that a stale completion
//! is recognised. A slot's life: `Free → InFlight → (Finished →) Free`.

use std::rc::Rc;
use std::task::Waker;

use smallvec::SmallVec;

use super::EventToken;
use super::command::CommandSink;
use super::driver::{FixedOp, KernelOp, Kind};
use crate::buffer::{BUFFER_ALIGN, Buffer, FixedRange, IoSlice, IoSlices, Memory, append_zeros};
use crate::canary::{Rule, broken};
use crate::door::Door;
use crate::error::IoError;
use crate::handle::FileHandle;
use crate::request::Request;
use crate::sync::WaitList;

/// Who gets an op's result, and with it what the op owned.
#[derive(Debug)]
pub(super) enum Owner {
    /// Nobody: the slot is free.
    Free,
    /// The request is answered as it is.
    Request(Request),
    /// A future, to be woken.
    Waiting(Option<Waker>),
    /// A future, which has not fetched the result yet.
    Finished(Result<(), IoError>),
    /// Its future was dropped; the memory goes when the op has ended.
    Orphan,
    /// A watch, which reports under this token.
    Watch(EventToken),
    /// A command, whose result goes to this sink under this tag.
    Command(Rc<CommandSink>, u64),
}

/// What the stretches of an op are.
#[derive(Debug, Default)]
pub(super) enum Named {
    /// Addresses of this process.
    #[default]
    Memory,
    /// One stretch of a registered buffer, by what the kernel calls its bytes.
    Fixed {
        index: u16,
        door: Door,
        /// What to add to that for the position at the door.
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
    /// Where the op continues in the file, in bytes.
    pub(super) offset: u64,
    /// The length of an allocation, or the bytes of a transfer still to do.
    pub(super) left: u64,
    pub(super) slices: IoSlices,
    pub(super) named: Named,
    /// The file is the door of registered buffers: a read finds no end of it past which there are zeros.
    pub(super) at_door: bool,
    /// The first slice that is not done; its start and length are what is left of it.
    pub(super) first_slice: usize,
    /// How much of that slice is done.
    within_slice: usize,
    /// How many bytes are done.
    done: u64,
    pub(super) retries: u8,
    /// Keeps the memory of `slices`, where the owner does not.
    pub(super) keep: SmallVec<[Rc<Buffer>; 2]>,
}

/// How often an op that the kernel asks to repeat is repeated.
const RETRIES_MAX: u8 = 100;

/// What follows from a completion.
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

    /// Adds bytes of this process's memory to what the op reads into or writes from.
    #[inline]
    pub(super) fn name_memory(&mut self, memory: Memory<'_>, offset: usize, len: usize) {
        memory.for_each(offset, len, |slice| self.slices.push(slice));
    }

    /// Lets the op read into, or write from, `len` bytes of a registered buffer and nothing else.
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

    /// The op as a driver takes it; `None` if the slot has no file, which no started op lacks.
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

    /// What the kernel calls the first byte that is still to do of a registered buffer.
    fn address(&self) -> u64 {
        self.slices
            .get(self.first_slice)
            .map_or(0, |slice| slice.ptr().addr() as u64)
    }

    /// Takes one completion into account. A short transfer goes on where it stopped; a read at the end
    /// of the file is completed with zeros; a write that makes no progress fails.
    pub(super) fn advance(&mut self, result: i32) -> Step {
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
        if self.left == 0 || (self.kind == Kind::Read && broken(Rule::ShortReadIsSuccess)) {
            return Step::End(Ok(()));
        }
        self.offset += moved;
        self.done += moved;
        let mut skip = usize::try_from(moved).unwrap_or(usize::MAX);
        while let Some(slice) = self.slices.get_mut(self.first_slice) {
            if skip < slice.len() {
                if broken(Rule::RegisteredStaysBehind) && matches!(self.named, Named::Fixed { .. }) {
                    *slice = IoSlice::new(slice.ptr(), slice.len() - skip);
                    break;
                }
                *slice = slice.skip(skip);
                self.within_slice += skip;
                break;
            }
            skip -= slice.len();
            // Whole again, so that `step_back` finds all of it.
            *slice = slice.unskip(self.within_slice);
            self.within_slice = 0;
            self.first_slice += 1;
        }
        Step::Again
    }

    /// Lets a read that has come to the end of its file end with zeros. Where these go to a registered buffer, that
    /// is I/O of its own: the op goes on as a write at the door.
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
    /// where the file does; if the file has grown meanwhile, going on from there is refused. `false` if
    /// there is nowhere to go back to.
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

/// Slots that only watches take, so that a full ring can still be woken.
const WATCH_SLOTS: u32 = 64;

/// All slots of a ring.
#[derive(Debug)]
pub(super) struct Slots {
    list: Vec<Slot>,
    free: Vec<u32>,
    /// Futures that wait for a free slot.
    waiters: WaitList,
}

impl Slots {
    /// Slots for `count` ops, and some for watches.
    pub(super) fn new(count: u32) -> Self {
        let count = count + WATCH_SLOTS;
        Self {
            list: (0..count).map(|_| Slot::new()).collect(),
            free: (0..count).rev().collect(),
            waiters: WaitList::default(),
        }
    }

    pub(super) fn has_free(&self) -> bool {
        self.free.len() > WATCH_SLOTS as usize
    }

    /// Takes a free slot for an op, without an owner yet.
    pub(super) fn take(&mut self) -> Option<u32> {
        if self.has_free() { self.free.pop() } else { None }
    }

    /// Takes a free slot for a watch: those ops leave alone are there for it.
    pub(super) fn take_for_watch(&mut self) -> Option<u32> {
        self.free.pop()
    }

    pub(super) fn get(&self, index: u32) -> Option<&Slot> {
        self.list.get(index as usize)
    }

    pub(super) fn get_mut(&mut self, index: u32) -> Option<&mut Slot> {
        self.list.get_mut(index as usize)
    }

    /// Wakes `waker` when a slot becomes free.
    pub(super) fn wait(&mut self, waker: &Waker) {
        self.waiters.register(waker);
    }

    /// Frees a slot and whatever it held.
    pub(super) fn release(&mut self, index: u32) -> Owner {
        let Some(slot) = self.list.get_mut(index as usize) else {
            return Owner::Free;
        };
        let owner = std::mem::replace(&mut slot.owner, Owner::Free);
        slot.generation = slot.generation.wrapping_add(1);
        slot.file = None;
        slot.slices.clear();
        slot.named = Named::Memory;
        slot.at_door = false;
        slot.first_slice = 0;
        slot.within_slice = 0;
        slot.done = 0;
        slot.retries = 0;
        slot.keep.clear();
        self.free.push(index);
        // All of them: a waker on the list may belong to a task that has what it wanted, and one of
        // the others would then sleep for ever.
        self.waiters.wake_all();
        owner
    }

    /// Frees what commands in flight hold, but for their memory, which the kernel may still write; that is given back.
    /// Their files must not stay open for it.
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

    /// The indices of all slots that are not free.
    pub(super) fn busy(&self) -> impl Iterator<Item = (u32, &Slot)> {
        (0u32..)
            .zip(&self.list)
            .filter(|(_, slot)| !matches!(slot.owner, Owner::Free | Owner::Finished(_)))
    }
}

/// A slot and its generation as one number.
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
    fn a_short_read_continues_inside_a_slice() {
        let mut memory = [1u8; 64];
        let mut slot = transfer(Kind::Read, &[16, 16, 32], &mut memory);
        assert_eq!(slot.advance(20), Step::Again);
        assert_eq!((slot.offset, slot.left, slot.first_slice), (20, 44, 1));
        assert_eq!(slot.slices[1].len(), 12);
        assert_eq!(slot.advance(44), Step::End(Ok(())));
    }

    #[test]
    fn a_read_at_end_of_file_is_completed_with_zeros() {
        let mut memory = [1u8; 64];
        let mut slot = transfer(Kind::Read, &[32, 32], &mut memory);
        assert_eq!(slot.advance(40), Step::Again);
        assert_eq!(slot.advance(0), Step::End(Ok(())));
        assert!(memory[..40].iter().all(|&byte| byte == 1));
        assert!(memory[40..].iter().all(|&byte| byte == 0));
    }

    #[test]
    fn a_write_that_makes_no_progress_fails() {
        let mut memory = [1u8; 64];
        let mut slot = transfer(Kind::Write { dsync: false }, &[64], &mut memory);
        assert_eq!(
            slot.advance(0),
            Step::End(Err(IoError::Host { errno: libc::EIO }))
        );
    }

    /// The end of the file was in the middle of a block, and is further on now: from there direct I/O does
    /// not go on.
    #[test]
    fn a_read_that_may_not_go_on_inside_a_block_goes_back_to_its_start() {
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
    fn an_op_is_not_repeated_for_ever() {
        let mut memory = [1u8; 64];
        let mut slot = transfer(Kind::Read, &[64], &mut memory);
        let ended = (0..1000).find(|_| slot.advance(-libc::EAGAIN) != Step::Again);
        assert!(ended.is_some());
    }
}
