//! The I/O timeout of block devices (`queue/io_timeout`) while they are upgraded, for drivers before Linux 6.16 (without QUIESCE).
//!
//! If a server has every request of a queue when it exits, such a driver notices only by this timeout: on any host, I/O would stop
//! for the 30 s of the kernel's default. It has no effect while the server lives.
//!
//! Invariant: nobody waits for ever. Some of these kernels (6.12) freeze the queue to store the number: they wait for all requests under
//! way, and those of a server that has died wait for the next one, which may be this process. So another process writes.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::saved_devices::process;

/// The timeout during an upgrade, in milliseconds.
const LOOK_MS: u32 = 100;
/// The kernel's default, in milliseconds.
const DEFAULT_MS: &str = "30000";
/// The longest wait for the kernel to store one.
const STORE_MAX: Duration = Duration::from_secs(1);

fn path(id: u32) -> PathBuf {
    PathBuf::from(format!("/sys/block/ublkb{id}/queue/io_timeout"))
}

/// The timeouts of some devices, which are short until this is dropped.
#[derive(Debug)]
pub(super) struct ShortTimeouts {
    before: Vec<(PathBuf, String)>,
}

impl ShortTimeouts {
    /// Shortens those that can be.
    pub(super) fn of(ids: &[u32]) -> Self {
        let read = |&id: &u32| {
            let mut before = fs::read_to_string(path(id)).ok()?;
            if is_short(&before) {
                DEFAULT_MS.clone_into(&mut before);
            }
            Some((path(id), before.trim().to_owned()))
        };
        let before: Vec<_> = ids.iter().filter_map(read).collect();
        let short = before.iter().map(|(path, _)| (path.clone(), LOOK_MS.to_string()));
        store(short.collect());
        Self { before }
    }
}

impl Drop for ShortTimeouts {
    fn drop(&mut self) {
        store(std::mem::take(&mut self.before));
    }
}

/// Stores timeouts, and waits for that if it does not take long. What takes longer is stored when the device has a server again.
fn store(timeouts: Vec<(PathBuf, String)>) {
    let write = |(path, text): &(PathBuf, String)| -> io::Result<Child> {
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", "echo \"$1\" >\"$0\""]).arg(path).arg(text);
        let quiet = shell
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        quiet.spawn()
    };
    let deadline = Instant::now() + STORE_MAX;
    let writing: Vec<_> = timeouts.iter().map(write).collect();
    for ((path, text), child) in timeouts.iter().zip(writing) {
        let stored = child.and_then(|mut child| {
            let number = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
            let number = number.ok_or(io::ErrorKind::NotFound)?;
            let ending = pidfd_open(number, PidfdFlags::empty())?;
            let left = deadline.saturating_duration_since(Instant::now());
            if !process::has_ended_within(&ending, left) {
                return Err(io::ErrorKind::TimedOut.into());
            }
            match child.wait()? {
                status if status.success() => Ok(()),
                status => Err(io::Error::other(status.to_string())),
            }
        });
        if let Err(error) = stored {
            tracing::info!(path = %path.display(), text, %error, "the I/O timeout is not set yet");
        }
    }
}

/// Returns true if this is the timeout of an upgrade; one that was killed, if none is running.
fn is_short(text: &str) -> bool {
    text.trim().parse() == Ok(LOOK_MS)
}

/// Sets back what an upgrade that was killed has left of a device that is served again.
pub(super) fn mend(id: u32) {
    if fs::read_to_string(path(id)).is_ok_and(|text| is_short(&text)) {
        store(vec![(path(id), DEFAULT_MS.to_owned())]);
    }
}
