//! A client that takes its memory away costs itself, not this process.
//!
//! A client can shrink the file behind memory that it gave us, and touching what is gone would end the process
//! and every other client's disk with it (SIGBUS). The handler here puts zeros in the place of such a page, and the
//! thread goes on. What the client's queue does then is its own loss. A fault anywhere else ends the process as ever.
//!
//! What must stay true: the handler does nothing that a signal handler may not: it reads atomics and calls
//! mmap(2). A region leaves the table before it is unmapped. The table grows with the regions that clients have at one
//! time, whose number each device bounds, and never shrinks.

#![expect(unsafe_code, reason = "a signal handler, and the mapping it makes")]

use std::io;
use std::mem;
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

/// Regions in one part of the table.
const SLOTS: usize = 512;

/// A region's first address and length in bytes, and its page size. Free while the length is zero; being
/// changed while the page size is.
#[derive(Debug)]
struct Slot {
    start: AtomicUsize,
    len: AtomicUsize,
    page: AtomicUsize,
}

/// A part of the table, and where the next one is.
struct Part {
    slots: [Slot; SLOTS],
    next: AtomicPtr<Part>,
}

impl Part {
    const fn new() -> Self {
        Self {
            slots: [const {
                Slot {
                    start: AtomicUsize::new(0),
                    len: AtomicUsize::new(0),
                    page: AtomicUsize::new(0),
                }
            }; SLOTS],
            next: AtomicPtr::new(ptr::null_mut()),
        }
    }

    fn next(&self) -> Option<&'static Self> {
        // SAFETY: the pointer is null or that of a box that `extend` leaked, so it stays valid, and nothing changes it
        // but through atomics.
        unsafe { self.next.load(Ordering::SeqCst).as_ref() }
    }

    /// The part behind this one, which is the last or was a moment ago.
    fn extend(&self) -> &'static Self {
        let new = Box::into_raw(Box::new(Self::new()));
        let none = ptr::null_mut();
        match self
            .next
            .compare_exchange(none, new, Ordering::SeqCst, Ordering::SeqCst)
        {
            // SAFETY: it was just leaked, for good.
            Ok(_) => unsafe { &*new },
            Err(other) => {
                // SAFETY: `new` came from a box and was given to nobody.
                drop(unsafe { Box::from_raw(new) });
                // SAFETY: as in `next`; what is there is not null, or the exchange would have been made.
                unsafe { &*other }
            }
        }
    }
}

static TABLE: Part = Part::new();

/// All parts there are.
fn parts() -> impl Iterator<Item = &'static Part> {
    std::iter::successors(Some(&TABLE), |part| part.next())
}

/// A region whose pages may go away. Drop it before the region is unmapped.
#[derive(Debug)]
pub(super) struct FaultGuard(&'static Slot);

impl FaultGuard {
    /// Guards `len` bytes at `start`, in pages of `page` bytes (a power of two).
    pub(super) fn new(start: usize, len: usize, page: usize) -> Self {
        let free = |slot: &&Slot| {
            slot.len
                .compare_exchange(0, len, Ordering::SeqCst, Ordering::SeqCst)
                .is_ok()
        };
        let mut part = &TABLE;
        let slot = loop {
            if let Some(slot) = part.slots.iter().find(free) {
                break slot;
            }
            part = part.next().unwrap_or_else(|| part.extend());
        };
        slot.start.store(start, Ordering::SeqCst);
        slot.page.store(page, Ordering::SeqCst);
        Self(slot)
    }
}

impl Drop for FaultGuard {
    fn drop(&mut self) {
        let slot = self.0;
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
    parts().flat_map(|part| &part.slots).find_map(|slot| {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// One client must not use up what another one's memory needs.
    #[test]
    fn the_table_grows_and_finds_every_region() {
        // Addresses that nothing has mapped: they are looked up, not touched.
        let base = 1usize << 60;
        let guards: Vec<FaultGuard> = (0..3 * SLOTS)
            .map(|index| FaultGuard::new(base + index * 0x4000, 0x3000, 0x1000))
            .collect();
        for index in 0..guards.len() {
            let start = base + index * 0x4000;
            assert_eq!(guarded(start + 0x2345), Some((start + 0x2000, 0x1000)), "{index}");
            assert_eq!(guarded(start + 0x3000), None, "{index}");
        }
        drop(guards);
        assert_eq!(guarded(base), None);
    }
}
