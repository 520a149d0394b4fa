//! The old server's part of an upgrade: it hands over all of its devices and exits.
//!
//! Invariants: a request is refused while nothing has changed, or completed, which ends this process, in the time that was given for it.
//! Devices and their rings are left as they are, because only the exit of the process makes the driver release them; the images stay
//! locked until then.

use std::convert::Infallible;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use serde_json::json;
use virtio_devices::ublk::{HandOverError, Recovery, UblkDevice, block_path};

use super::requests::UblkDesk;
use super::served::Served;
use crate::control::{Request, answer_with};
use crate::error::{EXIT_OK, chain};
use crate::parallel;
use crate::takeover::Asked;

/// The longest time that a new server may take to read the answer.
const READ_MAX: Duration = Duration::from_secs(5);
/// The shortest time that devices have to answer what they have.
const DRAIN_MIN: Duration = Duration::from_millis(500);

impl UblkDesk {
    /// Hands all devices over, and ends the process.
    ///
    /// # Errors
    ///
    /// The reason for a refusal. Nothing was said or changed then.
    pub(super) fn hand_devices_over(&self, connection: &UnixStream, request: Request) -> Result<(), String> {
        let asked = Asked::understand(connection, request)?;
        let mut shared = self.server.lock();
        let shared = &mut *shared;
        let served: Vec<&Served> = shared.devices.values().collect();
        let devices: Vec<&UblkDevice> = served.iter().map(|served| &served.device).collect();
        check(&devices, &asked)?;
        // Without them the next server waits for the kernel to release the locks.
        let mut locks = self.lock_set.descriptors().unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot pass the image locks to the new server");
            Vec::new()
        });
        // No request of an operator works on an image that is closed for the next server.
        served.iter().for_each(|served| served.disk.detach());
        tracing::info!(event = "handing-over", ids = ?ids(&devices), "handing over");
        let mut failures = Vec::new();
        for (index, device) in devices.iter().enumerate() {
            match device.retire(&mut shared.control) {
                Err(error) if index == 0 => {
                    served
                        .iter()
                        .for_each(|served| served.disk.attach(&served.opened));
                    return Err(chain(&error));
                }
                // There is no way back for those before it. This one goes as if this process were killed.
                Err(error) => failures.push(error),
                Ok(()) => {}
            }
        }
        let patience = asked.left().max(DRAIN_MIN);
        let (done, closed) = mpsc::channel();
        let close = || {
            let Ok(closed) = parallel::each(devices, |device| {
                Ok::<_, Infallible>(device.drain_and_close(patience))
            });
            let failed = closed.into_iter().filter_map(|(_, closed)| closed.err());
            // Whoever waits does not for ever.
            done.send(failed.collect()).unwrap_or_default();
        };
        thread::scope(|scope| {
            let closing = thread::Builder::new().name("closing".to_owned());
            if let Err(error) = closing.spawn_scoped(scope, close) {
                tracing::error!(%error, "cannot close images");
            }
            let late: Result<Vec<HandOverError>, _> = closed.recv_timeout(patience + DRAIN_MIN);
            let mut failures: Vec<String> = failures.iter().map(|error| chain(error)).collect();
            match late {
                Ok(errors) => failures.extend(errors.iter().map(|error| chain(error))),
                Err(_) => failures.push(format!(
                    "the host has not closed its images within {:.1} s",
                    patience.as_secs_f64()
                )),
            }
            for error in &failures {
                tracing::error!(error, "not handed over cleanly");
                // I/O may be under way: the next server waits for the kernel to release them.
                locks.clear();
            }
            connection.set_write_timeout(Some(READ_MAX)).unwrap_or_default();
            answer_with(connection, &json!({ "ok": true, "failures": failures }), &locks)
                .unwrap_or_else(|error| tracing::warn!(%error, "the new server has not read the answer"));
            // The socket would go with the server, which is not taken down.
            std::fs::remove_file(&self.socket).unwrap_or_default();
            tracing::info!(event = "handed-over", "handed over");
            std::process::exit(EXIT_OK.into());
        })
    }
}

/// Returns the numbers of devices.
fn ids(devices: &[&UblkDevice]) -> Vec<u32> {
    devices.iter().map(|device| device.id()).collect()
}

/// Refuses a hand-over that cannot be done.
///
/// # Errors
///
/// The reason.
fn check(devices: &[&UblkDevice], asked: &Asked) -> Result<(), String> {
    let ids = ids(devices);
    if places(&ids) != asked.disks {
        let names = names(&ids);
        return Err(format!(
            "it serves {names}, and hands over all of its devices or none"
        ));
    }
    for device in devices {
        if let Some(why) = Recovery::obstacle(device.info().flags()) {
            return Err(format!("{} {why}", block_path(device.id())));
        }
    }
    Ok(())
}

/// Devices, as a request names them.
pub(super) fn places(ids: &[u32]) -> Vec<PathBuf> {
    ids.iter()
        .map(|&id| Path::new(&block_path(id)).to_owned())
        .collect()
}

/// Devices, for people.
pub(super) fn names(ids: &[u32]) -> String {
    let paths: Vec<String> = ids.iter().map(|&id| block_path(id)).collect();
    paths.join(" and ")
}
