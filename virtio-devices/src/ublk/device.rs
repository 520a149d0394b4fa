//! One device: created, served, stopped and deleted, or recovered from a dead server.
//!
//! Invariants: a failure during set-up is undone, so that no incomplete device remains. A device that outlives its servers is
//! left as it was found. A ring in which the driver waits is closed only by the exit of the process.

mod hand_over;
mod park;

use std::fs::OpenOptions;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use block::ring::RingKind;
use block::worker::{FrontendId, StartWorkerError, WorkerConfig, WorkerGone, WorkerHandle};
use block::{Disk, IoError, OpenQueueError};

use super::abi::{
    ANY_DEVICE, DeviceInfo, Flags, IO_BYTES_MAX, QUEUE_DEPTH_MAX, QUEUES_MAX, REGISTERED_BUFFERS_MAX, State,
};
use super::channel::{KernelChannel, Transport, become_io_flusher, finish_fetches};
use super::control::{CommandError, Control, char_path};
use super::params::{self, ParamsError};
use super::queue::{Counts, Events, QueueState, UblkQueue};
pub use hand_over::{HandOverError, Settling, Step, parting_duty};

/// The longest time that queues may take to drain when their device was stopped.
const DRAIN: Duration = Duration::from_secs(30);
/// The longest wait for the character device's node.
const NODE: Duration = Duration::from_secs(5);
/// The longest time that the driver may take to notice that a server is gone: requests that it waits for in vain time
/// out.
const NOTICE: Duration = Duration::from_secs(90);

/// The length in bytes from which on [`TransportChoice::Auto`] serves requests by their registered pages: every request. The
/// driver registers the pages of all of them, and a copy on top of that saves nothing: measured in
/// docs/decisions/zero-copy.md.
pub const ZERO_COPY_FROM: u32 = 0;

/// The requested transport of a device.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum TransportChoice {
    /// The best that the kernel has.
    #[default]
    Auto,
    /// This one, or an error.
    Only(Transport),
}

/// The policy for I/O while a device has no server.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Recovery {
    /// It waits for the next server, and what the old one had taken is done again.
    #[default]
    Reissue,
    /// It waits for the next server; what the old one had taken fails.
    Wait,
    /// It fails until there is a next server.
    Fail,
    /// The device goes with its server.
    Off,
}

impl Recovery {
    /// Returns the flags with which a device is created.
    #[must_use]
    pub fn flags(self) -> Flags {
        match self {
            Self::Reissue => Flags::USER_RECOVERY | Flags::USER_RECOVERY_REISSUE,
            Self::Wait => Flags::USER_RECOVERY,
            Self::Fail => Flags::USER_RECOVERY | Flags::USER_RECOVERY_FAIL_IO,
            Self::Off => Flags::empty(),
        }
    }

    /// Returns the policy of a device with these flags.
    #[must_use]
    pub fn of(flags: Flags) -> Self {
        if !flags.contains(Flags::USER_RECOVERY) {
            Self::Off
        } else if flags.contains(Flags::USER_RECOVERY_REISSUE) {
            Self::Reissue
        } else if flags.contains(Flags::USER_RECOVERY_FAIL_IO) {
            Self::Fail
        } else {
            Self::Wait
        }
    }
}

/// The configuration of a device.
#[derive(Clone, Debug)]
pub struct UblkConfig {
    /// The disk's name, for logs.
    pub name: String,
    /// The device's number; any if absent.
    pub id: Option<u32>,
    /// The number of queues, 1 to 4096. The driver makes no more than there are CPUs.
    pub num_queues: u16,
    /// The depth of each queue, 1 to 4096.
    pub queue_depth: u16,
    /// The most bytes a request moves: a power of two, 4 KiB to 32 MiB.
    pub io_bytes_max: u32,
    /// The transfer of request data.
    pub transport: TransportChoice,
    /// The length in bytes from which on [`TransportChoice::Auto`] serves requests without copies.
    pub zero_copy_from: u32,
    /// The most places for registered buffers that a worker's ring has, up to 16384. Requests under tags for which
    /// none is left are copied.
    pub registered_buffers_max: u16,
    /// The policy for I/O after this server is gone.
    pub recovery: Recovery,
    /// The number of queues that share a worker thread; at least 1.
    pub queues_per_worker: u16,
    /// The settings of the queues' workers, in order; [`UblkConfig::default_worker`] for a queue without an entry. Queues
    /// that share a worker share their CPUs, and have the other settings of the first. A queue without CPUs has those whose
    /// requests come to it. The device sets name, ring, depth and registered buffers itself.
    pub workers: Vec<WorkerConfig>,
    /// True if the host scans for partitions. Leave it off for contents that a guest wrote.
    pub partitions: bool,
}

impl UblkConfig {
    /// Returns the settings of a worker that was given none. It does not poll: requests arrive as ring completions, which end
    /// the system call that submitted its answers, and the host's program that makes the next request may need the CPU.
    #[must_use]
    pub fn default_worker() -> WorkerConfig {
        WorkerConfig {
            poll_max: Duration::ZERO,
            ..WorkerConfig::default()
        }
    }
}

impl Default for UblkConfig {
    fn default() -> Self {
        Self {
            name: "disk".to_owned(),
            id: None,
            num_queues: 1,
            queue_depth: 128,
            io_bytes_max: 1 << 20,
            transport: TransportChoice::Auto,
            zero_copy_from: ZERO_COPY_FROM,
            registered_buffers_max: REGISTERED_BUFFERS_MAX,
            recovery: Recovery::Reissue,
            queues_per_worker: 1,
            workers: Vec::new(),
            partitions: false,
        }
    }
}

/// An error of creating or recovering a device. No new device is left behind, except with [`AddError::CleanUp`].
#[derive(Debug, thiserror::Error)]
pub enum AddError {
    /// A number is out of range.
    #[error("{what} is {found}; expected {expected}")]
    Range {
        /// The name of the value.
        what: &'static str,
        /// The value.
        found: u64,
        /// The permitted range.
        expected: &'static str,
    },
    /// The kernel has not what was asked for by name.
    #[error("this kernel's ublk driver has no {what} ({since}); see `ringdisk ublk features`")]
    Unsupported {
        /// The feature.
        what: &'static str,
        /// The kernel version that introduced it.
        since: &'static str,
    },
    /// This takes rights that the process has not.
    #[error(
        "an unprivileged user's device supports --transport copy only, not {0}; leave --transport out, or run as root"
    )]
    Rights(Transport),
    /// The driver refused a command.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// The driver dropped a flag.
    #[error("the driver ignored the requested flags {0:?}")]
    Flags(Flags),
    /// The driver dropped a parameter.
    #[error(transparent)]
    Params(#[from] ParamsError),
    /// The character device cannot be used.
    #[error("cannot open {path}{}", owner(source))]
    CharDevice {
        /// Its path.
        path: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A worker could not be started.
    #[error("cannot start the worker of queue {queue}")]
    Worker {
        /// The queue.
        queue: u16,
        /// The cause.
        #[source]
        source: StartWorkerError,
    },
    /// A queue could not be started.
    #[error("cannot start queue {queue}")]
    Queue {
        /// The queue.
        queue: u16,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The disk cannot be used on a worker.
    #[error(transparent)]
    Disk(#[from] OpenQueueError),
    /// A worker ended.
    #[error(transparent)]
    Gone(#[from] WorkerGone),
    /// The device to recover is not in need of it.
    #[error("/dev/ublkb{device} is {state}; only a device whose server is gone can be recovered")]
    NotRecoverable {
        /// The device.
        device: u32,
        /// Its state.
        state: State,
    },
    /// A recovery of the device has stopped half way, and cannot be brought to where another one may begin.
    #[error("cannot clean up an interrupted recovery of /dev/ublkb{device}")]
    HalfRecovered {
        /// The device.
        device: u32,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The device has another size than the disk.
    #[error("/dev/ublkb{device} has {device_bytes} bytes, and the disk {disk_bytes}: is it the right image?")]
    Size {
        /// The device.
        device: u32,
        /// Its size.
        device_bytes: u64,
        /// The disk's.
        disk_bytes: u64,
    },
    /// It failed, and then so did taking it down.
    #[error("{failure}; and /dev/ublkb{device} cannot be removed: {clean_up}")]
    CleanUp {
        /// The device.
        device: u32,
        /// The first failure.
        failure: Box<AddError>,
        /// And then.
        clean_up: CommandError,
    },
}

/// An error of closing a device.
#[derive(Debug, thiserror::Error)]
pub enum CloseError {
    /// A queue holds requests that do not end.
    #[error("the queues of /dev/ublkb{device} have not drained in {} s", DRAIN.as_secs())]
    Undrained {
        /// The device.
        device: u32,
    },
    /// The driver refused a command.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// A worker has ended.
    #[error(transparent)]
    Worker(#[from] WorkerGone),
    /// The disk says so.
    #[error("cannot close the disk cleanly")]
    Disk(#[from] IoError),
}

/// An error of a resize; the device keeps its size.
#[derive(Debug, thiserror::Error)]
pub enum ResizeError {
    /// The driver cannot change sizes.
    #[error("this kernel's ublk driver cannot resize a device that is served; it needs Linux 6.16")]
    Unsupported,
    /// The disk does not grow so.
    #[error("cannot resize the disk to {size_bytes} bytes")]
    Disk {
        /// The size asked for.
        size_bytes: u64,
        /// The cause.
        #[source]
        source: IoError,
    },
    /// The disk has grown, and the driver refused.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// A worker has ended.
    #[error(transparent)]
    Worker(#[from] WorkerGone),
}

/// A device and those who serve it.
///
/// If it is dropped before the driver has ended it, by [`UblkDevice::close`] or another process's command, it stays
/// with this process: requests are no longer answered, its threads and the lock of the disk remain, and the driver
/// takes the exit of the process for the death of its server.
#[derive(Debug)]
pub struct UblkDevice {
    info: DeviceInfo,
    transport: Transport,
    disk: Arc<dyn Disk>,
    queues: Vec<Queue>,
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

fn check(config: &UblkConfig) -> Result<(), AddError> {
    let range = |what, found: u64, expected, fits: bool| {
        let error = AddError::Range {
            what,
            found,
            expected,
        };
        if fits { Ok(()) } else { Err(error) }
    };
    let (queues, depth, bytes) = (config.num_queues, config.queue_depth, config.io_bytes_max);
    let few = (1..=QUEUES_MAX).contains(&queues);
    range("the number of queues", queues.into(), "1 to 4096", few)?;
    let short = (1..=QUEUE_DEPTH_MAX).contains(&depth);
    range("the queue's depth", depth.into(), "1 to 4096", short)?;
    let small = bytes.is_power_of_two() && (4096..=IO_BYTES_MAX).contains(&bytes);
    let expected = "a power of two from 4096 to 33554432";
    range("the largest request", bytes.into(), expected, small)
}

/// The places that the ring of a worker with so many tags needs.
fn places(tags: u32, config: &UblkConfig) -> u16 {
    let most = config.registered_buffers_max.min(REGISTERED_BUFFERS_MAX);
    u16::try_from(tags).unwrap_or(u16::MAX).min(most)
}

/// The first of the places that the tags of `queue` have in the table of its worker's ring, if so many queues of `depth`
/// tags share a worker.
#[must_use]
pub fn first_place(queue: u16, queues_per_worker: u16, depth: u16) -> u16 {
    (queue % queues_per_worker.max(1)).saturating_mul(depth)
}

/// The transport that the driver's features and the choice come to.
fn choose(choice: TransportChoice, features: Flags) -> Result<Transport, AddError> {
    let unsupported = |what, since| Err(AddError::Unsupported { what, since });
    match choice {
        TransportChoice::Auto => Ok(Transport::of(features)),
        TransportChoice::Only(transport) if features.contains(transport.flags()) => Ok(transport),
        TransportChoice::Only(Transport::ZeroCopy) => unsupported("zero copy", "Linux 6.16"),
        TransportChoice::Only(_) => unsupported("user copy", "Linux 6.5"),
    }
}

impl UblkDevice {
    /// Makes a device of `disk` and serves it. What happens to it later comes through `events`.
    ///
    /// # Errors
    ///
    /// [`AddError`]; no device is left behind then.
    pub fn add(
        control: &mut Control,
        disk: Arc<dyn Disk>,
        config: &UblkConfig,
        events: &Events,
    ) -> Result<Self, AddError> {
        check(config)?;
        let features = control.features()?;
        let owned = !may_administer();
        let transport = match (owned, config.transport) {
            (false, choice) => choose(choice, features)?,
            (true, _) if !features.contains(Flags::UNPRIVILEGED_DEV) => {
                return Err(AddError::Unsupported {
                    what: "devices for users without rights",
                    since: "Linux 6.3",
                });
            }
            // The driver trusts nobody else with the memory of requests.
            (true, TransportChoice::Auto | TransportChoice::Only(Transport::Copy)) => Transport::Copy,
            (true, TransportChoice::Only(transport)) => return Err(AddError::Rights(transport)),
        };
        // Nor with the time of those who wait for a server.
        let recovery = if owned { Recovery::Off } else { config.recovery };
        let recovery = recovery.flags();
        if !owned && config.recovery == Recovery::Fail && !features.contains(Flags::USER_RECOVERY_FAIL_IO) {
            return Err(AddError::Unsupported {
                what: "recovery=fail",
                since: "Linux 6.13",
            });
        }
        let mut wanted = recovery | Flags::CMD_IOCTL_ENCODE | transport.flags();
        if owned {
            wanted |= Flags::UNPRIVILEGED_DEV;
        }
        // What a kernel may lack without anybody's loss.
        let mut welcome = Flags::UPDATE_SIZE | Flags::QUIESCE | Flags::SAFE_STOP_DEV;
        if !config.partitions {
            welcome |= Flags::NO_AUTO_PART_SCAN;
        }
        let quiesce = if recovery.is_empty() {
            Flags::QUIESCE
        } else {
            Flags::empty()
        };
        wanted |= features & welcome & !quiesce;
        let asked = DeviceInfo {
            nr_hw_queues: config.num_queues,
            queue_depth: config.queue_depth,
            max_io_buf_bytes: config.io_bytes_max,
            dev_id: config.id.unwrap_or(ANY_DEVICE),
            ublksrv_pid: -1,
            flags: wanted.bits(),
            // For the next server, which is to do as this one.
            ublksrv_flags: match config.transport {
                TransportChoice::Auto => config.zero_copy_from.into(),
                TransportChoice::Only(_) => 0,
            },
            ..DeviceInfo::default()
        };
        let info = control.add(&asked)?;
        let device = info.dev_id;
        match Self::bring_up(control, info, wanted, transport, disk, config, events) {
            Ok(device) => {
                tracing::info!(disk = %config.name, device = info.dev_id, %transport, flags = ?info.flags(), "live");
                Ok(device)
            }
            Err(failure) => match control.delete(device) {
                Ok(()) => Err(failure),
                Err(clean_up) => Err(AddError::CleanUp {
                    device,
                    failure: Box::new(failure),
                    clean_up,
                }),
            },
        }
    }

    /// Describes a device that was just made, serves it, and makes its disk appear.
    fn bring_up(
        control: &mut Control,
        info: DeviceInfo,
        wanted: Flags,
        transport: Transport,
        disk: Arc<dyn Disk>,
        config: &UblkConfig,
        events: &Events,
    ) -> Result<Self, AddError> {
        let dropped = wanted & !info.flags();
        if !dropped.is_empty() {
            return Err(AddError::Flags(dropped));
        }
        if info.flags().contains(Flags::UNPRIVILEGED_DEV) {
            // Every command looks at it, and it becomes the user's a moment later.
            drop(open_char(info.dev_id, NODE)?);
        }
        let told = params::describe(&disk.info(), info.max_io_buf_bytes);
        params::verify(&told, &control.set_params(info.dev_id, &told)?)?;
        let served = Self::serve(control, info, transport, disk, config, events)?;
        if let Err(error) = control.start(info.dev_id) {
            served.take_down(control);
            return Err(error.into());
        }
        Ok(served)
    }

    /// Begins to serve a device whose server is gone, with the same disk. The image must be locked: then the old server's
    /// I/O has ended. Waits for the driver to notice the death. The number of queues, their depth and the transport are
    /// the device's, whatever `config` says.
    ///
    /// I/O does not start before [`RecoveringDevice::finish`]. To recover several devices, call this for all of them
    /// first: the I/O of one would delay the others.
    ///
    /// # Errors
    ///
    /// [`AddError`]; the device waits for another server then.
    pub fn recover(
        control: &mut Control,
        device: u32,
        disk: Arc<dyn Disk>,
        config: &UblkConfig,
        events: &Events,
    ) -> Result<RecoveringDevice, AddError> {
        let info = control.info(device)?;
        if info.state() == State::Dead || !info.flags().contains(Flags::USER_RECOVERY) {
            let state = info.state();
            return Err(AddError::NotRecoverable { device, state });
        }
        let params = control.params(device)?;
        let device_bytes = params.basic.dev_sectors * 512;
        let disk_bytes = disk.info().size_bytes;
        if device_bytes != disk_bytes {
            return Err(AddError::Size {
                device,
                device_bytes,
                disk_bytes,
            });
        }
        let noticed = Instant::now() + NOTICE;
        // Drivers before 6.15, which have not this either, follow null pointers where a recovery has stopped half way. Later ones
        // must be spared: they let requests flow as soon as each queue has a server.
        if !control.features()?.contains(Flags::SUPPORT_ZERO_COPY) {
            let file = open_char(device, NOTICE)?;
            let unserved =
                finish_fetches(file, &info).map_err(|source| AddError::HalfRecovered { device, source })?;
            if unserved > 0 {
                tracing::info!(device, unserved, "cleaning up an interrupted recovery");
            }
        }
        control.start_recovery(device, noticed.saturating_duration_since(Instant::now()))?;
        let transport = Transport::of(info.flags());
        let served = Self::serve(control, info, transport, disk, config, events)?;
        let name = config.name.clone();
        Ok(RecoveringDevice { served, name })
    }

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
                Transport::ZeroCopy => places(tags, config),
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
        let state = QueueState::new(self.info.dev_id, Arc::clone(events));
        let index = self.workers.len() - 1;
        let Some(worker) = self.workers.last() else {
            return Err(WorkerGone.into());
        };
        let hide_partitions = !config.partitions && !self.info.flags().contains(Flags::NO_AUTO_PART_SCAN);
        let failed = move |source| AddError::Queue { queue, source };
        let file = file.try_clone().map_err(failed)?;
        let (disk, shared) = (Arc::clone(&self.disk), Arc::clone(&state));
        let (depth, bytes, transport) = (self.info.queue_depth, self.info.max_io_buf_bytes, self.transport);
        let first_place = first_place(queue, config.queues_per_worker, depth);
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
            let channel = KernelChannel::open(&cx, file, queue, depth, transport, bytes, first_place);
            let channel = channel.map_err(failed)?;
            let frontend = UblkQueue::start(channel, disk, depth, bytes, zero_copy_from, shared);
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

    /// Returns true if the driver has ended every tag: the device was stopped.
    #[must_use]
    pub fn is_ended(&self) -> bool {
        self.queues.iter().all(|queue| queue.state.tags() == 0)
    }

    /// Makes the disk larger, and then the device.
    ///
    /// # Errors
    ///
    /// [`ResizeError`].
    pub fn resize(&self, control: &mut Control, size_bytes: u64) -> Result<u64, ResizeError> {
        if !self.info.flags().contains(Flags::UPDATE_SIZE) {
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

    /// Stops the device, drains its requests, deletes it and closes the disk as a clean shutdown should. A device
    /// that another process has stopped is deleted by that one.
    ///
    /// # Errors
    ///
    /// [`CloseError`], the first if there are several. [`CloseError::Undrained`] leaves requests that only the end of
    /// this process takes away.
    pub fn close(self, control: &mut Control) -> Result<(), CloseError> {
        let stopped_by_others = self.is_ended();
        let mut first = None;
        if !stopped_by_others && let Err(error) = unless_gone(control.stop(self.info.dev_id)) {
            first.get_or_insert(CloseError::from(error));
        }
        let disk = Arc::clone(&self.disk);
        let device = self.info.dev_id;
        self.drain()?;
        if let Some(worker) = self.workers.first() {
            let closed = worker.block_on(move |cx| disk.close(cx));
            let closed = closed.map_err(CloseError::from).and_then(|disk| Ok(disk?));
            if let Err(error) = closed {
                first.get_or_insert(error);
            }
        }
        // The last hold on the character device.
        drop(self);
        if !stopped_by_others && let Err(error) = unless_gone(control.delete(device)) {
            first.get_or_insert(error.into());
        }
        first.map_or(Ok(()), Err)
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
        if self.info.state() == State::Dead
            && let Err(error) = control.stop(self.info.dev_id)
        {
            tracing::warn!(%error, "cannot stop the device");
        }
        let deadline = Instant::now() + Duration::from_secs(5);
        while self.info.state() == State::Dead && !self.is_ended() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// A device that has a server again, whose queues wait for requests. I/O to it waits still.
#[derive(Debug)]
#[must_use = "I/O waits until this is finished"]
pub struct RecoveringDevice {
    served: UblkDevice,
    name: String,
}

impl RecoveringDevice {
    /// Lets I/O flow, what the old server had taken first. The answers are in the order of `devices`: [`AddError`] for each
    /// that waits for another server.
    pub fn finish(devices: Vec<Self>, control: &mut Control) -> Vec<Result<UblkDevice, AddError>> {
        let ids: Vec<u32> = devices.iter().map(|device| device.served.id()).collect();
        // All at once: the I/O of the first would take the time of the others.
        let ended = control.end_recovery(&ids);
        let each = devices.into_iter().zip(ended).map(|(device, ended)| {
            let Self { served, name } = device;
            ended?;
            tracing::info!(disk = %name, device = served.id(), transport = %served.transport, "recovered");
            Ok(served)
        });
        each.collect()
    }
}

/// Drops `CAP_SYS_ADMIN` of the calling thread. A driver without a flag against partition scans does not scan if the
/// serving threads lack this capability.
fn give_up_admin() {
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
    let given_up = capabilities(None).and_then(|mut sets| {
        sets.effective.remove(CapabilitySet::SYS_ADMIN);
        set_capabilities(None, sets)
    });
    if let Err(error) = given_up {
        tracing::warn!(%error, "cannot drop CAP_SYS_ADMIN: the host may scan this disk for partitions");
    }
}

/// Returns true if the calling thread may create privileged devices.
#[must_use]
pub fn may_administer() -> bool {
    use rustix::thread::{CapabilitySet, capabilities};
    capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN))
}

/// Returns advice about a device of another user, in brackets.
fn owner(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EACCES) => " (run as root, or install the udev rules for users: docs/howto-ublk.md)",
        _ => "",
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
