//! Bringing devices up: images are opened and locked, devices created or recovered, and their state saved.
//!
//! Invariants: an image is locked before its device appears. If a device cannot be created, those of the same call are not left
//! behind; if one cannot be recovered, it waits for another server.

use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use block::lock::LockSet;
use serde_json::json;
use virtio_devices::ublk::{Events, RecoveringDevice, Recovery, UblkDevice, block_path};

use super::by_id;
use super::priority::RaisedPriority;
use super::served::{Event, Served, Server, ServerState};
use super::wanted::Wanted;
use crate::error::CommandFailure;
use crate::exchange::ServedDisk;
use crate::open::{self, OpenedDisk, Opening};
use crate::saved_devices::claimed_file::ClaimedFile;
use crate::saved_devices::state::{self, SavedDevice};

/// The longest time that I/O of a killed server may keep its image locked: as long as a request may take the driver.
const UNLOCK_MAX: Duration = Duration::from_secs(30);

/// Opens and locks a disk. One whose server was killed is locked until the last of its I/O has ended.
pub(super) fn open_disk(wanted: &Wanted, lock_set: &LockSet) -> Result<OpenedDisk, CommandFailure> {
    let begun = Instant::now();
    let device = wanted.recover.or(wanted.half_made);
    let had_server = device.is_some();
    let how = Opening {
        persist_mappings: wanted.outlives,
        device,
        lock_set: lock_set.clone(),
    };
    loop {
        match open::open_as(&wanted.disk, &how) {
            Err(error) if had_server && error.is_locked() && begun.elapsed() < UNLOCK_MAX => {
                std::thread::sleep(Duration::from_millis(5));
            }
            disk => return disk.map_err(|error| CommandFailure::Failed(error.into())),
        }
    }
}

/// A device that is on its way.
enum Begun {
    Made(UblkDevice),
    /// Nothing is asked of it yet.
    Recovering(RecoveringDevice),
}

/// Serves the disks; answers the numbers of their devices. I/O of devices in recovery flows only when all of them have their
/// queues: that of the first would take the others' time. If one of them fails then, it waits for another server, and the
/// others are served: that failure is the second part of the answer.
pub(super) fn bring_up(
    server: &Server,
    disks: Vec<(Wanted, OpenedDisk)>,
    events: &mpsc::Sender<Event>,
    socket: &Path,
) -> Result<(Vec<u32>, Option<CommandFailure>), CommandFailure> {
    let mut shared = server.lock();
    if shared.has_ended {
        return Err(CommandFailure::Failed("the server is stopping".into()));
    }
    let about = |wanted: &Wanted, error| CommandFailure::about(wanted.disk.name(), error);
    let (mut begun, mut failure, mut late) = (Vec::new(), None, None);
    for (wanted, opened) in disks {
        if let Some(id) = wanted.half_made
            // Its image is ours now, so nobody is about to serve it.
            && let Err(error) = shared.control.delete(id)
        {
            failure = Some(CommandFailure::Failed(error.into()));
            break;
        }
        let events = events.clone();
        // If nobody listens any more, the process is ending.
        let events: Events = Arc::new(move |event| events.send(Event::Queue(event)).unwrap_or_default());
        let (control, config) = (&mut shared.control, &wanted.config);
        let device = match wanted.recover {
            None => UblkDevice::add(control, opened.disk(), config, &events).map(Begun::Made),
            Some(id) => {
                UblkDevice::recover(control, id, opened.disk(), config, &events).map(Begun::Recovering)
            }
        };
        match device {
            Ok(device) => begun.push((wanted, opened, device)),
            Err(error) => {
                failure = Some(about(&wanted, error));
                break;
            }
        }
    }
    let (mut served, mut recovering, mut waiting) = (Vec::new(), Vec::new(), Vec::new());
    for (wanted, opened, device) in begun {
        match device {
            Begun::Made(device) => served.push((wanted, opened, device)),
            Begun::Recovering(device) => {
                recovering.push(device);
                waiting.push((wanted, opened));
            }
        }
    }
    // From here on the devices' I/O competes with this thread for the CPUs.
    let _priority = RaisedPriority::begin();
    // All of them wait for another server if one cannot be had.
    if failure.is_none() {
        let finished = RecoveringDevice::start_io(recovering, &mut shared.control);
        for ((wanted, opened), device) in waiting.into_iter().zip(finished) {
            match device {
                Ok(device) => served.push((wanted, opened, device)),
                Err(error) => {
                    tracing::error!(disk = %wanted.disk.name(), %error, "the device was not recovered");
                    late.get_or_insert(about(&wanted, error));
                    shared.left.push(opened);
                }
            }
        }
    }
    let mut ids = Vec::new();
    for (wanted, opened, device) in served {
        ids.push(device.id());
        remember(&mut shared, wanted, opened, device, socket);
    }
    let nobody = shared.devices.is_empty();
    match failure.or_else(|| late.take_if(|_| nobody)) {
        Some(failure) => Err(failure),
        None => Ok((ids, late)),
    }
}

/// Keeps a device that is served.
fn remember(shared: &mut ServerState, wanted: Wanted, opened: OpenedDisk, device: UblkDevice, socket: &Path) {
    let (id, name) = (device.id(), wanted.disk.name());
    let remembered = SavedDevice {
        id,
        pid: std::process::id(),
        disk: wanted.text,
        directory: wanted.directory,
        queues_per_worker: wanted.config.queues_per_worker,
        rate_limit_group: wanted.rate_limit_group,
        control: socket.to_owned(),
        added_by: wanted.added_by,
        listed_in: wanted.listed_in,
        sequence: state::sequence(Path::new(state::BLOCK_DEVICES), id),
        outlives: Recovery::of(device.info().flags()) != Recovery::Off,
        partitions: wanted.partitions,
        files: opened
            .disk()
            .files()
            .iter()
            .filter_map(|file| ClaimedFile::of(file))
            .collect(),
    };
    if let Err(error) = remembered.store() {
        tracing::warn!(%error, device = id, "cannot save the state of the device; `ublk recover` will need --disk");
    }
    by_id::make(id, wanted.disk.serial.as_deref());
    let disk = ServedDisk::of(block_path(id), &wanted.disk, device.stats(), &opened);
    shared.devices.insert(
        id,
        Served {
            device,
            name,
            disk,
            config: wanted.disk,
            opened,
            recovered: wanted.recover.is_some(),
        },
    );
}

/// The lines that say which devices are served, of these numbers.
pub(super) fn lines(server: &Server, ids: &[u32], json: bool) -> String {
    let shared = server.lock();
    let line = |id: &u32| {
        let served = shared.devices.get(id)?;
        let (path, device) = (block_path(*id), &served.device);
        if !json {
            return Some(path + "\n");
        }
        let (transport, queues) = (device.transport().to_string(), device.info().nr_hw_queues);
        let line =
            json!({"id": id, "path": path, "disk": served.name, "transport": transport, "queues": queues});
        Some(format!("{line}\n"))
    };
    ids.iter().filter_map(line).collect()
}
