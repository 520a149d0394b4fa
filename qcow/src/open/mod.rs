//! Opening of images: lock, header, tables, backing chain, and the preparations for the first write.
//!
//! Invariants:
//! - nothing is probed (a format is given or recorded);
//! - backing files are opened only when allowed;
//! - a chain is finite (no image twice, a bounded depth);
//! - a failed open leaves every byte as it was.

mod error;
mod load;
mod options;
mod overlay;

use std::path::Path;
use std::sync::Arc;

use block::file::{FileView, HostFiles, ImageFile, OpenFiles};
use block::open::{Access, Format, OpenError, Opening};
use block::raw::Raw;
use block::ring::RingKind;
use block::{Context, Disk, LocalBoxFuture};

pub use error::ImageError;
use load::{announcement, check_header, default_cache, io_length, load, prepare};
pub use options::{BITMAPS_MEMORY_DEFAULT_BYTES, L2_CACHE_DEFAULT_MAX_BYTES, OpenOptions};

use crate::engine::{
    Announcement, Backing, BitmapPolicy, DataFile, Encryption, Parts, Policy, QcowDisk, SnapshotError,
    SnapshotSelector, header_of,
};
use crate::format::{CryptMethod, Header};
use crate::image::keys::read_luks;
use crate::image::{KeysError, backing_path};
use crate::luks::{self, Secret};

/// The QCOW2 format. Images below the first are opened with the same options, read-only.
#[derive(Clone, Debug, Default)]
pub struct Qcow2(pub OpenOptions);

impl Format for Qcow2 {
    fn name(&self) -> &'static str {
        "qcow2"
    }

    fn open<'a>(
        &'a self,
        opening: &'a Opening<'a>,
        path: &'a Path,
        access: Access,
    ) -> LocalBoxFuture<'a, Result<Arc<dyn Disk>, OpenError>> {
        Box::pin(
            async move { Ok(self.open_image(opening, path, access, Below::Opened).await? as Arc<dyn Disk>) },
        )
    }
}

impl Qcow2 {
    /// Opens as [`Format::open`] does, for callers that use the disk as what it is.
    ///
    /// # Errors
    ///
    /// As for [`Format::open`].
    pub async fn open_qcow(
        &self,
        opening: &Opening<'_>,
        path: &Path,
        access: Access,
    ) -> Result<Arc<QcowDisk>, OpenError> {
        self.open_image(opening, path, access, Below::Opened).await
    }
}

impl QcowDisk {
    /// Opens the image at `path`, and its backing chain of QCOW2 and raw files if that is allowed.
    ///
    /// # Errors
    ///
    /// [`OpenError`], with an [`ImageError`] for what is wrong in an image. No byte of any image has been changed then,
    /// unless the host failed while the refcounts of an image that was not closed cleanly were being rebuilt.
    pub fn open(path: &Path, options: &OpenOptions) -> Result<Arc<Self>, OpenError> {
        // A ring would be wasted on the few reads of an open.
        let io = |error: std::io::Error| {
            let source = error.into();
            OpenError::image(
                path,
                ImageError::Io {
                    what: "wait for I/O",
                    source,
                },
            )
        };
        let cx = Context::new(RingKind::Syscalls, 64).map_err(|error| io(error.into()))?;
        match cx.block_on(Self::open_on(&cx, &HostFiles, path, options)) {
            Ok(result) => result,
            Err(error) => Err(io(error)),
        }
    }

    /// Opens as [`QcowDisk::open`] does, with the images taken from `files` and the I/O done by `cx`.
    ///
    /// # Errors
    ///
    /// As for [`QcowDisk::open`].
    pub async fn open_on(
        cx: &Context,
        files: &dyn OpenFiles,
        path: &Path,
        options: &OpenOptions,
    ) -> Result<Arc<Self>, OpenError> {
        let qcow2 = Qcow2(options.clone());
        let formats: [&dyn Format; 2] = [&qcow2, &Raw::default()];
        let opening = Opening::new(cx, files, &formats, options.of_chain());
        let access = if options.read_only {
            Access::Read
        } else {
            Access::Write
        };
        qcow2.open_image(&opening, path, access, Below::Opened).await
    }
}

/// Opens the image at `path` for writing, and no image below it: for operations that no guest's data is needed for. What
/// the image does not map must not be read or written.
pub(crate) async fn open_without_backing(
    cx: &Context,
    path: &Path,
    options: &OpenOptions,
) -> Result<Arc<QcowDisk>, OpenError> {
    let opening = Opening::new(cx, &HostFiles, &[], options.of_chain());
    let qcow2 = Qcow2(options.clone());
    qcow2
        .open_image(&opening, path, Access::Write, Below::LeftOut)
        .await
}

/// The images below an image that is opened.
#[derive(Debug)]
pub(super) enum Below {
    /// Opened with it.
    Opened,
    /// Open already, whatever the header names.
    Given(Arc<dyn Disk>),
    /// Not needed.
    LeftOut,
}

impl Qcow2 {
    async fn open_image(
        &self,
        opening: &Opening<'_>,
        path: &Path,
        access: Access,
        below: Below,
    ) -> Result<Arc<QcowDisk>, OpenError> {
        let (options, write) = (&self.0, access.is_write());
        let image = |source: ImageError| OpenError::image(path, source);
        let snapshot = options.snapshot.as_ref().filter(|_| access != Access::Below);
        if let (Some(snapshot), true) = (snapshot, write) {
            return Err(image(ImageError::SnapshotForWriting(snapshot.clone())));
        }
        let file = opening.open_file(path, access)?;
        self.open_in(opening, file, access, snapshot, below).await
    }

    /// Opens the image in `file`, or a snapshot of it.
    pub(super) async fn open_in(
        &self,
        opening: &Opening<'_>,
        file: Arc<ImageFile>,
        access: Access,
        snapshot: Option<&SnapshotSelector>,
        below: Below,
    ) -> Result<Arc<QcowDisk>, OpenError> {
        let (options, write, path) = (&self.0, access.is_write(), file.path());
        let image = |source: ImageError| OpenError::image(path, source);
        let view = file.view(opening.context()).map_err(|error| {
            image(ImageError::Io {
                what: "duplicate a descriptor",
                source: error.into(),
            })
        })?;
        let (mut header, mut fields) = check_header(&view, write).await.map_err(image)?;
        let lends_no_secret = match &below {
            Below::Opened => false,
            Below::Given(_) => true,
            Below::LeftOut => options.secret.is_none(),
        };
        let backing = match below {
            Below::Opened => open_backing(opening, path, &header).await?,
            Below::Given(disk) => Some(Backing::new(disk)),
            Below::LeftOut if header.has_data_file() && !options.data_files => {
                return Err(image(SnapshotError::DataFile.into()));
            }
            Below::LeftOut => None,
        };
        // After the images below: it may be none of them.
        let data_file = open_data_file(opening, path, &header, access)?;
        let encryption = encryption(&view, &header, access, lends_no_secret, options.secret.as_ref())
            .await
            .map_err(image)?;
        // Nothing has been written so far; from here on only a rebuild writes.
        if prepare(&view, &header, write).await.map_err(image)? {
            (header, fields) = check_header(&view, write).await.map_err(image)?;
        }
        if let Some(snapshot) = snapshot {
            let found = header_of(&view, &header, snapshot).await;
            header = found.map_err(|error| image(error.into()))?;
        }
        let covered_bytes = backing.as_ref().map_or(0, |backing| backing.size);
        let mut cache = (options.l2_cache_bytes).unwrap_or_else(|| default_cache(&header.geometry()));
        if access == Access::Below && backing.is_some() {
            cache = opening.share_with_index(cache);
        }
        let metadata = load(&view, &header, cache, covered_bytes, write)
            .await
            .map_err(image)?;
        let announcement = if write {
            announcement(&view, &header).await
        } else {
            Announcement::default()
        };
        // Not sooner: a caller that opens an image needs the error that there is no space.
        if write && options.wait_for_space {
            file.wait_for_space();
            if let Some(data) = &data_file {
                data.file.wait_for_space();
            }
        }
        Ok(QcowDisk::from_parts(Parts {
            file,
            data_file,
            policy: Policy {
                read_only: !write,
                sparse: options.sparse,
                discard_no_unref: options.discard_no_unref,
                persist_mappings: options.persist_mappings,
                bitmaps: BitmapPolicy {
                    storage: options.bitmaps,
                    memory_bytes: options.bitmaps_memory_bytes,
                },
            },
            compression: header.compression,
            encryption,
            backing,
            metadata,
            header: fields,
            announcement,
            inflate_threads: options.inflate_threads,
            table_memory: options.table_memory.clone(),
        }))
    }
}

/// Returns the encryption of an image's data. Takes seconds of CPU if it has one. `without`: the secret, if there is one, is
/// not for this image, and its data is not needed.
async fn encryption(
    view: &FileView,
    header: &Header,
    access: Access,
    without: bool,
    secret: Option<&Secret>,
) -> Result<Encryption, ImageError> {
    let method = header.crypt_method;
    let is_encrypted = method != CryptMethod::None;
    let is_below = access == Access::Below;
    match secret.filter(|_| !is_below && !without) {
        None if !is_encrypted => Ok(Encryption::Plain),
        None if is_below => Err(ImageError::EncryptedBelow { method }),
        None if without => Ok(Encryption::Locked),
        None => Err(ImageError::SecretMissing { method }),
        Some(_) if !is_encrypted => Err(ImageError::SecretUnused),
        Some(_) if method == CryptMethod::Aes && access == Access::Write => Err(ImageError::AesForWriting),
        Some(secret) if method == CryptMethod::Aes => Ok(Encryption::Aes(Arc::new(luks::aes_cbc(secret)))),
        Some(secret) => {
            let file_len = view.len().map_err(io_length)?;
            let (_, luks) = read_luks(view, header, file_len).await?;
            let cipher = luks::unlock(&luks, secret).map_err(KeysError::from)?;
            Ok(Encryption::Luks(Arc::new(cipher)))
        }
    }
}

async fn open_backing(
    opening: &Opening<'_>,
    path: &Path,
    header: &Header,
) -> Result<Option<Backing>, OpenError> {
    let Some(name) = &header.backing_name else {
        return Ok(None);
    };
    let text = String::from_utf8_lossy(name).into_owned();
    if !opening.allows_backing_files() {
        return Err(OpenError::image(
            path,
            ImageError::BackingNotAllowed { name: text },
        ));
    }
    let Some(format) = header.backing_format() else {
        return Err(OpenError::image(
            path,
            ImageError::BackingFormatMissing { name: text },
        ));
    };
    let below = backing_path(path, name)
        .ok_or_else(|| OpenError::image(path, ImageError::BackingName { name: text }))?;
    let disk = opening.open_below(path, &below, format).await?;
    Ok(Some(Backing::new(disk)))
}

/// Opens the file that has the image's data, if there is one.
fn open_data_file(
    opening: &Opening<'_>,
    path: &Path,
    header: &Header,
    access: Access,
) -> Result<Option<DataFile>, OpenError> {
    if !header.has_data_file() {
        return Ok(None);
    }
    let image = |source: ImageError| OpenError::image(path, source);
    let name = header.data_file_name().map_err(|error| image(error.into()))?;
    let named = || name.to_owned();
    if !opening.allows_data_files() {
        return Err(image(ImageError::DataFileNotAllowed { name: named() }));
    }
    let data = backing_path(path, name.as_bytes())
        .ok_or_else(|| image(ImageError::DataFilePath { name: named() }))?;
    let file = opening.open_data_file(path, &data, access)?;
    let view = file.view(opening.context()).map_err(|error| {
        image(ImageError::Io {
            what: "duplicate a descriptor",
            source: error.into(),
        })
    })?;
    let len = view.len().map_err(|error| image(io_length(error)))?;
    let size = header.geometry().virtual_size();
    if len < size {
        return Err(image(ImageError::DataFileTooShort {
            path: data,
            len,
            size,
        }));
    }
    Ok(Some(DataFile {
        file,
        is_raw: header.has_raw_data_file(),
    }))
}
