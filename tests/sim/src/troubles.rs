//! Errors of the host in runs with operations on the whole image: snapshots, bitmaps, other sizes and compaction.
//!
//! What an operation promises when the host fails something is told by its error. One of its own kind says that nothing has changed.
//! One of the host's may have come when the header was written: then either state may be in force after a cut, and the image is not
//! written any more. So a guest's changes may be refused as those of a corrupt image, which it is not.

use std::error::Error;

use block::IoError;
use qcow::{BitmapsError, CompactError, ShrinkError, SnapshotError};
use simulator::{Profile, Random};

use crate::oracle::End;
use crate::run::without_errors;

/// Returns a disk with the habits of `profile` that does things in any order. In one of three runs the host fails some of what it is
/// asked for.
pub(crate) fn draw(profile: Profile, seed: u64) -> Profile {
    let calm = Profile {
        reorder: true,
        ..without_errors(profile)
    };
    // From a source of its own, so that the rest of a run stays what it is.
    let random = &mut Random::new(seed.rotate_left(36));
    if !random.one_in(3) {
        return calm;
    }
    // An operation takes many ops, of which each may end it.
    let mut some = |most: u64| match random.one_in(2) {
        true => 1 + random.below(most) as u32,
        false => 0,
    };
    Profile {
        cancel: some(15),
        read_error: some(30),
        write_error: some(25),
        sync_error: some(20),
        allocate_error: some(150),
        no_space: some(20),
        ..calm
    }
}

/// An error of an operation.
pub(crate) trait OperationError: Error + 'static {
    /// Returns the error of the host, or of the image, if it is one as it is.
    fn own(&self) -> Option<IoError>;

    /// Returns the error of the host that the operation failed with; `None` if it has a reason of its own.
    fn of_host(&self) -> Option<IoError> {
        let causes = std::iter::successors(self.source(), |&error| error.source());
        let mut found = causes.filter_map(|error| error.downcast_ref().copied());
        self.own().or_else(|| found.next())
    }
}

impl OperationError for BitmapsError {
    fn own(&self) -> Option<IoError> {
        match self {
            Self::Io(error) => Some(*error),
            _ => None,
        }
    }
}

impl OperationError for CompactError {
    fn own(&self) -> Option<IoError> {
        match self {
            Self::Io(error) => Some(*error),
            _ => None,
        }
    }
}

impl OperationError for SnapshotError {
    fn own(&self) -> Option<IoError> {
        match self {
            Self::Io(error) => Some(*error),
            _ => None,
        }
    }
}

impl OperationError for ShrinkError {
    fn own(&self) -> Option<IoError> {
        match self {
            Self::Metadata(error) => error.own(),
            _ => None,
        }
    }
}

/// Returns the end of an operation.
pub(crate) fn end_of<T>(result: &Result<T, impl OperationError>) -> End {
    match result {
        Ok(_) => End::Done,
        Err(error) if error.of_host().is_some() => End::Unknown,
        Err(_) => End::Undone,
    }
}

#[cfg(test)]
mod tests {
    use qcow::format::ClusterUse;
    use qcow::image::ReadError;

    use super::*;

    #[test]
    fn end_is_unknown_if_the_host_failed_something() {
        let source = IoError::Host { errno: 5 };
        let read = ReadError::Io {
            what: ClusterUse::Header,
            offset: 0,
            source,
        };
        for error in [SnapshotError::Io(source), SnapshotError::Read(read)] {
            assert_eq!(error.of_host(), Some(source), "{error:?}");
            assert_eq!(end_of(&Err::<(), _>(ShrinkError::Metadata(error))), End::Unknown);
        }
        assert_eq!(ShrinkError::DataFile(source).of_host(), Some(source));
        assert_eq!(end_of(&Err::<(), _>(SnapshotError::Busy)), End::Undone);
    }
}
