//! Both sides of a takeover in one process.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use virtio_devices::vhost_user::HandOverError;

use super::message::socket_path;
use super::*;
use crate::control::{HAND_OVER, Request};
use crate::socket::Socket;

struct World {
    folder: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        Self {
            folder: tempfile::tempdir().expect("a folder"),
        }
    }

    fn sockets(&self) -> Vec<PathBuf> {
        vec![self.folder.path().join("socket")]
    }

    /// Descriptors that stand for locks: many, so this process has the limit of a server.
    fn moving(&self, locks: usize) -> MovingDisk {
        crate::limits::raise_descriptors().expect("a limit");
        let file = File::create(self.folder.path().join("image")).expect("a file");
        let locks = (0..locks).map(|_| file.try_clone().map(OwnedFd::from));
        MovingDisk {
            place: 0,
            locks: locks.collect::<io::Result<_>>().expect("descriptors"),
            client: None,
        }
    }

    fn ask(&self) -> Result<Offer, TakeoverError> {
        let sockets = self.sockets();
        let wish = Wish {
            from: None,
            sockets: &sockets,
            control: None,
            within: Duration::from_secs(20),
        };
        wish.ask()
    }
}

/// Returns the connection of the next one who comes to the takeover socket, and what it asks for.
fn accept(listener: &UnixListener) -> (UnixStream, Result<Asked, String>) {
    let (connection, _) = listener.accept().expect("somebody comes");
    let mut line = String::new();
    BufReader::new(&connection)
        .read_line(&mut line)
        .expect("a request");
    let request: Request = serde_json::from_str(&line).expect("a request");
    let asked = Asked::understand(&connection, request);
    (connection, asked)
}

/// Runs both servers, the new one on a thread of its own. The old one has offered its socket.
fn serve<R: Send>(
    world: &World,
    lanes: usize,
    new: impl FnOnce(Offer, Vec<Moves>) -> R + Send,
    old: impl FnOnce(Successor, Vec<Moves>),
) -> R {
    let path = &world.sockets()[0];
    let socket = Socket::listen(path).expect("a socket");
    let takeover_socket = Socket::listen(&socket_path(path)).expect("a takeover socket");
    thread::scope(|scope| {
        let new = scope.spawn(move || {
            let offer = world.ask().expect("an offer");
            assert_eq!(offer.disks.len(), 1);
            assert!(offer.control.is_none(), "none was offered");
            let own = offer.takeover_socket.as_ref().expect("it was offered");
            assert_eq!(own.path, socket_path(&world.sockets()[0]));
            let made = (0..lanes).map(|_| Moves::lane().expect("a lane"));
            let (ours, theirs) = made.unzip();
            offer.ready(theirs).expect("it waits");
            new(offer, ours)
        });
        let (connection, asked) = accept(takeover_socket.listener());
        let successor = Successor::new(&connection, asked.expect("it is ours")).expect("a successor");
        let own = ControlSocket {
            path: takeover_socket.absolute().to_owned(),
            listener: takeover_socket.listener().try_clone().expect("a descriptor"),
            file: takeover_socket.file().expect("a file"),
        };
        let lanes = successor
            .offer(Some(&own), None, &[&socket])
            .expect("it is ready");
        drop(connection);
        old(successor, lanes);
        new.join().expect("no panic")
    })
}

/// Offered, given, refused, given again, given back, and finished.
#[test]
fn disks_move_on_lanes_and_come_back() {
    let world = &World::new();
    let new = |offer: Offer, lanes: Vec<Moves>| {
        for locks in [3, 300] {
            let next = lanes[1].next().expect("a disk");
            assert!(matches!(next, Next::Disk(disk) if disk.locks.len() == locks && disk.place == 0));
            if locks == 3 {
                lanes[1].refuse("it is too small").expect("it waits");
            } else {
                lanes[1].take().expect("it waits");
            }
        }
        assert!(matches!(lanes[0].next(), Ok(Next::NoFurther(why)) if why == "it is late"));
        assert!(matches!(lanes[1].next(), Ok(Next::End)));
        assert!(matches!(offer.moves().give(world.moving(1)), Ok(Given::Taken)));
        offer.finish(true).expect("it waits");
    };
    serve(world, 2, new, |successor, lanes| {
        assert_eq!(successor.asked.disks, world.sockets());
        let left = successor.asked.left();
        assert!(
            left <= Duration::from_secs(20) && left > Duration::from_secs(10),
            "{left:?}"
        );
        let refused = lanes[1].give(world.moving(3)).expect("an answer");
        assert!(matches!(refused, Given::Refused(why) if why == "it is too small"));
        assert!(matches!(lanes[1].give(world.moving(300)), Ok(Given::Taken)));
        lanes[0].go_no_further("it is late").expect("it waits");
        lanes[1].end().expect("it waits");
        assert!(matches!(successor.moves().next(), Ok(Next::Disk(disk)) if disk.locks.len() == 1));
        successor.moves().take().expect("it waits");
        assert!(successor.finish().expect("it has all").control);
    });
}

/// The new server ends when it has been given a disk, before it has one, and instead of an answer.
#[test]
fn disk_is_lost_only_when_the_connection_has_ended() {
    let world = &World::new();
    for answers in [false, true] {
        let new = |_: Offer, lanes: Vec<Moves>| {
            if answers {
                assert!(matches!(lanes[0].next(), Ok(Next::Disk(_))));
            }
        };
        serve(world, 1, new, |_, lanes| {
            assert!(matches!(lanes[0].give(world.moving(2)), Ok(Given::Lost)));
        });
    }
}

/// The new server is stopped, and more is on its way to it than its socket holds.
#[test]
fn give_times_out_on_a_server_that_does_not_read() {
    let world = &World::new();
    let (told, hears) = std::sync::mpsc::channel::<()>();
    let new = move |_: Offer, lanes: Vec<Moves>| {
        // Nothing is read until the other side has given up.
        assert!(hears.recv().is_err());
        drop(lanes);
    };
    serve(world, 1, new, |_, lanes| {
        let begun = Instant::now();
        let told = thread::scope(|scope| {
            let giving = scope.spawn(|| lanes[0].give(world.moving(1500)));
            // It waits for the end of the connection, as the other one may read what it has.
            while begun.elapsed() < message::SEND_MAX && !giving.is_finished() {
                thread::park_timeout(Duration::from_millis(50));
            }
            drop(told);
            giving.join().expect("no panic")
        });
        assert!(matches!(told, Ok(Given::Lost)), "{told:?}");
    });
}

#[test]
fn request_of_another_version_or_kind_is_refused() {
    let (here, _there) = UnixStream::pair().expect("a pair");
    let hand_over = |version| Request::HandOver {
        version,
        disks: Vec::new(),
        seconds: u64::MAX,
        partly: false,
    };
    let asked = Asked::understand(&here, hand_over(HAND_OVER)).expect("ours");
    assert!(asked.left() <= WITHIN_MAX);
    let other = Asked::understand(&here, hand_over(1)).expect_err("another version");
    assert_eq!(other, "it supports hand-over version 2, not 1");
    Asked::understand(&here, Request::Info {}).expect_err("another request");
}

#[test]
fn refusal_and_another_version_of_the_old_server_are_told_apart() {
    let world = &World::new();
    let error = world.ask().expect_err("nobody listens");
    assert!(matches!(error, TakeoverError::Nobody { .. }), "{error}");
    let listener = UnixListener::bind(socket_path(&world.sockets()[0])).expect("a socket");
    let asked = |answer: Option<&str>| {
        thread::scope(|scope| {
            let new = scope.spawn(|| world.ask().expect_err("no offer"));
            let (mut connection, _) = accept(&listener);
            if let Some(answer) = answer {
                connection.write_all(answer.as_bytes()).expect("it reads");
            }
            drop(connection);
            new.join().expect("no panic")
        })
    };
    let refused = asked(Some("{\"ok\":false,\"error\":\"not now\"}\n"));
    assert!(
        matches!(&refused, TakeoverError::Refused { reason } if reason == "not now"),
        "{refused}"
    );
    let broken = asked(None);
    assert!(matches!(broken, TakeoverError::BrokenOff(_)), "{broken}");
    assert!(broken.to_string().contains("of another version"), "{broken}");
}

#[test]
fn unanswered_tells_silence_from_a_broken_connection() {
    let silent = TakeoverError::unanswered(io::ErrorKind::WouldBlock.into(), Duration::from_secs(60));
    assert_eq!(
        silent.to_string(),
        "the running server did not answer within 60 s; it continues to serve its clients"
    );
    let ended = TakeoverError::unanswered(io::ErrorKind::UnexpectedEof.into(), Duration::from_secs(60));
    assert!(matches!(ended, TakeoverError::BrokenOff(_)), "{ended}");
}

#[test]
fn not_adopted_names_the_option_a_client_needs() {
    let line = |error| not_adopted("a.qcow2", error).line().expect("a line");
    let restartable = line(HandOverError::InflightTracking);
    assert!(
        restartable.starts_with("a.qcow2: ") && restartable.contains("needs --restartable"),
        "{restartable}"
    );
    let queues = line(HandOverError::SeveralQueues);
    assert!(queues.contains("num_queues="), "{queues}");
    let reason = "feature bits 0x4 were not offered".to_owned();
    let other = line(HandOverError::Refused { code: 2, reason });
    assert!(other.contains("message 2") && other.contains("0x4"), "{other}");
}
