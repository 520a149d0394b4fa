//! The header and its extensions, from arbitrary bytes: none may panic, and what is understood survives a round trip.

use qcow::format::Header;

/// The bytes as a file's first cluster.
///
/// # Panics
///
/// If that does not hold.
pub fn body(bytes: &[u8]) -> &'static str {
    let Ok(header) = Header::decode(bytes) else {
        return "no header";
    };
    let valid = header.validate().is_ok();
    // Only that they answer matters here.
    drop((
        header.require_supported(),
        header.validate_within(bytes.len() as u64),
        header.geometry(),
    ));
    if !valid {
        return "refused";
    }
    assert!(header.l1_bytes() <= 32 << 20);
    assert!(header.refcount_table_bytes() <= 8 << 20);
    if let Ok(encoded) = header.encode() {
        assert_eq!(Header::parse(&encoded).as_ref(), Ok(&header));
    }
    "understood"
}
