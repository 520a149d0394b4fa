//! The life of a server: its socket, its lock, and how it stops.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use vhost::VhostBackend;
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};

use ringdisk_gen::patience::wait_until;

use crate::server::Server;
use crate::world::{Ended, World, exists};

#[test]
fn stop_signal_ends_the_server_without_warnings_or_leftovers() {
    for signal in ["TERM", "INT", "HUP"] {
        let world = World::new();
        world.qemu_create("a.qcow2", "compat=1.1", "1M");
        let mut server = Server::start(&world, &[("s", "path=a.qcow2,num_queues=2")]);
        let mode = world.path("s").metadata().expect("stat").permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "the socket is open to others");
        // A client that is connected and says nothing must not hold the stop up.
        let _client = UnixStream::connect(world.path("s")).expect("connect");
        server.signal(signal);
        let line = format!("serving a.qcow2 on s (process {})\n", server.pid());
        let ended = server.wait();
        assert_eq!(
            (ended.code, ended.stdout, ended.stderr.as_str()),
            (Some(0), line, ""),
            "{signal}"
        );
        assert!(!exists(&world.path("s")), "the socket was left behind");
        world.assert_flawless("a.qcow2");
    }
}

#[test]
fn signal_ignored_at_start_stays_ignored() {
    let world = World::new();
    world.qemu_create("a.qcow2", "compat=1.1", "1M");
    let environment = ["--ignore-signal=HUP", "RINGDISK_LOG=info"];
    let mut server = Server::start_with(&environment, &world, &[("s", "path=a.qcow2")]);
    server.signal("HUP");
    server.signal("TERM");
    let ended = server.wait();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(
        ended.stderr.contains("SIGTERM") && !ended.stderr.contains("SIGHUP"),
        "{ended:?}"
    );
}

#[test]
fn server_serves_one_client_after_another() {
    let world = World::new();
    world.qemu_create("a.qcow2", "compat=1.1", "1M");
    let mut server = Server::start(&world, &[("s", "path=a.qcow2")]);
    for _ in 0..20 {
        drop(UnixStream::connect(world.path("s")).expect("connect"));
    }
    assert!(server.is_running());
    server.signal("TERM");
    assert_eq!(server.wait().code, Some(0));
}

/// The size in bytes of the disk that is served at a socket.
fn capacity(world: &World, socket: &str) -> u64 {
    let mut client = Frontend::connect(world.path(socket), 1).expect("a connection");
    client.set_owner().expect("SET_OWNER");
    client.get_features().expect("GET_FEATURES");
    client
        .set_protocol_features(VhostUserProtocolFeatures::CONFIG)
        .expect("SET_PROTOCOL_FEATURES");
    // The capacity in sectors is the first field.
    let answer = client.get_config(0, 8, VhostUserConfigFlags::WRITABLE, &[0; 8]);
    let bytes = answer.expect("GET_CONFIG").1;
    u64::from_le_bytes(bytes.try_into().expect("eight bytes")) * 512
}

#[test]
fn disks_and_sockets_pair_up_in_order() {
    let world = World::new();
    world.qemu_create("a.qcow2", "compat=1.1", "1M");
    world.sparse_file("b.img", 2 << 20);
    let disks = [
        ("sa", "path=a.qcow2"),
        ("sb", "path=b.img,image_type=raw,serial=second"),
    ];
    let mut server = Server::start(&world, &disks);
    assert_eq!(
        ["sa", "sb"].map(|name| capacity(&world, name)),
        [1 << 20, 2 << 20]
    );
    server.signal("TERM");
    assert_eq!(server.wait().code, Some(0));
    assert!(!exists(&world.path("sa")) && !exists(&world.path("sb")));
}

#[test]
fn server_refuses_a_socket_in_use_and_replaces_a_stale_one() {
    let world = World::new();
    world.qemu_create("a.qcow2", "compat=1.1", "1M");
    world.qemu_create("b.qcow2", "compat=1.1", "1M");
    let server = Server::start(&world, &[("s", "path=a.qcow2")]);
    let line = world
        .ringdisk(&["vhost-user", "--socket", "s", "--disk", "path=b.qcow2"])
        .refused(1);
    let who = format!("ringdisk (process {})", server.pid());
    assert!(
        line.contains("socket s is in use by") && line.contains(&who),
        "{line}"
    );

    drop(server);
    assert!(
        exists(&world.path("s")),
        "a killed server cannot remove its socket"
    );
    let mut server = Server::start(&world, &[("s", "path=b.qcow2")]);
    server.signal("TERM");
    assert_eq!(server.wait().code, Some(0));
}

#[test]
fn served_image_is_locked_until_the_server_ends() {
    let world = World::new();
    world.qemu_create("a.qcow2", "compat=1.1", "1M");
    let mut server = Server::start(&world, &[("s", "path=a.qcow2")]);
    let who = format!("ringdisk (process {})", server.pid());
    let line = world.ringdisk(&["io", "--disk", "path=a.qcow2"]).refused(1);
    assert!(
        line.contains("a.qcow2 is locked") && line.contains(&who),
        "{line}"
    );
    let theirs = world.qemu("qemu-img", &["check", "a.qcow2"]);
    assert!(
        theirs.code != Some(0) && theirs.stderr.contains("lock"),
        "{theirs:?}"
    );

    server.signal("TERM");
    assert_eq!(server.wait().code, Some(0));
    world.assert_flawless("a.qcow2");
}

#[test]
fn read_only_disk_is_shared_with_readers_only() {
    let world = World::new();
    world.qemu_create("a.qcow2", "compat=1.1", "1M");
    let _server = Server::start(&world, &[("s", "path=a.qcow2,readonly=on")]);
    world
        .io("path=a.qcow2,readonly=on", &["read -P 0 0 1M"])
        .success();
    world.ringdisk(&["image", "check", "a.qcow2"]).success();
    let line = world.ringdisk(&["io", "--disk", "path=a.qcow2"]).refused(1);
    assert!(line.contains("is reading it and needs it unchanged"), "{line}");
}

#[test]
fn too_long_socket_path_is_refused_before_opening() {
    let world = World::new();
    let long = "x".repeat(200);
    let pair = ["--disk", "path=a.qcow2"];
    let line = world.ringdisk(&[&["vhost-user", "--socket", &long][..], &pair].concat());
    assert!(
        line.refused(2)
            .contains("is longer than 107 bytes; choose a shorter one")
    );
}

#[test]
fn server_refuses_an_image_given_twice() {
    let world = World::new();
    world.qemu_create("a.qcow2", "compat=1.1", "1M");
    let pairs = [
        "--socket",
        "s",
        "--disk",
        "path=a.qcow2",
        "--socket",
        "t",
        "--disk",
        "path=a.qcow2",
    ];
    let line = world.ringdisk(&[&["vhost-user"][..], &pairs].concat()).refused(2);
    assert!(line.contains("path=a.qcow2 are the same file"), "{line}");
    assert!(!exists(&world.path("s")) && !exists(&world.path("t")));
}

#[test]
fn server_refuses_a_socket_given_twice() {
    let world = World::new();
    for name in ["a.qcow2", "b.qcow2"] {
        world.qemu_create(name, "compat=1.1", "1M");
    }
    let pairs = ["--socket", "s", "./s", "--disk", "path=a.qcow2", "path=b.qcow2"];
    let line = world.ringdisk(&[&["vhost-user"][..], &pairs].concat()).refused(2);
    assert!(line.contains("socket ./s is given more than once"), "{line}");
    assert!(!exists(&world.path("s")));
}

#[test]
fn ringdisk_log_enables_the_log() {
    let world = World::new();
    world.qemu_create("a.qcow2", "compat=1.1", "1M");
    let ended: Ended = world
        .ringdisk_command()
        .args(["io", "--disk", "path=a.qcow2", "-c", "length"])
        .env("RINGDISK_LOG", "debug")
        .output()
        .expect("run ringdisk")
        .into();
    assert_eq!(ended.code, Some(0));
    assert!(ended.stderr.contains("DEBUG"), "{ended:?}");
    assert!(!ended.stderr.contains('\u{1b}'), "colours in a file: {ended:?}");
}

/// Every thread of the process `pid`: its name, and the words of these lines of its status.
fn threads(pid: u32, lines: &[&str]) -> Vec<(String, Vec<String>)> {
    let folder = std::fs::read_dir(format!("/proc/{pid}/task")).expect("a process");
    folder
        .filter_map(|entry| {
            // One that has ended meanwhile has none.
            let status = std::fs::read_to_string(entry.ok()?.path().join("status")).ok()?;
            let line = |name: &str| {
                let line = status
                    .lines()
                    .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
                line.map(|value| value.trim().to_owned()).unwrap_or_default()
            };
            Some((line("Name"), lines.iter().map(|name| line(name)).collect()))
        })
        .collect()
}

#[test]
fn sandbox_holds_every_server_thread_unless_off() {
    let world = World::new();
    world.qemu_create("a.qcow2", "compat=1.1", "1M");
    // Outside the sandbox they have what we have: a container may be in one of its own.
    const LINES: [&str; 2] = ["NoNewPrivs", "Seccomp"];
    let (_, ours) = threads(std::process::id(), &LINES).swap_remove(0);
    for (option, expected) in [("on", vec!["1".to_owned(), "2".to_owned()]), ("off", ours)] {
        let mut server = Server::start_as(
            &["--sandbox", option],
            &world,
            &[("s", "path=a.qcow2,num_queues=2")],
        );
        let _client = UnixStream::connect(world.path("s")).expect("connect");
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let found = threads(server.pid(), &LINES);
            if found.len() >= 5 && found.iter().all(|(_, values)| *values == expected) {
                break;
            }
            assert!(Instant::now() < deadline, "--sandbox {option}: {found:?}");
            std::thread::yield_now();
        }
        server.signal("TERM");
        let ended = server.wait();
        assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
        assert!(!exists(&world.path("s")), "the socket was left behind");
        world.assert_flawless("a.qcow2");
    }
}

#[test]
fn server_takes_an_inherited_descriptor_as_image() {
    let world = World::new();
    world.qemu_create("a.qcow2", "compat=1.1", "1M");
    let ringdisk = world.ringdisk_command();
    let script = "exec 7<>a.qcow2; mv a.qcow2 b.qcow2; \
                  exec env --default-signal \"$0\" vhost-user --socket s --disk path=/dev/fd/7";
    let mut command = Command::new("sh");
    command
        .args(["-c", script])
        .arg(ringdisk.get_program())
        .current_dir(world.path(""));
    let mut server = Server::spawn(&mut command, 1);
    let line = world.ringdisk(&["io", "--disk", "path=b.qcow2"]).refused(1);
    assert!(line.contains("b.qcow2 is locked"), "{line}");
    server.signal("TERM");
    let ended = server.wait();
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{ended:?}");
    world.assert_flawless("b.qcow2");
}

/// A socket's name proves nothing: a killed server may have left it.
#[test]
fn ready_is_notified_when_clients_can_connect() {
    let world = World::new();
    world.qemu_create("a.qcow2", "compat=1.1", "1M");
    let manager = UnixDatagram::bind(world.path("notify")).expect("a socket");
    manager
        .set_read_timeout(Some(Duration::from_secs(20)))
        .expect("a timeout");
    let environment = format!("NOTIFY_SOCKET={}", world.path("notify").display());
    let mut server = Server::start_with(&[&environment], &world, &[("s", "path=a.qcow2")]);
    let mut bytes = [0; 32];
    let count = manager.recv(&mut bytes).expect("a message within 20 s");
    assert_eq!(&bytes[..count], b"READY=1");
    UnixStream::connect(world.path("s")).expect("it listens");
    server.signal("TERM");
    server.wait().success();

    // One that cannot serve does not claim it.
    let failed = world
        .ringdisk_command()
        .env("NOTIFY_SOCKET", world.path("notify"))
        .args(["vhost-user", "--socket", "s", "--disk", "path=none"])
        .output()
        .expect("run ringdisk");
    assert_eq!(failed.status.code(), Some(1));
    manager.set_nonblocking(true).expect("no wait");
    assert!(manager.recv(&mut bytes).is_err(), "it said that it was ready");
}

#[test]
fn daemonize_returns_when_it_serves_or_has_failed() {
    let world = World::new();
    world.qemu_create("a.qcow2", "compat=1.1", "1M");
    let daemonize = |disk: &str| -> Ended {
        // Whoever stays in the background keeps standard error.
        let errors = std::fs::File::create(world.path("errors")).expect("a file");
        let mut command = world.ringdisk_command();
        command.args([
            "vhost-user",
            "--daemonize",
            "--pidfile",
            "pid",
            "--socket",
            "s",
            "--disk",
            disk,
        ]);
        let mut ended: Ended = command
            .stdout(Stdio::piped())
            .stderr(errors)
            .spawn()
            .and_then(std::process::Child::wait_with_output)
            .expect("run ringdisk")
            .into();
        ended.stderr = String::from_utf8(world.bytes("errors")).expect("UTF-8");
        ended
    };
    let failed = daemonize("path=none").refused(1);
    assert!(failed.contains("cannot open none"), "{failed}");
    assert!(!exists(&world.path("pid")), "nobody serves");

    let said = daemonize("path=a.qcow2").success();
    let process = said
        .strip_prefix("serving a.qcow2 on s (process ")
        .and_then(|rest| rest.strip_suffix(")\n"))
        .unwrap_or_else(|| panic!("{said:?}"));
    UnixStream::connect(world.path("s")).expect("it listens");
    assert_eq!(world.bytes("pid"), format!("{process}\n").as_bytes());
    let stopped = Command::new("kill").arg(process).status();
    assert!(stopped.expect("run kill").success());
    wait_until("end of the server", || {
        !exists(&world.path("s")) && !exists(&world.path("pid"))
    });
}
