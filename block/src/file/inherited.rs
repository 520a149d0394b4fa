//! Paths that name an inherited descriptor: `/dev/fd/N`, an image opened by the parent process.
//!
//! The kernel checks such a path against *our* permissions on the file, not against the descriptor's mode. A
//! descriptor opened for reading would be reopened for writing wherever our user may. The parent process limits
//! access by the descriptor's mode, so that mode is enforced here.

use std::os::fd::RawFd;
use std::path::Path;

use super::flags::fcntl_flags;

/// Error: a path names a descriptor that cannot be used.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum DescriptorRefusal {
    /// It was not open when this process started. A path cannot name those that the process opened itself since.
    #[error("no descriptor {number} was inherited")]
    NotInherited {
        /// Its number.
        number: RawFd,
    },
    /// Open for reading only, but write access is requested.
    #[error(
        "descriptor {number} is open for reading only; hand over one for reading and writing, or use readonly=on"
    )]
    ReadOnly {
        /// Its number.
        number: RawFd,
    },
    /// Not open for reading; every image is read.
    #[error("descriptor {number} is not open for reading")]
    NotReadable {
        /// Its number.
        number: RawFd,
    },
}

/// Returns the descriptor that `path` names.
fn named(path: &Path) -> Option<RawFd> {
    if path == Path::new("/dev/stdin") {
        return Some(0);
    }
    let number = path
        .strip_prefix("/dev/fd")
        .or_else(|_| path.strip_prefix("/proc/self/fd"))
        .ok()?;
    number.to_str()?.parse().ok()
}

/// Refuses a path that names a descriptor which was not inherited, or which allows less than is requested.
pub(super) fn check(path: &Path, write: bool) -> Result<(), DescriptorRefusal> {
    let Some(number) = named(path) else {
        return Ok(());
    };
    let get =
        |command| fcntl_flags(number, command, 0).map_err(|_| DescriptorRefusal::NotInherited { number });
    // All of our own descriptors have `FD_CLOEXEC`; inherited ones cannot have it.
    if get(libc::F_GETFD)? & libc::FD_CLOEXEC != 0 {
        return Err(DescriptorRefusal::NotInherited { number });
    }
    let flags = get(libc::F_GETFL)?;
    match flags & libc::O_ACCMODE {
        _ if flags & libc::O_PATH != 0 => Err(DescriptorRefusal::NotReadable { number }),
        libc::O_RDWR => Ok(()),
        libc::O_RDONLY if !write => Ok(()),
        libc::O_RDONLY => Err(DescriptorRefusal::ReadOnly { number }),
        _ => Err(DescriptorRefusal::NotReadable { number }),
    }
}
