//! The queue against a model of the driver, with a disk in memory.

use std::cell::RefCell;
use std::sync::Arc;

use block::sync::mpsc;
use block::worker::{Frontend, Worker};
use block::{Context, IoError, Op};
use parking_lot::Mutex;

use super::abi::op;
use super::model::{Io, Model, ModelChannel};
use super::queue::UblkQueue;
use super::queue_state::{Counts, QueueEvent, QueueState};
use crate::stats::RequestKind;
use crate::testing::{DISK_BYTES, MemDisk};
use ringdisk_gen::Random;

const IO_BYTES_MAX: u32 = 64 << 10;
const DEVICE: u32 = 5;

/// A queue, the driver below it, and the worker's part played by the test.
pub(super) struct World {
    cx: Context,
    pub(super) model: Model,
    pub(super) state: Arc<QueueState>,
    events: Arc<Mutex<Vec<QueueEvent>>>,
    queue: Option<UblkQueue<ModelChannel>>,
}

impl World {
    pub(super) fn new(disk: &MemDisk, depth: u16) -> Self {
        Self::on(disk, Model::new(depth), depth)
    }

    pub(super) fn on(disk: &MemDisk, model: Model, depth: u16) -> Self {
        let cx = Context::syscalls();
        let events = Arc::new(Mutex::new(Vec::new()));
        let heard = Arc::clone(&events);
        let tell = Arc::new(move |event| heard.lock().push(event));
        let state = QueueState::new(DEVICE, tell);
        let queue = disk.disk().open_queue(&cx).expect("a queue");
        let shared = Arc::clone(&state);
        let queue = UblkQueue::start(&cx, model.channel(0), queue, depth, IO_BYTES_MAX, None, shared);
        Self {
            cx,
            model,
            state,
            events,
            queue: Some(queue),
        }
    }

    fn queue(&mut self) -> &mut UblkQueue<ModelChannel> {
        self.queue.as_mut().expect("not dropped yet")
    }

    fn round(&mut self) {
        self.queue().poll();
        self.cx.run_ready();
        self.queue().publish();
        assert_eq!(self.model.take_fault(), None);
    }

    pub(super) fn rounds(&mut self) {
        for _ in 0..8 {
            self.round();
        }
    }

    /// Makes a request and gives its answer.
    fn ask(&mut self, io: Io) -> i32 {
        let number = self.model.request(io);
        self.rounds();
        self.result(number)
    }

    /// The answer to a request, which must be there.
    pub(super) fn result(&self, number: usize) -> i32 {
        self.model.io(number).result.expect("it was committed")
    }

    pub(super) fn events(&self) -> Vec<QueueEvent> {
        self.events.lock().clone()
    }
}

#[test]
fn queue_maps_every_operation_to_the_disk() {
    let disk = MemDisk::new();
    let mut world = World::new(&disk, 4);
    let data: Vec<u8> = (0..4096).map(|index| (index / 7) as u8).collect();
    assert_eq!(world.ask(Io::write(8, &data)), 4096);
    assert_eq!(disk.bytes(4096, 4096), data);
    let number = world.model.request(Io::new(op::READ, 8, 8));
    world.rounds();
    assert_eq!((world.result(number), world.model.io(number).data), (4096, data));
    assert_eq!(world.ask(Io::write(0, &[1; 512]).flags(op::FLAG_FUA)), 512);
    assert_eq!(world.ask(Io::new(op::FLUSH, 0, 0)), 0);
    assert_eq!(world.ask(Io::new(op::DISCARD, 16, 8)), 0);
    assert_eq!(world.ask(Io::new(op::WRITE_ZEROES, 16, 8)), 0);
    assert_eq!(
        world.ask(Io::new(op::WRITE_ZEROES, 16, 8).flags(op::FLAG_NOUNMAP)),
        0
    );
    let asked: Vec<_> = disk.log();
    let zeroes = |unmap| Op::WriteZeroes { unmap, fua: false };
    assert_eq!(
        asked,
        [
            (Op::Write { fua: false }, 4096, 4096),
            (Op::Read, 4096, 4096),
            (Op::Write { fua: true }, 0, 512),
            (Op::Flush, 0, 0),
            (Op::Discard, 8192, 4096),
            (zeroes(true), 8192, 4096),
            (zeroes(false), 8192, 4096),
        ]
    );
    let counts = Counts {
        requests: 7,
        bytes: 4096 + 4096 + 512,
        copied: 3,
        ..Counts::default()
    };
    assert_eq!(world.state.counts(), counts);
}

#[test]
fn statistics_agree_with_what_the_host_did() {
    let mut shares = 0.0;
    for seed in 1..=40 {
        let mut random = Random::new(seed);
        let disk = MemDisk::new();
        let mut world = World::new(&disk, 16);
        // By kind: requests, bytes, errors.
        let mut expected = [[0u64; 3]; RequestKind::ALL.len()];
        for _ in 0..100 {
            disk.fail(random.one_in(6).then_some(IoError::Corrupt));
            let mut asked = Vec::new();
            for _ in 0..1 + random.below(20) {
                let sectors = 1 + random.below(8) as u32;
                let sector = random.below(2048 + 4);
                let bytes = u64::from(sectors) * 512;
                let (io, kind, bytes) = match random.below(8) {
                    0 | 1 => (Io::new(op::READ, sector, sectors), RequestKind::Read, bytes),
                    2 | 3 => {
                        let data = vec![7; bytes as usize];
                        (Io::write(sector, &data), RequestKind::Write, bytes)
                    }
                    4 => (Io::new(op::FLUSH, 0, 0), RequestKind::Flush, 0),
                    5 => (Io::new(op::DISCARD, sector, sectors), RequestKind::Discard, bytes),
                    6 => (
                        Io::new(op::WRITE_ZEROES, sector, sectors),
                        RequestKind::WriteZeroes,
                        bytes,
                    ),
                    _ => (Io::new(77, 0, 0), RequestKind::Other, 0),
                };
                asked.push((world.model.request(io), kind, bytes));
            }
            world.rounds();
            for (number, kind, bytes) in asked {
                let [requests, moved, errors] = &mut expected[kind as usize];
                *requests += 1;
                match world.result(number) {
                    0.. => *moved += bytes,
                    _ => *errors += 1,
                }
            }
        }
        let stats = world.state.stats().snapshot();
        assert_eq!(stats.in_flight, 0);
        for kind in RequestKind::ALL {
            let found = stats.kind(kind);
            let found = [found.requests, found.bytes, found.errors];
            assert_eq!(found, expected[kind as usize], "seed {seed}: {kind:?}");
            assert!(found[0] > 0, "seed {seed}: {kind:?}");
        }
        let errors: u64 = expected.iter().map(|[.., errors]| errors).sum();
        assert!(errors > 10, "seed {seed}");
        assert_eq!(
            stats.discard.latency.count(),
            stats.discard.requests,
            "seed {seed}"
        );
        let share = stats.read.latency.count() as f64 / stats.read.requests as f64;
        shares += share / 40.0;
        assert_eq!(
            world.state.counts().requests,
            expected.iter().map(|kind| kind[0]).sum::<u64>()
        );
    }
    // What was measured stands for all.
    assert!((0.8..1.2).contains(&shares), "{shares}");
}

#[test]
fn failed_request_is_answered_with_its_errno() {
    let disk = MemDisk::new();
    let mut world = World::new(&disk, 4);
    for (error, errno) in [
        (IoError::Host { errno: libc::ENOSPC }, libc::ENOSPC),
        (IoError::Corrupt, libc::EIO),
        (IoError::ReadOnly, libc::EROFS),
        (IoError::Cancelled, libc::ECANCELED),
        (IoError::Host { errno: 0 }, 1),
    ] {
        disk.fail(Some(error));
        assert_eq!(world.ask(Io::new(op::READ, 0, 1)), -errno);
        assert_eq!(world.ask(Io::write(0, &[0; 512])), -errno);
        assert_eq!(world.ask(Io::new(op::FLUSH, 0, 0)), -errno);
    }
    disk.fail(None);
    let past = DISK_BYTES / 512;
    assert_eq!(world.ask(Io::new(op::READ, past, 1)), -libc::EINVAL);
    assert_eq!(world.ask(Io::new(op::READ, past - 1, 1)), 512);
}

/// The driver is the kernel's, but its mistake must cost one request and nothing more.
#[test]
fn invalid_descriptor_is_answered_with_an_errno() {
    let disk = MemDisk::new();
    let mut world = World::new(&disk, 2);
    let long = IO_BYTES_MAX / 512 + 1;
    for (io, errno) in [
        (Io::new(4, 0, 1), libc::EOPNOTSUPP),
        (Io::new(255, 0, 1), libc::EOPNOTSUPP),
        (Io::new(op::READ, u64::MAX, 1), libc::EINVAL),
        (Io::new(op::READ, 1 << 55, 1), libc::EINVAL),
        (Io::new(op::READ, 0, long), libc::EINVAL),
        (Io::new(op::READ, 0, 0), libc::EINVAL),
        (Io::new(op::DISCARD, 1, u32::MAX), libc::EINVAL),
    ] {
        let text = format!("{io:?}");
        assert_eq!(world.ask(io), -errno, "{text}");
    }
    assert_eq!(world.ask(Io::new(op::READ, 0, long - 1)), IO_BYTES_MAX as i32);
}

#[test]
fn failed_transfer_fails_only_its_request() {
    let disk = MemDisk::new();
    let mut world = World::new(&disk, 2);
    world
        .model
        .fail_transfers(Some(IoError::Host { errno: libc::EFAULT }));
    assert_eq!(world.ask(Io::write(0, &[1; 512])), -libc::EFAULT);
    assert_eq!(world.ask(Io::new(op::READ, 0, 1)), -libc::EFAULT);
    assert_eq!(
        disk.bytes(0, 512),
        [0; 512],
        "what could not be fetched was not written"
    );
    world.model.fail_transfers(None);
    assert_eq!(world.ask(Io::new(op::READ, 0, 1)), 512);
}

#[test]
fn answers_are_committed_once_after_a_full_ring() {
    let disk = MemDisk::new();
    let mut world = World::new(&disk, 8);
    disk.hold();
    let numbers: Vec<usize> = (0..8)
        .map(|index| world.model.request(Io::new(op::READ, index, 1)))
        .collect();
    world.round();
    disk.release();
    world.model.refuse(5);
    world.cx.run_ready();
    world.queue().publish();
    assert!(world.model.unanswered() > 0, "the ring was full");
    world.rounds();
    for number in numbers {
        assert_eq!(world.result(number), 512);
    }
    assert_eq!(world.model.fetches(), 16, "a fetch for each tag, and a commit");
}

/// The device was stopped: idle tags end, and a request at the disk is committed before its tag ends too.
#[test]
fn queue_ends_only_after_its_last_tag() {
    let disk = MemDisk::new();
    let mut world = World::new(&disk, 4);
    disk.hold();
    let number = world.model.request(Io::write(0, &[9; 512]));
    world.rounds();
    world.model.abort();
    world.rounds();
    assert_eq!((world.state.tags(), world.queue().in_flight()), (1, 1));
    assert_eq!(world.events(), []);
    disk.release();
    world.rounds();
    assert_eq!(world.result(number), 512);
    assert_eq!(world.state.tags(), 1, "the driver has not ended it");
    world.model.abort();
    world.rounds();
    assert_eq!((world.state.tags(), world.queue().in_flight()), (0, 0));
    assert_eq!(world.events(), [QueueEvent::Ended { device: DEVICE }]);
    world.queue = None;
    assert_eq!(world.events().len(), 1);
}

/// A worker does not poll a removed queue any more, but the driver does not know that it is removed.
#[test]
fn removed_queue_is_served_until_the_driver_ends_it() {
    let disk = MemDisk::new();
    let mut world = World::new(&disk, 4);
    let mut worker = Worker::by_hand(world.cx.clone());
    let queue = world.queue.take().expect("a queue");
    let id = worker.add(Box::new(queue), Vec::new()).expect("no kicks");
    let (done, gone) = mpsc::channel();
    worker.remove(id, done);
    let number = world.model.request(Io::write(0, &[3; 512]));
    for _ in 0..4 {
        worker.round().expect("a round");
    }
    assert_eq!(world.result(number), 512);
    assert_eq!(gone.try_recv(), Err(mpsc::TryRecvError::Empty));
    world.model.abort();
    for _ in 0..4 {
        worker.round().expect("a round");
    }
    assert_eq!(gone.try_recv(), Err(mpsc::TryRecvError::Disconnected));
    assert_eq!(world.events(), [QueueEvent::Ended { device: DEVICE }]);
}

/// Counting the result as an end would hang the device; ignoring it would lose the tag.
#[test]
fn unknown_driver_result_is_reported_and_costs_one_tag() {
    let disk = MemDisk::new();
    for lie in [-libc::EINVAL, -libc::EBUSY, -libc::EIO, 1, 7] {
        let mut world = World::new(&disk, 4);
        world.model.lie(lie);
        world.model.request(Io::new(op::READ, 0, 1));
        world.rounds();
        let events = world.events();
        assert!(
            matches!(&events[..], [QueueEvent::Broken { device: DEVICE, .. }]),
            "{lie}: {events:?}"
        );
        assert_eq!(world.ask(Io::new(op::READ, 0, 1)), 512);
    }
}

#[test]
fn dropped_queue_reports_broken_unless_abandoned() {
    let disk = MemDisk::new();
    let mut world = World::new(&disk, 4);
    world.queue = None;
    assert!(matches!(&world.events()[..], [QueueEvent::Broken { .. }]));
    let mut world = World::new(&disk, 4);
    disk.hold();
    world.model.request(Io::new(op::READ, 0, 1));
    world.rounds();
    assert_eq!(world.queue().in_flight(), 4);
    world.state.abandon();
    assert_eq!(world.queue().in_flight(), 0);
    world.queue = None;
    assert_eq!(world.events(), []);
    // A context whose tasks have not ended goes with nobody.
    disk.release();
    world.cx.run_ready();
}

/// Single-sector reads and writes, while servers find no slots, are delayed and are killed. Every request is answered.
#[test]
fn answered_requests_survive_killed_servers() {
    for seed in 1..200u64 {
        let mut random = Random::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let disk = MemDisk::new();
        let depth = 1 + random.below(8) as u16;
        let mut world = World::new(&disk, depth);
        // By sector: what it holds, and the request that is under way with what it writes.
        let held = RefCell::new(vec![(0u8, None::<(usize, Option<u8>)>); 32]);
        let settle = |model: &Model| {
            for (value, under_way) in held.borrow_mut().iter_mut() {
                let Some((number, writes)) = *under_way else {
                    continue;
                };
                let io = model.io(number);
                if let Some(result) = io.result {
                    assert_eq!(result, 512, "seed {seed}");
                    match writes {
                        Some(byte) => *value = byte,
                        None => assert_eq!(io.data, [*value; 512], "seed {seed}"),
                    }
                    *under_way = None;
                }
            }
        };
        for step in 0..400 {
            match random.below(12) {
                0..6 => {
                    let sector = random.below(32) as usize;
                    if held.borrow()[sector].1.is_none() {
                        let byte = (step % 251) as u8 + 1;
                        let writes = random.below(2) == 0;
                        let io = match writes {
                            true => Io::write(sector as u64, &[byte; 512]),
                            false => Io::new(op::READ, sector as u64, 1),
                        };
                        let number = world.model.request(io);
                        held.borrow_mut()[sector].1 = Some((number, writes.then_some(byte)));
                    }
                }
                6 => world.model.refuse(random.below(4) as u32),
                7 => disk.hold(),
                8 => disk.release(),
                9 if random.below(6) == 0 => {
                    // Its I/O ends before the driver lets a successor in.
                    world.state.abandon();
                    disk.release();
                    world.cx.run_ready();
                    world.queue = None;
                    world.model.refuse(0);
                    world.model.server_gone();
                    world = World::on(&disk, world.model.clone(), depth);
                    world.model.end_recovery();
                }
                _ => world.round(),
            }
            settle(&world.model);
        }
        disk.release();
        world.model.refuse(0);
        for _ in 0..64 {
            world.rounds();
        }
        settle(&world.model);
        assert_eq!(world.model.unanswered(), 0, "seed {seed}");
        for (sector, (value, _)) in held.borrow().iter().enumerate() {
            assert_eq!(
                disk.bytes(sector * 512, 512),
                [*value; 512],
                "seed {seed}, sector {sector}"
            );
        }
    }
}
