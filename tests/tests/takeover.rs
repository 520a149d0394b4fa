//! A stock Linux guest goes on while the servers of its disks are replaced on purpose, and QEMU does not notice: it
//! keeps its connections, and was not told to connect again.
#![expect(clippy::print_stdout, reason = "a number that was measured is worth a line")]

use std::thread;
use std::time::Duration;

use lab::{Error, Guest, Scratch, Server, image};

const MIB: u64 = 1 << 20;
/// The number of times that each server is replaced.
const TAKEOVERS: u64 = 8;
/// The time that takeovers may add, in milliseconds, to the longest that a request of the guest takes without them: an
/// emulated CPU under load has long ones of its own. Compilers beside it on two CPUs hold up each of the processes that a takeover wakes in
/// turn, 125 ms together at most so far; `vmm/tests/restart/takeover.rs` sorts such times out, and allows 100 ms.
const INTERRUPTION_MAX_MS: f64 = 250.0;

const WORK: &str = include_str!("../guest/vhost_user/replaced.sh");

/// The longest latency that fio tells of, in milliseconds.
fn longest_ms(line: &str) -> Option<f64> {
    let unit = match line.split(['(', ')']).nth(1)? {
        "nsec" => 1e-6,
        "usec" => 1e-3,
        "msec" => 1.0,
        _ => return None,
    };
    let max = line.split("max=").nth(1)?.split(',').next()?.trim();
    let (digits, factor) = max
        .strip_suffix('k')
        .map_or((max, 1.0), |digits| (digits, 1000.0));
    Some(digits.parse::<f64>().ok()? * factor * unit)
}

#[test]
fn guest_does_not_notice_replaced_servers() -> Result<(), Error> {
    let lab = lab::require();
    let scratch = Scratch::new()?;
    let (root, data) = (scratch.file("root.qcow2"), scratch.file("data.qcow2"));
    image::overlay(&root, lab.base())?;
    image::create(&data, "qcow2", "cluster_size=16k,extended_l2=on", 256 * MIB)?;
    let control = scratch.file("control").display().to_string();
    let grow = |bytes: u64| {
        image::ringdisk(&[
            "ctl",
            "--socket",
            &control,
            "disk-resize",
            "data",
            &bytes.to_string(),
        ])
    };
    let [larger, largest] = [288 * MIB, 320 * MIB];
    let root_disk = format!("path={},backing_files=on", root.display());
    let data_disk = format!("path={},num_queues=2,id=data", data.display());
    let (root_socket, data_socket) = (scratch.file("root.sock"), scratch.file("data.sock"));
    let mut root_server = Server::ringdisk(&root_socket, &root_disk)?;
    let mut data_server = Server::ringdisk_with(&["--control", &control], &data_socket, &data_disk)?;

    let mut guest = Guest::new(&lab)
        .cpus(2)
        .disk("root", &root_socket, 1)
        .disk("data", &data_socket, 2)
        .script(&format!(
            "seconds={} larger={larger} largest={largest}\n{WORK}",
            TAKEOVERS * 2 + 6
        ))
        .boot(&scratch, "guest")?;
    guest.wait_for(|line| line == "ready")?;
    grow(larger)?;
    let grown = format!("grown to {larger}");
    guest.wait_for(|line| line == grown)?;
    thread::sleep(Duration::from_secs(3));
    for _ in 0..TAKEOVERS {
        let replace = |old: Server, more: &[&str], socket, disk: &str| -> Result<Server, Error> {
            let arguments = [&["--takeover"], more].concat();
            let new = Server::ringdisk_with(&arguments, socket, disk)?;
            old.succeeded()?;
            Ok(new)
        };
        data_server = replace(data_server, &["--control", &control], &data_socket, &data_disk)?;
        root_server = replace(root_server, &[], &root_socket, &root_disk)?;
        thread::sleep(Duration::from_secs(1));
    }
    assert_eq!(
        guest.lines().last(),
        Some(&grown),
        "the work outlasts the takeovers"
    );
    // The last server was not connected to, and still can tell the guest.
    grow(largest)?;
    let outcome = guest.finish()?;
    root_server.stop()?;
    data_server.stop()?;

    assert_eq!(outcome.complaints(), Vec::<&str>::new(), "{}", outcome.console());
    let longest = |name: &str| {
        let told = outcome.lines().filter(|line| line.starts_with(name));
        let told = told.filter_map(longest_ms);
        told.reduce(f64::max).expect("fio tells of its latencies")
    };
    let (undisturbed, latency) = (longest("undisturbed "), longest("latency "));
    println!("the guest's longest request: {latency} ms; without takeovers: {undisturbed} ms");
    assert!(
        latency <= undisturbed + INTERRUPTION_MAX_MS,
        "{latency} ms; without takeovers: {undisturbed} ms"
    );
    for path in [&root, &data] {
        image::check_flawless(path)?;
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
