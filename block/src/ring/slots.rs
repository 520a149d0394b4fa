//! The in-flight slots: what an op holds from submission until its completion is reaped.
//!
//! Slots are made once per ring and never move, because the kernel may read a slot's slice list while
//! the op is being started. `user_data` is a slot's index and its generation, so that a stale completion
//! is recognised. A slot's life: `Free → InFlight → (Finished →) Free`.

use std::rc::Rc;
use std::task::Waker;

use smallvec::SmallVec;

use super::driver::{KernelOp, Kind};
use super::{EventToken, FileHandle};
use crate::buffer::{Buffer, IoSlices};
use crate::canary::{Rule, broken};
use crate::error::IoError;
use crate::request::Request;

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
    /// The first slice that is not done; its start and length are what is left of it.
    pub(super) first_slice: usize,
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
            first_slice: 0,
            retries: 0,
            keep: SmallVec::new(),
        }
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
        })
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
            if self.kind == Kind::Read {
                crate::buffer::zero_slices(&self.slices[self.first_slice..]);
                return Step::End(Ok(()));
            }
            return Step::End(Err(IoError::Host { errno: libc::EIO }));
        }
        self.left -= moved;
        if self.left == 0 || (self.kind == Kind::Read && broken(Rule::ShortReadIsSuccess)) {
            return Step::End(Ok(()));
        }
        self.offset += moved;
        let mut skip = usize::try_from(moved).unwrap_or(usize::MAX);
        while let Some(slice) = self.slices.get_mut(self.first_slice) {
            if skip < slice.len() {
                *slice = slice.skip(skip);
                break;
            }
            skip -= slice.len();
            self.first_slice += 1;
        }
        Step::Again
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
    waiters: Vec<Waker>,
}

impl Slots {
    /// Slots for `count` ops, and some for watches.
    pub(super) fn new(count: u32) -> Self {
        let count = count + WATCH_SLOTS;
        Self {
            list: (0..count).map(|_| Slot::new()).collect(),
            free: (0..count).rev().collect(),
            waiters: Vec::new(),
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
        // One task often waits with several ops.
        if !self.waiters.last().is_some_and(|last| last.will_wake(waker)) {
            self.waiters.push(waker.clone());
        }
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
        slot.first_slice = 0;
        slot.retries = 0;
        slot.keep.clear();
        self.free.push(index);
        // All of them: a waker on the list may belong to a task that has what it wanted, and one of
        // the others would then sleep for ever.
        for waker in self.waiters.drain(..) {
            waker.wake();
        }
        owner
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

    #[test]
    fn an_op_is_not_repeated_for_ever() {
        let mut memory = [1u8; 64];
        let mut slot = transfer(Kind::Read, &[64], &mut memory);
        let ended = (0..1000).find(|_| slot.advance(-libc::EAGAIN) != Step::Again);
        assert!(ended.is_some());
    }
}
