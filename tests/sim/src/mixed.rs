//! Compactions, other sizes, snapshots and bitmaps in one run, beside the requests of several queues.
//!
//! The first queue has the disk become smaller and larger, its snapshots created, applied and deleted, and bitmaps added, one after the
//! other. The second one has the image compacted meanwhile, so that any of these may come between two steps of a compaction.

use simulator::Random;

use crate::bitmaps::Bitmaps;
use crate::compaction;
use crate::plan::{Ask, Case, Planned};
use crate::resize;

/// The first number of the snapshots that are applied.
const APPLIED: u32 = 100;

/// The run of a seed in which all of these meet.
pub(crate) fn draw(seed: u64) -> Case {
    let mut case = resize::draw(seed);
    let random = &mut Random::new(seed.rotate_left(52));
    let shape = &mut case.shape;
    compaction::draw_gaps(shape, random);
    // A data file has one version.
    shape.data_file = None;
    shape.refcount_bits = shape.refcount_bits.max(4);
    if random.one_in(4) {
        shape.bitmaps = Some(Bitmaps::draw(random));
    }
    *shape = shape.sound();
    case.before = compaction::draw_discards(shape, random);
    for number in APPLIED..=APPLIED + random.below(3) as u32 {
        let create = random.below(1 + case.plan.len() as u64) as usize;
        put(&mut case, create, Ask::Snapshot(number), random);
        // Soon after, as it is refused when the disk has another size.
        let mut place = create + 1;
        for ask in [Ask::Apply(number), Ask::Unsnapshot(number)] {
            let left = case.plan.len() - place;
            place += (random.below(16) as usize).min(left);
            if !random.one_in(4) {
                put(&mut case, place, ask, random);
                place += 1;
            }
        }
    }
    if case.shape.bitmaps.is_some() && random.one_in(2) {
        let place = random.below(1 + case.plan.len() as u64) as usize;
        put(&mut case, place, Ask::Bitmap(0), random);
    }
    let may_be_slow = case.passes_time();
    for _ in 0..2 + random.below(4) {
        let place = random.below(1 + case.plan.len() as u64) as usize;
        let compact = compaction::draw_ask(random, may_be_slow);
        let planned = Planned {
            lane: 1,
            alone: random.one_in(4),
            ..Planned::new(compact, 0, 0)
        };
        case.plan.insert(place, planned);
    }
    case
}

/// Has the first queue ask for an operation.
fn put(case: &mut Case, place: usize, ask: Ask, random: &mut Random) {
    let planned = Planned {
        alone: random.one_in(4),
        ..Planned::new(ask, 0, 0)
    };
    case.plan.insert(place, planned);
}
