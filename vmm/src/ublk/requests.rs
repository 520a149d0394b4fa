//! Requests to the control socket of a ublk server.
//!
//! Invariant: a request holds the devices' lock while it is answered, so it never sees a device that is half up or half closed.

use serde_json::json;
use virtio_devices::ublk::UblkDevice;

use super::hand_over;
use super::served::{Server, ServerState};
use crate::control::Request;

/// Carries out what the control socket is asked.
pub(super) fn answer(server: &Server, request: Request) -> Result<serde_json::Value, String> {
    let mut shared = server.lock();
    let ServerState {
        control,
        devices,
        handed_over,
        ..
    } = &mut *shared;
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
        Request::DiskResize { id, size } => {
            let served = id.parse().ok().and_then(|id: u32| devices.get(&id));
            let served = served.ok_or_else(|| format!("this server has no device {id}"))?;
            let resized = served.device.resize(control, size);
            let size = resized.map_err(|error| crate::error::chain(&error))?;
            Ok(json!({ "size": size }))
        }
        _ => Err("a ublk server does not support this request".to_owned()),
    }
}
