//! Both sides of a takeover in one process, and servers of the version before.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use virtio_devices::vhost_user::HandOverError;

use super::message::{GREETING_FOR_ALL, NOT_UNDERSTOOD, receive, request, send, socket_path};
use super::offer::ask;
use super::successor::OPEN_MAX;
use super::*;
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
    fn locks(&self, count: usize) -> Vec<OwnedFd> {
        crate::limits::raise_descriptors().expect("a limit");
        let file = File::create(self.folder.path().join("image")).expect("a file");
        let locks = (0..count).map(|_| file.try_clone().map(OwnedFd::from));
        locks.collect::<io::Result<_>>().expect("descriptors")
    }

    fn open(&self) -> (Socket, TakeoverSocket, TakeoverListener) {
        let sockets = self.sockets();
        let socket = Socket::listen(&sockets[0]).expect("a socket");
        let takeover_socket = TakeoverSocket::open(&sockets[0], &sockets).expect("a takeover socket");
        let listener = takeover_socket.listener_for_thread().expect("a listener");
        (socket, takeover_socket, listener)
    }
}

/// Runs the old server on its own thread.
fn serve<R: Send>(
    world: &World,
    new: impl FnOnce() -> R + Send,
    old: impl FnOnce(&Socket, &TakeoverSocket, Successor),
) -> R {
    let (socket, takeover_socket, listener) = world.open();
    thread::scope(|scope| {
        let new = scope.spawn(new);
        old(
            &socket,
            &takeover_socket,
            listener.wait().expect("somebody comes"),
        );
        new.join().expect("no panic")
    })
}

fn hand_over(
    successor: &Successor,
    socket: &Socket,
    takeover_socket: &TakeoverSocket,
    locks: &[OwnedFd],
) -> io::Result<()> {
    let disks = [(socket, None)].into_iter();
    let taken = successor.hand_over(takeover_socket.listener(), None, locks, disks)?;
    assert!(!taken.control, "none was offered");
    Ok(())
}

#[test]
fn take_over_holds_the_locks_after_the_old_server_ends() {
    let world = &World::new();
    let new = || {
        let offer = ask(&world.sockets(), None, GREETING_FOR_ALL).expect("an offer");
        offer.begin().expect("it is in time");
        offer.accept(false).expect("the old one ends");
        offer.disks.len()
    };
    let disks = serve(world, new, |socket, takeover_socket, successor| {
        assert!(successor.moves().is_none());
        hand_over(&successor, socket, takeover_socket, &world.locks(300)).expect("it takes them");
    });
    assert_eq!(disks, 1);
}

#[test]
fn take_back_waits_for_the_new_server_to_close_images() {
    let world = &World::new();
    let image = Mutex::new(false);
    let is_open = |open: bool| *image.lock() = open;
    let new = || {
        let offer = ask(&world.sockets(), None, GREETING_FOR_ALL).expect("an offer");
        offer.begin().expect("it is in time");
        is_open(true);
        thread::sleep(Duration::from_millis(300));
        is_open(false);
        drop(offer);
    };
    serve(world, new, |socket, takeover_socket, successor| {
        hand_over(&successor, socket, takeover_socket, &[]).expect_err("it gives up");
        successor.take_back(Duration::from_secs(20)).expect("it lets go");
        assert!(!*image.lock());
    });

    // One that holds on to them is told of.
    let (told, hears) = std::sync::mpsc::channel();
    let (begun, begins) = std::sync::mpsc::channel();
    let new = move || {
        let offer = ask(&world.sockets(), None, GREETING_FOR_ALL).expect("an offer");
        offer.begin().expect("it is in time");
        begun.send(()).expect("it listens");
        hears.recv().expect("the end");
        // Whatever it says now, nobody hears it.
        assert!(offer.accept(false).is_err());
    };
    serve(world, new, |socket, takeover_socket, successor| {
        send_offer(&successor, socket, takeover_socket);
        begins.recv().expect("a word");
        let error = successor
            .take_back(Duration::from_millis(100))
            .expect_err("it has them open");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        told.send(()).expect("it listens");
    });
}

/// Offers everything, and does not wait for it to be taken.
fn send_offer(successor: &Successor, socket: &Socket, takeover_socket: &TakeoverSocket) {
    let token = successor.token.as_ref().expect("a token");
    let connection = successor.moves.connection();
    send(
        connection,
        b"o",
        &[takeover_socket.listener().as_raw_fd(), token.0.as_raw_fd()],
    )
    .expect("sent");
    send(connection, &0u32.to_ne_bytes(), &[]).expect("sent");
    send(connection, b"l", &[socket.listener().as_raw_fd()]).expect("sent");
    send(connection, b"", &[]).expect("sent");
}

#[test]
fn begin_fails_after_the_old_server_took_back() {
    let world = &World::new();
    let (told, hears) = std::sync::mpsc::channel();
    let new = move || {
        let offer = ask(&world.sockets(), None, GREETING_FOR_ALL).expect("an offer");
        hears.recv().expect("a word");
        offer.begin().expect_err("too late")
    };
    let error = serve(world, new, |socket, takeover_socket, successor| {
        send_offer(&successor, socket, takeover_socket);
        let begun = Instant::now();
        successor
            .take_back(Duration::from_secs(20))
            .expect("nobody has them");
        assert!(begun.elapsed() < Duration::from_secs(10), "nothing is waited for");
        told.send(()).expect("it listens");
    });
    assert!(matches!(error, TakeoverError::TooLate), "{error}");
}

/// The new server is stopped, and more is on its way to it than its socket holds.
#[test]
fn hand_over_times_out_on_a_server_that_does_not_read() {
    let world = &World::new();
    let (told, hears) = std::sync::mpsc::channel::<()>();
    let new = move || {
        let stream = UnixStream::connect(socket_path(&world.sockets()[0])).expect("a takeover socket");
        let asked = request(GREETING_FOR_ALL, &world.sockets()).expect("a request");
        send(&stream, &asked, &[]).expect("sent");
        // Nothing is read until the other side has given up.
        assert!(hears.recv().is_err());
    };
    serve(world, new, |socket, takeover_socket, successor| {
        let locks = world.locks(700);
        let begun = Instant::now();
        hand_over(&successor, socket, takeover_socket, &locks).expect_err("nobody reads");
        assert!(begun.elapsed() < OPEN_MAX, "{:?}", begun.elapsed());
        successor
            .take_back(Duration::from_secs(20))
            .expect("it has not begun");
        drop(told);
    });
}

#[test]
fn takeover_is_of_all_disks_at_once_with_the_previous_version() {
    // An old server that knows only that request, and refuses others in its words.
    let world = &World::new();
    let (socket, takeover_socket, _) = world.open();
    let listener = takeover_socket.listener_for_thread().expect("a listener");
    thread::scope(|scope| {
        let new = scope.spawn(|| {
            let offer = take_over(&world.sockets(), None).expect("an offer");
            assert!(offer.moves().is_none());
            offer.begin().expect("it is in time");
            offer.accept(false)
        });
        let (connection, _) = listener.listener.accept().expect("somebody comes");
        receive(&connection).expect("a request");
        Successor::unnamed(connection).refuse(NOT_UNDERSTOOD);
        let successor = listener.wait().expect("it comes again");
        hand_over(&successor, &socket, &takeover_socket, &[]).expect("it takes them");
        new.join().expect("no panic").expect("the old one ends");
    });
}

/// A server that takes disks one at a time: offered, given, refused, given again, and finished.
#[test]
fn disks_move_one_at_a_time_in_both_directions() {
    let world = &World::new();
    let moving = |locks: usize| MovingDisk {
        place: 0,
        locks: world.locks(locks),
        client: None,
    };
    let new = || {
        let offer = take_over(&world.sockets(), None).expect("an offer");
        let moves = offer.moves().expect("one at a time");
        offer.begin().expect("nothing is to be taken");
        offer.ready().expect("it waits");
        for locks in [3, 300] {
            let next = moves.next().expect("a disk");
            assert!(matches!(next, Next::Disk(disk) if disk.locks.len() == locks && disk.place == 0));
            if locks == 3 {
                moves.refuse("it is too small").expect("it waits");
            } else {
                moves.take().expect("it waits");
            }
        }
        assert!(matches!(moves.give(moving(1)), Ok(Given::Taken)));
        assert!(matches!(moves.next(), Ok(Next::NoFurther(why)) if why == "it is late"));
        assert!(matches!(moves.next(), Ok(Next::End)));
        offer.finish(false).expect("it waits");
        offer.disks.len()
    };
    let disks = serve(world, new, |socket, takeover_socket, successor| {
        let moves = successor.moves().expect("one at a time");
        let sockets = [socket].into_iter();
        let listener = takeover_socket.listener();
        successor.offer(listener, None, sockets).expect("it is ready");
        assert_eq!(successor.place_of(socket.absolute()), Some(0));
        let refused = moves.give(moving(3)).expect("an answer");
        assert!(matches!(refused, Given::Refused(why) if why == "it is too small"));
        assert!(matches!(moves.give(moving(300)), Ok(Given::Taken)));
        assert!(matches!(moves.next(), Ok(Next::Disk(disk)) if disk.locks.len() == 1));
        moves.take().expect("it waits");
        moves.go_no_further("it is late").expect("it waits");
        let taken = successor.finish().expect("it has all");
        assert!(!taken.control);
    });
    assert_eq!(disks, 1);
}

/// The new server ends when it has been given a disk, before it has one, and instead of an answer.
#[test]
fn disk_is_lost_only_when_the_connection_has_ended() {
    let world = &World::new();
    for answers in [false, true] {
        let new = || {
            let offer = take_over(&world.sockets(), None).expect("an offer");
            offer.ready().expect("it waits");
            let moves = offer.moves().expect("one at a time");
            if answers {
                assert!(matches!(moves.next(), Ok(Next::Disk(_))));
            }
        };
        serve(world, new, |socket, takeover_socket, successor| {
            let sockets = [socket].into_iter();
            let listener = takeover_socket.listener();
            successor.offer(listener, None, sockets).expect("it is ready");
            let moving = MovingDisk {
                place: 0,
                locks: world.locks(2),
                client: None,
            };
            let moves = successor.moves().expect("one at a time");
            assert!(matches!(moves.give(moving), Ok(Given::Lost)));
        });
    }
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
