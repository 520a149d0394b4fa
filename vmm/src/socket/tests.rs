//! Sockets that are created, refused, inherited and removed.

use super::*;
use std::os::unix::net::UnixStream;

fn directory() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary directory")
}

#[test]
fn listen_makes_a_private_socket_removed_on_drop() {
    let directory = directory();
    let path = directory.path().join("s");
    let socket = Socket::listen(&path).expect("listen");
    assert_eq!(
        fs::metadata(&path).expect("stat").permissions().mode() & 0o777,
        0o600
    );
    let _client = UnixStream::connect(&path).expect("connect");
    socket.listener().accept().expect("accept");
    drop(socket);
    assert!(!path.exists());
}

#[test]
fn listen_names_a_live_server_and_leaves_it_alone() {
    let directory = directory();
    let path = directory.path().join("s");
    let _server = UnixListener::bind(&path).expect("bind");
    let refused = Socket::listen(&path).expect_err("in use").to_string();
    assert!(
        refused.contains(&format!("{} is in use by ", path.display())),
        "{refused}"
    );
    assert!(
        refused.contains(&format!("(process {})", std::process::id())),
        "{refused}"
    );
    UnixStream::connect(&path).expect("the live server still answers");
}

#[test]
fn listen_refuses_a_server_with_a_full_backlog_at_once() {
    let directory = directory();
    let path = directory.path().join("s");
    let _server = Socket::listen(&path).expect("listen");
    let address = Address::new(&path).expect("an address");
    let mut clients = Vec::new();
    loop {
        let client = stream_socket(libc::SOCK_NONBLOCK).expect("socket");
        if address.connect(&client).is_err() {
            break;
        }
        clients.push(client);
        assert!(clients.len() < 10_000, "the backlog never fills");
    }
    let refused = Socket::listen(&path).expect_err("in use");
    assert!(matches!(refused, SocketError::InUse { .. }), "{refused}");
}

#[test]
fn listen_replaces_a_stale_socket() {
    let directory = directory();
    let path = directory.path().join("s");
    drop(UnixListener::bind(&path).expect("bind"));
    assert!(path.exists(), "the standard library leaves the file");
    let socket = Socket::listen(&path).expect("replace");
    UnixStream::connect(socket.path()).expect("connect");
}

/// Each start probes the stale socket, removes it and makes its own. Without a lock it may remove a new one.
#[test]
fn listen_succeeds_once_among_concurrent_starts() {
    for round in 0..200 {
        let directory = directory();
        let path = directory.path().join("s");
        drop(UnixListener::bind(&path).expect("bind"));
        let barrier = std::sync::Barrier::new(4);
        let made: Vec<Socket> = std::thread::scope(|scope| {
            let starts: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| {
                        barrier.wait();
                        Socket::listen(&path)
                    })
                })
                .collect();
            let ended = starts.into_iter().map(|start| start.join().expect("no panic"));
            ended.filter_map(Result::ok).collect()
        });
        assert_eq!(made.len(), 1, "round {round}");
        let client = UnixStream::connect(&path).expect("connect");
        made[0].listener().accept().expect("it is at its path");
        drop(client);
    }
}

/// Another start may be replacing the stale socket while it holds the folder's lock.
#[test]
fn listen_waits_for_the_folder_lock_but_not_forever() {
    let directory = directory();
    let path = directory.path().join("s");
    drop(UnixListener::bind(&path).expect("bind"));
    let inode = || fs::symlink_metadata(&path).expect("stat").ino();
    let leftover = inode();
    let other = lock_folder(&path).expect("a lock");
    std::thread::scope(|scope| {
        let start = scope.spawn(|| Socket::listen(&path));
        std::thread::sleep(Duration::from_millis(100));
        assert!(!start.is_finished());
        assert_eq!(inode(), leftover);
        drop(other);
        start.join().expect("no panic").expect("replace");
    });
    // Whoever keeps the lock for longer holds nobody up for good.
    drop(UnixListener::bind(&path).expect("bind"));
    let _other = lock_folder(&path).expect("a lock");
    Socket::listen(&path).expect("replace");
}

#[test]
fn listen_refuses_and_keeps_a_file_that_is_no_socket() {
    let directory = directory();
    let path = directory.path().join("s");
    fs::write(&path, "precious").expect("write");
    let refused = Socket::listen(&path).expect_err("not a socket").to_string();
    assert!(refused.contains("exists and is not a socket"), "{refused}");
    assert_eq!(fs::read(&path).expect("read"), b"precious");
}

#[test]
fn drop_keeps_a_successors_socket() {
    let directory = directory();
    let path = directory.path().join("s");
    let old = Socket::listen(&path).expect("listen");
    fs::remove_file(&path).expect("remove");
    let _new = Socket::listen(&path).expect("listen again");
    drop(old);
    assert!(path.exists());
}

#[test]
fn listen_names_a_path_it_cannot_bind() {
    let long = Path::new("/tmp").join("x".repeat(200));
    let refused = Socket::listen(&long).expect_err("too long").to_string();
    assert!(refused.contains("longer than 107 bytes"), "{refused}");
    let refused = Socket::listen(Path::new("/nonexistent/s"))
        .expect_err("no directory")
        .to_string();
    assert_eq!(refused, "cannot bind socket /nonexistent/s");
    Socket::listen(Path::new("")).expect_err("empty");
}
