//! The `ringdisk` command: serves QCOW2 disks to virtual machines and to the host, and has the tools for their images.
//!
//! ```text
//!  command line ──▶ cli ──▶ disk_config ──▶ open ──▶ block::Disk
//!                    │                                 │
//!                    ├ vhost_user, takeover ◀──────────┤  serve it to other programs' machines
//!                    ├ run, machine ◀──────────────────┤  to a machine on KVM in this process
//!                    ├ ublk ◀──────────────────────────┤  to the host, as /dev/ublkbN
//!                    ├ io ◀────────────────────────────┘  to commands on standard input
//!                    └ image                              create, info, check
//! ```
//!
//! This is the only crate that uses both formats and frontends. [`sandbox`] confines what serves; [`control`] is the control
//! socket of all servers, and `exchange` answers it; [`metrics`] serves statistics; [`error`] makes exit codes and the one line
//! of a failure.
//!
//! ```
//! use ringdisk::disk_config::DiskConfig;
//!
//! let disk = DiskConfig::parse("path=a.qcow2,num_queues=2")?;
//! assert_eq!(disk.num_queues, 2);
//!
//! let error = DiskConfig::parse("path=a.qcow2,num_queue=2").expect_err("a misspelt key");
//! assert!(error.to_string().contains("did you mean `num_queues`?"));
//! # Ok::<(), ringdisk::disk_config::DiskConfigError>(())
//! ```
//!
//! Invariants: a request that cannot be fulfilled is refused by name before anything is written; a command reports its
//! result in its exit code.

mod background;
pub mod cli;
pub mod cloud_init;
mod config_file;
pub mod control;
mod ctl;
pub mod disk_config;
mod disks;
mod errands;
pub mod error;
mod exchange;
mod heed;
pub mod image;
mod image_folders;
pub mod io;
pub mod key_value;
pub mod limits;
pub mod logging;
pub mod machine;
pub mod metrics;
pub mod net_config;
pub mod once;
pub mod open;
mod parallel;
mod pid_file;
pub mod run;
pub mod sandbox;
pub mod saved_devices;
mod sd_notify;
mod seat;
pub mod secret_file;
mod serve;
mod shrink;
pub mod signals;
pub mod size;
mod snapshots;
pub mod socket;
pub mod takeover;
pub mod ublk;
pub mod vhost_user;
