//! Loops of discards and writes, after which a file should be hardly longer than what it holds.

use crate::Random;

/// A mebibyte.
const MIB: u64 = 1 << 20;

/// One request, in bytes of the disk.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Step {
    /// Write `len` bytes of this value at `offset`.
    Write {
        /// The first byte.
        offset: u64,
        /// The length.
        len: u64,
        /// The value, not 0.
        value: u8,
    },
    /// Discard `len` bytes at `offset`.
    Discard {
        /// The first byte.
        offset: u64,
        /// The length.
        len: u64,
    },
    /// Write `len` zeros at `offset`, and unmap them.
    Zeroes {
        /// The first byte.
        offset: u64,
        /// The length.
        len: u64,
    },
    /// Make it durable.
    Flush,
}

impl Step {
    /// Returns the command of `qemu-io` for it.
    #[must_use]
    pub fn command(&self) -> String {
        match self {
            Self::Write { offset, len, value } => format!("write -q -P {value} {offset} {len}"),
            Self::Discard { offset, len } => format!("discard -q {offset} {len}"),
            Self::Zeroes { offset, len } => format!("write -q -z -u {offset} {len}"),
            Self::Flush => "flush".to_owned(),
        }
    }
}

/// A loop of discards and writes.
#[derive(Clone, Debug)]
pub struct Loop {
    /// Its name.
    pub name: &'static str,
    /// The requests, in order.
    pub steps: Vec<Step>,
}

/// Returns five loops on a disk of `mib` mebibytes, which fill it, or half of it in the third.
#[must_use]
pub fn loops(mib: u64) -> Vec<Loop> {
    let whole = |flush: bool| {
        let mut steps = Vec::new();
        for value in 1..=4 {
            write(&mut steps, 0, mib * MIB, MIB, value);
            steps.extend(flush.then_some(Step::Flush));
            if value < 4 {
                let (offset, len) = (0, mib * MIB);
                steps.push(Step::Discard { offset, len });
                steps.extend(flush.then_some(Step::Flush));
            }
        }
        steps
    };
    let list = |name, steps| Loop { name, steps };
    vec![
        list("whole-disk", whole(false)),
        list("whole-disk-flushed", whole(true)),
        list("random-half-full", random(mib)),
        list("scattered-trims", trims(mib)),
        list("zeroes-and-rewrite", zeroes(mib)),
    ]
}

/// Writes `from..to` in requests of `each` bytes.
fn write(steps: &mut Vec<Step>, from: u64, to: u64, each: u64, value: u8) {
    steps.extend((from..to).step_by(each as usize).map(|offset| Step::Write {
        offset,
        len: each.min(to - offset),
        value,
    }));
}

/// Half of the disk is in use: a mebibyte of it is discarded, another one written.
fn random(mib: u64) -> Vec<Step> {
    let mut random = Random::new(7);
    let (mut full, mut empty): (Vec<u64>, Vec<u64>) = ((0..mib / 2).collect(), (mib / 2..mib).collect());
    let mut steps = Vec::new();
    write(&mut steps, 0, mib / 2 * MIB, MIB, 1);
    for turn in 0..4 * mib {
        let (from, to) = (random.below(full.len() as u64), random.below(empty.len() as u64));
        let (old, new) = (full.swap_remove(from as usize), empty.swap_remove(to as usize));
        full.push(new);
        empty.push(old);
        steps.push(Step::Discard {
            offset: old * MIB,
            len: MIB,
        });
        steps.push(Step::Write {
            offset: new * MIB,
            len: MIB,
            value: (turn % 250) as u8 + 2,
        });
    }
    steps
}

/// Two clusters of 64 KiB in every eight are discarded, at another place in each round, and the disk is written from
/// its start to its end.
fn trims(mib: u64) -> Vec<Step> {
    let mut steps = Vec::new();
    write(&mut steps, 0, mib * MIB, MIB, 1);
    for round in 0..4 {
        let places = (round * MIB / 8..mib * MIB).step_by(MIB as usize / 2);
        steps.extend(places.map(|offset| Step::Discard { offset, len: MIB / 8 }));
        write(&mut steps, 0, mib * MIB, MIB / 4, round as u8 + 2);
    }
    steps
}

/// The disk is overwritten with zeros that give its space back, and written again.
fn zeroes(mib: u64) -> Vec<Step> {
    let mut steps = Vec::new();
    for value in 1..=4 {
        write(&mut steps, 0, mib * MIB, MIB, value);
        if value < 4 {
            let offsets = (0..mib * MIB).step_by(MIB as usize / 4);
            steps.extend(offsets.map(|offset| Step::Zeroes { offset, len: MIB / 4 }));
        }
    }
    steps
}
