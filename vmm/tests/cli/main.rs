//! The `ringdisk` binary as a person or a script meets it: what it prints, how it exits, and whether QEMU's
//! tools agree with what it did.

mod activation;
mod bitmaps;
mod compact;
mod descriptor;
mod image_keys;
mod image_tools;
mod io_language;
mod limits;
mod machine;
mod metrics;
mod overlay;
mod packaging;
mod resize;
mod run;
mod server;
mod snapshots;
mod terminal;
mod usage;
mod vhost_user;
mod world;
