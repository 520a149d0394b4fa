//! Images with a LUKS header: made by us and read by QEMU, and the other way round; changes of keys; malformed places.

use std::time::Duration;

use super::testing::World;
use super::*;
use crate::format::Version;
use crate::luks::{self, LuksError, LuksOptions, Removal, Secret};

const FAST: Duration = Duration::from_millis(1);
const IMAGE: &str = "driver=qcow2,encrypt.key-secret=key,file.filename=disk";

fn secret(text: &str) -> Secret {
    Secret::new(text.as_bytes().to_vec())
}

/// Options of an image that the secret `one` opens.
fn options(size: u64) -> CreateOptions {
    let fast = LuksOptions {
        iter_time: FAST,
        ..LuksOptions::default()
    };
    let (header, _) = luks::create(&secret("one"), &fast).unwrap();
    CreateOptions {
        luks_header: Some(header),
        ..CreateOptions::new(size)
    }
}

/// Runs a command of `qemu-io` on the disk with a secret; false if the secret does not open it.
fn qemu_opens(world: &World, secret: &str, command: &str) -> bool {
    let object = format!("secret,id=key,data={secret}");
    let output = world.tool(
        "qemu-io",
        &["--object", &object, "--image-opts", IMAGE, "-c", command],
    );
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    if text.contains("Invalid password") {
        return false;
    }
    assert!(output.status.success() && !text.contains("failed"), "{text}");
    true
}

/// Has `qemu-img check`, which needs a secret, look at the disk.
#[track_caller]
fn assert_flawless(world: &World, secret: &str) {
    let object = format!("secret,id=key,data={secret}");
    let output = world.tool("qemu-img", &["check", "--object", &object, "--image-opts", IMAGE]);
    assert!(output.status.success(), "{output:?}");
}

fn make_by_qemu(world: &World) {
    let secret = "secret,id=key,data=one";
    let luks = "encrypt.format=luks,encrypt.key-secret=key,encrypt.iter-time=10";
    world.qemu_img(&[
        "create", "-q", "--object", secret, "-f", "qcow2", "-o", luks, "disk", "4M",
    ]);
}

#[test]
fn images_of_every_shape_are_flawless_and_qemu_reads_and_writes_them() {
    for (version, cluster_size, refcount_bits, extended_l2) in [
        (Version::V3, 65536, 16, false),
        (Version::V3, 512, 1, false),
        (Version::V3, 2 << 20, 64, true),
        (Version::V2, 4096, 16, false),
    ] {
        let world = World::new();
        let options = CreateOptions {
            version,
            cluster_size,
            refcount_bits,
            extended_l2,
            ..options(4 << 20)
        };
        let header = world.on("disk", async |file| create(&file, &options).await.unwrap());
        let (offset, len) = header.crypto_header().unwrap();
        assert_eq!(len, options.luks_header.as_ref().unwrap().len() as u64);
        let bytes = std::fs::read(world.path("disk")).unwrap();
        let clusters = (len.next_multiple_of(cluster_size) - len) as usize;
        let rest = &bytes[(offset.bytes() + len) as usize..][..clusters];
        assert!(rest.iter().all(|&byte| byte == 0), "the rest of the clusters");

        assert_flawless(&world, "one");
        let report = world.on("disk", async |file| check(&file).await.unwrap());
        assert_eq!(report.verdict(), Verdict::Clean, "{:?}", report.findings);
        assert!(qemu_opens(&world, "one", "write -P 7 1M 64k"));
        assert!(qemu_opens(&world, "one", "read -P 7 1M 64k"));
        assert!(!qemu_opens(&world, "two", "read 0 512"));
        assert_flawless(&world, "one");
    }
}

#[test]
fn options_that_encryption_does_not_go_with_are_refused_before_a_write() {
    let data = NewDataFile {
        name: "data".to_owned(),
        raw: false,
        keep: false,
    };
    let cases = [
        (
            CreateOptions {
                preallocation: Preallocation::Metadata,
                ..options(1 << 20)
            },
            "preallocation=metadata: expected off with encryption",
        ),
        (
            CreateOptions {
                luks_header: Some(vec![0; 4096]),
                ..options(1 << 20)
            },
            "encrypt.format=luks: expected a sound header",
        ),
    ];
    for (options, expected) in cases {
        let world = World::new();
        let error = world.on("disk", async |file| create(&file, &options).await.unwrap_err());
        assert!(error.to_string().contains(expected), "{error}");
        assert_eq!(std::fs::read(world.path("disk")).unwrap(), b"");
    }
    let world = World::new();
    let options = CreateOptions {
        data_file: Some(data),
        ..options(1 << 20)
    };
    let error = world.on("disk", async |file| {
        create_with_data_file(&file, &file, &options).await.unwrap_err()
    });
    assert!(
        error
            .to_string()
            .contains("data_file=data: expected none with encryption"),
        "{error}"
    );
}

#[test]
fn keys_that_we_add_and_remove_are_qemus_too() {
    let world = World::new();
    make_by_qemu(&world);
    assert!(qemu_opens(&world, "one", "write -P 9 0 64k"));
    let add = |slot| {
        world.on("disk", async move |file| {
            add_key(&file, &secret("one"), &secret("two"), slot, FAST).await
        })
    };
    assert_eq!(add(None).unwrap(), 1);
    assert_eq!(add(Some(6)).unwrap(), 6);
    assert!(matches!(
        add(Some(6)),
        Err(KeysError::Luks(LuksError::SlotInUse { slot: 6 }))
    ));
    assert!(qemu_opens(&world, "two", "read -P 9 0 64k"));

    let one = secret("one");
    let removed = world.on("disk", async |file| remove_key(&file, &Removal::Of(&one)).await);
    assert_eq!(removed.unwrap(), 0);
    assert!(!qemu_opens(&world, "one", "read 0 512"));
    assert!(qemu_opens(&world, "two", "read -P 9 0 64k"));
    let two = secret("two");
    for slot in [1, 6] {
        let removed = world.on("disk", async |file| {
            remove_key(&file, &Removal::Slot(slot, &two)).await
        });
        assert_eq!(removed.is_ok(), slot == 1, "{removed:?}");
    }
    let listed = world.on("disk", async |file| list_keys(&file).await.unwrap());
    let used: Vec<bool> = listed.slots.iter().map(|slot| slot.active).collect();
    assert_eq!(used, [false, false, false, false, false, false, true, false]);
    assert_flawless(&world, "two");
}

#[test]
fn keys_that_qemu_adds_and_removes_are_ours_too() {
    let world = World::new();
    world.on("disk", async |file| {
        create(&file, &options(1 << 20)).await.unwrap()
    });
    let objects = [
        "--object",
        "secret,id=key,data=one",
        "--object",
        "secret,id=new,data=two",
    ];
    let amend = |options: &str| {
        world.qemu_img(&[&["amend"], &objects[..], &["--image-opts", "-o", options, IMAGE]].concat());
    };
    amend("encrypt.state=active,encrypt.new-secret=new,encrypt.iter-time=10");
    let opened = |text: &str| {
        world.on("disk", async |file| {
            let located = read_header(&file).await.unwrap();
            let (_, bytes) = keys::read_luks(&file, &located.header, located.file_len)
                .await
                .unwrap();
            luks::unlock(&bytes, &secret(text)).is_ok()
        })
    };
    assert!(opened("one") && opened("two"));
    amend("encrypt.state=inactive,encrypt.old-secret=new");
    assert!(opened("one") && !opened("two"));
}

#[test]
fn place_of_the_luks_header_is_checked() {
    let world = World::new();
    make_by_qemu(&world);
    let bytes = std::fs::read(world.path("disk")).unwrap();
    let kind = 0x0537_be77_u32.to_be_bytes();
    let at = bytes.windows(4).position(|window| window == kind).unwrap() as u64 + 8;
    let (l1, table) = (world.u64_at("disk", 40), world.u64_at("disk", 48));
    let (offset, len) = (world.u64_at("disk", at), world.u64_at("disk", at + 8));
    for (field, value, expected) in [
        (at, 0, "a multiple of 0x10000 behind the image's header"),
        (at, offset + 512, "a multiple of 0x10000"),
        (at, u64::MAX << 16, "an end in the file"),
        (at, 1 << 40, "an end in the file"),
        (at, l1, "the check of the image found"),
        (at, table, "the check of the image found"),
        (at + 8, u64::MAX, "at most 4194304 bytes"),
        (at + 8, 4 << 20, "an end in the file"),
        (at + 8, len - 1, "payload sector"),
        (at + 8, 0, "has 0 bytes"),
    ] {
        world.patch("disk", field, &value.to_be_bytes());
        let before = std::fs::read(world.path("disk")).unwrap();
        let add = async |file| add_key(&file, &secret("one"), &secret("two"), None, FAST).await;
        let error = world.on("disk", add).expect_err(expected);
        assert!(
            error.to_string().contains(expected),
            "{error}; expected {expected}"
        );
        assert!(
            std::fs::read(world.path("disk")).unwrap() == before,
            "the image was changed"
        );
        // It is described all the same.
        let told = world.on("disk", async |file| info(&file).await);
        assert!(told.is_ok_and(|info| info.encrypted), "{expected}");
        world.patch("disk", at, &offset.to_be_bytes());
        world.patch("disk", at + 8, &len.to_be_bytes());
    }
}

#[test]
fn keys_of_images_without_slots_or_marked_corrupt_are_left_alone() {
    let world = World::new();
    let add = async |file: block::file::FileView| {
        let added = add_key(&file, &secret("one"), &secret("two"), None, FAST).await;
        added.unwrap_err().to_string()
    };
    world.on("plain", async |file| {
        create(&file, &CreateOptions::new(1 << 20)).await.unwrap()
    });
    let error = world.on("plain", add);
    assert!(error.contains("no key slots"), "{error}");
    make_by_qemu(&world);
    world.patch("disk", 72, &2_u64.to_be_bytes());
    let error = world.on("disk", add);
    assert!(error.contains("marked as corrupt"), "{error}");
}

/// Repair counts the header's clusters as used.
#[test]
fn repair_keeps_the_luks_header() {
    let world = World::new();
    world.on("disk", async |file| {
        create(&file, &options(1 << 20)).await.unwrap()
    });
    let table = world.u64_at("disk", 48);
    let block = world.u64_at("disk", table);
    let before = std::fs::read(world.path("disk")).unwrap();
    // Every count of the first block is gone.
    world.patch("disk", block, &[0; 4096]);
    world.on("disk", async |file| {
        repair(&file, RepairScope::All).await.unwrap()
    });
    assert_flawless(&world, "one");
    assert!(qemu_opens(&world, "one", "read -P 0 0 1M"));
    let after = std::fs::read(world.path("disk")).unwrap();
    assert_eq!(after.len(), before.len());
}

/// Method: a second LUKS header lies where the guest's data is, or a structure of each kind; its secret opens it.
#[test]
fn keys_are_not_changed_where_something_else_lies() {
    let world = World::new();
    make_by_qemu(&world);
    assert!(qemu_opens(&world, "one", "write -P 9 0 4M"));
    let bytes = std::fs::read(world.path("disk")).unwrap();
    let kind = 0x0537_be77_u32.to_be_bytes();
    let at = bytes.windows(4).position(|window| window == kind).unwrap() as u64 + 8;
    let (offset, len) = (world.u64_at("disk", at), world.u64_at("disk", at + 8));
    let luks = &bytes[offset as usize..][..len as usize];
    let mask = 0x00ff_ffff_ffff_fe00;
    let l2 = world.u64_at("disk", world.u64_at("disk", 40)) & mask;
    let data = world.u64_at("disk", l2) & mask;
    let block = world.u64_at("disk", world.u64_at("disk", 48));
    for (place, count) in [(data, 1_u16), (data, 2), (l2, 1), (block, 1)] {
        std::fs::write(world.path("disk"), &bytes).unwrap();
        world.patch("disk", at, &place.to_be_bytes());
        if place == data {
            // The counts may admit both uses.
            world.patch("disk", place, luks);
            for cluster in place >> 16..(place + len.next_multiple_of(1 << 16)) >> 16 {
                world.patch("disk", block + cluster * 2, &count.to_be_bytes());
            }
        }
        let before = std::fs::read(world.path("disk")).unwrap();
        let add = async |file| add_key(&file, &secret("one"), &secret("two"), None, FAST).await;
        let error = world.on("disk", add).unwrap_err();
        assert!(matches!(error, KeysError::Unsound(_)), "{place:#x}: {error}");
        assert!(std::fs::read(world.path("disk")).unwrap() == before, "{place:#x}");
    }
}
