//! Opening of disks whose images name each other.
//!
//! An [`Opening`] opens one disk: the image that was asked for, and the chain of images below it. It knows the formats
//! that its caller gave it, and nothing of what is in them; a [`Format`] knows its own images, and asks the opening for
//! the disk below by the name and the format that its header records. So no format depends on another, and who opens
//! disks decides which formats there are.
//!
//! Invariants:
//!
//! - Nothing is probed: a format is given or recorded.
//! - No image is in a chain twice, no file is an image and the data of one, and a chain has at most [`CHAIN_DEPTH_MAX`]
//!   images.
//! - Images below the first are opened read-only, and only if the opening allows them. So are data files: only if it allows
//!   them, and only those of the first image for writing.
//! - An opened file is locked, unless the opening locks nothing, and stays locked as long as anybody uses it.
//! - Two or more images below the first have an index ([`crate::chain`]), unless the opening has none.

use std::cell::{Cell, RefCell};
use std::error::Error;
use std::fmt;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::chain::{ChainIndexes, LayerIdentity};
use crate::disk::{Disk, OpenQueueError};
use crate::file::{FileOptions, ImageFile, OpenFileError, OpenFiles};
use crate::lock::{LockError, LockGranularity, LockMode, LockSet};
use crate::task::{Context, LocalBoxFuture};

/// The most images a chain may have.
pub const CHAIN_DEPTH_MAX: usize = 64;

/// An image format.
pub trait Format: fmt::Debug {
    /// Returns the name by which images and users refer to it.
    fn name(&self) -> &'static str;

    /// Opens the image at `path`.
    ///
    /// Fails with [`OpenError`]; no byte of any image has been changed then, unless the format says otherwise.
    fn open<'a>(
        &'a self,
        opening: &'a Opening<'a>,
        path: &'a Path,
        access: Access,
    ) -> LocalBoxFuture<'a, Result<Arc<dyn Disk>, OpenError>>;
}

/// The use of an image that is being opened.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Access {
    /// The disk itself, to be written.
    Write,
    /// The disk itself, to be read only.
    Read,
    /// An image below another one. Read only.
    Below,
}

impl Access {
    /// Returns true if the image may be written.
    #[must_use]
    pub fn is_write(self) -> bool {
        self == Self::Write
    }
}

/// Options that hold for all images of a chain.
#[derive(Clone, Debug)]
pub struct ChainOptions {
    /// Bypass the host's page cache.
    pub direct: bool,
    /// Open the images that images name.
    pub backing_files: bool,
    /// Open the files that images name for their data.
    pub data_files: bool,
    /// Lock images as QEMU does; `None` locks nothing.
    pub lock: Option<LockGranularity>,
    /// The lock set for the locks of the whole chain.
    pub lock_set: LockSet,
    /// The indexes of long chains, which disks on the same images share if they lock them; `None` uses none.
    pub indexes: Option<ChainIndexes>,
}

/// Error of opening a disk.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A file could not be opened.
    #[error(transparent)]
    File(#[from] OpenFileError),
    /// An image could not be locked, as when another process has it open.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The disk cannot be used as it is.
    #[error(transparent)]
    Queue(#[from] OpenQueueError),
    /// An image cannot be used.
    #[error("{}", path.display())]
    Image {
        /// The image.
        path: PathBuf,
        /// The error in the image, of the type that its format documents.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// The file that has an image's data could not be opened.
    #[error("data file of {}", path.display())]
    DataFile {
        /// The image that names it.
        path: PathBuf,
        /// The data file's error.
        #[source]
        source: Box<OpenError>,
    },
    /// The image below could not be opened.
    #[error("backing file of {}", path.display())]
    Backing {
        /// The image that names it.
        path: PathBuf,
        /// The backing image's error.
        #[source]
        source: Box<OpenError>,
    },
}

impl OpenError {
    /// Makes the error of an image.
    #[must_use]
    pub fn image(path: &Path, source: impl Error + Send + Sync + 'static) -> Self {
        Self::Image {
            path: path.to_owned(),
            source: Box::new(source),
        }
    }

    /// Returns true if an image, or its data file, is on a file system without direct I/O, which was wanted.
    #[must_use]
    pub fn lacks_direct_io(&self) -> bool {
        match self {
            Self::File(OpenFileError::NoDirectIo { .. }) => true,
            Self::DataFile { source, .. } => source.lacks_direct_io(),
            _ => false,
        }
    }

    /// Returns true if another program has an image that is needed.
    #[must_use]
    pub fn is_locked(&self) -> bool {
        match self {
            Self::Lock(error) => matches!(error, LockError::Held { .. }),
            Self::Backing { source, .. } | Self::DataFile { source, .. } => source.is_locked(),
            _ => false,
        }
    }
}

/// Error of a chain of images.
#[derive(Debug, thiserror::Error)]
pub enum ChainError {
    /// The format is none of the opening's.
    #[error("its backing file has format {format:?}; expected {expected}")]
    Format {
        /// The format, as recorded.
        format: String,
        /// The formats that there are, each in quotes.
        expected: String,
    },
    /// An image comes up twice in its own chain.
    #[error("its backing chain comes back to {}", path.display())]
    Cycle {
        /// The image that comes up twice.
        path: PathBuf,
    },
    /// An image names a file for its data that is an image of its chain, or the data file of another one.
    #[error("its data file {} is an image of its own chain, or another image's data file", path.display())]
    DataFileTaken {
        /// The file.
        path: PathBuf,
    },
    /// The chain is too long.
    #[error("its backing chain has more than {CHAIN_DEPTH_MAX} images")]
    TooDeep,
}

/// The opening of one disk and of the images below it.
pub struct Opening<'a> {
    cx: &'a Context,
    files: &'a dyn OpenFiles,
    formats: &'a [&'a dyn Format],
    options: ChainOptions,
    /// Device and inode of each file so far, if they are known.
    seen: RefCell<Vec<Option<(u64, u64)>>>,
    /// The images below the first that are open, the lowest first.
    layers: RefCell<Vec<LayerIdentity>>,
    /// The number of images so far.
    images: Cell<usize>,
    /// The number of images below the first that are being opened.
    descents: Cell<usize>,
    /// The smallest cluster of the layers but the lowest, and the memory for an index, in bytes.
    cluster_bytes: Cell<u64>,
    index_bytes: Cell<u64>,
}

impl fmt::Debug for Opening<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Opening")
            .field("formats", &self.formats)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

impl<'a> Opening<'a> {
    /// Begins to open one disk of these formats, with the files taken from `files` and the I/O done by `cx`.
    #[must_use]
    pub fn new(
        cx: &'a Context,
        files: &'a dyn OpenFiles,
        formats: &'a [&'a dyn Format],
        options: ChainOptions,
    ) -> Self {
        Self {
            cx,
            files,
            formats,
            options,
            seen: RefCell::default(),
            layers: RefCell::default(),
            images: Cell::new(0),
            descents: Cell::new(0),
            cluster_bytes: Cell::new(u64::MAX),
            index_bytes: Cell::new(0),
        }
    }

    /// Returns the context that does the I/O.
    #[must_use]
    pub fn context(&self) -> &'a Context {
        self.cx
    }

    /// Returns true if the images that images name may be opened.
    #[must_use]
    pub fn allows_backing_files(&self) -> bool {
        self.options.backing_files
    }

    /// Returns true if the files that images name for their data may be opened.
    #[must_use]
    pub fn allows_data_files(&self) -> bool {
        self.options.data_files
    }

    /// Opens and locks the file of the next image of the chain.
    ///
    /// # Errors
    ///
    /// [`OpenError`], also if the chain is too long or comes back to the file.
    pub fn open_file(&self, path: &Path, access: Access) -> Result<Arc<ImageFile>, OpenError> {
        self.add_image(path)?;
        self.open_locked(path, access, |path| {
            OpenError::image(&path.clone(), ChainError::Cycle { path })
        })
    }

    /// Opens and locks the file at `path`, which the image at `above` names for its data.
    ///
    /// # Errors
    ///
    /// [`OpenError`], also if the file is one of the chain's already.
    pub fn open_data_file(
        &self,
        above: &Path,
        path: &Path,
        access: Access,
    ) -> Result<Arc<ImageFile>, OpenError> {
        let is_taken = |path| OpenError::image(above, ChainError::DataFileTaken { path });
        self.open_locked(path, access, is_taken)
            .map_err(|error| match error {
                OpenError::Image { .. } => error,
                error => OpenError::DataFile {
                    path: above.to_owned(),
                    source: Box::new(error),
                },
            })
    }

    /// Opens and locks a file, unless it is one of those seen so far.
    fn open_locked(
        &self,
        path: &Path,
        access: Access,
        is_taken: impl FnOnce(PathBuf) -> OpenError,
    ) -> Result<Arc<ImageFile>, OpenError> {
        let write = access.is_write();
        let options = FileOptions {
            write,
            direct: self.options.direct,
        };
        let file = self.files.open(path, options)?;
        let mut seen = self.seen.borrow_mut();
        let identity = identity(&file);
        if identity.is_some() && seen.contains(&identity) {
            return Err(is_taken(path.to_owned()));
        }
        seen.push(identity);
        if let Some(granularity) = self.options.lock {
            let mode = if write { LockMode::Write } else { LockMode::Read };
            file.lock(&self.options.lock_set, mode, granularity)?;
        }
        Ok(file)
    }

    /// Adds a temporary file to the chain: one that nobody else can open, and that needs no lock.
    ///
    /// # Errors
    ///
    /// [`OpenError`], if the chain is too long.
    pub fn add_temporary(&self, file: &ImageFile) -> Result<(), OpenError> {
        debug_assert!(file.is_temporary(), "others may have it open");
        self.add_image(file.path())?;
        self.seen.borrow_mut().push(identity(file));
        Ok(())
    }

    /// Counts an image of the chain.
    fn add_image(&self, path: &Path) -> Result<(), OpenError> {
        if self.images.get() >= CHAIN_DEPTH_MAX {
            return Err(OpenError::image(path, ChainError::TooDeep));
        }
        self.images.update(|images| images + 1);
        Ok(())
    }

    /// Opens the disk below the image at `above`: the image at `path`, in the format that `above` records for it.
    ///
    /// # Errors
    ///
    /// [`OpenError::Backing`] for what is wrong below, [`OpenError::Image`] if the format is none of this opening's.
    pub fn open_below<'b>(
        &'b self,
        above: &'b Path,
        path: &'b Path,
        format: &'b [u8],
    ) -> LocalBoxFuture<'b, Result<Arc<dyn Disk>, OpenError>> {
        Box::pin(async move {
            let known = self
                .formats
                .iter()
                .find(|known| known.name().as_bytes() == format);
            let Some(format) = known else {
                let names = self.formats.iter().map(|format| format!("{:?}", format.name()));
                let error = ChainError::Format {
                    format: String::from_utf8_lossy(format).into_owned(),
                    expected: names.collect::<Vec<_>>().join(" or "),
                };
                return Err(OpenError::image(above, error));
            };
            let first = self.seen.borrow().len();
            self.descents.update(|descents| descents + 1);
            let opened = format.open(self, path, Access::Below).await;
            self.descents.update(|descents| descents - 1);
            let disk = opened.map_err(|error| OpenError::Backing {
                path: above.to_owned(),
                source: Box::new(error),
            })?;
            let (file, info) = (self.seen.borrow().get(first).copied().flatten(), disk.info());
            let mut layers = self.layers.borrow_mut();
            if !layers.is_empty() {
                let smallest = self.cluster_bytes.get().min(info.preferred_io_bytes.into());
                self.cluster_bytes.set(smallest);
            }
            layers.push(LayerIdentity {
                file,
                format: format.name(),
                size_bytes: info.size_bytes,
            });
            Ok(match &self.options.indexes {
                // The uppermost of them. What lies below one image has no choice of layers.
                Some(indexes) if self.descents.get() == 0 && layers.len() > 1 => indexes.indexed(
                    disk,
                    &layers,
                    self.cluster_bytes.get(),
                    self.index_bytes.get(),
                    self.options.lock.is_some(),
                ),
                _ => disk,
            })
        })
    }

    /// Divides the budget of a table cache, in bytes, of an image that lies below one and above another: returns what is left
    /// when the chain's index has got its part, a quarter.
    pub fn share_with_index(&self, budget: u64) -> u64 {
        if self.options.indexes.is_none() {
            return budget;
        }
        self.index_bytes.update(|bytes| bytes.saturating_add(budget / 4));
        budget - budget / 4
    }
}

fn identity(file: &ImageFile) -> Option<(u64, u64)> {
    let file = std::fs::File::from(file.as_fd().try_clone_to_owned().ok()?);
    let meta = file.metadata().ok()?;
    Some((meta.dev(), meta.ino()))
}
