//! QCOW2 images: an asynchronous, crash-safe, multi-queue engine, and the tools for whole images.
//!
//! ```text
//!  Request ──▶ engine ──lookup, plan, publish──▶ metadata (in memory, behind one lock; no I/O)
//!              │  ▲                                  │ parse, encode
//!              │  └── load, write back ──────────────▼
//!              └──data ops──▶ block::file         format (pure functions over bytes)
//!
//!  offline ──▶ open ──▶ engine ──▶ image: create, describe, check, repair; reads of an image's directories
//! ```
//!
//! [`mod@format`] is what is on disk; `metadata` what is in memory; `engine` executes requests. [`image`] works on an
//! image's file without the engine; [`offline`] has the engine change an image that is not served. Open an image with
//! [`QcowDisk::open`] and use it as a [`block::Disk`]:
//!
//! ```
//! use block::file::{FileOptions, ImageFile};
//! use block::{AlignedBuf, Context, Disk, Op, ask};
//! use qcow::image::{CreateOptions, create};
//! use qcow::{OpenOptions, QcowDisk};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let file = tempfile::NamedTempFile::new()?;
//! let cx = Context::syscalls();
//! let view = ImageFile::open(file.path(), FileOptions { write: true, direct: false })?.view(&cx)?;
//! cx.block_on(create(&view, &CreateOptions::new(1 << 30)))??;
//!
//! let disk = QcowDisk::open(file.path(), &OpenOptions::default())?;
//! assert_eq!(disk.info().size_bytes, 1 << 30);
//!
//! let queue = disk.clone().open_queue(&cx)?;
//! let data = AlignedBuf::from_slice(&[0xaa; 4096]);
//! cx.block_on(ask(&*queue, Op::Write { fua: false }, 0, 4096, data.into()))??;
//!
//! drop(queue);
//! cx.block_on(disk.close(&cx))??; // flushes; the write is durable
//! # Ok(())
//! # }
//! ```
//!
//! Invariants: an image is untrusted input; a power cut at any instant leaves at most leaked clusters; what a completed
//! flush covered is kept.

#![forbid(unsafe_code)]

mod engine;
pub mod format;
pub mod image;
mod invariant;
pub mod luks;
mod metadata;
pub mod offline;
mod open;

pub use block::open::OpenError;
pub use engine::{
    BitmapChange, BitmapStorage, BitmapsError, CompactError, CompactOptions, CompactProgress, Compacted,
    DiskSize, EngineCounts, Fixed, FixedClusters, MappingReader, QcowDisk, ShrinkError, SnapshotError,
    SnapshotSelector, TableMemory,
};
pub use metadata::cluster_use::StructureError;
pub use open::{BITMAPS_MEMORY_DEFAULT_BYTES, ImageError, L2_CACHE_DEFAULT_MAX_BYTES, OpenOptions, Qcow2};
