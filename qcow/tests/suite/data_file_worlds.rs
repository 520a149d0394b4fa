//! External data files in the simulated world: the guest writes, zeroes, discards, flushes and the disk grows, and the power
//! may go at any step, which leaves each of both files in any of its crash states.
//!
//! After each cut a check finds nothing but leaks, and each sector reads as it was flushed or as it was asked to be since.
//! So does a raw data file by itself. What was in a data file before, or lies past the disk's end in it, never shows.

use std::path::Path;
use std::rc::Rc;

use block::Context;
use qcow::image::{CreateOptions, NewDataFile, check, create_with_data_file};
use qcow::{OpenOptions, QcowDisk};
use simulator::{Profile, Random, SimImage, SimWorld};

use crate::sectors::{Guest, assert_values, content, sectors};
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
    guest: Guest,
    is_raw: bool,
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
        world.settle();
        world.set_profile(Profile::draw(random));
        let known: Vec<u8> = (0..sectors)
            .map(|at| if at < backed { 0xBB } else { 0 })
            .collect();
        Self {
            guest: Guest::new(&cx, disk, (1 << cluster_bits) / 512, known),
            is_raw,
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
        let durable = bench.guest.durable.borrow();
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
        run_to_end(&bench.world, &bench.guest.cx, &what, task, || {
            if random.one_in(4) {
                judge.look(&bench, &what, random);
            }
        });
    }
    let Ok(bench) = Rc::try_unwrap(bench) else {
        panic!("a task has not ended")
    };
    let Bench { world, guest, is_raw } = bench;
    let what = format!("seed {seed}");
    let known = guest.close(&world, DISK, &options(true), &what);
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
        let flush = async move { asked.guest.flush().await };
        run_to_end(&bench.world, &bench.guest.cx, "a FLUSH", flush, || {});
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
