//! Small sound inputs to start from, which random bytes would take long to become.

use block::Context;
use qcow::format::{CompressionType, Version};
use qcow::image::{CreateOptions, Preallocation, create};
use ringdisk_gen::image::extension;
use ringdisk_gen::{Content, Image, ImageSpec, Snapshot, bytes_of_seed};

use crate::Seed;
use crate::host::MemoryFile;

/// Random bytes, for bodies that make of any bytes what they need: a fuzzer would long stay with short ones.
#[must_use]
pub fn random() -> Vec<Seed> {
    let seeds = (0..64).map(|number| {
        let len = 60 << (number % 6);
        (format!("random-{number}"), bytes_of_seed(number, len))
    });
    seeds.collect()
}

/// First clusters of sound images.
#[must_use]
pub fn headers() -> Vec<Seed> {
    let mut seeds = images();
    for (_, bytes) in &mut seeds {
        bytes.truncate(4096);
    }
    seeds
}

/// Sound images of many kinds, each a few KiB.
///
/// # Panics
///
/// If one cannot be made, which is a bug in `create`.
#[must_use]
pub fn images() -> Vec<Seed> {
    let new = || CreateOptions {
        cluster_size: 512,
        ..CreateOptions::new(8 << 10)
    };
    let full = |refcount_bits| CreateOptions {
        refcount_bits,
        preallocation: Preallocation::Metadata,
        ..new()
    };
    let v2 = CreateOptions {
        version: Version::V2,
        ..new()
    };
    let zstd = CreateOptions {
        compression: CompressionType::Zstd,
        lazy_refcounts: true,
        ..new()
    };
    let overlay = CreateOptions {
        backing_file: Some("base.raw".into()),
        backing_format: Some("raw".into()),
        ..new()
    };
    let four = CreateOptions {
        cluster_size: 4096,
        ..full(16)
    };
    let created = [
        ("v2", v2),
        ("zstd", zstd),
        ("full", full(16)),
        ("overlay", overlay),
        ("4k", four),
        ("narrow", full(1)),
        ("wide", full(64)),
    ];
    let created = created.map(|(name, options)| (name.to_owned(), image(&options)));
    let mut spec = ImageSpec::new(9, 64 << 10);
    spec.clusters = (0..8).map(|guest| (guest, Content::Data(1))).collect();
    let built = [
        ("built", spec.clone()),
        (
            "built-compressed",
            ImageSpec {
                clusters: (0..6).map(|guest| (guest, Content::Compressed(2))).collect(),
                ..spec.clone()
            },
        ),
        (
            "built-zstd",
            ImageSpec {
                clusters: (0..6).map(|guest| (guest, Content::Compressed(2))).collect(),
                zstd: true,
                ..spec.clone()
            },
        ),
        (
            "built-snapshots",
            ImageSpec {
                snapshots: vec![
                    Snapshot::default(),
                    Snapshot {
                        own: [(1, Content::Zero), (70, Content::Data(3))].into(),
                    },
                ],
                ..spec.clone()
            },
        ),
        (
            "built-bitmap",
            ImageSpec {
                bitmap: true,
                ..spec.clone()
            },
        ),
        (
            "built-subclusters",
            ImageSpec {
                cluster_bits: 14,
                extended: true,
                clusters: [
                    (0, Content::Subclusters(1, 0xff00_0000_00ff)),
                    (1, Content::Data(2)),
                    (2, Content::Zero),
                ]
                .into(),
                ..spec.clone()
            },
        ),
        (
            "built-dirty",
            ImageSpec {
                incompatible: 1,
                compatible: 1,
                ..spec
            },
        ),
    ];
    let built = built.map(|(name, spec)| (name.to_owned(), Image::new(spec).bytes));
    created.into_iter().chain(built).collect()
}

fn image(options: &CreateOptions) -> Vec<u8> {
    let (cx, file) = (Context::syscalls(), MemoryFile::new(b""));
    let created = cx.block_on(create(&file.view(&cx), options));
    created.expect("the ring turns").expect("an image");
    file.read(0, usize::MAX)
}

/// Entries of each kind, in the shape the body takes: entry, geometry, and a snapshot's or bitmap's entry.
#[must_use]
pub fn entries() -> Vec<Seed> {
    let kinds: [(&str, u64); 6] = [
        ("unallocated", 0),
        ("zero", 1),
        ("data", 1 << 63 | 0x5_0000),
        ("preallocated", 1 << 63 | 0x5_0001),
        ("compressed", 1 << 62 | 2 << 54 | 0x5_0123),
        ("reserved", 1 << 60 | 0x5_0000),
    ];
    let shaped = |name: &str, raw: u64, rest: &[u8]| {
        (
            name.to_owned(),
            [&raw.to_be_bytes()[..], &[1, 7, 0], rest].concat(),
        )
    };
    let mut seeds: Vec<Seed> = kinds.iter().map(|(name, raw)| shaped(name, *raw, b"")).collect();
    let mut snapshot = [&0x5_0000_u64.to_be_bytes()[..], &[0, 0, 0, 1, 0, 1, 0, 4]].concat();
    snapshot.extend([0; 20]);
    snapshot.extend([0, 0, 0, 16]);
    snapshot.extend([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0]);
    snapshot.extend(b"1name\0\0\0");
    seeds.push(shaped("snapshot", 0, &snapshot));
    let mut bitmap = [
        &0x5_0000_u64.to_be_bytes()[..],
        &[0, 0, 0, 1, 0, 0, 0, 2, 1, 16, 0, 4],
    ]
    .concat();
    bitmap.extend([0, 0, 0, 0]);
    bitmap.extend(b"name");
    seeds.push(shaped("bitmap", 0, &bitmap));
    seeds
}

/// Areas of header extensions: each kind alone, and all together.
#[must_use]
pub fn extensions() -> Vec<Seed> {
    let place = [&0x5_0000_u64.to_be_bytes()[..], &0x2_0000_u64.to_be_bytes()].concat();
    let bitmaps = [
        &[0, 0, 0, 1, 0, 0, 0, 0][..],
        &32_u64.to_be_bytes(),
        &0x5_0000_u64.to_be_bytes(),
    ]
    .concat();
    let mut names = vec![0; 96];
    names[1] = 4;
    names[2..14].copy_from_slice(b"extended L2\0");
    names[48] = 2;
    let kinds: [(&str, u32, &[u8]); 6] = [
        ("backing-format", 0xe279_2aca, b"qcow2"),
        ("feature-names", 0x6803_f857, &names),
        ("bitmaps", 0x2385_2875, &bitmaps),
        ("crypto", 0x0537_be77, &place),
        ("data-file", 0x4441_5441, b"data.raw"),
        ("unknown", 0x1234_5678, b"thirteen byte"),
    ];
    let alone = kinds.map(|(name, kind, data)| (name.to_owned(), extension(kind, data)));
    let all = alone
        .iter()
        .flat_map(|(_, bytes)| bytes.clone())
        .chain([0; 8])
        .collect();
    alone.into_iter().chain([("all".to_owned(), all)]).collect()
}

/// Changes of a LUKS header, xored with it: of none of its fields, and of one each.
#[must_use]
pub fn luks_changes() -> Vec<Seed> {
    let fields = [
        ("none", 0),
        ("version", 7),
        ("payload", 106),
        ("digest", 120),
        ("digest-iterations", 167),
        ("slot-0-iterations", 215),
        ("slot-0-salt", 220),
        ("slot-3-material", 395),
        ("slot-7-stripes", 591),
    ];
    let change = |(name, at): (&str, usize)| {
        let mut bytes = vec![0; 592];
        bytes[at] = u8::from(at > 0);
        (name.to_owned(), bytes)
    };
    let mut seeds: Vec<Seed> = fields.into_iter().map(change).collect();
    // Slot 3 is out of use: its state becomes 0x0000dead.
    let mut out_of_use = vec![0; 592];
    let states = 0x00ac_71f3_u32 ^ 0x0000_dead;
    out_of_use[352..356].copy_from_slice(&states.to_be_bytes());
    seeds.push(("slot-3-out-of-use".to_owned(), out_of_use));
    seeds
}

/// Changes of the tables in the shape that the body takes: none of them, in each.
#[must_use]
pub fn table_changes() -> Vec<Seed> {
    let numbered = (0..12_u8).map(|number| {
        let mut bytes = vec![0; 96];
        // What the cursor picks the cluster size and the table by.
        bytes[..2].copy_from_slice(&[number % 3, number % 4]);
        (format!("table-{number}"), bytes)
    });
    numbered.collect()
}

/// Texts of `--disk`.
#[must_use]
pub fn disk_configs() -> Vec<Seed> {
    let texts = [
        "path=disk.qcow2",
        "path=disk.raw,image_type=raw,readonly=on,direct=true",
        "path=\"a,b\",image_type=qcow2,backing_files=on,sparse=off,l2_cache=2M,discard_no_unref=on",
        "path=a,num_queues=4,queue_size=256,queue_affinity=[0@[1,3],1@[2-5],3@[0]],poll_us=50",
        "path=a,id=\"the disk\",serial=serial-1,lock_granularity=full,werror=wait",
        "path=[a],id=x=y,num_queues=256,queue_size=32768",
        "path=a,path=b",
        "path=a,socket=/run/x,rate_limit_group=g",
        "path=a,snapshot=id=1,overlay=temporary,overlay_dir=/var/tmp,werror=wait",
        "path=a.raw,image_type=raw,overlay=temporary,l2_cache=1M",
    ];
    let numbered = (0..).zip(texts);
    numbered
        .map(|(index, text)| (format!("text-{index}"), text.into()))
        .collect()
}
