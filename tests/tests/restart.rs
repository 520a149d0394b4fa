//! A stock Linux guest goes on while the server of its disks is killed and started again, and again: QEMU
//! connects to each new one, which finds what the last one had in flight.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use lab::{Error, Guest, Lab, Scratch, Server, image};

const MIB: u64 = 1 << 20;
/// The number of times that the data disk's server is killed; the root's is at every fifth.
const KILLS: u64 = 20;
/// As [`KILLS`], of disks that differ only in where and how their data lies.
const KILLS_OF_OTHERS: u64 = 8;

/// Clusters are small, so that it allocates to the end.
const WORK: &str = include_str!("../guest/vhost_user/killed.sh");

/// Boots a guest whose data disk is served as `data_disk` says, and kills its servers while it works. Returns the hash of
/// that disk as the guest reads it in the end. Both servers have ended cleanly then.
fn work_through_kills(
    lab: &Lab,
    scratch: &Scratch,
    root: &Path,
    data_disk: &str,
    kills: u64,
) -> Result<String, Error> {
    let root_disk = format!("path={},backing_files=on", root.display());
    let (root_socket, data_socket) = (scratch.file("root.sock"), scratch.file("data.sock"));
    let serve = |socket, disk: &str| Server::ringdisk_with(&["--restartable"], socket, disk);
    let mut root_server = serve(&root_socket, &root_disk)?;
    let mut data_server = serve(&data_socket, data_disk)?;

    let mut guest = Guest::new(lab)
        .cpus(2)
        .disk("root", &root_socket, 1)
        .disk("data", &data_socket, 2)
        .reconnects()
        .script(&format!("seconds={}\n{WORK}", kills + 8))
        .boot(scratch, "guest")?;
    guest.wait_for(|line| line == "ready")?;
    thread::sleep(Duration::from_secs(3));
    for kill in 0..kills {
        thread::sleep(Duration::from_millis(600 + kill * 37 % 300));
        data_server.kill()?;
        data_server = serve(&data_socket, data_disk)?;
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
    let hash = outcome.value("data ").and_then(|line| line.split(' ').next());
    Ok(hash.expect("the guest reads its disk").to_owned())
}

/// An overlay of the lab's root.
fn root_in(lab: &Lab, scratch: &Scratch) -> Result<PathBuf, Error> {
    let root = scratch.file("root.qcow2");
    image::overlay(&root, lab.base())?;
    Ok(root)
}

#[test]
fn guest_goes_on_while_its_servers_are_killed() -> Result<(), Error> {
    let lab = lab::require();
    let scratch = Scratch::new()?;
    let (root, data) = (root_in(&lab, &scratch)?, scratch.file("data.qcow2"));
    image::create(&data, "qcow2", "cluster_size=16k", 256 * MIB)?;
    let data_disk = format!("path={},num_queues=2", data.display());
    let read_by_guest = work_through_kills(&lab, &scratch, &root, &data_disk, KILLS)?;
    for path in [&root, &data] {
        // A kill may leave clusters that nobody uses, and nothing worse.
        image::check_sound(path)?;
    }
    let raw = data.with_extension("raw");
    image::convert(&data, &raw, "raw")?;
    assert_eq!(
        read_by_guest,
        image::sha256(&raw)?,
        "QEMU reads what the guest read"
    );
    Ok(())
}

/// The data disk is encrypted by us, and read by QEMU in the end.
#[test]
fn guest_goes_on_while_the_servers_of_its_encrypted_disk_are_killed() -> Result<(), Error> {
    let lab = lab::require();
    let scratch = Scratch::new()?;
    let (root, data) = (root_in(&lab, &scratch)?, scratch.file("data.qcow2"));
    let secret = scratch.file("secret");
    std::fs::write(&secret, "open sesame").expect("a secret");
    let (data_text, secret_text) = (data.to_string_lossy(), secret.to_string_lossy());
    let options = "cluster_size=16k,encrypt.format=luks,encrypt.iter-time=10";
    let size = (256 * MIB).to_string();
    image::ringdisk(&[
        "image",
        "create",
        "-o",
        options,
        "--secret-file",
        &secret_text,
        &data_text,
        &size,
    ])?;
    let data_disk = format!("path={data_text},num_queues=2,secret_file={secret_text}");
    let read_by_guest = work_through_kills(&lab, &scratch, &root, &data_disk, KILLS_OF_OTHERS)?;
    let verdict = image::check_encrypted(&data, &secret)?;
    assert!(!matches!(verdict, image::Verdict::Errors(_)), "{verdict:?}");
    let raw = data.with_extension("raw");
    image::convert_encrypted(&data, &secret, &raw)?;
    assert_eq!(
        read_by_guest,
        image::sha256(&raw)?,
        "QEMU reads what the guest read"
    );
    Ok(())
}

/// The data disk has a raw data file, which is the disk byte by byte in the end.
#[test]
fn guest_goes_on_while_the_servers_of_its_disk_with_a_data_file_are_killed() -> Result<(), Error> {
    let lab = lab::require();
    let scratch = Scratch::new()?;
    let (root, data) = (root_in(&lab, &scratch)?, scratch.file("data.qcow2"));
    let raw = scratch.file("data.raw");
    let options = format!("cluster_size=16k,data_file={},data_file_raw=on", raw.display());
    image::create(&data, "qcow2", &options, 256 * MIB)?;
    let data_disk = format!("path={},num_queues=2,data_file=on", data.display());
    let read_by_guest = work_through_kills(&lab, &scratch, &root, &data_disk, KILLS_OF_OTHERS)?;
    image::check_sound(&data)?;
    assert_eq!(read_by_guest, image::sha256(&raw)?, "the data file is the disk");
    let by_qemu = scratch.file("by-qemu.raw");
    image::convert(&data, &by_qemu, "raw")?;
    assert_eq!(
        read_by_guest,
        image::sha256(&by_qemu)?,
        "QEMU reads what the guest read"
    );
    Ok(())
}
