//! Paths that name a descriptor: `/dev/fd/N`, an image that whoever started us opened.
//!
//! The kernel opens such a path by asking whether *we* may open the file, not what the descriptor allows: a
//! descriptor that was opened for reading would be opened for writing wherever our user may. Whoever hands over a
//! descriptor means what it says, so it is the limit here.

use std::os::fd::RawFd;
use std::path::Path;

use super::fcntl_flags;

/// What is wrong with a descriptor that a path names.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum DescriptorRefusal {
    /// There was none when this process started. Those that it opened itself since are nobody's to name.
    #[error("no descriptor {number} was inherited")]
    NotInherited {
        /// Its number.
        number: RawFd,
    },
    /// Writing is asked for.
    #[error(
        "descriptor {number} is open for reading only; hand over one for reading and writing, or use readonly=on"
    )]
    ReadOnly {
        /// Its number.
        number: RawFd,
    },
    /// Every image is read.
    #[error("descriptor {number} is not open for reading")]
    NotReadable {
        /// Its number.
        number: RawFd,
    },
}

/// The descriptor that `path` names.
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

/// Refuses a path that names a descriptor which this process did not inherit, or which allows less than is wanted.
pub(super) fn check(path: &Path, write: bool) -> Result<(), DescriptorRefusal> {
    let Some(number) = named(path) else {
        return Ok(());
    };
    let get =
        |command| fcntl_flags(number, command, 0).map_err(|_| DescriptorRefusal::NotInherited { number });
    // All of ours are closed on exec, which none that came through one is.
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
