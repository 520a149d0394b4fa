//! Refuses command lines that name an image or a socket twice, before anything is opened: later the image's lock or the
//! socket would refuse the second one, and name this very process as its holder.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::disk_config::DiskConfig;
use crate::error::CommandFailure;

/// Fails if two disks are the same image and at least one of them is written to. A missing image is reported later, when
/// it is opened.
///
/// # Errors
///
/// [`CommandFailure::Usage`], naming both.
pub fn check_images<'a>(configs: impl IntoIterator<Item = &'a DiskConfig>) -> Result<(), CommandFailure> {
    // The first disk of each file stands for all others of it, as either all of them only read or there is none.
    let mut seen: HashMap<(u64, u64), &DiskConfig> = HashMap::new();
    for config in configs.into_iter().filter(|config| !config.vhost_user) {
        let Ok(found) = fs::metadata(&config.path) else {
            continue;
        };
        let file = (found.dev(), found.ino());
        let before = seen.entry(file).or_insert(config);
        if !std::ptr::eq(*before, config) && (before.writes_image() || config.writes_image()) {
            return Err(CommandFailure::Usage(format!(
                "--disk path={} and --disk path={} are the same file; expected one writer, or readonly=on or overlay=temporary for each",
                before.path.display(),
                config.path.display()
            )));
        }
    }
    Ok(())
}

/// Fails if two sockets have the same path.
///
/// # Errors
///
/// [`CommandFailure::Usage`], naming it.
pub fn check_sockets(sockets: &[impl AsRef<Path>]) -> Result<(), CommandFailure> {
    let mut seen = HashSet::new();
    for socket in sockets {
        let socket = socket.as_ref();
        let absolute = std::path::absolute(socket).unwrap_or_else(|_| socket.to_owned());
        if !seen.insert(absolute) {
            return Err(CommandFailure::Usage(format!(
                "socket {} is given more than once; each disk needs its own socket",
                socket.display()
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn disk(text: String) -> DiskConfig {
        DiskConfig::parse(&text).expect("a disk")
    }

    #[test]
    fn check_images_allows_sharing_only_among_readers() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        fs::write(path("a"), "").expect("a file");
        fs::hard_link(path("a"), path("b")).expect("a link");
        std::os::unix::fs::symlink("a", path("c")).expect("a link");
        fs::write(path("other"), "").expect("a file");
        let check = |disks: &[(&str, &str)]| {
            let disks = disks
                .iter()
                .map(|(name, keys)| disk(format!("path={}{keys}", path(name).display())));
            check_images(&disks.collect::<Vec<_>>())
        };
        for second in ["a", "b", "c"] {
            let failure = check(&[("a", ",readonly=on"), (second, "")]).expect_err("refused");
            assert_eq!(failure.exit_code(), 2);
            let line = failure.line().expect("a line");
            assert!(
                line.contains(&format!("{} are the same file", path(second).display())),
                "{line}"
            );
            assert!(check(&[("a", ",readonly=on"), (second, ",readonly=on")]).is_ok());
        }
        assert!(check(&[("a", ""), ("other", "")]).is_ok());
        assert!(
            check(&[("missing", ""), ("missing", "")]).is_ok(),
            "opening it says what is wrong"
        );
    }

    #[test]
    fn check_sockets_finds_repeats_in_any_spelling() {
        let check = |names: &[&str]| check_sockets(&names.iter().map(PathBuf::from).collect::<Vec<_>>());
        assert!(check(&["s", "t"]).is_ok());
        for twice in ["s", "./s"] {
            let failure = check(&["s", "t", twice]).expect_err("refused");
            assert_eq!(failure.exit_code(), 2);
        }
    }
}
