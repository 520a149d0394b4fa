//! One virtqueue of the device, served as a frontend of a worker.
//!
//! A round takes the available chains, up to a bound, submits their requests, and publishes the answers that have arrived. A
//! chain in flight is recorded under the number of its first descriptor, so the table has as many entries as the queue, and
//! a guest cannot make it grow.
//!
//! Invariants: a slot is busy from the taking of its chain to the last answer of its parts, and then its status is
//! written once. A broken queue takes nothing more, but returns the chains in flight.

use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};

use block::worker::Frontend;
use block::{Buffer, CompletionSink, Context, DiskQueue, Done, Op, OpenQueueError, Request};
use virtio_bindings::virtio_blk::{VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_WRITE_ZEROES};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use vm_memory::GuestMemoryMmap;

use super::device::{BlockDevice, SERIAL_BYTES, has};
use super::request::{self, BlockRequest, Range, Status};
use crate::virtqueue::{
    Chain, InflightError, InflightQueue, InflightRegion, QueueError, QueueSetup, RingAddresses, ServedQueue,
    SetupError, Slice,
};

/// The maximum number of chains taken in one round. A guest processes the answers of one round during the next; a
/// round with all its chains would make guest and worker wait for each other.
const BATCH_MAX: u16 = 32;

/// The most chains of a queue in flight, however long the guest makes the queue: each costs memory of ours while
/// it is served. Those beyond wait in the queue.
pub const IN_FLIGHT_MAX: usize = 1024;

/// The way from a queue to its guest, beside the memory that they share.
pub trait Notify {
    /// Chains were given back, and the guest wants to know.
    fn used(&self);

    /// The guest broke the queue, which has stopped. Called once at most.
    fn broken(&self);

    /// Returns true if memory was lost since the last call: what was read from it may not be what the guest wrote, and
    /// what was written to it may not reach the guest. Called before each batch of answers.
    fn is_memory_lost(&self) -> bool {
        false
    }
}

/// The final state of a queue, with which it can be started again.
#[derive(Debug, Default)]
pub struct QueueReport {
    next_available: AtomicU16,
    next_used: AtomicU16,
    broken: AtomicBool,
}

impl QueueReport {
    /// The available index of the first chain that was not taken. Valid once the queue was removed.
    #[must_use]
    pub fn next_available(&self) -> u16 {
        self.next_available.load(Ordering::Acquire)
    }

    /// The used index: as many chains were given back, modulo 65536. Valid once the queue was removed.
    #[must_use]
    pub fn next_used(&self) -> u16 {
        self.next_used.load(Ordering::Acquire)
    }

    /// Returns true if the guest broke the queue.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }
}

/// An error of starting a queue.
#[derive(Debug, thiserror::Error)]
pub enum StartQueueError {
    /// The rings cannot be used.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// The disk cannot be used on this worker.
    #[error(transparent)]
    Open(#[from] OpenQueueError),
    /// The inflight region of a killed server is inconsistent.
    #[error(transparent)]
    Inflight(#[from] InflightError),
}

/// A chain in flight.
#[derive(Clone, Copy)]
struct Slot {
    /// The address of the status byte; `None` if the slot is free.
    place: Option<Slice>,
    /// Answers still to come.
    parts: u32,
    /// The number of bytes written on success.
    len: u32,
    status: Status,
}

impl Slot {
    const FREE: Self = Self {
        place: None,
        parts: 0,
        len: 0,
        status: Status::OK,
    };
}

/// One queue of a [`BlockDevice`].
pub struct BlockQueue {
    device: Arc<BlockDevice>,
    ring: ServedQueue,
    disk: Box<dyn DiskQueue>,
    features: u64,
    notify: Box<dyn Notify>,
    /// True if the guest sends no kicks.
    polled: bool,
    report: Arc<QueueReport>,
    /// Memory was lost: no request is known to have succeeded.
    lost: bool,
    broken: bool,
    slots: Box<[Slot]>,
    in_flight: usize,
    /// Records chains in flight for the next server, if this one is killed.
    inflight: Option<InflightQueue>,
    /// Chains that a killed server had taken and not returned, the oldest last.
    again: Vec<u16>,
    sink: Rc<CompletionSink>,
    /// Kept to be filled again.
    chain: Chain,
    done: Vec<Done>,
    ranges: Vec<Range>,
}

impl fmt::Debug for BlockQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockQueue")
            .field("ring", &self.ring)
            .field("in_flight", &self.in_flight)
            .field("broken", &self.broken)
            .finish_non_exhaustive()
    }
}

/// The configuration of a [`BlockQueue`].
pub struct BlockQueueConfig {
    /// The guest's memory; the queue and each of its requests keep it mapped.
    pub memory: GuestMemoryMmap,
    /// The entries: a power of two up to 32768.
    pub size: u16,
    /// The guest addresses of the rings.
    pub addresses: RingAddresses,
    /// The available index of the first chain to take, unless `inflight` knows better.
    pub next_available: u16,
    /// The inflight region, perhaps with records of a killed server.
    pub inflight: Option<InflightRegion>,
    /// The feature bits the driver accepted.
    pub features: u64,
    /// Notifies the guest.
    pub notify: Box<dyn Notify + Send>,
    /// True if the guest sends no kicks, so that the worker never sleeps.
    pub polled: bool,
    /// Receives the state of the queue when it ends.
    pub report: Arc<QueueReport>,
}

impl BlockQueueConfig {
    /// A queue of `size` entries that runs from its beginning, in a guest that kicks.
    #[must_use]
    pub fn new(
        memory: GuestMemoryMmap,
        size: u16,
        addresses: RingAddresses,
        features: u64,
        notify: Box<dyn Notify + Send>,
    ) -> Self {
        Self {
            memory,
            size,
            addresses,
            next_available: 0,
            inflight: None,
            features,
            notify,
            polled: false,
            report: Arc::default(),
        }
    }
}

impl fmt::Debug for BlockQueueConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockQueueConfig")
            .field("size", &self.size)
            .field("addresses", &self.addresses)
            .field("next_available", &self.next_available)
            .field("features", &format_args!("{:#x}", self.features))
            .finish_non_exhaustive()
    }
}

impl BlockQueue {
    /// Starts a queue on the worker that `cx` belongs to.
    ///
    /// # Errors
    ///
    /// [`StartQueueError`].
    pub fn start(
        device: Arc<BlockDevice>,
        cx: &Context,
        config: BlockQueueConfig,
    ) -> Result<Self, StartQueueError> {
        let setup = QueueSetup {
            size: config.size,
            addresses: config.addresses,
            next_available: config.next_available,
            event_idx: has(config.features, VIRTIO_RING_F_EVENT_IDX),
            indirect: has(config.features, VIRTIO_RING_F_INDIRECT_DESC),
        };
        let mut ring = ServedQueue::new(config.memory, &setup)?;
        let (mut inflight, mut again) = (None, Vec::new());
        if let Some(region) = &config.inflight {
            let (queue, found) = InflightQueue::open(region, ring.size(), ring.used_index())?;
            inflight = Some(queue);
            if let Some(found) = found {
                ring.set_next_available(found.next_available);
                again = found.heads;
                again.reverse();
                // The killed server may have published without telling.
                config.notify.used();
            }
        }
        let disk = Arc::clone(device.disk()).open_queue(cx)?;
        let mut queue = Self {
            device,
            slots: vec![Slot::FREE; usize::from(ring.size())].into_boxed_slice(),
            ring,
            disk,
            features: config.features,
            notify: config.notify,
            polled: config.polled,
            report: config.report,
            lost: false,
            broken: false,
            in_flight: 0,
            inflight,
            again,
            sink: CompletionSink::new(),
            chain: Chain::default(),
            done: Vec::new(),
            ranges: Vec::new(),
        };
        // At once: a queue may be stopped before its worker has come to its first round, and what is marked must
        // have been answered then.
        queue.take_again();
        Ok(queue)
    }

    /// As many chains as there may be in flight.
    #[inline]
    fn room(&self) -> usize {
        self.slots.len().min(IN_FLIGHT_MAX).saturating_sub(self.in_flight)
    }

    #[cold]
    fn fail(&mut self, error: QueueError) {
        if let Some(held_back) = self.device.log_limit().admit() {
            tracing::warn!(%error, held_back, "the guest broke a queue; the queue is stopped");
        }
        self.broken = true;
        self.again.clear();
        self.report.broken.store(true, Ordering::Release);
        self.notify.broken();
    }

    #[cold]
    fn lose_memory(&mut self) {
        self.lost = true;
        if !self.broken {
            self.fail(QueueError::MemoryLost);
        }
    }

    #[inline]
    fn take_some(&mut self) -> Result<bool, QueueError> {
        if !self.again.is_empty() {
            return Ok(false);
        }
        let waiting = self.ring.available()?;
        let count = usize::from(waiting.min(BATCH_MAX)).min(self.room());
        for taken in 0..count {
            self.ring.prefetch(waiting - taken as u16);
            self.take()?;
        }
        Ok(count > 0)
    }

    /// Submits again what a killed server had taken and not given back, in the order it was taken. The
    /// specification has these before all new ones.
    #[cold]
    fn take_again(&mut self) {
        if !self.again.is_empty() {
            tracing::info!(
                chains = self.again.len(),
                "resubmitting the requests that were in flight"
            );
        }
        while self.room() > 0
            && let Some(head) = self.again.pop()
        {
            let taken = self.ring.take_again(head, &mut self.chain);
            if let Err(error) = taken.and_then(|()| self.submit(head, true)) {
                return self.fail(error);
            }
        }
    }

    /// Takes one chain and submits what it asks, or answers it.
    #[inline]
    fn take(&mut self) -> Result<(), QueueError> {
        let head = self.ring.take(&mut self.chain)?;
        self.submit(head, false)
    }

    /// Submits what the chain that was just followed asks, or answers it. `marked`: it is marked already.
    #[inline]
    fn submit(&mut self, head: u16, marked: bool) -> Result<(), QueueError> {
        let Some(status) = self.chain.take_status() else {
            let defect = self.chain.defect();
            return Err(QueueError::NoStatus { head, defect });
        };
        // The head is a position in the descriptor table, so it has a slot.
        if self.slots[usize::from(head)].place.is_some() {
            return Err(QueueError::HeadInFlight { head });
        }
        if let Some(inflight) = &mut self.inflight
            && !marked
        {
            inflight.take(head);
        }
        match request::parse(&mut self.chain, self.ring.memory()) {
            Ok(BlockRequest::Read { offset }) => {
                let buffer = self.ring.memory().buffer(self.chain.writable());
                self.submit_data(head, status, Op::Read, offset, buffer, true);
            }
            Ok(BlockRequest::Write { offset }) => {
                let fua = self.device.is_writethrough(self.features);
                let buffer = self.ring.memory().buffer(self.chain.readable());
                self.submit_data(head, status, Op::Write { fua }, offset, buffer, false);
            }
            Ok(BlockRequest::Flush) => self.submit_data(head, status, Op::Flush, 0, Buffer::default(), false),
            Ok(BlockRequest::Id) => self.identify(head, status),
            Ok(BlockRequest::Discard) => self.submit_ranges(head, status, VIRTIO_BLK_F_DISCARD),
            Ok(BlockRequest::WriteZeroes) => self.submit_ranges(head, status, VIRTIO_BLK_F_WRITE_ZEROES),
            Err(error) => self.answer(head, status, error, 1),
        }
        Ok(())
    }

    #[inline]
    fn occupy(&mut self, head: u16, place: Slice, parts: u32, len: u32) {
        self.slots[usize::from(head)] = Slot {
            place: Some(place),
            parts,
            len,
            status: Status::OK,
        };
        self.in_flight += 1;
    }

    /// Submits a request that is one request to the disk too. `fills`: it writes to the guest's buffers.
    #[inline]
    fn submit_data(&mut self, head: u16, status: Slice, op: Op, offset: u64, buffer: Buffer, fills: bool) {
        let len = buffer.len();
        // Data is limited to 1 GiB, so this fits.
        let written = if fills { len as u32 + 1 } else { 1 };
        self.occupy(head, status, 1, written);
        let tag = u64::from(head);
        self.disk
            .submit(Request::new(op, offset, len as u64, buffer, &self.sink, tag));
    }

    /// Submits each segment of a discard or write-zeroes request. The chain is given back when all have
    /// been answered.
    fn submit_ranges(&mut self, head: u16, status: Slice, feature: u32) {
        if !has(self.features, feature) {
            return self.answer(head, status, Status::UNSUPPORTED, 1);
        }
        let zero = feature == VIRTIO_BLK_F_WRITE_ZEROES;
        let disk_bytes = self.device.disk().info().size_bytes;
        let memory = self.ring.memory();
        if let Err(error) = request::ranges(&self.chain, memory, zero, disk_bytes, &mut self.ranges) {
            return self.answer(head, status, error, 1);
        }
        if self.ranges.is_empty() {
            return self.answer(head, status, Status::OK, 1);
        }
        self.occupy(head, status, self.ranges.len() as u32, 1);
        let fua = self.device.is_writethrough(self.features);
        for range in &self.ranges {
            let op = if zero {
                Op::WriteZeroes {
                    unmap: range.unmap,
                    fua,
                }
            } else {
                Op::Discard
            };
            let (buffer, tag) = (Buffer::default(), u64::from(head));
            self.disk
                .submit(Request::new(op, range.offset, range.len, buffer, &self.sink, tag));
        }
    }

    fn identify(&mut self, head: u16, status: Slice) {
        let written = self
            .ring
            .memory()
            .write_across(self.chain.writable(), self.device.serial());
        debug_assert!(written <= SERIAL_BYTES);
        match written {
            0 => self.answer(head, status, Status::IO_ERROR, 1),
            _ => self.answer(head, status, Status::OK, written as u32 + 1),
        }
    }

    /// Writes the status and gives the chain back.
    #[inline]
    fn answer(&mut self, head: u16, place: Slice, status: Status, len: u32) {
        self.ring.memory().write_byte(place, status.0);
        if let Some(inflight) = &mut self.inflight {
            inflight.give_back(head);
        }
        self.ring.give_back(head, len);
    }

    /// Completes one of the disk requests of a chain, and answers the chain after the last.
    #[inline]
    fn complete_part(&mut self, done: &Done) {
        // Tags are heads of chains in flight, as `submit_data` and `submit_ranges` gave them.
        let head = done.tag as u16;
        let slot = &mut self.slots[usize::from(head)];
        if let Err(error) = done.result {
            tracing::debug!(%error, head, "a request failed");
            slot.status = error.into();
        } else if self.lost {
            slot.status = Status::IO_ERROR;
        }
        slot.parts = slot.parts.saturating_sub(1);
        if slot.parts > 0 {
            return;
        }
        let (status, len) = (slot.status, slot.len);
        if let Some(place) = slot.place.take() {
            self.in_flight -= 1;
            let len = if status == Status::OK { len } else { 1 };
            self.answer(head, place, status, len);
        }
    }
}

impl Frontend for BlockQueue {
    #[inline]
    fn poll(&mut self) -> bool {
        if self.broken {
            return false;
        }
        self.take_some().unwrap_or_else(|error| {
            self.fail(error);
            true
        })
    }

    #[inline]
    fn publish(&mut self) -> bool {
        if !self.sink.is_empty() {
            let mut done = std::mem::take(&mut self.done);
            self.sink.drain_into(&mut done);
            // After the requests have ended, and before the first of them is answered.
            if self.notify.is_memory_lost() {
                self.lose_memory();
            }
            for done in done.drain(..) {
                self.complete_part(&done);
            }
            self.done = done;
            // Here and not in `poll`, which is not called any more when the queue is to be removed.
            if !self.again.is_empty() {
                self.take_again();
            }
        }
        if self.ring.unpublished() == 0 {
            return false;
        }
        let wanted = self.ring.publish();
        if let Some(inflight) = &mut self.inflight {
            inflight.published(self.ring.used_index());
        }
        if wanted {
            self.notify.used();
        }
        true
    }

    fn prepare_sleep(&mut self) -> bool {
        if self.broken {
            return false;
        }
        match self.ring.enable_notifications() {
            Ok(waiting) => (waiting || !self.again.is_empty()) && self.room() > 0 || self.polled,
            Err(error) => {
                self.fail(error);
                true
            }
        }
    }

    fn end_sleep(&mut self) {
        self.ring.disable_notifications();
    }

    fn in_flight(&self) -> usize {
        self.in_flight + self.again.len() + usize::from(self.ring.unpublished())
    }

    fn removed(&mut self) {
        self.report
            .next_available
            .store(self.ring.next_available(), Ordering::Release);
        self.report
            .next_used
            .store(self.ring.used_index(), Ordering::Release);
    }
}
