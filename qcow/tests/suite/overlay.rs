//! Temporary overlays: over images of every kind the disk is what an array of bytes says, and the images below stay as they
//! are.

use std::fs;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::{Folder, Lane, assert_same, chain, close, create};
use block::file::{HostFiles, ImageFile};
use block::open::{Access, CHAIN_DEPTH_MAX, Format, Opening};
use block::raw::Raw;
use block::ring::RingKind;
use block::{Context, Disk};
use qcow::image::CreateOptions;
use qcow::{OpenError, OpenOptions, Qcow2, QcowDisk, SnapshotSelector};
use ringdisk_gen::Random;

const DISK: u64 = 3 << 20;

/// An overlay and its file.
#[derive(Debug)]
struct Overlay {
    disk: Arc<QcowDisk>,
    file: Arc<ImageFile>,
}

fn try_open(path: &Path, format: &str, options: &OpenOptions) -> Result<Overlay, OpenError> {
    let cx = Context::syscalls();
    let (qcow2, raw) = (Qcow2(options.clone()), Raw::default());
    let formats: [&dyn Format; 2] = [&qcow2, &raw];
    let opening = Opening::new(&cx, &HostFiles, &formats, options.of_chain());
    let opened = cx.block_on(async {
        let format = if format == "raw" { formats[1] } else { formats[0] };
        let below = format.open(&opening, path, Access::Read).await?;
        let name = PathBuf::from("temporary overlay");
        let file = ImageFile::temporary(Path::new("/var/tmp"), name, options.direct)?;
        let disk = qcow2.open_over(&opening, Arc::clone(&file), below).await?;
        Ok(Overlay { disk, file })
    });
    opened.expect("it runs")
}

fn open(path: &Path, format: &str, options: &OpenOptions) -> Overlay {
    try_open(path, format, options).unwrap_or_else(|error| panic!("{}", chain(&error)))
}

impl Overlay {
    /// The state of its file.
    fn metadata(&self) -> fs::Metadata {
        let fd = self.file.as_fd().try_clone_to_owned().expect("a duplicate");
        fs::File::from(fd).metadata().expect("its state")
    }

    /// The bytes that its file takes on the host.
    fn allocated(&self) -> u64 {
        self.metadata().blocks() * 512
    }

    /// Closes the disk, and fails the test unless QEMU finds the overlay sound.
    fn close(self, folder: &Folder) {
        close(self.disk);
        // By a descriptor of its own, as ours may demand alignment.
        let path = format!("/proc/self/fd/{}", self.file.as_fd().as_raw_fd());
        fs::copy(path, folder.path("overlay.qcow2")).expect("a copy");
        folder.assert_flawless("overlay.qcow2", false);
    }
}

/// An image to lay an overlay over.
struct Base {
    name: &'static str,
    format: &'static str,
    snapshot: Option<SnapshotSelector>,
}

/// Makes images of every kind, in `folder`, each with its disk's contents.
fn bases(folder: &Folder) -> Vec<(Base, Vec<u8>)> {
    let random = &mut Random::new(0x0e1a);
    let mut contents = vec![0; DISK as usize];
    // A third is data, in pieces that begin and end anywhere.
    for _ in 0..40 {
        let at = random.below(DISK - 50_000) as usize;
        let len = random.below(50_000) as usize;
        contents[at..at + len].fill(random.below(255) as u8 + 1);
    }
    fs::write(folder.path("base.img"), &contents).expect("a raw image");
    let convert = |options: &[&str], name: &str| {
        let fixed = ["convert", "-f", "raw", "-O", "qcow2"];
        folder.qemu_img(&[&fixed[..], options, &["base.img", name]].concat());
    };
    convert(&["-o", "cluster_size=64k"], "plain.qcow2");
    convert(&["-o", "extended_l2=on,cluster_size=128k"], "extended.qcow2");
    convert(&["-c"], "compressed.qcow2");
    convert(&["-o", "compat=0.10,cluster_size=4k"], "old.qcow2");
    folder.qemu_img(&["snapshot", "-c", "s", "plain.qcow2"]);
    folder.qemu_io("qcow2", "plain.qcow2", &["write -P 99 0 1M"]);
    let mut changed = contents.clone();
    changed[..1 << 20].fill(99);
    let chain = "backing_file=extended.qcow2,backing_fmt=qcow2,cluster_size=4k";
    folder.qemu_create("middle.qcow2", chain, "2M");
    folder.qemu_io("qcow2", "middle.qcow2", &["write -P 77 1M 300k"]);
    let chain = "backing_file=middle.qcow2,backing_fmt=qcow2";
    folder.qemu_create("chain.qcow2", chain, &DISK.to_string());
    let mut chained = contents.clone();
    chained[1 << 20..][..300 << 10].fill(77);
    chained[2 << 20..].fill(0);
    let base = |name, format| Base {
        name,
        format,
        snapshot: None,
    };
    let snapshot = Base {
        snapshot: Some(SnapshotSelector::Name("s".to_owned())),
        ..base("plain.qcow2", "qcow2")
    };
    vec![
        (base("base.img", "raw"), contents.clone()),
        (base("plain.qcow2", "qcow2"), changed),
        (snapshot, contents.clone()),
        (base("extended.qcow2", "qcow2"), contents.clone()),
        (base("compressed.qcow2", "qcow2"), contents.clone()),
        (base("old.qcow2", "qcow2"), contents),
        (base("chain.qcow2", "qcow2"), chained),
    ]
}

/// Changes random parts of the disk and of `model`, and compares what is read.
fn work(lane: &Lane, model: &mut [u8], random: &mut Random) {
    const CLUSTER: u64 = 128 << 10;
    let size = model.len() as u64;
    for _ in 0..150 {
        let offset = random.below(size / 512) * 512;
        let len = (random.below(200) + 1) * 512;
        let len = len.min(size - offset);
        let range = offset as usize..(offset + len) as usize;
        match random.below(10) {
            0..5 => {
                let byte = random.below(255) as u8 + 1;
                lane.write(offset, &vec![byte; len as usize]);
                model[range].fill(byte);
            }
            5 => {
                lane.write_zeroes(offset, len, random.below(2) == 0);
                model[range].fill(0);
            }
            6 => {
                // Whole clusters, which then read as zeros, whatever lies below.
                let offset = offset / CLUSTER * CLUSTER;
                if offset + CLUSTER <= size {
                    lane.discard(offset, CLUSTER);
                    model[offset as usize..][..CLUSTER as usize].fill(0);
                }
            }
            7 => lane.flush(),
            _ => assert_same(&lane.read(offset, len), &model[range], "read back"),
        }
    }
}

#[test]
fn disk_over_every_kind_of_image_is_an_array_of_bytes_and_the_images_stay() {
    let folder = Folder::new();
    let random = &mut Random::new(0x0e1b);
    for (base, contents) in bases(&folder) {
        for (ring, direct) in [(RingKind::Syscalls, false), (RingKind::IoUring, true)] {
            let what = format!("{} {:?} {ring:?}", base.name, base.snapshot);
            let files = ["base.img", "extended.qcow2", "middle.qcow2", base.name];
            let images = || files.map(|name| fs::read(folder.path(name)).expect("an image"));
            let before = images();
            let options = OpenOptions {
                backing_files: true,
                direct,
                snapshot: base.snapshot.clone(),
                ..OpenOptions::default()
            };
            let path = folder.path(base.name);
            let overlay = open(&path, base.format, &options);
            let info = overlay.disk.info();
            assert_eq!(info.size_bytes, DISK, "{what}");
            assert!(!info.read_only && info.discard && info.write_zeroes, "{what}");
            let files = overlay.disk.files();
            assert_eq!(files.first(), Some(&path), "{what}: the overlay has no path");
            let mut model = contents.clone();
            let lane = Lane::new(&overlay.disk, ring);
            assert_same(&lane.read(0, DISK), &model, &what);
            work(&lane, &mut model, random);
            assert_same(&lane.read(0, DISK), &model, &what);
            // What it grows by reads as zeros, and only the overlay grows.
            let cx = Context::syscalls();
            let grown = cx.block_on(overlay.disk.grow(&cx, DISK + (1 << 20)));
            grown.expect("it runs").expect("growth");
            model.resize((DISK + (1 << 20)) as usize, 0);
            assert_same(&lane.read(0, DISK + (1 << 20)), &model, &what);
            work(&lane, &mut model, random);
            lane.flush();
            assert_same(&lane.read(0, DISK + (1 << 20)), &model, &what);
            lane.settle();
            drop(lane);
            crate::common::drain(&cx);
            overlay.close(&folder);
            assert!(images() == before, "{what}: an image has changed");
        }
    }
}

#[test]
fn discard_gives_the_space_of_the_overlay_back() {
    let folder = Folder::new();
    folder.qemu_create("base.qcow2", "", "64M");
    let overlay = open(&folder.path("base.qcow2"), "qcow2", &OpenOptions::default());
    assert_eq!(overlay.metadata().nlink(), 0, "it has no name");
    let lane = Lane::new(&overlay.disk, RingKind::Syscalls);
    let empty = overlay.allocated();
    for part in 0..16 {
        lane.write(part << 20, &vec![1; 1 << 20]);
    }
    lane.flush();
    let full = overlay.allocated();
    assert!(full >= empty + (16 << 20), "{empty} {full}");
    lane.discard(0, 16 << 20);
    lane.flush();
    lane.settle();
    let after = overlay.allocated();
    assert!(after < empty + (1 << 20), "{empty} {full} {after}");
    assert_same(&lane.read(0, 1 << 20), &vec![0; 1 << 20], "discarded");
    drop(lane);
    overlay.close(&folder);
}

/// Whole pages are written without a look at what lies below: each takes a page, not a cluster.
#[test]
fn page_written_over_an_image_copies_nothing() {
    let folder = Folder::new();
    folder.qemu_create("base.qcow2", "", "64M");
    folder.qemu_io("qcow2", "base.qcow2", &["write -P 5 0 64M"]);
    let overlay = open(&folder.path("base.qcow2"), "qcow2", &OpenOptions::default());
    let lane = Lane::new(&overlay.disk, RingKind::Syscalls);
    let empty = overlay.allocated();
    for cluster in 0..64 {
        lane.write(cluster << 20, &[6; 4096]);
    }
    lane.flush();
    let taken = overlay.allocated() - empty;
    assert!(taken < 64 * 16 * 1024, "64 pages take {taken} bytes");
    for cluster in 0..64 {
        let expected = [[6; 4096], [5; 4096]].concat();
        assert_same(
            &lane.read(cluster << 20, 8192),
            &expected,
            "beside it is what lies below",
        );
    }
    lane.settle();
    drop(lane);
    overlay.close(&folder);
}

/// Several may read an image; a writer of it keeps an overlay away, and the other way round.
#[test]
fn image_below_is_locked_as_one_that_is_read() {
    let folder = Folder::new();
    folder.qemu_create("base.qcow2", "", "1M");
    let path = folder.path("base.qcow2");
    let options = OpenOptions::default();
    let (one, other) = (open(&path, "qcow2", &options), open(&path, "qcow2", &options));
    let refused = QcowDisk::open(&path, &options).expect_err("it is read");
    assert!(refused.is_locked(), "{}", chain(&refused));
    one.close(&folder);
    other.close(&folder);
    let writer = crate::common::open(&path, &options);
    let refused = try_open(&path, "qcow2", &options).expect_err("it is written");
    assert!(refused.is_locked(), "{}", chain(&refused));
    close(writer);
}

/// An overlay is an image of the chain.
#[test]
fn overlay_counts_as_an_image_of_the_chain() {
    let folder = Folder::new();
    for image in 0..CHAIN_DEPTH_MAX {
        let below = image.checked_sub(1).map(|below| format!("{below}.qcow2"));
        let options = CreateOptions {
            backing_format: below.as_ref().map(|_| "qcow2".to_owned()),
            backing_file: below,
            ..CreateOptions::new(1 << 20)
        };
        create(&folder.path(&format!("{image}.qcow2")), &options);
    }
    let options = OpenOptions {
        backing_files: true,
        ..OpenOptions::default()
    };
    let last = CHAIN_DEPTH_MAX - 1;
    let path = |image: usize| folder.path(&format!("{image}.qcow2"));
    close(crate::common::open(&path(last), &options));
    let refused = try_open(&path(last), "qcow2", &options).expect_err("too long");
    let said = chain(&refused);
    assert!(
        said.contains("temporary overlay") && said.contains("more than 64 images"),
        "{said}"
    );
    open(&path(last - 1), "qcow2", &options).close(&folder);
}
