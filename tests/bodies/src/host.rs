//! The host's side of a case: files in memory, and no others.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use block::Context;
use block::file::{FileOptions, FileView, ImageFile, OpenFileError, OpenFiles};
use rustix::fs::MemfdFlags;

/// A file in memory, sparse as files are.
#[derive(Debug)]
pub struct MemoryFile(File);

impl MemoryFile {
    /// A file that holds `bytes`.
    ///
    /// # Panics
    ///
    /// If the kernel has no file or memory left.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Self {
        let fd = rustix::fs::memfd_create("ringdisk-case", MemfdFlags::CLOEXEC).expect("a file in memory");
        let file = Self(fd.into());
        file.fill(bytes);
        file
    }

    /// Makes it hold `bytes` and nothing else.
    ///
    /// # Panics
    ///
    /// If the kernel has no memory left.
    pub fn fill(&self, bytes: &[u8]) {
        self.0.set_len(0).expect("an empty file");
        self.0.write_all_at(bytes, 0).expect("a full file");
    }

    /// Its length in bytes.
    ///
    /// # Panics
    ///
    /// If the kernel does not say.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.0.metadata().expect("the file's length").len()
    }

    /// Returns true if it holds nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes from `offset` on, up to `len` of them.
    ///
    /// # Panics
    ///
    /// If they cannot be read.
    #[must_use]
    pub fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let left = usize::try_from(self.len().saturating_sub(offset)).unwrap_or(usize::MAX);
        let mut bytes = vec![0; len.min(left)];
        self.0
            .read_exact_at(&mut bytes, offset)
            .expect("the file's bytes");
        bytes
    }

    /// Returns true if it holds `bytes` and nothing else.
    #[must_use]
    pub fn holds(&self, bytes: &[u8]) -> bool {
        self.len() == bytes.len() as u64 && self.read(0, bytes.len()) == bytes
    }

    fn image(&self, path: &Path, options: FileOptions) -> io::Result<Arc<ImageFile>> {
        Ok(ImageFile::from_fd(path, self.0.try_clone()?, options))
    }

    /// A view that can write, for tools.
    ///
    /// # Panics
    ///
    /// If the process has no descriptor left.
    #[must_use]
    pub fn view(&self, cx: &Context) -> FileView {
        let options = FileOptions {
            write: true,
            direct: false,
        };
        let image = self.image(Path::new("case"), options).expect("a descriptor");
        image.view(cx).expect("another descriptor")
    }
}

/// The files there are, by name. What else is asked for does not exist, and is remembered.
#[derive(Debug, Default)]
pub struct Files {
    files: BTreeMap<PathBuf, MemoryFile>,
    missed: RefCell<Vec<PathBuf>>,
}

impl Files {
    /// One file of this name.
    #[must_use]
    pub fn with(name: &str, bytes: &[u8]) -> Self {
        let mut files = Self::default();
        files.add(name, bytes);
        files
    }

    /// Adds a file.
    pub fn add(&mut self, name: &str, bytes: &[u8]) {
        self.files.insert(name.into(), MemoryFile::new(bytes));
    }

    /// The file of this name.
    ///
    /// # Panics
    ///
    /// If there is none.
    #[must_use]
    pub fn file(&self, name: &str) -> &MemoryFile {
        &self.files[Path::new(name)]
    }

    /// Names that were asked for and are not there.
    #[must_use]
    pub fn missed(&self) -> Vec<PathBuf> {
        self.missed.borrow().clone()
    }
}

impl OpenFiles for Files {
    fn open(&self, path: &Path, options: FileOptions) -> Result<Arc<ImageFile>, OpenFileError> {
        let open = |source| OpenFileError::Open {
            path: path.to_owned(),
            source,
        };
        match self.files.get(path) {
            Some(file) => file.image(path, options).map_err(open),
            None => {
                self.missed.borrow_mut().push(path.to_owned());
                Err(open(io::ErrorKind::NotFound.into()))
            }
        }
    }
}
