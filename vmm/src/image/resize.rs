//! `ringdisk image resize`: makes the disk in an image that is not served larger or smaller.

use std::error::Error;
use std::path::PathBuf;

use clap::Args;
use qcow::ImageError;
use qcow::offline::{ChangeError, NewSize, ResizeOptions};

use super::{failure, unclaimed};
use crate::error::{CommandFailure, EXIT_OK};
use crate::secret_file::read_secret;
use crate::size::{SizeError, parse_bytes};

/// The command line of `image resize`.
#[derive(Args, Debug)]
pub struct ResizeArguments {
    /// Let the disk become smaller; what lies past its new end is lost
    #[arg(long)]
    shrink: bool,
    /// Allow the external data file that the image names; it becomes as long as the disk
    #[arg(long)]
    data_file: bool,
    /// File with a secret that opens an encrypted image, or a descriptor such as /dev/fd/3; a newline at its end counts
    #[arg(long, value_name = "PATH")]
    secret_file: Option<PathBuf>,
    /// Image file; no program may have it open for writing
    path: PathBuf,
    /// New size, such as 20G, or the difference: +5G, -5G; a multiple of 512 bytes
    #[arg(allow_hyphen_values = true)]
    size: String,
}

/// Resizes a disk and returns the exit code.
pub(super) fn run(arguments: &ResizeArguments) -> Result<u8, CommandFailure> {
    let path = &arguments.path;
    let size = new_size(&arguments.size)
        .map_err(|error| CommandFailure::Usage(format!("the size {:?} is {error}", arguments.size)))?;
    let options = ResizeOptions {
        shrink: arguments.shrink,
        data_file: arguments.data_file,
        secret: arguments.secret_file.as_deref().map(read_secret).transpose()?,
    };
    unclaimed(path)?;
    match qcow::offline::resize(path, size, &options) {
        Ok(_) => Ok(EXIT_OK),
        Err(error) => match missing_option(&error) {
            Some(message) => Err(CommandFailure::about(path.display(), message)),
            None => Err(failure(path, error)),
        },
    }
}

fn new_size(text: &str) -> Result<NewSize, SizeError> {
    Ok(match (text.strip_prefix('+'), text.strip_prefix('-')) {
        (Some(more), _) => NewSize::LargerBy(parse_bytes(more)?),
        (_, Some(less)) => NewSize::SmallerBy(parse_bytes(less)?),
        _ => NewSize::To(parse_bytes(text)?),
    })
}

/// Returns what to pass, if the image could not be opened without.
fn missing_option<E: Error + 'static>(error: &ChangeError<E>) -> Option<String> {
    let ChangeError::Open(error) = error else {
        return None;
    };
    let mut source: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(error) = source {
        match error.downcast_ref() {
            Some(ImageError::DataFileNotAllowed { name }) => {
                return Some(format!(
                    "it keeps its data in the external file {name:?}; pass --data-file to resize both"
                ));
            }
            Some(ImageError::SecretMissing { method }) => {
                return Some(format!("it is encrypted ({method}); pass --secret-file"));
            }
            _ => source = error.source(),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_size_takes_a_size_or_a_difference() {
        assert_eq!(new_size("1M"), Ok(NewSize::To(1 << 20)));
        assert_eq!(new_size("+1.5k"), Ok(NewSize::LargerBy(1536)));
        assert_eq!(new_size("-512"), Ok(NewSize::SmallerBy(512)));
        for text in ["", "+", "-", "+-1", "--1", "1M+", "+ 1"] {
            assert_eq!(new_size(text), Err(SizeError::Malformed), "{text:?}");
        }
    }
}
