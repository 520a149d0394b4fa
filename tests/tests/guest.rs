//! A stock Linux guest works hard on QCOW2 disks that `ringdisk vhost-user` serves; afterwards QEMU's
//! tools and `e2fsck` judge what is left.
//!
//! Each disk has two queues and a server of its own. The root is an overlay of the lab's read-only base
//! image, so it copies on write; the data disk starts empty, so it allocates.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use lab::{Error, Guest, Lab, Scratch, Server, image};

const MIB: u64 = 1 << 20;

/// The two images of a guest and where they are served.
struct Disks {
    scratch: Scratch,
    root: PathBuf,
    data: PathBuf,
}

impl Disks {
    /// Makes the images: the root over the base, the data disk empty and of `data_bytes`.
    fn new(lab: &Lab, data_bytes: u64) -> Result<Self, Error> {
        let scratch = Scratch::new()?;
        let (root, data) = (scratch.file("root.qcow2"), scratch.file("data.qcow2"));
        image::overlay(&root, lab.base())?;
        image::create(&data, "qcow2", "", data_bytes)?;
        Ok(Self { scratch, root, data })
    }

    /// Serves both, the root first.
    fn serve(&self) -> Result<[Server; 2], Error> {
        let root = format!("path={},num_queues=2,backing_files=on", self.root.display());
        let data = format!("path={},num_queues=2", self.data.display());
        Ok([
            Server::ringdisk(&self.scratch.file("root.sock"), &root)?,
            Server::ringdisk(&self.scratch.file("data.sock"), &data)?,
        ])
    }

    /// A guest on both disks that runs `script`.
    fn guest<'lab>(&self, lab: &'lab Lab, script: &str) -> Guest<'lab> {
        Guest::new(lab)
            .cpus(2)
            .disk("root", &self.scratch.file("root.sock"), 2)
            .disk("data", &self.scratch.file("data.sock"), 2)
            .script(script)
    }

    /// What the image at `path` reads as, as a raw image that `e2fsck` finds clean.
    fn sound_file_system(&self, path: &Path) -> Result<PathBuf, Error> {
        let raw = path.with_extension("raw");
        image::convert(path, &raw, "raw")?;
        image::fsck(&raw)?;
        Ok(raw)
    }
}

/// The first boot makes a file system, works on it and restarts; the second finds everything again.
const WORK: &str = r#"
fio_job() {
    fio --name=verified --directory="$1" --size=8m --numjobs=2 --cpus_allowed=0,1 --cpus_allowed_policy=split \
        --rw=randwrite --bsrange=4k-64k --ioengine=libaio --iodepth=16 --direct=1 --fsync=64 --fallocate=none \
        --verify=xxhash --verify_fatal=1 --randseed=7 --eta=never --output=/dev/shm/fio "$2" || { cat /dev/shm/fio; exit 1; }
}

for disk in root data; do
    sed 's/^/cache /' "/sys/block/$(basename "$(readlink /dev/lab/$disk)")/queue/write_cache"
done
if [ ! -e /root/sums ]; then
    mkfs.ext4 -q /dev/lab/data
    mount /dev/lab/data /mnt
    fio_job /mnt --do_verify=1
    fio_job /srv --do_verify=1
    dd if=/dev/urandom of=/mnt/kept bs=1M count=4 conv=fsync status=none
    dd if=/dev/urandom of=/srv/kept bs=1M count=4 conv=fsync status=none
    yes junk | head -c 64M >/mnt/junk
    sync /mnt/junk
    (sha256sum /mnt/kept /srv/kept) >/root/sums
    rm /mnt/junk
    sync # what the journal has not committed is not trimmed
    fstrim -v /mnt | sed 's/^/trimmed /'
    fstrim /
    umount /mnt
    e2fsck -fn /dev/lab/data
    mount /dev/lab/data /mnt
    sha256sum -c /root/sums
    sync
    lab-reboot
    exit
fi

mount /dev/lab/data /mnt
sha256sum -c /root/sums
fio_job /mnt --verify_only=1
fio_job /srv --verify_only=1
umount /mnt
e2fsck -fn /dev/lab/data
for disk in root data; do
    name=$(basename "$(readlink -f "/sys/block/$(basename "$(readlink /dev/lab/$disk)")/device")")
    for queue in 0 1; do
        awk -v queue="$name-req.$queue" '$NF == queue { print "interrupts", $2 + $3 }' /proc/interrupts
    done
done
sed 's/^/sum /' /root/sums
sha256sum /dev/lab/data | sed 's/^/data /'
"#;

/// The whole life of a disk: made, filled, trimmed, unmounted, rebooted, powered off, offered to a second
/// guest by the same server, closed; and then read by QEMU.
#[test]
fn qcow2_disks_are_flawless_after_a_guest_worked_hard_on_them() -> Result<(), Error> {
    let lab = lab::require();
    let disks = Disks::new(&lab, 192 * MIB)?;
    let servers = disks.serve()?;

    let first = disks.guest(&lab, WORK).run(&disks.scratch, "first")?;
    let second = disks
        .guest(
            &lab,
            "sha256sum /dev/lab/data | sed 's/^/data /'; sha256sum -c --ignore-missing /root/sums",
        )
        .run(&disks.scratch, "second")?;
    for server in servers {
        server.stop()?;
    }

    assert_eq!(first.boots(), 2, "the guest rebooted once");
    assert_eq!(first.complaints(), Vec::<&str>::new(), "{}", first.console());
    assert_eq!(second.complaints(), Vec::<&str>::new(), "{}", second.console());
    let interrupts: Vec<_> = first
        .lines()
        .filter_map(|line| line.strip_prefix("interrupts "))
        .collect();
    assert_eq!(
        interrupts.len(),
        4,
        "two disks with two queues each: {interrupts:?}"
    );
    assert!(
        interrupts.iter().all(|count| *count != "0"),
        "every queue was used: {interrupts:?}"
    );
    assert!(first.value("trimmed ").is_some(), "fstrim did something");
    assert_eq!(
        first.value("data "),
        second.value("data "),
        "a second guest reads the same"
    );

    for path in [&disks.root, &disks.data] {
        image::check_flawless(path)?;
        image::ringdisk(&["image", "check", &path.to_string_lossy()])?;
    }
    let allocated = fs::metadata(&disks.data).expect("the image is there").blocks() * 512;
    assert!(
        allocated < 56 * MIB,
        "64 MiB were deleted and trimmed, yet {} MiB are allocated",
        allocated / MIB
    );

    let root = disks.sound_file_system(&disks.root)?;
    let sums: Vec<_> = first
        .lines()
        .filter_map(|line| line.strip_prefix("sum "))
        .map(str::to_owned)
        .collect();
    let found = image::read_file(&root, "/root/sums")?;
    assert_eq!(
        found.lines().collect::<Vec<_>>(),
        sums,
        "QEMU reads the root as the guest left it"
    );
    let data = disks.sound_file_system(&disks.data)?;
    let guests = first
        .value("data ")
        .and_then(|line| line.split(' ').next())
        .unwrap_or_default();
    assert_eq!(
        image::sha256(&data)?,
        guests,
        "QEMU reads the data disk as the guest did"
    );
    let caches: Vec<_> = first
        .lines()
        .filter_map(|line| line.strip_prefix("cache "))
        .collect();
    assert_eq!(
        caches, ["write back"; 4],
        "without a write cache the guest would send no flushes"
    );
    Ok(())
}

/// Checks that the files 1 to `EXPECTED` are whole on both disks; then writes and syncs more and more of
/// them, under a load that allocates, copies, overwrites and discards, until something ends it.
const LOAD: &str = r#"
content() { seq "$1" "$(($1 + 20000))"; }
[ -z "$(blkid /dev/lab/data)" ] && mkfs.ext4 -q /dev/lab/data
mount /dev/lab/data /mnt

number=0
while [ "$number" -lt EXPECTED ]; do
    number=$((number + 1))
    for place in /mnt /srv; do
        content $number | cmp - $place/kept.$number
    done
done
echo "intact $number"
rm -f /mnt/load.* /srv/load.*
[ LAST = no ] || exit 0

for place in /mnt /srv; do
    fio --name=load --directory=$place --size=128m --numjobs=2 --rw=randwrite --bsrange=4k-128k --ioengine=libaio \
        --iodepth=8 --direct=1 --fsync=32 --fallocate=none --time_based --runtime=1000 >/dev/null &
done
(while :; do
    dd if=/dev/zero of=/mnt/junk bs=1M count=4 status=none
    rm /mnt/junk
    fstrim /mnt
done) &
while :; do
    number=$((number + 1))
    for place in /mnt /srv; do
        content $number >$place/kept.$number
        sync $place/kept.$number $place
    done
    echo "synced $number"
done
"#;

/// `kill -9` of the guest and of its servers, in either order, several times on the same images: whatever
/// the guest had synced is there at the next boot, and the images hold no errors (leaks may remain).
#[test]
fn what_a_guest_synced_survives_kill_nine_of_everything() -> Result<(), Error> {
    /// How many files a guest syncs before it may be killed.
    const FILES: usize = 8;
    const ROUNDS: u64 = 3;
    let lab = lab::require();
    let disks = Disks::new(&lab, 1024 * MIB)?;
    let mut synced = 0;

    for round in 0..ROUNDS {
        let name = format!("round-{round}");
        let script = LOAD
            .replace("EXPECTED", &synced.to_string())
            .replace("LAST", "no");
        let servers = disks.serve()?;
        let mut guest = disks.guest(&lab, &script).start(&disks.scratch, &name)?;
        let enough = format!("synced {}", synced + FILES);
        guest.wait_for(|line| line == enough)?;
        thread::sleep(Duration::from_millis(round * 170));

        let lines = if round % 2 == 0 {
            let lines = guest.kill()?;
            for server in servers {
                server.kill()?;
            }
            lines
        } else {
            for server in servers {
                server.kill()?;
            }
            guest.kill()?
        };

        assert!(
            lines.contains(&format!("intact {synced}")),
            "round {round} lost a synced file: {lines:?}"
        );
        let last = lines
            .iter()
            .rev()
            .find_map(|line| line.strip_prefix("synced ")?.parse().ok());
        synced = last.expect("the guest was waited for until it had synced files");
        image::check_sound(&disks.root)?;
        image::check_sound(&disks.data)?;
    }

    let servers = disks.serve()?;
    let script = LOAD
        .replace("EXPECTED", &synced.to_string())
        .replace("LAST", "yes");
    let outcome = disks.guest(&lab, &script).run(&disks.scratch, "last")?;
    for server in servers {
        server.stop()?;
    }
    assert_eq!(outcome.value("intact "), Some(synced.to_string().as_str()));
    assert_eq!(outcome.complaints(), Vec::<&str>::new(), "{}", outcome.console());
    for path in [&disks.root, &disks.data] {
        image::check_sound(path)?;
        disks.sound_file_system(path)?;
    }
    Ok(())
}
