//! Rules of a kernel and of a disk that a special build breaks ([`block::canary`]). Without one broken, nothing here
//! has an effect.

use std::collections::BTreeMap;

use block::buffer::IoSlice;
use block::canary::{Rule, broken, strikes};
use block::ring::driver::Kind;

use super::World;
use super::op::{HELD, SimOp};

/// State of a kernel and a disk that break rules.
#[derive(Debug, Default)]
pub(super) struct Canaries {
    /// The ring of each op, by the op's number, for a disk whose syncs cover their own ring's writes only.
    rings: Vec<u32>,
    /// The first stretch that each op on registered pages named, by its ring and user data.
    stretches: BTreeMap<(u32, u64), IoSlice>,
}

impl Canaries {
    /// Notes the ring of the next op.
    pub(super) fn submit(&mut self, ring: u32) {
        if broken(Rule::FlushMissesQueue) {
            self.rings.push(ring);
        }
    }

    /// Returns true if a sync by `ring` covers what op `op` has written.
    pub(super) fn covers(&self, ring: u32, op: u64) -> bool {
        !broken(Rule::FlushMissesQueue) || self.rings.get(op as usize) == Some(&ring)
    }

    /// Returns the stretch of registered pages that an op is carried out on; a continued op stays where it began if
    /// that rule is broken.
    pub(super) fn stretch(&mut self, ring: u32, user_data: u64, named: IoSlice) -> IoSlice {
        if !broken(Rule::RegisteredStaysBehind) {
            return named;
        }
        let first = self.stretches.entry((ring, user_data)).or_insert(named);
        IoSlice::new(first.ptr(), named.len())
    }

    /// Returns true if a completion is lost.
    pub(super) fn loses_completion() -> bool {
        strikes(Rule::LostCompletion, 50)
    }
}

impl World {
    /// Completes an op when it is submitted, if it breaks a rule so. It takes effect some time later, with the bytes of
    /// now, because its memory may be gone then.
    pub(super) fn complete_early(&mut self, op: &mut SimOp) {
        let rules = [
            Rule::MemoryFreedEarly,
            Rule::ZerosNotAwaited,
            Rule::ReuseBeforePunch,
        ];
        if !rules.map(broken).contains(&true) || op.not_before == HELD {
            return;
        }
        let fate = self.bounds(op);
        let mut bytes = Vec::new();
        if matches!(op.kind, Kind::Write { .. }) {
            bytes.resize(op.len as usize, 0);
            op.copy(
                |memory, at| bytes[at..at + memory.len()].copy_from_slice(memory),
                op.len,
            );
        }
        let at_door = self.files[op.file].pages.is_some();
        let (is_early, result) = match op.kind {
            Kind::Write { .. } if at_door => {
                let zeros = bytes.iter().all(|&byte| byte == 0);
                (zeros && broken(Rule::ZerosNotAwaited), fate.bytes as i32)
            }
            Kind::Write { .. } => (strikes(Rule::MemoryFreedEarly, 5), fate.bytes as i32),
            Kind::Allocate { mode } => {
                let punches = mode & libc::FALLOC_FL_PUNCH_HOLE != 0;
                (punches && broken(Rule::ReuseBeforePunch), 0)
            }
            _ => (false, 0),
        };
        if is_early && fate.errno.is_none() {
            op.fate = Some(fate);
            op.not_before += 50 + self.random.below(400);
            op.completed_with = Some(bytes);
            self.push_completion(op.ring, op.user_data, result);
        }
    }
}
