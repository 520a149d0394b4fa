//! The control socket of a server: what is asked there while a client works, and who has it after a takeover.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

use ringdisk_gen::Random;
use ringdisk_gen::patience::wait_until;
use ringdisk_gen::sockets::{has_connection, listens};
use serde_json::Value;

use crate::client::{BLOCK, Client};
use crate::server::World;

const BLOCKS: usize = 2048;
/// The bytes of the disk behind the client's blocks, and those of them that are free.
const REST: usize = 10 << 20;
const FREE: usize = 8 << 20;

/// An image whose first clusters are free, more than the client has blocks: what is in the others lies behind them in the file.
fn half_free(size: usize) -> World {
    let world = World::new("cluster_size=4096", size + REST);
    let free = size + FREE;
    world.qemu_io(&[
        &format!("write -P 9 0 {free}"),
        &format!("write -P 7 {free} {}", REST - FREE),
        &format!("discard 0 {free}"),
    ]);
    world
}

/// Asserts that what follows the client's blocks is as it was, and returns these.
fn own_blocks(world: &World, size: usize) -> Vec<u8> {
    let mut contents = world.contents();
    let rest = contents.split_off(size);
    assert_eq!(rest.len(), REST);
    let (free, full) = rest.split_at(FREE);
    assert!(free.iter().all(|&byte| byte == 0) && full.iter().all(|&byte| byte == 7));
    contents
}

/// Sends lines and ends; what was answered, once the server has ended the connection.
fn say(world: &World, bytes: &[u8]) -> String {
    let mut stream = UnixStream::connect(world.path("control")).expect("it listens");
    // It may answer and leave before it has read all.
    stream.write_all(bytes).unwrap_or_default();
    stream.shutdown(std::net::Shutdown::Write).unwrap_or_default();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap_or_default();
    String::from_utf8_lossy(&answer).into_owned()
}

/// One request, as soon as the socket is there.
fn ask(world: &World, request: &str) -> Value {
    world.wait_for_control("control");
    let answer = say(world, format!("{request}\n").as_bytes());
    serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{request}: {answer:?}: {error}"))
}

/// As [`ask`], with success.
fn asked(world: &World, request: &str) -> Value {
    let answer = ask(world, request);
    assert_eq!(answer["ok"], true, "{request}: {answer}");
    answer
}

/// As [`ask`], of a request that fails.
fn refused(world: &World, request: &str) -> String {
    let answer = ask(world, request);
    assert_eq!(answer["ok"], false, "{request}: {answer}");
    answer["error"].as_str().expect("a reason").to_owned()
}

/// Works until a compaction of the disk has ended, and returns what it came to.
fn work_while_compacting(world: &World, client: &mut Client, random: &mut Random) -> Value {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        client.work(random, Duration::from_millis(5));
        let status = asked(world, r#"{"command":"compact-status","id":"disk.qcow2"}"#);
        if !["running", "stopping"].contains(&status["state"].as_str().expect("a state")) {
            return status;
        }
        assert!(Instant::now() < deadline, "{status}");
    }
}

#[test]
fn disk_in_use_is_listed_flushed_resized_kept_in_snapshots_and_compacted() {
    let world = half_free(BLOCKS * BLOCK);
    let mut random = Random::new(0xc0417);
    let mut client = Client::new(BLOCKS, false);
    let server = world.serve(&["--control", "control"]);
    client.connect(&world.path("socket"));
    client.work(&mut random, Duration::from_millis(50));

    let info = asked(&world, r#"{"command":"info"}"#);
    assert_eq!(
        (&info["protocol"], &info["state"]),
        (&1.into(), &"serving".into()),
        "{info}"
    );
    let size = (BLOCKS * BLOCK + REST) as u64;
    let list = asked(&world, r#"{"command":"disk-list"}"#);
    let disk = &list["disks"][0];
    assert_eq!(list["disks"].as_array().map(Vec::len), Some(1), "{list}");
    for (key, value) in [
        ("id", "disk.qcow2".into()),
        ("format", "qcow2".into()),
        ("size", Value::from(size)),
        ("readonly", false.into()),
        ("place", "socket".into()),
    ] {
        assert_eq!(disk[key], value, "{list}");
    }

    for _ in 0..5 {
        client.work(&mut random, Duration::from_millis(5));
        asked(&world, r#"{"command":"flush","id":"disk.qcow2"}"#);
    }
    let made = asked(
        &world,
        r#"{"command":"snapshot-create","id":"disk.qcow2","name":"one"}"#,
    );
    assert_eq!(made["snapshot"], "1", "{made}");
    client.work(&mut random, Duration::from_millis(30));
    let listed = asked(&world, r#"{"command":"snapshot-list","id":"disk.qcow2"}"#);
    assert_eq!(listed["snapshots"][0]["name"], "one", "{listed}");
    let apply = r#"{"command":"snapshot-apply","id":"disk.qcow2","snapshot":"one"}"#;
    assert!(refused(&world, apply).contains("force"));
    asked(
        &world,
        r#"{"command":"snapshot-delete","id":"disk.qcow2","snapshot":"one"}"#,
    );

    let larger = size + (1 << 20);
    let resize = format!(r#"{{"command":"disk-resize","id":"disk.qcow2","size":{larger}}}"#);
    assert_eq!(asked(&world, &resize)["size"], larger);
    let smaller = format!(r#"{{"command":"disk-resize","id":"disk.qcow2","size":{size}}}"#);
    assert!(refused(&world, &smaller).contains("force"));
    let smaller = smaller.replace('}', r#","force":true}"#);
    assert_eq!(asked(&world, &smaller)["size"], size);

    // A first one is stopped, a second one ends.
    asked(&world, r#"{"command":"compact","id":"disk.qcow2","rate":4096}"#);
    let again = refused(&world, r#"{"command":"compact","id":"disk.qcow2"}"#);
    assert!(again.contains("being compacted already"), "{again}");
    let changed = refused(
        &world,
        r#"{"command":"snapshot-create","id":"disk.qcow2","name":"two"}"#,
    );
    assert!(changed.contains("compact-stop"), "{changed}");
    asked(&world, r#"{"command":"compact-stop","id":"disk.qcow2"}"#);
    let status = work_while_compacting(&world, &mut client, &mut random);
    assert_eq!(status["state"], "stopped", "{status}");
    // As long as the client writes blocks for the first time, their clusters may lie where others have just left.
    let (deadline, mut moved) = (Instant::now() + Duration::from_secs(60), 0);
    loop {
        asked(&world, r#"{"command":"compact","id":"disk.qcow2"}"#);
        let status = work_while_compacting(&world, &mut client, &mut random);
        assert_eq!(status["state"], "done", "{status}");
        moved += status["moved"].as_u64().expect("a number");
        let file = std::fs::metadata(world.path("disk.qcow2")).expect("an image");
        if file.len() < size {
            break;
        }
        assert!(
            Instant::now() < deadline,
            "the file has {} bytes: {status}",
            file.len()
        );
    }
    assert!(moved > 0);

    for (request, reason) in [
        (r#"{"command":"pause"}"#, "a vhost-user server cannot do `pause`"),
        (
            r#"{"command":"power-button"}"#,
            "it has no guest; only `ringdisk run` has buttons",
        ),
        (
            r#"{"command":"disk-remove","id":"other"}"#,
            "there is no disk `other`; there are: disk.qcow2",
        ),
        (
            r#"{"command":"flush","id":"other"}"#,
            "there is no disk `other`; there are: disk.qcow2",
        ),
        (r#"{"command":"dance"}"#, "dance"),
        (r#"{"command":"flush"}"#, "id"),
        (r#"{"command":"compact","id":"disk.qcow2","rate":0}"#, "rate"),
        (
            r#"{"command":"compact-stop","id":"disk.qcow2"}"#,
            "is not being compacted",
        ),
    ] {
        let error = refused(&world, request);
        assert!(error.contains(reason), "{request}: {error}");
    }

    client.drain();
    let counted = asked(&world, r#"{"command":"stats","id":"disk.qcow2"}"#);
    let engine = &counted["disks"][0]["engine"];
    for count in [
        "clusters_allocated",
        "clusters_freed",
        "flush_rounds",
        "l2_slices_read",
    ] {
        assert!(engine[count].as_u64() > Some(0), "{count}: {engine}");
    }
    let queue = &counted["disks"][0]["queues"][0];
    let kinds = ["read", "write", "flush", "discard", "write_zeroes"];
    let requests = kinds.map(|kind| queue[kind]["requests"].as_u64().expect("a number"));
    assert_eq!(requests.iter().sum::<u64>(), client.answered, "{requests:?}");
    assert_eq!(
        (&queue["in_flight"], &queue["write"]["errors"]),
        (&0.into(), &0.into())
    );

    // In order, as by a signal.
    assert_eq!(asked(&world, r#"{"command":"stop"}"#)["state"], "stopping");
    assert_eq!(server.wait(), Some(0), "{}", world.log());
    assert!(!world.path("control").exists());
    world.assert_sound(false);
    client.assert_contents(&own_blocks(&world, BLOCKS * BLOCK));
}

/// The stored bitmaps are QEMU's to judge when the server has ended.
#[test]
fn bitmaps_of_a_disk_in_use_are_added_merged_and_removed_and_who_watches_hears_of_it() {
    let world = World::new("cluster_size=65536", BLOCKS * BLOCK);
    let mut random = Random::new(0xb17);
    let mut client = Client::new(BLOCKS, false);
    let server = world.serve(&["--control", "control"]);
    asked(&world, r#"{"command":"info"}"#);
    let events = UnixStream::connect(world.path("control")).expect("it listens");
    (&events)
        .write_all(b"{\"command\":\"events\"}\n")
        .expect("it reads");
    let mut events = BufReader::new(events).lines().map(|line| {
        let line: Value = serde_json::from_str(&line.expect("text")).expect("JSON");
        line
    });
    assert_eq!(events.next().expect("an answer")["ok"], true);
    client.connect(&world.path("socket"));
    let request =
        |what: &str, more: &str| format!(r#"{{"command":"bitmap-{what}","id":"disk.qcow2","name":"{more}}}"#);
    let mut change = |what: &str, more: &str| {
        asked(&world, &request(what, more));
        client.work(&mut random, Duration::from_millis(20));
    };
    change("add", r#"all","granularity":4096"#);
    change("add", r#"late","disabled":true"#);
    change("disable", r#"all""#);
    change("enable", r#"late""#);
    change("clear", r#"late""#);
    change("add", r#"both","granularity":1048576"#);
    change("merge", r#"both","source":"all""#);
    change("remove", r#"all""#);
    let listed = asked(&world, r#"{"command":"bitmap-list","id":"disk.qcow2"}"#);
    let described = |index: usize, key: &str| listed["bitmaps"][index][key].clone();
    assert_eq!(listed["bitmaps"].as_array().map(Vec::len), Some(2), "{listed}");
    assert_eq!([described(0, "name"), described(1, "name")], ["late", "both"]);
    assert_eq!(described(1, "granularity"), 1 << 20);
    for (request, reason) in [
        (request("remove", r#"all""#), "there is no bitmap"),
        (request("add", r#"late""#), "there is a bitmap"),
        (request("add", r#"odd","granularity":700"#), "granularity"),
        (request("dance", r#"late""#), "bitmap-dance"),
    ] {
        let error = refused(&world, &request);
        assert!(error.contains(reason), "{request}: {error}");
    }
    client.drain();
    asked(&world, r#"{"command":"stop"}"#);
    assert_eq!(server.wait(), Some(0), "{}", world.log());
    world.assert_sound(false);
    // The server has ended, and so have the events.
    let names: Vec<String> = events
        .filter_map(|event| event["event"].as_str().map(str::to_owned))
        .collect();
    let changes = names.iter().filter(|name| *name == "bitmap-changed").count();
    assert_eq!(changes, 8, "{names:?}");
    for name in ["client-connected", "stopping"] {
        assert!(names.iter().any(|event| event == name), "{name}: {names:?}");
    }
    let output = Command::new("qemu-img")
        .args(["info", "--output=json"])
        .arg(world.path("disk.qcow2"))
        .output()
        .expect("qemu-img");
    let info: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let bitmaps = &info["format-specific"]["data"]["bitmaps"];
    for (index, name) in ["late", "both"].into_iter().enumerate() {
        assert_eq!(bitmaps[index]["name"], name, "{info}");
        // Nobody uses it, and it is complete.
        assert_eq!(bitmaps[index]["flags"], serde_json::json!(["auto"]), "{info}");
    }
}

/// Silent, hostile and many clients take nothing from the disk's.
#[test]
fn clients_of_the_control_socket_do_not_disturb_the_disk() {
    let world = World::new("cluster_size=65536", BLOCKS * BLOCK);
    let mut random = Random::new(0xbad);
    let mut client = Client::new(BLOCKS, false);
    let server = world.serve(&["--control", "control"]);
    client.connect(&world.path("socket"));
    asked(&world, r#"{"command":"info"}"#);
    let slow: Vec<UnixStream> = (0..4)
        .map(|_| {
            let mut stream = UnixStream::connect(world.path("control")).expect("it listens");
            stream.write_all(b"{\"comm").expect("it reads");
            stream
        })
        .collect();
    let answers: Vec<String> = std::thread::scope(|scope| {
        let asking: Vec<_> = (0..100)
            .map(|number| {
                let world = &world;
                scope.spawn(move || match number % 4 {
                    0 => say(world, b"{\"command\":\"info\"}\n"),
                    1 => say(world, &[b'x'; 100 << 10]),
                    2 => say(world, b"\0\xff\xfe\n{}\n[[[[\n"),
                    _ => say(world, b"{\"command\":\"flush\",\"id\":\"disk.qcow2\"}\n"),
                })
            })
            .collect();
        while asking.iter().any(|asking| !asking.is_finished()) {
            client.work(&mut random, Duration::from_millis(5));
        }
        asking
            .into_iter()
            .map(|asking| asking.join().expect("a client"))
            .collect()
    });
    for (number, answer) in answers.iter().enumerate() {
        let is_full = answer.contains("too many clients");
        let is_expected = match number % 4 {
            0 => answer.contains("\"protocol\":1"),
            3 => answer == "{\"ok\":true}\n",
            // It may have closed the connection on what it had not read.
            1 => answer.is_empty() || answer.contains("\"ok\":false"),
            _ => answer.contains("\"ok\":false"),
        };
        assert!(is_full || is_expected, "{number}: {answer}");
    }
    assert!(answers.iter().any(|answer| answer.contains("\"protocol\":1")));
    drop(slow);
    asked(&world, r#"{"command":"info"}"#);
    client.drain();
    assert_eq!(server.stop(), Some(0), "{}", world.log());
    client.assert_contents(&world.contents());
}

/// Method: the limit of the running server is lowered until one number is free below it.
#[test]
fn last_descriptor_is_enough_for_a_client() {
    let world = World::new("cluster_size=64k", 1 << 20);
    let socket = world.path("control");
    let server = world.serve(&["--control", socket.to_str().expect("a path of ours")]);
    world.wait_for_control("control");
    // The server may not have closed its end of that client's connection, whose number will be free again.
    assert!(listens(&socket).expect("the kernel's table of sockets"));
    wait_until("end of the connection", || {
        !has_connection(&socket).expect("the kernel's table of sockets")
    });
    let folder = format!("/proc/{}/fd", server.pid());
    let in_use: Vec<u32> = std::fs::read_dir(folder)
        .expect("its descriptors")
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    let first_free = (0..).find(|number| !in_use.contains(number)).expect("a number");
    let limit = |number: u32| {
        let arguments = [format!("--pid={}", server.pid()), format!("--nofile={number}:")];
        let set = Command::new("prlimit").args(arguments).status();
        assert!(set.expect("prlimit, of util-linux").success());
    };
    limit(first_free + 1);
    for _ in 0..4 {
        asked(&world, r#"{"command":"info"}"#);
    }
    // With none left, a client waits until there is one.
    limit(first_free);
    let mut early = UnixStream::connect(world.path("control")).expect("it listens");
    early.write_all(b"{\"command\":\"info\"}\n").expect("it waits");
    early
        .set_read_timeout(Some(Duration::from_millis(300)))
        .expect("a socket");
    let nothing = early.read(&mut [0; 1]).expect_err("nobody reads it yet");
    assert_eq!(nothing.kind(), std::io::ErrorKind::WouldBlock);
    limit(first_free + 1);
    early.set_read_timeout(None).expect("a socket");
    let mut answer = String::new();
    BufReader::new(early).read_line(&mut answer).expect("an answer");
    assert!(answer.contains("\"ok\":true"), "{answer}");
    assert_eq!(server.stop(), Some(0));
}

#[test]
fn control_socket_goes_to_the_next_server_or_stays() {
    let world = half_free(BLOCKS * BLOCK);
    let mut random = Random::new(0x4a4d);
    let mut client = Client::new(BLOCKS, true);
    let mut old = world.serve(&["--restartable", "--control", "control"]);
    client.connect(&world.path("socket"));
    let process = |world: &World| asked(world, r#"{"command":"info"}"#)["process"].as_u64();
    let first = process(&world);
    for round in 0..3 {
        // A compaction under way keeps no server from leaving.
        asked(&world, r#"{"command":"compact","id":"disk.qcow2","rate":8192}"#);
        let wait = |client: &mut Client, random: &mut Random, is_over: &mut dyn FnMut() -> bool| {
            let deadline = Instant::now() + Duration::from_secs(30);
            while !is_over() {
                client.work(random, Duration::from_micros(200));
                assert!(Instant::now() < deadline, "{}", world.log());
            }
        };
        // One that cannot take over, as it is not restartable: the old one goes on, and has its socket.
        let mut less = world.serve(&["--takeover", "--control", "control"]);
        wait(&mut client, &mut random, &mut || !less.is_running());
        assert_eq!(less.wait(), Some(1), "round {round}: {}", world.log());
        let before = process(&world);
        assert!(
            old.is_running() && before.is_some(),
            "round {round}: {}",
            world.log()
        );
        let new = world.serve(&["--takeover", "--restartable", "--control", "control"]);
        wait(&mut client, &mut random, &mut || !old.is_running());
        assert_eq!(old.wait(), Some(0), "round {round}: {}", world.log());
        assert_ne!(process(&world), before, "round {round}");
        old = new;
    }
    assert_ne!(process(&world), first);
    asked(&world, r#"{"command":"flush","id":"disk.qcow2"}"#);
    client.drain();
    assert_eq!(old.stop(), Some(0), "{}", world.log());
    assert!(!world.path("control").exists());
    world.assert_sound(false);
    client.assert_contents(&own_blocks(&world, BLOCKS * BLOCK));
}

/// `ctl` shows a table, or what was answered.
#[test]
fn ctl_prints_tables_and_json() {
    let world = World::new("cluster_size=65536", BLOCKS * BLOCK);
    let server = world.serve(&["--control", "control"]);
    asked(&world, r#"{"command":"info"}"#);
    let ctl = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_ringdisk"))
            .args(["ctl", "--socket"])
            .arg(world.path("control"))
            .args(arguments)
            .output()
            .expect("ringdisk");
        (
            output.status.code(),
            String::from_utf8_lossy(&output.stdout).into_owned(),
        )
    };
    let (code, table) = ctl(&["disk-list"]);
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!((code, lines.len()), (Some(0), 2), "{table}");
    assert!(
        lines[0].starts_with("ID ") && lines[1].starts_with("disk.qcow2 "),
        "{table}"
    );
    let (code, json) = ctl(&["disk-list", "--json"]);
    let answer: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(
        (code, &answer["disks"][0]["id"]),
        (Some(0), &"disk.qcow2".into()),
        "{json}"
    );
    assert_eq!(ctl(&["flush", "disk.qcow2"]), (Some(0), "done\n".to_owned()));
    assert_eq!(ctl(&["flush", "none"]).0, Some(1));
    let (code, table) = ctl(&["stats"]);
    let words: Vec<&str> = table.split_whitespace().collect();
    assert_eq!((code, &words[..2]), (Some(0), &["DISK", "KIND"][..]), "{table}");
    assert!(
        table
            .lines()
            .nth(1)
            .is_some_and(|line| line.starts_with("disk.qcow2") && line.ends_with("idle")),
        "{table}"
    );
    assert_eq!(ctl(&["stats", "none"]).0, Some(1));
    assert_eq!(ctl(&["stop"]).0, Some(0));
    assert_eq!(server.wait(), Some(0), "{}", world.log());
}
