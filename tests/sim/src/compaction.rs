//! Compactions of half-free images beside the requests of all queues, some of them stopped on the way.

use simulator::{Random, SECTOR};

use crate::bitmaps::Bitmaps;
use crate::plan::{Ask, Case, Planned};
use crate::shape::Shape;
use crate::troubles;

/// Gives an image clusters in use that may be discarded, and a file that may be cut.
pub(crate) fn draw_gaps(shape: &mut Shape, random: &mut Random) {
    // A device has no end to cut. A cluster that is discarded is free.
    (shape.device, shape.no_unref, shape.sparse) = (0, false, true);
    shape.filled = shape.filled.max(random.pick(&[500, 1000]));
}

/// Returns discards of about half of a disk.
pub(crate) fn draw_discards(shape: &Shape, random: &mut Random) -> Vec<Planned> {
    let sectors = shape.size() / SECTOR as u64;
    let mut discards = Vec::new();
    let mut at = random.below((sectors / 4).max(1));
    while at < sectors {
        let count = (1 + random.below((sectors / 3).max(1))).min(sectors - at);
        discards.push(Planned::new(Ask::Discard, at, count));
        at += count + random.below((sectors / 4).max(1));
    }
    discards
}

/// Returns a compaction. Slow ones wait between their steps.
pub(crate) fn draw_ask(random: &mut Random, may_be_slow: bool) -> Ask {
    Ask::Compact {
        reports: random.pick(&[0, 0, 0, 1, 3]),
        slow: may_be_slow && !random.one_in(3),
    }
}

/// The run of a seed whose image is compacted a few times. Before anything can go wrong parts of the disk are discarded. Narrow
/// refcount blocks, snapshots that are deleted again, and rebuilt refcounts put tables of every kind near the end of the file.
pub(crate) fn draw(seed: u64) -> Case {
    let mut case = Case::draw(seed);
    let random = &mut Random::new(seed.rotate_left(44));
    case.profile = troubles::draw(case.profile, seed);
    let shape = &mut case.shape;
    draw_gaps(shape, random);
    shape.bytes = shape.bytes.max(random.pick(&[48 << 10, 96 << 10]));
    if !shape.v2 && shape.cluster_bits < 14 {
        shape.cluster_bits = 9;
        shape.refcount_bits = random.pick(&[16, 32, 64, 64]);
    }
    shape.dirty |= !shape.v2 && random.one_in(3);
    if shape.bitmaps.is_none() && !shape.v2 && random.one_in(8) {
        shape.bitmaps = Some(Bitmaps::draw(random));
    }
    *shape = shape.sound();
    let (shape, sectors) = (*shape, shape.bytes / SECTOR as u64);
    case.before = draw_discards(&shape, random);
    case.plan.truncate(50);
    case.plan
        .retain(|planned| !matches!(planned.ask, Ask::Grow(_)) && planned.first + planned.count <= sectors);
    let is_snapshot_taken = shape.data_file.is_none() && shape.refcount_bits > 1 && random.one_in(2);
    if is_snapshot_taken {
        // Their new tables lie behind all others.
        let first = random.below(3).min(case.plan.len() as u64) as usize;
        let second = first + 1 + random.below(2).min((case.plan.len() - first) as u64) as usize;
        case.plan.insert(first, Planned::new(Ask::Snapshot(0), 0, 0));
        case.plan.insert(second, Planned::new(Ask::Unsnapshot(0), 0, 0));
        // Those that stay share what moves with the disk.
        for number in 1..=random.below(3) as u32 {
            let place = first + random.below((case.plan.len() - first) as u64) as usize;
            case.plan.insert(place, Planned::new(Ask::Snapshot(number), 0, 0));
        }
    }
    // Time has to pass between the steps.
    let may_be_slow = case.passes_time();
    for _ in 0..2 + random.below(3) {
        let place = random.below(1 + case.plan.len() as u64) as usize;
        let compact = draw_ask(random, may_be_slow);
        let planned = Planned {
            alone: random.one_in(4),
            ..Planned::new(compact, 0, 0)
        };
        case.plan.insert(place, planned);
        // Writes that are in flight when it begins, also to clusters that will move.
        for _ in 0..random.below(4) {
            let first = random.below(sectors);
            let write = Planned {
                lane: random.below(case.lanes as u64) as usize,
                alone: false,
                ..Planned::new(
                    Ask::Write { fua: false },
                    first,
                    (1 + random.below(16)).min(sectors - first),
                )
            };
            case.plan.insert(place, write);
        }
    }
    // The plan is mostly over before clusters of the guest's move, and no write in flight then.
    let random = &mut Random::new(seed.rotate_left(20));
    if random.one_in(4) {
        case.writes_on = true;
        case.depth = random.pick(&[4, 8]);
        case.profile.late = random.pick(&[300, 700]);
    }
    // Bitmaps move only before the guest has changed anything.
    if case.shape.bitmaps.is_some() && !random.one_in(3) {
        let compact = draw_ask(random, may_be_slow);
        let first = Planned {
            alone: true,
            ..Planned::new(compact, 0, 0)
        };
        case.plan.insert(0, first);
    }
    case
}
