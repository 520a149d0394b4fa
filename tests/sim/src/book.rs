//! The requests of one queue and their answers, whoever brings them to the disk: a [lane](crate::lane), a
//! [guest](crate::guest)'s virtqueue, or the host's [block layer](crate::block_layer). What is read is compared with the oracle.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use block::{Context, IoError, Op};
use qcow::QcowDisk;
use simulator::SECTOR;

use crate::content::{ZERO, word_of};
use crate::oracle::{Asked, End, Expected};
use crate::plan::{Ask, Planned};
use crate::record::Record;
use crate::shape::Shape;

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
    pub(crate) growing: usize,
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
        let count = |of: fn(&Ask) -> bool| plan.iter().filter(|planned| of(&planned.ask)).count();
        record.borrow_mut().grows += count(|ask| matches!(ask, Ask::Grow(_)));
        record.borrow_mut().may_shrink |= count(|ask| matches!(ask, Ask::Shrink(_))) > 0;
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
            Ask::Write { .. } => (first, record.next_words(first..first + count)),
            Ask::Discard => {
                // Whole clusters, and the last one if it is reached: as the engine documents it.
                let per_cluster = self.shape.cluster() / SECTOR as u64;
                let from = first.div_ceil(per_cluster) * per_cluster;
                let mut end = (first + count) / per_cluster * per_cluster;
                // That may be earlier when it is carried out.
                if first + count >= record.sectors || record.may_shrink {
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

    /// Returns the number of a change's `count` sectors that are changed whatever size the disk has meanwhile: not those of
    /// a discard that are in a last cluster which it covers only in part.
    fn whole(&self, ask: Ask, from: u64, count: u64) -> usize {
        let per_cluster = self.shape.cluster() / SECTOR as u64;
        let last = (from + count) / per_cluster * per_cluster;
        match ask {
            Ask::Discard => last.saturating_sub(from) as usize,
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
                let whole = self.whole(ask, from, words.len() as u64);
                let reaches_end = first + count >= record.sectors;
                let (sure, rest) = words.split_at(whole);
                let asked = record.oracle.ask_change(from, sure.iter().copied());
                let tail = (!rest.is_empty()).then(|| Tail {
                    asked: record
                        .oracle
                        .ask_change(from + whole as u64, rest.iter().copied()),
                    growths: (reaches_end && record.growths[0] == record.growths[1])
                        .then_some(record.growths[0]),
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
            since: record.time(),
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
        let since = self.record.borrow().time();
        let mut record = self.record.borrow_mut();
        record.growths[0] += 1;
        record.oracle.ask_size(bytes / SECTOR as u64);
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
            if let Ask::Grow(bytes) = planned.ask {
                let end = match result {
                    Ok(()) => End::Done,
                    Err(IoError::OutOfRange | IoError::Unsupported) => End::Undone,
                    Err(_) => End::Unknown,
                };
                record.oracle.answer_size(bytes / SECTOR as u64, end);
            }
            // Another queue may have made it larger than this one wants it.
            // Or it did not become as small as planned before.
            let may_be_larger = record.grows > 1 || record.has_shrunk_or_tried();
            let smaller = result == Err(IoError::OutOfRange) && may_be_larger;
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
