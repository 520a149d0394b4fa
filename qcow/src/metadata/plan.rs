//! Plans of writes: the content of every byte of the clusters that a write touches.
//!
//! A plan is made under the lock, step by step, and executed without it. The engine reads no entry and knows no kind
//! of cluster. It overwrites, or it fills reserved clusters and their edges and then maps them.
//!
//! A fill has the borders of subclusters, which in most images are those of clusters. In a cluster that the disk
//! owns only the subclusters that are written are filled; others of it may be filled at the same time. A new host cluster
//! takes over the data of the old one, and no more.
//!
//! Invariant: from the plan until they are published or abandoned, clusters are reserved, the bytes to fill are in flight,
//! and the slice that maps them is pinned.

use std::ops::Range;

use block::IoError;
use block::canary::{Rule, broken};
use block::sync::WaitList;

use super::{Blocked, Dropped, Growth, Metadata};
use crate::format::{
    CompressedExtent, GuestCluster, GuestOffset, HostOffset, L2Entry, L2Mapping, SubclusterBitmap,
    SubclusterKind,
};
use crate::invariant::invariant;

/// One step of a write: `len` guest bytes from `offset` on.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct WriteStep {
    pub(crate) offset: GuestOffset,
    pub(crate) len: u64,
    pub(crate) action: Action,
}

impl WriteStep {
    /// Returns the guest's bytes of the step.
    pub(crate) fn bytes(&self) -> Range<GuestOffset> {
        self.offset..self.offset + self.len
    }
}

/// The action for the bytes of a step.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Action {
    /// The bytes are written over existing data, from this offset on.
    Overwrite(HostOffset),
    /// The bytes are written to reserved clusters, which are then mapped.
    Fill(Fill),
}

/// The contents to fill reserved clusters with: the head, the step's bytes, the tail.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Fill {
    pub(crate) allocation: Allocation,
    /// The bytes before the step's in what is filled.
    pub(crate) head: Edge,
    /// The bytes after the step's in what is filled.
    pub(crate) tail: Edge,
}

/// The bytes between those of a step and the border of what is filled.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Edge {
    /// Length in bytes; 0 if the step's bytes reach the border, or if the edge is data already.
    pub(crate) len: u64,
    pub(crate) content: EdgeContent,
}

/// The content of an edge.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum EdgeContent {
    /// The host's present content: zeros.
    Kept,
    /// Zeros, which have to be written.
    Zeros,
    /// The guest cluster's old content, which has to be copied.
    Old(OldCluster),
}

/// The source of a guest cluster's old bytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum OldCluster {
    /// A host cluster, which begins here.
    Data(HostOffset),
    /// A compressed cluster.
    Compressed(CompressedExtent),
    /// The backing file.
    Backing,
    /// Subclusters that are not all alike: what the guest reads there.
    Subclusters,
}

/// Host clusters reserved for guest bytes, which are in flight.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Allocation {
    /// The first guest cluster.
    pub(crate) guest: GuestCluster,
    /// The number of clusters.
    pub(crate) count: u64,
    /// The offset of the first host cluster.
    pub(crate) host: HostOffset,
    /// The guest cluster keeps the host cluster that it has: nothing was allocated.
    pub(crate) kept: bool,
    /// The first byte to fill and the one after the last, at borders of subclusters.
    pub(crate) start: GuestOffset,
    pub(crate) end: GuestOffset,
    /// The L2 slice that maps them, pinned.
    slice: u64,
}

impl Metadata {
    /// Plans the next step of a write to guest bytes `offset..end`.
    ///
    /// # Errors
    ///
    /// [`Blocked`], if something must happen first.
    pub(crate) fn plan_write(
        &mut self,
        offset: GuestOffset,
        end: GuestOffset,
        growth: Growth,
    ) -> Result<WriteStep, Blocked> {
        let cluster = self.geometry.guest_cluster(offset);
        if let Some(taken) = self.in_flight.find(&self.subcluster_of(offset)) {
            return Err(Blocked::InFlight(taken));
        }
        let slice = self.own_slice(cluster)?;
        let old = self.mapping(slice, cluster)?;
        if let Some(host) = self.past_end(&old) {
            tracing::error!(guest = offset.bytes(), %host, "the mapping leads past the end of the file");
            return Err(Blocked::Failed(IoError::Corrupt));
        }
        let owned = match old {
            L2Mapping::Data { host, .. } if broken(Rule::InPlaceShared) => Some(host),
            _ => self.owned(cluster, &old),
        };
        match owned {
            Some(host) => self.plan_in_place(slice, offset, end, host, old),
            None if growth == Growth::Held && self.holds_growth() => Err(Blocked::Growth),
            None => self.plan_allocation(slice, offset, end, old),
        }
    }

    /// Fails if bytes are to be overwritten in place that a power cut may leave changed, and unmarked in a durable bitmap.
    fn require_stored(&self, bytes: Range<GuestOffset>) -> Result<(), Blocked> {
        let bytes = bytes.start.bytes()..bytes.end.bytes();
        let lacks = self.bitmaps.as_ref().is_some_and(|bitmaps| bitmaps.lack(&bytes));
        match lacks && !broken(Rule::BitsAfterData) {
            true => Err(Blocked::Unstored(bytes)),
            false => Ok(()),
        }
    }

    /// Returns the guest bytes of the subcluster that holds `offset`.
    fn subcluster_of(&self, offset: GuestOffset) -> Range<GuestOffset> {
        let start = self.floor(offset);
        start..start + self.geometry.subcluster_size()
    }

    /// Returns the start of the subcluster that holds `offset`.
    fn floor(&self, offset: GuestOffset) -> GuestOffset {
        GuestOffset::new(offset.bytes() & !(self.geometry.subcluster_size() - 1))
    }

    /// Returns `offset`, or the end of the subcluster that it lies in.
    fn ceil(&self, offset: GuestOffset) -> GuestOffset {
        self.floor(offset + (self.geometry.subcluster_size() - 1))
    }

    /// Plans to write bytes of a guest cluster that owns the host cluster at `host`, and is mapped to `old`.
    fn plan_in_place(
        &mut self,
        slice: u64,
        offset: GuestOffset,
        end: GuestOffset,
        host: HostOffset,
        old: L2Mapping,
    ) -> Result<WriteStep, Blocked> {
        let guest = self.geometry.guest_cluster(offset);
        let bytes = self.bytes_of(guest);
        let mut border = bytes.end.min(end);
        // Others fill subclusters beside.
        if let Some(taken) = self.in_flight.find(&(offset..border)) {
            border = taken;
        }
        let index = self.geometry.subcluster_index(offset.bytes());
        let run_end = u64::from(old.subclusters().run_end(index)) << self.geometry.subcluster_bits();
        let run_end = (bytes.start + run_end).min(bytes.end);
        if old.subclusters().kind(index) == SubclusterKind::Data && run_end >= border {
            let step = self.plan_overwrite(slice, offset..border, end, host);
            self.require_stored(step.bytes())?;
            return Ok(step);
        }
        // Of the subclusters that are filled, those that are data already show without an entry.
        let last = self.geometry.subcluster_index(border.bytes() - 1);
        if (index..=last).any(|index| old.subclusters().kind(index) == SubclusterKind::Data) {
            self.require_stored(offset..border)?;
        }
        let allocation = Allocation {
            guest,
            count: 1,
            host,
            kept: true,
            start: self.floor(offset),
            end: self.end_of_fill(border),
            slice,
        };
        Ok(self.plan_fill(offset, border, allocation, false, [old; 2]))
    }

    /// Returns the end of what is filled by a write that ends at `border`. A data file does not become longer than the
    /// disk; a growth zeroes the rest of the last cluster.
    fn end_of_fill(&self, border: GuestOffset) -> GuestOffset {
        let end = self.ceil(border);
        if self.geometry.has_data_file() {
            return end.min(GuestOffset::new(self.size_bytes & !511)).max(border);
        }
        end
    }

    /// Plans to overwrite `bytes` of the cluster at `host`, and those of the clusters that follow it up to `end`, on the
    /// host as for the guest.
    fn plan_overwrite(
        &self,
        slice: u64,
        bytes: Range<GuestOffset>,
        end: GuestOffset,
        host: HostOffset,
    ) -> WriteStep {
        let size = self.geometry.cluster_size();
        let offset = bytes.start;
        let at = host + self.geometry.offset_in_cluster(offset.bytes());
        let mut len = bytes.end - offset;
        while offset + len < end && (offset + len).is_aligned_to(size) {
            let next = self.geometry.guest_cluster(offset + len);
            let follows = self.slice_of(next) == slice
                && matches!(self.mapping(slice, next),
                    Ok(L2Mapping::Data { host, copied: true }) if host == at + len);
            if !follows || self.in_flight.touches(&self.bytes_of(next)) {
                break;
            }
            len += size.min(end - (offset + len));
        }
        WriteStep {
            offset,
            len,
            action: Action::Overwrite(at),
        }
    }

    /// Reserves clusters for all neighbours that need some, and plans to fill them.
    fn plan_allocation(
        &mut self,
        slice: u64,
        offset: GuestOffset,
        end: GuestOffset,
        first: L2Mapping,
    ) -> Result<WriteStep, Blocked> {
        let guest = self.geometry.guest_cluster(offset);
        let last = self.geometry.guest_cluster(GuestOffset::new(end.bytes() - 1));
        let mut count = 1;
        for next in (guest + 1).until(last + 1) {
            if self.slice_of(next) != slice || self.in_flight.touches(&self.bytes_of(next)) {
                break;
            }
            match self.mapping(slice, next) {
                Err(_) => break,
                Ok(old) if old.owned().is_some() => break,
                // The write fails when it gets there: the old content to copy cannot be read.
                Ok(old) if self.past_end(&old).is_some() => break,
                Ok(_) => count += 1,
            }
        }
        let run = self.refcounts.allocate(count)?;
        // The write goes there before anything refers to them.
        invariant!(
            run.first
                .until(run.first + run.count)
                .all(|cluster| self.refcounts.is_given(cluster)),
            "{run:?} is reserved and has another user"
        );
        let last_cluster = guest + (run.count - 1);
        let last = self.mapping(slice, last_cluster)?;
        let end = end.min(self.bytes_of(last_cluster).end);
        let allocation = Allocation {
            guest,
            count: run.count,
            host: self.geometry.host_offset(run.first),
            kept: false,
            start: self.floor(offset).min(self.data_of(guest, first).start),
            end: self.ceil(end).max(self.data_of(last_cluster, last).end),
            slice,
        };
        Ok(self.plan_fill(offset, end, allocation, run.zero, [first, last]))
    }

    /// Returns the bytes from the first to the last subcluster with data of a cluster that is mapped to `old`. If there are
    /// none, the range begins after the cluster and ends before it.
    fn data_of(&self, cluster: GuestCluster, old: L2Mapping) -> Range<GuestOffset> {
        let bytes = self.bytes_of(cluster);
        let data = old.subclusters().data_range();
        if data.is_empty() || broken(Rule::SubclustersLeftBehind) {
            return bytes.end..bytes.start;
        }
        let at =
            |index: u32| (bytes.start + (u64::from(index) << self.geometry.subcluster_bits())).min(bytes.end);
        at(data.start)..at(data.end)
    }

    /// Plans to fill reserved clusters, of which the first and the last were mapped to `old`. `is_zero`: they read as
    /// zeros on the host.
    fn plan_fill(
        &mut self,
        offset: GuestOffset,
        end: GuestOffset,
        allocation: Allocation,
        is_zero: bool,
        old: [L2Mapping; 2],
    ) -> WriteStep {
        self.in_flight.enter(&self.in_flight_of(&allocation));
        self.l2.pin(allocation.slice);
        let is_zero = is_zero && self.holes_are_zeros;
        let mut edges = [
            self.edge(old[0], allocation.start..offset, &allocation, is_zero),
            self.edge(old[1], end..allocation.end, &allocation, is_zero),
        ];
        // If anything is copied, whole clusters are written, which suits direct I/O.
        if edges
            .iter()
            .any(|edge| matches!(edge.content, EdgeContent::Old(_)))
        {
            for edge in edges.iter_mut().filter(|edge| edge.len > 0) {
                if edge.content == EdgeContent::Kept {
                    edge.content = EdgeContent::Zeros;
                }
            }
        }
        let [head, tail] = edges;
        let action = Action::Fill(Fill {
            allocation,
            head,
            tail,
        });
        WriteStep {
            offset,
            len: end - offset,
            action,
        }
    }

    /// Returns the guest bytes that an allocation keeps in flight.
    fn in_flight_of(&self, allocation: &Allocation) -> Range<GuestOffset> {
        if allocation.kept {
            return allocation.start..allocation.end;
        }
        let end = self.geometry.guest_offset(allocation.guest + allocation.count);
        self.geometry.guest_offset(allocation.guest)..end
    }

    /// Returns the edge `bytes` of an allocation, in a cluster that is mapped to `old`. `is_zero`: the host has zeros there.
    fn edge(
        &self,
        old: L2Mapping,
        bytes: Range<GuestOffset>,
        allocation: &Allocation,
        is_zero: bool,
    ) -> Edge {
        let len = bytes.end - bytes.start;
        let kind = old
            .subclusters()
            .kind(self.geometry.subcluster_index(bytes.start.bytes()));
        if len == 0 || allocation.kept && kind == SubclusterKind::Data {
            return Edge {
                len: 0,
                content: EdgeContent::Kept,
            };
        }
        let zeros = if is_zero {
            EdgeContent::Kept
        } else {
            EdgeContent::Zeros
        };
        let is_covered = self.floor(bytes.start).bytes() < self.covered_bytes;
        let content = match (old, kind) {
            _ if broken(Rule::NeighbourDropped) => zeros,
            (L2Mapping::Data { host, .. }, _) => EdgeContent::Old(OldCluster::Data(host)),
            (L2Mapping::Compressed(extent), _) => EdgeContent::Old(OldCluster::Compressed(extent)),
            // Data of other subclusters is to be copied with it.
            (L2Mapping::Subclusters { bitmap, .. }, _) if !allocation.kept && bitmap.data() != 0 => {
                EdgeContent::Old(OldCluster::Subclusters)
            }
            (_, SubclusterKind::Unallocated) if is_covered => EdgeContent::Old(OldCluster::Backing),
            (_, SubclusterKind::Unallocated | SubclusterKind::Zero) => zeros,
            // Data that has no host cluster does not decode.
            (_, SubclusterKind::Data) => zeros,
        };
        Edge { len, content }
    }

    /// Maps an allocation whose clusters are filled. Returns the waiters to wake, also on failure; drop the list
    /// without the lock.
    ///
    /// # Errors
    ///
    /// If the metadata is not as planned, which is a corruption.
    pub(crate) fn publish(&mut self, allocation: &Allocation) -> (WaitList, Result<(), IoError>) {
        let size = self.geometry.cluster_size();
        self.assert_in_flight(allocation);
        // Only the request in flight may change the mapping that its plan was made for.
        invariant!(
            (0..allocation.count).all(|index| self.is_as_planned(allocation, index)),
            "{allocation:?} is not published as it was planned"
        );
        self.l2.unpin(allocation.slice);
        let result = (0..allocation.count).try_for_each(|index| {
            let host = allocation.host + index * size;
            let entry = self.filled(allocation, index, host)?;
            self.set_mapping(allocation.slice, allocation.guest + index, entry)
        });
        let start = self.in_flight_of(allocation).start;
        (self.in_flight.leave(start), result.map_err(|_| IoError::Corrupt))
    }

    /// Returns the entry of cluster `index` of an allocation that is filled, and lies at `host`. Its subclusters that were
    /// not filled stay as they are now: others may have filled some meanwhile.
    fn filled(&self, allocation: &Allocation, index: u64, host: HostOffset) -> Result<L2Entry, Blocked> {
        if !self.geometry.has_subclusters() {
            return Ok(L2Entry::data(host, true, &self.geometry));
        }
        let cluster = allocation.guest + index;
        let old = self.mapping(allocation.slice, cluster)?;
        let bytes = self.bytes_of(cluster);
        let at = |offset: GuestOffset| {
            let within = offset.clamp(bytes.start, bytes.end) - bytes.start;
            (within >> self.geometry.subcluster_bits()) as u32
        };
        let filled = at(allocation.start)..at(self.ceil(allocation.end));
        let others = if broken(Rule::SubclustersReplaced) {
            SubclusterBitmap::UNALLOCATED
        } else {
            old.subclusters()
        };
        let kinds = others.with(filled.clone(), SubclusterKind::Data);
        // The new host cluster has no other data than what was filled.
        invariant!(
            allocation.kept || old.subclusters().with(filled, SubclusterKind::Zero).data() == 0,
            "{allocation:?} loses data of {old:?}"
        );
        Ok(L2Entry::subclusters(Some(host), true, kinds))
    }

    /// Checks that an allocation is in flight, as it was reserved.
    fn assert_in_flight(&self, allocation: &Allocation) {
        // Otherwise another request may have remapped its guest clusters.
        invariant!(
            self.in_flight.is_entered(&self.in_flight_of(allocation)),
            "{allocation:?} is not in flight"
        );
    }

    /// Returns true if cluster `index` of an allocation is mapped as a plan for it demands. Corrupt entries are found
    /// when it is published.
    fn is_as_planned(&self, allocation: &Allocation, index: u64) -> bool {
        match self.mapping(allocation.slice, allocation.guest + index) {
            Ok(L2Mapping::Data { copied: true, .. }) => false,
            Ok(old) if allocation.kept => self.owned(allocation.guest + index, &old) == Some(allocation.host),
            Ok(old) => old.owned().is_none(),
            Err(_) => true,
        }
    }

    /// Undoes an allocation whose clusters could not be filled. Returns the waiters to wake; drop the list without
    /// the lock.
    pub(crate) fn abandon(&mut self, allocation: &Allocation) -> WaitList {
        self.assert_in_flight(allocation);
        self.l2.unpin(allocation.slice);
        if !allocation.kept {
            let first = self.geometry.host_cluster(allocation.host);
            for cluster in first.until(first + allocation.count) {
                if self.refcounts.give_back(cluster).is_err() {
                    // Its slice was evicted meanwhile; the cluster is freed like a mapped one.
                    self.drop_clusters(Dropped::one(cluster), true);
                }
            }
        }
        let start = self.in_flight_of(allocation).start;
        self.in_flight.leave(start)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{CLUSTER, metadata};
    use super::*;

    /// The contents of the edges of a write into the middle of the third cluster, in an image over a backing file of so many bytes.
    fn edges(covered_bytes: u64) -> [EdgeContent; 2] {
        let mut metadata = metadata();
        metadata.covered_bytes = covered_bytes;
        let middle = GuestOffset::new(2 * CLUSTER + 4096);
        let step = metadata.plan_write(middle, middle + 4096, Growth::Free);
        let Action::Fill(fill) = step.expect("an empty image").action else {
            panic!("nothing is mapped");
        };
        assert_eq!((fill.head.len, fill.tail.len), (4096, CLUSTER - 8192));
        [fill.head.content, fill.tail.content]
    }

    #[test]
    fn backing_file_is_copied_up_to_its_last_cluster_only() {
        let backing = EdgeContent::Old(OldCluster::Backing);
        for covered_bytes in [2 * CLUSTER + 1, 2 * CLUSTER + 8192, 3 * CLUSTER] {
            assert_eq!(edges(covered_bytes), [backing; 2], "{covered_bytes} bytes below");
        }
        for covered_bytes in [0, CLUSTER, 2 * CLUSTER] {
            let edges = edges(covered_bytes);
            assert!(
                !edges.contains(&backing),
                "{covered_bytes} bytes below: {edges:?}"
            );
        }
    }
}
