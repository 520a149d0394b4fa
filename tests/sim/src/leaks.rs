//! The bound on the clusters that a power cut may leak: those that changes since the last quiet FLUSHes have taken or
//! dropped.
//!
//! A change takes clusters, whose counts are durable before their entries are, and drops others, whose counts go down last. What it
//! took is no leak any more when a FLUSH that was asked for after its answer is answered. What it dropped is freed then, as
//! soon as no request is in flight that may use it, and the lower count is durable with the FLUSH after that. So
//! after a *quiet* FLUSH (nothing else is under way, and nothing is asked for until all that it started has ended) all that
//! was taken before is referenced and all that was dropped before is counted down in memory; after the next one nothing of
//! that is leaked by a cut. Only what was asked for since the quiet FLUSH before the last may be.
//!
//! Neither may work of the engine's own be under way, as the round that follows an operation is: a FLUSH that shares such a round of
//! another worker is still in flight when that looks for what can be freed, so that a timer or the next FLUSH frees it.
//!
//! Persistent bitmaps are stored anew, all of them with their directory, before the first change where they are durable, again
//! before the first one after they or the disk's size changed, and when the image is closed. That is one more change.
//!
//! A server that is killed leaks what it had under way for good, until a check repairs it. Where the host has failed
//! anything there is no bound.

use simulator::SECTOR;

use crate::bitmaps::Bitmaps;
use crate::plan::{Ask, Planned};
use crate::shape::Shape;

/// The most clusters a refcount table of these worlds has.
const TABLE_CLUSTERS: u64 = 8;

/// The most clusters that changes may have leaked.
#[derive(Clone, Copy, Debug, Default)]
pub struct Leaks {
    /// For good, by servers that were killed.
    lost: u64,
    /// By changes before the last quiet FLUSH, and after the one before it.
    before: u64,
    /// By changes since.
    recent: u64,
    quiet: Quiet,
    /// By storing the bitmaps once; 0 before the first change.
    stored: u64,
    /// A change that was asked for has the bitmaps stored, so that those after it do not.
    are_stored: bool,
}

/// The progress of a quiet FLUSH.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
enum Quiet {
    #[default]
    None,
    /// It was asked for when nothing else was under way.
    Asked,
    /// It was answered; what it started may go on.
    Answered,
}

impl Leaks {
    /// A request is asked for, when nothing else is under way (`is_first`) or something is.
    pub(crate) fn ask(&mut self, shape: &Shape, sectors: u64, planned: &Planned, is_first: bool) {
        self.quiet = match planned.ask {
            Ask::Flush if is_first => Quiet::Asked,
            _ => Quiet::None,
        };
        if matches!(planned.ask, Ask::Read | Ask::Flush) {
            return;
        }
        self.stored = match (&shape.bitmaps, planned.ask) {
            (None, _) => 0,
            (Some(bitmaps), Ask::Grow(bytes)) => bitmaps_cost(bitmaps, shape, bytes),
            (Some(bitmaps), _) => bitmaps_cost(bitmaps, shape, sectors * SECTOR as u64),
        };
        let are_durable = shape.bitmaps.is_some_and(|bitmaps| bitmaps.durable);
        // A change beside an operation may have them stored before it, and again after it.
        let is_stored = are_durable && !self.are_stored || has_bitmaps_stored_anew(planned.ask);
        self.recent += if is_stored { self.stored } else { 0 };
        // A discard may change nothing.
        self.are_stored |= matches!(planned.ask, Ask::Write { .. } | Ask::Zeroes { .. });
        self.recent += cost(shape, sectors, planned);
    }

    /// Notes that an operation has ended, with any result.
    pub(crate) fn end(&mut self, ask: Ask) {
        self.are_stored &= !has_bitmaps_stored_anew(ask);
    }

    /// The image is about to be closed.
    pub(crate) fn close(&mut self) {
        self.recent += self.stored;
    }

    /// A FLUSH was answered well.
    pub(crate) fn answer_flush(&mut self) {
        if self.quiet == Quiet::Asked {
            self.quiet = Quiet::Answered;
        }
    }

    /// Returns true if a quiet FLUSH was answered and waits for what it started to end.
    pub(crate) fn is_quiet(&self) -> bool {
        self.quiet == Quiet::Answered
    }

    /// All that a quiet FLUSH started has ended.
    pub(crate) fn settle(&mut self) {
        self.quiet = Quiet::None;
        self.before = std::mem::take(&mut self.recent);
    }

    /// The server was killed. The next one does again what was in flight, and stores the bitmaps before.
    pub(crate) fn kill(&mut self) {
        let open = self.before + self.recent;
        self.lost += open;
        (self.before, self.recent) = (0, open + self.stored);
        self.quiet = Quiet::None;
        self.are_stored = false;
    }

    /// The most clusters that a cut now leaks.
    #[must_use]
    pub fn most(&self) -> u64 {
        self.lost + self.before + self.recent
    }
}

/// The most clusters that an operation on the whole image takes or drops: more than any image here has.
const ALL_CLUSTERS: u64 = 1 << 32;

/// Returns true if durable bitmaps are stored anew by this, or before the first change after it.
fn has_bitmaps_stored_anew(ask: Ask) -> bool {
    matches!(
        ask,
        Ask::Grow(_) | Ask::Shrink(_) | Ask::Apply(_) | Ask::Bitmap(_)
    )
}

/// Returns the most clusters that are taken and dropped when the bitmaps of a disk of so many `bytes` are stored anew.
fn bitmaps_cost(bitmaps: &Bitmaps, shape: &Shape, bytes: u64) -> u64 {
    let cluster = shape.cluster();
    let own = |granularity: u64| {
        let data = bytes.div_ceil(granularity).div_ceil(8).div_ceil(cluster);
        data + (data * 8).div_ceil(cluster)
    };
    // The directory fits a cluster. Each cluster is taken at a new place and dropped at the old one.
    let stored = 2 * (1 + bitmaps.granularities().map(own).sum::<u64>());
    // So is each refcount block in which a count changes: at worst every one of these counts is in a block of its own.
    stored + 2 * stored + 2 * TABLE_CLUSTERS
}

/// Returns the most clusters that a change takes or drops.
fn cost(shape: &Shape, sectors: u64, planned: &Planned) -> u64 {
    let cluster = shape.cluster();
    let per_cluster = cluster / SECTOR as u64;
    let per_table = per_cluster * (cluster / 8);
    let touched = |first: u64, end: u64, unit: u64| end.div_ceil(unit) - first / unit;
    let (clusters, tables) = match planned.ask {
        Ask::Read | Ask::Flush | Ask::Bitmap(_) => return 0,
        ask if ask.is_of_snapshots() || ask.is_operation() => return ALL_CLUSTERS,
        Ask::Grow(bytes) => {
            let end = bytes / SECTOR as u64;
            // The L1 table at both its places, the old last cluster, and tables that hide a longer backing file.
            let l1 = |sectors: u64| (sectors.div_ceil(per_table) * 8).div_ceil(cluster);
            let hidden = end.max(sectors) - sectors;
            let below = (shape.below_bytes() / SECTOR as u64)
                .saturating_sub(sectors)
                .min(hidden);
            (
                l1(end) + l1(sectors) + 2,
                touched(sectors, sectors + below, per_table) + 1,
            )
        }
        _ => {
            let (first, end) = (planned.first, planned.first + planned.count);
            // A new cluster for each and the old one; compressed ones lie in two.
            let each = if shape.compressed.is_some() { 3 } else { 2 };
            (
                each * touched(first, end, per_cluster),
                touched(first, end, per_table),
            )
        }
    };
    let own = clusters + 2 * tables;
    let blocks = own / (cluster * 8 / u64::from(shape.refcount_bits)) + 2;
    own + blocks + 2 * TABLE_CLUSTERS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_quiet_flushes_leave_nothing_to_leak() {
        let mut leaks = Leaks::default();
        let ask = |leaks: &mut Leaks, ask, is_first| {
            leaks.ask(&Shape::PLAIN, 64, &Planned::new(ask, 0, 4), is_first);
        };
        ask(&mut leaks, Ask::Discard, true);
        let most = leaks.most();
        assert!(most >= 8, "four clusters dropped: {most}");
        // Not alone, so it does not count.
        ask(&mut leaks, Ask::Flush, false);
        leaks.answer_flush();
        assert!(!leaks.is_quiet());
        for left in [most, 0] {
            ask(&mut leaks, Ask::Flush, true);
            leaks.answer_flush();
            assert!(leaks.is_quiet());
            leaks.settle();
            assert_eq!(leaks.most(), left);
        }
    }

    #[test]
    fn bitmaps_are_stored_by_the_first_change_and_after_each_of_another_size() {
        let shape = Shape {
            bitmaps: Some(Bitmaps {
                granularity: 512,
                durable: true,
            }),
            ..Shape::PLAIN
        };
        let mut leaks = Leaks::default();
        let mut charged = |planned: Planned| {
            let before = leaks.most();
            leaks.ask(&shape, 64, &planned, true);
            leaks.end(planned.ask);
            leaks.most() - before
        };
        let write = Planned::new(Ask::Write { fua: false }, 0, 4);
        let discard = Planned::new(Ask::Discard, 0, 4);
        let (first, second) = (charged(discard), charged(write));
        assert_eq!(first, second, "a discard may not be the first change");
        let other = charged(write);
        let stored = second - other;
        assert!(stored > 10, "two tables with data, and a directory: {stored}");
        assert!(charged(Planned::new(Ask::Grow(64 << 10), 0, 0)) > stored);
        assert_eq!(charged(write), second);
        assert_eq!(charged(write), other);
        assert_eq!(charged(Planned::new(Ask::Bitmap(0), 0, 0)), stored);
        assert_eq!(charged(write), second);
    }

    #[test]
    fn leaks_of_a_killed_server_stay() {
        let mut leaks = Leaks::default();
        leaks.ask(&Shape::PLAIN, 64, &Planned::new(Ask::Discard, 0, 4), true);
        let most = leaks.most();
        leaks.kill();
        assert_eq!(leaks.most(), 2 * most);
        for _ in 0..2 {
            leaks.settle();
        }
        assert_eq!(leaks.most(), most);
    }
}
