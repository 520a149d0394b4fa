//! A disk handed over as an open descriptor, served from inside the sandbox.

use std::fs::File;
use std::time::Duration;

use crate::client::{BLOCK, Client};
use crate::server::World;
use ringdisk_gen::Random;

/// No process can find the file by name any more.
#[test]
fn unlinked_disk_is_served_and_taken_over() {
    let world = World::new("cluster_size=65536", 256 * BLOCK);
    let mut file = File::open(world.path("disk.qcow2")).expect("the image");
    // The second server inherits the same file: it was opened while it had a name.
    let hand_over = [
        "bash",
        "-c",
        "exec 7<>\"${DISK:-disk.qcow2}\"; rm -f disk.qcow2; exec env --default-signal \"$0\" \"$@\"",
    ];
    let old = world.serve_disk(&hand_over, "path=/dev/fd/7", &["--sandbox", "on"]);
    let mut client = Client::new(256, false);
    client.connect(&world.path("socket"));
    let mut random = Random::new(0xfd7);
    client.work(&mut random, Duration::from_millis(100));
    client.drain();
    assert!(!world.path("disk.qcow2").exists());

    let again = format!("DISK=/proc/{}/fd/7", old.pid());
    let again = [&["env", &again][..], &hand_over].concat();
    let new = world.serve_disk(&again, "path=/dev/fd/7", &["--takeover"]);
    assert_eq!(old.wait(), Some(0), "{}", world.log());
    client.work(&mut random, Duration::from_millis(100));
    client.drain();
    assert!(client.answered > 0 && client.is_connected());
    assert_eq!(new.stop(), Some(0), "{}", world.log());
    assert_eq!(world.log(), "");

    let mut named = File::create(world.path("disk.qcow2")).expect("a file");
    std::io::copy(&mut file, &mut named).expect("a copy");
    world.assert_sound(false);
    client.assert_contents(&world.contents());
}
