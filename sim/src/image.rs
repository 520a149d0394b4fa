//! File contents as lists of interned sectors, so that a crash image costs a copy of small numbers.
//!
//! Every distinct content of a sector is stored once, in a [`Store`] that worlds and images share. An
//! image is then a list of numbers, which is cheap to copy, compare and hash.
//!
//! Invariant: number 0 is the sector of zeros, and an image's list never ends with it.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};
use std::rc::Rc;

/// The sector size of simulated disks, in bytes.
pub const SECTOR: usize = 512;

/// A sector's content by number.
pub(super) type SectorId = u32;

/// The sector of zeros.
pub(super) const ZEROS: SectorId = 0;

/// Hasher for numbers that are hashes already.
#[derive(Default)]
struct Given(u64);

impl Hasher for Given {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(self.0 << 8 | u64::from(byte));
        }
    }
    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}

fn mix(hash: u64, word: u64) -> u64 {
    (hash.rotate_left(23) ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

fn hash_of(bytes: &[u8; SECTOR]) -> u64 {
    let mut lanes = [1u64, 2, 3, 4];
    for words in bytes.as_chunks::<32>().0 {
        for (lane, word) in lanes.iter_mut().zip(words.as_chunks::<8>().0) {
            *lane = mix(*lane, u64::from_le_bytes(*word));
        }
    }
    lanes
        .into_iter()
        .fold(0, |hash, lane| mix(hash ^ hash >> 31, lane))
}

#[derive(Default)]
struct Contents {
    sectors: Vec<[u8; SECTOR]>,
    hashes: Vec<u64>,
    index: HashMap<u64, SectorId, BuildHasherDefault<Given>>,
}

/// All sector contents, each stored once. Cheap to clone; all clones are the same store.
#[derive(Clone)]
pub struct Store(Rc<RefCell<Contents>>);

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Store({} sectors)", self.0.borrow().sectors.len())
    }
}

impl Default for Store {
    fn default() -> Self {
        let store = Self(Rc::default());
        let zeros = store.intern(&[0; SECTOR]);
        debug_assert_eq!(zeros, ZEROS);
        store
    }
}

impl Store {
    pub(super) fn intern(&self, bytes: &[u8; SECTOR]) -> SectorId {
        let contents = &mut *self.0.borrow_mut();
        let mut hash = hash_of(bytes);
        while let Some(&id) = contents.index.get(&hash) {
            if contents.sectors[id as usize] == *bytes {
                return id;
            }
            // Two contents with one hash: the second is stored under the next number.
            hash = hash.wrapping_add(1);
        }
        let id = SectorId::try_from(contents.sectors.len()).expect("a world has fewer than 2^32 sectors");
        contents.sectors.push(*bytes);
        contents.hashes.push(hash);
        contents.index.insert(hash, id);
        id
    }

    pub(super) fn sector(&self, id: SectorId) -> [u8; SECTOR] {
        self.0.borrow().sectors[id as usize]
    }
}

/// The contents of a file: a length and sectors. Unwritten sectors read as zeros.
#[derive(Clone, Debug)]
pub struct SimImage {
    store: Store,
    sectors: Vec<SectorId>,
    len: u64,
}

impl PartialEq for SimImage {
    fn eq(&self, other: &Self) -> bool {
        self.len == other.len && self.sectors == other.sectors
    }
}

impl SimImage {
    /// Makes an empty file.
    #[must_use]
    pub fn new(store: &Store) -> Self {
        Self {
            store: store.clone(),
            sectors: Vec::new(),
            len: 0,
        }
    }

    /// Makes a file that holds `bytes`.
    #[must_use]
    pub fn from_bytes(store: &Store, bytes: &[u8]) -> Self {
        let mut image = Self::new(store);
        image.len = bytes.len() as u64;
        for (index, chunk) in bytes.chunks(SECTOR).enumerate() {
            let mut sector = [0; SECTOR];
            sector[..chunk.len()].copy_from_slice(chunk);
            image.set(index as u64, store.intern(&sector));
        }
        image
    }

    /// Returns the whole file.
    ///
    /// # Panics
    ///
    /// If it is larger than the address space.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(self.len).expect("a simulated file is small")];
        self.read(0, &mut bytes);
        bytes
    }

    /// Fills `out` from byte `offset` on, with zeros past the end.
    pub fn read(&self, offset: u64, out: &mut [u8]) {
        let contents = self.store.0.borrow();
        let mut done = 0;
        while done < out.len() {
            let at = offset + done as u64;
            let within = (at % SECTOR as u64) as usize;
            let part = (SECTOR - within).min(out.len() - done);
            let sector = &contents.sectors[self.get(at / SECTOR as u64) as usize];
            out[done..done + part].copy_from_slice(&sector[within..within + part]);
            done += part;
        }
    }

    /// Changes bytes from `offset` on; extends the file if they reach past its end.
    pub fn patch(&mut self, offset: u64, bytes: &[u8]) {
        let mut done = 0;
        while done < bytes.len() {
            let at = offset + done as u64;
            let within = (at % SECTOR as u64) as usize;
            let part = (SECTOR - within).min(bytes.len() - done);
            let index = at / SECTOR as u64;
            let mut sector = self.store.sector(self.get(index));
            sector[within..within + part].copy_from_slice(&bytes[done..done + part]);
            self.set(index, self.store.intern(&sector));
            done += part;
        }
        self.len = self.len.max(offset + bytes.len() as u64);
    }

    /// Returns the length in bytes.
    #[must_use]
    #[expect(
        clippy::len_without_is_empty,
        reason = "nobody asks whether an image is empty"
    )]
    pub fn len(&self) -> u64 {
        self.len
    }

    pub(super) fn set_len(&mut self, len: u64) {
        self.len = len;
    }

    pub(super) fn store(&self) -> &Store {
        &self.store
    }

    #[inline]
    pub(super) fn get(&self, sector: u64) -> SectorId {
        self.sectors.get(sector as usize).copied().unwrap_or(ZEROS)
    }

    pub(super) fn set(&mut self, sector: u64, id: SectorId) {
        let index = sector as usize;
        if index < self.sectors.len() {
            self.sectors[index] = id;
            while self.sectors.last() == Some(&ZEROS) {
                self.sectors.pop();
            }
        } else if id != ZEROS {
            self.sectors.resize(index, ZEROS);
            self.sectors.push(id);
        }
    }

    /// Cuts everything at and past the length, as a file system does.
    pub(super) fn cut(&mut self) {
        let whole = self.len / SECTOR as u64;
        let within = (self.len % SECTOR as u64) as usize;
        if within > 0 && self.get(whole) != ZEROS {
            let mut sector = self.store.sector(self.get(whole));
            sector[within..].fill(0);
            self.set(whole, self.store.intern(&sector));
        }
        let keep = whole as usize + usize::from(within > 0);
        self.sectors.truncate(keep);
        while self.sectors.last() == Some(&ZEROS) {
            self.sectors.pop();
        }
    }

    /// Returns a hash of the contents: the same for the same bytes in any world.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        let contents = self.store.0.borrow();
        let start = mix(0x0123_4567_89AB_CDEF, self.len);
        self.sectors.iter().fold(start, |hash, &id| {
            mix(hash ^ hash >> 29, contents.hashes[id as usize])
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sim_image_holds_what_was_patched_into_it() {
        let store = Store::default();
        let mut image = SimImage::from_bytes(&store, &[7; 1300]);
        image.patch(500, &[9; 30]);
        image.patch(5000, &[1; 10]);
        let mut expected = vec![0; 5010];
        expected[..1300].fill(7);
        expected[500..530].fill(9);
        expected[5000..].fill(1);
        assert_eq!(image.to_bytes(), expected);
        image.set_len(600);
        image.cut();
        assert_eq!(image.to_bytes(), expected[..600]);
        image.set_len(2000);
        expected[600..2000].fill(0);
        assert_eq!(image.to_bytes(), expected[..2000]);
    }

    #[test]
    fn sim_images_of_equal_contents_are_equal() {
        let store = Store::default();
        let mut a = SimImage::from_bytes(&store, &[3; 2048]);
        let b = SimImage::from_bytes(&store, &[3; 1024]);
        a.set_len(1024);
        a.cut();
        assert_eq!(a, b);
        assert_eq!(a.fingerprint(), b.fingerprint());
        a.patch(0, &[4]);
        assert_ne!(a.fingerprint(), b.fingerprint());
    }
}
