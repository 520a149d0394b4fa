//! Making guest clusters read as zeros, or be nothing, by changing their entries alone.

use std::task::Waker;

use block::IoError;
use block::canary::{Rule, broken};

use super::{Blocked, Metadata};
use crate::format::{L2Entry, L2Mapping, Version};

/// How clusters are cleared.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clear {
    /// Clusters that are this guest's alone keep their place on the host.
    pub(crate) keep: bool,
    /// And their space is given back to the host by punching it.
    pub(crate) punch: bool,
    /// Below this guest cluster the backing file has bytes that must not show.
    pub(crate) covered: u64,
}

/// What became of a step.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Cleared {
    /// Done up to this guest cluster.
    Until(u64),
    /// These clusters, in flight now and their slice pinned, are to be punched and then handed to
    /// [`Metadata::punched`].
    Punch {
        guest: u64,
        count: u64,
        host: u64,
        slice: u64,
    },
}

impl Metadata {
    /// Clears guest clusters from `cluster` on, as far as `end`, one slice, or one punch.
    ///
    /// # Errors
    ///
    /// [`Blocked`], if something must happen first.
    pub(crate) fn clear(&mut self, cluster: u64, end: u64, how: Clear) -> Result<Cleared, Blocked> {
        let l1_index = (cluster >> self.geometry.l2_bits()) as usize;
        if cluster >= how.covered && matches!(self.table_offset(l1_index), Ok(None)) {
            let table_end = (l1_index as u64 + 1) << self.geometry.l2_bits();
            return Ok(Cleared::Until(table_end.min(end)));
        }
        let slice = self.own_slice(cluster)?;
        let slice_end = ((slice + 1) << self.slice_bits).min(end);
        let bits = self.geometry.cluster_bits().get();
        for here in cluster..slice_end {
            if self.is_in_flight(here << bits, 1) && !broken(Rule::ClearRuns) {
                if here > cluster {
                    return Ok(Cleared::Until(here));
                }
                return Err(Blocked::InFlight(here));
            }
            let plain = match self.geometry.version() {
                Version::V3 => L2Entry::ZERO_PLAIN,
                // Callers clear in version 2 only where nothing lies below.
                Version::V2 => L2Entry::UNALLOCATED,
            };
            let keeps = how.keep && self.geometry.version() == Version::V3;
            let new = match self.mapping(slice, here)? {
                L2Mapping::Unallocated if here >= how.covered => continue,
                L2Mapping::Zero { host: None, .. } => continue,
                L2Mapping::Zero { copied: true, .. } if keeps => continue,
                L2Mapping::Data { host, copied: true } if keeps => {
                    if how.punch {
                        if here > cluster {
                            return Ok(Cleared::Until(here));
                        }
                        return self.plan_punch(slice, here, slice_end, host.bytes());
                    }
                    L2Entry::zero_allocated(host, true)
                }
                _ => plain,
            };
            self.set_mapping(slice, here, new)?;
        }
        Ok(Cleared::Until(slice_end))
    }

    fn plan_punch(&mut self, slice: u64, first: u64, end: u64, host: u64) -> Result<Cleared, Blocked> {
        let size = self.geometry.cluster_size();
        let bits = self.geometry.cluster_bits().get();
        let mut count = 1;
        while first + count < end
            && !self.is_in_flight((first + count) << bits, 1)
            && matches!(self.mapping(slice, first + count)?,
                L2Mapping::Data { host: at, copied: true } if at.bytes() == host + count * size)
        {
            count += 1;
        }
        self.enter_in_flight(first, count);
        self.l2.pin(slice);
        Ok(Cleared::Punch {
            guest: first,
            count,
            host,
            slice,
        })
    }

    /// Marks clusters that were punched as zeros that keep their place. Returns whom to wake.
    pub(crate) fn punched(
        &mut self,
        guest: u64,
        count: u64,
        slice: u64,
        done: bool,
    ) -> (Vec<Waker>, Result<(), IoError>) {
        self.l2.unpin(slice);
        let mut result = Ok(());
        for cluster in (guest..guest + count).filter(|_| done) {
            if let Ok(L2Mapping::Data { host, copied: true }) = self.mapping(slice, cluster)
                && self
                    .set_mapping(slice, cluster, L2Entry::zero_allocated(host, true))
                    .is_ok()
            {
                continue;
            }
            result = Err(IoError::Corrupt);
        }
        (self.leave_in_flight(guest), result)
    }
}
