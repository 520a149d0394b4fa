//! The lab: real kernels in virtual machines, on disks somebody serves over vhost-user-blk.
//!
//! A whole-system test asks for the lab with [`require`], makes images in a [`Scratch`] folder with
//! [`image`], starts a [`Server`], boots a [`Guest`] on it, and reads what the guest's script said.
//!
//! What must stay true:
//!
//! - Nothing is skipped in silence. A missing tool, guest or binary is an [`Error`] that names it and
//!   the command that brings it.
//! - Tests share only what is read-only (the kernel, the base image). Everything else lives in a folder
//!   of the test's own, so any number of tests, and of checkouts, run at once.
//! - Nothing is retried in silence. Only an emulator that has failed for certain is a reason, and says so in a line
//!   that is counted ([`begun_again`]).
//! - No process outlives the test that started it: each is killed when its handle is dropped, and by the
//!   kernel if the test itself is killed.
//!
//! The guest is emulated (TCG): no `/dev/kvm` is needed, and absolute speeds mean nothing.

mod again;
pub mod crash;
mod error;
mod guest;
mod heartbeat;
pub mod image;
mod initramfs;
mod machine;
pub mod nested;
mod prepare;
mod process;
mod results;
mod scratch;
mod server;

pub use again::{begun_again, test_name};
pub use error::Error;
pub use guest::{Guest, Outcome, RunningGuest};
pub use machine::Machine;
pub use prepare::{Kernel, Lab, require, require_kernel};
pub use scratch::Scratch;
pub use server::Server;
