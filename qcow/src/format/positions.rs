//! Positions: bytes and clusters, on the guest's disk and in the image file.
//!
//! Offsets count bytes, and cluster numbers count from zero. Each is its own type, so mixing them does not compile.

use std::fmt;
use std::ops::{Add, AddAssign, Sub};

/// The largest byte offset a file can have on Linux, and so the largest this crate accepts.
pub const FILE_OFFSET_MAX: u64 = i64::MAX as u64;

/// The smallest unit a guest addresses, in bytes.
pub const SECTOR_SIZE: u64 = 512;

/// A byte offset on the guest's disk.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct GuestOffset(u64);

/// A byte offset in the image file.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct HostOffset(u64);

/// A cluster of the guest's disk, counted from zero.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct GuestCluster(u64);

/// A cluster of the image file, counted from zero: the header is in cluster 0.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct HostCluster(u64);

/// Sums and differences of positions that are known to lie on a disk or in a file: they cannot overflow, which debug
/// builds check. Positions that an image claims go through `checked_add`.
macro_rules! distances {
    ($type:ident) => {
        #[expect(
            clippy::arithmetic_side_effects,
            reason = "positions on a disk end far below 2^64"
        )]
        impl Add<u64> for $type {
            type Output = Self;

            #[inline]
            fn add(self, more: u64) -> Self {
                Self(self.0 + more)
            }
        }

        #[expect(
            clippy::arithmetic_side_effects,
            reason = "positions on a disk end far below 2^64"
        )]
        impl AddAssign<u64> for $type {
            #[inline]
            fn add_assign(&mut self, more: u64) {
                self.0 += more;
            }
        }

        #[expect(
            clippy::arithmetic_side_effects,
            reason = "callers subtract what lies before"
        )]
        impl Sub for $type {
            type Output = u64;

            #[inline]
            fn sub(self, before: Self) -> u64 {
                self.0 - before.0
            }
        }
    };
}

macro_rules! offset_methods {
    ($type:ident) => {
        impl $type {
            /// Creates the offset of byte number `bytes`.
            #[inline]
            pub const fn new(bytes: u64) -> Self {
                Self(bytes)
            }

            /// Returns the offset, in bytes.
            #[inline]
            pub const fn bytes(self) -> u64 {
                self.0
            }

            /// Returns the offset `bytes` further on, unless it overflows.
            #[inline]
            pub const fn checked_add(self, bytes: u64) -> Option<Self> {
                match self.0.checked_add(bytes) {
                    Some(sum) => Some(Self(sum)),
                    None => None,
                }
            }

            /// Returns true if the offset is a multiple of `bytes`, a power of two.
            #[inline]
            pub const fn is_aligned_to(self, bytes: u64) -> bool {
                self.0 & bytes.wrapping_sub(1) == 0
            }
        }

        distances!($type);

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }
    };
}

macro_rules! cluster_methods {
    ($type:ident) => {
        impl $type {
            /// Creates cluster number `index`.
            #[inline]
            pub const fn new(index: u64) -> Self {
                Self(index)
            }

            /// Returns the cluster's number.
            #[inline]
            pub const fn index(self) -> u64 {
                self.0
            }

            /// Returns the cluster `count` further on, unless its number overflows.
            #[inline]
            pub const fn checked_add(self, count: u64) -> Option<Self> {
                match self.0.checked_add(count) {
                    Some(sum) => Some(Self(sum)),
                    None => None,
                }
            }

            /// Returns the clusters from this one up to `end`, without it, in order.
            #[inline]
            pub fn until(self, end: Self) -> impl DoubleEndedIterator<Item = Self> + Clone {
                (self.0..end.0).map(Self)
            }
        }

        distances!($type);

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    };
}

offset_methods!(GuestOffset);
offset_methods!(HostOffset);
cluster_methods!(GuestCluster);
cluster_methods!(HostCluster);
