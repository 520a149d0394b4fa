//! One queue of a device, served as a frontend of a worker.
//!
//! Every tag of the queue has its own cycle:
//!
//! ```text
//! Waiting ──request──▶ Served ──answer──▶ Answered ──commit and fetch──▶ Waiting
//!    └──abort──▶ Ended
//! ```
//!
//! Invariants: a request that was fetched is committed exactly once, because the kernel, and possibly the whole host, waits
//! for it. The exception is a queue that is handed over ([`Duty`]): the requests that it keeps go to the next server after
//! this process has exited, and reach the disk only there. A read or write commits all its bytes or an error. Only an abort
//! ends a tag; any other error of a fetch is reported, never counted as an end. A request with registered pages is
//! answered when nothing names them any more: the answer frees their slot for the next request's.

use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use block::worker::Frontend;
use block::{Buffer, CompletionSink, Context, DiskQueue, Done, Op, Request};

use super::abi::{IO_RES_ABORT, IO_RES_OK, IoDescriptor, SECTOR_BYTES, op};
use super::channel::Channel;
use super::queue_state::{Duty, QueueEvent, QueueState};
use crate::stats::{Meter, RequestKind};

/// What is to be done with the buffer of a request that the disk has answered.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Data {
    /// Nothing: it is the request's pages, or empty.
    Drop,
    /// It goes back to the channel.
    GiveBack,
    /// Its bytes are delivered before.
    Deliver,
}

/// The state of a tag.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Tag {
    /// The driver has it, until there is a request.
    Waiting,
    /// The disk has its request.
    Served {
        /// Its good answer: the bytes to move.
        answer: i32,
        data: Data,
        kind: RequestKind,
        /// True if its latency is measured.
        measured: bool,
    },
    /// It waits for a slot of the ring, or for its pages to be free, to be committed.
    Answered { answer: i32 },
    /// Its request is the next server's.
    Kept,
    /// The driver will bring nothing more.
    Ended,
}

/// One queue of a ublk device.
pub struct UblkQueue<C> {
    channel: C,
    disk: Box<dyn DiskQueue>,
    io_bytes_max: u32,
    /// From which length on requests' pages go to the disk.
    zero_copy_from: Option<u32>,
    tags: Box<[Tag]>,
    /// Tags that are not [`Tag::Ended`].
    live: usize,
    /// Tags that are [`Tag::Answered`], the oldest first.
    answered: Vec<u16>,
    /// The length in bytes of each tag's request without data.
    lens: Box<[u64]>,
    state: Arc<QueueState>,
    sink: Rc<CompletionSink>,
    meter: Meter,
    /// The tag of the request among those that are taken now whose latency is to be measured, or `u16::MAX`.
    picked: u16,
    /// Kept to be filled again.
    results: Vec<(u64, i32)>,
    done: Vec<Done>,
}

impl<C: Channel> fmt::Debug for UblkQueue<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UblkQueue")
            .field("channel", &self.channel)
            .field("live", &self.live)
            .finish_non_exhaustive()
    }
}

impl<C> Drop for UblkQueue<C> {
    fn drop(&mut self) {
        // Its worker has ended, unless its owner let it go.
        if self.live > 0 && !self.state.abandoned.load(Ordering::Acquire) {
            let (device, what) = (self.state.device, "its worker has ended".to_owned());
            self.state.send_event(QueueEvent::Broken { device, what });
        }
    }
}

/// Counts. Only the queue's worker writes its counters, so that a load and a store do, without a locked instruction.
fn add(counter: &AtomicU64, count: u64) {
    counter.store(counter.load(Ordering::Relaxed) + count, Ordering::Relaxed);
}

/// A request of the driver's that makes no sense, as the errno to answer.
type Refusal = i32;

/// Parses a descriptor: the operation, its first byte and its length.
fn parse(descriptor: &IoDescriptor, io_bytes_max: u32) -> Result<(Op, u64, u64), Refusal> {
    let flag = |bit: u32| descriptor.op_flags & bit != 0;
    let fua = flag(op::FLAG_FUA);
    let op = match (descriptor.op_flags & 0xff) as u8 {
        op::READ => Op::Read,
        op::WRITE => Op::Write { fua },
        op::FLUSH => return Ok((Op::Flush, 0, 0)),
        op::DISCARD => Op::Discard,
        op::WRITE_ZEROES => Op::WriteZeroes {
            unmap: !flag(op::FLAG_NOUNMAP),
            fua,
        },
        _ => return Err(libc::EOPNOTSUPP),
    };
    let offset = descriptor.start_sector.checked_mul(SECTOR_BYTES);
    let offset = offset.ok_or(libc::EINVAL)?;
    let len = u64::from(descriptor.nr_sectors) * SECTOR_BYTES;
    let moves = matches!(op, Op::Read | Op::Write { .. });
    if moves && (len > u64::from(io_bytes_max) || len == 0) {
        return Err(libc::EINVAL);
    }
    Ok((op, offset, len))
}

impl<C: Channel> UblkQueue<C> {
    /// Begins to fetch under every one of `depth` tags. `io_bytes_max` is what the device was made with. Where the driver
    /// registers pages, `zero_copy_from` is the length in bytes from which on requests are served by them. `cx` is its worker's.
    pub fn start(
        cx: &Context,
        channel: C,
        disk: Box<dyn DiskQueue>,
        depth: u16,
        io_bytes_max: u32,
        zero_copy_from: Option<u32>,
        state: Arc<QueueState>,
    ) -> Self {
        let meter = Meter::new(Arc::clone(&state.stats), cx.clone(), depth.into());
        let mut queue = Self {
            channel,
            disk,
            io_bytes_max,
            zero_copy_from,
            tags: vec![Tag::Waiting; usize::from(depth)].into_boxed_slice(),
            live: usize::from(depth),
            answered: Vec::with_capacity(usize::from(depth)),
            lens: vec![0; usize::from(depth)].into_boxed_slice(),
            state,
            sink: CompletionSink::new(),
            meter,
            picked: u16::MAX,
            results: Vec::new(),
            done: Vec::new(),
        };
        queue.state.tags.store(queue.live, Ordering::Release);
        for tag in 0..depth {
            if queue.channel.fetch(tag).is_err() {
                queue.broken(format!("its ring has no slot for tag {tag}"));
                queue.end(tag);
            }
        }
        queue
    }

    #[cold]
    fn broken(&mut self, what: String) {
        tracing::error!(device = self.state.device, %what, "a queue is broken");
        let device = self.state.device;
        self.state.send_event(QueueEvent::Broken { device, what });
    }

    fn end(&mut self, tag: u16) {
        self.tags[usize::from(tag)] = Tag::Ended;
        self.live -= 1;
        self.state.tags.store(self.live, Ordering::Release);
        if self.live == 0 {
            let device = self.state.device;
            self.state.send_event(QueueEvent::Ended { device });
        }
    }

    /// Takes what fetches have ended with, and submits it.
    fn take(&mut self) -> bool {
        if !self.channel.has_results() {
            return false;
        }
        let mut results = std::mem::take(&mut self.results);
        self.channel.take_results(&mut results);
        let picked = self.meter.pick(results.len());
        self.picked = picked.map_or(u16::MAX, |place| results[place].0 as u16);
        self.meter.taken(results.len());
        for (tag, result) in results.drain(..) {
            // Tags come back as they were given.
            let tag = tag as u16;
            let state = self.tags.get(usize::from(tag));
            assert_eq!(state, Some(&Tag::Waiting), "tag {tag} was not waiting");
            match result {
                IO_RES_OK if self.state.duty() == Duty::Keep => {
                    self.tags[usize::from(tag)] = Tag::Kept;
                }
                IO_RES_OK => self.serve(tag),
                IO_RES_ABORT => {
                    self.meter.not_taken();
                    self.end(tag);
                }
                other => {
                    self.meter.not_taken();
                    let error = std::io::Error::from_raw_os_error(other.saturating_neg());
                    self.broken(format!("the driver answers {other} under tag {tag}: {error}"));
                    // Nothing is known of it. It is freed when the ring is closed.
                    self.end(tag);
                }
            }
        }
        if self.picked != u16::MAX {
            self.measure_picked();
        }
        self.results = results;
        true
    }

    /// Measures the latency of the request that was picked, if it was submitted and has data.
    #[cold]
    fn measure_picked(&mut self) {
        let tag = self.picked;
        if let Some(Tag::Served { kind, measured, .. }) = self.tags.get_mut(usize::from(tag))
            && kind.has_data()
        {
            *measured = true;
            self.meter.mark_picked(tag);
        }
    }

    /// Submits a request without data, whose latency is measured.
    #[cold]
    fn serve_without_data(&mut self, tag: u16, op: Op, offset: u64, len: u64) {
        self.meter.mark(tag);
        self.lens[usize::from(tag)] = len;
        self.tags[usize::from(tag)] = Tag::Served {
            answer: 0,
            data: Data::Drop,
            kind: RequestKind::of(op),
            measured: true,
        };
        let (buffer, tag) = (Buffer::default(), u64::from(tag));
        self.disk
            .submit(Request::new(op, offset, len, buffer, &self.sink, tag));
    }

    /// Counts the latency of a request that is measured and moves `bytes`. Returns the number of bytes that it is about.
    #[cold]
    fn end_measured(&mut self, tag: u16, kind: RequestKind, bytes: u64) -> u64 {
        self.meter.measured(tag, kind);
        if kind.has_data() {
            bytes
        } else {
            self.lens[usize::from(tag)]
        }
    }

    /// Submits the request under a tag to the disk, or answers it.
    fn serve(&mut self, tag: u16) {
        let descriptor = self.channel.descriptor(tag);
        let (op, offset, len) = match parse(&descriptor, self.io_bytes_max) {
            Ok(request) => request,
            Err(errno) => {
                tracing::warn!(
                    device = self.state.device,
                    ?descriptor,
                    "invalid request from the driver"
                );
                self.meter.fail(RequestKind::Other);
                return self.answer(tag, -errno);
            }
        };
        let kind = match op {
            Op::Read => RequestKind::Read,
            Op::Write { .. } => RequestKind::Write,
            _ => return self.serve_without_data(tag, op, offset, len),
        };
        // Data is limited to 32 MiB, so this fits.
        let bytes = len as usize;
        let pages = self.pages(tag, &descriptor, bytes);
        let data = match kind {
            _ if pages.is_some() => Data::Drop,
            RequestKind::Read => Data::Deliver,
            _ => Data::GiveBack,
        };
        let buffer = match pages {
            Some(pages) => pages,
            None if kind == RequestKind::Read => self.channel.room(tag, bytes),
            None => match self.channel.data(tag, bytes) {
                Ok(buffer) => buffer,
                Err(error) => {
                    tracing::warn!(device = self.state.device, %error, "cannot fetch the data of a write");
                    self.meter.fail(kind);
                    return self.answer(tag, -error.errno());
                }
            },
        };
        self.tags[usize::from(tag)] = Tag::Served {
            answer: bytes as i32,
            data,
            kind,
            measured: false,
        };
        self.disk
            .submit(Request::new(op, offset, len, buffer, &self.sink, tag.into()));
    }

    /// The pages of a request with data, if it is to be served by them.
    fn pages(&mut self, tag: u16, descriptor: &IoDescriptor, bytes: usize) -> Option<Buffer> {
        let state = &self.state;
        let count = |counter: &AtomicU64| add(counter, 1);
        let pages = match self.zero_copy_from {
            Some(_) if descriptor.op_flags & op::FLAG_NEED_REG_BUF != 0 => {
                count(&state.fallbacks);
                None
            }
            Some(from) if bytes >= from as usize => match self.channel.pages(tag, bytes) {
                Ok(pages) => Some(pages),
                Err(error) => {
                    tracing::error!(device = state.device, tag, %error, "cannot use the registered pages of a request");
                    None
                }
            },
            _ => None,
        };
        count(match pages {
            Some(_) => &state.zero_copied,
            None => &state.copied,
        });
        pages
    }

    /// Answers a request that the disk has completed, or keeps it for the next server.
    fn answer_disk_request(&mut self, done: Done) {
        // Tags come back as they were given.
        let tag = done.tag as u16;
        let served = self.tags.get(usize::from(tag));
        let Some(&Tag::Served {
            answer,
            data,
            kind,
            measured,
        }) = served
        else {
            tracing::error!(device = self.state.device, tag, "a request was answered twice");
            return;
        };
        let mut result = done.result;
        if result.is_ok() && data == Data::Deliver {
            result = self.channel.deliver(tag, &done.buffer);
        }
        if data == Data::Drop {
            // Before the answer: with it the driver takes the pages.
            drop(done.buffer);
        } else if !done.buffer.is_empty() {
            self.channel.give_back(tag, done.buffer);
        }
        match (self.state.duty(), &result) {
            (Duty::Keep, _) | (Duty::FinishWell, Err(_)) => {
                self.tags[usize::from(tag)] = Tag::Kept;
                return;
            }
            _ => {}
        }
        let mut bytes = u64::from(answer.unsigned_abs());
        if measured {
            bytes = self.end_measured(tag, kind, bytes);
        }
        match result {
            Ok(()) => {
                self.meter.succeed(kind, bytes);
                self.answer(tag, answer);
            }
            Err(error) => {
                self.meter.fail(kind);
                tracing::debug!(device = self.state.device, tag, %error, "a request failed");
                // Zero would not be an error.
                self.answer(tag, -error.errno().max(1));
            }
        }
    }

    /// Answers the request under a tag; if the ring is full or its pages are not free, as soon as that has changed.
    fn answer(&mut self, tag: u16, answer: i32) {
        let now = self.answered.is_empty() && self.channel.is_free(tag);
        if now && self.channel.commit_and_fetch(tag, answer).is_ok() {
            self.tags[usize::from(tag)] = Tag::Waiting;
        } else {
            self.tags[usize::from(tag)] = Tag::Answered { answer };
            self.answered.push(tag);
        }
    }

    /// Reports the work that is left before another server may continue.
    #[cold]
    fn count_unfinished(&self) {
        let keeps = self.state.duty() == Duty::Keep;
        let is_unfinished = |tag: &&Tag| match tag {
            Tag::Served { .. } => true,
            Tag::Answered { .. } => !keeps,
            Tag::Waiting | Tag::Kept | Tag::Ended => false,
        };
        let count = self.tags.iter().filter(is_unfinished).count();
        self.state.unfinished.store(count, Ordering::Release);
    }

    /// Commits what could not be committed before.
    fn commit_rest(&mut self) -> bool {
        let (channel, tags) = (&mut self.channel, &mut self.tags);
        let (before, mut full) = (self.answered.len(), false);
        self.answered.retain(|&tag| {
            let state = &mut tags[usize::from(tag)];
            let Tag::Answered { answer } = *state else {
                return false;
            };
            if full || !channel.is_free(tag) {
                return true;
            }
            full = channel.commit_and_fetch(tag, answer).is_err();
            if !full {
                *state = Tag::Waiting;
            }
            full
        });
        self.answered.len() < before
    }
}

impl<C: Channel> Frontend for UblkQueue<C> {
    fn poll(&mut self) -> bool {
        self.take()
    }

    fn publish(&mut self) -> bool {
        let mut any = false;
        if !self.answered.is_empty() {
            any |= self.commit_rest();
        }
        if !self.sink.is_empty() {
            any = true;
            let mut done = std::mem::take(&mut self.done);
            self.sink.drain_into(&mut done);
            self.meter.begin_answering();
            for done in done.drain(..) {
                self.answer_disk_request(done);
            }
            self.done = done;
        }
        // Here too, because a queue that is to be removed is not polled, and what the driver gave it is its own.
        any |= self.take();
        if self.state.duty() != Duty::Serve {
            self.count_unfinished();
        }
        any
    }

    fn prepare_sleep(&mut self) -> bool {
        self.channel.has_results() || !self.sink.is_empty()
    }

    fn end_sleep(&mut self) {}

    fn comes_through_ring(&self) -> bool {
        // What waits to be committed is looked at by a round alone.
        self.answered.is_empty()
    }

    fn in_flight(&self) -> usize {
        if self.state.abandoned.load(Ordering::Acquire) {
            return 0;
        }
        self.live
    }
}
