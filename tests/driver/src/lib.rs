//! The driver's side of split virtqueues, for tests: a guest's code without a guest.
//!
//! ```text
//!  request ─┐
//!  chain ───┼─▶ descriptors ─▶ stage ─▶ available ring ─▶ publish ─▶ kick?
//!  link ────┘                                                          │
//!  take_used ◀─ used ring ◀────────────────────── device ◀─────────────┘
//! ```
//!
//! Written from virtio 1.2 ("2.7") alone, without Ringdisk's crates, so that an error in our device is not repeated in its
//! test. [`Driver`] takes descriptors from a free list; tests that write rings no driver would write use
//! [`Driver::descriptor`], [`Driver::stage`] and [`Rings`].
//!
//! ```
//! use ringdisk_driver::{Driver, Rings, blk};
//! use vm_memory::{GuestAddress, GuestMemoryMmap};
//!
//! let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 1 << 16)])?;
//! let mut driver = Driver::new(memory, Rings::at(0), 64, 0x4000);
//! let head = driver.request(blk::IN, 7, &[(0x8000, 512, true)]);
//! driver.publish();
//! assert_eq!(driver.take_used(), None, "no device is here");
//! assert_eq!(driver.status(head), blk::NO_STATUS);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Invariant: a descriptor of a chain is used again only after the chain was found in the used ring.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{Ordering, fence};

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

pub mod blk;

/// Descriptor flag: another one follows.
pub const NEXT: u16 = 1;
/// Descriptor flag: the device may write the buffer.
pub const WRITE: u16 = 2;
/// Descriptor flag: the buffer is a table of descriptors.
pub const INDIRECT: u16 = 4;

/// Flag of the available ring, without event indices: no interrupt is wanted.
const NO_INTERRUPT: u16 = 1;
/// Flag of the used ring, without event indices: no kick is wanted.
const NO_NOTIFY: u16 = 1;

/// A descriptor: address, length in bytes, flags, index of the next one.
#[derive(Clone, Copy, Debug)]
pub struct Desc(pub u64, pub u32, pub u16, pub u16);

impl Desc {
    /// Returns the descriptor as memory has it.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 16] {
        let Self(address, len, flags, next) = self;
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&address.to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        bytes
    }
}

/// A buffer of a chain: address, length in bytes, and true if the device may write it.
pub type Part = (u64, u32, bool);

/// The guest addresses of a queue's three parts, and of the fields in them.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Rings {
    /// The descriptor table.
    pub descriptors: u64,
    /// The available ring.
    pub available: u64,
    /// The used ring.
    pub used: u64,
}

impl Rings {
    /// The bytes of a queue laid out by [`Rings::at`].
    pub const BYTES: u64 = 0x4000;

    /// The parts of a queue of at most 256 entries, one behind the other from `base`.
    #[must_use]
    pub const fn at(base: u64) -> Self {
        Self {
            descriptors: base,
            available: base + 0x1000,
            used: base + 0x2000,
        }
    }

    /// The address of descriptor `index`.
    #[must_use]
    pub const fn descriptor(&self, index: u16) -> u64 {
        self.descriptors + 16 * index as u64
    }

    /// The address of the available ring's flags; its index follows.
    #[must_use]
    pub const fn available_flags(&self) -> u64 {
        self.available
    }

    /// The address of the available ring's index.
    #[must_use]
    pub const fn available_index(&self) -> u64 {
        self.available + 2
    }

    /// The address of the available ring's entry for `index`, in a queue of `size` entries.
    #[must_use]
    pub const fn available_entry(&self, index: u16, size: u16) -> u64 {
        self.available + 4 + 2 * (index % size) as u64
    }

    /// The address of the driver's event index, in a queue of `size` entries.
    #[must_use]
    pub const fn used_event(&self, size: u16) -> u64 {
        self.available + 4 + 2 * size as u64
    }

    /// The address of the used ring's index.
    #[must_use]
    pub const fn used_index(&self) -> u64 {
        self.used + 2
    }

    /// The address of the used ring's entry for `index`, in a queue of `size` entries.
    #[must_use]
    pub const fn used_entry(&self, index: u16, size: u16) -> u64 {
        self.used + 4 + 8 * (index % size) as u64
    }

    /// The address of the device's event index, in a queue of `size` entries.
    #[must_use]
    pub const fn avail_event(&self, size: u16) -> u64 {
        self.used + 4 + 8 * size as u64
    }
}

/// Returns true if going from `old` to `new` passes `event` (virtio 1.2, "2.7.10").
#[must_use]
pub const fn crossed(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// The driver of one queue.
#[derive(Clone, Debug)]
pub struct Driver {
    /// The guest's memory.
    pub memory: GuestMemoryMmap,
    /// The places of the queue's parts.
    pub rings: Rings,
    /// The number of entries.
    pub size: u16,
    /// The index of the next chain in the available ring, counting those that are staged.
    pub available: u16,
    /// The index of the next entry of the used ring to look at.
    pub used: u16,
    /// True if event indices were negotiated.
    pub event_idx: bool,
    requests: u64,
    free: VecDeque<u16>,
    /// The descriptors of chains that are not used yet, by head.
    chains: BTreeMap<u16, Vec<u16>>,
}

impl Driver {
    /// Drives a queue of `size` entries in `memory`, which is zero where the rings are. Headers and status bytes of requests
    /// are at `requests`, which takes [`Driver::request_bytes`].
    #[must_use]
    pub fn new(memory: GuestMemoryMmap, rings: Rings, size: u16, requests: u64) -> Self {
        Self {
            memory,
            rings,
            size,
            available: 0,
            used: 0,
            event_idx: true,
            requests,
            free: (0..size).collect(),
            chains: BTreeMap::new(),
        }
    }

    /// The memory that headers and status bytes of a queue of `size` entries take.
    #[must_use]
    pub const fn request_bytes(size: u16) -> u64 {
        17 * size as u64
    }

    /// Lets both rings begin at `index`.
    pub fn start_at(&mut self, index: u16) {
        (self.available, self.used) = (index, index);
        self.put_u16(self.rings.available_index(), index);
        self.put_u16(self.rings.used_index(), index);
    }

    /// Makes the rings those of a new queue: flags, indices and entries are zero.
    pub fn clear_rings(&self) {
        let (size, rings) = (self.size, self.rings);
        let available = rings.used_event(size) + 2 - rings.available;
        self.write(rings.available, &vec![0; available as usize]);
        self.write(
            rings.used,
            &vec![0; (rings.avail_event(size) + 2 - rings.used) as usize],
        );
    }

    /// The same driver on a copy of its memory.
    #[must_use]
    pub fn in_memory(&self, memory: &GuestMemoryMmap) -> Self {
        Self {
            memory: memory.clone(),
            ..self.clone()
        }
    }

    /// Writes guest memory.
    ///
    /// # Panics
    ///
    /// If there is none at the address.
    pub fn write(&self, address: u64, bytes: &[u8]) {
        self.memory
            .write_slice(bytes, GuestAddress(address))
            .unwrap_or_else(|error| panic!("{address:#x} in guest memory: {error}"));
    }

    /// Reads guest memory.
    ///
    /// # Panics
    ///
    /// As for [`Driver::write`].
    #[must_use]
    pub fn read(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory
            .read_slice(&mut bytes, GuestAddress(address))
            .unwrap_or_else(|error| panic!("{address:#x} in guest memory: {error}"));
        bytes
    }

    fn put_u16(&self, address: u64, word: u16) {
        self.memory
            .store(word.to_le(), GuestAddress(address), Ordering::SeqCst)
            .unwrap_or_else(|error| panic!("{address:#x} in guest memory: {error}"));
    }

    fn u16_at(&self, address: u64) -> u16 {
        self.memory
            .load(GuestAddress(address), Ordering::SeqCst)
            .map(u16::from_le)
            .unwrap_or_else(|error| panic!("{address:#x} in guest memory: {error}"))
    }

    fn u32_at(&self, address: u64) -> u32 {
        self.memory
            .read_obj(GuestAddress(address))
            .map(u32::from_le)
            .unwrap_or_else(|error| panic!("{address:#x} in guest memory: {error}"))
    }

    /// Writes descriptor `index` of the table at `table`.
    pub fn descriptor_in(&self, table: u64, index: u16, desc: Desc) {
        self.write(table + 16 * u64::from(index), &desc.to_bytes());
    }

    /// Writes descriptor `index` of the queue.
    pub fn descriptor(&self, index: u16, desc: Desc) {
        self.descriptor_in(self.rings.descriptors, index, desc);
    }

    /// Writes a chain of `parts` into the descriptors `indices`, the head first; with `table`, into a table there, to which
    /// the only one of `indices` leads.
    ///
    /// # Panics
    ///
    /// If there are not as many indices as the chain takes.
    pub fn link(&self, indices: &[u16], parts: &[Part], table: Option<u64>) {
        let put = |table: u64, index: u16, part: Part, next: Option<u16>| {
            let (address, len, writable) = part;
            let flags = if writable { WRITE } else { 0 } | if next.is_some() { NEXT } else { 0 };
            self.descriptor_in(table, index, Desc(address, len, flags, next.unwrap_or(0)));
        };
        let count = if table.is_some() { 1 } else { parts.len() };
        assert_eq!(indices.len(), count, "descriptors for {parts:?}");
        match table {
            Some(table) => {
                for (at, &part) in (0..).zip(parts) {
                    let next = (usize::from(at) + 1 < parts.len()).then_some(at + 1);
                    put(table, at, part, next);
                }
                self.descriptor(indices[0], Desc(table, 16 * parts.len() as u32, INDIRECT, 0));
            }
            None => {
                for (at, &part) in parts.iter().enumerate() {
                    let next = indices.get(at + 1).copied();
                    put(self.rings.descriptors, indices[at], part, next);
                }
            }
        }
    }

    /// Writes a chain of `parts` into free descriptors, which are taken in turn. Returns the head.
    ///
    /// # Panics
    ///
    /// If too few are free.
    pub fn chain(&mut self, parts: &[Part]) -> u16 {
        self.chain_in(parts, None)
    }

    /// Writes a chain of `parts` into a table at `table` and a free descriptor, which it returns.
    ///
    /// # Panics
    ///
    /// If none is free.
    pub fn indirect(&mut self, parts: &[Part], table: u64) -> u16 {
        self.chain_in(parts, Some(table))
    }

    fn chain_in(&mut self, parts: &[Part], table: Option<u64>) -> u16 {
        let count = if table.is_some() { 1 } else { parts.len() };
        assert!(
            count <= self.free.len(),
            "{count} descriptors are needed, {} are free",
            self.free.len()
        );
        let indices: Vec<u16> = self.free.drain(..count).collect();
        self.link(&indices, parts, table);
        let head = indices[0];
        self.chains.insert(head, indices);
        head
    }

    /// Puts `head` into the available ring without moving its index.
    pub fn stage(&mut self, head: u16) {
        let entry = self.rings.available_entry(self.available, self.size);
        self.put_u16(entry, head);
        self.available = self.available.wrapping_add(1);
    }

    /// Returns true if a chain is staged that the device was not shown.
    #[must_use]
    pub fn has_staged(&self) -> bool {
        self.available != self.u16_at(self.rings.available_index())
    }

    /// Shows the device what was staged. Returns true if it wants to be kicked; a kick too many does no harm.
    pub fn publish(&self) -> bool {
        let old = self.u16_at(self.rings.available_index());
        self.put_u16(self.rings.available_index(), self.available);
        // The device stores its event index before it looks at ours a last time; we the other way round.
        fence(Ordering::SeqCst);
        if self.event_idx {
            crossed(self.avail_event(), self.available, old)
        } else {
            self.used_flags() & NO_NOTIFY == 0
        }
    }

    /// Stages `head` and publishes it.
    pub fn make_available(&mut self, head: u16) {
        self.stage(head);
        self.publish();
    }

    /// Asks for an interrupt when entry `event` of the used ring is written, with event indices.
    pub fn set_used_event(&self, event: u16) {
        self.put_u16(self.rings.used_event(self.size), event);
    }

    /// Asks for an interrupt at the next used entry. The caller must look at the ring once more before it sleeps.
    pub fn want_interrupt(&self) {
        if self.event_idx {
            self.set_used_event(self.used);
        } else {
            self.put_u16(self.rings.available_flags(), 0);
        }
    }

    /// Asks for no interrupts. An event index that was passed does so by itself.
    pub fn want_no_interrupt(&self) {
        if !self.event_idx {
            self.put_u16(self.rings.available_flags(), NO_INTERRUPT);
        }
    }

    /// The device's event index.
    #[must_use]
    pub fn avail_event(&self) -> u16 {
        self.u16_at(self.rings.avail_event(self.size))
    }

    /// The flags of the used ring.
    #[must_use]
    pub fn used_flags(&self) -> u16 {
        self.u16_at(self.rings.used)
    }

    /// The index of the used ring.
    #[must_use]
    pub fn used_index(&self) -> u16 {
        self.u16_at(self.rings.used_index())
    }

    /// Takes the next used entry: head and length. A chain that [`Driver::chain`] made frees its descriptors.
    pub fn take_used(&mut self) -> Option<(u32, u32)> {
        if self.used == self.used_index() {
            return None;
        }
        let entry = self.rings.used_entry(self.used, self.size);
        self.used = self.used.wrapping_add(1);
        let (head, len) = (self.u32_at(entry), self.u32_at(entry + 4));
        let chain = u16::try_from(head)
            .ok()
            .and_then(|head| self.chains.remove(&head));
        self.free.extend(chain.into_iter().flatten());
        Some((head, len))
    }

    /// The address of the header of the request at `head`.
    fn header_address(&self, head: u16) -> u64 {
        self.requests + 16 * u64::from(head)
    }

    /// Returns the guest address of the status of the request at `head`.
    #[must_use]
    pub fn status_address(&self, head: u16) -> u64 {
        self.requests + 16 * u64::from(self.size) + u64::from(head)
    }

    /// Returns the status of the request at `head`: [`blk::NO_STATUS`] until it is written.
    #[must_use]
    pub fn status(&self, head: u16) -> u8 {
        self.read(self.status_address(head), 1)[0]
    }

    /// Lays out a virtio-blk request of header, `data` and status; stages it. Returns its head.
    ///
    /// # Panics
    ///
    /// As for [`Driver::chain`].
    pub fn request(&mut self, kind: u32, sector: u64, data: &[Part]) -> u16 {
        let head = *self.free.front().expect("a free descriptor");
        let (header, status) = (self.header_address(head), self.status_address(head));
        self.write(header, &blk::header(kind, sector));
        self.write(status, &[blk::NO_STATUS]);
        let mut parts = vec![(header, blk::HEADER_BYTES, false)];
        parts.extend(data);
        parts.push((status, 1, true));
        self.chain(&parts);
        self.stage(head);
        head
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn driver(size: u16) -> Driver {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 16)]).expect("memory");
        Driver::new(memory, Rings::at(0), size, 0x8000)
    }

    /// Plays the device: uses the chain at `head`.
    fn give_back(driver: &Driver, head: u16, len: u32) {
        let index = driver.used_index();
        let entry = driver.rings.used_entry(index, driver.size);
        driver.write(entry, &u32::from(head).to_le_bytes());
        driver.write(entry + 4, &len.to_le_bytes());
        driver.put_u16(driver.rings.used_index(), index.wrapping_add(1));
    }

    #[test]
    fn crossed_is_true_only_when_the_event_index_was_passed() {
        assert!(crossed(5, 6, 5));
        assert!(crossed(5, 9, 4));
        assert!(!crossed(6, 6, 5));
        assert!(!crossed(4, 6, 5));
        assert!(crossed(u16::MAX, 0, u16::MAX));
        assert!(!crossed(0x8000, 10, 0));
    }

    #[test]
    fn chain_has_the_layout_of_the_specification() {
        let mut driver = driver(4);
        let head = driver.chain(&[(0x1122, 3, false), (0x3344, 5, true)]);
        driver.make_available(head);
        let first = [0x22, 0x11, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 1, 0, 1, 0];
        let second = [0x44, 0x33, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 2, 0, 0, 0];
        assert_eq!(driver.read(0, 32), [first, second].concat());
        assert_eq!(driver.read(0x1000, 6), [0, 0, 1, 0, 0, 0]);
        let head = driver.indirect(&[(0x1122, 3, false), (0x3344, 5, true)], 0x4000);
        driver.make_available(head);
        assert_eq!(driver.read(0x4000, 32), [first, second].concat());
        let leads = [0, 0x40, 0, 0, 0, 0, 0, 0, 32, 0, 0, 0, 4, 0, 0, 0];
        assert_eq!(driver.read(16 * u64::from(head), 16), leads);
        assert_eq!(driver.read(0x1000, 8), [0, 0, 2, 0, 0, 0, 2, 0]);
    }

    #[test]
    fn descriptors_are_freed_when_their_chain_is_used() {
        let mut driver = driver(4);
        let heads = [1, 2].map(|_| {
            let head = driver.chain(&[(0, 1, false), (0, 1, true)]);
            driver.make_available(head);
            head
        });
        assert_eq!(heads, [0, 2]);
        let exhausted = std::panic::catch_unwind(|| driver.clone().chain(&[(0, 1, true)]));
        assert!(exhausted.is_err());
        give_back(&driver, heads[1], 9);
        assert_eq!(driver.take_used(), Some((2, 9)));
        assert_eq!(driver.chain(&[(0, 1, false), (0, 1, true)]), 2);
    }

    #[test]
    fn publish_wraps_indices_and_kicks_when_wanted() {
        let mut driver = driver(4);
        driver.start_at(u16::MAX - 1);
        for (event, kick) in [(u16::MAX - 1, true), (5, false), (0, true), (0, false)] {
            driver.put_u16(driver.rings.avail_event(4), event);
            let head = driver.chain(&[(0, 1, true)]);
            driver.stage(head);
            assert_eq!(driver.publish(), kick, "{event:#x}");
            give_back(&driver, head, 1);
            assert_eq!(driver.take_used(), Some((head.into(), 1)));
        }
        assert_eq!((driver.available, driver.used), (2, 2));
        driver.event_idx = false;
        for (flags, kick) in [(0, true), (NO_NOTIFY, false)] {
            driver.put_u16(driver.rings.used, flags);
            assert_eq!(driver.publish(), kick);
        }
    }
}
