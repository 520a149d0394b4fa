//! A disk as a plain array of bytes: what a guest must read, whatever is in flight.
//!
//! Requests that are in flight together never share a byte of the disk. So what each of them leaves is known when it
//! begins, in whatever order they end.

use std::ops::Range;

/// A request of a guest, of a range of the disk.
#[derive(Clone, Debug)]
pub enum Ask {
    /// Read.
    Read,
    /// Write these bytes, as many as the range has.
    Write(Vec<u8>),
    /// Write zeroes.
    Zeroes,
    /// Discard. Only whole clusters may be cleared.
    Discard,
    /// Flush. The range is empty.
    Flush,
}

/// A request in flight.
#[derive(Debug)]
struct InFlight {
    range: Range<u64>,
    read: bool,
    /// The bytes of the range once it has ended.
    bytes: Vec<u8>,
}

/// The model.
#[derive(Debug)]
pub struct Array {
    bytes: Vec<u8>,
    cluster_bytes: u64,
    /// True if discarded clusters read as zeros; otherwise they read as before.
    pub discards: bool,
    in_flight: Vec<Option<InFlight>>,
}

impl Array {
    /// A disk that holds `bytes`, of clusters of `cluster_bytes`, with at most `tags` requests in flight.
    #[must_use]
    pub fn new(bytes: Vec<u8>, cluster_bytes: u64, tags: usize) -> Self {
        Self {
            bytes,
            cluster_bytes,
            discards: true,
            in_flight: (0..tags).map(|_| None).collect(),
        }
    }

    /// The contents, without what is in flight.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns a tag that is not in use.
    #[must_use]
    pub fn free_tag(&self) -> Option<usize> {
        self.in_flight.iter().position(Option::is_none)
    }

    /// Returns true if the request `tag` is in flight.
    #[must_use]
    pub fn is_in_flight(&self, tag: usize) -> bool {
        self.in_flight[tag].is_some()
    }

    /// Returns true if nothing is in flight.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.in_flight.iter().all(Option::is_none)
    }

    /// Returns true if the request `tag` is in flight and reads.
    #[must_use]
    pub fn is_read(&self, tag: usize) -> bool {
        self.in_flight[tag].as_ref().is_some_and(|request| request.read)
    }

    /// The range of the request `tag`; empty if it is not in flight.
    #[must_use]
    pub fn range(&self, tag: usize) -> Range<u64> {
        let request = self.in_flight[tag].as_ref();
        request.map_or(0..0, |request| request.range.clone())
    }

    /// Returns true if no request in flight shares a byte with `range`.
    #[must_use]
    pub fn is_free(&self, range: &Range<u64>) -> bool {
        let mut others = self.in_flight.iter().flatten().map(|request| &request.range);
        others.all(|other| range.end <= other.start || other.end <= range.start)
    }

    /// Begins a request. Returns false, and does nothing, if its range is not free.
    ///
    /// # Panics
    ///
    /// If the tag is in use, the range is outside the disk, or a write has another length.
    pub fn begin(&mut self, tag: usize, range: Range<u64>, ask: Ask) -> bool {
        if !self.is_free(&range) {
            return false;
        }
        assert!(self.in_flight[tag].is_none(), "request {tag} is in flight");
        let read = matches!(ask, Ask::Read);
        let old = self.bytes[range.start as usize..range.end as usize].to_vec();
        let bytes = match ask {
            Ask::Read | Ask::Flush => old,
            Ask::Write(bytes) => bytes,
            Ask::Zeroes => vec![0; old.len()],
            Ask::Discard => self.discarded(&range, old),
        };
        assert_eq!(bytes.len() as u64, range.end - range.start, "{range:?}");
        self.in_flight[tag] = Some(InFlight { range, read, bytes });
        true
    }

    /// Returns `bytes` after a discard: zeros in whole clusters, of which the last may be cut by the disk's end.
    fn discarded(&self, range: &Range<u64>, mut bytes: Vec<u8>) -> Vec<u8> {
        let from = range.start.next_multiple_of(self.cluster_bytes);
        let to = if range.end == self.bytes.len() as u64 {
            range.end
        } else {
            range.end / self.cluster_bytes * self.cluster_bytes
        };
        if self.discards && from < to {
            bytes[(from - range.start) as usize..(to - range.start) as usize].fill(0);
        }
        bytes
    }

    /// Ends a request, which has found `found` if it reads.
    ///
    /// # Errors
    ///
    /// If it was not in flight, or has found something else than it must; names the first byte.
    pub fn end(&mut self, tag: usize, found: &[u8]) -> Result<(), String> {
        let request = self.in_flight.get_mut(tag).and_then(Option::take);
        let request = request.ok_or_else(|| format!("request {tag} was answered and is not in flight"))?;
        let Range { start, end } = request.range;
        if !request.read {
            self.bytes[start as usize..end as usize].copy_from_slice(&request.bytes);
            return Ok(());
        }
        let expected = &request.bytes;
        if found.len() != expected.len() {
            let (found, expected) = (found.len(), expected.len());
            return Err(format!(
                "a read of {start:#x}..{end:#x} has {found} bytes, expected {expected}"
            ));
        }
        match (0..found.len()).find(|&at| found[at] != expected[at]) {
            None => Ok(()),
            Some(at) => Err(format!(
                "byte {:#x} is {:#04x}, expected {:#04x}; read {start:#x}..{end:#x}",
                start + at as u64,
                found[at],
                expected[at]
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn array_requests_never_overlap_and_apply_at_their_end() {
        let mut array = Array::new(vec![1; 8], 4, 3);
        assert!(array.begin(0, 0..4, Ask::Write(vec![2; 4])));
        assert!(!array.begin(1, 3..5, Ask::Read));
        assert!(array.begin(1, 4..8, Ask::Read));
        assert!(array.begin(2, 0..0, Ask::Flush));
        assert_eq!(array.free_tag(), None);
        assert_eq!(array.bytes(), [1; 8]);
        assert_eq!(array.end(0, &[]), Ok(()));
        assert_eq!(array.bytes(), [2, 2, 2, 2, 1, 1, 1, 1]);
        assert!(array.end(0, &[]).is_err(), "answered twice");
        assert_eq!(array.end(2, &[]), Ok(()));
        let difference = array.end(1, &[1, 1, 9, 1]).expect_err("another byte");
        assert_eq!(difference, "byte 0x6 is 0x09, expected 0x01; read 0x4..0x8");
        assert!(array.is_idle());
    }

    #[test]
    fn discard_clears_whole_clusters_and_the_disks_end() {
        for (range, left) in [(1..10, [1, 1, 1, 1, 0, 0, 0, 0, 1, 1]), (5..10, [1; 10])] {
            let mut array = Array::new(vec![1; 11], 4, 1);
            assert!(array.begin(0, range, Ask::Discard));
            assert_eq!(array.end(0, &[]), Ok(()));
            assert_eq!(array.bytes()[..10], left);
        }
        for (discards, last) in [(true, 0), (false, 1)] {
            let mut array = Array::new(vec![1; 10], 4, 1);
            array.discards = discards;
            assert!(array.begin(0, 6..10, Ask::Discard));
            assert_eq!(array.end(0, &[]), Ok(()));
            assert_eq!(array.bytes()[6..], [1, 1, last, last]);
        }
    }
}
