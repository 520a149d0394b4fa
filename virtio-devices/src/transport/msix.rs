//! MSI-X: a table of messages in the function's window, and masks. PCI 3.0, 6.8.2.
//!
//! An interrupt is connected exactly while it is not masked. A signal during the mask stays in its eventfd,
//! which the pending bits show.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use super::{Interrupt, Machine, MsiMessage};
use block::report::LogLimit;

/// The bytes of a table entry: address, data, control.
pub(super) const ENTRY_BYTES: u64 = 16;
/// "No interrupt", where a queue's vector is asked for.
pub(super) const NO_VECTOR: u16 = 0xFFFF;
const MASKED: u32 = 1;
const CONTROL_ENABLED: u16 = 1 << 15;
const CONTROL_FUNCTION_MASKED: u16 = 1 << 14;

#[derive(Clone, Copy, Debug)]
struct Entry {
    message: MsiMessage,
    control: u32,
    connected: Option<MsiMessage>,
}

/// The interrupts of a function, to be signalled from any thread.
pub(super) type Vectors = Arc<[Box<dyn Interrupt>]>;

/// The table.
#[derive(Debug)]
pub(super) struct Msix {
    entries: Vec<Entry>,
    vectors: Vectors,
    control: u16,
    log_limit: Arc<LogLimit>,
}

impl Msix {
    /// A table of `count` interrupts of `machine`, all masked.
    pub(super) fn new(machine: &dyn Machine, count: u16, log_limit: &Arc<LogLimit>) -> io::Result<Self> {
        let vectors: Vec<_> = (0..count)
            .map(|_| machine.interrupt())
            .collect::<Result<_, _>>()?;
        let entry = Entry {
            message: MsiMessage::default(),
            control: MASKED,
            connected: None,
        };
        Ok(Self {
            entries: vec![entry; vectors.len()],
            vectors: vectors.into(),
            control: 0,
            log_limit: Arc::clone(log_limit),
        })
    }

    pub(super) fn vectors(&self) -> &Vectors {
        &self.vectors
    }

    /// The capability's control register, as the guest has written it.
    pub(super) fn set_control(&mut self, control: u16) {
        self.control = control;
        (0..self.entries.len()).for_each(|index| self.update(index));
    }

    /// Connects or disconnects an interrupt as its masks say.
    fn update(&mut self, index: usize) {
        let (Some(entry), Some(vector)) = (self.entries.get_mut(index), self.vectors.get(index)) else {
            return;
        };
        let enabled = self.control & (CONTROL_ENABLED | CONTROL_FUNCTION_MASKED) == CONTROL_ENABLED;
        let wanted = (enabled && entry.control & MASKED == 0).then_some(entry.message);
        if wanted == entry.connected {
            return;
        }
        let changed = match wanted {
            Some(message) => vector.connect(message),
            None => vector.disconnect(),
        };
        match changed {
            Ok(()) => entry.connected = wanted,
            Err(error) => {
                if let Some(held_back) = self.log_limit.admit() {
                    tracing::error!(index, %error, held_back, "cannot set up an interrupt");
                }
            }
        }
    }

    /// Reads the table at `offset`.
    pub(super) fn read_table(&self, offset: u64, data: &mut [u8]) {
        let entry = self.entries.get((offset / ENTRY_BYTES) as usize);
        let mut bytes = [0; ENTRY_BYTES as usize];
        if let Some(entry) = entry {
            bytes[..8].copy_from_slice(&entry.message.address.to_le_bytes());
            bytes[8..12].copy_from_slice(&entry.message.data.to_le_bytes());
            bytes[12..].copy_from_slice(&entry.control.to_le_bytes());
        }
        let within = (offset % ENTRY_BYTES) as usize;
        for (byte, value) in data.iter_mut().zip(bytes.iter().skip(within)) {
            *byte = *value;
        }
    }

    /// Writes the table at `offset`: 4 or 8 bytes.
    pub(super) fn write_table(&mut self, offset: u64, data: &[u8]) {
        let index = (offset / ENTRY_BYTES) as usize;
        let Some(entry) = self.entries.get_mut(index) else {
            return;
        };
        for (part, word) in data.as_chunks::<4>().0.iter().enumerate() {
            let value = u32::from_le_bytes(*word);
            let address = &mut entry.message.address;
            match offset % ENTRY_BYTES / 4 + part as u64 {
                0 => *address = *address & !0xFFFF_FFFF | u64::from(value),
                1 => *address = *address & 0xFFFF_FFFF | u64::from(value) << 32,
                2 => entry.message.data = value,
                3 => entry.control = value,
                _ => {}
            }
        }
        self.update(index);
    }

    /// Reads the pending bits at `offset`.
    pub(super) fn read_pending(&self, offset: u64, data: &mut [u8]) {
        for (at, byte) in (offset as usize..).zip(data) {
            *byte = 0;
            for bit in 0..8 {
                let index = at * 8 + bit;
                if let (Some(entry), Some(vector)) = (self.entries.get(index), self.vectors.get(index))
                    && entry.connected.is_none()
                    && is_signalled(vector.event())
                {
                    *byte |= 1 << bit;
                }
            }
        }
    }

    /// All masked and none connected, as after a reset of the function.
    pub(super) fn disconnect(&mut self) {
        self.set_control(0);
    }
}

/// Returns true if an eventfd holds a signal, which stays there.
pub(super) fn is_signalled(event: BorrowedFd<'_>) -> bool {
    let mut poll = [rustix::event::PollFd::from_borrowed_fd(
        event,
        rustix::event::PollFlags::IN,
    )];
    let zero = rustix::event::Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    debug_assert!(event.as_raw_fd() >= 0);
    matches!(rustix::event::poll(&mut poll, Some(&zero)), Ok(1))
}
