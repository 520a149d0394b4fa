//! The virtio-blk device, independent of the transport of its queues.
//!
//! [`BlockDevice`] is what all queues share: the disk, the features, the configuration space. A
//! [`BlockQueue`] serves one virtqueue as a frontend of a worker. Spec: virtio 1.2, 5.2.
//!
//! Invariants: the status of every chain that was taken is written exactly once, and the chain is returned exactly once,
//! unless the queue is broken; no input of a guest reaches the disk unchecked.

mod config;
mod device;
mod queue;
mod queue_config;
mod request;
mod run;
#[cfg(test)]
mod tests;

pub(crate) use config::{CONFIG_BYTES, WRITEBACK_OFFSET};
pub(crate) use device::CacheMode;
pub use device::{BlockDevice, BlockDeviceConfig, ConfigWriteError, SERIAL_BYTES, SerialTooLong};
pub use queue::{BlockQueue, IN_FLIGHT_MAX};
pub use queue_config::{BlockQueueConfig, Notify, QueueReport, StartQueueError};
pub(crate) use run::{FlushError, flush};
pub use run::{RunQueueError, RunningQueue};
