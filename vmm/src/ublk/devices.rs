//! Looking at devices, and removing them: commands that serve nothing.

use std::fs;
use std::io::Write;
use std::time::Duration;

use serde_json::{Value, json};
use virtio_devices::ublk::abi::{DeviceState, Flags, SECTOR_BYTES};
use virtio_devices::ublk::{CommandError, Control, Recovery, Transport, block_path};

use super::{by_id, command_process, in_use, page_cache};
use crate::control::{self, Request, ask_within};
use crate::error::{CommandFailure, EXIT_OK};
use crate::saved_devices::process::is_alive;
use crate::saved_devices::state::{self, SavedDevice};
use crate::size;

/// The longest time that a server may take to report its counters. One that hands over, or was stopped, takes longer.
const PROMPT: Duration = Duration::from_secs(3);

fn failed(error: CommandError) -> CommandFailure {
    CommandFailure::Failed(error.into())
}

/// The numbers of all devices, in order.
pub(super) fn all() -> Vec<u32> {
    // Where the driver has no devices yet, it has no class.
    let entries = fs::read_dir("/sys/class/ublk-char").into_iter().flatten();
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut ids: Vec<u32> = names
        .filter_map(|name| name.strip_prefix("ublkc")?.parse().ok())
        .collect();
    ids.sort_unstable();
    ids
}

/// The devices that wait for a server and are remembered.
///
/// # Errors
///
/// The driver's error.
pub(super) fn waiting() -> Result<Vec<u32>, CommandFailure> {
    let mut control = command_process::control()?;
    let mut waiting = Vec::new();
    for id in all() {
        let info = control.info(id).map_err(failed)?;
        let dead = info.state() == DeviceState::Live && !is_alive(&info);
        let waits = matches!(info.state(), DeviceState::Quiesced | DeviceState::FailIo) || dead;
        if waits && SavedDevice::load(id).is_some() {
            waiting.push(id);
        }
    }
    Ok(waiting)
}

/// The devices that a process serves.
///
/// # Errors
///
/// If there are none; what the driver refuses.
pub(super) fn served_by(pid: u32) -> Result<Vec<u32>, CommandFailure> {
    let mut control = command_process::control()?;
    let mut served = Vec::new();
    for id in all() {
        let info = match control.info(id) {
            // Deleted meanwhile, or somebody else's.
            Err(error) if matches!(error.errno(), Some(libc::ENODEV | libc::EPERM | libc::EACCES)) => {
                continue;
            }
            info => info.map_err(failed)?,
        };
        if info.state() == DeviceState::Live && u32::try_from(info.ublksrv_pid) == Ok(pid) {
            served.push(id);
        }
    }
    if served.is_empty() {
        let message = format!("process {pid} serves no device");
        return Err(CommandFailure::Failed(message.into()));
    }
    Ok(served)
}

/// Refuses to take devices from servers that are alive.
///
/// # Errors
///
/// If one of them is served, or is not there.
pub(super) fn refuse_served(ids: &[u32]) -> Result<(), CommandFailure> {
    let mut control = command_process::control()?;
    for &id in ids {
        let info = control.info(id).map_err(failed)?;
        if info.state() == DeviceState::Live && is_alive(&info) {
            let message = format!("{} is served by process {}", block_path(id), info.ublksrv_pid);
            return Err(CommandFailure::Failed(message.into()));
        }
    }
    Ok(())
}

fn recovery(flags: Flags) -> &'static str {
    match Recovery::of(flags) {
        Recovery::Reissue => "reissue",
        Recovery::Wait => "wait",
        Recovery::Fail => "fail",
        Recovery::Off => "off",
    }
}

fn names(flags: Flags) -> Vec<String> {
    flags.iter_names().map(|(name, _)| name.to_owned()).collect()
}

/// Describes a device from the driver's information and the saved state.
fn describe(control: &mut Control, id: u32) -> Result<Value, CommandError> {
    let info = control.info(id)?;
    let bytes = control.params(id)?.basic.dev_sectors * SECTOR_BYTES;
    let remembered = SavedDevice::load(id);
    Ok(json!({
        "id": id,
        "path": block_path(id),
        "state": info.state().to_string(),
        "size": bytes,
        "queues": info.nr_hw_queues,
        "depth": info.queue_depth,
        "max_io": info.max_io_buf_bytes,
        "transport": Transport::of(info.flags()).to_string(),
        "recovery": recovery(info.flags()),
        "flags": names(info.flags()),
        "pid": info.ublksrv_pid,
        "disk": remembered.map(|state| state.disk),
    }))
}

/// One line for people: `key value` pairs.
fn line(device: &Value) -> String {
    let text = |key: &str| match &device[key] {
        Value::String(text) => text.clone(),
        Value::Null => "-".to_owned(),
        other => other.to_string(),
    };
    let server = match (text("state").as_str(), device["pid"].as_i64()) {
        ("quiesced" | "failing", _) => format!("no server (see `ublk recover {}`)", text("id")),
        (_, Some(pid)) if pid > 0 => format!("server {pid}"),
        _ => "no server".to_owned(),
    };
    format!(
        "{} {} {} bytes, {} queues of {}, {}, recovery {}, {server}, {}",
        text("path"),
        text("state"),
        text("size"),
        text("queues"),
        text("depth"),
        text("transport"),
        text("recovery"),
        text("disk"),
    )
}

/// `ringdisk ublk list`.
///
/// # Errors
///
/// If there is no driver, or it refuses.
pub(super) fn list(json: bool) -> Result<u8, CommandFailure> {
    let mut control = command_process::control()?;
    let mut devices = Vec::new();
    for id in all() {
        match describe(&mut control, id) {
            Ok(device) => devices.push(device),
            // Deleted meanwhile, or somebody else's.
            Err(error) if matches!(error.errno(), Some(libc::ENODEV | libc::EPERM | libc::EACCES)) => {}
            Err(error) => return Err(failed(error)),
        }
    }
    let mut output = std::io::stdout();
    if json {
        writeln!(output, "{}", Value::Array(devices))?;
    } else {
        for device in &devices {
            writeln!(output, "{}", line(device))?;
        }
    }
    Ok(EXIT_OK)
}

/// `ringdisk ublk info`.
///
/// # Errors
///
/// If there is no such device.
pub(super) fn info(id: u32, json: bool) -> Result<u8, CommandFailure> {
    let mut device = describe(&mut command_process::control()?, id).map_err(failed)?;
    if let Some(state) = SavedDevice::load(id)
        && let Ok(answer) = ask_within(&state.control, &Request::Info {}, Some(PROMPT))
        && let Some(own) = answer["devices"]
            .as_array()
            .into_iter()
            .flatten()
            .find(|own| own["id"] == id)
    {
        device["served"] = own.clone();
    }
    let mut output = std::io::stdout();
    if json {
        writeln!(output, "{device}")?;
        return Ok(EXIT_OK);
    }
    writeln!(output, "{}", line(&device))?;
    let flags: Vec<&str> = device["flags"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    writeln!(output, "flags {}", flags.join(" "))?;
    if let Some(own) = device["served"].as_object() {
        let get = |key: &str| own.get(key).and_then(Value::as_u64).unwrap_or_default();
        let (requests, bytes, errors) = (get("requests"), get("bytes"), get("errors"));
        writeln!(
            output,
            "{requests} requests, {bytes} bytes, {errors} errors, {} workers",
            get("workers")
        )?;
        writeln!(
            output,
            "{} by zero copy, {} by copies, {} of them because their pages could not be registered",
            get("zero_copied"),
            get("copied"),
            get("fallbacks")
        )?;
    }
    Ok(EXIT_OK)
}

/// `ringdisk ublk features`.
///
/// # Errors
///
/// If there is no driver.
pub(super) fn features(json: bool) -> Result<u8, CommandFailure> {
    let features = command_process::control()?.features().map_err(failed)?;
    let unknown = features.bits() & !known();
    let mut output = std::io::stdout();
    if json {
        let answer = json!({"bits": format!("{:#x}", features.bits()), "features": names(features)});
        writeln!(output, "{answer}")?;
        return Ok(EXIT_OK);
    }
    for name in names(features) {
        writeln!(output, "{name}")?;
    }
    if unknown != 0 {
        writeln!(output, "and {unknown:#x}, which this version does not know")?;
    }
    Ok(EXIT_OK)
}

/// The bits that have names here.
fn known() -> u64 {
    Flags::all()
        .iter_names()
        .fold(0, |bits, (_, flag)| bits | flag.bits())
}

/// `ringdisk ublk set-size`.
///
/// # Errors
///
/// The error of the server, the image or the driver.
pub(super) fn set_size(id: u32, text: &str, force: bool) -> Result<u8, CommandFailure> {
    let size = size::parse_bytes(text).map_err(|error| CommandFailure::Usage(error.to_string()))?;
    // Says so if there is no such device.
    let bytes = command_process::control()?
        .params(id)
        .map_err(failed)?
        .basic
        .dev_sectors
        * SECTOR_BYTES;
    if size < bytes && !force {
        let message = format!(
            "{} has {bytes} bytes; expected a larger size, or --force to lose what lies past the new end",
            block_path(id)
        );
        return Err(CommandFailure::Failed(message.into()));
    }
    let request = Request::DiskResize {
        id: id.to_string(),
        size,
        force,
    };
    let answer = ask_server(id, &request)?;
    writeln!(std::io::stdout(), "{}", answer["size"])?;
    Ok(EXIT_OK)
}

/// Asks the server of a device; answers what it says.
///
/// # Errors
///
/// If it has none that is known, or what the server refuses.
pub(super) fn ask_server(id: u32, request: &Request) -> Result<Value, CommandFailure> {
    let state = SavedDevice::load(id).ok_or_else(|| {
        CommandFailure::Failed(
            format!(
                "no saved state for {}; its server cannot be reached",
                block_path(id)
            )
            .into(),
        )
    })?;
    control::ask(&state.control, request)
}

/// `ringdisk ublk del`.
///
/// # Errors
///
/// The first failure; the other devices were tried.
pub(super) fn delete(ids: Vec<u32>, everything: bool, force: bool) -> Result<u8, CommandFailure> {
    let mut control = command_process::control()?;
    let ids = if everything { all() } else { ids };
    let mut first_failure = None;
    for id in ids {
        if let Err(failure) = delete_one(&mut control, id, force) {
            first_failure.get_or_insert(failure);
        }
    }
    first_failure.map_or(Ok(EXIT_OK), Err)
}

fn delete_one(control: &mut Control, id: u32, force: bool) -> Result<(), CommandFailure> {
    let info = control.info(id).map_err(failed)?;
    let path = block_path(id);
    let user = in_use::user_of(&path).map_err(|error| CommandFailure::about(&path, error))?;
    match user {
        Some(user) if !force => {
            return Err(CommandFailure::Failed(
                format!("{path} is in use ({user}); pass --force to remove it anyway").into(),
            ));
        }
        Some(_) => page_cache::sync(),
        None => {}
    }
    let stopped = if !force && info.flags().contains(Flags::SAFE_STOP_DEV) {
        control.try_stop(id)
    } else {
        control.stop(id)
    };
    // A device without a server is not in the state to be asked whether it may go.
    let stopped = match stopped {
        Err(error) if error.errno() == Some(libc::ENODEV) => control.stop(id),
        stopped => stopped,
    };
    match stopped {
        Err(error) if error.errno() == Some(libc::EBUSY) && !force => {
            return Err(CommandFailure::Failed(
                format!("{path} is in use; pass --force to remove it anyway").into(),
            ));
        }
        stopped => stopped.map_err(failed)?,
    }
    // Waits for the server, which closes the image first.
    match control.delete(id) {
        Err(error) if error.errno() != Some(libc::ENODEV) => return Err(failed(error)),
        _ => {}
    }
    by_id::remove(id);
    state::forget(id, None);
    Ok(())
}
