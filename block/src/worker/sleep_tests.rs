//! The number of times that a worker calls the kernel.

use std::cell::RefCell;
use std::rc::Rc;

use super::*;
use crate::request::{CompletionSink, Op, Request};
use crate::ring::counting::CountingDriver;
use crate::ring::driver::Wait;
use crate::ring::{FileHandle, Ring};

/// A frontend whose requests are the ends of ops, and whose answers are the next ops: none of it comes from elsewhere. After
/// so many it has its worker end.
struct Loop {
    ring: Ring,
    file: FileHandle,
    sink: Rc<CompletionSink>,
    taken: usize,
    left: usize,
    through_ring: bool,
    commands: Arc<Commands>,
}

impl Loop {
    fn start(&self) {
        let op = Request::new(Op::Flush, 0, 0, crate::Buffer::default(), &self.sink, 0);
        assert!(self.ring.submit_request(&self.file, 0, op).is_ok());
    }

    fn end(&self) {
        let last: Command = Box::new(|worker| worker.remove(FrontendId(0), mpsc::channel().0));
        self.commands.list.lock().push(last);
        self.commands.waiting.store(true, Ordering::SeqCst);
        self.commands.stop.store(true, Ordering::SeqCst);
    }
}

impl Frontend for Loop {
    fn poll(&mut self) -> bool {
        let mut ended = Vec::new();
        self.sink.drain_into(&mut ended);
        self.taken += ended.len();
        !ended.is_empty()
    }
    fn publish(&mut self) -> bool {
        let answers = std::mem::take(&mut self.taken);
        for _ in 0..answers {
            self.left -= 1;
            match self.left {
                0 => self.end(),
                _ => self.start(),
            }
        }
        answers > 0
    }
    fn prepare_sleep(&mut self) -> bool {
        !self.sink.is_empty()
    }
    fn end_sleep(&mut self) {}
    fn comes_through_ring(&self) -> bool {
        self.through_ring
    }
    fn in_flight(&self) -> usize {
        self.left
    }
}

/// A worker that never polls, and its calls of the kernel.
fn worker(commands: &Arc<Commands>) -> (Worker, Rc<RefCell<Vec<Wait>>>) {
    let driver = CountingDriver::default();
    let calls = Rc::clone(&driver.calls);
    let ring = Ring::with_driver(Box::new(driver), 16, 0);
    let poll = PollTime::up_to(Duration::ZERO);
    (Worker::new(Context::on(ring), Arc::clone(commands), poll), calls)
}

/// Returns the number of kernel calls for 100 ops, each begun when the one before has ended.
fn calls(through_ring: bool) -> usize {
    let commands: Arc<Commands> = Arc::default();
    let (mut worker, calls) = worker(&commands);
    let ring = worker.context().ring().clone();
    let file = tempfile::tempfile().expect("a file");
    let frontend = Loop {
        file: ring.register(file.into()).expect("a file"),
        ring,
        sink: CompletionSink::new(),
        taken: 0,
        left: 100,
        through_ring,
        commands,
    };
    frontend.start();
    worker.add(Box::new(frontend), Vec::new()).expect("a frontend");
    worker.serve().expect("the ring goes on");
    calls.borrow().len()
}

/// The call that starts an answer also waits for the next request.
#[test]
fn ring_frontend_costs_one_call_per_op() {
    // The first op is started before the first round has done anything.
    assert_eq!(calls(true), 101);
}

/// Requests that do not arrive as ring completions cost a second call for each op.
#[test]
fn other_frontend_is_polled_once_more_before_sleep() {
    assert_eq!(calls(false), 200);
}

/// A frontend that publishes one answer in each round.
struct Slow(usize);

impl Frontend for Slow {
    fn poll(&mut self) -> bool {
        false
    }
    fn publish(&mut self) -> bool {
        self.0 -= 1;
        true
    }
    fn prepare_sleep(&mut self) -> bool {
        true
    }
    fn end_sleep(&mut self) {}
    fn comes_through_ring(&self) -> bool {
        true
    }
    fn in_flight(&self) -> usize {
        self.0
    }
}

#[test]
fn worker_does_not_sleep_with_a_frontend_to_remove() {
    let commands: Arc<Commands> = Arc::default();
    let (mut worker, _) = worker(&commands);
    let id = worker.add(Box::new(Slow(5)), Vec::new()).expect("a frontend");
    let (done, gone) = mpsc::channel();
    worker.remove(id, done);
    commands.stop.store(true, Ordering::SeqCst);
    worker.serve().expect("the ring goes on");
    assert!(gone.recv().is_err(), "it was let go of");
}
