//! A client that takes its memory away costs itself, not this process.
//!
//! A client can shrink the file behind memory that it gave us, and touching what is gone would end the process
//! and every other client's disk with it (SIGBUS). The handler here puts zeros in the place of such a page, and the
//! thread goes on. What the client's queue does then is its own loss. A fault anywhere else ends the process as ever.
//!
//! What must stay true: the handler does nothing that a signal handler may not: it reads atomics and calls
//! mmap(2). A region leaves the table before it is unmapped.

#![expect(unsafe_code, reason = "a signal handler, and the mapping it makes")]

use std::io;
use std::mem;
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Regions that all clients of a process can have together.
const SLOTS: usize = 4096;

/// A region's first address and length in bytes, and its page size. Free while the length is zero; being
/// changed while the page size is.
struct Slot {
    start: AtomicUsize,
    len: AtomicUsize,
    page: AtomicUsize,
}

static TABLE: [Slot; SLOTS] = [const {
    Slot {
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        page: AtomicUsize::new(0),
    }
}; SLOTS];

/// A region whose pages may go away. Drop it before the region is unmapped.
#[derive(Debug)]
pub(super) struct FaultGuard(usize);

impl FaultGuard {
    /// Guards `len` bytes at `start`, in pages of `page` bytes (a power of two). `None` if there are too many
    /// regions already.
    pub(super) fn new(start: usize, len: usize, page: usize) -> Option<Self> {
        let free = |slot: &Slot| {
            slot.len
                .compare_exchange(0, len, Ordering::SeqCst, Ordering::SeqCst)
                .is_ok()
        };
        let index = TABLE.iter().position(free)?;
        TABLE[index].start.store(start, Ordering::SeqCst);
        TABLE[index].page.store(page, Ordering::SeqCst);
        Some(Self(index))
    }
}

impl Drop for FaultGuard {
    fn drop(&mut self) {
        let slot = &TABLE[self.0];
        slot.page.store(0, Ordering::SeqCst);
        slot.len.store(0, Ordering::SeqCst);
    }
}

/// Has faults handled from now on. Call it before threads lose the right to install handlers.
pub(super) fn prepare() {
    static HANDLER: Once = Once::new();
    HANDLER.call_once(|| {
        if let Err(error) = handle() {
            tracing::warn!(%error, "a client that shrinks its memory will end this process");
        }
    });
}

/// Installs the handler.
fn handle() -> io::Result<()> {
    // SAFETY: an all-zero `sigaction` is a valid value of that plain C struct.
    let mut action: libc::sigaction = unsafe { mem::zeroed() };
    action.sa_sigaction = on_fault as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: `action` is a live, initialised value; the handler has the signature that SA_SIGINFO asks for and is
    // async-signal-safe.
    if unsafe { libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// The first address and the size of what lies in one page with `address`, if it is a client's.
fn guarded(address: usize) -> Option<(usize, usize)> {
    TABLE.iter().find_map(|slot| {
        let page = slot.page.load(Ordering::SeqCst);
        let (start, len) = (slot.start.load(Ordering::SeqCst), slot.len.load(Ordering::SeqCst));
        let inside = address.checked_sub(start).is_some_and(|offset| offset < len);
        (page != 0 && inside).then(|| {
            let first = (address & !(page - 1)).max(start);
            let end = ((address & !(page - 1)) + page).min(start + len);
            (first, end - first)
        })
    })
}

extern "C" fn on_fault(signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid `siginfo_t` to a handler with SA_SIGINFO, and for SIGBUS it has an address.
    let address = unsafe { (*info).si_addr() } as usize;
    if let Some((start, bytes)) = guarded(address) {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: replaces one page of a region that is mapped from a client's file for as long as its guard is in the
        // table. Guest memory is reached through raw pointers only, and may change at any time; zeros are a
        // change like another.
        let mapped = unsafe { libc::mmap(start as *mut libc::c_void, bytes, access, flags, -1, 0) };
        if mapped != libc::MAP_FAILED {
            return;
        }
    }
    // SAFETY: the default action; the access that faulted is tried again and ends the process.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
}
