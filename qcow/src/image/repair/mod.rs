//! Repair: counts every reference anew, and makes refcounts and COPIED flags agree.
//!
//! There are two ways. Counts are repaired in place (`mend`) if the refcount structure is intact; otherwise a new one
//! is written (`rebuild`). Either can be cut at any write: the image then has no new errors, reads the same, and can
//! be repaired.
//!
//! References to invalid places are not repaired, as that would be to invent data. And as long as there are any,
//! nothing is written at all: a cluster that seems to be leaked may be their proper target.

mod flags;
mod mend;
mod rebuild;
pub(super) mod writer;

use block::IoError;
use block::file::FileView;
use serde::Serialize;

use super::check::survey::MEMORY_MAX_BYTES;
use super::check::{CheckError, CheckReport, Finding, Verdict, check_within};
use super::read::ReadError;
use crate::format::{ClusterUse, Header, HeaderError, Incompatible};

/// An image could not be repaired.
#[derive(Debug, thiserror::Error)]
pub enum RepairError {
    /// The image cannot be checked.
    #[error(transparent)]
    Check(#[from] CheckError),
    /// A structure cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The image has a fault that new refcounts do not repair.
    #[error(
        "{} at {:#x} {}; repair derives refcounts from sound tables only",
        .0.structure, .0.offset, .0.message
    )]
    Damaged(Finding),
    /// Leaks were to be repaired, and the refcount structure itself is damaged.
    #[error("the refcount table or a refcount block is damaged; leaks alone cannot be mended, all can")]
    RefcountsDamaged,
    /// The refcount table would be larger than QEMU accepts.
    #[error("the refcount table would be larger than 8 MiB")]
    TableTooLarge,
    /// The host failed a write.
    #[error("cannot write {} at {offset:#x}", .what.phrase())]
    Write {
        /// The structure.
        what: ClusterUse,
        /// The offset, in bytes.
        offset: u64,
        /// The host's error.
        #[source]
        source: IoError,
    },
    /// The host failed a sync.
    #[error("cannot make the repair durable (sync)")]
    Sync(#[source] IoError),
}

impl From<HeaderError> for RepairError {
    fn from(error: HeaderError) -> Self {
        Self::Check(error.into())
    }
}

/// The faults that a repair mends.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum RepairScope {
    /// Clusters that count as used and are not.
    Leaks,
    /// Everything that right refcounts and COPIED flags repair, and the header's warnings.
    All,
}

/// The result of a repair.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct RepairReport {
    /// The image before the repair.
    pub before: CheckReport,
    /// The image after the repair.
    pub after: CheckReport,
}

impl RepairReport {
    /// Returns the number of leaks that were repaired.
    #[must_use]
    pub fn leaks_fixed(&self) -> u64 {
        self.before.leaks.saturating_sub(self.after.leaks)
    }

    /// Returns the number of corruptions that were repaired.
    #[must_use]
    pub fn corruptions_fixed(&self) -> u64 {
        self.before.corruptions.saturating_sub(self.after.corruptions)
    }
}

/// Checks the image, and repairs the faults within `scope`.
///
/// # Errors
///
/// [`RepairError`], also if damage was found that new refcounts do not repair; then nothing was written.
pub async fn repair(file: &FileView, scope: RepairScope) -> Result<RepairReport, RepairError> {
    repair_within(file, scope, MEMORY_MAX_BYTES).await
}

/// Repairs as [`repair`] does, in about this much memory. The less it is, the more often the tables are read.
///
/// # Errors
///
/// As for [`repair`].
pub async fn repair_within(
    file: &FileView,
    scope: RepairScope,
    memory_max_bytes: usize,
) -> Result<RepairReport, RepairError> {
    let before = check_within(file, memory_max_bytes).await?;
    let needed = match scope {
        RepairScope::Leaks => before.leaks > 0,
        RepairScope::All => before.verdict() != Verdict::Clean || before.dirty || before.marked_corrupt,
    };
    if !needed {
        let after = before.clone();
        return Ok(RepairReport { before, after });
    }
    if !mend::mend(file, scope, memory_max_bytes).await? {
        if scope == RepairScope::Leaks {
            return Err(RepairError::RefcountsDamaged);
        }
        let warnings = Incompatible::DIRTY | Incompatible::CORRUPT;
        rebuild::rebuild(file, warnings, memory_max_bytes).await?;
    }
    let after = check_within(file, memory_max_bytes).await?;
    Ok(RepairReport { before, after })
}

/// Rebuilds the refcounts of an image whose dirty bit is set, before anything is written to it, and clears the bit.
/// Returns the new header.
///
/// # Errors
///
/// [`RepairError`].
pub async fn rebuild_refcounts(file: &FileView) -> Result<Header, RepairError> {
    rebuild::rebuild(file, Incompatible::DIRTY, MEMORY_MAX_BYTES).await
}
