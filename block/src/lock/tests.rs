//! Locks among ourselves, and against QEMU's tools really holding an image open, both ways.

use super::*;
use std::fs::{File, OpenOptions};
use std::os::fd::AsFd;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use LockGranularity::{ByteRange, Full};
use LockMode::{Read, Write};

/// An image made by `qemu-img` in a directory of its own.
struct World {
    _directory: tempfile::TempDir,
    path: PathBuf,
}

impl World {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("disk.qcow2");
        let made = qemu(
            "qemu-img",
            &["create", "-q", "-f", "qcow2", path_str(&path), "1M"],
        );
        assert!(
            made.status.success(),
            "qemu-img create: {}",
            String::from_utf8_lossy(&made.stderr)
        );
        Self {
            _directory: directory,
            path,
        }
    }

    fn open(&self) -> File {
        OpenOptions::new()
            .read(true)
            .write(true)
            .open(&self.path)
            .expect("open the image")
    }

    fn lock(
        &self,
        file: &File,
        mode: LockMode,
        granularity: LockGranularity,
    ) -> Result<ImageLock, LockError> {
        ImageLock::acquire(&LockSet::default(), file.as_fd(), &self.path, mode, granularity)
    }

    /// Returns true if the kernel lists a lock on `byte` of the image.
    fn is_locked(&self, byte: i64) -> bool {
        let inode = format!(":{}", fs::metadata(&self.path).expect("stat").ino());
        fs::read_to_string("/proc/locks")
            .expect("/proc/locks")
            .lines()
            .any(|line| {
                line.split_whitespace().any(|word| word.ends_with(&inode))
                    && fdinfo_locks(&format!("lock:{line}"))
                        .any(|(first, last)| ByteLock::byte(byte).overlaps(first, last))
            })
    }
}

fn path_str(path: &Path) -> &str {
    path.to_str().expect("a UTF-8 path")
}

fn qemu(program: &str, arguments: &[&str]) -> Output {
    Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|error| {
            panic!("{program} is needed by this test (apt-get install qemu-utils): {error}")
        })
}

/// A `qemu-io` that has the image open until dropped.
struct QemuHolds(Child);

impl QemuHolds {
    fn new(world: &World, arguments: &[&str]) -> Self {
        let mut child = Command::new("qemu-io")
            .args(arguments)
            .arg(&world.path)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("qemu-io is needed by this test (apt-get install qemu-utils)");
        let deadline = Instant::now() + Duration::from_secs(20);
        while !world.is_locked(UNSHARED_BASE + RESIZE) {
            assert!(Instant::now() < deadline, "qemu-io took no lock within 20 s");
            assert!(child.try_wait().expect("wait").is_none(), "qemu-io ended at once");
            std::thread::yield_now();
        }
        Self(child)
    }
}

impl Drop for QemuHolds {
    fn drop(&mut self) {
        self.0.kill().expect("kill qemu-io");
        self.0.wait().expect("reap qemu-io");
    }
}

#[test]
fn lock_refuses_second_writer_and_names_the_holder() {
    let world = World::new();
    let (first, second) = (world.open(), world.open());
    let _held = world.lock(&first, Write, ByteRange).expect("the first writer");

    let refused = world
        .lock(&second, Write, ByteRange)
        .expect_err("the second writer");

    let LockError::Held {
        other: Write,
        holder: Some(holder),
        ..
    } = &refused
    else {
        panic!("not a named writer: {refused:?}");
    };
    assert_eq!(holder.pid, std::process::id());
    let text = refused.to_string();
    assert!(
        text.contains("disk.qcow2 is locked") && text.contains("is writing to it"),
        "{text}"
    );
}

#[test]
fn lock_admits_readers_together_and_a_writer_alone() {
    for granularity in [ByteRange, Full] {
        let world = World::new();
        let (first, second, third) = (world.open(), world.open(), world.open());
        let _one = world.lock(&first, Read, granularity).expect("a reader");
        let two = world.lock(&second, Read, granularity).expect("another reader");
        world
            .lock(&third, Write, granularity)
            .expect_err("a writer beside two readers");
        drop((_one, two));

        let _writer = world.lock(&third, Write, granularity).expect("a writer alone");
        let refused = world
            .lock(&first, Read, granularity)
            .expect_err("a reader beside a writer");
        assert!(
            matches!(refused, LockError::Held { other: Write, .. }),
            "{refused:?}"
        );
    }
}

#[test]
fn lock_leaves_no_bytes_locked_when_refused_or_dropped() {
    let world = World::new();
    let (first, second) = (world.open(), world.open());
    let held = world.lock(&first, Read, ByteRange).expect("a reader");
    world
        .lock(&second, Write, ByteRange)
        .expect_err("a writer beside it");
    assert!(
        !world.is_locked(PERMISSION_BASE + WRITE),
        "the refused writer left its lock"
    );

    drop(held);
    assert!(
        !world.is_locked(PERMISSION_BASE + CONSISTENT_READ),
        "the dropped reader left its lock"
    );
    world.lock(&second, Write, ByteRange).expect("a writer alone");
}

#[test]
fn lock_survives_close_of_its_and_other_descriptors() {
    let world = World::new();
    let first = world.open();
    let _held = world.lock(&first, Write, ByteRange).expect("a writer");
    drop(first);
    drop(world.open());

    world
        .lock(&world.open(), Write, ByteRange)
        .expect_err("a second writer");
}

#[test]
fn whole_file_and_byte_range_writers_exclude_each_other() {
    let world = World::new();
    let (first, second) = (world.open(), world.open());
    let full = world.lock(&first, Write, Full).expect("a whole-file writer");
    world
        .lock(&second, Write, ByteRange)
        .expect_err("a byte-range writer beside it");
    drop(full);
    let _bytes = world
        .lock(&second, Write, ByteRange)
        .expect("a byte-range writer");
    world
        .lock(&first, Write, Full)
        .expect_err("a whole-file writer beside it");
}

#[test]
fn lock_refuses_image_qemu_writes_and_names_qemu() {
    let world = World::new();
    let qemu_io = QemuHolds::new(&world, &[]);

    for mode in [Write, Read] {
        let refused = world
            .lock(&world.open(), mode, ByteRange)
            .expect_err("beside qemu-io");
        let LockError::Held {
            other: Write,
            holder: Some(holder),
            ..
        } = &refused
        else {
            panic!("not a named writer: {refused:?}");
        };
        assert_eq!((holder.pid, holder.name.as_str()), (qemu_io.0.id(), "qemu-io"));
    }
    world
        .lock(&world.open(), Write, Full)
        .expect_err("a whole-file writer beside qemu-io");
}

#[test]
fn lock_admits_only_readers_of_image_qemu_reads() {
    let world = World::new();
    let _qemu_io = QemuHolds::new(&world, &["-r"]);

    world
        .lock(&world.open(), Read, ByteRange)
        .expect("a reader beside a reader");
    let refused = world
        .lock(&world.open(), Write, ByteRange)
        .expect_err("a writer beside a reader");
    assert!(
        matches!(refused, LockError::Held { other: Read, .. }),
        "{refused:?}"
    );
}

#[test]
fn qemu_refuses_image_under_write_lock() {
    let world = World::new();
    let file = world.open();
    for granularity in [ByteRange, Full] {
        let _held = world.lock(&file, Write, granularity).expect("a writer");
        for arguments in [&["-c", "length"][..], &["-r", "-c", "length"][..]] {
            let refused = qemu("qemu-io", &[arguments, &[path_str(&world.path)]].concat());
            let said = String::from_utf8_lossy(&refused.stderr).into_owned();
            assert!(!refused.status.success(), "qemu-io {arguments:?} opened it");
            assert!(
                said.contains("lock"),
                "qemu-io {arguments:?} failed for another reason: {said}"
            );
        }
    }
}

#[test]
fn qemu_only_reads_image_under_read_lock() {
    let world = World::new();
    let file = world.open();
    let _held = world.lock(&file, Read, ByteRange).expect("a reader");

    let reader = qemu("qemu-io", &["-r", "-c", "read 0 512", path_str(&world.path)]);
    assert!(
        reader.status.success(),
        "{}",
        String::from_utf8_lossy(&reader.stderr)
    );
    let writer = qemu("qemu-io", &["-c", "length", path_str(&world.path)]);
    assert!(!writer.status.success(), "qemu-io opened it for writing");
}

#[test]
fn fdinfo_locks_parses_kernel_lock_lines() {
    let info = "pos:\t0\nlock:\t1: OFDLCK ADVISORY  READ -1 fe:00:99 100 101\n\
                lock:\t2: POSIX  ADVISORY  WRITE 7 fe:00:99 0 EOF\nino:\t99\n";
    assert_eq!(
        fdinfo_locks(info).collect::<Vec<_>>(),
        [(100, Some(101)), (0, None)]
    );
    assert!(ByteLock::byte(101).overlaps(100, Some(101)));
    assert!(!ByteLock::byte(102).overlaps(100, Some(101)));
    assert!(!ByteLock::byte(99).overlaps(100, Some(101)));
    assert!(ByteLock::whole_file(true).overlaps(5, None));
}
