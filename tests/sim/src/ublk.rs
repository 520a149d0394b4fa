//! The server of a ublk device: production queues on a [model](virtio_devices::ublk::model) of the driver.
//!
//! A [killed server](crate::server)'s requests are the driver's again, which gives them to the next server or fails
//! them. Other servers [hand over](crate::hand_over). Several queues may share a worker, its ring and the ring's buffer
//! table.
//!
//! Invariant: no server is given a request before the last op of every earlier server has ended.

use std::cell::Cell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError, mpsc};

use block::canary::{Rule, broken};
use block::worker::{Frontend, FrontendId, Worker};
use block::{Context, Disk};
use simulator::SimWorld;
use simulator::pages::Tags;
use virtio_devices::ublk::model::{Model, ModelChannel, RingTable};
use virtio_devices::ublk::{Duty, Events, QueueEvent, QueueState, Transport, UblkQueue, first_slot};

use crate::block_layer::HostQueue;
use crate::book::Book;
use crate::places::PLACE_BYTES;
use crate::plan::{Planned, Ublk};
use crate::run::{Run, without_errors};
use crate::served::{self, served};
use crate::server::{Mishap, Mishaps, Sleepers, revive};
use crate::shape::chain;

/// The context of a worker with so many queues, and places for registered pages if the device has them.
pub(crate) fn context(world: &SimWorld, ublk: &Ublk, queues: usize) -> (Context, Option<Rc<Tags>>) {
    if ublk.transport != Transport::ZeroCopy {
        return (world.context(32), None);
    }
    // Their first byte is called 0, as the driver has it.
    let places = ublk.places * queues as u16;
    let (cx, tags) = world.context_with_tags(32, places, PLACE_BYTES, true);
    (cx, Some(Rc::new(tags)))
}

/// Returns the number of queues of each worker, for a device with `queues` queues.
pub(crate) fn shares(ublk: &Ublk, queues: usize) -> impl Iterator<Item = usize> {
    let each = usize::from(ublk.queues_per_worker);
    (0..queues)
        .step_by(each)
        .map(move |first| each.min(queues - first))
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
        !self.dead.get() && self.queue.prepare_sleep() && !broken(Rule::UblkSleepsOnAnswers)
    }

    fn end_sleep(&mut self) {
        if !self.dead.get() {
            self.queue.end_sleep();
        }
    }

    fn comes_through_ring(&self) -> bool {
        self.queue.comes_through_ring()
    }

    fn in_flight(&self) -> usize {
        match self.dead.get() {
            true => 0,
            false => self.queue.in_flight(),
        }
    }
}

/// The server's side of a queue.
#[derive(Debug)]
pub(crate) struct Served {
    id: FrontendId,
    pub(crate) state: Arc<QueueState>,
    /// The number of errors that it had answered when it was last given a duty.
    pub(crate) errors: Option<u64>,
}

/// A command that a worker carries out between two rounds.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Command {
    /// Nothing: who has told it knows that a round has ended, and another one begins.
    Nothing,
    /// To give a queue of its another duty.
    Duty { queue: usize, duty: Duty },
}

/// A host with a ublk device, and who serves it.
pub(crate) struct Host {
    pub(crate) ublk: Ublk,
    pub(crate) queues: Vec<HostQueue>,
    pub(crate) served: Vec<Served>,
    /// By worker.
    commands: Vec<Option<Command>>,
    /// A server has died, and perhaps left space that nobody has.
    pub(crate) may_leak: bool,
    /// Nobody asks anything.
    pub(crate) is_idle: bool,
    /// The server that is there now was killed.
    dead: Rc<Cell<bool>>,
    sleepers: Sleepers,
    mishaps: Mishaps,
    /// The complaint of a queue that is broken.
    broken: Arc<Mutex<Option<String>>>,
}

impl Run<'_> {
    /// Makes a device of the disk.
    pub(crate) fn start_host(&mut self, ublk: Ublk) -> Result<(), String> {
        // A run that failed may have left this thread dead.
        revive();
        let queues = (0..self.case.lanes).map(|index| {
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
            commands: vec![None; self.workers.len()],
            may_leak: false,
            is_idle: false,
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
        let queues = host.queues.len();
        let tables = self.tags.iter().zip(shares(&ublk, queues)).map(|(tags, share)| {
            let places = ublk.places * share as u16;
            tags.as_ref().map(|tags| RingTable::new(tags, places))
        });
        let tables: Vec<Option<RingTable>> = tables.collect();
        for (number, queue) in (0..).zip(&mut host.queues) {
            let index = usize::from(number / ublk.queues_per_worker);
            let worker = &mut self.workers[index];
            let cx = worker.context().clone();
            if let Some(table) = &tables[index] {
                queue.model().register_with(table);
            }
            let opened = served(Arc::clone(disk) as Arc<dyn Disk>, served::Frontend::Ublk)
                .open_queue(&cx)
                .map_err(|error| chain(&error))?;
            let broken = Arc::clone(&host.broken);
            let events: Events = Arc::new(move |event| {
                if let QueueEvent::Broken { what, .. } = event {
                    *broken.lock().unwrap_or_else(PoisonError::into_inner) = Some(what);
                }
            });
            let state = QueueState::new(0, events);
            let from = (ublk.transport == Transport::ZeroCopy).then_some(ublk.zero_copy_from);
            let frontend = UblkQueue::start(
                &cx,
                queue
                    .model()
                    .channel(first_slot(number, ublk.queues_per_worker, ublk.depth)),
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
            host.served.push(Served {
                id,
                state,
                errors: None,
            });
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
            return if host.is_idle {
                Ok(false)
            } else {
                host.queues[turn - count].turn()
            };
        }
        if let Some(Command::Duty { queue, duty }) = host.commands[turn].take() {
            let served = &mut host.served[queue];
            served.errors = Some(served.state.counts().errors);
            // A queue that serves on whatever it is told.
            let serves_on = duty == Duty::Keep && broken(Rule::UblkServesOn);
            served
                .state
                .set_duty(if serves_on { Duty::FinishWell } else { duty });
        }
        let (worker, schedule) = (&mut self.workers[turn], &mut self.schedule);
        let each = usize::from(host.ublk.queues_per_worker);
        let own = &host.queues[turn * each..((turn + 1) * each).min(host.queues.len())];
        let has_news = || own.iter().any(|queue| queue.model().has_results());
        host.sleepers.turn(turn, worker, &self.world, schedule, has_news)
    }

    /// The worker that has a queue.
    pub(crate) fn worker_of(&self, queue: usize) -> usize {
        let each = self.host.as_ref().map_or(1, |host| host.ublk.queues_per_worker);
        queue / usize::from(each)
    }

    /// Tells a worker something, and waits until it has done it.
    pub(crate) fn command(&mut self, worker: usize, command: Command) -> Result<(), String> {
        let Some(host) = &mut self.host else {
            return Ok(());
        };
        host.commands[worker] = Some(command);
        // Its next turn is a round.
        host.sleepers.wake(worker, &mut self.workers[worker]);
        let pending = |run: &Self| {
            run.host
                .as_ref()
                .is_some_and(|host| host.commands[worker].is_some())
        };
        self.drive(|run| !pending(run))
    }

    /// Returns the number of the host's queues, which take turns.
    pub(crate) fn host_queues(&self) -> usize {
        self.host.as_ref().map_or(0, |host| host.queues.len())
    }

    /// Describes the host's queues, and what they wait for, when nothing happens any more.
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

    /// Checks the rules that hold of the host's side between two turns.
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
        if let Some(host) = &mut self.host {
            host.may_leak = true;
        }
        let lost = self.end_process()?;
        let mut record = self.record.borrow_mut();
        record.reached.kills += 1;
        record.reached.lost += lost;
        drop(record);
        self.next_server()
    }

    /// The server's process ends, whatever it was doing. Answers how many requests it had.
    pub(crate) fn end_process(&mut self) -> Result<u64, String> {
        let Some(host) = &mut self.host else {
            return Ok(0);
        };
        host.dead.set(true);
        host.commands.fill(None);
        host.served.iter().for_each(|served| served.state.abandon());
        let hasty = host.ublk.hasty;
        let mut lost = 0;
        if hasty {
            lost = self.lose_server();
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
            lost = self.lose_server();
        }
        Ok(lost)
    }

    /// The driver notices that there is no server any more. Answers how many requests that had.
    fn lose_server(&mut self) -> u64 {
        let Some(host) = &mut self.host else { return 0 };
        let reached = &mut self.record.borrow_mut().reached;
        let mut lost = 0;
        for (queue, served) in host.queues.iter_mut().zip(&host.served) {
            queue.set_server(None);
            lost += queue.model().server_gone() as u64;
            let counts = served.state.counts();
            reached.zero_copied += counts.zero_copied;
            reached.copied += counts.copied;
            reached.fallbacks += counts.fallbacks;
        }
        lost
    }

    /// A server that recovers the device.
    pub(crate) fn next_server(&mut self) -> Result<(), String> {
        if let Some(host) = &mut self.host {
            host.sleepers.renew();
            for (index, share) in shares(&host.ublk, host.queues.len()).enumerate() {
                let (cx, tags) = context(&self.world, &host.ublk, share);
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
        for (queue, served) in host.served.iter().enumerate() {
            let index = queue / usize::from(host.ublk.queues_per_worker);
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
