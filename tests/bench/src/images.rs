//! The images that are measured, made by QEMU's tools so that nobody plays at home.
//!
//! All QCOW2 images have 64 KiB clusters, but one with subclusters. They lie in one directory, are made when first asked for, and
//! are removed at the end. Data comes from [`crate::content`].

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::cache;
use crate::content;
use crate::process;
use crate::space;
use crate::workload::CLUSTER_BYTES;

/// The size of the images with data, in bytes.
pub(crate) const DATA_BYTES: u64 = 2 << 30;
/// The size of the compressed images, in bytes.
pub(crate) const COMPRESSED_BYTES: u64 = 1 << 30;
/// The size of the empty images, in bytes: 32,768 clusters to allocate.
pub(crate) const FRESH_BYTES: u64 = 2 << 30;
/// The size of the image whose memory needs are measured, in bytes.
pub(crate) const HUGE_BYTES: u64 = 1 << 40;

/// The size of the images of a test, in bytes.
#[cfg(test)]
pub(crate) const TEST_BYTES: u64 = 8 << 20;

/// The size of the image whose persistent bitmap has very many granules, in bytes.
pub(crate) const WIDE_BYTES: u64 = 25 << 30;
/// The size of these granules, in bytes: there are as many as a disk of 100 GiB has by default.
const WIDE_GRANULE_BYTES: u64 = 16 << 10;
/// The size of the image that is half free, in bytes.
pub(crate) const HALF_FREE_BYTES: u64 = 10 << 30;

/// The name of the bitmap of [`Source::ScratchBitmap`] and [`Source::WideBitmap`].
pub(crate) const BITMAP: &str = "changes";

/// The number of images below the disk of [`Source::Chain`].
pub(crate) const CHAIN_IMAGES: u64 = 32;

/// The secret of [`Source::Luks`].
const SECRET: &str = "open sesame";

/// The directory of the images, below the one that is given.
const OWN_DIRECTORY: &str = "ringdisk-bench";

/// The longest time to make an image.
const LIMIT: Duration = Duration::from_secs(300);

/// An image's format.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) enum Format {
    /// The guest's bytes as they are.
    Raw,
    /// QCOW2.
    Qcow2,
}

impl Format {
    /// As QEMU and we call it.
    #[must_use]
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }
}

/// A kind of image to measure on.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) enum Source {
    /// A raw file with data, only read.
    Raw,
    /// A raw file with data, to be overwritten.
    RawScratch,
    /// QCOW2 with every cluster allocated, only read.
    Data,
    /// The same, to be overwritten.
    Scratch,
    /// Compressed with deflate.
    Deflate,
    /// Compressed with zstd.
    Zstd,
    /// An empty overlay on [`Source::Data`]. Made anew for each measurement that writes.
    Overlay,
    /// An empty overlay on [`CHAIN_IMAGES`] images, over which the clusters are spread evenly; only read.
    Chain,
    /// Nothing allocated. Made anew for each measurement.
    Fresh,
    /// A raw file that is one hole, as large as the disk of [`Source::Fresh`]. Made anew for each measurement.
    RawFresh,
    /// One tebibyte, every L2 table allocated, no data.
    Huge,
    /// One tebibyte whose clusters are all mapped, no data, to have snapshots.
    Mapped,
    /// With extended L2 entries, above the data file of [`Source::DataFile`].
    DataExtended,
    /// With extended L2 entries, above the data file of [`Source::ScratchDataFile`].
    ScratchExtended,
    /// As [`Source::Overlay`], with clusters of 128 KiB in subclusters of 4 KiB.
    OverlayExtended,
    /// As [`Source::Data`], with a raw data file that has the guest's bytes.
    DataFile,
    /// As [`Source::Scratch`], with a raw data file that has the guest's bytes.
    ScratchDataFile,
    /// As [`Source::Data`], encrypted.
    Luks,
    /// As [`Source::Scratch`], with a bitmap.
    ScratchBitmap,
    /// The same file, whose bitmap is disabled.
    ScratchBitmapOff,
    /// [`WIDE_BYTES`] of zeros that are written, to be overwritten, with a bitmap, which is to be durable.
    WideBitmap,
    /// The same file, whose bitmap is disabled.
    WideBitmapOff,
    /// Data in every other mebibyte of [`HALF_FREE_BYTES`]; what was between is discarded, and the file as long as with it.
    HalfFree,
}

impl Source {
    /// Returns true if writing to the image uses it up.
    #[must_use]
    pub(crate) fn used_up_by_writing(self) -> bool {
        matches!(
            self,
            Self::Overlay | Self::OverlayExtended | Self::Fresh | Self::RawFresh
        )
    }

    /// The size of the disk in it, in bytes.
    #[must_use]
    pub(crate) fn disk_bytes(self) -> u64 {
        match self {
            Self::Raw
            | Self::RawScratch
            | Self::Data
            | Self::Scratch
            | Self::Overlay
            | Self::Chain
            | Self::DataExtended
            | Self::ScratchExtended
            | Self::OverlayExtended
            | Self::DataFile
            | Self::ScratchDataFile
            | Self::ScratchBitmap
            | Self::ScratchBitmapOff
            | Self::Luks => DATA_BYTES,
            Self::Deflate | Self::Zstd => COMPRESSED_BYTES,
            Self::Fresh | Self::RawFresh => FRESH_BYTES,
            Self::Huge | Self::Mapped => HUGE_BYTES,
            Self::WideBitmap | Self::WideBitmapOff => WIDE_BYTES,
            Self::HalfFree => HALF_FREE_BYTES,
        }
    }

    /// Returns true if all of its disk is data, in as many bytes of a file that no other image has.
    fn is_full(self) -> bool {
        matches!(
            self,
            Self::Raw
                | Self::RawScratch
                | Self::Data
                | Self::Scratch
                | Self::DataFile
                | Self::ScratchDataFile
                | Self::ScratchBitmap
                | Self::ScratchBitmapOff
                | Self::Luks
        )
    }

    /// Returns the most bytes of the host's disk that are in use while it is made, with the copy that lays it out.
    fn room_bytes(self) -> u64 {
        match self {
            // Their holes stay.
            Self::Huge | Self::Mapped => 1 << 30,
            Self::WideBitmap | Self::WideBitmapOff => WIDE_BYTES + (1 << 30),
            _ => 2 * self.disk_bytes(),
        }
    }

    /// Returns the bytes of a granule of its bitmap, if it has one.
    fn granule_bytes(self) -> Option<u64> {
        match self {
            Self::ScratchBitmap | Self::ScratchBitmapOff => Some(CLUSTER_BYTES),
            Self::WideBitmap | Self::WideBitmapOff => Some(WIDE_GRANULE_BYTES),
            _ => None,
        }
    }

    /// Returns the options of an overlay.
    fn overlay_options(self) -> &'static str {
        match self {
            Self::OverlayExtended => "cluster_size=128k,extended_l2=on",
            _ => "cluster_size=64k",
        }
    }

    /// Returns its format.
    pub(crate) fn format(self) -> Format {
        match self {
            Self::Raw | Self::RawScratch | Self::RawFresh => Format::Raw,
            _ => Format::Qcow2,
        }
    }

    fn file_name(self) -> &'static str {
        match self {
            Self::Raw => "base.raw",
            Self::RawScratch => "scratch.raw",
            Self::Data => "data.qcow2",
            Self::Scratch => "scratch.qcow2",
            Self::Deflate => "deflate.qcow2",
            Self::Zstd => "zstd.qcow2",
            Self::Overlay => "overlay.qcow2",
            Self::Chain => "chain.qcow2",
            Self::Fresh => "fresh.qcow2",
            Self::RawFresh => "fresh.raw",
            Self::Huge => "huge.qcow2",
            Self::Mapped => "mapped.qcow2",
            Self::DataExtended => "data-extended.qcow2",
            Self::ScratchExtended => "scratch-extended.qcow2",
            Self::OverlayExtended => "overlay-extended.qcow2",
            Self::DataFile => "data-file.qcow2",
            Self::ScratchDataFile => "scratch-data-file.qcow2",
            Self::Luks => "luks.qcow2",
            Self::ScratchBitmap | Self::ScratchBitmapOff => "scratch-bitmap.qcow2",
            Self::WideBitmap | Self::WideBitmapOff => "wide-bitmap.qcow2",
            Self::HalfFree => "half-free.qcow2",
        }
    }

    /// Returns true if its blocks hold what [`content`] says.
    #[must_use]
    pub(crate) fn has_content(self) -> bool {
        matches!(
            self,
            Self::Raw
                | Self::Data
                | Self::Deflate
                | Self::Zstd
                | Self::Overlay
                | Self::DataExtended
                | Self::OverlayExtended
                | Self::DataFile
                | Self::Luks
        )
    }

    /// Returns the name of the file that has the guest's bytes, if that is not the image.
    fn data_file_name(self) -> Option<&'static str> {
        match self {
            Self::DataFile | Self::DataExtended => Some("data-file.raw"),
            Self::ScratchDataFile | Self::ScratchExtended => Some("scratch-data-file.raw"),
            _ => None,
        }
    }

    /// Returns the image whose data file it shares.
    fn shares(self) -> Option<Self> {
        match self {
            Self::DataExtended => Some(Self::DataFile),
            Self::ScratchExtended => Some(Self::ScratchDataFile),
            _ => None,
        }
    }
}

/// An image file.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Image {
    /// Its path.
    pub(crate) path: PathBuf,
    /// Its format.
    pub(crate) format: Format,
    /// The image below it.
    pub(crate) backing: Option<Box<Image>>,
    /// True if its blocks hold what [`content`] says.
    pub(crate) has_content: bool,
    /// The raw file with the guest's bytes, if they are not in the image.
    pub(crate) data_file: Option<PathBuf>,
    /// The file with the secret that opens it, if it is encrypted.
    pub(crate) secret_file: Option<PathBuf>,
    /// Our engine is to keep its bitmaps durable.
    pub(crate) durable_bitmaps: bool,
}

/// The directory of images.
#[derive(Debug)]
pub(crate) struct Images {
    directory: PathBuf,
    made: HashMap<Source, Image>,
}

impl Images {
    /// Uses a directory of our own below `directory`. With `keep`, images that a run before left there are
    /// used again; otherwise they go.
    ///
    /// # Errors
    ///
    /// If it cannot be made, or is on no file system that can tell a disk from its cache.
    pub(crate) fn new(directory: &Path, keep: bool) -> io::Result<Self> {
        // Ours alone: it is removed with all in it.
        let directory = directory.join(OWN_DIRECTORY);
        if !keep && directory.exists() {
            remove_directory(&directory)?;
        }
        fs::create_dir_all(&directory)?;
        let directory = directory.canonicalize()?;
        let mut stat = Command::new("stat");
        stat.args(["-f", "-c", "%T"]).arg(&directory);
        let kind = process::output(stat, Duration::from_secs(10))?;
        if matches!(kind.trim(), "tmpfs" | "ramfs" | "overlayfs") {
            fs::remove_dir(&directory)?;
            let shown = directory.display();
            return Err(io::Error::other(format!(
                "{shown} is on {}; set RINGDISK_BENCH_DIR to a directory on ext4",
                kind.trim()
            )));
        }
        Ok(Self {
            directory,
            made: HashMap::new(),
        })
    }

    /// The images of a test: [`Source::Raw`] and [`Source::Data`] with [`TEST_BYTES`] each.
    #[cfg(test)]
    pub(crate) fn of_test(directory: &Path) -> io::Result<Self> {
        let mut images = Self {
            directory: directory.to_owned(),
            made: HashMap::new(),
        };
        write_content(&directory.join(Source::Raw.file_name()), TEST_BYTES)?;
        let data = directory.join(Source::Data.file_name());
        images.convert(TEST_BYTES, &["-o", "cluster_size=64k"], &data)?;
        images.image(Source::Data)?;
        Ok(images)
    }

    /// The directory, for sockets and logs.
    #[must_use]
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Waits until the file system of the images has nothing left to be written.
    ///
    /// # Errors
    ///
    /// If it cannot write.
    pub(crate) fn settle(&self) -> io::Result<()> {
        Ok(rustix::fs::syncfs(File::open(&self.directory)?)?)
    }

    /// The image of a kind, made now if it is not there yet.
    ///
    /// # Errors
    ///
    /// If a tool is missing or fails, or the disk is full.
    pub(crate) fn image(&mut self, source: Source) -> io::Result<Image> {
        if let Some(image) = self.made.get(&source) {
            return Ok(image.clone());
        }
        let image = self.make(source)?;
        if !source.used_up_by_writing() {
            self.made.insert(source, image.clone());
        }
        Ok(image)
    }

    /// Forgets an image that somebody may have spoiled: it is made anew for whoever asks next.
    ///
    /// # Errors
    ///
    /// If it cannot be removed.
    pub(crate) fn forget(&mut self, source: Source) -> io::Result<()> {
        self.made.remove(&source);
        space::remove(&self.directory.join(source.file_name()))
    }

    fn make(&mut self, source: Source) -> io::Result<Image> {
        let path = self.directory.join(source.file_name());
        let backing = match source {
            Source::Overlay | Source::OverlayExtended => Some(Box::new(self.image(Source::Data)?)),
            Source::Chain => self.layers()?,
            _ => None,
        };
        if let Some(other) = source.shares() {
            self.image(other)?;
        }
        if source.used_up_by_writing() || !path.exists() {
            space::require(&self.directory, source.room_bytes())?;
            // Under its own name only when complete: whoever finds it there may use it.
            let partial = path.with_extension("part");
            space::remove(&path)?;
            match &backing {
                Some(below) => create_overlay_with(source.overlay_options(), &below.path, &partial)?,
                None => self.write(source, &partial)?,
            }
            if source.is_full() {
                let data_file = source.data_file_name().map(|name| self.directory.join(name));
                space::lay_out(data_file.as_deref().unwrap_or(&partial))?;
            }
            if let Some(bytes) = source.granule_bytes() {
                let bytes = bytes.to_string();
                let arguments = ["bitmap", "--add", "-f", "qcow2", "-g", &bytes].map(OsStr::new);
                let name = [partial.as_os_str(), OsStr::new(BITMAP)];
                qemu_img(&[&arguments[..], &name].concat())?;
            }
            fs::rename(&partial, &path)?;
        }
        // The kernel keeps a file in folios as large as the writes that filled it, and finds a page among few large ones in a
        // quarter of the time. Evicted, images made in different ways are all cached by reading them in order.
        cache::evict(&File::open(&path)?)?;
        let data_file = source.data_file_name().map(|name| self.directory.join(name));
        if let Some(data) = &data_file {
            cache::evict(&File::open(data)?)?;
        }
        Ok(Image {
            path,
            format: source.format(),
            backing,
            has_content: source.has_content(),
            data_file,
            secret_file: (source == Source::Luks).then(|| self.secret_file()),
            durable_bitmaps: source == Source::WideBitmap,
        })
    }

    /// The images below [`Source::Chain`]: each cluster is in one of them, neighbours mostly in different ones.
    fn layers(&self) -> io::Result<Option<Box<Image>>> {
        let mut below: Option<Box<Image>> = None;
        for number in 0..CHAIN_IMAGES {
            let path = self.directory.join(format!("layer-{number}.qcow2"));
            if !path.exists() {
                let partial = path.with_extension("part");
                match &below {
                    Some(below) => create_overlay(&below.path, &partial)?,
                    None => create_empty("cluster_size=64k", &partial, DATA_BYTES)?,
                }
                let mut command = Command::new("qemu-io");
                command.args(["-f", "qcow2"]).arg(&partial);
                let clusters = 0..DATA_BYTES / CLUSTER_BYTES;
                for cluster in
                    clusters.filter(|cluster| (cluster * 13 + cluster / 32) % CHAIN_IMAGES == number)
                {
                    let at = cluster * CLUSTER_BYTES;
                    command.args(["-c", &format!("write -q -P {} {at} {CLUSTER_BYTES}", number + 1)]);
                }
                process::output(command, LIMIT)?;
                fs::rename(&partial, &path)?;
            }
            cache::evict(&File::open(&path)?)?;
            below = Some(Box::new(Image {
                path,
                format: Format::Qcow2,
                backing: below,
                has_content: false,
                data_file: None,
                secret_file: None,
                durable_bitmaps: false,
            }));
        }
        Ok(below)
    }

    fn write(&mut self, source: Source, path: &Path) -> io::Result<()> {
        let size = source.disk_bytes();
        match source {
            Source::Raw | Source::RawScratch => write_content(path, size),
            Source::RawFresh => File::create(path)?.set_len(size),
            Source::Data | Source::Scratch | Source::ScratchBitmap | Source::ScratchBitmapOff => {
                self.convert(size, &["-o", "cluster_size=64k"], path)
            }
            Source::Deflate => self.convert(
                size,
                &["-c", "-W", "-o", "cluster_size=64k,compression_type=zlib"],
                path,
            ),
            Source::Zstd => self.convert(
                size,
                &["-c", "-W", "-o", "cluster_size=64k,compression_type=zstd"],
                path,
            ),
            Source::DataExtended | Source::ScratchExtended => {
                // The tool would empty a file that is there: it is given another until it has mapped every cluster.
                let data = path.with_extension("data");
                let options = format!("{},extended_l2=on", with_data_file(&data));
                self.convert(size, &["-o", &options], path)?;
                let shared = self.directory.join(source.data_file_name().unwrap_or_default());
                let name = format!("data_file={}", shared.display());
                let arguments = ["amend", "-f", "qcow2", "-o", &name].map(OsStr::new);
                qemu_img(&[&arguments[..], &[path.as_os_str()]].concat())?;
                space::remove(&data)
            }
            Source::DataFile | Source::ScratchDataFile => {
                let data = self.directory.join(source.data_file_name().unwrap_or_default());
                self.convert(size, &["-o", &with_data_file(&data)], path)
            }
            Source::Luks => {
                let secret_file = self.secret_file();
                fs::write(&secret_file, SECRET)?;
                let object = format!("secret,id=key,file={}", secret_file.display());
                let options =
                    "cluster_size=64k,encrypt.format=luks,encrypt.key-secret=key,encrypt.iter-time=10";
                self.convert(size, &["--object", &object, "-o", options], path)
            }
            Source::Overlay | Source::OverlayExtended | Source::Chain | Source::Fresh => {
                create_empty("cluster_size=64k", path, size)
            }
            Source::Huge | Source::Mapped => {
                create_empty("cluster_size=64k,preallocation=metadata", path, size)
            }
            // Of a sparse file the file system would allocate each block, for both sides, and log that at each sync.
            Source::WideBitmap | Source::WideBitmapOff => {
                create_empty("cluster_size=64k,preallocation=full", path, size)
            }
            Source::HalfFree => {
                create_empty("cluster_size=64k,preallocation=metadata", path, size)?;
                free_half(path, size)
            }
        }
    }

    fn secret_file(&self) -> PathBuf {
        self.directory.join("secret")
    }

    /// Converts the first `bytes` of the raw image.
    fn convert(&mut self, bytes: u64, options: &[&str], path: &Path) -> io::Result<()> {
        let raw = self.image(Source::Raw)?.path;
        let mut part = OsString::from(format!("driver=raw,size={bytes},file.driver=file,file.filename="));
        part.push(&raw);
        let mut arguments: Vec<OsString> = ["convert", "--image-opts", "-m", "4", "-O", "qcow2"]
            .map(OsString::from)
            .to_vec();
        arguments.extend(options.iter().map(OsString::from));
        arguments.extend([part, path.into()]);
        qemu_img(&arguments)
    }

    /// Removes the directory and all in it.
    ///
    /// # Errors
    ///
    /// If that fails.
    pub(crate) fn remove_all(self) -> io::Result<()> {
        remove_directory(&self.directory)
    }
}

/// Returns the options of an image with a raw data file.
fn with_data_file(data: &Path) -> String {
    format!("cluster_size=64k,data_file={},data_file_raw=on", data.display())
}

fn create(arguments: &[&OsStr]) -> io::Result<()> {
    qemu_img(&[&["create", "-q", "-f", "qcow2"].map(OsStr::new)[..], arguments].concat())
}

fn create_overlay(below: &Path, path: &Path) -> io::Result<()> {
    create_overlay_with("cluster_size=64k", below, path)
}

fn create_overlay_with(options: &str, below: &Path, path: &Path) -> io::Result<()> {
    let options = ["-o", options, "-F", "qcow2", "-b"].map(OsStr::new);
    create(&[&options[..], &[below.as_os_str(), path.as_os_str()]].concat())
}

fn create_empty(options: &str, path: &Path, bytes: u64) -> io::Result<()> {
    let size = bytes.to_string();
    create(&[
        OsStr::new("-o"),
        OsStr::new(options),
        path.as_os_str(),
        OsStr::new(&size),
    ])
}

/// Writes every other mebibyte of a disk whose clusters are all mapped, and discards the others.
fn free_half(path: &Path, bytes: u64) -> io::Result<()> {
    let mut command = Command::new("qemu-io");
    let mut options =
        OsString::from("driver=qcow2,discard=unmap,file.driver=file,file.discard=unmap,file.filename=");
    options.push(path);
    command.arg("--image-opts").arg(options);
    for at in 0..bytes >> 20 {
        let what = match at % 2 {
            0 => format!("discard -q {at}M 1M"),
            _ => format!("write -q -P {} {at}M 1M", at % 255 + 1),
        };
        command.arg("-c").arg(what);
    }
    process::output(command, LIMIT).map(drop)
}

fn remove_directory(directory: &Path) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            space::remove(&entry.path())?;
        }
    }
    fs::remove_dir_all(directory)
}

fn qemu_img(arguments: &[impl AsRef<OsStr>]) -> io::Result<()> {
    let mut command = Command::new("qemu-img");
    command.args(arguments);
    process::output(command, LIMIT).map(drop)
}

/// Asks `qemu-img check` whether the image has neither errors nor leaks: a fast way to spoil an image is
/// no result.
///
/// # Errors
///
/// With what the tool found.
pub(crate) fn check(image: &Image) -> io::Result<()> {
    if image.format == Format::Raw {
        return Ok(());
    }
    qemu_img(&[OsStr::new("check"), OsStr::new("-q"), image.path.as_os_str()])
}

fn write_content(path: &Path, bytes: u64) -> io::Result<()> {
    let mut file = File::create(path)?;
    let mut cluster = vec![0; CLUSTER_BYTES as usize];
    let blocks = CLUSTER_BYTES / content::BLOCK_BYTES as u64;
    for first in (0..bytes / content::BLOCK_BYTES as u64).step_by(blocks as usize) {
        for (index, block) in (first..).zip(cluster.chunks_mut(content::BLOCK_BYTES)) {
            content::fill(index, block);
        }
        file.write_all(&cluster)?;
    }
    file.sync_all()
}
