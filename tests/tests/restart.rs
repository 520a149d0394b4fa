//! A stock Linux guest goes on while the server of its disks is killed and started again, and again: QEMU
//! connects to each new one, which finds what the last one had in flight.

use std::thread;
use std::time::Duration;

use lab::{Error, Guest, Scratch, Server, image};

const MIB: u64 = 1 << 20;
/// The number of times that the data disk's server is killed; the root's is at every fifth.
const KILLS: u64 = 20;

/// Clusters are small, so that it allocates to the end.
const WORK: &str = include_str!("../guest/vhost_user/killed.sh");

#[test]
fn guest_goes_on_while_its_servers_are_killed() -> Result<(), Error> {
    let lab = lab::require();
    let scratch = Scratch::new()?;
    let (root, data) = (scratch.file("root.qcow2"), scratch.file("data.qcow2"));
    image::overlay(&root, lab.base())?;
    image::create(&data, "qcow2", "cluster_size=16k", 256 * MIB)?;
    let root_disk = format!("path={},backing_files=on", root.display());
    let data_disk = format!("path={},num_queues=2", data.display());
    let (root_socket, data_socket) = (scratch.file("root.sock"), scratch.file("data.sock"));
    let serve = |socket, disk: &str| Server::ringdisk_with(&["--restartable"], socket, disk);
    let mut root_server = serve(&root_socket, &root_disk)?;
    let mut data_server = serve(&data_socket, &data_disk)?;

    let mut guest = Guest::new(&lab)
        .cpus(2)
        .disk("root", &root_socket, 1)
        .disk("data", &data_socket, 2)
        .reconnects()
        .script(&format!("seconds={}\n{WORK}", KILLS + 8))
        .boot(&scratch, "guest")?;
    guest.wait_for(|line| line == "ready")?;
    thread::sleep(Duration::from_secs(3));
    for kill in 0..KILLS {
        thread::sleep(Duration::from_millis(600 + kill * 37 % 300));
        data_server.kill()?;
        data_server = serve(&data_socket, &data_disk)?;
        if kill % 5 == 4 {
            root_server.kill()?;
            root_server = serve(&root_socket, &root_disk)?;
        }
    }
    assert_eq!(guest.lines(), ["ready"], "the work outlasts the kills");
    let outcome = guest.finish()?;
    root_server.stop()?;
    data_server.stop()?;

    assert_eq!(outcome.complaints(), Vec::<&str>::new(), "{}", outcome.console());
    for path in [&root, &data] {
        // A kill may leave clusters that nobody uses, and nothing worse.
        image::check_sound(path)?;
    }
    let raw = data.with_extension("raw");
    image::convert(&data, &raw, "raw")?;
    let guests = outcome.value("data ").and_then(|line| line.split(' ').next());
    assert_eq!(
        guests,
        Some(image::sha256(&raw)?.as_str()),
        "QEMU reads what the guest read"
    );
    Ok(())
}
