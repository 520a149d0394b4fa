//! Bodies over pure functions: no bytes may panic, and what is understood survives a round trip.

use qcow::format::{
    BitmapDirectoryEntry, BitmapTableEntry, ClusterBits, Geometry, Header, L1Entry, L2Entry, L2Mapping,
    RefcountOrder, RefcountTableEntry, SnapshotEntry, Version,
};

/// The bytes as a file's first cluster.
pub fn header(bytes: &[u8]) {
    let Ok(header) = Header::decode(bytes) else { return };
    let valid = header.validate().is_ok();
    // Only the answers' existence matters here.
    drop((
        header.require_supported(),
        header.validate_within(bytes.len() as u64),
        header.geometry(),
    ));
    if !valid {
        return;
    }
    assert!(header.l1_bytes() <= 32 << 20);
    assert!(header.refcount_table_bytes() <= 8 << 20);
    if let Ok(encoded) = header.encode() {
        assert_eq!(Header::parse(&encoded).as_ref(), Ok(&header));
    }
}

/// Eight bytes of entry, two that choose the geometry; the rest as snapshot and bitmap entries.
pub fn entries(bytes: &[u8]) {
    let [raw @ .., version, bits, _] = match bytes.first_chunk::<11>() {
        Some(chunk) => *chunk,
        None => return,
    };
    let version = if version & 1 == 0 {
        Version::V2
    } else {
        Version::V3
    };
    let Ok(cluster_bits) = ClusterBits::parse(9 + u32::from(bits) % 13) else {
        return;
    };
    let geometry = Geometry::new(version, cluster_bits, RefcountOrder::DEFAULT, 1 << 40);
    let raw = u64::from_be_bytes(raw);

    if let Ok(mapping) = L2Entry::from_raw(raw).decode(&geometry) {
        check_mapping(mapping, &geometry);
        let again = L2Entry::encode(mapping, &geometry).expect("what was decoded can be encoded");
        assert_eq!(again.decode(&geometry), Ok(mapping));
    }
    if let Ok(Some(table)) = L1Entry::from_raw(raw).decode(&geometry) {
        assert_eq!(L1Entry::encode(table).raw(), raw);
    }
    if let Ok(Some(block)) = RefcountTableEntry::from_raw(raw).decode(&geometry) {
        assert_eq!(RefcountTableEntry::encode(block).raw(), raw);
    }
    let _checked = BitmapTableEntry::from_raw(raw).decode(&geometry);
    if let Ok(snapshot) = SnapshotEntry::parse(&bytes[11..]) {
        let mut encoded = Vec::new();
        snapshot
            .encode_into(&mut encoded)
            .expect("what was parsed can be encoded");
        assert_eq!(SnapshotEntry::parse(&encoded), Ok(snapshot));
    }
    if let Ok(bitmap) = BitmapDirectoryEntry::parse(&bytes[11..]) {
        let _checked = bitmap.validate(&geometry);
        let mut encoded = Vec::new();
        bitmap
            .encode_into(&mut encoded)
            .expect("what was parsed can be encoded");
        assert_eq!(BitmapDirectoryEntry::parse(&encoded), Ok(bitmap));
    }
}

/// What every mapping keeps, whatever the entry was.
fn check_mapping(mapping: L2Mapping, geometry: &Geometry) {
    match mapping {
        L2Mapping::Unallocated | L2Mapping::Zero { host: None, .. } => {}
        L2Mapping::Zero { host: Some(host), .. } | L2Mapping::Data { host, .. } => {
            assert!(host.bytes() != 0 && host.is_aligned_to(geometry.cluster_size()));
        }
        L2Mapping::Compressed(extent) => {
            let max = 2 * geometry.cluster_size();
            assert!(extent.len_max >= 1 && u64::from(extent.len_max) <= max);
            assert!(extent.end() < 1 << 62);
        }
    }
}
