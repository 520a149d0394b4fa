//! Snapshot table entries: a snapshot's L1 table and name.
//!
//! Entries have variable length, are padded to eight bytes and follow one another; the header has their number.
//! Unknown extra data is kept. Spec: "Snapshots".

use super::bytes::{pad_to_8, u16_at, u32_at, u64_at};
use super::{HostOffset, Version};

/// Bytes in an entry before its extra data.
pub const SNAPSHOT_FIXED_SIZE: usize = 40;
/// QEMU's limit on an entry's extra data, in bytes, and ours.
pub const SNAPSHOT_EXTRA_MAX: u32 = 1024;
/// The extra data a version 3 image must have: VM state size and disk size.
pub const SNAPSHOT_EXTRA_V3_MIN: usize = 16;

/// One internal snapshot.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct SnapshotEntry {
    /// The offset of the snapshot's L1 table.
    pub l1_offset: HostOffset,
    /// The number of entries of that table.
    pub l1_entries: u32,
    /// The unique ID, usually a decimal number.
    pub id: Vec<u8>,
    /// The name.
    pub name: Vec<u8>,
    /// The time of the snapshot, in seconds since the epoch.
    pub date_seconds: u32,
    /// The part of a second beyond that, in nanoseconds.
    pub date_nanoseconds: u32,
    /// The guest's running time, in nanoseconds.
    pub guest_clock_ns: u64,
    /// The VM state's size in bytes, unless the extra data has it too.
    pub vm_state_size_32: u32,
    /// Everything between the fixed fields and the ID.
    pub extra: Vec<u8>,
}

/// A snapshot table entry cannot be read.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum SnapshotError {
    /// The table ends before the entry does.
    #[error("the snapshot table entry needs {needed} bytes; {available} are there")]
    Truncated {
        /// The entry's length in bytes, as far as it is known.
        needed: usize,
        /// The bytes that are available.
        available: usize,
    },
    /// More extra data than QEMU accepts.
    #[error("the snapshot table entry's extra_data_size is {found}; expected at most {SNAPSHOT_EXTRA_MAX}")]
    ExtraData {
        /// The field, as read.
        found: u32,
    },
}

impl SnapshotEntry {
    /// Returns the length in bytes of the entry that starts with `bytes`, padding included. Its first
    /// [`SNAPSHOT_FIXED_SIZE`] bytes are enough.
    ///
    /// # Errors
    ///
    /// [`SnapshotError`] if those are missing, or claim too much extra data.
    pub fn peek_len(bytes: &[u8]) -> Result<usize, SnapshotError> {
        let (id, name, extra) = lengths(bytes)?;
        let len = SNAPSHOT_FIXED_SIZE
            .saturating_add(extra)
            .saturating_add(id)
            .saturating_add(name);
        Ok(len.next_multiple_of(8))
    }

    /// Parses the entry that `bytes` starts with; [`Self::peek_len`] returns the distance to the next one.
    ///
    /// # Errors
    ///
    /// [`SnapshotError`] if it is cut short (the last one may lack its padding) or claims too
    /// much extra data.
    pub fn parse(bytes: &[u8]) -> Result<Self, SnapshotError> {
        let (id_len, name_len, extra_len) = lengths(bytes)?;
        let needed = SNAPSHOT_FIXED_SIZE
            .saturating_add(extra_len)
            .saturating_add(id_len)
            .saturating_add(name_len);
        let cut = SnapshotError::Truncated {
            needed,
            available: bytes.len(),
        };
        let rest = bytes.get(SNAPSHOT_FIXED_SIZE..).ok_or(cut)?;
        let (extra, rest) = rest.split_at_checked(extra_len).ok_or(cut)?;
        let (id, rest) = rest.split_at_checked(id_len).ok_or(cut)?;
        let name = rest.get(..name_len).ok_or(cut)?;
        Ok(Self {
            l1_offset: HostOffset::new(u64_at(bytes, 0).ok_or(cut)?),
            l1_entries: u32_at(bytes, 8).ok_or(cut)?,
            id: id.to_vec(),
            name: name.to_vec(),
            date_seconds: u32_at(bytes, 16).ok_or(cut)?,
            date_nanoseconds: u32_at(bytes, 20).ok_or(cut)?,
            guest_clock_ns: u64_at(bytes, 24).ok_or(cut)?,
            vm_state_size_32: u32_at(bytes, 32).ok_or(cut)?,
            extra: extra.to_vec(),
        })
    }

    /// Appends the entry, padded to eight bytes. Returns `None`, with nothing appended, if the ID, the name or the
    /// extra data is longer than its length field or limit allows.
    pub fn encode_into(&self, out: &mut Vec<u8>) -> Option<()> {
        let id_len = u16::try_from(self.id.len()).ok()?;
        let name_len = u16::try_from(self.name.len()).ok()?;
        let extra_len = u32::try_from(self.extra.len())
            .ok()
            .filter(|&len| len <= SNAPSHOT_EXTRA_MAX)?;
        out.extend_from_slice(&self.l1_offset.bytes().to_be_bytes());
        out.extend_from_slice(&self.l1_entries.to_be_bytes());
        out.extend_from_slice(&id_len.to_be_bytes());
        out.extend_from_slice(&name_len.to_be_bytes());
        out.extend_from_slice(&self.date_seconds.to_be_bytes());
        out.extend_from_slice(&self.date_nanoseconds.to_be_bytes());
        out.extend_from_slice(&self.guest_clock_ns.to_be_bytes());
        out.extend_from_slice(&self.vm_state_size_32.to_be_bytes());
        out.extend_from_slice(&extra_len.to_be_bytes());
        out.extend_from_slice(&self.extra);
        out.extend_from_slice(&self.id);
        out.extend_from_slice(&self.name);
        pad_to_8(out);
        Some(())
    }

    /// Returns the VM state's size in bytes, from the wide field if there is one.
    pub fn vm_state_size(&self) -> u64 {
        u64_at(&self.extra, 0).unwrap_or(u64::from(self.vm_state_size_32))
    }

    /// Returns the guest disk's size in bytes at the time of the snapshot; older images do not record it.
    pub fn disk_size(&self) -> Option<u64> {
        u64_at(&self.extra, 8)
    }

    /// Returns the number of instructions that the guest had executed, if QEMU counted them.
    pub fn icount(&self) -> Option<u64> {
        u64_at(&self.extra, 16).filter(|&count| count != u64::MAX)
    }

    /// Returns true if the entry has the extra data that its edition of the format demands.
    pub fn is_complete(&self, version: Version) -> bool {
        version == Version::V2 || self.extra.len() >= SNAPSHOT_EXTRA_V3_MIN
    }
}

/// Returns the lengths of ID, name and extra data, in bytes.
fn lengths(bytes: &[u8]) -> Result<(usize, usize, usize), SnapshotError> {
    let cut = SnapshotError::Truncated {
        needed: SNAPSHOT_FIXED_SIZE,
        available: bytes.len(),
    };
    let id = u16_at(bytes, 12).ok_or(cut)?;
    let name = u16_at(bytes, 14).ok_or(cut)?;
    let extra = u32_at(bytes, 36).ok_or(cut)?;
    if extra > SNAPSHOT_EXTRA_MAX {
        return Err(SnapshotError::ExtraData { found: extra });
    }
    Ok((usize::from(id), usize::from(name), extra as usize))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn snapshot_entry_refuses_too_much_extra_data() {
        let mut bytes = [0; SNAPSHOT_FIXED_SIZE];
        bytes[36..].copy_from_slice(&1025_u32.to_be_bytes());
        assert_eq!(
            SnapshotEntry::peek_len(&bytes),
            Err(SnapshotError::ExtraData { found: 1025 })
        );
        assert_eq!(
            SnapshotEntry::parse(&bytes),
            Err(SnapshotError::ExtraData { found: 1025 })
        );
    }

    #[test]
    fn snapshot_entry_prefers_wide_vm_state_size() {
        let narrow = SnapshotEntry {
            vm_state_size_32: 7,
            ..Default::default()
        };
        assert_eq!(
            (narrow.vm_state_size(), narrow.disk_size(), narrow.icount()),
            (7, None, None)
        );
        let extra = [1_u64, 2, 3].map(u64::to_be_bytes).concat();
        let wide = SnapshotEntry {
            vm_state_size_32: 7,
            extra,
            ..Default::default()
        };
        assert_eq!(
            (wide.vm_state_size(), wide.disk_size(), wide.icount()),
            (1, Some(2), Some(3))
        );
    }

    fn any_entry() -> impl Strategy<Value = SnapshotEntry> {
        let text = || prop::collection::vec(any::<u8>(), 0..40);
        (any::<(u64, u32, u32, u32, u64, u32)>(), text(), text(), text()).prop_map(|(fixed, id, name, extra)| {
            let (l1_offset, l1_entries, date_seconds, date_nanoseconds, guest_clock_ns, vm_state_size_32) = fixed;
            let l1_offset = HostOffset::new(l1_offset);
            SnapshotEntry {
                l1_offset,
                l1_entries,
                id,
                name,
                date_seconds,
                date_nanoseconds,
                guest_clock_ns,
                vm_state_size_32,
                extra,
            }
        })
    }

    proptest! {
        #[test]
        fn snapshot_table_survives_encoding(entries in prop::collection::vec(any_entry(), 0..5)) {
            let mut table = Vec::new();
            for entry in &entries {
                entry.encode_into(&mut table).unwrap();
            }
            let mut rest = table.as_slice();
            for entry in &entries {
                prop_assert_eq!(&SnapshotEntry::parse(rest).unwrap(), entry);
                rest = &rest[SnapshotEntry::peek_len(rest).unwrap()..];
            }
            prop_assert!(rest.is_empty());
        }

        #[test]
        fn snapshot_entry_cut_anywhere_is_an_error(entry in any_entry(), cut in any::<prop::sample::Index>()) {
            let mut bytes = Vec::new();
            entry.encode_into(&mut bytes).unwrap();
            let needed = SNAPSHOT_FIXED_SIZE + entry.extra.len() + entry.id.len() + entry.name.len();
            let outcome = SnapshotEntry::parse(&bytes[..cut.index(needed)]);
            let truncated = matches!(outcome, Err(SnapshotError::Truncated { .. }));
            prop_assert!(truncated);
        }
    }
}
