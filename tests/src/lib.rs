//! The lab: real kernels in virtual machines, on disks that a server under test provides over vhost-user-blk or ublk.
//!
//! ```text
//!  test ──require──▶ Lab: QEMU, kernels, base image, ringdisk (tests/setup.sh)
//!    ├ Scratch       a folder of its own: images, sockets, logs
//!    ├ Server        ringdisk vhost-user, or qemu-storage-daemon
//!    ├ Guest         a stock Debian kernel under QEMU runs a script; Machine: the same under `ringdisk run`
//!    └ Outcome       the lines that the script printed; then qemu-img checks the image
//! ```
//!
//! ```no_run
//! use lab::{Guest, Scratch, Server, image};
//!
//! # fn main() -> Result<(), lab::Error> {
//! let lab = lab::require();
//! let scratch = Scratch::new()?;
//! let root = scratch.file("root.qcow2");
//! image::overlay(&root, lab.base())?;
//! let server = Server::ringdisk(&scratch.file("root.sock"), &format!("path={},backing_files=on", root.display()))?;
//! let outcome = Guest::new(&lab)
//!     .disk("root", server.socket(), 1)
//!     .script("uname -r")
//!     .run(&scratch, "guest")?;
//! assert_eq!(outcome.lines().next(), Some(lab.kernel_version()));
//! server.stop()?;
//! image::check_flawless(&root)
//! # }
//! ```
//!
//! Invariants:
//!
//! - Nothing is skipped silently. A missing tool, guest or binary is an [`Error`] that names it and
//!   the command that installs it.
//! - Tests share only read-only files (the kernel, the base image). Everything else is in a folder
//!   of the test's own, so any number of tests, and of checkouts, run at once.
//! - Nothing is repeated silently. Only a known fault of the emulator or of the guest's kernel is a reason, and a
//!   repetition prints a line that is counted ([`begun_again`]).
//! - No process outlives the test that started it: each is killed when its handle is dropped, and by the
//!   kernel if the test itself is killed.
//!
//! The guest is emulated (TCG): no `/dev/kvm` is needed, and absolute speeds mean nothing.

mod again;
pub mod crash;
mod efi;
mod error;
mod fault;
mod guest;
mod heartbeat;
pub mod image;
mod initramfs;
mod machine;
mod migration;
pub mod nested;
mod prepare;
mod process;
mod results;
mod scratch;
mod server;

pub use again::{begun_again, test_name};
pub use efi::{Efi, require_efi};
pub use error::Error;
pub use guest::{Guest, Outcome, RunningGuest};
pub use machine::Machine;
pub use prepare::{Kernel, Lab, require, require_kernel};
pub use scratch::Scratch;
pub use server::Server;
