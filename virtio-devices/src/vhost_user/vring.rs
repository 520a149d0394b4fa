//! One queue as the client sets it up, message by message, and its run on a worker.
//!
//! The protocol has a queue *started* (by its kick descriptor, until its base is asked for) and *enabled*
//! (by a message). It runs on its worker exactly while both hold and its rings and memory are known:
//!
//! ```text
//!              SET_VRING_KICK, enabled, size, addresses, memory
//!   stopped ────────────────────────────────────────────────────▶ running
//!           ◀────────────────────────────────────────────────────
//!     GET_VRING_BASE, disabled, any change: drained, next index kept
//! ```
//!
//! A client that has agreed to `GET_VRING_BASE_INFLIGHT` gets its base without a full drain: requests that wait for a rate limit stay in
//! the inflight records. Those that the disk has begun are waited for, and answered: a write that the kernel still had could overwrite
//! what the guest writes through the next server, and a FLUSH that failed here would succeed there.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use block::worker::{WorkerGone, WorkerHandle};

use super::event::ClientEvent;
use super::log_memory::LogMemory;
use super::memory::ClientMemory;
use super::sigbus::LossWatch;
use crate::blk::{BlockDevice, BlockQueueConfig, Notify, QueueReport, RunQueueError, RunningQueue};
use crate::stats::QueueStats;
use crate::virtqueue::{InflightRegion, QueueLog, RingAddresses, used_bytes};

/// Clients that share so little do not share their guest's memory, but some firmware at most, in bytes.
const SHARED_MIN: u64 = 16 << 20;

/// An error of starting or stopping a queue.
#[derive(Debug, thiserror::Error)]
pub(super) enum VringError {
    #[error(
        "the {part} at the client's address {address:#x} is in none of its {regions} memory regions of {bytes} bytes \
         together{}",
        if *bytes < SHARED_MIN { "; is the guest's memory shared with this server (QEMU: share=on)?" } else { "" }
    )]
    OutsideMemory {
        part: &'static str,
        address: u64,
        regions: usize,
        bytes: u64,
    },
    #[error("the client's log of written pages ends at guest address {end:#x}; {part} ends at {needed:#x}")]
    OutsideLog {
        part: &'static str,
        needed: u64,
        end: u64,
    },
    #[error(transparent)]
    Run(#[from] RunQueueError),
}

/// The way in which the client announces available chains.
#[derive(Debug)]
pub(super) enum Kick {
    /// Not known yet: the queue is not started.
    Unknown,
    /// By this eventfd.
    Event(File),
    /// Not at all.
    Polled,
}

/// The client's side of a queue.
#[derive(Debug)]
pub(super) struct Vring {
    pub(super) size: u16,
    /// As addresses of the client's.
    pub(super) addresses: Option<RingAddresses>,
    /// The guest address by which a log knows the used ring, if the client gave one.
    pub(super) log_address: Option<u64>,
    pub(super) next_available: u16,
    pub(super) kick: Kick,
    pub(super) call: Arc<ClientEvent>,
    pub(super) error: Arc<ClientEvent>,
    pub(super) enabled: bool,
    /// True if the inflight records may be those of a killed server, because no queue of ours has run on them yet.
    recover: bool,
    running: Option<RunningQueue>,
}

/// The parts of a client that its queues share.
#[derive(Debug)]
pub(super) struct ClientParts<'a> {
    pub(super) memory: &'a ClientMemory,
    /// The records of its chains in flight.
    pub(super) inflight: Option<InflightRegion>,
    /// The log of the guest pages that it writes.
    pub(super) log: Option<&'a LogMemory>,
    /// The features that the client accepted.
    pub(super) features: u64,
    pub(super) stats: Arc<QueueStats>,
}

/// Signals the client's eventfds, and knows of its memory.
struct Events {
    call: Arc<ClientEvent>,
    error: Arc<ClientEvent>,
    losses: LossWatch,
}

impl Notify for Events {
    fn used(&self) {
        self.call.signal();
    }

    fn broken(&self) {
        self.error.signal();
    }

    fn is_memory_lost(&self) -> bool {
        self.losses.is_lost()
    }
}

impl Vring {
    pub(super) fn new() -> Self {
        Self {
            size: 0,
            addresses: None,
            log_address: None,
            next_available: 0,
            kick: Kick::Unknown,
            call: Arc::default(),
            error: Arc::default(),
            enabled: false,
            recover: false,
            running: None,
        }
    }

    /// Resets the queue, which must not run. Its eventfds stay, because the client continues to use them.
    pub(super) fn reset(&mut self) {
        *self = Self {
            call: Arc::clone(&self.call),
            error: Arc::clone(&self.error),
            ..Self::new()
        };
    }

    pub(super) fn set_size(&mut self, size: u16) {
        self.size = size;
    }

    pub(super) fn set_addresses(&mut self, addresses: RingAddresses, log_address: Option<u64>) {
        self.addresses = Some(addresses);
        self.log_address = log_address;
    }

    pub(super) fn set_base(&mut self, next_available: u16) {
        self.next_available = next_available;
    }

    pub(super) fn base(&self) -> u16 {
        self.next_available
    }

    /// Starts the queue: from now on the client kicks `kick`, or not at all.
    pub(super) fn set_kick(&mut self, kick: Option<File>) {
        self.kick = kick.map_or(Kick::Polled, Kick::Event);
    }

    /// The queue is not started any more.
    pub(super) fn forget_kick(&mut self) {
        self.kick = Kick::Unknown;
    }

    /// Sets the eventfd that notifies the client; may change while the queue runs.
    pub(super) fn set_call(&self, call: Option<File>) {
        self.call.set(call);
        // What was signalled at the old place, also by a server that was killed, may not have arrived.
        self.call.signal();
    }

    /// The client has given inflight memory: the next start looks what is marked there.
    pub(super) fn recover(&mut self) {
        self.recover = true;
    }

    /// Returns true if the next start uses the inflight records.
    pub(super) fn is_to_recover(&self) -> bool {
        self.recover
    }

    /// Sets the eventfd that reports a broken queue; may change while the queue runs.
    pub(super) fn set_error(&self, error: Option<File>) {
        self.error.set(error);
    }

    pub(super) fn set_enabled(&mut self, enabled: bool) {
        self.enabled = enabled;
    }

    pub(super) fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Stops the queue, if it runs, by draining it. A broken queue needs a new kick to start again.
    pub(super) fn stop(&mut self, worker: &WorkerHandle) -> Result<(), WorkerGone> {
        self.end(worker, RunningQueue::stop)
    }

    /// Stops the queue as [`Vring::stop`] does, but leaves requests that have not begun in the inflight records.
    pub(super) fn suspend(&mut self, worker: &WorkerHandle) -> Result<(), WorkerGone> {
        self.end(worker, RunningQueue::suspend)
    }

    fn end(
        &mut self,
        worker: &WorkerHandle,
        end: impl FnOnce(RunningQueue, &WorkerHandle) -> Result<Arc<QueueReport>, WorkerGone>,
    ) -> Result<(), WorkerGone> {
        if let Some(running) = self.running.take() {
            let report = end(running, worker)?;
            self.next_available = report.next_available();
            // A client that goes on here does not have to give the memory again.
            self.recover |= report.left() > 0;
            if report.is_broken() {
                self.forget_kick();
            }
        }
        Ok(())
    }

    /// Returns true if the queue should run and does not.
    pub(super) fn is_to_run(&self) -> bool {
        let is_described = self.addresses.is_some() && self.size != 0;
        self.running.is_none() && is_described && self.enabled && !matches!(self.kick, Kick::Unknown)
    }

    /// Returns true if the client has stopped the queue, or never started it.
    pub(super) fn is_at_rest(&self) -> bool {
        self.running.is_none() && matches!(self.kick, Kick::Unknown)
    }

    /// Runs the queue, if it should run and does not.
    pub(super) fn start(
        &mut self,
        worker: &WorkerHandle,
        device: &Arc<BlockDevice>,
        client: ClientParts<'_>,
    ) -> Result<(), VringError> {
        let ClientParts {
            memory,
            inflight,
            log,
            features,
            stats,
        } = client;
        let Some(user) = self.addresses.filter(|_| self.is_to_run()) else {
            return Ok(());
        };
        let kick = match &self.kick {
            Kick::Unknown => return Ok(()),
            Kick::Event(file) => Some(OwnedFd::from(file.try_clone().map_err(RunQueueError::Kick)?)),
            Kick::Polled => None,
        };
        let guest = |part, address| {
            memory.guest_address(address).ok_or_else(|| {
                let (regions, bytes) = memory.extent();
                VringError::OutsideMemory {
                    part,
                    address,
                    regions,
                    bytes,
                }
            })
        };
        let addresses = RingAddresses {
            descriptors: guest("descriptor table", user.descriptors)?,
            available: guest("available ring", user.available)?,
            used: guest("used ring", user.used)?,
        };
        let guard = log.map(LogMemory::guard);
        let log = log
            .map(|log| self.queue_log(log, memory, addresses.used))
            .transpose()?;
        let events = Events {
            call: Arc::clone(&self.call),
            error: Arc::clone(&self.error),
            losses: memory.watch(guard),
        };
        let mut config =
            BlockQueueConfig::new(memory.map(), self.size, addresses, features, Box::new(events));
        config.next_available = self.next_available;
        config.inflight = inflight;
        config.log = log;
        config.stats = stats;
        self.running = Some(RunningQueue::start(worker, device, kick, config)?);
        self.recover = false;
        Ok(())
    }

    /// The log of the queue, which must have a bit for all that the queue can write.
    fn queue_log(
        &self,
        log: &LogMemory,
        memory: &ClientMemory,
        used_ring: u64,
    ) -> Result<QueueLog, VringError> {
        let end = log.log().end();
        let used_ring = self.log_address.unwrap_or(used_ring);
        let ring_end = used_ring.saturating_add(used_bytes(self.size));
        for (part, needed) in [("its memory", memory.end()), ("the used ring", ring_end)] {
            if needed > end {
                return Err(VringError::OutsideLog { part, needed, end });
            }
        }
        Ok(QueueLog {
            log: Arc::clone(log.log()),
            used_ring,
        })
    }
}
