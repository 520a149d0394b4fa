//! Checking an image: does every reference lead somewhere sensible, and does every cluster's
//! refcount say how many references it has?
//!
//! The verdict is `qemu-img check`'s, with two deliberate exceptions where we are stricter: metadata
//! that anything else also refers to is corrupt even if the refcounts agree, and so is the
//! all-zeros flag in a version 2 image, which our reads refuse. Nothing is written.
//!
//! Every L1 and L2 table is read once, however often it is referred to, so time is linear in the
//! file's length. Memory is two bytes per cluster of the file, and a bounded list of findings.

mod refblocks;
mod report;
mod walk;

use block::IoError;
use block::file::FileView;

use super::counts::CountMap;
use super::read::{Located, ReadError, read_header};
use crate::format::{Geometry, Header, HeaderError, Incompatible, Unsupported};

pub use report::{CheckReport, Finding, Severity, Verdict};
pub(crate) use report::{Findings, Remedy};
pub(crate) use walk::Walk;

/// The most clusters a file may have to be checked, as in QEMU.
const CLUSTERS_MAX: u64 = i32::MAX as u64;

/// An image cannot be checked at all.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CheckError {
    /// The header could not be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The header's values make no sense.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// The image is of a kind we cannot look into.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// The file has more clusters than we can count.
    #[error("the file has {clusters} clusters; at most {CLUSTERS_MAX} can be checked")]
    TooManyClusters {
        /// How many it has.
        clusters: u64,
    },
    /// The host failed.
    #[error("cannot read the image")]
    Io(#[from] IoError),
}

/// Everything a check or a repair needs to know about the image it works on.
#[derive(Debug)]
pub(crate) struct Subject<'a> {
    pub(crate) file: &'a FileView,
    pub(crate) header: &'a Header,
    pub(crate) geometry: Geometry,
    pub(crate) file_len: u64,
}

impl<'a> Subject<'a> {
    /// Decides whether the image can be looked into. A missing refcount table is no obstacle.
    pub(crate) fn new(file: &'a FileView, located: &'a Located) -> Result<Self, CheckError> {
        let Located { header, file_len } = located;
        header.validate_except_missing_refcount_table()?;
        match header.require_supported() {
            // Metadata is never encrypted.
            Ok(()) | Err(Unsupported::Encrypted { .. }) => {}
            Err(other) => return Err(other.into()),
        }
        let geometry = header.geometry();
        let clusters = geometry.clusters_for(*file_len);
        if clusters > CLUSTERS_MAX {
            return Err(CheckError::TooManyClusters { clusters });
        }
        Ok(Self {
            file,
            header,
            geometry,
            file_len: *file_len,
        })
    }

    /// How many clusters the file has, the last one possibly partial.
    pub(crate) fn file_clusters(&self) -> u64 {
        self.geometry.clusters_for(self.file_len)
    }
}

/// Checks the image in `file`.
///
/// # Errors
///
/// [`CheckError`] if the image cannot be checked; what is wrong with an image that can be is in
/// the report.
pub async fn check(file: &FileView) -> Result<CheckReport, CheckError> {
    let located = read_header(file).await?;
    let subject = Subject::new(file, &located)?;
    let mut walk = Walk::new(&subject);
    let on_disk = refblocks::load(&mut walk).await?;
    walk.run(Some(&on_disk)).await?;
    let image_end_offset = compare(&mut walk, &on_disk);
    let header = &located.header;
    Ok(CheckReport {
        filename: file.file().path().display().to_string(),
        format: "qcow2",
        dirty: header.incompatible.contains(Incompatible::DIRTY),
        marked_corrupt: header.incompatible.contains(Incompatible::CORRUPT),
        image_end_offset,
        total_clusters: subject.geometry.guest_clusters(),
        allocated_clusters: walk.stats.allocated,
        compressed_clusters: walk.stats.compressed,
        fragmented_clusters: walk.stats.fragmented,
        ..walk.findings.into_report()
    })
}

/// Compares the counts found with those on disk; returns where the last used cluster ends.
fn compare(walk: &mut Walk<'_>, on_disk: &CountMap) -> u64 {
    let geometry = walk.subject.geometry;
    let mut used_end = 1;
    let findings = &mut walk.findings;
    walk.expected.for_each_pair(on_disk, |cluster, expected, found| {
        used_end = used_end.max(cluster + 1);
        let offset = cluster * geometry.cluster_size();
        if found < expected {
            findings.corruption("cluster", offset, Remedy::Rebuild, || {
                format!("refcount is {found}, but there are {expected} references")
            });
        } else if found > expected {
            findings.leak("cluster", offset, || {
                format!("refcount is {found}, but there are only {expected} references")
            });
        }
    });
    used_end * geometry.cluster_size()
}
