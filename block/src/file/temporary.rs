//! Temporary files: open, without a name, and gone with the last descriptor, however the process ends.
//!
//! Invariant: a temporary file has no name at any time, so that nothing is left behind by a kill at any time.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::flags::set_for_io;
use super::image_file::ImageFile;
use super::open::{FileOptions, OpenFileError};

impl ImageFile {
    /// Makes an empty temporary file in the file system of `folder`, for reading and writing. `name` stands for its path in
    /// messages.
    ///
    /// Nobody can open it again, so it is durable for nobody: a sync of it succeeds at once ([`ImageFile::is_temporary`]).
    ///
    /// # Errors
    ///
    /// [`OpenFileError`], naming the folder.
    pub fn temporary(folder: &Path, name: PathBuf, direct: bool) -> Result<Arc<Self>, OpenFileError> {
        let path = || folder.to_owned();
        let open = |source| OpenFileError::Temporary {
            folder: path(),
            source,
        };
        // With `O_EXCL` it cannot be given a name later.
        let mut flags = libc::O_CLOEXEC | libc::O_TMPFILE | libc::O_EXCL;
        if direct {
            flags |= libc::O_DIRECT;
        }
        let opened = OpenOptions::new()
            .read(true)
            .write(true)
            .mode(0o600)
            .custom_flags(flags)
            .open(folder);
        let file = opened.map_err(|error| match error.raw_os_error() {
            // A file system without unnamed files says the one, or opens the folder itself and says the other.
            Some(libc::EOPNOTSUPP | libc::EISDIR) => OpenFileError::NoUnnamedFiles { folder: path() },
            Some(libc::EINVAL) if direct => OpenFileError::NoDirectIo { path: path() },
            _ => open(error),
        })?;
        set_for_io(&file).map_err(open)?;
        let options = FileOptions { write: true, direct };
        let mut file = Self::from_file(name, file, options, false);
        file.temporary = true;
        Ok(Arc::new(file))
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::fs::MetadataExt;
    use std::rc::Rc;

    use super::*;
    use crate::buffer::AlignedBuf;
    use crate::ring::Ring;
    use crate::ring::counting::CountingDriver;
    use crate::task::Context;

    fn links(file: &ImageFile) -> u64 {
        let fd = file.as_fd().try_clone_to_owned().expect("a duplicate");
        std::fs::File::from(fd).metadata().expect("its state").nlink()
    }

    #[test]
    fn temporary_file_has_no_name_and_is_written_and_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let name = PathBuf::from("temporary overlay of x");
        let file = ImageFile::temporary(folder.path(), name.clone(), false).expect("a file");
        assert!(file.is_temporary() && file.is_writable() && !file.is_block_device());
        assert_eq!((file.path(), links(&file)), (name.as_path(), 0));
        let cx = Context::syscalls();
        let view = file.view(&cx).expect("a view");
        cx.block_on(async {
            let written = view.write_at(4096, AlignedBuf::from_slice(&[7; 4096])).await;
            written.expect("written");
            view.sync().await.expect("nothing to do");
            let read = view.read_at(0, 8192).await.expect("read");
            assert!(read[..4096] == [0; 4096] && read[4096..] == [7; 4096]);
        })
        .expect("it runs");
        assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 0);
    }

    #[test]
    fn sync_of_a_temporary_file_asks_the_kernel_for_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let options = FileOptions {
            write: true,
            direct: false,
        };
        let named = tempfile::tempfile().expect("a file");
        let named = ImageFile::from_fd(Path::new("named"), named, options);
        let temporary = ImageFile::temporary(folder.path(), "temporary".into(), false).expect("a file");
        for (file, asks) in [(named, true), (temporary, false)] {
            let driver = CountingDriver::default();
            let calls = Rc::clone(&driver.calls);
            let cx = Context::on(Ring::with_driver(Box::new(driver), 16, 0));
            let view = file.view(&cx).expect("a view");
            let synced = cx.block_on(view.sync()).expect("it runs");
            assert_eq!(synced, Ok(()));
            assert_eq!(!calls.borrow().is_empty(), asks, "{}", file.path().display());
        }
    }

    #[test]
    fn folder_that_cannot_have_one_is_named() {
        let refused = |folder: &str| {
            let error = ImageFile::temporary(Path::new(folder), PathBuf::from("x"), false);
            error.expect_err("it cannot").to_string()
        };
        let missing = refused("/nowhere/at/all");
        assert!(missing.contains("/nowhere/at/all"), "{missing}");
        // A file system without unnamed files, on every Linux.
        let proc = refused("/proc");
        assert!(
            proc.contains("of /proc has no") && proc.contains("ext4"),
            "{proc}"
        );
    }
}
