//! Detects users of a block device, on kernels that do not report them.
//!
//! A file system or a stacked device claims it, so that an exclusive open fails; a program that has it open shows it among
//! its descriptors. Between this check and the next step another user may come. Kernels since 7.0 decide it in one step.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Describes a user of the block device at `path`; `None` if none is found.
///
/// # Errors
///
/// If the device cannot be looked at.
pub(super) fn user_of(path: &str) -> io::Result<Option<String>> {
    let metadata = match fs::metadata(path) {
        Ok(metadata) => metadata,
        // A device that is not there is not in use.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    if !metadata.file_type().is_block_device() {
        return Ok(None);
    }
    let exclusive = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_EXCL | libc::O_NONBLOCK)
        .open(path);
    if let Err(error) = exclusive
        && error.raw_os_error() == Some(libc::EBUSY)
    {
        return Ok(Some("it is mounted, or another device is on it".to_owned()));
    }
    let own = std::process::id();
    for process in fs::read_dir("/proc")?.filter_map(Result::ok) {
        let Some(pid) = process
            .file_name()
            .to_str()
            .and_then(|name| name.parse::<u32>().ok())
        else {
            continue;
        };
        if pid != own && has_open(&process.path().join("fd"), metadata.rdev()) {
            return Ok(Some(format!("process {pid} has it open")));
        }
    }
    Ok(None)
}

/// Returns true if one of the descriptors in `folder` is the block device `number`.
fn has_open(folder: &Path, number: u64) -> bool {
    // Processes come and go, and some do not let us look.
    let Ok(descriptors) = fs::read_dir(folder) else {
        return false;
    };
    descriptors.filter_map(Result::ok).any(|descriptor| {
        fs::metadata(descriptor.path())
            .is_ok_and(|file| file.file_type().is_block_device() && file.rdev() == number)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_of_is_none_for_a_missing_or_non_block_device() {
        assert_eq!(user_of("/dev/null").expect("a look"), None);
        assert_eq!(user_of("/dev/no-such-device").expect("a look"), None);
    }
}
