//! The state of a device towards its guest and its backend: all that a backend that follows a lost one is told.

use std::fmt;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::Sender;

use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserInflight};
use vhost::{VhostBackend, VringConfigData};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

use super::super::device::{DeviceError, QueueInterrupt};
use super::super::function::{FunctionState, signal};
use super::super::memory::regions;
use super::agreement::{Agreed, Config, PROTOCOL_FEATURES};
use super::link::{Ask, BackendError, Connection, Link};
use crate::blk::WRITEBACK_OFFSET;
use crate::vhost_user::event::event_of;
use crate::virtqueue::RingAddresses;

/// A queue that runs, with all it takes to start it.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) size: u16,
    pub(super) addresses: RingAddresses,
    pub(super) base: u16,
    pub(super) kick: OwnedFd,
    pub(super) interrupt: QueueInterrupt,
}

/// The state of the device towards guest and backend, and the connection.
pub(super) struct BackendState {
    pub(super) connection: Connection,
    pub(super) memory: GuestMemoryMmap,
    /// The most entries of a queue.
    pub(super) queue_size: u16,
    /// The function, once there is one, and the thread that waits for a lost backend.
    pub(super) function: Option<(Arc<FunctionState>, Sender<Ask>)>,
    pub(super) features: u64,
    /// The configuration that the driver reads, with the cache mode that it has chosen.
    pub(super) config: Config,
    /// The cache mode that the backend had in the beginning.
    pub(super) writeback: u8,
    /// The cache mode that the backend has.
    pub(super) writeback_there: u8,
    /// The cache mode that the driver has chosen; each backend gets it before a queue runs.
    pub(super) chosen: Option<u8>,
    /// True if the backend records requests in flight in memory of ours.
    pub(super) has_inflight: bool,
    pub(super) inflight: Option<(VhostUserInflight, File)>,
    /// True if the backend knows the driver's features and the memory.
    pub(super) is_set_up: bool,
    /// The features that the driver has accepted.
    pub(super) accepted: u64,
    pub(super) running: Vec<Option<Running>>,
    /// Signalled instead of an interrupt that the driver has not chosen.
    pub(super) nobody: OwnedFd,
}

impl fmt::Debug for BackendState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BackendState")
            .field("connection", &self.connection)
            .field("running", &self.running)
            .finish_non_exhaustive()
    }
}

impl BackendState {
    pub(super) fn link(&self) -> &Link {
        self.connection.link()
    }

    pub(super) fn queues(&self) -> u16 {
        self.running.len() as u16
    }

    /// As [`LogLimit::admit`](block::report::LogLimit::admit), of the function's lines.
    pub(super) fn admit(&self) -> Option<Option<u64>> {
        let function = self.function.as_ref();
        function.map_or(Some(None), |(function, _)| function.log_limit.admit())
    }

    /// Returns true if the backend was lost and is being waited for, without the guest's knowledge.
    pub(super) fn is_awaited(&self) -> bool {
        self.has_inflight && self.link().is_gone()
    }

    /// Ignores a failed message if the backend is lost and awaited: the next one gets the whole state.
    pub(super) fn unless_awaited(&self, result: Result<(), BackendError>) -> Result<(), DeviceError> {
        match result {
            Err(_) if self.is_awaited() => Ok(()),
            result => Ok(result?),
        }
    }

    /// Passes the receivers of events to the connection.
    pub(super) fn serve(&self) {
        if let Some((function, keeper)) = &self.function {
            let keeper = self.has_inflight.then_some(keeper);
            self.link().serve(function, keeper);
        }
    }

    /// Tells the backend which features the driver took, where the guest's memory is, where to keep note of what is in
    /// flight, and the cache mode that the driver chose.
    pub(super) fn set_up(&mut self) -> Result<(), BackendError> {
        if self.is_set_up {
            return Ok(());
        }
        let features = self.accepted & self.features | PROTOCOL_FEATURES;
        let regions = regions(&self.memory).map_err(|address| BackendError::Memory {
            what: "a region",
            address,
        })?;
        let link = self.connection.link();
        link.send("SET_FEATURES", |backend| backend.set_features(features))?;
        link.send("SET_MEM_TABLE", |backend| backend.set_mem_table(&regions))?;
        if self.has_inflight {
            if self.inflight.is_none() {
                let asked = VhostUserInflight::new(0, 0, self.queues(), self.queue_size);
                let given = link.send("GET_INFLIGHT_FD", |backend| backend.get_inflight_fd(&asked))?;
                self.inflight = Some(given);
            }
            if let Some((shape, file)) = &self.inflight {
                let file = file.as_raw_fd();
                link.send("SET_INFLIGHT_FD", |backend| backend.set_inflight_fd(shape, file))?;
            }
        }
        if let Some(chosen) = self.chosen {
            self.set_writeback(chosen)?;
        }
        self.is_set_up = true;
        Ok(())
    }

    /// Returns the address in this process of a guest address.
    pub(super) fn host_address(&self, what: &'static str, address: u64) -> Result<u64, BackendError> {
        let place = self.memory.get_host_address(GuestAddress(address));
        let place = place.map_err(|_| BackendError::Memory { what, address })?;
        Ok(place.addr() as u64)
    }

    pub(super) fn set_call(&self, queue: usize, interrupt: &QueueInterrupt) -> Result<(), BackendError> {
        let event = event_of(interrupt.event().unwrap_or(self.nobody.as_fd())).map_err(BackendError::Host)?;
        self.link()
            .send("SET_VRING_CALL", |backend| backend.set_vring_call(queue, &event))
    }

    /// Has the backend run a queue.
    pub(super) fn start(&mut self, queue: usize, start: &Running) -> Result<(), BackendError> {
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
        link.send("SET_VRING_NUM", |backend| backend.set_vring_num(queue, size))?;
        link.send("SET_VRING_BASE", |backend| backend.set_vring_base(queue, base))?;
        link.send("SET_VRING_ADDR", |backend| backend.set_vring_addr(queue, &rings))?;
        link.send("SET_VRING_ERR", |backend| backend.set_vring_err(queue, &broken))?;
        self.set_call(queue, &start.interrupt)?;
        link.send("SET_VRING_KICK", |backend| backend.set_vring_kick(queue, &kick))?;
        link.send("SET_VRING_ENABLE", |backend| {
            backend.set_vring_enable(queue, true)
        })?;
        // What is available already may have been kicked for before the backend listened.
        signal(start.kick.as_fd());
        Ok(())
    }

    /// Returns the used index that the guest has seen: the position at which a queue starts by default.
    pub(super) fn used_index(&self, addresses: &RingAddresses) -> u16 {
        let index = GuestAddress(addresses.used.saturating_add(2));
        self.memory.read_obj(index).unwrap_or(0)
    }

    /// Takes over the configuration that the backend says it has.
    pub(super) fn take_config(&mut self, config: Config) {
        self.config = config;
        self.writeback_there = config[WRITEBACK_OFFSET];
        if let Some(chosen) = self.chosen {
            self.config[WRITEBACK_OFFSET] = chosen;
        }
    }

    pub(super) fn set_writeback(&mut self, value: u8) -> Result<(), BackendError> {
        self.config[WRITEBACK_OFFSET] = value;
        if self.writeback_there == value {
            return Ok(());
        }
        let (offset, flags) = (WRITEBACK_OFFSET as u32, VhostUserConfigFlags::empty());
        self.link().send("SET_CONFIG", |backend| {
            backend.set_config(offset, flags, &[value])
        })?;
        self.writeback_there = value;
        Ok(())
    }

    /// Goes on with a new connection where the last one was: with the queues that ran, and what was in flight in them.
    pub(super) fn go_on(&mut self, agreed: Agreed) -> Result<(), BackendError> {
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
            if let Some(held_back) = function.log_limit.admit() {
                tracing::info!(%disk, %socket, held_back, "reconnected to the vhost-user backend");
            }
            if self.config != before {
                function.config_changed();
            }
        }
        Ok(())
    }

    /// Has a backend that knows nothing yet run the queues that ran.
    pub(super) fn run_again(&mut self) -> Result<(), BackendError> {
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
    pub(super) fn give_up(&self) {
        if let Some((function, _)) = &self.function {
            function.needs_reset();
        }
    }
}
