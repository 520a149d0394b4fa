//! The clusters that metadata refers to.

use std::ops::Range;

use super::super::counts::CountMap;

/// The names of metadata structures, by their number in [`Claims`], from one.
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

/// Returns true for refcounts: if their clusters have another use as well, they can be written somewhere else.
pub(super) fn is_refcounts(kind: u64) -> bool {
    kind == kind_of("refcount table") || kind == kind_of("refcount block")
}

/// The number of references to each cluster, and the first kind of metadata that refers to it, packed into one
/// integer.
#[derive(Debug)]
pub(super) struct Claims(CountMap);

impl Claims {
    const KIND_BITS: u32 = 4;
    /// More than all tables together can refer to any cluster.
    const COUNT_MAX: u64 = u64::MAX >> Self::KIND_BITS;

    pub(super) fn new(window: Range<u64>) -> Self {
        Self(CountMap::new(window))
    }

    /// Returns the map behind it, to measure its memory.
    pub(super) fn map(&self) -> &CountMap {
        &self.0
    }

    /// Counts references. Returns the kind that refers to the cluster already, or 0.
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

    /// Returns every cluster that metadata refers to, the kind, and the number of references.
    pub(super) fn all(&self) -> impl Iterator<Item = (u64, u64, u64)> + '_ {
        let claims = self.0.nonzero();
        claims.map(|(cluster, packed)| {
            let (kind, count) = Self::split(packed);
            (cluster, kind, count)
        })
    }
}
