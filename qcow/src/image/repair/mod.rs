//! Repair: count every reference anew, and make refcounts and COPIED flags agree.
//!
//! There are two ways. Counts are mended where they are (`mend`) if the refcount structure is in place; otherwise a
//! new one is written (`rebuild`). Either can be cut at any write: what is left has no errors it did not have
//! before, reads the same, and can be repaired.
//!
//! References that lead nowhere sensible are not repaired, as that would be to invent data. And as long as there are
//! any, nothing is written at all: what seems to be lost may be what they should lead to.

mod flags;
mod mend;
pub(super) mod pen;
mod rebuild;

use block::IoError;
use block::file::FileView;
use serde::Serialize;

use super::check::survey::MEMORY_MAX_BYTES;
use super::check::{CheckError, CheckReport, Finding, Verdict, check_within};
use super::read::ReadError;
use crate::format::{Header, HeaderError, Incompatible};

/// An image could not be repaired.
#[derive(Debug, thiserror::Error)]
pub enum RepairError {
    /// The image cannot be looked into.
    #[error(transparent)]
    Check(#[from] CheckError),
    /// Something cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// Something is wrong that new refcounts do not mend.
    #[error(
        "{} at {:#x} {}; repair derives refcounts from sound tables only",
        .0.structure, .0.offset, .0.message
    )]
    Damaged(Finding),
    /// Leaks were to be mended, and the refcount structure is damaged itself.
    #[error("the refcount table or a refcount block is damaged; leaks alone cannot be mended, all can")]
    RefcountsDamaged,
    /// The refcount table would be larger than QEMU accepts.
    #[error("the refcount table would be larger than 8 MiB")]
    TableTooLarge,
    /// The host failed a write.
    #[error("cannot write {what} at {offset:#x}")]
    Write {
        /// The structure.
        what: &'static str,
        /// Where, in bytes.
        offset: u64,
        /// Why.
        #[source]
        source: IoError,
    },
}

impl From<HeaderError> for RepairError {
    fn from(error: HeaderError) -> Self {
        Self::Check(error.into())
    }
}

/// What to repair.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Extent {
    /// Clusters that count as used and are not.
    Leaks,
    /// Everything that right refcounts and COPIED flags mend, and the header's warnings.
    All,
}

/// What a repair did.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct RepairReport {
    /// The image as it was.
    pub before: CheckReport,
    /// The image as it is.
    pub after: CheckReport,
}

impl RepairReport {
    /// How many leaks are no more.
    #[must_use]
    pub fn leaks_fixed(&self) -> u64 {
        self.before.leaks.saturating_sub(self.after.leaks)
    }

    /// How many corruptions are no more.
    #[must_use]
    pub fn corruptions_fixed(&self) -> u64 {
        self.before.corruptions.saturating_sub(self.after.corruptions)
    }
}

/// Checks the image, and mends as much of what is wrong as `extent` says.
///
/// # Errors
///
/// [`RepairError`], also if damage was found that new refcounts do not mend; then nothing was written.
pub async fn repair(file: &FileView, extent: Extent) -> Result<RepairReport, RepairError> {
    repair_within(file, extent, MEMORY_MAX_BYTES).await
}

/// As [`repair`], in about this much memory. The less it is, the more often the tables are read.
///
/// # Errors
///
/// As for [`repair`].
pub async fn repair_within(
    file: &FileView,
    extent: Extent,
    memory_max_bytes: usize,
) -> Result<RepairReport, RepairError> {
    let before = check_within(file, memory_max_bytes).await?;
    let needed = match extent {
        Extent::Leaks => before.leaks > 0,
        Extent::All => before.verdict() != Verdict::Clean || before.dirty || before.marked_corrupt,
    };
    if !needed {
        let after = before.clone();
        return Ok(RepairReport { before, after });
    }
    if !mend::mend(file, extent, memory_max_bytes).await? {
        if extent == Extent::Leaks {
            return Err(RepairError::RefcountsDamaged);
        }
        let warnings = Incompatible::DIRTY | Incompatible::CORRUPT;
        rebuild::rebuild(file, warnings, memory_max_bytes).await?;
    }
    let after = check_within(file, memory_max_bytes).await?;
    Ok(RepairReport { before, after })
}

/// Rebuilds the refcounts of an image whose dirty bit is set, before anything is written to it,
/// and clears the bit. Returns the header as it is now.
///
/// # Errors
///
/// [`RepairError`].
pub async fn rebuild_refcounts(file: &FileView) -> Result<Header, RepairError> {
    rebuild::rebuild(file, Incompatible::DIRTY, MEMORY_MAX_BYTES).await
}
