//! Changes of persistent bitmaps of a closed image, beside `qemu-img bitmap`: the same bits, flags and verdicts; and damaged
//! directories and tables, from which nothing is freed that something else uses.

use std::path::Path;

use crate::bitmap_bits::{bitmaps, entries};
use crate::common::{Folder, OFFSET_MASK, chain, close, open, patch, u64_at};
use block::Context;
use qcow::offline::change_bitmap;
use qcow::{BitmapChange, OpenOptions};
use ringdisk_gen::Random;

fn change(path: &Path, name: &str, change: &BitmapChange) {
    if let Err(error) = change_bitmap(path, name, change) {
        panic!("{name} {change:?}: {}", chain(&error));
    }
}

fn refused(path: &Path, name: &str, what: &BitmapChange, said: &str) {
    let before = std::fs::read(path).expect("the image");
    let error = change_bitmap(path, name, what).expect_err("a refusal");
    let error = chain(&error);
    assert!(error.contains(said), "{name} {what:?}: {error}");
    assert_eq!(
        bitmaps_safe(&before),
        bitmaps_safe(&std::fs::read(path).expect("the image")),
        "nothing has changed"
    );
}

/// The directory as it is, whatever the tables are.
fn bitmaps_safe(image: &[u8]) -> Vec<Vec<u8>> {
    let entries = entries(image).into_iter();
    entries
        .map(|(_, entry)| format!("{entry:?}").into_bytes())
        .collect()
}

fn add(granularity: Option<u64>, enabled: bool) -> BitmapChange {
    BitmapChange::Add { granularity, enabled }
}

fn merge(source: &str) -> BitmapChange {
    BitmapChange::Merge {
        source: source.to_owned(),
    }
}

/// Each change of ours on one copy, `qemu-img`'s on the other: the same bitmaps, and no leak, after each.
#[test]
fn changes_are_those_of_qemu() {
    for seed in 0..10 {
        let random = &mut Random::new(seed);
        let folder = Folder::new();
        // Bitmaps of several clusters of data.
        let (cluster, size) =
            random.pick(&[(512, 6_000_128_u64), (4096, 40 << 20), (65536, (1 << 30) + 512)]);
        let size = size & !511;
        let mut options = format!(
            "cluster_size={cluster},refcount_bits={}",
            random.pick(&[1, 16, 64])
        );
        if cluster > 512 && random.one_in(2) {
            folder.run("truncate", &["-s", "1M", "base.raw"]);
            options += ",backing_fmt=raw,backing_file=base.raw";
        }
        folder.qemu_create("ours.qcow2", &options, &size.to_string());
        std::fs::copy(folder.path("ours.qcow2"), folder.path("theirs.qcow2")).expect("a copy");
        let path = folder.path("ours.qcow2");
        let granularities = [512, 1024, 4096, 65536, 1 << 20, 1 << 31];
        let mut names: Vec<String> = Vec::new();
        for round in 0..24 {
            let (what, theirs): (BitmapChange, Vec<String>);
            let mut name = format!("b{round}");
            let kind = if names.len() < 2 { 0 } else { random.below(10) };
            if kind <= 2 {
                let granularity = Some(random.pick(&granularities)).filter(|_| random.below(4) > 0);
                let enabled = random.below(4) > 0;
                what = add(granularity, enabled);
                let mut arguments = vec!["--add".to_owned()];
                arguments.extend(
                    granularity
                        .into_iter()
                        .flat_map(|bytes| ["-g".to_owned(), bytes.to_string()]),
                );
                arguments.extend((!enabled).then(|| "--disable".to_owned()));
                theirs = arguments;
                names.push(name.clone());
            } else {
                let index = random.below(names.len() as u64) as usize;
                name = names[index].clone();
                let source = names[random.below(names.len() as u64) as usize].clone();
                (what, theirs) = match kind {
                    3 => (BitmapChange::Remove, vec!["--remove".to_owned()]),
                    4 => (BitmapChange::Clear, vec!["--clear".to_owned()]),
                    5 => (BitmapChange::Enable, vec!["--enable".to_owned()]),
                    6 => (BitmapChange::Disable, vec!["--disable".to_owned()]),
                    _ => (merge(&source), vec!["--merge".to_owned(), source]),
                };
                if kind == 3 {
                    names.remove(index);
                }
            }
            change(&path, &name, &what);
            let mut arguments = vec!["bitmap"];
            arguments.extend(theirs.iter().map(String::as_str));
            arguments.extend(["-f", "qcow2", "theirs.qcow2", &name]);
            folder.qemu_img(&arguments);
            folder.assert_flawless("ours.qcow2", false);
            // Both get the same bits, from QEMU.
            let places: Vec<(u64, u64)> = (0..random.below(4))
                .map(|_| {
                    let most = random.pick(&[1, 100, 4000]);
                    let len = 512 * (1 + random.below(most));
                    (512 * random.below((size - len) / 512 + 1), len)
                })
                .collect();
            for image in ["ours.qcow2", "theirs.qcow2"] {
                let commands: Vec<String> = places
                    .iter()
                    .map(|(at, len)| format!("write -q -z {at} {len}"))
                    .collect();
                let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
                if !commands.is_empty() {
                    folder.qemu_io("qcow2", image, &commands);
                }
            }
            let [ours, theirs] = ["ours.qcow2", "theirs.qcow2"]
                .map(|name| bitmaps(&std::fs::read(folder.path(name)).expect("an image")));
            assert!(ours == theirs, "seed {seed}, round {round}: {name} {what:?}");
        }
        for name in names.drain(..) {
            change(&path, &name, &BitmapChange::Remove);
        }
        folder.assert_flawless("ours.qcow2", false);
        assert!(bitmaps(&std::fs::read(&path).expect("an image")).is_empty());
    }
}

#[test]
fn refused_changes_leave_the_bitmaps_as_they_were() {
    let folder = Folder::new();
    folder.qemu_create("disk.qcow2", "", "4T");
    let path = folder.path("disk.qcow2");
    change(&path, "a", &add(None, true));
    change(&path, "b", &add(None, true));
    refused(&path, "a", &add(None, true), "already");
    refused(
        &path,
        "none",
        &BitmapChange::Remove,
        "there is no bitmap \"none\"",
    );
    refused(&path, "a", &merge("none"), "there is no bitmap \"none\"");
    refused(&path, "", &BitmapChange::Clear, "0 bytes");
    refused(&path, &"n".repeat(1024), &add(None, true), "1024 bytes");
    change(&path, &"n".repeat(1023), &add(None, true));
    for bytes in [0, 256, 513, 1 << 32] {
        refused(&path, "c", &add(Some(bytes), true), "power of two");
    }
    refused(&path, "c", &add(Some(4096), true), "larger granularity");
    // As a crashed writer leaves it.
    let image = std::fs::read(&path).expect("the image");
    let (at, _) = entries(&image)[0];
    patch(&path, at as u64 + 12, &3_u32.to_be_bytes());
    for what in [
        BitmapChange::Clear,
        BitmapChange::Enable,
        BitmapChange::Disable,
        merge("b"),
    ] {
        refused(&path, "a", &what, "in use");
    }
    refused(&path, "b", &merge("a"), "in use");
    change(&path, "a", &BitmapChange::Remove);
    folder.assert_flawless("disk.qcow2", false);

    folder.qemu_create("old.qcow2", "compat=0.10", "1M");
    refused(&folder.path("old.qcow2"), "a", &add(None, true), "version 2");
}

/// An image of two bitmaps with a cluster of data each, and the offsets of their entries and tables.
fn damaged(folder: &Folder) -> (std::path::PathBuf, [(u64, u64); 2]) {
    folder.qemu_create("disk.qcow2", "", "1M");
    let path = folder.path("disk.qcow2");
    change(&path, "a", &add(None, true));
    change(&path, "b", &add(None, true));
    folder.qemu_io("qcow2", "disk.qcow2", &["write -P 1 0 64k"]);
    let found = entries(&std::fs::read(&path).expect("the image"));
    let place = |index: usize| (found[index].0 as u64, found[index].1.table_offset.bytes());
    (path, [place(0), place(1)])
}

/// Tries a change as an embedder of a served disk does: the image is not checked.
fn refused_by_engine(path: &Path, name: &str, what: &BitmapChange, said: &str) {
    let disk = open(path, &OpenOptions::default());
    let cx = Context::syscalls();
    let changed = cx
        .block_on(disk.change_bitmap(&cx, name, what))
        .expect("it turns");
    let error = chain(&changed.expect_err("a refusal"));
    assert!(error.contains(said), "{name} {what:?}: {error}");
    close(disk);
}

#[test]
fn damage_frees_nothing_that_something_else_uses() {
    for what in [BitmapChange::Remove, BitmapChange::Clear] {
        // Two entries lead to one table: such an image does not open for writing.
        let folder = Folder::new();
        let (path, [(a, table), (b, _)]) = damaged(&folder);
        patch(&path, b, &table.to_be_bytes());
        refused(&path, "a", &what, "lies over");
        refused(&path, "b", &what, "lies over");
        // A table is the directory.
        let directory = a & !0xFFFF;
        patch(&path, b, &directory.to_be_bytes());
        refused(&path, "b", &what, "lies over");

        // Two tables lead to one cluster of data.
        let folder = Folder::new();
        let (path, [(_, a), (_, b)]) = damaged(&folder);
        let data = u64_at(&path, a);
        assert!(data > 1, "a cluster of data");
        patch(&path, b, &data.to_be_bytes());
        refused_by_engine(&path, "a", &what, "more references");
        // One leads to a structure, one past the end.
        for wrong in [0x1_0000_u64, 0x2_0000, 1 << 40] {
            patch(&path, b, &wrong.to_be_bytes());
            refused_by_engine(&path, "b", &what, "damaged");
        }
    }
}

/// Removal of a damaged bitmap frees nothing: its table leads to another's clusters, or to unknown ones.
#[test]
fn damaged_bitmap_is_removed_alone() {
    let folder = Folder::new();
    let (path, [(_, a), (_, b)]) = damaged(&folder);
    let sound = std::fs::read(&path).expect("the image");
    let first_entry = u64_at(&path, folder.first_table("disk.qcow2")) & OFFSET_MASK;
    let malformed = u64_at(&path, b) | 2;
    for wrong in [first_entry, u64_at(&path, a), 0x1_0000, 1 << 40, malformed] {
        std::fs::write(&path, &sound).expect("the image");
        patch(&path, b, &wrong.to_be_bytes());
        for what in [
            BitmapChange::Clear,
            BitmapChange::Disable,
            merge("a"),
            add(None, true),
        ] {
            refused(&path, "b", &what, "the check of the image found");
        }
        change(&path, "b", &BitmapChange::Remove);
        folder.assert_flawless("disk.qcow2", true);
        let left = bitmaps(&std::fs::read(&path).expect("the image"));
        assert_eq!(left.len(), 1, "{wrong:#x}");
        // Clusters that were freed would be used for these.
        folder.qemu_io("qcow2", "disk.qcow2", &["write -P 2 64k 512k", "read -P 1 0 64k"]);
        folder.assert_flawless("disk.qcow2", true);
    }
}
