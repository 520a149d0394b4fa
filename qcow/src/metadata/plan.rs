//! Plans of writes: the content of every byte of the clusters that a write touches.
//!
//! A plan is made under the lock, step by step, and executed without it. The engine reads no entry and knows no kind
//! of cluster. It overwrites, or it fills reserved clusters and their edges and then maps them.
//!
//! Invariant: from the plan until they are published or abandoned, clusters are reserved and in flight, and the slice
//! that maps them is pinned.

use block::IoError;
use block::canary::{Rule, broken};
use block::sync::WaitList;

use super::{Blocked, Dropped, Growth, Metadata};
use crate::format::{CompressedExtent, GuestCluster, GuestOffset, HostOffset, L2Entry, L2Mapping};
use crate::invariant::invariant;

/// One step of a write: `len` guest bytes from `offset` on.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct WriteStep {
    pub(crate) offset: GuestOffset,
    pub(crate) len: u64,
    pub(crate) action: Action,
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
    /// The bytes before the step's in its first cluster.
    pub(crate) head: Edge,
    /// The bytes after the step's in its last cluster.
    pub(crate) tail: Edge,
}

/// The bytes between those of a step and the border of a cluster.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Edge {
    /// Length in bytes; 0 if the step's bytes reach the border.
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
}

/// Host clusters reserved for guest clusters, which are in flight.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Allocation {
    /// The first guest cluster.
    pub(crate) guest: GuestCluster,
    /// The number of clusters.
    pub(crate) count: u64,
    /// The offset of the first host cluster.
    pub(crate) host: HostOffset,
    /// The guest cluster keeps the host cluster that it had while it read as zeros: nothing was allocated.
    pub(crate) kept: bool,
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
        if self.in_flight.touches(cluster, cluster) {
            return Err(Blocked::InFlight(cluster));
        }
        let slice = self.own_slice(cluster)?;
        let old = self.mapping(slice, cluster)?;
        if let Some(host) = self.past_end(&old) {
            tracing::error!(guest = offset.bytes(), %host, "the mapping leads past the end of the file");
            return Err(Blocked::Failed(IoError::Corrupt));
        }
        match old {
            L2Mapping::Data { host, copied } if copied || broken(Rule::InPlaceShared) => {
                Ok(self.plan_overwrite(slice, offset, end, host))
            }
            L2Mapping::Zero {
                host: Some(host),
                copied: true,
            } => {
                let allocation = Allocation {
                    guest: cluster,
                    count: 1,
                    host,
                    kept: true,
                    slice,
                };
                Ok(self.plan_fill(offset, end, allocation, false, [old; 2]))
            }
            _ if growth == Growth::Held && self.holds_growth() => Err(Blocked::Growth),
            _ => self.plan_allocation(slice, offset, end, old),
        }
    }

    /// Plans to overwrite bytes of the cluster at `host` and of those that follow it, on the host as for the guest.
    fn plan_overwrite(
        &self,
        slice: u64,
        offset: GuestOffset,
        end: GuestOffset,
        host: HostOffset,
    ) -> WriteStep {
        let size = self.geometry.cluster_size();
        let within = self.geometry.offset_in_cluster(offset.bytes());
        let at = host + within;
        let mut len = (size - within).min(end - offset);
        while offset + len < end {
            let next = self.geometry.guest_cluster(offset + len);
            let follows = self.slice_of(next) == slice
                && matches!(self.mapping(slice, next),
                    Ok(L2Mapping::Data { host, copied: true }) if host == at + len);
            if !follows || self.in_flight.touches(next, next) {
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
            if self.slice_of(next) != slice || self.in_flight.touches(next, next) {
                break;
            }
            match self.mapping(slice, next) {
                Ok(L2Mapping::Data { copied: true, .. } | L2Mapping::Zero { copied: true, .. }) | Err(_) => {
                    break;
                }
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
        let last = self.mapping(slice, guest + (run.count - 1))?;
        let allocation = Allocation {
            guest,
            count: run.count,
            host: self.geometry.host_offset(run.first),
            kept: false,
            slice,
        };
        Ok(self.plan_fill(offset, end, allocation, run.zero, [first, last]))
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
        let Allocation {
            guest, count, slice, ..
        } = allocation;
        self.in_flight.enter(guest, count);
        self.l2.pin(slice);
        let start = self.geometry.guest_offset(guest);
        let border = self.geometry.guest_offset(guest + count);
        let end = end.min(border);
        let edge = |len, old, cluster| Edge {
            len,
            content: match len {
                0 => EdgeContent::Kept,
                _ => self.edge_content(old, cluster, is_zero),
            },
        };
        let mut edges = [
            edge(offset - start, old[0], guest),
            edge(border - end, old[1], guest + (count - 1)),
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

    /// Returns the content of an edge in a cluster that was mapped to `old`. `is_zero`: the host has zeros there.
    fn edge_content(&self, old: L2Mapping, cluster: GuestCluster, is_zero: bool) -> EdgeContent {
        let zeros = if is_zero {
            EdgeContent::Kept
        } else {
            EdgeContent::Zeros
        };
        match old {
            _ if broken(Rule::NeighbourDropped) => zeros,
            L2Mapping::Zero { .. } => zeros,
            L2Mapping::Unallocated if self.geometry.guest_offset(cluster).bytes() < self.covered_bytes => {
                EdgeContent::Old(OldCluster::Backing)
            }
            // No image that has any is written.
            L2Mapping::Unallocated | L2Mapping::Subclusters { .. } => zeros,
            L2Mapping::Data { host, .. } => EdgeContent::Old(OldCluster::Data(host)),
            L2Mapping::Compressed(extent) => EdgeContent::Old(OldCluster::Compressed(extent)),
        }
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
            let entry = L2Entry::data(allocation.host + index * size, true, &self.geometry);
            self.set_mapping(allocation.slice, allocation.guest + index, entry)
                .map_err(|_| IoError::Corrupt)
        });
        (self.in_flight.leave(allocation.guest), result)
    }

    /// Checks that an allocation is in flight, as it was reserved.
    fn assert_in_flight(&self, allocation: &Allocation) {
        // Otherwise another request may have remapped its guest clusters.
        invariant!(
            self.in_flight.is_entered(allocation.guest, allocation.count),
            "{allocation:?} is not in flight"
        );
    }

    /// Returns true if cluster `index` of an allocation is mapped as a plan for it demands. Corrupt entries are found
    /// when it is published.
    fn is_as_planned(&self, allocation: &Allocation, index: u64) -> bool {
        match self.mapping(allocation.slice, allocation.guest + index) {
            Ok(L2Mapping::Zero {
                host: Some(host),
                copied: true,
            }) => allocation.kept && host == allocation.host,
            Ok(L2Mapping::Data { copied: true, .. }) => false,
            Ok(_) => !allocation.kept,
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
        self.in_flight.leave(allocation.guest)
    }
}
