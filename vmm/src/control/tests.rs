//! The control socket as a client sees it, and the documented requests.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tracing_subscriber::layer::SubscriberExt;
use virtio_devices::connect::{Cancel, connect_within};

use super::clients::{CLIENTS_MAX, ROOM_MAX, SILENT_MIN};
use super::*;
use crate::disk_config::DiskConfig;
use crate::socket::Socket;

fn served() -> (tempfile::TempDir, std::path::PathBuf, Control) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("control");
    let handler = |request| match request {
        Request::Info {} => Ok(json!({"state": "running"})),
        Request::DiskList {} | Request::Stats { .. } => Ok(json!({"disks": []})),
        Request::Pause {} => Err("it will not".to_owned()),
        Request::Resume {} | Request::PowerButton {} | Request::Reset {} | Request::Reload {} => {
            Ok(Value::Null)
        }
        // As a panic is, and without its noise.
        Request::DiskResize { size: 13, .. } => std::panic::resume_unwind(Box::new("bad luck")),
        Request::DiskResize { id, size, .. } => Ok(json!({ "id": id, "size": size })),
        Request::DiskAdd { disk, .. } => match disk.config() {
            Ok(config) => Ok(json!({"id": config.name(), "queues": config.num_queues})),
            Err(error) => Err(error.to_string()),
        },
        Request::DiskLimits { id, limits } => {
            let limits = limits.map(|limits| limits.limits().expect("limits"));
            Ok(json!({ "id": id, "is_set": limits.is_some() }))
        }
        Request::GroupLimits { group, .. } => Ok(json!({ "group": group })),
        Request::DiskRemove { id }
        | Request::SnapshotList { id }
        | Request::BitmapList { id }
        | Request::Flush { id }
        | Request::CompactStatus { id }
        | Request::CompactStop { id } => Ok(json!({ "id": id })),
        Request::Compact { id, rate } => Ok(json!({ "id": id, "rate": rate })),
        Request::Stop {} => Ok(json!({"state": "stopping"})),
        Request::SnapshotCreate { id, name } => Ok(json!({ "id": id, "snapshot": name })),
        Request::SnapshotApply { id, snapshot, force } => {
            Ok(json!({ "id": id, "snapshot": snapshot, "force": force }))
        }
        Request::SnapshotDelete { id, snapshot } => Ok(json!({ "id": id, "snapshot": snapshot })),
        Request::BitmapAdd { id, name, .. }
        | Request::BitmapRemove { id, name }
        | Request::BitmapClear { id, name }
        | Request::BitmapEnable { id, name }
        | Request::BitmapDisable { id, name }
        | Request::BitmapMerge { id, name, .. } => Ok(json!({ "id": id, "name": name })),
        Request::HandOver { .. } | Request::Events {} | Request::Log { .. } => {
            Err("it is not for the handler".to_owned())
        }
    };
    let control = Control::serve(&path, Arc::new(handler)).expect("a socket");
    (folder, path, control)
}

/// Sends bytes to a control socket and ends the connection. Returns what it answers.
pub(crate) fn say(path: &Path, bytes: &[u8]) -> String {
    let mut stream = UnixStream::connect(path).expect("it listens");
    stream.write_all(bytes).expect("it reads");
    stream.shutdown(std::net::Shutdown::Write).expect("a socket");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("text");
    answer
}

#[test]
fn control_answers_requests_in_turn_on_one_connection() {
    let (_folder, path, _control) = served();
    let answer = say(
        &path,
        b"{\"command\":\"info\"}\n{\"command\":\"pause\"}\n{\"command\":\"resume\"}\n",
    );
    let lines: Vec<Value> = answer
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    assert_eq!(
        lines,
        [
            json!({"ok": true, "state": "running"}),
            json!({"ok": false, "error": "it will not"}),
            json!({"ok": true}),
        ]
    );
    // Whoever does not say so does not force.
    let apply = b"{\"command\":\"snapshot-apply\",\"id\":\"a\",\"snapshot\":\"1\"}\n";
    assert!(say(&path, apply).contains("\"force\":false"));
    let resize = Request::DiskResize {
        id: "a".to_owned(),
        size: 7,
        force: false,
    };
    let answer = ask(&path, &resize).expect("an answer");
    assert_eq!(answer, json!({"ok": true, "id": "a", "size": 7}));
}

/// Every request on the page parses, and every request is on the page.
#[test]
fn control_page_lists_exactly_the_requests() {
    let page = include_str!("../../../docs/control.md");
    let mut examples: Vec<Value> = Vec::new();
    for block in page.split("```json\n").skip(1) {
        let block = block.split("```").next().expect("the end of the block");
        let values = serde_json::Deserializer::from_str(block).into_iter();
        examples.extend(values.map(|value| value.expect("JSON")));
    }
    let (requests, answers): (Vec<Value>, Vec<Value>) = examples
        .into_iter()
        .partition(|value| value.get("command").is_some());
    let mut commands = Vec::new();
    for request in requests {
        let parsed: Request = serde_json::from_value(request).expect("a request");
        if let Request::DiskAdd { disk, .. } = &parsed {
            disk.config().expect("a disk");
        }
        commands.push(parsed.name());
    }
    // Of a machine, of a vhost-user server and of one of block devices.
    assert_eq!(commands.iter().filter(|name| **name == "disk-add").count(), 3);
    commands.dedup();
    assert_eq!(
        commands,
        [
            "info",
            "disk-list",
            "stats",
            "flush",
            "events",
            "log",
            "stop",
            "pause",
            "resume",
            "power-button",
            "reset",
            "disk-add",
            "disk-remove",
            "reload",
            "disk-resize",
            "disk-limits",
            "group-limits",
            "snapshot-create",
            "snapshot-list",
            "snapshot-delete",
            "snapshot-apply",
            "bitmap-list",
            "bitmap-add",
            "bitmap-remove",
            "bitmap-clear",
            "bitmap-enable",
            "bitmap-disable",
            "bitmap-merge",
            "compact",
            "compact-status",
            "compact-stop",
            "hand-over"
        ]
    );
    assert_eq!(answers.len(), 27, "an answer for each, and an error");
    for answer in answers {
        let refused = answer["error"].is_string();
        assert_eq!(answer["ok"], Value::Bool(!refused), "{answer}");
    }
}

/// A client that watches gets lines until it goes, and then leaves its place to another.
#[test]
fn events_are_sent_until_the_client_goes() {
    let (_folder, path, _control) = served();
    let log = tracing_subscriber::registry().with(WatchLayer);
    let _guard = tracing::subscriber::set_default(log);
    let mut seen = 0;
    for round in 0..2 * CLIENTS_MAX as u64 {
        let stream = UnixStream::connect(&path).expect("it listens");
        (&stream)
            .write_all(b"{\"command\":\"events\"}\n")
            .expect("it reads");
        let mut lines = BufReader::new(&stream).lines();
        let mut next = || -> Value {
            let line = lines.next().expect("a line").expect("text");
            serde_json::from_str(&line).expect("JSON")
        };
        let mut answer = next();
        // The place of one that has just gone may still be taken.
        if answer["ok"] == false {
            std::thread::sleep(Duration::from_millis(300));
            continue;
        }
        assert_eq!(answer["ok"], true);
        tracing::info!(event = "control-test", round, "it happens");
        while answer["event"] != "control-test" {
            answer = next();
        }
        assert_eq!(answer["round"], round);
        seen += 1;
    }
    assert!(seen > CLIENTS_MAX, "{seen}");
}

/// The answer comes with descriptors, and what follows it is nobody's request. A refusal ends nothing.
#[test]
fn hand_over_answers_with_every_lock_and_leaves_the_connection() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("control");
    let image = std::fs::File::create(folder.path().join("image")).expect("a file");
    let own = image.try_clone().expect("a descriptor");
    let hand_over = move |mut connection: &UnixStream, request| {
        let Request::HandOver { seconds, .. } = request else {
            return Err("another request".to_owned());
        };
        if seconds == 13 {
            std::panic::resume_unwind(Box::new("bad luck"));
        }
        let copies = (0..300).map(|_| own.try_clone().map(Into::into));
        let copies = copies.collect::<io::Result<Vec<_>>>().expect("descriptors");
        answer_with(connection, &json!({"ok": true, "failures": []}), &copies).expect("it reads");
        connection.write_all(b"more").expect("it reads");
        Ok(())
    };
    let server = Server {
        hand_over: Arc::new(hand_over),
        ..Server::new(Arc::new(|_| Ok(json!({"state": "running"}))))
    };
    let socket = Socket::listen(&path).expect("a socket");
    let _control = Control::serve_on(socket, &server).expect("it serves");
    let request = |seconds| Request::HandOver {
        version: HAND_OVER,
        disks: vec!["/run/a.sock".into()],
        seconds,
        partly: false,
    };
    let patience = Duration::from_secs(20);
    let mut connection = UnixStream::connect(&path).expect("it listens");
    let refused = ask_for_disks(&connection, &request(13), patience).expect_err("bad luck");
    assert!(matches!(refused, AskError::Refused(why) if why.contains("internal error")));
    let handed = ask_for_disks(&connection, &request(20), patience).expect("locks");
    assert_eq!(handed.answer["failures"], json!([]));
    assert_eq!(handed.locks.len(), 300);
    // The same description: they share a position.
    let mut last = std::fs::File::from(handed.locks.into_iter().next_back().expect("one"));
    last.write_all(b"four").expect("written");
    let mut image = &image;
    assert_eq!(std::io::Seek::stream_position(&mut image).expect("a position"), 4);
    let mut more = String::new();
    connection.read_to_string(&mut more).expect("text");
    assert_eq!(more, "more");
    assert!(ask(&path, &Request::Info {}).is_ok());

    // What came with the request would be lost to what follows it.
    let text = serde_json::to_string(&request(20)).expect("text");
    let answer = say(&path, format!("{text}\n{{\"command\":\"info\"}}\n").as_bytes());
    assert!(answer.contains("has to be the last request"), "{answer}");
    assert!(answer.contains("\"state\":\"running\""), "{answer}");
    let (_folder, path, _control) = served();
    let answer = say(&path, format!("{text}\n").as_bytes());
    assert!(answer.contains("it has no disks to hand over"), "{answer}");
}

#[test]
fn disk_add_takes_the_command_line_keys() {
    let (_folder, path, _control) = served();
    let text = r#"path="a,b.qcow2",id=a,num_queues=2,queue_affinity=[0@[0],1@[1-2]],readonly=on"#;
    let keys = DiskKeys::parse(text).expect("a disk");
    assert_eq!(keys.config(), DiskConfig::parse(text));
    let answer = ask(
        &path,
        &Request::DiskAdd {
            disk: keys.clone(),
            socket: None,
        },
    )
    .expect("an answer");
    assert_eq!(answer, json!({"ok": true, "id": "a", "queues": 2}));
    // The forms that JSON has for them mean the same.
    let json =
        r#"{"path":"a,b.qcow2","id":"a","num_queues":2,"queue_affinity":"[0@[0],1@[1-2]]","readonly":true}"#;
    let written: DiskKeys = serde_json::from_str(json).expect("keys");
    assert_eq!(written.config(), keys.config());
    // Who comes later reads them as text.
    for keys in [&keys, &written] {
        let text = keys.text().expect("a text");
        assert_eq!(DiskConfig::parse(&text), keys.config(), "{text}");
    }
    let odd: DiskKeys = serde_json::from_str(r#"{"path":"a\",\"b"}"#).expect("keys");
    let told = odd.text().expect_err("no text has it");
    assert!(told.starts_with("path has a comma and a quote"), "{told}");
    let odd: DiskKeys = serde_json::from_str(r#"{"path":"a\"b","id":"[x,y"}"#).expect("keys");
    assert_eq!(odd.text().as_deref(), Ok("id=\"[x,y\",path=a\"b"));
    for (disk, said) in [
        (r#"{"path":"a","pth":"b"}"#, "unknown key `pth`"),
        (r#"{"id":"b"}"#, "`path` is missing"),
        (r#"{"path":"a","num_queues":0}"#, "`num_queues=0`"),
        (r#"{"path":"a","num_queues":-1}"#, "invalid request"),
        (
            r#"{"path":"a","readonly":1}"#,
            "`readonly=1`: readonly takes on or off",
        ),
        (r#"{"path":["a"]}"#, "invalid request"),
        (r#""path=a""#, "invalid request"),
    ] {
        let request = format!("{{\"command\":\"disk-add\",\"disk\":{disk}}}\n");
        let answer = say(&path, request.as_bytes());
        assert!(
            answer.contains(said) && answer.contains("\"ok\":false"),
            "{disk}: {answer}"
        );
    }
}

#[test]
fn invalid_request_is_answered_and_the_next_client_served() {
    let (_folder, path, _control) = served();
    for (bytes, said) in [
        (
            &b"{\"command\":\"dance\"}\n"[..],
            "invalid request: unknown variant `dance`",
        ),
        (b"{\"command\":\"pause\",\"really\":true}\n", "invalid request: "),
        (
            b"{\"command\":\"disk-resize\",\"id\":\"a\"}\n",
            "missing field `size`",
        ),
        (
            b"{\"command\":\"snapshot-create\",\"id\":\"a\"}\n",
            "missing field `name`",
        ),
        (
            b"{\"command\":\"snapshot-create\",\"id\":\"a\",\"name\":7}\n",
            "invalid type: integer `7`",
        ),
        (
            b"{\"command\":\"snapshot-apply\",\"id\":\"a\",\"snapshot\":\"1\",\"force\":\"yes\"}\n",
            "invalid type: string",
        ),
        (
            b"{\"command\":\"snapshot-delete\",\"id\":\"a\",\"snapshot\":\"1\",\"force\":true}\n",
            "unknown field `force`",
        ),
        (b"nonsense\n", "invalid request: "),
        (b"{\"command\":\"inf", "the request is incomplete"),
        (&[b'x'; (1 << 20) + 1], "longer than 1048576 bytes"),
    ] {
        let answer = say(&path, bytes);
        assert!(
            answer.contains(said) && answer.contains("\"ok\":false"),
            "{answer}"
        );
    }
    assert!(ask(&path, &Request::Info {}).is_ok());
}

#[test]
fn handler_panic_is_answered_and_costs_no_seat() {
    let (_folder, path, _control) = served();
    for _ in 0..2 * CLIENTS_MAX {
        let answer = say(
            &path,
            b"{\"command\":\"disk-resize\",\"id\":\"a\",\"size\":13}\n{\"command\":\"info\"}\n",
        );
        assert!(
            answer.contains("internal error") && answer.contains("running"),
            "{answer}"
        );
    }
}

#[test]
fn ask_within_times_out_and_after_answer_follows_the_answer() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("control");
    let silent = std::os::unix::net::UnixListener::bind(&path).expect("a socket");
    let asked = ask_within(&path, &Request::Info {}, Some(Duration::from_millis(30)));
    assert!(matches!(asked, Err(AskError::Unanswered(error)) if error.kind() == io::ErrorKind::TimedOut));
    drop(silent);
    std::fs::remove_file(&path).expect("it is there");
    // Nor one that accepts nobody and whose backlog is full: connecting would take as long as it does.
    let deaf = Socket::listen(&path).expect("a socket");
    let connect = || connect_within(&path, Duration::from_millis(10), &Cancel::never());
    let waiting: Vec<UnixStream> = std::iter::from_fn(|| connect().ok()).collect();
    let asked = ask_within(&path, &Request::Info {}, Some(Duration::from_millis(30)));
    assert!(matches!(asked, Err(AskError::Unanswered(error)) if error.kind() == io::ErrorKind::TimedOut));
    drop((deaf, waiting));

    let (count, heard) = (Arc::new(AtomicUsize::new(0)), folder.path().join("other"));
    let (asked, told) = (Arc::clone(&count), Arc::clone(&count));
    let handler = move |_| Ok(json!({ "before": asked.load(Ordering::SeqCst) }));
    let told = move || {
        told.fetch_add(1, Ordering::SeqCst);
    };
    let server = Server {
        handler: Arc::new(handler),
        stop: Arc::new(|| ()),
        after_answer: Arc::new(told),
        ..Server::new(Arc::new(|_| Err("nobody asks".to_owned())))
    };
    let socket = Socket::listen(&heard).expect("a socket");
    let _control = Control::serve_on(socket, &server).expect("threads");
    let answer = say(&heard, b"{\"command\":\"info\"}\n{\"command\":\"info\"}\n");
    assert!(
        answer.contains("\"before\":0") && answer.contains("\"before\":1"),
        "{answer}"
    );
    assert_eq!(count.load(Ordering::SeqCst), 2);
}

/// Clients that say nothing, or the half of a request, make room one by one, the oldest first; those that watch do not.
#[test]
fn silent_clients_make_room_for_one_that_asks() {
    let (_folder, path, _control) = served();
    let connect = || UnixStream::connect(&path).expect("it listens");
    let watch = || {
        let stream = connect();
        (&stream)
            .write_all(b"{\"command\":\"events\"}\n")
            .expect("it reads");
        let mut lines = BufReader::new(stream);
        let mut line = String::new();
        lines.read_line(&mut line).expect("an answer");
        assert!(line.contains("true"), "{line}");
        lines
    };
    let watching: Vec<_> = (0..CLIENTS_MAX - 2).map(|_| watch()).collect();
    let mut silent = connect();
    let mut slow = connect();
    for waits in [&silent, &slow] {
        let timeout = waits.set_read_timeout(Some(Duration::from_secs(20)));
        timeout.expect("a timeout that is not zero");
    }
    slow.write_all(b"{\"command\"").expect("it reads");
    let began = Instant::now();
    assert!(ask(&path, &Request::Info {}).is_ok());
    assert_eq!(
        silent.read(&mut [0]).expect("the end"),
        0,
        "the one that was there first"
    );
    // The other one may go on, if nobody else comes.
    slow.write_all(b":\"info\"}\n").expect("it reads");
    let mut slow = BufReader::new(slow);
    let mut answer = String::new();
    slow.read_line(&mut answer).expect("an answer");
    assert!(answer.contains("running"), "{answer}");
    assert!(ask(&path, &Request::Info {}).is_ok() && ask(&path, &Request::Info {}).is_ok());
    assert!(
        began.elapsed() < ROOM_MAX + 3 * SILENT_MIN,
        "{:?}",
        began.elapsed()
    );

    // With eight that are not silent there is no room.
    drop(slow);
    let more: Vec<_> = (0..2).map(|_| watch()).collect();
    let refused = ask(&path, &Request::Info {}).expect_err("no room").line();
    assert!(refused.is_some_and(|line| line.contains("too many clients")));
    drop((watching, more));
    let free = (0..500).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        ask(&path, &Request::Info {}).is_ok()
    });
    assert!(free, "nobody was let in again");
}

#[test]
fn hundred_clients_at_once_are_all_answered() {
    let (_folder, path, _control) = served();
    let start = std::sync::Barrier::new(100);
    std::thread::scope(|scope| {
        let ask_at_once = || {
            start.wait();
            ask(&path, &Request::Info {})
        };
        let clients: Vec<_> = (0..100).map(|_| scope.spawn(ask_at_once)).collect();
        for client in clients {
            let answer = client.join().expect("no panic").expect("an answer");
            assert_eq!(answer["state"], "running");
        }
    });
}
