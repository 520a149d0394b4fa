//! The watchdog of a service manager: it is told, again and again, that every worker works.
//!
//! Invariant: nothing is said while a worker hangs. The manager then ends the process and starts it again, and with `--restartable` the
//! guests go on.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use virtio_devices::vhost_user::Pulse;

use super::served::{Options, confine};
use crate::sandbox::Task;
use crate::sd_notify::{self, Manager};

/// Starts to tell `manager`, if it wants to know, or the options say how often. The thread ends with the process.
///
/// # Errors
///
/// If the thread cannot be started.
pub(super) fn start(
    manager: Arc<Manager>,
    pulses: impl Fn() -> Vec<Pulse> + Send + 'static,
    options: Options,
) -> std::io::Result<()> {
    let Some(time) = options.watchdog.or_else(sd_notify::watchdog) else {
        return Ok(());
    };
    let tell = move || {
        if let Err(error) = confine(Task::Control, options) {
            tracing::error!(%error, "cannot tell the service manager that the workers work");
            return;
        }
        loop {
            pulses().iter().for_each(Pulse::beat);
            manager.works();
            // A worker that is busy, or this thread on a busy machine, may be late by as much.
            thread::sleep((time / 3).max(Duration::from_millis(1)));
        }
    };
    thread::Builder::new().name("watchdog".to_owned()).spawn(tell)?;
    Ok(())
}
