//! One device that is served: its workers and queues, from their start to the close of the disk.
//!
//! Its beginning is in `add` and `recover`, its way to another process in `hand_over`.
//!
//! Invariants: a device that outlives its servers is left as it was found. A ring in which the driver waits is closed only by
//! the exit of the process.

mod add;
mod hand_over;
mod park;
mod recover;

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use block::Disk;
use block::ring::RingKind;
use block::worker::{FrontendId, StartWorkerError, WorkerConfig, WorkerGone, WorkerHandle};

use super::abi::{DeviceInfo, DeviceState, Flags};
use super::channel::{KernelChannel, Transport, become_io_flusher};
use super::config::{self, UblkConfig, first_slot};
use super::control::{CommandError, Control, char_path};
use super::error::{AddError, CloseError, DRAIN, ResizeError};
use super::queue::UblkQueue;
use super::queue_state::{Counts, Events, QueueState};
use super::rights::give_up_admin;
use crate::stats::DiskStats;
pub use hand_over::{HandOverError, HandOverProgress, Step, parting_duty};
pub use recover::RecoveringDevice;

/// The longest wait for the character device's node.
const NODE: Duration = Duration::from_secs(5);

/// A device and those who serve it.
///
/// If it is dropped before the driver has ended it, by [`UblkDevice::close_all`] or another process's command, it stays
/// with this process: requests are no longer answered, its threads and the lock of the disk remain, and the driver
/// takes the exit of the process for the death of its server.
#[derive(Debug)]
pub struct UblkDevice {
    info: DeviceInfo,
    transport: Transport,
    disk: Arc<dyn Disk>,
    queues: Vec<Queue>,
    stats: Arc<DiskStats>,
    // Dropped last: a queue's memory is its worker's.
    workers: Vec<WorkerHandle>,
}

#[derive(Debug)]
struct Queue {
    state: Arc<QueueState>,
    worker: usize,
    id: FrontendId,
}

impl Drop for UblkDevice {
    fn drop(&mut self) {
        if !self.is_ended() {
            self.park();
        }
    }
}

impl UblkDevice {
    /// Starts workers and queues, which fetch at once.
    fn serve(
        control: &mut Control,
        info: DeviceInfo,
        transport: Transport,
        disk: Arc<dyn Disk>,
        config: &UblkConfig,
        events: &Events,
    ) -> Result<Self, AddError> {
        let file = open_char(info.dev_id, NODE)?;
        let each = config.queues_per_worker.max(1);
        let mut device = Self {
            info,
            transport,
            disk,
            queues: Vec::new(),
            stats: Arc::default(),
            workers: Vec::new(),
        };
        for queue in 0..info.nr_hw_queues {
            if queue % each == 0 {
                let worker = device.start_worker(control, queue, each, config)?;
                device.workers.push(worker);
            }
            let started = device.start_queue(queue, &file, config, events);
            if let Err(error) = started {
                device.take_down(control);
                return Err(error);
            }
        }
        Ok(device)
    }

    /// The worker of `queue` and those behind it.
    fn start_worker(
        &self,
        control: &mut Control,
        queue: u16,
        each: u16,
        config: &UblkConfig,
    ) -> Result<WorkerHandle, AddError> {
        let last = queue.saturating_add(each).min(self.info.nr_hw_queues);
        let (mut cpus, mut suggested) = (Vec::new(), false);
        for queue in queue..last {
            match config.workers.get(usize::from(queue)) {
                Some(given) if !given.cpus.is_empty() => cpus.extend_from_slice(&given.cpus),
                _ => {
                    suggested = true;
                    cpus.extend(control.queue_affinity(self.info.dev_id, queue)?);
                }
            }
        }
        let tags = u32::from(last - queue) * u32::from(self.info.queue_depth);
        let given = config.workers.get(usize::from(queue));
        let worker = WorkerConfig {
            name: format!("ublk{} q{queue}", self.info.dev_id),
            ring: RingKind::IoUringCommands,
            // A slot for each tag's command, and as many for I/O.
            depth: tags * 2 + 64,
            registered_buffers: match self.transport {
                Transport::ZeroCopy => config::registered_slots(tags, config),
                _ => 0,
            },
            cpus,
            ..given.cloned().unwrap_or_else(UblkConfig::default_worker)
        };
        let started = match WorkerHandle::spawn(worker.clone()) {
            // CPUs that only the driver thought of may be none of ours.
            Err(StartWorkerError::Affinity { .. }) if suggested => WorkerHandle::spawn(WorkerConfig {
                cpus: Vec::new(),
                ..worker
            }),
            started => started,
        };
        started.map_err(|source| AddError::Worker { queue, source })
    }

    fn start_queue(
        &mut self,
        queue: u16,
        file: &OwnedFd,
        config: &UblkConfig,
        events: &Events,
    ) -> Result<(), AddError> {
        let state = QueueState::with_stats(self.info.dev_id, Arc::clone(events), self.stats.queue(queue));
        let index = self.workers.len() - 1;
        let Some(worker) = self.workers.last() else {
            return Err(WorkerGone.into());
        };
        let hide_partitions = !config.partitions && !self.info.flags().contains(Flags::NO_AUTO_PART_SCAN);
        let failed = move |source| AddError::Queue { queue, source };
        let file = file.try_clone().map_err(failed)?;
        let (disk, shared) = (Arc::clone(&self.disk), Arc::clone(&state));
        let (depth, bytes, transport) = (self.info.queue_depth, self.info.max_io_buf_bytes, self.transport);
        let first_slot = first_slot(queue, config.queues_per_worker, depth);
        // The driver keeps what `add` gave it.
        let from = u32::try_from(self.info.ublksrv_flags).unwrap_or(u32::MAX);
        let zero_copy_from = (transport == Transport::ZeroCopy).then_some(from);
        let started = worker.run(move |worker| -> Result<FrontendId, AddError> {
            become_io_flusher();
            if hide_partitions {
                give_up_admin();
            }
            let cx = worker.context().clone();
            let disk = disk.open_queue(&cx)?;
            let channel = KernelChannel::open(&cx, file, queue, depth, transport, bytes, first_slot);
            let channel = channel.map_err(failed)?;
            let frontend = UblkQueue::start(&cx, channel, disk, depth, bytes, zero_copy_from, shared);
            worker.add(Box::new(frontend), Vec::new()).map_err(failed)
        });
        let id = started??;
        self.queues.push(Queue {
            state,
            worker: index,
            id,
        });
        Ok(())
    }

    /// The device's number.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.info.dev_id
    }

    /// Returns the driver's information about the device.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Returns the transport of request data.
    #[must_use]
    pub fn transport(&self) -> Transport {
        self.transport
    }

    /// The threads that serve it.
    #[must_use]
    pub fn workers(&self) -> usize {
        self.workers.len()
    }

    /// Returns its counters.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let mut sum = Counts::default();
        for queue in &self.queues {
            sum += queue.state.counts();
        }
        sum
    }

    /// Returns the statistics of its queues.
    #[must_use]
    pub fn stats(&self) -> &Arc<DiskStats> {
        &self.stats
    }

    /// Returns true if the driver has ended every tag: the device was stopped.
    #[must_use]
    pub fn is_ended(&self) -> bool {
        self.queues.iter().all(|queue| queue.state.tags() == 0)
    }

    /// Returns true if the driver can change the size of a device that is served.
    #[must_use]
    pub fn can_resize(&self) -> bool {
        self.info.flags().contains(Flags::UPDATE_SIZE)
    }

    /// Makes the disk larger, and then the device as large as the disk, which may have become smaller.
    ///
    /// # Errors
    ///
    /// [`ResizeError`].
    pub fn resize(&self, control: &mut Control, size_bytes: u64) -> Result<u64, ResizeError> {
        if !self.can_resize() {
            return Err(ResizeError::Unsupported);
        }
        let disk = Arc::clone(&self.disk);
        if let Some(worker) = self.workers.first() {
            let resized = worker.block_on(move |cx| disk.resize(cx, size_bytes))?;
            resized.map_err(|source| ResizeError::Disk { size_bytes, source })?;
        }
        let size_bytes = self.disk.info().size_bytes;
        control.update_size(self.info.dev_id, size_bytes)?;
        Ok(size_bytes)
    }

    /// Stops devices, drains their requests, deletes them and closes their disks as a clean shutdown should. They are stopped
    /// and deleted at once, because the driver mostly waits in each. A device that another process has stopped is
    /// deleted by that one.
    ///
    /// Returns the results in the order of `devices`: [`CloseError`], the first of a device if it has several.
    /// [`CloseError::Undrained`] leaves requests that only the end of this process takes away.
    pub fn close_all(devices: Vec<Self>, control: &mut Control) -> Vec<Result<(), CloseError>> {
        let ours: Vec<u32> = devices
            .iter()
            .filter(|device| !device.is_ended())
            .map(Self::id)
            .collect();
        let mut results: BTreeMap<u32, Result<(), CloseError>> = ours
            .iter()
            .copied()
            .zip(control.stop_all(&ours))
            .map(|(id, stopped)| (id, unless_gone(stopped).map_err(CloseError::from)))
            .collect();
        let ids: Vec<u32> = devices.iter().map(Self::id).collect();
        let mut undrained = Vec::new();
        for device in devices {
            let id = device.id();
            let ended = device.end();
            if let Err(CloseError::Undrained { .. }) = &ended {
                undrained.push(id);
                results.insert(id, ended);
                continue;
            }
            let first = results.remove(&id).unwrap_or(Ok(()));
            results.insert(id, first.and(ended));
        }
        // Nothing of ours holds their character devices any more.
        let drained = |id: &u32| !undrained.contains(id);
        let ours: Vec<u32> = ours.into_iter().filter(drained).collect();
        for (&id, deleted) in ours.iter().zip(control.delete_all(&ours)) {
            let deleted = unless_gone(deleted).map_err(CloseError::from);
            let first = results.remove(&id).unwrap_or(Ok(()));
            results.insert(id, first.and(deleted));
        }
        ids.iter()
            .map(|id| results.remove(id).unwrap_or(Ok(())))
            .collect()
    }

    /// Drains the requests of a stopped device, closes its disk, and lets go of its character device.
    fn end(self) -> Result<(), CloseError> {
        let disk = Arc::clone(&self.disk);
        self.drain()?;
        let Some(worker) = self.workers.first() else {
            return Ok(());
        };
        let closed = worker.block_on(move |cx| disk.close(cx));
        closed.map_err(CloseError::from).and_then(|disk| Ok(disk?))
    }

    /// Waits until the driver has ended all tags and the queues are gone.
    fn drain(&self) -> Result<(), CloseError> {
        let deadline = Instant::now() + DRAIN;
        // Whoever waits for the host's space would wait for ever.
        let _held = self.disk.hold_off();
        while !self.is_ended() {
            if Instant::now() > deadline {
                let device = self.info.dev_id;
                return Err(CloseError::Undrained { device });
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        for queue in &self.queues {
            if let Some(worker) = self.workers.get(queue.worker) {
                worker.remove(queue.id)?;
            }
        }
        Ok(())
    }

    /// Lets go of a device that does not serve yet.
    fn take_down(self, control: &mut Control) {
        // Ends the tags that wait. A device in recovery is not ours to stop: the end of the process ends them.
        if self.info.state() == DeviceState::Dead
            && let Err(error) = control.stop(self.info.dev_id)
        {
            tracing::warn!(%error, "cannot stop the device");
        }
        let deadline = Instant::now() + Duration::from_secs(5);
        while self.info.state() == DeviceState::Dead && !self.is_ended() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Treats a device that another process has deleted meanwhile as deleted.
fn unless_gone(result: Result<(), CommandError>) -> Result<(), CommandError> {
    match result {
        Err(error) if error.errno() == Some(libc::ENODEV) => Ok(()),
        result => result,
    }
}

/// Opens the character device, whose node may take a moment, and the end of its last server as long as `patience`.
fn open_char(device: u32, patience: Duration) -> Result<OwnedFd, AddError> {
    let path = char_path(device);
    let began = Instant::now();
    loop {
        let source = match OpenOptions::new().read(true).write(true).open(&path) {
            Ok(file) => return Ok(file.into()),
            Err(source) => source,
        };
        let patience = match source.raw_os_error() {
            Some(libc::ENOENT | libc::EACCES) => NODE,
            Some(libc::EBUSY) => patience,
            _ => Duration::ZERO,
        };
        if began.elapsed() >= patience {
            return Err(AddError::CharDevice { path, source });
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
