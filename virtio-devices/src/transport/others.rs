//! PCI functions that are no disks: a network interface, and a source of entropy.

use std::io;
use std::sync::Arc;

use block::worker::StartHook;
use vm_memory::GuestMemoryMmap;

use super::entropy::{self, Entropy};
use super::error::PlugError;
use super::network::PciNetworkConfig;
use super::pci::{Function, Kind, Shape};
use super::vhost_net::{self, VhostNet};
use super::{Machine, PciFunction, Window};

/// A virtio device on a PCI bus that is no disk.
#[derive(Debug)]
pub struct VirtioPciDevice(Function);

impl VirtioPciDevice {
    /// A virtio-net interface for a guest with `memory`, which must be mapped from files, with its window at `window`, a multiple
    /// of [`BAR_BYTES`](super::BAR_BYTES); not enabled yet. It has a queue for what comes and one for what goes. The host's kernel runs
    /// them (vhost-net).
    ///
    /// # Errors
    ///
    /// [`PlugError::Network`], [`PlugError::Events`].
    pub fn network(
        config: PciNetworkConfig,
        memory: GuestMemoryMmap,
        machine: Arc<dyn Machine>,
        window: u32,
    ) -> Result<Self, PlugError> {
        let shape = Shape {
            kind: Kind::NETWORK,
            name: config.tap.name().to_owned(),
            queues: vhost_net::QUEUES,
            queue_size: config.queue_size,
            log_limit: Arc::default(),
        };
        let device = VhostNet::new(config.tap, config.mac, memory)?;
        let function = Function::show(shape, machine, window, |_| Ok(Box::new(device)))?;
        Ok(Self(function))
    }

    /// A virtio-rng device, which gives a guest random bytes of the host, with its window as that of
    /// [`VirtioPciDevice::network`]. The thread that does so runs `on_start` first.
    ///
    /// # Errors
    ///
    /// [`PlugError::Thread`], [`PlugError::Events`].
    pub fn entropy(
        on_start: Option<StartHook>,
        memory: GuestMemoryMmap,
        machine: Arc<dyn Machine>,
        window: u32,
    ) -> Result<Self, PlugError> {
        let shape = Shape {
            kind: Kind::ENTROPY,
            name: "entropy".to_owned(),
            queues: 1,
            queue_size: entropy::QUEUE_SIZE,
            log_limit: Arc::default(),
        };
        let function = Function::show(shape, machine, window, |shared| {
            let entropy = Entropy::new(memory, shared, on_start).map_err(PlugError::Thread)?;
            Ok(Box::new(entropy))
        })?;
        Ok(Self(function))
    }

    /// Stops the queues: until [`VirtioPciDevice::resume`] nothing is taken from them, and nothing comes.
    ///
    /// # Errors
    ///
    /// The device's error.
    pub fn pause(&mut self) -> io::Result<()> {
        self.0.pause()
    }

    /// Lets the queues run again.
    pub fn resume(&mut self) {
        self.0.resume();
    }

    /// Unplugs the function: stops its queues for good. What a guest writes from now on, through an access that found the
    /// function before, changes nothing.
    ///
    /// # Errors
    ///
    /// The device's error.
    pub fn unplug(&mut self) -> io::Result<()> {
        self.0.unplug()
    }
}

super::pci::is_function!(VirtioPciDevice);
