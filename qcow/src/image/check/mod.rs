//! Checks of an image: every reference must point to a valid place, and every cluster's refcount must equal its
//! number of references.
//!
//! The verdict is `qemu-img check`'s, with two deliberate exceptions where this check is stricter. Metadata that
//! anything else also refers to is corrupt even if the refcounts agree. So is the all-zeros flag in a version 2
//! image, which reads here refuse. Nothing is written.
//!
//! Every L1 and L2 table is read once in a pass, however often it is referred to, so time is linear in the file's
//! length. Memory is bounded whatever the image says: see `survey`.

mod claims;
mod refblocks;
mod report;
pub(crate) mod survey;
mod walk;

use block::IoError;
use block::file::FileView;

use super::read::{Located, ReadError, read_header};
use crate::format::{ClusterUse, Geometry, Header, HeaderError, Incompatible, Unsupported};

pub use report::{CheckReport, Finding, Severity, Verdict};
pub(crate) use report::{Findings, Remedy};
pub(crate) use survey::Survey;
pub(crate) use walk::Walk;

/// The most clusters a file may have to be checked, as in QEMU.
const CLUSTERS_MAX: u64 = i32::MAX as u64;

/// An image cannot be checked at all.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CheckError {
    /// The header could not be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The header's values are invalid.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// The image is of a kind that cannot be checked.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// The file has more clusters than can be counted.
    #[error("the file has {clusters} clusters; at most {CLUSTERS_MAX} can be checked")]
    TooManyClusters {
        /// The number of its clusters.
        clusters: u64,
    },
    /// The host failed.
    #[error("cannot read the image")]
    Io(#[from] IoError),
}

/// The image that a check or a repair works on.
#[derive(Debug)]
pub(crate) struct Subject<'a> {
    pub(crate) file: &'a FileView,
    pub(crate) header: &'a Header,
    pub(crate) geometry: Geometry,
    pub(crate) file_len: u64,
}

impl<'a> Subject<'a> {
    /// Decides if the image can be checked. A missing refcount table is no obstacle.
    pub(crate) fn new(file: &'a FileView, located: &'a Located) -> Result<Self, CheckError> {
        let Located { header, file_len } = located;
        header.validate_except_missing_refcount_table()?;
        match header.require_supported() {
            // Metadata is never encrypted.
            Ok(()) | Err(Unsupported::EncryptedDataFile { .. }) => {}
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

    /// Returns the number of clusters of the file, the last one possibly partial.
    pub(crate) fn file_clusters(&self) -> u64 {
        self.geometry.clusters_for(self.file_len)
    }
}

/// Checks the image in `file`.
///
/// # Errors
///
/// [`CheckError`] if the image cannot be checked; the faults of an image that can be are in the report.
pub async fn check(file: &FileView) -> Result<CheckReport, CheckError> {
    check_within(file, survey::MEMORY_MAX_BYTES).await
}

/// Checks as [`check`] does, in about this much memory. The less it is, the more often the tables are read.
///
/// # Errors
///
/// As for [`check`].
pub async fn check_within(file: &FileView, memory_max_bytes: usize) -> Result<CheckReport, CheckError> {
    let located = read_header(file).await?;
    let subject = Subject::new(file, &located)?;
    let mut survey = Survey::new(&subject, true, memory_max_bytes);
    let mut used_end = 1;
    while let Some(mut walk) = survey.next().await {
        used_end = used_end.max(compare(&mut walk));
        survey.done(walk);
    }
    let header = &located.header;
    let stats = survey.stats;
    Ok(CheckReport {
        filename: file.file().path().display().to_string(),
        format: "qcow2",
        dirty: header.incompatible.contains(Incompatible::DIRTY),
        marked_corrupt: header.incompatible.contains(Incompatible::CORRUPT),
        image_end_offset: used_end * subject.geometry.cluster_size(),
        total_clusters: subject.geometry.guest_clusters(),
        allocated_clusters: stats.allocated,
        compressed_clusters: stats.compressed,
        fragmented_clusters: stats.fragmented,
        ..survey.findings.into_report()
    })
}

/// Compares the counts found with those on disk. Returns the cluster after the last used one.
fn compare(walk: &mut Walk<'_>) -> u64 {
    let cluster_size = walk.subject.geometry.cluster_size();
    let findings = &mut walk.findings;
    walk.expected
        .for_each_difference(&walk.on_disk, |cluster, expected, found| {
            let offset = cluster * cluster_size;
            if found < expected {
                findings.corruption(ClusterUse::Unknown, offset, Remedy::Rebuild, || {
                    format!("refcount is {found}, but there are {expected} references")
                });
            } else {
                findings.leak(ClusterUse::Unknown, offset, || {
                    format!("refcount is {found}, but there are only {expected} references")
                });
            }
        });
    let last = walk.expected.last().max(walk.on_disk.last());
    last.map_or(0, |last| last + 1)
}
