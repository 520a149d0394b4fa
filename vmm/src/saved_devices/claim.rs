//! Claims: the image of a block device without a server is not opened for writing by others, until the device has a server
//! again or is deleted.
//!
//! The image of such a device is not locked, and its host may still have it mounted. A second writer would change the disk
//! under a file system that continues with its page cache after `ublk recover`. Invariant: the saved state of a deleted
//! device, or of an earlier device with the same number, blocks nobody.

use std::fs;
use std::path::{Path, PathBuf};

use virtio_devices::ublk::block_path;

use super::claimed_file::Identity;
use super::process::is_process_alive;
use super::state::{self, SavedDevice};

/// An image that may not be opened for writing.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// The device has no server.
    #[error(
        "{} is {} {}, which waits for a server: `ringdisk ublk recover {id}`, or `ringdisk ublk del {id}`",
        path.display(), part(*backing), block_path(*id)
    )]
    Waits {
        /// The image.
        path: PathBuf,
        /// The device's number.
        id: u32,
        /// It lies below the device's image.
        backing: bool,
    },
    /// The device is served.
    #[error(
        "{} is locked: it is {} {}, which process {pid} serves",
        path.display(), part(*backing), block_path(*id)
    )]
    Served {
        /// The image.
        path: PathBuf,
        /// The device's number.
        id: u32,
        /// Its server.
        pid: u32,
        /// It lies below the device's image.
        backing: bool,
    },
}

fn part(backing: bool) -> &'static str {
    if backing {
        "a backing file of the disk of"
    } else {
        "the disk of"
    }
}

/// Refuses to write the image at `path` if it belongs to a block device, other than `own`, that keeps its I/O for
/// the next server.
///
/// # Errors
///
/// [`ClaimError`], which names the device.
pub fn refuse_claimed(path: &Path, own: Option<u32>) -> Result<(), ClaimError> {
    refuse_in(&state::folder(), Path::new(state::BLOCK_DEVICES), path, own)
}

/// The folders that [`refuse_claimed`] looks at, as far as they are there. A sandbox has to leave them readable: it takes what it cannot
/// look at for nothing.
#[must_use]
pub fn folders() -> Vec<PathBuf> {
    let folders = [state::folder(), state::VIRTUAL_DEVICES.into()];
    folders.into_iter().filter(|folder| folder.is_dir()).collect()
}

/// Makes the folder of saved states, for a server that outlasts the first block device and opens images later than that.
pub fn make_folder() {
    if let Err(error) = state::make_folder() {
        tracing::debug!(%error, "there is no folder for saved states of block devices");
    }
}

/// As [`refuse_claimed`], with what is remembered in `folder` of the devices in `devices`.
fn refuse_in(folder: &Path, devices: &Path, path: &Path, own: Option<u32>) -> Result<(), ClaimError> {
    // Whoever opens it says what is wrong.
    let Ok(identity) = Identity::of(path) else {
        return Ok(());
    };
    // Who may not look here has no devices that wait.
    for entry in fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok) {
        let name = entry.file_name();
        let id = name
            .to_str()
            .and_then(|name| name.strip_suffix(".json")?.parse().ok());
        let Some(state) = id.and_then(|id| SavedDevice::load_from(folder, id)) else {
            continue;
        };
        let (id, pid) = (state.id, state.pid);
        if own == Some(id) || !state.outlives || !state.is_of_present_device(devices) {
            continue;
        }
        let Some(index) = state.claimed().iter().position(|file| file.is(identity)) else {
            continue;
        };
        let (path, backing) = (path.to_owned(), index > 0);
        return Err(if is_process_alive(pid) {
            ClaimError::Served {
                path,
                id,
                pid,
                backing,
            }
        } else {
            ClaimError::Waits { path, id, backing }
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::saved_devices::claimed_file::ClaimedFile;

    /// A folder with images, one with what is remembered, and one as `/sys/block`.
    struct World {
        root: tempfile::TempDir,
    }

    impl World {
        /// Device 3 with the disk `a`, over the backing file `base`, whose server is gone.
        fn new() -> Self {
            let world = Self {
                root: tempfile::tempdir().expect("a folder"),
            };
            for folder in ["run", "sys/ublkb3"] {
                fs::create_dir_all(world.path(folder)).expect("a folder");
            }
            for image in ["a", "base", "other"] {
                fs::write(world.path(image), image).expect("a file");
            }
            world.is_device(41);
            world.remember(|_| ());
            world
        }

        fn path(&self, name: &str) -> PathBuf {
            self.root.path().join(name)
        }

        fn is_device(&self, sequence: u64) {
            fs::write(self.path("sys/ublkb3/diskseq"), format!("{sequence}\n")).expect("a file");
        }

        fn remember(&self, change: impl FnOnce(&mut SavedDevice)) {
            let files = ["a", "base"].map(|name| ClaimedFile::of(&self.path(name)).expect("a file"));
            let mut state = SavedDevice {
                id: 3,
                // No process has the largest number that fits.
                pid: u32::MAX,
                disk: "path=a".to_owned(),
                directory: self.root.path().to_owned(),
                queues_per_worker: 1,
                rate_limit_group: None,
                control: "/run/x".into(),
                added_by: None,
                listed_in: None,
                sequence: Some(41),
                outlives: true,
                partitions: false,
                files: files.into(),
            };
            change(&mut state);
            let text = serde_json::to_string(&state).expect("JSON");
            fs::write(self.path("run/3.json"), text).expect("a file");
        }

        fn refusal(&self, name: &str, own: Option<u32>) -> Option<String> {
            let refused = refuse_in(&self.path("run"), &self.path("sys"), &self.path(name), own);
            refused.err().map(|error| error.to_string())
        }
    }

    #[test]
    fn refuse_claimed_names_the_waiting_device_for_any_path() {
        let world = World::new();
        fs::hard_link(world.path("a"), world.path("hard")).expect("a link");
        std::os::unix::fs::symlink("a", world.path("soft")).expect("a link");
        for name in ["a", "hard", "soft"] {
            let wanted = format!(
                "{} is the disk of /dev/ublkb3, which waits for a server: `ringdisk ublk recover 3`, or `ringdisk ublk del 3`",
                world.path(name).display()
            );
            assert_eq!(world.refusal(name, None), Some(wanted));
            assert!(world.refusal(name, Some(4)).is_some());
        }
        let base = world.refusal("base", None).expect("its blocks show through");
        assert!(
            base.contains("is a backing file of the disk of /dev/ublkb3"),
            "{base}"
        );
        // Its own server, another image, and one that is not there.
        assert_eq!(world.refusal("a", Some(3)), None);
        assert_eq!(world.refusal("other", None), None);
        assert_eq!(world.refusal("none", None), None);
        // The image that has been moved is the one that the host has mounted.
        fs::rename(world.path("a"), world.path("moved")).expect("renamed");
        assert!(world.refusal("moved", None).is_some());
        // What is in its place is what `recover` would open.
        fs::write(world.path("a"), "new").expect("a file");
        assert!(world.refusal("a", None).is_some());
        assert_eq!(world.refusal("moved", None), None);
    }

    #[test]
    fn refuse_claimed_names_the_server_of_a_served_device() {
        let world = World::new();
        let pid = std::process::id();
        world.remember(|state| state.pid = pid);
        let message = world.refusal("a", None).expect("it is served");
        assert!(
            message.ends_with(&format!("the disk of /dev/ublkb3, which process {pid} serves")),
            "{message}"
        );
    }

    #[test]
    fn refuse_claimed_ignores_a_stale_state() {
        let world = World::new();
        // Another device has the number now.
        world.is_device(42);
        assert_eq!(world.refusal("a", None), None);
        world.is_device(41);
        assert!(world.refusal("a", None).is_some());
        // Nobody has it.
        fs::remove_dir_all(world.path("sys/ublkb3")).expect("removed");
        assert_eq!(world.refusal("a", None), None);
        fs::create_dir(world.path("sys/ublkb3")).expect("a folder");
        world.is_device(41);
        // It goes with its server.
        world.remember(|state| state.outlives = false);
        assert_eq!(world.refusal("a", None), None);
        fs::write(world.path("run/3.json"), "{").expect("a file");
        assert_eq!(world.refusal("a", None), None);
    }

    /// Older versions saved neither files nor sequence numbers.
    #[test]
    fn refuse_claimed_reads_the_state_of_older_versions() {
        let world = World::new();
        let text = format!(
            r#"{{"id":3,"pid":4294967295,"disk":"path=a","directory":{:?},"queues_per_worker":1,"control":"/run/x"}}"#,
            world.root.path()
        );
        fs::write(world.path("run/3.json"), text).expect("a file");
        assert!(world.refusal("a", None).is_some());
        assert_eq!(world.refusal("base", None), None);
        fs::remove_dir_all(world.path("sys/ublkb3")).expect("removed");
        assert_eq!(world.refusal("a", None), None);
    }
}
