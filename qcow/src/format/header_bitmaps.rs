//! The bitmaps extension in the header's first sector, so that the one write that puts metadata in force puts bitmaps in
//! force with it.
//!
//! QEMU puts the table of feature names before it, which may push it out of the sector. The names are only a courtesy:
//! those without room are left out. A backing file's name that is in the way gets a copy behind the first sector, in bytes
//! that nothing refers to until the sector is written.

use super::extension::{EXTENSION_HEADER_SIZE, ExtensionError};
use super::header::at;
use super::{Autoclear, BitmapsExtension, Extension, HeaderError, HeaderFields};

/// The length of one entry of the table of feature names, in bytes.
const FEATURE_NAME_BYTES: usize = 48;

/// The header has no room for the place of the bitmaps, or is damaged.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum NoRoomForBitmaps {
    /// The header does not decode.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// The extensions or the backing file's name leave no room.
    #[error(
        "the header's {what} would end at byte {end}; expected at most {room}, so that one write changes the bitmaps; use \
         `qemu-img bitmap`"
    )]
    Full {
        /// The part of the header without room.
        what: &'static str,
        /// The offset of its end, in bytes.
        end: usize,
        /// The largest such offset.
        room: usize,
    },
}

impl From<ExtensionError> for NoRoomForBitmaps {
    fn from(error: ExtensionError) -> Self {
        Self::Header(error.into())
    }
}

/// The header's bytes with another place of the bitmaps.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct BitmapsLayout {
    next: HeaderFields,
    /// The bytes to write before the first sector, and their offset.
    copy: Option<(usize, Vec<u8>)>,
    has_bitmaps: bool,
}

impl BitmapsLayout {
    /// Plans the next header.
    ///
    /// # Errors
    ///
    /// [`NoRoomForBitmaps`].
    pub(crate) fn plan(
        fields: &HeaderFields,
        bitmaps: Option<BitmapsExtension>,
    ) -> Result<Self, NoRoomForBitmaps> {
        let header = fields.decode()?;
        let start = header.header_length as usize;
        let mut area = Vec::new();
        if let Some(bitmaps) = bitmaps {
            Extension::Bitmaps(bitmaps).encode_into(&mut area);
        }
        let mut names = Vec::new();
        for extension in header.extensions {
            match extension {
                Extension::Bitmaps(_) => {}
                Extension::FeatureNames(found) => names = found,
                other => other.encode_into(&mut area),
            }
        }
        let needed = start
            .saturating_add(area.len())
            .saturating_add(EXTENSION_HEADER_SIZE);
        if needed > HeaderFields::BYTES {
            return Err(NoRoomForBitmaps::Full {
                what: "extensions",
                end: needed,
                room: HeaderFields::BYTES,
            });
        }
        let left = HeaderFields::BYTES.saturating_sub(needed);
        names.truncate(left.saturating_sub(EXTENSION_HEADER_SIZE) / FEATURE_NAME_BYTES);
        if !names.is_empty() {
            Extension::FeatureNames(names).encode_into(&mut area);
        }
        Extension::encode_end_into(&mut area);
        let end = start.saturating_add(area.len());

        let mut next = fields.clone();
        let name_at = fields.u64_at(at::BACKING_FILE_OFFSET) as usize;
        let mut copy = None;
        let mut clear_to = HeaderFields::BYTES;
        if name_at != 0 && name_at >= end {
            clear_to = clear_to.min(name_at);
        }
        if let Some(gap) = next.0.get_mut(start..clear_to) {
            gap.fill(0);
        }
        put(&mut next, start, &area);
        if name_at != 0 && name_at < end {
            let name = header.backing_name.unwrap_or_default();
            let is_near = end.saturating_add(name.len()) <= HeaderFields::BYTES;
            let to = match is_near {
                true => end,
                // Behind what the header refers to until its first sector is written.
                false => name_at.saturating_add(name.len()).max(HeaderFields::BYTES),
            };
            let copy_end = to.saturating_add(name.len());
            let room = header.cluster_bits.size() as usize;
            if copy_end > room {
                return Err(NoRoomForBitmaps::Full {
                    what: "backing file name",
                    end: copy_end,
                    room,
                });
            }
            if next.0.len() < copy_end {
                next.0.resize(copy_end, 0);
            }
            put(&mut next, to, &name);
            next.put(at::BACKING_FILE_OFFSET, (to as u64).to_be_bytes());
            if !is_near {
                copy = Some((to, name));
            }
        }
        Ok(Self {
            next,
            copy,
            has_bitmaps: bitmaps.is_some(),
        })
    }

    /// Returns the bytes to write before the first sector, and their offset. Nothing refers to that place until then.
    pub(crate) fn copy(&self) -> Option<(u64, &[u8])> {
        self.copy
            .as_ref()
            .map(|(at, bytes)| (*at as u64, bytes.as_slice()))
    }
}

fn put(fields: &mut HeaderFields, at: usize, bytes: &[u8]) {
    let place = fields.0.get_mut(at..).unwrap_or_default();
    for (to, from) in place.iter_mut().zip(bytes) {
        *to = *from;
    }
}

impl HeaderFields {
    /// Takes over a layout's extensions, and sets or clears the bit that says that the bitmaps are valid. The fields before
    /// the extensions stay, but for the place of the backing file's name.
    pub(crate) fn set_bitmaps(&mut self, layout: &BitmapsLayout) {
        let start = self.u32_at(at::HEADER_LENGTH) as usize;
        let rest = layout.next.0.get(start..).unwrap_or_default();
        self.0.truncate(start);
        self.0.extend_from_slice(rest);
        self.put(
            at::BACKING_FILE_OFFSET,
            layout.next.u64_at(at::BACKING_FILE_OFFSET).to_be_bytes(),
        );
        let mut features = self.autoclear();
        features.set(Autoclear::BITMAPS, layout.has_bitmaps);
        self.set_autoclear(features);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{FeatureKind, FeatureName, HostOffset};

    fn place(at: u64) -> BitmapsExtension {
        BitmapsExtension {
            count: 2,
            reserved: 0,
            directory_size: 64,
            directory_offset: HostOffset::new(at),
        }
    }

    /// A header as QEMU writes it, with so many feature names and a backing file's name of so many bytes.
    fn header(names: usize, backing: usize, more: &[Extension]) -> HeaderFields {
        let mut bytes = vec![0; 112];
        bytes[..4].copy_from_slice(b"QFI\xfb");
        bytes[at::VERSION..][..4].copy_from_slice(&3_u32.to_be_bytes());
        bytes[at::CLUSTER_BITS..][..4].copy_from_slice(&12_u32.to_be_bytes());
        bytes[at::REFCOUNT_ORDER..][..4].copy_from_slice(&4_u32.to_be_bytes());
        bytes[at::HEADER_LENGTH..][..4].copy_from_slice(&112_u32.to_be_bytes());
        let name = FeatureName::new(FeatureKind::Incompatible, 0, "dirty bit");
        Extension::FeatureNames(vec![name; names]).encode_into(&mut bytes);
        more.iter()
            .for_each(|extension| extension.encode_into(&mut bytes));
        Extension::encode_end_into(&mut bytes);
        if backing > 0 {
            let offset = bytes.len() as u64;
            bytes[at::BACKING_FILE_OFFSET..][..8].copy_from_slice(&offset.to_be_bytes());
            bytes[at::BACKING_FILE_SIZE..][..4].copy_from_slice(&(backing as u32).to_be_bytes());
            bytes.extend(vec![b'b'; backing]);
        }
        bytes.resize(4096, 0);
        HeaderFields::new(&bytes)
    }

    /// Method: what is on disk before, between and after the two writes decodes, with all that is not a feature name.
    #[test]
    fn every_layout_keeps_names_and_unknown_extensions_at_each_write() {
        let unknown = Extension::Unknown {
            kind: 0x1234_5678,
            data: vec![7; 20],
        };
        for names in [0, 1, 4, 8] {
            for backing in [0, 1, 100, 400, 1023] {
                for old in [None, Some(place(0x3000))] {
                    for new in [None, Some(place(0x5000))] {
                        let mut more = vec![unknown.clone()];
                        more.extend(old.map(Extension::Bitmaps));
                        let before = header(names, backing, &more);
                        let expected = before.decode().expect("a header");
                        let layout = BitmapsLayout::plan(&before, new).expect("room");
                        let mut disk = before.0.clone();
                        if let Some((at, bytes)) = layout.copy() {
                            disk[at as usize..][..bytes.len()].copy_from_slice(bytes);
                        }
                        let between = HeaderFields::new(&disk).decode();
                        assert_eq!(between.as_ref(), Ok(&expected), "{names} {backing}");
                        let mut after = before.clone();
                        after.set_bitmaps(&layout);
                        disk[..512].copy_from_slice(after.first_sector());
                        assert_eq!(disk.len(), after.0.len());
                        let found = HeaderFields::new(&disk).decode().expect("a header");
                        assert_eq!(found.bitmaps(), new);
                        assert_eq!(found.autoclear.contains(Autoclear::BITMAPS), new.is_some());
                        assert_eq!(found.backing_name, expected.backing_name);
                        assert!(found.extensions.contains(&unknown));
                    }
                }
            }
        }
    }

    #[test]
    fn extensions_past_the_first_sector_leave_no_room() {
        let unknown = Extension::Unknown {
            kind: 0x1234_5678,
            data: vec![7; 400],
        };
        let full = BitmapsLayout::plan(&header(0, 0, &[unknown]), Some(place(0x5000)));
        assert!(matches!(full, Err(NoRoomForBitmaps::Full { .. })), "{full:?}");
    }
}
