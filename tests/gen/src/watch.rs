//! A watch on opens of files, as the kernel tells of them: what a test says about files that must not be opened is
//! checked.

use std::collections::BTreeSet;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::inotify::{self, CreateFlags, Reader, WatchFlags};
use rustix::io::Errno;

/// Watches a folder for files that are opened in it.
#[derive(Debug)]
pub struct Watch {
    fd: OwnedFd,
}

impl Watch {
    /// Starts to watch the files of `folder`, or the file `folder` is.
    ///
    /// # Errors
    ///
    /// The kernel's error.
    pub fn new(folder: &Path) -> io::Result<Self> {
        let fd = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?;
        inotify::add_watch(&fd, folder, WatchFlags::OPEN)?;
        Ok(Self { fd })
    }

    /// The names of the files that were opened since the last call; the watched file or folder itself is `.`.
    ///
    /// # Errors
    ///
    /// The kernel's error; also if it has lost count.
    pub fn opened(&self) -> io::Result<BTreeSet<String>> {
        let mut names = BTreeSet::new();
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut reader = Reader::new(&self.fd, &mut buffer);
        loop {
            let event = match reader.next() {
                Ok(event) => event,
                Err(Errno::AGAIN) => return Ok(names),
                Err(error) => return Err(error.into()),
            };
            if event.events().contains(inotify::ReadFlags::QUEUE_OVERFLOW) {
                return Err(io::Error::other("inotify has lost events"));
            }
            let name = event.file_name().map(|name| name.to_string_lossy().into_owned());
            names.insert(name.unwrap_or_else(|| ".".to_owned()));
        }
    }
}
