//! A model of the driver, behind the same seam as the driver itself, for tests and for simulated worlds.
//!
//! A [`Model`] is one queue of a device. The test plays the host: it makes [requests](Io) and sees their answers; a server
//! has its [`ModelChannel`]. As in the kernel, requests wait for a free tag. Its part of the device's life:
//!
//! ```text
//! Serving ──quiesce, hold_back──▶ Ending ──server_gone──▶ Gone ──(all tags fetched) end_recovery──▶ Serving
//!    └───────────server_gone (it was killed, or left)────────▲
//! ```
//!
//! Without a server requests wait, or fail, by the device's [`Recovery`]; those of a dead server are
//! given to the next one, or fail. The caller ensures that no op of a dead server is in flight when [`Model::end_recovery`]
//! is called, as it does for the image's lock.
//!
//! The model checks the rules of the kernel; [`Model::take_fault`] returns the first violation: a tag that is
//! fetched twice, a commit of a request that was not handed out, a read that commits fewer bytes than requested, memory that
//! the driver copies to or from while an op uses it. If it registers pages, it does so when it hands a request out, in the
//! slot that the tag's command named, and removes them when the request is answered. Two requests in one slot, an answer
//! while something still names the slot, and changed bytes that are not the request's are faults.
//!
//! Invariants: nothing is random but what [`Model::shuffle`]'s seed determines.

mod channel;
mod table;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use block::ring::NoSlot;
use block::{AlignedBuf, Buffer, IoError};
use simulator::{Random, memory};

use super::abi::{IO_RES_ABORT, IO_RES_OK, op};
use super::channel::TagSlots;
use super::config::Recovery;
pub use channel::ModelChannel;
pub use table::RingTable;
use table::Table;

/// A request as the host makes it, and its answer.
#[derive(Clone, Debug)]
pub struct Io {
    /// One of [`op`]'s operations.
    pub op: u8,
    /// [`op::FLAG_FUA`] and the like.
    pub flags: u32,
    /// The first sector, of 512 bytes.
    pub sector: u64,
    /// The number of sectors.
    pub sectors: u32,
    /// The data of a write, or the data read.
    pub data: Vec<u8>,
    /// The committed result.
    pub result: Option<i32>,
    /// No server but the driver has answered it, with an error.
    pub by_driver: bool,
}

impl Io {
    /// A request of so many sectors. A read finds zeros, and a write writes them, until its data is another.
    #[must_use]
    pub fn new(op: u8, sector: u64, sectors: u32) -> Self {
        let moves = matches!(op, op::READ | op::WRITE);
        let bytes = if moves { sectors as usize * 512 } else { 0 };
        Self {
            op,
            flags: 0,
            sector,
            sectors,
            data: vec![0; bytes],
            result: None,
            by_driver: false,
        }
    }

    /// A write of whole sectors.
    #[must_use]
    pub fn write(sector: u64, data: &[u8]) -> Self {
        Self {
            op: op::WRITE,
            flags: 0,
            sector,
            sectors: (data.len() / 512) as u32,
            data: data.to_vec(),
            result: None,
            by_driver: false,
        }
    }

    /// The same with these flags.
    #[must_use]
    pub fn flags(mut self, flags: u32) -> Self {
        self.flags = flags;
        self
    }

    fn moves(&self) -> bool {
        matches!(self.op, op::READ | op::WRITE)
    }
}

/// The state of a tag, as the driver sees it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Tag {
    /// Not fetched.
    Idle,
    /// A command waits here.
    Fetching,
    /// The server has the request with this number.
    Owned(usize),
    /// Aborted.
    Aborted,
}

/// The server of the device.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Server {
    /// Served.
    Serving,
    /// Served, without new requests. With `aborts`, each tag is ended as soon as it waits.
    Ending { aborts: bool },
    /// Not served, until a recovery has ended.
    Gone,
}

#[derive(Debug)]
struct State {
    tags: Vec<Tag>,
    requests: Vec<Io>,
    /// Requests that no tag has.
    waiting: VecDeque<usize>,
    /// Requests that were answered and not taken.
    answered: Vec<usize>,
    results: Vec<(u64, i32)>,
    server: Server,
    recovery: Recovery,
    /// The number of the server: channels of earlier ones are dead.
    generation: u32,
    /// Picks tags, if they are not to be taken in their order.
    random: Option<Random>,
    /// Commands that find no slot, counted down.
    refused: u32,
    /// False results for the next completions.
    lies: Vec<i32>,
    /// Transfers fail with this.
    transfer_error: Option<IoError>,
    fetches: u64,
    /// By request: its pages could not be registered.
    unregistered: Vec<usize>,
    /// The table in which it registers pages.
    table: Option<Table>,
    /// In copy mode, the server's memory for each tag.
    buffers: Option<Vec<Option<Rc<Buffer>>>>,
    fault: Option<String>,
}

/// The driver's end of one queue. Cheap to clone; all clones are the same queue.
#[derive(Clone, Debug)]
pub struct Model {
    state: Rc<RefCell<State>>,
}

impl Model {
    /// A queue of so many tags of a device that is served, whose server reads and writes data through the character
    /// device.
    #[must_use]
    pub fn new(depth: u16) -> Self {
        let state = State {
            tags: vec![Tag::Idle; depth.into()],
            requests: Vec::new(),
            waiting: VecDeque::new(),
            answered: Vec::new(),
            results: Vec::new(),
            server: Server::Serving,
            recovery: Recovery::Reissue,
            generation: 0,
            random: None,
            refused: 0,
            lies: Vec::new(),
            transfer_error: None,
            fetches: 0,
            unregistered: Vec::new(),
            table: None,
            buffers: None,
            fault: None,
        };
        Self {
            state: Rc::new(RefCell::new(state)),
        }
    }

    /// As [`Model::new`], of a device whose driver copies data to and from a buffer of the server's.
    #[must_use]
    pub fn in_copy_mode(depth: u16) -> Self {
        let model = Self::new(depth);
        model.state.borrow_mut().buffers = Some(vec![None; depth.into()]);
        model
    }

    /// Sets the policy for requests without a server; the default is to repeat them.
    pub fn set_recovery(&self, recovery: Recovery) {
        self.state.borrow_mut().recovery = recovery;
    }

    /// Gives requests to free tags in an order that `seed` determines, and not the first to the first.
    pub fn shuffle(&self, seed: u64) {
        self.state.borrow_mut().random = Some(Random::new(seed));
    }

    /// From now on it registers pages in the table of this ring, which other queues may share.
    pub fn register_with(&self, ring: &RingTable) {
        let mut state = self.state.borrow_mut();
        state.table = Some(Table::new(ring, state.tags.len()));
    }

    /// The next `count` registrations fail.
    pub fn fail_registrations(&self, count: u32) {
        if let Some(table) = &mut self.state.borrow_mut().table {
            table.failing = count;
        }
    }

    /// The end of the server that is there now. Its tags have the slots from `first_slot` on.
    #[must_use]
    pub fn channel(&self, first_slot: u16) -> ModelChannel {
        let generation = self.state.borrow().generation;
        ModelChannel::new(self.clone(), TagSlots { first: first_slot }, generation)
    }

    /// The host makes a request; returns its number.
    pub fn request(&self, io: Io) -> usize {
        let mut state = self.state.borrow_mut();
        let number = state.requests.len();
        state.requests.push(io);
        if state.server == Server::Gone && state.recovery == Recovery::Fail {
            state.fail(number);
        } else {
            state.waiting.push_back(number);
            state.give_out();
        }
        number
    }

    /// Returns the state of a request.
    ///
    /// # Panics
    ///
    /// If there is none of this number.
    #[must_use]
    pub fn io(&self, number: usize) -> Io {
        self.state.borrow().requests[number].clone()
    }

    /// Takes the requests that were answered since this was last asked, in the order of their answers, each with its
    /// number. Their data is theirs from here on.
    #[must_use]
    pub fn take_answered(&self) -> Vec<(usize, Io)> {
        let mut state = self.state.borrow_mut();
        let answered = std::mem::take(&mut state.answered);
        let mut take = |number: usize| {
            let io = &mut state.requests[number];
            let data = std::mem::take(&mut io.data);
            (number, Io { data, ..io.clone() })
        };
        answered.into_iter().map(&mut take).collect()
    }

    /// The first thing that a server did and must not, since this was last asked.
    #[must_use]
    pub fn take_fault(&self) -> Option<String> {
        self.state.borrow_mut().fault.take()
    }

    /// Returns true if there are results that the server has not taken.
    #[must_use]
    pub fn has_results(&self) -> bool {
        !self.state.borrow().results.is_empty()
    }

    /// Requests without an answer.
    #[must_use]
    pub fn unanswered(&self) -> usize {
        let state = self.state.borrow();
        state.requests.iter().filter(|io| io.result.is_none()).count()
    }

    /// Commands that the queue has started.
    #[must_use]
    pub fn fetches(&self) -> u64 {
        self.state.borrow().fetches
    }

    /// The next `count` commands find no slot.
    pub fn refuse(&self, count: u32) {
        self.state.borrow_mut().refused = count;
    }

    /// The next completion says `result`.
    pub fn lie(&self, result: i32) {
        self.state.borrow_mut().lies.push(result);
    }

    /// From now on data can be fetched and delivered no more, or, with `None`, again.
    pub fn fail_transfers(&self, error: Option<IoError>) {
        self.state.borrow_mut().transfer_error = error;
    }

    /// Every tag that waits is ended, as by drivers that cancel commands one at a time. Those that are fetched for later
    /// wait.
    pub fn abort(&self) {
        self.state.borrow_mut().abort();
    }

    /// The device is stopped, or its server is to hand it over: nothing new is given out, and each tag is ended as soon as
    /// it waits.
    pub fn quiesce(&self) {
        let mut state = self.state.borrow_mut();
        state.server = Server::Ending { aborts: true };
        state.abort();
    }

    /// Holds requests back for a hand-over: nothing new is handed out. Tags that wait are ended when the server has
    /// exited and not before.
    pub fn hold_back(&self) {
        self.state.borrow_mut().server = Server::Ending { aborts: false };
    }

    /// Notices the exit of the server. Its requests are treated by [`Model::set_recovery`]: they wait for the next
    /// server, before later ones, or fail. Returns the number of these requests.
    pub fn server_gone(&self) -> usize {
        let mut state = self.state.borrow_mut();
        let mut had: Vec<usize> = Vec::new();
        for tag in &mut state.tags {
            if let Tag::Owned(number) = *tag {
                had.push(number);
            }
            *tag = Tag::Idle;
        }
        state.server = Server::Gone;
        state.generation += 1;
        state.results.clear();
        state.unregistered.clear();
        // Its memory is gone, and so is its ring, and the table with it.
        state.table = None;
        state
            .buffers
            .iter_mut()
            .flatten()
            .for_each(|buffer| *buffer = None);
        had.sort_unstable();
        let count = had.len();
        match state.recovery {
            Recovery::Reissue => {
                for number in had.into_iter().rev() {
                    state.waiting.push_front(number);
                }
            }
            Recovery::Wait => had.into_iter().for_each(|number| state.fail(number)),
            Recovery::Fail | Recovery::Off => {
                had.extend(std::mem::take(&mut state.waiting));
                had.into_iter().for_each(|number| state.fail(number));
            }
        }
        count
    }

    /// The next server has fetched under every tag, and gets what waits. The old one's I/O must have ended.
    pub fn end_recovery(&self) {
        let mut state = self.state.borrow_mut();
        if let Some(tag) = state.tags.iter().position(|tag| *tag == Tag::Idle) {
            state.fault(|| format!("a recovery is ended before tag {tag} was fetched for"));
        }
        state.server = Server::Serving;
        state.give_out();
    }
}

impl State {
    #[cold]
    fn fault(&mut self, text: impl FnOnce() -> String) {
        if self.fault.is_none() {
            self.fault = Some(text());
        }
    }

    /// The driver itself answers a request.
    fn fail(&mut self, number: usize) {
        let io = &mut self.requests[number];
        io.result = Some(-libc::EIO);
        io.by_driver = true;
        self.answered.push(number);
    }

    fn abort(&mut self) {
        for tag in 0..self.tags.len() {
            if self.tags[tag] == Tag::Fetching {
                self.tags[tag] = Tag::Aborted;
                self.results.push((tag as u64, IO_RES_ABORT));
            }
        }
    }

    /// The tag that the next request goes to.
    fn free_tag(&mut self) -> Option<usize> {
        let mut free = (0..self.tags.len()).filter(|&tag| self.tags[tag] == Tag::Fetching);
        match &mut self.random {
            None => free.next(),
            Some(random) => {
                let turn = random.below(free.clone().count() as u64);
                free.nth(turn as usize)
            }
        }
    }

    /// Gives waiting requests to tags that wait.
    fn give_out(&mut self) {
        match self.server {
            Server::Serving => {}
            Server::Ending { aborts: true } => return self.abort(),
            Server::Ending { aborts: false } | Server::Gone => return,
        }
        while !self.waiting.is_empty() {
            let Some(tag) = self.free_tag() else { return };
            let Some(number) = self.waiting.pop_front() else {
                return;
            };
            self.tags[tag] = Tag::Owned(number);
            self.prepare(tag, number);
            let result = self.lies.pop().unwrap_or(IO_RES_OK);
            self.results.push((tag as u64, result));
        }
    }

    /// Brings the data of a request to where the server expects it.
    fn prepare(&mut self, tag: usize, number: usize) {
        let io = &self.requests[number];
        if !io.moves() {
            return;
        }
        let mut fault = None;
        if let Some(buffers) = &mut self.buffers {
            fault = copy_in(&mut buffers[tag], io).err();
        }
        if let Some(table) = &mut self.table {
            match table.register(tag, number, io) {
                Ok(true) => {}
                Ok(false) => self.unregistered.push(number),
                Err(text) => fault = Some(text),
            }
        }
        if let Some(text) = fault {
            self.fault(|| text);
        }
    }

    /// Takes the answer to the request under a tag.
    fn answer(&mut self, tag: u16, result: i32) {
        let Some(number) = self.owned(tag) else { return };
        let io = &mut self.requests[number];
        let mut fault = None;
        if let Some(Some(buffer)) = self.buffers.as_mut().map(|all| &all[usize::from(tag)])
            && io.moves()
        {
            fault = copy_out(buffer, io, result).err();
        }
        if let Some(table) = &mut self.table {
            fault = fault.or(table.unregister(number, io).err());
        }
        self.unregistered.retain(|&other| other != number);
        let whole = if io.moves() { io.sectors as i32 * 512 } else { 0 };
        if result >= 0 && result != whole {
            fault = Some(format!("{result} of {whole} bytes were committed"));
        }
        io.result = Some(result);
        self.answered.push(number);
        if let Some(text) = fault {
            self.fault(|| format!("request {number} under tag {tag}: {text}"));
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

    /// The request under a tag, which must be the server's.
    fn owned(&mut self, tag: u16) -> Option<usize> {
        match self.tags.get(usize::from(tag)) {
            Some(Tag::Owned(number)) => Some(*number),
            other => {
                let text = format!("tag {tag} is {other:?}, and not the server's");
                self.fault(|| text);
                None
            }
        }
    }
}

/// The op that uses a server's buffer, which the driver is about to touch.
fn in_use(buffer: &Buffer) -> Result<(), String> {
    let range = buffer.as_owned().map(|bytes| {
        let start = bytes.as_ptr().addr();
        start..start + bytes.len()
    });
    match range.and_then(memory::holder) {
        None => Ok(()),
        Some(op) => Err(format!("the driver copies while op {op} uses the tag's buffer")),
    }
}

/// Copies a request's data into the tag's buffer; for a read these bytes are undefined.
fn copy_in(buffer: &mut Option<Rc<Buffer>>, io: &Io) -> Result<(), String> {
    if let Some(buffer) = buffer {
        in_use(buffer)?;
    }
    let buffer = match buffer {
        Some(buffer) if buffer.len() >= io.data.len() => buffer,
        place => {
            let bytes = AlignedBuf::zeroed(io.data.len().next_power_of_two());
            place.insert(Rc::new(bytes.into()))
        }
    };
    match buffer.memory() {
        Some(memory) if io.op == op::WRITE => memory.write(0, &io.data),
        Some(memory) => memory.fill(0, io.data.len(), 0xCC),
        None => return Err("the tag's buffer has no memory".to_owned()),
    }
    Ok(())
}

/// Copies what a read found out of the tag's buffer.
fn copy_out(buffer: &Buffer, io: &mut Io, result: i32) -> Result<(), String> {
    in_use(buffer)?;
    if let Some(memory) = buffer.memory()
        && io.op == op::READ
        && result >= 0
    {
        memory.read(0, &mut io.data);
    }
    Ok(())
}
