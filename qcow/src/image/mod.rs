//! Operations on an image as a whole: create, describe, check and repair it.
//!
//! Everything runs over a [`FileView`](block::file::FileView), so the same code serves tools (on plain system calls),
//! the open path of a running disk, and a simulated disk.
//!
//! Invariants:
//! - an image is untrusted, so memory and time are bounded by the file's length, never by a number in it;
//! - only `create`, `repair` and `keys` write. [`offline`](crate::offline) has the changes that the engine makes.

mod backing;
pub(crate) mod bitmaps;
pub mod check;
mod counts;
pub mod create;
pub(crate) mod guarded_tables;
pub mod info;
pub mod keys;
mod layout;
pub mod read;
pub(crate) mod references;
pub mod repair;
mod sound;

pub use backing::backing_path;
pub use bitmaps::BitmapDirectoryError;
pub use check::{CheckError, CheckReport, Finding, Severity, Verdict, check, check_within};
pub use create::{CreateError, CreateOptions, NewDataFile, Preallocation, create, create_with_data_file};
pub use info::{BitmapList, ImageInfo, SnapshotList, info};
pub use keys::{KeysError, add_key, list_keys, remove_key};
pub use read::{Located, ReadError, read_header};
pub use repair::{RepairError, RepairReport, RepairScope, rebuild_refcounts, repair};
pub use sound::UnsoundError;
pub(crate) use sound::require_sound;

#[cfg(test)]
mod check_tests;
#[cfg(test)]
mod create_tests;
#[cfg(test)]
mod info_tests;
#[cfg(test)]
mod keys_tests;
#[cfg(test)]
mod repair_tests;
#[cfg(test)]
pub(crate) mod testing;
