//! `ringdisk image bitmap` beside `qemu-img`.

use serde_json::Value;

use crate::world::World;

fn bitmap(world: &World, arguments: &[&str]) -> String {
    world
        .ringdisk(&[&["image", "bitmap"][..], arguments].concat())
        .success()
}

/// The bitmaps that `qemu-img` lists.
fn qemu_lists(world: &World) -> Value {
    let info = world
        .qemu("qemu-img", &["info", "--output=json", "a.qcow2"])
        .success();
    let info: Value = serde_json::from_str(&info).expect("JSON");
    info["format-specific"]["data"]["bitmaps"].clone()
}

fn ours(world: &World) -> Value {
    serde_json::from_str(&bitmap(world, &["list", "--json", "a.qcow2"])).expect("JSON")
}

#[test]
fn bitmaps_are_changed_and_listed_as_qemu_sees_them() {
    let world = World::new();
    world.ringdisk(&["image", "create", "a.qcow2", "4M"]).success();
    assert_eq!(ours(&world), serde_json::json!([]));
    bitmap(&world, &["add", "a.qcow2", "monday"]);
    bitmap(
        &world,
        &["add", "--granularity", "4k", "--disabled", "a.qcow2", "tuesday"],
    );
    let expected = serde_json::json!([
        {"name": "monday", "granularity": 65536, "flags": ["auto"]},
        {"name": "tuesday", "granularity": 4096, "flags": []},
    ]);
    assert_eq!((&ours(&world), &qemu_lists(&world)), (&expected, &expected));
    let list = bitmap(&world, &["list", "a.qcow2"]);
    let lines: Vec<Vec<&str>> = list
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(
        lines,
        [
            &["GRANULARITY", "FLAGS", "NAME"][..],
            &["65536", "auto", "monday"],
            &["4096", "tuesday"]
        ]
    );
    bitmap(&world, &["merge", "a.qcow2", "tuesday", "monday"]);
    bitmap(&world, &["enable", "a.qcow2", "tuesday"]);
    bitmap(&world, &["disable", "a.qcow2", "monday"]);
    bitmap(&world, &["clear", "a.qcow2", "tuesday"]);
    world.assert_flawless("a.qcow2");
    let flags: Vec<Value> = (0..2)
        .map(|index| qemu_lists(&world)[index]["flags"].clone())
        .collect();
    assert_eq!(flags, [serde_json::json!([]), serde_json::json!(["auto"])]);

    // A server of ours writes, and keeps it.
    world.io("path=a.qcow2", &["write 0 64k"]).success();
    assert_eq!(ours(&world)[1]["flags"], serde_json::json!(["auto"]));
    // One that crashes does not.
    let image = world.bytes("a.qcow2");
    let name = image.windows(7).rposition(|bytes| bytes == b"tuesday");
    let flags = name.expect("a name") as u64 - 12;
    world.patch("a.qcow2", flags, &3_u32.to_be_bytes());
    assert_eq!(ours(&world)[1]["flags"], serde_json::json!(["in-use", "auto"]));
    let said = world
        .ringdisk(&["image", "bitmap", "clear", "a.qcow2", "tuesday"])
        .refused(1);
    assert!(
        said.starts_with("a.qcow2: ") && said.contains("can only be removed"),
        "{said}"
    );
    bitmap(&world, &["remove", "a.qcow2", "tuesday"]);
    bitmap(&world, &["remove", "a.qcow2", "monday"]);
    assert_eq!(
        (ours(&world), qemu_lists(&world)),
        (serde_json::json!([]), Value::Null)
    );
    world.assert_flawless("a.qcow2");
}

#[test]
fn damaged_directory_is_refused() {
    let world = World::new();
    world.qemu_create("a.qcow2", "cluster_size=64k", "1M");
    bitmap(&world, &["add", "a.qcow2", "monday"]);
    let image = world.bytes("a.qcow2");
    let name = image
        .windows(6)
        .rposition(|bytes| bytes == b"monday")
        .expect("a name");
    // The length of the extra data.
    world.patch("a.qcow2", name as u64 - 4, &[0xFF; 4]);
    let before = world.bytes("a.qcow2");
    for arguments in [
        &["remove", "a.qcow2", "monday"][..],
        &["add", "a.qcow2", "tuesday"],
    ] {
        let ended = world.ringdisk(&[&["image", "bitmap"][..], arguments].concat());
        assert_eq!(ended.code, Some(1), "{ended:?}");
        // A warning says what the first write of a guest would do.
        let said = ended.stderr.lines().last().expect("a line");
        let expected = "bitmap 0: the bitmap directory entry's extra_data_size";
        assert!(
            said.starts_with("ringdisk: a.qcow2: ") && said.contains(expected),
            "{said}"
        );
    }
    assert!(world.bytes("a.qcow2") == before);
}
