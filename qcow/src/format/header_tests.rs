//! Headers of every malformed class, and round trips.

use super::header::at;
use super::validate::SNAPSHOTS_MAX;
use super::*;
use proptest::prelude::*;

/// A header as `qemu-img create` lays it out: a 1 GiB disk with 64 KiB clusters.
fn plain(version: Version) -> Header {
    Header {
        version,
        cluster_bits: ClusterBits::DEFAULT,
        virtual_size: 1 << 30,
        crypt_method: CryptMethod::None,
        l1_entries: 2,
        l1_offset: HostOffset::new(0x3_0000),
        refcount_table_offset: HostOffset::new(0x1_0000),
        refcount_table_clusters: 1,
        snapshot_count: 0,
        snapshot_table_offset: HostOffset::new(0),
        incompatible: Incompatible::empty(),
        compatible: Compatible::empty(),
        autoclear: Autoclear::empty(),
        refcount_order: RefcountOrder::DEFAULT,
        header_length: if version == Version::V3 { 112 } else { 72 },
        compression: CompressionType::Deflate,
        unknown_fields: if version == Version::V3 {
            vec![0; 7]
        } else {
            vec![]
        },
        extensions: vec![Extension::BackingFormat(b"qcow2".to_vec())],
        backing_name: Some(b"base.qcow2".to_vec()),
    }
}

/// A plain version 3 header's cluster with some bytes replaced.
fn patched(patches: &[(usize, &[u8])]) -> Vec<u8> {
    let mut bytes = plain(Version::V3).encode().unwrap();
    bytes.resize(0x1_0000, 0);
    for &(at, patch) in patches {
        bytes[at..at + patch.len()].copy_from_slice(patch);
    }
    bytes
}

/// Returns the error a header gives when one of its `u32` fields is replaced.
fn error_u32(at: usize, value: u32) -> String {
    Header::parse(&patched(&[(at, &value.to_be_bytes())]))
        .unwrap_err()
        .to_string()
}

/// Returns the error a header gives when one of its `u64` fields is replaced.
fn error_u64(at: usize, value: u64) -> String {
    Header::parse(&patched(&[(at, &value.to_be_bytes())]))
        .unwrap_err()
        .to_string()
}

#[track_caller]
fn assert_names(error: &str, parts: &[&str]) {
    for part in parts {
        assert!(error.contains(part), "{error:?} does not say {part:?}");
    }
}

#[test]
fn header_of_either_version_survives_encoding() {
    for version in [Version::V2, Version::V3] {
        let header = plain(version);
        let bytes = header.encode().unwrap();
        assert_eq!(Header::parse(&bytes).unwrap(), header);
    }
}

#[test]
fn parse_refuses_foreign_and_empty_data() {
    assert_names(
        &Header::parse(b"<xml>").unwrap_err().to_string(),
        &["not a QCOW2 image", "QFI"],
    );
    assert!(matches!(
        Header::parse(b""),
        Err(HeaderError::Truncated {
            needed: 72,
            available: 0,
            ..
        })
    ));
}

#[test]
fn parse_refuses_a_header_cut_anywhere() {
    for version in [Version::V2, Version::V3] {
        let bytes = plain(version).encode().unwrap();
        for len in 0..bytes.len() {
            let error = Header::parse(&bytes[..len]).unwrap_err();
            assert!(matches!(error, HeaderError::Truncated { .. }), "{len}: {error}");
        }
    }
}

#[test]
fn parse_refuses_unknown_versions() {
    for version in [0, 1, 4, u32::MAX] {
        assert_names(&error_u32(at::VERSION, version), &["version", "byte 4", "2 or 3"]);
    }
}

#[test]
fn parse_refuses_cluster_size_out_of_range() {
    for bits in [0, 8, 22, 63, u32::MAX] {
        assert_names(
            &error_u32(at::CLUSTER_BITS, bits),
            &["cluster_bits", "9 to 21", "byte 20"],
        );
    }
}

#[test]
fn parse_refuses_disk_larger_than_any_file() {
    for size in [1 << 63, u64::MAX] {
        assert_names(&error_u64(at::SIZE, size), &["size", "byte 24"]);
    }
}

#[test]
fn geometry_rounds_odd_disk_size_down_to_sectors() {
    let header = Header::parse(&patched(&[(at::SIZE, &1_000_001_u64.to_be_bytes())])).unwrap();
    assert_eq!(header.geometry().virtual_size(), 1_000_001 / 512 * 512);
    assert_eq!(header.virtual_size, 1_000_001);
}

#[test]
fn parse_refuses_l1_table_of_bad_size_or_place() {
    for entries in [0, 1] {
        assert_names(
            &error_u32(at::L1_SIZE, entries),
            &["l1_size", "byte 36", "at least 2"],
        );
    }
    for entries in [(32 << 20) / 8 + 1, u32::MAX] {
        assert_names(
            &error_u32(at::L1_SIZE, entries),
            &["l1_size", "byte 36", "32 MiB"],
        );
    }
    for offset in [0, 0x200, 0x3_0008, u64::MAX, 1 << 63] {
        assert_names(
            &error_u64(at::L1_TABLE_OFFSET, offset),
            &["l1_table_offset", "byte 40"],
        );
    }
}

#[test]
fn parse_refuses_refcount_table_of_bad_size_or_place() {
    for clusters in [0, 129, u32::MAX] {
        let parts = ["refcount_table_clusters", "byte 56", "1 to 128"];
        assert_names(&error_u32(at::REFCOUNT_TABLE_CLUSTERS, clusters), &parts);
    }
    for offset in [0, 0x200, 0x1_0008, u64::MAX, 1 << 63] {
        let parts = ["refcount_table_offset", "byte 48"];
        assert_names(&error_u64(at::REFCOUNT_TABLE_OFFSET, offset), &parts);
    }
}

#[test]
fn parse_refuses_snapshot_table_of_bad_size_or_place() {
    for count in [SNAPSHOTS_MAX + 1, u32::MAX] {
        assert_names(
            &error_u32(at::NB_SNAPSHOTS, count),
            &["nb_snapshots", "byte 60", "65536"],
        );
    }
    for offset in [0, 0x200, 1 << 63] {
        let bytes = patched(&[
            (at::NB_SNAPSHOTS, &[0, 0, 0, 1]),
            (at::SNAPSHOTS_OFFSET, &u64::to_be_bytes(offset)),
        ]);
        let error = Header::parse(&bytes).unwrap_err().to_string();
        assert_names(&error, &["snapshots_offset", "byte 64"]);
    }
}

#[test]
fn parse_refuses_refcount_width_out_of_range() {
    for order in [7, u32::MAX] {
        assert_names(
            &error_u32(at::REFCOUNT_ORDER, order),
            &["refcount_order", "0 to 6", "byte 96"],
        );
    }
}

#[test]
fn parse_refuses_header_length_unaligned_or_out_of_range() {
    for length in [0, 72, 103, 105, 0x1_0001, 0x1_0008, u32::MAX] {
        assert_names(
            &error_u32(at::HEADER_LENGTH, length),
            &["header_length", "byte 100"],
        );
    }
}

#[test]
fn parse_refuses_extension_past_the_first_cluster() {
    for length in [1_u32 << 31, u32::MAX] {
        let error = error_u32(112 + 4, length);
        assert_names(&error, &["0xe2792aca", "byte 112"]);
    }
}

#[test]
fn parse_refuses_backing_name_outside_first_cluster() {
    for offset in [1, 71, 111, 0x1_0001, u64::MAX] {
        assert_names(
            &error_u64(at::BACKING_FILE_OFFSET, offset),
            &["backing_file_offset", "byte 8"],
        );
    }
    for size in [1024, u32::MAX] {
        assert_names(
            &error_u32(at::BACKING_FILE_SIZE, size),
            &["backing_file_size", "byte 16", "1023"],
        );
    }
    assert_names(
        &error_u64(at::BACKING_FILE_OFFSET, 0xffff),
        &["backing_file_size", "byte 16", "at most 1"],
    );
}

#[test]
fn parse_ignores_backing_size_without_backing_offset() {
    let bytes = patched(&[
        (at::BACKING_FILE_OFFSET, &[0; 8]),
        (at::BACKING_FILE_SIZE, &[0xff; 4]),
    ]);
    assert_eq!(Header::parse(&bytes).unwrap().backing_name, None);
}

#[test]
fn parse_requires_compression_type_to_match_its_bit() {
    let bit = Incompatible::COMPRESSION_TYPE.bits().to_be_bytes();
    let without_type = patched(&[(at::INCOMPATIBLE_FEATURES, &bit)]);
    let without_bit = patched(&[(at::COMPRESSION_TYPE, &[1])]);
    for bytes in [without_type, without_bit] {
        assert_names(
            &Header::parse(&bytes).unwrap_err().to_string(),
            &["compression_type", "byte 104"],
        );
    }
    let both = patched(&[(at::INCOMPATIBLE_FEATURES, &bit), (at::COMPRESSION_TYPE, &[1])]);
    assert_eq!(Header::parse(&both).unwrap().compression, CompressionType::Zstd);
    let unknown = patched(&[(at::INCOMPATIBLE_FEATURES, &bit), (at::COMPRESSION_TYPE, &[2])]);
    assert_names(
        &Header::parse(&unknown).unwrap_err().to_string(),
        &["compression_type", "0x2"],
    );
}

#[test]
fn parse_refuses_extended_l2_with_clusters_below_16_kib() {
    let bit = Incompatible::EXTENDED_L2.bits().to_be_bytes();
    let patches: [(usize, &[u8]); 2] = [
        (at::INCOMPATIBLE_FEATURES, &bit),
        (at::CLUSTER_BITS, &13_u32.to_be_bytes()),
    ];
    let mut bytes = patched(&patches);
    bytes[at::L1_SIZE..at::L1_SIZE + 4].copy_from_slice(&4096_u32.to_be_bytes());
    let error = Header::parse(&bytes).unwrap_err().to_string();
    assert_names(&error, &["cluster_bits", "at least 14"]);
}

#[test]
fn data_file_name_is_checked() {
    let named = |extensions: Vec<Extension>| {
        let header = Header {
            incompatible: Incompatible::EXTERNAL_DATA,
            extensions,
            ..plain(Version::V3)
        };
        header
            .data_file_name()
            .map(str::to_owned)
            .map_err(|error| error.to_string())
    };
    let name = |name: &[u8]| named(vec![Extension::DataFile(name.to_vec())]);
    assert_eq!(name(b"data.raw"), Ok("data.raw".to_owned()));
    assert_eq!(name(&[b'a'; 1023]), Ok("a".repeat(1023)));
    assert_names(
        &named(vec![]).unwrap_err(),
        &["external file", "0x44415441 is missing"],
    );
    assert_names(
        &name(b"").unwrap_err(),
        &["external file", "0 bytes", "1 to 1023"],
    );
    assert_names(&name(&[b'a'; 1024]).unwrap_err(), &["1024 bytes", "1 to 1023"]);
    assert_names(&name(b"a\0b").unwrap_err(), &["NUL"]);
    assert_names(&name(b"a\xff").unwrap_err(), &["not UTF-8"]);
}

#[test]
fn validate_refuses_what_excludes_a_data_file() {
    let external = |change: fn(&mut Header)| {
        let mut header = Header {
            incompatible: Incompatible::EXTERNAL_DATA,
            autoclear: Autoclear::RAW_EXTERNAL_DATA,
            backing_name: None,
            ..plain(Version::V3)
        };
        change(&mut header);
        header.validate().map_err(|error| error.to_string())
    };
    assert_eq!(external(|_| ()), Ok(()));
    let snapshots = external(|header| {
        header.snapshot_count = 1;
        header.snapshot_table_offset = HostOffset::new(1 << 20);
    });
    assert_names(&snapshots.unwrap_err(), &["nb_snapshots", "external file"]);
    let below = |header: &mut Header| header.backing_name = Some(b"base".to_vec());
    assert_names(
        &external(below).unwrap_err(),
        &["autoclear_features", "backing file"],
    );
    let plain_over = |header: &mut Header| {
        header.autoclear = Autoclear::empty();
        header.backing_name = Some(b"base".to_vec());
    };
    assert_eq!(external(plain_over), Ok(()));
}

#[test]
fn require_supported_names_each_unsupported_feature() {
    let unsupported = |header: Header| header.require_supported().unwrap_err().to_string();
    let with = |incompatible| Header {
        incompatible,
        ..plain(Version::V3)
    };
    let encrypted = |crypt_method, incompatible| Header {
        crypt_method,
        ..with(incompatible)
    };
    for (method, name) in [(CryptMethod::Aes, "aes"), (CryptMethod::Luks, "luks")] {
        let error = unsupported(encrypted(method, Incompatible::EXTERNAL_DATA));
        assert_names(&error, &["encrypted", name, "byte 32", "external data file"]);
        let alone = encrypted(method, Incompatible::empty());
        assert_eq!(alone.require_supported(), Ok(()));
    }

    let mut newer = with(Incompatible::from_bits_retain(1 << 7 | 1 << 63));
    let name = FeatureName::new(FeatureKind::Incompatible, 7, "quantum clusters");
    newer.extensions.push(Extension::FeatureNames(vec![name]));
    assert_names(&unsupported(newer), &["quantum clusters", "bit 63"]);

    assert_eq!(plain(Version::V3).require_supported(), Ok(()));
    assert_eq!(with(Incompatible::EXTENDED_L2).require_supported(), Ok(()));
}

#[test]
fn parse_refuses_unknown_encryption_method() {
    assert_names(&error_u32(at::CRYPT_METHOD, 3), &["crypt_method", "byte 32"]);
}

#[test]
fn validate_within_refuses_tables_past_end_of_file() {
    let header = plain(Version::V3);
    assert_eq!(header.validate_within(0x3_0010), Ok(()));
    let error = header.validate_within(0x3_000f).unwrap_err().to_string();
    assert_names(&error, &["L1 table", "196624", "196623"]);
    assert_names(
        &header.validate_within(0x1_0000).unwrap_err().to_string(),
        &["refcount table"],
    );
}

#[test]
fn encode_refuses_header_larger_than_its_cluster() {
    let header = Header {
        cluster_bits: ClusterBits::parse(9).unwrap(),
        backing_name: Some(vec![b'b'; 600]),
        ..plain(Version::V3)
    };
    assert!(matches!(
        header.encode(),
        Err(HeaderError::TooLarge { room: 512, .. })
    ));
}

#[test]
fn encode_refuses_version_2_with_version_3_fields() {
    let lazy = Header {
        compatible: Compatible::LAZY_REFCOUNTS,
        ..plain(Version::V2)
    };
    assert!(lazy.encode().is_err());
    let narrow = Header {
        refcount_order: RefcountOrder::parse(0).unwrap(),
        ..plain(Version::V2)
    };
    assert!(narrow.encode().is_err());
}

proptest! {
    #[test]
    fn header_parse_never_panics_and_bounds_table_sizes(
        patches in prop::collection::vec((0usize..160, any::<[u8; 4]>()), 0..12),
        len in 0usize..0x2_0000,
    ) {
        let mut bytes = patched(&[]);
        for (at, patch) in patches {
            bytes[at..at + 4].copy_from_slice(&patch);
        }
        bytes.truncate(len);
        if let Ok(header) = Header::parse(&bytes) {
            prop_assert!(header.l1_bytes() <= 32 << 20);
            prop_assert!(header.refcount_table_bytes() <= 8 << 20);
            let _supported = header.require_supported();
            if let Ok(again) = header.encode() {
                prop_assert_eq!(Header::parse(&again).unwrap(), header);
            }
        }
    }

    #[test]
    fn header_encoding_keeps_unknown_fields_and_extensions(
        fields in prop::collection::vec(any::<u8>(), 0..64),
        kind in 1u32..0x1000_0000,
        data in prop::collection::vec(any::<u8>(), 0..200),
        bits in any::<(u64, u64)>(),
    ) {
        prop_assume!(kind != 0x0537_be77);
        let mut unknown_fields = fields;
        unknown_fields.resize((unknown_fields.len() + 1).next_multiple_of(8) - 1, 0xee);
        let header = Header {
            header_length: 105 + unknown_fields.len() as u32,
            unknown_fields,
            compatible: Compatible::from_bits_retain(bits.0),
            autoclear: Autoclear::from_bits_retain(bits.1),
            extensions: vec![Extension::Unknown { kind, data }],
            ..plain(Version::V3)
        };
        let bytes = header.encode().unwrap();
        prop_assert_eq!(Header::parse(&bytes).unwrap(), header);
    }
}
