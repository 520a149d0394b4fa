//! The worker: one thread, one ring, one executor, and the frontends it serves.
//!
//! Every event a worker waits for comes through its ring: kicks and wake-ups are watched eventfds, I/O
//! ends as completions. One system call both submits and waits. An idle worker first polls for a bounded
//! time, which grows while polling finds work and shrinks to zero on an idle disk. Only then does it ask its
//! guests for notifications and sleep. If even requests come through the ring and the worker does not poll,
//! the call that submits a round's ops is the one that waits.
//!
//! A frontend that has nothing to do falls asleep by itself, as long as the worker has others: it has asked its guest for a
//! notification then, and costs nothing until the kick comes. So a worker can serve a thousand idle queues.
//!
//! ```text
//!  config ──▶ WorkerHandle ──commands──▶ Worker (this file): round, sleep ──▶ Frontend: poll, publish
//!             thread, stop               poll_time: how long to poll          a virtqueue, a ublk queue
//! ```
//!
//! Invariants: between asking for notifications and sleeping every queue is checked once more; a frontend that sleeps by itself
//! has nothing in flight, and a kick wakes it; a frontend is removed only when each of its requests has been answered and published.

mod config;
mod cpus;
mod frontend;
mod handle;
mod poll_time;
mod pool;

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::ring::{EventToken, Watch};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, mpsc};
use crate::task::Context;
use poll_time::PollTime;

pub use config::{FailureHook, StartHook, StartWorkerError, WorkerConfig};
pub use frontend::{Frontend, FrontendId};
pub use handle::{WorkerGone, WorkerHandle};
pub use pool::WorkerPool;

/// Work for the worker's thread, done between two rounds.
type Command = Box<dyn FnOnce(&mut Worker) + Send>;

/// Commands from the worker's handle.
#[derive(Default)]
struct Commands {
    list: Mutex<Vec<Command>>,
    waiting: AtomicBool,
    stop: AtomicBool,
    ended: AtomicBool,
}

/// State of a worker, on its thread. Reached through [`WorkerHandle::run`], or made [by hand](Worker::by_hand).
pub struct Worker {
    cx: Context,
    /// The frontends that each round looks at.
    awake: Vec<Entry>,
    /// Those that wait for a kick, by the token of their watches.
    asleep: BTreeMap<EventToken, Entry>,
    /// The tokens of watches that fired, until they are looked at.
    events: Vec<EventToken>,
    next_id: u64,
    commands: Arc<Commands>,
    poll: PollTime,
    /// The time for which syncs in place blocked the last round.
    blocked: Duration,
}

struct Entry {
    id: FrontendId,
    frontend: Box<dyn Frontend>,
    watches: Vec<Watch>,
    /// Senders that are dropped when the removal is done; not empty once removal was requested.
    removal: Vec<mpsc::Sender<()>>,
    /// The rounds in a row in which it had nothing to do.
    idle: u32,
}

impl Entry {
    /// Returns true if it may wait for a kick by itself, and nothing else brings it work.
    fn may_sleep_alone(&self) -> bool {
        !self.watches.is_empty()
            && self.removal.is_empty()
            && self.frontend.in_flight() == 0
            && !self.frontend.comes_through_ring()
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker")
            .field("cx", &self.cx)
            .field("awake", &self.awake.len())
            .field("asleep", &self.asleep.len())
            .finish_non_exhaustive()
    }
}

/// The wake-up's token; those of frontends' watches follow. Events only end a sleep; the next round finds the work by polling.
const WAKE: EventToken = 0;

/// After so many looks without anything to do a frontend falls asleep by itself: about as long as a worker polls. Many that are awake
/// share them, or each round would look at all of them for the few that have something to do.
const IDLE_LOOKS: usize = if cfg!(shuttle) { 2 } else { 256 };

impl Worker {
    /// Makes a worker without a thread: its owner calls [`Worker::round`], and can interleave several of them in one
    /// thread.
    #[must_use]
    pub fn by_hand(cx: Context) -> Self {
        Self::new(cx, Arc::default(), PollTime::up_to(Duration::ZERO))
    }

    fn new(cx: Context, commands: Arc<Commands>, poll: PollTime) -> Self {
        Self {
            cx,
            awake: Vec::new(),
            asleep: BTreeMap::new(),
            events: Vec::new(),
            next_id: 0,
            commands,
            poll,
            blocked: Duration::ZERO,
        }
    }

    /// Returns the worker's ring, executor and pool.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.cx
    }

    /// Adds a frontend, which is woken by the eventfds in `kicks`.
    ///
    /// # Errors
    ///
    /// If a kick cannot be watched.
    pub fn add(
        &mut self,
        frontend: Box<dyn Frontend>,
        kicks: Vec<std::os::fd::OwnedFd>,
    ) -> io::Result<FrontendId> {
        let id = FrontendId(self.next_id);
        let watches = kicks
            .into_iter()
            .map(|fd| self.cx.ring().watch(fd, id.token()))
            .collect::<io::Result<Vec<_>>>()?;
        self.next_id += 1;
        self.awake.push(Entry {
            id,
            frontend,
            watches,
            removal: Vec::new(),
            idle: 0,
        });
        Ok(id)
    }

    /// Requests a frontend's removal; `done` is dropped when it has drained and is gone. An unknown frontend
    /// counts as gone.
    pub fn remove(&mut self, id: FrontendId, done: mpsc::Sender<()>) {
        self.wake(id.token());
        if let Some(entry) = self.awake.iter_mut().find(|entry| entry.id == id) {
            entry.watches.clear();
            entry.removal.push(done);
        }
    }

    /// Suspends a frontend that is to be removed; see [`Frontend::suspend`].
    pub fn suspend(&mut self, id: FrontendId) {
        self.wake(id.token());
        if let Some(entry) = self.awake.iter_mut().find(|entry| entry.id == id) {
            entry.frontend.suspend();
        }
    }

    /// Wakes the frontend with this token. Returns true if it slept by itself.
    fn wake(&mut self, token: EventToken) -> bool {
        let Some(mut entry) = self.asleep.remove(&token) else {
            return false;
        };
        entry.frontend.end_sleep();
        entry.idle = 0;
        self.awake.push(entry);
        true
    }

    /// Wakes the frontends that were kicked. Returns true if there were any.
    #[inline]
    fn wake_kicked(&mut self) -> bool {
        self.cx.ring().has_events() && self.take_kicks()
    }

    #[inline(never)]
    fn take_kicks(&mut self) -> bool {
        let mut events = std::mem::take(&mut self.events);
        self.cx.ring().take_events(&mut events);
        let mut any = false;
        for token in events.drain(..) {
            any |= self.wake(token);
        }
        self.events = events;
        any
    }

    /// Has frontends fall asleep that have had nothing to do for a while, so that those which have go faster. With one frontend
    /// it is the worker that sleeps.
    #[inline(never)]
    fn rest_idle(&mut self) {
        let looks = IDLE_LOOKS / self.awake.len();
        let rests = |entry: &mut Entry| {
            // A frontend that may not sleep alone stays awake, and is counted on, for as long as others are busy.
            entry.idle = entry.idle.saturating_add(1);
            if (entry.idle as usize) < looks || !entry.may_sleep_alone() {
                return false;
            }
            entry.idle = 0;
            let stays = entry.frontend.prepare_sleep();
            if stays {
                entry.frontend.end_sleep();
            }
            !stays
        };
        let resting = self.awake.extract_if(.., rests);
        self.asleep.extend(resting.map(|entry| (entry.id.token(), entry)));
    }

    fn run_commands(&mut self) -> bool {
        if !self.commands.waiting.load(Ordering::Acquire) {
            return false;
        }
        let list = {
            let mut list = self.commands.list.lock();
            self.commands.waiting.store(false, Ordering::Release);
            std::mem::take(&mut *list)
        };
        for command in list {
            command(self);
        }
        true
    }

    /// Takes the new requests of all frontends. Returns true if there were any.
    fn take_requests(&mut self) -> bool {
        let mut any = false;
        for entry in &mut self.awake {
            if entry.removal.is_empty() && entry.frontend.poll() {
                entry.idle = 0;
                any = true;
            }
        }
        if any {
            // One that sleeps may be kicked any time.
            let alone =
                self.asleep.is_empty() && matches!(&self.awake[..], [only] if only.frontend.in_flight() == 1);
            self.cx.sync_history().arrived(alone);
        }
        any
    }

    /// Runs one round: new requests, tasks, the ring, answers. Never waits. Returns true if anything happened.
    ///
    /// # Errors
    ///
    /// If the ring has failed.
    pub fn round(&mut self) -> io::Result<bool> {
        let mut worked = self.run_commands();
        worked |= self.take_requests();
        worked |= self.cx.run_ready();
        if self.cx.ring().turn(false)? > 0 {
            worked = true;
            self.cx.run_ready();
        }
        self.blocked = self.cx.sync_history().take_blocked();
        if !self.blocked.is_zero() {
            // What is found before the answer is published came during the sync.
            self.cx.ring().turn(false)?;
            if self.take_requests() {
                self.cx.sync_history().disturbed();
            }
        }
        for entry in &mut self.awake {
            if entry.frontend.publish() {
                entry.idle = 0;
                worked = true;
            }
        }
        self.awake.retain_mut(|entry| {
            let gone = !entry.removal.is_empty() && entry.frontend.in_flight() == 0;
            if gone {
                entry.frontend.removed();
            }
            !gone
        });
        if self.awake.len() > 1 {
            self.rest_idle();
        }
        worked |= self.wake_kicked();
        Ok(worked)
    }

    fn drained(&self) -> bool {
        self.commands.stop.load(Ordering::Acquire)
            && self.awake.is_empty()
            && self.asleep.is_empty()
            && self.cx.tasks() == 0
            && self.cx.ring().in_flight() == 0
            && !self.commands.waiting.load(Ordering::Acquire)
    }

    /// Returns true if the worker may sleep even after a busy round, unless [`Worker::prepare_sleep`] finds more work.
    #[must_use]
    pub fn may_sleep_at_once(&self) -> bool {
        // A frontend that is being removed is not polled.
        let may = |entry: &Entry| entry.removal.is_empty() && entry.frontend.comes_through_ring();
        self.awake.iter().all(may)
    }

    /// Asks every source of work to wake this worker, and checks each once more. Returns false if there is work
    /// already. The caller must call [`Worker::end_sleep`] next, or after the sleep.
    pub fn prepare_sleep(&mut self) -> bool {
        let mut stay = false;
        let is_alone = self.asleep.is_empty() && self.awake.len() < 2;
        let rests = |entry: &mut Entry| {
            let stays = entry.removal.is_empty() && entry.frontend.prepare_sleep();
            stay |= stays;
            // It sleeps on when the worker wakes for another.
            !stays && !is_alone && entry.may_sleep_alone()
        };
        let resting = self.awake.extract_if(.., rests);
        self.asleep.extend(resting.map(|entry| (entry.id.token(), entry)));
        !stay && self.cx.run_queue().prepare_sleep()
    }

    /// Returns true if another worker or a task has woken this one since [`Worker::prepare_sleep`].
    #[must_use]
    pub fn is_woken(&self) -> bool {
        !self.cx.run_queue().is_sleeping()
    }

    /// Turns wake-ups and notifications off again.
    pub fn end_sleep(&mut self) {
        self.cx.run_queue().end_sleep();
        for entry in &mut self.awake {
            entry.frontend.end_sleep();
        }
        self.wake_kicked();
    }

    /// Sleeps until an event comes, unless there is work already.
    fn sleep(&mut self) -> io::Result<()> {
        if self.prepare_sleep() {
            let commanded = self.commands.waiting.load(Ordering::SeqCst);
            let stopped = self.commands.stop.load(Ordering::SeqCst) && self.drained();
            self.cx.ring().turn(!commanded && !stopped)?;
        }
        self.end_sleep();
        Ok(())
    }

    fn serve(&mut self) -> io::Result<()> {
        let mut idle_since: Option<Instant> = None;
        loop {
            let worked = self.round()?;
            // Polling is for guests' requests only. I/O in flight wakes the worker just as fast, and a task without
            // I/O waits for another thread, which may need this CPU.
            let waits_for_guests = self.cx.ring().in_flight() == 0 && self.cx.tasks() == 0;
            let polls = waits_for_guests && !self.poll.window().is_zero();
            if worked {
                if let Some(since) = idle_since.take() {
                    self.poll.found(since.elapsed().saturating_sub(self.blocked));
                }
                if polls || !self.may_sleep_at_once() {
                    continue;
                }
            } else if self.drained() {
                return Ok(());
            }
            if polls {
                let since = *idle_since.get_or_insert_with(Instant::now);
                if since.elapsed() < self.poll.window() {
                    std::hint::spin_loop();
                    continue;
                }
            }
            let before = idle_since.take().unwrap_or_else(Instant::now);
            self.sleep()?;
            if waits_for_guests {
                self.poll.slept(before.elapsed());
            }
        }
    }
}

#[cfg(all(test, shuttle))]
mod guest_model;
#[cfg(test)]
mod sleep_tests;
#[cfg(test)]
mod sync_tests;
#[cfg(test)]
mod tests;
