//! A snapshot that a server shows a guest in place of the disk.

use std::time::Duration;

use ringdisk_gen::Random;

use crate::client::{Ask, BLOCK, Client};
use crate::server::World;

const BLOCKS: usize = 512;

#[test]
fn client_reads_the_snapshot_and_cannot_change_it() {
    let world = World::new("cluster_size=4096", BLOCKS * BLOCK);
    let random = &mut Random::new(1);
    let mut writer = Client::new(BLOCKS, true);
    let mut work = |writer: &mut Client| {
        let server = world.serve(&[]);
        writer.connect(&world.path("socket"));
        writer.work(random, Duration::from_millis(300));
        writer.drain();
        assert_eq!(server.stop(), Some(0), "{}", world.log());
    };
    work(&mut writer);
    world.qemu_img(&["snapshot", "-c", "s", "disk.qcow2"]);
    let mut reader = Client::new(BLOCKS, false);
    reader.model.clone_from(&writer.model);
    reader.reads_only = true;
    work(&mut writer);
    assert!(reader.model != writer.model, "the disk has changed");
    let before = std::fs::read(world.path("disk.qcow2")).expect("the image");

    let disk = "path=disk.qcow2,poll_us=0,snapshot=name=s";
    let server = world.serve_disk(&["env", "--default-signal"], disk, &[]);
    reader.connect(&world.path("socket"));
    for block in 0..BLOCKS {
        for ask in [Ask::Write(7), Ask::Read] {
            while !reader.submit(ask, block) {
                reader.take_answers();
            }
        }
    }
    reader.drain();
    assert_eq!(reader.answered, 2 * BLOCKS as u64);
    assert_eq!(server.stop(), Some(0), "{}", world.log());
    let after = std::fs::read(world.path("disk.qcow2")).expect("the image");
    assert!(after == before, "the image has changed");
}
