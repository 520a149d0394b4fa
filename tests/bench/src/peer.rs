//! Failures of peers: missing, crashed, hanging or wrong. They cost the figures beside that peer, and not the run.

use std::fmt;
use std::io;

/// A peer's failure, in words that name it.
#[derive(Debug)]
struct Failure(String);

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Failure {}

/// Marks an error of measuring the peer `name` as the peer's own.
#[must_use]
pub(crate) fn failed(name: &str, error: &io::Error) -> io::Error {
    let text = error.to_string();
    let text = if text.contains(name) {
        text
    } else {
        format!("{name}: {text}")
    };
    io::Error::new(error.kind(), Failure(text))
}

/// Returns the words of a peer's failure.
///
/// # Errors
///
/// The error itself if it is nobody's but ours, or if somebody has interrupted the run, for which no peer can be blamed.
pub(crate) fn failure(error: io::Error) -> io::Result<String> {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<Failure>()) {
        Some(failure) if !crate::interrupted() => Ok(failure.0.clone()),
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_of_a_peer_names_it_once_and_others_stay_errors() {
        let error = io::Error::other("no result");
        let words = |name, text: &str| failure(failed(name, &io::Error::other(text))).ok();
        assert_eq!(words("fio", "no result"), Some("fio: no result".to_owned()));
        assert_eq!(
            words("fio", "cannot start fio"),
            Some("cannot start fio".to_owned())
        );
        assert!(failure(error).is_err());
    }
}
