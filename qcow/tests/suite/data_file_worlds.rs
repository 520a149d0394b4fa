//! External data files in the simulated world: the guest writes, zeroes, discards, flushes and the disk grows, and the power
//! may go at any step, which leaves each of both files in any of its crash states.
//!
//! After each cut a check finds nothing but leaks, and each sector reads as it was flushed or as it was asked to be since.
//! So does a raw data file by itself. What was in a data file before, or lies past the disk's end in it, never shows.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use block::{AlignedBuf, Buffer, Context, Disk, DiskQueue, Op, ask};
use qcow::image::{CreateOptions, NewDataFile, check, create_with_data_file};
use qcow::{OpenOptions, QcowDisk};
use simulator::{Profile, Random, SimImage, SimWorld};

use crate::sectors::{Sectors, assert_values, certain, content, sectors};
use crate::steps::run_to_end;

const DISK: &str = "disk";
const DATA: &str = "data";
const BASE: &str = "base";
/// The byte that the data file is full of before the image has it.
const STALE: u8 = 0xEE;
/// Sectors of the data file behind the disk's end.
const BEHIND: u64 = 40;

struct Bench {
    world: SimWorld,
    cx: Context,
    disk: Arc<QcowDisk>,
    queue: Box<dyn DiskQueue>,
    is_raw: bool,
    cluster_sectors: u64,
    /// The content as the guest knows it, a byte for each sector.
    known: RefCell<Vec<u8>>,
    /// The contents that a cut may leave.
    durable: RefCell<Sectors>,
}

fn options(read_only: bool) -> OpenOptions {
    OpenOptions {
        read_only,
        backing_files: true,
        data_files: true,
        lock: None,
        ..OpenOptions::default()
    }
}

impl Bench {
    fn new(seed: u64, random: &mut Random) -> Self {
        let world = SimWorld::new(seed, Profile::IMMEDIATE);
        let cluster_bits = random.pick(&[9, 9, 10, 12, 14]);
        let sectors = 24 + random.below(60);
        let is_raw = random.one_in(2);
        let backed = if is_raw { 0 } else { random.pick(&[0, sectors / 2]) };
        // Empty before, so that nothing is asked about its bytes; then what a device or a longer file may have.
        let (data_sectors, is_longer) = (sectors + BEHIND, random.one_in(2));
        let cx = world.context(64);
        let disk = cx.block_on(async {
            let view = world.file(DISK, true).view(&cx).expect("a view");
            let data = world.file(DATA, true).view(&cx).expect("a view");
            let mut create_options = CreateOptions::new(sectors * 512);
            create_options.cluster_size = 1 << cluster_bits;
            create_options.extended_l2 = cluster_bits == 14;
            create_options.data_file = Some(NewDataFile {
                name: DATA.to_owned(),
                raw: is_raw,
                keep: false,
            });
            if backed > 0 {
                let base = vec![0xBB; backed as usize * 512];
                world.set_contents(BASE, SimImage::from_bytes(&world.store(), &base));
                create_options.backing_file = Some(BASE.to_owned());
                create_options.backing_format = Some("raw".to_owned());
            }
            create_with_data_file(&view, &data, &create_options)
                .await
                .expect("an image");
            let len = if is_longer { data_sectors } else { sectors };
            let mut bytes = vec![STALE; len as usize * 512];
            if is_raw {
                bytes[..sectors as usize * 512].fill(0);
            }
            world.set_contents(DATA, SimImage::from_bytes(&world.store(), &bytes));
            let disk = QcowDisk::open_on(&cx, &world, Path::new(DISK), &options(false)).await;
            disk.expect("a disk")
        });
        let disk = disk.expect("nothing waits for ever");
        let queue = Arc::clone(&disk).open_queue(&cx).expect("a queue");
        world.settle();
        world.set_profile(Profile::draw(random));
        let known: Vec<u8> = (0..sectors)
            .map(|at| if at < backed { 0xBB } else { 0 })
            .collect();
        Self {
            durable: RefCell::new(certain(&known)),
            known: RefCell::new(known),
            is_raw,
            cluster_sectors: (1 << cluster_bits) / 512,
            world,
            cx,
            disk,
            queue,
        }
    }

    fn flushed(&self) {
        *self.durable.borrow_mut() = certain(&self.known.borrow());
    }

    /// One request of the guest, answered.
    async fn request(&self, random: &mut Random) {
        let sectors = self.known.borrow().len() as u64;
        let mut count = 1 + random.below(sectors.min(12));
        let mut first = random.below(sectors - count + 1);
        let kind = random.below(9);
        if kind == 0 {
            ask(&*self.queue, Op::Flush, 0, 0, Buffer::default())
                .await
                .expect("a FLUSH");
            return self.flushed();
        }
        if kind == 8 {
            return self.grow(random.below(20)).await;
        }
        let (op, byte) = match kind {
            1 | 2 => {
                let unmap = kind == 1;
                (Op::WriteZeroes { unmap, fua: false }, 0)
            }
            3 => {
                // Whole clusters, which a discard makes zeros.
                first -= first % self.cluster_sectors;
                count = count.next_multiple_of(self.cluster_sectors).min(sectors - first);
                (Op::Discard, 0)
            }
            _ => (Op::Write { fua: kind == 4 }, 1 + random.below(0x70) as u8),
        };
        for at in first..first + count {
            self.durable.borrow_mut()[at as usize].push(byte);
        }
        let buffer = match op {
            Op::Write { .. } => AlignedBuf::from_slice(&vec![byte; count as usize * 512]).into(),
            _ => Buffer::default(),
        };
        ask(&*self.queue, op, first * 512, count * 512, buffer)
            .await
            .expect("a change");
        self.known.borrow_mut()[first as usize..][..count as usize].fill(byte);
        if kind == 4 {
            for at in first..first + count {
                self.durable.borrow_mut()[at as usize] = vec![byte];
            }
        }
    }

    async fn grow(&self, sectors: u64) {
        let size = self.known.borrow().len() as u64 + sectors;
        for _ in 0..sectors {
            self.durable.borrow_mut().push(vec![0]);
        }
        self.disk.grow(&self.cx, size * 512).await.expect("a growth");
        self.known.borrow_mut().resize(size as usize, 0);
        if sectors > 0 {
            self.flushed();
        }
    }
}

/// A world to look at what a cut leaves.
struct Judge {
    world: SimWorld,
    cx: Context,
}

impl Judge {
    fn new(bench: &Bench) -> Self {
        let world = SimWorld::with_store(0, Profile::IMMEDIATE, &bench.world.store());
        world.set_contents(BASE, bench.world.contents(BASE));
        let cx = world.context(64);
        Self { world, cx }
    }

    fn look(&self, bench: &Bench, what: &str, random: &mut Random) {
        let data = bench.world.crash_space(DATA).draw(random);
        let data_bytes = data.to_bytes();
        self.world
            .set_contents(DISK, bench.world.crash_space(DISK).draw(random));
        self.world.set_contents(DATA, data);
        let view = self.world.file(DISK, false).view(&self.cx).expect("a view");
        let report = self.cx.block_on(check(&view)).expect("it turns");
        let report = report.expect("a check");
        assert_eq!(report.corruptions, 0, "{what}: {:?}", report.findings);
        let found = content(&self.world, &self.cx, DISK, &options(true), what);
        let durable = bench.durable.borrow();
        assert_values(&found, &durable, what);
        if bench.is_raw {
            let size = found.len() * 512;
            let raw = sectors(&data_bytes[..size], what);
            assert_values(&raw, &durable, &format!("{what}, the raw file"));
        }
    }
}

fn run(seed: u64) {
    let random = &mut Random::new(seed);
    let bench = Rc::new(Bench::new(seed, random));
    let judge = Judge::new(&bench);
    for round in 0..6 {
        let in_task = Rc::clone(&bench);
        let mut own = Random::new(seed << 8 | round);
        let task = async move {
            for _ in 0..own.below(8) {
                in_task.request(&mut own).await;
            }
        };
        let what = format!("seed {seed}, round {round}");
        run_to_end(&bench.world, &bench.cx, &what, task, || {
            if random.one_in(4) {
                judge.look(&bench, &what, random);
            }
        });
    }
    let Ok(bench) = Rc::try_unwrap(bench) else {
        panic!("a task has not ended")
    };
    let Bench {
        world,
        cx,
        disk,
        queue,
        is_raw,
        known,
        ..
    } = bench;
    drop(queue);
    let what = format!("seed {seed}");
    crate::closing::close(&world, &cx, &disk, DISK, &what);
    let known = known.into_inner();
    assert_eq!(content(&world, &cx, DISK, &options(true), &what), known, "{what}");
    let data = world.contents(DATA).to_bytes();
    if is_raw {
        let raw = &data[..known.len() * 512];
        assert_eq!(sectors(raw, &what), known, "{what}: the raw file");
    }
}

/// A process before this one may have written entries and data and not synced either file.
#[test]
fn first_flush_after_open_syncs_both_files() {
    let bench = Rc::new(Bench::new(0, &mut Random::new(0)));
    bench.world.record();
    let syncs = || {
        let before = bench.world.trace().len();
        let asked = Rc::clone(&bench);
        let flush = async move {
            let flushed = ask(&*asked.queue, Op::Flush, 0, 0, Buffer::default()).await;
            flushed.expect("a FLUSH");
        };
        run_to_end(&bench.world, &bench.cx, "a FLUSH", flush, || {});
        let trace = bench.world.trace();
        let events = trace[before..].iter().map(ToString::to_string);
        events.filter(|event| event.ends_with("sync, submitted")).count()
    };
    assert_eq!([syncs(), syncs()], [2, 0]);
}

#[test]
fn data_file_and_image_survive_a_cut_at_any_step() {
    for seed in 0..200 {
        run(seed);
    }
}
