//! Malformed images: whatever is wrong with one, opening it names what, or the ranges it concerns answer
//! with an error.
//!
//! Each case is a sound image with something broken in it ([`ringdisk_gen::malformed`]). It is opened read-only and
//! for writing, and if that succeeds everything a guest can ask is asked of it; and it is described, checked and
//! repaired. That happens in a child process that has 256 MiB of address space and little time. What must hold each
//! time: no crash, no hang, no byte changed by a failed open or a reader, no other file opened, and no guest byte
//! over the image's own structures.

#[path = "../common/mod.rs"]
mod common;
mod huge;

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use block::file::{FileOptions, ImageFile};
use block::ring::RingKind;
use block::{AlignedBuf, Buffer, Context, Disk, Op};
use common::{Folder, Lane, chain};
use qcow::image::{RepairScope, check, info, repair};
use qcow::{BitmapStorage, OpenOptions, QcowDisk};
use ringdisk_gen::fingerprint::Fingerprint;
use ringdisk_gen::image::u64_in;
use ringdisk_gen::malformed::{self, CLUSTER, Case, DISK, Fate};
use ringdisk_gen::watch::Watch;

/// The byte that guests write here, and that nothing else in an image looks like.
const GUEST: u8 = 0x5A;
/// The child's address space, in KiB.
const ADDRESS_SPACE_KIB: u64 = 256 << 10;
/// The memory that a check or a repair may have resident, in KiB.
const LOOK_RESIDENT_MAX_KIB: u64 = 128 << 10;
/// The longest time for one case.
const TIME_MAX: Duration = Duration::from_secs(30);
/// Tells a child what folder its cases are in.
const FOLDER_VARIABLE: &str = "RINGDISK_MALFORMED_FOLDER";
/// The test that is the child.
const CHILD: &str = "child_works_the_images_it_is_given";

/// The outcome of a case in one way of using it.
#[derive(Debug, Default)]
struct Outcome {
    refused: Option<String>,
    read_failed: bool,
}

/// Opens and works an image as a guest might.
fn work(path: &Path, options: &OpenOptions) -> Outcome {
    let disk = match QcowDisk::open(path, options) {
        Ok(disk) => disk,
        Err(error) => {
            return Outcome {
                refused: Some(chain(&error)),
                read_failed: false,
            };
        }
    };
    let ring = if options.read_only {
        RingKind::Syscalls
    } else {
        RingKind::IoUring
    };
    let lane = Lane::new(&disk, ring);
    let size = disk.info().size_bytes.min(2 * DISK);
    let mut read_failed = false;
    let read_all = |failed: &mut bool| {
        for at in (0..size).step_by(CLUSTER as usize) {
            *failed |= lane.try_read(at, CLUSTER.min(size - at)).is_err();
        }
        *failed |= size > 0 && lane.try_read(0, size).is_err();
    };
    read_all(&mut read_failed);
    let ask = |op, offset: u64, len: u64| {
        if offset + len <= size {
            let buffer = match op {
                Op::Write { .. } => AlignedBuf::from_slice(&vec![GUEST; len as usize]).into(),
                _ => Buffer::default(),
            };
            let written = lane.ask(op, offset, len, buffer).result;
            assert!(!(options.read_only && op.is_write() && written.is_ok()));
        }
    };
    for cluster in 0..24 {
        ask(Op::Write { fua: cluster == 3 }, cluster * CLUSTER + 512, 1024);
    }
    ask(Op::Write { fua: false }, 1 << 20, 64 << 10);
    ask(Op::Write { fua: false }, (2 << 20) + 512, 8 << 10);
    ask(Op::Discard, 16 << 10, 16 << 10);
    ask(Op::Flush, 0, 0);
    for unmap in [true, false] {
        ask(Op::WriteZeroes { unmap, fua: false }, 36 << 10, 9 << 10);
    }
    ask(Op::Discard, 0, size / 512 * 512);
    ask(Op::Flush, 0, 0);
    ask(Op::Write { fua: false }, 0, 256 << 10);
    ask(Op::Flush, 0, 0);
    read_all(&mut false);
    lane.settle();
    drop(lane);
    // It may fail: a corrupt image is not written any more.
    let cx = Context::syscalls();
    let _result = cx.block_on(disk.close(&cx)).expect("the ring turns");
    Outcome {
        refused: None,
        read_failed,
    }
}

/// Takes the fingerprint of a case's file.
fn fingerprint(path: &Path) -> Fingerprint {
    Fingerprint::of(path).expect("the case")
}

/// The most that this process had resident, in KiB.
fn resident_max_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("a status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let value = line.and_then(|line| line.trim().strip_suffix(" kB"));
    value
        .and_then(|value| value.trim().parse().ok())
        .expect("a number")
}

/// Describes, checks and repairs an image as its administrator might.
fn look(path: &Path) -> Outcome {
    let cx = Context::syscalls();
    let options = FileOptions {
        write: true,
        direct: false,
    };
    let view = ImageFile::open(path, options).map(|file| file.view(&cx));
    let view = view.expect("the case").expect("a view");
    let before = fingerprint(path);
    // "5" resets the high-water mark of what is resident: proc_pid_clear_refs(5).
    std::fs::write("/proc/self/clear_refs", "5").expect("a process may reset its own");
    let described = cx.block_on(info(&view)).expect("the ring turns").map(drop);
    let checked = cx.block_on(check(&view)).expect("the ring turns");
    let same = || fingerprint(path) == before;
    assert!(same(), "looking at an image changes it");
    assert!(
        described.is_ok() || checked.is_err(),
        "checked and not described: {described:?}"
    );
    match cx
        .block_on(repair(&view, RepairScope::All))
        .expect("the ring turns")
    {
        Ok(report) => assert_eq!(report.after.verdict(), qcow::image::Verdict::Clean, "{report:?}"),
        Err(_) => assert!(same(), "a repair that failed has changed the image"),
    }
    let resident = resident_max_kib();
    assert!(resident <= LOOK_RESIDENT_MAX_KIB, "{resident} KiB were resident");
    Outcome {
        refused: checked.err().map(|error| chain(&error)),
        read_failed: false,
    }
}

/// The ways to use a case: the name, and the end of the file's name that it is done to.
const WAYS: &[&str] = &["reader", "writer", "look"];
/// The same for an image with bitmaps, which a writer may also keep durable.
const WAYS_WITH_BITMAPS: &[&str] = &["reader", "writer", "durable", "look"];

/// The child: works every image whose number it reads, and answers in a line each.
///
/// On its own, this test works the unbroken image: every step must do its work, or the cases would prove nothing.
#[test]
fn child_works_the_images_it_is_given() {
    let Ok(folder) = std::env::var(FOLDER_VARIABLE) else {
        let folder = Folder::new();
        let base = malformed::base().bytes;
        for &way in WAYS {
            std::fs::write(folder.path(way), &base).expect("the image");
            let outcome = use_case(&folder.path(way), way, true);
            assert!(
                outcome.refused.is_none() && !outcome.read_failed,
                "{way}: {outcome:?}"
            );
            folder.assert_flawless(way, false);
        }
        let guest = std::fs::read(folder.path("writer")).expect("the image");
        assert!(
            guest.chunks(512).any(|sector| sector == [GUEST; 512]),
            "nothing was written"
        );
        return;
    };
    for line in std::io::stdin().lines() {
        let line = line.expect("a case");
        let (name, allowed) = line.split_once(' ').expect("a file and what is allowed");
        let way = name.rsplit('.').next().unwrap_or_default();
        let outcome = use_case(&Path::new(&folder).join(name), way, allowed == "backing");
        let text = outcome.refused.unwrap_or_default().replace('\n', " ");
        let mut out = std::io::stdout().lock();
        writeln!(out, "\nanswer {name} {} {text}", u8::from(outcome.read_failed)).expect("a reader");
        out.flush().expect("a reader");
    }
}

fn use_case(path: &Path, way: &str, backing_files: bool) -> Outcome {
    let options = OpenOptions {
        read_only: way == "reader",
        backing_files,
        bitmaps: if way == "durable" {
            BitmapStorage::Durable
        } else {
            BitmapStorage::default()
        },
        ..OpenOptions::default()
    };
    match way {
        "look" => look(path),
        _ => work(path, &options),
    }
}

/// A child with little memory, and what it answers.
struct Worker {
    time_max: Duration,
    child: Child,
    lines: Receiver<String>,
}

impl Worker {
    fn start(folder: &Folder) -> Self {
        let itself = std::env::current_exe().expect("this test");
        let limit = format!("ulimit -v {ADDRESS_SPACE_KIB} && exec \"$0\" \"$@\"");
        let mut child = Command::new("sh")
            .args(["-c", &limit])
            .arg(itself)
            .args(["--exact", CHILD, "--nocapture"])
            .env(FOLDER_VARIABLE, folder.path(""))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("a child");
        let (send, lines) = channel();
        let stdout = child.stdout.take().expect("a pipe");
        let forward = send.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if forward.send(line).is_err() {
                    break;
                }
            }
        });
        let stderr = child.stderr.take().expect("a pipe");
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                if send.send(format!("stderr: {line}")).is_err() {
                    break;
                }
            }
        });
        let time_max = TIME_MAX;
        Self {
            time_max,
            child,
            lines,
        }
    }

    /// Has the child use one file.
    fn ask(&mut self, case: &str, file: &str, backing: bool) -> Outcome {
        let allowed = if backing { "backing" } else { "none" };
        let input = self.child.stdin.as_mut().expect("a pipe");
        writeln!(input, "{file} {allowed}")
            .unwrap_or_else(|error| panic!("{case}: the child is gone: {error}"));
        let mut said = String::new();
        loop {
            let line = match self.lines.recv_timeout(self.time_max) {
                Ok(line) => line,
                Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {
                    // The child is ours.
                    let _ended = self.child.kill();
                    panic!("{case} ({file}): it hangs\n{said}");
                }
                Err(_) => {
                    let status = self.child.wait().expect("a child");
                    panic!("{case} ({file}): the child died: {status}\n{said}");
                }
            };
            if let Some(answer) = line.strip_prefix("answer ") {
                let mut words = answer.splitn(3, ' ');
                assert_eq!(words.next(), Some(file), "{case}: answers are out of step");
                let read_failed = words.next() == Some("1");
                let text = words.next().unwrap_or_default().to_owned();
                return Outcome {
                    refused: (!text.is_empty()).then_some(text),
                    read_failed,
                };
            }
            said.push_str(&line);
            said.push('\n');
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.child.stdin.take();
        let status = self.child.wait().expect("a child");
        if !std::thread::panicking() {
            assert!(status.success(), "the child failed: {status}");
        }
    }
}

/// Uses cases in every way, and checks what must hold.
struct Trial<'a> {
    folder: &'a Folder,
    watch: Watch,
    shadow: Watch,
    worker: Worker,
    ways: &'static [&'static str],
}

impl<'a> Trial<'a> {
    fn new(folder: &'a Folder) -> Self {
        std::fs::write(folder.path("sentinel"), vec![7; 1 << 20]).expect("a file");
        Self {
            folder,
            watch: Watch::new(&folder.path("")).expect("a watch"),
            shadow: Watch::new(Path::new("/etc/shadow")).expect("a watch on /etc/shadow"),
            worker: Worker::start(folder),
            ways: WAYS,
        }
    }

    /// Checks what `name` leads to with these bytes; `others` are the files that it may open.
    fn face(&mut self, name: &str, bytes: &[u8], fate: Fate, backing: bool, others: &[&str]) {
        for &way in self.ways {
            let file = format!("case.{way}");
            let path = self.folder.path(&file);
            // A file of its own: the kernel may let go of the last one's lock only when its ring is gone.
            let _missing = std::fs::remove_file(&path);
            std::fs::write(&path, bytes).expect("the case");
            let state = |file: &&str| fingerprint(&self.folder.path(file));
            let files: Vec<&str> = [&[file.as_str(), "sentinel"], others].concat();
            let before: Vec<_> = files.iter().map(state).collect();
            self.watch.opened().expect("events");
            let outcome = self.worker.ask(name, &file, backing);
            let what = format!("{name}, {way}: {outcome:?}");
            let opened = self.watch.opened().expect("events");
            assert!(opened.contains(&file), "{what}: the watch has missed it");
            let strange: Vec<_> = opened
                .iter()
                .filter(|&opened| *opened != file && opened != "." && !others.contains(&opened.as_str()))
                .collect();
            assert!(strange.is_empty(), "{what}: {strange:?} were opened");
            let shadow = self.shadow.opened().expect("events");
            assert!(shadow.is_empty(), "{what}: /etc/shadow was opened");
            if way == "look" {
                continue;
            }
            let is_refused = outcome.refused.is_some();
            for (file, before) in files.iter().zip(before) {
                let may_change = !is_refused && way != "reader" && *file == files[0];
                assert!(may_change || state(file) == before, "{what}: {file} has changed");
            }
            if !is_refused && way != "reader" {
                assert_structures_stand(&what, bytes, &std::fs::read(&path).expect("the case"));
            }
            assert_fate(&what, fate, &outcome, way == "reader");
        }
    }

    fn face_case(&mut self, case: &Case, base: &[u8]) {
        let name = format!("{}: {}", case.class, case.name);
        self.face(&name, &case.apply(base), case.fate, false, &[]);
    }
}

fn assert_fate(what: &str, fate: Fate, outcome: &Outcome, reader: bool) {
    match (fate, &outcome.refused) {
        (Fate::Refused(says), Some(error)) => assert!(error.contains(says), "{what} says no {says:?}"),
        (Fate::NotWritable(says), Some(error)) if !reader => {
            assert!(error.contains(says), "{what} says no {says:?}");
        }
        (Fate::NotWritable(_), None) if reader => {}
        (Fate::Refused(_) | Fate::NotWritable(_), _) => panic!("{what}: expected {fate:?}"),
        (Fate::Eio, Some(_)) if !reader => {}
        (Fate::Opens | Fate::Eio, Some(_)) => panic!("{what}: expected {fate:?}"),
        (Fate::Eio, None) => assert!(outcome.read_failed, "{what}: expected {fate:?}"),
        (Fate::Opens, None) => assert!(!outcome.read_failed, "{what}: expected {fate:?}"),
        (Fate::Survives, _) => {}
    }
}

/// A guest's bytes never lie over the header, the L1 table, or the refcount table.
fn assert_structures_stand(what: &str, before: &[u8], after: &[u8]) {
    if before.len() < CLUSTER as usize || after.len() < 104 {
        return;
    }
    let fixed = [0..8, 20..36, 60..64, 96..104];
    for range in fixed {
        assert_eq!(
            after[range.clone()],
            before[range.clone()],
            "{what}: header bytes {range:?}"
        );
    }
    let (l1, table) = (u64_in(after, 40) as usize, u64_in(after, 48) as usize);
    for (structure, at, len) in [("L1", l1, 16), ("refcount table", table, CLUSTER as usize)] {
        let bytes = after.get(at..at.saturating_add(len)).unwrap_or_default();
        let guest = bytes.chunks_exact(8).any(|entry| entry == [GUEST; 8]);
        assert!(!guest, "{what}: a guest's bytes are in the {structure}");
    }
}

/// The generator's control: QEMU finds nothing wrong with the base, and reads what it should hold.
#[test]
fn base_image_is_sound() {
    let folder = Folder::new();
    let base = malformed::base();
    std::fs::write(folder.path("base.qcow2"), &base.bytes).expect("the image");
    folder.assert_flawless("base.qcow2", false);
    assert!(folder.qemu_reads("base.qcow2") == base.guest());
}

/// The watch's control: it sees a backing file that is allowed, and so would see one that is not.
#[test]
fn watch_sees_an_opened_backing_file() {
    let folder = Folder::new();
    let mut trial = Trial::new(&folder);
    let spec = |spec: &mut ringdisk_gen::ImageSpec| {
        spec.backing = Some((b"sentinel".to_vec(), b"raw".to_vec()));
    };
    let bytes = malformed::base_with(spec).bytes;
    trial.face("allowed", &bytes, Fate::Opens, true, &["sentinel"]);
    let file = "case.reader";
    std::fs::write(folder.path(file), &bytes).expect("the case");
    trial.watch.opened().expect("events");
    trial.worker.ask("allowed", file, true);
    assert!(trial.watch.opened().expect("events").contains("sentinel"));
}

#[test]
fn every_defect_is_survived_or_refused_by_name() {
    let base = malformed::base();
    let folder = Folder::new();
    let mut trial = Trial::new(&folder);
    let cases = malformed::cases(&base);
    for case in &cases {
        trial.face_case(case, &base.bytes);
    }
    assert!(cases.len() > 300);
}

#[test]
fn every_defect_of_subclusters_is_survived_or_refused_by_name() {
    let base = malformed::subcluster_base();
    let folder = Folder::new();
    std::fs::write(folder.path("base.qcow2"), &base.bytes).expect("the image");
    folder.assert_flawless("base.qcow2", false);
    assert!(folder.qemu_reads("base.qcow2") == base.guest());
    let mut trial = Trial::new(&folder);
    let cases = malformed::subcluster_cases(&base);
    for case in &cases {
        trial.face_case(case, &base.bytes);
    }
    assert!(cases.len() > 20);
}

#[test]
fn every_defect_of_bitmaps_is_survived_or_refused() {
    let base = malformed::bitmap_base();
    let folder = Folder::new();
    std::fs::write(folder.path("base.qcow2"), &base.bytes).expect("the image");
    folder.assert_flawless("base.qcow2", false);
    let mut trial = Trial::new(&folder);
    trial.ways = WAYS_WITH_BITMAPS;
    trial.face("the sound one", &base.bytes, Fate::Opens, false, &[]);
    let cases = malformed::bitmap_cases(&base);
    for case in &cases {
        trial.face_case(case, &base.bytes);
    }
    assert!(cases.len() > 80);
}

#[test]
fn pairs_of_defects_are_survived_or_refused_by_name() {
    let base = malformed::base();
    let folder = Folder::new();
    let mut trial = Trial::new(&folder);
    let pairs = malformed::pairs(&malformed::cases(&base));
    for case in &pairs {
        trial.face_case(case, &base.bytes);
    }
    assert!(pairs.len() > 500);
}

#[test]
fn open_refuses_backing_names_that_dangle_or_loop() {
    let folder = Folder::new();
    let mut trial = Trial::new(&folder);
    let named = |name: &str, format: &str| {
        let backing = Some((name.as_bytes().to_vec(), format.as_bytes().to_vec()));
        malformed::base_with(|spec| spec.backing = backing).bytes
    };
    for (name, says) in [
        ("loop.qcow2", "comes back"),
        ("./loop.qcow2", "comes back"),
        ("file:loop.qcow2", "comes back"),
        ("missing.qcow2", "missing.qcow2"),
        ("json:{\"driver\":\"null-co\"}", "not a path"),
        ("nbd://localhost/", "not a path"),
        (".", "backing file of"),
    ] {
        std::fs::write(folder.path("loop.qcow2"), named("loop.qcow2", "qcow2")).expect("the other image");
        let bytes = named(name, "qcow2");
        trial.face(name, &bytes, Fate::Refused(says), true, &["loop.qcow2"]);
    }
    for &way in WAYS {
        let own = format!("case.{way}");
        let bytes = named(&own, "qcow2");
        std::fs::write(folder.path(&own), &bytes).expect("the case");
        let outcome = trial.worker.ask("backed by itself", &own, true);
        let refused = outcome.refused.unwrap_or_default();
        assert!(
            way == "look" || refused.contains("comes back"),
            "{way}: {refused}"
        );
    }
    trial.face(
        "vmdk",
        &named("sentinel", "vmdk"),
        Fate::Refused("vmdk"),
        true,
        &[],
    );
    for index in 0..100 {
        let name = format!("link-{}.qcow2", index + 1);
        std::fs::write(folder.path(&format!("link-{index}.qcow2")), named(&name, "qcow2")).expect("a link");
    }
    let links: Vec<String> = (0..100).map(|index| format!("link-{index}.qcow2")).collect();
    let links: Vec<&str> = links.iter().map(String::as_str).collect();
    let first = named("link-0.qcow2", "qcow2");
    trial.face(
        "an endless chain",
        &first,
        Fate::Refused("more than"),
        true,
        &links,
    );
}
