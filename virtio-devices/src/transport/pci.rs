//! A virtio-blk disk as a PCI function: the registers of virtio 1.2, 4.1.4, in one memory window.
//!
//! Invariants: the function's queues run exactly while the driver has set DRIVER_OK, they are enabled and the machine
//! is not paused; and when a reset or a pause returns, none of them touches guest memory any more.

mod layout;
mod registers;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, Ordering};

use block::Disk;
use block::report::LogLimit;
use block::worker::{WorkerConfig, WorkerHandle};
use virtio_bindings::virtio_blk::VIRTIO_BLK_F_RO;
use vm_memory::GuestMemoryMmap;

use super::config_space::{COMMAND_MEMORY, ConfigSpace, at};
use super::device::{Device, DeviceError};
use super::error::{PlugError, ResizeError};
use super::foreign::{Foreign, VhostUserBackend};
use super::function::{FunctionState, QUEUES_MAX, signal};
use super::in_process::InProcess;
use super::msix::{Msix, NO_VECTOR};
use super::queue::PciQueue;
use super::{Machine, PciFunction, Window};
use crate::blk::{BlockDevice, BlockDeviceConfig};
use crate::stats::DiskStats;
pub use layout::BAR_BYTES;
use layout::{COMMON, COMMON_BYTES, DEVICE, ISR, NOTIFY, NOTIFY_STRIDE, PENDING, TABLE};
use registers::STATUS_DRIVER_OK;

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
pub struct VirtioPciBlock {
    device: Box<dyn Device>,
    machine: Arc<dyn Machine>,
    space: ConfigSpace,
    msix: Msix,
    msix_at: u16,
    access_at: u16,
    shared: Arc<FunctionState>,
    queues: Vec<PciQueue>,
    device_feature_select: u32,
    driver_feature_select: u32,
    features: u64,
    queue_select: u16,
    /// The function's window, and the addresses of kicks.
    window: Window,
    watched: Option<u64>,
    /// It is in no slot any more.
    unplugged: bool,
    paused: bool,
}

impl VirtioPciBlock {
    /// A function that shows `disk` to a guest with `memory`, with its window at `window`, a multiple of
    /// [`BAR_BYTES`]; not enabled yet.
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
        Self::show(
            machine,
            window,
            config.name,
            queues,
            config.queue_size,
            log_limit,
            |shared| Box::new(InProcess::new(device, memory, shared, workers)),
        )
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
        let config = backend.config.clone();
        let foreign = Foreign::new(backend, memory)?;
        Self::show(
            machine,
            window,
            config.name,
            config.num_queues,
            config.queue_size,
            Arc::default(),
            |shared| Box::new(foreign.serve(shared)),
        )
    }

    /// A function with `queues` queues for the device that `make` answers.
    pub(super) fn show(
        machine: Arc<dyn Machine>,
        window: u32,
        name: String,
        queues: u16,
        queue_size: u16,
        log_limit: Arc<LogLimit>,
        make: impl FnOnce(Arc<FunctionState>) -> Box<dyn Device>,
    ) -> Result<Self, PlugError> {
        let msix = Msix::new(&*machine, queues + 1, &log_limit)?;
        let layout::Capabilities {
            space,
            msix_at,
            access_at,
        } = layout::capabilities(window, queues);
        let shared = Arc::new(FunctionState {
            name,
            log_limit,
            status: AtomicU8::new(0),
            isr: AtomicU8::new(0),
            generation: AtomicU8::new(0),
            config_vector: AtomicU16::new(NO_VECTOR),
            vectors: Arc::clone(msix.vectors()),
        });
        Ok(Self {
            queues: (0..queues)
                .map(|index| PciQueue::new(index, queue_size, msix.vectors()))
                .collect::<Result<_, _>>()?,
            device: make(Arc::clone(&shared)),
            machine,
            space,
            msix,
            msix_at,
            access_at,
            shared,
            device_feature_select: 0,
            driver_feature_select: 0,
            features: 0,
            queue_select: 0,
            window: Window::new(BAR_BYTES.into()),
            watched: None,
            unplugged: false,
            paused: false,
        })
    }

    /// The size of the disk in bytes, as the guest sees it.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        let mut sectors = [0; 8];
        self.device.read_config(0, &mut sectors, self.features);
        u64::from_le_bytes(sectors).saturating_mul(512)
    }

    /// Returns true if the guest may only read.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.device.features() & 1 << VIRTIO_BLK_F_RO != 0
    }

    /// Returns the name of the I/O driver: `"io_uring"`, `"syscalls"` or `"null"`; `"vhost-user"` if another program
    /// does the I/O.
    #[must_use]
    pub fn driver_name(&self) -> &'static str {
        self.device.driver_name()
    }

    /// Drains all queues and makes durable what was answered. Until [`VirtioPciBlock::resume`] nothing is taken
    /// from them any more, and the image holds every write that the guest believes done.
    ///
    /// # Errors
    ///
    /// The disk's error; the queues are stopped in any case.
    pub fn pause(&mut self) -> io::Result<()> {
        self.paused = true;
        self.stop_all().map_err(io::Error::other)?;
        self.device.flush()
    }

    /// Lets the queues run again.
    pub fn resume(&mut self) {
        self.paused = false;
        self.start_all();
    }

    /// Enlarges the disk, notifies the guest, and returns the new size in bytes.
    ///
    /// # Errors
    ///
    /// [`ResizeError`]; the disk has its old size then.
    pub fn resize(&mut self, size_bytes: u64) -> Result<u64, ResizeError> {
        let size_bytes = self.device.resize(size_bytes)?;
        self.shared.config_changed();
        Ok(size_bytes)
    }

    /// Unplugs the function: drains its queues for good. The disk stays open. What a guest writes from now on, through
    /// an access that found the function before, changes nothing.
    ///
    /// # Errors
    ///
    /// If a worker has ended.
    pub fn unplug(&mut self) -> io::Result<()> {
        self.unplugged = true;
        self.window.set(None);
        self.watch(None);
        self.msix.disconnect();
        self.stop_all().map_err(io::Error::other)
    }

    fn stop_all(&mut self) -> Result<(), DeviceError> {
        let mut result = Ok(());
        for queue in &mut self.queues {
            result = result.and(queue.stop(&mut *self.device));
        }
        result
    }

    fn start_all(&mut self) {
        let status = self.shared.status.load(Ordering::SeqCst);
        if self.unplugged || self.paused || status & STATUS_DRIVER_OK == 0 {
            return;
        }
        for queue in &mut self.queues {
            if let Err(error) = queue.start(&mut *self.device, self.features) {
                if let Some(held_back) = self.shared.log_limit.admit() {
                    tracing::warn!(disk = %self.shared.name, %error, held_back, "cannot start a queue");
                }
                self.shared.needs_reset();
            }
        }
    }

    /// Moves the watch for kicks to a window at `base`, or ends it.
    fn watch(&mut self, base: Option<u64>) {
        if self.watched == base {
            return;
        }
        for (queue, at) in self.queues.iter().zip((NOTIFY..).step_by(NOTIFY_STRIDE as usize)) {
            let unwatched = self
                .watched
                .map(|old| self.machine.unwatch(old + at, queue.kick()));
            let watched = base.map(|new| self.machine.watch(new + at, queue.kick()));
            for result in [unwatched, watched].into_iter().flatten() {
                // The guest's write comes here instead.
                if let Err(error) = result
                    && let Some(held_back) = self.shared.log_limit.admit()
                {
                    tracing::warn!(disk = %self.shared.name, %error, held_back, "cannot watch for kicks");
                }
            }
        }
        self.watched = base;
    }

    fn write_device(&mut self, offset: u64, data: &[u8]) {
        if let Err(error) = self.device.write_config(offset, data, self.features) {
            if let Some(held_back) = self.shared.log_limit.admit() {
                tracing::error!(disk = %self.shared.name, %error, held_back, "cannot change the configuration");
            }
            self.shared.needs_reset();
        }
    }

    /// Returns the access that the access capability requests: an offset in the window, and a number of bytes.
    fn access(&self) -> Option<(u64, usize)> {
        let (offset, len) = (
            self.space.u32_at(self.access_at + 8),
            self.space.u32_at(self.access_at + 12),
        );
        let first = self.space.u32_at(self.access_at + 4) & 0xFF == 0;
        (first && [1, 2, 4].contains(&len)).then_some((offset.into(), len as usize))
    }
}

impl PciFunction for VirtioPciBlock {
    fn read_config(&mut self, offset: u16, data: &mut [u8]) {
        if offset == self.access_at + 16
            && let Some((place, len)) = self.access()
        {
            let mut bytes = [0; 4];
            self.read(place, &mut bytes[..len]);
            self.space.put(offset, &bytes);
        }
        self.space.read(offset, data);
    }

    fn write_config(&mut self, offset: u16, data: &[u8]) {
        if self.unplugged {
            return;
        }
        self.space.write(offset, data);
        if offset & !3 == self.msix_at {
            self.msix.set_control(self.space.u16_at(self.msix_at + 2));
        }
        if offset == self.access_at + 16
            && let Some((place, len)) = self.access()
            && let Some(data) = data.get(..len)
        {
            self.write(place, data);
        }
        let base = u64::from(self.space.u32_at(at::BAR0) & !(BAR_BYTES - 1));
        let answers = self.space.u16_at(at::COMMAND) & COMMAND_MEMORY != 0;
        let base = answers.then_some(base);
        self.window.set(base);
        self.watch(base);
    }

    fn window(&self) -> Window {
        self.window.clone()
    }

    fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        match offset {
            COMMON..COMMON_BYTES => {
                let bytes = self.common();
                for (byte, value) in data.iter_mut().zip(bytes.iter().skip(offset as usize)) {
                    *byte = *value;
                }
            }
            ISR => {
                if let Some(byte) = data.first_mut() {
                    *byte = self.shared.isr.swap(0, Ordering::SeqCst);
                }
            }
            DEVICE..NOTIFY => self.device.read_config(offset - DEVICE, data, self.features),
            TABLE..PENDING => self.msix.read_table(offset - TABLE, data),
            PENDING.. => self.msix.read_pending(offset - PENDING, data),
            _ => {}
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        match offset {
            _ if self.unplugged => {}
            COMMON..COMMON_BYTES => self.write_common(offset, data),
            DEVICE..NOTIFY => self.write_device(offset - DEVICE, data),
            NOTIFY..TABLE => {
                let index = (offset - NOTIFY) / NOTIFY_STRIDE;
                if let Some(queue) = self.queues.get(index as usize) {
                    signal(queue.kick());
                }
            }
            TABLE..PENDING if offset.is_multiple_of(4) => self.msix.write_table(offset - TABLE, data),
            _ => {}
        }
    }
}
