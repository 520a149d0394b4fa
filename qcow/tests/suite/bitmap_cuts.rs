//! Persistent bitmaps that record changes while two queues write, in the simulated world; and the power may go at any step. After
//! each cut a bitmap that is not in use has a bit for every granule that differs from what the disk had when the bitmap was enabled.
//! A bit too few is a failure; bits without a change are bounded.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use block::{AlignedBuf, Buffer, Context, Disk, DiskQueue, IoError, Op, ask, join_all};
use qcow::format::BitmapFlags;
use qcow::format::bitmap::BITMAP_FLAGS_AT;
use qcow::image::{CreateOptions, check, create};
use qcow::{BitmapChange, BitmapStorage, CompactOptions, DiskSize, OpenOptions, QcowDisk, SnapshotSelector};
use simulator::{Profile, Random, SimImage, SimWorld, Store};

use crate::bitmap_bits::{bitmaps, entries};
use crate::steps::run_to_end;

const DISK: &str = "disk";
/// The disk's size in bytes.
const SIZE: u64 = 16 << 20;
/// The offset of the autoclear feature bits in the header.
const AUTOCLEAR_AT: u64 = 88;
/// The guest bytes that a durable bitmap may mark at once; less if a chunk of its bits has less.
const REGION: u64 = 4 << 20;

async fn open(world: &SimWorld, cx: &Context, options: &OpenOptions) -> Arc<QcowDisk> {
    let options = OpenOptions {
        lock: None,
        ..options.clone()
    };
    let disk = QcowDisk::open_on(cx, world, Path::new(DISK), &options).await;
    disk.expect("a disk")
}

fn durable() -> OpenOptions {
    OpenOptions {
        bitmaps: BitmapStorage::Durable,
        ..OpenOptions::default()
    }
}

async fn request(queue: &dyn DiskQueue, op: Op, offset: u64, bytes: &[u8], len: u64) -> Result<(), IoError> {
    let buffer: Buffer = match op {
        Op::Write { .. } => AlignedBuf::from_slice(bytes).into(),
        _ => Buffer::default(),
    };
    ask(queue, op, offset, len, buffer).await.map(drop)
}

/// An image whose disk has data in places, a snapshot of it, and bitmaps that were enabled then: the world.
async fn image(world: &SimWorld, cx: &Context, cluster: u64, granularities: &[u64], random: &mut Random) {
    let view = world.file(DISK, true).view(cx).expect("a view");
    let mut options = CreateOptions::new(SIZE);
    options.cluster_size = cluster;
    options.extended_l2 = cluster == 65536 && random.one_in(2);
    create(&view, &options).await.expect("an image");
    let disk = open(world, cx, &OpenOptions::default()).await;
    let queue = Arc::clone(&disk).open_queue(cx).expect("a queue");
    for _ in 0..24 {
        let at = random.below(SIZE / 4096) * 4096;
        let write = Op::Write { fua: false };
        request(&*queue, write, at, &[1; 4096], 4096)
            .await
            .expect("a write");
    }
    drop(queue);
    let date = std::time::SystemTime::UNIX_EPOCH;
    disk.create_snapshot(cx, "s", date).await.expect("a snapshot");
    for (number, &granularity) in granularities.iter().enumerate() {
        for enabled in [true, false] {
            let name = format!("{}{number}", if enabled { "on" } else { "off" });
            let granularity = Some(granularity);
            let add = BitmapChange::Add { granularity, enabled };
            disk.change_bitmap(cx, &name, &add).await.expect("a bitmap");
        }
    }
    disk.close(cx).await.expect("a close");
}

/// Reads the whole disk of an image that nobody has open.
async fn read_all(world: &SimWorld, cx: &Context, size: u64) -> Vec<u8> {
    let options = OpenOptions {
        read_only: true,
        ..OpenOptions::default()
    };
    let disk = open(world, cx, &options).await;
    let queue = disk.open_queue(cx).expect("a queue");
    let mut all = Vec::with_capacity(size as usize);
    while (all.len() as u64) < size {
        let len = (1 << 20).min(size - all.len() as u64);
        let buffer = AlignedBuf::zeroed(len as usize).into();
        let read = ask(&*queue, Op::Read, all.len() as u64, len, buffer).await;
        all.extend_from_slice(&read.expect("a read").into_owned().expect("our own"));
    }
    all
}

/// Returns the disk of an image that a cut has left, in which a check finds nothing but leaks.
fn sound_content(store: &Store, cut: SimImage, what: &str) -> Vec<u8> {
    let world = SimWorld::with_store(0, Profile::IMMEDIATE, store);
    let cx = world.context(64);
    world.set_contents(DISK, cut);
    let view = world.file(DISK, false).view(&cx).expect("a view");
    let found = cx.block_on(async { (check(&view).await, read_all(&world, &cx, SIZE).await) });
    let (report, content) = found.expect("it turns");
    let report = report.expect("a check");
    assert_eq!(report.corruptions, 0, "{what}: {:?}", report.findings);
    content
}

/// The granules of 512 bytes that were asked for since the bitmaps were enabled.
#[derive(Clone, Default)]
struct Asked(Rc<RefCell<BTreeSet<u64>>>);

impl Asked {
    fn add(&self, op: Op, offset: u64, len: u64, cluster: u64) {
        let (mut start, mut end) = (offset, offset + len);
        if op == Op::Discard {
            start = start.next_multiple_of(cluster);
            end = if end == SIZE { end } else { end / cluster * cluster };
        }
        self.0.borrow_mut().extend(start / 512..end / 512);
    }

    /// The granules of another size.
    fn granules(&self, granularity: u64) -> BTreeSet<u64> {
        let asked = self.0.borrow();
        asked.iter().map(|sector| sector * 512 / granularity).collect()
    }
}

/// Counts of the cuts, and of the bitmaps and bits that they have left.
#[derive(Debug, Default)]
struct Seen {
    cuts: u64,
    in_use: u64,
    trusted: u64,
    bits: u64,
    extra: u64,
}

/// Compares the bitmaps of a cut with what differs from `before`.
fn judge(
    bytes: &[u8],
    before: &[u8],
    now: &[u8],
    asked: &Asked,
    is_durable: bool,
    seen: &mut Seen,
    what: &str,
) {
    seen.cuts += 1;
    for (name, bitmap) in bitmaps(bytes) {
        if name.starts_with("off") {
            assert!(bitmap.bits.iter().all(|bit| !bit), "{what}: {name} is disabled");
            assert!(!bitmap.flags.contains(BitmapFlags::IN_USE), "{what}: {name}");
            continue;
        }
        if bitmap.flags.contains(BitmapFlags::IN_USE) {
            assert!(!is_durable, "{what}: {name} is in use");
            seen.in_use += 1;
            continue;
        }
        seen.trusted += 1;
        let asked = asked.granules(bitmap.granularity);
        let region = (REGION / bitmap.granularity).max(64);
        let regions: BTreeSet<u64> = asked.iter().map(|bit| bit / region).collect();
        for (bit, is_set) in (0_u64..).zip(&bitmap.bits) {
            let start = (bit * bitmap.granularity) as usize;
            let end = (start + bitmap.granularity as usize).min(before.len());
            let has_changed = before[start..end] != now[start..end];
            assert!(*is_set || !has_changed, "{what}: {name} lacks bit {bit}");
            if *is_set {
                seen.bits += 1;
                seen.extra += u64::from(!asked.contains(&bit));
                let is_near = regions.contains(&(bit / region));
                assert!(is_near, "{what}: {name} has bit {bit}, far from any change");
            }
        }
    }
}

fn run(seed: u64, seen: &mut Seen) {
    let random = &mut Random::new(seed);
    let is_durable = !seed.is_multiple_of(4);
    let cluster = random.pick(&[512, 4096, 65536]);
    let world = SimWorld::new(seed, Profile::IMMEDIATE);
    let cx = world.context(64);
    let granularities = [random.pick(&[512, 4096]), random.pick(&[65536, 1 << 20])];
    let before = cx.block_on(async {
        image(&world, &cx, cluster, &granularities, random).await;
        read_all(&world, &cx, SIZE).await
    });
    let before = before.expect("nothing waits for ever");
    let options = OpenOptions {
        sparse: random.below(4) > 0,
        discard_no_unref: random.one_in(4),
        persist_mappings: random.one_in(4),
        ..if is_durable {
            durable()
        } else {
            OpenOptions::default()
        }
    };
    let disk = cx
        .block_on(open(&world, &cx, &options))
        .expect("nothing waits for ever");
    world.settle();
    world.set_profile(Profile::draw(random));
    let store = world.store();
    let asked = Asked::default();
    let sizes = (cluster, options.sparse);
    for round in 0..3 {
        let what = format!("seed {seed}, round {round}");
        let guests = (0..2).map(|number| {
            let queue = Arc::clone(&disk).open_queue(&cx).expect("a queue");
            let (asked, mut random) = (asked.clone(), Random::new(seed << 8 | round << 4 | number));
            Box::pin(async move {
                for _ in 0..10 {
                    let (op, offset, len) = draw(&mut random, sizes);
                    asked.add(op, offset, len, sizes.0);
                    let bytes = vec![2 + random.below(200) as u8; len as usize];
                    request(&*queue, op, offset, &bytes, len).await?;
                }
                Ok(())
            })
        });
        let guests: Vec<_> = guests.collect();
        let task = async move {
            join_all(guests).await.expect("requests that succeed");
        };
        run_to_end(&world, &cx, &what, task, || {
            if random.one_in(24) {
                let cut = world.crash_space(DISK).draw(random);
                let bytes = cut.to_bytes();
                let now = sound_content(&store, cut, &what);
                judge(&bytes, &before, &now, &asked, is_durable, seen, &what);
            }
        });
        if round == 1 && random.one_in(2) {
            // The bits of the session so far are stored, and the next change begins anew.
            let change = BitmapChange::Add {
                granularity: Some(1 << 20),
                enabled: false,
            };
            let name = format!("off-{round}");
            let changed = cx.block_on(disk.change_bitmap(&cx, &name, &change));
            changed.expect("nothing waits for ever").expect("a bitmap");
        }
    }
    crate::closing::close(&world, &cx, &disk, DISK, &format!("seed {seed}"));
    let bytes = world.contents(DISK).to_bytes();
    for (name, bitmap) in bitmaps(&bytes) {
        if name.starts_with("off") {
            continue;
        }
        assert!(!bitmap.flags.contains(BitmapFlags::IN_USE), "seed {seed}: {name}");
        let bits = (0_u64..).zip(&bitmap.bits).filter(|(_, is_set)| **is_set);
        let bits: BTreeSet<u64> = bits.map(|(bit, _)| bit).collect();
        let expected = asked.granules(bitmap.granularity);
        assert!(bits == expected, "seed {seed}: {name} is exact after a close");
    }
}

/// A request of a guest. Discards only where they do something.
fn draw(random: &mut Random, (cluster, sparse): (u64, bool)) -> (Op, u64, u64) {
    let most = random.pick(&[1, 8, 128, 512]);
    let len = 512 * (1 + random.below(most));
    let offset = 512 * random.below((SIZE - len) / 512 + 1);
    match random.below(12) {
        0 => (Op::Flush, 0, 0),
        1 | 2 if sparse => {
            let len = len.next_multiple_of(cluster) + cluster;
            (Op::Discard, offset.min(SIZE - len), len)
        }
        3 => (
            Op::WriteZeroes {
                unmap: true,
                fua: false,
            },
            offset,
            len,
        ),
        4 => (
            Op::WriteZeroes {
                unmap: false,
                fua: true,
            },
            offset,
            len,
        ),
        5 => (Op::Write { fua: true }, offset, len),
        _ => (Op::Write { fua: false }, offset, len),
    }
}

/// The power may go at any step of a compaction that moves bitmaps: each of them is there, with its bits, and so is the disk.
#[test]
fn no_cut_of_a_compaction_leaves_bitmaps_without_their_bits() {
    let mut moved = 0;
    for seed in 0..8 {
        let random = &mut Random::new(seed);
        let cluster = random.pick(&[512, 4096]);
        let world = SimWorld::new(seed, Profile::IMMEDIATE);
        let cx = world.context(64);
        let begun = cx.block_on(async {
            image(&world, &cx, cluster, &[512, 65536], random).await;
            let disk = open(&world, &cx, &OpenOptions::default()).await;
            let queue = Arc::clone(&disk).open_queue(&cx).expect("a queue");
            let write = Op::Write { fua: false };
            for at in (0..SIZE / 2).step_by(16 << 10) {
                let written = request(&*queue, write, at, &[7; 8192], 8192).await;
                written.expect("a write");
            }
            drop(queue);
            disk.close(&cx).await.expect("a close");
            // The bits lie at the end of the file now, and are not stored anew for what becomes free.
            let disk = open(&world, &cx, &OpenOptions::default()).await;
            for name in ["on0", "on1"] {
                let disabled = disk.change_bitmap(&cx, name, &BitmapChange::Disable).await;
                disabled.expect("a change");
            }
            let queue = Arc::clone(&disk).open_queue(&cx).expect("a queue");
            let discarded = request(&*queue, Op::Discard, 0, &[], SIZE / 4).await;
            discarded.expect("a discard");
            drop(queue);
            disk.close(&cx).await.expect("a close");
            (
                bitmaps(&world.contents(DISK).to_bytes()),
                read_all(&world, &cx, SIZE).await,
                open(&world, &cx, &OpenOptions::default()).await,
            )
        });
        let (before, content, disk) = begun.expect("nothing waits for ever");
        assert!(before["on0"].bits.contains(&true), "seed {seed}");
        let place = |bytes: &[u8]| entries(bytes).iter().map(|(_, entry)| entry.table_offset).max();
        let old_place = place(&world.contents(DISK).to_bytes());
        world.settle();
        world.set_profile(Profile::draw(random));
        let store = world.store();
        let (compacting, own_cx) = (Arc::clone(&disk), cx.clone());
        let task = async move {
            let options = CompactOptions::default();
            let compacted = compacting.compact(&own_cx, &options, |_| ControlFlow::Continue(()));
            let compacted = compacted.await.expect("a compaction");
            assert_eq!(compacted.fixed, [], "{compacted:?}");
        };
        let what = format!("seed {seed}");
        run_to_end(&world, &cx, &what, task, || {
            if random.one_in(6) {
                let cut = world.crash_space(DISK).draw(random);
                let found = bitmaps(&cut.to_bytes());
                let now = sound_content(&store, cut, &what);
                assert!(found == before, "{what}: the bitmaps have changed");
                assert!(now == content, "{what}: the disk has changed");
            }
        });
        crate::closing::close(&world, &cx, &disk, DISK, &what);
        let bytes = world.contents(DISK).to_bytes();
        assert!(bitmaps(&bytes) == before, "{what}: the bitmaps have changed");
        moved += u64::from(place(&bytes) < old_place);
    }
    assert!(moved > 4, "bitmaps moved in {moved} runs");
}

#[test]
fn no_cut_leaves_a_change_without_its_bit() {
    let mut seen = Seen::default();
    for seed in 0..120 {
        run(seed, &mut seen);
    }
    assert!(seen.in_use > 100 && seen.trusted > 1000, "{seen:?}");
}

/// A program has marked the bitmaps as in use, or disowned them, and was killed before that was durable. The next one changes the guest's
/// data only when it is.
#[test]
fn mark_of_a_killed_program_is_durable_before_a_change() {
    for disowns in [false, true] {
        for options in [OpenOptions::default(), durable()] {
            change_after_a_killed_program(disowns, &options);
        }
    }
}

fn change_after_a_killed_program(disowns: bool, options: &OpenOptions) {
    const AT: u64 = 1 << 20;
    let what = format!("disowns: {disowns}, {:?}", options.bitmaps);
    let write = Op::Write { fua: false };
    let world = SimWorld::new(7, Profile::IMMEDIATE);
    let cx = world.context(64);
    let begun = cx.block_on(async {
        image(&world, &cx, 4096, &[512], &mut Random::new(7)).await;
        let before = read_all(&world, &cx, SIZE).await;
        // Its cluster is written in place from now on.
        let disk = open(&world, &cx, options).await;
        let queue = Arc::clone(&disk).open_queue(&cx).expect("a queue");
        let written = request(&*queue, write, AT, &[8; 512], 512).await;
        written.expect("a write");
        drop(queue);
        disk.close(&cx).await.expect("a close");
        before
    });
    let before = begun.expect("nothing waits for ever");
    world.settle();
    world.set_profile(Profile::default());
    let entries = entries(&world.contents(DISK).to_bytes());
    let mut marks = vec![(AUTOCLEAR_AT, vec![0; 8])];
    if !disowns {
        let recording = entries.iter().filter(|(_, entry)| entry.name.starts_with(b"on"));
        let marked = recording.map(|(at, entry)| {
            let flags = (entry.flags | BitmapFlags::IN_USE).bits();
            ((at + BITMAP_FLAGS_AT) as u64, flags.to_be_bytes().to_vec())
        });
        marks = marked.collect();
    }
    let (own_cx, own_world, options) = (cx.clone(), world.clone(), options.clone());
    let task = async move {
        let view = own_world.file(DISK, true).view(&own_cx).expect("a view");
        for (at, mark) in marks {
            let marked = view.write_at(at, AlignedBuf::from_slice(&mark)).await;
            marked.expect("a write");
        }
        let disk = open(&own_world, &own_cx, &options).await;
        let queue = Arc::clone(&disk).open_queue(&own_cx).expect("a queue");
        let written = request(&*queue, write, AT + 512, &[9; 512], 512).await;
        written.expect("a write");
    };
    let asked = Asked::default();
    asked.add(write, AT, 1024, 4096);
    let (mut seen, mut changed) = (Seen::default(), 0);
    run_to_end(&world, &cx, &what, task, || {
        let cuts = world.crash_space(DISK);
        for number in 0..cuts.count() {
            let cut = cuts.nth(number);
            let bytes = cut.to_bytes();
            let now = sound_content(&world.store(), cut, &what);
            changed += u64::from(now[AT as usize + 512] == 9);
            judge(&bytes, &before, &now, &asked, false, &mut seen, &what);
        }
    });
    assert!(changed > 0 && seen.trusted > 0, "{what}: {changed}, {seen:?}");
}

/// More regions are written in place than may stay marked. What is stored of all but the newest has the granules of changes only.
#[test]
fn marked_regions_are_bounded() {
    const REGIONS: u64 = 320;
    const OPEN: u64 = 256;
    const GRANULE: u64 = 64 << 10;
    let world = SimWorld::new(1, Profile::IMMEDIATE);
    let cx = world.context(64);
    let run = async {
        let view = world.file(DISK, true).view(&cx).expect("a view");
        let mut options = CreateOptions::new(REGIONS * REGION);
        options.cluster_size = 4096;
        create(&view, &options).await.expect("an image");
        let touch = async |disk: &Arc<QcowDisk>, byte: u8| {
            let queue = Arc::clone(disk).open_queue(&cx).expect("a queue");
            for region in 0..REGIONS {
                let write = Op::Write { fua: false };
                let written = request(&*queue, write, region * REGION, &[byte; 512], 512).await;
                written.expect("a write");
            }
        };
        let disk = open(&world, &cx, &OpenOptions::default()).await;
        touch(&disk, 1).await;
        let add = BitmapChange::Add {
            granularity: Some(GRANULE),
            enabled: true,
        };
        disk.change_bitmap(&cx, "b", &add).await.expect("a bitmap");
        disk.close(&cx).await.expect("a close");
        let disk = open(&world, &cx, &durable()).await;
        touch(&disk, 2).await;
        let found = bitmaps(&world.contents(DISK).to_bytes());
        let bits = &found["b"].bits;
        let per_region = (REGION / GRANULE) as usize;
        let mut open_regions = 0;
        for region in bits.chunks(per_region) {
            assert!(region[0], "it was written");
            open_regions += u64::from(region[1..].iter().any(|bit| *bit));
        }
        assert!(
            (1..=OPEN).contains(&open_regions),
            "{open_regions} regions are marked"
        );
        // Again, also where regions are marked no more.
        touch(&disk, 3).await;
        disk.close(&cx).await.expect("a close");
        let found = bitmaps(&world.contents(DISK).to_bytes());
        let count = found["b"].bits.iter().filter(|bit| **bit).count();
        assert_eq!(count as u64, REGIONS, "exactly what was written");
    };
    cx.block_on(run).expect("nothing waits for ever");
}

/// The application of a snapshot changes any byte: at each cut the bitmaps are as they were, or have all bits set with the new
/// contents. Afterwards they go on recording.
#[test]
fn applied_snapshot_sets_all_bits_at_any_cut() {
    for seed in 0..24 {
        let random = &mut Random::new(seed);
        let world = SimWorld::new(seed, Profile::IMMEDIATE);
        let cx = world.context(64);
        let cluster = random.pick(&[512, 4096]);
        let is_durable = random.one_in(2);
        let options = if is_durable {
            durable()
        } else {
            OpenOptions::default()
        };
        let (before, disk) = cx
            .block_on(async {
                image(&world, &cx, cluster, &[4096, 65536], random).await;
                let before = read_all(&world, &cx, SIZE).await;
                let disk = open(&world, &cx, &options).await;
                if random.one_in(2) {
                    let queue = Arc::clone(&disk).open_queue(&cx).expect("a queue");
                    let write = Op::Write { fua: true };
                    request(&*queue, write, 8192, &[9; 4096], 4096)
                        .await
                        .expect("a write");
                }
                (before, disk)
            })
            .expect("nothing waits for ever");
        world.settle();
        world.set_profile(Profile::draw(random));
        let old = bitmaps(&world.contents(DISK).to_bytes());
        let (task_disk, task_cx) = (Arc::clone(&disk), cx.clone());
        let task = async move {
            let which = SnapshotSelector::Name("s".to_owned());
            let applied = task_disk.apply_snapshot(&task_cx, &which, DiskSize::Fixed).await;
            applied.expect("an application");
        };
        let mut cuts = Vec::new();
        run_to_end(&world, &cx, &format!("seed {seed}"), task, || {
            if random.one_in(3) {
                cuts.push(world.crash_space(DISK).draw(random).to_bytes());
            }
        });
        let is_full = |bytes: &[u8]| {
            let found = bitmaps(bytes);
            let on = found.iter().filter(|(name, _)| name.starts_with("on"));
            on.map(|(_, bitmap)| bitmap).all(|bitmap| {
                !bitmap.flags.contains(BitmapFlags::IN_USE) && bitmap.bits.iter().all(|bit| *bit)
            })
        };
        for cut in &cuts {
            assert!(bitmaps(cut) == old || is_full(cut), "seed {seed}");
        }
        let bytes = world.crash_space(DISK).draw(random).to_bytes();
        assert!(is_full(&bytes), "seed {seed}: it is durable");
        crate::closing::close(&world, &cx, &disk, DISK, &format!("seed {seed}"));
        let now = cx.block_on(read_all(&world, &cx, SIZE)).expect("it turns");
        assert!(now == before, "seed {seed}: the snapshot's disk");
    }
}

/// A read fails at any step of a snapshot's application, so that bitmaps cannot have all their bits set, perhaps: those which are not
/// in use afterwards have what is written then.
#[test]
fn application_with_a_failed_read_leaves_no_bitmap_too_few() {
    let (mut applied, mut given_up) = (0, 0);
    for step in 0.. {
        let random = &mut Random::new(7);
        let world = SimWorld::new(7, Profile::IMMEDIATE);
        let cx = world.context(64);
        let disk = cx.block_on(async {
            image(&world, &cx, 4096, &[4096, 65536], random).await;
            let disk = open(&world, &cx, &durable()).await;
            let queue = Arc::clone(&disk).open_queue(&cx).expect("a queue");
            let first = request(&*queue, Op::Write { fua: true }, 8192, &[9; 4096], 4096);
            first.await.expect("a write");
            disk
        });
        let disk = disk.expect("nothing waits for ever");
        world.settle();
        world.set_profile(Profile::default());
        let (task_disk, task_cx) = (Arc::clone(&disk), cx.clone());
        let result = Rc::new(RefCell::new(None));
        let put = Rc::clone(&result);
        let task = async move {
            let which = SnapshotSelector::Name("s".to_owned());
            let done = task_disk.apply_snapshot(&task_cx, &which, DiskSize::Fixed).await;
            *put.borrow_mut() = Some(done.is_ok());
        };
        let mut steps = 0;
        run_to_end(&world, &cx, &format!("step {step}"), task, || {
            let read_error = if steps == step { 1000 } else { 0 };
            world.set_profile(Profile {
                read_error,
                ..Profile::default()
            });
            steps += 1;
        });
        world.set_profile(Profile::IMMEDIATE);
        let is_applied = result.take().expect("an answer");
        // Further than any of the first writes, and than what a durable bitmap marks with them.
        let at = SIZE - 4096;
        let written = cx.block_on(async {
            let queue = Arc::clone(&disk).open_queue(&cx).expect("a queue");
            request(&*queue, Op::Write { fua: true }, at, &[8; 4096], 4096).await
        });
        written.expect("nothing waits for ever").expect("a write");
        for (name, bitmap) in bitmaps(&world.contents(DISK).to_bytes()) {
            let is_in_use = bitmap.flags.contains(BitmapFlags::IN_USE);
            if name.starts_with("on") && !is_in_use {
                assert_eq!(bitmap.bits.last(), Some(&true), "step {step}: {name}");
            }
            given_up += u64::from(is_in_use);
        }
        applied += u64::from(is_applied);
        if steps <= step {
            assert!(is_applied, "nothing failed");
            break;
        }
    }
    assert!(applied > 1 && given_up > 0, "{applied} {given_up}");
}

/// The host takes no write of bits: the guest's change fails in a durable bitmap, and nothing that changed lacks its bit. What
/// cannot be stored at the close stays in use.
#[test]
fn failed_writes_of_bits_leave_no_bitmap_too_few() {
    let (mut failed, mut in_use) = (0, 0);
    for seed in 0..40 {
        let random = &mut Random::new(seed);
        let world = SimWorld::new(seed, Profile::IMMEDIATE);
        let cx = world.context(64);
        let is_durable = seed % 2 == 0;
        let options = if is_durable {
            durable()
        } else {
            OpenOptions::default()
        };
        let (before, disk) = cx
            .block_on(async {
                image(&world, &cx, 4096, &[4096, 65536], random).await;
                let before = read_all(&world, &cx, SIZE).await;
                (before, open(&world, &cx, &options).await)
            })
            .expect("nothing waits for ever");
        world.settle();
        let asked = Asked::default();
        let queue = Arc::clone(&disk).open_queue(&cx).expect("a queue");
        for number in 0..20 {
            world.set_profile(Profile {
                write_error: if number % 3 == 2 { 300 } else { 0 },
                ..Profile::default()
            });
            let (op, offset, len) = draw(random, (4096, true));
            asked.add(op, offset, len, 4096);
            let bytes = vec![number + 2; len as usize];
            let done = cx.block_on(request(&*queue, op, offset, &bytes, len));
            failed += u32::from(done.expect("nothing waits for ever").is_err());
        }
        drop(queue);
        world.set_profile(Profile {
            write_error: if random.one_in(2) { 300 } else { 0 },
            ..Profile::default()
        });
        let closed = cx.block_on(Arc::clone(&disk).close(&cx));
        let _failed_too = closed.expect("nothing waits for ever");
        world.settle();
        world.set_profile(Profile::IMMEDIATE);
        let bytes = world.contents(DISK).to_bytes();
        let now = cx.block_on(read_all(&world, &cx, SIZE)).expect("it turns");
        let mut seen = Seen::default();
        judge(
            &bytes,
            &before,
            &now,
            &asked,
            false,
            &mut seen,
            &format!("seed {seed}"),
        );
        in_use += seen.in_use;
    }
    assert!(
        failed > 0 && in_use > 0,
        "{failed} requests failed, {in_use} bitmaps are in use"
    );
}
