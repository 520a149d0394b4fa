//! Devices that come to a running server, and go: `disk-add` and `disk-remove` of its control socket. `reload` does so as a file says.
//!
//! A thread of its own makes them, which is not confined: it opens device nodes, and makes links and saved states. Where the sandbox is
//! on, the image of a disk, which others may have written, is opened by another thread, which can open files of `--images` alone.
//!
//! Invariants: one change at a time; a change that fails leaves all as it was; a device in use is not removed.

use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::thread;

use block::lock::LockSet;
use parking_lot::Mutex;
use serde_json::{Value, json};
use virtio_devices::ublk::abi::Flags;
use virtio_devices::ublk::block_path;

use super::arguments::ServeArguments;
use super::bring_up::{bring_up, open_disk};
use super::groups::Groups;
use super::reload::Followed;
use super::served::{Event, Server, close};
use super::wanted::{NewDevices, Wanted};
use super::{in_use, requests};
use crate::control::DiskKeys;
use crate::disk_config::DiskConfig;
use crate::errands::Errands;
use crate::error::{CommandFailure, chain};
use crate::open::OpenedDisk;
use crate::sandbox::{self, AllowedFiles};
use crate::saved_devices::claim;
use crate::sd_notify::Manager;
use crate::{image_folders, once};

/// The parts of a server that make further devices.
pub(super) struct Additions {
    pub(super) server: Server,
    /// For the main thread.
    pub(super) events: mpsc::Sender<Event>,
    /// The server's own control socket.
    pub(super) socket: PathBuf,
    pub(super) arguments: ServeArguments,
    pub(super) new: NewDevices,
    pub(super) groups: Mutex<Groups>,
    /// The folder in which relative paths start.
    pub(super) directory: PathBuf,
    pub(super) lock_set: LockSet,
    /// The configuration file that the server follows.
    pub(super) followed: Option<Mutex<Followed>>,
    pub(super) manager: Arc<Manager>,
}

/// The thread that makes and removes devices.
#[derive(Clone)]
pub(super) struct DisksThread {
    additions: Arc<Additions>,
    errands: Errands,
}

impl DisksThread {
    /// Starts the thread, as confined as the calling one, of a server that takes devices; `None` of any other.
    ///
    /// # Errors
    ///
    /// If it cannot be started.
    pub(super) fn start(additions: Additions) -> std::io::Result<Option<Self>> {
        let arguments = &additions.arguments;
        let takes = !arguments.images.is_empty() || !arguments.is_confined();
        if !takes && additions.followed.is_none() {
            return Ok(None);
        }
        Ok(Some(Self {
            errands: Errands::start("disks")?,
            additions: Arc::new(additions),
        }))
    }

    /// Makes a device of a disk, and serves it.
    ///
    /// # Errors
    ///
    /// The reason as one line; all is as it was.
    pub(super) fn add(&self, keys: DiskKeys) -> Result<Value, String> {
        self.ask(move |additions| additions.add(&keys))
    }

    /// Removes a device that is not in use, and closes its image.
    ///
    /// # Errors
    ///
    /// The reason as one line. If it is not about the image, the device is served as before.
    pub(super) fn remove(&self, id: String) -> Result<Value, String> {
        self.ask(move |additions| additions.remove(&id))
    }

    /// Follows the configuration file.
    ///
    /// # Errors
    ///
    /// As [`Additions::reload`].
    pub(super) fn reload(&self) -> Result<Value, String> {
        self.ask(Additions::reload)
    }

    /// Has the configuration file followed, and does not wait for that. What comes of it is in the log.
    pub(super) fn begin_reload(&self) {
        let additions = Arc::clone(&self.additions);
        self.errands.send(move || drop(additions.reload()));
    }

    fn ask(
        &self,
        work: impl FnOnce(&Additions) -> Result<Value, String> + Send + 'static,
    ) -> Result<Value, String> {
        let additions = Arc::clone(&self.additions);
        let answer = self.errands.ask(move || work(&additions));
        answer.unwrap_or_else(|| Err("the server is stopping".to_owned()))
    }
}

impl Additions {
    fn add(&self, keys: &DiskKeys) -> Result<Value, String> {
        let mut disk = keys.config().map_err(|error| error.to_string())?;
        disk.is_own().map_err(|error| error.to_string())?;
        let name = disk.name();
        let refused = |reason: String| format!("cannot add disk {name}: {reason}");
        let wanted = self.wanted(&mut disk, keys).map_err(refused)?;
        self.bring(wanted).map_err(refused)
    }

    /// Makes a device, and serves it.
    ///
    /// # Errors
    ///
    /// The reason as the end of a sentence.
    pub(super) fn bring(&self, wanted: Wanted) -> Result<Value, String> {
        let opened = self.open(&wanted).map_err(|failure| line(&failure))?;
        let brought = bring_up(&self.server, vec![(wanted, opened)], &self.events, &self.socket);
        // A device that is made anew does not come late.
        let (ids, _late) = brought.map_err(|failure| line(&failure))?;
        let id = *ids.first().ok_or("it has no device")?;
        let path = block_path(id);
        tracing::info!(event = "disk-added", disk = %id, %path, "serving one more disk");
        Ok(json!({ "id": id.to_string(), "path": path }))
    }

    /// Refuses a disk that cannot come beside `others`, of which it is none.
    ///
    /// # Errors
    ///
    /// The reason as the end of a sentence.
    pub(super) fn check_new<'a>(
        &self,
        others: impl IntoIterator<Item = &'a DiskConfig>,
        disk: &'a DiskConfig,
    ) -> Result<(), String> {
        if self.arguments.is_confined() {
            image_folders::check_within(&self.folders(), "image", &disk.path)?;
        }
        once::check_images(others.into_iter().chain([disk])).map_err(|failure| line(&failure))
    }

    /// The device that is to be made of a disk. Its image is not opened yet.
    fn wanted(&self, disk: &mut DiskConfig, keys: &DiskKeys) -> Result<Wanted, String> {
        let text = keys.text()?;
        let group = self.groups.lock().join(disk, None);
        let group = group.map_err(|failure| line(&failure))?;
        disk.start_in(&self.directory);
        let others: Vec<_> = {
            let shared = self.server.lock();
            shared
                .devices
                .values()
                .map(|served| served.config.clone())
                .collect()
        };
        self.check_new(&others, disk)?;
        let made = self.new.wanted(
            (text, disk.clone()),
            group,
            self.directory.clone(),
            &self.arguments,
        );
        let made = made.map_err(|failure| line(&failure))?;
        let added_by = self.arguments.control.as_ref();
        Ok(Wanted {
            added_by: added_by.map(|control| self.directory.join(control)),
            ..made
        })
    }

    /// The folders of `--images`, from the root.
    fn folders(&self) -> Vec<PathBuf> {
        let folders = self.arguments.images.iter();
        folders.map(|folder| self.directory.join(folder)).collect()
    }

    /// Opens an image: in a sandbox on a thread that can open the files of `--images`, and see which images belong to devices that
    /// wait for a server.
    fn open(&self, wanted: &Wanted) -> Result<OpenedDisk, CommandFailure> {
        if !self.arguments.is_confined() {
            return open_disk(wanted, &self.lock_set);
        }
        let allowed = AllowedFiles {
            open: self.folders(),
            readable_in: claim::folders(),
            ..AllowedFiles::default()
        };
        let open = || {
            sandbox::restrict_files(&allowed).map_err(|error| CommandFailure::Failed(error.into()))?;
            open_disk(wanted, &self.lock_set)
        };
        thread::scope(|scope| {
            let thread = thread::Builder::new().name("open".to_owned());
            let opening = thread.spawn_scoped(scope, open);
            let opening = opening.map_err(|error| CommandFailure::about("cannot start a thread", error))?;
            let panicked = |_| CommandFailure::Failed("the thread that opens the image has panicked".into());
            opening.join().map_err(panicked)?
        })
    }

    pub(super) fn remove(&self, id: &str) -> Result<Value, String> {
        let (number, _) = requests::find(&self.server.lock().devices, id)?;
        let path = block_path(number);
        let in_use = |user: &str| {
            format!(
                "{path} is in use{user}; unmount it, or end who uses it, or run `ringdisk ublk del --force {number}`"
            )
        };
        match in_use::user_of(&path) {
            Ok(None) => {}
            Ok(Some(user)) => return Err(in_use(&format!(" ({user})"))),
            Err(error) => return Err(format!("cannot tell whether {path} is in use: {error}")),
        }
        let mut shared = self.server.lock();
        let shared = &mut *shared;
        let (_, served) = requests::find(&shared.devices, id)?;
        if shared.has_ended {
            return Err("the server is stopping".to_owned());
        }
        if served.device.info().flags().contains(Flags::SAFE_STOP_DEV) {
            match shared.control.try_stop(number) {
                Err(error) if error.errno() == Some(libc::EBUSY) => return Err(in_use("")),
                stopped => stopped.map_err(|error| chain(&error))?,
            }
        }
        let served = shared.devices.remove(&number);
        close(&mut shared.control, served).map_err(|failure| line(&failure))?;
        // Whoever finds a device ended takes it for one that another process deletes.
        match shared.control.delete(number) {
            Err(error) if error.errno() != Some(libc::ENODEV) => return Err(chain(&error)),
            _ => {}
        }
        tracing::info!(event = "disk-removed", disk = id, "a disk was removed");
        Ok(json!({ "id": id }))
    }
}

/// The text of a failure, as the end of a sentence.
pub(super) fn line(failure: &CommandFailure) -> String {
    failure.line().unwrap_or_default()
}
