//! Frontends that offer a disk to virtual machines and to the host. They know guests and no image formats: anything that
//! implements [`block::Disk`] can be offered.
//!
//! ```text
//!  guest of another process ──vhost-user──▶ vhost_user ─┐
//!  guest of this process ───virtio-pci────▶ transport  ─┼▶ blk (virtio-blk) ────▶ virtqueue
//!                                                       │         │
//!  host, /dev/ublkbN ───────ublk driver───▶ ublk ───────┴─Request─▶ block::DiskQueue
//! ```
//!
//! [`virtqueue`] has split virtqueues, [`blk`] the virtio-blk device, [`vhost_user`] its vhost-user backend,
//! [`transport`] its PCI function (in front of a disk in this process, or of another vhost-user backend), and [`ublk`] the
//! server of the kernel's ublk driver.
//!
//! A device offers features that follow from its disk:
//!
//! ```
//! use block::file::{FileOptions, ImageFile};
//! use block::raw::RawDisk;
//! use virtio_devices::blk::{BlockDevice, BlockDeviceConfig};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let file = tempfile::NamedTempFile::new()?;
//! let image = ImageFile::open(file.path(), FileOptions { write: false, direct: false })?;
//! let disk = RawDisk::new(image, 1 << 20, false);
//! let device = BlockDevice::new(disk, &BlockDeviceConfig { num_queues: 2, queue_size: 128, serial: "root" })?;
//!
//! const VIRTIO_BLK_F_RO: u64 = 1 << 5;
//! assert_ne!(device.features() & VIRTIO_BLK_F_RO, 0, "the file is open for reading only");
//! # Ok(())
//! # }
//! ```
//!
//! Invariants: guests and clients are untrusted. Their input costs at most their own disk, never this process, its memory
//! or its other clients.

pub mod blk;
pub mod connect;
pub mod stats;
pub mod transport;
pub mod ublk;
pub mod vhost_user;
pub mod virtqueue;

#[cfg(test)]
mod conformance;
#[cfg(test)]
mod testing;
