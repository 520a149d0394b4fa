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
use std::sync::atomic::Ordering;

use block::worker::Frontend;
use block::{Buffer, CompletionSink, Context, DiskQueue, Done, Op, Request};
use virtio_bindings::virtio_blk::{VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_WRITE_ZEROES};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::device::{BlockDevice, SERIAL_BYTES, has};
use super::queue_config::{BlockQueueConfig, Notify, QueueReport, StartQueueError};
use super::request::{self, BlockRequest, Range, Status};
use crate::stats::{Meter, RequestKind};
use crate::virtqueue::{Chain, InflightQueue, QueueError, QueueSetup, ServedQueue, Slice};

/// The maximum number of chains taken in one round. A guest processes the answers of one round during the next; a
/// round with all its chains would make guest and worker wait for each other.
const BATCH_MAX: u16 = 32;

/// The most chains of a queue in flight, however long the guest makes the queue: each costs memory of ours while
/// it is served. Those beyond wait in the queue.
pub const IN_FLIGHT_MAX: usize = 1024;

/// A chain in flight.
#[derive(Clone, Copy)]
struct Slot {
    /// The address of the status byte; `None` if the slot is free.
    place: Option<Slice>,
    /// Answers still to come.
    parts: u32,
    /// The number of bytes of the disk that it is about.
    bytes: u64,
    status: Status,
    kind: RequestKind,
    /// True if its latency is measured.
    measured: bool,
}

impl Slot {
    const FREE: Self = Self {
        place: None,
        parts: 0,
        bytes: 0,
        status: Status::OK,
        kind: RequestKind::Other,
        measured: false,
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
    /// Nothing more is taken.
    suspended: bool,
    slots: Box<[Slot]>,
    in_flight: usize,
    /// The number of chains that stay in the inflight records.
    left: usize,
    /// Records chains in flight for the next server, if this one is killed.
    inflight: Option<InflightQueue>,
    /// Chains that a killed server had taken and not returned, the oldest last.
    again: Vec<u16>,
    sink: Rc<CompletionSink>,
    meter: Meter,
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
        if let Some(log) = config.log {
            ring.log_writes(log);
        }
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
        let disk = device.disk().open_queue(cx)?;
        let size = usize::from(ring.size());
        let mut queue = Self {
            device,
            slots: vec![Slot::FREE; size].into_boxed_slice(),
            ring,
            disk,
            features: config.features,
            notify: config.notify,
            polled: config.polled,
            report: config.report,
            lost: false,
            broken: false,
            suspended: false,
            in_flight: 0,
            left: 0,
            inflight,
            again,
            sink: CompletionSink::new(),
            meter: Meter::new(config.stats, cx.clone(), size),
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
        if count == 0 {
            return Ok(false);
        }
        let picked = self.meter.pick(count).unwrap_or(usize::MAX);
        for place in 0..count {
            self.ring.prefetch(waiting - place as u16);
            match self.take() {
                Ok(head) if place == picked => self.measure_picked(head),
                Ok(_) => {}
                Err(error) => {
                    self.meter.taken(place);
                    return Err(error);
                }
            }
        }
        self.meter.taken(count);
        Ok(true)
    }

    /// Measures the latency of a request that was just submitted, if it is a read or write.
    #[cold]
    fn measure_picked(&mut self, head: u16) {
        let slot = &mut self.slots[usize::from(head)];
        if slot.place.is_some() && slot.kind.has_data() {
            slot.measured = true;
            self.meter.mark_picked(head);
        }
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
            // None of them is measured but flushes and the like.
            let _unmeasured = self.meter.pick(1);
            if let Err(error) = taken.and_then(|()| self.submit(head, true)) {
                return self.fail(error);
            }
            self.meter.taken(1);
        }
    }

    /// Takes one chain and submits what it asks, or answers it.
    #[inline]
    fn take(&mut self) -> Result<u16, QueueError> {
        let head = self.ring.take(&mut self.chain)?;
        self.submit(head, false)?;
        Ok(head)
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
                self.submit_data(head, status, Op::Read, offset, buffer);
            }
            Ok(BlockRequest::Write { offset }) => {
                let fua = self.device.is_writethrough(self.features);
                let buffer = self.ring.memory().buffer(self.chain.readable());
                self.submit_data(head, status, Op::Write { fua }, offset, buffer);
            }
            Ok(BlockRequest::Flush) => {
                self.meter.mark(head);
                self.submit_data(head, status, Op::Flush, 0, Buffer::default());
                self.slots[usize::from(head)].measured = true;
            }
            Ok(BlockRequest::Id) => self.identify(head, status),
            Ok(BlockRequest::Discard) => self.submit_ranges(head, status, VIRTIO_BLK_F_DISCARD),
            Ok(BlockRequest::WriteZeroes) => self.submit_ranges(head, status, VIRTIO_BLK_F_WRITE_ZEROES),
            Err(error) => self.answer_alone(head, status, error, RequestKind::Other),
        }
        Ok(())
    }

    #[inline]
    fn occupy(&mut self, head: u16, place: Slice, parts: u32, bytes: u64, kind: RequestKind) {
        self.slots[usize::from(head)] = Slot {
            place: Some(place),
            parts,
            bytes,
            status: Status::OK,
            kind,
            measured: false,
        };
        self.in_flight += 1;
    }

    /// Submits a request that is one request to the disk too.
    #[inline]
    fn submit_data(&mut self, head: u16, status: Slice, op: Op, offset: u64, buffer: Buffer) {
        let len = buffer.len();
        self.occupy(head, status, 1, len as u64, RequestKind::of(op));
        let tag = u64::from(head);
        self.disk
            .submit(Request::new(op, offset, len as u64, buffer, &self.sink, tag));
    }

    /// Submits each segment of a discard or write-zeroes request. The chain is given back when all have
    /// been answered.
    fn submit_ranges(&mut self, head: u16, status: Slice, feature: u32) {
        let zero = feature == VIRTIO_BLK_F_WRITE_ZEROES;
        let kind = if zero {
            RequestKind::WriteZeroes
        } else {
            RequestKind::Discard
        };
        if !has(self.features, feature) {
            return self.answer_alone(head, status, Status::UNSUPPORTED, kind);
        }
        let disk_bytes = self.device.disk().info().size_bytes;
        let memory = self.ring.memory();
        if let Err(error) = request::ranges(&self.chain, memory, zero, disk_bytes, &mut self.ranges) {
            return self.answer_alone(head, status, error, kind);
        }
        if self.ranges.is_empty() {
            return self.answer_alone(head, status, Status::OK, kind);
        }
        let bytes = self.ranges.iter().map(|range| range.len).sum();
        self.occupy(head, status, self.ranges.len() as u32, bytes, kind);
        self.meter.mark(head);
        self.slots[usize::from(head)].measured = true;
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
            0 => self.answer_alone(head, status, Status::IO_ERROR, RequestKind::Other),
            _ => {
                self.meter.succeed(RequestKind::Other, 0);
                self.answer(head, status, Status::OK, written as u32 + 1);
            }
        }
    }

    /// Answers a chain that is not submitted.
    #[cold]
    fn answer_alone(&mut self, head: u16, place: Slice, status: Status, kind: RequestKind) {
        match status {
            Status::OK => self.meter.succeed(kind, 0),
            _ => self.meter.fail(kind),
        }
        self.answer(head, place, status, 1);
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
        // Also if it failed: some of it may have been written.
        if self.ring.memory().is_logged() && slot.kind == RequestKind::Read {
            self.ring.memory().written(&done.buffer);
        }
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
        let &mut Slot {
            status,
            bytes,
            kind,
            measured,
            ..
        } = slot;
        if let Some(place) = slot.place.take() {
            self.in_flight -= 1;
            let mut len = 1;
            if kind == RequestKind::Read && status == Status::OK {
                // Data is limited to 1 GiB, so this fits.
                len += bytes as u32;
            }
            if u16::from_le_bytes([status.0, measured.into()]) == 0 {
                self.meter.succeed(kind, bytes);
            } else {
                self.settle(head, kind, bytes, status, measured);
            }
            self.answer(head, place, status, len);
        } else {
            // A part of it was withdrawn.
            self.in_flight = self.in_flight.saturating_sub(1);
        }
    }

    /// Counts a request that has failed, or whose latency is measured.
    #[cold]
    fn settle(&mut self, head: u16, kind: RequestKind, bytes: u64, status: Status, measured: bool) {
        if measured {
            self.meter.measured(head, kind);
        }
        match status {
            Status::OK => self.meter.succeed(kind, bytes),
            _ => self.meter.fail(kind),
        }
    }

    /// Withdraws the requests that the disk has not begun: their chains stay in the inflight records, unanswered.
    fn withdraw(&mut self) {
        self.disk.cancel_waiting();
        let mut cancelled = std::mem::take(&mut self.done);
        self.sink.drain_into(&mut cancelled);
        for part in cancelled.drain(..) {
            if self.slots[usize::from(part.tag as u16)].place.take().is_some() {
                self.left += 1;
                self.meter.not_taken();
            }
            self.complete_part(&part);
        }
        self.done = cancelled;
    }
}

impl Frontend for BlockQueue {
    #[inline]
    fn poll(&mut self) -> bool {
        if self.broken || self.suspended {
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
            self.meter.begin_answering();
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
        if self.broken || self.suspended {
            return false;
        }
        if self.in_flight == 0 {
            self.meter.idle();
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

    fn suspend(&mut self) {
        if self.inflight.is_some() && !self.broken {
            self.suspended = true;
            self.left += self.again.len();
            self.again.clear();
            // Answers that are there already: a failure, of a FLUSH above all, is this server's to tell.
            self.publish();
            self.withdraw();
        }
    }

    fn in_flight(&self) -> usize {
        self.in_flight + self.again.len() + usize::from(self.ring.unpublished())
    }

    fn removed(&mut self) {
        self.report
            .next_available
            .store(self.ring.next_available(), Ordering::Release);
        // There are no more chains in flight than entries.
        self.report.left.store(self.left as u16, Ordering::Release);
        self.report
            .next_used
            .store(self.ring.used_index(), Ordering::Release);
    }
}
