//! Table entries of every kind, from arbitrary bytes: none may panic, and what is understood survives a round trip.

use qcow::format::{
    BitmapDirectoryEntry, BitmapTableEntry, ClusterBits, Geometry, L1Entry, L2Entry, L2EntryWidth, L2Mapping,
    RefcountOrder, RefcountTableEntry, SnapshotEntry, SubclusterBitmap, Version,
};

/// Eight bytes of entry, two that choose the geometry; the rest as snapshot and bitmap entries.
///
/// # Panics
///
/// If that does not hold.
pub fn body(bytes: &[u8]) -> &'static str {
    let [raw @ .., version, bits, _] = match bytes.first_chunk::<11>() {
        Some(chunk) => *chunk,
        None => return "short",
    };
    let version = if version & 1 == 0 {
        Version::V2
    } else {
        Version::V3
    };
    let Ok(cluster_bits) = ClusterBits::parse(9 + u32::from(bits) % 13) else {
        return "short";
    };
    let geometry = Geometry::new(version, cluster_bits, RefcountOrder::DEFAULT, 1 << 40);
    let raw = u64::from_be_bytes(raw);

    let bitmap = bytes.get(11..).and_then(|rest| rest.first_chunk::<8>());
    let bitmap = SubclusterBitmap::from_raw(bitmap.map_or(0, |raw| u64::from_be_bytes(*raw)));
    for width in [L2EntryWidth::Standard, L2EntryWidth::Extended] {
        let geometry = geometry.with_l2_entry_width(width);
        let entry = L2Entry::from_raw(raw).with_bitmap(bitmap);
        if let Ok(mapping) = entry.decode(&geometry) {
            check_mapping(mapping, &geometry);
            let again = L2Entry::encode(mapping, &geometry).expect("what was decoded can be encoded");
            assert_eq!(again.decode(&geometry), Ok(mapping));
        }
    }
    if let Ok(Some(table)) = L1Entry::from_raw(raw).decode(&geometry) {
        assert_eq!(L1Entry::encode(table).raw(), raw);
    }
    if let Ok(Some(block)) = RefcountTableEntry::from_raw(raw).decode(&geometry) {
        assert_eq!(RefcountTableEntry::encode(block).raw(), raw);
    }
    let _checked = BitmapTableEntry::from_raw(raw).decode(&geometry);
    let mut reached = "entry";
    if let Ok(bitmap) = BitmapDirectoryEntry::parse(&bytes[11..]) {
        let _checked = bitmap.validate(&geometry);
        let mut encoded = Vec::new();
        bitmap
            .encode_into(&mut encoded)
            .expect("what was parsed can be encoded");
        assert_eq!(BitmapDirectoryEntry::parse(&encoded), Ok(bitmap));
        reached = "bitmap";
    }
    if let Ok(snapshot) = SnapshotEntry::parse(&bytes[11..]) {
        let mut encoded = Vec::new();
        snapshot
            .encode_into(&mut encoded)
            .expect("what was parsed can be encoded");
        assert_eq!(SnapshotEntry::parse(&encoded), Ok(snapshot));
        reached = "snapshot";
    }
    reached
}

/// Checks what every mapping keeps, whatever the entry was.
fn check_mapping(mapping: L2Mapping, geometry: &Geometry) {
    if let Some((host, _)) = mapping.cluster() {
        assert!(host.bytes() != 0 && host.is_aligned_to(geometry.cluster_size()));
    }
    match mapping {
        L2Mapping::Unallocated | L2Mapping::Zero { .. } | L2Mapping::Data { .. } => {}
        L2Mapping::Subclusters { host, bitmap, .. } => {
            assert!(geometry.has_subclusters() && bitmap.data() & bitmap.zeros() == 0);
            assert!(host.is_some() || bitmap.data() == 0);
        }
        L2Mapping::Compressed(extent) => {
            let max = 2 * geometry.cluster_size();
            assert!(extent.len_max >= 1 && u64::from(extent.len_max) <= max);
            assert!(extent.end() < 1 << 62);
        }
    }
}
