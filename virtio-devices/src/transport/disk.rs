//! A virtio-blk disk as a PCI function.

use std::io;
use std::sync::Arc;

use block::Disk;
use block::worker::{WorkerConfig, WorkerHandle};
use virtio_bindings::virtio_blk::VIRTIO_BLK_F_RO;
use vm_memory::GuestMemoryMmap;

use super::error::{PlugError, ResizeError};
use super::foreign::{Foreign, VhostUserBackend};
use super::function::QUEUES_MAX;
use super::in_process::InProcess;
use super::pci::{Function, Kind, Shape};
use super::{Machine, PciFunction, Window};
use crate::blk::{BlockDevice, BlockDeviceConfig};
use crate::stats::DiskStats;

/// A disk function, and how its queues run.
#[derive(Clone, Debug)]
pub struct PciDiskConfig {
    /// The name in logs.
    pub name: String,
    /// The number of queues, 1 to 256. Each has a worker of its own.
    pub num_queues: u16,
    /// The most entries of a queue: a power of two.
    pub queue_size: u16,
    /// The serial number that the guest reads.
    pub serial: String,
    /// The configurations of the queues' workers, in order; `num_queues` of them.
    pub workers: Vec<WorkerConfig>,
    /// The statistics of the disk, which its queues go on with.
    pub stats: Arc<DiskStats>,
}

/// A virtio-blk disk on a PCI bus.
#[derive(Debug)]
pub struct VirtioPciBlock(Function);

impl VirtioPciBlock {
    /// A function that shows `disk` to a guest with `memory`, with its window at `window`, a multiple of
    /// [`BAR_BYTES`](super::BAR_BYTES); not enabled yet.
    ///
    /// # Errors
    ///
    /// [`PlugError`].
    pub fn new(
        disk: Arc<dyn Disk>,
        memory: GuestMemoryMmap,
        machine: Arc<dyn Machine>,
        window: u32,
        config: PciDiskConfig,
    ) -> Result<Self, PlugError> {
        let queues = config.num_queues;
        if queues == 0 || queues > QUEUES_MAX || usize::from(queues) != config.workers.len() {
            let workers = config.workers.len();
            return Err(PlugError::Queues { queues, workers });
        }
        let shown = BlockDeviceConfig {
            num_queues: queues,
            queue_size: config.queue_size,
            serial: &config.serial,
        };
        let device = BlockDevice::new(disk, &shown)?.with_stats(config.stats);
        let log_limit = Arc::clone(device.log_limit());
        let workers = config.workers.into_iter().map(WorkerHandle::spawn);
        let workers = workers.collect::<Result<Vec<_>, _>>()?;
        let shape = Shape {
            kind: Kind::BLOCK,
            name: config.name,
            queues,
            queue_size: config.queue_size,
            log_limit,
        };
        let function = Function::show(shape, machine, window, |shared| {
            Ok(Box::new(InProcess::new(device, memory, shared, workers)))
        })?;
        Ok(Self(function))
    }

    /// A function for a disk whose queues another program runs: a vhost-user-blk `backend`, with which the guest's
    /// `memory` is shared, which must be mapped from files. Kicks and interrupts go between it and the guest.
    ///
    /// If the backend exits, the device reports to the guest that it needs a reset; a reset connects again. If the
    /// backend records requests in flight (`VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD`), the guest is not notified: its
    /// requests wait until the backend is back.
    ///
    /// # Errors
    ///
    /// [`PlugError`].
    pub fn vhost_user(
        backend: VhostUserBackend,
        memory: GuestMemoryMmap,
        machine: Arc<dyn Machine>,
        window: u32,
    ) -> Result<Self, PlugError> {
        let shape = Shape {
            kind: Kind::BLOCK,
            name: backend.config.name.clone(),
            queues: backend.config.num_queues,
            queue_size: backend.config.queue_size,
            log_limit: Arc::default(),
        };
        let foreign = Foreign::new(backend, memory)?;
        let function = Function::show(shape, machine, window, |shared| {
            Ok(Box::new(foreign.serve(shared)))
        })?;
        Ok(Self(function))
    }

    /// The size of the disk in bytes, as the guest sees it.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        let mut sectors = [0; 8];
        self.0.device.read_config(0, &mut sectors, self.0.features);
        u64::from_le_bytes(sectors).saturating_mul(512)
    }

    /// Returns true if the guest may only read.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.0.device.features() & 1 << VIRTIO_BLK_F_RO != 0
    }

    /// Returns the name of the I/O driver: `"io_uring"`, `"syscalls"` or `"null"`; `"vhost-user"` if another program
    /// does the I/O.
    #[must_use]
    pub fn driver_name(&self) -> &'static str {
        self.0.device.driver_name()
    }

    /// Drains all queues and makes durable what was answered. Until [`VirtioPciBlock::resume`] nothing is taken
    /// from them any more, and the image holds every write that the guest believes done.
    ///
    /// # Errors
    ///
    /// The disk's error; the queues are stopped in any case.
    pub fn pause(&mut self) -> io::Result<()> {
        self.0.pause()
    }

    /// Lets the queues run again.
    pub fn resume(&mut self) {
        self.0.resume();
    }

    /// Enlarges the disk, notifies the guest, and returns the new size in bytes.
    ///
    /// # Errors
    ///
    /// [`ResizeError`]; the disk has its old size then.
    pub fn resize(&mut self, size_bytes: u64) -> Result<u64, ResizeError> {
        let size_bytes = self.0.device.resize(size_bytes)?;
        self.0.shared.config_changed();
        Ok(size_bytes)
    }

    /// Unplugs the function: drains its queues for good. The disk stays open. What a guest writes from now on, through
    /// an access that found the function before, changes nothing.
    ///
    /// # Errors
    ///
    /// If a worker has ended.
    pub fn unplug(&mut self) -> io::Result<()> {
        self.0.unplug()
    }
}

super::pci::is_function!(VirtioPciBlock);
