//! QCOW2 images: an asynchronous, crash-safe, multi-queue engine.
//!
//! [`mod@format`] is what is on disk, pure functions over bytes; `metadata` is what is in memory; `engine` is
//! what happens to a request; [`image`] is what happens to an image. To serve an image, open it with
//! [`QcowDisk::open`] and use it as a [`block::Disk`].
//!
//! What must stay true: an image is untrusted input, and a power cut at any instant leaves at most leaks.

#![forbid(unsafe_code)]

mod engine;
pub mod format;
pub mod image;
mod metadata;

pub use engine::QcowDisk;
pub use image::{OpenError, OpenOptions};
