//! The life of a server, of whatever kind: its workers sleep, it is killed, and another one follows.
//!
//! A killed server's memory is gone, and with it what it had not written to the image's file; what it had asked the
//! host to do is done, or given up before it began. The file as readers see it stays. The next server starts when the
//! last I/O of the dead one has ended, as the image's lock has it.

use block::worker::Worker;
use simulator::{Random, SimWorld};

use crate::run::Run;
use crate::shape::chain;

/// The sleep states of a server's workers.
#[derive(Debug)]
pub(crate) struct Sleepers {
    /// Workers that sleep.
    asleep: Vec<bool>,
    /// Workers that found nothing to do in their last turn.
    idle: Vec<bool>,
    /// The first worker's number in the world.
    first_context: u32,
}

impl Sleepers {
    /// So many workers that are awake, the first that the world has seen.
    pub(crate) fn new(count: usize) -> Self {
        Self {
            asleep: vec![false; count],
            idle: vec![false; count],
            first_context: 0,
        }
    }

    /// All workers are others now.
    pub(crate) fn renew(&mut self) {
        self.first_context += self.asleep.len() as u32;
        self.asleep.fill(false);
        self.idle.fill(false);
    }

    pub(crate) fn is_asleep(&self, index: usize) -> bool {
        self.asleep[index]
    }

    /// A worker that is told to do something has another round before it sleeps.
    pub(crate) fn wake(&mut self, index: usize, worker: &mut Worker) {
        if std::mem::take(&mut self.asleep[index]) {
            worker.end_sleep();
        }
        self.idle[index] = false;
    }

    /// The turn of a worker, whose sleep `news` ends. Returns whether it did anything.
    pub(crate) fn turn(
        &mut self,
        index: usize,
        worker: &mut Worker,
        world: &SimWorld,
        schedule: &mut Random,
        news: impl FnOnce() -> bool,
    ) -> Result<bool, String> {
        if self.asleep[index] {
            let context = self.first_context + index as u32;
            if !(news() || worker.is_woken() || world.has_completion(context)) {
                return Ok(false);
            }
            worker.end_sleep();
            self.asleep[index] = false;
        }
        // It goes to sleep some time after it has found nothing, or will find nothing: meanwhile others have had their turns.
        if std::mem::take(&mut self.idle[index]) && schedule.one_in(2) {
            self.asleep[index] = worker.prepare_sleep();
            if !self.asleep[index] {
                worker.end_sleep();
            }
            return Ok(false);
        }
        let worked = worker.round().map_err(|error| chain(&error))?;
        self.idle[index] = !worked || worker.may_sleep_at_once();
        Ok(worked)
    }
}

/// An event in the life of a server.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Mishap {
    /// It is killed.
    Kill,
    /// It stops, or something of it, and starts again.
    Stop,
}

/// The schedule of a server's mishaps: spread over the run.
#[derive(Debug)]
pub(crate) struct Mishaps {
    kills: u32,
    stops: u32,
    killed: u32,
    stopped: u32,
    /// Nothing happens to the server just now.
    pub(crate) quiet: bool,
    /// So many turns until what is due happens.
    delay: Option<u64>,
    /// It is being killed, between two stores.
    dying: bool,
}

impl Mishaps {
    pub(crate) fn new(kills: u32, stops: u32) -> Self {
        Self {
            kills,
            stops,
            killed: 0,
            stopped: 0,
            quiet: false,
            delay: None,
            dying: false,
        }
    }

    /// Returns the mishap that happens now, when `answered` requests of `all` have been answered. No other one happens
    /// until `quiet` is reset.
    pub(crate) fn due(&mut self, answered: u64, all: u64, schedule: &mut Random) -> Option<Mishap> {
        if self.quiet {
            return None;
        }
        let to_kill = self.killed < self.kills
            && answered * u64::from(self.kills + 1) >= all * u64::from(self.killed + 1);
        let to_stop = self.stopped < self.stops
            && answered * u64::from(2 * self.stops) >= all * u64::from(2 * self.stopped + 1);
        if !to_kill && !to_stop {
            return None;
        }
        let delay = *self.delay.get_or_insert_with(|| schedule.below(40));
        let is_dead = self.dying && is_killed();
        if delay > 0 && !is_dead {
            self.delay = Some(delay - 1);
            return None;
        }
        if to_kill && !self.dying {
            self.dying = true;
            if kill_after(schedule.below(12)) {
                // It dies at one of its next stores, or after so many turns.
                self.delay = Some(100);
                return None;
            }
        }
        self.delay = None;
        self.dying = false;
        self.quiet = true;
        if to_kill {
            self.killed += 1;
            return Some(Mishap::Kill);
        }
        self.stopped += 1;
        Some(Mishap::Stop)
    }
}

impl Run<'_> {
    /// The server is gone from one moment to the next, and the disk with it. What it had started ends, and
    /// `meanwhile` happens after each step of that. Returns how many workers it had.
    pub(crate) fn bury(
        &mut self,
        mut meanwhile: impl FnMut(&mut Self) -> Result<(), String>,
    ) -> Result<usize, String> {
        self.disk = None;
        self.world.kill_process();
        while self.world.step() {
            self.cut_if_changed()?;
            meanwhile(self)?;
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
                worker.round().map_err(|error| chain(&error))?;
            }
        }
        let count = dead.len();
        drop(dead);
        revive();
        Ok(count)
    }
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

/// Clears the kill of this thread: from here on it plays another process.
pub(crate) fn revive() {
    #[cfg(feature = "canary")]
    block::canary::kill_after(None);
}
