//! The trace of a world, in a compact form: the same seed must give the same trace.

use std::fmt;

use block::ring::driver::Kind;

/// One event in a world.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Event {
    /// The time, counted in steps and submissions.
    pub time: u64,
    /// The worker's ring, numbered in the order in which they were made.
    pub ring: u32,
    /// The op, numbered in the order of submission.
    pub op: u64,
    /// The file, numbered in the order in which they were made.
    pub file: u32,
    pub(super) kind: Kind,
    /// The offset in bytes.
    pub offset: u64,
    /// The length in bytes.
    pub len: u64,
    pub(super) what: What,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum What {
    Submitted,
    /// These bytes of it took effect.
    Effect,
    /// It completed with this result.
    Completed(i32),
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::Read => "read",
            Kind::Write { dsync: false } => "write",
            Kind::Write { dsync: true } => "write-dsync",
            Kind::DataSync => "sync",
            Kind::Allocate { mode } if mode & libc::FALLOC_FL_PUNCH_HOLE != 0 => "punch",
            Kind::Allocate { mode } if mode & libc::FALLOC_FL_ZERO_RANGE != 0 => "zero-range",
            Kind::Allocate { .. } => "allocate",
            Kind::Truncate => "truncate",
            Kind::Watch => "watch",
            Kind::Command { .. } => "command",
        };
        let Self { time, ring, op, .. } = self;
        write!(f, "{time:>6} ring {ring} op {op}: {kind}")?;
        if self.kind != Kind::DataSync {
            write!(f, " file {} at {:#x}+{:#x}", self.file, self.offset, self.len)?;
        }
        match self.what {
            What::Submitted => f.write_str(", submitted"),
            What::Effect => f.write_str(", takes effect"),
            What::Completed(result) if result < 0 => {
                write!(f, ", fails with errno {}", result.saturating_neg())
            }
            What::Completed(result) => write!(f, ", completes with {result}"),
        }
    }
}

/// The events of a world: always hashed, kept on request.
#[derive(Debug, Default)]
pub(super) struct Trace {
    hash: u64,
    kept: Option<Vec<Event>>,
}

impl Trace {
    pub(super) fn record(&mut self) {
        self.kept.get_or_insert_default();
    }

    pub(super) fn events(&self) -> &[Event] {
        self.kept.as_deref().unwrap_or_default()
    }

    pub(super) fn hash(&self) -> u64 {
        self.hash
    }

    pub(super) fn note(&mut self, event: Event) {
        let kind = match event.kind {
            Kind::Read => 1,
            Kind::Write { dsync } => 2 + u64::from(dsync),
            Kind::DataSync => 4,
            Kind::Allocate { mode } => 16 + u64::from(mode.unsigned_abs()),
            Kind::Truncate => 5,
            Kind::Watch => 6,
            Kind::Command { code, .. } => 1 << 40 | u64::from(code),
        };
        let what = match event.what {
            What::Submitted => 1,
            What::Effect => 2,
            What::Completed(result) => 3 << 32 | u64::from(result.cast_unsigned()),
        };
        for word in [
            event.time,
            u64::from(event.ring) << 32 | u64::from(event.file),
            event.op,
            kind,
            event.offset,
            event.len,
            what,
        ] {
            self.hash = (self.hash.rotate_left(19) ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        }
        if let Some(kept) = &mut self.kept {
            kept.push(event);
        }
    }
}
