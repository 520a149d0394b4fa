//! Image locks: a second writer of an image is refused, whichever program it is.
//!
//! QEMU's tools mark an open image with locks on single bytes of the file. Bytes 100 and up state
//! what an opener *does*, bytes 200 and up what it *does not let others do*. The locks here
//! are the same ones, so `qemu-img` refuses an image we write, and we refuse one QEMU writes.
//!
//! Invariants:
//!
//! - Locks are **taken first and checked second**. Two openers that race may both be refused;
//!   they never both succeed.
//! - All locks are shared (`F_RDLCK`) locks of the open file description, so closing another
//!   descriptor of the same file does not lose them, as it would with plain POSIX locks.
//! - Nothing is written: locking byte 100 does not touch byte 100.
//!
//! - A lock that is handed over to another process ([`LockSet`]) always has an owner: the open file description is
//!   passed, and the lock with it.
//!
//! With [`LockGranularity::Full`] the whole file is locked instead, for file systems which
//! cannot lock ranges. Such a lock excludes QEMU's tools too, readers included.
#![expect(
    unsafe_code,
    reason = "fcntl has no safe wrapper for locks of an open file description"
)]

use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

mod set;

pub use set::LockSet;

/// First byte of the locks on what an opener does; a permission's bit number is added.
const PERMISSION_BASE: i64 = 100;
/// First byte of the locks on what others must not do; a permission's bit number is added.
const UNSHARED_BASE: i64 = 200;

/// Bit number: reads that must be consistent.
const CONSISTENT_READ: i64 = 0;
/// Bit number: writes.
const WRITE: i64 = 1;
/// Bit number: changes of size.
const RESIZE: i64 = 3;

/// Timeout for the lock of a process that has died, and the interval between two tries.
const LINGER_MAX: Duration = Duration::from_secs(5);
const LINGER_STEP: Duration = Duration::from_millis(5);

/// Timeout for those who try to lock an image that is locked by an inherited description. As QEMU has it, they take the bytes of what they
/// want to do, look whether they may, and give them back.
const PASSING_MAX: Duration = Duration::from_secs(1);

/// Access that the holder of a lock needs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum LockMode {
    /// Read, write and resize; nobody else may write or resize. As with QEMU, others may do consistent reads.
    Write,
    /// Read only, as for a backing file; other readers are allowed, writers are not.
    Read,
}

/// Part of the file that the locks cover.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum LockGranularity {
    /// Single bytes, understood by QEMU's tools.
    #[default]
    ByteRange,
    /// The whole file, for file systems that cannot lock ranges.
    Full,
}

/// The process found to hold a conflicting lock.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Holder {
    /// Its process id, in our namespace.
    pub pid: u32,
    /// Its command name, at most 15 bytes as the kernel keeps it.
    pub name: String,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (process {})", self.name, self.pid)
    }
}

/// Error: an image could not be locked.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another opener's lock conflicts with ours.
    #[error(
        "{} is locked: {} is {}",
        path.display(),
        holder.as_ref().map_or_else(|| "another process".to_owned(), Holder::to_string),
        match other { LockMode::Write => "writing to it", LockMode::Read => "reading it and needs it unchanged" }
    )]
    Held {
        /// The image.
        path: PathBuf,
        /// The other opener's access, as far as its locks tell.
        other: LockMode,
        /// The other opener's process, if found.
        holder: Option<Holder>,
    },
    /// The system refused the lock call.
    #[error("cannot lock {}", path.display())]
    Os {
        /// The image.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
}

/// A held image lock; dropping it releases it.
///
/// The lock belongs to the open file description it was taken on. Descriptors duplicated from it
/// share the lock. The lock ends when this value is dropped, even if they stay open. Taking two
/// locks on one description is not detected as a conflict.
///
/// The lock of a [`LockSet`] that another process shares stays with that process when this value is dropped.
#[derive(Debug)]
pub struct ImageLock {
    fd: Arc<OwnedFd>,
    held: Vec<ByteLock>,
    set: LockSet,
}

/// One locked range and its kind of lock. A length of zero means up to the end of the file, however far it grows.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct ByteLock {
    start: i64,
    len: i64,
    exclusive: bool,
}

impl ByteLock {
    fn byte(at: i64) -> Self {
        Self {
            start: at,
            len: 1,
            exclusive: false,
        }
    }

    fn whole_file(exclusive: bool) -> Self {
        Self {
            start: 0,
            len: 0,
            exclusive,
        }
    }

    /// Returns true if a lock reported as `first..=last` (`last` absent: to the end) overlaps this range.
    fn overlaps(&self, first: i64, last: Option<i64>) -> bool {
        let ends_before = self.len != 0 && self.start + self.len <= first;
        let starts_after = last.is_some_and(|last| self.start > last);
        !ends_before && !starts_after
    }
}

/// The locks that a mode takes, and the bytes on which nobody else may then hold any.
struct Plan {
    take: Vec<ByteLock>,
    /// Bytes to test, each with the access that a foreign lock on it implies.
    test: Vec<(ByteLock, LockMode)>,
}

impl Plan {
    fn new(mode: LockMode, granularity: LockGranularity) -> Self {
        let permissions: &[i64] = match mode {
            LockMode::Write => &[CONSISTENT_READ, WRITE, RESIZE],
            LockMode::Read => &[CONSISTENT_READ],
        };
        // No opener, reader or writer, lets others write or resize.
        let unshared = [WRITE, RESIZE];
        match granularity {
            LockGranularity::Full => Self {
                take: vec![ByteLock::whole_file(mode == LockMode::Write)],
                test: Vec::new(),
            },
            LockGranularity::ByteRange => Self {
                take: permissions
                    .iter()
                    .map(|bit| ByteLock::byte(PERMISSION_BASE + bit))
                    .chain(unshared.iter().map(|bit| ByteLock::byte(UNSHARED_BASE + bit)))
                    .collect(),
                // Writers' bytes are tested first, so that a writer is reported as one.
                test: unshared
                    .iter()
                    .map(|bit| (ByteLock::byte(PERMISSION_BASE + bit), LockMode::Write))
                    .chain(
                        permissions
                            .iter()
                            .map(|bit| (ByteLock::byte(UNSHARED_BASE + bit), LockMode::Read)),
                    )
                    .collect(),
            },
        }
    }
}

impl ImageLock {
    /// Locks the image behind `fd`, as a part of `set`, or returns the holder of a conflicting lock. If the set has
    /// inherited a description of the same file, the lock is taken on it, where it may be held already.
    ///
    /// Waits only for killed processes, for a few seconds at most, and a second for those who try to lock a file that is locked by an
    /// inherited description; and not with a set that is [to be taken at once](LockSet::at_once).
    /// When a process is killed, the kernel ends its
    /// io_uring, and with it the I/O in flight and the lock on the image, a moment later. That lock is
    /// respected, because the I/O may still reach the image; its holder cannot be found.
    ///
    /// `fd` must be open for reading, and for writing too if `mode` is [`LockMode::Write`] and
    /// `granularity` is [`LockGranularity::Full`]. `path` is only for messages.
    ///
    /// # Errors
    ///
    /// [`LockError::Held`] if another open file description holds a conflicting lock, and
    /// [`LockError::Os`] if the file system cannot lock or `fd` is of the wrong kind. No lock
    /// stays behind, but an inherited one stays with the set, and with the process that shares it.
    pub fn acquire(
        set: &LockSet,
        fd: BorrowedFd<'_>,
        path: &Path,
        mode: LockMode,
        granularity: LockGranularity,
    ) -> Result<Self, LockError> {
        let inherited = set.take_inherited(fd);
        let (fd, is_inherited) = match &inherited {
            Some(inherited) => (inherited.as_fd(), true),
            None => (fd, false),
        };
        let begin = Instant::now();
        let locked = loop {
            let locked = Self::acquire_now((fd, is_inherited), path, mode, granularity, set);
            let max = match &locked {
                Err(LockError::Held { .. }) if is_inherited => PASSING_MAX,
                Err(LockError::Held { holder: None, .. }) => LINGER_MAX,
                _ => break locked,
            };
            if !set.waits() || begin.elapsed() >= max {
                break locked;
            }
            std::thread::sleep(LINGER_STEP);
        };
        match (&locked, inherited) {
            (Ok(lock), _) => set.add(lock),
            // It is for the next try, until the set is kept.
            (Err(_), Some(inherited)) => set.give_back(inherited),
            (Err(_), None) => {}
        }
        locked
    }

    /// One try. What an inherited description had locked before stays so if it fails.
    fn acquire_now(
        (fd, is_inherited): (BorrowedFd<'_>, bool),
        path: &Path,
        mode: LockMode,
        granularity: LockGranularity,
        set: &LockSet,
    ) -> Result<Self, LockError> {
        let os = |source| LockError::Os {
            path: path.to_owned(),
            source,
        };
        let plan = Plan::new(mode, granularity);
        let mut lock = Self {
            fd: Arc::new(fd.try_clone_to_owned().map_err(os)?),
            held: Vec::new(),
            set: set.clone(),
        };

        for &range in &plan.take {
            match take(lock.fd.as_raw_fd(), range) {
                Ok(()) if is_inherited => {}
                Ok(()) => lock.held.push(range),
                Err(error) if is_conflict(&error) => {
                    return Err(lock.held_by_other(path, (range, LockMode::Write), is_inherited));
                }
                Err(error) => return Err(os(error)),
            }
        }
        for &(range, other) in &plan.test {
            if conflicts(lock.fd.as_raw_fd(), range).map_err(os)?.is_some() {
                return Err(lock.held_by_other(path, (range, other), is_inherited));
            }
        }
        lock.held = plan.take;
        Ok(lock)
    }

    /// Releases every range held, unless another process shares the lock, or it is held over.
    fn release(&mut self) {
        if self.set.stays(&self.fd) {
            return;
        }
        for range in self.held.drain(..) {
            if let Err(error) = unset(self.fd.as_raw_fd(), range) {
                tracing::warn!(%error, start = range.start, "could not release an image lock");
            }
        }
    }

    /// Returns the error for a conflict on `range`, with the holder if it can be found.
    ///
    /// Releases the ranges already taken first, so that the search does not find this process.
    fn held_by_other(
        mut self,
        path: &Path,
        (range, other): (ByteLock, LockMode),
        is_inherited: bool,
    ) -> LockError {
        self.release();
        let probe = ByteLock {
            exclusive: true,
            ..range
        };
        let named = match conflicts(self.fd.as_raw_fd(), probe) {
            Ok(Some(pid)) if pid > 0 => u32::try_from(pid).ok(),
            _ => None,
        };
        let holder = named.map(|pid| Holder {
            pid,
            name: process_name(pid),
        });
        // A search would find us, or the processes that share the lock.
        let is_ours = is_inherited || self.set.is_shared();
        let search = || (!is_ours).then(|| self.search_holder(range)).flatten();
        LockError::Held {
            path: path.to_owned(),
            other,
            holder: holder.or_else(search),
        }
    }

    /// Searches `/proc` for a process that holds a lock on `range` of this file.
    ///
    /// The kernel reports no process id for locks of an open file description. Only the
    /// descriptor's own `fdinfo` shows them, and only to processes that may inspect the holder.
    fn search_holder(&self, range: ByteLock) -> Option<Holder> {
        let ours = fs::metadata(format!("/proc/self/fd/{}", self.fd.as_raw_fd())).ok()?;
        for process in fs::read_dir("/proc").ok()?.flatten() {
            let Some(pid) = process
                .file_name()
                .to_str()
                .and_then(|name| name.parse::<u32>().ok())
            else {
                continue;
            };
            let Ok(descriptors) = fs::read_dir(process.path().join("fd")) else {
                continue;
            };
            for descriptor in descriptors.flatten() {
                let name = descriptor.file_name();
                let same_file = fs::metadata(descriptor.path())
                    .is_ok_and(|found| found.dev() == ours.dev() && found.ino() == ours.ino());
                if !same_file {
                    continue;
                }
                let Ok(info) = fs::read_to_string(process.path().join("fdinfo").join(&name)) else {
                    continue;
                };
                if fdinfo_locks(&info).any(|(first, last)| range.overlaps(first, last)) {
                    return Some(Holder {
                        pid,
                        name: process_name(pid),
                    });
                }
            }
        }
        None
    }
}

impl Drop for ImageLock {
    fn drop(&mut self) {
        self.release();
    }
}

/// Returns the ranges of the `lock:` lines of a `/proc/<pid>/fdinfo/<fd>` file; an absent end is "EOF".
fn fdinfo_locks(info: &str) -> impl Iterator<Item = (i64, Option<i64>)> + '_ {
    info.lines().filter_map(|line| {
        let mut words = line.strip_prefix("lock:")?.split_whitespace().rev();
        let last = words.next()?;
        let first = words.next()?.parse().ok()?;
        match last {
            "EOF" => Some((first, None)),
            number => Some((first, Some(number.parse().ok()?))),
        }
    })
}

/// Returns the command name of a process, or `unknown` if it has ended.
fn process_name(pid: u32) -> String {
    match fs::read_to_string(format!("/proc/{pid}/comm")) {
        Ok(name) => name.trim_end().to_owned(),
        Err(_) => "unknown".to_owned(),
    }
}

/// Returns true if a lock call failed because of a conflicting lock.
fn is_conflict(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES))
}

/// Takes a lock; fails at once with `EAGAIN` if a foreign one conflicts.
fn take(fd: RawFd, range: ByteLock) -> io::Result<()> {
    let kind = if range.exclusive {
        libc::F_WRLCK
    } else {
        libc::F_RDLCK
    };
    call(fd, libc::F_OFD_SETLK, range, kind).map(drop)
}

/// Releases a lock.
fn unset(fd: RawFd, range: ByteLock) -> io::Result<()> {
    call(fd, libc::F_OFD_SETLK, range, libc::F_UNLCK).map(drop)
}

/// Finds a foreign lock that overlaps `range`, and returns its process id as the kernel reports it:
/// -1 for a lock of an open file description.
fn conflicts(fd: RawFd, range: ByteLock) -> io::Result<Option<i32>> {
    let found = call(fd, libc::F_OFD_GETLK, range, libc::F_WRLCK)?;
    Ok((i32::from(found.l_type) != libc::F_UNLCK).then_some(found.l_pid))
}

/// Makes one `fcntl` lock call and returns the structure as the kernel left it.
fn call(fd: RawFd, command: libc::c_int, range: ByteLock, kind: libc::c_int) -> io::Result<libc::flock> {
    // The kernel's lock kinds are 0, 1 and 2: they fit the narrower field.
    let l_type = i16::try_from(kind).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
    let whence = i16::try_from(libc::SEEK_SET).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
    let mut lock = libc::flock {
        l_type,
        l_whence: whence,
        l_start: range.start,
        l_len: range.len,
        l_pid: 0,
    };
    // SAFETY: both commands used here read, and GETLK also writes, one `struct flock` through the
    // pointer, which is to a live, exclusively borrowed local of that type, and only during the
    // call. `fd` is a plain number to the kernel: a bad one is an error, not misuse of memory.
    let result = unsafe { libc::fcntl(fd, command, &raw mut lock) };
    if result == -1 {
        Err(io::Error::last_os_error())
    } else {
        Ok(lock)
    }
}

#[cfg(test)]
mod tests;
