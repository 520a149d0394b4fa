//! Workers with a thread: requests, removal, futures.

use std::cell::Cell;
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::time::Duration;

use super::*;
use crate::buffer::{AlignedBuf, Buffer};
use crate::disk::{Disk, DiskQueue};
use crate::file::{FileOptions, ImageFile};
use crate::raw::RawDisk;
use crate::request::{CompletionSink, Done, Op, Request};
use crate::ring::{Ring, RingKind};

/// A frontend fed through a channel, like a guest with a very simple queue.
pub(super) struct Channel {
    queue: Box<dyn DiskQueue>,
    requests: mpsc::Receiver<(Op, u64)>,
    answers: mpsc::Sender<Done2>,
    sink: Rc<CompletionSink>,
    in_flight: usize,
}
type Done2 = (u64, bool);

impl Channel {
    /// A frontend of `disk`, the requests to it, and its answers: the offset, and true for success.
    pub(super) fn on(
        disk: Arc<dyn Disk>,
        cx: &Context,
    ) -> (Self, mpsc::Sender<(Op, u64)>, mpsc::Receiver<Done2>) {
        let (send, requests) = mpsc::channel();
        let (answers, answered) = mpsc::channel();
        let channel = Self {
            queue: disk.open_queue(cx).expect("a queue"),
            requests,
            answers,
            sink: CompletionSink::new(),
            in_flight: 0,
        };
        (channel, send, answered)
    }
}

/// A disk of 1 MiB on a temporary file.
pub(super) fn disk() -> Arc<RawDisk> {
    let file = tempfile::tempfile().expect("a temporary file");
    file.set_len(1 << 20).expect("its length");
    let options = FileOptions {
        write: true,
        direct: false,
    };
    RawDisk::new(ImageFile::from_fd("test".as_ref(), file, options), 1 << 20, true)
}

impl Frontend for Channel {
    fn poll(&mut self) -> bool {
        let mut any = false;
        while let Ok((op, offset)) = self.requests.try_recv() {
            let buffer = if op == Op::Flush {
                Buffer::default()
            } else {
                AlignedBuf::zeroed(4096).into()
            };
            let len = buffer.len() as u64;
            self.in_flight += 1;
            self.queue
                .submit(Request::new(op, offset, len, buffer, &self.sink, offset));
            any = true;
        }
        any
    }
    fn publish(&mut self) -> bool {
        let mut done: Vec<Done> = Vec::new();
        self.sink.drain_into(&mut done);
        self.in_flight -= done.len();
        let any = !done.is_empty();
        for done in done {
            self.answers
                .send((done.tag, done.result.is_ok()))
                .expect("the test waits");
        }
        any
    }
    fn prepare_sleep(&mut self) -> bool {
        self.poll()
    }
    fn end_sleep(&mut self) {}
    fn in_flight(&self) -> usize {
        self.in_flight
    }
}

#[test]
fn worker_answers_all_requests_until_frontend_is_removed() {
    for ring in [RingKind::IoUring, RingKind::Syscalls] {
        let disk = disk();
        let config = WorkerConfig {
            ring,
            poll_max: Duration::from_micros(20),
            ..WorkerConfig::default()
        };
        let worker = WorkerHandle::spawn(config).expect("a worker");
        let kick = crate::event::eventfd().expect("an eventfd");
        let kicked = kick.try_clone().expect("a duplicate");
        let (id, send, answered) = worker
            .run(move |worker| {
                let (channel, send, answered) = Channel::on(disk, worker.context());
                let id = worker.add(Box::new(channel), vec![kicked]).expect("a frontend");
                (id, send, answered)
            })
            .expect("the worker runs");
        for round in 0..50 {
            for n in 0..8 {
                let op = if n == 7 {
                    Op::Flush
                } else {
                    Op::Write { fua: false }
                };
                send.send((op, n * 4096)).expect("the frontend listens");
            }
            crate::event::signal_event(kick.as_raw_fd());
            if round % 10 == 0 {
                std::thread::yield_now();
            }
            for _ in 0..8 {
                assert!(
                    answered
                        .recv_timeout(Duration::from_secs(10))
                        .expect("an answer")
                        .1
                );
            }
        }
        worker.remove(id).expect("the worker runs");
        assert!(send.send((Op::Flush, 0)).is_err(), "the frontend is gone");
        worker.stop();
    }
}

#[test]
fn worker_block_on_runs_future_on_its_thread() {
    let worker = WorkerHandle::spawn(WorkerConfig::default()).expect("a worker");
    let here = std::thread::current().id();
    let there = worker
        .block_on(|_cx| Box::pin(async { std::thread::current().id() }))
        .expect("the worker runs");
    assert_ne!(here, there);
}

/// A worker that ends by a panic tells those who asked it before, and those who ask it later.
#[test]
fn worker_that_panics_leaves_nobody_waiting_and_says_so() {
    let (failed, failure) = mpsc::channel();
    let config = || {
        let failed = failed.clone();
        WorkerConfig {
            on_failure: Some(FailureHook::new(move || failed.send(()).expect("a test"))),
            ..WorkerConfig::default()
        }
    };
    // One that is asked to end says nothing.
    WorkerHandle::spawn(config()).expect("a worker").stop();
    let worker = WorkerHandle::spawn(config()).expect("a worker");
    assert!(!worker.has_ended());
    let (go, gone) = mpsc::channel::<()>();
    let (begun, is_busy) = mpsc::channel();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| {
            worker.run(move |_| {
                begun.send(()).expect("somebody waits");
                gone.recv().expect("a word");
                panic!("a fault of ours");
            })
        });
        is_busy.recv().expect("it has begun");
        let queued = scope.spawn(|| worker.run(|_| ()));
        go.send(()).expect("it waits");
        let ended: Result<(), WorkerGone> = first.join().expect("no panic here");
        assert!(ended.is_err());
        assert!(queued.join().expect("no panic here").is_err());
    });
    assert!(worker.run(|_| ()).is_err());
    assert!(worker.block_on(|_| Box::pin(async {})).is_err());
    assert!(worker.has_ended());
    failure.recv_timeout(Duration::from_secs(10)).expect("a word");
    assert!(failure.try_recv().is_err(), "only one");
}

/// A frontend that counts the looks at it.
struct Looked {
    looks: Rc<Cell<u32>>,
    is_busy: bool,
}

impl Frontend for Looked {
    fn poll(&mut self) -> bool {
        self.looks.set(self.looks.get() + 1);
        self.is_busy
    }
    fn publish(&mut self) -> bool {
        false
    }
    fn prepare_sleep(&mut self) -> bool {
        self.is_busy
    }
    fn end_sleep(&mut self) {}
    fn in_flight(&self) -> usize {
        0
    }
}

/// A round of a worker with a thousand frontends looks at those which have something to do.
#[test]
fn rounds_pass_over_idle_frontends_until_they_are_kicked() {
    let cx = Context::on(Ring::new(RingKind::IoUring, 16).expect("these tests need io_uring"));
    let mut worker = Worker::by_hand(cx);
    let mut add = |is_busy| {
        let looks = Rc::new(Cell::new(0));
        let frontend = Looked {
            looks: Rc::clone(&looks),
            is_busy,
        };
        let kick = crate::event::eventfd().expect("an eventfd");
        let kicks = vec![kick.try_clone().expect("a duplicate")];
        let id = worker.add(Box::new(frontend), kicks).expect("a frontend");
        (id, looks, kick)
    };
    let (_, busy, _) = add(true);
    let idle: Vec<_> = (0..1000).map(|_| add(false)).collect();
    let rounds = |worker: &mut Worker| (0..2000).for_each(|_| assert!(worker.round().expect("a round")));
    rounds(&mut worker);
    assert_eq!(busy.get(), 2000);
    let looks = |idle: &[(FrontendId, Rc<Cell<u32>>, _)]| idle.iter().map(|(_, looks, _)| looks.get()).max();
    assert_eq!(looks(&idle), Some(1), "so many share what one may have");
    let (first, kicked, kick) = &idle[7];
    crate::event::signal_event(kick.as_raw_fd());
    rounds(&mut worker);
    let two = IDLE_LOOKS as u32 / 2;
    assert_eq!(
        kicked.get(),
        1 + two,
        "until it falls asleep again, beside one other"
    );
    assert_eq!(looks(&idle[8..]), Some(1));
    // Removed, asleep as it is.
    let (done, gone) = mpsc::channel();
    worker.remove(*first, done);
    rounds(&mut worker);
    assert!(gone.recv().is_err(), "it was let go of");
    assert_eq!(Rc::strong_count(kicked), 1);
}

/// A frontend without a kick cannot sleep: beside a busy one it gets more looks than its counter can hold.
#[test]
fn frontend_that_cannot_sleep_is_looked_at_without_end() {
    let cx = Context::on(Ring::new(RingKind::IoUring, 16).expect("these tests need io_uring"));
    let mut worker = Worker::by_hand(cx);
    let looks = [true, false].map(|is_busy| {
        let looks = Rc::new(Cell::new(0));
        let frontend = Looked {
            looks: Rc::clone(&looks),
            is_busy,
        };
        worker.add(Box::new(frontend), Vec::new()).expect("a frontend");
        looks
    });
    worker.awake.iter_mut().for_each(|entry| entry.idle = u32::MAX);
    (0..10).for_each(|_| assert!(worker.round().expect("a round")));
    assert_eq!(looks.map(|looks| looks.get()), [10, 10]);
}
