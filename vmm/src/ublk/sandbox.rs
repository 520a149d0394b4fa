//! Confinement of the threads of a ublk server after its devices are ready, by [`crate::sandbox`].
//!
//! Workers, which process requests of the host and data of the images, cannot open any file; they are confined before the
//! first request. The other threads may remove the server's files and send commands to the driver. Invariants: every thread
//! is confined, and everything that a server does at its end is permitted.

use std::path::{Path, PathBuf};

use block::worker::StartHook;

use super::by_id;
use crate::error::CommandFailure;
use crate::metrics::Address;
use crate::sandbox::{self, AllowedFiles, Task};
use crate::saved_devices::state;
use crate::socket::folder_of;

/// Returns the start hook of each worker.
pub(super) fn worker_hook(on: bool) -> Option<StartHook> {
    on.then(|| StartHook::new(|| Ok(sandbox::confine_thread(Task::UblkQueue)?)))
}

/// Confines the calling thread, which manages the server from before the devices are ready and opens no file.
///
/// # Errors
///
/// As [`confine`].
pub(super) fn confine_early() -> Result<(), sandbox::SandboxError> {
    sandbox::confine_thread(Task::UblkControl)
}

/// Confines the calling thread, and all that it starts from now on, to looking after these block devices and the control socket
/// at `control`. The socket of `metrics` can be removed, and the file with the process id at `pid_file`.
///
/// # Errors
///
/// If the kernel has what that takes, and refuses.
pub(super) fn confine(
    devices: impl IntoIterator<Item = String>,
    control: Option<&Path>,
    metrics: Option<&Address>,
    pid_file: Option<&Path>,
) -> Result<(), CommandFailure> {
    let mut folders = vec![state::folder(), by_id::FOLDER.into()];
    folders.extend(control.into_iter().chain(pid_file).map(folder_of));
    folders.extend(metrics.and_then(Address::folder));
    let mut allowed = AllowedFiles {
        // To be flushed in the end.
        readable: devices.into_iter().map(PathBuf::from).collect(),
        removable_in: folders.into_iter().filter(|folder| folder.is_dir()).collect(),
        ..AllowedFiles::default()
    };
    // Who the server is that a device is remembered with.
    allowed.readable.push(state::folder());
    let confined =
        sandbox::restrict_files(&allowed).and_then(|()| sandbox::restrict_calls(Task::UblkControl));
    confined.map_err(|error| CommandFailure::Failed(error.into()))
}
