//! The images that are measured, made by QEMU's tools so that nobody plays at home.
//!
//! All QCOW2 images have 64 KiB clusters. They lie in one directory, are made when first asked for, and
//! are removed at the end. Data comes from [`crate::content`].

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::content;
use crate::process;
use crate::workload::CLUSTER_BYTES;

/// The size of the images with data, in bytes.
pub(crate) const DATA_BYTES: u64 = 2 << 30;
/// The size of the compressed images, in bytes.
pub(crate) const COMPRESSED_BYTES: u64 = 1 << 30;
/// The size of the empty images, in bytes: 131,072 clusters to allocate.
pub(crate) const FRESH_BYTES: u64 = 8 << 30;
/// The size of the image whose memory needs are measured, in bytes.
pub(crate) const HUGE_BYTES: u64 = 1 << 40;

/// How long one image may take to make.
const LIMIT: Duration = Duration::from_secs(300);

/// What an image is.
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
    /// Nothing allocated. Made anew for each measurement.
    Fresh,
    /// One tebibyte, every L2 table allocated, no data.
    Huge,
}

impl Source {
    /// Whether writing to the image uses it up.
    #[must_use]
    pub(crate) fn used_up_by_writing(self) -> bool {
        matches!(self, Self::Overlay | Self::Fresh)
    }

    /// The size of the disk in it, in bytes.
    #[must_use]
    pub(crate) fn disk_bytes(self) -> u64 {
        match self {
            Self::Raw | Self::RawScratch | Self::Data | Self::Scratch | Self::Overlay => DATA_BYTES,
            Self::Deflate | Self::Zstd => COMPRESSED_BYTES,
            Self::Fresh => FRESH_BYTES,
            Self::Huge => HUGE_BYTES,
        }
    }

    /// Whether its blocks hold what [`content`] says.
    #[must_use]
    pub(crate) fn has_content(self) -> bool {
        matches!(
            self,
            Self::Raw | Self::Data | Self::Deflate | Self::Zstd | Self::Overlay
        )
    }
}

/// An image file.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Image {
    /// Where it is.
    pub(crate) path: PathBuf,
    /// What it is.
    pub(crate) format: Format,
    /// The image below it.
    pub(crate) backing: Option<Box<Image>>,
}

/// The directory of images.
#[derive(Debug)]
pub(crate) struct Images {
    directory: PathBuf,
    made: HashMap<Source, Image>,
}

impl Images {
    /// Uses `directory`, which is made if need be.
    ///
    /// # Errors
    ///
    /// If it cannot be made, or is on no file system that can tell a disk from its cache.
    pub(crate) fn new(directory: &Path) -> io::Result<Self> {
        fs::create_dir_all(directory)?;
        let directory = directory.canonicalize()?;
        let mut stat = Command::new("stat");
        stat.args(["-f", "-c", "%T"]).arg(&directory);
        let kind = process::output(stat, Duration::from_secs(10))?;
        if matches!(kind.trim(), "tmpfs" | "ramfs" | "overlayfs") {
            return Err(io::Error::other(format!(
                "{} is on {}; set RINGDISK_BENCH_DIR to a directory on ext4",
                directory.display(),
                kind.trim()
            )));
        }
        Ok(Self {
            directory,
            made: HashMap::new(),
        })
    }

    /// The directory, for sockets and logs.
    #[must_use]
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
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

    fn make(&mut self, source: Source) -> io::Result<Image> {
        let at = |name: &str| self.directory.join(name);
        let qcow2 = |path: PathBuf| Image {
            path,
            format: Format::Qcow2,
            backing: None,
        };
        Ok(match source {
            Source::Raw | Source::RawScratch => {
                let path = at(if source == Source::Raw {
                    "base.raw"
                } else {
                    "scratch.raw"
                });
                write_content(&path, DATA_BYTES)?;
                Image {
                    path,
                    format: Format::Raw,
                    backing: None,
                }
            }
            Source::Data | Source::Scratch | Source::Deflate | Source::Zstd => {
                let raw = self.image(Source::Raw)?.path;
                let (name, options) = match source {
                    Source::Data => ("data.qcow2", "cluster_size=64k"),
                    Source::Scratch => ("scratch.qcow2", "cluster_size=64k"),
                    Source::Deflate => ("deflate.qcow2", "cluster_size=64k,compression_type=zlib"),
                    _ => ("zstd.qcow2", "cluster_size=64k,compression_type=zstd"),
                };
                let path = self.directory.join(name);
                // Of a raw file, the driver cuts the part that is wanted.
                let mut part = OsString::from(format!(
                    "driver=raw,size={},file.driver=file,",
                    source.disk_bytes()
                ));
                part.push("file.filename=");
                part.push(&raw);
                let mut arguments = vec!["convert".into(), "--image-opts".into()];
                if matches!(source, Source::Deflate | Source::Zstd) {
                    arguments.push("-c".into());
                }
                arguments.extend(["-W", "-m", "4", "-O", "qcow2", "-o", options].map(OsString::from));
                arguments.extend([part, path.clone().into()]);
                qemu_img(&arguments)?;
                qcow2(path)
            }
            Source::Overlay => {
                let base = self.image(Source::Data)?;
                let path = self.directory.join("overlay.qcow2");
                let create = [
                    "create",
                    "-q",
                    "-f",
                    "qcow2",
                    "-F",
                    "qcow2",
                    "-o",
                    "cluster_size=64k",
                    "-b",
                ];
                let mut arguments: Vec<OsString> = create.map(OsString::from).to_vec();
                arguments.extend([base.path.clone().into(), path.clone().into()]);
                qemu_img(&arguments)?;
                Image {
                    path,
                    format: Format::Qcow2,
                    backing: Some(Box::new(base)),
                }
            }
            Source::Fresh => {
                let path = at("fresh.qcow2");
                create(&path, "cluster_size=64k", FRESH_BYTES)?;
                qcow2(path)
            }
            Source::Huge => {
                let path = at("huge.qcow2");
                create(&path, "cluster_size=64k,preallocation=metadata", HUGE_BYTES)?;
                qcow2(path)
            }
        })
    }

    /// Removes the directory and all in it.
    ///
    /// # Errors
    ///
    /// If that fails.
    pub(crate) fn remove_all(self) -> io::Result<()> {
        fs::remove_dir_all(&self.directory)
    }
}

fn create(path: &Path, options: &str, bytes: u64) -> io::Result<()> {
    let size = bytes.to_string();
    let head = ["create", "-q", "-f", "qcow2", "-o", options].map(OsStr::new);
    qemu_img(&[&head[..], &[path.as_os_str(), OsStr::new(&size)]].concat())
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
