//! Disks that become smaller and larger, while other queues write, discard, zero and flush up to the end that they know.

use simulator::{Random, SECTOR};

use crate::growth;
use crate::plan::{Ask, Case, Planned};
use crate::shape::{Below, DataFileKind, Shape};
use crate::troubles;

/// The most bytes of a disk.
const MOST: u64 = 256 << 10;

/// A shape of any size, with what its last cluster may be: encrypted, in a data file, or of subclusters.
fn draw_shape(random: &mut Random) -> Shape {
    let mut shape = growth::draw_shape(random);
    match random.below(8) {
        0 => shape.encrypted = true,
        1 => {
            shape.data_file = Some(match shape.below {
                Below::Nothing if random.one_in(2) => DataFileKind::Raw,
                _ => DataFileKind::Plain,
            });
        }
        2 => {
            shape.cluster_bits = 14;
            shape.extended = true;
        }
        _ => {}
    }
    shape.sound()
}

/// Returns a smaller size for a disk of `sectors`: anywhere, or around the end of a cluster or of what an L2 table maps.
fn smaller(shape: &Shape, sectors: u64, random: &mut Random) -> u64 {
    let cluster = shape.cluster() / SECTOR as u64;
    let unit = random.pick(&[1, cluster, cluster * (shape.cluster() / 8)]);
    let near = random.below(sectors) / unit * unit + random.pick(&[0, 0, 1, unit - 1]);
    near.clamp(1, sectors)
}

/// The run of a seed whose disk gets another size in some rounds. In each of them the first queue has it become smaller or
/// larger, and then uses its end; the others go on meanwhile, up to the old end.
pub(crate) fn draw(seed: u64) -> Case {
    let mut case = Case::draw(seed);
    let random = &mut Random::new(seed.rotate_left(12));
    case.shape = draw_shape(random);
    case.lanes = 2 + random.below(2) as usize;
    case.profile = troubles::draw(case.profile, seed);
    let has_snapshots = case.shape.data_file.is_none() && random.one_in(3);
    if has_snapshots {
        case.shape.refcount_bits = case.shape.refcount_bits.max(4);
    }
    let mut bytes = case.shape.size();
    case.plan.clear();
    for round in 0..3 + random.below(3) {
        let old = bytes / SECTOR as u64;
        let ask = if random.one_in(3) {
            bytes = growth::larger(&case.shape, bytes, MOST.max(bytes + 4096), random);
            Ask::Grow(bytes)
        } else {
            bytes = smaller(&case.shape, old, random) * SECTOR as u64;
            Ask::Shrink(bytes)
        };
        let new = bytes / SECTOR as u64;
        for lane in 1..case.lanes {
            for _ in 0..3 + random.below(6) {
                case.plan.push(growth::draw_change(random, lane, old));
            }
        }
        for _ in 0..random.below(4) {
            case.plan.push(growth::draw_change(random, 0, old));
        }
        if has_snapshots && random.one_in(2) {
            case.plan.push(Planned::new(Ask::Snapshot(round as u32), 0, 0));
        }
        case.plan.push(Planned {
            alone: random.one_in(2),
            ..Planned::new(ask, 0, 0)
        });
        let count = (1 + random.below(12)).min(new);
        case.plan.push(Planned::new(Ask::Read, new - count, count));
        for _ in 0..random.below(3) {
            case.plan.push(growth::draw_change(random, 0, new));
        }
    }
    case
}
