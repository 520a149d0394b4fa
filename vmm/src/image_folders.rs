//! The folders of `--images`, where the files of disks are that come later.
//!
//! Names are compared here, so that an error names the folders; Landlock sees to it that no link leads out of them.

use std::path::{Component, Path, PathBuf};

use crate::error::CommandFailure;

/// The reason why a server whose sandbox is on and that has no such folder takes no disk.
pub(crate) const NO_FOLDER: &str =
    "its sandbox lets no further image be opened; start it with --images FOLDER, or with --sandbox off";

/// Refuses what is no folder.
///
/// # Errors
///
/// [`CommandFailure::Usage`], naming it.
pub(crate) fn check(folders: &[PathBuf]) -> Result<(), CommandFailure> {
    let Some(folder) = folders.iter().find(|folder| !folder.is_dir()) else {
        return Ok(());
    };
    let folder = folder.display();
    Err(CommandFailure::Usage(format!(
        "--images {folder}: it is no folder; expected one with images, or for them"
    )))
}

/// Refuses a path, of an image or a socket as `what` says, outside of the folders.
///
/// # Errors
///
/// The reason, which names the path and the folders.
pub(crate) fn check_within(folders: &[PathBuf], what: &str, path: &Path) -> Result<(), String> {
    let mut within = folders
        .iter()
        .map(|folder| absolute(path).starts_with(absolute(folder)));
    if within.any(|is_within| is_within) {
        return Ok(());
    }
    let named: Vec<_> = folders
        .iter()
        .map(|folder| folder.display().to_string())
        .collect();
    let named = if named.is_empty() {
        "there is none".to_owned()
    } else {
        named.join(", ")
    };
    Err(format!(
        "its sandbox allows no {what} at {}; expected one in a folder of --images: {named}",
        path.display(),
    ))
}

/// Returns a path from the root, without `..` as far as names tell.
fn absolute(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let mut plain = PathBuf::new();
    for component in absolute.components() {
        match component {
            Component::ParentDir => _ = plain.pop(),
            component => plain.push(component),
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_that_leads_out_of_the_folders_is_refused_by_its_name() {
        let folders = ["/srv/a".into(), "/srv/b/c".into()];
        let check = |path: &str| check_within(&folders, "image", Path::new(path));
        for inside in [
            "/srv/a/x",
            "/srv/a/y/../x",
            "/srv/b/../a/x",
            "/srv/b/c/x/",
            "/../srv/a/x",
        ] {
            assert_eq!(check(inside), Ok(()), "{inside}");
        }
        for outside in ["/srv/a/../x", "/srv/ab/x", "/srv/b/x", "/srv/b/c/../../x", "x"] {
            let said = check(outside).expect_err(outside);
            let expected =
                format!("no image at {outside}; expected one in a folder of --images: /srv/a, /srv/b/c");
            assert!(said.ends_with(&expected), "{said}");
        }
    }
}
