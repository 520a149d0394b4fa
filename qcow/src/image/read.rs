//! Reads of an image's structures: the header, tables of 8-byte entries, the snapshot table.
//!
//! Reads are cut into parts of bounded size. Their results are checked only as far as reading on needs.

use block::IoError;
use block::file::FileView;

use crate::format::snapshot::{SNAPSHOT_EXTRA_MAX, SNAPSHOT_FIXED_SIZE, SnapshotError};
use crate::format::validate::SNAPSHOT_TABLE_MAX_BYTES;
use crate::format::{ClusterUse, Header, HeaderError, HeaderFields, HostOffset, SnapshotEntry};

/// The size of one read of a table, in bytes.
pub(crate) const PART: u64 = 256 << 10;

/// A structure of an image could not be read.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ReadError {
    /// The host failed the read.
    #[error("cannot read {} at {offset:#x}", .what.phrase())]
    Io {
        /// The structure.
        what: ClusterUse,
        /// The offset, in bytes.
        offset: u64,
        /// The host's error.
        #[source]
        source: IoError,
    },
    /// The host failed to find the length of the file.
    #[error("cannot find the length of the file")]
    Length(#[source] IoError),
    /// The header is invalid.
    #[error(transparent)]
    Header(#[from] HeaderError),
}

impl ReadError {
    fn io(what: ClusterUse, offset: u64) -> impl FnOnce(IoError) -> Self {
        move |source| Self::Io { what, offset, source }
    }
}

/// The bytes that are read of a file at first: a header's cluster, if that has the size that most have, or a smaller one.
const FIRST_BYTES: u64 = 64 << 10;

/// A header, and the length of its file.
#[derive(Clone, Debug)]
pub struct Located {
    /// The header, decoded but not validated.
    pub header: Header,
    /// The file's length in bytes.
    pub file_len: u64,
}

/// Reads and decodes the header, without validating it.
///
/// # Errors
///
/// [`ReadError`] if the file cannot be read or holds no header.
pub async fn read_header(file: &FileView) -> Result<Located, ReadError> {
    Ok(read_header_fields(file).await?.0)
}

/// As [`read_header`], with the bytes that an engine writes back.
///
/// # Errors
///
/// As for [`read_header`].
pub(crate) async fn read_header_fields(file: &FileView) -> Result<(Located, HeaderFields), ReadError> {
    let file_len = file.len().map_err(ReadError::Length)?;
    let len = |bytes: u64| file_len.min(bytes) as usize;
    let mut first = read(file, ClusterUse::Header, 0, len(FIRST_BYTES)).await?;
    let cluster_len = len(Header::peek_cluster_size(&first)?);
    if cluster_len > first.len() {
        first = read(file, ClusterUse::Header, 0, cluster_len).await?;
    }
    let cluster = first.get(..cluster_len).unwrap_or_default();
    let header = Header::decode(cluster)?;
    Ok((Located { header, file_len }, HeaderFields::new(cluster)))
}

/// Reads `len` bytes of the structure `what`.
pub(crate) async fn read(
    file: &FileView,
    what: ClusterUse,
    offset: u64,
    len: usize,
) -> Result<block::AlignedBuf, ReadError> {
    file.read_at(offset, len)
        .await
        .map_err(ReadError::io(what, offset))
}

/// Calls `each(index, raw entry)` for the `count` 8-byte entries of the table at `offset`. Entries in holes of the
/// file, which are zero, may be left out.
pub(crate) async fn for_each_entry(
    file: &FileView,
    what: ClusterUse,
    offset: HostOffset,
    count: u64,
    mut each: impl FnMut(u64, u64),
) -> Result<(), ReadError> {
    let mut index = 0;
    while index < count {
        let at = offset.bytes().saturating_add(index * 8);
        let Some(data) = file.next_data(at) else { break };
        let hole = (data.saturating_sub(at) / 8).min(count - index);
        if hole > 0 {
            index += hole;
            continue;
        }
        let entries = (count - index).min(PART / 8);
        let bytes = read(file, what, at, usize::try_from(entries * 8).unwrap_or_default()).await?;
        for (entry, raw) in (index..).zip(bytes.as_chunks::<8>().0) {
            each(entry, u64::from_be_bytes(*raw));
        }
        index += entries;
    }
    Ok(())
}

/// A table of entries of different lengths, read a part at a time.
pub(crate) struct Parts<'a> {
    file: &'a FileView,
    what: ClusterUse,
    /// The latest end of the table, in bytes.
    limit: u64,
    part: block::AlignedBuf,
    part_at: u64,
}

impl<'a> Parts<'a> {
    pub(crate) fn new(file: &'a FileView, what: ClusterUse, limit: u64) -> Self {
        Self {
            file,
            what,
            limit,
            part: block::AlignedBuf::zeroed(0),
            part_at: 0,
        }
    }

    /// Returns the bytes from `offset` on: the whole entry that starts there, with the length from `len_of`, if it
    /// ends before the limit and fits in [`PART`].
    pub(crate) async fn at(
        &mut self,
        offset: u64,
        len_of: impl Fn(&[u8]) -> Option<usize>,
    ) -> Result<&[u8], ReadError> {
        let mut at = usize::try_from(offset.saturating_sub(self.part_at)).unwrap_or(usize::MAX);
        let rest = self.part.get(at..).unwrap_or_default();
        if len_of(rest).is_none_or(|len| len > rest.len()) {
            let len = usize::try_from(self.limit.saturating_sub(offset).min(PART)).unwrap_or_default();
            self.part = read(self.file, self.what, offset, len).await?;
            (self.part_at, at) = (offset, 0);
        }
        Ok(self.part.get(at..).unwrap_or_default())
    }
}

/// An error in the snapshot table.
#[derive(Clone, Debug, thiserror::Error)]
pub enum SnapshotTableError {
    /// It could not be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// One of its entries is malformed.
    #[error("snapshot {index}, at {offset:#x}: {source}")]
    Entry {
        /// The entry's number, from zero.
        index: u32,
        /// The offset of its start, in bytes.
        offset: u64,
        /// The error in the entry.
        #[source]
        source: SnapshotError,
    },
    /// It is larger than QEMU accepts, or reaches past the end of the file.
    #[error("the snapshot table reaches {end:#x} with snapshot {index}; it must end by {limit:#x}")]
    TooLong {
        /// The entry's number, from zero.
        index: u32,
        /// The offset of the entry's end, in bytes.
        end: u64,
        /// The largest offset of the table's end, in bytes.
        limit: u64,
    },
}

/// Reads the snapshot table and calls `each(index, entry)`. Returns the total length of the entries in bytes. The
/// last entry may lack its padding at the end of the file.
pub(crate) async fn for_each_snapshot(
    file: &FileView,
    header: &Header,
    file_len: u64,
    mut each: impl FnMut(u32, SnapshotEntry),
) -> Result<u64, SnapshotTableError> {
    let mut table_len = 0;
    let start = header.snapshot_table_offset.bytes();
    let limit = start.saturating_add(SNAPSHOT_TABLE_MAX_BYTES).min(file_len);
    // One part holds at least one entry of the largest kind.
    const ENTRY_MAX: usize = SNAPSHOT_FIXED_SIZE + SNAPSHOT_EXTRA_MAX as usize + 2 * u16::MAX as usize + 8;
    const _: () = assert!(PART as usize >= ENTRY_MAX);
    let mut parts = Parts::new(file, ClusterUse::SnapshotTable, limit);
    for index in 0..header.snapshot_count {
        let offset = start.saturating_add(table_len);
        let malformed = |source| SnapshotTableError::Entry {
            index,
            offset,
            source,
        };
        let rest = parts
            .at(offset, |rest| SnapshotEntry::peek_len(rest).ok())
            .await?;
        let len = SnapshotEntry::peek_len(rest).map_err(malformed)? as u64;
        let entry = SnapshotEntry::parse(rest).map_err(malformed)?;
        let end = offset.saturating_add(len);
        if end > limit.saturating_add(7) {
            return Err(SnapshotTableError::TooLong { index, end, limit });
        }
        each(index, entry);
        table_len += len;
    }
    Ok(table_len)
}
