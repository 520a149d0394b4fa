//! One queue of a function: its registers, and its run on a worker.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use block::Disk;
use block::worker::{FrontendId, WorkerGone, WorkerHandle};
use vm_memory::GuestMemoryMmap;

use super::msix::{NO_VECTOR, Vectors};
use super::pci::Shared;
use crate::block::{BlockDevice, BlockQueue, BlockQueueConfig, Notify, QueueReport, StartQueueError};
use crate::virtqueue::RingAddresses;

/// Why a queue that should run does not.
#[derive(Debug, thiserror::Error)]
pub(super) enum QueueProblem {
    #[error(transparent)]
    Start(#[from] StartQueueError),
    #[error("cannot watch the kick eventfd")]
    Kick(#[source] io::Error),
    #[error(transparent)]
    Worker(#[from] WorkerGone),
}

#[derive(Debug)]
struct Running {
    id: FrontendId,
    report: Arc<QueueReport>,
}

/// A queue.
#[derive(Debug)]
pub(super) struct PciQueue {
    pub(super) size_max: u16,
    pub(super) size: u16,
    pub(super) addresses: RingAddresses,
    pub(super) enabled: bool,
    vector: Arc<AtomicU16>,
    kick: OwnedFd,
    next_available: u16,
    running: Option<Running>,
}

/// Raises the interrupts of one queue.
struct Events {
    vector: Arc<AtomicU16>,
    vectors: Vectors,
    shared: Arc<Shared>,
}

impl Notify for Events {
    fn used(&self) {
        let vector = self.vector.load(Ordering::Relaxed);
        if let Some(interrupt) = self.vectors.get(usize::from(vector)) {
            signal(interrupt.event());
        }
    }

    fn broken(&self) {
        self.shared.needs_reset();
    }
}

/// Signals an eventfd. It cannot fail but by a counter at its limit, which is a signal too.
pub(super) fn signal(event: BorrowedFd<'_>) {
    rustix::io::write(event, &1u64.to_ne_bytes()).unwrap_or_default();
}

const NOWHERE: RingAddresses = RingAddresses {
    descriptors: 0,
    available: 0,
    used: 0,
};

impl PciQueue {
    pub(super) fn new(size_max: u16) -> io::Result<Self> {
        Ok(Self {
            size_max,
            size: size_max,
            addresses: NOWHERE,
            enabled: false,
            vector: Arc::new(AtomicU16::new(NO_VECTOR)),
            kick: block::task::eventfd()?,
            next_available: 0,
            running: None,
        })
    }

    /// The eventfd that says that there are chains.
    pub(super) fn kick(&self) -> BorrowedFd<'_> {
        self.kick.as_fd()
    }

    pub(super) fn vector(&self) -> u16 {
        self.vector.load(Ordering::Relaxed)
    }

    pub(super) fn set_vector(&self, vector: u16) {
        self.vector.store(vector, Ordering::Relaxed);
    }

    /// Drains the queue, if it runs.
    pub(super) fn stop(&mut self, worker: &WorkerHandle, disk: &dyn Disk) -> Result<(), WorkerGone> {
        if let Some(Running { id, report }) = self.running.take() {
            // What waits for space would hold the drain up for as long as there is none.
            let _off = disk.hold_off();
            worker.remove(id)?;
            self.next_available = report.next_available();
        }
        Ok(())
    }

    /// As a driver finds it that has just reset the device. The queue does not run.
    pub(super) fn reset(&mut self) {
        self.size = self.size_max;
        self.addresses = NOWHERE;
        self.enabled = false;
        self.next_available = 0;
        self.set_vector(NO_VECTOR);
    }

    /// Runs the queue, if it is enabled and does not.
    pub(super) fn start(
        &mut self,
        worker: &WorkerHandle,
        device: &Arc<BlockDevice>,
        memory: &GuestMemoryMmap,
        features: u64,
        shared: &Arc<Shared>,
        vectors: &Vectors,
    ) -> Result<(), QueueProblem> {
        if !self.enabled || self.running.is_some() {
            return Ok(());
        }
        let kick = self.kick.try_clone().map_err(QueueProblem::Kick)?;
        let report = Arc::new(QueueReport::default());
        let events = Events {
            vector: Arc::clone(&self.vector),
            vectors: Arc::clone(vectors),
            shared: Arc::clone(shared),
        };
        let (size, addresses, next_available) = (self.size, self.addresses, self.next_available);
        let (memory, device, reported) = (memory.clone(), Arc::clone(device), Arc::clone(&report));
        let id = worker.run(move |worker| -> Result<FrontendId, QueueProblem> {
            let config = BlockQueueConfig {
                memory,
                size,
                addresses,
                next_available,
                inflight: None,
                features,
                notify: Box::new(events),
                polled: false,
                report: reported,
            };
            let queue = BlockQueue::start(device, worker.context(), config)?;
            worker
                .add(Box::new(queue), vec![kick])
                .map_err(QueueProblem::Kick)
        })??;
        self.running = Some(Running { id, report });
        Ok(())
    }
}
