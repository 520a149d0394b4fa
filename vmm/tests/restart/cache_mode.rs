//! The cache mode that a guest chose, over a kill, a stop and a takeover of its server. A client does not tell it
//! again (QEMU does not), and a guest in writethrough never sends a flush.

use crate::client::{Ask, BLOCK, Client};
use crate::server::{Server, World};

const BLOCKS: usize = 1024;
/// In the log of a server that does not know the mode.
const UNKNOWN: &str = "reconnected without its guest's cache mode";
const WRITETHROUGH: u8 = 0;
const WRITEBACK: u8 = 1;

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Event {
    Kill,
    Stop,
    Takeover,
}

/// Has another server serve the client.
fn follow(world: &World, client: &mut Client, old: Server, event: Event, arguments: &[&str]) -> Server {
    match event {
        Event::Kill => old.kill(),
        Event::Stop => assert_eq!(old.stop(), Some(0), "{}", world.log()),
        Event::Takeover => {
            let new = world.serve(&[arguments, &["--takeover"]].concat());
            assert_eq!(old.wait(), Some(0), "{}", world.log());
            return new;
        }
    }
    let new = world.serve(arguments);
    client.connect(&world.path("socket"));
    new
}

fn write(client: &mut Client, block: usize) {
    assert!(client.submit(Ask::Write(block as u64 + 1), block));
    client.drain();
}

fn first(world: &World, mode: u8, arguments: &[&str]) -> (Client, Server) {
    let mut client = Client::new(BLOCKS, false);
    client.chooses_mode = true;
    client.reads_config = true;
    let server = world.serve(arguments);
    client.connect(&world.path("socket"));
    client.reads_config = false;
    assert_eq!(client.shown_mode(), WRITEBACK);
    client.choose_mode(mode);
    (client, server)
}

/// Each block is in a cluster of its own, so that losing its mapping loses it.
fn nothing_answered_is_lost(event: Event, arguments: &[&str]) {
    let world = World::new("cluster_size=65536", BLOCKS * BLOCK);
    let (mut client, mut server) = first(&world, WRITETHROUGH, arguments);
    for round in 0..3 {
        write(&mut client, 100 * round);
        server = follow(&world, &mut client, server, event, arguments);
    }
    write(&mut client, 500);
    server.kill();
    let last = world.serve(arguments);
    client.connect(&world.path("socket"));
    for block in [0, 100, 200, 500] {
        assert!(client.submit(Ask::Read, block));
    }
    client.drain();
    if event == Event::Takeover || !arguments.is_empty() {
        let shown = client.shown_mode();
        let forgotten = arguments.is_empty();
        // Without inflight tracking the kill at the end took the mode with it.
        assert_eq!(shown, u8::from(forgotten), "{event:?} {arguments:?}");
    }
    assert_eq!(last.stop(), Some(0), "{}", world.log());
    world.assert_sound(true);
    client.assert_contents(&world.contents());
}

#[test]
fn writethrough_guest_loses_no_answered_write() {
    for event in [Event::Kill, Event::Stop, Event::Takeover] {
        for arguments in [&[][..], &["--restartable"]] {
            nothing_answered_is_lost(event, arguments);
        }
    }
}

#[test]
fn writeback_guest_stays_so_if_the_mode_is_known() {
    for (event, arguments, known) in [
        (Event::Kill, &["--restartable"][..], true),
        (Event::Stop, &["--restartable"], true),
        (Event::Takeover, &["--restartable"], true),
        (Event::Takeover, &[], true),
        (Event::Stop, &[], false),
    ] {
        let world = World::new("cluster_size=65536", BLOCKS * BLOCK);
        let (mut client, server) = first(&world, WRITEBACK, arguments);
        write(&mut client, 0);
        let server = follow(&world, &mut client, server, event, arguments);
        write(&mut client, 100);
        let log = world.log();
        assert_eq!(log.contains(UNKNOWN), !known, "{event:?} {arguments:?}: {log}");
        assert_eq!(server.stop(), Some(0), "{}", world.log());
        world.assert_sound(false);
        client.assert_contents(&world.contents());
    }
}
