//! Following a configuration file that has changed, while its devices are served.
//!
//! A device is known by the name of its disk. Rate limits change at once. What else changes is refused, and needs a new server: the
//! rest of a device is as it was when its image was opened. Devices that were added by request are left alone.
//!
//! Invariants: nothing changes before the whole file was found good; a device in use is not removed, and is tried again next time.

use std::collections::BTreeSet;

use serde_json::Value;

use super::additions::{Additions, line};
use super::file::{DevicesFile, FileDevice};
use super::wanted::Wanted;
use crate::config_file;
use crate::disk_config::{DiskConfig, LIMIT_KEYS};
use crate::error::chain;
use crate::open;
use crate::saved_devices::state::SavedDevice;

/// A file that a server follows.
#[derive(Debug)]
pub(super) struct Followed {
    /// The file as it was last followed.
    pub(super) file: DevicesFile,
    /// The names of the disks that it lists, or has listed and whose devices could not be removed yet.
    pub(super) listed: BTreeSet<String>,
}

impl Followed {
    /// The file of a server that begins with these devices.
    pub(super) fn begin(file: DevicesFile, wanted: &[Wanted]) -> Self {
        let listed = file.devices.iter().map(|device| device.disk.name());
        let before = wanted
            .iter()
            .filter(|wanted| wanted.listed_in.as_deref() == Some(file.path.as_path()));
        let before = before.map(|wanted| wanted.disk.name());
        Self {
            listed: listed.chain(before).collect(),
            file,
        }
    }

    /// True if there are devices that the file lists no more.
    pub(super) fn has_leftovers(&self) -> bool {
        self.listed.iter().any(|name| self.file.device(name).is_none())
    }
}

/// The way from the devices that are served to those of a file.
struct Plan {
    go: Vec<u32>,
    /// Those that get the limits that they have in the file.
    change: Vec<(u32, FileDevice)>,
    come: Vec<FileDevice>,
}

impl Additions {
    /// Follows the configuration file as it is now. Answers which disks have come, gone and changed.
    ///
    /// # Errors
    ///
    /// What is wrong with the file, as a sentence: nothing has changed then. Or the devices that could not be changed.
    pub(super) fn reload(&self) -> Result<Value, String> {
        let followed = self.followed.as_ref().ok_or(config_file::NO_FILE)?;
        let mut followed = followed.lock();
        config_file::follow(&self.manager, || {
            let file = DevicesFile::read(&followed.file.path).map_err(|error| chain(&error))?;
            let plan = self.plan(&followed, &file)?;
            self.apply(&mut followed, file, plan)
        })
    }

    /// Compares the file with what is served.
    fn plan(&self, followed: &Followed, file: &DevicesFile) -> Result<Plan, String> {
        file.check_settings(&followed.file)
            .map_err(|error| chain(&error))?;
        let mut plan = Plan {
            go: Vec::new(),
            change: Vec::new(),
            come: Vec::new(),
        };
        let mut staying = Vec::new();
        for (&id, served) in &self.server.lock().devices {
            if followed.listed.contains(&served.name) && file.device(&served.name).is_none() {
                plan.go.push(id);
            } else {
                staying.push((id, served.config.clone()));
            }
        }
        for device in &file.devices {
            let name = device.disk.name();
            match staying.iter().find(|(_, config)| config.name() == name) {
                Some((id, now)) => {
                    let before = followed.file.device(&name);
                    if is_changed(file, device, before, *id, now)? {
                        plan.change.push((*id, device.clone()));
                    }
                }
                None => {
                    let others = staying.iter().map(|(_, config)| config);
                    self.check_new(others, &device.disk)
                        .map_err(|problem| file.wrong(device, None, problem))?;
                    open::rehearse(&device.disk)
                        .map_err(|error| file.wrong(device, Some("path"), chain(&error)))?;
                    plan.come.push(device.clone());
                }
            }
        }
        Ok(plan)
    }

    /// Does as planned, device by device. One that fails keeps no other from it.
    fn apply(&self, followed: &mut Followed, file: DevicesFile, plan: Plan) -> Result<Value, String> {
        let (mut added, mut removed, mut changed, mut failed) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        open::table_memory().set_limit_bytes(file.arguments.table_cache);
        let limits = self.groups.lock().follow(&file.arguments.rate_limit_group);
        for (group, limits) in limits.map_err(|failure| line(&failure))? {
            for served in self.server.lock().devices.values() {
                served.disk.limits_of_group(&group, Some(&limits));
            }
        }
        followed.listed = file.devices.iter().map(|device| device.disk.name()).collect();
        for id in plan.go {
            let name = self
                .server
                .lock()
                .devices
                .get(&id)
                .map(|served| served.name.clone());
            let Some(name) = name else { continue };
            match self.remove(&id.to_string()) {
                Ok(_) => removed.push(name),
                Err(error) => {
                    failed.push(format!("cannot remove disk {name}: {error}"));
                    followed.listed.insert(name);
                }
            }
        }
        for (id, device) in plan.change {
            if let Some(served) = self.server.lock().devices.get_mut(&id) {
                let limits = device.disk.rate_limits;
                served.config.rate_limits = limits;
                // A closed image has them when it is opened.
                let _closed = served.disk.limits(Some(&limits));
                let name = &served.name;
                tracing::info!(
                    event = "disk-changed",
                    disk = name,
                    "a disk has another configuration"
                );
                changed.push(name.clone());
            }
        }
        for device in plan.come {
            let name = device.disk.name();
            let wanted = device.wanted(&file, &mut self.groups.lock());
            let came = wanted
                .map_err(|failure| line(&failure))
                .and_then(|wanted| self.bring(wanted));
            match came {
                Ok(_) => added.push(name),
                Err(error) => failed.push(format!("cannot add disk {name}: {error}")),
            }
        }
        self.remember(&file);
        followed.file = file;
        config_file::followed(&added, &removed, &changed, &failed)
    }

    /// Saves what the file says of its devices now, for whoever serves them next.
    fn remember(&self, file: &DevicesFile) {
        let shared = self.server.lock();
        for (&id, served) in &shared.devices {
            let Some((device, saved)) = file.device(&served.name).zip(SavedDevice::load(id)) else {
                continue;
            };
            let group = self.groups.lock().join(&mut device.disk.clone(), None);
            let now = SavedDevice {
                disk: device.text.clone(),
                rate_limit_group: group.unwrap_or_else(|_| saved.rate_limit_group.clone()),
                listed_in: Some(file.path.clone()),
                added_by: None,
                ..saved.clone()
            };
            if now != saved
                && let Err(error) = now.store()
            {
                tracing::warn!(%error, device = id, "cannot save the state of the device");
            }
        }
    }
}

/// Returns true if rate limits of a device that is served have changed in the file, which had it as `before`.
///
/// # Errors
///
/// If something else has.
fn is_changed(
    file: &DevicesFile,
    device: &FileDevice,
    before: Option<&FileDevice>,
    id: u32,
    now: &DiskConfig,
) -> Result<bool, String> {
    let name = device.disk.name();
    let refused = |key: &'static str| {
        let problem = format!(
            "`{key}` of disk {name} cannot change while it is served; expected what it was, or a new server (--takeover) or another \
             `id`, as its users may notice"
        );
        Err(file.wrong(device, Some(key), problem))
    };
    if device.number.is_some_and(|number| number != id) {
        return refused("number");
    }
    if let Some(before) = before
        && let Some(key) = device.new.changed_key(&before.new)
    {
        return refused(key);
    }
    let keys = now.differences(&device.disk);
    match keys.iter().find(|key| !LIMIT_KEYS.contains(key)) {
        Some(key) => refused(key),
        None => Ok(!keys.is_empty()),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn file(more: &str) -> DevicesFile {
        let text = format!("[[device]]\nid = \"a\"\npath = \"/srv/a\"\n{more}");
        DevicesFile::parse(Path::new("/etc/x.toml"), &text).expect("a file")
    }

    #[test]
    fn device_changes_by_its_limits_alone() {
        let before = file("num_queues = 2\nrecovery = \"wait\"");
        let served = &before.devices[0];
        let change = |more: &str| {
            let now = file(more);
            is_changed(&now, &now.devices[0], Some(served), 3, &served.disk)
        };
        let same = "recovery = \"wait\"\nnum_queues = 2\n";
        let with = |more: &str| change(&format!("{same}{more}"));
        assert_eq!(with("number = 3"), Ok(false));
        assert_eq!(with("ops_size = 5\nops_refill_time = 100"), Ok(true));
        for (more, key, line) in [
            ("number = 4", "number", 6),
            ("direct = true", "direct", 6),
            ("serial = \"A\"", "serial", 6),
            ("max_io = \"64K\"", "max_io", 6),
        ] {
            let refused = with(more).expect_err("it would be noticed");
            let wanted = format!("/etc/x.toml:{line}: `{key}` of disk a cannot change while it is served; ");
            assert!(refused.starts_with(&wanted), "{refused}");
        }
        let refused = change("num_queues = 2").expect_err("its recovery has changed");
        assert!(
            refused.starts_with("/etc/x.toml:1: `recovery` of disk a"),
            "{refused}"
        );
    }
}
