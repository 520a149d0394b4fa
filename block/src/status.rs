//! Block status: which parts of a disk hold data, which read as zeros, and which image of a chain decides it.
//!
//! Tools that copy, compare or show disks skip what holds nothing ([`DiskQueue::status`](crate::DiskQueue::status)). A status
//! describes the disk at some time during the call; a request that is answered meanwhile may or may not be seen.

/// The largest number of ranges that one call of [`DiskQueue::status`](crate::DiskQueue::status) returns.
pub const STATUS_RANGES_MAX: usize = 1024;

/// A range of a disk whose bytes come from one place.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct StatusRange {
    /// The offset on the disk, in bytes.
    pub offset: u64,
    /// The length in bytes; not zero.
    pub len: u64,
    /// The content.
    pub content: Content,
    /// The number of images above the one that decides: 0 if it is the disk's own image.
    pub depth: u32,
}

/// The content of a range of a disk.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Content {
    /// Bytes of a file.
    Data {
        /// Their offset in the file of the image that decides, in bytes, if they lie there as they are.
        at: Option<u64>,
    },
    /// Bytes that are stored compressed.
    Compressed,
    /// Zeros, which an image records.
    Zero,
    /// Zeros, because no image holds anything.
    Absent,
}

impl StatusRange {
    /// Returns the end of the range, in bytes.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.len)
    }

    /// Returns true if the bytes may be other than zeros.
    #[must_use]
    pub fn may_hold_data(&self) -> bool {
        matches!(self.content, Content::Data { .. } | Content::Compressed)
    }

    /// Returns true if `next` goes on where this range ends, on the disk and in the file.
    fn continues_in(&self, next: &Self) -> bool {
        let content = match (self.content, next.content) {
            (Content::Data { at: Some(at) }, Content::Data { at: Some(next) }) => {
                at.checked_add(self.len) == Some(next)
            }
            (here, next) => here == next,
        };
        content && self.depth == next.depth && self.end() == next.offset
    }
}

/// The ranges of a status under construction: each as long as it can be, none empty, not too many.
#[derive(Debug, Default)]
pub struct StatusRanges(Vec<StatusRange>);

impl StatusRanges {
    /// Returns true if there are as many ranges as a status may have.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.0.len() >= STATUS_RANGES_MAX
    }

    /// Appends a range, which continues the last one or is a new one.
    pub fn push(&mut self, next: StatusRange) {
        match self.0.last_mut() {
            Some(last) if last.continues_in(&next) => last.len += next.len,
            _ if next.len == 0 => {}
            _ => self.0.push(next),
        }
    }

    /// Returns the ranges.
    #[must_use]
    pub fn into_vec(self) -> Vec<StatusRange> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(offset: u64, len: u64, content: Content, depth: u32) -> StatusRange {
        StatusRange {
            offset,
            len,
            content,
            depth,
        }
    }

    #[test]
    fn status_ranges_merge_only_contiguous_disk_and_file_ranges() {
        let data = |at| Content::Data { at: Some(at) };
        let mut ranges = StatusRanges::default();
        for next in [
            range(0, 512, data(4096), 0),
            range(512, 512, data(4608), 0),
            range(1024, 512, data(8192), 0),
            range(1536, 512, data(8704), 1),
            range(2048, 0, Content::Zero, 0),
            range(2048, 512, Content::Zero, 0),
            range(2560, 512, Content::Zero, 0),
            range(3072, 512, Content::Absent, 0),
        ] {
            ranges.push(next);
        }
        assert_eq!(
            ranges.into_vec(),
            [
                range(0, 1024, data(4096), 0),
                range(1024, 512, data(8192), 0),
                range(1536, 512, data(8704), 1),
                range(2048, 1024, Content::Zero, 0),
                range(3072, 512, Content::Absent, 0),
            ]
        );
    }
}
