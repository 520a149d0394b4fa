//! How a disk is offered to a virtual machine.
//!
//! The crate knows guests and no image formats: whatever implements `block::Disk` can be offered. It
//! owns the virtqueue ([`virtqueue`]), the virtio-blk device ([`block`]), the vhost-user backend
//! ([`vhost_user`]) that offers the device to another process's virtual machine, and the ublk server ([`ublk`]) that
//! offers the disk to this machine itself.
//!
//! What must stay true: a guest and a client are untrusted. Whatever they write costs at most their own
//! disk, never this process, its memory or its other clients.

pub mod block;
pub mod connect;
pub mod transport;
pub mod ublk;
pub mod vhost_user;
pub mod virtqueue;

#[cfg(test)]
mod testing;
