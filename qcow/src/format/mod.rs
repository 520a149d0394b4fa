//! The contents of a QCOW2 image on disk: parse and encode, pure functions over bytes.
//!
//! One file per on-disk structure, each named after its section in the format's specification (`docs/interop/qcow2`
//! of QEMU). Invariants:
//!
//! - nothing does I/O, and nothing keeps state;
//! - every input is untrusted: no function panics, overflows or allocates more than its input's length, whatever the
//!   bytes say;
//! - unknown contents are kept, so that parse and encode together change nothing else;
//! - all integers on disk are big-endian.
//!
//! Three steps decide if an image is *usable*, so that tools which only describe an image can stop early:
//! [`Header::decode`] (the bytes have the format's shape), [`Header::validate`] (the values keep the format's rules
//! and QEMU's limits), and [`Header::require_supported`] (this crate can serve it).

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects, clippy::indexing_slicing))]

pub mod bitmap;
pub(crate) mod bytes;
mod cluster_use;
pub mod data_file;
mod entry;
pub mod extension;
mod features;
pub mod geometry;
pub mod header;
mod header_bitmaps;
mod header_fields;
#[cfg(test)]
mod header_tests;
pub mod l1;
pub mod l2;
#[cfg(test)]
mod l2_tests;
pub mod positions;
pub mod refcount;
pub(crate) mod references;
pub mod sizes;
pub mod snapshot;
pub mod subclusters;
pub mod validate;

pub use bitmap::{BitmapCluster, BitmapDirectoryEntry, BitmapFlags, BitmapTableEntry};
pub use cluster_use::ClusterUse;
pub use entry::EntryError;
pub use extension::{BitmapsExtension, Extension, ExtensionError, FeatureKind, FeatureName};
pub use geometry::Geometry;
pub use header::{
    Autoclear, Compatible, CompressionType, CryptMethod, Header, HeaderError, Incompatible, Unsupported,
};
pub(crate) use header_bitmaps::BitmapsLayout;
pub use header_bitmaps::NoRoomForBitmaps;
pub(crate) use header_fields::HeaderFields;
pub use l1::{L1Entry, L2TableRef};
pub use l2::{CompressedExtent, L2Entry, L2Mapping, L2Table, L2TableMut};
pub use positions::{GuestCluster, GuestOffset, HostCluster, HostOffset};
pub use refcount::{RefcountTableEntry, SetRefcountError};
pub use sizes::{ClusterBits, L2EntryWidth, RefcountOrder, Version};
pub use snapshot::SnapshotEntry;
pub use subclusters::{SubclusterBitmap, SubclusterKind};
