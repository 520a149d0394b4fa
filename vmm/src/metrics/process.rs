//! The memory and the descriptors of this process: its tables of images, and what is read from descriptors of `/proc` that were
//! opened before the sandbox closed.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::fs::FileExt;

use rustix::fs::{RawDir, SeekFrom, seek};

use crate::open::table_memory;

/// The most bytes of `/proc/self/statm`: seven numbers.
const STATM_MAX: usize = 256;

/// What a process uses.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct Usage {
    /// The memory that is in RAM, in bytes; `None` if the kernel does not say.
    pub(super) resident_bytes: Option<u64>,
    /// The open file descriptors, those of these statistics included.
    pub(super) descriptors: Option<u64>,
    /// The tables of images that are in memory, in bytes.
    pub(super) table_bytes: u64,
    /// The most that they may be together.
    pub(super) table_bytes_max: Option<u64>,
}

/// This process, as `/proc` shows it.
pub(super) struct Process {
    statm: File,
    descriptors: parking_lot::Mutex<File>,
    page_bytes: u64,
}

impl Process {
    /// Opens the files.
    pub(super) fn open() -> io::Result<Self> {
        Ok(Self {
            statm: File::open("/proc/self/statm")?,
            descriptors: parking_lot::Mutex::new(File::open("/proc/self/fd")?),
            page_bytes: rustix::param::page_size() as u64,
        })
    }

    /// Returns the present usage.
    pub(super) fn read(&self) -> Usage {
        Usage {
            resident_bytes: self.resident_bytes(),
            descriptors: self.count().ok(),
            table_bytes: table_memory().used_bytes(),
            table_bytes_max: table_memory().limit_bytes(),
        }
    }

    fn resident_bytes(&self) -> Option<u64> {
        let mut bytes = [0; STATM_MAX];
        let len = self.statm.read_at(&mut bytes, 0).ok()?;
        let text = std::str::from_utf8(bytes.get(..len)?).ok()?;
        let pages: u64 = text.split_whitespace().nth(1)?.parse().ok()?;
        pages.checked_mul(self.page_bytes)
    }

    fn count(&self) -> io::Result<u64> {
        // The position belongs to the open file: one thread at a time.
        let folder = self.descriptors.lock();
        seek(&*folder, SeekFrom::Start(0))?;
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut entries = RawDir::new(&*folder, &mut buffer);
        let mut count = 0;
        while let Some(entry) = entries.next() {
            count += u64::from(!entry?.file_name().to_bytes().starts_with(b"."));
        }
        Ok(count)
    }
}
