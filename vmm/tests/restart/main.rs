//! A guest's view of a server that is killed or replaced: the `ringdisk` program against a vhost-user
//! client of our own that outlives it.

mod client;
mod kill;
mod server;
mod stop;
mod takeover;
