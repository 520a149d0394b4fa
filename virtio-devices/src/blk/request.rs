//! The request in a descriptor chain, parsed and checked.
//!
//! Pure functions over a chain that was already followed: nothing here touches the disk or the rings.
//! Spec: virtio 1.2, 5.2.6.

use block::IoError;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH,
    VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
    VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};

use super::config::{SECTOR_BYTES, ZERO_SECTORS_MAX, ZERO_SEGMENTS_MAX};
use crate::virtqueue::{Chain, QueueMemory};

/// The status byte.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Status(pub(super) u8);

impl Status {
    pub(super) const OK: Self = Self(VIRTIO_BLK_S_OK as u8);
    pub(super) const IO_ERROR: Self = Self(VIRTIO_BLK_S_IOERR as u8);
    pub(super) const UNSUPPORTED: Self = Self(VIRTIO_BLK_S_UNSUPP as u8);
}

impl From<IoError> for Status {
    fn from(error: IoError) -> Self {
        match error {
            IoError::Unsupported => Self::UNSUPPORTED,
            _ => Self::IO_ERROR,
        }
    }
}

/// The type of a guest's request, and its offset on the disk in bytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum BlockRequest {
    Read { offset: u64 },
    Write { offset: u64 },
    Flush,
    Id,
    Discard,
    WriteZeroes,
}

/// The most data of one request, in bytes: firmware reads whole kernels at once, but not more than this.
const DATA_BYTES_MAX: u64 = 1 << 30;

/// Takes the header off `chain`, whose status has been taken, and checks what can be checked without the
/// disk.
///
/// # Errors
///
/// The status to answer with.
#[inline]
pub(super) fn parse(chain: &mut Chain, memory: &QueueMemory) -> Result<BlockRequest, Status> {
    if chain.defect().is_some() {
        return Err(Status::IO_ERROR);
    }
    let [first, sector] = chain.take_header(memory).ok_or(Status::IO_ERROR)?;
    // The upper half is an I/O priority that no device has to honour.
    let kind = first as u32;
    let offset = |data: u64| {
        let whole = data != 0 && data.is_multiple_of(u64::from(SECTOR_BYTES)) && data <= DATA_BYTES_MAX;
        let offset = sector.checked_mul(u64::from(SECTOR_BYTES));
        offset.filter(|_| whole).ok_or(Status::IO_ERROR)
    };
    match kind {
        VIRTIO_BLK_T_IN => Ok(BlockRequest::Read {
            offset: offset(chain.writable_bytes())?,
        }),
        VIRTIO_BLK_T_OUT => Ok(BlockRequest::Write {
            offset: offset(chain.readable_bytes())?,
        }),
        VIRTIO_BLK_T_FLUSH => Ok(BlockRequest::Flush),
        VIRTIO_BLK_T_GET_ID => Ok(BlockRequest::Id),
        VIRTIO_BLK_T_DISCARD => Ok(BlockRequest::Discard),
        VIRTIO_BLK_T_WRITE_ZEROES => Ok(BlockRequest::WriteZeroes),
        _ => Err(Status::UNSUPPORTED),
    }
}

/// One segment of a discard or write-zeroes request, in bytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Range {
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) unmap: bool,
}

/// The size of a segment in the request, in bytes.
const SEGMENT_BYTES: u64 = 16;

/// Reads all segments of a discard or write-zeroes request into `out`, in place of what it held, and
/// checks each against a disk of `disk_bytes`. Empty ones are left out.
///
/// # Errors
///
/// The status to answer with.
pub(super) fn ranges(
    chain: &Chain,
    memory: &QueueMemory,
    may_unmap: bool,
    disk_bytes: u64,
    out: &mut Vec<Range>,
) -> Result<(), Status> {
    out.clear();
    let bytes = chain.readable_bytes();
    let count = bytes / SEGMENT_BYTES;
    if count == 0 || !bytes.is_multiple_of(SEGMENT_BYTES) || count > u64::from(ZERO_SEGMENTS_MAX) {
        return Err(Status::IO_ERROR);
    }
    for index in 0..count {
        let words = memory.load_16_across(chain.readable(), index * SEGMENT_BYTES);
        let [sector, rest] = words.ok_or(Status::IO_ERROR)?;
        let (sectors, flags) = (rest as u32, (rest >> 32) as u32);
        let unmap = flags & VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0;
        if flags & !VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0 || unmap && !may_unmap {
            return Err(Status::UNSUPPORTED);
        }
        let len = u64::from(sectors) * u64::from(SECTOR_BYTES);
        let range = sector
            .checked_mul(u64::from(SECTOR_BYTES))
            .filter(|offset| offset.checked_add(len).is_some_and(|end| end <= disk_bytes))
            .filter(|_| sectors <= ZERO_SECTORS_MAX)
            .map(|offset| Range { offset, len, unmap })
            .ok_or(Status::IO_ERROR)?;
        if range.len > 0 {
            out.push(range);
        }
    }
    Ok(())
}
