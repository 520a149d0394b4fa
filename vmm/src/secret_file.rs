//! Secrets from files or descriptors (`/dev/fd/3`), never from the command line, which every user of the host can read.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use qcow::luks::Secret;

use crate::error::CommandFailure;

/// The longest secret, in bytes.
const SECRET_MAX: usize = 64 << 10;

/// A secret file gives no secret.
#[derive(Debug, thiserror::Error)]
pub enum SecretFileError {
    /// It cannot be read.
    #[error("secret file {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
    /// It is empty.
    #[error("secret file {}: it is empty; expected a secret", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// It has too many bytes.
    #[error("secret file {}: it is longer than {SECRET_MAX} bytes", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
    },
}

/// A file with a secret, which is read once, as it may be a pipe, and kept as long as the configuration that names it: a
/// server may have to open its images again. Then it is wiped from memory.
#[derive(Clone)]
pub struct SecretFile {
    path: PathBuf,
    secret: Arc<OnceLock<Secret>>,
}

impl SecretFile {
    /// Names the file, which is read when the secret is asked for first.
    #[must_use]
    pub fn new(path: PathBuf) -> Self {
        let secret = Arc::default();
        Self { path, secret }
    }

    /// Returns the file that has this path in `directory`, which is not read yet.
    #[must_use]
    pub fn in_directory(&self, directory: &Path) -> Self {
        Self::new(directory.join(&self.path))
    }

    /// Returns the secret.
    ///
    /// # Errors
    ///
    /// [`SecretFileError`], which names the file.
    pub fn secret(&self) -> Result<Secret, SecretFileError> {
        if let Some(secret) = self.secret.get() {
            return Ok(secret.clone());
        }
        let secret = read(&self.path)?;
        Ok(self.secret.get_or_init(|| secret).clone())
    }
}

impl PartialEq for SecretFile {
    fn eq(&self, other: &Self) -> bool {
        self.path == other.path
    }
}

impl Eq for SecretFile {}

impl fmt::Debug for SecretFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SecretFile({})", self.path.display())
    }
}

/// Reads a secret: all bytes of the file, with a newline at its end, as QEMU's `--object secret,file=…` does.
///
/// # Errors
///
/// A failure that names the file, if it cannot be read, is empty or too long.
pub fn read_secret(path: &Path) -> Result<Secret, CommandFailure> {
    read(path).map_err(|error| CommandFailure::Failed(error.into()))
}

fn read(path: &Path) -> Result<Secret, SecretFileError> {
    let named = || path.to_owned();
    let failed = |source| SecretFileError::Read {
        path: named(),
        source,
    };
    let file = File::open(path).map_err(failed)?;
    // With this capacity the bytes are never moved, which would leave a copy of them in memory.
    let mut bytes = Vec::with_capacity(SECRET_MAX + 64);
    let read = file.take(SECRET_MAX as u64 + 1).read_to_end(&mut bytes);
    let secret = Secret::new(bytes);
    read.map_err(failed)?;
    match secret.bytes().len() {
        0 => Err(SecretFileError::Empty { path: named() }),
        len if len > SECRET_MAX => Err(SecretFileError::TooLong { path: named() }),
        _ => Ok(secret),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8]) -> Result<Secret, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        read_secret(file.path()).map_err(|error| error.line().unwrap_or_default())
    }

    #[test]
    fn secret_is_every_byte_of_its_file() {
        assert_eq!(read(b"open sesame\n").unwrap().bytes(), b"open sesame\n");
        assert_eq!(read(&[7; SECRET_MAX]).unwrap().bytes().len(), SECRET_MAX);
    }

    #[test]
    fn secret_file_is_read_once_and_shared() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "open sesame").unwrap();
        let secret = SecretFile::new(file.path().to_owned());
        let other = secret.clone();
        assert_eq!(secret.secret().unwrap().bytes(), b"open sesame");
        drop(file);
        assert_eq!(other.secret().unwrap().bytes(), b"open sesame");
        assert!(!format!("{other:?}").contains("sesame"));
    }

    #[test]
    fn empty_long_and_missing_files_are_refused_by_name() {
        assert!(read(b"").unwrap_err().contains("it is empty"));
        assert!(
            read(&[7; SECRET_MAX + 1])
                .unwrap_err()
                .contains("longer than 65536 bytes")
        );
        let missing = read_secret(Path::new("/nowhere/secret")).unwrap_err().line();
        assert!(missing.unwrap().contains("secret file /nowhere/secret: "));
    }
}
