//! External data files: the name that an image records, and what it rules out. Spec: "External data file name string",
//! "Incompatible features" bit 2.

use super::Header;
use super::header::{BACKING_NAME_MAX, HeaderError, at};

/// The longest name of a data file, in bytes: as for a backing file.
pub const DATA_FILE_NAME_MAX: usize = BACKING_NAME_MAX as usize;

/// The image keeps its data in another file and does not say properly in which.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum DataFileNameError {
    /// There is no such header extension.
    #[error(
        "it keeps its data in an external file and does not name it: header extension 0x44415441 is missing"
    )]
    Missing,
    /// The name is empty or too long.
    #[error(
        "the name of its external file has {len} bytes (header extension 0x44415441); expected 1 to {DATA_FILE_NAME_MAX}"
    )]
    Length {
        /// The name's length, in bytes.
        len: usize,
    },
    /// The name has bytes that no name has.
    #[error(
        "the name of its external file, {name:?}, has {what} (header extension 0x44415441); expected none"
    )]
    Bytes {
        /// The name, with invalid UTF-8 replaced.
        name: String,
        /// The wrong bytes.
        what: &'static str,
    },
}

impl Header {
    /// Returns the data file's name, which is as long as a name may be and free of NULs.
    ///
    /// # Errors
    ///
    /// [`DataFileNameError`].
    pub fn data_file_name(&self) -> Result<&str, DataFileNameError> {
        let name = self.data_file().ok_or(DataFileNameError::Missing)?;
        if name.is_empty() || name.len() > DATA_FILE_NAME_MAX {
            return Err(DataFileNameError::Length { len: name.len() });
        }
        let wrong = |what| DataFileNameError::Bytes {
            name: String::from_utf8_lossy(name).into_owned(),
            what,
        };
        if name.contains(&0) {
            return Err(wrong("a NUL byte"));
        }
        std::str::from_utf8(name).map_err(|_| wrong("bytes that are not UTF-8"))
    }

    /// Checks that an image with a data file has none of what the format rules out for it.
    pub(super) fn validate_data_file(&self) -> Result<(), HeaderError> {
        if self.has_data_file() && self.snapshot_count > 0 {
            let found = u64::from(self.snapshot_count);
            let expected = "0: an image with an external file for its data has no snapshots";
            return Err(HeaderError::field(
                "nb_snapshots",
                at::NB_SNAPSHOTS,
                found,
                expected,
            ));
        }
        if self.has_raw_data_file() && self.backing_name.is_some() {
            let expected = "bit 1 clear: an image with a backing file has no raw data file";
            let found = self.autoclear.bits();
            return Err(HeaderError::field(
                "autoclear_features",
                at::AUTOCLEAR_FEATURES,
                found,
                expected,
            ));
        }
        Ok(())
    }
}
