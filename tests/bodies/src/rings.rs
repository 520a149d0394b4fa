//! The split virtqueue beside the crate `virtio-queue` of rust-vmm, its oracle: each has its own copy of the same guest memory,
//! and both see the same driver.
//!
//! Asserted after every step: the same chains (head, buffers, order, readable or writable), the same bytes in the used ring,
//! the same indices, the same answers to "must the driver be notified?" and "is a chain waiting?". The two differ where the
//! table says so, and nowhere else. Each row that ends a case is a label of it.
//!
//! | what a driver does | ours | `virtio-queue` |
//! |---|---|---|
//! | makes a part of the queue span two memory regions | refuses to start | translates at every access |
//! | moves the available index too far | `AvailableIndex`, on every look | the same on a take |
//! | names a descriptor that is not in the table | `DescriptorIndex` | ends the chain before it, silently |
//! | makes a loop | `TooLong` | ends the chain after as many descriptors as the table has |
//! | makes a chain of more than 1,024 descriptors | `TooLong`: no I/O takes as many buffers | follows it |
//! | uses an indirect table that was not negotiated | `IndirectNotNegotiated` | does not know what was negotiated |
//! | puts an indirect table into an indirect table | `IndirectNested` | ends the chain before it |
//! | continues a chain after an indirect table | `IndirectHasNext` | ignores the rest |
//! | gives an indirect table no entry, or part of one | `IndirectLength` | ends the chain before it |
//! | puts an indirect table outside memory, or over two regions | `IndirectOutsideMemory` | reads only the entries that the chain uses |
//! | gives an empty buffer | follows the chain, defect `ZeroLength` | yields the buffer |
//! | puts a readable buffer after a writable one | follows, defect `ReadableAfterWritable` | yields both |
//! | puts a buffer outside memory | follows, defect `OutsideMemory` | yields it unchecked |
//! | makes a chain of more than 2^32 bytes | follows; so many are not in memory, so it has a defect | ends the chain |
//! | sets `VRING_AVAIL_F_NO_INTERRUPT` | does not notify | always notifies without event indices |
//! | waits for the first answers after a start | is notified, whatever its event index | only if its event index asks |
//!
//! Not reached, because the memory is too small: an indirect table of more than 65,535 entries, which `virtio-queue` refuses.

use virtio_devices::virtqueue::{
    CHAIN_MAX, Chain, ChainDefect, QueueError, QueueSetup, RingAddresses, SetupError, Slice, Virtqueue,
};
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Error, Queue, QueueOwnedT, QueueState, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

use crate::cursor::Cursor;
use crate::device::{AVAILABLE, DESCRIPTORS, USED, lay_out, lay_out_chain};
use crate::memory::{BASE, EDGE, END, GuardedMemory};

/// The most steps of a case.
const STEPS_MAX: u32 = 300;
/// A queue of more entries than this has its parts in the second region.
const SMALL_MAX: u16 = 256;

const NO_INTERRUPT: u16 = 1;

thread_local! {
    static MEMORIES: [GuardedMemory; 2] = [GuardedMemory::new(), GuardedMemory::new()];
}

struct Pair {
    ours: Virtqueue,
    theirs: Queue,
    /// Ours, theirs.
    memories: [GuestMemoryMmap; 2],
    setup: QueueSetup,
    /// Chains taken and not given back.
    in_flight: Vec<u16>,
    /// True until the first answers since the start.
    fresh: bool,
    /// The difference met last that does not end a case.
    met: &'static str,
}

/// Lets a driver work, and both queues answer it. Returns the difference that ended the case or was met last, else "equal".
///
/// # Panics
///
/// If the queues differ in what the table does not list.
pub fn body(data: &[u8]) -> &'static str {
    let mut cursor = Cursor::new(data);
    let memories = MEMORIES.with(|memories| memories.map(GuardedMemory::zeroed));
    let size = cursor.pick(&[16, 16, 16, 16, 64, 256, 1, 2, 8, 2048, 2048, 3, 0, 32768]);
    let setup = QueueSetup {
        size,
        addresses: place(&mut cursor, size),
        next_available: cursor.pick(&[0, 0, 65530, 65535, 32767]),
        event_idx: !cursor.one_in(3),
        indirect: !cursor.one_in(8),
    };
    // Where the used ring stands may be unlike where the available ring does.
    let used = cursor.pick(&[0_u16, 0, 65532, 65535, 7]).to_le_bytes();
    for memory in &memories {
        // There may be no such place.
        let _written = memory.write(&used, GuestAddress(setup.addresses.used.wrapping_add(2)));
        let index = setup.next_available.to_le_bytes();
        let _written = memory.write(&index, GuestAddress(setup.addresses.available.wrapping_add(2)));
    }
    let ours = Virtqueue::new(memories[0].clone(), &setup);
    let theirs = oracle(&memories[1], &setup);
    let (ours, theirs) = match (ours, theirs) {
        (Ok(ours), Some(theirs)) => (ours, theirs),
        (Err(_), None) => return "refused",
        (Err(SetupError::OutsideMemory { address, len, .. }), Some(_))
            if (address + 1..address + len).contains(&EDGE) =>
        {
            return "queue in two regions";
        }
        (ours, theirs) => panic!("{setup:x?}: {ours:?}, {theirs:?}"),
    };
    let mut pair = Pair {
        ours,
        theirs,
        memories,
        setup,
        in_flight: Vec::new(),
        fresh: true,
        met: "equal",
    };
    pair.disable_notifications();
    for _ in 0..STEPS_MAX {
        if cursor.is_empty() {
            break;
        }
        if let Err(ended) = pair.step(&mut cursor) {
            pair.met = ended;
            break;
        }
        pair.compare_rings();
    }
    let [ours, theirs] = pair
        .memories
        .each_ref()
        .map(|memory| read(memory, BASE, (END - BASE) as usize));
    assert!(ours == theirs, "guest memory differs");
    pair.met
}

/// Returns the addresses of the queue's parts: mostly where they may be.
fn place(cursor: &mut Cursor<'_>, size: u16) -> RingAddresses {
    let usual = if size <= SMALL_MAX {
        [DESCRIPTORS, AVAILABLE, USED]
    } else {
        [EDGE, EDGE + 0x8000, EDGE + 0xa000]
    };
    let elsewhere = cursor.one_in(16);
    let [descriptors, available, used] = usual.map(|usual| {
        if !elsewhere {
            return usual;
        }
        let wild = cursor.u64();
        cursor.pick(&[
            usual,
            usual,
            usual + 1,
            usual + 2,
            usual + 8,
            EDGE - 16,
            END - 16,
            wild,
        ])
    });
    RingAddresses {
        descriptors,
        available,
        used,
    }
}

/// The queue of `virtio-queue` for this setup; `None` if it refuses.
fn oracle(memory: &GuestMemoryMmap, setup: &QueueSetup) -> Option<Queue> {
    let state = QueueState {
        max_size: 1 << 15,
        next_avail: setup.next_available,
        next_used: 0,
        event_idx_enabled: setup.event_idx,
        size: setup.size,
        ready: true,
        desc_table: setup.addresses.descriptors,
        avail_ring: setup.addresses.available,
        used_ring: setup.addresses.used,
    };
    let mut queue = Queue::try_from(state)
        .ok()
        .filter(|queue| queue.is_valid(memory))?;
    let used = queue
        .used_idx(memory, std::sync::atomic::Ordering::Acquire)
        .ok()?;
    queue.set_next_used(used.0);
    Some(queue)
}

fn read(memory: &GuestMemoryMmap, address: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    memory
        .read_slice(&mut bytes, GuestAddress(address))
        .expect("inside memory");
    bytes
}

impl Pair {
    fn write(&self, address: u64, bytes: &[u8]) {
        for memory in &self.memories {
            // A driver has no other memory.
            let _any = memory.write(bytes, GuestAddress(address));
        }
    }

    fn word(&self, address: u64) -> u16 {
        let bytes = read(&self.memories[1], address, 2);
        u16::from_le_bytes([bytes[0], bytes[1]])
    }

    /// The ring words and entries that the device writes, and what both queues know.
    fn compare_rings(&self) {
        let (at, len) = (self.setup.addresses.used, 6 + 8 * usize::from(self.setup.size));
        let [ours, theirs] = self.memories.each_ref().map(|memory| read(memory, at, len));
        assert!(ours == theirs, "the used rings differ: {ours:x?}, {theirs:x?}");
        assert_eq!(self.ours.used_index(), self.theirs.next_used());
        assert_eq!(self.ours.next_available(), self.theirs.next_avail());
    }

    fn step(&mut self, cursor: &mut Cursor<'_>) -> Result<(), &'static str> {
        match cursor.below(16) {
            0..5 => {
                let head = lay_out_chain(cursor, &self.setup, &mut |at, bytes| self.write(at, bytes));
                self.make_available(cursor, head);
            }
            5..9 => {
                let most = 1 + cursor.below(8) as u16;
                self.take(most)?;
            }
            9..12 => self.answer(cursor),
            12 => {
                // Near the used index, where it matters.
                let near = self.theirs.next_used().wrapping_add(cursor.below(8) as u16);
                let event = near.wrapping_sub(cursor.below(8) as u16);
                let at = self.setup.addresses.available + 4 + 2 * u64::from(self.setup.size);
                self.write(at, &event.to_le_bytes());
                let flags = cursor.pick(&[0, 0, NO_INTERRUPT]);
                self.write(self.setup.addresses.available, &flags.to_le_bytes());
            }
            13 => self.sleep()?,
            14 if cursor.one_in(4) => self.restart(),
            _ if cursor.one_in(4) => lay_out(cursor, self.setup.size, &mut |at, bytes| self.write(at, bytes)),
            _ => {}
        }
        Ok(())
    }

    /// Puts a head into the available ring, and mostly no more heads than it holds.
    fn make_available(&self, cursor: &mut Cursor<'_>, head: u16) {
        let (at, size) = (self.setup.addresses.available, self.setup.size);
        let index = self.word(at + 2);
        let untaken = index.wrapping_sub(self.theirs.next_avail());
        if untaken >= size && !cursor.one_in(64) {
            return;
        }
        let head = if cursor.one_in(128) {
            cursor.u32() as u16
        } else {
            head
        };
        self.write(at + 4 + 2 * u64::from(index % size), &head.to_le_bytes());
        let moved = if cursor.one_in(256) {
            cursor.u32() as u16
        } else {
            1
        };
        self.write(at + 2, &index.wrapping_add(moved).to_le_bytes());
    }

    /// Has both take up to `most` chains.
    fn take(&mut self, most: u16) -> Result<(), &'static str> {
        let index = self.word(self.setup.addresses.available + 2);
        let waiting = match (self.ours.available(), self.theirs.iter(&self.memories[1])) {
            (Ok(waiting), Ok(_)) => waiting,
            (Err(QueueError::AvailableIndex { .. }), Err(Error::InvalidAvailRingIndex)) => {
                return Err("available index");
            }
            (ours, theirs) => panic!("{ours:?}, {theirs:?}"),
        };
        assert_eq!(waiting, index.wrapping_sub(self.theirs.next_avail()));
        for _ in 0..waiting.min(most) {
            let mut chain = Chain::default();
            let ours = self.ours.take(&mut chain);
            let mut iter = self.theirs.iter(&self.memories[1]).expect("as before");
            let followed = iter.next().expect("a chain, as there is one");
            let head = followed.head_index();
            let descriptors: Vec<Descriptor> = followed.collect();
            match ours {
                Ok(found) => {
                    assert_eq!(found, head);
                    self.compare_chains(&chain, &descriptors);
                    self.in_flight.push(head);
                }
                Err(error) => return Err(self.judge(error, head, &descriptors)),
            }
        }
        Ok(())
    }

    /// The buffer of a descriptor in our memory, one part for each region; `None` if it is not all in memory.
    fn parts(&self, descriptor: &Descriptor) -> Option<Vec<(usize, usize)>> {
        let slices = self.memories[0].get_slices(descriptor.addr(), descriptor.len() as usize);
        let part = slices.map(|slice| slice.map(|slice| (slice.ptr_guard().as_ptr() as usize, slice.len())));
        part.collect::<Result<_, _>>().ok()
    }

    /// A chain that we followed to its end.
    fn compare_chains(&mut self, chain: &Chain, descriptors: &[Descriptor]) {
        let mut parts: [Vec<(usize, usize)>; 2] = Default::default();
        let mut defect = None;
        for descriptor in descriptors {
            let (address, len) = (descriptor.addr().0, descriptor.len());
            let writes = usize::from(descriptor.is_write_only());
            let found = self.parts(descriptor);
            let new = if len == 0 {
                Some(ChainDefect::ZeroLength)
            } else if writes == 0 && !parts[1].is_empty() {
                Some(ChainDefect::ReadableAfterWritable)
            } else if let Some(found) = found {
                parts[writes].extend(found);
                None
            } else {
                Some(ChainDefect::OutsideMemory { address, len })
            };
            defect = defect.or(new);
        }
        if !is_complete(descriptors) {
            // It counts bytes, and we go on to the buffer that cannot be in memory.
            let ours = chain.defect();
            assert!(
                ours.is_some() && (ours == defect || defect.is_none()),
                "{ours:?}, {descriptors:x?}"
            );
            self.met = "more than 2^32 bytes";
            return;
        }
        assert_eq!(chain.defect(), defect, "{descriptors:x?}");
        match defect {
            Some(ChainDefect::ZeroLength) => self.met = "empty buffer",
            Some(ChainDefect::ReadableAfterWritable) => self.met = "readable after writable",
            Some(ChainDefect::OutsideMemory { .. }) => self.met = "buffer outside memory",
            None => {
                let memory = self.ours.memory();
                let part = |slice: &Slice| {
                    let start = memory.pointer(*slice, 0, slice.len());
                    (start.addr().get(), slice.len() as usize)
                };
                let ours = [chain.readable(), chain.writable()]
                    .map(|slices| slices.iter().map(part).collect::<Vec<_>>());
                assert_eq!(ours, parts, "{descriptors:x?}");
                let bytes = |parts: &[(usize, usize)]| parts.iter().map(|(_, len)| *len as u64).sum::<u64>();
                assert_eq!(chain.readable_bytes(), bytes(&parts[0]));
                assert_eq!(chain.writable_bytes(), bytes(&parts[1]));
            }
        }
    }

    /// A chain that we refuse: there must be a reason in the descriptors, and the oracle must see as much of the chain as
    /// the table says. Returns the reason's label.
    fn judge(&self, error: QueueError, head: u16, descriptors: &[Descriptor]) -> &'static str {
        let (size, table) = (self.setup.size, self.setup.addresses.descriptors);
        let read_descriptor = |index: u64| -> Descriptor {
            let found = self.memories[1].read_obj(GuestAddress(table + 16 * index));
            found.expect("inside memory")
        };
        let tables: Vec<Descriptor> = (0..u64::from(size))
            .map(read_descriptor)
            .filter(Descriptor::refers_to_indirect_table)
            .collect();
        let any = |what: &dyn Fn(&Descriptor) -> bool| tables.iter().any(what);
        let complete = is_complete(descriptors);
        let said = || format!("{error}: {head}, {descriptors:x?}");
        match error {
            QueueError::DescriptorIndex { index, size } => {
                assert!(!complete && u32::from(index) >= size, "{}", said());
                "descriptor index"
            }
            QueueError::TooLong { limit, .. } if complete => {
                assert!(
                    limit == CHAIN_MAX && descriptors.len() > usize::from(limit),
                    "{}",
                    said()
                );
                "more than 1,024 descriptors"
            }
            QueueError::TooLong { limit, .. } => {
                let next = read_descriptor(descriptors.last().map_or(head, Descriptor::next).into());
                let bytes = descriptors
                    .iter()
                    .chain([&next])
                    .map(|found| u64::from(found.len()));
                let cut = bytes.sum::<u64>() > u32::MAX.into();
                let whole = limit == CHAIN_MAX || descriptors.len() == usize::from(limit);
                assert!(whole || cut, "{}", said());
                "loop"
            }
            QueueError::IndirectNotNegotiated { .. } => {
                assert!(!self.setup.indirect && !tables.is_empty(), "{}", said());
                "indirect, not negotiated"
            }
            QueueError::IndirectNested { .. } => {
                assert!(!complete && !tables.is_empty(), "{}", said());
                "indirect in indirect"
            }
            QueueError::IndirectHasNext { .. } => {
                assert!(any(&|found| found.has_next()), "{}", said());
                "next after indirect"
            }
            QueueError::IndirectLength { len, .. } => {
                let odd = len == 0 || len % 16 != 0;
                assert!(!complete && odd && any(&|found| found.len() == len), "{}", said());
                "indirect table of odd length"
            }
            QueueError::IndirectOutsideMemory { address, .. } => {
                let outside = |found: &Descriptor| {
                    let inside = self.parts(found).is_some_and(|parts| parts.len() == 1);
                    found.addr().0 == address && !inside
                };
                assert!(any(&outside), "{}", said());
                "indirect table outside memory"
            }
            _ => panic!("{}", said()),
        }
    }

    /// Gives back chains in any order, and publishes them.
    fn answer(&mut self, cursor: &mut Cursor<'_>) {
        assert!(!self.ours.publish(), "nothing was given back");
        if self.in_flight.is_empty() {
            return;
        }
        let index = self.setup.addresses.used + 2;
        let before = read(&self.memories[0], index, 2);
        let count = 1 + cursor.below(self.in_flight.len().min(8) as u64);
        for _ in 0..count {
            let which = cursor.below(self.in_flight.len() as u64) as usize;
            let (head, len) = (self.in_flight.swap_remove(which), cursor.u32());
            self.ours.give_back(head, len);
            let added = self.theirs.add_used(&self.memories[1], head, len);
            added.expect("the head of a chain");
        }
        assert_eq!(u64::from(self.ours.unpublished()), count);
        // Descriptors may lie over the used ring, but nothing writes there meanwhile.
        assert_eq!(read(&self.memories[0], index, 2), before, "published early");
        let flags = self.word(self.setup.addresses.available);
        let ours = self.ours.publish();
        let theirs = self.theirs.needs_notification(&self.memories[1]);
        let theirs = theirs.expect("an event index in memory");
        let fresh = std::mem::take(&mut self.fresh);
        if !self.setup.event_idx {
            assert!(theirs);
            assert_eq!(ours, flags & NO_INTERRUPT == 0);
            if !ours {
                self.met = "no interrupt";
            }
        } else if fresh {
            assert!(ours);
            if !theirs {
                self.met = "first answers";
            }
        } else {
            assert_eq!(ours, theirs, "{:?}", self.theirs);
        }
    }

    fn sleep(&mut self) -> Result<(), &'static str> {
        let ours = self.ours.enable_notifications();
        let theirs = self.theirs.enable_notification(&self.memories[1]);
        let theirs = theirs.expect("a ring in memory");
        match ours {
            Ok(waiting) => assert_eq!(waiting, theirs),
            Err(QueueError::AvailableIndex { .. }) => {
                assert!(theirs && self.theirs.iter(&self.memories[1]).is_err());
                return Err("available index");
            }
            Err(error) => panic!("{error}"),
        }
        self.compare_rings();
        self.disable_notifications();
        Ok(())
    }

    fn disable_notifications(&mut self) {
        self.ours.disable_notifications();
        let theirs = self.theirs.disable_notification(&self.memories[1]);
        theirs.expect("a ring in memory");
        if self.setup.event_idx {
            // The oracle lets the index stay that a sleep asked for, and is kicked for the next chain although it is awake.
            let at = self.setup.addresses.used + 4 + 8 * u64::from(self.setup.size);
            let passed = read(&self.memories[0], at, 2);
            let copied = self.memories[1].write_slice(&passed, GuestAddress(at));
            copied.expect("a ring in memory");
        }
    }

    /// Both start again where they are: ours from the oracle's state. The used index is the one in memory, which a driver
    /// may have changed.
    fn restart(&mut self) {
        let setup = QueueSetup {
            next_available: self.theirs.state().next_avail,
            ..self.setup
        };
        self.ours = Virtqueue::new(self.memories[0].clone(), &setup).expect("as before");
        self.theirs = oracle(&self.memories[1], &setup).expect("as before");
        self.fresh = true;
        self.disable_notifications();
    }
}

/// Returns true if the oracle came to the end of the chain.
fn is_complete(descriptors: &[Descriptor]) -> bool {
    descriptors.last().is_some_and(|last| !last.has_next())
}
