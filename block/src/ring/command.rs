//! Commands to a device's own driver, and transfers with it; they serve a ublk queue.
//!
//! A command may wait for ever, for instance for a request that never comes. So it is not counted among the ring's
//! ops in flight, and its result goes to a [`CommandSink`] that its owner polls.

#![expect(unsafe_code, reason = "the memory of a command is its caller's promise")]

use std::rc::Rc;

use super::driver::{KernelOp, Kind};
use super::slots::Owner;
use super::{CommandSink, FileHandle, Ring, sys};
use crate::buffer::{Buffer, IoSlices};
use crate::error::IoError;

/// Every slot of the ring is taken; some become free when ops end.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("every slot of the ring is taken")]
pub struct NoSlot;

/// A command to a device's driver, for the ring.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct DeviceCommand {
    /// Its number.
    pub code: u32,
    /// Its data.
    pub data: [u8; 16],
    /// The address field of the op; some drivers use it for further data, not an address.
    pub address: u64,
}

/// Direction of a transfer between memory and a device.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Direction {
    /// From the device into the memory.
    Read,
    /// From the memory to the device.
    Write,
}

impl Ring {
    /// Starts a command of `file`'s driver. The driver's answer goes to `sink`, under `tag`. Only a ring of
    /// [`RingKind::IoUringCommands`](super::RingKind::IoUringCommands) has commands; on others the answer is
    /// `EOPNOTSUPP` or `EACCES`, and on the null ring 0 at once.
    ///
    /// # Errors
    ///
    /// [`NoSlot`]; the command was not started then.
    ///
    /// # Safety
    ///
    /// Memory that the command makes the driver read or write must be that of `keep`, or memory that is valid for it
    /// as long as the process lives. `keep` is held until the command has ended, and leaked if the ring is dropped
    /// first. The caller must touch it only when the driver does not.
    pub unsafe fn command(
        &self,
        file: &FileHandle,
        command: DeviceCommand,
        keep: Option<Rc<Buffer>>,
        sink: &Rc<CommandSink>,
        tag: u64,
    ) -> Result<(), NoSlot> {
        let mut slots = self.in_flight.slots.borrow_mut();
        let index = slots.take().ok_or(NoSlot)?;
        let slot = slots.get_mut(index).ok_or(NoSlot)?;
        let DeviceCommand { code, data, address } = command;
        slot.kind = Kind::Command { code, data };
        slot.offset = address;
        slot.file = Some(file.clone());
        if let Some(keep) = keep {
            slot.keep.push(keep);
        }
        slot.owner = Owner::Command(Rc::clone(sink), tag);
        drop(slots);
        self.in_flight.commands.set(self.in_flight.commands.get() + 1);
        self.in_flight.push(index);
        Ok(())
    }

    /// Moves the first `len` bytes of `buffer` to or from `file` at `offset` synchronously. Meant for devices whose
    /// transfers are copies of memory, which io_uring would punt to a kernel thread.
    ///
    /// # Errors
    ///
    /// The device's error, or `EIO` if it moved fewer bytes.
    ///
    /// # Panics
    ///
    /// If the buffer is shorter than `len` bytes.
    pub fn transfer_now(
        &self,
        file: &FileHandle,
        direction: Direction,
        offset: u64,
        buffer: &Buffer,
        len: usize,
    ) -> Result<(), IoError> {
        // A registered buffer is reached only by ops.
        let memory = buffer.memory().ok_or(IoError::Unsupported)?;
        let mut at = 0;
        while at < len {
            let mut slices = IoSlices::new();
            memory.for_each(at, len - at, |slice| slices.push(slice));
            let op = KernelOp {
                kind: match direction {
                    Direction::Read => Kind::Read,
                    Direction::Write => Kind::Write { dsync: false },
                },
                file: file.slot(),
                offset: offset + at as u64,
                len: 0,
                slices: slices.as_ptr(),
                slice_count: slices.len(),
                fixed: None,
                at_door: false,
            };
            // SAFETY: the list is a live local, and its entries name memory of `buffer`, which is borrowed
            // longer than the call. The handle keeps the file open.
            let moved = unsafe { sys::perform(&op) };
            match moved {
                1.. => at += moved.unsigned_abs() as usize,
                0 => return Err(IoError::Host { errno: libc::EIO }),
                _ if moved == -libc::EINTR => {}
                _ => return Err(IoError::from_errno(moved.saturating_neg())),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, Read};
    use std::os::fd::RawFd;

    use super::*;
    use crate::buffer::AlignedBuf;
    use crate::ring::RingKind;
    use crate::ring::driver::{Completion, Driver, FileSlot, QueueFull, Wait};

    fn ask(ring: &Ring, code: u32) -> i32 {
        let file = tempfile::tempfile().expect("a file");
        let file = ring.register(file.into()).expect("a registered file");
        let sink = CommandSink::new();
        let command = DeviceCommand {
            code,
            ..DeviceCommand::default()
        };
        // SAFETY: the command names no memory.
        unsafe { ring.command(&file, command, None, &sink, 9) }.expect("a slot");
        assert_eq!(ring.in_flight(), 0, "nobody waits for a command");
        while sink.is_empty() {
            ring.turn(true).expect("the ring turns");
        }
        let mut results = Vec::new();
        sink.drain_into(&mut results);
        assert_eq!((results.len(), results[0].0), (1, 9));
        results[0].1
    }

    /// A regular file supports no commands; a ring for image I/O refuses them before the file is asked.
    #[test]
    fn ring_passes_commands_only_when_made_for_them() {
        for (kind, errno) in [
            (RingKind::IoUringCommands, libc::EOPNOTSUPP),
            (RingKind::IoUring, libc::EACCES),
            (RingKind::Syscalls, libc::EOPNOTSUPP),
            (RingKind::Null, 0),
        ] {
            let ring = Ring::new(kind, 16).expect("these tests need io_uring");
            assert_eq!(ask(&ring, 1), -errno, "{kind:?}");
        }
    }

    #[test]
    fn transfer_now_moves_bytes_and_fails_when_short() {
        let ring = Ring::new(RingKind::Syscalls, 16).expect("no kernel support is needed");
        let file = ring
            .register(tempfile::tempfile().expect("a file").into())
            .expect("a file");
        let out = Buffer::from(AlignedBuf::from_slice(&[7; 300]));
        ring.transfer_now(&file, Direction::Write, 100, &out, 200)
            .expect("room");
        let back = Buffer::from(AlignedBuf::zeroed(300));
        ring.transfer_now(&file, Direction::Read, 100, &back, 200)
            .expect("it is there");
        let mut bytes = [0; 201];
        back.memory().expect("it is memory").read(0, &mut bytes);
        assert_eq!((bytes[0], bytes[199], bytes[200]), (7, 7, 0));
        let short = ring.transfer_now(&file, Direction::Read, 100, &back, 201);
        assert_eq!(short, Err(IoError::Host { errno: libc::EIO }));
    }

    /// A driver whose commands never end.
    #[derive(Debug)]
    struct Never;

    // SAFETY: no op's memory is touched, and none is completed.
    unsafe impl Driver for Never {
        fn name(&self) -> &'static str {
            "never"
        }
        fn register_file(&mut self, fd: RawFd) -> io::Result<FileSlot> {
            Ok(FileSlot { fd, fixed: None })
        }
        fn unregister_file(&mut self, _file: FileSlot) {}
        unsafe fn push(&mut self, _op: &KernelOp, _user_data: u64) -> Result<(), QueueFull> {
            Ok(())
        }
        fn cancel(&mut self, _user_data: u64) -> Result<(), QueueFull> {
            Ok(())
        }
        fn enter(&mut self, wait: Wait) -> io::Result<()> {
            assert_eq!(wait, Wait::No, "it would wait for ever");
            Ok(())
        }
        fn file_len(&self, _file: FileSlot) -> io::Result<u64> {
            Ok(0)
        }
        fn reap(&mut self, _out: &mut Vec<Completion>) {}
    }

    /// The kernel may still write to the memory, and an open file would block the removal of its device.
    #[test]
    fn ring_drop_during_command_closes_file_and_leaks_memory() {
        let (mut reader, writer) = io::pipe().expect("a pipe");
        let buffer = Rc::new(Buffer::from(AlignedBuf::zeroed(4096)));
        let ring = Ring::with_driver(Box::new(Never), 16, 0);
        let file = ring.register(writer.into()).expect("a file");
        let sink = CommandSink::new();
        let keep = Some(Rc::clone(&buffer));
        // SAFETY: the driver touches no memory.
        unsafe { ring.command(&file, DeviceCommand::default(), keep, &sink, 0) }.expect("a slot");
        drop(file);
        drop(ring);
        assert_eq!(Rc::strong_count(&buffer), 2, "one is left behind");
        assert_eq!(
            reader.read(&mut [0]).expect("a pipe"),
            0,
            "nobody has the other end"
        );
    }
}
