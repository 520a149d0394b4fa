//! Created images, judged by QEMU's tools.

use super::testing::World;
use super::*;
use crate::format::{CompressionType, Header, Version};

fn create_in(world: &World, name: &str, options: &CreateOptions) -> Result<Header, CreateError> {
    world.on(name, async |file| create(&file, options).await)
}

/// Returns the error that options give, as a person reads it.
fn refused(options: CreateOptions) -> String {
    let world = World::new();
    let error = create_in(&world, "refused.qcow2", &options)
        .unwrap_err()
        .to_string();
    assert_eq!(
        std::fs::metadata(world.path("refused.qcow2")).unwrap().len(),
        0,
        "{error}: but written"
    );
    error
}

/// Creates the image, has QEMU check it, read it, and write all over it.
fn assert_usable(options: &CreateOptions) {
    let world = World::new();
    create_in(&world, "new.qcow2", options).unwrap_or_else(|error| panic!("{options:?}: {error}"));
    world.assert_flawless("new.qcow2");
    let report = world.on("new.qcow2", async |file| check(&file).await.unwrap());
    assert_eq!(
        report.verdict(),
        Verdict::Clean,
        "{options:?}: {:?}",
        report.findings
    );
    if options.size >= 1 << 20 {
        world.qemu_io(
            "new.qcow2",
            &["read -P 0 0 1M", "write -P 7 1000 300k", "discard 64k 64k"],
        );
        world.assert_flawless("new.qcow2");
    }
}

#[test]
fn create_is_flawless_for_every_cluster_and_refcount_size() {
    for bits in 9..=21 {
        for refcount_bits in [1, 2, 4, 8, 16, 32, 64] {
            let cluster_size = 1 << bits;
            assert_usable(&CreateOptions {
                cluster_size,
                refcount_bits,
                ..CreateOptions::new(3 << 20)
            });
        }
        assert_usable(&CreateOptions {
            version: Version::V2,
            cluster_size: 1 << bits,
            ..CreateOptions::new(3 << 20)
        });
    }
    for bits in 14..=21 {
        for preallocation in [Preallocation::Off, Preallocation::Metadata] {
            assert_usable(&CreateOptions {
                cluster_size: 1 << bits,
                extended_l2: true,
                preallocation,
                ..CreateOptions::new(3 << 20)
            });
        }
    }
}

#[test]
fn create_refuses_subclusters_where_the_format_has_none() {
    let small = refused(CreateOptions {
        cluster_size: 8192,
        extended_l2: true,
        ..CreateOptions::new(1 << 20)
    });
    assert_eq!(
        small,
        "cluster_size=8192: expected 16384 (16k) or more with extended_l2=on"
    );
    let old = refused(CreateOptions {
        version: Version::V2,
        extended_l2: true,
        ..CreateOptions::new(1 << 20)
    });
    assert_eq!(old, "extended_l2=on: expected off with compat=0.10");
}

#[test]
fn create_is_flawless_in_every_preallocation_mode() {
    for preallocation in [
        Preallocation::Metadata,
        Preallocation::Falloc,
        Preallocation::Full,
    ] {
        for bits in [9, 12, 16, 21] {
            for refcount_bits in [1, 16, 64] {
                let cluster_size = 1 << bits;
                let size = (5 << 20) + 512;
                let options = CreateOptions {
                    cluster_size,
                    refcount_bits,
                    preallocation,
                    ..CreateOptions::new(size)
                };
                assert_usable(&options);
            }
        }
        let version = Version::V2;
        assert_usable(&CreateOptions {
            version,
            preallocation,
            ..CreateOptions::new(5 << 20)
        });
    }
}

#[test]
fn create_allocates_as_its_preallocation_mode_says() {
    use std::os::unix::fs::MetadataExt;
    let world = World::new();
    let blocks = |preallocation| {
        create_in(
            &world,
            "sized.qcow2",
            &CreateOptions {
                preallocation,
                ..CreateOptions::new(8 << 20)
            },
        )
        .unwrap();
        let metadata = std::fs::metadata(world.path("sized.qcow2")).unwrap();
        (metadata.len() >= 8 << 20, metadata.blocks() * 512 >= 8 << 20)
    };
    assert_eq!(blocks(Preallocation::Off), (false, false));
    assert_eq!(blocks(Preallocation::Metadata), (true, false));
    assert_eq!(blocks(Preallocation::Falloc), (true, true));
    assert_eq!(blocks(Preallocation::Full), (true, true));
}

#[test]
fn create_is_flawless_for_tiny_and_huge_disks() {
    for size in [0, 1, 512, 65_535, 1 << 40, 64 << 40] {
        assert_usable(&CreateOptions::new(size));
    }
    assert_usable(&CreateOptions {
        cluster_size: 512,
        ..CreateOptions::new(128 << 30)
    });
    assert_usable(&CreateOptions {
        cluster_size: 2 << 20,
        ..CreateOptions::new(1 << 60)
    });
}

#[test]
fn create_is_flawless_with_other_options_qemu_reads_back() {
    let world = World::new();
    world.qemu_img(&["create", "-q", "-f", "raw", "base.raw", "2M"]);
    let options = CreateOptions {
        lazy_refcounts: true,
        compression: CompressionType::Zstd,
        backing_file: Some("base.raw".into()),
        backing_format: Some("raw".into()),
        ..CreateOptions::new(4 << 20)
    };
    create_in(&world, "over.qcow2", &options).unwrap();
    world.assert_flawless("over.qcow2");
    let told = world.qemu_img(&["info", "over.qcow2"]);
    for part in [
        "backing file: base.raw",
        "backing file format: raw",
        "lazy refcounts: true",
        "type: zstd",
    ] {
        assert!(told.contains(part), "{part:?} is not in {told}");
    }
    world.qemu_io(
        "over.qcow2",
        &["write -P 5 0 3M", "read -P 5 0 3M", "read -P 0 3M 1M"],
    );
    world.assert_flawless("over.qcow2");
}

#[test]
fn create_fits_backing_name_into_smallest_cluster() {
    let world = World::new();
    world.qemu_img(&["create", "-q", "-f", "qcow2", "base.qcow2", "2M"]);
    for version in [Version::V2, Version::V3] {
        let options = CreateOptions {
            version,
            cluster_size: 512,
            backing_file: Some("base.qcow2".into()),
            backing_format: Some("qcow2".into()),
            ..CreateOptions::new(2 << 20)
        };
        create_in(&world, "small.qcow2", &options).unwrap();
        world.assert_flawless("small.qcow2");
    }
}

#[test]
fn create_replaces_the_files_old_contents() {
    let world = World::new();
    std::fs::write(world.path("old.qcow2"), vec![0xaa; 3 << 20]).unwrap();
    let options = CreateOptions {
        preallocation: Preallocation::Metadata,
        ..CreateOptions::new(4 << 20)
    };
    create_in(&world, "old.qcow2", &options).unwrap();
    world.assert_flawless("old.qcow2");
    world.qemu_io("old.qcow2", &["read -P 0 0 4M"]);
}

#[test]
fn create_names_option_out_of_range_and_writes_nothing() {
    let new = || CreateOptions::new(1 << 30);
    for cluster_size in [0, 1, 256, 513, 3 << 9, 4 << 20, u64::MAX] {
        assert!(
            refused(CreateOptions {
                cluster_size,
                ..new()
            })
            .starts_with("cluster_size=")
        );
    }
    for refcount_bits in [0, 3, 128] {
        assert!(
            refused(CreateOptions {
                refcount_bits,
                ..new()
            })
            .starts_with("refcount_bits=")
        );
    }
    for size in [u64::MAX, 1 << 63, 1 << 62] {
        assert!(refused(CreateOptions::new(size)).starts_with("size="));
    }
    assert!(
        refused(CreateOptions {
            cluster_size: 512,
            ..CreateOptions::new((128 << 30) + 1)
        })
        .starts_with("size=")
    );
    let v2 = || CreateOptions {
        version: Version::V2,
        ..new()
    };
    assert!(
        refused(CreateOptions {
            refcount_bits: 8,
            ..v2()
        })
        .starts_with("refcount_bits=")
    );
    assert!(
        refused(CreateOptions {
            lazy_refcounts: true,
            ..v2()
        })
        .starts_with("lazy_refcounts=")
    );
    let zstd = CreateOptions {
        compression: CompressionType::Zstd,
        ..v2()
    };
    assert!(refused(zstd).starts_with("compression_type="));

    let name = |name: &str| Some(name.to_owned());
    let unformatted = CreateOptions {
        backing_file: name("base"),
        ..new()
    };
    assert!(refused(unformatted).starts_with("backing_file=base"));
    let nameless = CreateOptions {
        backing_format: name("raw"),
        ..new()
    };
    assert!(refused(nameless).starts_with("backing_fmt=raw"));
    let backed = |file: &str, format: &str| CreateOptions {
        backing_file: name(file),
        backing_format: name(format),
        ..new()
    };
    assert!(refused(backed("base", "vmdk")).starts_with("backing_fmt=vmdk"));
    assert!(refused(backed(&"b".repeat(1024), "raw")).starts_with("backing_file="));
    let full = CreateOptions {
        preallocation: Preallocation::Full,
        ..backed("base", "raw")
    };
    assert!(refused(full).starts_with("backing_file=base"));
    let cramped = CreateOptions {
        cluster_size: 512,
        ..backed(&"b".repeat(500), "raw")
    };
    assert!(refused(cramped).contains("cluster has 512"));
}
