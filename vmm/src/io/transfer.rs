//! One command's requests: from any bytes to the whole sectors that a disk takes.
//!
//! Disks take multiples of 512 bytes. A read is widened to whole sectors and cut afterwards. A write that
//! starts or ends inside a sector reads that sector first and writes it back whole; a discard is narrowed to whole sectors.
//!
//! Invariants: the read and the write of an edge are two requests, so no other write may be in flight meanwhile.
//! [`touches_edges`] returns which transfers must run alone.

use block::{AlignedBuf, Buffer, DiskQueue, IoError, Op, ask};

use super::command::{Content, Range, Transfer};

/// The unit disks take, in bytes.
const SECTOR_BYTES: u64 = 512;

/// Whole sectors around a range.
struct Sectors {
    start: u64,
    end: u64,
}

impl Sectors {
    /// The sectors that hold any of `range`, which ends within the disk.
    fn around(range: Range) -> Self {
        let end = range.offset + range.len;
        Self {
            start: range.offset & !(SECTOR_BYTES - 1),
            end: end.next_multiple_of(SECTOR_BYTES),
        }
    }

    /// The sectors that `range` covers entirely; `None` if there are none.
    fn inside(range: Range) -> Option<Self> {
        let start = range.offset.next_multiple_of(SECTOR_BYTES);
        let end = (range.offset + range.len) & !(SECTOR_BYTES - 1);
        (start < end).then_some(Self { start, end })
    }

    fn len(&self) -> u64 {
        self.end - self.start
    }
}

/// Returns true if a transfer writes a part of a sector, and so must run alone.
pub(super) fn touches_edges(transfer: Transfer, range: Range) -> bool {
    let whole_sectors = (range.offset | range.len).is_multiple_of(SECTOR_BYTES);
    matches!(transfer, Transfer::Write { .. }) && !whole_sectors
}

/// Runs one transfer on a disk of `disk_bytes` and returns the bytes of a read, exactly those asked for.
///
/// # Errors
///
/// The disk's error; a range outside the disk is out of range, whatever its alignment.
pub(super) async fn run(
    queue: &dyn DiskQueue,
    disk_bytes: u64,
    transfer: Transfer,
    range: Range,
) -> Result<Vec<u8>, IoError> {
    if range
        .offset
        .checked_add(range.len)
        .is_none_or(|end| end > disk_bytes)
    {
        return Err(IoError::OutOfRange);
    }
    if range.len == 0 {
        return Ok(Vec::new());
    }
    match transfer {
        Transfer::Read { .. } => read(queue, range).await,
        Transfer::Write {
            content: Content::Pattern(pattern),
            fua,
        } => {
            write_pattern(queue, range, pattern, fua).await?;
            Ok(Vec::new())
        }
        Transfer::Write {
            content: Content::Zeroes { unmap },
            fua,
        } => {
            write_zeroes(queue, range, unmap, fua).await?;
            Ok(Vec::new())
        }
        Transfer::Discard => {
            if let Some(sectors) = Sectors::inside(range) {
                ask(
                    queue,
                    Op::Discard,
                    sectors.start,
                    sectors.len(),
                    Buffer::default(),
                )
                .await?;
            }
            Ok(Vec::new())
        }
    }
}

/// Makes everything durable that was answered before.
///
/// # Errors
///
/// The disk's error.
pub(super) async fn flush(queue: &dyn DiskQueue) -> Result<(), IoError> {
    ask(queue, Op::Flush, 0, 0, Buffer::default()).await.map(drop)
}

/// A buffer for `len` bytes. Commands are bounded far below what memory can address.
fn buffer_of(len: u64) -> Result<AlignedBuf, IoError> {
    usize::try_from(len)
        .map(AlignedBuf::zeroed)
        .map_err(|_| IoError::BufferLength)
}

async fn read_sectors(queue: &dyn DiskQueue, sectors: &Sectors) -> Result<AlignedBuf, IoError> {
    let buffer = buffer_of(sectors.len())?;
    let buffer = ask(queue, Op::Read, sectors.start, sectors.len(), buffer.into()).await?;
    buffer.into_owned().ok_or(IoError::BufferLength)
}

async fn read(queue: &dyn DiskQueue, range: Range) -> Result<Vec<u8>, IoError> {
    let sectors = Sectors::around(range);
    let bytes = read_sectors(queue, &sectors).await?;
    Ok(part(&bytes, &sectors, range)?.to_vec())
}

/// The bytes of `range` in a buffer that holds `sectors`.
fn part<'a>(bytes: &'a [u8], sectors: &Sectors, range: Range) -> Result<&'a [u8], IoError> {
    let skip = usize::try_from(range.offset - sectors.start).map_err(|_| IoError::BufferLength)?;
    let len = usize::try_from(range.len).map_err(|_| IoError::BufferLength)?;
    bytes.get(skip..skip + len).ok_or(IoError::BufferLength)
}

async fn write_pattern(queue: &dyn DiskQueue, range: Range, pattern: u8, fua: bool) -> Result<(), IoError> {
    let sectors = Sectors::around(range);
    let mut buffer = buffer_of(sectors.len())?;
    for edge in edges(&sectors, range) {
        let old = read_sectors(
            queue,
            &Sectors {
                start: edge,
                end: edge + SECTOR_BYTES,
            },
        )
        .await?;
        let at = usize::try_from(edge - sectors.start).map_err(|_| IoError::BufferLength)?;
        buffer
            .get_mut(at..at + old.len())
            .ok_or(IoError::BufferLength)?
            .copy_from_slice(&old);
    }
    let skip = usize::try_from(range.offset - sectors.start).map_err(|_| IoError::BufferLength)?;
    let len = usize::try_from(range.len).map_err(|_| IoError::BufferLength)?;
    buffer
        .get_mut(skip..skip + len)
        .ok_or(IoError::BufferLength)?
        .fill(pattern);
    ask(
        queue,
        Op::Write { fua },
        sectors.start,
        sectors.len(),
        buffer.into(),
    )
    .await
    .map(drop)
}

/// The sectors, by their offsets, that `range` covers only in part: none, one or two.
fn edges(sectors: &Sectors, range: Range) -> Vec<u64> {
    let end = range.offset + range.len;
    let last = sectors.end - SECTOR_BYTES;
    let mut edges = Vec::new();
    if range.offset != sectors.start {
        edges.push(sectors.start);
    }
    if end != sectors.end && !edges.contains(&last) {
        edges.push(last);
    }
    edges
}

/// Zeros for whole sectors go out without data, the edges as patterns.
async fn write_zeroes(queue: &dyn DiskQueue, range: Range, unmap: bool, fua: bool) -> Result<(), IoError> {
    let end = range.offset + range.len;
    let Some(inside) = Sectors::inside(range) else {
        return write_pattern(queue, range, 0, fua).await;
    };
    if range.offset < inside.start {
        let head = Range {
            offset: range.offset,
            len: inside.start - range.offset,
        };
        write_pattern(queue, head, 0, fua).await?;
    }
    let op = Op::WriteZeroes { unmap, fua };
    ask(queue, op, inside.start, inside.len(), Buffer::default()).await?;
    if inside.end < end {
        let tail = Range {
            offset: inside.end,
            len: end - inside.end,
        };
        write_pattern(queue, tail, 0, fua).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::Request;
    use std::cell::RefCell;

    const DISK_BYTES: u64 = 4096;

    /// A disk in memory that answers at once and keeps a list of what it was asked.
    #[derive(Debug)]
    struct Memory {
        bytes: RefCell<Vec<u8>>,
        asked: RefCell<Vec<(Op, u64, u64)>>,
    }

    impl Memory {
        fn new() -> Self {
            let bytes = (0..DISK_BYTES).map(|at| (at % 251) as u8).collect();
            Self {
                bytes: RefCell::new(bytes),
                asked: RefCell::default(),
            }
        }
    }

    impl DiskQueue for Memory {
        fn submit(&self, mut request: Request) {
            if let Err(error) = request.check(DISK_BYTES, false) {
                return request.finish(Err(error));
            }
            self.asked
                .borrow_mut()
                .push((request.op, request.offset, request.len));
            let (start, end) = (request.offset as usize, (request.offset + request.len) as usize);
            let mut bytes = self.bytes.borrow_mut();
            let mut buffer = request.take_buffer();
            match request.op {
                Op::Read => buffer
                    .as_owned_mut()
                    .expect("our own")
                    .copy_from_slice(&bytes[start..end]),
                Op::Write { .. } => bytes[start..end].copy_from_slice(buffer.as_owned().expect("our own")),
                Op::WriteZeroes { .. } | Op::Discard => bytes[start..end].fill(0),
                Op::Flush => {}
            }
            request.finish_with(buffer, Ok(()));
        }
    }

    fn run(disk: &Memory, transfer: Transfer, offset: u64, len: u64) -> Result<Vec<u8>, IoError> {
        let range = Range { offset, len };
        block::Context::syscalls()
            .block_on(super::run(disk, DISK_BYTES, transfer, range))
            .expect("the ring turns")
    }

    const READ: Transfer = Transfer::Read {
        check: None,
        dump: false,
    };

    fn write(pattern: u8) -> Transfer {
        Transfer::Write {
            content: Content::Pattern(pattern),
            fua: false,
        }
    }

    #[test]
    fn transfer_touches_exactly_its_range() {
        let zeroes = Transfer::Write {
            content: Content::Zeroes { unmap: true },
            fua: true,
        };
        for offset in [0, 1, 511, 512, 513, 1023, 1024, 3583, 4095] {
            for len in [0, 1, 2, 510, 511, 512, 513, 1024, 1535] {
                if offset + len > DISK_BYTES {
                    continue;
                }
                for (transfer, byte) in [(write(0xee), 0xee), (zeroes, 0)] {
                    let disk = Memory::new();
                    let mut expected = disk.bytes.borrow().clone();
                    let range = offset as usize..(offset + len) as usize;
                    assert_eq!(
                        run(&disk, READ, offset, len).as_deref(),
                        Ok(&expected[range.clone()])
                    );

                    expected[range].fill(byte);
                    run(&disk, transfer, offset, len).expect("a write inside the disk");
                    assert_eq!(*disk.bytes.borrow(), expected, "{len} bytes at {offset}");
                }
            }
        }
    }

    #[test]
    fn transfer_of_whole_sectors_is_one_request() {
        let disk = Memory::new();
        run(&disk, write(1), 512, 1024).expect("a write");
        let zeroes = Transfer::Write {
            content: Content::Zeroes { unmap: false },
            fua: true,
        };
        run(&disk, zeroes, 0, 512).expect("zeros");
        assert_eq!(
            *disk.asked.borrow(),
            [
                (Op::Write { fua: false }, 512, 1024),
                (
                    Op::WriteZeroes {
                        unmap: false,
                        fua: true
                    },
                    0,
                    512
                )
            ]
        );
        assert!(!touches_edges(
            write(1),
            Range {
                offset: 512,
                len: 1024
            }
        ));
        assert!(touches_edges(
            write(1),
            Range {
                offset: 512,
                len: 1025
            }
        ));
        assert!(touches_edges(zeroes, Range { offset: 1, len: 511 }));
        assert!(!touches_edges(READ, Range { offset: 1, len: 1 }));
    }

    #[test]
    fn discard_is_cut_to_whole_sectors() {
        let disk = Memory::new();
        run(&disk, Transfer::Discard, 1, 1022).expect("nothing to discard");
        assert!(disk.asked.borrow().is_empty());
        run(&disk, Transfer::Discard, 1, 2047).expect("a discard");
        assert_eq!(*disk.asked.borrow(), [(Op::Discard, 512, 1536)]);
    }

    #[test]
    fn transfer_outside_the_disk_fails_without_changes() {
        let disk = Memory::new();
        let before = disk.bytes.borrow().clone();
        for (offset, len) in [
            (4096, 1),
            (4095, 2),
            (0, 4097),
            (u64::MAX, 2),
            (4097, 0),
            (1, u64::MAX),
        ] {
            for transfer in [READ, write(1), Transfer::Discard] {
                assert_eq!(
                    run(&disk, transfer, offset, len),
                    Err(IoError::OutOfRange),
                    "{len} at {offset}"
                );
            }
        }
        assert_eq!(*disk.bytes.borrow(), before);
    }
}
