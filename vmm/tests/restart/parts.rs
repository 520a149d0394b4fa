//! Takeovers of a part of a server's disks, and what they may take: a time, and several disks at once.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ringdisk::takeover::{Given, Moves, MovingDisk, Next, Offer, TakeoverError, Wish};
use serde_json::Value;

use crate::several::Disks;

fn ids(all: &Disks, socket: &str) -> Vec<String> {
    all.world.wait_for_control(socket);
    let (ok, said) = all.world.ctl(socket, &["disk-list"]);
    assert!(ok, "{said}");
    let list: Value = serde_json::from_str(&said).expect("JSON");
    let disks = list["disks"].as_array().expect("a list");
    disks
        .iter()
        .map(|disk| disk["id"].to_string().replace('"', ""))
        .collect()
}

/// Some disks go to another server, whose client notices nothing, and the old one goes on with the others; then these go, too. What
/// cannot go stays, and so does what nobody named.
#[test]
fn some_disks_go_to_another_server_and_the_others_stay() {
    let mut all = Disks::new(4);
    let (mut old, mut served) = (all.serve(&["--control", "old"]), Vec::new());
    all.connect();
    all.work(Duration::from_millis(5));

    // Without the name of a control socket it has to be all of them.
    let fewer = all.serve_some(0..2, &["--takeover"]);
    assert_eq!(fewer.wait(), Some(1));
    assert!(all.world.log().contains("it serves ["), "{}", all.world.log());
    let able = all.disks.clone();
    all.disks[1] += ",sparse=off";
    let less = all.serve_some(0..2, &["--takeover=old"]);
    assert_eq!(less.wait(), Some(1));
    assert!(
        all.world.log().contains("were not offered"),
        "{}",
        all.world.log()
    );
    all.disks = able;
    assert_eq!(ids(&all, "old").len(), 4);
    all.work(Duration::from_millis(5));

    // With the disk after which its takeover socket is named.
    let first = all.serve_some(0..2, &["--takeover=old", "--control", "first"]);
    assert_eq!(ids(&all, "first"), ["0.qcow2", "1.qcow2"]);
    assert_eq!(ids(&all, "old"), ["2.qcow2", "3.qcow2"]);
    all.work(Duration::from_millis(5));
    assert!(all.are_connected() && old.is_running(), "{}", all.world.log());
    // What has gone is locked, and in nobody's way here.
    let (ok, said) = all.world.ctl("old", &["flush", "0.qcow2"]);
    assert!(!ok && said.contains("there is no disk `0.qcow2`"), "{said}");
    let mut io = std::process::Command::new(env!("CARGO_BIN_EXE_ringdisk"));
    io.current_dir(all.world.path(""))
        .args(["io", "--disk", "path=0.qcow2", "-c", "read 0 512"]);
    let io = io.output().expect("it runs");
    let said = String::from_utf8_lossy(&io.stderr);
    assert!(!io.status.success() && said.contains("0.qcow2"), "{said}");
    assert!(said.contains("in use") || said.contains("lock"), "{said}");
    let second = all.serve_some(2..4, &["--takeover=old", "--control", "second"]);
    assert_eq!(old.wait(), Some(0), "{}", all.world.log());
    assert_eq!(ids(&all, "second"), ["2.qcow2", "3.qcow2"]);
    all.work(Duration::from_millis(5));

    // Each of the two has a takeover socket of its own, and has gone on from the old one's.
    for (some, before) in [(0..2, first), (2..4, second)] {
        let next = all.serve_some(some, &["--takeover"]);
        assert_eq!(before.wait(), Some(0), "{}", all.world.log());
        all.work(Duration::from_millis(5));
        served.push(next);
    }
    assert!(all.are_connected(), "{}", all.world.log());
    all.drain();
    for server in served {
        assert_eq!(server.stop(), Some(0), "{}", all.world.log());
    }
    all.assert_contents(false);
}

fn wish(all: &Disks, within: Duration) -> Result<Offer, TakeoverError> {
    let sockets: Vec<PathBuf> = all.sockets.iter().map(|name| all.world.path(name)).collect();
    let wish = Wish {
        from: None,
        sockets: &sockets,
        control: None,
        within,
    };
    wish.ask()
}

/// A new server, played by the test, as which nothing is opened: what it is given it can give back.
struct Player {
    offer: Offer,
    lanes: Vec<Moves>,
}

impl Player {
    fn new(all: &Disks, lanes: usize, within: Duration) -> Self {
        let offer = wish(all, within).expect("an offer");
        let made = (0..lanes).map(|_| Moves::lane().expect("a lane"));
        let (lanes, theirs): (Vec<Moves>, Vec<OwnedFd>) = made.unzip();
        offer.ready(theirs).expect("it waits");
        Self { offer, lanes }
    }

    /// Takes the next disk of a lane, and does not say so.
    fn next(&self, lane: usize) -> MovingDisk {
        match self.lanes[lane].next() {
            Ok(Next::Disk(moving)) => moving,
            other => panic!("{other:?}"),
        }
    }
}

/// Two disks are on their way at once. When the time is over no other one moves, and both come back.
#[test]
fn disks_move_at_once_and_in_the_time_that_there_is() {
    let mut all = Disks::new(3);
    let mut old = all.serve(&[]);
    all.connect();
    for round in 0..2 {
        all.work(Duration::from_millis(5));
        // Longer than two disks take to move on any machine.
        let within = Duration::from_secs(3);
        let player = Player::new(&all, 2, within);
        let begun = Instant::now();
        let moving = [player.next(0), player.next(1)];
        assert!(begun.elapsed() < within, "{:?}", begun.elapsed());
        assert_ne!(moving[0].place, moving[1].place);
        // The third one is served meanwhile.
        let third = &mut all.clients[3 - moving[0].place - moving[1].place];
        let answered = third.answered;
        while begun.elapsed() < within + Duration::from_millis(100) {
            third.work(&mut all.random, Duration::from_millis(1));
        }
        assert!(third.answered > answered);
        for lane in &player.lanes {
            lane.take().expect("it waits");
        }
        // The other one may have ended before it was too late.
        let said = |lane: &Moves| match lane.next() {
            Ok(Next::NoFurther(why)) => why,
            Ok(Next::End) => String::new(),
            other => panic!("round {round}: {other:?}"),
        };
        let why = player.lanes.iter().map(said).collect::<String>();
        assert!(
            why.contains("the time of the takeover is over (--within)"),
            "{why}"
        );
        for moving in moving {
            let back = player.offer.moves().give(moving);
            assert!(matches!(back, Ok(Given::Taken)), "round {round}: {back:?}");
        }
        player.offer.moves().end().expect("it waits");
        all.work(Duration::from_millis(5));
        all.drain();
        assert!(old.is_running() && all.are_connected(), "{}", all.world.log());
    }
    assert_eq!(old.stop(), Some(0), "{}", all.world.log());
    all.assert_contents(false);
}

/// A new server that hangs before anything has moved is given up, and its control socket answers again.
#[test]
fn new_server_that_says_nothing_is_given_up_in_its_time() {
    let mut all = Disks::new(1);
    let mut old = all.serve(&["--control", "control"]);
    all.connect();
    all.world.wait_for_control("control");
    let within = Duration::from_secs(1);
    let begun = Instant::now();
    let _hangs = wish(&all, within).expect("an offer");
    assert_eq!(ids(&all, "control"), ["0.qcow2"]);
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    let log = all.world.log();
    assert!(
        log.contains("the new server is not ready: it did not answer in time"),
        "{log}"
    );
    all.work(Duration::from_millis(5));
    all.drain();
    assert!(old.is_running() && all.are_connected(), "{}", all.world.log());
    assert_eq!(old.stop(), Some(0), "{}", all.world.log());
    all.assert_contents(false);
}
