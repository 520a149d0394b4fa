//! Logs: to standard error, warnings only unless asked for more, and to clients of a control socket that watch.

use std::io::IsTerminal;
use std::str::FromStr;

use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use crate::control::WatchLayer;
use crate::error::CommandFailure;

/// The variable that sets the filter when `--log` does not.
pub const LOG_VARIABLE: &str = "RINGDISK_LOG";
/// The filter when nothing sets it.
const DEFAULT_FILTER: &str = "warn";

/// Starts logging with the filter of `--log`, of `RINGDISK_LOG`, or the default.
///
/// # Errors
///
/// A usage failure if the filter is not one.
pub fn start(option: Option<&str>) -> Result<(), CommandFailure> {
    let variable = std::env::var(LOG_VARIABLE).ok().filter(|text| !text.is_empty());
    let (name, text) = match (option, &variable) {
        (Some(option), _) => ("--log", option),
        (None, Some(variable)) => (LOG_VARIABLE, variable.as_str()),
        (None, None) => ("", DEFAULT_FILTER),
    };
    let wrong = |why: &dyn std::fmt::Display| {
        CommandFailure::Usage(format!(
            "{name}: `{text}` is not a log filter ({why}); \
             it takes a level (error, warn, info, debug, trace, off) or module=level pairs"
        ))
    };
    // A bare word would be taken for a module, all of whose messages are to be shown.
    if let Some(word) = text.split(',').find(|word| is_unknown_level(word)) {
        return Err(wrong(&format_args!("there is no level `{word}`")));
    }
    let filter = Targets::from_str(text).map_err(|error| wrong(&error))?;
    let printed = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_filter(filter);
    // A second start, as in tests, keeps the first one's filter.
    let started = tracing_subscriber::registry()
        .with(printed)
        .with(WatchLayer.with_filter(LevelFilter::INFO))
        .try_init();
    if started.is_err() {
        tracing::debug!("logging was already started");
    }
    Ok(())
}

/// Returns true for a word that is neither a level nor part of a pair.
fn is_unknown_level(word: &str) -> bool {
    let plain = word
        .bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    plain && LevelFilter::from_str(word).is_err()
}
