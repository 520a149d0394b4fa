//! Errors in a `--disk`.

use super::rate;
use crate::error::CommandFailure;
use crate::key_value::SyntaxError;

/// An invalid `--disk`.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum DiskConfigError {
    /// An item is not `key=value`, or a quote or bracket is not closed.
    #[error("--disk: {0}")]
    Syntax(SyntaxError),
    /// No such key.
    #[error("--disk: unknown key `{key}`{}; --help lists the keys", did_you_mean(*nearest))]
    UnknownKey {
        /// The key.
        key: String,
        /// A key it resembles.
        nearest: Option<&'static str>,
    },
    /// The key exists, but not for this command.
    #[error("--disk: `{key}` does not apply here: {place}")]
    NotHere {
        /// The key.
        key: &'static str,
        /// The scope in which it applies.
        place: &'static str,
    },
    /// The key is there twice.
    #[error("--disk: `{key}` is given more than once")]
    Duplicate {
        /// The key.
        key: &'static str,
    },
    /// The value is not one the key takes.
    #[error("--disk: `{key}={value}`: {key} takes {takes}")]
    Value {
        /// The key.
        key: &'static str,
        /// The value, as given.
        value: String,
        /// Its permitted values.
        takes: &'static str,
    },
    /// A limit is given by half.
    #[error("--disk: `{key}` is given without `{missing}`, which takes {takes}")]
    Incomplete {
        /// The key that is there.
        key: &'static str,
        /// The key that is not.
        missing: &'static str,
        /// The permitted values of that key.
        takes: &'static str,
    },
    /// There is no such group.
    #[error("--disk: `rate_limit_group={id}`: {}", rate::known(known))]
    UnknownGroup {
        /// The group.
        id: String,
        /// The groups there are.
        known: Vec<String>,
    },
    /// Two keys contradict each other.
    #[error("--disk: `{key}` contradicts `{other}`: {why}")]
    Contradiction {
        /// One key.
        key: &'static str,
        /// The other, with its value.
        other: String,
        /// The contradiction.
        why: &'static str,
    },
    /// There is no path.
    #[error("--disk: `path` is missing; it takes {takes}")]
    NoPath {
        /// Its permitted values.
        takes: &'static str,
    },
}

impl DiskConfigError {
    /// The key that it is about, if it is about one; of a contradiction without the value.
    pub(crate) fn key(&self) -> Option<&str> {
        match self {
            Self::UnknownKey { key, .. } => Some(key),
            Self::NotHere { key, .. }
            | Self::Duplicate { key }
            | Self::Value { key, .. }
            | Self::Incomplete { key, .. }
            | Self::Contradiction { key, .. } => key.split('=').next(),
            Self::UnknownGroup { .. } => Some("rate_limit_group"),
            Self::Syntax(_) | Self::NoPath { .. } => None,
        }
    }
}

fn did_you_mean(nearest: Option<&'static str>) -> String {
    nearest.map_or_else(String::new, |key| format!(" (did you mean `{key}`?)"))
}

impl From<DiskConfigError> for CommandFailure {
    fn from(error: DiskConfigError) -> Self {
        Self::Usage(error.to_string())
    }
}
