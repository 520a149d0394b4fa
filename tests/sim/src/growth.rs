//! Disks that grow by any amount, while other queues write, discard, zero and flush up to the end that they know.

use simulator::{Profile, Random, SECTOR};

use crate::plan::{Ask, Case, DATA_SECTORS_MAX, Planned};
use crate::shape::{Below, Shape};

/// The most bytes of most disks that grow. Of clusters of 512 bytes it takes more than one cluster of an L1 table.
const LARGE: u64 = 4 << 20;

/// The most bytes of the others: their L1 tables cross what refcount blocks count.
const HUGE: u64 = 32 << 20;

/// Returns a larger size for a disk of `bytes`: around what a sector, a 4 KiB block, a cluster, an L2 table, a cluster of the
/// L1 table and a refcount block cover. Some sizes end inside a sector, of which only whole ones become the guest's.
pub(crate) fn larger(shape: &Shape, bytes: u64, most: u64, random: &mut Random) -> u64 {
    let sector = SECTOR as u64;
    let (table, l1, counted) = spans(shape);
    let unit = random.pick(&[sector, 4096, shape.cluster(), table, l1, counted]);
    let nudge = random.pick(&[0, 0, sector, 4096 - sector, unit - sector]);
    let within = random.pick(&[0, 0, 0, 8, 504]);
    let far = (bytes / unit + 1 + random.below(3)) * unit + nudge + within;
    if far <= most {
        return far;
    }
    (bytes + sector * (1 + random.below(2 * table / sector))).min(most.max(bytes + sector))
}

/// Returns the bytes of the guest that one L2 table maps, those that one cluster of the L1 table maps, and the bytes of
/// the file that one refcount block counts.
fn spans(shape: &Shape) -> (u64, u64, u64) {
    let cluster = shape.cluster();
    let table = cluster * (cluster / 8);
    let counted = cluster * (cluster * 8 / u64::from(shape.refcount_bits));
    (table, table * (cluster / 8), counted)
}

/// A shape of any size, whose disk may end inside a cluster, a 4 KiB block and a sector.
pub(crate) fn draw_shape(random: &mut Random) -> Shape {
    let bytes = SECTOR as u64 * (1 + random.below(200));
    let snapshot = random.one_in(12);
    let below = [bytes / 1024 * 512, bytes + 512, bytes + (1 << 16)];
    let below = random.pick(&below).max(512);
    Shape {
        cluster_bits: random.pick(&[9, 9, 9, 10, 12]),
        refcount_bits: if snapshot {
            random.pick(&[2, 16, 64])
        } else {
            random.pick(&[1, 2, 4, 8, 16, 32, 64])
        },
        bytes,
        ragged: random.pick(&[0, 0, 0, 8, 312]),
        below: match random.below(6) {
            _ if snapshot => Below::Nothing,
            0 | 1 => Below::Raw(below),
            2 => Below::Qcow(below),
            _ => Below::Nothing,
        },
        snapshot,
        lazy: random.one_in(12),
        filled: random.pick(&[0, 500, 1000]),
        alignment: random.pick(&[1, 512, 4096]),
        device: random.pick(&[0, 0, 0, 1 << 20]),
        sparse: !random.one_in(6),
        no_unref: random.one_in(4),
        cache: random.pick(&[1 << 20, 8 << 10]),
        ..Shape::PLAIN
    }
    .sound()
}

/// A change that reaches the end of a disk of so many sectors, as often as not, or a FLUSH.
pub(crate) fn draw_change(random: &mut Random, lane: usize, sectors: u64) -> Planned {
    let count = 1 + random.below(sectors.min(40));
    let first = if random.one_in(2) {
        sectors - count
    } else {
        random.below(sectors - count + 1)
    };
    let zeroes = Ask::Zeroes {
        unmap: random.one_in(2),
        fua: random.one_in(8),
    };
    let ask = match random.below(12) {
        0 | 1 => Ask::Flush,
        2..=4 => Ask::Discard,
        5 | 6 => zeroes,
        7 => Ask::Read,
        kind => Ask::Write { fua: kind == 8 },
    };
    Planned {
        lane,
        ask,
        first,
        count: count.min(DATA_SECTORS_MAX),
        alone: random.one_in(4),
    }
}

/// The run of a seed whose disk grows in some rounds. In each of them the first queue has it grow and then uses what is new; the others
/// go on meanwhile, up to the old end.
pub(crate) fn draw(seed: u64) -> Case {
    let mut case = Case::draw(seed);
    let random = &mut Random::new(seed.rotate_left(8));
    case.shape = draw_shape(random);
    case.lanes = 2 + random.below(2) as usize;
    // Most of these worlds are about what is done at once, not about errors of the host.
    if !random.one_in(3) {
        case.profile = crate::run::without_errors(case.profile);
    }
    case.profile = Profile {
        reorder: true,
        ..case.profile
    };
    let most = if random.one_in(8) { HUGE } else { LARGE };
    let mut bytes = case.shape.size();
    case.plan.clear();
    for _ in 0..2 + random.below(3) {
        let old = bytes / SECTOR as u64;
        bytes = larger(&case.shape, bytes, most, random);
        let new = bytes / SECTOR as u64;
        let grow = Planned {
            alone: random.one_in(2),
            ..Planned::new(Ask::Grow(bytes), 0, 0)
        };
        case.plan.push(grow);
        for lane in 1..case.lanes {
            for _ in 0..3 + random.below(6) {
                if old > 0 {
                    case.plan.push(draw_change(random, lane, old));
                }
            }
        }
        // Around both ends, and somewhere between.
        for at in [old.saturating_sub(4), old + random.below(new - old + 1), new - 1] {
            let count = (1 + random.below(12)).min(new - at.min(new - 1));
            let read = Planned::new(Ask::Read, at.min(new - 1), count);
            case.plan.push(read);
        }
        for _ in 0..random.below(4) {
            case.plan.push(draw_change(random, 0, new));
        }
    }
    case
}
