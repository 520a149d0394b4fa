//! New places for compressed data.
//!
//! Compressed data shares host clusters, and may lie in two. So it is packed anew, in the order of the file, into runs of free
//! clusters: data whose sectors overlap keeps its distance, other data begins in a sector of its own. A cluster counts the
//! references to all data that touches it.
//!
//! An entry says only in which sector the data ends: all bytes up to there are copied, and no other data is taken for shorter
//! than its entry says.
//!
//! Invariant: no data is longer than a run, and a run is copied in memory of [`RUN_BYTES_MAX`], or of two clusters.

use std::collections::BTreeMap;
use std::rc::Rc;

use block::{AlignedBuf, IoError};

use super::change;
use crate::engine::Queue;
use crate::format::{Geometry, HostCluster, HostOffset};
use crate::metadata::Dropped;
use crate::metadata::refcounts::Stuck;
use crate::metadata::shared_moves::{SharedMoves, StoredBytes};

/// The most bytes of a run that is longer than two clusters.
const RUN_BYTES_MAX: u64 = 1 << 20;
const SECTOR: u64 = 512;

/// Neighbouring clusters that compressed data is packed into.
#[derive(Debug)]
struct PackedRun {
    first: HostCluster,
    count: u64,
    /// The offset after the last byte in use: that of a sector.
    end: HostOffset,
    /// The last data, and its place here.
    last: Option<(StoredBytes, HostOffset)>,
    /// The references to each cluster.
    counts: BTreeMap<HostCluster, u64>,
    /// Bytes to copy: their old and new place, and their number, in sectors.
    parts: Vec<(HostOffset, HostOffset, u64)>,
}

/// The room for data before a bound.
#[derive(Clone, Copy, Debug)]
enum Room {
    /// So many clusters from the first on.
    Run(HostCluster, u64),
    /// There are free clusters, but not as many side by side as the data needs.
    Scattered,
    None,
}

/// Compressed data with its new places.
#[derive(Debug, Default)]
pub(super) struct Packed {
    runs: Vec<PackedRun>,
    places: Vec<(StoredBytes, HostOffset, u64)>,
    /// There is no free cluster left.
    pub(super) is_full: bool,
}

impl PackedRun {
    fn new(geometry: &Geometry, first: HostCluster, count: u64) -> Self {
        Self {
            first,
            count,
            end: geometry.host_offset(first),
            last: None,
            counts: BTreeMap::new(),
            parts: Vec::new(),
        }
    }

    /// Returns the place for the next data, if there is room for it and for so many references.
    fn place(&self, geometry: &Geometry, data: StoredBytes, references: u64) -> Option<HostOffset> {
        let within = data.host.bytes() % SECTOR;
        let near = match self.last {
            Some((last, place)) if data.host.bytes() < last.end() => place + (data.host - last.host),
            _ => self.end + within,
        };
        // A cluster whose count is full is left to what is in it.
        let apart = geometry
            .align_up(self.end.bytes())
            .map(|end| HostOffset::new(end) + within);
        let mut places = std::iter::once(near).chain(apart);
        places.find(|&to| self.has_room(geometry, StoredBytes { host: to, ..data }, references))
    }

    fn has_room(&self, geometry: &Geometry, place: StoredBytes, references: u64) -> bool {
        if place.end() > geometry.host_offset(self.first + self.count).bytes() {
            return false;
        }
        let (first, count) = place.clusters(geometry);
        first.until(first + count).all(|cluster| {
            let counted = self.counts.get(&cluster).copied().unwrap_or(0);
            let sum = counted.checked_add(references);
            sum.is_some_and(|sum| sum <= geometry.refcount_max())
        })
    }

    fn put(&mut self, geometry: &Geometry, data: StoredBytes, to: HostOffset, references: u64) {
        let place = StoredBytes { host: to, ..data };
        let (first, count) = place.clusters(geometry);
        for cluster in first.until(first + count) {
            *self.counts.entry(cluster).or_default() += references;
        }
        self.end = self.end.max(HostOffset::new(place.end()));
        self.last = Some((data, to));
        let before = data.host.bytes() % SECTOR;
        let from = HostOffset::new(data.host.bytes() - before);
        let to = HostOffset::new(to.bytes() - before);
        self.parts.push((from, to, data.len + before));
    }

    /// Copies the data. The rest of the last cluster becomes zeros.
    async fn copy(&self, queue: &Rc<Queue>) -> Result<(), IoError> {
        let geometry = queue.shared.geometry;
        let start = geometry.host_offset(self.first);
        let mut bytes = AlignedBuf::zeroed((self.count * geometry.cluster_size()) as usize);
        for &(from, to, len) in &self.parts {
            let part = queue.file.read_at(from.bytes(), len as usize).await?;
            let at = (to - start) as usize;
            let place = bytes.get_mut(at..at + len as usize).ok_or(IoError::OutOfRange)?;
            place.copy_from_slice(&part);
        }
        queue.file.write_at(start.bytes(), bytes).await
    }
}

impl Packed {
    /// Finds places before `bound` for data, which is sorted, with the references to each. What has no room stays.
    ///
    /// # Errors
    ///
    /// [`IoError`]; then nothing is taken.
    pub(super) async fn plan(
        queue: &Rc<Queue>,
        data: &[(StoredBytes, u64)],
        bound: HostCluster,
    ) -> Result<Self, IoError> {
        let mut packed = Self::default();
        match packed.fill(queue, data, bound).await {
            Ok(()) => Ok(packed),
            Err(error) => {
                packed.give_back(queue)?;
                Err(error)
            }
        }
    }

    async fn fill(
        &mut self,
        queue: &Rc<Queue>,
        data: &[(StoredBytes, u64)],
        bound: HostCluster,
    ) -> Result<(), IoError> {
        let geometry = queue.shared.geometry;
        let mut left: u64 = data.iter().map(|(data, _)| data.len).sum();
        for &(data, references) in data {
            let place = |run: &PackedRun| run.place(&geometry, data, references);
            let mut found = self.runs.last().and_then(place);
            if found.is_none() && self.add_run(queue, data, left, bound).await? {
                found = self.runs.last().and_then(place);
            }
            left = left.saturating_sub(data.len);
            if let (Some(to), Some(run)) = (found, self.runs.last_mut()) {
                run.put(&geometry, data, to, references);
                self.places.push((data, to, references));
            }
        }
        Ok(())
    }

    /// Takes clusters for `data` and, if there are as many side by side, for `left` bytes. Returns false without room.
    async fn add_run(
        &mut self,
        queue: &Rc<Queue>,
        data: StoredBytes,
        left: u64,
        bound: HostCluster,
    ) -> Result<bool, IoError> {
        let geometry = queue.shared.geometry;
        let needed = geometry.clusters_for(data.host.bytes() % SECTOR + data.len);
        let wanted = geometry.clusters_for(left.min(RUN_BYTES_MAX)).max(needed);
        let found = change(queue, |metadata| {
            let refcounts = &mut metadata.refcounts;
            let Some(run) = refcounts.allocate_below(wanted, bound)? else {
                return Ok::<_, Stuck>(Room::None);
            };
            if run.count >= needed {
                return Ok(Room::Run(run.first, run.count));
            }
            for cluster in run.first.until(run.first + run.count) {
                refcounts.give_back(cluster)?;
            }
            let first = refcounts.allocate_run_below(needed, bound)?;
            Ok(first.map_or(Room::Scattered, |first| Room::Run(first, needed)))
        });
        let (first, count) = match found.await? {
            Room::Run(first, count) => (first, count),
            Room::Scattered => return Ok(false),
            Room::None => {
                self.is_full = true;
                return Ok(false);
            }
        };
        match self.runs.last_mut() {
            Some(run)
                if run.first + run.count == first
                    && (run.count + count) * geometry.cluster_size() <= RUN_BYTES_MAX =>
            {
                run.count += count;
            }
            _ => self.runs.push(PackedRun::new(&geometry, first, count)),
        }
        Ok(true)
    }

    /// Gives back clusters that nothing was written to.
    fn give_back(self, queue: &Rc<Queue>) -> Result<(), IoError> {
        let mut metadata = queue.shared.write()?;
        for PackedRun { first, count, .. } in self.runs {
            metadata.drop_clusters(Dropped { first, count }, true);
        }
        Ok(())
    }

    /// Counts the references, and adds the data to what moves. Returns the number of clusters.
    ///
    /// # Errors
    ///
    /// [`IoError`]; then the clusters are leaked.
    pub(super) async fn count(&mut self, queue: &Rc<Queue>, moves: &mut SharedMoves) -> Result<u64, IoError> {
        let mut clusters = 0;
        for run in &mut self.runs {
            let used = run.counts.len() as u64;
            if used < run.count {
                let dropped = Dropped {
                    first: run.first + used,
                    count: run.count - used,
                };
                queue.shared.write()?.drop_clusters(dropped, true);
            }
            run.count = used;
            clusters += used;
            for (&cluster, &count) in &run.counts {
                change(queue, |metadata| metadata.refcounts.set(cluster, count)).await?;
            }
        }
        for (data, to, references) in self.places.drain(..) {
            moves.add(data, to, references);
        }
        Ok(clusters)
    }

    /// Copies the data.
    pub(super) async fn copy(&self, queue: &Rc<Queue>) -> Result<(), IoError> {
        for run in self.runs.iter().filter(|run| run.count > 0) {
            run.copy(queue).await?;
        }
        Ok(())
    }
}
