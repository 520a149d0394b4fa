//! Encrypted images in the simulated world: the guest writes, zeroes, discards, flushes and the disk grows, and the power
//! may go at any step, which leaves the file in any of its crash states.
//!
//! After each cut a check finds nothing but leaks, and each sector reads as it was flushed or as it was asked to be since:
//! never as what a hole of the file, or a sector that was encrypted for another place, decrypts to.

use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use block::Context;
use qcow::image::{CreateOptions, check, create};
use qcow::luks::{self, LuksOptions, Secret};
use qcow::{OpenOptions, QcowDisk};
use simulator::{Profile, Random, SimImage, SimWorld};

use crate::sectors::{Guest, assert_values, content};
use crate::steps::run_to_end;

const DISK: &str = "disk";
const BASE: &str = "base";

struct Bench {
    world: SimWorld,
    guest: Guest,
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
            guest: Guest::new(&cx, disk, (1 << cluster_bits) / 512, known),
            world,
        }
    }

    /// One request of the guest, answered.
    async fn request(&self, random: &mut Random) {
        match random.below(9) {
            0 => self.guest.flush().await,
            8 => self.guest.grow(random.below(20)).await,
            _ => self.guest.change(random).await,
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
        let durable = bench.guest.durable.borrow();
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
        run_to_end(&bench.world, &bench.guest.cx, &what, task, || {
            if random.one_in(4) {
                judge.look(&bench, &what, random);
            }
        });
    }
    let Ok(bench) = Rc::try_unwrap(bench) else {
        panic!("a task has not ended")
    };
    let Bench { world, guest } = bench;
    let what = format!("seed {seed}");
    guest.close(&world, DISK, &options(true), &what);
}

#[test]
fn encrypted_image_survives_a_cut_at_any_step() {
    for seed in 0..60 {
        run(seed);
    }
}
