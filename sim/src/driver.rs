//! Driver of one worker's ring on a simulated world.

#![expect(unsafe_code, reason = "implements Driver::push")]

use std::cell::RefCell;
use std::io;
use std::os::fd::RawFd;
use std::rc::Rc;

use super::world::World;
use block::ring::driver::{Completion, Driver, FileSlot, KernelOp, Kind, QueueFull, Wait};

/// The driver of one ring.
#[derive(Debug)]
pub(super) struct SimDriver {
    world: Rc<RefCell<World>>,
    ring: u32,
    /// Watches, whose descriptors never become readable: no worker sleeps in a simulation.
    watches: Vec<u64>,
    /// Completions of ops that did not reach the world.
    ended: Vec<Completion>,
}

impl SimDriver {
    pub(super) fn new(world: Rc<RefCell<World>>) -> Self {
        let ring = world.borrow_mut().add_ring();
        Self {
            world,
            ring,
            watches: Vec::new(),
            ended: Vec::new(),
        }
    }

    pub(super) fn ring(&self) -> u32 {
        self.ring
    }

    fn end(&mut self, user_data: u64, result: i32) {
        self.ended.push(Completion {
            user_data,
            result,
            more: false,
        });
    }
}

// SAFETY: the world completes an op once, after its last effect (`World::complete`); watches and commands name no memory.
unsafe impl Driver for SimDriver {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn register_file(&mut self, fd: RawFd) -> io::Result<FileSlot> {
        // An eventfd is not a file of the world, and only watched.
        let fixed = self.world.borrow().find(fd)?;
        Ok(FileSlot { fd, fixed })
    }

    fn unregister_file(&mut self, _file: FileSlot) {}

    unsafe fn push(&mut self, op: &KernelOp, user_data: u64) -> Result<(), QueueFull> {
        if op.kind == Kind::Watch {
            self.watches.push(user_data);
            return Ok(());
        }
        if matches!(op.kind, Kind::Command { .. }) {
            self.end(user_data, -libc::EOPNOTSUPP);
            return Ok(());
        }
        // SAFETY: the caller's contract is the same: list and memory stay until the completion is reaped,
        // which `World` does not hand out twice.
        unsafe { self.world.borrow_mut().submit(self.ring, op, user_data) };
        Ok(())
    }

    fn cancel(&mut self, user_data: u64) -> Result<(), QueueFull> {
        if let Some(index) = self.watches.iter().position(|&watch| watch == user_data) {
            self.watches.swap_remove(index);
            self.end(user_data, -libc::ECANCELED);
        } else {
            self.world.borrow_mut().cancel(self.ring, user_data);
        }
        Ok(())
    }

    fn enter(&mut self, wait: Wait) -> io::Result<()> {
        let mut world = self.world.borrow_mut();
        while wait != Wait::No && self.ended.is_empty() && !world.has_completion(self.ring) {
            if !world.step() {
                return Err(io::Error::other(
                    "nothing is in flight in the simulated world: a worker would sleep for ever",
                ));
            }
        }
        Ok(())
    }

    fn file_len(&self, file: FileSlot) -> io::Result<u64> {
        match file.fixed {
            Some(index) => Ok(self.world.borrow_mut().contents(index as usize).now.len()),
            None => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    fn reap(&mut self, out: &mut Vec<Completion>) {
        out.append(&mut self.ended);
        self.world.borrow_mut().reap(self.ring, out);
    }
}
