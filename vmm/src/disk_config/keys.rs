//! The table of `--disk` keys: names, values, defaults, meanings and scopes.

use super::DiskConfigError;

/// The scope in which a key applies.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Scope {
    /// All commands that open a disk.
    Here,
    /// Disks of `ringdisk run` only.
    Machine,
    /// Not in `--disk`; the text names the other program or command.
    Elsewhere(&'static str),
}

/// One key of the full `--disk` syntax.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// Its name.
    pub name: &'static str,
    /// Its permitted values, as the end of a sentence: "takes on or off".
    pub takes: &'static str,
    /// Its default, as text.
    pub default: &'static str,
    /// Its purpose.
    pub about: &'static str,
    /// Its scope.
    pub scope: Scope,
}

const ON_OFF: &str = "on or off";
/// The reason for refusing a PCI key outside `ringdisk run`.
pub(super) const OUR_VM: &str =
    "it applies to disks of `ringdisk run` only; set it in the program that attaches the disk";
const BYTES: &str = "a number of bytes, at least 1, such as 100M";
const NUMBER: &str = "a number, at least 1";
const MILLIS: &str = "milliseconds from 1 to 4294967295";
/// The reason for refusing the keys of a vhost-user client in a server.
pub(super) const CLIENT: &str = "it names the vhost-user backend of a disk of `ringdisk run`; \
                                 pass a server its socket with --socket";
const CREATE: &str = "it applies to `ringdisk image create` only";

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

/// Every key of the full syntax; those of every disk come first.
pub static KEYS: &[Key] = &[
    here("path", "the name of a file", "required", "image file"),
    here(
        "image_type",
        "raw or qcow2",
        "qcow2 if the file starts with its magic",
        "image format; a file without the QCOW2 magic needs image_type=raw",
    ),
    here("readonly", ON_OFF, "off", "refuse writes"),
    here(
        "snapshot",
        "id=ID, name=NAME, or an ID or a name that means one snapshot only",
        "none",
        "show this internal snapshot of the image, read-only, in place of the disk",
    ),
    here(
        "overlay",
        "temporary",
        "none",
        "write to an overlay that ends with this process; the image is only read",
    ),
    here(
        "overlay_dir",
        "a directory",
        "$TMPDIR or /var/tmp",
        "directory whose file system holds the temporary overlay",
    ),
    here(
        "secret_file",
        "the name of a file or a descriptor such as /dev/fd/3",
        "none",
        "file with the secret that opens an encrypted image; a newline at its end counts",
    ),
    here("direct", ON_OFF, "off", "bypass the host's page cache (O_DIRECT)"),
    here(
        "num_queues",
        "a number from 1 to 256",
        "1",
        "number of queues, each with a worker thread",
    ),
    here(
        "queue_size",
        "a power of two from 4 to 32768",
        "128",
        "entries of each queue; a vhost-user client may choose another size",
    ),
    here(
        "serial",
        "1 to 20 printable ASCII characters",
        "none",
        "serial number that the guest sees",
    ),
    here("id", "a name", "the path", "name of the disk in logs"),
    here(
        "queue_affinity",
        "a list of queue@[cpus], each queue once, such as [0@[1,3],1@[4-7]]",
        "none",
        "host CPUs on which each queue's worker may run",
    ),
    here(
        "backing_files",
        ON_OFF,
        "off",
        "allow opening the backing files that the image names",
    ),
    here(
        "data_file",
        ON_OFF,
        "off",
        "allow opening the external data file that the image names, or that its backing files name",
    ),
    here("sparse", ON_OFF, "on", "return discarded space to the host"),
    here(
        "lock_granularity",
        "byte-range or full",
        "byte-range",
        "range of the image lock; full for file systems that cannot lock ranges",
    ),
    here(
        "l2_cache",
        "a number of bytes, at least 64K, such as 4M",
        "by the disk's size",
        "memory for mapping tables",
    ),
    here(
        "discard_no_unref",
        ON_OFF,
        "off",
        "keep discarded clusters allocated, so that the image does not fragment",
    ),
    here(
        "werror",
        "report or wait",
        "report",
        "when the host is out of space: fail the write, or delay it until there is space",
    ),
    here(
        "bitmaps",
        "close or durable",
        "close",
        "when the image's persistent bitmaps are stored: durable ones survive a crash, and delay the first change of each 4 MiB",
    ),
    here(
        "poll_us",
        "microseconds from 0 to 10000",
        "adaptive; 0 for ublk",
        "time that an idle worker polls before it sleeps",
    ),
    here(
        "bw_size",
        BYTES,
        "no limit",
        "bytes that may be read and written in one bw_refill_time",
    ),
    here("bw_one_time_burst", BYTES, "none", "extra bytes, used up once"),
    here(
        "bw_refill_time",
        MILLIS,
        "no limit",
        "time in which the allowance of bw_size is refilled",
    ),
    here("ops_size", NUMBER, "no limit", "requests in one ops_refill_time"),
    here(
        "ops_one_time_burst",
        NUMBER,
        "none",
        "extra requests, used up once",
    ),
    here(
        "ops_refill_time",
        MILLIS,
        "no limit",
        "time in which the allowance of ops_size is refilled",
    ),
    here(
        "rate_limit_group",
        "the id of a --rate-limit-group",
        "none",
        "use the shared limits of that group instead of the disk's own",
    ),
    machine(
        "vhost_user",
        ON_OFF,
        "off",
        "use a disk that another program serves (a vhost-user-blk backend)",
    ),
    machine("socket", "the path of a socket", "none", "socket of that backend"),
    machine(
        "pci_device_id",
        "a slot from 1 to 31",
        "the lowest free one",
        "PCI slot of the disk",
    ),
    machine(
        "pci_segment",
        "0, the only segment",
        "0",
        "PCI segment of the disk",
    ),
    machine(
        "iommu",
        "off, as the machine has no IOMMU",
        "off",
        "place the disk behind an IOMMU",
    ),
    elsewhere("cow", CREATE),
    elsewhere("compression", CREATE),
];

/// Returns the keys that a disk can have, in table order.
fn applicable() -> impl Iterator<Item = &'static Key> {
    KEYS.iter()
        .filter(|key| !matches!(key.scope, Scope::Elsewhere(_)))
}

/// Returns the key called `name`.
pub(super) fn find(name: &str) -> Result<&'static Key, DiskConfigError> {
    KEYS.iter()
        .find(|key| key.name == name)
        .ok_or_else(|| DiskConfigError::UnknownKey {
            key: name.to_owned(),
            nearest: nearest(name),
        })
}

/// Returns the table of keys of every disk for `--help`, one key per line.
#[must_use]
pub fn keys_help() -> String {
    table(applicable().filter(|key| key.scope == Scope::Here))
}

/// Returns the table of keys of `ringdisk run` disks for `--help`.
#[must_use]
pub fn machine_keys_help() -> String {
    table(applicable())
}

fn table(keys: impl Iterator<Item = &'static Key>) -> String {
    let mut text = String::from(
        "Keys of --disk (key=value, separated by commas; put a value with a comma in double quotes, path=\"a,b\"):\n",
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

/// Returns the applicable key closest to a misspelt name, at most two edits away.
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

/// Returns the edit distance of `a` and `b` (insertions, deletions and replacements).
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
