//! A guest's view of a server that is killed or replaced, or that serves others who mean ill: the `ringdisk` program
//! against a vhost-user client of our own.

mod cache_mode;
mod client;
mod control;
mod density;
mod descriptor;
mod disks;
mod idle;
mod kill;
mod limits;
mod memory;
mod metrics;
mod migration;
mod overlay;
mod parts;
mod peers;
mod serve;
mod server;
mod several;
mod snapshot;
mod space;
mod stop;
mod takeover;
