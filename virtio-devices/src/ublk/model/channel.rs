//! The server's end of a [`Model`].

use block::canary::{Rule, broken, may_store};
use block::ring::{LeaseError, NoSlot};
use block::{AlignedBuf, Buffer, IoError};
use simulator::pages::TagError;

use super::super::abi::{IoDescriptor, op};
use super::super::channel::{Channel, PagesError, TagSlots};
use super::super::params::DMA_ALIGN;
use super::{Model, State, Tag};

/// The end of one server: when the driver has noticed that it is gone, a fault to use.
#[derive(Debug)]
pub struct ModelChannel {
    model: Model,
    slots: TagSlots,
    generation: u32,
    /// The server has taken results.
    has_taken: bool,
}

impl ModelChannel {
    pub(super) fn new(model: Model, slots: TagSlots, generation: u32) -> Self {
        Self {
            model,
            slots,
            generation,
            has_taken: false,
        }
    }

    /// Returns true if this is the driver's current server; records a fault if not.
    fn is_heard(&self, state: &mut State) -> bool {
        let heard = self.generation == state.generation;
        if !heard {
            state.fault(|| "a server that is gone gives commands".to_owned());
        }
        heard
    }

    /// Checks a fetch, alone or after an answer.
    fn wait(&self, state: &mut State, tag: u16) {
        state.tags[usize::from(tag)] = Tag::Fetching;
        let named = state
            .table
            .as_mut()
            .map(|table| table.name(tag, self.slots.command(tag)));
        if let Some(Err(text)) = named {
            state.fault(|| text);
        }
        state.give_out();
    }
}

impl Channel for ModelChannel {
    fn fetch(&mut self, tag: u16) -> Result<(), NoSlot> {
        let mut state = self.model.state.borrow_mut();
        state.slot()?;
        if !self.is_heard(&mut state) {
            return Ok(());
        }
        if state.tags.get(usize::from(tag)) != Some(&Tag::Idle) {
            state.fault(|| format!("tag {tag} was fetched for already, or is none"));
            return Ok(());
        }
        self.wait(&mut state, tag);
        Ok(())
    }

    fn commit_and_fetch(&mut self, tag: u16, result: i32) -> Result<(), NoSlot> {
        let mut state = self.model.state.borrow_mut();
        state.slot()?;
        if !may_store() || !self.is_heard(&mut state) || state.owned(tag).is_none() {
            return Ok(());
        }
        state.answer(tag, result);
        self.wait(&mut state, tag);
        Ok(())
    }

    fn has_results(&self) -> bool {
        self.model.has_results()
    }

    fn take_results(&mut self, out: &mut Vec<(u64, i32)>) {
        let first = !std::mem::replace(&mut self.has_taken, true);
        out.append(&mut self.model.state.borrow_mut().results);
        if first && out.len() > 1 && broken(Rule::UblkTagForgotten) {
            // As of a server that comes after another and is given all that one had.
            out.pop();
        }
    }

    fn descriptor(&self, tag: u16) -> IoDescriptor {
        let mut state = self.model.state.borrow_mut();
        let Some(number) = state.owned(tag) else {
            return IoDescriptor::default();
        };
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
        let mut state = self.model.state.borrow_mut();
        if let Some(error) = state.transfer_error {
            return Err(error);
        }
        if let Some(buffer) = state.buffer(tag, len) {
            return Ok(buffer);
        }
        let number = state.owned(tag).ok_or(IoError::Cancelled)?;
        let data = &state.requests[number].data;
        if data.len() != len {
            let text = format!("{len} bytes were fetched of a write of {}", data.len());
            state.fault(|| text);
            return Err(IoError::Cancelled);
        }
        Ok(AlignedBuf::from_slice(data).into())
    }

    fn room(&mut self, tag: u16, len: usize) -> Buffer {
        let state = self.model.state.borrow();
        state
            .buffer(tag, len)
            .unwrap_or_else(|| AlignedBuf::zeroed(len).into())
    }

    fn deliver(&mut self, tag: u16, data: &Buffer) -> Result<(), IoError> {
        let mut state = self.model.state.borrow_mut();
        if let Some(error) = state.transfer_error {
            return Err(error);
        }
        let number = state.owned(tag).ok_or(IoError::Cancelled)?;
        if state.buffers.is_some() {
            // The driver takes it when the request is answered.
            return Ok(());
        }
        let State { requests, table, .. } = &mut *state;
        let io = &mut requests[number];
        let Some(memory) = data.memory().filter(|_| data.len() == io.data.len()) else {
            state.fault(|| "what is delivered is not what a read asked for".to_owned());
            return Err(IoError::Cancelled);
        };
        memory.read(0, &mut io.data);
        // The same pages, whichever way they are reached.
        if let Some(table) = table {
            table.deliver(number, io);
        }
        Ok(())
    }

    fn give_back(&mut self, tag: u16, _buffer: Buffer) {
        self.model.state.borrow_mut().owned(tag);
    }

    fn pages(&mut self, tag: u16, len: usize) -> Result<Buffer, PagesError> {
        let mut state = self.model.state.borrow_mut();
        let number = state.owned(tag);
        if number.is_some_and(|number| state.unregistered.contains(&number)) {
            state.fault(|| format!("the request under tag {tag} has no pages"));
        }
        let place = self.slots.of(tag);
        let Some(table) = &state.table else {
            state.fault(|| "no pages are registered".to_owned());
            return Err(LeaseError::NoPlace {
                index: place,
                places: 0,
            }
            .into());
        };
        let buffer = table.pages.buffer(place, 0, len, DMA_ALIGN as usize);
        buffer.map_err(|error| match error {
            TagError::Lease(error) => PagesError::Lease(error),
            TagError::Registration(error) => PagesError::Registration(error),
        })
    }

    fn is_free(&self, tag: u16) -> bool {
        let state = self.model.state.borrow();
        let table = state.table.as_ref();
        broken(Rule::UblkPagesBackEarly) || table.is_none_or(|table| table.is_free(self.slots.of(tag)))
    }
}

impl State {
    /// A part of the memory of a tag, where the driver copies.
    fn buffer(&self, tag: u16, len: usize) -> Option<Buffer> {
        let buffer = self.buffers.as_ref()?.get(usize::from(tag))?.as_ref()?;
        (buffer.len() >= len).then(|| Buffer::part(buffer, 0, len))
    }
}
