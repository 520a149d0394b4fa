//! Two workers of a disk in the simulated world, turned by hand while others' operations are held.

#![allow(dead_code, reason = "each test uses its part of this module")]

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use block::{Buffer, Context, Disk, DiskQueue, Done, Op, Request};
use qcow::{OpenOptions, QcowDisk};
use simulator::{Profile, SimWorld};

/// The place of a task's output, once it has ended.
pub(crate) type Slot<T> = Rc<RefCell<Option<T>>>;

/// Two workers with a queue each.
pub(crate) struct Workers {
    world: SimWorld,
    each: Vec<(Context, Box<dyn DiskQueue>)>,
}

impl Workers {
    /// Opens the image `name` of a world whose I/O takes time from then on.
    pub(crate) fn open(world: &SimWorld, name: &str, options: &OpenOptions) -> (Arc<QcowDisk>, Self) {
        let cx = world.context(64);
        let disk = cx.block_on(QcowDisk::open_on(&cx, world, Path::new(name), options));
        let disk = disk.expect("nothing waits for ever").expect("a disk");
        let workers = Self::new(world, &disk);
        world.set_profile(Profile::default());
        // The first change would sync the image otherwise, before the op that a test holds or fails.
        let flushed = workers.ask(0, Op::Flush, 0, 0, Buffer::default());
        flushed.take().expect("an answer").result.expect("a FLUSH");
        (disk, workers)
    }

    /// Ends the workers and closes their disk, the image `name`. Returns its world, whose image has no flaw.
    #[track_caller]
    pub(crate) fn close(self, disk: &Arc<QcowDisk>, name: &str) -> SimWorld {
        let Self { world, each } = self;
        drop(each);
        crate::closing::close(&world, &world.context(64), disk, name, "closed");
        world
    }

    pub(crate) fn new(world: &SimWorld, disk: &Arc<QcowDisk>) -> Self {
        let each = (0..2).map(|_| {
            let cx = world.context(64);
            let queue = Arc::clone(disk).open_queue(&cx).expect("a queue");
            (cx, queue)
        });
        Self {
            each: each.collect(),
            world: world.clone(),
        }
    }

    pub(crate) fn context(&self, worker: usize) -> &Context {
        &self.each[worker].0
    }

    /// Submits a request, and turns until only what is held is under way.
    pub(crate) fn ask(&self, worker: usize, op: Op, offset: u64, len: u64, buffer: Buffer) -> Slot<Done> {
        let (request, answer) = Request::local(op, offset, len, buffer);
        self.each[worker].1.submit(request);
        self.run(worker, answer)
    }

    /// Starts a task on a worker, and turns until only what is held is under way.
    pub(crate) fn run<T: 'static>(&self, worker: usize, task: impl Future<Output = T> + 'static) -> Slot<T> {
        let place = Slot::default();
        let put = Rc::clone(&place);
        self.context(worker).spawn(async move {
            *put.borrow_mut() = Some(task.await);
        });
        self.settle();
        place
    }

    /// Turns until only what is held is under way.
    pub(crate) fn settle(&self) {
        let mut idle = 0;
        while idle < 16 {
            for (cx, _) in &self.each {
                cx.run_ready();
                cx.ring().turn(false).expect("the ring turns");
                cx.run_ready();
            }
            idle = if self.world.step() { 0 } else { idle + 1 };
        }
    }
}
