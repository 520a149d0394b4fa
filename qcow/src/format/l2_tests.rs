//! Decoding and encoding of L2 entries, and tables of them.

use super::*;
use crate::format::{ClusterBits, RefcountOrder};
use proptest::prelude::*;

fn geometry(version: Version, bits: u32) -> Geometry {
    Geometry::new(
        version,
        ClusterBits::parse(bits).unwrap(),
        RefcountOrder::DEFAULT,
        1 << 30,
    )
}

fn decode(raw: u64) -> Result<L2Mapping, EntryError> {
    L2Entry::from_raw(raw).decode(&geometry(Version::V3, 16))
}

#[test]
fn l2_entry_decodes_plain_kinds_per_specification() {
    let host = HostOffset::new(0x5_0000);
    assert_eq!(decode(0), Ok(L2Mapping::Unallocated));
    assert_eq!(decode(1 << 63), Ok(L2Mapping::Unallocated));
    assert_eq!(
        decode(1),
        Ok(L2Mapping::Zero {
            host: None,
            copied: false
        })
    );
    assert_eq!(
        decode(1 << 63 | 1),
        Ok(L2Mapping::Zero {
            host: None,
            copied: false
        })
    );
    assert_eq!(
        decode(0x5_0001),
        Ok(L2Mapping::Zero {
            host: Some(host),
            copied: false
        })
    );
    assert_eq!(decode(0x5_0000), Ok(L2Mapping::Data { host, copied: false }));
    assert_eq!(
        decode(1 << 63 | 0x5_0000),
        Ok(L2Mapping::Data { host, copied: true })
    );
}

#[test]
fn compressed_extent_ends_at_its_last_sector() {
    // 64 KiB clusters: x = 54. Two more sectors after the one that holds byte 0x50123.
    let raw = 1 << 62 | 2 << 54 | 0x5_0123;
    let host = HostOffset::new(0x5_0123);
    let extent = CompressedExtent {
        host,
        len_max: 3 * 512 - 0x123,
    };
    assert_eq!(decode(raw), Ok(L2Mapping::Compressed(extent)));
    assert_eq!(extent.end() % 512, 0);
}

#[test]
fn compressed_entry_with_copied_is_refused_but_located() {
    let entry = 3 << 62 | 0x5_0123;
    assert_eq!(decode(entry), Err(EntryError::CompressedCopied { entry }));
    let extent = L2Entry::from_raw(entry)
        .compressed_extent(&geometry(Version::V3, 16))
        .unwrap();
    assert_eq!(extent.host, HostOffset::new(0x5_0123));
}

#[test]
fn compressed_entry_reports_reserved_bits_before_copied() {
    let entry = 3 << 62 | 1 << 56;
    let entry = L2Entry::from_raw(entry);
    let geometry = geometry(Version::V3, 9);
    assert!(matches!(
        entry.decode(&geometry),
        Err(EntryError::ReservedBits { .. })
    ));
    assert_eq!(entry.compressed_extent(&geometry), None);
}

#[test]
fn small_clusters_reserve_compressed_offset_bits_past_55() {
    let entry = 1 << 62 | 1 << 56;
    let found = L2Entry::from_raw(entry).decode(&geometry(Version::V3, 9));
    assert_eq!(
        found,
        Err(EntryError::ReservedBits {
            structure: "L2 entry",
            entry,
            bits: 1 << 56
        })
    );
}

#[test]
fn l2_entry_with_reserved_bit_names_it() {
    for bit in (1..9).chain(56..62) {
        let entry = 0x5_0000 | 1 << bit;
        let expected = EntryError::ReservedBits {
            structure: "L2 entry",
            entry,
            bits: 1 << bit,
        };
        assert_eq!(decode(entry), Err(expected));
    }
}

#[test]
fn l2_entry_refuses_zero_flag_in_version_2() {
    let found = L2Entry::from_raw(1).decode(&geometry(Version::V2, 16));
    assert_eq!(found, Err(EntryError::ZeroFlagInVersion2 { entry: 1 }));
}

#[test]
fn l2_entry_refuses_unaligned_data_cluster() {
    assert!(matches!(
        decode(0x5_0200),
        Err(EntryError::Unaligned { offset: 0x5_0200, .. })
    ));
}

#[test]
fn compressed_refuses_extent_that_does_not_fit() {
    let geometry = geometry(Version::V3, 16);
    let at = HostOffset::new;
    assert!(L2Entry::compressed(at(0), 0, &geometry).is_none());
    assert!(L2Entry::compressed(at(1 << 54), 1, &geometry).is_none());
    assert!(L2Entry::compressed(at(0), 256 * 512, &geometry).is_some());
    assert!(L2Entry::compressed(at(0), 256 * 512 + 1, &geometry).is_none());
    assert!(L2Entry::compressed(at(u64::MAX), u32::MAX, &geometry).is_none());
}

#[test]
fn l2_table_reads_and_writes_either_entry_width() {
    for width in [L2EntryWidth::Standard, L2EntryWidth::Extended] {
        let geometry = geometry(Version::V3, 16).with_l2_entry_width(width);
        let mut bytes = vec![0xFF; 4 * width.bytes()];
        let bitmap = match width {
            L2EntryWidth::Standard => SubclusterBitmap::UNALLOCATED,
            L2EntryWidth::Extended => SubclusterBitmap::from_raw(0x0102_0304_0506_0708),
        };
        let entries = [1, 0x5_0000, 1 << 63 | 0x6_0000, 0];
        let entries = entries.map(|raw| L2Entry::from_raw(raw).with_bitmap(bitmap));
        let mut table = L2TableMut::new(&mut bytes, &geometry);
        for (index, &entry) in entries.iter().enumerate() {
            table.set(index, entry);
        }
        assert!(!table.update(|entry| entry));
        assert!(table.update(|entry| if entry == entries[2] { entries[0] } else { entry }));
        let table = L2Table::new(&bytes, &geometry);
        let expected = [entries[0], entries[1], entries[0], entries[3]];
        assert_eq!(table.len(), 4);
        assert!(table.iter().eq(expected));
        assert!((0..4).map(|index| table.get(index)).eq(expected));
        assert_eq!(table.get(4), L2Entry::REFUSED);
        let last = &bytes[L2Table::offset_of(&geometry, 3) as usize..];
        assert_eq!(
            last,
            [&[0; 8], &bitmap.raw().to_be_bytes()[..width.bytes() - 8]].concat()
        );
    }
}

/// Method: every descriptor that QEMU tells apart, beside every bitmap that it does.
#[test]
fn extended_entry_decodes_by_its_bitmap_as_in_qemu() {
    let geometry = geometry(Version::V3, 16).with_l2_entry_width(L2EntryWidth::Extended);
    let decode = |raw: u64, bitmap| {
        let entry = L2Entry::from_raw(raw).with_bitmap(SubclusterBitmap::from_raw(bitmap));
        entry.decode(&geometry)
    };
    let (at, zero, data) = (Some(HostOffset::new(0x5_0000)), 0xFFFF_FFFF << 32, 0xFFFF_FFFF);
    let bitmap = SubclusterBitmap::from_raw;
    let (host, copied) = (HostOffset::new(0x5_0000), true);
    let owned = 1 << 63 | 0x5_0000;
    assert_eq!(decode(0, 0), Ok(L2Mapping::Unallocated));
    assert_eq!(decode(1, 0), Ok(L2Mapping::Unallocated), "no all-zeros flag");
    assert_eq!(decode(1 << 63, 0), Ok(L2Mapping::Unallocated));
    assert_eq!(decode(owned, data), Ok(L2Mapping::Data { host, copied }));
    assert_eq!(decode(owned | 1, data), Ok(L2Mapping::Data { host, copied }));
    assert_eq!(decode(owned, zero), Ok(L2Mapping::Zero { host: at, copied }));
    let plain_zero = L2Mapping::Zero {
        host: None,
        copied: false,
    };
    assert_eq!(decode(1 << 63, zero), Ok(plain_zero));
    for mixed in [0, 1, 1 << 32, 2 | 1 << 32, data - 1] {
        let expected = L2Mapping::Subclusters {
            host: at,
            copied,
            bitmap: bitmap(mixed),
        };
        assert_eq!(decode(owned, mixed), Ok(expected));
    }
    let placeless = L2Mapping::Subclusters {
        host: None,
        copied: false,
        bitmap: bitmap(1 << 40),
    };
    assert_eq!(decode(0, 1 << 40), Ok(placeless));
    assert!(matches!(
        decode(0, 1),
        Err(EntryError::SubclustersWithoutCluster { .. })
    ));
    let both = decode(owned, 3 | 1 << 33);
    assert!(matches!(
        both,
        Err(EntryError::SubclustersOfTwoKinds { both: 2, .. })
    ));
    // Its bitmap means nothing.
    let compressed = decode(1 << 62 | 0x5_0000, 1 | 1 << 32);
    assert!(matches!(compressed, Ok(L2Mapping::Compressed(_))));
    let reserved = decode(owned | 2, data);
    assert!(matches!(reserved, Err(EntryError::ReservedBits { bits: 2, .. })));
}

#[test]
fn standard_entry_cannot_express_subclusters() {
    let mapping = L2Mapping::Subclusters {
        host: None,
        copied: false,
        bitmap: SubclusterBitmap::from_raw(1 << 32),
    };
    assert_eq!(L2Entry::encode(mapping, &geometry(Version::V3, 16)), None);
}

proptest! {
    #[test]
    fn l2_entry_keeps_its_meaning_through_decode_and_encode(
        raw in any::<u64>(), data in any::<u32>(), zeros in any::<u32>(), bits in 9u32..=21, extended in any::<bool>(),
    ) {
        let width = if extended { L2EntryWidth::Extended } else { L2EntryWidth::Standard };
        let geometry = geometry(Version::V3, bits).with_l2_entry_width(width);
        let bitmap = SubclusterBitmap::from_raw(u64::from(zeros & !data) << 32 | u64::from(data));
        if let Ok(mapping) = L2Entry::from_raw(raw).with_bitmap(bitmap).decode(&geometry) {
            let again = L2Entry::encode(mapping, &geometry).unwrap();
            prop_assert_eq!(again.decode(&geometry), Ok(mapping));
        }
    }

    #[test]
    fn compressed_extents_survive_encoding(
        host in 0u64..(1 << 49), len in 1u32..(2 << 20), bits in 9u32..=21,
    ) {
        let geometry = geometry(Version::V3, bits);
        if let Some(entry) = L2Entry::compressed(HostOffset::new(host), len, &geometry) {
            let Ok(L2Mapping::Compressed(extent)) = entry.decode(&geometry) else {
                panic!("{entry:?} is not compressed");
            };
            prop_assert_eq!(extent.host.bytes(), host);
            prop_assert!(extent.len_max >= len && extent.len_max - len < 512);
        } else {
            prop_assert!(u64::from(len) + 511 > 1 << bits);
        }
    }
}
