//! Sockets and processes of a service manager: those that it passes, those who may connect, and the process it goes by.

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use ringdisk_gen::patience::wait_for;
use rustix::io::{FdFlags, fcntl_setfd};

use crate::server::Server;
use crate::world::{World, exists};

/// Returns true if a vhost-user server answers a client's first message on `stream`: its features.
fn is_answered(mut stream: &UnixStream) -> bool {
    use std::io::{Read, Write};
    let get_features: [u32; 3] = [1, 1, 0];
    let request: Vec<u8> = get_features.iter().flat_map(|word| word.to_ne_bytes()).collect();
    stream
        .set_read_timeout(Some(Duration::from_secs(20)))
        .expect("a timeout");
    let mut answer = [0; 20];
    stream.write_all(&request).is_ok() && stream.read_exact(&mut answer).is_ok()
}

/// The tool of systemd starts the server when the first client has connected, with the socket that it made.
#[test]
fn server_serves_the_socket_that_systemd_passes_and_leaves_its_file() {
    let world = World::new();
    world.qemu_create("a.qcow2", "compat=1.1", "1M");
    let ringdisk = world.ringdisk_command();
    let mut command = Command::new("systemd-socket-activate");
    command
        .arg("--listen")
        .arg(world.path("s"))
        .arg(ringdisk.get_program())
        .args(["vhost-user", "--disk", "path=a.qcow2"])
        .current_dir(world.path(""))
        .env_remove("RINGDISK_LOG")
        .stderr(Stdio::null());
    let world = &world;
    let mut server = std::thread::scope(|scope| {
        let client = scope.spawn(|| {
            // Its file is there a moment before it is listened on.
            wait_for("socket that systemd made", || {
                UnixStream::connect(world.path("s")).ok()
            })
        });
        let server = Server::spawn(&mut command, 1);
        assert!(
            is_answered(&client.join().expect("no panic")),
            "the client that it was started for"
        );
        server
    });
    // One that takes over knows that the file is not the server's.
    let mut new = Server::start_as(&["--takeover"], world, &[("s", "path=a.qcow2")]);
    assert_eq!(server.wait().code, Some(0));
    assert!(is_answered(
        &UnixStream::connect(world.path("s")).expect("it listens")
    ));
    new.signal("TERM");
    new.wait().success();
    assert!(exists(&world.path("s")), "the manager goes on listening there");
    assert!(!exists(&world.path("s.takeover")));
    world.assert_flawless("a.qcow2");
}

/// A listener that children get too.
fn passed_on(path: &Path) -> UnixListener {
    let listener = UnixListener::bind(path).expect("bind");
    fcntl_setfd(&listener, FdFlags::empty()).expect("fcntl");
    listener
}

#[test]
fn fd_names_a_listening_socket_of_the_caller() {
    let world = World::new();
    world.qemu_create("a.qcow2", "compat=1.1", "1M");
    let listener = passed_on(&world.path("s"));
    let number = listener.as_raw_fd().to_string();
    // It waits for the server, unlike one that finds nobody listening.
    let client = UnixStream::connect(world.path("s")).expect("connect");
    let mut command = world.ringdisk_command();
    command.args(["vhost-user", "--fd", &number, "--disk", "path=a.qcow2"]);
    let mut server = Server::spawn(&mut command, 1);
    assert!(is_answered(&client));
    server.signal("TERM");
    server.wait().success();
    assert!(exists(&world.path("s")));
    drop(listener);

    let refused = |arguments: &[&str], code| {
        let disk = ["vhost-user", "--disk", "path=a.qcow2"];
        world.ringdisk(&[&disk[..], arguments].concat()).refused(code)
    };
    let error = refused(&["--fd", "1"], 1);
    assert_eq!(
        error,
        "descriptor 1 is not open, or is in use here; expected a listening Unix stream socket with a path"
    );
    let tcp = OwnedFd::from(std::net::TcpListener::bind("127.0.0.1:0").expect("bind"));
    fcntl_setfd(&tcp, FdFlags::empty()).expect("fcntl");
    let number = tcp.as_raw_fd().to_string();
    assert!(refused(&["--fd", &number], 1).contains("is no Unix socket"));
    let error = refused(&["--fd", "7", "8"], 2);
    assert_eq!(error, "2 --fd for 1 --disk; each disk needs its own socket");
    assert!(refused(&["--fd", "7", "--socket", "s"], 2).contains("cannot be used with"));
    assert!(refused(&["--fd", "7", "--takeover"], 2).contains("expected --socket, the path"));
    assert!(refused(&["--fd", "7", "--socket-mode", "660"], 2).contains("expected --socket"));
    assert!(refused(&[], 2).starts_with("--socket is missing; expected a path for each --disk"));
    world.assert_flawless("a.qcow2");
}

#[test]
fn socket_mode_and_group_say_who_may_connect() {
    let world = World::new();
    world.qemu_create("a.qcow2", "compat=1.1", "1M");
    // A group that whoever runs this is in.
    let group = world.path("").metadata().expect("stat").gid().to_string();
    for (arguments, mode) in [
        (&["--socket-group", &group][..], 0o660),
        (&["--socket-mode", "0666"], 0o666),
        (&["--socket-mode", "600", "--socket-group", &group], 0o600),
    ] {
        let mut server = Server::start_as(arguments, &world, &[("s", "path=a.qcow2")]);
        let found = world.path("s").metadata().expect("stat");
        assert_eq!(found.permissions().mode() & 0o777, mode, "{arguments:?}");
        assert_eq!(found.gid().to_string(), group, "{arguments:?}");
        // Who may connect to the disk may not take it over.
        let takeover = world.path("s.takeover").metadata().expect("stat");
        assert_eq!(takeover.permissions().mode() & 0o777, 0o600);
        server.signal("TERM");
        server.wait().success();
    }
    for (arguments, wanted) in [
        (
            ["--socket-mode", "0888"],
            "--socket-mode 0888: expected an octal mode",
        ),
        (
            ["--socket-group", "no-such-group"],
            "--socket-group no-such-group: there is no such group",
        ),
    ] {
        let command = [
            &["vhost-user", "--socket", "s", "--disk", "path=a.qcow2"],
            &arguments[..],
        ]
        .concat();
        let error = world.ringdisk(&command).refused(2);
        assert!(error.starts_with(wanted), "{error}");
    }
}

/// Makes the socket on which a service manager listens.
fn manager(world: &World) -> UnixDatagram {
    let manager = UnixDatagram::bind(world.path("notify")).expect("a socket");
    let limited = manager.set_read_timeout(Some(Duration::from_secs(20)));
    limited.expect("a timeout");
    manager
}

/// Returns the next message that a manager hears.
fn heard(manager: &UnixDatagram) -> String {
    let mut bytes = [0; 64];
    let count = manager.recv(&mut bytes).expect("a message within 20 s");
    String::from_utf8_lossy(&bytes[..count]).into_owned()
}

/// A manager goes by how its main process ends: the old server's end must not look like the service's.
#[test]
fn takeover_tells_the_manager_the_new_process_before_the_old_one_ends() {
    let world = World::new();
    world.qemu_create("a.qcow2", "compat=1.1", "1M");
    let manager = manager(&world);
    let said = || heard(&manager);
    let environment = format!("NOTIFY_SOCKET={}", world.path("notify").display());
    let pair = [("s", "path=a.qcow2")];
    let mut old = Server::start_with(&[&environment], &world, &pair);
    assert_eq!(said(), "READY=1");
    let mut new = Server::run(&[&environment], &["--takeover"], &world, &pair);
    assert_eq!(said(), format!("MAINPID={}", new.pid()));
    assert_eq!(said(), "READY=1");
    assert_eq!(old.wait().code, Some(0));
    new.signal("TERM");
    new.wait().success();
}

/// A manager that has a watchdog hears that the workers work, from the server that takes over too, which is told how often.
#[test]
fn watchdog_hears_of_the_server_and_of_the_one_that_takes_over() {
    let world = World::new();
    world.qemu_create("a.qcow2", "compat=1.1", "1M");
    let manager = manager(&world);
    let said = || heard(&manager);
    let notify = format!("NOTIFY_SOCKET={}", world.path("notify").display());
    let pair = [("s", "path=a.qcow2,num_queues=2")];
    let environment = [notify.as_str(), "WATCHDOG_USEC=150000"];
    let mut old = Server::start_with(&environment, &world, &pair);
    assert_eq!(said(), "READY=1");
    for _ in 0..5 {
        assert_eq!(said(), "WATCHDOG=1");
    }
    let mut new = Server::run(&[&notify], &["--takeover", "--watchdog", "1"], &world, &pair);
    assert_eq!(old.wait().code, Some(0));
    let after: Vec<String> = std::iter::repeat_with(said)
        .skip_while(|message| message.starts_with("WATCHDOG"))
        .take(2)
        .collect();
    let main = format!("MAINPID={}", new.pid());
    assert_eq!(after[0], main);
    // The old one may say it once more.
    let heard: Vec<String> = std::iter::repeat_with(said).take(4).collect();
    let all: Vec<&String> = after.iter().chain(&heard).collect();
    assert!(all.iter().any(|message| *message == "READY=1"), "{all:?}");
    assert!(
        heard[1..].iter().all(|message| message == "WATCHDOG=1"),
        "{all:?}"
    );
    new.signal("TERM");
    new.wait().success();

    // It is another process's.
    let environment = [notify.as_str(), "WATCHDOG_USEC=1000", "WATCHDOG_PID=1"];
    let mut other = Server::start_with(&environment, &world, &pair);
    while said() != "READY=1" {}
    other.signal("TERM");
    other.wait().success();
    manager.set_nonblocking(true).expect("a socket");
    assert!(manager.recv(&mut [0; 64]).is_err());
    let error = world.ringdisk(&[
        "vhost-user",
        "--socket",
        "s",
        "--disk",
        "path=a.qcow2",
        "--watchdog",
        "0",
    ]);
    error.refused(2);
}
