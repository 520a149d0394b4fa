//! The `ringdisk` command: QCOW2 disks for virtual machines, and tools for their images.
//!
//! This crate is where formats and frontends meet. It turns the command line into opened disks
//! ([`disk_config`], [`mod@open`]) and hands them to what serves them: virtual machines over vhost-user
//! ([`vhost_user`]), a machine of our own ([`run`], [`machine`]), or the command line itself ([`io`]). Image tools are in [`image`].
//!
//! What must stay true: whatever the command line asks and cannot be had is refused, by name, before
//! anything is written; and a command that ends has told how in its exit code.

mod background;
pub mod cli;
pub mod control;
pub mod disk_config;
pub mod error;
pub mod image;
pub mod io;
pub mod key_value;
pub mod limits;
pub mod logging;
pub mod machine;
pub mod once;
pub mod open;
pub mod run;
pub mod sandbox;
mod sd_notify;
pub mod signals;
pub mod size;
pub mod socket;
pub mod takeover;
pub mod ublk;
pub mod vhost_user;
