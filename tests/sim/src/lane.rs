//! One guest queue that asks the disk itself, as a frontend would. A [`Guest`](crate::guest::Guest) asks through a virtqueue,
//! and the host's block layer asks a driver. Each keeps its requests and their answers in a `Book`.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

use block::canary::{Rule, strikes};
use block::worker::Frontend;
use block::{AlignedBuf, Buffer, CompletionSink, Context, Disk, DiskQueue, Done, Op, Request};
use qcow::QcowDisk;
use simulator::memory::GuestRegion;
use simulator::{Random, SECTOR};

use crate::book::{Book, Entry};
use crate::content::bytes_of;
use crate::operations::Operations;
use crate::places::{Places, Taken};
use crate::plan::{Ask, Planned};
use crate::record::Record;
use crate::served::{self, served};
use crate::shape::Shape;
use crate::snapshots::Snapshotting;

/// A guest's queue.
#[derive(Debug)]
pub struct Lane {
    cx: Context,
    disk: Arc<QcowDisk>,
    queue: Box<dyn DiskQueue>,
    book: Book,
    snapshots: Snapshotting,
    operations: Operations,
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
    /// It goes on writing while its operation on the whole image is under way.
    writes_on: bool,
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
            operations: Operations::new(shape, record),
            plan,
            sink: CompletionSink::new(),
            depth,
            random: Random::new(seed),
            done: Vec::new(),
            places: None,
            taken: BTreeMap::new(),
            number: None,
            writes_on: false,
        }
    }

    /// Has the queue keep the run's [`Pace`], as its first or its second one.
    #[must_use]
    pub(crate) fn in_step(mut self, number: Option<usize>) -> Self {
        self.number = number;
        self
    }

    /// Has the queue go on writing while its operation on the whole image is under way.
    #[must_use]
    pub(crate) fn writing_on(mut self, does: bool) -> Self {
        self.writes_on = does;
        self
    }

    /// Returns true if the queue asks for a write that is not in its plan.
    fn may_write_on(&self) -> bool {
        self.writes_on && self.operations.under_way > 0 && self.book.in_flight < self.depth
    }

    /// Returns a write that is not in the plan.
    fn write_on(&mut self) -> Planned {
        let mut record = self.book.record.borrow_mut();
        record.left += 1;
        Planned {
            alone: false,
            ..Planned::new(Ask::Write { fua: false }, self.random.below(record.sectors), 1)
        }
    }

    /// Returns true if the next request has to wait for others of this queue.
    fn is_held(&self, next: &Planned) -> bool {
        // What is read in the next round may begin while reads of the last one are late.
        let in_step = self.number == Some(0) && next.ask == Ask::Read;
        let alone = next.alone && self.in_flight() > 0 && !in_step;
        let is_operation = next.ask.is_of_snapshots() || next.ask.is_operation();
        // One of these at a time, so that it is known which snapshots there are.
        let under_way = self.snapshots.under_way + self.operations.under_way;
        let in_turn = match next.ask {
            // And which sizes.
            Ask::Shrink(_) => under_way + self.book.growing > 0,
            Ask::Grow(_) => self.operations.under_way > 0,
            _ => is_operation && under_way > 0,
        };
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
            ask if ask.is_of_snapshots() => return self.snapshots.ask(&self.cx, &self.disk, planned),
            ask if ask.is_operation() => return self.operations.ask(&self.cx, &self.disk, planned),
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
        if self.may_write_on() {
            let write = self.write_on();
            self.ask(write);
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
        any |= self.book.note_growth(grown) | self.snapshots.note() | self.operations.note();
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
        self.book.in_flight + self.snapshots.under_way + self.operations.under_way
    }
}
