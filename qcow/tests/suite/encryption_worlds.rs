//! Encrypted images in the simulated world: the guest writes, zeroes, discards, flushes and the disk grows, and the power
//! may go at any step, which leaves the file in any of its crash states.
//!
//! After each cut a check finds nothing but leaks, and each sector reads as it was flushed or as it was asked to be since:
//! never as what a hole of the file, or a sector that was encrypted for another place, decrypts to.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use block::{AlignedBuf, Buffer, Context, Disk, DiskQueue, Op, ask};
use qcow::image::{CreateOptions, check, create};
use qcow::luks::{self, LuksOptions, Secret};
use qcow::{OpenOptions, QcowDisk};
use simulator::{Profile, Random, SimImage, SimWorld};

use crate::sectors::{Sectors, assert_values, certain, content};
use crate::steps::run_to_end;

const DISK: &str = "disk";
const BASE: &str = "base";

struct Bench {
    world: SimWorld,
    cx: Context,
    disk: Arc<QcowDisk>,
    queue: Box<dyn DiskQueue>,
    cluster_sectors: u64,
    /// The content as the guest knows it, a byte for each sector.
    known: RefCell<Vec<u8>>,
    /// The contents that a cut may leave.
    durable: RefCell<Sectors>,
}

fn secret() -> Secret {
    Secret::new(b"open sesame".to_vec())
}

fn options(read_only: bool) -> OpenOptions {
    OpenOptions {
        read_only,
        secret: Some(secret()),
        backing_files: true,
        lock: None,
        ..OpenOptions::default()
    }
}

impl Bench {
    fn new(seed: u64, random: &mut Random) -> Self {
        let world = SimWorld::new(seed, Profile::IMMEDIATE);
        let cluster_bits = random.pick(&[9, 9, 10, 12, 14]);
        let sectors = 24 + random.below(60);
        let backed = random.pick(&[0, sectors / 2]);
        let discard_no_unref = random.one_in(2);
        let cx = world.context(64);
        let disk = cx.block_on(async {
            let view = world.file(DISK, true).view(&cx).expect("a view");
            let mut create_options = CreateOptions::new(sectors * 512);
            create_options.cluster_size = 1 << cluster_bits;
            create_options.extended_l2 = cluster_bits == 14;
            let cheap = LuksOptions {
                iter_time: Duration::from_millis(1),
                ..LuksOptions::default()
            };
            let (header, _) = luks::create(&secret(), &cheap).expect("a header");
            create_options.luks_header = Some(header);
            if backed > 0 {
                let base = vec![0xBB; backed as usize * 512];
                world.set_contents(BASE, SimImage::from_bytes(&world.store(), &base));
                create_options.backing_file = Some(BASE.to_owned());
                create_options.backing_format = Some("raw".to_owned());
            }
            create(&view, &create_options).await.expect("an image");
            let options = OpenOptions {
                discard_no_unref,
                ..options(false)
            };
            let disk = QcowDisk::open_on(&cx, &world, Path::new(DISK), &options).await;
            disk.expect("a disk")
        });
        let disk = disk.expect("nothing waits for ever");
        let queue = Arc::clone(&disk).open_queue(&cx).expect("a queue");
        world.settle();
        world.set_profile(Profile {
            reorder: true,
            piecewise: random.pick(&[0, 300]),
            linger: random.pick(&[0, 300, 800]),
            late: random.pick(&[0, 100]),
            ..Profile::default()
        });
        let known: Vec<u8> = (0..sectors)
            .map(|at| if at < backed { 0xBB } else { 0 })
            .collect();
        Self {
            durable: RefCell::new(certain(&known)),
            known: RefCell::new(known),
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
        self.world
            .set_contents(DISK, bench.world.crash_space(DISK).draw(random));
        let view = self.world.file(DISK, false).view(&self.cx).expect("a view");
        let report = self.cx.block_on(check(&view)).expect("it turns");
        let report = report.expect("a check");
        assert_eq!(report.corruptions, 0, "{what}: {:?}", report.findings);
        let found = content(&self.world, &self.cx, DISK, &options(true), what);
        let durable = bench.durable.borrow();
        assert_values(&found, &durable, what);
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
        known,
        ..
    } = bench;
    drop(queue);
    let what = format!("seed {seed}");
    crate::closing::close(&world, &cx, &disk, DISK, &what);
    let known = known.into_inner();
    assert_eq!(content(&world, &cx, DISK, &options(true), &what), known, "{what}");
}

#[test]
fn encrypted_image_survives_a_cut_at_any_step() {
    for seed in 0..60 {
        run(seed);
    }
}
