//! Write-back of the host's page cache, in bounded time.

use std::fs::File;
use std::sync::mpsc;
use std::time::Duration;

use super::command_process;

/// The time in which a device in use may write back the host's page cache.
const SYNC_MAX: Duration = Duration::from_secs(10);

/// Has the host write what it keeps in memory, in bounded time: there may be disks that hang.
pub(super) fn sync() {
    match command_process::sync(SYNC_MAX) {
        Ok(true) => {}
        Ok(false) => tracing::warn!(
            "the host has not written back its page cache within {} s",
            SYNC_MAX.as_secs()
        ),
        // Who is confined starts no process.
        Err(_) => in_time(rustix::fs::sync),
    }
}

/// As [`sync`], what it keeps of one block device for those who have it open.
pub(super) fn flush(path: String) {
    in_time(move || {
        let flushed = File::open(&path).and_then(|device| device.sync_all());
        flushed.unwrap_or_else(|error| tracing::warn!(%error, "cannot flush {path}"));
    });
}

/// Runs `what` on a thread of its own, which may take longer than the wait for it.
fn in_time(what: impl FnOnce() + Send + 'static) {
    let (done, ended) = mpsc::channel();
    let sync = move || {
        what();
        done.send(()).unwrap_or_default();
    };
    if std::thread::Builder::new()
        .name("sync".to_owned())
        .spawn(sync)
        .is_ok()
        && ended.recv_timeout(SYNC_MAX).is_err()
    {
        tracing::warn!(
            "the host has not written back its page cache within {} s",
            SYNC_MAX.as_secs()
        );
    }
}
