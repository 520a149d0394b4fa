//! Compaction of images of many shapes that are free in many places: the disk stays as it is, QEMU finds no flaw, and the
//! file has no cluster that is not in use.

use std::ops::ControlFlow;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::bitmap_bits::{bitmaps, entries};
use crate::common::{Folder, Lane, SECRET, assert_same, chain, close, open, secret};
use crate::used_clusters::used;
use block::Context;
use block::ring::RingKind;
use qcow::format::BitmapFlags;
use qcow::format::bitmap::BITMAP_FLAGS_AT;
use qcow::image::UnsoundError;
use qcow::offline::{ChangeError, compact_image};
use qcow::{BitmapStorage, CompactError, CompactOptions, Compacted, Fixed, OpenOptions};
use ringdisk_gen::Random;

pub(crate) const IMAGE: &str = "disk.qcow2";

pub(crate) fn options() -> OpenOptions {
    OpenOptions {
        backing_files: true,
        data_files: true,
        ..OpenOptions::default()
    }
}

/// Changes an image with this crate's engine.
pub(crate) fn change(folder: &Folder, options: &OpenOptions, change: impl FnOnce(&Lane)) {
    let disk = open(&folder.path(IMAGE), options);
    let lane = Lane::new(&disk, RingKind::Syscalls);
    change(&lane);
    lane.flush();
    lane.settle();
    drop(lane);
    close(disk);
}

fn compact(path: &Path) -> Compacted {
    try_compact(path).unwrap_or_else(|error| panic!("{}", chain(&error)))
}

fn try_compact(path: &Path) -> Result<Compacted, ChangeError<CompactError>> {
    let secret = secret().filter(|_| crate::common::u32_at(path, 32) != 0);
    compact_image(path, secret, &CompactOptions::default(), |_| {
        ControlFlow::Continue(())
    })
}

fn len(folder: &Folder) -> u64 {
    std::fs::metadata(folder.path(IMAGE)).expect("an image").len()
}

/// The space that the image takes on the host, in bytes.
fn space(folder: &Folder) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let metadata = std::fs::metadata(folder.path(IMAGE)).expect("an image");
    metadata.blocks() * 512
}

/// Compacts an image, whose disk stays as it is. Returns the result.
#[track_caller]
fn compact_and_check(folder: &Folder, what: &str) -> Compacted {
    let before = folder.qemu_reads(IMAGE);
    let old_len = len(folder);
    let compacted = compact(&folder.path(IMAGE));
    folder.assert_flawless(IMAGE, false);
    assert_same(&folder.qemu_reads(IMAGE), &before, what);
    assert_eq!(compacted.before_bytes, old_len, "{what}");
    assert_eq!(compacted.after_bytes, len(folder), "{what}");
    assert!(!compacted.is_stopped, "{what}");
    compacted
}

/// As [`compact_and_check`]; the file has no cluster that is not in use.
#[track_caller]
pub(crate) fn compact_wholly(folder: &Folder, what: &str) -> Compacted {
    let compacted = compact_and_check(folder, what);
    assert_eq!(compacted.fixed, [], "{what}");
    let (clusters, ideal) = used(&std::fs::read(folder.path(IMAGE)).expect("an image"));
    // The last one may be written in part.
    let len = len(folder);
    assert!(
        len <= ideal && len + ideal / clusters > ideal,
        "{what}: {len} bytes, and {clusters} clusters are in use; {compacted:?}"
    );
    let again = compact_and_check(folder, what);
    assert_eq!((again.moved_bytes, again.after_bytes), (0, len), "{what}: again");
    compacted
}

/// The places of the clusters that are discarded, of a disk of `clusters`.
#[derive(Clone, Copy, Debug)]
enum Pattern {
    End,
    Start,
    Scattered,
    All,
}

impl Pattern {
    fn discards(self, lane: &Lane, clusters: u64, size: u64) {
        let ranges: Vec<(u64, u64)> = match self {
            Self::End => vec![(clusters / 2, clusters / 2)],
            Self::Start => vec![(0, clusters / 2)],
            Self::Scattered => (0..clusters)
                .filter(|at| at * 7 % 5 < 3)
                .map(|at| (at, 1))
                .collect(),
            Self::All => vec![(0, clusters)],
        };
        for (first, count) in ranges {
            lane.discard(first * size, count * size);
        }
    }
}

const PATTERNS: [Pattern; 4] = [Pattern::End, Pattern::Start, Pattern::Scattered, Pattern::All];

/// Writes a disk of `clusters` whole, each sector with other bytes, and then discards some.
fn fill(folder: &Folder, options: &OpenOptions, pattern: Pattern, clusters: u64, size: u64) {
    change(folder, options, |lane| {
        let mut random = Random::new(clusters);
        for at in 0..clusters {
            let byte = random.draw();
            let bytes: Vec<u8> = (0..size).map(|at| (byte ^ (at / 512)) as u8).collect();
            lane.write(at * size, &bytes);
        }
        lane.flush();
        pattern.discards(lane, clusters, size);
    });
}

#[test]
fn compaction_leaves_no_free_cluster_in_images_of_many_shapes() {
    let shapes = [
        ("cluster_size=512", 512, 3000),
        ("cluster_size=512,refcount_bits=64", 512, 1500),
        ("cluster_size=512,refcount_bits=1", 512, 1500),
        ("cluster_size=4k", 4096, 1200),
        ("cluster_size=4k,compat=0.10", 4096, 600),
        ("cluster_size=64k", 65536, 200),
        ("cluster_size=2M", 2 << 20, 12),
        ("cluster_size=16k,extended_l2=on", 16384, 400),
    ];
    for (format, size, clusters) in shapes {
        for pattern in PATTERNS {
            let folder = Folder::new();
            folder.qemu_create(IMAGE, format, &(size * clusters).to_string());
            fill(&folder, &options(), pattern, clusters, size);
            let before = len(&folder);
            let what = format!("{format} {pattern:?}");
            let compacted = compact_wholly(&folder, &what);
            assert!(
                compacted.after_bytes < before * 2 / 3,
                "{what}: {compacted:?} of {before}"
            );
        }
    }
}

/// QEMU's own images: it places clusters in another order.
#[test]
fn compaction_leaves_no_free_cluster_in_images_that_qemu_wrote() {
    for seed in 0..12 {
        let random = &mut Random::new(seed);
        let folder = Folder::new();
        let cluster = random.pick(&[512, 1024, 4096, 65536]);
        let mut format = format!("cluster_size={cluster}");
        if random.below(2) == 0 {
            std::fs::write(folder.path("base.raw"), vec![0xBA; 600 << 10]).expect("a base");
            format += ",backing_file=base.raw,backing_fmt=raw";
        }
        folder.qemu_create(IMAGE, &format, "1M");
        folder.scribble_by_qemu(IMAGE, 1 << 20, random, 150);
        change(&folder, &options(), |lane| {
            for at in 0..20 {
                lane.discard(at * 49152, 32768);
            }
        });
        compact_wholly(&folder, &format!("seed {seed}: {format}"));
    }
}

/// Subclusters that are not all alike keep their kinds.
#[test]
fn compaction_keeps_subclusters() {
    for backing in [false, true] {
        let folder = Folder::new();
        let mut format = "cluster_size=16k,extended_l2=on".to_owned();
        if backing {
            std::fs::write(folder.path("base.raw"), vec![0xBA; 2 << 20]).expect("a base");
            format += ",backing_file=base.raw,backing_fmt=raw";
        }
        folder.qemu_create(IMAGE, &format, "2M");
        change(&folder, &options(), |lane| {
            for at in 0..64 {
                lane.write(at * 32768, &[at as u8 + 1; 16384]);
                lane.write(at * 32768 + 16384 + 512 * (at % 30), &[at as u8 + 1; 1024]);
                lane.write_zeroes(at * 32768 + 16384 + 8192, 512, true);
            }
            lane.flush();
            lane.discard(0, 1 << 20);
        });
        compact_wholly(&folder, &format!("backing {backing}"));
    }
}

#[test]
fn compaction_encrypts_clusters_for_their_new_places() {
    let folder = Folder::new();
    folder.create_encrypted(IMAGE, "cluster_size=4k", "4M");
    let open = OpenOptions {
        secret: secret(),
        ..options()
    };
    fill(&folder, &open, Pattern::Scattered, 1024, 4096);
    let compacted = compact_wholly(&folder, SECRET);
    assert!(compacted.moved_bytes > 256 << 10, "{compacted:?}");
    let locked = compact_image(&folder.path(IMAGE), None, &CompactOptions::default(), |_| {
        ControlFlow::Continue(())
    });
    assert!(matches!(locked, Err(ChangeError::Change(CompactError::Locked))));
}

/// Only tables are in the image: they move to where a bitmap was.
#[test]
fn compaction_moves_the_tables_of_an_image_with_a_data_file() {
    let folder = Folder::new();
    folder.qemu_create(IMAGE, "cluster_size=512,data_file=data.raw", "4M");
    folder.qemu_img(&["bitmap", "--add", "--disable", IMAGE, "b0"]);
    change(&folder, &options(), |lane| {
        for at in 0..128 {
            lane.write(at * 32768, &[at as u8 + 1; 512]);
        }
    });
    folder.qemu_img(&["bitmap", "--remove", IMAGE, "b0"]);
    let data = || std::fs::read(folder.path("data.raw")).expect("a data file");
    let before = data();
    let compacted = compact_wholly(&folder, "data file");
    assert!(compacted.moved_bytes > 0);
    assert!(data() == before, "the data file has changed");
}

/// Bitmaps that lie at the end of the file move with their bits, which are QEMU's and ours, also those of one that is in use since a
/// crash.
#[test]
fn compaction_moves_bitmaps_with_their_bits() {
    for (format, size, clusters) in [
        ("cluster_size=512", 512, 8000),
        ("cluster_size=4k", 4096, 1024),
        ("cluster_size=64k,refcount_bits=1", 65536, 64),
    ] {
        let folder = Folder::new();
        folder.qemu_create(IMAGE, format, &(size * clusters).to_string());
        fill(&folder, &options(), Pattern::End, clusters, size);
        for (name, more) in [("b0", None), ("b1", Some("--disable")), ("old", None)] {
            let granularity = ["--granularity", "512", IMAGE, name];
            folder.qemu_img(&[&["bitmap", "--add"], more.as_slice(), &granularity].concat());
        }
        fill(&folder, &options(), Pattern::Start, clusters, size);
        folder.qemu_img(&["bitmap", "--disable", IMAGE, "b0"]);
        let image = || std::fs::read(folder.path(IMAGE)).expect("an image");
        let mut crashed = image();
        let (at, _) = entries(&crashed)[2];
        crashed[at + BITMAP_FLAGS_AT + 3] |= BitmapFlags::IN_USE.bits() as u8;
        std::fs::write(folder.path(IMAGE), &crashed).expect("an image");
        let before = bitmaps(&crashed);
        assert!(before["b0"].bits.contains(&true) && !before["b1"].bits.contains(&true));
        assert!(before["old"].flags.contains(BitmapFlags::IN_USE));
        compact_wholly(&folder, format);
        assert!(bitmaps(&image()) == before, "{format}: the bitmaps have changed");
    }
}

/// The bits of a bitmap that records changes are in memory, or are written in place: it stays where it is.
#[test]
fn compaction_leaves_bitmaps_of_a_guest_that_writes_where_they_are() {
    for storage in [BitmapStorage::Close, BitmapStorage::Durable] {
        let folder = Folder::new();
        folder.qemu_create(IMAGE, "cluster_size=4k", "4M");
        fill(&folder, &options(), Pattern::End, 1024, 4096);
        folder.qemu_img(&["bitmap", "--add", "--granularity", "512", IMAGE, "b0"]);
        fill(&folder, &options(), Pattern::Start, 1024, 4096);
        let options = OpenOptions {
            bitmaps: storage,
            ..options()
        };
        let disk = open(&folder.path(IMAGE), &options);
        let lane = Lane::new(&disk, RingKind::Syscalls);
        lane.write(3 << 20, &[7; 4096]);
        lane.flush();
        lane.settle();
        let cx = Context::syscalls();
        let options = CompactOptions::default();
        let compact = disk.compact(&cx, &options, |_| ControlFlow::Continue(()));
        let compacted = cx.block_on(compact).expect("it turns").expect("a compaction");
        lane.write(3 << 20, &[8; 4096]);
        lane.flush();
        lane.settle();
        drop(lane);
        close(disk);
        let fixed = compacted.fixed.iter().map(|fixed| fixed.reason);
        assert!(fixed.eq([Fixed::Bitmaps]), "{storage:?}: {compacted:?}");
        folder.assert_flawless(IMAGE, false);
        let found = bitmaps(&std::fs::read(folder.path(IMAGE)).expect("an image"));
        assert!(!found["b0"].flags.contains(BitmapFlags::IN_USE) && found["b0"].bits[(3 << 20) / 512]);
    }
}

/// Clusters that were only allocated stay holes of the file.
#[test]
fn compaction_writes_no_zeros_into_holes() {
    let folder = Folder::new();
    folder.qemu_create(IMAGE, "cluster_size=64k,preallocation=metadata", "64M");
    change(&folder, &options(), |lane| lane.discard(0, 32 << 20));
    let before = space(&folder);
    compact_wholly(&folder, "holes");
    assert!(
        space(&folder) <= before + (1 << 20),
        "{} of {before}",
        space(&folder)
    );
}

/// Clusters that a step has left are freed before the next one begins, and the file never becomes longer.
#[test]
fn compaction_takes_the_space_of_one_step_more_at_most() {
    let folder = Folder::new();
    folder.qemu_create(IMAGE, "cluster_size=64k", "64M");
    fill(&folder, &options(), Pattern::Start, 1024, 65536);
    let (most, long) = (space(&folder) + (9 << 20), len(&folder));
    let mut steps = 0;
    let compacted = compact_image(&folder.path(IMAGE), None, &CompactOptions::default(), |_| {
        steps += 1;
        assert!(space(&folder) <= most, "{} of {most}", space(&folder));
        assert!(len(&folder) <= long);
        ControlFlow::Continue(())
    });
    assert!(compacted.expect("a compaction").moved_bytes > 30 << 20 && steps > 4);
}

/// An interrupted compaction leaves a sound image, and the next ones go on with what is left.
#[test]
fn interrupted_compactions_add_up_to_a_whole_one() {
    let folder = Folder::new();
    folder.qemu_create(IMAGE, "cluster_size=64k", "64M");
    fill(&folder, &options(), Pattern::Start, 1024, 65536);
    let before = folder.qemu_reads(IMAGE);
    let (mut moved, mut rounds) = (0, 0);
    loop {
        let mut steps = 0;
        let compacted = compact_image(
            &folder.path(IMAGE),
            None,
            &CompactOptions::default(),
            |progress| {
                steps += u64::from(progress.moved_bytes > 0);
                match steps {
                    0 => ControlFlow::Continue(()),
                    _ => ControlFlow::Break(()),
                }
            },
        );
        let compacted = compacted.expect("a compaction");
        folder.assert_flawless(IMAGE, false);
        assert_same(&folder.qemu_reads(IMAGE), &before, "interrupted");
        moved += compacted.moved_bytes;
        rounds += 1;
        if !compacted.is_stopped {
            break;
        }
        assert!(
            compacted.moved_bytes <= 9 << 20,
            "more than one step: {compacted:?}"
        );
    }
    assert!(rounds >= 4, "{rounds} rounds");
    let (_, ideal) = used(&std::fs::read(folder.path(IMAGE)).expect("an image"));
    assert_eq!(len(&folder), ideal);
    assert!(moved < 33 << 20, "{moved} bytes moved, some of them twice");
}

#[test]
fn rate_limits_the_bytes_that_move_in_a_second() {
    let folder = Folder::new();
    folder.qemu_create(IMAGE, "cluster_size=4k", "1M");
    fill(&folder, &options(), Pattern::Start, 256, 4096);
    let rate = CompactOptions {
        rate: Some(512 << 10),
    };
    let (began, mut most, mut last) = (Instant::now(), 0, 0);
    let compacted = compact_image(&folder.path(IMAGE), None, &rate, |progress| {
        most = most.max(progress.moved_bytes - last);
        last = progress.moved_bytes;
        ControlFlow::Continue(())
    });
    let compacted = compacted.expect("a compaction");
    assert!(compacted.moved_bytes > 400 << 10, "{compacted:?}");
    assert!(
        began.elapsed() > Duration::from_millis(700),
        "{:?}",
        began.elapsed()
    );
    assert!(most <= 64 << 10, "{most} bytes in a step");
}

/// A cluster that is in use and counts zero would be overwritten, or cut off.
#[test]
fn compaction_refuses_an_image_with_errors() {
    let folder = Folder::new();
    folder.qemu_create(IMAGE, "cluster_size=64k", "4M");
    fill(&folder, &options(), Pattern::Start, 64, 65536);
    let path = folder.path(IMAGE);
    let block = crate::common::u64_at(&path, crate::common::u64_at(&path, 48));
    // The last cluster of the file.
    let last = len(&folder) / 65536 - 1;
    crate::common::patch(&path, block + last * 2, &[0, 0]);
    let before = std::fs::read(&path).expect("an image");
    let refused = try_compact(&path);
    assert!(
        matches!(
            &refused,
            Err(ChangeError::Change(CompactError::Unsound(
                UnsoundError::Errors { .. }
            )))
        ),
        "{refused:?}"
    );
    assert!(
        before == std::fs::read(&path).expect("an image"),
        "it was changed"
    );
}
