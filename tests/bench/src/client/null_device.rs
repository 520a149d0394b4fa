//! A device that answers every request at once without doing it: what remains is the client.
//!
//! It shows the rate at which the client itself would become the limit, and lets the ring be tested
//! without a server.
#![expect(unsafe_code, reason = "plays the device's side of the rings")]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::thread::JoinHandle;

use ringdisk_driver::{NEXT, crossed};
use virtio_driver::QueueNotifier;

use super::Connection;
use super::memory::SharedMemory;
use super::ring::{Descriptor, QUEUE_SIZE, RequestBuf, Ring, RingMemory, SLOTS_MAX, field};

/// The client's kicks, which a device that never sleeps has no use for.
struct Unheard;

impl QueueNotifier for Unheard {
    fn notify(&self) -> Result<(), io::Error> {
        Ok(())
    }
}

/// A running device. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct NullDevice {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// Offsets of the parts of the one queue in its memory, in bytes.
const AVAILABLE: usize = 0x2000;
const USED: usize = 0x3000;
const REQUESTS: usize = 0x4000;
const DATA: usize = REQUESTS + 0x2000;

const _: () = assert!(QUEUE_SIZE as usize * size_of::<Descriptor>() <= AVAILABLE);
const _: () = assert!(SLOTS_MAX as usize * size_of::<RequestBuf>() <= DATA - REQUESTS);

impl NullDevice {
    /// A device and a connection to it, for requests of `block_bytes` on a disk of `disk_bytes`.
    /// Requests at or past the disk's end fail.
    ///
    /// # Errors
    ///
    /// If memory or descriptors are short.
    pub(crate) fn start(disk_bytes: u64, block_bytes: u32) -> io::Result<(Self, Connection)> {
        let len = DATA + usize::from(SLOTS_MAX) * block_bytes as usize;
        let memory = Arc::new(SharedMemory::new(len)?);
        // SAFETY: creates a descriptor; nothing else is touched.
        let event = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        if event < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and nobody else's.
        let call = unsafe { File::from_raw_fd(event) };
        let stop = Arc::new(AtomicBool::new(false));
        let (device_memory, device_stop, device_call) =
            (Arc::clone(&memory), Arc::clone(&stop), call.try_clone()?);
        let thread =
            std::thread::spawn(move || serve(&device_memory, &device_call, disk_bytes, &device_stop));
        // SAFETY: every part lies inside the memory.
        let at = |offset: usize| unsafe { memory.base().add(offset) };
        let parts = RingMemory {
            descriptors: at(0),
            available: at(AVAILABLE),
            used: at(USED),
            requests: at(REQUESTS).cast(),
            data: at(DATA),
            block_bytes,
        };
        let hold: Arc<dyn Send + Sync> = memory;
        // SAFETY: the parts are large enough by the asserts above and aligned to pages; `hold` keeps
        // them mapped; the device thread plays the other side.
        let ring = unsafe { Ring::new(parts, hold, Box::new(Unheard), call) };
        let connection = Connection {
            disk_bytes,
            block_bytes,
            rings: vec![ring],
        };
        Ok((
            Self {
                stop,
                thread: Some(thread),
            },
            connection,
        ))
    }
}

impl Drop for NullDevice {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A device that panicked has failed its client already.
            let _panicked = thread.join();
        }
    }
}

fn serve(memory: &SharedMemory, call: &File, disk_bytes: u64, stop: &AtomicBool) {
    let base = memory.base();
    // SAFETY: the rings' parts lie inside the memory.
    let part = |offset: usize| unsafe { base.add(offset) };
    let (mut seen, mut used) = (0_u16, 0_u16);
    let event_at = 4 + 8 * usize::from(QUEUE_SIZE);
    let interrupt_at = 4 + 2 * usize::from(QUEUE_SIZE);
    let mut idle = 0_u32;
    while !stop.load(Ordering::Relaxed) {
        // SAFETY: the index of the available ring.
        let available = unsafe { field(part(AVAILABLE), 2) }.load(Ordering::Acquire);
        if available == seen {
            std::hint::spin_loop();
            // Reaches its end after some minutes without requests.
            idle = idle.wrapping_add(1);
            if idle.is_multiple_of(1024) {
                // Perhaps the client wants this CPU.
                std::thread::yield_now();
            }
            continue;
        }
        let old = used;
        while seen != available {
            // SAFETY: an entry of the available ring.
            let entry = unsafe { field(part(AVAILABLE), 4 + 2 * usize::from(seen % QUEUE_SIZE)) };
            let head = entry.load(Ordering::Relaxed);
            answer(memory, head, disk_bytes);
            // SAFETY: an entry of the used ring: 4 bytes of id (and 4 of length), 4-aligned.
            let id =
                unsafe { AtomicU32::from_ptr(part(USED + 4 + 8 * usize::from(used % QUEUE_SIZE)).cast()) };
            id.store(u32::from(head), Ordering::Relaxed);
            seen = seen.wrapping_add(1);
            used = used.wrapping_add(1);
        }
        // SAFETY: the event index and the index of the used ring.
        let (event, index) = unsafe { (field(part(USED), event_at), field(part(USED), 2)) };
        event.store(seen.wrapping_add(0x8000), Ordering::Relaxed);
        index.store(used, Ordering::SeqCst);
        // SAFETY: the client's event index.
        let wanted = unsafe { field(part(AVAILABLE), interrupt_at) }.load(Ordering::SeqCst);
        if crossed(wanted, used, old) {
            let one = 1_u64.to_ne_bytes();
            // SAFETY: writes 8 bytes of ours to an open eventfd; a full counter needs no more.
            unsafe { libc::write(call.as_raw_fd(), one.as_ptr().cast(), 8) };
        }
    }
}

/// Walks the chain of `head` to its last descriptor, the status, and writes it.
fn answer(memory: &SharedMemory, head: u16, disk_bytes: u64) {
    // SAFETY: descriptors lie at the start of the memory, QUEUE_SIZE of them.
    let descriptor = |index: u16| unsafe {
        memory
            .base()
            .cast::<Descriptor>()
            .add(usize::from(index % QUEUE_SIZE))
            .read_volatile()
    };
    let header = descriptor(head);
    // SAFETY: the client points at its own request buffers, inside the mapping; bytes 8..16 of the header
    // are the sector.
    let sector = unsafe { (header.address as *const u64).add(1).read_volatile() };
    let mut last = header;
    while last.flags & NEXT != 0 {
        last = descriptor(last.next);
    }
    let status = u8::from(sector * 512 >= disk_bytes);
    // SAFETY: as above; the status byte is the device's to write.
    unsafe { AtomicU8::from_ptr(last.address as *mut u8) }.store(status, Ordering::Release);
}
