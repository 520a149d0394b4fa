//! Finding what the lab is made of: QEMU, the guest that `tests/setup.sh` built, the `ringdisk` binary.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Error, process};

/// The programs the lab runs, each with the Debian package that brings it.
const TOOLS: [(&str, &str); 7] = [
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("qemu-storage-daemon", "qemu-utils"),
    ("qemu-img", "qemu-utils"),
    ("qemu-io", "qemu-utils"),
    ("e2fsck", "e2fsprogs"),
    ("debugfs", "e2fsprogs"),
    ("sha256sum", "coreutils"),
];

/// The prepared lab. Everything it names is read-only.
#[derive(Debug, Clone)]
pub struct Lab {
    kernel: PathBuf,
    kernel_version: String,
    initramfs: PathBuf,
    base: PathBuf,
}

/// The lab, or the end of the test with what is missing and the command that brings it.
///
/// # Panics
///
/// If [`Lab::prepare`] fails: a test that cannot run has failed, never passed.
#[must_use]
pub fn require() -> Lab {
    match Lab::prepare() {
        Ok(lab) => lab,
        Err(error) => panic!("{error}"),
    }
}

impl Lab {
    /// Finds every piece of the lab.
    ///
    /// # Errors
    ///
    /// [`Error::MissingTool`] or [`Error::GuestNotBuilt`], which say how to get the piece.
    pub fn prepare() -> Result<Self, Error> {
        for (tool, package) in TOOLS {
            if find_program(tool).is_none() {
                return Err(Error::MissingTool { tool, package });
            }
        }
        let setup = Path::new(env!("CARGO_MANIFEST_DIR")).join("setup.sh");
        let mut command = Command::new(&setup);
        command.arg("--where");
        let (status, said) = process::run(command)?;
        if !status.success() {
            return Err(Error::GuestNotBuilt {
                message: said.trim().to_owned(),
            });
        }
        let folder = PathBuf::from(said.trim());
        let version = folder.join("kernel-version");
        let kernel_version = fs::read_to_string(&version).map_err(|source| Error::File {
            action: "read",
            path: version,
            source,
        })?;
        Ok(Self {
            kernel: folder.join("vmlinuz"),
            kernel_version: kernel_version.trim().to_owned(),
            initramfs: folder.join("initramfs.cpio"),
            base: folder.join("base.qcow2"),
        })
    }

    /// The guest's kernel image, a bzImage.
    #[must_use]
    pub fn kernel(&self) -> &Path {
        &self.kernel
    }

    /// The release of that kernel, as the guest's `uname -r` says it.
    #[must_use]
    pub fn kernel_version(&self) -> &str {
        &self.kernel_version
    }

    /// The initramfs, without a test's script.
    #[must_use]
    pub fn initramfs(&self) -> &Path {
        &self.initramfs
    }

    /// The root file system as a read-only QCOW2 image of 2 GiB, to be used as a backing file.
    #[must_use]
    pub fn base(&self) -> &Path {
        &self.base
    }
}

/// The `ringdisk` binary: `$RINGDISK_BIN`, else the release build of this target folder, else its dev build.
///
/// # Errors
///
/// [`Error::RingdiskNotBuilt`] with the places searched.
pub(crate) fn ringdisk_binary() -> Result<PathBuf, Error> {
    let mut places = Vec::new();
    if let Some(path) = env::var_os("RINGDISK_BIN") {
        places.push(PathBuf::from(path));
    } else if let Some(target) = env::current_exe().ok().as_deref().and_then(target_folder) {
        places.push(target.join("release/ringdisk"));
        places.push(target.join("debug/ringdisk"));
    }
    let found = places.iter().find(|path| path.is_file()).cloned();
    found.ok_or_else(|| Error::RingdiskNotBuilt {
        looked: places
            .iter()
            .map(|path| path.display().to_string())
            .collect::<Vec<_>>()
            .join(", "),
    })
}

/// The target folder an executable was built into: the parent of its profile's folder.
fn target_folder(executable: &Path) -> Option<&Path> {
    let profile = executable
        .ancestors()
        .find(|place| place.ends_with("debug") || place.ends_with("release"))?;
    profile.parent()
}

/// Looks a program up in `$PATH` and in the system folders that an ordinary user's lacks.
fn find_program(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    folders
        .map(|folder| folder.join(name))
        .find(|program| program.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_target_folder_is_found_from_a_test_and_from_a_binary() {
        for executable in [
            "/t/debug/deps/guest-0123",
            "/t/release/demo",
            "/t/debug/examples/x",
        ] {
            assert_eq!(
                target_folder(Path::new(executable)),
                Some(Path::new("/t")),
                "{executable}"
            );
        }
    }

    #[test]
    fn a_missing_tool_says_its_package_and_the_command_to_get_it() {
        assert_eq!(find_program("no-such-program"), None);
        let message = Error::MissingTool {
            tool: "qemu-img",
            package: "qemu-utils",
        }
        .to_string();
        assert!(
            message.contains("qemu-utils") && message.contains("make setup"),
            "{message}"
        );
    }
}
