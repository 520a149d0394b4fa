//! The places of a span's bytes in the files of the layers that decide them, encoded.
//!
//! A scattered mapping takes four bytes a cluster, one without gaps four bytes a span.
//!
//! Invariant: a place that is found is one that the block status gave. Bytes without one (zeros, compressed clusters) have none
//! here, and a span whose places do not fit the encoding has none at all.

/// The most units of a span. A mapping that needs more has no places.
const UNITS_MAX: u64 = 1 << 13;
/// A unit without a place.
const NONE: u32 = u32::MAX;

/// Consecutive bytes of a span that lie in one piece, or have no place, up to the start of the next run.
#[derive(Clone, Copy, Debug)]
struct PlaceRun {
    /// The offset in the span, in bytes.
    start: u64,
    /// The offset of its first byte in a file, in bytes.
    place: Option<u64>,
}

impl PlaceRun {
    /// Returns the place that the byte at `offset` of the span has if the run goes on until there.
    fn place_at(&self, offset: u64) -> Option<u64> {
        self.place
            .map(|place| place.saturating_add(offset.saturating_sub(self.start)))
    }
}

/// The places of a span under construction.
#[derive(Debug, Default)]
pub(super) struct PlaceRuns {
    runs: Vec<PlaceRun>,
    too_many: bool,
}

impl PlaceRuns {
    /// Appends bytes that begin at `start` of the span, which is 0 or where the last ones end.
    pub(super) fn push(&mut self, start: u64, place: Option<u64>) {
        let continues = self.runs.last().is_some_and(|run| run.place_at(start) == place);
        if continues || self.too_many {
            return;
        }
        self.too_many = self.runs.len() as u64 >= UNITS_MAX;
        self.runs.push(PlaceRun { start, place });
    }

    /// Encodes the places of a span of `bytes` bytes (a power of two). Returns `None` if it has none or they do not fit.
    pub(super) fn encode(&self, bytes: u64) -> Option<Places> {
        if self.too_many || self.runs.iter().all(|run| run.place.is_none()) {
            return None;
        }
        // The largest power of two that divides the starts; then the one that divides all places at starts of units.
        let unit_bits = self
            .runs
            .iter()
            .fold(bytes, |all, run| all | run.start)
            .trailing_zeros();
        let places = self.runs.iter().filter_map(|run| run.place);
        let place_bits = places
            .fold(1 << unit_bits, |all, place| all | place)
            .trailing_zeros();
        if bytes >> unit_bits > UNITS_MAX {
            return None;
        }
        let mut units = Vec::with_capacity((bytes >> unit_bits) as usize);
        let mut ends = self.runs.iter().skip(1).map(|run| run.start);
        for run in &self.runs {
            let end = ends.next().unwrap_or(bytes);
            for start in (run.start..end).step_by(1 << unit_bits) {
                units.push(match run.place_at(start) {
                    Some(place) => u32::try_from(place >> place_bits)
                        .ok()
                        .filter(|unit| *unit != NONE)?,
                    None => NONE,
                });
            }
        }
        Some(Places {
            unit_bits,
            place_bits,
            units: units.into(),
        })
    }
}

/// The places of a span.
#[derive(Debug, Eq, PartialEq)]
pub(super) struct Places {
    unit_bits: u32,
    /// Places are stored without so many low bits.
    place_bits: u32,
    /// The place of each unit's first byte, or [`NONE`].
    units: Box<[u32]>,
}

impl Places {
    /// Returns the place of the `len` bytes (more than none) from `offset` of the span on, if they lie in one piece. Bytes past the
    /// span's end have none.
    #[inline]
    pub(super) fn find(&self, offset: u64, len: u64) -> Option<u64> {
        let first = offset >> self.unit_bits;
        let last = (offset + (len - 1)) >> self.unit_bits;
        let place = self.unit(first)?;
        for unit in first + 1..=last {
            if self.unit(unit)? != place + ((unit - first) << self.unit_bits) {
                return None;
            }
        }
        Some(place + (offset - (first << self.unit_bits)))
    }

    #[inline]
    fn unit(&self, unit: u64) -> Option<u64> {
        let stored = *self.units.get(unit as usize)?;
        (stored != NONE).then_some(u64::from(stored) << self.place_bits)
    }

    /// Returns the bytes of memory that they have beside themselves.
    pub(super) fn heap_bytes(&self) -> usize {
        size_of_val(&*self.units)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::numbers;
    use super::*;

    /// Encodes an array of the places of units of `unit` bytes.
    fn encode(array: &[Option<u64>], unit: u64) -> Option<Places> {
        let mut runs = PlaceRuns::default();
        for (start, place) in (0..).step_by(unit as usize).zip(array) {
            runs.push(start, *place);
        }
        runs.encode(unit * array.len() as u64)
    }

    #[test]
    fn places_answer_as_the_array_they_were_made_of() {
        let (mut found, mut split, mut absent) = (0, 0, 0);
        for seed in 0..400 {
            let mut draw = numbers(seed);
            let unit = 512 << draw(8);
            let count = 1 << draw(9);
            let grain = 512 << draw(4);
            let stay = 1 + draw(6);
            let mut last: Option<u64> = None;
            let array: Vec<Option<u64>> = (0..count)
                .map(|_| {
                    last = match last {
                        _ if draw(stay) == 0 => Some(draw(1 << 20) * grain),
                        _ if draw(9) == 0 => None,
                        last => last.map(|place| place + unit),
                    };
                    last
                })
                .collect();
            let bytes = unit * count;
            let Some(places) = encode(&array, unit) else {
                assert!(array.iter().all(Option::is_none), "seed {seed}: {array:?}");
                continue;
            };
            for _ in 0..200 {
                let from = draw(bytes / 512) * 512;
                let len = (1 + draw(4 * unit / 512)) * 512;
                let len = len.min(bytes - from);
                let place_at = |at: u64| array[(at / unit) as usize].map(|place| place + at % unit);
                let place = place_at(from);
                let expected = place.filter(|place| {
                    (from..from + len)
                        .step_by(512)
                        .all(|at| place_at(at) == Some(place + (at - from)))
                });
                assert_eq!(
                    places.find(from, len),
                    expected,
                    "seed {seed}: {len} bytes at {from} of {places:?}"
                );
                match (place, expected) {
                    (_, Some(_)) => found += 1,
                    (Some(_), None) => split += 1,
                    (None, _) => absent += 1,
                }
            }
        }
        let often = [found, split, absent];
        assert!(often.iter().all(|count| *count > 2000), "{often:?}");
    }

    #[test]
    fn places_of_contiguous_bytes_take_one_unit() {
        let contiguous: Vec<_> = (0..512).map(|at| Some((7 + at) << 16)).collect();
        let places = encode(&contiguous, 64 << 10).expect("places");
        assert_eq!(places.heap_bytes(), 4);
        assert_eq!(places.find(65536 * 3 + 512, 65536 * 9), Some((10 << 16) + 512));
        let scattered: Vec<_> = (0..512).map(|at| Some((at * 5039 % 512) << 16)).collect();
        assert_eq!(
            encode(&scattered, 64 << 10).map(|places| places.heap_bytes()),
            Some(2048)
        );
    }

    #[test]
    fn places_that_do_not_fit_are_left_out() {
        let far = |place| encode(&[Some(place), None], 64 << 10);
        assert!(far(0xffff_fffe << 16).is_some());
        assert_eq!(far(0xffff_ffff << 16), None, "it would look like no place");
        assert_eq!(far(1 << 48), None);
        assert_eq!(far(u64::MAX), None);
        assert_eq!(encode(&[None, None], 64 << 10), None);
        let runs = |count: u64| {
            let array: Vec<_> = (0..count).map(|at| Some((at * 5039 % 8209) << 16)).collect();
            encode(&array, 64 << 10)
        };
        assert!(runs(UNITS_MAX).is_some());
        assert_eq!(runs(2 * UNITS_MAX), None);
    }
}
