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

mod agreement;
mod connector;
pub(super) mod link;
mod state;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use block::worker::StartHook;
use parking_lot::Mutex;
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use virtio_bindings::virtio_blk::{VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_FLUSH};
use vm_memory::GuestMemoryMmap;

use super::device::{Device, DeviceError, QueueInterrupt, QueueStart};
use super::error::PlugError;
use super::function::{FunctionState, QUEUES_MAX};
use crate::blk::WRITEBACK_OFFSET;
use crate::connect::Cancel;
use agreement::{Agreed, agree, agree_after, read_config};
use connector::Connector;
pub use link::BackendError;
use link::SETUP_PATIENCE;
use state::{BackendState, Running};

/// A disk function whose queues another program runs.
#[derive(Clone, Debug)]
pub struct VhostUserDiskConfig {
    /// The name in logs.
    pub name: String,
    /// The backend's socket.
    pub socket: PathBuf,
    /// The number of queues, 1 to 256; the backend has at least as many.
    pub num_queues: u16,
    /// The most entries of a queue: a power of two.
    pub queue_size: u16,
    /// Runs first on each thread that talks to the backend, to drop privileges for instance. A thread started by one
    /// of them inherits that.
    pub on_start: Option<StartHook>,
}

/// The device.
#[derive(Debug)]
pub(super) struct Foreign {
    // Ends first: it uses the state.
    connector: Connector,
    state: Arc<Mutex<BackendState>>,
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
        let state = Arc::new(Mutex::new(BackendState {
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
            nobody: block::event::eventfd().map_err(BackendError::Host)?,
        }));
        Ok(Self {
            connector: Connector::start(&state, &config.socket, patience, config.on_start)?,
            state,
        })
    }

    /// Reports events of the backend to `function` from now on.
    pub(super) fn serve(self, function: Arc<FunctionState>) -> Self {
        {
            let mut state = self.state.lock();
            state.function = Some((function, self.connector.asked().clone()));
            state.serve();
        }
        self
    }
}

impl Device for Foreign {
    fn features(&self) -> u64 {
        self.state.lock().features
    }

    fn read_config(&self, offset: u64, data: &mut [u8], features: u64) {
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
        let mut config = state.config;
        if features & 1 << VIRTIO_BLK_F_CONFIG_WCE != 0 && features & 1 << VIRTIO_BLK_F_FLUSH == 0 {
            // Virtio 1.2, 5.2.5.2. The backend was asked before there was a driver.
            config[WRITEBACK_OFFSET] = 0;
        }
        let rest = usize::try_from(offset)
            .ok()
            .and_then(|offset| config.get(offset..));
        let mut bytes = rest.unwrap_or_default().iter();
        data.fill_with(|| bytes.next().copied().unwrap_or(0));
    }

    fn write_config(&mut self, offset: u64, data: &[u8], features: u64) -> Result<(), DeviceError> {
        let mut state = self.state.lock();
        let may = features & state.features & 1 << VIRTIO_BLK_F_CONFIG_WCE != 0;
        match data {
            &[value @ (0 | 1)] if may && offset == WRITEBACK_OFFSET as u64 => {
                state.chosen = Some(value);
                let result = state.set_writeback(value);
                state.unless_awaited(result)
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
        let base = state.link().send("GET_VRING_BASE", |backend| {
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
        let result = state.set_call(index.into(), interrupt);
        state.unless_awaited(result)
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

    // What it has answered is in the backend's hands, the disk's size too; the protocol has no words for them.

    fn driver_name(&self) -> &'static str {
        "vhost-user"
    }
}
