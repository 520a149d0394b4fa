//! The devices that this process serves, and how it lets each of them go.
//!
//! The main thread and the control socket's threads share them. Invariants: a device is stopped and drained before its image is
//! closed, and the image's lock goes last. A device that is left to the next server stays untouched, and its image locked, until
//! this process exits.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use virtio_devices::ublk::{CloseError, Control, QueueEvent, UblkDevice, block_path};

use super::{by_id, in_use, page_cache};
use crate::disk_config::DiskConfig;
use crate::error::{CommandFailure, EXIT_FAILURE};
use crate::exchange::ServedDisk;
use crate::metrics::{DiskReport, Source};
use crate::open::OpenedDisk;
use crate::saved_devices::state;

/// A device and the image behind it. Dropped in this order: the image's lock goes last.
pub(super) struct Served {
    pub(super) device: UblkDevice,
    pub(super) name: String,
    pub(super) config: DiskConfig,
    /// The disk, for requests of control sockets.
    pub(super) disk: Arc<ServedDisk>,
    pub(super) opened: OpenedDisk,
    /// True if it had another server before.
    pub(super) recovered: bool,
}

/// The state that the main thread and the control socket share.
pub(super) struct ServerState {
    pub(super) control: Control,
    pub(super) devices: BTreeMap<u32, Served>,
    /// The images of detached devices, held until this process exits.
    pub(super) left: Vec<OpenedDisk>,
    /// They are being closed, and none may come any more.
    pub(super) has_ended: bool,
}

impl ServerState {
    /// A server without devices.
    pub(super) fn new(control: Control) -> Self {
        Self {
            control,
            devices: BTreeMap::new(),
            left: Vec::new(),
            has_ended: false,
        }
    }

    /// Lets go of a device: it stays as it is until the end of this process, which the driver takes for its server's death. So
    /// does its image's lock.
    pub(super) fn leave(&mut self, served: Served) {
        let Served {
            device, opened, disk, ..
        } = served;
        disk.detach();
        drop(device);
        self.left.push(opened);
    }

    /// Lets go of all devices that this process has not made: they are the next server's, as they would be had it not come.
    pub(super) fn leave_recovered(&mut self) {
        let (recovered, made) = std::mem::take(&mut self.devices)
            .into_iter()
            .partition::<BTreeMap<_, _>, _>(|(_, served)| served.recovered);
        self.devices = made;
        recovered.into_values().for_each(|served| self.leave(served));
    }
}

pub(super) type Server = Arc<Mutex<ServerState>>;

/// Returns what gives the statistics of the devices that a server has.
pub(super) fn reports(server: &Server) -> Arc<Source> {
    // Its owner and the server of statistics end together.
    let server = Arc::clone(server);
    let report = |(&id, served): (&u32, &Served)| {
        let requests = served.device.stats().snapshot();
        let mut report = DiskReport::new(served.name.clone(), requests, served.disk.engine_counts());
        report.labels.push(("device", format!("ublkb{id}")));
        report
    };
    Arc::new(move || server.lock().devices.iter().map(report).collect())
}

/// An event for the main thread.
pub(super) enum Event {
    Stop(&'static str),
    /// A request was answered, which may have removed a device.
    Answered,
    Queue(QueueEvent),
}

/// Stops and deletes devices and closes their images. The failure is the first there was.
pub(super) fn close(
    control: &mut Control,
    served: impl IntoIterator<Item = Served>,
) -> Result<(), CommandFailure> {
    let (mut devices, mut images) = (Vec::new(), Vec::new());
    for served in served {
        let Served {
            device,
            name,
            config,
            disk,
            opened,
            recovered: _,
        } = served;
        disk.detach();
        prepare(&device, config.serial.as_deref());
        images.push((device.id(), name, opened));
        devices.push(device);
    }
    let closed = UblkDevice::close_all(devices, control);
    let (mut first_failure, mut is_undrained) = (None, false);
    for ((id, name, _opened), closed) in images.into_iter().zip(closed) {
        if let Err(CloseError::Undrained { .. }) = &closed {
            is_undrained = true;
            continue;
        }
        state::forget(id, Some(std::process::id()));
        match closed {
            Ok(()) => tracing::info!(disk = %name, device = id, "the image was closed cleanly"),
            Err(error) => {
                tracing::error!(disk = %name, device = id, %error, "the image was not closed cleanly");
                first_failure.get_or_insert_with(|| CommandFailure::about(name, error));
            }
        }
    }
    if is_undrained {
        // Only the end of the process frees what the kernel waits for, and it must come soon.
        tracing::error!("exiting: requests are still in flight");
        std::process::exit(EXIT_FAILURE.into());
    }
    first_failure.map_or(Ok(()), Err)
}

/// Writes back what the host keeps of a device that is about to be removed, and removes its link.
fn prepare(device: &UblkDevice, serial: Option<&str>) {
    let (id, path) = (device.id(), block_path(device.id()));
    if !device.is_ended() {
        match in_use::user_of(&path) {
            Ok(Some(user)) => {
                tracing::warn!(device = id, %user, "the device was removed while in use; its users get I/O errors");
                page_cache::sync();
            }
            Ok(None) => {}
            // The sandbox does not let us see who has it open.
            Err(_) => page_cache::flush(path),
        }
    }
    by_id::remove_own(id, serial);
}
