//! Random orders of a worker, its guest and its owner: requests, kicks, removal and stop.

use std::os::fd::AsRawFd;
use std::rc::Rc;

use super::*;
use crate::buffer::Buffer;
use crate::disk::DiskQueue;
use crate::file::{FileOptions, ImageFile};
use crate::raw::RawDisk;
use crate::request::{CompletionSink, Op, Request};
use crate::ring::RingKind;
use crate::{AlignedBuf, Disk};

/// A queue in "guest memory": requests, whether the guest is to kick, and answers.
#[derive(Debug, Default)]
struct Memory {
    requests: Mutex<Vec<u64>>,
    kick: AtomicBool,
}

struct Guest {
    queue: Box<dyn DiskQueue>,
    memory: Arc<Memory>,
    answers: mpsc::Sender<u64>,
    sink: Rc<CompletionSink>,
    in_flight: usize,
    dropped: Arc<AtomicBool>,
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.dropped.store(true, Ordering::SeqCst);
    }
}

impl Frontend for Guest {
    fn poll(&mut self) -> bool {
        let requests = std::mem::take(&mut *self.memory.requests.lock());
        self.in_flight += requests.len();
        for &tag in &requests {
            let buffer: Buffer = AlignedBuf::zeroed(512).into();
            let op = Op::Write { fua: false };
            self.queue
                .submit(Request::new(op, tag * 512, 512, buffer, &self.sink, tag));
        }
        !requests.is_empty()
    }

    fn publish(&mut self) -> bool {
        let mut done = Vec::new();
        self.sink.drain_into(&mut done);
        self.in_flight -= done.len();
        for done in &done {
            assert_eq!(done.result, Ok(()));
            // A guest that has gone hears nothing more.
            self.answers.send(done.tag).unwrap_or_default();
        }
        !done.is_empty()
    }

    fn prepare_sleep(&mut self) -> bool {
        self.memory.kick.store(true, Ordering::SeqCst);
        !self.memory.requests.lock().is_empty()
    }

    fn end_sleep(&mut self) {
        self.memory.kick.store(false, Ordering::SeqCst);
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }
}

/// Fails if a worker sleeps without another look at its queues after asking for kicks, if a frontend is removed with a
/// request in flight, if its removal is not reported, and if a worker ends before everything has.
#[test]
fn frontend_removal_waits_for_answers_to_all_requests() {
    let run = || {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(1 << 16).unwrap();
        let options = FileOptions {
            write: true,
            direct: false,
        };
        let disk = RawDisk::new(ImageFile::from_fd("test".as_ref(), file, options), 1 << 16, true);
        let config = WorkerConfig {
            ring: RingKind::Syscalls,
            depth: 16,
            poll_max: Duration::ZERO,
            ..WorkerConfig::default()
        };
        let worker = WorkerHandle::spawn(config).unwrap();
        let memory = Arc::new(Memory::default());
        let (answers, answered) = mpsc::channel();
        let kick = crate::task::eventfd().unwrap();
        let (theirs, kicked) = (Arc::clone(&memory), kick.try_clone().unwrap());
        let dropped = Arc::new(AtomicBool::new(false));
        let gone = Arc::clone(&dropped);
        let id = worker
            .run(move |worker| {
                let guest = Guest {
                    queue: disk.open_queue(worker.context()).unwrap(),
                    memory: theirs,
                    answers,
                    sink: CompletionSink::new(),
                    in_flight: 0,
                    dropped: gone,
                };
                worker.add(Box::new(guest), vec![kicked]).unwrap()
            })
            .unwrap();
        let ask = |tags: std::ops::Range<u64>| {
            memory.requests.lock().extend(tags);
            if memory.kick.load(Ordering::SeqCst) {
                crate::ring::signal_event(kick.as_raw_fd());
            }
        };
        let mut seen = Vec::new();
        for round in 0..3 {
            ask(round * 2..round * 2 + 2);
            seen.extend([answered.recv().unwrap(), answered.recv().unwrap()]);
        }
        seen.sort_unstable();
        assert_eq!(seen, [0, 1, 2, 3, 4, 5]);
        // The last ones may be taken or not; those taken are answered before the removal is.
        ask(6..10);
        worker.remove(id).unwrap();
        assert!(dropped.load(Ordering::SeqCst));
        let left = memory.requests.lock().len();
        let late = std::iter::from_fn(|| answered.try_recv().ok()).count();
        assert_eq!(late + left, 4);
        let ran = worker.block_on(|_| Box::pin(async { 7 })).unwrap();
        assert_eq!(ran, 7);
        worker.stop();
    };
    shuttle::check_random(run, 1000);
    shuttle::check_pct(run, 1000, 3);
}
