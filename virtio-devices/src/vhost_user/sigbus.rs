//! SIGBUS handler: a client that truncates its memory harms itself, not this process.
//!
//! A client can truncate the file behind the memory that it shares, and an access past its end would raise SIGBUS and end
//! the process with every other client's disk. The handler maps zeros in place of such a page, and the thread
//! continues. The same holds for memory that the host cannot provide (an uncorrectable error, an exhausted pool of huge
//! pages). The region is marked as lost: from then on a queue that uses it answers no request with success, because the
//! requests may have carried those zeros ([`LossWatch`]). A fault anywhere else ends the process.
//!
//! Invariants: the handler is async-signal-safe: it reads atomics and calls mmap(2). A region is removed from the table
//! before it is unmapped. The table grows with the number of regions that clients have at a time, which each device
//! bounds, and never shrinks.

#![expect(unsafe_code, reason = "a signal handler, and the mapping it makes")]

use std::io;
use std::mem;
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

/// Regions in one part of the table.
const SLOTS: usize = 512;

/// A region's first address and length in bytes, its page size, and whether a page of it was replaced. Free while the
/// length is zero; being changed while the page size is.
#[derive(Debug)]
struct Slot {
    start: AtomicUsize,
    len: AtomicUsize,
    page: AtomicUsize,
    lost: AtomicBool,
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
                    lost: AtomicBool::new(false),
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
/// The number of pages replaced so far, in all regions.
static LOSSES: AtomicUsize = AtomicUsize::new(0);

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
        slot.lost.store(false, Ordering::SeqCst);
        slot.page.store(page, Ordering::SeqCst);
        Self(slot)
    }
}

/// Tells a queue of lost pages in the regions it uses, whose guards outlive it.
#[derive(Debug)]
pub(super) struct LossWatch {
    slots: Vec<&'static Slot>,
    /// As many losses were looked at.
    seen: AtomicUsize,
}

impl LossWatch {
    pub(super) fn new<'a>(guards: impl Iterator<Item = &'a FaultGuard>) -> Self {
        Self {
            slots: guards.map(|guard| guard.0).collect(),
            seen: AtomicUsize::new(0),
        }
    }

    /// Returns true if a page of the regions was lost, and any page since the last call.
    #[inline]
    pub(super) fn is_lost(&self) -> bool {
        let losses = LOSSES.load(Ordering::SeqCst);
        if losses == self.seen.load(Ordering::Relaxed) {
            return false;
        }
        self.seen.store(losses, Ordering::Relaxed);
        self.slots.iter().any(|slot| slot.lost.load(Ordering::SeqCst))
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
            tracing::warn!(%error, "cannot handle SIGBUS: a client that truncates its memory will end this process");
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

/// The first address and the size of what lies in one page with `address`, and its region, if it is a client's.
fn guarded(address: usize) -> Option<(usize, usize, &'static Slot)> {
    parts().flat_map(|part| &part.slots).find_map(|slot| {
        let page = slot.page.load(Ordering::SeqCst);
        let (start, len) = (slot.start.load(Ordering::SeqCst), slot.len.load(Ordering::SeqCst));
        let inside = address.checked_sub(start).is_some_and(|offset| offset < len);
        (page != 0 && inside).then(|| {
            let first = (address & !(page - 1)).max(start);
            let end = ((address & !(page - 1)) + page).min(start + len);
            (first, end - first, slot)
        })
    })
}

extern "C" fn on_fault(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid `siginfo_t` to a handler with SA_SIGINFO, and for SIGBUS it has an address.
    let address = unsafe { (*info).si_addr() } as usize;
    if let Some((start, bytes, slot)) = guarded(address) {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // Before the zeros can be read, and in this order: whoever sees the count finds the region.
        slot.lost.store(true, Ordering::SeqCst);
        LOSSES.fetch_add(1, Ordering::SeqCst);
        // SAFETY: replaces one page of a region that is mapped from a client's file for as long as its guard is in the
        // table. Guest memory is reached through raw pointers only, and may change at any time; zeros are a
        // change like another.
        let mapped = unsafe { libc::mmap(start as *mut libc::c_void, bytes, access, flags, -1, 0) };
        if mapped != libc::MAP_FAILED {
            return;
        }
    }
    // The access that faulted is tried again on return. While its signal is blocked the kernel ends the process
    // (SIGBUS, with a core), and needs no system call for it: the sandbox has none that changes handlers.
    let context = context.cast::<libc::ucontext_t>();
    // SAFETY: the kernel passes a valid `ucontext_t` to a handler with SA_SIGINFO, which nobody else uses now;
    // sigaddset(3) sets a bit in it, and the signal's number is valid.
    unsafe { libc::sigaddset(&raw mut (*context).uc_sigmask, signal) };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One client must not use up the slots that another one's memory needs.
    #[test]
    fn guard_table_grows_and_finds_every_region() {
        // Addresses that nothing has mapped: they are looked up, not touched.
        let base = 1usize << 60;
        let guards: Vec<FaultGuard> = (0..3 * SLOTS)
            .map(|index| FaultGuard::new(base + index * 0x4000, 0x3000, 0x1000))
            .collect();
        for index in 0..guards.len() {
            let start = base + index * 0x4000;
            let page = |address| guarded(address).map(|(start, bytes, _)| (start, bytes));
            assert_eq!(page(start + 0x2345), Some((start + 0x2000, 0x1000)), "{index}");
            assert_eq!(page(start + 0x3000), None, "{index}");
        }
        drop(guards);
        assert!(guarded(base).is_none());
    }

    /// The environment variable by which a test starts this program again, to have it end.
    const CHILD: &str = "RINGDISK_TEST_FAULT_CHILD";

    /// Forbids this thread to change signal handlers, as the sandbox of the server does.
    fn forbid_handlers() {
        let statement = |code: u32, k: u32| libc::sock_filter {
            code: code as u16,
            jt: 0,
            jf: 0,
            k,
        };
        let mut program = [
            statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
            libc::sock_filter {
                jf: 1,
                ..statement(
                    libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
                    libc::SYS_rt_sigaction as u32,
                )
            },
            statement(
                libc::BPF_RET | libc::BPF_K,
                libc::SECCOMP_RET_ERRNO | libc::EPERM as u32,
            ),
            statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
        ];
        let filter = libc::sock_fprog {
            len: program.len() as u16,
            filter: program.as_mut_ptr(),
        };
        // SAFETY: neither call of prctl(2) keeps the memory it is passed, which lives across it.
        unsafe {
            assert_eq!(libc::prctl(libc::PR_SET_DUMPABLE, 0), 0);
            assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
            let mode = libc::SECCOMP_MODE_FILTER;
            assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const filter), 0);
        }
    }

    /// Touches memory that is no client's and whose file has been cut.
    fn fault_outside() {
        prepare();
        forbid_handlers();
        let file = tempfile::tempfile().expect("a file");
        file.set_len(4096).expect("its length");
        // SAFETY: a new mapping at an address of the kernel's choice.
        let memory = unsafe {
            let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
            libc::mmap(ptr::null_mut(), 4096, libc::PROT_READ, libc::MAP_SHARED, fd, 0)
        };
        assert_ne!(memory, libc::MAP_FAILED);
        file.set_len(0).expect("a shorter file");
        // SAFETY: the page is mapped; that nothing lies behind it is what is tested, and ends the process.
        unsafe { ptr::read_volatile(memory.cast::<u8>()) };
    }

    #[test]
    fn fault_outside_client_memory_ends_a_sandboxed_process() {
        use std::os::unix::process::ExitStatusExt;
        use std::process::{Command, Stdio};
        use std::time::{Duration, Instant};

        if std::env::var_os(CHILD).is_some() {
            return fault_outside();
        }
        let name = "vhost_user::sigbus::tests::fault_outside_client_memory_ends_a_sandboxed_process";
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", name])
            .env(CHILD, "1")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("run this program");
        let deadline = Instant::now() + Duration::from_secs(20);
        let status = loop {
            if let Some(status) = child.try_wait().expect("a child") {
                break status;
            }
            if Instant::now() > deadline {
                child.kill().expect("kill");
                child.wait().expect("a child");
                panic!("it faults for ever");
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        assert_eq!(status.signal(), Some(libc::SIGBUS), "{status}");
    }
}
