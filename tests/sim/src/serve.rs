//! The server of a guest's virtqueues: it sleeps, is stopped, is killed, and is started again.
//!
//! A killed server's memory is gone, and with it what it had not written to the image's file; what it had asked the
//! host to do is done, or given up before it began. The file as readers see it stays, and so do the guest's memory and
//! the marks of what is in flight. The next server starts when the last I/O of the dead one has ended, as the
//! image's lock has it.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::{Arc, mpsc};

use block::Disk;
use block::worker::{FrontendId, Worker};
use virtio_devices::block::{BlockDevice, BlockDeviceConfig, BlockQueue, BlockQueueConfig, QueueReport};

use crate::arena::Arena;
use crate::guest::{Guest, Interrupt, Served};
use crate::lane::Book;
use crate::plan::{Planned, Virtio};
use crate::run::{Run, without_errors};
use crate::shape::chain;

/// Where the cache mode is in the configuration space.
const WRITEBACK_AT: u64 = 32;

/// A guest, its memory, and who serves it.
pub(crate) struct Serving {
    virtio: Virtio,
    arena: Rc<RefCell<Arena>>,
    guests: Vec<Guest>,
    queues: Vec<(FrontendId, Arc<QueueReport>)>,
    device: Option<Arc<BlockDevice>>,
    /// Workers that sleep.
    asleep: Vec<bool>,
    /// Workers that found nothing to do in their last turn.
    idle: Vec<bool>,
    /// The first worker's number in the world.
    first_context: u32,
    /// Nothing happens to the server just now.
    quiet: bool,
    kills: u32,
    stops: u32,
    /// So many turns until what is due happens.
    delay: Option<u64>,
    /// It is being killed, between two stores.
    dying: bool,
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
            asleep: vec![false; lanes],
            idle: vec![false; lanes],
            first_context: 0,
            quiet: false,
            kills: 0,
            stops: 0,
            delay: None,
            dying: false,
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
        let device = BlockDevice::new(Arc::clone(disk) as Arc<dyn Disk>, &config).map_err(text)?;
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
            asleep,
            idle,
            ..
        }) = &mut self.serving
        else {
            return Ok(());
        };
        let Some(disk) = &self.disk else { return Ok(()) };
        let worker = &mut self.workers[index];
        wake(worker, &mut asleep[index], &mut idle[index]);
        let features = Serving::accepted(virtio, device);
        let wire = guests[index].connect(worker.context(), disk, features);
        let report = Arc::new(QueueReport::default());
        let marks = virtio.kills > 0;
        let mut memory = arena.borrow_mut();
        let config = BlockQueueConfig {
            memory: memory.map(),
            size: virtio.size,
            addresses: Arena::rings(index),
            next_available,
            inflight: marks.then(|| memory.marks(index, recover)).flatten(),
            features,
            notify: Box::new(Interrupt(Arc::clone(&wire))),
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
            return self.workers[turn].round().map_err(text);
        };
        if turn >= count {
            return serving.guests[turn - count].turn();
        }
        let worker = &mut self.workers[turn];
        if serving.asleep[turn] {
            let kicked = serving.guests[turn].wire().kicked.replace(false);
            let context = serving.first_context + turn as u32;
            if !(kicked || worker.is_woken() || self.world.has_completion(context)) {
                return Ok(false);
            }
            worker.end_sleep();
            serving.asleep[turn] = false;
        }
        // It goes to sleep some time after it has found nothing: meanwhile others have had their turns.
        if std::mem::take(&mut serving.idle[turn]) && self.schedule.one_in(2) {
            serving.asleep[turn] = worker.prepare_sleep();
            if !serving.asleep[turn] {
                worker.end_sleep();
            }
            return Ok(false);
        }
        let worked = worker.round().map_err(text)?;
        serving.idle[turn] = !worked;
        Ok(worked)
    }

    /// Who waits for what, when nothing happens any more.
    pub(crate) fn describe_guests(&self) -> String {
        let Some(serving) = &self.serving else {
            return String::new();
        };
        let both = serving.guests.iter().zip(&serving.asleep).zip(&self.workers);
        let each = both.map(|((guest, asleep), worker)| {
            let state = if *asleep { "asleep" } else { "awake" };
            format!(
                "; {guest}, its worker {state} with {} tasks",
                worker.context().tasks()
            )
        });
        each.collect()
    }

    /// How many take turns.
    pub(crate) fn actors(&self) -> usize {
        let guests = self.serving.as_ref().map_or(0, |serving| serving.guests.len());
        self.workers.len() + guests
    }

    /// What must hold of the guest's side between two turns.
    pub(crate) fn look_at_guests(&mut self) -> Result<(), String> {
        let Some(serving) = &mut self.serving else {
            return Ok(());
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
            return Ok(());
        };
        if serving.quiet {
            return Ok(());
        }
        let Virtio { kills, stops, .. } = serving.virtio;
        // Spread over the run.
        let to_kill =
            serving.kills < kills && answered * u64::from(kills + 1) >= all * u64::from(serving.kills + 1);
        let to_stop = serving.stops < stops
            && answered * u64::from(2 * stops) >= all * u64::from(2 * serving.stops + 1);
        if !to_kill && !to_stop {
            return Ok(());
        }
        let delay = *serving.delay.get_or_insert_with(|| self.schedule.below(40));
        let is_dead = serving.dying && is_killed();
        if delay > 0 && !is_dead {
            serving.delay = Some(delay - 1);
            return Ok(());
        }
        if to_kill && !serving.dying {
            serving.dying = true;
            if kill_after(self.schedule.below(12)) {
                // It dies at one of its next stores, or after so many turns.
                serving.delay = Some(100);
                return Ok(());
            }
        }
        serving.delay = None;
        serving.dying = false;
        serving.quiet = true;
        if to_kill {
            serving.kills += 1;
            self.kill()?;
        } else {
            serving.stops += 1;
            self.stop_and_start()?;
        }
        if let Some(serving) = &mut self.serving {
            serving.quiet = false;
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
            wake(worker, &mut serving.asleep[index], &mut serving.idle[index]);
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
            guest.wire().dead.set(true);
            guest.disconnect();
        }
        serving.device = None;
        self.disk = None;
        self.world.kill_process();
        while self.world.step() {
            self.cut_if_changed()?;
        }
        // Nothing of this has an effect: it only lets go of what a process has.
        let mut dead = std::mem::take(&mut self.workers);
        let mut rounds = 0;
        while dead.iter().any(|worker| {
            let cx = worker.context();
            cx.tasks() > 0 || cx.ring().in_flight() > 0
        }) {
            rounds += 1;
            if rounds > 10_000 {
                return Err("tasks of a killed server do not end".to_owned());
            }
            for worker in &mut dead {
                worker.round().map_err(text)?;
            }
        }
        let count = dead.len();
        drop(dead);
        revive();

        if let Some(serving) = &mut self.serving {
            serving.first_context += count as u32;
            serving.asleep = vec![false; count];
            serving.idle = vec![false; count];
        }
        self.workers = (0..count)
            .map(|_| Worker::by_hand(self.world.context(32)))
            .collect();
        self.look_at_guests()?;
        self.world.set_profile(without_errors(self.case.profile));
        self.open()?;
        self.world.set_profile(self.case.profile);
        self.serve(true)
    }

    /// Ends guest and server, once all is answered.
    pub(crate) fn end_guests(&mut self) -> Result<(), String> {
        if let Some(serving) = &mut self.serving {
            serving.quiet = true;
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

/// A worker that is told to do something has another round before it sleeps.
fn wake(worker: &mut Worker, asleep: &mut bool, idle: &mut bool) {
    if std::mem::take(asleep) {
        worker.end_sleep();
    }
    *idle = false;
}

/// Kills what this thread plays at its store number `stores` from here on; `false` if that cannot be done, and it is to
/// die at once.
#[cfg(feature = "canary")]
fn kill_after(stores: u64) -> bool {
    block::canary::kill_after(Some(stores));
    true
}

/// `false`: only a special build can be killed between two stores.
#[cfg(not(feature = "canary"))]
fn kill_after(_stores: u64) -> bool {
    false
}

#[cfg(feature = "canary")]
fn is_killed() -> bool {
    block::canary::is_killed()
}

#[cfg(not(feature = "canary"))]
fn is_killed() -> bool {
    false
}

/// What is played from here on is another process.
fn revive() {
    #[cfg(feature = "canary")]
    block::canary::kill_after(None);
}
