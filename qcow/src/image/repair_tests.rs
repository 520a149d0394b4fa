//! Repaired images, judged by QEMU's tools.

use super::testing::World;
use super::*;
use crate::format::header::at;
use crate::format::l1::OFFSET_MASK;
use crate::format::{Header, Incompatible};
use crate::image::check::survey::MEMORY_MAX_BYTES;
use crate::image::repair::repair_within;
use crate::image::repair::writer::record::{self, Step};

/// Bytes of memory for a check or a repair, too few for the maps of a few thousand clusters.
const LITTLE_MEMORY: usize = 4 << 10;

/// An image with data, compressed clusters and a snapshot.
fn build(world: &World, options: &str) -> Header {
    world.qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, "disk.qcow2", "8M"]);
    world.qemu_io(
        "disk.qcow2",
        &["write -P 1 0 1M", "write -P 2 3M 200k", "write -c -P 3 5M 128k"],
    );
    world.qemu_img(&["snapshot", "-c", "before", "disk.qcow2"]);
    world.qemu_io("disk.qcow2", &["write -P 4 64k 128k"]);
    header(world)
}

fn header(world: &World) -> Header {
    world.on("disk.qcow2", async |file| {
        read_header(&file).await.unwrap().header
    })
}

fn assert_contents_kept(world: &World) {
    world.qemu_io(
        "disk.qcow2",
        &[
            "read -P 1 0 64k",
            "read -P 4 64k 128k",
            "read -P 2 3M 200k",
            "read -P 3 5M 128k",
            "read -P 0 6M 2M",
        ],
    );
    world.qemu_img(&["snapshot", "-a", "before", "disk.qcow2"]);
    world.qemu_io(
        "disk.qcow2",
        &["read -P 1 0 1M", "read -P 2 3M 200k", "read -P 3 5M 128k"],
    );
    world.assert_flawless("disk.qcow2");
}

const LAYOUTS: [&str; 6] = [
    "cluster_size=64k",
    "cluster_size=512",
    "cluster_size=4k,refcount_bits=64",
    "cluster_size=64k,refcount_bits=4",
    "cluster_size=64k,compat=0.10",
    "cluster_size=64k,extended_l2=on",
];

/// Every writer must clear an unknown autoclear bit. The clusters of its feature look leaked and are freed, and a bit
/// that stays set would vouch for them. It is cleared before anything else is written.
#[test]
fn repair_clears_unknown_autoclear_bits_first() {
    for (scope, spoil) in [
        (RepairScope::Leaks, false),
        (RepairScope::All, false),
        (RepairScope::All, true),
    ] {
        let world = World::new();
        let header = build(&world, "cluster_size=64k");
        world.qemu_img(&["bitmap", "--add", "disk.qcow2", "bitmap"]);
        let path = world.path("disk.qcow2");
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[at::AUTOCLEAR_FEATURES] = 0x80;
        let block = |bytes: &[u8], at: u64| {
            u64::from_be_bytes(*bytes[at as usize..].first_chunk::<8>().unwrap()) as usize
        };
        let table = header.refcount_table_offset.bytes();
        let counts = block(&bytes, table);
        // The last cluster there is, and one more: a leak.
        let clusters = bytes.len().div_ceil(65536);
        bytes.resize((clusters + 1) * 65536, 0);
        bytes[counts + clusters * 2 + 1] = 1;
        if spoil {
            // Not the place of a refcount block: all counts are written anew.
            bytes[table as usize + 7] = 0x01;
        }
        std::fs::write(&path, &bytes).unwrap();
        record::take();
        let report = world.on("disk.qcow2", async |file| repair(&file, scope).await.unwrap());
        assert_eq!(report.after.verdict(), Verdict::Clean, "{:?}", report.after);
        let after = std::fs::read(&path).unwrap();
        assert_eq!(&after[at::AUTOCLEAR_FEATURES..][..8], [0, 0, 0, 0, 0, 0, 0, 1]);
        let steps = record::take();
        let is_cleared =
            |step: &Step| matches!(step, Step::Write(0, sector) if sector[at::AUTOCLEAR_FEATURES] == 0);
        let [Step::Sync, cleared, Step::Sync, ..] = &steps[..] else {
            panic!("{steps:?}")
        };
        assert!(is_cleared(cleared), "{cleared:?}");
        world.assert_flawless("disk.qcow2");
    }
}

#[test]
fn repair_rebuilds_lost_refcounts_and_keeps_contents() {
    for options in LAYOUTS {
        let world = World::new();
        let header = build(&world, options);
        let block = world.u64_at("disk.qcow2", header.refcount_table_offset.bytes());
        let zeros = vec![0; header.cluster_bits.size() as usize];
        world.patch("disk.qcow2", block, &zeros);
        assert_eq!(world.qemu_check("disk.qcow2").0, 2, "{options}");
        let report = world.on("disk.qcow2", async |file| {
            repair(&file, RepairScope::All).await.unwrap()
        });
        assert_eq!(
            (report.before.verdict(), report.after.verdict()),
            (Verdict::Corrupt, Verdict::Clean)
        );
        world.assert_flawless("disk.qcow2");
        assert_contents_kept(&world);
    }
}

#[test]
fn repair_replaces_garbage_or_missing_refcount_table() {
    let world = World::new();
    let table = build(&world, "cluster_size=64k").refcount_table_offset.bytes();
    world.patch("disk.qcow2", table, &[0xff; 4096]);
    world.on("disk.qcow2", async |file| {
        repair(&file, RepairScope::All).await.unwrap()
    });
    world.assert_flawless("disk.qcow2");
    world.patch("disk.qcow2", at::REFCOUNT_TABLE_CLUSTERS as u64, &[0; 4]);
    world.on("disk.qcow2", async |file| {
        repair(&file, RepairScope::All).await.unwrap()
    });
    world.assert_flawless("disk.qcow2");
    assert_contents_kept(&world);
}

#[test]
fn repair_frees_leaks() {
    let world = World::new();
    let header = build(&world, "cluster_size=64k");
    let l2 = world.u64_at("disk.qcow2", header.l1_offset.bytes()) & OFFSET_MASK;
    world.patch("disk.qcow2", l2 + 8, &[0; 8]);
    assert_eq!(world.qemu_check("disk.qcow2").0, 3);
    let report = world.on("disk.qcow2", async |file| {
        repair(&file, RepairScope::All).await.unwrap()
    });
    assert_eq!(
        (report.before.verdict(), report.before.leaks),
        (Verdict::Leaks, 1)
    );
    assert_eq!(report.after.verdict(), Verdict::Clean);
    world.assert_flawless("disk.qcow2");
}

#[test]
fn repair_corrects_copied_flags() {
    let world = World::new();
    let header = build(&world, "cluster_size=64k");
    let l1_at = header.l1_offset.bytes();
    let l1 = world.u64_at("disk.qcow2", l1_at);
    let l2 = l1 & OFFSET_MASK;
    world.patch("disk.qcow2", l1_at, &(l1 ^ 1 << 63).to_be_bytes());
    for entry in [0, 1, 2, 48] {
        let raw = world.u64_at("disk.qcow2", l2 + entry * 8);
        world.patch("disk.qcow2", l2 + entry * 8, &(raw ^ 1 << 63).to_be_bytes());
    }
    let compressed = world.u64_at("disk.qcow2", l2 + 80 * 8);
    assert_ne!(compressed & 1 << 62, 0);
    world.patch("disk.qcow2", l2 + 80 * 8, &(compressed | 1 << 63).to_be_bytes());
    assert_eq!(world.qemu_check("disk.qcow2").0, 2);
    world.on("disk.qcow2", async |file| {
        repair(&file, RepairScope::All).await.unwrap()
    });
    world.assert_flawless("disk.qcow2");
    assert_contents_kept(&world);
}

/// Such a bitmap means nothing to readers, and is an error to QEMU's check. Other wrong bitmaps leave open what the guest
/// has there: nothing is written then.
#[test]
fn repair_clears_bitmap_of_compressed_cluster_alone() {
    let world = World::new();
    let header = build(&world, "cluster_size=64k,extended_l2=on");
    let l2 = world.u64_at("disk.qcow2", header.l1_offset.bytes()) & OFFSET_MASK;
    let (compressed, data) = (l2 + 80 * 16, l2 + 16);
    assert_ne!(world.u64_at("disk.qcow2", compressed) & 1 << 62, 0);
    let bitmap = world.u64_at("disk.qcow2", data + 8);
    world.patch("disk.qcow2", compressed + 8, &1_u64.to_be_bytes());
    world.patch("disk.qcow2", data + 8, &(bitmap | 1 << 32).to_be_bytes());
    assert_eq!(world.qemu_check("disk.qcow2").0, 2);
    let before = std::fs::read(world.path("disk.qcow2")).unwrap();
    let error = world.on("disk.qcow2", async |file| {
        repair(&file, RepairScope::All).await.unwrap_err()
    });
    assert!(error.to_string().contains("both allocated and zero"), "{error}");
    assert!(std::fs::read(world.path("disk.qcow2")).unwrap() == before);

    world.patch("disk.qcow2", data + 8, &bitmap.to_be_bytes());
    let report = world.on("disk.qcow2", async |file| {
        repair(&file, RepairScope::All).await.unwrap()
    });
    let verdicts = (report.before.verdict(), report.after.verdict());
    assert_eq!(verdicts, (Verdict::Corrupt, Verdict::Clean), "{report:?}");
    assert_eq!(report.before.corruptions, 1, "{:?}", report.before);
    assert_contents_kept(&world);
}

/// Method: a dirty image as a killed QEMU with lazy refcounts leaves it.
#[test]
fn rebuild_cleans_a_dirty_image() {
    let world = World::new();
    world.qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        "lazy_refcounts=on",
        "disk.qcow2",
        "8M",
    ]);
    let args = [
        "-f",
        "qcow2",
        "disk.qcow2",
        "-c",
        "write -P 5 0 1M",
        "-c",
        "flush",
        "-c",
        "abort",
    ];
    world.tool("qemu-io", &args);
    assert!(header(&world).incompatible.contains(Incompatible::DIRTY));
    assert_eq!(world.qemu_check("disk.qcow2").0, 2);
    let rebuilt = world.on("disk.qcow2", async |file| rebuild_refcounts(&file).await.unwrap());
    assert_eq!(rebuilt, header(&world));
    assert!(!rebuilt.incompatible.contains(Incompatible::DIRTY));
    world.assert_flawless("disk.qcow2");
    world.qemu_io("disk.qcow2", &["read -P 5 0 1M", "write -P 6 512k 4M"]);
    world.assert_flawless("disk.qcow2");
}

#[test]
fn repair_does_not_touch_a_clean_image() {
    let world = World::new();
    build(&world, "cluster_size=64k");
    let before = std::fs::read(world.path("disk.qcow2")).unwrap();
    world.on("disk.qcow2", async |file| {
        repair(&file, RepairScope::All).await.unwrap()
    });
    assert_eq!(std::fs::read(world.path("disk.qcow2")).unwrap(), before);
}

#[test]
fn repair_names_damage_beyond_refcounts_and_writes_nothing() {
    for bad in [0x5_0200, 0x7fff_0000_0000, 1 << 60 | 0x5_0000, 0x3_0000_u64] {
        let world = World::new();
        let header = build(&world, "cluster_size=64k");
        let l2 = world.u64_at("disk.qcow2", header.l1_offset.bytes()) & OFFSET_MASK;
        world.patch("disk.qcow2", l2 + 8, &bad.to_be_bytes());
        let before = std::fs::read(world.path("disk.qcow2")).unwrap();
        let error = world.on("disk.qcow2", async |file| {
            repair(&file, RepairScope::All).await.unwrap_err()
        });
        assert!(matches!(error, RepairError::Damaged(_)), "{error}");
        assert_eq!(std::fs::read(world.path("disk.qcow2")).unwrap(), before);
    }
}

/// Method: put the old header back after a rebuild. All that it points to is as it was.
#[test]
fn rebuild_keeps_old_structure_until_header_switches() {
    let world = World::new();
    let header_before = build(&world, "cluster_size=64k");
    let l2 = world.u64_at("disk.qcow2", header_before.l1_offset.bytes()) & OFFSET_MASK;
    world.patch("disk.qcow2", l2 + 8, &[0; 8]);
    let before = std::fs::read(world.path("disk.qcow2")).unwrap();
    world.on("disk.qcow2", async |file| rebuild_refcounts(&file).await.unwrap());
    let after = std::fs::read(world.path("disk.qcow2")).unwrap();
    // All but the header is where it was; the new structure is behind the old end.
    assert_eq!(before[512..], after[512..before.len()]);
    assert!(header(&world).refcount_table_offset.bytes() >= before.len() as u64);
    // With the old header, the image is as it was: a leak and what was appended, no corruption.
    std::fs::write(world.path("disk.qcow2"), [&before[..512], &after[512..]].concat()).unwrap();
    assert_eq!(world.qemu_check("disk.qcow2").0, 3);
}

/// A breakage's name, and its patches: offsets and bytes.
type Breakage = (&'static str, Vec<(u64, Vec<u8>)>);

/// Returns ways to break an image that new refcounts repair.
fn breakages(world: &World) -> Vec<Breakage> {
    let header = header(world);
    let cluster = header.cluster_bits.size();
    let table = header.refcount_table_offset.bytes();
    let block = world.u64_at("disk.qcow2", table);
    let l1 = header.l1_offset.bytes();
    let l1_entry = world.u64_at("disk.qcow2", l1);
    let l2 = l1_entry & OFFSET_MASK;
    let count = |cluster: u64, byte: u8| {
        let width = u64::from(header.refcount_order.bits()) / 8;
        (
            block + cluster * width,
            [&vec![0; width as usize - 1][..], &[byte]].concat(),
        )
    };
    let data = (world.u64_at("disk.qcow2", l2) & OFFSET_MASK) / cluster;
    let flip = |at: u64| {
        (
            at,
            (world.u64_at("disk.qcow2", at) ^ 1 << 63).to_be_bytes().to_vec(),
        )
    };
    let mut breakages = vec![
        ("a leak", vec![(l2 + 24, vec![0; 8])]),
        ("leaks", vec![(l2, vec![0; 64])]),
        ("a count too low", vec![count(data, 0)]),
        ("a count too high", vec![count(data, 9)]),
        (
            "both",
            vec![count(data, 9), count(data + 1, 0), count(0, 0), count(3, 7)],
        ),
        ("flags", vec![flip(l1), flip(l2 + 8), flip(l2 + 16)]),
        (
            "flags and counts",
            vec![flip(l2 + 8), count(data, 0), (l2 + 32, vec![0; 8])],
        ),
        ("no counts", vec![(block, vec![0; cluster as usize])]),
        ("no block", vec![(table, vec![0; 8])]),
        (
            "no block, and flags",
            vec![(table, vec![0; 8]), flip(l1), flip(l2 + 8)],
        ),
        ("no table", vec![(at::REFCOUNT_TABLE_CLUSTERS as u64, vec![0; 4])]),
        ("a wild table", vec![(table, vec![0xa5; 64])]),
        (
            "two tables in one",
            vec![(table, [l2.to_be_bytes(), [0; 8]].concat())],
        ),
    ];
    // Version 2 has no such bits.
    if header.version == crate::format::Version::V3 {
        let bits = |bits: u64| (72, bits.to_be_bytes().to_vec());
        breakages.push(("the corrupt bit", vec![bits(2)]));
        breakages.push(("the dirty bit and a leak", vec![bits(1), (l2 + 24, vec![0; 8])]));
    }
    breakages
}

/// Returns the guest's data now, and when the snapshot was taken, if QEMU can still read them.
fn contents(world: &World, name: &str) -> Option<Vec<Vec<u8>>> {
    let read = |arguments: &[&str]| {
        let mut all = vec!["convert", "-f", "qcow2", "-O", "raw"];
        all.extend(arguments);
        all.extend([name, "as-raw.img"]);
        let done = world.tool("qemu-img", &all).status.success();
        done.then(|| std::fs::read(world.path("as-raw.img")).unwrap())
    };
    Some(vec![read(&[])?, read(&["-l", "snapshot.name=before"])?])
}

/// Calls `each` with every state that a cut may leave: every write that a sync followed, and each subset of those since the last one, if
/// there are few, or the first few, the last few, all but one. Writes are torn at each sector too, one at a time.
/// The states are made one after the other: together they are hundreds of MiB.
fn for_each_cut(start: &[u8], steps: &[Step], mut each: impl FnMut(&[u8])) {
    let apply = |bytes: &mut Vec<u8>, offset: u64, new: &[u8]| {
        let end = offset as usize + new.len();
        bytes.resize(bytes.len().max(end), 0);
        bytes[offset as usize..end].copy_from_slice(new);
    };
    let mut last = Vec::new();
    let mut each = |state: &[u8]| {
        if last != state {
            each(state);
            last = state.to_vec();
        }
    };
    let mut durable = start.to_vec();
    let rounds = steps.split(|step| matches!(step, Step::Sync));
    for round in rounds {
        let writes: Vec<(u64, &[u8])> = round
            .iter()
            .filter_map(|step| match step {
                Step::Write(offset, bytes) => Some((*offset, &bytes[..])),
                Step::Sync => None,
            })
            .collect();
        let count = writes.len();
        let subsets: Vec<u64> = if count <= 6 {
            (0..1 << count).collect()
        } else {
            let all = u64::MAX >> (64 - count.min(64));
            (0..count.min(64))
                .flat_map(|i| [1 << i, all & !(1 << i), all >> i])
                .collect()
        };
        for subset in subsets {
            let mut state = durable.clone();
            for (i, (offset, bytes)) in writes.iter().enumerate() {
                if subset >> i.min(63) & 1 == 1 {
                    apply(&mut state, *offset, bytes);
                }
            }
            each(&state);
        }
        for (i, (offset, bytes)) in writes.iter().enumerate() {
            for sector in (512..bytes.len()).step_by(512).take(4) {
                let mut state = durable.clone();
                writes[..i]
                    .iter()
                    .for_each(|(offset, bytes)| apply(&mut state, *offset, bytes));
                apply(&mut state, *offset, &bytes[..sector]);
                each(&state);
                let mut state = durable.clone();
                apply(&mut state, *offset + sector as u64, &bytes[sector..]);
                each(&state);
            }
        }
        writes
            .iter()
            .for_each(|(offset, bytes)| apply(&mut durable, *offset, bytes));
    }
    each(&durable);
}

/// Method: break an image, repair it, and record what the repair writes. Cut it anywhere: nothing is worse than it
/// was, a second repair ends clean, and a guest reads what it read before.
#[test]
fn repair_cut_anywhere_can_be_repaired_without_loss() {
    // Side by side, as it takes longer than all other tests here together.
    let tried: usize = std::thread::scope(|scope| {
        let kinds = [
            ("cluster_size=4k", MEMORY_MAX_BYTES),
            ("cluster_size=512,refcount_bits=64", MEMORY_MAX_BYTES),
            ("cluster_size=512", LITTLE_MEMORY),
            ("cluster_size=4k,compat=0.10", MEMORY_MAX_BYTES),
        ];
        let threads =
            kinds.map(|(options, memory)| scope.spawn(move || repairs_cut_anywhere(options, memory)));
        threads
            .map(|thread| thread.join().expect("no cut of this kind did harm"))
            .iter()
            .sum()
    });
    assert!(tried > 400, "{tried}");
}

/// Does so with each breakage of one kind of image, and counts the cuts.
fn repairs_cut_anywhere(options: &str, memory: usize) -> usize {
    let mut tried = 0;
    let world = World::new();
    build(&world, options);
    if memory == LITTLE_MEMORY {
        widen(&world);
    }
    let good = std::fs::read(world.path("disk.qcow2")).unwrap();
    for (what, patches) in breakages(&world) {
        std::fs::write(world.path("disk.qcow2"), &good).unwrap();
        for (at, bytes) in &patches {
            world.patch("disk.qcow2", *at, bytes);
        }
        let broken = std::fs::read(world.path("disk.qcow2")).unwrap();
        let name = format!("{options}: {what}");
        record::take();
        let repaired = world.on("disk.qcow2", async |file| {
            repair_within(&file, RepairScope::All, memory).await
        });
        let steps = record::take();
        let report = repaired.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(report.after.verdict(), Verdict::Clean, "{name}: {report:#?}");
        world.assert_flawless("disk.qcow2");
        let read = contents(&world, "disk.qcow2").unwrap_or_else(|| panic!("{name}: unreadable"));
        let mut cuts = 0;
        for_each_cut(&broken, &steps, |_| cuts += 1);
        assert!(cuts > 1, "{name}: nothing was written");
        let mut number = 0;
        for_each_cut(&broken, &steps, |state| {
            let name = format!("{name}, cut {number} of {cuts}");
            std::fs::write(world.path("cut.qcow2"), state).unwrap();
            let cut = world.on("cut.qcow2", async |file| check(&file).await.unwrap());
            let (was, is) = (report.before.corruptions, cut.corruptions);
            assert!(
                is <= was,
                "{name}: {was} corruptions became {is}: {:#?}",
                cut.findings
            );
            let again = world.on("cut.qcow2", async |file| {
                repair_within(&file, RepairScope::All, memory).await
            });
            let again = again.unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!(again.after.verdict(), Verdict::Clean, "{name}: {again:#?}");
            number += 1;
            // QEMU's tools take long: a sample.
            if number % 32 == 1 || number == cuts {
                world.assert_flawless("cut.qcow2");
                assert!(
                    contents(&world, "cut.qcow2").as_ref() == Some(&read),
                    "{name}: other contents"
                );
            }
        });
        tried += number;
    }
    tried
}

/// Writes so many clusters that a check or a repair in [`LITTLE_MEMORY`] takes several passes.
fn widen(world: &World) {
    world.qemu_io("disk.qcow2", &["write -P 5 5300k 1500k"]);
    let passes = world.passes_within("disk.qcow2", LITTLE_MEMORY);
    assert!(passes > 1, "{passes}");
}

/// Method: repair each breakage of an image of many clusters in one pass, and in the passes that very little memory requires.
#[test]
fn repair_with_little_memory_writes_the_same() {
    let world = World::new();
    build(&world, "cluster_size=512");
    widen(&world);
    let good = std::fs::read(world.path("disk.qcow2")).unwrap();
    for (what, patches) in breakages(&world) {
        let [one, many] = [usize::MAX, LITTLE_MEMORY].map(|memory| {
            std::fs::write(world.path("disk.qcow2"), &good).unwrap();
            for (at, bytes) in &patches {
                world.patch("disk.qcow2", *at, bytes);
            }
            let report = world.on("disk.qcow2", async |file| {
                repair_within(&file, RepairScope::All, memory).await
            });
            let report = report.unwrap_or_else(|error| panic!("{what}, {memory} bytes: {error}"));
            assert_eq!(report.after.verdict(), Verdict::Clean, "{what}, {memory} bytes");
            let faults = [report.before.corruptions, report.before.leaks];
            (faults, std::fs::read(world.path("disk.qcow2")).unwrap())
        });
        assert_eq!(one.0, many.0, "{what}: faults found");
        assert!(one.1 == many.1, "{what}: the files differ");
        world.assert_flawless("disk.qcow2");
    }
}

#[test]
fn leak_repair_works_in_place_and_leaves_corruption() {
    for options in ["cluster_size=4k", "cluster_size=512,refcount_bits=64"] {
        let world = World::new();
        let header = build(&world, options);
        let l2 = world.u64_at("disk.qcow2", header.l1_offset.bytes()) & OFFSET_MASK;
        let len = std::fs::metadata(world.path("disk.qcow2")).unwrap().len();
        world.patch("disk.qcow2", l2 + 24, &[0; 8]);
        let block = world.u64_at("disk.qcow2", header.refcount_table_offset.bytes());
        // The header's own count.
        let width = u64::from(header.refcount_order.bits()) / 8;
        world.patch("disk.qcow2", block + width - 1, &[0]);
        let report = world.on("disk.qcow2", async |file| {
            repair(&file, RepairScope::Leaks).await.unwrap()
        });
        assert_eq!((report.leaks_fixed(), report.after.leaks), (1, 0), "{options}");
        assert_eq!(
            report.after.corruptions, report.before.corruptions,
            "{options}: {report:#?}"
        );
        assert!(report.after.corruptions > 0);
        assert_eq!(std::fs::metadata(world.path("disk.qcow2")).unwrap().len(), len);
        assert_eq!(world.qemu_check("disk.qcow2").0, 2);
        world.on("disk.qcow2", async |file| {
            repair(&file, RepairScope::All).await.unwrap()
        });
        world.assert_flawless("disk.qcow2");
        assert_eq!(std::fs::metadata(world.path("disk.qcow2")).unwrap().len(), len);
    }
}

/// Such a table reads as zeros: a repair that trusted it would free all that it referred to.
#[test]
fn repair_frees_nothing_for_a_truncated_table() {
    for (what, cut) in [
        ("the L1 table", 0),
        ("the L1 table's end", 8),
        ("an L2 table", 512),
    ] {
        let world = World::new();
        build(&world, "cluster_size=4k");
        let header = header(&world);
        let len = std::fs::metadata(world.path("disk.qcow2")).unwrap().len();
        let end = len.next_multiple_of(4096);
        let l1 = header.l1_offset.bytes();
        let mut table = vec![0; 4096];
        let from = if what == "an L2 table" {
            world.u64_at("disk.qcow2", l1) & OFFSET_MASK
        } else {
            l1
        };
        for (at, byte) in (0..).zip(table.iter_mut()) {
            *byte = world.u64_at("disk.qcow2", from + at).to_be_bytes()[0];
        }
        // The table moves behind everything, and there the file is cut.
        world.patch("disk.qcow2", end, &table);
        if what == "an L2 table" {
            world.patch("disk.qcow2", l1, &(1 << 63 | end).to_be_bytes());
        } else {
            world.patch("disk.qcow2", at::L1_TABLE_OFFSET as u64, &end.to_be_bytes());
        }
        let file = std::fs::OpenOptions::new()
            .write(true)
            .open(world.path("disk.qcow2"))
            .unwrap();
        file.set_len(end + cut).unwrap();
        let before = std::fs::read(world.path("disk.qcow2")).unwrap();
        for scope in [RepairScope::Leaks, RepairScope::All] {
            let error = world.on("disk.qcow2", async |file| repair(&file, scope).await.unwrap_err());
            assert!(matches!(error, RepairError::Damaged(_)), "{what}: {error}");
        }
        assert_eq!(std::fs::read(world.path("disk.qcow2")).unwrap(), before, "{what}");
    }
}
