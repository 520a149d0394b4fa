//! The channel on which a client learns that its disk has grown.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;

use super::tests::{World, wait};
use crate::testing::{DATA, DISK_BYTES, MemDisk};
use ringdisk_driver::blk::{IN, OK};
use vhost::vhost_user::VhostUserFrontend;

/// A client that passes a channel is told, one that does not is not, and none that is gone.
#[test]
fn client_with_a_channel_is_told_that_its_disk_has_grown() {
    let disk = MemDisk::new();
    let world = World::new(disk.disk(), 1);
    for round in 0..3 {
        let mut client = world.client(1);
        assert!(!world.channel.notify().expect("nobody to tell"), "round {round}");
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        client
            .frontend
            .set_backend_request_fd(&theirs)
            .expect("SET_BACKEND_REQ_FD");
        drop(theirs);
        for bytes in [DISK_BYTES + 512, DISK_BYTES + 4096] {
            disk.grow(bytes + round * 8192);
            assert!(world.channel.notify().expect("a message"));
            let mut message = [0; 12];
            (&ours).read_exact(&mut message).expect("a message");
            // A change of the configuration, in version 1, without a body.
            assert_eq!(message, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
            let sectors = u64::from_le_bytes(*client.config().first_chunk().expect("a capacity"));
            assert_eq!(sectors * 512, bytes + round * 8192);
        }
        drop(client);
        wait("the end of the client", || {
            matches!(world.channel.notify(), Ok(false))
        });
        let rest = std::io::copy(&mut &ours, &mut std::io::sink()).expect("the channel is closed");
        assert_eq!(rest % 12, 0, "whole messages, from the wait");
    }
}

/// A client that does not read is not waited for.
#[test]
fn client_that_reads_no_messages_holds_nobody_up() {
    let disk = MemDisk::new();
    let world = World::new(disk.disk(), 1);
    let mut client = world.client(1);
    let (_ours, theirs) = UnixStream::pair().expect("sockets");
    client
        .frontend
        .set_backend_request_fd(&theirs)
        .expect("SET_BACKEND_REQ_FD");
    let error = (0..1 << 20).find_map(|_| world.channel.notify().err());
    assert_eq!(error.expect("a full socket").kind(), io::ErrorKind::WouldBlock);
    assert_eq!(client.ask(0, IN, 0, &[(DATA, 512, true)]), OK);
}
