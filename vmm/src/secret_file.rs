//! Secrets from files or descriptors (`/dev/fd/3`), never from the command line, which every user of the host can read.

use std::error::Error;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use qcow::luks::Secret;

use crate::error::CommandFailure;

/// The longest secret, in bytes.
const SECRET_MAX: usize = 64 << 10;

/// Reads a secret: all bytes of the file, with a newline at its end, as QEMU's `--object secret,file=…` does.
///
/// # Errors
///
/// A failure that names the file, if it cannot be read, is empty or too long.
pub fn read_secret(path: &Path) -> Result<Secret, CommandFailure> {
    let about = |error: Box<dyn Error + Send + Sync>| {
        CommandFailure::about(format!("secret file {}", path.display()), error)
    };
    let file = File::open(path).map_err(|error| about(error.into()))?;
    // With this capacity the bytes are never moved, which would leave a copy of them in memory.
    let mut bytes = Vec::with_capacity(SECRET_MAX + 64);
    let read = file.take(SECRET_MAX as u64 + 1).read_to_end(&mut bytes);
    let secret = Secret::new(bytes);
    read.map_err(|error| about(error.into()))?;
    match secret.bytes().len() {
        0 => Err(about("it is empty; expected a secret".into())),
        len if len > SECRET_MAX => Err(about(format!("it is longer than {SECRET_MAX} bytes").into())),
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
