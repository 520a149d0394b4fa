//! The names that images give their backing and data files.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use block::file::FileView;

/// Returns the path of the backing file that `image` names: relative names count from the image's folder, and `file:`
/// is left out. `None` if the name is not a path: QEMU would take `PROTOCOL:…` for something else.
#[must_use]
pub fn backing_path(image: &Path, name: &[u8]) -> Option<PathBuf> {
    let name = name.strip_prefix(b"file:").unwrap_or(name);
    if name.is_empty() || name.contains(&0) {
        return None;
    }
    let before_slash = name.split(|&byte| byte == b'/').next().unwrap_or_default();
    if before_slash.contains(&b':') {
        return None;
    }
    let path = Path::new(std::ffi::OsStr::from_bytes(name));
    Some(match image.parent() {
        Some(folder) if path.is_relative() => folder.join(path),
        _ => path.to_owned(),
    })
}

/// Returns the backing file's path. Names with a protocol, such as `json:`, are not paths.
pub(super) fn full_backing_name(file: &FileView, name: &str) -> String {
    let protocol = name
        .split_once(':')
        .is_some_and(|(protocol, _)| !protocol.contains('/'));
    match file.file().path().parent() {
        Some(folder) if !protocol => folder.join(name).display().to_string(),
        _ => name.to_owned(),
    }
}
