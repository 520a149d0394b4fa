//! One pass over everything that refers to clusters: header, L1 and L2 tables of the disk and of its snapshots, the
//! snapshot table, bitmaps, the encryption header.
//!
//! It counts the references to the clusters of its window. It also finds faults that do not depend on the refcounts:
//! entries that do not decode, references past the end of the file, metadata that something else also refers to.
//!
//! Invariants:
//! - The memory of a pass is bounded. The maps' memory is checked at every reference ([`Walk::is_over_budget`]); they
//!   have the part of the budget that lists leave. L2 tables are listed a bounded number at a time, and all other
//!   tables are read in parts.
//! - A table that is read whole is read once: L1 tables and bitmap tables that overlap would multiply the file.

mod bitmaps;
mod mapping;

use std::ops::Range;

use super::super::counts::CountMap;
use super::super::references::Table;
use super::claims::Claims;
use super::{Findings, Remedy, Subject, refblocks};
use crate::format::references::Reference;
use crate::format::{ClusterUse, HostOffset};

/// The number of references to a table.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct References {
    /// References from all L1 tables together.
    pub(crate) all: u64,
    /// References from the active L1 table.
    pub(crate) active: u64,
    /// The index of an L1 entry that refers to it.
    pub(crate) l1_index: u64,
}

/// Guest clusters by kind, over the active L1 table.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Stats {
    pub(crate) allocated: u64,
    pub(crate) compressed: u64,
    pub(crate) fragmented: u64,
}

/// An L1 table.
#[derive(Clone, Copy, Debug)]
struct L1Table {
    table: Table,
    references: References,
    /// Its bytes also belong to another L1 table.
    overlaps: bool,
}

/// The state of a pass.
#[derive(Debug)]
pub(crate) struct Walk<'a> {
    pub(crate) subject: &'a Subject<'a>,
    /// The clusters whose references are counted.
    pub(crate) window: Range<u64>,
    /// The number of references to each cluster.
    pub(crate) expected: CountMap,
    /// The refcounts on disk, if they were read.
    pub(crate) on_disk: CountMap,
    /// The refcount blocks by table entry, if they were read.
    pub(crate) blocks: Vec<(u64, HostOffset)>,
    /// True if the refcount structure itself is damaged, so that mending counts in place is not enough.
    pub(crate) refcounts_damaged: bool,
    pub(crate) findings: Findings,
    pub(crate) stats: Stats,
    memory_max_bytes: usize,
    /// The part of the memory that is left for the maps.
    maps_max_bytes: usize,
    claims: Claims,
    with_on_disk: bool,
    /// True in the first pass, which reports the findings that are not about a cluster.
    first: bool,
    l1_tables: Vec<L1Table>,
    /// A part of the file that is known to be a hole.
    hole: Range<u64>,
}

impl<'a> Walk<'a> {
    pub(super) fn new(subject: &'a Subject<'a>, window: Range<u64>, first: bool, findings: Findings) -> Self {
        let map = || CountMap::new(window.clone());
        Self {
            subject,
            expected: map(),
            on_disk: map(),
            claims: Claims::new(window.clone()),
            blocks: Vec::new(),
            refcounts_damaged: false,
            findings,
            stats: Stats::default(),
            memory_max_bytes: usize::MAX,
            maps_max_bytes: usize::MAX,
            with_on_disk: false,
            first,
            l1_tables: Vec::new(),
            hole: 0..0,
            window,
        }
    }

    /// Returns true if the window is the whole file.
    pub(crate) fn is_whole(&self) -> bool {
        self.window == (0..u64::MAX)
    }

    /// Returns true if the maps have outgrown their budget; then nothing in them is valid.
    pub(super) fn is_over_budget(&self) -> bool {
        let maps = [&self.expected, &self.on_disk, self.claims.map()];
        maps.iter().map(|map| map.memory_bytes()).sum::<usize>() > self.maps_max_bytes
    }

    /// Reserves the memory of a list that is kept during the pass. At least half of the budget stays for the maps.
    pub(super) fn set_aside(&mut self, bytes: usize) {
        let left = self.maps_max_bytes.saturating_sub(bytes);
        self.maps_max_bytes = left.max(self.memory_max_bytes / 2);
    }

    /// Sets the budget of the pass, in bytes; it has none to begin with.
    pub(super) fn limit_memory(&mut self, max_bytes: usize) {
        (self.memory_max_bytes, self.maps_max_bytes) = (max_bytes, max_bytes);
    }

    /// Reports a corruption that is not about a cluster's count, in the first pass.
    pub(super) fn report(
        &mut self,
        structure: ClusterUse,
        offset: u64,
        remedy: Remedy,
        message: impl FnOnce() -> String,
    ) {
        if self.first {
            self.findings.corruption(structure, offset, remedy, message);
        }
    }

    /// Reports that a structure could not be read, in the first pass.
    pub(super) fn report_unreadable(
        &mut self,
        structure: ClusterUse,
        offset: u64,
        remedy: Remedy,
        message: impl FnOnce() -> String,
    ) {
        if self.first {
            self.findings.error(structure, offset, remedy, message);
        }
    }

    /// Walks everything. With the refcounts as they are on disk, COPIED flags are checked against them.
    pub(super) async fn run(&mut self, with_on_disk: bool) {
        self.with_on_disk = with_on_disk;
        let Subject { header, geometry, .. } = *self.subject;
        self.claim(ClusterUse::Header, 0, geometry.cluster_size(), 1, Remedy::None);
        if with_on_disk {
            refblocks::load(self).await;
        }
        self.list_l1_tables().await;
        let l1_tables = std::mem::take(&mut self.l1_tables);
        for table in &l1_tables {
            self.claim_table(&table.table, table.references.all);
        }
        self.l1_tables = l1_tables;
        if self.is_over_budget() {
            return;
        }
        self.walk_tables().await;
        if self.is_over_budget() {
            return;
        }
        if let Some((offset, len)) = header.crypto_header() {
            self.claim(ClusterUse::EncryptionHeader, offset.bytes(), len, 1, Remedy::None);
        }
        self.walk_bitmaps().await;
        self.find_shared_metadata();
    }

    /// Stops reporting: the faults are known and are being repaired.
    pub(crate) fn stop_reporting(&mut self) {
        self.first = false;
        self.with_on_disk = false;
    }

    /// Returns true if a range ends in the file. Like QEMU, allows the last cluster of the file to be there only in
    /// part.
    fn ends_in_file(&self, offset: u64, len: u64) -> bool {
        let end = offset.saturating_add(len);
        end.saturating_sub(self.subject.file_len) < self.subject.geometry.cluster_size()
    }

    /// Returns true if `len` bytes at `offset` are in a hole, and so zeros that need no reading. A hole costs nothing
    /// to make, so it must cost nothing to check. Finding a hole's far end takes long: it is found once.
    pub(crate) fn is_in_hole(&mut self, offset: u64, len: u64) -> bool {
        let end = offset.saturating_add(len);
        if self.hole.start <= offset && end <= self.hole.end {
            return true;
        }
        let data = self.subject.file.next_data(offset).unwrap_or(u64::MAX);
        if data < end {
            return false;
        }
        self.hole = offset..data;
        true
    }

    /// Finds a table that the file's end cuts off. It reads as zeros from there on, and QEMU finds no fault. But the
    /// clusters it referred to would look leaked, so nothing may be repaired.
    fn find_missing_part(&mut self, structure: ClusterUse, offset: u64, len: u64) {
        let file_len = self.subject.file_len;
        if offset.saturating_add(len) > file_len {
            self.findings.block(structure, offset, || {
                format!("has {len:#x} bytes; the file ends at {file_len:#x}")
            });
        }
    }

    /// Returns true if `len` bytes at `offset` are in the file; reports them otherwise, if `report` is set.
    fn is_inside(
        &mut self,
        structure: ClusterUse,
        entry_at: u64,
        offset: u64,
        len: u64,
        report: bool,
    ) -> bool {
        let inside = self.ends_in_file(offset, len);
        if !inside && report {
            let file_len = self.subject.file_len;
            self.report(structure, entry_at, Remedy::None, || {
                format!("refers to {offset:#x} and {len:#x} bytes on; the file ends at {file_len:#x}")
            });
        }
        inside
    }

    /// Counts references from an L2 entry to guest data. Returns `false` if that is not in the file.
    fn count(&mut self, entry_at: u64, data: Reference, references: u64) -> bool {
        if !self.is_inside(ClusterUse::L2Table, entry_at, data.host.bytes(), data.len, true) {
            return false;
        }
        let geometry = self.subject.geometry;
        let max = geometry.refcount_max();
        for cluster in data.clusters(&geometry) {
            if self.is_over_budget() {
                break;
            }
            let cluster = cluster.index();
            if !self.expected.add(cluster, references, max) {
                self.findings
                    .corruption(ClusterUse::L2Table, entry_at, Remedy::None, || {
                        format!("cluster {cluster} has more references than a refcount can hold, {max}")
                    });
            }
        }
        true
    }

    /// Counts a table as [`Self::claim`] does.
    fn claim_table(&mut self, table: &Table, references: u64) -> bool {
        let (offset, len) = (table.offset.bytes(), table.bytes());
        self.claim(table.kind, offset, len, references, Remedy::None)
    }

    /// Counts a range as metadata that nothing else may refer to. Returns `false` if it is not in the file.
    pub(super) fn claim(
        &mut self,
        structure: ClusterUse,
        offset: u64,
        len: u64,
        references: u64,
        remedy: Remedy,
    ) -> bool {
        if len == 0 {
            return false;
        }
        let geometry = self.subject.geometry;
        if !self.ends_in_file(offset, len) {
            let file_len = self.subject.file_len;
            self.report(structure, offset, remedy, || {
                format!("has {len:#x} bytes; the file ends at {file_len:#x}")
            });
            return false;
        }
        let (first, end) = (
            offset / geometry.cluster_size(),
            (offset + len).div_ceil(geometry.cluster_size()),
        );
        let max = geometry.refcount_max();
        for cluster in first.max(self.window.start)..end.min(self.window.end) {
            if self.is_over_budget() {
                break;
            }
            let at = cluster * geometry.cluster_size();
            if !self.expected.add(cluster, references, max) {
                self.findings.corruption(structure, at, Remedy::None, || {
                    format!("has more references than a refcount can hold, {max}")
                });
            }
            let other = self.claims.add(cluster, structure, references);
            if let Some(other) = other {
                let remedy = if other.is_refcounts() {
                    Remedy::Rebuild
                } else {
                    remedy
                };
                self.refcounts_damaged |= remedy == Remedy::Rebuild;
                self.findings
                    .corruption(structure, at, remedy, || format!("is also the {other}"));
            }
        }
        true
    }

    /// Finds metadata that guest data also refers to.
    fn find_shared_metadata(&mut self) {
        let cluster_size = self.subject.geometry.cluster_size();
        for (cluster, structure, claimed) in self.claims.all() {
            if self.expected.get(cluster) > claimed {
                let offset = cluster * cluster_size;
                let remedy = if structure.is_refcounts() {
                    Remedy::Rebuild
                } else {
                    Remedy::None
                };
                self.refcounts_damaged |= remedy == Remedy::Rebuild;
                self.findings.corruption(structure, offset, remedy, || {
                    "guest data also refers to it".into()
                });
            }
        }
    }
}
