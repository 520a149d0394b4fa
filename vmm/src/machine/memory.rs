//! The guest's memory: one memfd, mapped once, in as many regions as the machine's address space has.
//!
//! It is a memfd so that a vhost-user backend can map it, too. Small pages are allocated when the guest touches them, huge
//! pages at once, because a missing one would raise SIGBUS later.
//!
//! Invariants: a process that gets the memfd cannot change its length (file seals), because an access past its end would
//! raise SIGBUS; core dumps contain no guest memory.

#![expect(unsafe_code, reason = "memfd_create, mbind, madvise and KVM's memory slots")]

use std::fs::File;
use std::io;
use std::os::fd::FromRawFd;

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use rustix::fs::SealFlags;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

/// The configuration of the guest's memory.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct MemoryConfig {
    /// Its size in bytes.
    pub bytes: u64,
    /// The size of its pages, if they are to be huge ones.
    pub hugepage_bytes: Option<u64>,
    /// The host's NUMA node that it is to come from.
    pub host_node: Option<u32>,
}

impl MemoryConfig {
    /// Refuses a size that no guest can have.
    pub(super) fn check(&self) -> Result<(), MemoryError> {
        let bytes = self.bytes;
        let unit = self.hugepage_bytes.unwrap_or(PAGE_BYTES);
        if bytes < MIN_BYTES || !bytes.is_multiple_of(unit) {
            let min = MIN_BYTES;
            return Err(MemoryError::Size { bytes, unit, min });
        }
        Ok(())
    }
}

/// An error of allocating guest memory.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The size is invalid.
    #[error("the guest's memory is {bytes} bytes; expected a multiple of {unit} bytes, at least {min}")]
    Size {
        /// The requested value.
        bytes: u64,
        /// The size must be a multiple of this.
        unit: u64,
        /// The least.
        min: u64,
    },
    /// The host has no pages of that size, or not so many.
    #[error(
        "cannot allocate {bytes} bytes of guest memory in huge pages of {page} bytes; the host has {free} of them \
         free (raise vm.nr_hugepages, or pass hugepages= on its kernel's command line)"
    )]
    HugePages {
        /// The requested value.
        bytes: u64,
        /// The size of a page.
        page: u64,
        /// The number of free huge pages, or "none" if the host has no such page size.
        free: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The host has no such node.
    #[error("cannot allocate guest memory on the host's NUMA node {node}")]
    Node {
        /// The node.
        node: u32,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The host refuses.
    #[error("cannot allocate {bytes} bytes of guest memory ({what})")]
    Host {
        /// The requested value.
        bytes: u64,
        /// The step that failed.
        what: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// The least memory that a kernel boots in.
const MIN_BYTES: u64 = 32 << 20;
const PAGE_BYTES: u64 = 4096;

/// Makes the memory, in the pieces that `layout` answers for its size: guest address and length of each.
///
/// # Errors
///
/// [`MemoryError`].
pub(super) fn make(
    config: &MemoryConfig,
    layout: impl FnOnce(u64) -> Vec<(u64, u64)>,
) -> Result<GuestMemoryMmap, MemoryError> {
    config.check()?;
    let bytes = config.bytes;
    let file = make_file(config)?;
    let mut ranges = Vec::new();
    let mut at = 0;
    for (start, len) in layout(bytes) {
        let clone = file.try_clone().map_err(|source| MemoryError::Host {
            bytes,
            what: "a descriptor",
            source,
        })?;
        let len_usize = usize::try_from(len).unwrap_or(usize::MAX);
        ranges.push((GuestAddress(start), len_usize, Some(FileOffset::new(clone, at))));
        at += len;
    }
    let memory = GuestMemoryMmap::from_ranges_with_files(ranges).map_err(|error| MemoryError::Host {
        bytes,
        what: "mapping it",
        source: io::Error::other(error),
    })?;
    advise(&memory, libc::MADV_DONTDUMP).map_err(|source| MemoryError::Host {
        bytes,
        what: "keeping it out of core dumps",
        source,
    })?;
    if let Some(node) = config.host_node {
        bind(&memory, node).map_err(|source| MemoryError::Node { node, source })?;
    }
    if let Some(page) = config.hugepage_bytes {
        // Every page is there from now on, from the node it is bound to.
        advise(&memory, libc::MADV_POPULATE_WRITE).map_err(|source| no_pages(bytes, page, source))?;
    }
    Ok(memory)
}

/// Makes the memfd. Its length is sealed: a vhost-user backend gets it, and could end this process by cutting it.
fn make_file(config: &MemoryConfig) -> Result<File, MemoryError> {
    let bytes = config.bytes;
    let host = |what| move |source| MemoryError::Host { bytes, what, source };
    let mut flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    if let Some(huge) = config.hugepage_bytes {
        flags |= libc::MFD_HUGETLB | huge.trailing_zeros() << libc::MFD_HUGE_SHIFT;
    }
    // SAFETY: the name is a C string, and no other memory is passed.
    let fd = unsafe { libc::memfd_create(c"guest memory".as_ptr(), flags) };
    if fd < 0 {
        let source = io::Error::last_os_error();
        return Err(match config.hugepage_bytes {
            Some(page) => no_pages(bytes, page, source),
            None => host("memfd_create")(source),
        });
    }
    // SAFETY: `fd` was just made and nobody else owns it.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(bytes).map_err(host("its size"))?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals)
        .map_err(io::Error::from)
        .map_err(host("sealing its size"))?;
    Ok(file)
}

fn no_pages(bytes: u64, page: u64, source: io::Error) -> MemoryError {
    let count = format!(
        "/sys/kernel/mm/hugepages/hugepages-{}kB/free_hugepages",
        page / 1024
    );
    let free =
        std::fs::read_to_string(count).map_or_else(|_| "none".to_owned(), |text| text.trim().to_owned());
    MemoryError::HugePages {
        bytes,
        page,
        free,
        source,
    }
}

/// Tells the kernel something about all of the memory that changes none of its contents.
fn advise(memory: &GuestMemoryMmap, advice: libc::c_int) -> io::Result<()> {
    for region in memory.iter() {
        // SAFETY: the range is one mapping of ours, which stays; its pages keep the contents they have.
        let result = unsafe { libc::madvise(region.as_ptr().cast(), region.len() as usize, advice) };
        if result != 0 {
            let error = io::Error::last_os_error();
            // A page that cannot be had is a fault to this call. The address is ours, so it cannot be a bad one.
            return Err(match error.raw_os_error() {
                Some(libc::EFAULT) => io::Error::from_raw_os_error(libc::ENOMEM),
                _ => error,
            });
        }
    }
    Ok(())
}

/// Takes all pages from one node of the host.
fn bind(memory: &GuestMemoryMmap, node: u32) -> io::Result<()> {
    const MPOL_BIND: libc::c_ulong = 2;
    let mut mask = [0u64; 16];
    let Some(word) = mask.get_mut(node as usize / 64) else {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    };
    *word = 1 << (node % 64);
    for region in memory.iter() {
        // SAFETY: the range is one mapping of ours, which stays; `mask` lives across the call and holds 1024 bits.
        let result = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                region.as_ptr(),
                region.len(),
                MPOL_BIND,
                mask.as_ptr(),
                1024,
                0,
            )
        };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Gives the memory to a KVM machine, which must not outlive it.
///
/// # Errors
///
/// KVM's error.
pub(super) fn plug(vm: &VmFd, memory: &GuestMemoryMmap) -> Result<(), kvm_ioctls::Error> {
    for (slot, region) in (0..).zip(memory.iter()) {
        let region = kvm_userspace_memory_region {
            slot,
            guest_phys_addr: region.start_addr().0,
            memory_size: region.len(),
            userspace_addr: region.as_ptr().addr() as u64,
            flags: 0,
        };
        // SAFETY: the range is mapped, and `KvmMachine` keeps it so for as long as the machine lives.
        unsafe { vm.set_user_memory_region(region)? };
    }
    Ok(())
}

#[cfg(test)]
#[expect(
    clippy::print_stdout,
    reason = "what cannot run here is counted by what it prints"
)]
mod tests {
    use super::*;

    fn config(hugepage_bytes: Option<u64>) -> MemoryConfig {
        MemoryConfig {
            bytes: MIN_BYTES,
            hugepage_bytes,
            host_node: None,
        }
    }

    /// A backend that truncated the memory would kill this process by SIGBUS, with its images open.
    #[test]
    fn guest_memory_length_is_sealed() {
        for hugepage_bytes in [None, Some(2 << 20)] {
            // Pages are not taken before the file is mapped.
            let file = match make_file(&config(hugepage_bytes)) {
                Err(MemoryError::HugePages { source, .. }) if source.raw_os_error() == Some(libc::ENODEV) => {
                    println!("cannot run here: sealed huge pages, because the host has none of 2 MiB");
                    continue;
                }
                made => made.expect("a memfd"),
            };
            for bytes in [0, MIN_BYTES / 2, 2 * MIN_BYTES] {
                let error = file.set_len(bytes).expect_err("it is sealed");
                assert_eq!(
                    error.raw_os_error(),
                    Some(libc::EPERM),
                    "{hugepage_bytes:?}, {bytes}"
                );
            }
            let more = rustix::fs::fcntl_add_seals(&file, SealFlags::WRITE);
            assert!(more.is_err(), "nobody else's seals");
            assert_eq!(file.metadata().expect("a file").len(), MIN_BYTES);
        }
    }

    #[test]
    fn guest_memory_is_in_no_core_dump() {
        let memory = make(&config(None), |bytes| vec![(0, bytes / 2), (1 << 32, bytes / 2)]).expect("memory");
        let maps = std::fs::read_to_string("/proc/self/smaps").expect("the process's mappings");
        for region in memory.iter() {
            let start = format!("{:x}-", region.as_ptr().addr());
            let mut lines = maps.lines().skip_while(|line| !line.starts_with(&start));
            assert!(
                lines
                    .next()
                    .is_some_and(|line| line.contains("memfd:guest memory"))
            );
            let flags = lines
                .find(|line| line.starts_with("VmFlags:"))
                .expect("its flags");
            assert!(flags.split_whitespace().any(|flag| flag == "dd"), "{flags}");
        }
    }
}
