//! Changes of entries alone that make guest clusters or subclusters read as zeros, or unallocated.

use std::ops::Range;

use block::IoError;
use block::canary::{Rule, broken};
use block::sync::WaitList;

use super::{Blocked, Metadata};
use crate::format::{GuestCluster, GuestOffset, HostOffset, L2Entry, L2Mapping, SubclusterKind, Version};
use crate::invariant::invariant;

/// The options for clearing clusters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clear {
    /// Owned clusters keep their host cluster.
    pub(crate) keep: bool,
    /// The treatment of the host's bytes of kept clusters.
    pub(crate) bytes: HostBytes,
    /// Below this guest cluster the backing file has bytes that must stay hidden.
    pub(crate) covered: GuestCluster,
}

/// The treatment of the host's bytes where a guest cluster reads as zeros but keeps its place.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum HostBytes {
    /// They stay: the entry hides them.
    Kept,
    /// Their space is returned to the host, if it can be.
    Punched,
    /// They become zeros, also where the entry says zeros already: a raw data file reads as the disk does. `sparse`: their
    /// space is returned to the host.
    Zeroed { sparse: bool },
}

/// The result of one step.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Cleared {
    /// Done up to this guest cluster.
    Until(GuestCluster),
    /// These clusters are in flight now and their slice is pinned. The caller must punch them and then call
    /// [`Metadata::punched`].
    Punch {
        guest: GuestCluster,
        count: u64,
        host: HostOffset,
        slice: u64,
    },
}

impl Metadata {
    /// Clears guest clusters from `cluster` on, up to `end`: the rest of one slice, or one punch.
    ///
    /// # Errors
    ///
    /// [`Blocked`], if something must happen first.
    pub(crate) fn clear(
        &mut self,
        cluster: GuestCluster,
        end: GuestCluster,
        how: Clear,
    ) -> Result<Cleared, Blocked> {
        let l1_index = self.geometry.l1_index(self.geometry.guest_offset(cluster));
        if cluster >= how.covered && matches!(self.table_offset(l1_index), Ok(None)) {
            let table_end = self.slice_end(self.table_slices(l1_index).end - 1);
            return Ok(Cleared::Until(table_end.min(end)));
        }
        let slice = self.own_slice(cluster)?;
        let slice_end = self.slice_end(slice).min(end);
        for here in cluster.until(slice_end) {
            if let Some(taken) = self.in_flight.find(&self.bytes_of(here))
                && !broken(Rule::ClearRuns)
            {
                if here > cluster {
                    return Ok(Cleared::Until(here));
                }
                return Err(Blocked::InFlight(taken));
            }
            let plain = match self.geometry.version() {
                Version::V3 => L2Entry::zero(None, false, &self.geometry),
                // In version 2, callers clear only if there is no backing file.
                Version::V2 => L2Entry::UNALLOCATED,
            };
            let keeps = how.keep && self.geometry.version() == Version::V3;
            let zeroed = matches!(how.bytes, HostBytes::Zeroed { .. });
            let new = match self.mapping(slice, here)? {
                _ if zeroed => {
                    if here > cluster {
                        return Ok(Cleared::Until(here));
                    }
                    let place = self.geometry.data_file_offset(here);
                    return self.plan_punch(slice, here, slice_end, place, zeroed);
                }
                L2Mapping::Unallocated if here >= how.covered => continue,
                L2Mapping::Zero { host: None, .. } => continue,
                L2Mapping::Zero { copied: true, .. } if keeps => continue,
                L2Mapping::Data { host, copied: true }
                | L2Mapping::Subclusters {
                    host: Some(host),
                    copied: true,
                    ..
                } if keeps => {
                    if how.bytes == HostBytes::Punched {
                        if here > cluster {
                            return Ok(Cleared::Until(here));
                        }
                        return self.plan_punch(slice, here, slice_end, host, false);
                    }
                    L2Entry::zero(Some(host), true, &self.geometry)
                }
                _ => plain,
            };
            self.set_mapping(slice, here, new)?;
        }
        Ok(Cleared::Until(slice_end))
    }

    /// Plans to punch clusters from `first` on, which lie from `host` on: those with data, or `all` of them.
    fn plan_punch(
        &mut self,
        slice: u64,
        first: GuestCluster,
        end: GuestCluster,
        host: HostOffset,
        all: bool,
    ) -> Result<Cleared, Blocked> {
        let size = self.geometry.cluster_size();
        let mut count = 1;
        while first + count < end
            && !self.in_flight.touches(&self.bytes_of(first + count))
            && match self.mapping(slice, first + count)? {
                L2Mapping::Data {
                    host: at,
                    copied: true,
                } if at == host + count * size => true,
                _ => all,
            }
        {
            count += 1;
        }
        self.in_flight.enter(&self.bytes_of_all(first, count));
        self.l2.pin(slice);
        Ok(Cleared::Punch {
            guest: first,
            count,
            host,
            slice,
        })
    }

    /// Maps punched clusters as zeros that keep their host clusters, or as data if the host's bytes are zeros: a write in place
    /// that is still under way then shows on the disk if it shows in the file. Returns the waiters to wake; drop the list
    /// without the lock.
    pub(crate) fn punched(
        &mut self,
        guest: GuestCluster,
        count: u64,
        slice: u64,
        how: HostBytes,
        done: bool,
    ) -> (WaitList, Result<(), IoError>) {
        // A write that came in between would have been punched away.
        invariant!(
            self.in_flight.is_entered(&self.bytes_of_all(guest, count)),
            "{count} guest clusters from {guest} on are not in flight"
        );
        invariant!(
            !done
                || guest.until(guest + count).all(|cluster| self
                    .mapping(slice, cluster)
                    .is_ok_and(|old| self.owned(cluster, &old).is_some())),
            "the mapping of punched clusters has changed"
        );
        self.l2.unpin(slice);
        let mut result = Ok(());
        for cluster in guest.until(guest + count).filter(|_| done) {
            let Ok(old) = self.mapping(slice, cluster) else {
                result = Err(IoError::Corrupt);
                continue;
            };
            let new = match (self.owned(cluster, &old), how) {
                (Some(_), HostBytes::Zeroed { .. }) if matches!(old, L2Mapping::Data { .. }) => continue,
                (Some(host), HostBytes::Zeroed { .. }) => Ok(L2Entry::data(host, true, &self.geometry)),
                (Some(host), _) => Ok(L2Entry::zero(Some(host), true, &self.geometry)),
                (None, _) => Err(IoError::Corrupt),
            };
            let set = new.map(|new| self.set_mapping(slice, cluster, new).is_ok());
            if set != Ok(true) {
                result = Err(IoError::Corrupt);
            }
        }
        let start = self.geometry.guest_offset(guest);
        (self.in_flight.leave(start), result)
    }

    fn bytes_of_all(&self, first: GuestCluster, count: u64) -> Range<GuestOffset> {
        self.geometry.guest_offset(first)..self.geometry.guest_offset(first + count)
    }

    /// Makes subclusters of one guest cluster read as zeros: `bytes` begin and end at borders of subclusters. Its host
    /// cluster stays. Returns false, with nothing changed, if they cannot be told from the others: in compressed clusters,
    /// and in images without subclusters.
    ///
    /// # Errors
    ///
    /// [`Blocked`], if something must happen first.
    pub(crate) fn clear_subclusters(
        &mut self,
        bytes: &Range<GuestOffset>,
        covered: GuestCluster,
    ) -> Result<bool, Blocked> {
        let cluster = self.geometry.guest_cluster(bytes.start);
        let is_covered = cluster < covered;
        if !is_covered && matches!(self.table_offset(self.geometry.l1_index(bytes.start)), Ok(None)) {
            return Ok(true);
        }
        if let Some(taken) = self.in_flight.find(bytes) {
            return Err(Blocked::InFlight(taken));
        }
        let slice = self.own_slice(cluster)?;
        let old = self.mapping(slice, cluster)?;
        if matches!(old, L2Mapping::Compressed(_)) || !self.geometry.has_subclusters() {
            return Ok(false);
        }
        let from = self.geometry.subcluster_index(bytes.start.bytes());
        let count = ((bytes.end - bytes.start) >> self.geometry.subcluster_bits()) as u32;
        let kinds = old.subclusters().with(from..from + count, SubclusterKind::Zero);
        let is_zero_already = !is_covered && old == L2Mapping::Unallocated;
        if kinds != old.subclusters() && !is_zero_already {
            let (host, copied) = old
                .cluster()
                .map_or((None, false), |(host, copied)| (Some(host), copied));
            self.set_mapping(slice, cluster, L2Entry::subclusters(host, copied, kinds))?;
        }
        Ok(true)
    }
}
