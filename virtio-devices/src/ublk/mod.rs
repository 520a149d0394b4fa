//! A disk for this host, as a block device of the kernel's ublk driver.
//!
//! [`Control`] sends commands about devices to the driver; a [`UblkDevice`] is one of them, with its queues on our own
//! workers, each on the ring that does the image's I/O too. [`UblkQueue`] turns the driver's requests into the disk's.
//!
//! ```text
//! /dev/ublkbN ◀─bio─ kernel ◀──descriptors, commands──▶ Channel ◀─▶ UblkQueue ──Request──▶ DiskQueue
//! ```
//!
//! Invariants: the kernel is never left waiting. A request that was fetched is committed, and a device is
//! deleted only when its queues have released its character device; if they cannot, the process must exit.

pub mod abi;
mod channel;
mod config;
mod control;
mod device;
mod error;
#[cfg(test)]
mod hand_over_tests;
#[cfg(any(test, feature = "model"))]
pub mod model;
mod params;
mod queue;
mod queue_state;
mod rights;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod zero_copy_tests;

pub use channel::{Channel, KernelChannel, PagesError, Transport};
pub use config::{Recovery, TransportChoice, UblkConfig, ZERO_COPY_FROM, first_slot};
pub use control::{
    Carrier, CommandError, Control, ControlCall, ControlDevice, OpenControlError, block_path, char_path,
    open_control,
};
pub use device::{HandOverError, HandOverProgress, RecoveringDevice, Step, UblkDevice, parting_duty};
pub use error::{AddError, CloseError, ResizeError};
pub use params::ParamsError;
pub use queue::UblkQueue;
pub use queue_state::{Counts, Duty, Events, QueueEvent, QueueState};
pub use rights::may_administer;
