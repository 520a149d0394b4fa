//! The behaviour of a world's disks, and the faults that it has injected so far.

use crate::Random;

/// Behaviour of a world's disks. Chances are in a thousand. The default is a disk without faults that performs
/// one op after the other, in the order of submission.
#[derive(Clone, Copy, Debug, Default)]
pub struct Profile {
    /// Perform each op at submission, durably: for set-up and inspection.
    pub immediate: bool,
    /// Ops take effect in any order.
    pub reorder: bool,
    /// An op takes effect piece by piece, with other ops between.
    pub piecewise: u32,
    /// An op's completion comes some steps after its effect.
    pub linger: u32,
    /// An op is delayed for a long time.
    pub late: u32,
    /// A read is delayed, in addition to `late`.
    pub late_reads: u32,
    /// A read or write transfers only a part.
    pub short: u32,
    /// `EAGAIN` or `EINTR`, without effect.
    pub again: u32,
    /// `ECANCELED`, unasked, with any part of the effect.
    pub cancel: u32,
    /// `EIO` for a read.
    pub read_error: u32,
    /// `EIO` for a write, with any part of the effect.
    pub write_error: u32,
    /// `EIO` for a sync; the cache forgets any part of what it covered.
    pub sync_error: u32,
    /// `EIO` for an allocation, a punch or a change of length.
    pub allocate_error: u32,
    /// The chance at each step that space runs out; it comes back after a while.
    pub no_space: u32,
    /// The host cannot punch holes.
    pub no_punch: bool,
    /// The host cannot zero ranges.
    pub no_zero_range: bool,
}

impl Profile {
    /// Every op is performed at once and none fails.
    pub const IMMEDIATE: Self = Self {
        immediate: true,
        reorder: false,
        piecewise: 0,
        linger: 0,
        late: 0,
        late_reads: 0,
        short: 0,
        again: 0,
        cancel: 0,
        read_error: 0,
        write_error: 0,
        sync_error: 0,
        allocate_error: 0,
        no_space: 0,
        no_punch: false,
        no_zero_range: false,
    };

    /// Draws a disk without errors that reorders writes, and may tear, keep and delay them.
    #[must_use]
    pub fn draw(random: &mut Random) -> Self {
        Self {
            reorder: true,
            piecewise: random.pick(&[0, 300]),
            linger: random.pick(&[0, 300, 800]),
            late: random.pick(&[0, 100]),
            ..Self::default()
        }
    }

    /// Returns true if requests may fail on this disk.
    #[must_use]
    pub fn has_errors(&self) -> bool {
        let errors = [
            self.cancel,
            self.read_error,
            self.write_error,
            self.sync_error,
            self.allocate_error,
            self.no_space,
        ];
        errors.iter().any(|&chance| chance > 0)
    }
}

/// The times ([`SimWorld::time`](crate::SimWorld::time)) of the last failed ops, by the op's kind. Retries and operations
/// that the host does not support do not count.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Faults {
    /// A read.
    pub read: Option<u64>,
    /// A write.
    pub write: Option<u64>,
    /// A sync, or a forced write.
    pub sync: Option<u64>,
    /// An allocation, a punch or a change of length.
    pub allocate: Option<u64>,
    /// An op on registered pages, at their door.
    pub door: Option<u64>,
    /// An op of any kind that ended with `ECANCELED`.
    pub cancel: Option<u64>,
}
