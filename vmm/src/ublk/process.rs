//! The processes that serve devices.

use std::fs;
use std::io;

use virtio_devices::ublk::abi::DeviceInfo;

/// Returns true if the process that serves a device runs.
pub(super) fn is_alive(info: &DeviceInfo) -> bool {
    u32::try_from(info.ublksrv_pid).is_ok_and(is_process_alive)
}

/// Returns true if a process runs. A zombie does not.
pub(super) fn is_process_alive(pid: u32) -> bool {
    let stat = match fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat,
        // It is there, and our sandbox keeps us from looking closer.
        Err(error) => return error.kind() == io::ErrorKind::PermissionDenied,
    };
    let state = stat.rsplit(") ").next().and_then(|rest| rest.chars().next());
    !matches!(state, None | Some('Z' | 'X'))
}
