//! The server of a guest's virtqueues: it sleeps, is stopped, is killed, and is started again.
//!
//! Of a [killed server](crate::server) the guest's memory stays, and in it the marks of what is in flight.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::{Arc, mpsc};

use block::Disk;
use block::canary::{Rule, broken};
use block::worker::{FrontendId, Worker};
use simulator::SECTOR;
use virtio_devices::blk::{BlockDevice, BlockDeviceConfig, BlockQueue, BlockQueueConfig, QueueReport};

use crate::arena::Arena;
use crate::book::Book;
use crate::guest::{Guest, Interrupt, Served};
use crate::plan::{Planned, Virtio};
use crate::run::{Run, without_errors};
use crate::served::{Frontend, served};
use crate::server::{Mishap, Mishaps, Sleepers, revive};
use crate::shape::chain;

/// The offset of the cache mode in the configuration space, in bytes.
const WRITEBACK_AT: u64 = 32;

/// A guest, its memory, and who serves it.
pub(crate) struct Serving {
    virtio: Virtio,
    arena: Rc<RefCell<Arena>>,
    guests: Vec<Guest>,
    queues: Vec<(FrontendId, Arc<QueueReport>)>,
    device: Option<Arc<BlockDevice>>,
    sleepers: Sleepers,
    mishaps: Mishaps,
}

fn text(error: impl std::error::Error) -> String {
    chain(&error)
}

impl Run<'_> {
    /// Starts a guest and its server.
    pub(crate) fn start_guests(&mut self, virtio: Virtio) -> Result<(), String> {
        // A run that failed may have left this thread dead.
        revive();
        let lanes = self.workers.len();
        let arena = Rc::new(RefCell::new(Arena::new(lanes, virtio.size)));
        let guests = (0..lanes).map(|index| {
            let own = |planned: &&Planned| planned.lane == index;
            let plan: VecDeque<Planned> = self.case.plan.iter().filter(own).copied().collect();
            let book = Book::new(self.case.shape, &plan, &self.record);
            let seed = self.case.schedule.wrapping_add(index as u64);
            Guest::new(index, &arena, virtio, book, plan, self.case.depth, seed)
        });
        self.serving = Some(Serving {
            virtio,
            guests: guests.collect(),
            arena,
            queues: Vec::new(),
            device: None,
            sleepers: Sleepers::new(lanes),
            mishaps: Mishaps::new(virtio.kills, virtio.stops),
        });
        self.serve(false)
    }

    /// Offers the disk to the guest; with `recover`, after a server that was killed.
    fn serve(&mut self, recover: bool) -> Result<(), String> {
        let (Some(serving), Some(disk)) = (&mut self.serving, &self.disk) else {
            return Ok(());
        };
        let config = BlockDeviceConfig {
            num_queues: self.workers.len() as u16,
            queue_size: serving.virtio.size,
            serial: "simulated",
        };
        let device = BlockDevice::new(
            served(Arc::clone(disk) as Arc<dyn Disk>, Frontend::Virtio),
            &config,
        )
        .map_err(text)?;
        if serving.virtio.writethrough {
            let features = serving.features(&device);
            device.write_config(WRITEBACK_AT, &[0], features).map_err(text)?;
        }
        serving.device = Some(Arc::new(device));
        serving.queues.clear();
        for index in 0..self.workers.len() {
            self.start_queue(index, self.first_index(), recover)?;
        }
        Ok(())
    }

    fn first_index(&self) -> u16 {
        self.serving.as_ref().map_or(0, |serving| serving.virtio.start)
    }

    /// Starts the device's queue `index`, on a mapping of the guest's memory of its own.
    fn start_queue(&mut self, index: usize, next_available: u16, recover: bool) -> Result<(), String> {
        let Some(Serving {
            virtio,
            arena,
            guests,
            queues,
            device: Some(device),
            sleepers,
            ..
        }) = &mut self.serving
        else {
            return Ok(());
        };
        let Some(disk) = &self.disk else { return Ok(()) };
        let worker = &mut self.workers[index];
        sleepers.wake(index, worker);
        let features = Serving::accepted(virtio, device);
        let wire = guests[index].connect(worker.context(), disk, features);
        let report = Arc::new(QueueReport::default());
        let marks = virtio.kills > 0;
        let mut memory = arena.borrow_mut();
        let config = BlockQueueConfig {
            memory: memory.map(),
            size: virtio.size,
            addresses: Arena::ring_addresses(index),
            next_available,
            inflight: marks.then(|| memory.marks(index, recover)).flatten(),
            log: None,
            features,
            notify: Box::new(Interrupt(Arc::clone(&wire))),
            stats: device.stats().queue(index as u16),
            polled: false,
            report: Arc::clone(&report),
        };
        drop(memory);
        let queue = BlockQueue::start(Arc::clone(device), worker.context(), config);
        let queue = queue.map_err(|error| format!("queue {index} does not start: {}", chain(&error)))?;
        let id = worker
            .add(Box::new(Served { queue, wire }), Vec::new())
            .map_err(text)?;
        if index < queues.len() {
            queues[index] = (id, report);
        } else {
            queues.push((id, report));
        }
        Ok(())
    }

    /// The turn of a worker or, behind those, of a guest. Returns whether it did anything.
    pub(crate) fn take_turn(&mut self, turn: usize) -> Result<bool, String> {
        let count = self.workers.len();
        let Some(serving) = &mut self.serving else {
            return self.take_host_turn(turn);
        };
        if turn >= count {
            return serving.guests[turn - count].turn();
        }
        let wire = serving.guests[turn].wire();
        let (worker, schedule) = (&mut self.workers[turn], &mut self.schedule);
        let sleepers = &mut serving.sleepers;
        sleepers.turn(turn, worker, &self.world, schedule, || wire.kicked.replace(false))
    }

    /// Describes the guests and workers, and what they wait for, when nothing happens any more.
    pub(crate) fn describe_guests(&self) -> String {
        let Some(serving) = &self.serving else {
            return self.describe_host();
        };
        let both = serving.guests.iter().zip(&self.workers).enumerate();
        let each = both.map(|(index, (guest, worker))| {
            let asleep = serving.sleepers.is_asleep(index);
            let state = if asleep { "asleep" } else { "awake" };
            format!(
                "; {guest}, its worker {state} with {} tasks",
                worker.context().tasks()
            )
        });
        each.collect()
    }

    /// Returns the number of workers, guests and queues of the host that take turns.
    pub(crate) fn actors(&self) -> usize {
        let guests = self.serving.as_ref().map_or(0, |serving| serving.guests.len());
        self.workers.len() + guests + self.host_queues()
    }

    /// Checks the rules that hold of the guest's side between two turns.
    pub(crate) fn look_at_guests(&mut self) -> Result<(), String> {
        let Some(serving) = &mut self.serving else {
            return self.look_at_host();
        };
        for guest in &mut serving.guests {
            guest.observe()?;
        }
        serving.arena.borrow_mut().check()
    }

    /// Lets happen to the server what is due.
    pub(crate) fn disturb(&mut self) -> Result<(), String> {
        let (answered, all) = (self.record.borrow().answered, self.case.plan.len() as u64);
        let Some(serving) = &mut self.serving else {
            return self.disturb_host(answered, all);
        };
        match serving.mishaps.due(answered, all, &mut self.schedule) {
            None => return Ok(()),
            Some(Mishap::Kill) => self.kill()?,
            Some(Mishap::Stop) => self.stop_and_start()?,
        }
        if let Some(serving) = &mut self.serving {
            serving.mishaps.quiet = false;
        }
        Ok(())
    }

    /// Removes a queue from its worker, and starts it again on another mapping of the guest's memory.
    fn stop_and_start(&mut self) -> Result<(), String> {
        let index = self.schedule.below(self.workers.len() as u64) as usize;
        let report = self.remove_queues(index..index + 1)?;
        let next_available = report.first().map_or(0, |report| report.next_available());
        self.start_queue(index, next_available, false)
    }

    fn remove_queues(&mut self, which: std::ops::Range<usize>) -> Result<Vec<Arc<QueueReport>>, String> {
        let Some(serving) = &mut self.serving else {
            return Ok(Vec::new());
        };
        let (done, gone) = mpsc::channel();
        let mut reports = Vec::new();
        for index in which {
            let (id, report) = &serving.queues[index];
            let worker = &mut self.workers[index];
            serving.sleepers.wake(index, worker);
            worker.remove(*id, done.clone());
            reports.push(Arc::clone(report));
        }
        drop(done);
        self.drive(move |_| matches!(gone.try_recv(), Err(mpsc::TryRecvError::Disconnected)))?;
        Ok(reports)
    }

    /// The server is gone from one moment to the next; another one comes.
    fn kill(&mut self) -> Result<(), String> {
        let Some(serving) = &mut self.serving else {
            return Ok(());
        };
        for guest in &mut serving.guests {
            guest.lose();
        }
        serving.device = None;
        let count = self.bury(|_| Ok(()))?;
        if let Some(serving) = &mut self.serving {
            serving.sleepers.renew();
        }
        self.workers = (0..count)
            .map(|_| Worker::by_hand(self.world.context(32)))
            .collect();
        self.look_at_guests()?;
        if broken(Rule::InflightClearedEarly) {
            self.unmark_too_many();
        }
        self.world.set_profile(without_errors(self.case.profile));
        {
            let mut record = self.record.borrow_mut();
            record.forgotten |= self.world.faults().sync.is_some();
            record.server_since = self.world.time();
            record.leaks.kill();
        }
        self.open()?;
        self.note_size()?;
        self.world.set_profile(self.case.profile);
        self.serve(true)
    }

    /// Removes marks as a server leaves them that unmarks chains before their answers are published.
    fn unmark_too_many(&self) {
        let Some(serving) = &self.serving else { return };
        for (index, guest) in serving.guests.iter().enumerate() {
            if let Some(head) = guest.first_head() {
                serving.arena.borrow().unmark(index, head);
            }
        }
    }

    /// A disk that the dead server was making larger may have grown. What the guest was told of has.
    fn note_size(&mut self) -> Result<(), String> {
        let bytes = self.disk.as_ref().map_or(0, |disk| disk.info().size_bytes);
        let mut record = self.record.borrow_mut();
        let sectors = bytes / SECTOR as u64;
        if sectors < record.sectors {
            let known = record.sectors;
            return Err(format!(
                "a disk of {known} sectors has {sectors} with the next server"
            ));
        }
        record.sectors = sectors;
        Ok(())
    }

    /// Ends guest and server, once all is answered.
    pub(crate) fn end_guests(&mut self) -> Result<(), String> {
        if let Some(serving) = &mut self.serving {
            serving.mishaps.quiet = true;
        }
        revive();
        let reports = self.remove_queues(0..self.workers.len())?;
        let Some(serving) = &mut self.serving else {
            return Ok(());
        };
        for (index, (guest, report)) in serving.guests.iter_mut().zip(&reports).enumerate() {
            let (next, expected) = (report.next_available(), guest.available());
            if next != expected {
                return Err(format!(
                    "queue {index} was removed with {next} as the next index, expected {expected}"
                ));
            }
            guest.disconnect();
        }
        serving.device = None;
        self.drive(|run| run.workers.iter().all(|worker| worker.context().tasks() == 0))?;
        self.look_at_guests()?;
        let serving = self.serving.take();
        if serving.is_some_and(|serving| !serving.arena.borrow().is_let_go()) {
            return Err("guest memory is still mapped after its queues were removed".to_owned());
        }
        Ok(())
    }
}

impl Serving {
    fn features(&self, device: &BlockDevice) -> u64 {
        Self::accepted(&self.virtio, device)
    }

    /// The feature bits that the driver accepts.
    fn accepted(virtio: &Virtio, device: &BlockDevice) -> u64 {
        let without = |on: bool, bit: u32| if on { 0 } else { 1_u64 << bit };
        device.features() & !without(virtio.event_idx, 29) & !without(virtio.indirect, 28)
    }
}
