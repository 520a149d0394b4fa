//! The condition for changes by tools that write or free clusters: the check of the image finds no error.
//!
//! A server believes the counts, as it has no time to read all tables. A tool has: where an image lies about its clusters, a
//! change could overwrite or free what the guest, or another structure, uses.

use block::file::FileView;

use super::check::{CheckError, Severity, check};

/// The image is not fit for a change, which was not begun.
#[derive(Clone, Debug, thiserror::Error)]
pub enum UnsoundError {
    /// It could not be checked.
    #[error(transparent)]
    Check(#[from] CheckError),
    /// The check found errors.
    #[error(
        "the check of the image found {errors} errors, the first of them at offset {offset:#x}: {first}; the change could lose \
         data of something else, and was not begun; `ringdisk image check` shows all, and `--repair all` mends what can be \
         mended"
    )]
    Errors {
        /// The number of corruptions, and of structures that cannot be read.
        errors: u64,
        /// The offset of the first in the file, in bytes.
        offset: u64,
        /// A description of the first.
        first: String,
    },
}

/// Checks the image in `file`. Leaks are no error. Takes about as long as `image check`.
///
/// # Errors
///
/// [`UnsoundError`].
pub(crate) async fn require_sound(file: &FileView) -> Result<(), UnsoundError> {
    let report = check(file).await?;
    let errors = report.corruptions + report.check_errors;
    if errors == 0 {
        return Ok(());
    }
    let first = report
        .findings
        .into_iter()
        .find(|finding| finding.severity != Severity::Leak);
    // The report keeps so many findings only.
    let (offset, first) = first.map_or((0, "it is not listed".to_owned()), |first| {
        (first.offset, first.message)
    });
    Err(UnsoundError::Errors {
        errors,
        offset,
        first,
    })
}
