//! Random orders of a worker, its guests and its owner: requests, kicks, removal and stop.

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

/// The owner's side of a guest: the guest's memory, its kick, and its answers.
struct Owner {
    id: FrontendId,
    memory: Arc<Memory>,
    kick: std::os::fd::OwnedFd,
    answered: mpsc::Receiver<u64>,
    dropped: Arc<AtomicBool>,
}

impl Owner {
    /// Adds a guest of `disk` to `worker`.
    fn of_a_guest(worker: &WorkerHandle, disk: Arc<RawDisk>) -> Self {
        let memory = Arc::new(Memory::default());
        let (answers, answered) = mpsc::channel();
        let kick = crate::event::eventfd().unwrap();
        let (theirs, kicked) = (Arc::clone(&memory), kick.try_clone().unwrap());
        let dropped = Arc::new(AtomicBool::new(false));
        let gone = Arc::clone(&dropped);
        let add = move |worker: &mut Worker| {
            let guest = Guest {
                queue: disk.open_queue(worker.context()).unwrap(),
                memory: theirs,
                answers,
                sink: CompletionSink::new(),
                in_flight: 0,
                dropped: gone,
            };
            worker.add(Box::new(guest), vec![kicked]).unwrap()
        };
        Self {
            id: worker.run(add).unwrap(),
            memory,
            kick,
            answered,
            dropped,
        }
    }

    fn ask(&self, tags: std::ops::Range<u64>) {
        self.memory.requests.lock().extend(tags);
        if self.memory.kick.load(Ordering::SeqCst) {
            crate::event::signal_event(self.kick.as_raw_fd());
        }
    }
}

/// A disk of 64 KiB in memory.
fn disk() -> Arc<RawDisk> {
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(1 << 16).unwrap();
    let options = FileOptions {
        write: true,
        direct: false,
    };
    RawDisk::new(ImageFile::from_fd("test".as_ref(), file, options), 1 << 16, true)
}

fn config() -> WorkerConfig {
    WorkerConfig {
        ring: RingKind::Syscalls,
        depth: 16,
        poll_max: Duration::ZERO,
        ..WorkerConfig::default()
    }
}

/// Fails if a frontend that falls asleep beside a busy one does not look again after asking for kicks, if a kick does not wake
/// it, and if one is removed before its requests have been answered, asleep or awake.
#[test]
fn idle_frontend_sleeps_beside_a_busy_one_until_it_is_kicked() {
    let run = || {
        let worker = WorkerHandle::spawn(config()).unwrap();
        let [busy, idle] = [(); 2].map(|()| Owner::of_a_guest(&worker, disk()));
        let working = shuttle::thread::spawn(move || {
            for tag in 0..6 {
                busy.ask(tag..tag + 1);
                assert_eq!(busy.answered.recv().unwrap(), tag);
            }
            busy
        });
        for tag in 0..3 {
            idle.ask(tag..tag + 1);
            assert_eq!(idle.answered.recv().unwrap(), tag);
            shuttle::thread::yield_now();
        }
        idle.ask(3..5);
        worker.remove(idle.id).unwrap();
        assert!(idle.dropped.load(Ordering::SeqCst));
        let left = idle.memory.requests.lock().len();
        let late = std::iter::from_fn(|| idle.answered.try_recv().ok()).count();
        assert_eq!(late + left, 2);
        let busy = working.join().unwrap();
        worker.stop();
        assert!(busy.dropped.load(Ordering::SeqCst));
    };
    shuttle::check_random(run, 1000);
    shuttle::check_pct(run, 1000, 3);
}

/// Fails if a worker sleeps without another look at its queues after asking for kicks, if a frontend is removed with a
/// request in flight, if its removal is not reported, and if a worker ends before everything has.
#[test]
fn frontend_removal_waits_for_answers_to_all_requests() {
    let run = || {
        let worker = WorkerHandle::spawn(config()).unwrap();
        let owner = Owner::of_a_guest(&worker, disk());
        let mut seen = Vec::new();
        for round in 0..3 {
            owner.ask(round * 2..round * 2 + 2);
            seen.extend([owner.answered.recv().unwrap(), owner.answered.recv().unwrap()]);
        }
        seen.sort_unstable();
        assert_eq!(seen, [0, 1, 2, 3, 4, 5]);
        // The last ones may be taken or not; those taken are answered before the removal is.
        owner.ask(6..10);
        worker.remove(owner.id).unwrap();
        assert!(owner.dropped.load(Ordering::SeqCst));
        let left = owner.memory.requests.lock().len();
        let late = std::iter::from_fn(|| owner.answered.try_recv().ok()).count();
        assert_eq!(late + left, 4);
        let ran = worker.block_on(|_| Box::pin(async { 7 })).unwrap();
        assert_eq!(ran, 7);
        worker.stop();
    };
    shuttle::check_random(run, 1000);
    shuttle::check_pct(run, 1000, 3);
}
