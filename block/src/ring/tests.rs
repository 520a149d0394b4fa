//! The ring on its drivers: ownership, short transfers, waiting, dropping.

use std::cell::RefCell;
use std::io::{Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::rc::Rc;
use std::task::Context;

use smallvec::smallvec;

use super::counting::CountingDriver;
use super::driver::Wait;
use super::*;
use crate::buffer::{AlignedBuf, Buffer, Piece};
use crate::error::IoError;
use crate::event::{eventfd, signal_event};
use crate::handle::Kind;
use crate::request::{CompletionSink, Op, Request};
use crate::task;

fn rings() -> Vec<Ring> {
    let uring =
        Ring::new(RingKind::IoUring, 16).expect("these tests need io_uring: kernel.io_uring_disabled=0");
    vec![
        uring,
        Ring::new(RingKind::Syscalls, 16).expect("no kernel support is needed"),
    ]
}

fn file_with(bytes: &[u8]) -> std::fs::File {
    let mut file = tempfile::tempfile().expect("a temporary file");
    file.write_all(bytes).expect("its contents");
    file.rewind().expect("a seek");
    file
}

fn bytes(buffer: &Rc<Buffer>) -> Vec<u8> {
    let mut out = vec![0; buffer.len()];
    buffer.memory().expect("memory").read(0, &mut out);
    out
}

fn run<T>(ring: &Ring, future: impl Future<Output = T>) -> T {
    task::Context::on(ring.clone())
        .block_on(future)
        .expect("the ring turns")
}

/// Hosts alert on I/O wait (`/proc/pressure/io`, `iowait`): an idle server must not look like a slow disk.
#[test]
fn ring_reports_io_wait_only_for_image_io() {
    let driver = CountingDriver::default();
    let calls = Rc::clone(&driver.calls);
    let ring = Ring::with_driver(Box::new(driver), 16, 0);
    let event = eventfd().expect("an eventfd");
    let _watch = ring.watch(event, 1).expect("a watch");
    let file = ring.register(file_with(&[]).into()).expect("a registered file");
    let turn = |wait| {
        ring.turn(wait).expect("the ring turns");
        calls.borrow().last().copied()
    };

    assert_eq!(turn(true), Some(Wait::Event), "nothing but a kick can come");
    let sync = ring.sync(&file);
    assert_eq!(turn(false), Some(Wait::No));
    assert_eq!(turn(true), Some(Wait::Io), "a sync is in flight");
    assert_eq!(turn(true), Some(Wait::Event), "it has ended");
    drop(sync);
}

#[test]
fn ops_started_while_more_are_pushed_all_end() {
    for ring in rings() {
        let file = file_with(&[9; 4096]);
        // Where direct I/O is impossible, these reads are as any others.
        let direct = std::fs::OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_DIRECT)
            .open(format!("/proc/self/fd/{}", file.as_raw_fd()))
            .unwrap_or(file);
        let file = ring.register(direct.into()).expect("a registered file");
        for count in [1, 7, 8, 9, 16] {
            let buffers: Vec<_> = (0..count)
                .map(|_| Rc::new(Buffer::from(AlignedBuf::zeroed(4096))))
                .collect();
            let reads: Vec<_> = buffers
                .iter()
                .map(|buffer| ring.read(&file, 0, smallvec![Piece::whole(buffer)]))
                .collect();
            run(&ring, async {
                for read in reads {
                    read.await.expect("a read");
                }
            });
            assert_eq!(ring.in_flight(), 0);
            assert!(buffers.iter().all(|buffer| bytes(buffer) == [9; 4096]));
        }
    }
}

#[test]
fn turn_without_waiting_reaps_deferred_completions() {
    let ring =
        Ring::new(RingKind::IoUring, 16).expect("these tests need io_uring: kernel.io_uring_disabled=0");
    let event = eventfd().expect("an eventfd");
    let signal = event.try_clone().expect("a duplicate");
    let _watch = ring.watch(event, 5).expect("a watch");
    ring.turn(false).expect("the watch starts");
    let mut events = Vec::new();
    ring.take_events(&mut events);
    assert!(events.is_empty());
    signal_event(signal.as_raw_fd());
    ring.turn(false).expect("the ring turns");
    ring.take_events(&mut events);
    assert_eq!(events, [5]);
}

#[test]
fn ring_reads_back_its_writes_on_every_driver() {
    for ring in rings() {
        let file = ring.register(file_with(&[]).into()).expect("a registered file");
        let data = Rc::new(Buffer::from(AlignedBuf::from_slice(&[7; 3000])));
        let pieces = smallvec![Piece::Zeros(100), Piece::whole(&data), Piece::Zeros(70_000)];
        run(&ring, ring.write(&file, 5, pieces, false)).expect("a write");
        run(&ring, ring.sync(&file)).expect("a sync");
        let back = Rc::new(Buffer::from(AlignedBuf::from_slice(&[1; 4000])));
        run(&ring, ring.read(&file, 0, smallvec![Piece::whole(&back)])).expect("a read");
        let back = bytes(&back);
        assert!(
            back[..105].iter().all(|&byte| byte == 0),
            "{}",
            ring.driver_name()
        );
        assert!(
            back[105..3105].iter().all(|&byte| byte == 7),
            "{}",
            ring.driver_name()
        );
        assert!(
            back[3105..].iter().all(|&byte| byte == 0),
            "{}",
            ring.driver_name()
        );
    }
}

#[test]
fn read_past_end_of_file_gives_zeros() {
    for ring in rings() {
        let file = ring
            .register(file_with(&[3; 600]).into())
            .expect("a registered file");
        let sink = CompletionSink::new();
        let buffer = Buffer::from(AlignedBuf::from_slice(&[9; 1024]));
        let request = Request::new(Op::Read, 0, 1024, buffer, &sink, 1);
        ring.submit_request(&file, 0, request).expect("a free slot");
        while sink.is_empty() {
            ring.turn(true).expect("a turn");
        }
        let mut done = Vec::new();
        sink.drain_into(&mut done);
        assert_eq!(done[0].result, Ok(()));
        let mut out = [0; 1024];
        done[0].buffer.memory().expect("memory").read(0, &mut out);
        assert!(out[..600].iter().all(|&byte| byte == 3));
        assert!(out[600..].iter().all(|&byte| byte == 0));
    }
}

#[test]
fn full_ring_returns_request_and_queues_future() {
    for ring in rings() {
        let file = ring
            .register(file_with(&[1; 4096]).into())
            .expect("a registered file");
        let sink = CompletionSink::new();
        let mut refused = 0;
        for tag in 0..20 {
            let buffer = Buffer::from(AlignedBuf::zeroed(512));
            let request = Request::new(Op::Read, 0, 512, buffer, &sink, tag);
            if let Err(request) = ring.submit_request(&file, 0, request) {
                refused += 1;
                request.finish(Err(IoError::Cancelled));
            }
        }
        assert_eq!(refused, 4, "sixteen slots take sixteen of twenty");
        let late = ring.sync(&file);
        run(&ring, late).expect("the op starts once a slot is free");
        while ring.in_flight() > 0 {
            ring.turn(true).expect("a turn");
        }
        let mut done = Vec::new();
        sink.drain_into(&mut done);
        assert_eq!(done.len(), 20);
        assert_eq!(done.iter().filter(|done| done.result.is_ok()).count(), 16);
    }
}

/// A task that gave up must not use up the wake-up of one that still waits.
#[test]
fn free_slot_wakes_a_task_that_still_waits() {
    for ring in rings() {
        let cx = task::Context::on(ring.clone());
        let file = ring
            .register(file_with(&[1; 4096]).into())
            .expect("a registered file");
        let mut busy: Vec<_> = (0..16).map(|_| Box::pin(ring.sync(&file))).collect();
        let mut waiting = Box::pin(ring.sync(&file));
        let mut hasty = Box::pin(ring.sync(&file));
        let woken = std::sync::Arc::new(Flag::default());
        let waker = std::task::Waker::from(std::sync::Arc::clone(&woken));
        assert!(
            waiting
                .as_mut()
                .poll(&mut Context::from_waker(&waker))
                .is_pending()
        );
        assert!(
            hasty
                .as_mut()
                .poll(&mut Context::from_waker(std::task::Waker::noop()))
                .is_pending()
        );
        drop(hasty);
        cx.block_on(busy.remove(0))
            .expect("the ring turns")
            .expect("a sync");
        assert!(
            woken.0.load(std::sync::atomic::Ordering::SeqCst),
            "{}",
            ring.driver_name()
        );
    }
}

#[derive(Default)]
struct Flag(std::sync::atomic::AtomicBool);

impl std::task::Wake for Flag {
    fn wake(self: std::sync::Arc<Self>) {
        self.0.store(true, std::sync::atomic::Ordering::SeqCst);
    }
}

#[test]
fn dropped_future_keeps_memory_until_op_ends() {
    for ring in rings() {
        let (read_end, write_end) = pipe();
        let file = ring.register(read_end.into()).expect("a registered file");
        let buffer = Rc::new(Buffer::from(AlignedBuf::zeroed(8)));
        if ring.driver_name() == "syscalls" {
            continue; // ops have ended before a future can be dropped
        }
        // An offset of -1 reads from the current position, as a pipe wants.
        let op = ring.op(&file, Kind::Read, u64::MAX, 8, smallvec![Piece::whole(&buffer)]);
        ring.turn(false).expect("a turn");
        drop(op);
        assert_eq!(Rc::strong_count(&buffer), 2, "the slot holds the buffer");
        drop(write_end);
        while Rc::strong_count(&buffer) > 1 {
            ring.turn(true).expect("a turn");
        }
    }
}

fn pipe() -> (std::io::PipeReader, std::io::PipeWriter) {
    std::io::pipe().expect("a pipe")
}

#[test]
fn watch_reports_every_signal_until_dropped() {
    for ring in rings() {
        let event = eventfd().expect("an eventfd");
        let watch = ring
            .watch(event.try_clone().expect("a duplicate"), 42)
            .expect("a watch");
        let seen = RefCell::new(Vec::new());
        for _ in 0..3 {
            signal_event(event.as_raw_fd());
            ring.turn(true).expect("a turn");
            ring.take_events(&mut seen.borrow_mut());
        }
        assert_eq!(*seen.borrow(), vec![42, 42, 42], "{}", ring.driver_name());
        drop(watch);
        ring.turn(false).expect("a turn");
        signal_event(event.as_raw_fd());
        ring.turn(false).expect("a turn");
        ring.turn(false).expect("a turn");
        ring.take_events(&mut seen.borrow_mut());
        assert_eq!(seen.borrow().len(), 3, "{}", ring.driver_name());
    }
}

#[test]
fn ring_write_returns_the_kernels_error() {
    for ring in rings() {
        let path = tempfile::NamedTempFile::new().expect("a temporary file");
        let read_only = std::fs::File::open(path.path()).expect("a file opened to read");
        let file = ring.register(read_only.into()).expect("a registered file");
        let data = Rc::new(Buffer::from(AlignedBuf::zeroed(512)));
        let result = run(&ring, ring.write(&file, 0, smallvec![Piece::whole(&data)], false));
        assert_eq!(result, Err(IoError::Host { errno: libc::EBADF }));
    }
}
