//! The bits of the persistent bitmaps that record changes, in memory, while an image is written.
//!
//! A queue sets the bits of a change before it makes the change, without a lock. Bits are cleared only by operations that run
//! alone, which replace the whole.
//!
//! Bitmaps may also be *durable*: what is stored of them has every change that may be in the file. Their data is written in place,
//! a chunk at a time. A granule whose bit is not stored yet may be changed in place only after a round has stored it. A round marks
//! the whole *region* around it, so that the changes that follow need no round. The oldest regions of many are closed again:
//! the next round that writes their chunk stores only the bits of changes. So what is marked without a change is bounded.
//!
//! Invariants:
//! - a bit of `stored` is set on disk, durably, and no write that is under way clears it;
//! - what a round stores has every bit of `stored`, but for regions that it closes, which have those of `changed`; and of chunks that
//!   L2 entries wait for, every bit of `changed`;
//! - a change in place begins after its bit was seen in `stored`, and after its bit was set in `changed`.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use block::AlignedBuf;
use block::sync::Mutex;
use block::sync::atomic::{AtomicU64, Ordering};

use crate::format::{BitmapCluster, HostOffset};
use crate::invariant::invariant;

/// The largest number of words that are written at once: 4 KiB.
const CHUNK_WORDS_MAX: u64 = 512;
/// The most bytes between two chunks that are written together with what is between them.
const GAP_BYTES: u64 = 32 << 10;
/// The most bytes of one write.
const WRITE_BYTES_MAX: u64 = 1 << 20;
/// The guest bytes of a region, unless a word of bits has more.
pub(crate) const REGION_BYTES: u64 = 4 << 20;
/// The number of regions that may stay marked without a change of all of their granules.
pub(crate) const REGIONS_MAX: usize = 256;
/// Bytes of memory for a bitmap beside its bits.
const OVERHEAD_BYTES: u64 = 256;

type Words = Arc<[AtomicU64]>;

/// Neighbouring words of a bitmap.
#[derive(Clone, Debug)]
struct Chunk {
    /// The bits of changes, and those that were set when the bitmap was loaded.
    changed: Words,
    /// The bits that are stored; empty unless the bitmap is durable.
    stored: Words,
}

/// One bitmap.
#[derive(Clone, Debug)]
pub(crate) struct DirtyBitmap {
    /// The offset of the flags in its directory entry, which identifies it.
    pub(crate) flags_at: u64,
    granularity_bits: u32,
    /// The number of bits.
    bits: u64,
    chunk_words: u64,
    chunks: Vec<Chunk>,
    /// The places of its clusters of data, if it is durable; none for those whose bits are all set.
    places: Vec<Option<HostOffset>>,
}

/// Neighbouring words of a bitmap that are marked at once, all in one chunk.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
struct Region {
    bitmap: usize,
    word: u64,
}

/// The regions of durable bitmaps.
#[derive(Debug, Default)]
struct Regions {
    /// To be marked by the next round.
    wanted: BTreeSet<Region>,
    /// Marked beyond what has changed, the oldest first.
    open: VecDeque<Region>,
    /// Chunks with bits that must be stored before the next L2 entries are, by bitmap and number.
    unsaved: BTreeSet<(usize, u64)>,
    /// A round is writing chunks, which may have been `unsaved`.
    is_under_way: bool,
}

/// Neighbouring chunks to write, and where.
#[derive(Debug)]
pub(crate) struct ChunksWrite {
    bitmap: usize,
    numbers: Range<u64>,
    /// Their words as they are on disk, until they are written.
    buffer: Option<AlignedBuf>,
    /// Words, by their numbers, and the bits of them that are stored when the round ends, and were not when it began.
    new: Vec<(u64, u64)>,
    /// Their place on disk.
    pub(crate) offset: HostOffset,
}

impl ChunksWrite {
    /// Takes their words as they are on disk. Returns nothing the second time.
    pub(crate) fn take_buffer(&mut self) -> Option<AlignedBuf> {
        self.buffer.take()
    }

    /// Takes the bits to write: those that are stored, those that have changed of chunks in `unsaved`, and all of `opened` regions.
    fn fill(&mut self, bitmap: &DirtyBitmap, unsaved: &BTreeSet<(usize, u64)>, opened: &BTreeSet<Region>) {
        let load = |word: &AtomicU64| word.load(Ordering::SeqCst);
        let (index, chunk_words) = (self.bitmap, bitmap.chunk_words as usize);
        let chunks = self.numbers.start as usize..self.numbers.end as usize;
        let chunks = bitmap.chunks.get(chunks).unwrap_or_default();
        let mut buffer = AlignedBuf::zeroed(chunks.len() * chunk_words * 8);
        let words = buffer.as_chunks_mut().0;
        for (chunk, words) in chunks.iter().zip(words.chunks_mut(chunk_words)) {
            for (place, stored) in words.iter_mut().zip(chunk.stored.iter()) {
                *place = load(stored).to_le_bytes();
            }
        }
        let start = self.numbers.start * bitmap.chunk_words;
        for &(_, chunk) in unsaved.range((index, self.numbers.start)..(index, self.numbers.end)) {
            for number in chunk * bitmap.chunk_words..(chunk + 1) * bitmap.chunk_words {
                let place = words.get_mut((number - start) as usize);
                let (Some(changed), Some(place)) = (bitmap.changed(number), place) else {
                    continue;
                };
                let stored = u64::from_le_bytes(*place);
                let new = load(changed) & !stored;
                if new != 0 {
                    *place = (stored | new).to_le_bytes();
                    self.new.push((number, new));
                }
            }
        }
        let region = |word| Region { bitmap: index, word };
        for opened in opened.range(region(start)..region(start + words.len() as u64)) {
            for number in opened.word..opened.word + bitmap.region_words() {
                if let Some(place) = words.get_mut((number - start) as usize) {
                    let valid = bitmap.valid(number);
                    *place = valid.to_le_bytes();
                    self.new.push((number, valid));
                }
            }
        }
        self.buffer = Some(buffer);
    }
}

/// All bitmaps of an image that record changes.
#[derive(Debug, Default)]
pub(crate) struct DirtyBitmaps {
    /// In the order of the directory.
    pub(crate) list: Vec<DirtyBitmap>,
    is_durable: bool,
    regions: Mutex<Regions>,
}

fn words(count: u64) -> Words {
    (0..count).map(|_| AtomicU64::new(0)).collect()
}

/// Returns a word with the bits from `low` up to `high`, at most 64, set.
fn mask(low: u64, high: u64) -> u64 {
    if low >= high {
        return 0;
    }
    (!0 << low) & (!0 >> (64 - high))
}

impl DirtyBitmap {
    /// Returns a bitmap of `bits` bits, all clear, in an image with clusters of `cluster_size` bytes.
    pub(crate) fn new(flags_at: u64, granularity_bits: u8, bits: u64, cluster_size: u64) -> Self {
        let mut bitmap = Self {
            flags_at,
            granularity_bits: u32::from(granularity_bits),
            bits: 0,
            chunk_words: CHUNK_WORDS_MAX.min(cluster_size / 8),
            chunks: Vec::new(),
            places: Vec::new(),
        };
        bitmap.grow(bits);
        bitmap
    }

    /// Returns the bytes of memory that a bitmap takes, if it is durable.
    pub(crate) fn memory_bytes(bits: u64) -> u64 {
        let chunks = bits.div_ceil(CHUNK_WORDS_MAX * 64);
        chunks
            .saturating_mul(CHUNK_WORDS_MAX * 16)
            .saturating_add(OVERHEAD_BYTES)
    }

    fn grow(&mut self, bits: u64) {
        self.bits = self.bits.max(bits);
        let chunks = self.bits.div_ceil(self.chunk_words * 64) as usize;
        let (count, is_durable) = (self.chunk_words, !self.places.is_empty());
        self.chunks.resize_with(chunks.max(self.chunks.len()), || Chunk {
            changed: words(count),
            stored: words(if is_durable { count } else { 0 }),
        });
    }

    fn chunk(&self, word: u64) -> Option<(&Chunk, usize)> {
        let chunk = self.chunks.get((word / self.chunk_words) as usize)?;
        Some((chunk, (word % self.chunk_words) as usize))
    }

    fn changed(&self, word: u64) -> Option<&AtomicU64> {
        let (chunk, at) = self.chunk(word)?;
        chunk.changed.get(at)
    }

    fn stored(&self, word: u64) -> Option<&AtomicU64> {
        let (chunk, at) = self.chunk(word)?;
        chunk.stored.get(at)
    }

    /// Returns the words with bits of these guest bytes, and a mask of the bits.
    fn words(&self, bytes: &Range<u64>) -> impl Iterator<Item = (u64, u64)> + use<> {
        let first = bytes.start >> self.granularity_bits;
        let end = match bytes.is_empty() {
            true => first,
            false => ((bytes.end - 1) >> self.granularity_bits) + 1,
        };
        invariant!(
            end <= self.bits || bytes.is_empty(),
            "a change past the end of a bitmap of {} bits",
            self.bits
        );
        (first / 64..end.div_ceil(64)).map(move |word| {
            let base = word * 64;
            (word, mask(first.saturating_sub(base), (end - base).min(64)))
        })
    }

    /// Returns the bits of a word that the bitmap has.
    fn valid(&self, word: u64) -> u64 {
        mask(0, self.bits.saturating_sub(word * 64).min(64))
    }

    /// Sets bits. Returns false if one of them has to be stored before a change.
    #[inline]
    fn mark(&self, bytes: &Range<u64>, is_durable: bool) -> bool {
        let mut is_stored = true;
        for (word, mask) in self.words(bytes) {
            let Some(changed) = self.changed(word) else {
                continue;
            };
            // In one order with the loads and stores of a round that closes the region: either that sees the bit, or
            // this sees the region closed.
            if changed.load(Ordering::SeqCst) & mask != mask {
                changed.fetch_or(mask, Ordering::SeqCst);
            }
            if is_durable {
                let stored = self.stored(word).map_or(0, |word| word.load(Ordering::SeqCst));
                is_stored &= stored & mask == mask;
            }
        }
        is_stored
    }

    /// Returns true if a bit is set and not stored.
    fn lacks(&self, bytes: &Range<u64>) -> bool {
        self.words(bytes).any(|(word, mask)| {
            let load = |word: Option<&AtomicU64>| word.map_or(0, |word| word.load(Ordering::SeqCst));
            load(self.changed(word)) & mask & !load(self.stored(word)) != 0
        })
    }

    fn region_words(&self) -> u64 {
        let words = REGION_BYTES.checked_shr(6 + self.granularity_bits).unwrap_or(0);
        words.clamp(1, self.chunk_words)
    }

    /// Sets the bits of a cluster's content, as it is on disk.
    pub(crate) fn load(&self, cluster: u64, cluster_size: u64, content: Option<&[u8]>) {
        let first = cluster * (cluster_size / 8);
        let words = self.bits.div_ceil(64).saturating_sub(first).min(cluster_size / 8);
        for at in 0..words {
            let bits = match content {
                None => !0,
                Some(bytes) => {
                    let bytes = bytes.get(at as usize * 8..).and_then(|bytes| bytes.first_chunk());
                    bytes.map_or(!0, |bytes| u64::from_le_bytes(*bytes))
                }
            };
            // Bits past the disk's end mean nothing.
            let bits = bits & self.valid(first + at);
            if let Some(changed) = self.changed(first + at).filter(|_| bits != 0) {
                changed.fetch_or(bits, Ordering::SeqCst);
            }
        }
    }

    /// Returns the content of a cluster that covers the first `bits` bits with others: all zeros, all ones, or its bytes.
    pub(crate) fn content(&self, cluster: u64, cluster_size: u64, bits: u64) -> (BitmapCluster, Vec<u8>) {
        let first = cluster * (cluster_size / 8);
        let mut bytes = Vec::with_capacity(cluster_size as usize);
        let (mut is_zero, mut is_one) = (true, true);
        for word in first..first + cluster_size / 8 {
            let valid = mask(0, bits.saturating_sub(word * 64).min(64));
            let changed = self.changed(word).map_or(0, |word| word.load(Ordering::SeqCst)) & valid;
            is_zero &= changed == 0;
            is_one &= changed == valid;
            bytes.extend_from_slice(&changed.to_le_bytes());
        }
        let kind = match (is_zero, is_one) {
            (true, _) => BitmapCluster::Zeros,
            (_, true) => BitmapCluster::Ones,
            _ => BitmapCluster::Data(HostOffset::default()),
        };
        (kind, bytes)
    }

    /// Returns the durable bitmap whose clusters, with the bits of changes as they are now, are stored as `table` says.
    /// Nothing changes meanwhile.
    pub(crate) fn stored_as(&self, table: &[BitmapCluster]) -> Self {
        let place = |cluster: &BitmapCluster| match cluster {
            BitmapCluster::Data(host) => Some(*host),
            BitmapCluster::Zeros | BitmapCluster::Ones => None,
        };
        let chunk = |chunk: &Chunk| {
            let copy = |word: &AtomicU64| AtomicU64::new(word.load(Ordering::SeqCst));
            Chunk {
                changed: Arc::clone(&chunk.changed),
                stored: chunk.changed.iter().map(copy).collect(),
            }
        };
        Self {
            chunks: self.chunks.iter().map(chunk).collect(),
            places: table.iter().map(place).collect(),
            ..self.clone()
        }
    }

    /// Returns the place of a chunk.
    fn place(&self, chunk: u64, cluster_size: u64) -> Option<HostOffset> {
        let at = chunk * self.chunk_words * 8;
        let cluster = self.places.get((at / cluster_size) as usize).copied().flatten()?;
        Some(cluster + at % cluster_size)
    }

    /// Returns true if a chunk lies so little behind those of a write that one write of all is cheaper than two.
    fn is_near(&self, write: &ChunksWrite, chunk: u64, cluster_size: u64) -> bool {
        let (numbers, chunk_bytes) = (&write.numbers, self.chunk_words * 8);
        let place = |number: u64| write.offset + (number - numbers.start) * chunk_bytes;
        (chunk - numbers.end) * chunk_bytes <= GAP_BYTES
            && (chunk + 1 - numbers.start) * chunk_bytes <= WRITE_BYTES_MAX
            && (numbers.end..=chunk).all(|number| self.place(number, cluster_size) == Some(place(number)))
    }

    /// Stops to count as stored those bits of a region that no change has set.
    fn close(&self, region: Region) {
        for word in region.word..region.word + self.region_words() {
            let (Some(changed), Some(stored)) = (self.changed(word), self.stored(word)) else {
                continue;
            };
            let before = stored.swap(0, Ordering::SeqCst);
            // Whoever saw the bit in `stored` before has set it in `changed`.
            let kept = before & changed.load(Ordering::SeqCst);
            stored.store(kept, Ordering::SeqCst);
        }
    }
}

impl DirtyBitmaps {
    /// Returns bitmaps whose bits are stored when the image is closed.
    pub(crate) fn new(list: Vec<DirtyBitmap>) -> Self {
        Self {
            list,
            ..Self::default()
        }
    }

    /// Returns durable bitmaps.
    pub(crate) fn durable(list: Vec<DirtyBitmap>) -> Self {
        Self {
            list,
            is_durable: true,
            ..Self::default()
        }
    }

    /// Returns the bitmap whose flags are at this offset.
    pub(crate) fn find(&self, flags_at: u64) -> Option<&DirtyBitmap> {
        let found = self
            .list
            .binary_search_by_key(&flags_at, |bitmap| bitmap.flags_at);
        self.list.get(found.ok()?)
    }

    /// Records that guest bytes are about to change. Returns false if the bits have to be stored before a change in place.
    pub(crate) fn mark(&self, bytes: &Range<u64>) -> bool {
        let mut is_stored = true;
        for bitmap in &self.list {
            is_stored &= bitmap.mark(bytes, self.is_durable);
        }
        is_stored
    }

    /// Returns true if a change of these bytes is recorded, and not stored as durable bitmaps are.
    pub(crate) fn lack(&self, bytes: &Range<u64>) -> bool {
        self.is_durable && self.list.iter().any(|bitmap| bitmap.lacks(bytes))
    }

    /// Has the bits of a recorded change stored with the next L2 entries.
    pub(crate) fn store_with_entries(&self, bytes: &Range<u64>) {
        let mut regions = self.regions.lock();
        for (index, bitmap) in self.list.iter().enumerate() {
            let chunk_of = |bit: u64| bit / 64 / bitmap.chunk_words;
            let first = chunk_of(bytes.start >> bitmap.granularity_bits);
            let last = chunk_of(bytes.end.saturating_sub(1) >> bitmap.granularity_bits);
            regions.unsaved.extend((first..=last).map(|chunk| (index, chunk)));
        }
    }

    /// Has the regions of changes marked by the next round, where bits are not stored.
    pub(crate) fn want(&self, changes: impl Iterator<Item = Range<u64>>) {
        let mut regions = self.regions.lock();
        for bytes in changes {
            for (index, bitmap) in self.list.iter().enumerate() {
                for (word, mask) in bitmap.words(&bytes) {
                    let stored = bitmap.stored(word).map_or(0, |word| word.load(Ordering::SeqCst));
                    if stored & mask != mask {
                        let word = word - word % bitmap.region_words();
                        regions.wanted.insert(Region { bitmap: index, word });
                    }
                }
            }
        }
    }

    /// Returns true if bits have to be stored before the next L2 entries, or a round may be storing them.
    pub(crate) fn need_round(&self) -> bool {
        let regions = self.regions.lock();
        regions.is_under_way || !regions.unsaved.is_empty()
    }

    /// Takes the chunks that a round writes. One round at a time, to [`Self::end_round`].
    pub(crate) fn take_round(&self, cluster_size: u64) -> Vec<ChunksWrite> {
        let mut regions = self.regions.lock();
        regions.is_under_way = true;
        let wanted = std::mem::take(&mut regions.wanted);
        let unsaved = std::mem::take(&mut regions.unsaved);
        let mut chunks = unsaved.clone();
        while regions.open.len() + wanted.len() > REGIONS_MAX {
            let Some(oldest) = regions.open.pop_front() else {
                break;
            };
            if let Some(bitmap) = self.list.get(oldest.bitmap) {
                bitmap.close(oldest);
                chunks.insert((oldest.bitmap, oldest.word / bitmap.chunk_words));
            }
        }
        for region in &wanted {
            let Some(bitmap) = self.list.get(region.bitmap) else {
                continue;
            };
            let is_whole = |word| {
                let changed = bitmap.changed(word).map_or(0, |word| word.load(Ordering::SeqCst));
                changed == bitmap.valid(word)
            };
            if !(region.word..region.word + bitmap.region_words()).all(is_whole) {
                regions.open.push_back(*region);
            }
            chunks.insert((region.bitmap, region.word / bitmap.chunk_words));
        }
        drop(regions);
        let mut writes = self.joined(&chunks, cluster_size);
        for write in &mut writes {
            if let Some(bitmap) = self.list.get(write.bitmap) {
                write.fill(bitmap, &unsaved, &wanted);
            }
        }
        writes
    }

    /// Returns the writes of these chunks, and of those in between where few are. They have no bits yet.
    fn joined(&self, chunks: &BTreeSet<(usize, u64)>, cluster_size: u64) -> Vec<ChunksWrite> {
        let mut writes: Vec<ChunksWrite> = Vec::new();
        for &(index, chunk) in chunks {
            let Some(bitmap) = self.list.get(index) else {
                continue;
            };
            let last = writes.last_mut().filter(|write| write.bitmap == index);
            if let Some(last) = last
                && bitmap.is_near(last, chunk, cluster_size)
            {
                last.numbers.end = chunk + 1;
                continue;
            }
            let Some(offset) = bitmap.place(chunk, cluster_size) else {
                continue;
            };
            writes.push(ChunksWrite {
                bitmap: index,
                numbers: chunk..chunk + 1,
                buffer: None,
                new: Vec::new(),
                offset,
            });
        }
        writes
    }

    /// Ends a round: its chunks are stored, durably.
    pub(crate) fn end_round(&self, written: &[ChunksWrite]) {
        for write in written {
            let Some(bitmap) = self.list.get(write.bitmap) else {
                continue;
            };
            for (number, new) in &write.new {
                if let Some(stored) = bitmap.stored(*number) {
                    stored.fetch_or(*new, Ordering::SeqCst);
                }
            }
        }
        self.regions.lock().is_under_way = false;
    }

    /// Ends a round without these chunks, which may not be stored: they are written with the next L2 entries.
    pub(crate) fn fail_round(&self, failed: &[ChunksWrite]) {
        let mut regions = self.regions.lock();
        regions.is_under_way = false;
        for write in failed {
            let chunks = write.numbers.clone();
            regions.unsaved.extend(chunks.map(|chunk| (write.bitmap, chunk)));
        }
    }

    /// Returns the same bitmaps for a disk of `size_bytes`, without those for which `memory_bytes` are too few. They are not
    /// durable: what is stored covers a disk of the old size. Changes that are recorded in either count for both.
    pub(crate) fn grown(&self, size_bytes: u64, memory_bytes: u64) -> Self {
        let mut room = memory_bytes;
        let mut grown = Vec::new();
        for bitmap in &self.list {
            let bits = size_bytes.div_ceil(1 << bitmap.granularity_bits);
            let Some(left) = room.checked_sub(DirtyBitmap::memory_bytes(bits)) else {
                continue;
            };
            room = left;
            let mut bitmap = bitmap.clone();
            bitmap.grow(bits);
            grown.push(bitmap);
        }
        Self::new(grown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLUSTER: u64 = 4096;

    /// A durable bitmap of 64 KiB granules, all clear, whose data is at 1 MiB.
    fn durable(bits: u64) -> DirtyBitmaps {
        let bitmap = DirtyBitmap::new(12, 16, bits, CLUSTER);
        let clusters = bits.div_ceil(8 * CLUSTER);
        let place = |cluster| BitmapCluster::Data(HostOffset::new((1 << 20) + cluster * CLUSTER));
        let table: Vec<BitmapCluster> = (0..clusters).map(place).collect();
        DirtyBitmaps::durable(vec![bitmap.stored_as(&table)])
    }

    fn bytes(write: &ChunksWrite) -> &[u8] {
        write.buffer.as_deref().expect("nobody has taken it")
    }

    /// The words to write first, at most three.
    fn words(round: &[ChunksWrite]) -> Vec<u64> {
        let words = bytes(&round[0]).as_chunks().0.iter();
        words.take(3).map(|word| u64::from_le_bytes(*word)).collect()
    }

    fn granule(number: u64) -> Range<u64> {
        number << 16..(number + 1) << 16
    }

    #[test]
    fn masks_have_the_bits_between() {
        for low in 0..64 {
            for high in 0..=64 {
                let expected = (low..high).fold(0, |mask, bit| mask | 1_u64 << bit);
                assert_eq!(mask(low, high), expected, "{low}..{high}");
            }
        }
    }

    #[test]
    fn marked_bits_are_those_of_the_granules() {
        let bitmap = DirtyBitmap::new(12, 9, 1000, 512);
        for (bytes, bits) in [
            (0..1, 0..1),
            (511..513, 0..2),
            (512 * 60..512 * 70, 60..70),
            (512 * 999..512 * 1000, 999..1000),
        ] {
            let bitmaps = DirtyBitmaps::new(vec![DirtyBitmap::new(12, 9, 1000, 512)]);
            assert!(bitmaps.mark(&bytes), "nothing is stored before");
            let found: Vec<u64> = bitmaps.list[0]
                .content(0, 512, 1000)
                .1
                .iter()
                .map(|&byte| byte.into())
                .collect();
            for bit in 0..1000 {
                let is_set = found[bit / 8] >> (bit % 8) & 1 == 1;
                assert_eq!(is_set, bits.contains(&(bit as u64)), "{bytes:?} {bit}");
            }
        }
        assert_eq!(bitmap.content(0, 512, 1000).0, BitmapCluster::Zeros);
        bitmap.load(0, 512, None);
        assert_eq!(bitmap.content(0, 512, 1000).0, BitmapCluster::Ones);
        assert!(matches!(bitmap.content(0, 512, 1001).0, BitmapCluster::Data(_)));
    }

    /// A change in place waits for a round, and those beside it do not. What the round stores is the region.
    #[test]
    fn round_marks_the_region_of_a_change() {
        let bitmaps = durable(1000);
        assert!(!bitmaps.mark(&granule(70)));
        assert!(bitmaps.lack(&granule(70)) && !bitmaps.lack(&granule(71)));
        bitmaps.want([granule(70)].into_iter());
        let round = bitmaps.take_round(CLUSTER);
        assert!(bitmaps.need_round(), "until its sync");
        assert_eq!(round.len(), 1);
        assert_eq!(round[0].offset, HostOffset::new(1 << 20));
        assert_eq!(words(&round), [0, !0, 0]);
        assert!(!bitmaps.mark(&granule(70)), "it is not durable yet");
        bitmaps.end_round(&round);
        assert!(!bitmaps.need_round());
        assert!(bitmaps.mark(&granule(64)) && bitmaps.mark(&granule(127)));
        assert!(!bitmaps.mark(&granule(128)));
    }

    /// A gap of two chunks is written, as it is stored; one of sixteen is not. A change that no round was asked to store is not stored.
    #[test]
    fn near_chunks_are_one_write() {
        let chunk_bits = CHUNK_WORDS_MAX * 64;
        let bitmaps = durable(40 * chunk_bits);
        let at = |chunk: u64| granule(chunk * chunk_bits);
        for chunk in [0, 1, 3, 20] {
            bitmaps.mark(&at(chunk));
            if chunk != 1 {
                bitmaps.want([at(chunk)].into_iter());
            }
        }
        let round = bitmaps.take_round(CLUSTER);
        let facts = |write: &ChunksWrite| (write.offset.bytes() - (1 << 20), bytes(write).len() as u64);
        let found: Vec<(u64, u64)> = round.iter().map(facts).collect();
        assert_eq!(found, [(0, 4 * CLUSTER), (20 * CLUSTER, CLUSTER)]);
        assert_eq!(bytes(&round[0])[CLUSTER as usize], 0);
        bitmaps.end_round(&round);
        assert!(bitmaps.mark(&at(0)) && bitmaps.mark(&at(3)) && bitmaps.mark(&at(20)));
        assert!(!bitmaps.mark(&at(1)));
    }

    #[test]
    fn failed_round_is_repeated_with_the_next_entries() {
        let bitmaps = durable(1000);
        bitmaps.mark(&granule(1));
        bitmaps.store_with_entries(&granule(1));
        let round = bitmaps.take_round(CLUSTER);
        assert_eq!(words(&round)[0], 2, "an allocating write marks no region");
        bitmaps.fail_round(&round);
        assert!(bitmaps.need_round() && bitmaps.lack(&granule(1)));
        bitmaps.end_round(&bitmaps.take_round(CLUSTER));
        assert!(!bitmaps.need_round() && !bitmaps.lack(&granule(1)));
    }

    /// The oldest region is closed when one more is opened: its chunk is written without the bits that no change has set.
    #[test]
    fn oldest_region_is_closed_for_one_too_many() {
        let regions = REGIONS_MAX as u64 + 1;
        let bitmaps = durable(regions * 64);
        for region in 0..regions {
            bitmaps.mark(&granule(region * 64 + 5));
            bitmaps.want([granule(region * 64 + 5)].into_iter());
            let round = bitmaps.take_round(CLUSTER);
            if region + 1 == regions {
                assert_eq!(words(&round)[0], 1 << 5, "closed");
                assert_eq!(words(&round)[1], !0, "not yet");
            }
            bitmaps.end_round(&round);
        }
        assert!(bitmaps.mark(&granule(5)), "what has changed stays stored");
        assert!(!bitmaps.mark(&granule(6)), "the rest does not");
    }

    #[test]
    fn grown_bitmaps_share_their_changes() {
        let old = DirtyBitmaps::new(vec![DirtyBitmap::new(12, 16, 10, CLUSTER)]);
        let new = old.grown(100_000 << 16, u64::MAX);
        old.mark(&granule(3));
        new.mark(&granule(99_999));
        let (_, first) = new.list[0].content(0, CLUSTER, 100_000);
        let (_, last) = new.list[0].content(3, CLUSTER, 100_000);
        assert_eq!(first[0], 8);
        assert!(last.iter().any(|&byte| byte != 0));
        assert!(
            old.grown(100_000 << 16, 1000).list.is_empty(),
            "there is no memory for it"
        );
    }
}
