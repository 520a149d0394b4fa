//! A device whose queues another program runs: a vhost-user-blk backend, ours or anybody's.
//!
//! The backend gets the guest's memory, the eventfd that the guest's kicks signal and the one that raises the queue's
//! interrupt; only set-up passes through this process. Spec: vhost-user, "Front-end message types".
//!
//! ```text
//! guest ──kick──▶ ioeventfd ──▶ backend ──▶ disk      registers ──▶ this process ──messages──▶ backend
//!       ◀──MSI──── irqfd ◀──────┘
//! ```
//!
//! What must stay true: where a queue stopped is asked before it is started again; a guest sees of the backend's
//! features those only that its transport can carry; and a backend that goes or hangs costs the guest its disk, and
//! nobody else anything.

mod connector;
mod link;
#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use block::IoError;
use parking_lot::Mutex;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserProtocolFeatures};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH,
    VIRTIO_BLK_F_GEOMETRY, VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX,
    VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use super::ResizeError;
use super::device::{Device, DeviceError, QueueInterrupt, QueueStart};
use super::pci::{Shared, signal};
use crate::block::{CONFIG_BYTES, WRITEBACK_OFFSET};
use crate::vhost_user::event::event_of;
use connector::{Agreed, Connector};
pub use link::BackendError;
use link::{Connection, Link, SETUP_PATIENCE};

/// `VHOST_USER_F_PROTOCOL_FEATURES`.
const PROTOCOL_FEATURES: u64 = 1 << 30;
/// Where the configuration space says how many queues there are: virtio 1.2, 5.2.4.
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

/// The device, and its connection with the backend.
#[derive(Debug)]
pub(super) struct Foreign {
    connection: Connection,
    connector: Connector,
    queues: u16,
    memory: GuestMemoryMmap,
    /// Once there is a function.
    function: Option<Arc<Shared>>,
    features: u64,
    config: Mutex<Config>,
    /// The cache mode that the backend had in the beginning.
    writeback: u8,
    /// Whether the backend knows the driver's features and the memory.
    is_set_up: bool,
    /// By queue: where its used ring is, while it runs.
    used_at: Vec<Option<u64>>,
    /// Signalled instead of an interrupt that the driver has not chosen.
    nobody: OwnedFd,
}

impl Foreign {
    /// Connects to the backend at `socket` and agrees with it about everything but the driver's features.
    pub(super) fn connect(socket: &Path, queues: u16, memory: GuestMemoryMmap) -> Result<Self, BackendError> {
        Self::connect_within(SETUP_PATIENCE, socket, queues, memory)
    }

    fn connect_within(
        patience: Duration,
        socket: &Path,
        queues: u16,
        memory: GuestMemoryMmap,
    ) -> Result<Self, BackendError> {
        let connector = Connector::start(socket, queues, patience)?;
        let Agreed {
            connection,
            features,
            config,
        } = connector.connect()?;
        Ok(Self {
            connection,
            connector,
            queues,
            memory,
            function: None,
            features,
            writeback: config[WRITEBACK_OFFSET],
            config: Mutex::new(config),
            is_set_up: false,
            used_at: vec![None; queues.into()],
            nobody: block::task::eventfd().map_err(BackendError::Host)?,
        })
    }

    /// From now on `function` is told what happens to the backend.
    pub(super) fn serve(mut self, function: Arc<Shared>) -> Self {
        self.connection.link().serve(&function);
        self.function = Some(function);
        self
    }

    fn link(&self) -> &Link {
        self.connection.link()
    }

    /// Tells the backend which features the driver took, and where the guest's memory is.
    fn set_up(&mut self, features: u64) -> Result<(), BackendError> {
        if self.is_set_up {
            return Ok(());
        }
        let features = features & self.features | PROTOCOL_FEATURES;
        let regions = self.memory.iter().map(|region| {
            VhostUserMemoryRegionInfo::from_guest_region(region).map_err(|_| BackendError::Memory {
                what: "a region",
                address: region.start_addr().0,
            })
        });
        let regions = regions.collect::<Result<Vec<_>, _>>()?;
        let link = self.link();
        link.tell("SET_FEATURES", |backend| backend.set_features(features))?;
        link.tell("SET_MEM_TABLE", |backend| backend.set_mem_table(&regions))?;
        self.is_set_up = true;
        Ok(())
    }

    /// Where this process has what is at a guest's address.
    fn host_address(&self, what: &'static str, address: u64) -> Result<u64, BackendError> {
        let place = self.memory.get_host_address(GuestAddress(address));
        let place = place.map_err(|_| BackendError::Memory { what, address })?;
        Ok(place.addr() as u64)
    }

    fn set_call(&self, index: u16, interrupt: &QueueInterrupt) -> Result<(), DeviceError> {
        let event = event_of(interrupt.event().unwrap_or(self.nobody.as_fd()))?;
        self.link().tell("SET_VRING_CALL", |backend| {
            backend.set_vring_call(index.into(), &event)
        })?;
        Ok(())
    }

    /// Chooses the cache mode, if it is another.
    fn set_writeback(&mut self, value: u8) -> Result<(), DeviceError> {
        if self.config.lock()[WRITEBACK_OFFSET] == value {
            return Ok(());
        }
        let (offset, flags) = (WRITEBACK_OFFSET as u32, VhostUserConfigFlags::empty());
        self.link().tell("SET_CONFIG", |backend| {
            backend.set_config(offset, flags, &[value])
        })?;
        self.config.lock()[WRITEBACK_OFFSET] = value;
        Ok(())
    }

    /// Connects again after the backend has gone. The driver has just given up all that was in flight.
    fn reconnect(&mut self) -> Result<(), BackendError> {
        let agreed = self.connector.connect()?;
        self.writeback = agreed.config[WRITEBACK_OFFSET];
        self.features = agreed.features;
        *self.config.lock() = agreed.config;
        self.connection = agreed.connection;
        if let Some(function) = &self.function {
            let (disk, socket) = (&function.name, self.link().socket().display());
            tracing::info!(%disk, %socket, "connected to the vhost-user backend again");
            self.link().serve(function);
        }
        Ok(())
    }
}

/// Agrees with a backend about the protocol. Answers the features that a guest may have, and its configuration.
fn negotiate(connection: &Connection, queues: u16) -> Result<(u64, Config), BackendError> {
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
    let agreed = offered & (Protocol::CONFIG | Protocol::MQ | Protocol::REPLY_ACK | Protocol::BACKEND_REQ);
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
    Ok((features, read_config(link, queues)?))
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
        self.features
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        if self.link().take_stale() {
            match read_config(self.link(), self.queues) {
                Ok(config) => *self.config.lock() = config,
                Err(error) => tracing::warn!(%error, "a changed configuration cannot be read"),
            }
        }
        let config = self.config.lock();
        let rest = usize::try_from(offset)
            .ok()
            .and_then(|offset| config.get(offset..));
        let mut bytes = rest.unwrap_or_default().iter();
        data.fill_with(|| bytes.next().copied().unwrap_or(0));
    }

    fn write_config(&mut self, offset: u64, data: &[u8], features: u64) -> Result<(), DeviceError> {
        let may = features & self.features & 1 << VIRTIO_BLK_F_CONFIG_WCE != 0;
        match data {
            &[value @ (0 | 1)] if may && offset == WRITEBACK_OFFSET as u64 => self.set_writeback(value),
            _ => Ok(()),
        }
    }

    fn start(&mut self, index: u16, start: &QueueStart<'_>) -> Result<(), DeviceError> {
        self.set_up(start.features)?;
        let rings = VringConfigData {
            queue_max_size: start.size,
            queue_size: start.size,
            flags: 0,
            desc_table_addr: self.host_address("a descriptor table", start.addresses.descriptors)?,
            used_ring_addr: self.host_address("a used ring", start.addresses.used)?,
            avail_ring_addr: self.host_address("an available ring", start.addresses.available)?,
            log_addr: None,
        };
        let (queue, size, base) = (usize::from(index), start.size, start.next_available);
        let kick = event_of(start.kick)?;
        let link = self.link();
        let broken = event_of(link.broken())?;
        link.tell("SET_VRING_NUM", |backend| backend.set_vring_num(queue, size))?;
        link.tell("SET_VRING_BASE", |backend| backend.set_vring_base(queue, base))?;
        link.tell("SET_VRING_ADDR", |backend| backend.set_vring_addr(queue, &rings))?;
        link.tell("SET_VRING_ERR", |backend| backend.set_vring_err(queue, &broken))?;
        self.set_call(index, start.interrupt)?;
        link.tell("SET_VRING_KICK", |backend| backend.set_vring_kick(queue, &kick))?;
        link.tell("SET_VRING_ENABLE", |backend| {
            backend.set_vring_enable(queue, true)
        })?;
        // What is available already may have been kicked for before the backend listened.
        signal(start.kick);
        if let Some(used_at) = self.used_at.get_mut(queue) {
            *used_at = Some(start.addresses.used);
        }
        Ok(())
    }

    fn stop(&mut self, index: u16) -> Result<u16, DeviceError> {
        let queue = usize::from(index);
        let used_at = self.used_at.get_mut(queue).and_then(Option::take);
        let base = self.link().tell("GET_VRING_BASE", |backend| {
            backend.set_vring_enable(queue, false)?;
            backend.get_vring_base(queue)
        });
        match (base, used_at) {
            (Ok(base), _) => Ok(base as u16),
            // That was told when it went. Nothing is known to be done but what it has answered.
            (Err(_), Some(used_at)) if self.link().is_gone() => {
                let index = GuestAddress(used_at.saturating_add(2));
                Ok(self.memory.read_obj(index).unwrap_or(0))
            }
            (Err(error), _) => Err(error.into()),
        }
    }

    fn rewire(&mut self, index: u16, interrupt: &QueueInterrupt) -> Result<(), DeviceError> {
        self.set_call(index, interrupt)
    }

    fn reset(&mut self) {
        self.is_set_up = false;
        let restored = if self.link().is_gone() {
            self.reconnect().map_err(Into::into)
        } else {
            self.set_writeback(self.writeback)
        };
        if let Err(error) = restored {
            tracing::error!(%error, "a vhost-user disk is not as a new driver expects it");
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
