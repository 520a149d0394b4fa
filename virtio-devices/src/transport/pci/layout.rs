//! The layout of the function: its window, and the capabilities that describe it to a driver (virtio 1.2, 4.1.4).
//!
//! Invariant: what a capability says of the window is where the registers answer, because both use the constants of this file.

use super::super::config_space::{ConfigSpace, at};
use super::super::function::QUEUES_MAX;
use super::super::msix::ENTRY_BYTES;

/// The size of the function's memory window, in bytes.
pub const BAR_BYTES: u32 = 0x8000;

/// The offset of each part in the window. The table takes 257 entries, the pending bits 5 words.
pub(super) const COMMON: u64 = 0;
pub(super) const COMMON_BYTES: u64 = 0x40;
pub(super) const ISR: u64 = 0x1000;
pub(super) const DEVICE: u64 = 0x2000;
const DEVICE_BYTES: u64 = 0x100;
pub(super) const NOTIFY: u64 = 0x3000;
pub(super) const NOTIFY_STRIDE: u64 = 4;
pub(super) const TABLE: u64 = 0x4000;
pub(super) const PENDING: u64 = 0x6000;

const VENDOR_VIRTIO: u16 = 0x1AF4;

/// A kind of device, as the PCI bus knows it: virtio 1.2, 4.1.2; the class codes of the PCI SIG.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Kind {
    device: u16,
    class: u32,
}

impl Kind {
    /// A disk: mass storage, of no further kind.
    pub(in super::super) const BLOCK: Self = Self {
        device: 0x1042,
        class: 0x01_80_00,
    };
    /// A network interface: an Ethernet controller.
    pub(in super::super) const NETWORK: Self = Self {
        device: 0x1041,
        class: 0x02_00_00,
    };
    /// A source of entropy: of no class.
    pub(in super::super) const ENTROPY: Self = Self {
        device: 0x1044,
        class: 0xFF_00_00,
    };
}

const CAPABILITY_VENDOR: u8 = 0x09;
const CAPABILITY_MSIX: u8 = 0x11;
/// `cfg_type` of virtio capabilities: virtio 1.2, 4.1.4.
const CFG_COMMON: u8 = 1;
const CFG_NOTIFY: u8 = 2;
const CFG_ISR: u8 = 3;
const CFG_DEVICE: u8 = 4;
const CFG_ACCESS: u8 = 5;

/// The configuration space of a function, and the offsets of the capabilities that are more than read.
pub(super) struct Capabilities {
    pub(super) space: ConfigSpace,
    /// The offset of the MSI-X capability.
    pub(super) msix_at: u16,
    /// The offset of the capability for access to the window through the configuration space.
    pub(super) access_at: u16,
}

/// Returns the configuration space of a function of this kind with `queues` queues and its window at `window`.
pub(super) fn capabilities(kind: Kind, window: u32, queues: u16) -> Capabilities {
    let mut space = ConfigSpace::new(VENDOR_VIRTIO, kind.device, kind.class, BAR_BYTES);
    space.put(at::BAR0, &window.to_le_bytes());
    space.add(
        CAPABILITY_VENDOR,
        &virtio_capability(CFG_COMMON, COMMON, COMMON_BYTES, &[]),
    );
    space.add(CAPABILITY_VENDOR, &virtio_capability(CFG_ISR, ISR, 1, &[]));
    space.add(
        CAPABILITY_VENDOR,
        &virtio_capability(CFG_DEVICE, DEVICE, DEVICE_BYTES, &[]),
    );
    let (stride, room) = (NOTIFY_STRIDE as u32, NOTIFY_STRIDE * u64::from(QUEUES_MAX));
    let notify = virtio_capability(CFG_NOTIFY, NOTIFY, room, &stride.to_le_bytes());
    space.add(CAPABILITY_VENDOR, &notify);
    let access_at = space.add(CAPABILITY_VENDOR, &virtio_capability(CFG_ACCESS, 0, 0, &[0; 4]));
    // Which window, where in it, how much, and the bytes there: all the guest's.
    space.allow(access_at + 4, &[0xFF]);
    space.allow(access_at + 8, &[0xFF; 8]);
    let mut body = Vec::from(queues.to_le_bytes());
    body.extend((TABLE as u32).to_le_bytes());
    body.extend((PENDING as u32).to_le_bytes());
    let msix_at = space.add(CAPABILITY_MSIX, &body);
    space.allow(msix_at + 2, &[0, 0xC0]);
    Capabilities {
        space,
        msix_at,
        access_at,
    }
}

/// Returns a virtio capability behind its identifier and link: its length, type, offset, and what its type adds.
fn virtio_capability(cfg_type: u8, offset: u64, len: u64, more: &[u8]) -> Vec<u8> {
    let mut body = vec![16 + more.len() as u8, cfg_type, 0, 0, 0, 0];
    body.extend((offset as u32).to_le_bytes());
    body.extend((len as u32).to_le_bytes());
    body.extend(more);
    body
}

const _: () = assert!(TABLE + ENTRY_BYTES * (QUEUES_MAX as u64 + 1) <= PENDING);
