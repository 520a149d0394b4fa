//! The condition for changes by tools that write or free clusters: the check of the image finds no error.
//!
//! A server believes the counts, as it has no time to read all tables. A tool has: where an image lies about its clusters, a
//! change could overwrite or free what the guest, or another structure, uses.

use block::file::FileView;

use super::check::{CheckError, check};

/// The image is not fit for a change, which was not begun.
#[derive(Clone, Debug, thiserror::Error)]
pub enum UnsoundError {
    /// It could not be checked.
    #[error(transparent)]
    Check(#[from] CheckError),
    /// The check found errors.
    #[error(
        "the image has {corruptions} errors, and {unreadable} structures that cannot be read: the change could lose data of \
         something else, and was not begun; `ringdisk image check` shows them, and `--repair all` mends what can be mended"
    )]
    Errors {
        /// The number of corruptions.
        corruptions: u64,
        /// The number of structures that cannot be read.
        unreadable: u64,
    },
}

/// Checks the image in `file`. Leaks are no error. Takes about as long as `image check`.
///
/// # Errors
///
/// [`UnsoundError`].
pub(super) async fn require_sound(file: &FileView) -> Result<(), UnsoundError> {
    let report = check(file).await?;
    if report.corruptions == 0 && report.check_errors == 0 {
        return Ok(());
    }
    Err(UnsoundError::Errors {
        corruptions: report.corruptions,
        unreadable: report.check_errors,
    })
}
