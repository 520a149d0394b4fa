//! The server of a ublk device: production queues on a [model](virtio_devices::ublk::model) of the driver.
//!
//! A [killed server](crate::server)'s requests are the driver's again, which gives them to the next one or fails them.
//! One that hands over is given nothing new, answers what it has, closes the disk and goes.
//!
//! What must stay true: nobody is given a request before the last op of every server before has ended.

use std::cell::Cell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError, mpsc};

use block::sim::SimWorld;
use block::sim::pages::Tags;
use block::worker::{Frontend, FrontendId, Worker};
use block::{Context, Disk, IoError};
use virtio_devices::ublk::model::{Model, ModelChannel};
use virtio_devices::ublk::{Events, QueueEvent, QueueState, Transport, UblkQueue};

use crate::block_layer::HostQueue;
use crate::lane::Book;
use crate::places::PLACE_BYTES;
use crate::plan::{Planned, Ublk};
use crate::run::{Run, Slot, without_errors};
use crate::server::{Mishap, Mishaps, Sleepers, revive};
use crate::shape::chain;

/// A worker's context, with places for registered pages if the device has them.
pub(crate) fn context(world: &SimWorld, ublk: &Ublk) -> (Context, Option<Rc<Tags>>) {
    if ublk.transport != Transport::ZeroCopy {
        return (world.context(32), None);
    }
    // Their first byte is called 0, as the driver has it.
    let (cx, tags) = world.context_with_tags(32, ublk.places, PLACE_BYTES, true);
    (cx, Some(Rc::new(tags)))
}

/// A queue of the production server, until its process is killed.
#[derive(Debug)]
struct Mortal {
    queue: UblkQueue<ModelChannel>,
    dead: Rc<Cell<bool>>,
}

impl Frontend for Mortal {
    fn poll(&mut self) -> bool {
        !self.dead.get() && self.queue.poll()
    }

    fn publish(&mut self) -> bool {
        !self.dead.get() && self.queue.publish()
    }

    fn prepare_sleep(&mut self) -> bool {
        !self.dead.get() && self.queue.prepare_sleep()
    }

    fn end_sleep(&mut self) {
        if !self.dead.get() {
            self.queue.end_sleep();
        }
    }

    fn in_flight(&self) -> usize {
        match self.dead.get() {
            true => 0,
            false => self.queue.in_flight(),
        }
    }
}

/// What the server has of a queue.
#[derive(Debug)]
struct Served {
    id: FrontendId,
    state: Arc<QueueState>,
}

/// A host with a ublk device, and who serves it.
pub(crate) struct Host {
    ublk: Ublk,
    queues: Vec<HostQueue>,
    served: Vec<Served>,
    /// The server that is there now was killed.
    dead: Rc<Cell<bool>>,
    sleepers: Sleepers,
    mishaps: Mishaps,
    /// What a queue has complained about.
    broken: Arc<Mutex<Option<String>>>,
}

impl Run<'_> {
    /// Makes a device of the disk.
    pub(crate) fn start_host(&mut self, ublk: Ublk) -> Result<(), String> {
        // A run that failed may have left this thread dead.
        revive();
        let queues = (0..self.workers.len()).map(|index| {
            let own = |planned: &&Planned| planned.lane == index;
            let plan: VecDeque<Planned> = self.case.plan.iter().filter(own).copied().collect();
            let book = Book::new(self.case.shape, &plan, &self.record);
            let seed = self.case.schedule.wrapping_add(index as u64);
            let model = match ublk.transport {
                Transport::Copy => Model::in_copy_mode(ublk.depth),
                _ => Model::new(ublk.depth),
            };
            model.set_recovery(ublk.recovery);
            model.shuffle(!seed);
            HostQueue::new(index, model, ublk, book, plan, self.case.depth, seed)
        });
        self.host = Some(Host {
            ublk,
            queues: queues.collect(),
            served: Vec::new(),
            dead: Rc::default(),
            sleepers: Sleepers::new(self.workers.len()),
            mishaps: Mishaps::new(ublk.kills, ublk.handovers),
            broken: Arc::default(),
        });
        self.serve_host()
    }

    /// Serves the device, which nobody does: fetches under all tags, and then gets what waits.
    fn serve_host(&mut self) -> Result<(), String> {
        let (Some(host), Some(disk)) = (&mut self.host, &self.disk) else {
            return Ok(());
        };
        let ublk = host.ublk;
        host.served.clear();
        host.dead = Rc::default();
        for ((worker, tags), queue) in self.workers.iter_mut().zip(&self.tags).zip(&mut host.queues) {
            let cx = worker.context().clone();
            if let Some(tags) = tags {
                queue.model().register_with(tags, ublk.places);
            }
            let opened = Arc::clone(disk).open_queue(&cx).map_err(|error| chain(&error))?;
            let broken = Arc::clone(&host.broken);
            let events: Events = Arc::new(move |event| {
                if let QueueEvent::Broken { what, .. } = event {
                    *broken.lock().unwrap_or_else(PoisonError::into_inner) = Some(what);
                }
            });
            let state = QueueState::new(0, events);
            let from = (ublk.transport == Transport::ZeroCopy).then_some(ublk.zero_copy_from);
            let frontend = UblkQueue::start(
                queue.model().channel(0),
                opened,
                ublk.depth,
                ublk.io_bytes_max,
                from,
                Arc::clone(&state),
            );
            let mortal = Mortal {
                queue: frontend,
                dead: Rc::clone(&host.dead),
            };
            let id = worker.add(Box::new(mortal), Vec::new());
            let id = id.map_err(|error| chain(&error))?;
            host.served.push(Served { id, state });
            queue.set_server(Some((cx, Arc::clone(disk))));
        }
        for queue in &host.queues {
            queue.model().end_recovery();
        }
        Ok(())
    }

    /// The turn of a worker or, behind those, of a queue of the host's. Returns whether it did anything.
    pub(crate) fn take_host_turn(&mut self, turn: usize) -> Result<bool, String> {
        let count = self.workers.len();
        let Some(host) = &mut self.host else {
            return self.workers[turn].round().map_err(|error| chain(&error));
        };
        if turn >= count {
            return host.queues[turn - count].turn();
        }
        let (worker, schedule) = (&mut self.workers[turn], &mut self.schedule);
        let model = host.queues[turn].model();
        host.sleepers
            .turn(turn, worker, &self.world, schedule, || model.has_results())
    }

    /// How many queues of the host's take turns.
    pub(crate) fn host_queues(&self) -> usize {
        self.host.as_ref().map_or(0, |host| host.queues.len())
    }

    /// Who waits for what, when nothing happens any more.
    pub(crate) fn describe_host(&self) -> String {
        let Some(host) = &self.host else {
            return String::new();
        };
        let each = host.queues.iter().zip(&host.served).map(|(queue, served)| {
            let waiting = if queue.model().has_results() {
                ", results waiting"
            } else {
                ""
            };
            format!("; {queue}, {} tags of the server{waiting}", served.state.tags())
        });
        each.collect()
    }

    /// What must hold of the host's side between two turns.
    pub(crate) fn look_at_host(&mut self) -> Result<(), String> {
        let Some(host) = &mut self.host else {
            return Ok(());
        };
        for queue in &mut host.queues {
            queue.observe()?;
        }
        let broken = host.broken.lock().unwrap_or_else(PoisonError::into_inner).take();
        broken.map_or(Ok(()), |what| Err(format!("a queue is broken: {what}")))
    }

    /// Lets happen to the server what is due.
    pub(crate) fn disturb_host(&mut self, answered: u64, all: u64) -> Result<(), String> {
        let Some(host) = &mut self.host else {
            return Ok(());
        };
        match host.mishaps.due(answered, all, &mut self.schedule) {
            None => return Ok(()),
            Some(Mishap::Kill) => self.kill_host()?,
            Some(Mishap::Stop) => self.hand_over()?,
        }
        if let Some(host) = &mut self.host {
            host.mishaps.quiet = false;
        }
        Ok(())
    }

    /// The server is gone from one moment to the next; another one comes.
    fn kill_host(&mut self) -> Result<(), String> {
        let Some(host) = &mut self.host else {
            return Ok(());
        };
        host.dead.set(true);
        host.served.iter().for_each(|served| served.state.abandon());
        let hasty = host.ublk.hasty;
        self.record.borrow_mut().reached.kills += 1;
        if hasty {
            self.lose_server();
        }
        // The host goes on.
        self.bury(|run| {
            let turn = run.schedule.below(4 * run.host_queues() as u64) as usize;
            if let Some(queue) = run.host.as_mut().and_then(|host| host.queues.get_mut(turn)) {
                queue.turn()?;
            }
            run.look_at_host()
        })?;
        if !hasty {
            self.lose_server();
        }
        self.next_server()
    }

    /// The driver notices that there is no server any more.
    fn lose_server(&mut self) {
        let Some(host) = &mut self.host else { return };
        let reached = &mut self.record.borrow_mut().reached;
        for (queue, served) in host.queues.iter_mut().zip(&host.served) {
            queue.set_server(None);
            reached.lost += queue.model().server_gone() as u64;
            let counts = served.state.counts();
            reached.zero_copied += counts.zero_copied;
            reached.copied += counts.copied;
            reached.fallbacks += counts.fallbacks;
        }
    }

    /// The server is told to go, and the next one waits for it.
    fn hand_over(&mut self) -> Result<(), String> {
        let Some(host) = &mut self.host else {
            return Ok(());
        };
        self.record.borrow_mut().reached.handovers += 1;
        host.queues.iter().for_each(|queue| queue.model().quiesce());
        self.remove_host_queues()?;
        let slot: Slot<Result<(), IoError>> = Rc::default();
        let disk = self.disk.clone().ok_or("no disk")?;
        let (task_cx, place) = (self.workers[0].context().clone(), Rc::clone(&slot));
        self.workers[0].context().spawn(async move {
            let closed = disk.close(&task_cx).await;
            *place.borrow_mut() = Some(closed);
        });
        // If the disk cannot be closed, it is as if the server had been killed.
        let closed = self.wait_for(&slot)?.is_ok() && self.schedule.one_in(2);
        if closed {
            self.drive(|run| run.workers.iter().all(|worker| worker.context().tasks() == 0))?;
        }
        self.lose_server();
        self.bury(Run::look_at_host)?;
        self.next_server()
    }

    /// A server that recovers the device.
    fn next_server(&mut self) -> Result<(), String> {
        if let Some(host) = &mut self.host {
            host.sleepers.renew();
            for index in 0..host.queues.len() {
                let (cx, tags) = context(&self.world, &host.ublk);
                self.workers.push(Worker::by_hand(cx));
                self.tags[index] = tags;
            }
        }
        self.look_at_host()?;
        self.world.set_profile(without_errors(self.case.profile));
        self.open()?;
        self.world.set_profile(self.case.profile);
        self.serve_host()
    }

    /// Removes the queues from their workers; all tags must have been ended.
    fn remove_host_queues(&mut self) -> Result<(), String> {
        let Some(host) = &mut self.host else {
            return Ok(());
        };
        let (done, gone) = mpsc::channel();
        for (index, served) in host.served.iter().enumerate() {
            let worker = &mut self.workers[index];
            host.sleepers.wake(index, worker);
            worker.remove(served.id, done.clone());
        }
        drop(done);
        self.drive(move |_| matches!(gone.try_recv(), Err(mpsc::TryRecvError::Disconnected)))?;
        let left = self.host.iter().flat_map(|host| &host.served);
        match left.map(|served| served.state.tags()).sum() {
            0 => Ok(()),
            tags => Err(format!("queues were removed while {tags} of their tags wait")),
        }
    }

    /// Stops the device, once all is answered.
    pub(crate) fn end_host(&mut self) -> Result<(), String> {
        let Some(host) = &mut self.host else {
            return Ok(());
        };
        host.mishaps.quiet = true;
        revive();
        host.queues.iter().for_each(|queue| queue.model().quiesce());
        self.remove_host_queues()?;
        self.lose_server();
        self.drive(|run| run.workers.iter().all(|worker| worker.context().tasks() == 0))?;
        self.look_at_host()?;
        self.host = None;
        Ok(())
    }
}
