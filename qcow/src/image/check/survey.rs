//! Surveys of an image, in as many passes as memory makes necessary.
//!
//! A pass counts the references to the clusters of one window of the file. As a rule the window is the whole file and
//! there is one pass. If the maps of a pass outgrow the budget, the pass starts over with half the window. Only files
//! made to be expensive, or huge and badly fragmented ones, need this, and they cost time instead of memory.
//!
//! Invariant: the windows cover every cluster once, so each finding about a cluster comes once, and findings about
//! anything else come from the first pass alone.

use std::ops::Range;

use super::super::counts::CHUNK;
use super::walk::{Stats, Walk};
use super::{Findings, Subject};

/// The default memory of a pass, in bytes: its maps and its lists. All other memory of a check or a repair is some
/// MiB.
pub(crate) const MEMORY_MAX_BYTES: usize = 96 << 20;

/// The results of the passes over an image so far.
#[derive(Debug)]
pub(crate) struct Survey<'a> {
    subject: &'a Subject<'a>,
    memory_max_bytes: usize,
    /// True if the refcounts on disk are checked too.
    with_on_disk: bool,
    next: Option<u64>,
    window_clusters: u64,
    first: bool,
    pub(crate) findings: Findings,
    pub(crate) stats: Stats,
}

impl<'a> Survey<'a> {
    pub(crate) fn new(subject: &'a Subject<'a>, with_on_disk: bool, memory_max_bytes: usize) -> Self {
        Self {
            subject,
            memory_max_bytes,
            with_on_disk,
            next: Some(0),
            window_clusters: u64::MAX,
            first: true,
            findings: Findings::default(),
            stats: Stats::default(),
        }
    }

    /// Walks the next pass and returns it; `None` after the last. The caller passes it on to [`Self::done`].
    pub(crate) async fn next(&mut self) -> Option<Walk<'a>> {
        let start = self.next?;
        loop {
            let window = self.window_at(start);
            let mark = self.findings.mark();
            let findings = std::mem::take(&mut self.findings);
            let mut walk = Walk::new(self.subject, window.clone(), self.first, findings);
            // The smallest window's maps are small, whatever is counted.
            if self.window_clusters > CHUNK {
                walk.limit_memory(self.memory_max_bytes);
            }
            walk.run(self.with_on_disk).await;
            if !walk.is_over_budget() {
                return Some(walk);
            }
            self.findings = walk.findings;
            self.findings.rewind(mark);
            let end = window.end.min(self.subject.file_clusters());
            self.window_clusters = ((end - start) / 2).next_multiple_of(CHUNK);
        }
    }

    /// Takes over the findings of a pass.
    pub(crate) fn done(&mut self, walk: Walk<'a>) {
        let file_clusters = self.subject.file_clusters();
        self.next = Some(walk.window.end).filter(|&end| end < file_clusters);
        if self.first {
            self.stats = walk.stats;
        }
        self.first = false;
        self.findings = walk.findings;
    }

    /// Returns the window from `start` on. The last window has no end: it includes what is written past the end of
    /// the file.
    fn window_at(&self, start: u64) -> Range<u64> {
        let end = start.saturating_add(self.window_clusters);
        if end >= self.subject.file_clusters() {
            start..u64::MAX
        } else {
            start..end
        }
    }
}
