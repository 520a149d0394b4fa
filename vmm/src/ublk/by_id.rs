//! Stable names: `/dev/disk/by-id/ringdisk-SERIAL` for each device whose disk has a serial number.
//!
//! If udev runs, it makes the links by `packaging/60-ringdisk.rules`, which calls [`print()`]; otherwise the server makes
//! them. Invariant: a name never leads to another disk than its own. So a name that leads to an existing device is left
//! alone, links to an earlier device of the same number are removed first, and links are changed under a lock of their
//! folder.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use virtio_devices::ublk::abi::Flags;
use virtio_devices::ublk::{Control, block_path};

use crate::disk_config::DiskConfig;
use crate::error::{CommandFailure, EXIT_OK};
use crate::saved_devices::process::is_process_alive;
use crate::saved_devices::state::{BLOCK_DEVICES, SavedDevice};

/// The folder of the links.
pub(super) const FOLDER: &str = "/dev/disk/by-id";
/// Exists while udev runs.
const UDEV: &str = "/run/udev/control";
/// The prefix of all our names.
const PREFIX: &str = "ringdisk-";

/// The name of a disk with this serial number. What may not be in udev's names is written as udev does: `\x20`.
pub(super) fn name(serial: &str) -> String {
    let mut name = PREFIX.to_owned();
    for byte in serial.bytes() {
        if byte.is_ascii_alphanumeric() || b"#+-.:=@_".contains(&byte) {
            name.push(byte.into());
        } else {
            // Writing to a text does not fail.
            write!(name, "\\x{byte:02x}").unwrap_or_default();
        }
    }
    name
}

/// Gives a device that was just made, or taken over, its name; says so in the log if it cannot have it.
pub(super) fn make(device: u32, serial: Option<&str>) {
    let folder = Path::new(FOLDER);
    let wanted = serial.map(name);
    if !rustix::process::geteuid().is_root() {
        // The names of the machine are not theirs to give.
        return;
    }
    if Path::new(UDEV).exists() {
        if let Some(wanted) = &wanted
            && let Some(other) = taken(folder, wanted, device)
        {
            warn_taken(device, wanted, &other);
        }
        // It looked at the device when that appeared, and nothing was remembered of it yet.
        if let Err(error) = look_again(device) {
            tracing::warn!(device, %error, "cannot trigger a udev event for the device");
        }
        return;
    }
    match make_in(folder, device, wanted.as_deref()) {
        Ok(None) => {}
        Ok(Some(other)) => warn_taken(device, &wanted.unwrap_or_default(), &other),
        Err(error) => tracing::warn!(device, %error, "cannot create the device's link in {FOLDER}"),
    }
}

/// Has udev look at the device and its partitions once more.
fn look_again(device: u32) -> io::Result<()> {
    let name = format!("ublkb{device}");
    let folder = Path::new("/sys/class/block").join(&name);
    fs::write(folder.join("uevent"), "change")?;
    for entry in fs::read_dir(folder)?.filter_map(Result::ok) {
        if entry.file_name().to_string_lossy().starts_with(&name) {
            fs::write(entry.path().join("uevent"), "change")?;
        }
    }
    Ok(())
}

fn warn_taken(device: u32, name: &str, other: &Path) {
    let other = other.display();
    tracing::warn!(
        "{} has no link {name}: {other} has the same serial number",
        block_path(device)
    );
}

/// Takes the name away that a device of this server has, if it leads there. udev does so itself.
pub(super) fn remove_own(device: u32, serial: Option<&str>) {
    if Path::new(UDEV).exists() || !rustix::process::geteuid().is_root() {
        return;
    }
    let link = serial.map(|serial| Path::new(FOLDER).join(name(serial)));
    // Nobody else touches a name that leads to a device that is there.
    if let Some(link) =
        link.filter(|link| fs::read_link(link).is_ok_and(|leads_to| leads_to == target(device)))
        && let Err(error) = fs::remove_file(&link)
    {
        tracing::warn!(device, %error, "cannot remove {}", link.display());
    }
}

/// Removes all names of a device without a server, as far as they lead to it.
pub(super) fn remove(device: u32) {
    if !Path::new(UDEV).exists()
        && rustix::process::geteuid().is_root()
        && let Err(error) = remove_in(Path::new(FOLDER), device, None)
    {
        tracing::warn!(device, %error, "cannot remove the device's link in {FOLDER}");
    }
}

/// Returns the target of a link to the device.
fn target(device: u32) -> PathBuf {
    Path::new("../../").join(format!("ublkb{device}"))
}

/// The device that is there, and another one, to which `name` leads.
fn taken(folder: &Path, name: &str, device: u32) -> Option<PathBuf> {
    let link = folder.join(name);
    let leads_to = fs::read_link(&link).ok()?;
    (leads_to != target(device) && link.exists()).then(|| link.canonicalize().unwrap_or(leads_to))
}

/// As [`make`], in any folder. `Some`: the name leads to this other device, and does so still.
fn make_in(folder: &Path, device: u32, name: Option<&str>) -> io::Result<Option<PathBuf>> {
    if name.is_some() {
        fs::create_dir_all(folder)?;
    }
    // Names of a device of this number that went without its server's doing.
    match remove_in(folder, device, name) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let Some(name) = name else {
        return Ok(None);
    };
    let _lock = lock(folder)?;
    if let Some(other) = taken(folder, name, device) {
        return Ok(Some(other));
    }
    let aside = folder.join(format!(".{name}.{}", std::process::id()));
    symlink(target(device), &aside)?;
    let made = fs::rename(&aside, folder.join(name));
    if made.is_err() {
        fs::remove_file(&aside).unwrap_or_default();
    }
    made.map(|()| None)
}

/// Holds the folder until it is dropped.
fn lock(folder: &Path) -> io::Result<File> {
    let file = File::open(folder)?;
    flock(&file, FlockOperation::LockExclusive)?;
    Ok(file)
}

/// Removes the names that lead to the device, except `keep`.
fn remove_in(folder: &Path, device: u32, keep: Option<&str>) -> io::Result<()> {
    let _lock = match lock(folder) {
        // Then there are no links.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        lock => lock?,
    };
    for entry in fs::read_dir(folder)?.filter_map(Result::ok) {
        let ours = entry
            .file_name()
            .to_str()
            .is_some_and(|name| name.starts_with(PREFIX));
        let kept = keep.is_some_and(|keep| entry.file_name() == keep);
        if ours && !kept && fs::read_link(entry.path()).is_ok_and(|leads_to| leads_to == target(device)) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// `ringdisk ublk udev`: what udev's rules want to know of a device, `KEY=value` in lines. Its name, if it has a serial
/// number; or, with `owner`, whose it is, if that is a user without rights.
///
/// # Errors
///
/// If standard output is closed, or the driver does not answer.
pub(super) fn print(device: u32, owner: bool) -> Result<u8, CommandFailure> {
    if owner {
        let mut control = Control::open().map_err(|error| CommandFailure::Failed(error.into()))?;
        let info = control.info(device);
        let info = info.map_err(|error| CommandFailure::Failed(error.into()))?;
        if info.flags().contains(Flags::UNPRIVILEGED_DEV) {
            let mut output = std::io::stdout();
            writeln!(output, "RINGDISK_OWNER={}", info.owner_uid)?;
            writeln!(output, "RINGDISK_GROUP={}", info.owner_gid)?;
        }
        return Ok(EXIT_OK);
    }
    let state = SavedDevice::load(device);
    if let Some(name) = state.and_then(|state| name_of(&state, Path::new(BLOCK_DEVICES))) {
        writeln!(std::io::stdout(), "RINGDISK_LINK={name}")?;
    }
    Ok(EXIT_OK)
}

/// `ringdisk ublk udev --contents`: `RINGDISK_CONTENTS=1` if the host may read what is in the device.
///
/// # Errors
///
/// If standard output is closed.
pub(super) fn print_contents(device: u32) -> Result<u8, CommandFailure> {
    let state = SavedDevice::load(device);
    if state.is_some_and(|state| may_be_read(&state, Path::new(BLOCK_DEVICES))) {
        writeln!(std::io::stdout(), "RINGDISK_CONTENTS=1")?;
    }
    Ok(EXIT_OK)
}

/// Returns true if the host may read the contents of the device, which must be one in `devices` and that of `state`.
/// Another device with this number may belong to anyone.
fn may_be_read(state: &SavedDevice, devices: &Path) -> bool {
    state.partitions && state.sequence.is_some() && state.is_of_present_device(devices)
}

/// The name of the device, among those in `devices`, of which `state` is remembered; `None` if its disk has no serial
/// number, or another device has its number now.
fn name_of(state: &SavedDevice, devices: &Path) -> Option<String> {
    // An older server has not remembered which device it was: it has to be alive.
    let is_known = state.sequence.is_some() || is_process_alive(state.pid);
    if !is_known || !state.is_of_present_device(devices) {
        return None;
    }
    let serial = DiskConfig::parse(&state.disk).ok()?.serial?;
    Some(name(&serial))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_escapes_for_udev_and_stays_unique() {
        assert_eq!(name("DATA-1.a"), "ringdisk-DATA-1.a");
        assert_eq!(name("../x y\\z"), r"ringdisk-..\x2fx\x20y\x5cz");
        assert_ne!(name("a b"), name(r"a\x20b"));
    }

    #[test]
    fn name_of_ignores_a_newer_device_of_that_number() {
        let devices = tempfile::tempdir().expect("a folder");
        let is_device = |sequence: &str| {
            fs::create_dir_all(devices.path().join("ublkb0")).expect("a folder");
            fs::write(devices.path().join("ublkb0/diskseq"), sequence).expect("a file");
        };
        let mut state = SavedDevice {
            id: 0,
            // No process has the largest number that fits.
            pid: u32::MAX,
            disk: "path=a.qcow2,serial=DATA".to_owned(),
            directory: "/srv".into(),
            queues_per_worker: 1,
            rate_limit_group: None,
            control: "/run/x".into(),
            added_by: None,
            listed_in: None,
            sequence: Some(41),
            outlives: true,
            partitions: true,
            files: Vec::new(),
        };
        assert_eq!(name_of(&state, devices.path()), None, "there is no device");
        is_device("41\n");
        // Whether or not its server is there: names stay.
        assert_eq!(name_of(&state, devices.path()).as_deref(), Some("ringdisk-DATA"));
        assert!(may_be_read(&state, devices.path()));
        state.partitions = false;
        assert!(!may_be_read(&state, devices.path()));
        state.partitions = true;
        is_device("42\n");
        assert!(!may_be_read(&state, devices.path()));
        assert_eq!(name_of(&state, devices.path()), None, "it is another one");
        state.sequence = None;
        assert_eq!(name_of(&state, devices.path()), None);
        state.pid = std::process::id();
        assert_eq!(name_of(&state, devices.path()).as_deref(), Some("ringdisk-DATA"));
    }

    /// A folder as `/dev`, with nodes of two devices.
    fn dev() -> (tempfile::TempDir, PathBuf) {
        let dev = tempfile::tempdir().expect("a folder");
        let links = dev.path().join("disk/by-id");
        for node in ["ublkb0", "ublkb1"] {
            fs::write(dev.path().join(node), "").expect("a file");
        }
        (dev, links)
    }

    #[test]
    fn link_stays_with_its_device_until_removed() {
        let (dev, links) = dev();
        let leads_to = |name: &str| fs::read_link(links.join(name)).ok();
        let make = |device, name| make_in(&links, device, name).expect("a link");
        assert_eq!(make(0, Some("ringdisk-a")), None);
        assert_eq!(leads_to("ringdisk-a"), Some("../../ublkb0".into()));
        // Again, as `recover` does; and by another device, which does not get it.
        assert_eq!(make(0, Some("ringdisk-a")), None);
        let other = dev.path().join("ublkb0").canonicalize().expect("a path");
        assert_eq!(make(1, Some("ringdisk-a")), Some(other));
        assert_eq!(leads_to("ringdisk-a"), Some("../../ublkb0".into()));
        // The end of the other one takes nothing of this one.
        remove_in(&links, 1, None).expect("nothing to do");
        assert_eq!(leads_to("ringdisk-a"), Some("../../ublkb0".into()));
        remove_in(&links, 0, None).expect("removed");
        assert_eq!(leads_to("ringdisk-a"), None);
        assert_eq!(
            fs::read_dir(&links).expect("a folder").count(),
            0,
            "nothing is left aside"
        );
    }

    #[test]
    fn stale_links_are_replaced_or_removed() {
        let (dev, links) = dev();
        make_in(&links, 0, Some("ringdisk-old")).expect("a link");
        make_in(&links, 1, Some("ringdisk-b")).expect("a link");
        // Device 0 went with its server, and there is another one with this number now.
        make_in(&links, 0, Some("ringdisk-new")).expect("a link");
        assert!(fs::read_link(links.join("ringdisk-old")).is_err());
        make_in(&links, 0, None).expect("no link");
        assert!(fs::read_link(links.join("ringdisk-new")).is_err());
        // A name whose device is gone is free.
        fs::remove_file(dev.path().join("ublkb1")).expect("removed");
        assert_eq!(make_in(&links, 0, Some("ringdisk-b")).expect("a link"), None);
        assert_eq!(
            fs::read_link(links.join("ringdisk-b")).expect("a link"),
            Path::new("../../ublkb0")
        );
        // Files of others stay.
        fs::write(links.join("ringdisk-file"), "").expect("a file");
        symlink("../../ublkb0", links.join("wwn-1")).expect("a link");
        remove_in(&links, 0, None).expect("removed");
        assert!(links.join("ringdisk-file").exists() && fs::read_link(links.join("wwn-1")).is_ok());
    }
}
