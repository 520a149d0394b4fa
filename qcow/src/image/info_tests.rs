//! Descriptions, compared with `qemu-img info`'s.

use serde_json::Value;

use super::bitmaps::{consistent_bitmaps, for_each_bitmap};
use super::testing::World;
use super::*;
use crate::format::bitmap::BITMAP_FLAGS_AT;
use crate::format::{BitmapDirectoryEntry, BitmapFlags};
use block::AlignedBuf;

fn ours(world: &World, name: &str) -> Value {
    let info = world.on(name, async |file| info(&file).await.unwrap());
    serde_json::to_value(info).unwrap()
}

/// Compares everything QEMU tells about the image (not about the file it is in) with ours.
fn assert_agrees(world: &World, name: &str) {
    let theirs = world.qemu_img(&["info", "--output=json", name]);
    let theirs: Value = serde_json::from_str(&theirs).unwrap();
    let ours = ours(world, name);
    for (key, theirs) in theirs.as_object().unwrap() {
        let ours = &ours[key];
        match key.as_str() {
            "children" => {}
            "filename" | "full-backing-filename" => {
                assert!(
                    ours.as_str().unwrap().ends_with(theirs.as_str().unwrap()),
                    "{key}"
                );
            }
            _ => assert_eq!(ours, theirs, "{key}"),
        }
    }
}

#[test]
fn info_describes_images_as_qemu_does() {
    let world = World::new();
    let create = |name: &str, options: &str| {
        world.qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, name, "16M"]);
        assert_agrees(&world, name);
    };
    create("plain.qcow2", "cluster_size=64k");
    create("old.qcow2", "compat=0.10");
    create("lazy.qcow2", "lazy_refcounts=on,refcount_bits=1,cluster_size=512");
    create("zstd.qcow2", "compression_type=zstd");
    create("extended.qcow2", "extended_l2=on");
    create("over.qcow2", "backing_file=plain.qcow2,backing_fmt=qcow2");
    create("external.qcow2", "data_file=data.raw,data_file_raw=on");
}

#[test]
fn info_lists_snapshots_and_bitmaps_as_qemu_does() {
    let world = World::new();
    world.qemu_img(&["create", "-q", "-f", "qcow2", "disk.qcow2", "16M"]);
    for name in ["first", "the second"] {
        world.qemu_io("disk.qcow2", &["write 0 1M"]);
        world.qemu_img(&["snapshot", "-c", name, "disk.qcow2"]);
        world.qemu_img(&["bitmap", "--add", "disk.qcow2", name]);
    }
    assert_agrees(&world, "disk.qcow2");
    world.on("disk.qcow2", async |file| {
        let located = read_header(&file).await;
        let Located { header, file_len } = located.expect("a header");
        let extension = consistent_bitmaps(&header).expect("bitmaps");
        let mut found = Vec::new();
        let each = |at, entry: BitmapDirectoryEntry| found.push((at, entry.flags));
        let read = for_each_bitmap(&file, &header, &extension, file_len, each).await;
        read.expect("a sound directory");
        assert_eq!(found.len(), 2);
        for (at, flags) in found {
            assert!(flags.contains(BitmapFlags::AUTO), "{flags:?}");
            let flags = (flags | BitmapFlags::IN_USE).bits().to_be_bytes();
            let written = file.write_at(at + BITMAP_FLAGS_AT as u64, AlignedBuf::from_slice(&flags));
            written.await.unwrap();
        }
    });
    world.assert_flawless("disk.qcow2");
    assert_agrees(&world, "disk.qcow2");
    let told = ours(&world, "disk.qcow2");
    let bitmaps = told["format-specific"]["data"]["bitmaps"].as_array().unwrap();
    assert_eq!(bitmaps.len(), 2);
    assert!(
        bitmaps.iter().all(|bitmap| bitmap["flags"][0] == "in-use"),
        "{bitmaps:?}"
    );
}

#[test]
fn info_describes_encrypted_image() {
    let world = World::new();
    let secret = "secret,id=key,data=hunter2";
    let options = "encrypt.format=luks,encrypt.key-secret=key,encrypt.iter-time=10";
    world.qemu_img(&[
        "create",
        "-q",
        "--object",
        secret,
        "-f",
        "qcow2",
        "-o",
        options,
        "luks.qcow2",
        "16M",
    ]);
    assert_agrees(&world, "luks.qcow2");
    let told = ours(&world, "luks.qcow2");
    assert_eq!(told["encrypted"], true);
    assert!(told["unsupported"].is_null(), "{told}");
    let report = world.on("luks.qcow2", async |file| check(&file).await.unwrap());
    assert_eq!(report.verdict(), Verdict::Clean, "{:?}", report.findings);
}

#[test]
fn info_refuses_a_file_that_is_no_image() {
    let world = World::new();
    std::fs::write(world.path("text"), "hello, this is no image").unwrap();
    let error = world.on("text", async |file| info(&file).await.unwrap_err());
    assert!(error.to_string().contains("not a QCOW2 image"), "{error}");
}
