//! A server follows its file when that has changed: whatever it serves, and however it was asked.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::sd_notify::Manager;

/// The reason why a server without such a file cannot follow it.
pub(crate) const NO_FILE: &str =
    "it was not started with a configuration file; `ringdisk serve --config FILE` has one to read again";

/// Finds the first of what is served that does not go with those before it. Returns how many there are up to it, and what is wrong; none
/// if it is wrong without any.
pub(crate) fn first_wrong<T, E>(all: &[T], check: impl Fn(&[T]) -> Result<(), E>) -> Option<(usize, E)> {
    let check = |count: usize| check(all.get(..count).unwrap_or(all));
    let failure = check(all.len()).err()?;
    if let Err(failure) = check(0) {
        return Some((0, failure));
    }
    let (mut good, mut bad) = (0, (all.len(), failure));
    while bad.0 - good > 1 {
        let middle = good + (bad.0 - good) / 2;
        match check(middle) {
            Ok(()) => good = middle,
            Err(failure) => bad = (middle, failure),
        }
    }
    Some(bad)
}

/// The folders that have to be readable for the file at `path` to be read again: its own and, if it is a link, that of its target.
pub(crate) fn folders(path: &Path) -> Vec<PathBuf> {
    let target = std::fs::canonicalize(path).ok();
    let paths = target.as_deref().into_iter().chain([path]);
    paths.filter_map(Path::parent).map(Path::to_owned).collect()
}

/// Has a server follow its file, tells the service manager meanwhile, and says in the log what came of it.
///
/// # Errors
///
/// That of `follow`.
pub(crate) fn follow(
    manager: &Manager,
    follow: impl FnOnce() -> Result<Value, String>,
) -> Result<Value, String> {
    manager.reloading();
    let done = follow();
    manager.ready();
    match &done {
        Ok(done) => {
            let count = |what: &str| done[what].as_array().map_or(0, Vec::len);
            tracing::info!(
                event = "reloaded",
                added = count("added"),
                removed = count("removed"),
                changed = count("changed"),
                "follows the configuration file"
            );
        }
        Err(error) => tracing::error!(
            event = "reload-failed",
            error,
            "cannot follow the configuration file"
        ),
    }
    done
}

/// Returns what came of following a file, by the names of the disks.
///
/// # Errors
///
/// If something `failed`.
pub(crate) fn followed(
    added: &[String],
    removed: &[String],
    changed: &[String],
    failed: &[String],
) -> Result<Value, String> {
    if failed.is_empty() {
        return Ok(json!({ "added": added, "removed": removed, "changed": changed }));
    }
    let failed = failed.join("; ");
    Err(format!("{failed}; the rest of the file is in effect"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_wrong_is_the_first_that_does_not_go_with_those_before() {
        for wrong in 0..7 {
            let check = |some: &[u8]| {
                if some.len() < wrong {
                    Ok(())
                } else {
                    Err(some.len())
                }
            };
            let found = first_wrong(&[0; 6], check);
            assert_eq!(found, (wrong <= 6).then_some((wrong, wrong)), "{wrong}");
        }
        assert_eq!(first_wrong(&[0; 6], |_| Ok::<(), ()>(())), None);
    }
}
