//! One guest queue: makes the planned requests, records every answer, and compares what it reads with the oracle.
//!
//! A [`Lane`] asks the disk itself, as a frontend would. A [`Guest`](crate::guest::Guest) asks through a virtqueue, and
//! the host's block layer asks a driver. Each keeps its requests and their answers in a `Book`.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

use block::canary::{Rule, strikes};
use block::worker::Frontend;
use block::{AlignedBuf, Buffer, CompletionSink, Context, Disk, DiskQueue, Done, IoError, Op, Request};
use qcow::QcowDisk;
use simulator::memory::GuestRegion;
use simulator::{Random, SECTOR, SimWorld};

use crate::content::{ZERO, bytes_of, word, word_of};
use crate::leaks::Leaks;
use crate::oracle::{Asked, Expected, Oracle};
use crate::pace::Pace;
use crate::places::{Places, Taken};
use crate::plan::{Ask, Planned};
use crate::served::{self, served};
use crate::shape::Shape;
use crate::snapshots::Snapshotting;

/// Counts of the fates of a ublk device's servers and requests.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Reached {
    /// Servers that were killed.
    pub kills: u64,
    /// Servers that handed over, or began to.
    pub handovers: u64,
    /// Servers that were asked to, and refused.
    pub refused: u64,
    /// Requests that a server left to the next one.
    pub kept: u64,
    /// Requests that a killed server had.
    pub lost: u64,
    /// Requests of the host's that the driver itself has answered.
    pub by_driver: u64,
    /// Requests of the host's that became several.
    pub split: u64,
    /// Requests with data that went by their registered pages.
    pub zero_copied: u64,
    /// Requests with data that was copied.
    pub copied: u64,
    /// Requests among the latter that were copied because their pages could not be registered.
    pub fallbacks: u64,
}

/// The record that all queues of a run share.
#[derive(Debug)]
pub struct Record {
    /// The promises that were made.
    pub oracle: Oracle,
    /// The first problem, in words.
    pub problem: Option<String>,
    /// The disk's size that guests know, in sectors.
    pub sectors: u64,
    /// The number of times that the disk is to grow.
    pub grows: usize,
    /// The number of times that it has begun to grow, and the number of these that have ended.
    pub growths: [u64; 2],
    /// Snapshots created and deleted.
    pub snapshots: u64,
    /// Requests that have not ended yet, asked for or not.
    pub left: usize,
    /// Requests that are asked for and not answered.
    pub in_flight: usize,
    /// Requests answered.
    pub answered: u64,
    /// FLUSHes answered well.
    pub flushes: u64,
    /// A request failed.
    pub failures: u64,
    /// A forced write failed, and with it perhaps the sync that it is.
    pub forced_failed: bool,
    /// Requests may fail, if a fault of the host's explains it.
    pub may_fail: bool,
    /// The file cannot become longer: what needs space may fail without any op that did.
    pub may_be_full: bool,
    /// The request that is being answered was failed by the driver, which had no server.
    pub by_driver: bool,
    /// The progress of two queues that keep step.
    pub pace: Option<Pace>,
    /// The clusters that a cut may leak.
    pub leaks: Leaks,
    /// The start of this server, in the world's time.
    pub server_since: u64,
    /// A server was killed that had been told of a failed sync: of what that covered, nobody knows any more.
    pub forgotten: bool,
    /// Counts of what happened to a ublk device.
    pub reached: Reached,
    world: SimWorld,
    version: u64,
    salt: u64,
}

impl Record {
    /// Nothing has happened yet.
    #[must_use]
    pub fn new(oracle: Oracle, sectors: u64, world: &SimWorld, salt: u64) -> Self {
        Self {
            oracle,
            problem: None,
            sectors,
            grows: 0,
            growths: [0; 2],
            snapshots: 0,
            left: 0,
            in_flight: 0,
            answered: 0,
            flushes: 0,
            forced_failed: false,
            failures: 0,
            may_fail: false,
            may_be_full: false,
            by_driver: false,
            pace: None,
            world: world.clone(),
            leaks: Leaks::default(),
            server_since: 0,
            forgotten: false,
            reached: Reached::default(),
            version: 3,
            salt,
        }
    }

    /// Notes what went wrong, if it is the first thing.
    pub fn problem(&mut self, text: impl FnOnce() -> String) {
        if self.problem.is_none() {
            self.problem = Some(text());
        }
    }

    /// Returns the time, in the world's steps.
    pub(crate) fn time(&self) -> u64 {
        self.world.time()
    }

    /// Notes that a request is asked for.
    pub(crate) fn note_asked(&mut self, shape: &Shape, planned: &Planned) {
        let (sectors, in_flight) = (self.sectors, self.in_flight);
        self.leaks.ask(shape, sectors, planned, in_flight);
        self.in_flight += 1;
    }

    /// Returns true if something that the host failed explains that a request fails that was asked for at `since`.
    fn is_explained(&self, ask: Ask, since: u64) -> bool {
        let faults = self.world.faults();
        // Who joins what another has begun may be told of what failed a moment before.
        let from = since.saturating_sub(JOINED);
        let lately = |fault: Option<u64>| fault.is_some_and(|time| time >= from);
        let own = |fault: Option<u64>| fault.is_some_and(|time| time >= self.server_since);
        let read = lately(faults.read) || lately(faults.door) || lately(faults.cancel);
        match ask {
            Ask::Read => read,
            _ if self.may_be_full => true,
            // A server remembers a failed sync.
            _ => read || lately(faults.write) || lately(faults.allocate) || own(faults.sync),
        }
    }

    /// Notes how a request that was asked for at `since` ended; complains if it must not end so.
    pub(crate) fn ended(&mut self, planned: &Planned, since: u64, result: Result<(), IoError>) {
        self.answered += 1;
        self.left -= 1;
        self.in_flight -= 1;
        let Err(error) = result else { return };
        self.failures += 1;
        let excused = matches!(error, IoError::Host { .. } | IoError::Cancelled);
        let explained = self.by_driver || self.is_explained(planned.ask, since);
        if !(excused && self.may_fail && explained) {
            let faults = self.world.faults();
            self.problem(|| format!("{planned} fails: {error} (asked for at step {since}; {faults:?})"));
        }
    }
}

/// So many steps after an op was completed everybody has been told who waited for it.
const JOINED: u64 = 200;

/// A request in flight.
#[derive(Debug)]
struct Slot {
    planned: Planned,
    /// The time at which it was asked for, in the world's time.
    since: u64,
    kind: SlotKind,
    answered: bool,
}

#[derive(Debug)]
enum SlotKind {
    Read(Expected),
    /// With what it is if the disk does not grow meanwhile, and whether it is forced.
    Change(Asked, Option<Tail>, bool),
    Flush(Asked),
}

/// The end of a discard, in a cluster that the disk fills only in part. It is discarded if the disk still ends there
/// when its turn comes.
#[derive(Debug)]
struct Tail {
    asked: Asked,
    /// The number of times that the disk had begun to grow, if it was not growing.
    growths: Option<u64>,
}

/// A disk being made larger.
pub(crate) type Growth = (Planned, u64, Result<(), IoError>);

/// The requests of one queue and their answers.
#[derive(Debug)]
pub(crate) struct Book {
    shape: Shape,
    pub(crate) record: Rc<RefCell<Record>>,
    slots: Vec<Slot>,
    pub(crate) in_flight: usize,
    /// The number of this queue's requests to grow the disk that are under way.
    growing: usize,
    grown: Rc<RefCell<Vec<Growth>>>,
}

/// A request as the disk is to get it.
#[derive(Debug)]
pub(crate) struct Entry {
    /// Its place in the book.
    pub(crate) tag: usize,
    pub(crate) op: Op,
    /// The words that it changes sectors to; none for a read or a FLUSH.
    pub(crate) words: Vec<u64>,
}

impl Book {
    /// The book of a queue that asks for `plan`.
    pub(crate) fn new(shape: Shape, plan: &VecDeque<Planned>, record: &Rc<RefCell<Record>>) -> Self {
        record.borrow_mut().left += plan.len();
        record.borrow_mut().grows += plan
            .iter()
            .filter(|planned| matches!(planned.ask, Ask::Grow(_)))
            .count();
        Self {
            shape,
            record: Rc::clone(record),
            slots: Vec::new(),
            in_flight: 0,
            growing: 0,
            grown: Rc::default(),
        }
    }

    /// The sectors a request changes, and what they hold afterwards.
    fn change(&self, record: &mut Record, planned: &Planned) -> (u64, Vec<u64>) {
        let Planned { first, count, .. } = *planned;
        match planned.ask {
            Ask::Write { .. } => {
                record.version += 1;
                let (salt, version) = (record.salt, record.version);
                let words = (first..first + count).map(|sector| word(salt, version, sector));
                (first, words.collect())
            }
            Ask::Discard => {
                // Whole clusters, and the last one if it is reached: as the engine documents it.
                let per_cluster = self.shape.cluster() / SECTOR as u64;
                let from = first.div_ceil(per_cluster) * per_cluster;
                let mut end = (first + count) / per_cluster * per_cluster;
                if first + count >= record.sectors {
                    end = first + count;
                }
                if !self.shape.discards() || from >= end {
                    return (first, Vec::new());
                }
                (from, vec![ZERO; (end - from) as usize])
            }
            _ => (first, vec![ZERO; count as usize]),
        }
    }

    /// Returns the number of a change's `count` sectors that are changed even if the disk grows meanwhile: not those of
    /// a discard that are in the disk's last cluster, if the disk fills that only in part.
    fn whole(&self, record: &Record, ask: Ask, from: u64, count: u64) -> usize {
        let per_cluster = self.shape.cluster() / SECTOR as u64;
        let last = record.sectors / per_cluster * per_cluster;
        match ask {
            Ask::Discard => last.saturating_sub(from).min(count) as usize,
            _ => count as usize,
        }
    }

    /// Notes what is about to be asked; `None` if it cannot be.
    pub(crate) fn ask(&mut self, planned: Planned) -> Option<Entry> {
        let Planned { first, count, .. } = planned;
        let shared = Rc::clone(&self.record);
        let mut record = shared.borrow_mut();
        if first + count > record.sectors {
            // Planned for a disk that has grown, which this one has not.
            record.left -= 1;
            return None;
        }
        record.note_asked(&self.shape, &planned);
        let (op, kind, words) = match planned.ask {
            Ask::Read => (
                Op::Read,
                SlotKind::Read(record.oracle.ask_read(first, count)),
                Vec::new(),
            ),
            Ask::Flush => (Op::Flush, SlotKind::Flush(record.oracle.ask_flush()), Vec::new()),
            ask => {
                let (from, words) = self.change(&mut record, &planned);
                let whole = self.whole(&record, ask, from, words.len() as u64);
                let (sure, rest) = words.split_at(whole);
                let asked = record.oracle.ask_change(from, sure.iter().copied());
                let tail = (!rest.is_empty()).then(|| Tail {
                    asked: record
                        .oracle
                        .ask_change(from + whole as u64, rest.iter().copied()),
                    growths: (record.growths[0] == record.growths[1]).then_some(record.growths[0]),
                });
                let (op, fua) = match ask {
                    Ask::Write { fua } => (Op::Write { fua }, fua),
                    Ask::Zeroes { unmap, fua } => (Op::WriteZeroes { unmap, fua }, fua),
                    _ => (Op::Discard, false),
                };
                (op, SlotKind::Change(asked, tail, fua), words)
            }
        };
        let tag = self.slots.len();
        self.slots.push(Slot {
            planned,
            since: record.world.time(),
            kind,
            answered: false,
        });
        self.in_flight += 1;
        Some(Entry { tag, op, words })
    }

    /// Notes that the next planned request is not made after all.
    pub(crate) fn skip(&mut self) {
        self.record.borrow_mut().left -= 1;
    }

    /// Notes an answer. `read` copies what was read, if it is as long as what was asked for.
    pub(crate) fn answer(
        &mut self,
        tag: usize,
        result: Result<(), IoError>,
        read: impl FnOnce(&mut [u8]) -> bool,
    ) {
        let mut record = self.record.borrow_mut();
        let Some(slot) = self.slots.get_mut(tag) else {
            return record.problem(|| "a request nobody made was answered".to_owned());
        };
        let planned = slot.planned;
        if std::mem::replace(&mut slot.answered, true) {
            return record.problem(|| format!("{planned} was answered twice"));
        }
        self.in_flight -= 1;
        let well = result.is_ok();
        record.ended(&planned, slot.since, result);
        match &slot.kind {
            SlotKind::Read(_) if !well => record.oracle.end_read(),
            SlotKind::Read(expected) => {
                let mut bytes = vec![0; planned.count as usize * SECTOR];
                if !read(&mut bytes) {
                    record.problem(|| format!("{planned}: its buffer did not come back"));
                }
                let words: Vec<Option<u64>> = bytes.chunks(SECTOR).map(word_of).collect();
                if let Err(text) = record.oracle.answer_read(expected, &words) {
                    record.problem(|| format!("{planned}: {text}"));
                }
            }
            SlotKind::Change(asked, tail, forced) => {
                record.forced_failed |= *forced && !well;
                record.oracle.answer_change(asked, well, *forced);
                if let Some(Tail { asked, growths }) = tail {
                    // If the disk grew meanwhile, the last cluster may be as it was, as after a change that failed.
                    let sure = *growths == Some(record.growths[0]);
                    record.oracle.answer_change(asked, well && sure, false);
                }
            }
            SlotKind::Flush(asked) if well => {
                record.flushes += 1;
                record.leaks.answer_flush();
                record.oracle.answer_flush(asked);
            }
            SlotKind::Flush(_) => {}
        }
    }

    /// Makes the disk larger, beside the queue.
    pub(crate) fn grow(&mut self, cx: &Context, disk: &Arc<QcowDisk>, planned: Planned, bytes: u64) {
        self.in_flight += 1;
        self.growing += 1;
        let (disk, task_cx, grown) = (Arc::clone(disk), cx.clone(), Rc::clone(&self.grown));
        let since = self.record.borrow().world.time();
        let mut record = self.record.borrow_mut();
        record.growths[0] += 1;
        record.note_asked(&self.shape, &planned);
        drop(record);
        cx.spawn(async move {
            let result = disk.grow(&task_cx, bytes).await;
            grown.borrow_mut().push((planned, since, result));
        });
    }

    /// Notes disks that were made larger. Returns whether there were any.
    pub(crate) fn note_growth(&mut self, grown: Vec<Growth>) -> bool {
        let any = !grown.is_empty();
        for (planned, since, result) in grown {
            self.in_flight -= 1;
            self.growing -= 1;
            let mut record = self.record.borrow_mut();
            record.growths[1] += 1;
            // Another queue may have made it larger than this one wants it.
            let smaller = result == Err(IoError::OutOfRange) && record.grows > 1;
            // Its snapshots could not be restored.
            let fixed = self.shape.v2 && self.shape.snapshot;
            if fixed && matches!(planned.ask, Ask::Grow(_)) && result.is_ok() {
                record.problem(|| format!("{planned}: an image of version 2 with a snapshot grows"));
            }
            let refused = fixed && result == Err(IoError::Unsupported);
            let ended = if smaller || refused { Ok(()) } else { result };
            record.ended(&planned, since, ended);
            if let (Ask::Grow(bytes), Ok(())) = (planned.ask, result) {
                record.sectors = record.sectors.max(bytes / SECTOR as u64);
            }
        }
        any
    }

    /// The server was killed: whether the disk became as large as it was to be, the next one will see.
    pub(crate) fn abandon_growth(&mut self) {
        let ended = self.take_growth();
        self.note_growth(ended);
        // What else is heard of it comes from the dead.
        self.grown = Rc::default();
        let count = std::mem::take(&mut self.growing);
        self.in_flight -= count;
        let mut record = self.record.borrow_mut();
        record.left -= count;
        record.in_flight -= count;
        record.answered += count as u64;
        record.growths[1] += count as u64;
    }

    /// Disks that were made larger and not noted yet.
    pub(crate) fn take_growth(&self) -> Vec<Growth> {
        std::mem::take(&mut *self.grown.borrow_mut())
    }
}

/// A guest's queue.
#[derive(Debug)]
pub struct Lane {
    cx: Context,
    disk: Arc<QcowDisk>,
    queue: Box<dyn DiskQueue>,
    book: Book,
    snapshots: Snapshotting,
    plan: VecDeque<Planned>,
    sink: Rc<CompletionSink>,
    depth: usize,
    random: Random,
    done: Vec<Done>,
    /// Pages that some requests have in place of memory.
    places: Option<Rc<Places>>,
    /// The places of those requests that have one, by tag.
    taken: BTreeMap<usize, Taken>,
    /// The index of this queue among the two that keep step; `None` for any other queue.
    number: Option<usize>,
}

impl Lane {
    /// A queue of `disk` on the worker of `cx` that asks for `plan`.
    ///
    /// # Panics
    ///
    /// If the process has no file descriptor left.
    #[must_use]
    pub fn new(
        cx: &Context,
        disk: &Arc<QcowDisk>,
        shape: Shape,
        plan: VecDeque<Planned>,
        depth: usize,
        record: &Rc<RefCell<Record>>,
        seed: u64,
    ) -> Self {
        Self {
            cx: cx.clone(),
            queue: served(Arc::clone(disk) as Arc<dyn Disk>, served::Frontend::Lane)
                .open_queue(cx)
                .unwrap_or_else(|error| panic!("{error}")),
            disk: Arc::clone(disk),
            book: Book::new(shape, &plan, record),
            snapshots: Snapshotting::new(shape, record),
            plan,
            sink: CompletionSink::new(),
            depth,
            random: Random::new(seed),
            done: Vec::new(),
            places: None,
            taken: BTreeMap::new(),
            number: None,
        }
    }

    /// Has the queue keep the run's [`Pace`], as its first or its second one.
    #[must_use]
    pub(crate) fn in_step(mut self, number: Option<usize>) -> Self {
        self.number = number;
        self
    }

    /// Returns true if the next request has to wait for others of this queue.
    fn is_held(&self, next: &Planned) -> bool {
        // What is read in the next round may begin while reads of the last one are late.
        let in_step = self.number == Some(0) && next.ask == Ask::Read;
        let alone = next.alone && self.in_flight() > 0 && !in_step;
        let is_snapshot = matches!(next.ask, Ask::Snapshot(_) | Ask::Unsnapshot(_));
        // One of these at a time, so that it is known which snapshots there are.
        let in_turn = is_snapshot && self.snapshots.under_way > 0;
        alone || in_turn || self.book.in_flight >= self.depth
    }

    /// Returns true if the next request, which is asked then, need not wait for the other queue.
    fn keeps_pace(&self, next: &Planned) -> bool {
        let mut record = self.book.record.borrow_mut();
        let (Some(pace), Some(number)) = (&mut record.pace, self.number) else {
            return true;
        };
        match (number, next.ask) {
            (0, Ask::Read) => !next.alone || pace.ask(),
            (1, Ask::Discard) => pace.begin(),
            _ => true,
        }
    }

    /// Says whether the other queue is to wait for this one.
    fn set_pace(&self) {
        let free = self.plan.is_empty() || self.book.in_flight >= self.depth;
        if let (Some(number), Some(pace)) = (self.number, &mut self.book.record.borrow_mut().pace) {
            pace.set_free(number, free);
        }
    }

    /// Gives the queue pages for requests.
    #[must_use]
    pub(crate) fn with_places(mut self, places: Option<Rc<Places>>) -> Self {
        self.places = places;
        self
    }

    /// The memory of a request: registered pages, ours or, as often, a guest's, which then nobody but the buffer keeps
    /// mapped.
    fn memory(&mut self, tag: usize, planned: &Planned, words: &[u64]) -> Buffer {
        let len = planned.count as usize * SECTOR;
        let reads = planned.ask == Ask::Read;
        if !reads && !matches!(planned.ask, Ask::Write { .. }) {
            return Buffer::default();
        }
        let bytes = if reads { vec![0xCC; len] } else { bytes_of(words) };
        if let Some(places) = &self.places
            && let Some((buffer, taken)) = places.take(&bytes, !reads, &mut self.random)
        {
            self.taken.insert(tag, taken);
            return buffer;
        }
        if self.random.one_in(2) {
            return AlignedBuf::from_slice(&bytes).into();
        }
        let region = GuestRegion::new(len + 4096);
        // Two stretches with a gap, the second not aligned to more than a sector.
        let cut = self.random.below(planned.count) as usize * SECTOR;
        region.write(0, &bytes[..cut]);
        region.write(cut + 512, &bytes[cut..]);
        region.buffer(&[(0, cut), (cut + 512, len - cut)])
    }

    fn ask(&mut self, planned: Planned) {
        match planned.ask {
            Ask::Grow(bytes) => return self.book.grow(&self.cx, &self.disk, planned, bytes),
            Ask::Snapshot(_) | Ask::Unsnapshot(_) => {
                return self.snapshots.ask(&self.cx, &self.disk, planned);
            }
            _ => {}
        }
        let Some(Entry { tag, op, words }) = self.book.ask(planned) else {
            return;
        };
        let buffer = self.memory(tag, &planned, &words);
        let (offset, len) = match op {
            Op::Flush => (0, 0),
            _ => (planned.first * SECTOR as u64, planned.count * SECTOR as u64),
        };
        self.queue
            .submit(Request::new(op, offset, len, buffer, &self.sink, tag as u64));
    }
}

impl Frontend for Lane {
    fn poll(&mut self) -> bool {
        let mut any = false;
        while let Some(&next) = self.plan.front() {
            if self.is_held(&next) || (any && self.random.one_in(2)) || !self.keeps_pace(&next) {
                break;
            }
            self.plan.pop_front();
            self.ask(next);
            any = true;
        }
        self.set_pace();
        any
    }

    fn publish(&mut self) -> bool {
        let grown = self.book.take_growth();
        let mut done = std::mem::take(&mut self.done);
        self.sink.drain_into(&mut done);
        if strikes(Rule::DoubleCompletion, 4)
            && let Some(&Done { tag, result, .. }) = done.last()
        {
            let buffer = Buffer::default();
            done.push(Done { tag, result, buffer });
        }
        let mut any = !done.is_empty();
        any |= self.book.note_growth(grown) | self.snapshots.note();
        for Done { tag, result, buffer } in done.drain(..) {
            let pages = self.places.as_ref().zip(self.taken.remove(&(tag as usize)));
            if let Some((places, taken)) = &pages
                && let Err(text) = places.check(taken)
            {
                self.book.record.borrow_mut().problem(|| text);
            }
            self.book.answer(tag as usize, result, |bytes| {
                let whole = buffer.len() == bytes.len();
                match (&pages, buffer.memory()) {
                    (Some((places, taken)), None) if whole => places.read(taken, bytes),
                    (None, Some(memory)) if whole => memory.read(0, bytes),
                    _ => return false,
                }
                true
            });
        }
        self.done = done;
        any
    }

    fn prepare_sleep(&mut self) -> bool {
        true
    }

    fn end_sleep(&mut self) {}

    fn in_flight(&self) -> usize {
        self.book.in_flight + self.snapshots.under_way
    }
}
