//! Changes of persistent bitmaps in the simulated world; and the power may go at any step. After each cut the bitmaps are the
//! old ones or the new ones, as a whole, and a check finds nothing but leaks.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;
use std::rc::Rc;

use qcow::format::{Extension, Header};
use qcow::image::check;
use qcow::{BitmapChange, BitmapsError, OpenOptions, QcowDisk};
use simulator::{Profile, Random, SimImage, SimWorld};

use crate::bitmap_bits::{Bits, bitmaps};
use crate::steps::run_to_end;

const DISK: &str = "disk";
/// The lengths of the backing file's name.
const NAMES: [usize; 2] = [60, 200];
/// The length of one that the first sector has no room for beside bitmaps.
const LONG_NAME: usize = 420;

/// An image of QEMU's with bits in two bitmaps, or with none. A backing file's name may lie in the way of the first bitmap
/// in the header's first sector; one that `is_long` has no room there.
fn image(is_long: bool, random: &mut Random) -> Vec<u8> {
    let folder = crate::common::Folder::new();
    let cluster = if is_long {
        "4k"
    } else {
        random.pick(&["512", "4k"])
    };
    let mut options = format!("cluster_size={cluster}");
    let name = "b".repeat(random.pick(&NAMES));
    if is_long || cluster == "4k" && random.one_in(2) {
        std::fs::write(folder.path(&name), vec![0; 4096]).expect("a file");
        options += &format!(",backing_fmt=raw,backing_file={name}");
    }
    folder.qemu_create("disk.qcow2", &options, "4M");
    let all = [("a", "512"), ("b", "4k")];
    for (name, granularity) in all
        .into_iter()
        .take(if is_long { 0 } else { random.pick(&[0, 2]) })
    {
        folder.qemu_img(&["bitmap", "--add", "-g", granularity, "disk.qcow2", name]);
    }
    folder.qemu_io("qcow2", "disk.qcow2", &["write -P 1 0 64k", "write -z 3M 64k"]);
    let mut image = std::fs::read(folder.path("disk.qcow2")).expect("the image");
    if is_long || random.one_in(2) {
        // A program that writes no feature names: the backing file's name begins in the first sector.
        let mut header = Header::decode(&image[..4096]).expect("a header");
        header
            .extensions
            .retain(|extension| !matches!(extension, Extension::FeatureNames(_)));
        if let Some(name) = header.backing_name.as_mut().filter(|_| is_long) {
            *name = vec![b'b'; LONG_NAME];
        }
        let bytes = header.encode().expect("a header");
        image[..header.cluster_bits.size() as usize].fill(0);
        image[..bytes.len()].copy_from_slice(&bytes);
    }
    image
}

fn run(seed: u64) {
    let random = &mut Random::new(seed);
    let before = image(seed.is_multiple_of(4), random);
    let backing_name = Header::parse(&before).expect("a header").backing_name;
    let world = SimWorld::new(seed, Profile::IMMEDIATE);
    world.set_contents(DISK, SimImage::from_bytes(&world.store(), &before));
    for name in NAMES.into_iter().chain([LONG_NAME]) {
        let base = SimImage::from_bytes(&world.store(), &[0; 4096]);
        world.set_contents("b".repeat(name), base);
    }
    let cx = world.context(64);
    let options = OpenOptions {
        lock: None,
        backing_files: true,
        ..OpenOptions::default()
    };
    let disk = cx.block_on(QcowDisk::open_on(&cx, &world, Path::new(DISK), &options));
    let disk = disk.expect("nothing waits for ever").expect("a disk");
    world.settle();
    world.set_profile(Profile::draw(random));
    let judge = SimWorld::with_store(0, Profile::IMMEDIATE, &world.store());
    let judge_cx = judge.context(64);
    let seen: RefCell<Vec<BTreeMap<String, Bits>>> = RefCell::new(vec![bitmaps(&before)]);
    for round in 0..8 {
        let names: Vec<String> = seen.borrow().last().expect("a list").keys().cloned().collect();
        let pick = |random: &mut Random| names[random.below(names.len() as u64) as usize].clone();
        let (name, change) = match random.below(8) {
            _ if names.is_empty() => (format!("n{round}"), add(random)),
            0 | 1 => (format!("n{round}"), add(random)),
            2 => (pick(random), BitmapChange::Remove),
            3 => (pick(random), BitmapChange::Clear),
            4 => (pick(random), BitmapChange::Enable),
            5 => (pick(random), BitmapChange::Disable),
            _ => (pick(random), BitmapChange::Merge { source: pick(random) }),
        };
        let what = format!("seed {seed}, round {round}: {name} {change:?}");
        let old = seen.borrow().last().expect("a list").clone();
        let new = expected(&old, &name, &change, 4 << 20);
        let result = Rc::new(RefCell::new(None));
        let (task_disk, task_cx, task_result) = (disk.clone(), cx.clone(), Rc::clone(&result));
        let task = async move {
            let changed: Result<(), BitmapsError> = task_disk.change_bitmap(&task_cx, &name, &change).await;
            *task_result.borrow_mut() = Some(changed);
        };
        run_to_end(&world, &cx, &what, task, || {
            if random.one_in(3) {
                let cut = world.crash_space(DISK).draw(random);
                let bytes = cut.to_bytes();
                judge.set_contents(DISK, cut);
                let view = judge.file(DISK, false).view(&judge_cx).expect("a view");
                let report = judge_cx
                    .block_on(check(&view))
                    .expect("it turns")
                    .expect("a check");
                assert_eq!(report.corruptions, 0, "{what}: {:?}", report.findings);
                let header = Header::parse(&bytes).expect("a header");
                assert_eq!(header.backing_name, backing_name, "{what}");
                let found = bitmaps(&bytes);
                assert!(
                    found == old || found == new,
                    "{what}: neither the old bitmaps nor the new ones"
                );
            }
        });
        result
            .take()
            .expect("an end")
            .unwrap_or_else(|error| panic!("{what}: {error}"));
        let found = world.crash_space(DISK).draw(random).to_bytes();
        assert!(bitmaps(&found) == new, "{what}: it is durable");
        seen.borrow_mut().push(new);
    }
    crate::closing::close(&world, &cx, &disk, DISK, &format!("seed {seed}"));
}

fn add(random: &mut Random) -> BitmapChange {
    BitmapChange::Add {
        granularity: Some(random.pick(&[512, 4096, 65536])),
        enabled: random.one_in(2),
    }
}

/// The bitmaps after a change, by a model: an array of bits each.
fn expected(
    old: &BTreeMap<String, Bits>,
    name: &str,
    change: &BitmapChange,
    size: u64,
) -> BTreeMap<String, Bits> {
    use qcow::format::BitmapFlags;
    let mut new = old.clone();
    match change {
        BitmapChange::Add { granularity, enabled } => {
            let granularity = granularity.expect("a granularity");
            let mut flags = BitmapFlags::empty();
            flags.set(BitmapFlags::AUTO, *enabled);
            let bits = vec![false; size.div_ceil(granularity) as usize];
            new.insert(
                name.to_owned(),
                Bits {
                    flags,
                    granularity,
                    bits,
                },
            );
        }
        BitmapChange::Remove => {
            new.remove(name);
        }
        BitmapChange::Merge { source } => {
            let from = old[source].clone();
            let to = new.get_mut(name).expect("a bitmap");
            for sector in (0..size).step_by(512) {
                if from.bits[(sector / from.granularity) as usize] {
                    to.bits[(sector / to.granularity) as usize] = true;
                }
            }
        }
        _ => {
            let to = new.get_mut(name).expect("a bitmap");
            match change {
                BitmapChange::Clear => to.bits.fill(false),
                _ => to.flags.set(BitmapFlags::AUTO, *change == BitmapChange::Enable),
            }
        }
    }
    new
}

#[test]
fn bitmaps_are_the_old_or_the_new_ones_after_a_cut_at_any_step() {
    for seed in 0..60 {
        run(seed);
    }
}
