//! Files that hold images: one opened file shared by all workers, and each worker's view of it.
//!
//! An [`ImageFile`] is opened once. Every worker makes a [`FileView`] with a descriptor of its own,
//! registered with its ring. A view hides the demands of direct I/O: offset, length and address alignment
//! are three separate conditions, found with `statx(2)` (`STATX_DIOALIGN`). Only transfers that break one of
//! them go through a bounce buffer.
//!
//! Invariants:
//!
//! - All I/O is positional (duplicates share an offset).
//! - A read-modify-write of a block excludes every other write, punch and zeroing in that block until it has ended.
//! - Once a sync has failed, on any view, none succeeds any more (`sync_rounds`).
//! - A sync of a temporary file asks the kernel for nothing: the file ends with the process.
//! - An op that may have changed the file is counted before its answer can be seen (`changes`).
//!
//! ```text
//!  open, alignment ──▶ ImageFile (shared) ──▶ FileView (one per worker) ──▶ read_write, allocation ──▶ Ring
//!                       syncs, range locks,                                  bounce, transfer, space
//!                       waits for space
//! ```

mod alignment;
mod allocation;
mod bounce;
mod failures;
mod flags;
mod image_file;
mod inherited;
mod open;
mod ranges;
mod read_write;
mod space;
mod temporary;
mod transfer;
mod view;

pub use alignment::Alignment;
pub use image_file::{HostFiles, ImageFile, OpenFiles};
pub use inherited::DescriptorRefusal;
pub use open::{FileOptions, OpenFileError};
pub use read_write::IoFuture;
pub use view::FileView;

#[cfg(all(test, shuttle))]
mod model;
#[cfg(test)]
mod tests;
