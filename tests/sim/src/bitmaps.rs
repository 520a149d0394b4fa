//! Persistent bitmaps: those that an image begins with, those that an image has on disk, and what they must have.
//!
//! Bitmaps that record changes do so from the beginning of a run on. So whatever a cut leaves, one that is not in use has
//! a bit for each granule in which the disk differs from its beginning. Bits of granules that nobody has asked to change
//! are counted; after a clean close there are none. One that does not record changes has no bits.

use block::Context;
use qcow::format::bitmap::BITMAP_FIXED_SIZE;
use qcow::format::{Autoclear, BitmapCluster, BitmapDirectoryEntry, BitmapFlags, BitmapTableEntry, Header};
use qcow::{BitmapChange, BitmapsError, QcowDisk};
use simulator::{Random, SECTOR, SimImage};

use crate::plan::{Ask, Case, Planned};
use crate::run::without_errors;
use crate::snapshots::BEFORE_NUMBER;
use crate::troubles;

/// The persistent bitmaps that an image begins with: two that record changes, and one that does not.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Bitmaps {
    /// The number of guest bytes that one bit of the first one covers; of the second one it is eight times as many.
    pub granularity: u64,
    /// Their bits are stored before each change, and not only when the image is closed.
    pub durable: bool,
}

/// The names of the bitmaps that record changes.
const RECORDING: [&str; 2] = ["fine", "coarse"];
/// The start of the names of those that do not.
const DISABLED: &str = "off";
/// The number of guest bytes of a bit of the one that an image begins with, and of those that are added.
const DISABLED_GRANULARITY: u64 = 512;
const ADDED_GRANULARITY: u64 = 4096;
/// The most bitmaps that are added in a run.
const ADDED_MAX: usize = 2;

impl Bitmaps {
    /// Bitmaps by chance.
    pub(crate) fn draw(random: &mut Random) -> Self {
        Self {
            granularity: random.pick(&[512, 512, 1024, 4096]),
            durable: !random.one_in(3),
        }
    }

    /// Returns the number of guest bytes of a bit of each bitmap that a run may have.
    pub(crate) fn granularities(&self) -> impl Iterator<Item = u64> {
        [self.granularity, self.granularity * 8, DISABLED_GRANULARITY]
            .into_iter()
            .chain(std::iter::repeat_n(ADDED_GRANULARITY, ADDED_MAX))
    }

    /// The same bitmaps as far as the image that a run begins with depends on them.
    pub(crate) fn on_disk(self) -> Self {
        Self {
            durable: false,
            ..self
        }
    }
}

/// Adds the bitmaps to an image.
///
/// # Errors
///
/// The error of a change.
pub(crate) async fn add(disk: &QcowDisk, cx: &Context, bitmaps: Bitmaps) -> Result<(), BitmapsError> {
    let change = |granularity, enabled| BitmapChange::Add {
        granularity: Some(granularity),
        enabled,
    };
    for (name, granularity) in RECORDING.into_iter().zip([1, 8]) {
        let add = change(bitmaps.granularity * granularity, true);
        disk.change_bitmap(cx, name, &add).await?;
    }
    disk.change_bitmap(cx, DISABLED, &change(DISABLED_GRANULARITY, false))
        .await
}

/// Adds the bitmap of a number, which does not record changes, to a disk that is served.
///
/// # Errors
///
/// The error of the change.
pub(crate) async fn add_disabled(disk: &QcowDisk, cx: &Context, number: u32) -> Result<(), BitmapsError> {
    let add = BitmapChange::Add {
        granularity: Some(ADDED_GRANULARITY),
        enabled: false,
    };
    disk.change_bitmap(cx, &format!("{DISABLED}{number}"), &add).await
}

/// A bitmap as it is on disk.
#[derive(Clone, Debug)]
pub(crate) struct Bitmap {
    name: String,
    flags: BitmapFlags,
    granularity: u64,
    /// Its bits; none if it is in use.
    bits: Vec<bool>,
}

/// The bitmaps of an image.
///
/// # Errors
///
/// Says what is malformed.
pub(crate) fn of_image(image: &SimImage) -> Result<Vec<Bitmap>, String> {
    let mut bytes = [0; 512];
    image.read(0, &mut bytes);
    let cluster = Header::peek_cluster_size(&bytes).map_err(|error| error.to_string())?;
    let mut bytes = vec![0; cluster as usize];
    image.read(0, &mut bytes);
    let header = Header::parse(&bytes).map_err(|error| error.to_string())?;
    let is_known = header.autoclear.contains(Autoclear::BITMAPS);
    let Some(extension) = header.bitmaps().filter(|_| is_known) else {
        return Ok(Vec::new());
    };
    let mut at = extension.directory_offset.bytes();
    let end = at + extension.directory_size;
    let mut list = Vec::new();
    for index in 0..extension.count {
        let malformed = |error: &dyn std::fmt::Display| format!("bitmap {index} is malformed: {error}");
        let mut bytes = vec![0; (end.saturating_sub(at) as usize).clamp(BITMAP_FIXED_SIZE, 4096)];
        image.read(at, &mut bytes);
        at += BitmapDirectoryEntry::peek_len(&bytes).map_err(|error| malformed(&error))? as u64;
        let entry = BitmapDirectoryEntry::parse(&bytes).map_err(|error| malformed(&error))?;
        let is_in_use = entry.flags.contains(BitmapFlags::IN_USE);
        list.push(Bitmap {
            name: String::from_utf8_lossy(&entry.name).into_owned(),
            flags: entry.flags,
            granularity: entry.granularity(),
            bits: match is_in_use {
                true => Vec::new(),
                false => bits_of(image, &entry, &header).map_err(|error| malformed(&error))?,
            },
        });
    }
    Ok(list)
}

fn bits_of(image: &SimImage, entry: &BitmapDirectoryEntry, header: &Header) -> Result<Vec<bool>, String> {
    let geometry = header.geometry();
    let cluster = geometry.cluster_size();
    let count = entry.bits(&geometry);
    let mut bits = Vec::with_capacity(count as usize);
    for index in 0..u64::from(entry.table_entries) {
        let mut raw = [0; 8];
        image.read(entry.table_offset.bytes() + index * 8, &mut raw);
        let content = BitmapTableEntry::from_raw(u64::from_be_bytes(raw)).decode(&geometry);
        let here = (count - bits.len() as u64).min(cluster * 8) as usize;
        match content.map_err(|error| error.to_string())? {
            BitmapCluster::Zeros => bits.resize(bits.len() + here, false),
            BitmapCluster::Ones => bits.resize(bits.len() + here, true),
            BitmapCluster::Data(host) => {
                let mut bytes = vec![0; here.div_ceil(8)];
                image.read(host.bytes(), &mut bytes);
                bits.extend((0..here).map(|bit| bytes[bit / 8] >> (bit % 8) & 1 == 1));
            }
        }
    }
    match bits.len() as u64 == count {
        true => Ok(bits),
        false => Err(format!("it has {} bits, expected {count}", bits.len())),
    }
}

/// The demand on bitmaps beyond the one that holds for all.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Exactness {
    /// None that records changes is in use.
    pub(crate) kept: bool,
    /// There are no bits without a change.
    pub(crate) exact: bool,
}

/// Counts of bits.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Counts {
    /// The number of bitmaps that were compared with what has changed.
    pub trusted: u64,
    /// The number of those that were in use.
    pub in_use: u64,
    /// The number of bits set.
    pub set: u64,
    /// The number of those for which nobody has asked for a change.
    pub extra: u64,
}

impl Counts {
    /// Takes over what another has counted.
    pub fn add(&mut self, other: Self) {
        self.trusted += other.trusted;
        self.in_use += other.in_use;
        self.set += other.set;
        self.extra += other.extra;
    }
}

/// Compares the bitmaps of an image with its disk: the words that it held when they were enabled (`was`; none for a sector that was past
/// its end since), and holds `now`. `is_asked` says if a change of a sector was asked for since.
///
/// # Errors
///
/// Says which one is gone, in use, or lacks a bit.
pub(crate) fn judge(
    found: &[Bitmap],
    was: impl Fn(u64) -> Option<u64>,
    now: &[u64],
    is_asked: impl Fn(u64) -> bool,
    demand: Exactness,
) -> Result<Counts, String> {
    let mut counts = Counts::default();
    for name in RECORDING.into_iter().chain([DISABLED]) {
        if !found.iter().any(|bitmap| bitmap.name == name) {
            return Err(format!("after the cut bitmap {name} is gone"));
        }
    }
    for bitmap in found {
        let name = &bitmap.name;
        let records = RECORDING.contains(&name.as_str());
        if bitmap.flags.contains(BitmapFlags::AUTO) != records {
            return Err(format!(
                "after the cut bitmap {name} has flags {:?}",
                bitmap.flags
            ));
        }
        if bitmap.flags.contains(BitmapFlags::IN_USE) {
            if demand.kept {
                return Err(format!("after the cut bitmap {name} is in use"));
            }
            counts.in_use += 1;
            continue;
        }
        counts.trusted += 1;
        let per_bit = bitmap.granularity / SECTOR as u64;
        for (bit, &is_set) in (0..).zip(&bitmap.bits) {
            let end = ((bit + 1) * per_bit).min(now.len() as u64);
            let mut sectors = bit * per_bit..end;
            if !is_set {
                let is_other = |sector: u64| was(sector).is_some_and(|was| was != now[sector as usize]);
                let changed = sectors.find(|&sector| is_other(sector));
                if let Some(sector) = changed.filter(|_| records) {
                    return Err(format!(
                        "after the cut bitmap {name} lacks bit {bit}: sector {sector} has changed"
                    ));
                }
                continue;
            }
            // The disk may have become smaller since, and the bit's sectors with it.
            let is_extra = !(bit * per_bit..(bit + 1) * per_bit).any(&is_asked);
            if is_extra && demand.exact || !records {
                return Err(format!("bitmap {name} has bit {bit}, which nobody has changed"));
            }
            counts.set += 1;
            counts.extra += u64::from(is_extra);
        }
    }
    Ok(counts)
}

/// The run of a seed whose image has bitmaps, while snapshots are applied and bitmaps added, and the disk grows.
pub(crate) fn draw(seed: u64) -> Case {
    let mut case = Case::draw(seed);
    let random = &mut Random::new(seed.rotate_left(28));
    case.profile = troubles::draw(case.profile, seed);
    let shape = &mut case.shape;
    (shape.v2, shape.bitmaps) = (false, Some(Bitmaps::draw(random)));
    let has_snapshots = shape.data_file.is_none() && random.one_in(2);
    if has_snapshots {
        shape.refcount_bits = shape.refcount_bits.max(random.pick(&[2, 8]));
        shape.snapshot |= random.one_in(2);
    }
    *shape = shape.sound();
    let begins_with_snapshot = shape.snapshot;
    if shape.device > 0 && random.one_in(2) {
        shape.device = shape.device.max(256 << 10);
    }
    case.plan.truncate(60);
    let mut put = |ask: Ask, random: &mut Random| {
        let planned = Planned {
            alone: random.one_in(4),
            ..Planned::new(ask, 0, 0)
        };
        let place = random.below(1 + case.plan.len() as u64) as usize;
        case.plan.insert(place, planned);
        place
    };
    for number in 0..random.below(1 + ADDED_MAX as u64) as u32 {
        put(Ask::Bitmap(number), random);
    }
    if begins_with_snapshot {
        put(Ask::Apply(BEFORE_NUMBER), random);
    } else if has_snapshots {
        // In this order: before that one, so that there is something to apply.
        let apply = put(Ask::Apply(0), random);
        let create = Planned::new(Ask::Snapshot(0), 0, 0);
        let place = random.below(1 + apply as u64 / 2) as usize;
        case.plan.insert(place, create);
    }
    case
}

/// Leaves out of a run what a disk with bitmaps would have to answer for.
pub(crate) fn calm(case: &mut Case) {
    if case.shape.bitmaps.is_some() {
        // A header whose write failed is not written again.
        case.profile = without_errors(case.profile);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bitmap(name: &str, bits: &[bool]) -> Bitmap {
        let flags = if name == DISABLED {
            BitmapFlags::empty()
        } else {
            BitmapFlags::AUTO
        };
        Bitmap {
            name: name.to_owned(),
            flags,
            granularity: 1024,
            bits: bits.to_vec(),
        }
    }

    fn all(bits: &[bool]) -> Vec<Bitmap> {
        vec![
            bitmap("fine", bits),
            bitmap("coarse", &[true; 2]),
            bitmap("off", &[false; 2]),
        ]
    }

    fn judged(found: &[Bitmap], demand: Exactness) -> Result<Counts, String> {
        let was = |sector: u64| Some(sector + 1);
        judge(found, was, &[1, 2, 3, 5], |sector| sector >= 2, demand)
    }

    #[test]
    fn judge_demands_bit_of_each_changed_granule() {
        let any = Exactness::default();
        let counts = judged(&all(&[false, true]), any).expect("a superset");
        assert_eq!((counts.trusted, counts.set, counts.extra), (3, 3, 1));
        judged(&all(&[true, false]), any).expect_err("the second granule has changed");
        let exact = Exactness { exact: true, ..any };
        judged(&all(&[false, true]), exact).expect_err("the other one has a bit too many");
        judged(&all(&[false, true])[..2], any).expect_err("one is gone");
    }

    #[test]
    fn judge_trusts_no_bitmap_in_use() {
        let mut found = all(&[false, false]);
        found[0].flags |= BitmapFlags::IN_USE;
        let any = Exactness::default();
        assert_eq!(judged(&found, any).map(|counts| counts.in_use), Ok(1));
        judged(&found, Exactness { kept: true, ..any }).expect_err("it is to be kept");
        let mut found = all(&[false, true]);
        found[2].bits[0] = true;
        judged(&found, any).expect_err("it does not record changes");
    }
}
