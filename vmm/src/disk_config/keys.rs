//! The table of `--disk` keys: what exists, what it takes, what it means, where it applies.

use super::DiskConfigError;

/// Where a key has a meaning.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Scope {
    /// Wherever a disk is opened.
    Here,
    /// For the disks of `ringdisk run` alone.
    Machine,
    /// Only somewhere else; the text says where.
    Elsewhere(&'static str),
}

/// One key of the full `--disk` syntax.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// Its name.
    pub name: &'static str,
    /// What it takes, as the end of a sentence: "takes on or off".
    pub takes: &'static str,
    /// The value it has when it is not given, as a person would say it.
    pub default: &'static str,
    /// What it is for.
    pub about: &'static str,
    /// Where it applies.
    pub scope: Scope,
}

const ON_OFF: &str = "on or off";
/// Why a disk has no place on a bus here.
pub(super) const OUR_VM: &str =
    "it applies to disks of `ringdisk run`; here the program that attaches the disk sets it";
const BYTES: &str = "bytes from 1 up, such as 100M";
const NUMBER: &str = "a number from 1 up";
const MILLIS: &str = "milliseconds from 1 to 4294967295";
/// Why a server is not one's client.
pub(super) const CLIENT: &str = "it tells a virtual machine where its disk's server is; \
                                 a server takes its socket from --socket";
const CREATE: &str = "it applies to images that are created";

const fn here(name: &'static str, takes: &'static str, default: &'static str, about: &'static str) -> Key {
    Key {
        name,
        takes,
        default,
        about,
        scope: Scope::Here,
    }
}

const fn machine(name: &'static str, takes: &'static str, default: &'static str, about: &'static str) -> Key {
    Key {
        scope: Scope::Machine,
        ..here(name, takes, default, about)
    }
}

const fn elsewhere(name: &'static str, place: &'static str) -> Key {
    Key {
        name,
        takes: "",
        default: "",
        about: "",
        scope: Scope::Elsewhere(place),
    }
}

/// Every key of the full syntax, those that apply here first.
pub static KEYS: &[Key] = &[
    here("path", "the name of an image file", "required", "the image"),
    here(
        "image_type",
        "raw or qcow2",
        "qcow2 if the file starts with its magic",
        "the image's format; a file that does not look like QCOW2 needs image_type=raw",
    ),
    here("readonly", ON_OFF, "off", "the guest may only read"),
    here("direct", ON_OFF, "off", "bypass the host's page cache (O_DIRECT)"),
    here(
        "num_queues",
        "a number from 1 to 256",
        "1",
        "queues of the device, each with a worker thread",
    ),
    here(
        "queue_size",
        "a power of two from 4 to 32768",
        "128",
        "entries of each queue; a client of vhost-user may set up more or fewer",
    ),
    here(
        "serial",
        "1 to 20 printable ASCII characters",
        "none",
        "the serial number the guest sees",
    ),
    here("id", "a name", "the path", "the disk's name in logs"),
    here(
        "queue_affinity",
        "a list of queue@[cpus], each queue once, such as [0@[1,3],1@[4-7]]",
        "none",
        "the host CPUs each queue's worker may run on",
    ),
    here(
        "backing_files",
        ON_OFF,
        "off",
        "allow opening the files the image names as its backing",
    ),
    here("sparse", ON_OFF, "on", "give discarded space back to the host"),
    here(
        "lock_granularity",
        "byte-range or full",
        "byte-range",
        "what the image lock covers; full for file systems that cannot lock ranges",
    ),
    here(
        "l2_cache",
        "bytes from 64K up, such as 4M",
        "by the disk's size",
        "memory for the mapping's tables",
    ),
    here(
        "discard_no_unref",
        ON_OFF,
        "off",
        "keep discarded clusters reserved, so that the image does not fragment",
    ),
    here(
        "werror",
        "report or wait",
        "report",
        "what becomes of a write that the host has no space for: it fails, or waits until there is space",
    ),
    here(
        "poll_us",
        "microseconds from 0 to 10000",
        "adaptive; 0 for ublk",
        "how long an idle worker polls before it sleeps",
    ),
    here(
        "bw_size",
        BYTES,
        "no limit",
        "bytes read and written in one bw_refill_time",
    ),
    here(
        "bw_one_time_burst",
        BYTES,
        "none",
        "bytes beyond that, once, at the start",
    ),
    here(
        "bw_refill_time",
        MILLIS,
        "no limit",
        "the time in which the bucket of bw_size fills again",
    ),
    here("ops_size", NUMBER, "no limit", "requests in one ops_refill_time"),
    here(
        "ops_one_time_burst",
        NUMBER,
        "none",
        "requests beyond that, once, at the start",
    ),
    here(
        "ops_refill_time",
        MILLIS,
        "no limit",
        "the time in which the bucket of ops_size fills again",
    ),
    here(
        "rate_limit_group",
        "the id of a --rate-limit-group",
        "none",
        "the disks whose limits it shares, instead of limits of its own",
    ),
    machine(
        "vhost_user",
        ON_OFF,
        "off",
        "another program serves the disk: a vhost-user-blk backend",
    ),
    machine(
        "socket",
        "the path of a socket",
        "none",
        "where that backend listens",
    ),
    machine(
        "pci_device_id",
        "a slot from 1 to 31",
        "the lowest free one",
        "where on the machine's bus the disk is",
    ),
    machine(
        "pci_segment",
        "0, as a machine has one",
        "0",
        "the PCI segment of that bus",
    ),
    machine(
        "iommu",
        "off, as a machine has none",
        "off",
        "an IOMMU in front of the disk",
    ),
    elsewhere("cow", CREATE),
    elsewhere("compression", CREATE),
];

/// The keys that a disk can have, in the table's order.
fn applicable() -> impl Iterator<Item = &'static Key> {
    KEYS.iter()
        .filter(|key| !matches!(key.scope, Scope::Elsewhere(_)))
}

/// The key called `name`.
pub(super) fn find(name: &str) -> Result<&'static Key, DiskConfigError> {
    KEYS.iter()
        .find(|key| key.name == name)
        .ok_or_else(|| DiskConfigError::UnknownKey {
            key: name.to_owned(),
            nearest: nearest(name),
        })
}

/// Returns the table of keys for `--help`, one key a line: those of every disk.
#[must_use]
pub fn keys_help() -> String {
    table(applicable().filter(|key| key.scope == Scope::Here))
}

/// As [`keys_help`], for disks of `ringdisk run`.
#[must_use]
pub fn machine_keys_help() -> String {
    table(applicable())
}

fn table(keys: impl Iterator<Item = &'static Key>) -> String {
    let mut text = String::from(
        "Keys of --disk (key=value, separated by commas; a value with a comma in double quotes, path=\"a,b\"):\n",
    );
    for key in keys {
        let Key {
            name,
            takes,
            default,
            about,
            ..
        } = key;
        text += &format!("  {name:<18} {about}; takes {takes} [default: {default}]\n");
    }
    text
}

/// The applicable key that a misspelt name most resembles: at most two letters away.
fn nearest(name: &str) -> Option<&'static str> {
    // No key is this long, and the distance below is quadratic.
    if name.len() > 32 {
        return None;
    }
    applicable()
        .map(|key| (letters_apart(name.as_bytes(), key.name.as_bytes()), key.name))
        .filter(|(distance, key)| *distance <= 2 && *distance < key.len() / 2 + 1)
        .min()
        .map(|(_, key)| key)
}

/// How many letters must be inserted, deleted or replaced to get from `a` to `b`.
fn letters_apart(a: &[u8], b: &[u8]) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, left) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, right) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(left != right);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(row[j + 1] + 1);
        }
    }
    row[b.len()]
}
