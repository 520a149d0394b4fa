//! Requests to the control socket of a ublk server: what differs from other servers.
//!
//! Invariant: a request never sees a device that is half up or half closed, because it holds the devices' lock while it looks for
//! one, changes its size for its users, removes one, or hands all of them over. Otherwise it does not hold that lock while the engine works
//! on an image.

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};

use block::lock::LockSet;
use serde_json::{Value, json};
use virtio_devices::ublk::{ResizeError, block_path};

use super::additions;
use super::served::{Event, Served, Server};
use crate::control::{HAND_OVER, Request};
use crate::exchange::{self, Listed, ServedDisk};
use crate::{config_file, image_folders};

/// The server, as its control sockets see it.
pub(super) struct UblkDesk {
    pub(super) server: Server,
    /// For the main thread.
    pub(super) events: mpsc::Sender<Event>,
    /// The locks of all images.
    pub(super) lock_set: LockSet,
    /// The control socket of its own.
    pub(super) socket: PathBuf,
    /// `None`: its sandbox lets no device come or go.
    pub(super) additions: Option<additions::DisksThread>,
}

/// Returns the device of this number.
pub(super) fn find<'a>(devices: &'a BTreeMap<u32, Served>, id: &str) -> Result<(u32, &'a Served), String> {
    let number = id.parse().ok();
    let found = number.and_then(|number| Some((number, devices.get(&number)?)));
    found.ok_or_else(|| format!("this server has no device {id}"))
}

impl exchange::Desk for UblkDesk {
    const SERVER: &'static str = "a ublk server";

    fn info(&self) -> Result<Value, String> {
        let shared = self.server.lock();
        let list = shared.devices.iter().map(|(id, served)| {
            let counts = served.device.counts();
            json!({
                "id": id,
                "disk": served.name,
                "transport": served.device.transport().to_string(),
                "workers": served.device.workers(),
                "requests": counts.requests,
                "bytes": counts.bytes,
                "errors": counts.errors,
                "zero_copied": counts.zero_copied,
                "copied": counts.copied,
                "fallbacks": counts.fallbacks,
            })
        });
        Ok(json!({
            "devices": list.collect::<Vec<_>>(),
            "hand_over": HAND_OVER,
            "process": std::process::id(),
        }))
    }

    fn disks(&self) -> Result<Vec<Listed>, String> {
        let shared = self.server.lock();
        let list = shared.devices.iter().map(|(id, served)| Listed {
            id: id.to_string(),
            place: block_path(*id),
            io: "io_uring".to_owned(),
            disk: Arc::clone(&served.disk),
        });
        Ok(list.collect())
    }

    fn disk(&self, id: &str) -> Result<Arc<ServedDisk>, String> {
        let shared = self.server.lock();
        let (_, served) = find(&shared.devices, id)?;
        Ok(Arc::clone(&served.disk))
    }

    /// Makes the image smaller first, if it is to be, and then the device what the image is.
    fn resize(&self, id: &str, size: u64, force: bool) -> Result<Value, String> {
        let shared = self.server.lock();
        let (_, served) = find(&shared.devices, id)?;
        if !served.device.can_resize() {
            return Err(ResizeError::Unsupported.to_string());
        }
        let disk = Arc::clone(&served.disk);
        drop(shared);
        let failed = |error: String| format!("cannot resize device {id} to {size} bytes: {error}");
        let _alone = disk.change(size, force).map_err(failed)?;
        let mut shared = self.server.lock();
        let shared = &mut *shared;
        let (_, served) = find(&shared.devices, id)?;
        let resized = served.device.resize(&mut shared.control, size);
        let size = resized.map_err(|error| crate::error::chain(&error))?;
        Ok(json!({ "size": size }))
    }

    fn stop(&self) {
        // If nobody listens any more, the process is ending.
        self.events
            .send(Event::Stop("a stop request"))
            .unwrap_or_default();
    }

    fn special(&self, request: Request) -> Result<Value, String> {
        let takes = || self.additions.as_ref().ok_or(image_folders::NO_FOLDER);
        match request {
            Request::DiskAdd { socket: Some(_), .. } => {
                Err("a block device has no socket; expected none".to_owned())
            }
            Request::DiskAdd { disk, socket: None } => takes()?.add(disk),
            Request::DiskRemove { id } => takes()?.remove(id),
            Request::Reload {} => self.additions.as_ref().ok_or(config_file::NO_FILE)?.reload(),
            request => Err(exchange::refusal(Self::SERVER, &request)),
        }
    }

    fn hand_over(&self, connection: &UnixStream, request: Request) -> Result<(), String> {
        self.hand_devices_over(connection, request)
    }
}
