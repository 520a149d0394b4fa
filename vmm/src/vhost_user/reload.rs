//! Following a configuration file that has changed, while its disks are served.
//!
//! ```text
//! file ──read──▶ Plan: disks that go, change and come ──apply──▶ roster
//!        │         │
//!        └─ wrong ─┴─▶ nothing changes, and the line is named
//! ```
//!
//! A disk is known by its name. What its guest cannot notice changes while the guest uses it: rate limits at once, the rest while its
//! client pauses and its image is opened anew. Anything else is refused. Disks that were added by request are left alone.
//!
//! Invariants: nothing changes before the whole file was found good; the lock of an image that is opened anew is held all the time; a
//! disk whose image cannot be opened the new way goes on the old way.

use std::error::Error;
use std::sync::Arc;

use block::throttle::RateLimits;
use serde_json::Value;

use super::file::{ConfigFile, FileDisk};
use super::roster::{LEAVE_MAX, Roster, seat};
use super::served::{Place, Served};
use crate::config_file;
use crate::disk_config::{DiskConfig, LIMIT_KEYS, OPENING_KEYS, RateLimitGroups};
use crate::error::chain;
use crate::open::{self, OpenError};

/// The way from the disks that are served to those of a file.
struct Plan {
    table_cache_bytes: Option<u64>,
    groups: RateLimitGroups,
    /// The names of all disks of the file.
    listed: Vec<String>,
    go: Vec<String>,
    change: Vec<(Change, DiskConfig)>,
    come: Vec<(Place, DiskConfig)>,
}

/// What a change of a disk takes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Change {
    Limits,
    Opening,
}

impl Roster {
    /// Follows the configuration file as it is now. Answers which disks have come, gone and changed.
    ///
    /// # Errors
    ///
    /// What is wrong with the file, as a sentence: nothing has changed then. Or the disks that could not be changed.
    pub(super) fn reload(self: &Arc<Self>) -> Result<Value, String> {
        let before = self.setup.file.as_ref().ok_or(config_file::NO_FILE)?;
        config_file::follow(&self.setup.manager, || {
            let file = ConfigFile::read(before.path()).map_err(|error| chain(&error))?;
            self.apply(self.plan(before, &file)?)
        })
    }

    /// Compares the file with what is served.
    fn plan(&self, before: &ConfigFile, file: &ConfigFile) -> Result<Plan, String> {
        file.check_settings(before).map_err(|error| chain(&error))?;
        let names = file.disks.iter().map(|disk| disk.config.name());
        let listed: Vec<String> = names.collect();
        let mut go = self.state.lock().listed.clone();
        go.retain(|name| !listed.contains(name) && self.find(name).is_ok());
        let mut plan = Plan {
            table_cache_bytes: file.table_cache_bytes(),
            groups: file.groups.clone(),
            listed,
            go,
            change: Vec::new(),
            come: Vec::new(),
        };
        for disk in &file.disks {
            self.plan_disk(file, disk, &mut plan)?;
        }
        Ok(plan)
    }

    fn plan_disk(&self, file: &ConfigFile, disk: &FileDisk, plan: &mut Plan) -> Result<(), String> {
        let name = disk.config.name();
        let wrong = |key: Option<&str>, problem: String| chain(&file.wrong_disk(disk, key, problem));
        let rehearse = || open::rehearse(&disk.config).map_err(|error| wrong(Some("path"), chain(&error)));
        let Ok(served) = self.find(&name) else {
            self.check(&disk.config, &disk.place, &plan.go)
                .map_err(|error| wrong(None, error))?;
            rehearse()?;
            plan.come.push((disk.place.clone(), disk.config.clone()));
            return Ok(());
        };
        if served.place != disk.place {
            let (key, socket) = match &disk.place {
                Place::Path(_) => ("socket", served.socket.path().display().to_string()),
                Place::Descriptor(_) => ("fd", "what it was".to_owned()),
            };
            return Err(wrong(
                Some(key),
                format!("the socket of disk {name} cannot change while it is served; expected {socket}"),
            ));
        }
        let now = served.image.config();
        let keys = now.differences(&disk.config);
        let joins = keys.contains(&"rate_limit_group");
        let is_known =
            |key: &&str| LIMIT_KEYS.contains(key) || OPENING_KEYS.contains(key) || *key == "rate_limit_group";
        if let Some(key) = keys.iter().find(|key| !is_known(key)) {
            return Err(wrong(
                Some(key),
                format!(
                    "`{key}` of disk {name} cannot change while it is served, as its guest would notice; expected what it was, or \
                     another `id`"
                ),
            ));
        }
        if keys.is_empty() {
            return Ok(());
        }
        if !joins && keys.iter().all(|key| LIMIT_KEYS.contains(key)) {
            plan.change.push((Change::Limits, disk.config.clone()));
            return Ok(());
        }
        let key = keys.first().copied();
        if now.overlay.is_some() {
            let problem = "its overlay=temporary would be lost".to_owned();
            return Err(wrong(
                key,
                format!("disk {name} cannot change while it is served: {problem}"),
            ));
        }
        if let Some(obstacle) = served.image.obstacle() {
            return Err(wrong(
                key,
                format!("disk {name} cannot change now: its image {obstacle}"),
            ));
        }
        rehearse()?;
        plan.change.push((Change::Opening, disk.config.clone()));
        Ok(())
    }

    /// Does as planned, disk by disk. One that fails keeps no other from it.
    fn apply(self: &Arc<Self>, plan: Plan) -> Result<Value, String> {
        let (mut removed, mut changed, mut added, mut failed) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        open::table_memory().set_limit_bytes(plan.table_cache_bytes);
        let limits = {
            let mut state = self.state.lock();
            state.listed = plan.listed;
            state.groups.follow(&plan.groups)
        };
        for (group, limits) in limits {
            for disk in self.served() {
                disk.disk.limits_of_group(&group, Some(&limits));
            }
        }
        for name in plan.go {
            match self.remove(&name) {
                Ok(_) => removed.push(name),
                Err(error) => failed.push(error),
            }
        }
        let join = |config: &mut DiskConfig| {
            let joined = self.state.lock().groups.join(config);
            joined.map_err(|error| error.to_string())
        };
        for (change, mut config) in plan.change {
            let name = config.name();
            match join(&mut config).and_then(|()| self.change(&name, change, config)) {
                Ok(()) => {
                    tracing::info!(
                        event = "disk-changed",
                        disk = name,
                        "a disk has another configuration"
                    );
                    changed.push(name);
                }
                Err(error) => failed.push(format!("cannot change disk {name}: {error}")),
            }
        }
        for (place, mut config) in plan.come {
            let name = config.name();
            match join(&mut config).and_then(|()| self.add_disk(place, config)) {
                Ok(_) => added.push(name),
                Err(error) => failed.push(error),
            }
        }
        config_file::followed(&added, &removed, &changed, &failed)
    }

    /// Changes a disk while it is used.
    fn change(self: &Arc<Self>, name: &str, change: Change, config: DiskConfig) -> Result<(), String> {
        let changes = self.alone();
        if changes.has_ended {
            return Err("the server is stopping".to_owned());
        }
        let (number, disk) = self.entry(name)?;
        if change == Change::Limits {
            let limits: RateLimits = config.rate_limits;
            disk.image.set_config(Arc::new(config));
            // A closed image has them when it is opened.
            let _closed = disk.disk.limits(Some(&limits));
            return Ok(());
        }
        let lock_set = disk.image.lock_set();
        let held = lock_set.hold_over(&disk.image.files());
        held.map_err(|error| format!("cannot hold the locks of its image: {error}"))?;
        let changed = self.pause_disk(number, &disk, LEAVE_MAX).map(|client| {
            let opened = open_anew(&disk, Arc::new(config));
            if opened.is_ok() {
                self.reception.enter(number, seat(&disk, client));
            }
            opened
        });
        lock_set.keep();
        match changed? {
            Ok(changed) => changed.map_err(|error| format!("it is served as before: {}", chain(&error))),
            Err(error) => {
                let said = chain(&*error);
                drop(disk);
                self.give_up_disk(number, name, error);
                Err(said)
            }
        }
    }
}

/// Closes the image of a disk that nobody uses, and opens it with another configuration; or as before, with the reason, if that
/// cannot be.
///
/// # Errors
///
/// The image is closed.
fn open_anew(
    disk: &Served,
    config: Arc<DiskConfig>,
) -> Result<Result<(), OpenError>, Box<dyn Error + Send + Sync>> {
    disk.disk.detach();
    let closed = disk.server.close_disk();
    disk.image.close();
    closed?;
    let before = disk.image.config();
    disk.image.set_config(config);
    let (opened, changed) = match disk.image.open_again() {
        Ok(opened) => (opened, Ok(())),
        Err(error) => {
            disk.image.set_config(before);
            (disk.image.open_again()?, Err(error))
        }
    };
    disk.server.reopen(opened);
    Ok(changed)
}

#[cfg(test)]
mod tests;
