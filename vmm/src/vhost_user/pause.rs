//! Pausing one disk while the others are served: its client waits, and notices nothing else.
//!
//! Invariant: whatever the host does, nobody waits for it for ever: a disk that cannot be paused in time goes on as before when it can.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use virtio_devices::vhost_user::PausedClient;

use super::roster::{Roster, seat};
use super::served::Served;

/// The longest time that a client may take to end a message.
const MESSAGE_MAX: Duration = Duration::from_secs(1);

impl Roster {
    /// Has a disk served no longer, and returns its client, which waits. The host has `patience` for each step.
    pub(super) fn pause_disk(
        self: &Arc<Self>,
        number: u64,
        disk: &Arc<Served>,
        patience: Duration,
    ) -> Result<Option<PausedClient>, String> {
        // Its guest need not wait for the end of a compaction, nor until what it has written so far is durable.
        disk.disk.prepare_to_detach();
        flush_within(disk, patience).inspect_err(|_| disk.disk.stay_attached())?;
        let paused = self.reception.pause(number);
        let mut answered = paused.recv_timeout(MESSAGE_MAX.min(patience));
        if matches!(answered, Err(RecvTimeoutError::Timeout)) {
            self.reception.interrupt(number);
            answered = paused.recv_timeout(patience);
        }
        match answered {
            Ok(client) => Ok(client),
            Err(RecvTimeoutError::Disconnected) => Err("the server is stopping".to_owned()),
            Err(RecvTimeoutError::Timeout) => {
                let (roster, waiting) = (Arc::clone(self), Arc::clone(disk));
                let go_on = move || {
                    if let Ok(client) = paused.recv() {
                        waiting.disk.stay_attached();
                        roster.reception.enter(number, seat(&waiting, client));
                    }
                };
                let thread = thread::Builder::new().name("pausing".to_owned()).spawn(go_on);
                Err(match thread {
                    Ok(_) => format!(
                        "the host has not answered its requests for {} s; it goes on as before when it has",
                        patience.as_secs()
                    ),
                    Err(error) => format!("it has requests in flight, and is served no longer: {error}"),
                })
            }
        }
    }
}

/// Makes what was written to a disk so far durable.
///
/// # Errors
///
/// The host takes longer than `patience`. An error of its own shows when the image is closed.
fn flush_within(disk: &Arc<Served>, patience: Duration) -> Result<(), String> {
    let (done, flushed) = mpsc::channel();
    let flushing = Arc::clone(disk);
    let flush = move || {
        let flushed = flushing.disk.flush();
        flushed.map_or_else(|error| tracing::debug!(error, "the close will say so"), drop);
        // Whoever waited may have gone.
        done.send(()).unwrap_or_default();
    };
    // Without a thread the client waits for it.
    let thread = thread::Builder::new().name("flushing".to_owned()).spawn(flush);
    if thread.is_ok() && flushed.recv_timeout(patience) == Err(RecvTimeoutError::Timeout) {
        return Err(format!(
            "the host has not made its writes durable for {} s; it goes on as before",
            patience.as_secs()
        ));
    }
    Ok(())
}
