//! One run: workers and disk take turns, and after each turn of the disk the judge gets what a power cut would leave.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use block::canary::{Rule, broken};
use block::file::Alignment;
use block::worker::{FrontendId, Worker};
use block::{Context, Disk, IoError};
use qcow::{OpenError, OpenOptions, QcowDisk};
use rustc_hash::FxHashSet;
use simulator::pages::Tags;
use simulator::{Event, Faults, Profile, Random, SimImage, SimWorld, Store, memory};

use crate::judge::{Demand, Judge, Tally};
use crate::lane::Lane;
use crate::leaks::Leaks;
use crate::oracle::Oracle;
use crate::pace::Pace;
use crate::places::{PLACE_BYTES, Places};
use crate::plan::{Ask, Case, Explore, Planned, Registered};
use crate::record::{Reached, Record};
use crate::serve::Serving;
use crate::shape::{Beginning, DATA, DISK, beginning, chain};
use crate::ublk::{self, Host};

/// The most turns a run takes; a run that takes more hangs.
const TURNS_MAX: u64 = 4_000_000;
/// The most turns that pass beside writes that go on while nothing but late ops is in flight: fewer than a run takes for hung.
const LATE_TURNS_MAX: u64 = 48;
/// The time of a worker's turn, in runs in which it does not stand still.
const TURN: Duration = Duration::from_millis(10);

/// The result of a run.
#[derive(Debug, Default)]
pub struct Outcome {
    /// The failure, if there was one.
    pub failure: Option<Failure>,
    /// A hash of all that happened.
    pub trace_hash: u64,
    /// The events on the disk, if they were recorded.
    pub trace: Vec<Event>,
    /// Instants at which the power could have gone and that differ from the one before.
    pub cuts: u64,
    /// Instants whose states were too many to be looked at all.
    pub sampled: u64,
    /// The most states of one instant.
    pub widest: u128,
    /// Requests answered.
    pub answered: u64,
    /// FLUSHes answered well.
    pub flushes: u64,
    /// There was no space for some op ([`Case::space`]).
    pub starved: bool,
    /// The number of attempts to give the disk another size.
    pub growths: u64,
    /// The number of times that it became smaller.
    pub shrunk: u64,
    /// The number of snapshots created, applied and deleted.
    pub snapshots: u64,
    /// The number of snapshots applied.
    pub applied: u64,
    /// The number of bitmaps added.
    pub bitmaps: u64,
    /// The number of bytes that compactions have moved.
    pub moved_bytes: u64,
    /// Counts of what happened to a ublk device.
    pub reached: Reached,
}

/// A failure and its time.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The time, in the world's steps.
    pub time: u64,
    /// The failure, in words.
    pub what: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at step {}: {}", self.time, self.what)
    }
}

/// Runs a case. What was looked at is added to `tally`.
#[must_use]
pub fn run(case: &Case, record_trace: bool, tally: &mut Tally) -> Outcome {
    let beginning = beginning(case.shape);
    // What an earlier run left behind is not this one's fault.
    let _stale = memory::take_faults();
    let mut outcome = Outcome::default();
    let mut run = Run::new(case, &beginning, tally);
    if record_trace {
        run.world.record();
    }
    let result = run.all();
    outcome.failure = result.err().map(|what| Failure {
        time: run.world.time(),
        what,
    });
    outcome.trace_hash = run.world.trace_hash();
    outcome.trace = run.world.trace();
    let seen = &run.seen;
    (outcome.cuts, outcome.sampled, outcome.widest) = (seen.cuts, seen.sampled, seen.widest);
    let record = run.record.borrow();
    (outcome.answered, outcome.flushes) = (record.answered, record.flushes);
    outcome.starved = run.world.is_starved();
    outcome.growths = record.growths[1];
    outcome.shrunk = record.shrunk;
    outcome.snapshots = record.snapshots;
    outcome.applied = record.applied;
    outcome.bitmaps = record.bitmaps;
    outcome.moved_bytes = record.moved_bytes;
    outcome.reached = record.reached;
    drop(record);
    // After a failure ops may be in flight: they end without effect, and let go of their memory.
    run.world.cut_power();
    while run.world.step() {}
    outcome
}

#[derive(Debug, Default)]
struct Seen {
    cuts: u64,
    sampled: u64,
    widest: u128,
    /// Crash spaces, each with what was promised then.
    spaces: FxHashSet<(u64, u64)>,
}

pub(crate) struct Run<'a> {
    pub(crate) case: &'a Case,
    pub(crate) world: SimWorld,
    pub(crate) record: Rc<RefCell<Record>>,
    judge: Judge,
    tally: &'a mut Tally,
    pub(crate) schedule: Random,
    chance: Random,
    seen: Seen,
    changes: u64,
    turns: u64,
    pub(crate) workers: Vec<Worker>,
    /// The registered pages of each worker's own lane.
    places: Vec<Option<Rc<Places>>>,
    /// The pages that the driver of a ublk device registers, by worker.
    pub(crate) tags: Vec<Option<Rc<Tags>>>,
    pub(crate) disk: Option<Arc<QcowDisk>>,
    pub(crate) serving: Option<Serving>,
    pub(crate) host: Option<Host>,
}

pub(crate) type Slot<T> = Rc<RefCell<Option<T>>>;

impl<'a> Run<'a> {
    fn new(case: &'a Case, beginning: &Rc<Beginning>, tally: &'a mut Tally) -> Self {
        let store = Store::default();
        let world = SimWorld::with_store(case.schedule, Profile::IMMEDIATE, &store);
        beginning.install(&world);
        if case.shape.alignment > 1 {
            let alignment = Alignment {
                memory: 512,
                offset: case.shape.alignment,
            };
            world.set_alignment(DISK, alignment);
            if case.shape.data_file.is_some() {
                world.set_alignment(DATA, alignment);
            }
        }
        let (mut workers, mut own, mut tags) = (Vec::new(), Vec::new(), Vec::new());
        let shares: Vec<usize> = match &case.ublk {
            Some(ublk) => ublk::shares(ublk, case.lanes).collect(),
            None => vec![1; case.lanes],
        };
        for share in shares {
            let (cx, places, pages) = match (case.registered, case.ublk) {
                (Some(registered), _) => {
                    let (cx, places) = places(&world, registered);
                    (cx, places, None)
                }
                (None, Some(ublk)) => {
                    let (cx, pages) = ublk::context(&world, &ublk, share);
                    (cx, None, pages)
                }
                (None, None) => (world.context(32), None, None),
            };
            workers.push(Worker::by_hand(cx));
            own.push(places);
            tags.push(pages);
        }
        let mut words = beginning.words.clone();
        words.resize(case.sectors() as usize, 0);
        let mut oracle = Oracle::new(&words);
        oracle.keep_snapshots(beginning.snapshots());
        // A snapshot whose application failed at the header may be what a cut leaves, whatever was read since.
        let may_be_applied = case
            .plan
            .iter()
            .any(|planned| matches!(planned.ask, Ask::Apply(_)));
        let may_turn = may_be_applied && case.profile.has_errors();
        oracle.reads_settle = case.profile.sync_error == 0 && !case.restarts() && !may_turn;
        oracle.keeps_bitmaps = keeps_bitmaps(case);
        oracle.writes_waver = case.profile.has_errors();
        if case
            .plan
            .iter()
            .any(|planned| matches!(planned.ask, Ask::Shrink(_)))
        {
            oracle.keep_size(case.shape.size() / 512);
        }
        let record = Record::new(
            oracle,
            case.shape.size() / 512,
            &world,
            case.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1,
        );
        Self {
            judge: Judge::new(beginning, &store, case.seed, case.space.is_some()),
            record: Rc::new(RefCell::new(record)),
            schedule: Random::new(case.schedule),
            chance: Random::new(case.schedule ^ 0xC4A5),
            workers,
            places: own,
            tags,
            seen: Seen::default(),
            changes: world.changes(),
            turns: 0,
            disk: None,
            serving: None,
            host: None,
            world,
            case,
            tally,
        }
    }

    fn all(&mut self) -> Result<(), String> {
        if !self.case.before.is_empty() {
            self.before()?;
        }
        // Opening must not fail for what the host does to it meanwhile, but the power may go.
        self.world.set_profile(without_errors(self.case.profile));
        self.changes = self.world.changes();
        self.open()?;
        // What finds no room on a device fails too.
        let may_be_full = self.case.shape.device > 0 || self.case.space.is_some();
        self.record.borrow_mut().may_be_full = may_be_full;
        self.record.borrow_mut().may_fail = self.case.profile.has_errors() || may_be_full;
        self.world.limit_space(self.case.space);
        self.world.set_profile(self.case.profile);
        let mut lanes = Vec::new();
        match (self.case.virtio, self.case.ublk) {
            (Some(virtio), _) => self.start_guests(virtio)?,
            (None, Some(ublk)) => self.start_host(ublk)?,
            (None, None) => {
                if self.case.paced {
                    self.record.borrow_mut().pace = Some(Pace::new(self.case.lanes));
                }
                lanes = self.start_lanes(&self.case.plan, self.case.depth)?;
            }
        }
        self.drive(|run| run.record.borrow().left == 0)?;
        self.world.set_profile(without_errors(self.case.profile));
        self.world.limit_space(None);
        self.end_guests()?;
        self.end_host()?;
        self.end_lanes(lanes)?;
        self.close()
    }

    /// Makes the requests that come before anything can go wrong, and closes the disk.
    fn before(&mut self) -> Result<(), String> {
        self.open()?;
        let lanes = self.start_lanes(&self.case.before, 1)?;
        self.drive(|run| run.record.borrow().left == 0)?;
        self.end_lanes(lanes)?;
        let disk = self.disk.take().ok_or("no disk")?;
        let cx = self.context(0);
        let closed = cx.block_on(Arc::clone(&disk).close(&cx));
        closed
            .map_err(|error| error.to_string())?
            .map_err(|error| error.to_string())?;
        drop(disk);
        self.world.settle();
        let mut record = self.record.borrow_mut();
        record.oracle.close();
        record.leaks = Leaks::default();
        Ok(())
    }

    fn context(&self, worker: usize) -> Context {
        self.workers[worker].context().clone()
    }

    pub(crate) fn open(&mut self) -> Result<(), String> {
        let slot: Slot<Result<Arc<QcowDisk>, OpenError>> = Rc::default();
        let (cx, world, place) = (self.context(0), self.world.clone(), Rc::clone(&slot));
        let options = OpenOptions {
            persist_mappings: self.case.restarts() && !broken(Rule::MappingForgotten),
            ..self.case.shape.options()
        };
        let task_cx = cx.clone();
        cx.spawn(async move {
            let opened = QcowDisk::open_on(&task_cx, &world, Path::new(DISK), &options).await;
            *place.borrow_mut() = Some(opened);
        });
        let opened = self.wait_for(&slot)?;
        let disk = opened.map_err(|error| format!("the image cannot be opened: {}", chain(&error)))?;
        self.disk = Some(disk);
        Ok(())
    }

    pub(crate) fn wait_for<T>(&mut self, slot: &Slot<T>) -> Result<T, String> {
        let waited = Rc::clone(slot);
        self.drive(move |_| waited.borrow().is_some())?;
        slot.borrow_mut()
            .take()
            .ok_or_else(|| "a task ended without a result".to_owned())
    }

    fn start_lanes(&mut self, plan: &[Planned], depth: usize) -> Result<Vec<FrontendId>, String> {
        let disk = self.disk.clone().ok_or("no disk")?;
        let mut ids = Vec::new();
        for (index, worker) in self.workers.iter_mut().enumerate() {
            let own: VecDeque<Planned> = plan
                .iter()
                .filter(|planned| planned.lane == index)
                .copied()
                .collect();
            let seed = self.case.schedule.wrapping_add(index as u64);
            let lane = Lane::new(
                worker.context(),
                &disk,
                self.case.shape,
                own,
                depth,
                &self.record,
                seed,
            )
            .with_places(self.places[index].clone())
            .in_step(self.case.paced.then_some(index))
            .writing_on(self.case.writes_on);
            ids.push(
                worker
                    .add(Box::new(lane), Vec::new())
                    .map_err(|error| error.to_string())?,
            );
        }
        Ok(ids)
    }

    fn end_lanes(&mut self, lanes: Vec<FrontendId>) -> Result<(), String> {
        let (done, gone) = mpsc::channel();
        for (worker, id) in self.workers.iter_mut().zip(lanes) {
            worker.remove(id, done.clone());
        }
        drop(done);
        self.drive(move |_| matches!(gone.try_recv(), Err(mpsc::TryRecvError::Disconnected)))?;
        // Write-back and reclaiming that nobody waits for.
        self.drive(|run| run.workers.iter().all(|worker| worker.context().tasks() == 0))
    }

    fn close(&mut self) -> Result<(), String> {
        let slot: Slot<Result<(), IoError>> = Rc::default();
        let (cx, place) = (self.context(0), Rc::clone(&slot));
        let disk = self.disk.clone().ok_or("no disk")?;
        self.record.borrow_mut().leaks.close();
        let task_cx = cx.clone();
        cx.spawn(async move {
            let closed = disk.close(&task_cx).await;
            *place.borrow_mut() = Some(closed);
        });
        let closed = self.wait_for(&slot)?;
        self.disk = None;
        match closed {
            Ok(()) => {}
            // A sync failed in this run, be it that of a forced write: nothing can be promised any more.
            Err(_)
                if self.case.profile.sync_error > 0
                    || self.case.profile.cancel > 0
                    || self.record.borrow().forced_failed =>
            {
                return self.cut(true);
            }
            Err(error) => return Err(format!("closing fails: {error}")),
        }
        let mut record = self.record.borrow_mut();
        record.oracle.close();
        // Where something failed or servers followed each other, space may be lost.
        let failed = self.world.faults() != Faults::default();
        let demand = if failed || self.case.restarts() {
            Demand::Sound
        } else {
            Demand::Flawless
        };
        // Nothing is in use then, unless there was no room for it.
        record.oracle.keeps_bitmaps |= demand == Demand::Flawless && !record.may_be_full;
        let image = self.world.contents(DISK);
        if self.case.shape.data_file.is_some() {
            self.judge.set_data(self.world.contents(DATA));
        }
        self.judge.judge(&image, &record.oracle, demand, self.tally)?;
        if record.forgotten {
            return Ok(());
        }
        let space = self.world.crash_space(DISK);
        let data = self.case.shape.data_file.map(|_| self.world.crash_space(DATA));
        for number in 0..space.count().min(16) {
            if let Some(data) = &data {
                self.judge.set_data(data.draw(&mut self.chance));
            }
            self.judge
                .judge(&space.nth(number), &record.oracle, demand, self.tally)?;
        }
        Ok(())
    }

    /// Workers and disk take turns until `done`.
    pub(crate) fn drive(&mut self, done: impl Fn(&Self) -> bool) -> Result<(), String> {
        let (mut idle, mut waited) = (0, 0);
        while !done(self) {
            self.turns += 1;
            if self.turns > TURNS_MAX {
                return Err(format!("no end after {TURNS_MAX} turns"));
            }
            // In step with others a late op is late by what they do, and not until the next moment that they do nothing. Timers may
            // have them do something for ever.
            let may_wait = match self.case.writes_on {
                true => waited < LATE_TURNS_MAX,
                false => self.case.paced && idle < 16,
            };
            let waits = may_wait && self.world.is_only_late();
            waited = if waits { waited + 1 } else { 0 };
            let in_flight = self.world.in_flight() > 0 && !waits;
            if !in_flight || self.schedule.chance(self.case.worker_turns) {
                if self.case.passes_time() {
                    // Timers expire while others are at work.
                    self.world.pass(TURN);
                }
                let is_at_rest = self.is_at_rest();
                self.record.borrow_mut().is_at_rest = is_at_rest;
                let actors = self.actors();
                let turn = self.schedule.below(actors as u64) as usize;
                let worked = self.take_turn(turn)?;
                idle = if worked || in_flight { 0 } else { idle + 1 };
                self.after_round()?;
                self.disturb()?;
                if idle > 64 * actors {
                    let left = self.record.borrow().left;
                    return Err(format!(
                        "it hangs: {left} requests have no answer, and nothing is in flight{}",
                        self.describe_guests()
                    ));
                }
                continue;
            }
            idle = 0;
            self.world.step();
            self.cut_if_changed()?;
        }
        Ok(())
    }

    /// Returns the number of turns taken so far.
    pub(crate) fn turns(&self) -> u64 {
        self.turns
    }

    /// Holds an image against what was promised so far.
    pub(crate) fn judge_now(&mut self, image: &SimImage, demand: Demand) -> Result<(), String> {
        let record = self.record.borrow();
        if self.case.shape.data_file.is_some() {
            self.judge.set_data(self.world.contents(DATA));
        }
        self.judge.judge(image, &record.oracle, demand, self.tally)
    }

    /// Looks at what a power cut leaves, if that may be something new.
    pub(crate) fn cut_if_changed(&mut self) -> Result<(), String> {
        if self.world.changes() == self.changes {
            return Ok(());
        }
        self.changes = self.world.changes();
        self.cut(false)
    }

    /// Checks the rules that hold between two turns of workers.
    fn after_round(&mut self) -> Result<(), String> {
        self.look_at_guests()?;
        if let Some(problem) = self.record.borrow_mut().problem.take() {
            return Err(problem);
        }
        self.note_quiet()?;
        if let Some(fault) = memory::take_faults().first() {
            return Err(fault.to_string());
        }
        if self.disk.as_ref().is_some_and(|disk| !disk.is_unlocked()) {
            return Err("the metadata is locked between two rounds: across an await".to_owned());
        }
        Ok(())
    }

    /// Returns true if no op is in flight and no task under way.
    fn is_at_rest(&self) -> bool {
        let ended = |worker: &Worker| worker.context().tasks() == 0;
        self.world.in_flight() == 0 && self.workers.iter().all(ended)
    }

    /// Notes that all that a quiet FLUSH started has ended, and what a cut may leave now.
    fn note_quiet(&mut self) -> Result<(), String> {
        let is_quiet = self.record.borrow().leaks.is_quiet();
        if !is_quiet || !self.is_at_rest() {
            return Ok(());
        }
        {
            let mut record = self.record.borrow_mut();
            record.leaks.settle();
            record.oracle.renew();
        }
        self.copy()?;
        self.cut(false)
    }

    /// Somebody copies the image of a machine that was paused: looks at what the file holds.
    fn copy(&mut self) -> Result<(), String> {
        let image = self.world.contents(DISK);
        let record = self.record.borrow();
        let demand = self.demand(&record);
        if self.case.shape.data_file.is_some() {
            self.judge.set_data(self.world.contents(DATA));
        }
        self.judge
            .judge(&image, &record.oracle, demand, self.tally)
            .map_err(|text| format!("a copy made during a pause: {text}"))
    }

    /// Returns the demand on an image that a cut leaves now.
    fn demand(&self, record: &Record) -> Demand {
        let servers = self.case.ublk.is_some_and(|ublk| ublk.restarts());
        if servers || self.world.faults() != Faults::default() {
            return Demand::Sound;
        }
        Demand::Leaks(record.leaks.most())
    }

    /// The power goes: looks at what is left, or at some of it.
    fn cut(&mut self, last: bool) -> Result<(), String> {
        let Explore { all_up_to, draws } = self.case.explore;
        let record = self.record.borrow();
        if record.forgotten {
            // No server can make up for what the host forgot, if the power goes. If this one is killed as well, all is there.
            let image = self.world.contents(DISK);
            if self.case.shape.data_file.is_some() {
                self.judge.set_data(self.world.contents(DATA));
            }
            return self
                .judge
                .judge(&image, &record.oracle, Demand::Sound, self.tally);
        }
        let space = self.world.crash_space(DISK);
        // Each file is cut for itself: of the data file, what is certain and one of all states beside each of the image's.
        let data = self.case.shape.data_file.map(|_| self.world.crash_space(DATA));
        let data_seen = data.as_ref().map_or(0, |data| data.fingerprint().rotate_left(1));
        if !self
            .seen
            .spaces
            .insert((space.fingerprint() ^ data_seen, record.oracle.promises()))
            && !last
        {
            return Ok(());
        }
        let count = space.count();
        let demand = self.demand(&record);
        self.seen.cuts += 1;
        self.seen.widest = self.seen.widest.max(count);
        if count <= all_up_to {
            for number in 0..count {
                let image = space.nth(number);
                if let Some(data) = &data {
                    self.judge.set_data(data.nth(0));
                    self.judge.judge(&image, &record.oracle, demand, self.tally)?;
                    self.judge.set_data(data.draw(&mut self.chance));
                }
                self.judge.judge(&image, &record.oracle, demand, self.tally)?;
            }
            return Ok(());
        }
        self.seen.sampled += 1;
        for _ in 0..draws {
            let image = space.draw(&mut self.chance);
            if let Some(data) = &data {
                self.judge.set_data(data.draw(&mut self.chance));
            }
            self.judge.judge(&image, &record.oracle, demand, self.tally)?;
        }
        Ok(())
    }
}

/// Returns true if the bitmaps of a run are durable, and nothing that happens in it has them stored at the close after all: neither errors
/// and a lack of space, nor requests that take long while time passes.
fn keeps_bitmaps(case: &Case) -> bool {
    let is_durable = case.shape.bitmaps.is_some_and(|bitmaps| bitmaps.durable);
    let has_space = case.shape.device == 0 && case.space.is_none();
    is_durable && has_space && !case.profile.has_errors() && !case.passes_time()
}

/// A worker's context with registered pages.
fn places(world: &SimWorld, registered: Registered) -> (Context, Option<Rc<Places>>) {
    let Registered {
        places, from_zero, ..
    } = registered;
    let (cx, tags) = world.context_with_tags(32, places, PLACE_BYTES, from_zero);
    (cx, Some(Rc::new(Places { tags, registered })))
}

/// The same disk, if nothing on it failed.
pub(crate) fn without_errors(profile: Profile) -> Profile {
    Profile {
        cancel: 0,
        read_error: 0,
        write_error: 0,
        sync_error: 0,
        allocate_error: 0,
        no_space: 0,
        ..profile
    }
}
