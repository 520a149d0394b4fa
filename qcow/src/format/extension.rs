//! Header extensions: typed optional sections between the header and the backing file name.
//! Spec: "Header extensions", "Feature name table", "Bitmaps extension", "Full disk encryption
//! header pointer".
//!
//! Their order is kept, and unknown ones are kept too.

use super::HostOffset;
use super::bytes::{array_at, pad_to_8, u32_at, u64_at};

/// Bytes of type and length before an extension's data.
pub const EXTENSION_HEADER_SIZE: usize = 8;

const END: u32 = 0;
const BACKING_FORMAT: u32 = 0xe279_2aca;
const FEATURE_NAMES: u32 = 0x6803_f857;
const BITMAPS: u32 = 0x2385_2875;
const CRYPTO: u32 = 0x0537_be77;
const DATA_FILE: u32 = 0x4441_5441;

const FEATURE_NAME_SIZE: usize = 48;
const BITMAPS_SIZE: usize = 24;
const CRYPTO_SIZE: usize = 16;
/// The longest backing format name QEMU accepts, in bytes.
pub const BACKING_FORMAT_MAX: usize = 15;

/// One header extension.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Extension {
    /// The backing file's format, such as `raw` or `qcow2`.
    BackingFormat(Vec<u8>),
    /// Names for feature bits.
    FeatureNames(Vec<FeatureName>),
    /// The place of the persistent bitmaps.
    Bitmaps(BitmapsExtension),
    /// The place of the encryption header.
    CryptoHeader {
        /// Its first byte; a multiple of the cluster size.
        offset: HostOffset,
        /// Its length in bytes.
        len: u64,
    },
    /// The external data file's name.
    DataFile(Vec<u8>),
    /// An unknown extension, perhaps newer; kept as it is.
    Unknown {
        /// The extension's type.
        kind: u32,
        /// Its data, without padding.
        data: Vec<u8>,
    },
}

/// The header's feature field that a [`FeatureName`] belongs to.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum FeatureKind {
    /// [`super::Incompatible`].
    Incompatible,
    /// [`super::Compatible`].
    Compatible,
    /// [`super::Autoclear`].
    Autoclear,
    /// A field that this edition of the format does not define.
    Other(u8),
}

/// One entry of the feature name table.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct FeatureName {
    /// The field the bit is in.
    pub kind: FeatureKind,
    /// The bit's number, 0 to 63.
    pub bit: u8,
    /// The name, zero-padded.
    pub name: [u8; FEATURE_NAME_SIZE - 2],
}

/// The place of the directory of persistent bitmaps.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct BitmapsExtension {
    /// The number of bitmaps in the directory.
    pub count: u32,
    /// Reserved by the format, to be zero.
    pub reserved: u32,
    /// The directory's size in bytes.
    pub directory_size: u64,
    /// Its first byte; a multiple of the cluster size.
    pub directory_offset: HostOffset,
}

/// The extension area cannot be read. `at` is the header byte where the extension starts.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum ExtensionError {
    /// The data would run past the end of the area.
    #[error(
        "header extension {kind:#010x} (header byte {at}) has length {len}; at most {room} bytes are left for it"
    )]
    TooLong {
        /// The extension's type.
        kind: u32,
        /// The header byte where it starts.
        at: usize,
        /// The length it claims, in bytes.
        len: u32,
        /// The bytes left in the area.
        room: usize,
    },
    /// The backing file name, or the end of the file, cuts off its type and length.
    #[error(
        "header extension at header byte {at} has {room} bytes before the backing file name or the end of the \
         header; its type and length take {EXTENSION_HEADER_SIZE}"
    )]
    Cut {
        /// The header byte where it starts.
        at: usize,
        /// The bytes left in the area.
        room: usize,
    },
    /// The data does not have the length its type demands.
    #[error("header extension {kind:#010x} (header byte {at}) has length {len}; expected {expected}")]
    Length {
        /// The extension's type.
        kind: u32,
        /// The header byte where it starts.
        at: usize,
        /// The length it claims, in bytes.
        len: u32,
        /// The expected length in words.
        expected: &'static str,
    },
    /// A type that may appear once appears again.
    #[error("header extension {kind:#010x} appears again at header byte {at}; expected once")]
    Repeated {
        /// The extension's type.
        kind: u32,
        /// The header byte where the second one starts.
        at: usize,
    },
}

impl FeatureName {
    /// Creates a table entry; a name longer than 46 bytes is cut.
    pub fn new(kind: FeatureKind, bit: u8, name: &str) -> Self {
        let mut padded = [0; FEATURE_NAME_SIZE - 2];
        for (to, from) in padded.iter_mut().zip(name.bytes()) {
            *to = from;
        }
        Self {
            kind,
            bit,
            name: padded,
        }
    }

    /// Returns the name as text, with invalid UTF-8 replaced.
    pub fn text(&self) -> String {
        let name = self.name.split(|&byte| byte == 0).next().unwrap_or_default();
        String::from_utf8_lossy(name).into_owned()
    }

    fn parse(entry: &[u8; FEATURE_NAME_SIZE]) -> Self {
        let [kind, bit, name @ ..] = *entry;
        let kind = match kind {
            0 => FeatureKind::Incompatible,
            1 => FeatureKind::Compatible,
            2 => FeatureKind::Autoclear,
            other => FeatureKind::Other(other),
        };
        Self { kind, bit, name }
    }
}

impl FeatureKind {
    const fn number(self) -> u8 {
        match self {
            Self::Incompatible => 0,
            Self::Compatible => 1,
            Self::Autoclear => 2,
            Self::Other(number) => number,
        }
    }
}

impl Extension {
    /// Returns the extension's type field.
    pub const fn kind(&self) -> u32 {
        match self {
            Self::BackingFormat(_) => BACKING_FORMAT,
            Self::FeatureNames(_) => FEATURE_NAMES,
            Self::Bitmaps(_) => BITMAPS,
            Self::CryptoHeader { .. } => CRYPTO,
            Self::DataFile(_) => DATA_FILE,
            Self::Unknown { kind, .. } => *kind,
        }
    }

    /// Parses the extensions in `area`, which starts at header byte `area_at` and ends where the
    /// backing file name or the next cluster begins. The end marker may be missing.
    ///
    /// # Errors
    ///
    /// [`ExtensionError`] naming the extension and its offset.
    pub fn parse_all(area: &[u8], area_at: usize) -> Result<Vec<Self>, ExtensionError> {
        let mut extensions: Vec<Self> = Vec::new();
        let mut rest = area;
        loop {
            let at = area_at.saturating_add(area.len().saturating_sub(rest.len()));
            let (Some(kind), Some(len)) = (u32_at(rest, 0), u32_at(rest, 4)) else {
                // Zeros are a marker that needs no more room.
                if rest.iter().any(|&byte| byte != 0) {
                    return Err(ExtensionError::Cut { at, room: rest.len() });
                }
                break;
            };
            if kind == END {
                break;
            }
            let body = rest.get(EXTENSION_HEADER_SIZE..).unwrap_or_default();
            let Some(data) = body.get(..len as usize) else {
                return Err(ExtensionError::TooLong {
                    kind,
                    at,
                    len,
                    room: body.len(),
                });
            };
            let extension = Self::parse(kind, data).map_err(|expected| ExtensionError::Length {
                kind,
                at,
                len,
                expected,
            })?;
            let known = !matches!(extension, Self::Unknown { .. });
            if known && extensions.iter().any(|earlier| earlier.kind() == kind) {
                return Err(ExtensionError::Repeated { kind, at });
            }
            extensions.push(extension);
            rest = body.get(data.len().next_multiple_of(8)..).unwrap_or_default();
        }
        Ok(extensions)
    }

    /// Parses one extension's data. Returns the expected length as the error.
    fn parse(kind: u32, data: &[u8]) -> Result<Self, &'static str> {
        let extension = match kind {
            BACKING_FORMAT if data.len() > BACKING_FORMAT_MAX => return Err("at most 15"),
            BACKING_FORMAT => Self::BackingFormat(data.to_vec()),
            FEATURE_NAMES => {
                let (entries, _) = data.as_chunks::<FEATURE_NAME_SIZE>();
                Self::FeatureNames(entries.iter().map(FeatureName::parse).collect())
            }
            BITMAPS => Self::Bitmaps(BitmapsExtension::parse(data).ok_or("24")?),
            CRYPTO => match (array_at::<CRYPTO_SIZE>(data, 0), u64_at(data, 0), u64_at(data, 8)) {
                (Some(_), Some(offset), Some(len)) if data.len() == CRYPTO_SIZE => Self::CryptoHeader {
                    offset: HostOffset::new(offset),
                    len,
                },
                _ => return Err("16"),
            },
            DATA_FILE => Self::DataFile(data.to_vec()),
            _ => Self::Unknown {
                kind,
                data: data.to_vec(),
            },
        };
        Ok(extension)
    }

    /// Appends the extension, padded to eight bytes.
    pub fn encode_into(&self, out: &mut Vec<u8>) {
        let mut data = Vec::new();
        match self {
            Self::BackingFormat(bytes) | Self::DataFile(bytes) | Self::Unknown { data: bytes, .. } => {
                data.extend_from_slice(bytes);
            }
            Self::FeatureNames(names) => {
                for name in names {
                    data.extend_from_slice(&[name.kind.number(), name.bit]);
                    data.extend_from_slice(&name.name);
                }
            }
            Self::Bitmaps(bitmaps) => {
                data.extend_from_slice(&bitmaps.count.to_be_bytes());
                data.extend_from_slice(&bitmaps.reserved.to_be_bytes());
                data.extend_from_slice(&bitmaps.directory_size.to_be_bytes());
                data.extend_from_slice(&bitmaps.directory_offset.bytes().to_be_bytes());
            }
            Self::CryptoHeader { offset, len } => {
                data.extend_from_slice(&offset.bytes().to_be_bytes());
                data.extend_from_slice(&len.to_be_bytes());
            }
        }
        out.extend_from_slice(&self.kind().to_be_bytes());
        out.extend_from_slice(&(data.len() as u32).to_be_bytes());
        out.extend_from_slice(&data);
        pad_to_8(out);
    }

    /// Appends the marker that ends the extension area.
    pub fn encode_end_into(out: &mut Vec<u8>) {
        out.extend_from_slice(&[0; EXTENSION_HEADER_SIZE]);
    }
}

impl BitmapsExtension {
    fn parse(data: &[u8]) -> Option<Self> {
        let data = data
            .first_chunk::<BITMAPS_SIZE>()
            .filter(|_| data.len() == BITMAPS_SIZE)?;
        Some(Self {
            count: u32_at(data, 0)?,
            reserved: u32_at(data, 4)?,
            directory_size: u64_at(data, 8)?,
            directory_offset: HostOffset::new(u64_at(data, 16)?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn encode(extensions: &[Extension]) -> Vec<u8> {
        let mut out = Vec::new();
        extensions
            .iter()
            .for_each(|extension| extension.encode_into(&mut out));
        Extension::encode_end_into(&mut out);
        out
    }

    #[test]
    fn parse_all_locates_extension_longer_than_the_area() {
        for len in [9, 1 << 31, u32::MAX] {
            let mut area = encode(&[Extension::BackingFormat(b"raw".to_vec())]);
            let at = 104 + area.len() - 8;
            area.truncate(area.len() - 8);
            area.extend_from_slice(&0x1234_u32.to_be_bytes());
            area.extend_from_slice(&len.to_be_bytes());
            area.extend_from_slice(&[0; 8]);
            let expected = ExtensionError::TooLong {
                kind: 0x1234,
                at,
                len,
                room: 8,
            };
            assert_eq!(Extension::parse_all(&area, 104), Err(expected));
        }
    }

    #[test]
    fn parse_all_refuses_extension_header_cut_by_area_end() {
        let whole = encode(&[Extension::DataFile(b"disk.raw".to_vec())]);
        let before_end = whole.len() - EXTENSION_HEADER_SIZE;
        for room in 1..EXTENSION_HEADER_SIZE {
            let mut area = whole[..before_end].to_vec();
            area.resize(before_end + room, 0);
            assert!(Extension::parse_all(&area, 112).is_ok(), "zeros end the area");
            area[before_end + room - 1] = 0x12;
            let at = 112 + before_end;
            assert_eq!(
                Extension::parse_all(&area, 112),
                Err(ExtensionError::Cut { at, room })
            );
        }
    }

    #[test]
    fn parse_all_refuses_known_extension_of_wrong_length() {
        for (kind, expected) in [(BITMAPS, "24"), (CRYPTO, "16"), (BACKING_FORMAT, "at most 15")] {
            for len in [0_u32, 15, 17, 25, 32] {
                if kind == BACKING_FORMAT && len <= 15 {
                    continue;
                }
                let mut area = [kind.to_be_bytes(), len.to_be_bytes()].concat();
                area.resize(64, 0);
                let error = ExtensionError::Length {
                    kind,
                    at: 0,
                    len,
                    expected,
                };
                assert_eq!(Extension::parse_all(&area, 0), Err(error));
            }
        }
    }

    #[test]
    fn parse_all_refuses_repeats_of_known_extensions_only() {
        let raw = Extension::BackingFormat(b"raw".to_vec());
        let twice = encode(&[raw.clone(), raw]);
        assert!(matches!(
            Extension::parse_all(&twice, 0),
            Err(ExtensionError::Repeated { at: 16, .. })
        ));
        let unknown = Extension::Unknown {
            kind: 7,
            data: vec![1],
        };
        let twice = [unknown.clone(), unknown];
        assert_eq!(Extension::parse_all(&encode(&twice), 0).unwrap(), twice);
    }

    #[test]
    fn parse_all_accepts_an_area_without_end_marker() {
        let mut area = encode(&[Extension::DataFile(b"disk.raw".to_vec())]);
        area.truncate(area.len() - 8);
        assert_eq!(
            Extension::parse_all(&area, 0).unwrap(),
            [Extension::DataFile(b"disk.raw".to_vec())]
        );
    }

    fn any_extension() -> impl Strategy<Value = Extension> {
        let data = || prop::collection::vec(any::<u8>(), 0..100);
        let name = (any::<u8>(), any::<u8>(), any::<[u8; 32]>()).prop_map(|(kind, bit, text)| {
            let mut entry = [0; FEATURE_NAME_SIZE];
            entry[0] = kind;
            entry[1] = bit;
            entry[2..34].copy_from_slice(&text);
            FeatureName::parse(&entry)
        });
        prop_oneof![
            prop::collection::vec(any::<u8>(), 0..=15).prop_map(Extension::BackingFormat),
            prop::collection::vec(name, 0..8).prop_map(Extension::FeatureNames),
            any::<(u32, u32, u64, u64)>().prop_map(|(count, reserved, directory_size, offset)| {
                let directory_offset = HostOffset::new(offset);
                Extension::Bitmaps(BitmapsExtension {
                    count,
                    reserved,
                    directory_size,
                    directory_offset,
                })
            }),
            any::<(u64, u64)>().prop_map(|(at, len)| Extension::CryptoHeader {
                offset: HostOffset::new(at),
                len
            }),
            data().prop_map(Extension::DataFile),
            (0x100u32..0x200, data()).prop_map(|(kind, data)| Extension::Unknown { kind, data }),
        ]
    }

    proptest! {
        #[test]
        fn extensions_survive_encoding(mut list in prop::collection::vec(any_extension(), 0..6)) {
            let mut seen = Vec::new();
            list.retain(|extension| {
                let first = !seen.contains(&extension.kind());
                seen.push(extension.kind());
                first
            });
            prop_assert_eq!(Extension::parse_all(&encode(&list), 0).unwrap(), list);
        }

        #[test]
        fn parse_all_never_panics(area in prop::collection::vec(any::<u8>(), 0..256), at: usize) {
            let _outcome = Extension::parse_all(&area, at);
        }
    }
}
