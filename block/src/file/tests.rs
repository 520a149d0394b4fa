//! Alignment, bouncing, zeroing: what a view does that a plain descriptor does not.

use std::io::Write;
use std::path::Path;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Wake, Waker};

use smallvec::smallvec;

use super::bounce::BOUNCE_BYTES_MAX;
use super::view::{to_usize, total};
use super::*;
use crate::buffer::{AlignedBuf, Buffer, Piece};
use crate::changes::Changes;
use crate::error::IoError;
use crate::lock::{LockError, LockGranularity, LockMode, LockSet};
use crate::request::{Op, Request};
use crate::ring::counting::CountingDriver;
use crate::ring::{Pieces, Ring};
use crate::sync::Mutex;
use crate::sync::atomic::Ordering;
use crate::task::Context;

fn view(alignment: Alignment, contents: &[u8]) -> (Context, FileView) {
    let cx = Context::syscalls();
    let mut file = tempfile::tempfile().expect("a temporary file");
    file.write_all(contents).expect("its contents");
    let image = ImageFile::with_alignment("test".into(), file, true, false, alignment);
    let view = Arc::new(image).view(&cx).expect("a view");
    (cx, view)
}

fn pieces(bytes: &[u8]) -> Pieces {
    smallvec![Piece::whole(&Rc::new(Buffer::from(AlignedBuf::from_slice(
        bytes
    ))))]
}

#[test]
fn misaligned_write_keeps_neighbouring_bytes() {
    for (offset, len) in [
        (1, 1),
        (0, 100),
        (4000, 200),
        (4095, 4098),
        (100, 3996),
        (512, 8192),
        (5000, 1),
    ] {
        let before: Vec<u8> = (0..16384u32).map(|i| (i % 251) as u8).collect();
        let (cx, view) = view(
            Alignment {
                memory: 512,
                offset: 4096,
            },
            &before,
        );
        let mut expected = before.clone();
        expected[offset..offset + len].fill(0xEE);
        cx.block_on(view.write(offset as u64, pieces(&vec![0xEE; len]), false))
            .expect("the ring turns")
            .expect("a write");
        let found = cx
            .block_on(view.read_at(0, 16384))
            .expect("the ring turns")
            .expect("a read");
        assert_eq!(&found[..], &expected[..], "write of {len} at {offset}");
        let part = cx
            .block_on(view.read_at(offset as u64, len))
            .expect("the ring turns")
            .expect("a read");
        assert_eq!(&part[..], &expected[offset..offset + len]);
    }
}

/// The guest chooses the size of its requests and the addresses of its buffers.
#[test]
fn misaligned_request_is_bounced_in_bounded_parts() {
    let alignment = Alignment {
        memory: 512,
        offset: 4096,
    };
    let part = to_usize(BOUNCE_BYTES_MAX).expect("a size");
    for (offset, len) in [
        (1, 3 * part),
        (part - 7, part + 14),
        (4096, 2 * part + 1),
        (part, part - 1),
    ] {
        let before: Vec<u8> = (0..5 * part).map(|i| (i % 251) as u8).collect();
        let (cx, view) = view(alignment, &before);
        let bytes: Vec<u8> = (0..len).map(|i| (i % 239) as u8 | 1).collect();
        let mut expected = before.clone();
        expected[offset..offset + len].copy_from_slice(&bytes);
        // Several pieces, zeros among them, cut anywhere.
        let mut asked = pieces(&bytes[..len / 3]);
        asked.push(Piece::Zeros(5));
        asked.extend(pieces(&bytes[len / 3 + 5..]));
        expected[offset + len / 3..][..5].fill(0);
        let parts = view.bounced_parts(offset as u64, &asked);
        assert!(
            parts.iter().all(|(_, part)| total(part) <= BOUNCE_BYTES_MAX),
            "{len} at {offset}"
        );
        cx.block_on(view.write(offset as u64, asked, false))
            .expect("the ring turns")
            .expect("a write");
        let found = cx
            .block_on(view.read_at(0, 5 * part))
            .expect("the ring turns")
            .expect("a read");
        assert!(found[..] == expected[..], "write of {len} at {offset}");
        let found = cx
            .block_on(view.read_at(offset as u64, len))
            .expect("the ring turns")
            .expect("a read");
        assert!(
            found[..] == expected[offset..offset + len],
            "read of {len} at {offset}"
        );
    }
}

#[test]
fn concurrent_writes_to_one_block_both_land() {
    let (cx, view) = view(
        Alignment {
            memory: 512,
            offset: 4096,
        },
        &[0; 8192],
    );
    let other = view.clone();
    cx.spawn(async move { other.write(512, pieces(&[2; 512]), false).await.expect("a write") });
    cx.block_on(view.write(0, pieces(&[1; 512]), false))
        .expect("the ring turns")
        .expect("a write");
    let found = cx
        .block_on(async {
            while cx.tasks() > 0 {
                view.sync().await.expect("a sync");
            }
            view.read_at(0, 1024).await
        })
        .expect("the ring turns")
        .expect("a read");
    assert!(found[..512].iter().all(|&byte| byte == 1) && found[512..].iter().all(|&byte| byte == 2));
}

#[test]
fn direct_file_reports_alignment_and_reads_back_writes() {
    let path = tempfile::NamedTempFile::new_in("/var/tmp").expect("a temporary file");
    let options = FileOptions {
        write: true,
        direct: true,
    };
    let file = ImageFile::open(path.path(), options).expect("direct I/O in /var/tmp");
    assert!(file.alignment().offset >= 512);
    let cx = Context::syscalls();
    let view = file.view(&cx).expect("a view");
    cx.block_on(async {
        view.write(3, pieces(&[5; 10_000]), false).await?;
        let found = view.read_at(0, 10_003).await?;
        assert_eq!(found[..3], [0; 3]);
        assert!(found[3..].iter().all(|&byte| byte == 5));
        Ok::<(), IoError>(())
    })
    .expect("the ring turns")
    .expect("I/O");
}

#[test]
fn open_refuses_a_directory() {
    let error = ImageFile::open(Path::new("/tmp"), FileOptions::default()).expect_err("a directory");
    assert!(matches!(error, OpenFileError::WrongKind { .. }), "{error}");
}

#[test]
fn zero_and_punch_read_back_as_zeros() {
    let (cx, view) = view(Alignment::NONE, &[9; 65536]);
    cx.block_on(async {
        view.zero(4096, 8192).await?;
        view.punch(20_480, 4096).await?;
        view.file.no_zero_range.store(true, Ordering::Relaxed);
        view.zero(40_000, 100).await?;
        let found = view.read_at(0, 65536).await?;
        for (at, &byte) in found.iter().enumerate() {
            let zeroed =
                (4096..12288).contains(&at) || (20480..24576).contains(&at) || (40000..40100).contains(&at);
            assert_eq!(byte, if zeroed { 0 } else { 9 }, "byte {at}");
        }
        Ok::<(), IoError>(())
    })
    .expect("the ring turns")
    .expect("I/O");
}

/// The kernel's look at the access time costs each read as much as finding its page.
#[test]
#[expect(clippy::print_stdout, reason = "what cannot run here says so")]
fn read_leaves_access_time_of_own_file_alone() {
    use std::fs::{File, FileTimes};
    use std::time::SystemTime;
    let directory = tempfile::tempdir().expect("a directory");
    // Old times, which a mount with `relatime` brings up to date at the first read.
    let old = |name: &str| {
        let path = directory.path().join(name);
        let mut file = File::create(&path).expect("a file");
        file.write_all(&[7; 4096]).expect("its contents");
        let times = FileTimes::new().set_accessed(SystemTime::UNIX_EPOCH);
        file.set_times(times).expect("old times");
        path
    };
    let accessed = |path: &Path| std::fs::metadata(path).and_then(|metadata| metadata.accessed());
    let (other, image) = (old("other"), old("image"));
    assert_eq!(std::fs::read(&other).expect("readable").len(), 4096);
    if accessed(&other).expect("its times") == SystemTime::UNIX_EPOCH {
        println!("cannot run here: access times, because this file system is mounted with `noatime`");
        return;
    }
    let cx = Context::syscalls();
    let file = ImageFile::open(&image, FileOptions::default()).expect("an image file");
    let view = file.view(&cx).expect("a view");
    let found = cx.block_on(view.read_at(0, 4096)).expect("the ring turns");
    assert_eq!(found.expect("a read")[..], [7; 4096]);
    assert_eq!(accessed(&image).expect("its times"), SystemTime::UNIX_EPOCH);
}

/// Waker that notes how many changes of a file are counted when it is woken.
struct Noting {
    changes: Arc<Changes>,
    counted: Mutex<Option<u64>>,
}

impl Wake for Noting {
    fn wake(self: Arc<Self>) {
        *self.counted.lock() = self.changes.ended();
    }
}

/// Returns how many changes are counted when whoever waits for `answer` is told.
fn counted_at(answer: impl Future, cx: &Context, changes: &Arc<Changes>) -> Option<u64> {
    let noting = Arc::new(Noting {
        changes: Arc::clone(changes),
        counted: Mutex::default(),
    });
    let waker = Waker::from(Arc::clone(&noting));
    let mut answer = pin!(answer);
    let polled = answer.as_mut().poll(&mut std::task::Context::from_waker(&waker));
    assert!(polled.is_pending());
    while cx.ring().in_flight() > 0 {
        cx.ring().turn(true).expect("the ring turns");
    }
    *noting.counted.lock()
}

/// A caller that is told of a write may ask another worker for a FLUSH at once.
#[test]
fn change_is_counted_before_its_answer() {
    let (cx, view) = view(Alignment::NONE, &[1; 4096]);
    let changes = view.file.syncs.changes();
    changes.assume_alone();
    let write = view.start_write(0, pieces(&[2; 4096]));
    assert_eq!(counted_at(write, &cx, changes), Some(1));
    let bytes = AlignedBuf::from_slice(&[3; 4096]).into();
    let (request, answer) = Request::local(Op::Write { fua: false }, 0, 4096, bytes);
    view.submit(0, request).expect("room");
    assert_eq!(counted_at(answer, &cx, changes), Some(2));
}

/// The kernel may carry the write out later: whoever could open the image would lose what lies there.
#[test]
fn image_stays_locked_after_a_ring_that_cannot_drain() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("image");
    std::fs::write(&path, [0; 8192]).expect("an image");
    let open = || {
        let options = FileOptions {
            write: true,
            direct: false,
        };
        let image = ImageFile::open(&path, options).expect("an image");
        let locked = image.lock(&LockSet::default(), LockMode::Write, LockGranularity::ByteRange);
        locked.map(|()| image)
    };
    for drains in [true, false] {
        let driver = CountingDriver::default();
        let fails = Rc::clone(&driver.fails);
        let cx = Context::on(Ring::with_driver(Box::new(driver), 16, 0));
        let image = open().expect("nobody else has it");
        let view = image.view(&cx).expect("a view");
        let mut write = Box::pin(view.write(0, pieces(&[1; 4096]), false));
        let waker = &mut std::task::Context::from_waker(Waker::noop());
        assert!(write.as_mut().poll(waker).is_pending());
        assert_eq!(cx.ring().in_flight(), 1);
        fails.set(!drains);
        drop(write);
        drop((view, image, cx));
        let next = open();
        match drains {
            true => assert!(next.is_ok(), "{next:?}"),
            false => assert!(matches!(next, Err(LockError::Held { .. })), "{next:?}"),
        }
    }
}
