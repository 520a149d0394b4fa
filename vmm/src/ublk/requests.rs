//! Requests to the control socket of a ublk server: what differs from other servers.
//!
//! Invariant: a request never sees a device that is half up or half closed, because it holds the devices' lock while it looks for
//! one, changes its size for its users, removes one, or hands all of them over. Otherwise it does not hold that lock while the engine works
//! on an image.

use std::collections::BTreeMap;
use std::sync::{Arc, mpsc};

use serde_json::{Value, json};
use virtio_devices::ublk::{ResizeError, UblkDevice, block_path};

use super::served::{Event, Served, Server};
use super::{additions, hand_over};
use crate::control::Request;
use crate::exchange::{self, Listed, ServedDisk};
use crate::{config_file, image_folders};

/// The server, as its control sockets see it.
pub(super) struct UblkDesk {
    pub(super) server: Server,
    /// For the main thread.
    pub(super) events: mpsc::Sender<Event>,
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
            "hand_over": hand_over::VERSION,
            "passes_locks": true,
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
        let (version, devices) = match request {
            Request::HandOver { version, devices } => (version, devices),
            Request::DiskAdd { socket: Some(_), .. } => {
                return Err("a block device has no socket; expected none".to_owned());
            }
            Request::DiskAdd { disk, socket: None } => return takes()?.add(disk),
            Request::DiskRemove { id } => return takes()?.remove(id),
            Request::Reload {} => return self.additions.as_ref().ok_or(config_file::NO_FILE)?.reload(),
            request => return Err(exchange::refusal(Self::SERVER, &request)),
        };
        let mut shared = self.server.lock();
        let shared = &mut *shared;
        let served: Vec<&Served> = shared.devices.values().collect();
        let own: Vec<&UblkDevice> = served.iter().map(|served| &served.device).collect();
        hand_over::check(&own, version, &devices)?;
        // No request of an operator works on an image that is closed for the next server.
        served.iter().for_each(|served| served.disk.detach());
        let left = hand_over::leave(&mut shared.control, &own).inspect_err(|_| {
            served
                .iter()
                .for_each(|served| served.disk.attach(&served.opened));
        })?;
        shared.handed_over = true;
        Ok(left)
    }
}
