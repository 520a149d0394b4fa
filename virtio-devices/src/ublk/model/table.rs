//! The table of a ring's registered buffers, as the driver sees it: one for all queues of a worker.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use block::ring::LeaseError;
use simulator::pages::{TagError, Tags, Way};

use super::super::abi::op;
use super::Io;

/// The bytes beside a request's bytes, as far as they are checked.
const BESIDE: [u8; 512] = [0xA5; 512];

/// By place, the queue of the ring and its request whose pages are there.
type Registered = Rc<RefCell<Vec<Option<(u32, usize)>>>>;

/// The table of a ring, in which the tags of all its queues have places. Cheap to clone; all clones are the same table.
#[derive(Clone, Debug)]
pub struct RingTable {
    pages: Rc<Tags>,
    registered: Registered,
    queues: Rc<Cell<u32>>,
}

impl RingTable {
    /// A table of so many places for `pages`, all of them empty.
    #[must_use]
    pub fn new(pages: &Rc<Tags>, places: u16) -> Self {
        Self {
            pages: Rc::clone(pages),
            registered: Rc::new(RefCell::new(vec![None; places.into()])),
            queues: Rc::default(),
        }
    }
}

/// The table in which the pages of a queue's requests are registered.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) pages: Rc<Tags>,
    registered: Registered,
    /// The number of the queue among those of the ring.
    queue: u32,
    /// The place that each tag's command named, and whether it took a fallback.
    named: Vec<(u16, bool)>,
    /// Registrations that fail, counted down.
    pub(super) failing: u32,
}

impl Table {
    pub(super) fn new(ring: &RingTable, tags: usize) -> Self {
        let queue = ring.queues.get();
        ring.queues.set(queue + 1);
        Self {
            pages: Rc::clone(&ring.pages),
            registered: Rc::clone(&ring.registered),
            queue,
            named: vec![(u16::MAX, false); tags],
            failing: 0,
        }
    }

    /// Checks the address of a fetch or commit under `tag`.
    pub(super) fn name(&mut self, tag: u16, address: u64) -> Result<(), String> {
        let (place, flags) = (address as u16, address >> 16);
        self.named[usize::from(tag)] = (place, flags == 1);
        if flags > 1 {
            return Err(format!("tag {tag} says flags {flags:#x} that no driver knows"));
        }
        Ok(())
    }

    /// Returns the number of bytes beside a request's bytes in its slot, as far as there is room.
    fn beside(&self, io: &Io) -> usize {
        BESIDE.len().min(self.pages.place_bytes() - io.data.len())
    }

    /// Registers the pages of a request that is given out. Not if there is no place; then it is not given out as it was
    /// meant to be.
    pub(super) fn register(&mut self, tag: usize, number: usize, io: &Io) -> Result<bool, String> {
        let (place, fallback) = self.named[tag];
        let failing = self.failing > 0;
        self.failing = self.failing.saturating_sub(1);
        match self.registered.borrow_mut().get_mut(usize::from(place)) {
            Some(Some((queue, other))) if !failing => Err(format!(
                "place {place} of tag {tag} has the pages of request {other} of the ring's queue {queue}"
            )),
            Some(free) if !failing => {
                *free = Some((self.queue, number));
                let writes = io.op == op::WRITE;
                self.pages
                    .limit(place, if writes { Way::Taken } else { Way::Filled });
                if writes {
                    self.pages.write(place, 0, &io.data);
                }
                self.pages.write(place, io.data.len(), &BESIDE[..self.beside(io)]);
                Ok(true)
            }
            _ if fallback => Ok(false),
            _ => Err(format!("request {number} fails and nobody hears of it")),
        }
    }

    /// Returns the slot of a request's pages.
    fn place(&self, number: usize) -> Option<u16> {
        let own = Some((self.queue, number));
        let place = self.registered.borrow().iter().position(|held| *held == own);
        place.map(|place| place as u16)
    }

    /// A read's data has come by a copy.
    pub(super) fn deliver(&self, number: usize, io: &Io) {
        if let Some(place) = self.place(number) {
            self.pages.write(place, 0, &io.data);
        }
    }

    /// Takes the pages of an answered request out of their place; what a read left there arrives.
    pub(super) fn unregister(&mut self, number: usize, io: &mut Io) -> Result<(), String> {
        let Some(place) = self.place(number) else {
            return Ok(());
        };
        self.registered.borrow_mut()[usize::from(place)] = None;
        let named = self.pages.buffer(place, 0, io.data.len(), 512);
        if let Err(error) = named {
            return Err(format!("it was answered while its pages are named: {error}"));
        }
        if let Some(op) = self.pages.holder(place) {
            return Err(format!("it was answered while op {op} uses its pages"));
        }
        let mut beside = BESIDE;
        let beside = &mut beside[..self.beside(io)];
        self.pages.read(place, io.data.len(), beside);
        if beside.iter().any(|&byte| byte != BESIDE[0]) {
            return Err("bytes behind its pages were changed".to_owned());
        }
        let mut found = vec![0; io.data.len()];
        self.pages.read(place, 0, &mut found);
        if io.op == op::READ {
            io.data = found;
        } else if io.data != found {
            return Err("the pages of a write were changed".to_owned());
        }
        Ok(())
    }

    /// Returns true if nothing names a slot any more.
    pub(super) fn is_free(&self, place: u16) -> bool {
        let buffer = self.pages.buffer(place, 0, 0, 512);
        !matches!(buffer, Err(TagError::Lease(LeaseError::InUse { .. })))
    }
}
