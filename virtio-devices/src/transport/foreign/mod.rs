//! A device whose queues run in another program: any vhost-user-blk backend, ours or another.
//!
//! The backend gets the guest's memory, the eventfd that the guest's kicks signal and the one that raises the queue's
//! interrupt; only set-up passes through this process. Spec: vhost-user, "Front-end message types".
//!
//! ```text
//! guest ──kick──▶ ioeventfd ──▶ backend ──▶ disk      registers ──▶ this process ──messages──▶ backend
//!       ◀──MSI──── irqfd ◀──────┘
//! ```
//!
//! Invariants: before a queue is started again, the backend is asked where it stopped; a guest sees only those features of
//! the backend that its transport supports; a backend that exits or hangs costs the guest its disk and nothing else.

mod connector;
mod link;
#[cfg(test)]
mod tests;

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use block::IoError;
use parking_lot::Mutex;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH,
    VIRTIO_BLK_F_GEOMETRY, VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX,
    VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use super::device::{Device, DeviceError, QueueInterrupt, QueueStart};
use super::pci::{QUEUES_MAX, Shared, signal};
use super::{PlugError, ResizeError, VhostUserDiskConfig};
use crate::block::{CONFIG_BYTES, WRITEBACK_OFFSET};
use crate::connect::Cancel;
use crate::vhost_user::event::event_of;
use crate::virtqueue::RingAddresses;
use connector::{Agreed, Ask, Connector, agree, agree_after};
pub use link::BackendError;
use link::{Connection, Link, SETUP_PATIENCE};

/// `VHOST_USER_F_PROTOCOL_FEATURES`.
const PROTOCOL_FEATURES: u64 = 1 << 30;
/// The offset of the number of queues in the configuration space: virtio 1.2, 5.2.4.
const QUEUES_OFFSET: usize = 34;

/// The features of a backend that a guest may have: those that ask of the transport only what is here.
fn passed_on() -> u64 {
    let bits = [
        VIRTIO_F_VERSION_1,
        VIRTIO_RING_F_EVENT_IDX,
        VIRTIO_RING_F_INDIRECT_DESC,
        VIRTIO_BLK_F_SIZE_MAX,
        VIRTIO_BLK_F_SEG_MAX,
        VIRTIO_BLK_F_GEOMETRY,
        VIRTIO_BLK_F_RO,
        VIRTIO_BLK_F_BLK_SIZE,
        VIRTIO_BLK_F_FLUSH,
        VIRTIO_BLK_F_TOPOLOGY,
        VIRTIO_BLK_F_CONFIG_WCE,
        VIRTIO_BLK_F_MQ,
        VIRTIO_BLK_F_DISCARD,
        VIRTIO_BLK_F_WRITE_ZEROES,
    ];
    bits.iter().fold(0, |set, bit| set | 1 << bit)
}

type Config = [u8; CONFIG_BYTES];

/// The device.
#[derive(Debug)]
pub(super) struct Foreign {
    // Ends first: it uses the state.
    connector: Connector,
    state: Arc<Mutex<State>>,
}

/// A queue that runs, with all it takes to start it.
#[derive(Debug)]
struct Running {
    size: u16,
    addresses: RingAddresses,
    base: u16,
    kick: OwnedFd,
    interrupt: QueueInterrupt,
}

/// The state of the device towards guest and backend, and the connection.
pub(super) struct State {
    connection: Connection,
    memory: GuestMemoryMmap,
    /// The most entries of a queue.
    queue_size: u16,
    /// The function, once there is one, and the thread that waits for a lost backend.
    function: Option<(Arc<Shared>, Sender<Ask>)>,
    features: u64,
    /// The configuration that the driver reads, with the cache mode that it has chosen.
    config: Config,
    /// The cache mode that the backend had in the beginning.
    writeback: u8,
    /// The cache mode that the backend has.
    writeback_there: u8,
    /// The cache mode that the driver has chosen; each backend gets it before a queue runs.
    chosen: Option<u8>,
    /// True if the backend records requests in flight in memory of ours.
    has_inflight: bool,
    inflight: Option<(VhostUserInflight, File)>,
    /// True if the backend knows the driver's features and the memory.
    is_set_up: bool,
    /// The features that the driver has accepted.
    accepted: u64,
    running: Vec<Option<Running>>,
    /// Signalled instead of an interrupt that the driver has not chosen.
    nobody: OwnedFd,
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("State")
            .field("connection", &self.connection)
            .field("running", &self.running)
            .finish_non_exhaustive()
    }
}

/// A vhost-user-blk backend that has agreed to be a machine's disk, and is not in one yet.
///
/// Connecting may take seconds, so it comes before anything of the machine is locked.
#[derive(Debug)]
pub struct VhostUserBackend {
    agreed: Agreed,
    pub(super) config: VhostUserDiskConfig,
    patience: Duration,
}

impl VhostUserBackend {
    /// Connects to the backend, and agrees with it about everything but the driver's features. Takes 5 s at most, or
    /// until `cancel` says so.
    ///
    /// # Errors
    ///
    /// [`PlugError`].
    pub fn connect(config: VhostUserDiskConfig, cancel: &Cancel) -> Result<Self, PlugError> {
        let queues = config.num_queues;
        if queues == 0 || queues > QUEUES_MAX {
            let workers = usize::from(queues);
            return Err(PlugError::Queues { queues, workers });
        }
        Ok(Self::connect_within(SETUP_PATIENCE, config, cancel)?)
    }

    fn connect_within(
        patience: Duration,
        config: VhostUserDiskConfig,
        cancel: &Cancel,
    ) -> Result<Self, BackendError> {
        Ok(Self {
            agreed: match &config.on_start {
                Some(hook) => agree_after(hook, &config.socket, config.num_queues, patience, cancel)?,
                None => agree(&config.socket, config.num_queues, patience, cancel)?,
            },
            config,
            patience,
        })
    }
}

impl Foreign {
    /// The device that `backend` is, for a guest with this memory.
    pub(super) fn new(backend: VhostUserBackend, memory: GuestMemoryMmap) -> Result<Self, BackendError> {
        let VhostUserBackend {
            agreed,
            config,
            patience,
        } = backend;
        let state = Arc::new(Mutex::new(State {
            connection: agreed.connection,
            memory,
            queue_size: config.queue_size,
            function: None,
            features: agreed.features,
            writeback: agreed.config[WRITEBACK_OFFSET],
            writeback_there: agreed.config[WRITEBACK_OFFSET],
            chosen: None,
            config: agreed.config,
            has_inflight: agreed.inflight,
            inflight: None,
            is_set_up: false,
            accepted: 0,
            running: (0..config.num_queues).map(|_| None).collect(),
            nobody: block::task::eventfd().map_err(BackendError::Host)?,
        }));
        Ok(Self {
            connector: Connector::start(&state, &config.socket, patience, config.on_start)?,
            state,
        })
    }

    /// Reports events of the backend to `function` from now on.
    pub(super) fn serve(self, function: Arc<Shared>) -> Self {
        {
            let mut state = self.state.lock();
            state.function = Some((function, self.connector.asked().clone()));
            state.serve();
        }
        self
    }
}

impl State {
    fn link(&self) -> &Link {
        self.connection.link()
    }

    fn queues(&self) -> u16 {
        self.running.len() as u16
    }

    /// As [`Told::admit`](crate::block::Told::admit), of the function's lines.
    fn admit(&self) -> Option<Option<u64>> {
        let function = self.function.as_ref();
        function.map_or(Some(None), |(function, _)| function.told.admit())
    }

    /// Returns true if the backend was lost and is being waited for, without the guest's knowledge.
    fn is_awaited(&self) -> bool {
        self.has_inflight && self.link().is_gone()
    }

    /// Ignores a failed message if the backend is lost and awaited: the next one gets the whole state.
    fn unless_awaited(&self, told: Result<(), BackendError>) -> Result<(), DeviceError> {
        match told {
            Err(_) if self.is_awaited() => Ok(()),
            told => Ok(told?),
        }
    }

    /// Passes the receivers of events to the connection.
    fn serve(&self) {
        if let Some((function, keeper)) = &self.function {
            let keeper = self.has_inflight.then_some(keeper);
            self.link().serve(function, keeper);
        }
    }

    /// Tells the backend which features the driver took, where the guest's memory is, where to keep note of what is in
    /// flight, and the cache mode that the driver chose.
    fn set_up(&mut self) -> Result<(), BackendError> {
        if self.is_set_up {
            return Ok(());
        }
        let features = self.accepted & self.features | PROTOCOL_FEATURES;
        let regions = self.memory.iter().map(|region| {
            VhostUserMemoryRegionInfo::from_guest_region(region).map_err(|_| BackendError::Memory {
                what: "a region",
                address: region.start_addr().0,
            })
        });
        let regions = regions.collect::<Result<Vec<_>, _>>()?;
        let link = self.connection.link();
        link.tell("SET_FEATURES", |backend| backend.set_features(features))?;
        link.tell("SET_MEM_TABLE", |backend| backend.set_mem_table(&regions))?;
        if self.has_inflight {
            if self.inflight.is_none() {
                let asked = VhostUserInflight::new(0, 0, self.queues(), self.queue_size);
                let given = link.tell("GET_INFLIGHT_FD", |backend| backend.get_inflight_fd(&asked))?;
                self.inflight = Some(given);
            }
            if let Some((shape, file)) = &self.inflight {
                let file = file.as_raw_fd();
                link.tell("SET_INFLIGHT_FD", |backend| backend.set_inflight_fd(shape, file))?;
            }
        }
        if let Some(chosen) = self.chosen {
            self.set_writeback(chosen)?;
        }
        self.is_set_up = true;
        Ok(())
    }

    /// Returns the address in this process of a guest address.
    fn host_address(&self, what: &'static str, address: u64) -> Result<u64, BackendError> {
        let place = self.memory.get_host_address(GuestAddress(address));
        let place = place.map_err(|_| BackendError::Memory { what, address })?;
        Ok(place.addr() as u64)
    }

    fn set_call(&self, queue: usize, interrupt: &QueueInterrupt) -> Result<(), BackendError> {
        let event = event_of(interrupt.event().unwrap_or(self.nobody.as_fd())).map_err(BackendError::Host)?;
        self.link()
            .tell("SET_VRING_CALL", |backend| backend.set_vring_call(queue, &event))
    }

    /// Has the backend run a queue.
    fn start(&mut self, queue: usize, start: &Running) -> Result<(), BackendError> {
        self.set_up()?;
        let (size, base) = (start.size, start.base);
        let rings = VringConfigData {
            queue_max_size: size,
            queue_size: size,
            flags: 0,
            desc_table_addr: self.host_address("a descriptor table", start.addresses.descriptors)?,
            used_ring_addr: self.host_address("a used ring", start.addresses.used)?,
            avail_ring_addr: self.host_address("an available ring", start.addresses.available)?,
            log_addr: None,
        };
        let kick = event_of(start.kick.as_fd()).map_err(BackendError::Host)?;
        let link = self.link();
        let broken = event_of(link.broken()).map_err(BackendError::Host)?;
        link.tell("SET_VRING_NUM", |backend| backend.set_vring_num(queue, size))?;
        link.tell("SET_VRING_BASE", |backend| backend.set_vring_base(queue, base))?;
        link.tell("SET_VRING_ADDR", |backend| backend.set_vring_addr(queue, &rings))?;
        link.tell("SET_VRING_ERR", |backend| backend.set_vring_err(queue, &broken))?;
        self.set_call(queue, &start.interrupt)?;
        link.tell("SET_VRING_KICK", |backend| backend.set_vring_kick(queue, &kick))?;
        link.tell("SET_VRING_ENABLE", |backend| {
            backend.set_vring_enable(queue, true)
        })?;
        // What is available already may have been kicked for before the backend listened.
        signal(start.kick.as_fd());
        Ok(())
    }

    /// Returns the used index that the guest has seen: the position at which a queue starts by default.
    fn used_index(&self, addresses: &RingAddresses) -> u16 {
        let index = GuestAddress(addresses.used.saturating_add(2));
        self.memory.read_obj(index).unwrap_or(0)
    }

    /// Takes over the configuration that the backend says it has.
    fn take_config(&mut self, config: Config) {
        self.config = config;
        self.writeback_there = config[WRITEBACK_OFFSET];
        if let Some(chosen) = self.chosen {
            self.config[WRITEBACK_OFFSET] = chosen;
        }
    }

    fn set_writeback(&mut self, value: u8) -> Result<(), BackendError> {
        self.config[WRITEBACK_OFFSET] = value;
        if self.writeback_there == value {
            return Ok(());
        }
        let (offset, flags) = (WRITEBACK_OFFSET as u32, VhostUserConfigFlags::empty());
        self.link().tell("SET_CONFIG", |backend| {
            backend.set_config(offset, flags, &[value])
        })?;
        self.writeback_there = value;
        Ok(())
    }

    /// Goes on with a new connection where the last one was: with the queues that ran, and what was in flight in them.
    fn go_on(&mut self, agreed: Agreed) -> Result<(), BackendError> {
        let runs = self.running.iter().any(Option::is_some);
        let missing = self.accepted & self.features & !agreed.features;
        if runs && (missing != 0 || !agreed.inflight) {
            self.give_up();
            return Err(BackendError::Lacks {
                socket: self.link().socket().to_owned(),
                what: "the features of its predecessor, so the guest cannot continue",
            });
        }
        let before = self.config;
        self.connection = agreed.connection;
        self.has_inflight = agreed.inflight;
        self.features = agreed.features;
        self.writeback = agreed.config[WRITEBACK_OFFSET];
        self.take_config(agreed.config);
        self.is_set_up = false;
        if runs && let Err(error) = self.run_again() {
            if !self.link().is_gone() {
                // It has refused something, and will again.
                self.serve();
                self.give_up();
            }
            return Err(error);
        }
        // Not before all runs: a loss meanwhile is an error here, and tried again.
        self.serve();
        if let Some((function, _)) = &self.function {
            let (disk, socket) = (&function.name, self.link().socket().display());
            if let Some(held_back) = function.told.admit() {
                tracing::info!(%disk, %socket, held_back, "reconnected to the vhost-user backend");
            }
            if self.config != before {
                function.config_changed();
            }
        }
        Ok(())
    }

    /// Has a backend that knows nothing yet run the queues that ran.
    fn run_again(&mut self) -> Result<(), BackendError> {
        self.set_up()?;
        for queue in 0..self.running.len() {
            let Some(mut running) = self.running.get_mut(queue).and_then(Option::take) else {
                continue;
            };
            // The backend knows better, from its note of what is in flight.
            running.base = self.used_index(&running.addresses);
            let started = self.start(queue, &running);
            if let Some(place) = self.running.get_mut(queue) {
                *place = Some(running);
            }
            started?;
        }
        Ok(())
    }

    /// Tells the guest that only a reset helps.
    fn give_up(&self) {
        if let Some((function, _)) = &self.function {
            function.needs_reset();
        }
    }
}

/// Agrees with a backend about the protocol. Answers the features that a guest may have, whether the backend keeps note
/// of what is in flight, and its configuration.
fn negotiate(connection: &Connection, queues: u16) -> Result<(u64, bool, Config), BackendError> {
    use VhostUserProtocolFeatures as Protocol;
    let link = connection.link();
    let lacks = |what| BackendError::Lacks {
        socket: link.socket().to_owned(),
        what,
    };
    link.tell("SET_OWNER", |backend| backend.set_owner())?;
    let features = link.tell("GET_FEATURES", |backend| backend.get_features())?;
    if features & PROTOCOL_FEATURES == 0 {
        return Err(lacks("VHOST_USER_F_PROTOCOL_FEATURES"));
    }
    if features & 1 << VIRTIO_F_VERSION_1 == 0 {
        return Err(lacks("VIRTIO_F_VERSION_1"));
    }
    let offered = link.tell("GET_PROTOCOL_FEATURES", |backend| backend.get_protocol_features())?;
    if !offered.contains(Protocol::CONFIG) {
        return Err(lacks("VHOST_USER_PROTOCOL_F_CONFIG"));
    }
    let known = Protocol::CONFIG
        | Protocol::MQ
        | Protocol::REPLY_ACK
        | Protocol::BACKEND_REQ
        | Protocol::INFLIGHT_SHMFD;
    let agreed = offered & known;
    link.tell("SET_PROTOCOL_FEATURES", |backend| {
        backend.set_protocol_features(agreed)?;
        if agreed.contains(Protocol::REPLY_ACK) {
            backend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
            link.answer();
        }
        Ok(())
    })?;
    let found = if agreed.contains(Protocol::MQ) {
        link.tell("GET_QUEUE_NUM", |backend| backend.get_queue_num())?
    } else {
        1
    };
    if found < queues.into() {
        return Err(BackendError::Queues {
            socket: link.socket().to_owned(),
            found,
            asked: queues,
        });
    }
    if agreed.contains(Protocol::BACKEND_REQ) {
        link.tell("SET_BACKEND_REQ_FD", |backend| {
            backend.set_backend_request_fd(connection.channel())
        })?;
    }
    let mut features = features & passed_on();
    if queues == 1 {
        features &= !(1 << VIRTIO_BLK_F_MQ);
    }
    let inflight = agreed.contains(Protocol::INFLIGHT_SHMFD);
    Ok((features, inflight, read_config(link, queues)?))
}

/// The backend's configuration, with the queues that there are here.
fn read_config(link: &Link, queues: u16) -> Result<Config, BackendError> {
    let mut config = [0; CONFIG_BYTES];
    let flags = VhostUserConfigFlags::empty();
    let (_, bytes) = link.tell("GET_CONFIG", |backend| {
        backend.get_config(0, CONFIG_BYTES as u32, flags, &config)
    })?;
    for (byte, value) in config.iter_mut().zip(bytes) {
        *byte = value;
    }
    config[QUEUES_OFFSET..QUEUES_OFFSET + 2].copy_from_slice(&queues.to_le_bytes());
    Ok(config)
}

impl Device for Foreign {
    fn features(&self) -> u64 {
        self.state.lock().features
    }

    fn read_config(&self, offset: u64, data: &mut [u8], _features: u64) {
        let mut state = self.state.lock();
        if state.link().take_stale() {
            match read_config(state.link(), state.queues()) {
                Ok(config) => state.take_config(config),
                Err(error) => {
                    if let Some(held_back) = state.admit() {
                        tracing::warn!(%error, held_back, "cannot read the changed configuration");
                    }
                }
            }
        }
        let rest = usize::try_from(offset)
            .ok()
            .and_then(|offset| state.config.get(offset..));
        let mut bytes = rest.unwrap_or_default().iter();
        data.fill_with(|| bytes.next().copied().unwrap_or(0));
    }

    fn write_config(&mut self, offset: u64, data: &[u8], features: u64) -> Result<(), DeviceError> {
        let mut state = self.state.lock();
        let may = features & state.features & 1 << VIRTIO_BLK_F_CONFIG_WCE != 0;
        match data {
            &[value @ (0 | 1)] if may && offset == WRITEBACK_OFFSET as u64 => {
                state.chosen = Some(value);
                let told = state.set_writeback(value);
                state.unless_awaited(told)
            }
            _ => Ok(()),
        }
    }

    fn start(&mut self, index: u16, start: &QueueStart<'_>) -> Result<(), DeviceError> {
        let mut state = self.state.lock();
        state.accepted = start.features;
        let running = Running {
            size: start.size,
            addresses: start.addresses,
            base: start.next_available,
            kick: start.kick.try_clone_to_owned()?,
            interrupt: start.interrupt.clone(),
        };
        let started = state.start(index.into(), &running);
        state.unless_awaited(started)?;
        if let Some(place) = state.running.get_mut(usize::from(index)) {
            *place = Some(running);
        }
        Ok(())
    }

    fn stop(&mut self, index: u16) -> Result<u16, DeviceError> {
        let queue = usize::from(index);
        let mut state = self.state.lock();
        let running = state.running.get_mut(queue).and_then(Option::take);
        let base = state.link().tell("GET_VRING_BASE", |backend| {
            backend.set_vring_enable(queue, false)?;
            backend.get_vring_base(queue)
        });
        match (base, running) {
            (Ok(base), _) => Ok(base as u16),
            // That was told when it went. Nothing is known to be done but what it has answered.
            (Err(_), Some(running)) if state.link().is_gone() => Ok(state.used_index(&running.addresses)),
            (Err(error), _) => Err(error.into()),
        }
    }

    fn rewire(&mut self, index: u16, interrupt: &QueueInterrupt) -> Result<(), DeviceError> {
        let state = self.state.lock();
        let told = state.set_call(index.into(), interrupt);
        state.unless_awaited(told)
    }

    fn reset(&mut self) {
        let gone = {
            let mut state = self.state.lock();
            state.is_set_up = false;
            // Nothing is in flight any more.
            state.inflight = None;
            state.chosen = None;
            state.link().is_gone()
        };
        let restored = if gone {
            self.connector.connect()
        } else {
            let mut state = self.state.lock();
            let writeback = state.writeback;
            state.set_writeback(writeback)
        };
        if let Err(error) = restored
            && let Some(held_back) = self.state.lock().admit()
        {
            tracing::error!(%error, held_back, "cannot reset a vhost-user disk for a new driver");
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        // What it has answered is in the backend's hands; the protocol has no word for this.
        Ok(())
    }

    fn resize(&mut self, _: u64) -> Result<u64, ResizeError> {
        Err(ResizeError::Disk(IoError::Unsupported))
    }

    fn driver_name(&self) -> &'static str {
        "vhost-user"
    }
}
