//! The processes that serve devices.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use virtio_devices::ublk::abi::DeviceInfo;

/// Returns true if the process that serves a device runs.
pub(crate) fn is_alive(info: &DeviceInfo) -> bool {
    u32::try_from(info.ublksrv_pid).is_ok_and(is_process_alive)
}

/// Returns true if a process runs. A zombie does not.
pub(crate) fn is_process_alive(pid: u32) -> bool {
    let stat = match fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat,
        // It is there, and our sandbox keeps us from looking closer.
        Err(error) => return error.kind() == io::ErrorKind::PermissionDenied,
    };
    let state = stat.rsplit(") ").next().and_then(|rest| rest.chars().next());
    !matches!(state, None | Some('Z' | 'X'))
}

/// Waits for the end of a process, for no longer than `patience`. Returns false if it has not ended.
pub(crate) fn has_ended_within(process: &OwnedFd, patience: Duration) -> bool {
    let patience = Timespec::try_from(patience).ok();
    let mut end = [PollFd::new(process, PollFlags::IN)];
    matches!(poll(&mut end, patience.as_ref()), Ok(1..))
}
