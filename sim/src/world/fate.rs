//! The outcome of an op, drawn when its turn comes: success, a part, or an error.
//!
//! Invariant: a chance of zero draws nothing, so that a fault that is switched off does not change a seed's other choices.

use block::ring::driver::Kind;

use super::World;
use super::op::{Fate, SimOp};
use crate::image::SECTOR;
use crate::random::Random;

impl World {
    /// Takes space for an op. Returns false if there is none.
    fn take_space(&mut self) -> bool {
        match &mut self.space_left {
            Some(0) => {
                self.starved = true;
                return false;
            }
            Some(left) => *left -= 1,
            None => {}
        }
        self.profile.no_space == 0 || self.time >= self.full_until
    }

    /// Returns the outcome of an op without injected faults. As in Linux, a write to a block device stops at its end
    /// and fails past it, and its length cannot be changed.
    pub(super) fn bounds(&self, op: &SimOp) -> Fate {
        let file = &self.files[op.file];
        let whole = Fate {
            bytes: op.len,
            errno: None,
        };
        if !file.fixed_size {
            return whole;
        }
        let room = file.len().saturating_sub(op.offset);
        let errno = match op.kind {
            Kind::Write { .. } if room == 0 => libc::ENOSPC,
            Kind::Write { .. } => {
                return Fate {
                    bytes: op.len.min(room),
                    errno: None,
                };
            }
            Kind::Allocate { mode: 0 } => libc::EOPNOTSUPP,
            Kind::Allocate { .. } if op.len > room => libc::EINVAL,
            Kind::Truncate => libc::EINVAL,
            _ => return whole,
        };
        Fate {
            bytes: 0,
            errno: Some(errno),
        }
    }

    /// Draws the outcome of an op.
    pub(super) fn fate(&mut self, op: &SimOp) -> Fate {
        let profile = self.profile;
        let fail = |errno| Fate {
            bytes: 0,
            errno: Some(errno),
        };
        if op.cancelled && self.random.one_in(2) {
            return fail(libc::ECANCELED);
        }
        if self.random.chance(profile.again) {
            return fail(self.random.pick(&[libc::EAGAIN, libc::EINTR]));
        }
        let part = |random: &mut Random| random.below(op.len / SECTOR as u64 + 1) * SECTOR as u64;
        if self.random.chance(profile.cancel) {
            let bytes = part(&mut self.random);
            return Fate {
                bytes,
                errno: Some(libc::ECANCELED),
            };
        }
        let mode = match op.kind {
            Kind::Allocate { mode } => mode,
            _ => 0,
        };
        if mode & libc::FALLOC_FL_PUNCH_HOLE != 0 && profile.no_punch
            || mode & libc::FALLOC_FL_ZERO_RANGE != 0 && profile.no_zero_range
        {
            return fail(libc::EOPNOTSUPP);
        }
        let error = match op.kind {
            Kind::Read => profile.read_error,
            Kind::Write { .. } => profile.write_error,
            Kind::DataSync => profile.sync_error,
            _ => profile.allocate_error,
        };
        if self.random.chance(error) {
            let bytes = part(&mut self.random);
            return Fate {
                bytes,
                errno: Some(libc::EIO),
            };
        }
        let needs_space = matches!(op.kind, Kind::Write { .. })
            || matches!(op.kind, Kind::Allocate { .. }) && mode & libc::FALLOC_FL_PUNCH_HOLE == 0;
        if needs_space
            && self.files[op.file].pages.is_none()
            && !self.files[op.file].contents.has_space(op.offset, op.len)
            && !self.take_space()
        {
            return fail(libc::ENOSPC);
        }
        let mut bytes = op.len;
        match self.bounds(op) {
            Fate {
                errno: None,
                bytes: room,
            } => bytes = bytes.min(room),
            refused => return refused,
        }
        let transfer = matches!(op.kind, Kind::Read | Kind::Write { .. });
        if transfer && op.len > SECTOR as u64 && self.random.chance(profile.short) {
            let unit = self.files[op.file].alignment.offset.max(SECTOR as u64);
            bytes = (unit * (1 + self.random.below(op.len / unit))).min(bytes);
        }
        Fate { bytes, errno: None }
    }
}
