//! A guest's driver of one virtqueue: lays out chains, kicks, and takes answers, as the specification has it.
//!
//! The device is the production one, served by a worker as any frontend is; what lies between it and the guest is
//! memory and a [`Wire`]. The guest works in turns of its own and, when it has nothing to do, sleeps until it
//! is interrupted. What the used ring says counts at once, whether the guest is awake or not: it could look.
//!
//! Invariant: a guest touches the memory of a chain only before it makes the chain available and after it has found it
//! used, and then it overwrites all of it.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use block::canary::{Rule, broken, may_store, strikes};
use block::worker::Frontend;
use block::{Context, IoError, Op};
use qcow::QcowDisk;
use ringdisk_driver::{Driver, Part, blk};
use simulator::{Random, SECTOR};
use virtio_devices::blk::{BlockQueue, Notify};
use vm_memory::{Bytes, GuestAddress};

use crate::arena::{Arena, DATA_BYTES_MAX, PLACES};
use crate::book::{Book, Entry};
use crate::content::bytes_of;
use crate::plan::{Ask, Planned, Virtio};

/// The offset of an indirect table in the first page of a place.
const TABLE_AT: u64 = 0x100;
/// The offset of a status byte there, unless it follows the data.
const STATUS_AT: u64 = 0x800;
/// The value of a status byte until the device has written it.
const NO_STATUS: u8 = 0xEE;
/// The byte that overwrites the memory of a used chain.
const SCRUB: u8 = 0xA5;

/// A yes or no that both ends of a wire see.
#[derive(Debug, Default)]
pub struct Flag(AtomicBool);

impl Flag {
    /// Returns the value.
    #[must_use]
    pub fn get(&self) -> bool {
        self.0.load(Relaxed)
    }

    /// Sets the value.
    pub fn set(&self, value: bool) {
        self.0.store(value, Relaxed);
    }

    /// Sets the value and returns the old one.
    #[must_use]
    pub fn replace(&self, value: bool) -> bool {
        self.0.swap(value, Relaxed)
    }
}

/// Kicks and interrupts between a guest and its server.
#[derive(Debug, Default)]
pub struct Wire {
    /// The guest has kicked since the server last looked.
    pub kicked: Flag,
    /// The server has interrupted since the guest last looked.
    pub interrupted: Flag,
    /// The device says that the guest has broken its queue.
    pub broken: Flag,
    /// The server was killed.
    pub dead: Flag,
}

/// The device's end of a [`Wire`].
#[derive(Debug)]
pub struct Interrupt(pub Arc<Wire>);

impl Notify for Interrupt {
    fn used(&self) {
        if may_store() && !strikes(Rule::AnswerNotNotified, 4) {
            self.0.interrupted.set(true);
        }
    }

    fn broken(&self) {
        self.0.broken.set(true);
    }
}

/// A queue of the production device, until its process is killed.
#[derive(Debug)]
pub struct Served {
    /// The queue.
    pub queue: BlockQueue,
    /// Its wire.
    pub wire: Arc<Wire>,
}

impl Frontend for Served {
    fn poll(&mut self) -> bool {
        !self.wire.dead.get() && self.queue.poll()
    }

    fn publish(&mut self) -> bool {
        !self.wire.dead.get() && self.queue.publish()
    }

    fn prepare_sleep(&mut self) -> bool {
        !self.wire.dead.get() && self.queue.prepare_sleep() && !broken(Rule::SleepWithoutLook)
    }

    fn end_sleep(&mut self) {
        if !self.wire.dead.get() {
            self.queue.end_sleep();
        }
    }

    fn in_flight(&self) -> usize {
        if self.wire.dead.get() || broken(Rule::RemovedInFlight) {
            return 0;
        }
        self.queue.in_flight()
    }

    fn removed(&mut self) {
        if !self.wire.dead.get() {
            self.queue.removed();
        }
    }
}

/// A chain that the device has, or had.
#[derive(Debug)]
struct Chain {
    tag: usize,
    descriptors: Vec<u16>,
    place: usize,
    data: Vec<(u64, u32)>,
    status: u64,
    /// The number of bytes that the device writes if the request succeeds.
    written: u32,
}

/// The driver of one queue: a [`Driver`] that draws the shape of its chains, and holds back what was used.
#[derive(Debug)]
pub struct Guest {
    number: usize,
    driver: Driver,
    arena: Rc<RefCell<Arena>>,
    virtio: Virtio,
    wire: Arc<Wire>,
    /// The features that the device offered and this driver accepted.
    features: u64,
    host: Option<(Context, Arc<QcowDisk>)>,
    book: Book,
    plan: VecDeque<Planned>,
    depth: usize,
    free: Vec<u16>,
    places: Vec<usize>,
    chains: BTreeMap<u16, Chain>,
    /// A used entry that is taken once more.
    taken_twice: Option<(u32, u32)>,
    /// Chains that are used and whose memory was not taken back yet.
    used: Vec<Chain>,
    asleep: bool,
    random: Random,
}

impl Guest {
    /// The driver of queue `number` of `arena`, which asks what `book` was made for.
    #[must_use]
    pub(crate) fn new(
        number: usize,
        arena: &Rc<RefCell<Arena>>,
        virtio: Virtio,
        book: Book,
        plan: VecDeque<Planned>,
        depth: usize,
        seed: u64,
    ) -> Self {
        let memory = arena.borrow().guest();
        // Headers and status bytes are in the arena's places.
        let mut driver = Driver::new(memory, Arena::rings(number), virtio.size, 0);
        driver.start_at(virtio.start);
        driver.event_idx = virtio.event_idx;
        Self {
            number,
            driver,
            arena: Rc::clone(arena),
            virtio,
            wire: Arc::default(),
            features: 0,
            host: None,
            book,
            plan,
            depth: depth.min(PLACES),
            free: (0..virtio.size).rev().collect(),
            places: (0..PLACES).rev().collect(),
            chains: BTreeMap::new(),
            taken_twice: None,
            used: Vec::new(),
            asleep: false,
            random: Random::new(seed),
        }
    }

    /// The wire to the server that is there now.
    #[must_use]
    pub fn wire(&self) -> &Arc<Wire> {
        &self.wire
    }

    /// There is a server, with this end of a new wire; a kick that the last one missed is still there.
    pub fn connect(&mut self, cx: &Context, disk: &Arc<QcowDisk>, features: u64) -> Arc<Wire> {
        self.host = Some((cx.clone(), Arc::clone(disk)));
        self.features = features;
        let wire = Wire::default();
        wire.kicked.set(self.wire.kicked.get());
        wire.interrupted.set(self.wire.interrupted.get());
        self.wire = Arc::new(wire);
        Arc::clone(&self.wire)
    }

    /// The server was killed.
    pub fn lose(&mut self) {
        self.wire.dead.set(true);
        self.book.abandon_growth();
        self.disconnect();
    }

    /// The first descriptor of a chain in flight.
    pub(crate) fn first_head(&self) -> Option<u16> {
        self.chains.keys().next().copied()
    }

    /// There is no server any more.
    pub fn disconnect(&mut self) {
        self.host = None;
    }

    /// The available index of the next chain.
    #[must_use]
    pub fn available(&self) -> u16 {
        self.driver.available
    }

    /// Looks what the device has used since the last time.
    ///
    /// # Errors
    ///
    /// Says what the device did that it must not do.
    pub fn observe(&mut self) -> Result<(), String> {
        if self.wire.broken.get() {
            return Err(format!(
                "queue {}: the device says that its guest broke it",
                self.number
            ));
        }
        let count = usize::from(self.driver.used_index().wrapping_sub(self.driver.used));
        if count > self.chains.len() {
            return Err(format!(
                "queue {}: {count} chains were used at once while {} are in flight: one was answered twice",
                self.number,
                self.chains.len()
            ));
        }
        while let Some((head, len)) = self.take_used() {
            let chain = u16::try_from(head)
                .ok()
                .and_then(|head| self.chains.remove(&head));
            let Some(chain) = chain else {
                return Err(format!(
                    "queue {}: the chain at {head} was used, but is not in flight: it was answered twice",
                    self.number
                ));
            };
            self.answer(chain, len)?;
        }
        Ok(())
    }

    /// Takes the next used entry, which the driver overlooks or takes twice if that rule is broken.
    fn take_used(&mut self) -> Option<(u32, u32)> {
        let entry = self.taken_twice.take().or_else(|| self.driver.take_used())?;
        if strikes(Rule::VirtqueueLostUsed, 20) {
            return self.driver.take_used();
        }
        self.taken_twice = strikes(Rule::VirtqueueDoubleUsed, 20).then_some(entry);
        Some(entry)
    }

    fn answer(&mut self, chain: Chain, len: u32) -> Result<(), String> {
        let status = self.driver.read(chain.status, 1)[0];
        let result = match status {
            blk::OK => Ok(()),
            blk::IOERR => Err(IoError::Host { errno: libc_eio() }),
            blk::UNSUPP => Err(IoError::Unsupported),
            other => return Err(format!("queue {}: a status is {other:#x}", self.number)),
        };
        let expected = if status == blk::OK { chain.written } else { 1 };
        if len != expected {
            return Err(format!(
                "queue {}: {len} bytes were written to a chain, expected {expected}",
                self.number
            ));
        }
        let arena = self.arena.borrow();
        let mut held = chain.data.iter().filter_map(|&(at, len)| arena.holder(at, len));
        if let Some(op) = held.next() {
            return Err(format!(
                "queue {}: a chain was used while op {op} is in flight on its memory",
                self.number
            ));
        }
        drop(arena);
        let (memory, data) = (&self.driver.memory, &chain.data);
        self.book.answer(chain.tag, result, |bytes| {
            let mut at = 0;
            for &(address, len) in data {
                let part = &mut bytes[at..at + len as usize];
                at += part.len();
                if memory.read_slice(part, GuestAddress(address)).is_err() {
                    return false;
                }
            }
            at == bytes.len()
        });
        self.used.push(chain);
        Ok(())
    }

    /// The guest's turn. Returns whether it did anything.
    ///
    /// # Errors
    ///
    /// As for [`Guest::observe`].
    pub fn turn(&mut self) -> Result<bool, String> {
        let grown = self.book.take_growth();
        let mut any = self.book.note_growth(grown);
        if self.asleep {
            if !self.wire.interrupted.get() && !any {
                return Ok(false);
            }
            self.asleep = false;
            any = true;
        }
        self.wire.interrupted.set(false);
        self.observe()?;
        self.take_back(&mut any);
        while let Some(&next) = self.plan.front() {
            let alone = next.alone && self.book.in_flight > 0;
            let full = self.book.in_flight >= self.depth;
            if alone || full || (any && self.random.one_in(2)) || !self.ask(next) {
                break;
            }
            self.plan.pop_front();
            any = true;
        }
        if self.driver.has_staged() && self.driver.publish() {
            self.wire.kicked.set(true);
        }
        if any {
            self.driver.want_no_interrupt();
            return Ok(true);
        }
        self.go_to_sleep()
    }

    /// Asks for an interrupt, and sleeps unless the answer is there already.
    fn go_to_sleep(&mut self) -> Result<bool, String> {
        self.driver.want_interrupt();
        let before = self.driver.used;
        self.observe()?;
        self.asleep = self.driver.used == before;
        Ok(!self.asleep)
    }

    /// Takes the memory of used chains back, and makes sure that nobody can still want what was in it.
    fn take_back(&mut self, any: &mut bool) {
        while let Some(chain) = self.used.pop() {
            *any = true;
            let (start, _) = self.arena.borrow().place(self.number, chain.place);
            self.driver.write(start, &[SCRUB; 0x1000]);
            for &(address, len) in &chain.data {
                self.driver.write(address, &vec![SCRUB; len as usize]);
            }
            for &index in &chain.descriptors {
                self.driver
                    .write(self.driver.rings.descriptor(index), &[SCRUB; 16]);
            }
            self.free.extend(chain.descriptors);
            self.places.push(chain.place);
            if self.random.one_in(4) {
                return;
            }
        }
    }

    /// Lays out what is planned as a chain. `false` if there is no room for it now.
    fn ask(&mut self, mut planned: Planned) -> bool {
        if let Ask::Grow(bytes) = planned.ask {
            if let Some((cx, disk)) = &self.host {
                self.book.grow(cx, disk, planned, bytes);
            }
            return self.host.is_some();
        }
        const DISCARD: u32 = 13;
        const WRITE_ZEROES: u32 = 14;
        let forced = self.virtio.writethrough;
        let needed = match &mut planned.ask {
            Ask::Write { fua } => {
                *fua = forced;
                None
            }
            Ask::Zeroes { fua, .. } => {
                *fua = forced;
                Some(WRITE_ZEROES)
            }
            Ask::Discard => Some(DISCARD),
            _ => None,
        };
        if needed.is_some_and(|bit| self.features & 1 << bit == 0) {
            // A driver asks for nothing that the device does not offer.
            self.book.skip();
            return true;
        }
        let indirect = self.virtio.indirect && self.random.one_in(2);
        let mut shape = Layout::draw(&mut self.random, &planned, indirect);
        if shape.descriptors() > self.free.len() {
            shape = Layout::PLAIN;
        }
        if shape.descriptors() > self.free.len() || self.places.is_empty() {
            return false;
        }
        let Some(entry) = self.book.ask(planned) else {
            return true;
        };
        self.lay_out(&planned, &entry, &shape);
        true
    }

    fn lay_out(&mut self, planned: &Planned, entry: &Entry, layout: &Layout) {
        let place = self.places.pop().unwrap_or_default();
        let (start, data_at) = self.arena.borrow().place(self.number, place);
        let (kind, data, reads) = match entry.op {
            Op::Read => (blk::IN, vec![0xCC; planned.count as usize * SECTOR], true),
            Op::Write { .. } => (blk::OUT, bytes_of(&entry.words), false),
            Op::Flush => (blk::FLUSH, Vec::new(), false),
            Op::Discard => (blk::DISCARD, layout.segments(planned, 0), false),
            Op::WriteZeroes { unmap, .. } => (
                blk::WRITE_ZEROES,
                layout.segments(planned, u32::from(unmap)),
                false,
            ),
        };
        let transfer = matches!(entry.op, Op::Read | Op::Write { .. });
        let sector = if transfer { planned.first } else { 0 };
        self.driver.write(start, &blk::header(kind, sector));

        let mut parts: Vec<Part> = match layout.header_cut {
            0 => vec![(start, 16, false)],
            cut => vec![(start, cut, false), (start + u64::from(cut), 16 - cut, false)],
        };
        let mut pieces = Vec::new();
        let (mut at, mut done) = (data_at + layout.offset, 0);
        while done < data.len() {
            let left = data.len() - done;
            let len = layout.piece.map_or(left, |piece| piece.min(left));
            // The last one has all that is left.
            let len = if pieces.len() + 1 == layout.pieces {
                left
            } else {
                len
            };
            self.driver.write(at, &data[done..done + len]);
            pieces.push((at, len as u32));
            parts.push((at, len as u32, reads));
            done += len;
            at += len as u64 + layout.gap;
        }
        assert!(
            at <= data_at + DATA_BYTES_MAX,
            "{planned} fits its place in guest memory"
        );
        let status = match (pieces.last(), reads && layout.status_with_data) {
            (Some(&(at, len)), true) => {
                if let Some(last) = parts.last_mut() {
                    last.1 += 1;
                }
                at + u64::from(len)
            }
            _ => {
                parts.push((start + STATUS_AT, 1, true));
                start + STATUS_AT
            }
        };
        self.driver.write(status, &[NO_STATUS]);
        let table = layout.indirect.then_some(start + TABLE_AT);
        let own = if table.is_some() { 1 } else { parts.len() };
        let descriptors = self.free.split_off(self.free.len() - own);
        self.driver.link(&descriptors, &parts, table);
        let head = descriptors[0];
        self.driver.stage(head);
        let chain = Chain {
            tag: entry.tag,
            descriptors,
            place,
            status,
            written: if reads { data.len() as u32 + 1 } else { 1 },
            data: if transfer { pieces } else { Vec::new() },
        };
        self.chains.insert(head, chain);
    }
}

impl fmt::Display for Guest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = if self.asleep { "asleep" } else { "awake" };
        write!(
            f,
            "queue {} {state}, {} planned, {} in flight, available {}, used {}",
            self.number,
            self.plan.len(),
            self.chains.len(),
            self.driver.available,
            self.driver.used
        )
    }
}

fn libc_eio() -> i32 {
    rustix::io::Errno::IO.raw_os_error()
}

/// The division of a request into buffers.
#[derive(Clone, Copy, Debug)]
struct Layout {
    indirect: bool,
    /// The bytes of the header before the cut; 0 if it is in one buffer.
    header_cut: u32,
    /// The length of all pieces of data but the last, in bytes; `None` if the data is in one piece.
    piece: Option<usize>,
    /// The most pieces of data.
    pieces: usize,
    /// Bytes before the data and between its pieces.
    offset: u64,
    gap: u64,
    /// The status is the byte after the data.
    status_with_data: bool,
    /// The first sector of a second segment, of requests that have several.
    second: Option<u64>,
}

impl Layout {
    const PLAIN: Self = Self {
        indirect: false,
        header_cut: 0,
        piece: None,
        pieces: 1,
        offset: 0,
        gap: 0,
        status_with_data: false,
        second: None,
    };

    fn draw(random: &mut Random, planned: &Planned, indirect: bool) -> Self {
        let bytes = planned.count as usize * SECTOR;
        // Whole sectors, or anything: the specification leaves it to the driver.
        let unit = random.pick(&[SECTOR, SECTOR, SECTOR, 1]);
        let pieces = random.pick(&[1, 1, 2, 4]);
        let piece = unit * (1 + random.below((bytes / unit) as u64) as usize);
        // Where one of two segments ends: only where no cluster is cut, or a discard would keep it.
        let second = planned.first + random.below(planned.count.max(1));
        Self {
            indirect,
            header_cut: if random.one_in(8) {
                1 + random.below(15) as u32
            } else {
                0
            },
            piece: (pieces > 1).then_some(piece),
            pieces,
            offset: random.pick(&[0, 0, 512, 16, 1]),
            gap: random.pick(&[0, 512, 3]),
            status_with_data: random.one_in(8),
            second: (random.one_in(3) && matches!(planned.ask, Ask::Zeroes { .. })).then_some(second),
        }
    }

    /// Returns the most descriptors of the queue's table that it takes.
    fn descriptors(&self) -> usize {
        if self.indirect {
            return 1;
        }
        2 + self.pieces + usize::from(self.header_cut > 0)
    }

    /// The segments of a discard or write-zeroes request.
    fn segments(&self, planned: &Planned, flags: u32) -> Vec<u8> {
        let (first, end) = (planned.first, planned.first + planned.count);
        let cut = self.second.unwrap_or(end);
        let mut bytes = Vec::new();
        for (from, to) in [(first, cut), (cut, end)] {
            // A segment of no sectors is allowed, and means nothing.
            if from == to && from == end {
                continue;
            }
            bytes.extend(blk::segment(from, (to - from) as u32, flags));
        }
        bytes
    }
}
