//! Runs of neighbouring clusters for tables, and the refcount table's own growth.
//!
//! A run is first planned and then taken. A search that fails changes nothing, so that clusters are handed out
//! afterwards as before. A run that needs a longer refcount table gets it in the same step, with the table before the
//! run.
//!
//! In a file that grows a run lies past everything that is in use, so that nothing has to be searched. On a block
//! device it is the first that is long enough past the scan's cursor, or one that was freed.
//!
//! Invariant: a run lies in ranges that all have a refcount block, or in ranges that all have none. In the second
//! case the blocks are made in the clusters before the run, so that each is counted by one of them. A count in an
//! older block would become durable together with the table entry that points to the new block.

use block::IoError;

use super::{FxHashMap, NO_LIMIT, Refcounts, Stuck, TablePlace, no_space};
use crate::format::l1::L1_TABLE_MAX_BYTES;
use crate::format::refcount::REFCOUNT_TABLE_MAX_BYTES;
use crate::format::{ClusterUse, Geometry, HostCluster, RefcountTableEntry};
use crate::invariant::invariant;

/// Returns the number of bytes that count the longest possible run. The cache must hold them all at once.
pub(super) fn count_bytes_max(geometry: &Geometry) -> u64 {
    let clusters =
        geometry.clusters_for(L1_TABLE_MAX_BYTES) + geometry.clusters_for(REFCOUNT_TABLE_MAX_BYTES);
    clusters * u64::from(geometry.refcount_bits()) / 8
}

/// Free clusters: first those for new refcount blocks, then those for a longer refcount table, then the run.
#[derive(Clone, Copy, Debug)]
struct Plan {
    first: HostCluster,
    /// The number of refcount blocks to make: one for each range that the plan touches, or none.
    blocks: u64,
    /// The number of clusters of the longer refcount table; 0 if it stays.
    table: u64,
    /// The number of clusters of the run.
    count: u64,
    /// True if the clusters come from the set of freed ones.
    freed: bool,
}

impl Plan {
    fn end(&self) -> HostCluster {
        self.first + self.len()
    }

    fn len(&self) -> u64 {
        self.blocks + self.table + self.count
    }

    /// Returns the last cluster.
    fn last(&self) -> HostCluster {
        self.first + (self.len() - 1)
    }
}

impl Refcounts {
    /// Takes `count` neighbouring clusters for a table, each with a count of one; returns the first.
    ///
    /// # Errors
    ///
    /// [`Stuck`], with nothing changed.
    pub(crate) fn allocate_run(&mut self, count: u64) -> Result<HostCluster, Stuck> {
        if let Some(bound) = self.preferred
            && let Some(first) = self.allocate_run_below(count, bound)?
        {
            return Ok(first);
        }
        self.take_run(count)
    }

    /// As [`Refcounts::allocate_run`], wherever there is room.
    pub(super) fn take_run(&mut self, count: u64) -> Result<HostCluster, Stuck> {
        let plan = self.plan(count, 0)?;
        self.take(plan)
    }

    /// Moves the refcount table to a place that has room for entry `index`, which it lacks.
    ///
    /// # Errors
    ///
    /// [`Stuck`], with nothing changed.
    pub(super) fn grow_table(&mut self, index: usize) -> Result<(), Stuck> {
        let plan = self.plan(0, index)?;
        self.take(plan).map(drop)
    }

    /// Finds room for a run, and for a refcount table that has entry `index` and counts all of it.
    fn plan(&mut self, count: u64, index: usize) -> Result<Plan, Stuck> {
        // Past the end of a file that grows, unless that is further than a refcount table can count.
        let behind = (self.limit == NO_LIMIT).then(|| self.cursor.max(self.end));
        let mut failed = no_space();
        for (start, is_behind) in behind
            .map(|at| (at, true))
            .into_iter()
            .chain([(self.cursor, false)])
        {
            let found = self.searches.get(&(count, is_behind));
            let mut at = found.map_or(start, |&at| at.max(start));
            match self.plan_from(&mut at, count, index) {
                Err(Stuck::Failed(error)) if error != IoError::Corrupt => failed = Stuck::Failed(error),
                Ok(plan) => return Ok(plan),
                Err(stuck) => {
                    self.searches.insert((count, is_behind), at);
                    return Err(stuck);
                }
            }
            self.searches.insert((count, is_behind), at);
        }
        if let Some(plan) = self.plan_freed(count, index)? {
            return Ok(plan);
        }
        self.searches = FxHashMap::default();
        Err(failed)
    }

    /// Returns the first plan from cluster `at` on; `at` moves on to the next candidate.
    fn plan_from(&mut self, at: &mut HostCluster, count: u64, index: usize) -> Result<Plan, Stuck> {
        let mut entries = self.entries_for(index)?;
        loop {
            let table = self.geometry.clusters_for(entries as u64 * 8);
            let table = if entries > self.table.len() { table } else { 0 };
            let plan = self.find(at, table, count)?;
            let last = self.block_index(plan.last());
            if last < entries {
                return Ok(plan);
            }
            entries = self.entries_for(last)?;
        }
    }

    /// Returns the number of entries of a table with entry `index`: unchanged, or enough for that one and some more.
    pub(super) fn entries_for(&self, index: usize) -> Result<usize, Stuck> {
        let max = (REFCOUNT_TABLE_MAX_BYTES / 8) as usize;
        if index < self.table.len() {
            return Ok(self.table.len());
        }
        if index >= max {
            // Space on the host would not help.
            tracing::error!(
                entries = max,
                "the refcount table has its largest size and cannot count more of the file"
            );
            return Err(Stuck::Failed(IoError::OutOfRange));
        }
        let wanted = (index + 1).max(self.table.len() + self.table.len() / 2) + 8;
        let entries = wanted.next_multiple_of(self.geometry.table_entries_per_cluster());
        Ok(entries.min(max))
    }

    /// Finds the first clusters from `at` on that a longer table and a run fit in.
    fn find(&mut self, at: &mut HostCluster, table: u64, count: u64) -> Result<Plan, Stuck> {
        loop {
            let mut plan = Plan {
                first: *at,
                blocks: 0,
                table,
                count,
                freed: false,
            };
            if plan
                .first
                .checked_add(table + count)
                .is_none_or(|end| end > self.limit)
            {
                return Err(no_space());
            }
            if self.has_block(self.block_index(plan.first))? {
                match self.next_unfit(plan.first, plan.end())? {
                    None => return Ok(plan),
                    Some(next) => *at = next,
                }
                continue;
            }
            let from = self.block_index(plan.first);
            let ranges = |plan: &Plan| (self.block_index(plan.last()) - from) as u64 + 1;
            while plan.blocks < ranges(&plan) {
                plan.blocks = ranges(&plan);
            }
            let mut present = None;
            for index in from..from + plan.blocks as usize {
                if self.has_block(index)? {
                    present = Some(index);
                    break;
                }
            }
            if let Some(index) = present {
                *at = HostCluster::new((index as u64) << self.geometry.refcount_block_bits());
                continue;
            }
            if plan.end() > self.limit {
                return Err(no_space());
            }
            for cluster in plan.first.until(plan.end()) {
                self.uses.check_free(cluster)?;
            }
            return Ok(plan);
        }
    }

    fn has_block(&self, index: usize) -> Result<bool, IoError> {
        Ok(self.block_offset(index)?.is_some())
    }

    /// Looks for a cluster in `first..end` that is in use or that no block counts. Returns the cluster to continue
    /// from.
    fn next_unfit(&mut self, first: HostCluster, end: HostCluster) -> Result<Option<HostCluster>, Stuck> {
        for cluster in first.until(end) {
            if !self.has_block(self.block_index(cluster))? {
                return Ok(Some(cluster));
            }
            if self.get(cluster)? != 0 {
                return Ok(Some(cluster + 1));
            }
            self.uses.check_free(cluster)?;
        }
        Ok(None)
    }

    /// Finds room among freed clusters.
    fn plan_freed(&mut self, count: u64, index: usize) -> Result<Option<Plan>, Stuck> {
        let entries = self.entries_for(index)?;
        let table = match entries > self.table.len() {
            true => self.geometry.clusters_for(entries as u64 * 8),
            false => 0,
        };
        let found = self.free.find(table + count);
        let Some(first) = found.filter(|&first| first + table + count <= self.limit) else {
            return Ok(None);
        };
        let plan = Plan {
            first,
            blocks: 0,
            table,
            count,
            freed: true,
        };
        match self.next_unfit(first, plan.end())? {
            None => Ok(Some(plan)),
            Some(next) => {
                tracing::error!(
                    cluster = next.index().saturating_sub(1),
                    "a freed cluster is in use"
                );
                Err(Stuck::Failed(IoError::Corrupt))
            }
        }
    }

    /// Counts the clusters of a plan and moves the refcount table if that is part of it. Returns the run's first
    /// cluster.
    fn take(&mut self, plan: Plan) -> Result<HostCluster, Stuck> {
        let run = plan.first + plan.blocks + plan.table;
        let entries = plan.table as usize * self.geometry.table_entries_per_cluster();
        let old = self.table.len();
        if entries > old {
            self.table.resize(entries, RefcountTableEntry::UNALLOCATED);
        }
        let from = self.block_index(plan.first);
        for (index, cluster) in (from..).zip(plan.first.until(plan.first + plan.blocks)) {
            self.new_block_at(index, cluster)?;
        }
        for cluster in plan.first.until(plan.end()) {
            if let Err(stuck) = self.claim(cluster) {
                // A loaded slice was evicted for another one. Those that were changed are still cached.
                for cluster in plan.first.until(cluster) {
                    self.set(cluster, 0)?;
                }
                self.table.truncate(old);
                return Err(stuck);
            }
        }
        self.uses.made(ClusterUse::RefcountBlock, plan.first, plan.blocks);
        if plan.table > 0 {
            let first = plan.first + plan.blocks;
            self.uses.made(ClusterUse::RefcountTable, first, plan.table);
            invariant!(
                self.table.len() as u64 * 8 <= plan.table * self.geometry.cluster_size(),
                "the refcount table is longer than its new place"
            );
            self.moved_from.push(self.place);
            self.place = TablePlace {
                offset: self.geometry.host_offset(first),
                clusters: plan.table,
            };
        }
        if plan.freed {
            self.free.remove(plan.first, plan.len());
        } else {
            // The scan gets there later, and clusters that are free then may have been written.
            self.virgin = self.virgin.max(plan.end());
        }
        self.end = self.end.max(plan.end());
        self.searches = FxHashMap::default();
        Ok(run)
    }
}
