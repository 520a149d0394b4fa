//! The header extensions alone, from arbitrary bytes: none may panic, and what is understood survives a round trip.

use qcow::format::Extension;

/// The header byte where extensions begin in images of version 3.
const AREA: usize = 112;

/// The bytes as the area behind a header.
///
/// # Panics
///
/// If that does not hold.
pub fn body(bytes: &[u8]) -> &'static str {
    let Ok(extensions) = Extension::parse_all(bytes, AREA) else {
        return "refused";
    };
    if extensions.is_empty() {
        return "none";
    }
    assert!(extensions.len() <= bytes.len() / 8);
    let mut encoded = Vec::new();
    extensions
        .iter()
        .for_each(|extension| extension.encode_into(&mut encoded));
    assert!(
        encoded.len() <= bytes.len().next_multiple_of(8),
        "it has become longer"
    );
    Extension::encode_end_into(&mut encoded);
    assert_eq!(Extension::parse_all(&encoded, AREA).as_ref(), Ok(&extensions));
    let known = extensions
        .iter()
        .any(|extension| !matches!(extension, Extension::Unknown { .. }));
    if known { "known" } else { "unknown" }
}
