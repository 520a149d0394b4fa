//! One span of the index: the deciding layer of each of its bytes, encoded.
//!
//! Invariant: the encoding is lossless. Its unit is the largest power of two that divides the start of every run.

/// The most runs of a span. A span with more is not indexed: no mapping of a slice's size has so many.
pub(super) const RUNS_MAX: usize = 1 << 16;

/// A run begins at this unit of the span, which takes the upper bits; its layer takes the lower.
const LAYER_BITS: u32 = 8;

/// Consecutive bytes of a span that one layer decides, from `start` to the start of the next run.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Run {
    /// The offset in the span, in bytes; 0 for the first run.
    pub(super) start: u64,
    /// The layer: 0 is the uppermost.
    pub(super) layer: u8,
}

/// The deciding layers of a span.
#[derive(Debug, Eq, PartialEq)]
pub(super) enum Span {
    /// One layer decides all of it.
    Whole(u8),
    /// Runs in ascending order, for long extents.
    Runs { unit_bits: u32, runs: Box<[u32]> },
    /// A layer for each unit, for scattered extents.
    Map { unit_bits: u32, layers: Box<[u8]> },
}

impl Span {
    /// Encodes `runs`, whose starts ascend from 0, of a span of `bytes` bytes (a power of two). Returns `None` for a span
    /// with too many runs.
    pub(super) fn encode(runs: &[Run], bytes: u64) -> Option<Self> {
        let first = runs.first()?;
        if runs.len() == 1 {
            return Some(Self::Whole(first.layer));
        }
        if runs.len() > RUNS_MAX {
            return None;
        }
        let unit_bits = runs.iter().fold(0, |all, run| all | run.start).trailing_zeros();
        let units = bytes >> unit_bits;
        if units > 1 << (u32::BITS - LAYER_BITS) {
            return None;
        }
        if runs.len() as u64 * 4 <= units {
            let encode = |run: &Run| ((run.start >> unit_bits) as u32) << LAYER_BITS | u32::from(run.layer);
            return Some(Self::Runs {
                unit_bits,
                runs: runs.iter().map(encode).collect(),
            });
        }
        let mut layers = Vec::with_capacity(units as usize);
        let ends = runs[1..].iter().map(|run| run.start).chain([bytes]);
        for (run, end) in runs.iter().zip(ends) {
            layers.resize((end >> unit_bits) as usize, run.layer);
        }
        Some(Self::Map {
            unit_bits,
            layers: layers.into(),
        })
    }

    /// Returns the layer that decides the byte at `offset` of the span, and the end of its run, or any offset past
    /// `enough` that lies before it.
    #[inline]
    pub(super) fn find(&self, offset: u64, enough: u64) -> (u8, u64) {
        match self {
            Self::Whole(layer) => (*layer, u64::MAX),
            Self::Runs { unit_bits, runs } => {
                let key = (offset >> unit_bits) as u32;
                let next = runs.partition_point(|run| run >> LAYER_BITS <= key);
                let layer = runs.get(next.wrapping_sub(1)).copied().unwrap_or_default() as u8;
                let end = runs
                    .get(next)
                    .map_or(u64::MAX, |run| u64::from(run >> LAYER_BITS) << unit_bits);
                (layer, end)
            }
            Self::Map { unit_bits, layers } => {
                let mut unit = (offset >> unit_bits) as usize;
                let layer = layers.get(unit).copied().unwrap_or_default();
                loop {
                    unit += 1;
                    let end = (unit as u64) << unit_bits;
                    if end >= enough {
                        return (layer, end);
                    }
                    match layers.get(unit) {
                        Some(next) if *next == layer => {}
                        Some(_) => return (layer, end),
                        None => return (layer, u64::MAX),
                    }
                }
            }
        }
    }

    /// Returns the bytes of memory that it has beside itself.
    pub(super) fn heap_bytes(&self) -> usize {
        match self {
            Self::Whole(_) => 0,
            Self::Runs { runs, .. } => size_of_val(&**runs),
            Self::Map { layers, .. } => layers.len(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::numbers;
    use super::*;

    /// The runs of a span, given the layer of each unit.
    fn runs_of(layers: &[u8], unit: u64) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        for (start, &layer) in (0..).step_by(unit as usize).zip(layers) {
            if runs.last().is_none_or(|run| run.layer != layer) {
                runs.push(Run { start, layer });
            }
        }
        runs
    }

    #[test]
    fn span_answers_as_the_array_it_was_made_of() {
        let mut kinds = [0; 3];
        for seed in 0..400 {
            let mut draw = numbers(seed);
            let unit = 512 << draw(8);
            let units = 1 << (1 + draw(9));
            let (layers, often) = (1 + draw(63), draw(8));
            let stay = 1 + draw(1 << often);
            let mut last = 0;
            let array: Vec<u8> = (0..units)
                .map(|_| {
                    if draw(stay) == 0 {
                        last = draw(layers) as u8;
                    }
                    last
                })
                .collect();
            let bytes = unit * units;
            let span = Span::encode(&runs_of(&array, unit), bytes).expect("few runs");
            kinds[match span {
                Span::Whole(_) => 0,
                Span::Runs { .. } => 1,
                Span::Map { .. } => 2,
            }] += 1;
            for _ in 0..200 {
                let from = draw(bytes / 512) * 512;
                let enough = from + 512 + draw((bytes - from) / 512) * 512;
                let (layer, end) = span.find(from, enough);
                let layer_at = |at: u64| array[(at / unit) as usize];
                assert_eq!(layer, layer_at(from), "seed {seed}: at {from} of {span:?}");
                assert!(end > from);
                for at in (from..end.min(bytes)).step_by(512) {
                    assert_eq!(layer_at(at), layer, "seed {seed}: {from}..{end} of {span:?}");
                }
                let whole = end >= enough || end >= bytes || layer_at(end) != layer;
                assert!(whole, "seed {seed}: {from}..{end} of {span:?} ends early");
            }
        }
        assert!(
            kinds.iter().all(|count| *count > 20),
            "each encoding occurs: {kinds:?}"
        );
    }

    #[test]
    fn span_takes_the_smaller_encoding() {
        let span = 32 << 20;
        let run = |start, layer| Run { start, layer };
        let sizes = |runs: &[Run]| Span::encode(runs, span).map(|span| span.heap_bytes());
        assert_eq!(sizes(&[run(0, 3)]), Some(0));
        assert_eq!(sizes(&[run(0, 3), run(65536, 1)]), Some(8));
        let scattered: Vec<Run> = (0..512).map(|at| run(at * 65536, at as u8 % 2)).collect();
        assert_eq!(sizes(&scattered), Some(512));
        // The end of a layer that is a few sectors longer than a cluster boundary.
        let ragged: Vec<Run> = scattered.iter().copied().chain([run(span - 512, 0)]).collect();
        assert_eq!(sizes(&ragged), Some(4 * 513));
    }

    #[test]
    fn span_with_too_many_runs_is_refused() {
        let runs: Vec<Run> = (0..=RUNS_MAX as u64)
            .map(|at| Run {
                start: at * 512,
                layer: (at % 2) as u8,
            })
            .collect();
        assert_eq!(Span::encode(&runs, 1 << 30), None);
        let fine = [Run { start: 0, layer: 0 }, Run { start: 512, layer: 1 }];
        assert_eq!(Span::encode(&fine, 1 << 40), None, "2^31 units");
        assert_eq!(Span::encode(&[], 1 << 20), None);
    }
}
