//! Snapshots of disks that are served, as a client of a machine's control socket has them: beside requests of a queue, and
//! while other requests are answered. QEMU's tools judge what is left.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use block::ring::RingKind;
use block::{AlignedBuf, Buffer, Context, Disk, Op, ask as ask_disk};
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::disks::{Attached, Disks};
use super::{Desk, Stop};
use crate::control::tests::say;
use crate::control::{AskError, Control, DiskKeys, Request, ask, ask_within};
use crate::disk_config::{DiskConfig, RateLimitGroups};
use crate::exchange::{self, Desk as _};
use crate::machine::{MachineConfig, MemoryConfig, Payload};
use crate::open;

/// The size of a write, and of what is compared.
const BLOCK: usize = 4096;
/// The number of blocks that are written, in turn.
const BLOCKS: u64 = 64;

/// A machine's control socket and disks. Its guest has not started: queues of the tests take its place.
struct World {
    folder: tempfile::TempDir,
    desk: Arc<Desk>,
    socket: PathBuf,
    _control: Control,
}

impl World {
    /// Attaches the disks of `--disk` texts, whose paths are relative to the world's folder.
    fn new(folder: tempfile::TempDir, disks: &[&str]) -> Self {
        let attach = |text: &&str| {
            let text = text.replace("path=", &format!("path={}/", folder.path().display()));
            let config = DiskConfig::parse(&text).expect("a disk");
            Attached::open(&config, false).expect("an image")
        };
        let disks = Disks::new(disks.iter().map(attach).collect()).expect("a thread");
        let desk = Arc::new(Desk {
            config: MachineConfig {
                payload: Payload::Kernel {
                    kernel: PathBuf::new(),
                    initramfs: None,
                    command_line: String::new(),
                },
                cpus: 1,
                memory: MemoryConfig {
                    bytes: 64 << 20,
                    hugepage_bytes: None,
                    host_node: None,
                },
                sandbox: false,
            },
            nets: Default::default(),
            rng: None,
            rate_limit_groups: RateLimitGroups::parse(&[]).expect("no groups"),
            disks: Arc::new(disks),
            machine: Mutex::default(),
            stop: Arc::new(Stop::default()),
            adding: Mutex::default(),
        });
        let (asked, socket) = (Arc::clone(&desk), folder.path().join("control"));
        let control = Control::serve(
            &socket,
            Arc::new(move |request| exchange::answer(&*asked, request)),
        );
        Self {
            folder,
            desk,
            socket,
            _control: control.expect("a socket"),
        }
    }

    fn disk(&self, id: &str) -> Arc<dyn Disk> {
        let disk = self.desk.disks.find(id, |_, disk| disk.disk());
        disk.expect("a disk").expect("an image")
    }

    /// Asks at the socket: the answer without its `ok`, or the error.
    fn ask(&self, request: &Request) -> Result<Value, String> {
        match ask_within(&self.socket, request, None) {
            Ok(mut answer) => {
                answer.as_object_mut().expect("an object").remove("ok");
                Ok(answer)
            }
            Err(AskError::Refused(error)) => {
                assert!(!error.contains('\n'), "{error}");
                Err(error)
            }
            Err(AskError::Unanswered(error)) => panic!("{error}"),
        }
    }

    fn create(&self, id: &str, name: &str) -> Result<Value, String> {
        self.ask(&create(id, name))
    }

    fn delete(&self, id: &str, snapshot: &str) -> Result<Value, String> {
        let (id, snapshot) = (id.to_owned(), snapshot.to_owned());
        self.ask(&Request::SnapshotDelete { id, snapshot })
    }

    fn apply(&self, id: &str, snapshot: &str, force: bool) -> Result<Value, String> {
        let (id, snapshot) = (id.to_owned(), snapshot.to_owned());
        self.ask(&Request::SnapshotApply { id, snapshot, force })
    }

    /// Returns the IDs and names of a disk's snapshots.
    fn list(&self, id: &str) -> Vec<(String, String)> {
        let listed = self.ask(&list(id)).expect("a list");
        let text = |value: &Value| value.as_str().expect("a text").to_owned();
        let snapshots = listed["snapshots"].as_array().expect("a list");
        snapshots
            .iter()
            .map(|snapshot| (text(&snapshot["id"]), text(&snapshot["name"])))
            .collect()
    }

    /// Closes the disks; the image `name` has no error and no leak.
    fn close(self, name: &str) -> tempfile::TempDir {
        self.desk.disks.close().expect("a clean close");
        qemu_img(&self.folder, &["check", name]);
        self.folder
    }
}

fn create(id: &str, name: &str) -> Request {
    Request::SnapshotCreate {
        id: id.to_owned(),
        name: name.to_owned(),
    }
}

fn list(id: &str) -> Request {
    Request::SnapshotList { id: id.to_owned() }
}

fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
    let owned = |&(id, name): &(&str, &str)| (id.to_owned(), name.to_owned());
    expected.iter().map(owned).collect()
}

fn qemu_img(folder: &tempfile::TempDir, arguments: &[&str]) -> String {
    let mut command = Command::new("qemu-img");
    let done = command.current_dir(folder.path()).args(arguments).output();
    let done = done.expect("qemu-img is needed by this test");
    let said = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(
        done.status.success(),
        "{arguments:?}: {said}{}",
        String::from_utf8_lossy(&done.stderr)
    );
    said
}

/// A folder with the image `a.qcow2` of 1 MiB.
fn image() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let options = "cluster_size=4k";
    qemu_img(
        &folder,
        &["create", "-q", "-f", "qcow2", "-o", options, "a.qcow2", "1M"],
    );
    folder
}

fn pattern(write: u64) -> Vec<u8> {
    write.to_le_bytes().repeat(BLOCK / 8)
}

/// Lets the tasks of a context end: one that is dropped with them is leaked, with the image's lock.
fn settle(cx: &Context) {
    while cx.tasks() > 0 {
        cx.run_ready();
        cx.ring().turn(false).expect("the ring turns");
    }
}

/// Writes to `disk` and waits for the answer.
fn write(disk: &Arc<dyn Disk>, block: u64, bytes: &[u8]) {
    let cx = Context::syscalls();
    let queue = Arc::clone(disk).open_queue(&cx).expect("a queue");
    let op = Op::Write { fua: false };
    let buffer: Buffer = AlignedBuf::from_slice(bytes).into();
    let written = ask_disk(&*queue, op, block * BLOCK as u64, BLOCK as u64, buffer);
    cx.block_on(written).expect("the ring turns").expect("a write");
    settle(&cx);
}

/// Reads all blocks of a `--disk` text's disk, as any frontend would show it.
fn read(folder: &tempfile::TempDir, text: &str) -> Vec<u8> {
    let text = text.replace("path=", &format!("path={}/", folder.path().display()));
    let opened = open::open(&DiskConfig::parse(&text).expect("a disk")).expect("an image");
    let cx = Context::syscalls();
    let queue = opened.disk().open_queue(&cx).expect("a queue");
    let len = BLOCKS * BLOCK as u64;
    let buffer: Buffer = AlignedBuf::zeroed(len as usize).into();
    let done = cx.block_on(ask_disk(&*queue, Op::Read, 0, len, buffer));
    let done = done.expect("the ring turns").expect("a read");
    let bytes = done.into_owned().expect("memory").to_vec();
    drop(queue);
    bytes
}

/// A guest that writes the blocks in turn, each write after the answer of the one before: the first has the number 1.
struct Writer {
    answered: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Writer {
    fn start(disk: Arc<dyn Disk>) -> Self {
        let (answered, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (count, is_over) = (Arc::clone(&answered), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            let cx = Context::new(RingKind::Auto, 64).expect("a ring");
            let queue = disk.open_queue(&cx).expect("a queue");
            while !is_over.load(Ordering::SeqCst) {
                let number = count.load(Ordering::SeqCst) + 1;
                let buffer: Buffer = AlignedBuf::from_slice(&pattern(number)).into();
                let (at, op) = ((number - 1) % BLOCKS * BLOCK as u64, Op::Write { fua: false });
                let written = ask_disk(&*queue, op, at, BLOCK as u64, buffer);
                cx.block_on(written).expect("the ring turns").expect("a write");
                count.store(number, Ordering::SeqCst);
            }
            settle(&cx);
        });
        Self {
            answered,
            stop,
            thread,
        }
    }

    fn answered(&self) -> u64 {
        self.answered.load(Ordering::SeqCst)
    }

    /// Waits until so many further writes were answered.
    fn wait(&self, more: u64) {
        let until = self.answered() + more;
        while self.answered() < until {
            assert!(!self.thread.is_finished(), "the guest has stopped");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    fn stop(self) -> u64 {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.join().expect("the guest's writes succeed");
        self.answered.load(Ordering::SeqCst)
    }
}

/// Returns what the disk has after so many writes.
fn after_writes(count: u64) -> Vec<u8> {
    let last = |block| (0..count).rev().find(|write| write % BLOCKS == block);
    let block = |block| last(block).map_or(vec![0; BLOCK], |write| pattern(write + 1));
    (0..BLOCKS).flat_map(block).collect()
}

/// Fails if what a snapshot shows is not the disk after one number of writes, from `before` to `after`.
fn assert_moment(bytes: &[u8], before: u64, after: u64) {
    let number = |block: &[u8]| u64::from_le_bytes(*block.first_chunk().expect("eight bytes"));
    let count = bytes.chunks(BLOCK).map(number).max().unwrap_or(0);
    assert!(
        (before..=after).contains(&count),
        "{count} writes are there; {before} were answered before, {after} were asked for"
    );
    assert!(bytes == after_writes(count), "other than after {count} writes");
}

#[test]
fn snapshot_of_a_disk_in_use_is_one_moment() {
    let folder = image();
    // The limits are beside the point, and stand between the disk and its image.
    let world = World::new(folder, &["path=a.qcow2,id=a,ops_size=1000000,ops_refill_time=1"]);
    let writer = Writer::start(world.disk("a"));
    let mut taken = Vec::new();
    for (name, id) in [("one", "1"), ("two", "2"), ("three", "3")] {
        writer.wait(BLOCKS + 7);
        let before = writer.answered();
        assert_eq!(world.create("a", name), Ok(json!({ "snapshot": id })));
        // One more may be under way.
        taken.push((name, before, writer.answered() + 1));
    }
    assert_eq!(
        world.list("a"),
        pairs(&[("1", "one"), ("2", "two"), ("3", "three")])
    );
    writer.wait(7);
    assert_eq!(world.delete("a", "name=two"), Ok(json!({})));
    writer.wait(BLOCKS);
    let count = writer.stop();
    let folder = world.close("a.qcow2");
    let listed = qemu_img(&folder, &["snapshot", "-l", "a.qcow2"]);
    let has = |name: &str| listed.split_whitespace().filter(|&word| word == name).count();
    assert_eq!(["one", "two", "three"].map(has), [1, 0, 1], "{listed}");
    for (name, before, after) in taken.into_iter().filter(|&(name, ..)| name != "two") {
        let text = format!("path=a.qcow2,readonly=on,snapshot=name={name}");
        assert_moment(&read(&folder, &text), before, after);
    }
    assert!(read(&folder, "path=a.qcow2") == after_writes(count), "the disk");
}

/// A request that is in flight holds the snapshot up, which gives up in the end; meanwhile others are answered.
#[test]
fn other_requests_are_answered_while_a_snapshot_is_made() {
    let folder = image();
    let raw = std::fs::File::create(folder.path().join("b")).expect("a file");
    raw.set_len(1 << 20).expect("its length");
    let world = World::new(folder, &["path=a.qcow2,id=a", "path=b,id=b,image_type=raw"]);
    let disk = world.disk("a");
    let cx = Context::syscalls();
    let queue = Arc::clone(&disk).open_queue(&cx).expect("a queue");
    // A new block each time: such a write is not answered before its ring turns.
    let held = |block: u64| {
        let buffer: Buffer = AlignedBuf::from_slice(&pattern(block)).into();
        let (at, op) = (block * BLOCK as u64, Op::Write { fua: false });
        let (request, answer) = block::Request::local(op, at, BLOCK as u64, buffer);
        queue.submit(request);
        answer
    };
    // If this machine is so slow that the snapshot has ended before others were asked, it is tried again.
    let mut answers = Vec::new();
    let found = (0..5).any(|round| {
        answers.push(held(round));
        let (socket, name) = (world.socket.clone(), format!("s{round}"));
        let asked = std::thread::spawn(move || ask_within(&socket, &create("a", &name), None));
        let mut others = 0;
        while !asked.is_finished() && others < 20 {
            let raw = world.ask(&list("b")).expect_err("no snapshots");
            assert_eq!(raw, "disk b has a raw image; only QCOW2 images have snapshots");
            let add = Request::DiskAdd {
                disk: DiskKeys::parse("path=none,id=c").expect("keys"),
                socket: None,
            };
            assert!(world.ask(&add).is_err());
            others += 1;
        }
        let meanwhile = !asked.is_finished();
        let refused = asked.join().expect("no panic").expect_err("a write is in flight");
        let AskError::Refused(error) = refused else {
            panic!("{refused:?}");
        };
        assert!(
            error.starts_with("cannot create a snapshot of disk a: requests in flight"),
            "{error}"
        );
        // The writes that it held off go on, but for those that it had found under way.
        cx.block_on(async {
            for answer in answers.drain(..) {
                answer.await.result.expect("a write");
            }
        })
        .expect("the ring turns");
        meanwhile
    });
    assert!(found, "others wait while a snapshot is made");
    assert_eq!(world.list("a"), []);
    assert_eq!(world.create("a", "s"), Ok(json!({"snapshot": "1"})));
    settle(&cx);
    drop((queue, cx, disk));
    world.close("a.qcow2");
}

#[test]
fn failed_requests_name_the_disk_and_change_nothing() {
    let folder = image();
    for name in ["twice", "twice", "2"] {
        qemu_img(&folder, &["snapshot", "-c", name, "a.qcow2"]);
    }
    std::fs::copy(folder.path().join("a.qcow2"), folder.path().join("ro.qcow2")).expect("a copy");
    let world = World::new(folder, &["path=a.qcow2,id=a", "path=ro.qcow2,id=ro,readonly=on"]);
    let writer = Writer::start(world.disk("a"));
    let there = pairs(&[("1", "twice"), ("2", "twice"), ("3", "2")]);
    let long = "x".repeat(256);
    for (failed, said) in [
        (
            world.create("none", "s"),
            "there is no disk `none`; there are: a, ro",
        ),
        (
            world.create("ro", "s"),
            "cannot create a snapshot of disk ro: the disk is read-only",
        ),
        (
            world.delete("ro", "id=1"),
            "cannot delete a snapshot of disk ro: the disk is read-only",
        ),
        (
            world.apply("ro", "id=1", true),
            "cannot apply a snapshot to disk ro: the disk is read-only",
        ),
        (
            world.create("a", "twice"),
            "cannot create a snapshot of disk a: there is a snapshot \"twice\" already, with id=1; choose another name, or \
             delete that one first",
        ),
        (
            world.create("a", ""),
            "cannot create a snapshot of disk a: the snapshot's name has 0 bytes; expected 1 to 255",
        ),
        (
            world.create("a", &long),
            "cannot create a snapshot of disk a: the snapshot's name has 256 bytes; expected 1 to 255",
        ),
        (
            world.create("a", "a\0b"),
            "cannot create a snapshot of disk a: the snapshot's name has a NUL; expected a name without",
        ),
        (
            world.delete("a", "name=none"),
            "cannot delete a snapshot of disk a: there is no snapshot name=none",
        ),
        (
            world.delete("a", "name=twice"),
            "cannot delete a snapshot of disk a: name=twice may mean 2 snapshots; select one by id=, such as id=1",
        ),
        (
            world.apply("a", "2", true),
            "cannot apply a snapshot to disk a: with the ID or name \"2\" may mean 2 snapshots; select one by id=, such as \
             id=2",
        ),
    ] {
        assert_eq!(failed.expect_err(said), said);
    }
    let unforced = world.apply("a", "id=1", false).expect_err("it is in use");
    assert!(
        unforced.contains("the disk may be in use") && unforced.contains("use force"),
        "{unforced}"
    );
    // From a client that does not keep to the language.
    for bytes in [
        &b"{\"command\":\"snapshot-create\",\"id\":\"a\",\"name\":\"s\",\"x\":1}\n"[..],
        b"{\"command\":\"snapshot-create\",\"id\":\"a\",\"name\":[\"s\"]}\n",
        b"{\"command\":\"snapshot-delete\",\"id\":\"a\",\"snapshot\":1}\n",
        b"{\"command\":\"snapshot-create\",\"id\":\"a\",\"name\":\"s",
        b"{\"command\":\"snapshot-create\",\"id\":\"a\",\"name\":\"\xff\"}\n",
        &[
            b"{\"command\":\"snapshot-create\",\"id\":\"a\",\"name\":\"",
            &[b's'; 70_000][..],
        ]
        .concat(),
    ] {
        let answer = say(&world.socket, bytes);
        assert!(
            answer.starts_with("{\"error\":") && answer.ends_with("\"ok\":false}\n"),
            "{answer}"
        );
        assert_eq!(answer.lines().count(), 1, "{answer}");
    }
    assert_eq!(world.list("a"), there);
    assert_eq!(world.list("ro"), there);
    // The guest goes on.
    writer.wait(2 * BLOCKS);
    let count = writer.stop();
    let folder = world.close("a.qcow2");
    assert!(read(&folder, "path=a.qcow2") == after_writes(count), "the disk");
}

#[test]
fn snapshot_is_applied_by_force_and_only_in_the_size_of_the_disk() {
    let world = World::new(image(), &["path=a.qcow2,id=a"]);
    let disk = world.disk("a");
    write(&disk, 0, &pattern(1));
    world.create("a", "one").expect("a snapshot");
    write(&disk, 0, &pattern(2));
    assert!(world.apply("a", "one", false).is_err());
    write(&disk, 1, &pattern(3));
    assert_eq!(world.apply("a", "name=one", true), Ok(json!({})));
    write(&disk, 2, &pattern(4));
    world.create("a", "two").expect("a snapshot");
    let cx = Context::syscalls();
    let grown = cx.block_on(Arc::clone(&disk).resize(&cx, 2 << 20));
    grown.expect("the ring turns").expect("growth");
    let refused = world
        .apply("a", "one", true)
        .expect_err("the guest has another size");
    assert!(
        refused.contains(
            "of a disk of 1048576 bytes, and the disk has 2097152 bytes: a disk that is served keeps its size"
        ),
        "{refused}"
    );
    assert_eq!(world.list("a"), pairs(&[("1", "one"), ("2", "two")]));
    drop((disk, cx));
    let folder = world.close("a.qcow2");
    let first = |writes: [u64; 3]| {
        writes
            .map(|write| if write > 0 { pattern(write) } else { vec![0; BLOCK] })
            .concat()
    };
    for (text, writes) in [
        ("path=a.qcow2", [1, 0, 4]),
        ("path=a.qcow2,readonly=on,snapshot=id=1", [1, 0, 0]),
        ("path=a.qcow2,readonly=on,snapshot=name=two", [1, 0, 4]),
    ] {
        let bytes = read(&folder, text);
        assert!(bytes[..3 * BLOCK] == first(writes), "{text}");
    }
}

/// A request that has found the disk before it was closed is refused.
#[test]
fn disk_that_is_closed_has_no_more_snapshots() {
    let world = World::new(image(), &["path=a.qcow2,id=a"]);
    let disk = world.desk.disk("a").expect("a disk");
    disk.create_snapshot("one").expect("a snapshot");
    let folder = world.close("a.qcow2");
    for refused in [disk.create_snapshot("two"), disk.list_snapshots(), disk.flush()] {
        assert!(
            refused
                .expect_err("closed")
                .ends_with("the image is closed, and nothing was changed")
        );
    }
    // The lock is released: the client that still knows the disk does not keep it.
    open::open(&DiskConfig::parse(&format!("path={}/a.qcow2", folder.path().display())).expect("a disk"))
        .expect("nobody has the image");
}

#[test]
fn client_reports_a_refused_snapshot() {
    let world = World::new(image(), &["path=a.qcow2,id=a"]);
    let failure = ask(&world.socket, &create("none", "s")).expect_err("no such disk");
    assert_eq!(
        failure.line().as_deref(),
        Some("there is no disk `none`; there are: a")
    );
    world.close("a.qcow2");
}
