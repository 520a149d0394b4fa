//! Disks that grow by any amount in the simulated world, while the guest writes, discards, zeroes and flushes up to the end
//! that it knows; and the power may go at any step.
//!
//! The sizes cross what L1 tables and refcount structures of every width hold, and end inside clusters, 4 KiB blocks and
//! right behind either.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use block::file::Alignment;
use block::{AlignedBuf, Buffer, Context, Disk, DiskQueue, Op, ask};
use qcow::image::{CreateOptions, check, create};
use qcow::{OpenOptions, QcowDisk};
use simulator::{Profile, Random, SimImage, SimWorld};

const DISK: &str = "disk";
const BASE: &str = "base";
const SECTOR: u64 = 512;

/// The guest's knowledge of its sectors: those that were changed, `None` for one that may hold either of two values.
type Sectors = BTreeMap<u64, Option<u8>>;

#[derive(Debug)]
struct Shape {
    /// The seed it was drawn from.
    #[expect(dead_code, reason = "for messages")]
    seed: u64,
    cluster_bits: u32,
    refcount_bits: u32,
    bytes: u64,
    /// A raw file of so many bytes below.
    backing: u64,
    alignment: u64,
}

impl Shape {
    fn draw(seed: u64, random: &mut Random) -> Self {
        let bytes = SECTOR * (1 + random.below(200));
        Self {
            seed,
            cluster_bits: random.pick(&[9, 9, 9, 10, 12]),
            refcount_bits: random.pick(&[1, 2, 4, 8, 16, 32, 64]),
            bytes,
            backing: random.pick(&[0, 0, bytes / 1024 * 512, bytes + 512, bytes + (1 << 16)]),
            alignment: random.pick(&[1, 512, 4096]),
        }
    }

    fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// A larger size for a disk of `bytes`.
    fn grow(&self, bytes: u64, random: &mut Random) -> u64 {
        // What one L2 table and one cluster of the L1 table map, and what one refcount block counts.
        let table = self.cluster() << (self.cluster_bits - 3);
        let l1 = table << (self.cluster_bits - 3);
        let counted = self.cluster() * (self.cluster() * 8 / u64::from(self.refcount_bits));
        let unit = random.pick(&[SECTOR, 4096, self.cluster(), table, l1, counted]);
        let nudge = random.pick(&[0, SECTOR, 4096 - SECTOR, unit - SECTOR]);
        let far = (bytes / unit + 1 + random.below(3)) * unit + nudge;
        // The L1 table of the largest has a thousand clusters of 512 bytes.
        far.min(bytes + (2 << 30)) / SECTOR * SECTOR
    }
}

struct Bench {
    shape: Shape,
    world: SimWorld,
    cx: Context,
    disk: Arc<QcowDisk>,
    queue: Rc<Box<dyn DiskQueue>>,
}

fn options() -> OpenOptions {
    OpenOptions {
        backing_files: true,
        lock: None,
        ..OpenOptions::default()
    }
}

impl Bench {
    fn new(seed: u64, random: &mut Random) -> Self {
        let shape = Shape::draw(seed, random);
        let world = SimWorld::new(seed, Profile::IMMEDIATE);
        if shape.backing > 0 {
            let base = vec![0xBB; shape.backing as usize];
            world.set_contents(BASE, SimImage::from_bytes(&world.store(), &base));
        }
        let cx = world.context(64);
        let disk = cx.block_on(async {
            let view = world.file(DISK, true).view(&cx).expect("a view");
            let mut create_options = CreateOptions::new(shape.bytes);
            create_options.cluster_size = shape.cluster();
            create_options.refcount_bits = shape.refcount_bits;
            if shape.backing > 0 {
                create_options.backing_file = Some(BASE.to_owned());
                create_options.backing_format = Some("raw".to_owned());
            }
            create(&view, &create_options).await.expect("an image");
            let alignment = Alignment {
                memory: 512,
                offset: shape.alignment,
            };
            if shape.alignment > 1 {
                world.set_alignment(DISK, alignment);
            }
            let disk = QcowDisk::open_on(&cx, &world, Path::new(DISK), &options()).await;
            disk.expect("a disk")
        });
        let disk = disk.expect("nothing waits for ever");
        let queue = Rc::new(Arc::clone(&disk).open_queue(&cx).expect("a queue"));
        world.settle();
        world.set_profile(Profile::draw(random));
        Self {
            shape,
            world,
            cx,
            disk,
            queue,
        }
    }

    /// Returns the byte that fills a sector that nobody has changed.
    fn untouched(&self, sector: u64) -> u8 {
        let below = self.shape.backing.min(self.shape.bytes) / SECTOR;
        if sector < below { 0xBB } else { 0 }
    }

    fn expected(&self, known: &Sectors, sector: u64) -> Option<u8> {
        known
            .get(&sector)
            .map_or(Some(self.untouched(sector)), |&byte| byte)
    }
}

/// One change of what lies before `end`: asked for, answered, and noted in `known`.
async fn change(
    bench: &Bench,
    known: &RefCell<Sectors>,
    durable: &RefCell<Sectors>,
    end: u64,
    random: &mut Random,
) {
    let queue = &**bench.queue;
    let sectors = end / SECTOR;
    let kind = random.below(8);
    let count = 1 + random.below(sectors.min(40));
    let first = if random.one_in(2) {
        sectors - count
    } else {
        random.below(sectors - count + 1)
    };
    if kind == 0 {
        let flushed = known.borrow().clone();
        ask(queue, Op::Flush, 0, 0, Buffer::default())
            .await
            .expect("a FLUSH");
        *durable.borrow_mut() = flushed;
        return;
    }
    let range = first..first + count;
    // Until a FLUSH, a cut may leave either.
    durable
        .borrow_mut()
        .extend(range.clone().map(|sector| (sector, None)));
    let (offset, len) = (first * SECTOR, count * SECTOR);
    let (op, buffer, byte) = match kind {
        1 => (Op::Discard, Buffer::default(), None),
        2 | 3 => {
            let unmap = kind == 2;
            (Op::WriteZeroes { unmap, fua: false }, Buffer::default(), Some(0))
        }
        _ => {
            let byte = 1 + random.below(0x70) as u8;
            let bytes = AlignedBuf::from_slice(&vec![byte; len as usize]);
            (Op::Write { fua: false }, bytes.into(), Some(byte))
        }
    };
    ask(queue, op, offset, len, buffer).await.expect("a change");
    let cluster = bench.shape.cluster();
    let whole = offset.next_multiple_of(cluster)..(offset + len) / cluster * cluster;
    for sector in range {
        let place = match byte {
            None if whole.contains(&(sector * SECTOR)) => Some(0),
            // The rest of a discarded range, or the last cluster if the disk grows meanwhile.
            None => None,
            byte => byte,
        };
        known.borrow_mut().insert(sector, place);
    }
}

/// A cut now leaves an image without errors that holds what was flushed.
fn judge(bench: &Bench, judge: &SimWorld, cx: &Context, durable: &Sectors, size: u64, random: &mut Random) {
    judge.set_contents(DISK, bench.world.crash_space(DISK).draw(random));
    let looked = cx.block_on(async {
        let view = judge.file(DISK, true).view(cx).expect("a view");
        let report = check(&view).await.expect("a check");
        assert_eq!(report.corruptions, 0, "{:?}: {:?}", bench.shape, report.findings);
        let disk = QcowDisk::open_on(cx, judge, Path::new(DISK), &options()).await;
        let disk = disk.expect("a disk");
        assert!(disk.info().size_bytes >= size, "{:?}", bench.shape);
        let queue = Arc::clone(&disk).open_queue(cx).expect("a queue");
        for (&sector, byte) in durable.iter().filter(|(_, byte)| byte.is_some()) {
            let read = read(&*queue, sector).await;
            assert_eq!(
                Some(read),
                *byte,
                "{:?}: sector {sector} after a cut",
                bench.shape
            );
        }
    });
    looked.expect("nothing waits for ever");
}

/// The byte that a sector is full of.
async fn read(queue: &dyn DiskQueue, sector: u64) -> u8 {
    let buffer = AlignedBuf::from_slice(&[0xEE; 512]).into();
    let read = ask(queue, Op::Read, sector * SECTOR, SECTOR, buffer).await;
    let bytes = read.expect("a read").into_owned().expect("our own buffer");
    assert!(
        bytes.iter().all(|&byte| byte == bytes[0]),
        "sector {sector} is torn"
    );
    bytes[0]
}

fn run(seed: u64) {
    let random = &mut Random::new(seed);
    let bench = Rc::new(Bench::new(seed, random));
    let judging = SimWorld::with_store(seed, Profile::IMMEDIATE, &bench.world.store());
    judging.set_contents(BASE, bench.world.contents(BASE));
    let judge_cx = judging.context(64);
    let (known, durable) = (
        Rc::new(RefCell::new(Sectors::new())),
        Rc::new(RefCell::new(Sectors::new())),
    );
    let mut size = bench.shape.bytes;
    for round in 0..5 {
        let larger = bench.shape.grow(size, random);
        let left = Rc::new(Cell::new(2));
        {
            let (bench, left, cx) = (Rc::clone(&bench), Rc::clone(&left), bench.cx.clone());
            bench.cx.clone().spawn(async move {
                bench.disk.grow(&cx, larger).await.expect("growth");
                left.set(left.get() - 1);
            });
        }
        {
            let (bench, left) = (Rc::clone(&bench), Rc::clone(&left));
            let (known, durable, mut random) =
                (Rc::clone(&known), Rc::clone(&durable), Random::new(seed ^ round));
            bench.cx.clone().spawn(async move {
                for _ in 0..6 {
                    change(&bench, &known, &durable, size, &mut random).await;
                }
                left.set(left.get() - 1);
            });
        }
        let mut turns = 0;
        while left.get() > 0 {
            bench.cx.run_ready();
            bench.cx.ring().turn(false).expect("the ring turns");
            bench.world.step();
            turns += 1;
            assert!(turns < 200_000, "{:?}: it does not end", bench.shape);
            if random.one_in(12) {
                judge(&bench, &judging, &judge_cx, &durable.borrow(), size, random);
            }
        }
        let old = std::mem::replace(&mut size, larger);
        assert_eq!(bench.disk.info().size_bytes, size);
        // Around the old end, the new one, and somewhere between.
        let mut places: Vec<u64> = (0..20).map(|at| (old / SECTOR + at).saturating_sub(4)).collect();
        places.extend([size / SECTOR - 1, (old + (size - old) / 2) / SECTOR]);
        let looked = bench.cx.block_on(async {
            for &sector in places.iter().filter(|&&sector| sector < size / SECTOR) {
                let found = read(&**bench.queue, sector).await;
                let expected = bench.expected(&known.borrow(), sector);
                assert!(
                    expected.is_none_or(|byte| byte == found),
                    "{:?}: sector {sector} holds {found:#x} when {old} bytes have become {size}",
                    bench.shape
                );
            }
        });
        looked.expect("nothing waits for ever");
    }
    let Ok(bench) = Rc::try_unwrap(bench) else {
        panic!("a task has not ended")
    };
    let Bench {
        world,
        cx,
        disk,
        queue,
        ..
    } = bench;
    drop(queue);
    crate::closing::close(&world, &cx, &disk, DISK, &format!("seed {seed}"));
}

#[test]
fn growth_keeps_flushed_data_and_shows_zeros() {
    // The last one: a run of clusters for the L1 table crosses what a refcount block counts, and the power goes.
    for seed in (0..60).chain([394]) {
        run(seed);
    }
}
