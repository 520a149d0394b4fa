//! The record of a run, which all its queues share: what was promised, what is under way, what went wrong.

use block::IoError;
use simulator::SimWorld;

use crate::content::word;
use crate::leaks::Leaks;
use crate::oracle::{End, Oracle};
use crate::pace::Pace;
use crate::plan::{Ask, Planned};
use crate::shape::Shape;
use crate::troubles::OperationError;

/// Counts of the fates of a ublk device's servers and requests.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Reached {
    /// Servers that were killed.
    pub kills: u64,
    /// Servers that handed over, or began to.
    pub handovers: u64,
    /// Servers that were asked to, and refused.
    pub refused: u64,
    /// Requests that a server left to the next one.
    pub kept: u64,
    /// Requests that a killed server had.
    pub lost: u64,
    /// Requests of the host's that the driver itself has answered.
    pub by_driver: u64,
    /// Requests of the host's that became several.
    pub split: u64,
    /// Requests with data that went by their registered pages.
    pub zero_copied: u64,
    /// Requests with data that was copied.
    pub copied: u64,
    /// Requests among the latter that were copied because their pages could not be registered.
    pub fallbacks: u64,
}

/// The record that all queues of a run share.
#[derive(Debug)]
pub struct Record {
    /// The promises that were made.
    pub oracle: Oracle,
    /// The first problem, in words.
    pub problem: Option<String>,
    /// The disk's size that guests know, in sectors.
    pub sectors: u64,
    /// The number of times that the disk is to grow.
    pub grows: usize,
    /// The disk is to become smaller at some time.
    pub may_shrink: bool,
    /// The number of times that it has begun to get another size, and the number of these that have ended.
    pub growths: [u64; 2],
    /// The times at which it was to become smaller, with the size in sectors.
    shrinks: Vec<(u64, u64)>,
    /// The number of times that it has become smaller.
    pub shrunk: u64,
    /// Snapshots created, applied and deleted.
    pub snapshots: u64,
    /// Those of them that were applications.
    pub applied: u64,
    /// Bitmaps added.
    pub bitmaps: u64,
    /// The number of bytes that compactions have moved.
    pub moved_bytes: u64,
    /// Requests that have not ended yet, asked for or not.
    pub left: usize,
    /// Requests that are asked for and not answered.
    pub in_flight: usize,
    /// When this turn began, no task and no op was under way.
    pub is_at_rest: bool,
    /// Requests answered.
    pub answered: u64,
    /// FLUSHes answered well.
    pub flushes: u64,
    /// A request failed.
    pub failures: u64,
    /// A forced write failed, and with it perhaps the sync that it is.
    pub forced_failed: bool,
    /// Requests may fail, if a fault of the host's explains it.
    pub may_fail: bool,
    /// The file cannot become longer: what needs space may fail without any op that did.
    pub may_be_full: bool,
    /// The request that is being answered was failed by the driver, which had no server.
    pub by_driver: bool,
    /// The progress of two queues that keep step.
    pub pace: Option<Pace>,
    /// The clusters that a cut may leak.
    pub leaks: Leaks,
    /// The start of this server, in the world's time.
    pub server_since: u64,
    /// The time since which a write of the header may put another state of the metadata in force.
    switches_since: Option<u64>,
    /// A server was killed that had been told of a failed sync: of what that covered, nobody knows any more.
    pub forgotten: bool,
    /// Counts of what happened to a ublk device.
    pub reached: Reached,
    world: SimWorld,
    version: u64,
    salt: u64,
}

impl Record {
    /// Nothing has happened yet.
    #[must_use]
    pub fn new(oracle: Oracle, sectors: u64, world: &SimWorld, salt: u64) -> Self {
        Self {
            oracle,
            problem: None,
            sectors,
            grows: 0,
            may_shrink: false,
            growths: [0; 2],
            shrinks: Vec::new(),
            shrunk: 0,
            snapshots: 0,
            applied: 0,
            bitmaps: 0,
            moved_bytes: 0,
            left: 0,
            in_flight: 0,
            is_at_rest: true,
            answered: 0,
            flushes: 0,
            forced_failed: false,
            failures: 0,
            may_fail: false,
            may_be_full: false,
            by_driver: false,
            pace: None,
            world: world.clone(),
            leaks: Leaks::default(),
            server_since: 0,
            switches_since: None,
            forgotten: false,
            reached: Reached::default(),
            version: 3,
            salt,
        }
    }

    /// Notes what went wrong, if it is the first thing.
    pub fn problem(&mut self, text: impl FnOnce() -> String) {
        if self.problem.is_none() {
            self.problem = Some(text());
        }
    }

    /// Returns the time, in the world's steps.
    pub(crate) fn time(&self) -> u64 {
        self.world.time()
    }

    /// Notes that a request is asked for.
    pub(crate) fn note_asked(&mut self, shape: &Shape, planned: &Planned) {
        let is_first = self.in_flight == 0 && self.is_at_rest;
        self.leaks.ask(shape, self.sectors, planned, is_first);
        // Bitmaps do not fit a disk of another size, until they are stored for it.
        self.oracle.keeps_bitmaps &= !matches!(planned.ask, Ask::Grow(_) | Ask::Shrink(_));
        let is_change = !matches!(planned.ask, Ask::Read | Ask::Flush | Ask::Compact { .. });
        let are_durable = shape.bitmaps.is_some_and(|bitmaps| bitmaps.durable);
        if is_change && (are_durable || planned.ask.is_of_snapshots() || planned.ask.is_operation()) {
            let now = self.time();
            self.switches_since.get_or_insert(now);
        }
        self.in_flight += 1;
    }

    /// Notes that the disk is to become smaller: nobody asks for what lies past its new end any more. Returns the size that it
    /// had, in sectors.
    pub(crate) fn ask_shrink(&mut self, sectors: u64) -> u64 {
        self.growths[0] += 1;
        self.shrinks.push((self.time(), sectors));
        self.oracle.ask_size(sectors);
        let old = self.sectors;
        self.sectors = old.min(sectors);
        old
    }

    /// Notes that the disk has become smaller, or still has its `old` size.
    pub(crate) fn end_shrink(&mut self, sectors: u64, old: u64, end: End) {
        self.growths[1] += 1;
        self.shrunk += u64::from(end == End::Done);
        self.oracle.answer_size(sectors, end);
        if end != End::Done {
            self.sectors = old;
        }
    }

    /// Returns true if the disk was ever to become smaller.
    pub(crate) fn has_shrunk_or_tried(&self) -> bool {
        !self.shrinks.is_empty()
    }

    /// Returns true if a request that was asked for at `since` may find the disk too small.
    fn may_be_past_end(&self, planned: &Planned, since: u64) -> bool {
        let end = planned.first + planned.count;
        self.shrinks
            .iter()
            .any(|&(time, sectors)| since <= time && end > sectors)
    }

    /// Returns the words that the next write changes these sectors to.
    pub(crate) fn next_words(&mut self, sectors: std::ops::Range<u64>) -> Vec<u64> {
        self.version += 1;
        sectors
            .map(|sector| word(self.salt, self.version, sector))
            .collect()
    }

    /// Returns true if something that the host failed explains that a request fails that was asked for at `since`.
    fn is_explained(&self, ask: Ask, since: u64) -> bool {
        let faults = self.world.faults();
        // Who joins what another has begun may be told of what failed a moment before.
        let from = since.saturating_sub(JOINED);
        let lately = |fault: Option<u64>| fault.is_some_and(|time| time >= from);
        let own = |fault: Option<u64>| fault.is_some_and(|time| time >= self.server_since);
        let read = lately(faults.read) || lately(faults.door) || lately(faults.cancel);
        match ask {
            Ask::Read => read,
            _ if self.may_be_full => true,
            // A server remembers a failed sync.
            _ => read || lately(faults.write) || lately(faults.allocate) || own(faults.sync),
        }
    }

    /// Returns true if the host has failed a write or a sync that may have been of the header, with which another state of the metadata
    /// was to be in force. The image takes no changes then. Before a write of less than a block, that is read.
    fn may_be_stopped(&self) -> bool {
        let faults = self.world.faults();
        let faults = [faults.read, faults.write, faults.sync, faults.cancel];
        let since = self.switches_since;
        since.is_some_and(|since| faults.into_iter().flatten().any(|time| time >= since))
    }

    /// Returns what the host did to an operation that ended; complains about any other failure.
    pub(crate) fn host_result(
        &mut self,
        planned: &Planned,
        result: Result<(), impl OperationError>,
    ) -> Result<(), IoError> {
        let Err(error) = result else { return Ok(()) };
        if let Some(error) = error.of_host() {
            return Err(error);
        }
        self.problem(|| format!("{planned} fails: {error}"));
        Ok(())
    }

    /// Notes how a request that was asked for at `since` ended; complains if it must not end so.
    pub(crate) fn ended(&mut self, planned: &Planned, since: u64, result: Result<(), IoError>) {
        self.answered += 1;
        self.left -= 1;
        self.in_flight -= 1;
        self.leaks.end(planned.ask);
        let Err(error) = result else { return };
        self.failures += 1;
        if error == IoError::OutOfRange && self.may_be_past_end(planned, since) {
            return;
        }
        let excused = matches!(error, IoError::Host { .. } | IoError::Cancelled);
        let explained = self.by_driver || self.is_explained(planned.ask, since);
        let is_refused = error == IoError::Corrupt && planned.ask != Ask::Read && self.may_be_stopped();
        if !(self.may_fail && (excused && explained || is_refused)) {
            let faults = self.world.faults();
            self.problem(|| format!("{planned} fails: {error} (asked for at step {since}; {faults:?})"));
        }
    }
}

/// So many steps after an op was completed everybody has been told who waited for it.
const JOINED: u64 = 200;
