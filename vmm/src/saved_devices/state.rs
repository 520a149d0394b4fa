//! The saved state of each device, for later commands: one small file in `/run/ringdisk/ublk` or, for an unprivileged
//! server, in its user's own folder.
//!
//! The kernel remembers the device; this remembers the disk behind it. A server writes its file when the device is
//! live and removes it with the device; after a kill it is there for `ringdisk ublk recover`. Nothing depends on it
//! that cannot be given again on the command line.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::claimed_file::ClaimedFile;
use crate::disk_config::DiskConfig;

/// The folder of privileged servers' files.
const FOLDER: &str = "/run/ringdisk/ublk";

/// The sysfs folder that those in [`BLOCK_DEVICES`] lead to, of devices without hardware.
pub(crate) const VIRTUAL_DEVICES: &str = "/sys/devices/virtual/block";

/// The sysfs folder of block devices.
pub(crate) const BLOCK_DEVICES: &str = "/sys/block";

/// Returns the folder of the files.
pub(crate) fn folder() -> PathBuf {
    let user = rustix::process::geteuid();
    if user.is_root() {
        return FOLDER.into();
    }
    let own = std::env::var_os("XDG_RUNTIME_DIR").filter(|own| !own.is_empty());
    let own = own.map_or_else(|| format!("/run/user/{}", user.as_raw()).into(), PathBuf::from);
    own.join("ringdisk/ublk")
}

/// The saved state of one device.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) struct SavedDevice {
    /// The device's number.
    pub(crate) id: u32,
    /// Its server.
    pub(crate) pid: u32,
    /// The `--disk` it was made with.
    pub(crate) disk: String,
    /// The folder that relative paths of it start in.
    pub(crate) directory: PathBuf,
    /// Queues that share a worker.
    pub(crate) queues_per_worker: u16,
    /// The `--rate-limit-group` that the disk is in.
    #[serde(default)]
    pub(crate) rate_limit_group: Option<String>,
    /// The control socket of its server.
    pub(crate) control: PathBuf,
    /// The `--control` of the server that made it for a request (`disk-add`), by an absolute path.
    #[serde(default)]
    pub(crate) added_by: Option<PathBuf>,
    /// The configuration file that lists it, by an absolute path.
    #[serde(default)]
    pub(crate) listed_in: Option<PathBuf>,
    /// The kernel's sequence number of the device, which no other one of this boot has. `None`: an older server's.
    #[serde(default)]
    pub(crate) sequence: Option<u64>,
    /// True if the device remains, and waits, when its server is gone.
    #[serde(default = "yes")]
    pub(crate) outlives: bool,
    /// True if the host may read the contents.
    #[serde(default)]
    pub(crate) partitions: bool,
    /// The files of the disk, its own first. Empty: an older server's.
    #[serde(default)]
    pub(crate) files: Vec<ClaimedFile>,
}

fn yes() -> bool {
    true
}

fn path_in(folder: &Path, id: u32) -> PathBuf {
    folder.join(format!("{id}.json"))
}

fn path(id: u32) -> PathBuf {
    path_in(&folder(), id)
}

/// The sequence number of the block device `id` that is there now, among those in `devices`.
pub(crate) fn sequence(devices: &Path, id: u32) -> Option<u64> {
    let path = devices.join(format!("ublkb{id}/diskseq"));
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Makes the folder, for its user alone.
///
/// # Errors
///
/// The error of the system call.
pub(crate) fn make_folder() -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder())
}

/// Returns the path of the control socket of server process `pid`.
pub(crate) fn socket(pid: u32) -> PathBuf {
    folder().join(format!("server-{pid}.sock"))
}

/// Removes the sockets in `folder` of servers that were killed: their processes are not there.
pub(crate) fn sweep(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok) {
        let name = entry.file_name();
        let pid = name
            .to_str()
            .and_then(|name| name.strip_prefix("server-")?.strip_suffix(".sock"));
        let pid = pid.and_then(|pid| pid.parse::<u32>().ok());
        if pid.is_some_and(|pid| !Path::new("/proc").join(pid.to_string()).exists()) {
            // Somebody else has done it.
            fs::remove_file(entry.path()).unwrap_or_default();
        }
    }
}

impl SavedDevice {
    /// Stores it, all or nothing.
    ///
    /// # Errors
    ///
    /// The error of the system call.
    pub(crate) fn store(&self) -> io::Result<()> {
        make_folder()?;
        let aside = folder().join(format!("{}.{}", self.id, self.pid));
        fs::write(&aside, serde_json::to_vec(self)?)?;
        fs::rename(&aside, path(self.id))
    }

    /// Returns the saved state of device `id`; `None` if there is none, or it is invalid.
    #[must_use]
    pub(crate) fn load(id: u32) -> Option<Self> {
        Self::load_from(&folder(), id)
    }

    /// As [`SavedDevice::load`], from `folder`.
    pub(crate) fn load_from(folder: &Path, id: u32) -> Option<Self> {
        let state: Self = serde_json::from_slice(&fs::read(path_in(folder, id)).ok()?).ok()?;
        (state.id == id).then_some(state)
    }

    /// Returns true if the device that has this number now, among those in `devices`, is the one that is remembered. Of
    /// one that an older server made, only the number is known.
    pub(crate) fn is_of_present_device(&self, devices: &Path) -> bool {
        match self.sequence {
            Some(known) => sequence(devices, self.id) == Some(known),
            None => devices.join(format!("ublkb{}", self.id)).exists(),
        }
    }

    /// The claimed files of the disk, its own first.
    pub(crate) fn claimed(&self) -> Vec<ClaimedFile> {
        if !self.files.is_empty() {
            return self.files.clone();
        }
        let disk = DiskConfig::parse(&self.disk).ok();
        let path = disk.map(|disk| self.directory.join(disk.path));
        path.and_then(|path| ClaimedFile::of(&path)).into_iter().collect()
    }
}

/// Forgets device `id`, if `pid` is its server or `None`.
pub(crate) fn forget(id: u32, pid: Option<u32>) {
    if pid.is_none_or(|pid| SavedDevice::load(id).is_some_and(|state| state.pid == pid)) {
        // A file that is not there is forgotten.
        fs::remove_file(path(id)).unwrap_or_default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sweep_removes_sockets_of_missing_processes() {
        let folder = tempfile::tempdir().expect("a folder");
        let own = format!("server-{}.sock", std::process::id());
        // No process has the largest number that fits.
        for name in [&own, "server-4294967295.sock", "server-.sock", "3.json"] {
            fs::write(folder.path().join(name), "").expect("a file");
        }
        sweep(folder.path());
        let there = |name: &str| folder.path().join(name).exists();
        assert!(there(&own) && there("server-.sock") && there("3.json"));
        assert!(!there("server-4294967295.sock"));
    }

    #[test]
    fn saved_device_round_trips_and_refuses_other_text() {
        let state = SavedDevice {
            id: 3,
            pid: 7,
            disk: "path=a.qcow2".to_owned(),
            directory: "/srv".into(),
            queues_per_worker: 2,
            rate_limit_group: Some("id=slow,ops_size=1,ops_refill_time=1".to_owned()),
            control: "/run/x".into(),
            added_by: Some("/run/y".into()),
            listed_in: Some("/etc/z".into()),
            sequence: Some(9),
            outlives: false,
            partitions: true,
            files: ClaimedFile::of(Path::new("/")).into_iter().collect(),
        };
        let text = serde_json::to_string(&state).expect("JSON");
        assert_eq!(
            serde_json::from_str::<SavedDevice>(&text).expect("the same"),
            state
        );
        assert!(serde_json::from_str::<SavedDevice>("{\"id\":3}").is_err());
        assert_eq!(SavedDevice::load(u32::MAX), None);
    }
}
