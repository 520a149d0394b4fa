//! A network interface whose queues the host's kernel runs (vhost-net): it moves frames between them and a tap interface.
//!
//! ```text
//! guest ──kick──▶ ioeventfd ──▶ kernel ──▶ tap      registers ──▶ this process ──ioctls──▶ kernel
//!       ◀──MSI──── irqfd ◀──────┘
//! ```
//!
//! Spec: virtio 1.2, 5.1. Linux: `include/uapi/linux/vhost.h`.
//!
//! Invariant: the kernel has the tap interface exactly while the queue runs; without it, it reaches no memory of the guest.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use vhost::vhost_kern::net::Net;
use vhost::{VhostBackend as _, VringConfigData, net::VhostNet as _};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN, VIRTIO_NET_F_GUEST_TSO4,
    VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_HOST_ECN, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6,
    VIRTIO_NET_F_MAC, VIRTIO_NET_F_MRG_RXBUF,
};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use vm_memory::GuestMemoryMmap;

use super::device::{Device, DeviceError, QueueInterrupt, QueueStart};
use super::memory::regions;
use super::network::MacAddress;
use super::tap::Tap;
use crate::vhost_user::event::event_of;

/// A queue for what comes and one for what goes.
pub(super) const QUEUES: u16 = 2;

/// Features that the kernel's threads have to know.
const OF_KERNEL: [u32; 4] = [
    VIRTIO_F_VERSION_1,
    VIRTIO_NET_F_MRG_RXBUF,
    VIRTIO_RING_F_EVENT_IDX,
    VIRTIO_RING_F_INDIRECT_DESC,
];
/// Features that are between the guest and the tap interface, in the header of each frame.
const OF_TAP: [u32; 8] = [
    VIRTIO_NET_F_CSUM,
    VIRTIO_NET_F_GUEST_CSUM,
    VIRTIO_NET_F_GUEST_TSO4,
    VIRTIO_NET_F_GUEST_TSO6,
    VIRTIO_NET_F_GUEST_ECN,
    VIRTIO_NET_F_HOST_TSO4,
    VIRTIO_NET_F_HOST_TSO6,
    VIRTIO_NET_F_HOST_ECN,
];
/// What a guest can take, and how the tap interface calls it. All but the first need the first.
const OFFLOADS: [(u32, libc::c_uint); 4] = [
    (VIRTIO_NET_F_GUEST_CSUM, libc::TUN_F_CSUM),
    (VIRTIO_NET_F_GUEST_TSO4, libc::TUN_F_TSO4),
    (VIRTIO_NET_F_GUEST_TSO6, libc::TUN_F_TSO6),
    (VIRTIO_NET_F_GUEST_ECN, libc::TUN_F_TSO_ECN),
];

fn bits(features: &[u32]) -> u64 {
    features.iter().fold(0, |set, bit| set | 1 << bit)
}

/// Returns the flags of the tap interface for a driver that accepted `features`.
fn offload(features: u64) -> libc::c_uint {
    if features & 1 << VIRTIO_NET_F_GUEST_CSUM == 0 {
        return 0;
    }
    let taken = OFFLOADS.iter().filter(|(bit, _)| features & 1 << bit != 0);
    taken.fold(0, |set, (_, flag)| set | flag)
}

/// The kernel does not run the queues of a network interface.
#[derive(Debug, thiserror::Error)]
pub enum VhostNetError {
    /// The kernel refuses.
    #[error("cannot have the kernel run a network interface: {what} (/dev/vhost-net; modprobe vhost_net)")]
    Kernel {
        /// What it was to do.
        what: &'static str,
        /// Its error.
        #[source]
        source: vhost::Error,
    },
    /// A region of the guest's memory is not mapped from a file.
    #[error("the guest's memory at {address:#x} is not mapped from a file")]
    Memory {
        /// Its guest address.
        address: u64,
    },
    /// The kernel's vhost-net is older than virtio 1.
    #[error("this kernel's vhost-net does not know VIRTIO_F_VERSION_1")]
    Old,
    /// The tap interface refuses.
    #[error("cannot say to the tap interface {name} what the guest can take")]
    Offload {
        /// The interface.
        name: String,
        /// Its error.
        #[source]
        source: io::Error,
    },
    /// The host has no descriptors.
    #[error("cannot duplicate a descriptor")]
    Host(#[source] io::Error),
}

fn kernel(what: &'static str) -> impl Fn(vhost::Error) -> VhostNetError {
    move |source| VhostNetError::Kernel { what, source }
}

/// The device.
pub(super) struct VhostNet {
    kernel: Net<Arc<GuestMemoryMmap>>,
    tap: Arc<Tap>,
    features: u64,
    config: [u8; MacAddress::BYTES],
    /// The kernel knows the driver's features.
    is_set_up: bool,
    /// Signalled instead of an interrupt that the driver has not chosen.
    nobody: OwnedFd,
}

impl std::fmt::Debug for VhostNet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VhostNet")
            .field("tap", &self.tap)
            .finish_non_exhaustive()
    }
}

impl VhostNet {
    /// A device that the kernel runs for a guest with this memory.
    pub(super) fn new(
        tap: Arc<Tap>,
        mac: MacAddress,
        memory: GuestMemoryMmap,
    ) -> Result<Self, VhostNetError> {
        let described = regions(&memory).map_err(|address| VhostNetError::Memory { address })?;
        let net = Net::new(Arc::new(memory)).map_err(kernel("opening it"))?;
        net.set_owner().map_err(kernel("VHOST_SET_OWNER"))?;
        net.set_mem_table(&described)
            .map_err(kernel("VHOST_SET_MEM_TABLE"))?;
        let known = net.get_features().map_err(kernel("VHOST_GET_FEATURES"))?;
        if known & 1 << VIRTIO_F_VERSION_1 == 0 {
            return Err(VhostNetError::Old);
        }
        Ok(Self {
            kernel: net,
            tap,
            features: known & bits(&OF_KERNEL) | bits(&OF_TAP) | 1 << VIRTIO_NET_F_MAC,
            config: mac.0,
            is_set_up: false,
            nobody: block::event::eventfd().map_err(VhostNetError::Host)?,
        })
    }

    /// Tells kernel and tap interface what the driver has accepted.
    fn set_up(&mut self, features: u64) -> Result<(), VhostNetError> {
        if self.is_set_up {
            return Ok(());
        }
        self.kernel
            .set_features(features & bits(&OF_KERNEL))
            .map_err(kernel("VHOST_SET_FEATURES"))?;
        let offloaded = self.tap.set_offload(offload(features));
        offloaded.map_err(|source| VhostNetError::Offload {
            name: self.tap.name().to_owned(),
            source,
        })?;
        self.is_set_up = true;
        Ok(())
    }

    fn set_call(&self, queue: usize, interrupt: &QueueInterrupt) -> Result<(), VhostNetError> {
        let event = interrupt.event().unwrap_or(self.nobody.as_fd());
        let event = event_of(event).map_err(VhostNetError::Host)?;
        let set = self.kernel.set_vring_call(queue, &event);
        set.map_err(kernel("VHOST_SET_VRING_CALL"))
    }

    fn run(&mut self, queue: usize, start: &QueueStart<'_>) -> Result<(), VhostNetError> {
        self.set_up(start.features)?;
        let rings = VringConfigData {
            queue_max_size: start.size,
            queue_size: start.size,
            flags: 0,
            desc_table_addr: start.addresses.descriptors,
            used_ring_addr: start.addresses.used,
            avail_ring_addr: start.addresses.available,
            log_addr: None,
        };
        let net = &self.kernel;
        net.set_vring_num(queue, start.size)
            .map_err(kernel("VHOST_SET_VRING_NUM"))?;
        net.set_vring_base(queue, start.next_available)
            .map_err(kernel("VHOST_SET_VRING_BASE"))?;
        net.set_vring_addr(queue, &rings)
            .map_err(kernel("VHOST_SET_VRING_ADDR"))?;
        let kick = event_of(start.kick).map_err(VhostNetError::Host)?;
        net.set_vring_kick(queue, &kick)
            .map_err(kernel("VHOST_SET_VRING_KICK"))?;
        self.set_call(queue, start.interrupt)?;
        net.set_backend(queue, Some(self.tap.file()))
            .map_err(kernel("VHOST_NET_SET_BACKEND"))
    }
}

impl Device for VhostNet {
    fn features(&self) -> u64 {
        self.features
    }

    fn read_config(&self, offset: u64, data: &mut [u8], _: u64) {
        let rest = usize::try_from(offset)
            .ok()
            .and_then(|offset| self.config.get(offset..));
        let mut bytes = rest.unwrap_or_default().iter();
        data.fill_with(|| bytes.next().copied().unwrap_or(0));
    }

    fn write_config(&mut self, _: u64, _: &[u8], _: u64) -> Result<(), DeviceError> {
        // A driver of virtio 1 has nothing to write there.
        Ok(())
    }

    fn start(&mut self, index: u16, start: &QueueStart<'_>) -> Result<(), DeviceError> {
        Ok(self.run(index.into(), start)?)
    }

    fn stop(&mut self, index: u16) -> Result<u16, DeviceError> {
        let queue = usize::from(index);
        self.kernel
            .set_backend(queue, None)
            .map_err(kernel("VHOST_NET_SET_BACKEND"))?;
        let base = self.kernel.get_vring_base(queue);
        Ok(base.map_err(kernel("VHOST_GET_VRING_BASE"))? as u16)
    }

    fn rewire(&mut self, index: u16, interrupt: &QueueInterrupt) -> Result<(), DeviceError> {
        Ok(self.set_call(index.into(), interrupt)?)
    }

    fn reset(&mut self) {
        self.is_set_up = false;
    }

    fn driver_name(&self) -> &'static str {
        "vhost-net"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offload_of_segments_needs_that_of_checksums() {
        let segments = 1 << VIRTIO_NET_F_GUEST_TSO4 | 1 << VIRTIO_NET_F_GUEST_ECN;
        assert_eq!(offload(segments), 0);
        let both = segments | 1 << VIRTIO_NET_F_GUEST_CSUM;
        assert_eq!(
            offload(both),
            libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO_ECN
        );
        assert_eq!(offload(1 << VIRTIO_NET_F_MAC), 0);
    }
}
