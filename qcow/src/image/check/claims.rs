//! The clusters that metadata refers to.

use std::ops::Range;

use super::super::counts::CountMap;

/// What metadata is called, by the number it has in [`Claims`], from one.
const STRUCTURES: [&str; 12] = [
    "header",
    "refcount table",
    "refcount block",
    "L1 table",
    "snapshot's L1 table",
    "L2 table",
    "snapshot table",
    "encryption header",
    "bitmap directory",
    "bitmap table",
    "bitmap data",
    "structure",
];

fn kind_of(structure: &str) -> u64 {
    let place = STRUCTURES.iter().position(|&other| other == structure);
    place.map_or(STRUCTURES.len(), |place| place + 1) as u64
}

pub(super) fn structure_of(kind: u64) -> &'static str {
    let place = usize::try_from(kind).unwrap_or_default();
    STRUCTURES
        .get(place.wrapping_sub(1))
        .copied()
        .unwrap_or("structure")
}

/// Whether it is the refcounts that something else is too: then they can be written somewhere else.
pub(super) fn is_refcounts(kind: u64) -> bool {
    kind == kind_of("refcount table") || kind == kind_of("refcount block")
}

/// How often metadata refers to each cluster, and which does so first: a number that is as small as both of them.
#[derive(Debug)]
pub(super) struct Claims(CountMap);

impl Claims {
    const KIND_BITS: u32 = 4;
    /// More than all tables together can refer to anything.
    const COUNT_MAX: u64 = u64::MAX >> Self::KIND_BITS;

    pub(super) fn new(window: Range<u64>) -> Self {
        Self(CountMap::new(window))
    }

    /// The map behind it, for what it takes.
    pub(super) fn map(&self) -> &CountMap {
        &self.0
    }

    /// Counts references; returns the kind that refers to the cluster already, or 0.
    pub(super) fn add(&mut self, cluster: u64, structure: &str, references: u64) -> u64 {
        let (other, count) = Self::split(self.0.get(cluster));
        let kind = if other == 0 { kind_of(structure) } else { other };
        let count = count.saturating_add(references).min(Self::COUNT_MAX);
        self.0.set(cluster, count << Self::KIND_BITS | kind);
        other
    }

    fn split(packed: u64) -> (u64, u64) {
        (packed & ((1 << Self::KIND_BITS) - 1), packed >> Self::KIND_BITS)
    }

    /// Every cluster that metadata refers to, the kind, and how often.
    pub(super) fn all(&self) -> impl Iterator<Item = (u64, u64, u64)> + '_ {
        let claims = self.0.nonzero();
        claims.map(|(cluster, packed)| {
            let (kind, count) = Self::split(packed);
            (cluster, kind, count)
        })
    }
}
