//! Finding what the lab is made of: QEMU, the guest that `tests/setup.sh` built, the `ringdisk` binary.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

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

/// The kernel that a guest runs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kernel {
    /// The one of the guest's own folder, 6.12.
    V6_12,
    /// The newer one, 7.x, from a suite that may not be within reach.
    V7,
}

/// The lab with this kernel. `None` where it cannot be had, which has been said as `tests/summary.sh` counts it.
///
/// # Panics
///
/// As [`require`].
#[must_use]
#[expect(
    clippy::print_stdout,
    reason = "what cannot run here is counted by what it prints"
)]
pub fn require_kernel(kernel: Kernel) -> Option<Lab> {
    match require().with_kernel(kernel) {
        Ok(lab) => Some(lab),
        Err(Error::NewerKernelUnavailable { why }) => {
            println!("cannot run here: tests with the newer kernel, because {why}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

impl Lab {
    /// The same lab, its guests on another kernel.
    ///
    /// # Errors
    ///
    /// [`Error::NewerKernelUnavailable`] if it cannot be downloaded here; [`Error::GuestNotBuilt`] if nobody tried.
    pub fn with_kernel(&self, kernel: Kernel) -> Result<Self, Error> {
        if kernel == Kernel::V6_12 {
            return Ok(self.clone());
        }
        let folder = newer_folder(None)?;
        Ok(Self {
            kernel: folder.join("vmlinuz"),
            kernel_version: kernel_version(&folder)?,
            initramfs: folder.join("initramfs.cpio"),
            base: self.base.clone(),
        })
    }

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
        let folder = guest_folder()?;
        Ok(Self {
            kernel: folder.join("vmlinuz"),
            kernel_version: kernel_version(&folder)?,
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

/// Asks `tests/setup.sh` where something is, in this cache or the usual one.
fn setup(question: &str, cache: Option<&Path>) -> Result<(ExitStatus, String), Error> {
    let setup = Path::new(env!("CARGO_MANIFEST_DIR")).join("setup.sh");
    let mut command = Command::new(setup);
    command.arg(question);
    if let Some(cache) = cache {
        command.env("RINGDISK_LAB_CACHE", cache);
    }
    process::run(command)
}

/// Returns the folder of the newer kernel, in this cache or the usual one.
pub(crate) fn newer_folder(cache: Option<&Path>) -> Result<PathBuf, Error> {
    let (status, said) = setup("--newer", cache)?;
    let said = said.trim();
    match status.code() {
        Some(0) => Ok(said.into()),
        Some(3) => Err(Error::NewerKernelUnavailable { why: said.to_owned() }),
        _ => Err(Error::GuestNotBuilt {
            message: said.to_owned(),
        }),
    }
}

/// The release of the kernel in a folder that `tests/setup.sh` made.
fn kernel_version(folder: &Path) -> Result<String, Error> {
    let path = folder.join("kernel-version");
    match fs::read_to_string(&path) {
        Ok(version) => Ok(version.trim().to_owned()),
        Err(source) => Err(Error::File {
            action: "read",
            path,
            source,
        }),
    }
}

/// The folder of the guest's parts: `$RINGDISK_LAB_GUEST`, where there is no checkout of this project, else what
/// `setup.sh` made.
fn guest_folder() -> Result<PathBuf, Error> {
    if let Some(folder) = env::var_os("RINGDISK_LAB_GUEST").filter(|folder| !folder.is_empty()) {
        return Ok(PathBuf::from(folder));
    }
    let (status, said) = setup("--where", None)?;
    if !status.success() {
        return Err(Error::GuestNotBuilt {
            message: said.trim().to_owned(),
        });
    }
    Ok(PathBuf::from(said.trim()))
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
    fn target_folder_is_found_from_tests_and_binaries() {
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

    /// A kernel that was not built is a fault of the set-up. Where it cannot be had, a test may go without.
    #[test]
    fn newer_kernel_not_built_is_told_from_unavailable() {
        let cache = crate::Scratch::new().unwrap();
        let cache = cache.file("cache");
        fs::create_dir(&cache).unwrap();
        let Err(Error::GuestNotBuilt { message }) = newer_folder(Some(&cache)) else {
            panic!("nothing was built");
        };
        let folder = message.split(['(', ')']).nth(1).unwrap();
        fs::write(format!("{folder}.unavailable"), "the mirror is away").unwrap();
        let Err(Error::NewerKernelUnavailable { why }) = newer_folder(Some(&cache)) else {
            panic!("it cannot be had");
        };
        assert_eq!(why, "the mirror is away");
        fs::create_dir(folder).unwrap();
        assert_eq!(newer_folder(Some(&cache)).unwrap(), PathBuf::from(folder));
    }

    #[test]
    fn missing_tool_names_its_package_and_command() {
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
