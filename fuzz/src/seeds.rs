//! Small sound images to start from.

use block::Context;
use block::file::{FileOptions, ImageFile};
use qcow::format::{CompressionType, Version};
use qcow::image::{CreateOptions, Preallocation, create};

/// Sound images of many kinds, each a few KiB.
///
/// # Panics
///
/// If one cannot be made, which is a bug in `create`.
pub fn images() -> Vec<(String, Vec<u8>)> {
    let new = || CreateOptions {
        cluster_size: 512,
        ..CreateOptions::new(8 << 10)
    };
    let mut kinds = vec![
        (
            "v2",
            CreateOptions {
                version: Version::V2,
                ..new()
            },
        ),
        (
            "zstd",
            CreateOptions {
                compression: CompressionType::Zstd,
                lazy_refcounts: true,
                ..new()
            },
        ),
        (
            "full",
            CreateOptions {
                preallocation: Preallocation::Metadata,
                ..new()
            },
        ),
        (
            "overlay",
            CreateOptions {
                backing_file: Some("base.raw".into()),
                backing_format: Some("raw".into()),
                ..new()
            },
        ),
        (
            "4k",
            CreateOptions {
                cluster_size: 4096,
                preallocation: Preallocation::Metadata,
                ..new()
            },
        ),
    ];
    for (name, refcount_bits) in [("narrow", 1), ("wide", 64)] {
        kinds.push((
            name,
            CreateOptions {
                refcount_bits,
                preallocation: Preallocation::Metadata,
                ..new()
            },
        ));
    }
    let made = kinds
        .into_iter()
        .map(|(name, options)| (name.to_owned(), image(&options)));
    made.collect()
}

fn image(options: &CreateOptions) -> Vec<u8> {
    let cx = Context::syscalls();
    let named = tempfile::NamedTempFile::new().expect("a temporary file");
    let file = ImageFile::open(
        named.path(),
        FileOptions {
            write: true,
            direct: false,
        },
    );
    let view = file.expect("the temporary file").view(&cx).expect("a view of it");
    let created = cx.block_on(create(&view, options)).expect("the ring turns");
    created.expect("an image");
    std::fs::read(named.path()).expect("the image's bytes")
}

/// Entries of each kind, in the shape `parse::entries` takes.
pub fn entries() -> Vec<(String, Vec<u8>)> {
    let kinds: [(&str, u64); 6] = [
        ("unallocated", 0),
        ("zero", 1),
        ("data", 1 << 63 | 0x5_0000),
        ("preallocated", 1 << 63 | 0x5_0001),
        ("compressed", 1 << 62 | 2 << 54 | 0x5_0123),
        ("reserved", 1 << 60 | 0x5_0000),
    ];
    let shaped = kinds.map(|(name, raw)| (name.to_owned(), [&raw.to_be_bytes()[..], &[1, 7, 0]].concat()));
    shaped.into()
}
