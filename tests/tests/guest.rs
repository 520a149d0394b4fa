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

    /// Returns the contents of the image at `path` as a raw image, which `e2fsck` finds clean.
    fn sound_file_system(&self, path: &Path) -> Result<PathBuf, Error> {
        let raw = path.with_extension("raw");
        image::convert(path, &raw, "raw")?;
        image::fsck(&raw)?;
        Ok(raw)
    }
}

const WORK: &str = include_str!("../guest/vhost_user/work.sh");

/// A disk's whole life: made, filled, trimmed, rebooted, served to a second guest, closed, and read by QEMU.
#[test]
fn disks_are_flawless_after_hard_work_in_a_guest() -> Result<(), Error> {
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

const LOAD: &str = include_str!("../guest/vhost_user/load.sh");

/// Method: `kill -9` of the guest and its servers, in either order, several times on the same images. Leaks may remain.
#[test]
fn synced_data_survives_kill_9_of_guest_and_servers() -> Result<(), Error> {
    /// The number of files a guest syncs before it may be killed.
    const FILES: usize = 8;
    const ROUNDS: u64 = 3;
    let lab = lab::require();
    let disks = Disks::new(&lab, 1024 * MIB)?;
    let mut synced = 0;

    for round in 0..ROUNDS {
        let name = format!("round-{round}");
        let script = format!("expected={synced} last=no\n{LOAD}");
        let servers = disks.serve()?;
        let mut guest = disks.guest(&lab, &script).boot(&disks.scratch, &name)?;
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
    let script = format!("expected={synced} last=yes\n{LOAD}");
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
