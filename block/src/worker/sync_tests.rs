//! Syncs in place: when a worker blocks, and what ends that.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use super::tests::{Channel, disk};
use super::*;
use crate::request::Op;
use crate::ring::Ring;
use crate::ring::counting::CountingDriver;
use crate::timer::Clock;
use crate::timer::tests::Still;

/// A worker, and a guest of one of its frontends.
struct World {
    worker: Worker,
    requests: mpsc::Sender<(Op, u64)>,
    answers: mpsc::Receiver<(u64, bool)>,
    /// The events during the next sync in place, and its result.
    during: Rc<RefCell<Box<dyn FnMut() -> i32>>>,
    /// The number of syncs in place.
    in_place: Rc<Cell<u32>>,
    clock: Rc<Still>,
}

impl World {
    fn new() -> Self {
        let during: Rc<RefCell<Box<dyn FnMut() -> i32>>> = Rc::new(RefCell::new(Box::new(|| 0)));
        let in_place = Rc::new(Cell::new(0));
        let (meanwhile, count) = (Rc::clone(&during), Rc::clone(&in_place));
        let sync_now = move || {
            count.set(count.get() + 1);
            meanwhile.borrow_mut()()
        };
        let mut driver = CountingDriver::default();
        driver.sync_now = Some(Box::new(sync_now));
        let clock = Rc::new(Still::default());
        let ring = Ring::with_driver(Box::new(driver), 16, 0);
        let cx = Context::with_clock(ring, Rc::clone(&clock) as Rc<dyn Clock>);
        let mut worker = Worker::by_hand(cx);
        let (channel, requests, answers) = Channel::on(disk(), worker.context());
        worker.add(Box::new(channel), Vec::new()).expect("a frontend");
        Self {
            worker,
            requests,
            answers,
            during,
            in_place,
            clock,
        }
    }

    /// Serves until nothing is in flight.
    fn serve(&mut self) {
        while self.worker.round().expect("the ring turns") || self.worker.cx.ring().in_flight() > 0 {
            let waits = self.worker.cx.ring().in_flight() > 0;
            self.worker.cx.ring().turn(waits).expect("the ring turns");
        }
    }

    /// A write and, after its answer, a FLUSH. Returns true if the FLUSH succeeds.
    fn pair(&mut self) -> bool {
        self.requests
            .send((Op::Write { fua: false }, 0))
            .expect("a frontend");
        self.serve();
        assert_eq!(self.answers.try_recv(), Ok((0, true)));
        self.requests.send((Op::Flush, 0)).expect("a frontend");
        self.serve();
        self.answers.try_recv().expect("an answer").1
    }

    /// The number of pairs until a worker blocks for one, and at most `limit`.
    fn until_it_blocks(&mut self, limit: u32) -> u32 {
        let before = self.in_place.get();
        let blocks = |_: &u32| self.pair() && self.in_place.get() > before;
        (0..limit).find(blocks).unwrap_or(limit)
    }
}

/// The number of pairs before the first sync in place.
const FIRST: u32 = 8;

#[test]
fn worker_syncs_in_place_after_a_run_of_quiet_syncs() {
    let mut world = World::new();
    assert_eq!(world.until_it_blocks(100), FIRST);
    assert!((0..10).all(|_| world.pair()));
    assert_eq!(world.in_place.get(), 11);
}

#[test]
fn request_during_a_sync_in_place_ends_the_run() {
    let mut world = World::new();
    assert_eq!(world.until_it_blocks(100), FIRST);
    let requests = world.requests.clone();
    *world.during.borrow_mut() = Box::new(move || {
        requests.send((Op::Read, 4096)).expect("a frontend");
        0
    });
    assert!(world.pair());
    assert_eq!(
        world.answers.try_recv(),
        Ok((4096, true)),
        "it is served all the same"
    );
    *world.during.borrow_mut() = Box::new(|| 0);
    assert_eq!(world.until_it_blocks(100), 2 * FIRST);
}

#[test]
fn long_sync_in_place_ends_the_run() {
    let mut world = World::new();
    assert_eq!(world.until_it_blocks(100), FIRST);
    let clock = Rc::clone(&world.clock);
    *world.during.borrow_mut() = Box::new(move || {
        clock.0.set(clock.0.get() + Duration::from_millis(2));
        0
    });
    assert!(world.pair());
    assert_eq!(world.until_it_blocks(100), 2 * FIRST);
}

#[test]
fn failed_sync_in_place_fails_every_later_flush() {
    let mut world = World::new();
    assert_eq!(world.until_it_blocks(100), FIRST);
    *world.during.borrow_mut() = Box::new(|| -libc::EIO);
    assert!(!world.pair());
    *world.during.borrow_mut() = Box::new(|| 0);
    assert!((0..20).all(|_| !world.pair()));
    assert_eq!(world.in_place.get(), 2, "none is tried again");
}

#[test]
fn interrupted_sync_in_place_goes_on_the_ring() {
    let mut world = World::new();
    assert_eq!(world.until_it_blocks(100), FIRST);
    *world.during.borrow_mut() = Box::new(|| -libc::EINTR);
    assert!((0..10).all(|_| world.pair()));
    assert_eq!(world.in_place.get(), 11, "each was tried");
}

#[test]
fn worker_with_two_frontends_never_syncs_in_place() {
    let mut world = World::new();
    let (channel, requests, answers) = Channel::on(disk(), world.worker.context());
    let second = world
        .worker
        .add(Box::new(channel), Vec::new())
        .expect("a frontend");
    assert_eq!(world.until_it_blocks(100), 100);
    // Its guest has sent nothing all the time.
    assert!(answers.try_recv().is_err());
    drop(requests);
    world.worker.remove(second, mpsc::channel().0);
    world.serve();
    assert_eq!(world.until_it_blocks(100), FIRST);
}

#[test]
fn worker_never_syncs_in_place_beside_a_second_request() {
    // A second FLUSH waits for its turn, without an op.
    for beside in [Op::Read, Op::Flush] {
        let mut world = World::new();
        assert_eq!(world.until_it_blocks(100), FIRST);
        for _ in 0..100 {
            world.requests.send((beside, 4096)).expect("a frontend");
            world.requests.send((Op::Flush, 0)).expect("a frontend");
            world.serve();
            assert_eq!(world.answers.try_iter().count(), 2);
        }
        assert_eq!(world.in_place.get(), 1);
    }
}
