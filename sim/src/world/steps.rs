//! The steps of a world: an op takes effect, whole or in pieces, or completes.
//!
//! Invariant: an op completes once, after its last effect.

use block::canary::{Rule, broken};
use block::ring::driver::Kind;

use super::canaries::Canaries;
use super::op::{Fate, HELD, SimOp};
use super::{SimFile, World};
use crate::image::SECTOR;
use crate::memory;
use crate::trace::What;

impl World {
    /// Takes one step. Returns false if no op is in flight, or only held ones.
    pub(crate) fn step(&mut self) -> bool {
        if self.ops.is_empty() {
            return false;
        }
        if !self.dead && self.ops.iter().all(|op| op.not_before == HELD) {
            return false;
        }
        self.time += 1;
        if self.dead {
            let op = self.ops.remove(0);
            self.answer(&op, -libc::EIO);
            return true;
        }
        if self.full_until < self.time && self.random.chance(self.profile.no_space) {
            self.full_until = self.time + self.random.below(300);
        }
        let index = self.choose();
        let mut op = self.ops.remove(index);
        if op.result.is_some() {
            self.complete(op);
            return true;
        }
        if op.fate.is_none() {
            op.fate = Some(self.fate(&op));
        }
        let most = if self.random.chance(self.profile.piecewise) {
            SECTOR as u64 * (1 + self.random.below(op.len / SECTOR as u64 + 1))
        } else {
            u64::MAX
        };
        self.take_effect(&mut op, most);
        if op.result.is_none() || self.random.chance(self.profile.linger) {
            if self.random.chance(self.profile.late) {
                op.not_before = self.time + self.random.below(200);
            }
            self.ops.insert(index, op);
        } else {
            self.complete(op);
        }
        true
    }

    /// Chooses the op whose turn it is.
    fn choose(&mut self) -> usize {
        let ready = self.ops.iter().filter(|op| op.not_before <= self.time).count() as u64;
        if ready == 0 {
            // All are late: time passes.
            let next = self.ops.iter().enumerate().min_by_key(|(_, op)| op.not_before);
            let (index, time) = next.map_or((0, 0), |(index, op)| (index, op.not_before));
            self.time = self.time.max(time);
            return index;
        }
        let turn = if self.profile.reorder {
            self.random.below(ready)
        } else {
            0
        };
        let mut ready = self
            .ops
            .iter()
            .enumerate()
            .filter(|(_, op)| op.not_before <= self.time);
        ready.nth(turn as usize).map_or(0, |(index, _)| index)
    }

    /// Lets at most `most` more bytes of an op take effect; sets its result if that was all.
    pub(super) fn take_effect(&mut self, op: &mut SimOp, most: u64) {
        let fate = op.fate.unwrap_or(Fate {
            bytes: op.len,
            errno: None,
        });
        // The op that versions are kept for; none in an immediate world.
        let owner = (!self.profile.immediate).then_some(op.id);
        let all = self.files[op.file].len();
        let SimFile { contents, pages, .. } = &mut self.files[op.file];
        let failed = fate.errno.map(|errno| -errno);
        match op.kind {
            Kind::Read => {
                let there = all.saturating_sub(op.offset).min(fate.bytes);
                let part = most.min(there.saturating_sub(op.done));
                let mut bytes = vec![0; part as usize];
                match pages {
                    Some(pages) => pages.read((op.offset + op.done) as usize, &mut bytes),
                    None => contents.now.read(op.offset + op.done, &mut bytes),
                }
                op.copy(
                    |memory, at| memory.copy_from_slice(&bytes[at..at + memory.len()]),
                    part,
                );
                op.done += part;
                if op.done >= there {
                    // A driver that calls a short read a whole one.
                    let moved = if broken(Rule::ShortReadIsSuccess) {
                        op.len
                    } else {
                        op.done
                    };
                    op.result = Some(failed.unwrap_or(moved as i32));
                }
            }
            Kind::Write { .. } => {
                let part = most.min(fate.bytes - op.done);
                let mut bytes = vec![0; part as usize];
                match &op.completed_with {
                    Some(all) => bytes.copy_from_slice(&all[op.done as usize..][..part as usize]),
                    None => op.copy(
                        |memory, at| bytes[at..at + memory.len()].copy_from_slice(memory),
                        part,
                    ),
                }
                match pages {
                    Some(pages) => pages.write((op.offset + op.done) as usize, &bytes),
                    None => {
                        contents.write(owner, op.offset + op.done, &bytes);
                        self.changes += u64::from(part > 0);
                    }
                }
                op.done += part;
                if op.done == fate.bytes {
                    op.result = Some(failed.unwrap_or(op.done as i32));
                }
            }
            Kind::DataSync => op.result = Some(failed.unwrap_or(0)),
            Kind::Allocate { mode } => {
                let keep_size = mode & libc::FALLOC_FL_KEEP_SIZE != 0;
                if failed.is_none() {
                    if mode & libc::FALLOC_FL_PUNCH_HOLE != 0 {
                        contents.zero(owner, op.offset, op.len, false);
                    } else if mode & libc::FALLOC_FL_ZERO_RANGE != 0 {
                        contents.zero(owner, op.offset, op.len, true);
                    } else {
                        contents.preallocate(owner, op.offset, op.len, keep_size);
                    }
                    self.changes += 1;
                }
                op.result = Some(failed.unwrap_or(0));
            }
            Kind::Truncate => {
                if failed.is_none() {
                    contents.truncate(owner, op.len);
                    self.changes += 1;
                }
                op.result = Some(failed.unwrap_or(0));
            }
            Kind::Watch | Kind::Command { .. } => op.result = Some(-libc::EINVAL),
        }
        let (kind, submitted) = (op.kind, op.submitted);
        if kind != Kind::DataSync {
            self.note(op, What::Effect);
        } else if failed == Some(-libc::EIO) && !self.profile.immediate {
            let random = &mut self.random;
            let lost = random.pick(&[200, 500, 900, 1000]);
            self.files[op.file]
                .contents
                .fail_sync(submitted, || random.chance(lost));
            self.changes += 1;
        }
    }

    /// Completes an op whose effect is over.
    pub(super) fn complete(&mut self, op: SimOp) {
        let result = op.result.unwrap_or(-libc::EIO);
        self.note_fault(&op, -result);
        let counts = result >= 0 || op.ring < self.first_alive;
        if !self.profile.immediate && counts && self.files[op.file].pages.is_none() {
            let contents = &mut self.files[op.file].contents;
            match op.kind {
                Kind::DataSync if result < 0 => {}
                Kind::DataSync => {
                    let canaries = &self.canaries;
                    contents.sync(op.submitted, |written_by| canaries.covers(op.ring, written_by));
                    self.changes += 1;
                }
                Kind::Read | Kind::Watch | Kind::Command { .. } => {}
                Kind::Write { dsync } => {
                    contents.complete(op.id, op.offset, op.done, self.time);
                    if dsync && op.done > 0 && result >= 0 {
                        contents.force(op.id, op.offset, op.done);
                        self.changes += 1;
                    }
                }
                Kind::Allocate { .. } => contents.complete(op.id, op.offset, op.len, self.time),
                // The range cut off lies past its length, however far.
                Kind::Truncate => contents.complete(op.id, op.len, u64::MAX / 2, self.time),
            }
        }
        self.answer(&op, result);
    }

    fn note_fault(&mut self, op: &SimOp, errno: i32) {
        let now = Some(self.time);
        let at_door = self.files[op.file].pages.is_some();
        match (op.kind, errno) {
            (_, ..=0 | libc::EAGAIN | libc::EINTR | libc::EOPNOTSUPP) => {}
            (_, libc::ECANCELED) => self.faults.cancel = now,
            _ if at_door => self.faults.door = now,
            (Kind::Read, _) => self.faults.read = now,
            (Kind::Write { dsync }, _) => {
                self.faults.write = now;
                if dsync {
                    self.faults.sync = now;
                }
            }
            (Kind::DataSync, _) => self.faults.sync = now,
            _ => self.faults.allocate = now,
        }
    }

    fn answer(&mut self, op: &SimOp, result: i32) {
        self.note(op, What::Completed(result));
        memory::let_go(op.id);
        if op.completed_with.is_none() && !Canaries::loses_completion() {
            self.push_completion(op.ring, op.user_data, result);
        }
    }
}
