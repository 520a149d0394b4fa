//! What is remembered of each device for whoever looks after it later: one small file in `/run/ringdisk/ublk`.
//!
//! The kernel remembers the device; this remembers the disk behind it. A server writes its file when the device is
//! live and removes it with the device; after a kill it is there for `ringdisk ublk recover`. Nothing depends on it
//! that cannot be given again on the command line.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Where the files are.
pub(super) const FOLDER: &str = "/run/ringdisk/ublk";

/// What is remembered of one device.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(super) struct DeviceState {
    /// The device's number.
    pub(super) id: u32,
    /// Its server.
    pub(super) pid: u32,
    /// The `--disk` it was made with.
    pub(super) disk: String,
    /// The folder that relative paths of it start in.
    pub(super) directory: PathBuf,
    /// Queues that share a worker.
    pub(super) queues_per_worker: u16,
    /// The `--rate-limit-group` that the disk is in.
    #[serde(default)]
    pub(super) rate_limit_group: Option<String>,
    /// Where its server can be asked.
    pub(super) control: PathBuf,
}

fn path(id: u32) -> PathBuf {
    Path::new(FOLDER).join(format!("{id}.json"))
}

/// Makes the folder, for root alone.
///
/// # Errors
///
/// What the system said.
pub(super) fn make_folder() -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    fs::DirBuilder::new().recursive(true).mode(0o700).create(FOLDER)
}

impl DeviceState {
    /// Stores it, all or nothing.
    ///
    /// # Errors
    ///
    /// What the system said.
    pub(super) fn store(&self) -> io::Result<()> {
        make_folder()?;
        let aside = Path::new(FOLDER).join(format!("{}.{}", self.id, self.pid));
        fs::write(&aside, serde_json::to_vec(self)?)?;
        fs::rename(&aside, path(self.id))
    }

    /// What is remembered of device `id`; `None` if nothing is, or it makes no sense.
    #[must_use]
    pub(super) fn load(id: u32) -> Option<Self> {
        let state: Self = serde_json::from_slice(&fs::read(path(id)).ok()?).ok()?;
        (state.id == id).then_some(state)
    }
}

/// Forgets device `id`, if `pid` is its server or `None`.
pub(super) fn forget(id: u32, pid: Option<u32>) {
    if pid.is_none_or(|pid| DeviceState::load(id).is_some_and(|state| state.pid == pid)) {
        // A file that is not there is forgotten.
        fs::remove_file(path(id)).unwrap_or_default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_remembered_comes_back_and_other_text_is_nothing() {
        let state = DeviceState {
            id: 3,
            pid: 7,
            disk: "path=a.qcow2".to_owned(),
            directory: "/srv".into(),
            queues_per_worker: 2,
            rate_limit_group: Some("id=slow,ops_size=1,ops_refill_time=1".to_owned()),
            control: "/run/x".into(),
        };
        let text = serde_json::to_string(&state).expect("JSON");
        assert_eq!(
            serde_json::from_str::<DeviceState>(&text).expect("the same"),
            state
        );
        assert!(serde_json::from_str::<DeviceState>("{\"id\":3}").is_err());
        assert_eq!(DeviceState::load(u32::MAX), None);
    }
}
