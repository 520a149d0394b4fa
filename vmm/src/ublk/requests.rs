//! Requests to the control socket of a ublk server.
//!
//! Invariant: a request holds the devices' lock while it is answered, so it never sees a device that is half up or half closed.
//! Those about snapshots, and shrinking, hold it only to find the image: the engine refuses one that is closed by then.

use std::collections::BTreeMap;

use serde_json::json;
use virtio_devices::ublk::{ResizeError, UblkDevice, block_path};

use super::hand_over;
use super::served::{Served, Server, ServerState};
use crate::control::Request;
use crate::shrink::ShrinkTarget;
use crate::snapshots::ServedSnapshots;

/// Carries out what the control socket is asked.
pub(super) fn answer(server: &Server, request: Request) -> Result<serde_json::Value, String> {
    match request {
        Request::SnapshotCreate { id, name } => snapshots(server, &id)?.create(&name),
        Request::SnapshotList { id } => snapshots(server, &id)?.list(),
        Request::SnapshotApply { id, snapshot, force } => snapshots(server, &id)?.apply(&snapshot, force),
        Request::SnapshotDelete { id, snapshot } => snapshots(server, &id)?.delete(&snapshot),
        Request::DiskResize { id, size, force } => {
            shrink_target(server, &id)?
                .shrink_to(size, force)
                .map_err(|error| format!("cannot resize device {id} to {size} bytes: {error}"))?;
            resize(&mut server.lock(), &id, size)
        }
        other => answer_locked(&mut server.lock(), other),
    }
}

/// Returns the snapshots of a device's image.
fn snapshots(server: &Server, id: &str) -> Result<ServedSnapshots, String> {
    let shared = server.lock();
    let (id, served) = find(&shared.devices, id)?;
    ServedSnapshots::of(block_path(id), &served.opened)
}

/// Returns the disk of a device that may become smaller.
fn shrink_target(server: &Server, id: &str) -> Result<ShrinkTarget, String> {
    let shared = server.lock();
    let (_, served) = find(&shared.devices, id)?;
    if !served.device.can_resize() {
        return Err(ResizeError::Unsupported.to_string());
    }
    Ok(ShrinkTarget::of(&served.opened))
}

/// Makes a device as large as `size`, unless that is smaller than its disk.
fn resize(shared: &mut ServerState, id: &str, size: u64) -> Result<serde_json::Value, String> {
    let ServerState { control, devices, .. } = shared;
    let (_, served) = find(devices, id)?;
    let resized = served.device.resize(control, size);
    let size = resized.map_err(|error| crate::error::chain(&error))?;
    Ok(json!({ "size": size }))
}

/// Returns the device of this number.
fn find<'a>(devices: &'a BTreeMap<u32, Served>, id: &str) -> Result<(u32, &'a Served), String> {
    let number = id.parse().ok();
    let found = number.and_then(|number| Some((number, devices.get(&number)?)));
    found.ok_or_else(|| format!("this server has no device {id}"))
}

fn answer_locked(shared: &mut ServerState, request: Request) -> Result<serde_json::Value, String> {
    let ServerState {
        control,
        devices,
        handed_over,
        ..
    } = shared;
    match request {
        Request::Info {} => {
            let list = devices.iter().map(|(id, served)| {
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
            Ok(
                json!({"devices": list.collect::<Vec<_>>(), "hand_over": hand_over::VERSION, "passes_locks": true}),
            )
        }
        Request::HandOver {
            version,
            devices: asked,
        } => {
            let devices: Vec<&UblkDevice> = devices.values().map(|served| &served.device).collect();
            let left = hand_over::leave(control, &devices, version, &asked)?;
            *handed_over = true;
            Ok(left)
        }
        _ => Err("a ublk server does not support this request".to_owned()),
    }
}
