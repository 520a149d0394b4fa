//! `--metrics` of commands that serve no client of ours; `vhost-user` is in the suite `restart`.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::process::Stdio;

use ringdisk_gen::patience::wait_for;

use crate::machine::{IDLE, Running, TINY, machines};
use crate::world::World;

#[test]
fn address_in_use_is_one_error_before_a_disk_is_opened() {
    let world = World::new();
    fs::write(world.path("kernel"), vec![0x5A; 4096]).expect("a file");
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    // It is missing, and nobody notices.
    let disk = ["--disk", "path=missing.qcow2", "--metrics", &address];
    for command in [
        &["run", "--kernel", "kernel", "--serial", "off"][..],
        &["ublk", "add"],
    ] {
        let line = world.ringdisk(&[command, &disk].concat()).refused(1);
        let expected =
            format!("--metrics {address}: the address is in use; stop its server or choose another one");
        assert_eq!(line, expected, "{command:?}");
    }
    for wrong in ["0.0.0.0:9350", "9350", "/run/metrics"] {
        let disk = ["--disk", "path=missing.qcow2", "--metrics", wrong];
        for command in [
            &["run", "--kernel", "kernel"][..],
            &["ublk", "add"],
            &["vhost-user"],
        ] {
            let line = world.ringdisk(&[command, &disk].concat()).refused(2);
            assert!(line.contains(wrong) || line.contains("0.0.0.0"), "{line}");
            assert!(line.contains("expected"), "{line}");
        }
    }
}

#[test]
fn machine_serves_statistics_of_its_process() {
    let Some(world) = machines("machine_serves_statistics_of_its_process") else {
        return;
    };
    let mut command = world.ringdisk_command();
    command.args(TINY).args(IDLE).args(["--serial", "off"]);
    command.args(["--disk", "path=disk.qcow2,id=root", "--metrics", "unix:metrics"]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut machine = Running::start(command);
    let ask = || {
        let mut stream = UnixStream::connect(world.path("metrics")).ok()?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        answer.contains("disk=\"root\"").then_some(answer)
    };
    let text = wait_for("statistics", ask);
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
    // The kernel leaves its disk alone.
    let quiet = "ringdisk_request_latency_seconds_count{disk=\"root\",kind=\"read\"} 0\n";
    assert!(text.contains(quiet), "{text}");
    let shown = |text: String| -> usize {
        let mut lines = text.lines();
        let shown = lines.find_map(|line| line.strip_prefix("process_open_fds "));
        shown.expect("its descriptors").parse().expect("a number")
    };
    // The machine may be starting still, and a client's connection comes and goes.
    let folder = format!("/proc/{}/fd", machine.child().id());
    wait_for("its number of descriptors", || {
        let shown = shown(ask()?);
        let files = fs::read_dir(&folder).expect("its files").count();
        (files.abs_diff(shown) <= 1).then_some(())
    });
    machine.signal("TERM");
    let ended = machine.ended();
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    assert!(!world.path("metrics").exists(), "the socket was left behind");
}
