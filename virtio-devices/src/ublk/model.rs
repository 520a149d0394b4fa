//! A model of the driver, behind the same seam as the driver itself.
//!
//! It knows what the kernel insists on and says at once when a queue does otherwise: a tag that is fetched for twice, a
//! commit of a request that was not given out, a read that commits fewer bytes than it was asked for, a buffer that is
//! looked at while the driver has it. Where it registers pages it does so when it gives a request out, into the place that the
//! tag's command named, and takes them out when the request is answered: two requests in one place, and an answer while
//! something still names the place, are faults. Requests wait in it, as in the kernel, for a free tag; those that a dead server
//! had are given to the next one.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use block::ring::{LeaseError, NoSlot};
use block::sim::pages::{TagError, Tags};
use block::{AlignedBuf, Buffer, IoError};

use super::abi::{IO_RES_ABORT, IO_RES_OK, IoDescriptor, op};
use super::channel::{Channel, PagesError, Places};
use super::params::DMA_ALIGN;

/// A request as somebody made it, and its answer.
#[derive(Clone, Debug)]
pub(super) struct Io {
    pub(super) op: u8,
    pub(super) flags: u32,
    pub(super) sector: u64,
    pub(super) sectors: u32,
    /// What a write writes; where a read's data arrives.
    pub(super) data: Vec<u8>,
    /// What was committed.
    pub(super) result: Option<i32>,
}

impl Io {
    pub(super) fn new(op: u8, sector: u64, sectors: u32) -> Self {
        let moves = matches!(op, op::READ | op::WRITE);
        let bytes = if moves { sectors as usize * 512 } else { 0 };
        Self {
            op,
            flags: 0,
            sector,
            sectors,
            data: vec![0; bytes],
            result: None,
        }
    }

    pub(super) fn write(sector: u64, data: &[u8]) -> Self {
        Self {
            data: data.to_vec(),
            ..Self::new(op::WRITE, sector, (data.len() / 512) as u32)
        }
    }

    pub(super) fn flags(mut self, flags: u32) -> Self {
        self.flags = flags;
        self
    }
}

/// Where a tag is, as the driver sees it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Tag {
    /// Nobody has fetched.
    Idle,
    /// A command waits here.
    Fetching,
    /// The server has the request with this number.
    Owned(usize),
    /// Aborted.
    Aborted,
}

#[derive(Debug)]
struct State {
    tags: Vec<Tag>,
    requests: Vec<Io>,
    /// Requests that no tag has.
    waiting: VecDeque<usize>,
    results: Vec<(u64, i32)>,
    /// Commands that find no slot, counted down.
    refused: u32,
    /// What the next completions say instead of the truth.
    lies: Vec<i32>,
    /// Transfers fail with this.
    transfer_error: Option<IoError>,
    fetches: u64,
    /// By request: its pages could not be registered.
    unregistered: Vec<usize>,
    /// What it registers pages with.
    table: Option<Table>,
}

/// A ring's table, as the driver sees it.
#[derive(Debug)]
struct Table {
    pages: Rc<Tags>,
    /// By place, the request whose pages are there.
    registered: Vec<Option<usize>>,
    /// The place that each tag's command named, and whether it took a fallback.
    named: Vec<(u16, bool)>,
    /// Registrations that fail, counted down.
    failing: u32,
}

impl Table {
    /// What a fetch or commit under `tag` says.
    fn name(&mut self, tag: u16, address: u64) {
        let (place, flags) = (address as u16, address >> 16);
        assert!(flags <= 1, "flags {flags:#x} that no driver knows");
        self.named[usize::from(tag)] = (place, flags == 1);
    }

    /// Registers the pages of a request that is given out. Not if there is no place; then it is not given out as it was
    /// meant to be.
    fn register(&mut self, tag: usize, number: usize, io: &Io) -> bool {
        let (place, fallback) = self.named[tag];
        let failing = self.failing > 0;
        self.failing = self.failing.saturating_sub(1);
        let registered = match self.registered.get_mut(usize::from(place)) {
            Some(held) if !failing => {
                assert_eq!(*held, None, "place {place} of tag {tag} is another request's");
                *held = Some(number);
                true
            }
            _ => false,
        };
        assert!(
            registered || fallback,
            "request {number} fails and nobody hears of it"
        );
        if registered && io.op == op::WRITE {
            self.pages.write(place, 0, &io.data);
        }
        registered
    }

    /// Where the pages of a request are.
    fn place(&self, number: usize) -> Option<u16> {
        let place = self.registered.iter().position(|held| *held == Some(number));
        place.map(|place| place as u16)
    }

    /// A read's data has come by a copy.
    fn deliver(&self, number: usize, io: &Io) {
        if let Some(place) = self.place(number) {
            self.pages.write(place, 0, &io.data);
        }
    }

    /// Takes the pages of an answered request out of their place; what a read left there arrives.
    fn unregister(&mut self, number: usize, io: &mut Io) {
        let Some(place) = self.place(number) else { return };
        let buffer = self.pages.buffer(place, 0, io.data.len(), 512);
        buffer.expect("nothing names pages that are given back");
        self.registered[usize::from(place)] = None;
        if io.op == op::READ {
            self.pages.read(place, 0, &mut io.data);
        }
    }
}

/// The driver's end of one queue.
#[derive(Clone, Debug)]
pub(super) struct Model {
    state: Rc<RefCell<State>>,
}

impl Model {
    pub(super) fn new(depth: u16) -> Self {
        let state = State {
            tags: vec![Tag::Idle; depth.into()],
            requests: Vec::new(),
            waiting: VecDeque::new(),
            results: Vec::new(),
            refused: 0,
            lies: Vec::new(),
            transfer_error: None,
            fetches: 0,
            unregistered: Vec::new(),
            table: None,
        };
        Self {
            state: Rc::new(RefCell::new(state)),
        }
    }

    /// From now on it registers pages with the ring of `pages`, in whose table there are so many places.
    pub(super) fn register_with(&self, pages: &Rc<Tags>, places: u16) {
        let mut state = self.state.borrow_mut();
        state.table = Some(Table {
            pages: Rc::clone(pages),
            registered: vec![None; places.into()],
            named: vec![(u16::MAX, false); state.tags.len()],
            failing: 0,
        });
    }

    /// The next `count` registrations fail.
    pub(super) fn fail_registrations(&self, count: u32) {
        if let Some(table) = &mut self.state.borrow_mut().table {
            table.failing = count;
        }
    }

    /// The server's end.
    pub(super) fn channel(&self) -> ModelChannel {
        self.channel_with(Places::default())
    }

    /// The server's end, of a queue whose tags have these places.
    pub(super) fn channel_with(&self, places: Places) -> ModelChannel {
        ModelChannel {
            model: self.clone(),
            places,
        }
    }

    /// Somebody makes a request; returns its number.
    pub(super) fn request(&self, io: Io) -> usize {
        let mut state = self.state.borrow_mut();
        let number = state.requests.len();
        state.requests.push(io);
        state.waiting.push_back(number);
        state.give_out();
        number
    }

    /// What became of a request.
    pub(super) fn io(&self, number: usize) -> Io {
        self.state.borrow().requests[number].clone()
    }

    /// The answer to a request, which must be there.
    pub(super) fn result(&self, number: usize) -> i32 {
        self.io(number).result.expect("it was committed")
    }

    /// Requests without an answer.
    pub(super) fn unanswered(&self) -> usize {
        let state = self.state.borrow();
        state.requests.iter().filter(|io| io.result.is_none()).count()
    }

    /// Commands that the queue has started.
    pub(super) fn fetches(&self) -> u64 {
        self.state.borrow().fetches
    }

    /// The next `count` commands find no slot.
    pub(super) fn refuse(&self, count: u32) {
        self.state.borrow_mut().refused = count;
    }

    /// The next completion says `result`.
    pub(super) fn lie(&self, result: i32) {
        self.state.borrow_mut().lies.push(result);
    }

    pub(super) fn fail_transfers(&self, error: Option<IoError>) {
        self.state.borrow_mut().transfer_error = error;
    }

    /// What a stop does: every tag that waits is ended.
    pub(super) fn abort(&self) {
        let mut state = self.state.borrow_mut();
        for tag in 0..state.tags.len() {
            if state.tags[tag] == Tag::Fetching {
                state.tags[tag] = Tag::Aborted;
                state.results.push((tag as u64, IO_RES_ABORT));
            }
        }
    }

    /// What the death of a server does with recovery: what it had waits for the next one, in order.
    pub(super) fn server_died(&self) {
        let mut state = self.state.borrow_mut();
        let mut had: Vec<usize> = Vec::new();
        for tag in &mut state.tags {
            if let Tag::Owned(number) = *tag {
                had.push(number);
            }
            *tag = Tag::Idle;
        }
        had.sort_unstable();
        for number in had.into_iter().rev() {
            state.waiting.push_front(number);
        }
        state.results.clear();
        state.unregistered.clear();
        // Its ring is gone, and the table with it.
        state.table = None;
    }
}

impl State {
    /// Gives waiting requests to tags that wait.
    fn give_out(&mut self) {
        while !self.waiting.is_empty() {
            let Some(tag) = self.tags.iter().position(|tag| *tag == Tag::Fetching) else {
                return;
            };
            let number = self.waiting.pop_front().expect("looked at");
            self.tags[tag] = Tag::Owned(number);
            let io = &self.requests[number];
            if let Some(table) = &mut self.table
                && matches!(io.op, op::READ | op::WRITE)
                && !table.register(tag, number, io)
            {
                self.unregistered.push(number);
            }
            let result = self.lies.pop().unwrap_or(IO_RES_OK);
            self.results.push((tag as u64, result));
        }
    }

    fn slot(&mut self) -> Result<(), NoSlot> {
        if self.refused > 0 {
            self.refused -= 1;
            return Err(NoSlot);
        }
        self.fetches += 1;
        Ok(())
    }

    fn owned(&self, tag: u16) -> usize {
        match self.tags[usize::from(tag)] {
            Tag::Owned(number) => number,
            other => panic!("tag {tag} is {other:?}, and not the server's"),
        }
    }
}

/// The server's end of a [`Model`].
#[derive(Debug)]
pub(super) struct ModelChannel {
    model: Model,
    places: Places,
}

impl Channel for ModelChannel {
    fn fetch(&mut self, tag: u16) -> Result<(), NoSlot> {
        let mut state = self.model.state.borrow_mut();
        state.slot()?;
        let place = &mut state.tags[usize::from(tag)];
        assert_eq!(*place, Tag::Idle, "tag {tag} was fetched for already");
        *place = Tag::Fetching;
        if let Some(table) = &mut state.table {
            table.name(tag, self.places.command(tag));
        }
        state.give_out();
        Ok(())
    }

    fn commit_and_fetch(&mut self, tag: u16, result: i32) -> Result<(), NoSlot> {
        let mut state = self.model.state.borrow_mut();
        state.slot()?;
        let number = state.owned(tag);
        let State { requests, table, .. } = &mut *state;
        let io = &mut requests[number];
        if let Some(table) = table {
            table.unregister(number, io);
            table.name(tag, self.places.command(tag));
        }
        assert_eq!(io.result, None, "request {number} was answered already");
        match io.op {
            _ if result < 0 => {}
            op::READ | op::WRITE => {
                assert_eq!(
                    result,
                    io.sectors as i32 * 512,
                    "a part of a transfer was committed"
                );
            }
            _ => assert_eq!(result, 0, "bytes were committed where there are none"),
        }
        io.result = Some(result);
        state.tags[usize::from(tag)] = Tag::Fetching;
        state.give_out();
        Ok(())
    }

    fn has_results(&self) -> bool {
        !self.model.state.borrow().results.is_empty()
    }

    fn take_results(&mut self, out: &mut Vec<(u64, i32)>) {
        out.append(&mut self.model.state.borrow_mut().results);
    }

    fn descriptor(&self, tag: u16) -> IoDescriptor {
        let state = self.model.state.borrow();
        let number = state.owned(tag);
        let io = &state.requests[number];
        let unregistered = match state.unregistered.contains(&number) {
            true => op::FLAG_NEED_REG_BUF,
            false => 0,
        };
        IoDescriptor {
            op_flags: u32::from(io.op) | io.flags | unregistered,
            nr_sectors: io.sectors,
            start_sector: io.sector,
            addr: 0,
        }
    }

    fn data(&mut self, tag: u16, len: usize) -> Result<Buffer, IoError> {
        let state = self.model.state.borrow();
        if let Some(error) = state.transfer_error {
            return Err(error);
        }
        let io = &state.requests[state.owned(tag)];
        assert_eq!(io.data.len(), len);
        Ok(AlignedBuf::from_slice(&io.data).into())
    }

    fn room(&mut self, tag: u16, len: usize) -> Buffer {
        self.model.state.borrow().owned(tag);
        AlignedBuf::zeroed(len).into()
    }

    fn deliver(&mut self, tag: u16, data: &Buffer) -> Result<(), IoError> {
        let mut state = self.model.state.borrow_mut();
        if let Some(error) = state.transfer_error {
            return Err(error);
        }
        let number = state.owned(tag);
        let data = data.memory().expect("it is memory");
        let State { requests, table, .. } = &mut *state;
        let io = &mut requests[number];
        data.read(0, &mut io.data);
        // The same pages, whichever way they are reached.
        if let Some(table) = table {
            table.deliver(number, io);
        }
        Ok(())
    }

    fn give_back(&mut self, tag: u16, _buffer: Buffer) {
        self.model.state.borrow().owned(tag);
    }

    fn pages(&mut self, tag: u16, len: usize) -> Result<Buffer, PagesError> {
        let state = self.model.state.borrow();
        let number = state.owned(tag);
        assert!(
            !state.unregistered.contains(&number),
            "request {number} has no pages"
        );
        let table = state.table.as_ref().expect("pages are registered");
        let buffer = table
            .pages
            .buffer(self.places.of(tag), 0, len, DMA_ALIGN as usize);
        buffer.map_err(|error| match error {
            TagError::Lease(error) => PagesError::Lease(error),
            TagError::Registration(error) => PagesError::Registration(error),
        })
    }

    fn is_free(&self, tag: u16) -> bool {
        let state = self.model.state.borrow();
        let Some(table) = &state.table else { return true };
        let buffer = table.pages.buffer(self.places.of(tag), 0, 0, 512);
        !matches!(buffer, Err(TagError::Lease(LeaseError::InUse { .. })))
    }
}
