//! The third ring of ringdisk-block: a simulated world of disks, seeded and deterministic.
//!
//! ```text
//!  engine, queues, workers (production code)
//!        │ ops                                    ┌─ SimWorld::step: one op takes effect, or completes
//!  Ring ─▶ driver ─▶ world: ops in flight ─▶ file: versions of sectors ─▶ crash: what a power cut can leave
//!                     memory: whose memory is it?   image: interned sectors
//!  Ring ─▶ short (a real driver, cut short)       pages: registered buffers, in the world and on real rings
//! ```
//!
//! A [`SimWorld`] holds files and the ops in flight on them. [`SimWorld::context`] makes a worker's context
//! whose ring runs on it; everything above the ring is production code. Nothing happens by itself: the
//! world's owner lets it take one [step](SimWorld::step) at a time, between the rounds of any number of
//! [workers](block::worker::Worker::by_hand), all in one thread.
//!
//! The seed decides the behaviour of a disk within the limits of the [`Profile`]:
//!
//! - Ops take effect in any order, whole or piece by piece, at any moment between submission and completion, and
//!   complete later still.
//! - Writes stay in a volatile cache until a sync that was submitted after they had completed. A power cut leaves
//!   [any subset](CrashSpace) of the sectors that were not synced.
//! - Any op may fail, be cut short, be cancelled or have to be retried. Space runs out and comes back.
//! - Direct and buffered I/O behave the same, but a file with an [alignment](SimWorld::set_alignment) refuses
//!   misaligned ops.
//!
//! The memory of ops is [watched](memory). [`Pages`](pages::Pages) stand in for the buffers that a kernel driver
//! registers, in the world and on a real ring.
//!
//! Invariant: the same seed and the same calls give the same [trace](SimWorld::trace_hash). No decision
//! depends on an address, a clock, a descriptor's number or the order of a randomly seeded map.
//!
//! ```
//! use block::AlignedBuf;
//! use simulator::{Profile, SimWorld};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let world = SimWorld::new(7, Profile::default());
//! let cx = world.context(16);
//! let view = world.file("disk", true).view(&cx)?;
//! cx.block_on(view.write_at(0, AlignedBuf::from_slice(&[0xaa; 512])))??;
//! assert!(world.crash_space("disk").count() > 1, "a power cut leaves the old sector or the new one");
//! cx.block_on(view.sync())??;
//! assert_eq!(world.crash_space("disk").count(), 1);
//! # Ok(())
//! # }
//! ```

mod crash;
mod driver;
mod file;
mod image;
pub mod memory;
pub mod pages;
mod profile;
mod random;
#[cfg(test)]
mod registered_file_tests;
#[cfg(test)]
mod registered_ring_tests;
mod short;
mod sim_world;
#[cfg(test)]
mod sync_tests;
#[cfg(test)]
mod tests;
mod trace;
mod world;

pub use crash::CrashSpace;
pub use image::{SECTOR, SimImage, Store};
pub use profile::{Faults, Profile};
pub use random::Random;
pub use sim_world::SimWorld;
pub use trace::Event;
