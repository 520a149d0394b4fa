//! A virtio-blk disk as a PCI function: the registers of virtio 1.2, 4.1.4, in one memory window.
//!
//! Invariants: the function's queues run exactly while the driver has set DRIVER_OK, they are enabled and the machine
//! is not paused; and when a reset or a pause returns, none of them touches guest memory any more.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, Ordering};

use block::Disk;
use block::worker::{WorkerConfig, WorkerHandle};
use virtio_bindings::virtio_blk::VIRTIO_BLK_F_RO;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use vm_memory::GuestMemoryMmap;

use super::config_space::{COMMAND_MEMORY, ConfigSpace, at};
use super::device::{Device, DeviceError};
use super::error::{PlugError, ResizeError};
use super::foreign::{Foreign, VhostUserBackend};
use super::function::{QUEUES_MAX, STATUS_NEEDS_RESET, Shared, signal};
use super::in_process::InProcess;
use super::msix::{ENTRY_BYTES, Msix, NO_VECTOR};
use super::queue::PciQueue;
use super::{Machine, PciFunction, Window};
use crate::block::{BlockDevice, BlockDeviceConfig, Told};

/// The size of the function's memory window, in bytes.
pub const BAR_BYTES: u32 = 0x8000;

/// The offset of each part in the window. The table takes 257 entries, the pending bits 5 words.
const COMMON: u64 = 0;
const COMMON_BYTES: u64 = 0x40;
const ISR: u64 = 0x1000;
const DEVICE: u64 = 0x2000;
const DEVICE_BYTES: u64 = 0x100;
const NOTIFY: u64 = 0x3000;
const NOTIFY_STRIDE: u64 = 4;
const TABLE: u64 = 0x4000;
const PENDING: u64 = 0x6000;

const VENDOR_VIRTIO: u16 = 0x1AF4;
const DEVICE_BLOCK: u16 = 0x1042;
/// Mass storage, of no further kind.
const CLASS: u32 = 0x01_80_00;
const CAPABILITY_VENDOR: u8 = 0x09;
const CAPABILITY_MSIX: u8 = 0x11;
/// Kinds of virtio capabilities: virtio 1.2, 4.1.4.
const KIND_COMMON: u8 = 1;
const KIND_NOTIFY: u8 = 2;
const KIND_ISR: u8 = 3;
const KIND_DEVICE: u8 = 4;
const KIND_ACCESS: u8 = 5;

const STATUS_DRIVER_OK: u8 = 4;
const STATUS_FEATURES_OK: u8 = 8;
/// `VIRTIO_F_RING_RESET`: a queue can be reset alone.
const FEATURE_RING_RESET: u64 = 1 << 40;

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
    shared: Arc<Shared>,
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
        let device = BlockDevice::new(disk, &shown)?;
        let told = Arc::clone(device.told());
        let workers = config.workers.into_iter().map(WorkerHandle::spawn);
        let workers = workers.collect::<Result<Vec<_>, _>>()?;
        Self::show(
            machine,
            window,
            config.name,
            queues,
            config.queue_size,
            told,
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
        told: Arc<Told>,
        make: impl FnOnce(Arc<Shared>) -> Box<dyn Device>,
    ) -> Result<Self, PlugError> {
        let msix = Msix::new(&*machine, queues + 1, &told)?;
        let mut space = ConfigSpace::new(VENDOR_VIRTIO, DEVICE_BLOCK, CLASS, BAR_BYTES);
        space.put(at::BAR0, &window.to_le_bytes());
        space.add(
            CAPABILITY_VENDOR,
            &virtio_part(KIND_COMMON, COMMON, COMMON_BYTES, &[]),
        );
        space.add(CAPABILITY_VENDOR, &virtio_part(KIND_ISR, ISR, 1, &[]));
        space.add(
            CAPABILITY_VENDOR,
            &virtio_part(KIND_DEVICE, DEVICE, DEVICE_BYTES, &[]),
        );
        let (stride, room) = (NOTIFY_STRIDE as u32, NOTIFY_STRIDE * u64::from(QUEUES_MAX));
        let notify = virtio_part(KIND_NOTIFY, NOTIFY, room, &stride.to_le_bytes());
        space.add(CAPABILITY_VENDOR, &notify);
        let access_at = space.add(CAPABILITY_VENDOR, &virtio_part(KIND_ACCESS, 0, 0, &[0; 4]));
        // Which window, where in it, how much, and the bytes there: all the guest's.
        space.allow(access_at + 4, &[0xFF]);
        space.allow(access_at + 8, &[0xFF; 8]);
        let mut body = Vec::from(queues.to_le_bytes());
        body.extend((TABLE as u32).to_le_bytes());
        body.extend((PENDING as u32).to_le_bytes());
        let msix_at = space.add(CAPABILITY_MSIX, &body);
        space.allow(msix_at + 2, &[0, 0xC0]);
        let shared = Arc::new(Shared {
            name,
            told,
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
                if let Some(held_back) = self.shared.told.admit() {
                    tracing::warn!(disk = %self.shared.name, %error, held_back, "cannot start a queue");
                }
                self.shared.needs_reset();
            }
        }
    }

    fn offered(&self) -> u64 {
        self.device.features() | FEATURE_RING_RESET
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
                    && let Some(held_back) = self.shared.told.admit()
                {
                    tracing::warn!(disk = %self.shared.name, %error, held_back, "cannot watch for kicks");
                }
            }
        }
        self.watched = base;
    }

    fn set_status(&mut self, status: u8) {
        if status == 0 {
            if let Err(error) = self.stop_all() {
                self.cannot_stop(&error);
            }
            self.queues.iter_mut().for_each(PciQueue::reset);
            self.device.reset();
            self.features = 0;
            (self.device_feature_select, self.driver_feature_select) = (0, 0);
            self.queue_select = 0;
            self.shared.config_vector.store(NO_VECTOR, Ordering::SeqCst);
            self.shared.isr.store(0, Ordering::SeqCst);
            self.shared.status.store(0, Ordering::SeqCst);
            return;
        }
        let mut status = status;
        let before = self.shared.status.load(Ordering::SeqCst);
        if status & !before & STATUS_FEATURES_OK != 0 {
            let good = self.features & !self.offered() == 0 && self.features & 1 << VIRTIO_F_VERSION_1 != 0;
            if !good {
                status &= !STATUS_FEATURES_OK;
            }
        }
        // A worker may set the one bit that says that a reset is needed, at any time.
        let kept = self.shared.status.fetch_or(status, Ordering::SeqCst) & STATUS_NEEDS_RESET;
        self.shared.status.fetch_and(status | kept, Ordering::SeqCst);
        if status & !before & STATUS_DRIVER_OK != 0 {
            self.start_all();
        }
    }

    fn set_features(&mut self, value: u32) {
        if self.shared.status.load(Ordering::SeqCst) & STATUS_FEATURES_OK != 0 {
            return;
        }
        let value = u64::from(value);
        match self.driver_feature_select {
            0 => self.features = self.features & !0xFFFF_FFFF | value,
            1 => self.features = self.features & 0xFFFF_FFFF | value << 32,
            _ => {}
        }
    }

    /// The common registers as a guest would read them.
    fn common(&self) -> [u8; COMMON_BYTES as usize] {
        let mut bytes = [0; COMMON_BYTES as usize];
        let mut put =
            |offset: usize, value: &[u8]| bytes[offset..offset + value.len()].copy_from_slice(value);
        let half = |features: u64, select: u32| match select {
            0 => features as u32,
            1 => (features >> 32) as u32,
            _ => 0,
        };
        put(0, &self.device_feature_select.to_le_bytes());
        put(4, &half(self.offered(), self.device_feature_select).to_le_bytes());
        put(8, &self.driver_feature_select.to_le_bytes());
        put(12, &half(self.features, self.driver_feature_select).to_le_bytes());
        put(
            16,
            &self.shared.config_vector.load(Ordering::SeqCst).to_le_bytes(),
        );
        put(18, &(self.queues.len() as u16).to_le_bytes());
        put(20, &[self.shared.status.load(Ordering::SeqCst)]);
        put(21, &[self.shared.generation.load(Ordering::SeqCst)]);
        put(22, &self.queue_select.to_le_bytes());
        if let Some(queue) = self.queues.get(usize::from(self.queue_select)) {
            put(24, &queue.size.to_le_bytes());
            put(26, &queue.vector().to_le_bytes());
            put(28, &u16::from(queue.enabled).to_le_bytes());
            put(30, &self.queue_select.to_le_bytes());
            put(32, &queue.addresses.descriptors.to_le_bytes());
            put(40, &queue.addresses.available.to_le_bytes());
            put(48, &queue.addresses.used.to_le_bytes());
        }
        bytes
    }

    fn write_common(&mut self, offset: u64, data: &[u8]) {
        let mut bytes = [0; 8];
        for (byte, value) in bytes.iter_mut().zip(data) {
            *byte = *value;
        }
        let value = u64::from_le_bytes(bytes);
        let vectors = self.queues.len() as u16 + 1;
        let vector = if (value as u16) < vectors {
            value as u16
        } else {
            NO_VECTOR
        };
        match (offset, data.len()) {
            (0, 4) => self.device_feature_select = value as u32,
            (8, 4) => self.driver_feature_select = value as u32,
            (12, 4) => self.set_features(value as u32),
            (16, 2) => self.shared.config_vector.store(vector, Ordering::SeqCst),
            (20, 1) => self.set_status(value as u8),
            (22, 2) => self.queue_select = value as u16,
            (28, 2) if value == 1 => {
                if let Some(queue) = self.queues.get_mut(usize::from(self.queue_select)) {
                    queue.enabled = true;
                }
                self.start_all();
            }
            (58, 2) if value == 1 && self.features & FEATURE_RING_RESET != 0 => self.reset_queue(),
            _ => self.write_queue(offset, data.len(), value, vector),
        }
    }

    fn reset_queue(&mut self) {
        let index = usize::from(self.queue_select);
        if let Some(queue) = self.queues.get_mut(index) {
            let stopped = queue.stop(&mut *self.device);
            queue.reset();
            if let Err(error) = stopped {
                self.cannot_stop(&error);
            }
        }
    }

    fn cannot_stop(&self, error: &DeviceError) {
        if let Some(held_back) = self.shared.told.admit() {
            tracing::error!(disk = %self.shared.name, %error, held_back, "cannot stop a queue");
        }
    }

    /// The registers of the selected queue that only a queue that is not enabled takes.
    fn write_queue(&mut self, offset: u64, len: usize, value: u64, vector: u16) {
        let Some(queue) = self.queues.get_mut(usize::from(self.queue_select)) else {
            return;
        };
        if (offset, len) == (26, 2) {
            if let Err(error) = queue.set_vector(vector, &mut *self.device) {
                if let Some(held_back) = self.shared.told.admit() {
                    let disk = &self.shared.name;
                    tracing::error!(%disk, %error, held_back, "cannot change a queue's interrupt");
                }
                self.shared.needs_reset();
            }
            return;
        }
        if queue.enabled {
            return;
        }
        let addresses = &mut queue.addresses;
        match (offset, len) {
            // What was offered is the most that memory is spent on.
            (24, 2) => queue.size = queue.size_max.min(value as u16),
            (32..40, _) => set_part(&mut addresses.descriptors, offset - 32, len, value),
            (40..48, _) => set_part(&mut addresses.available, offset - 40, len, value),
            (48..56, _) => set_part(&mut addresses.used, offset - 48, len, value),
            _ => {}
        }
    }

    fn write_device(&mut self, offset: u64, data: &[u8]) {
        if let Err(error) = self.device.write_config(offset, data, self.features) {
            if let Some(held_back) = self.shared.told.admit() {
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

/// A virtio capability behind its identifier and link: its length, kind, place, and what its kind adds.
fn virtio_part(kind: u8, offset: u64, len: u64, more: &[u8]) -> Vec<u8> {
    let mut body = vec![16 + more.len() as u8, kind, 0, 0, 0, 0];
    body.extend((offset as u32).to_le_bytes());
    body.extend((len as u32).to_le_bytes());
    body.extend(more);
    body
}

/// Sets half of an address, or all of it.
fn set_part(address: &mut u64, offset: u64, len: usize, value: u64) {
    match (offset, len) {
        (0, 8) => *address = value,
        (0, 4) => *address = *address & !0xFFFF_FFFF | value,
        (4, 4) => *address = *address & 0xFFFF_FFFF | value << 32,
        _ => {}
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

const _: () = assert!(TABLE + ENTRY_BYTES * (QUEUES_MAX as u64 + 1) <= PENDING);
