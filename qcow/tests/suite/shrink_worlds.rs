//! Disks that become smaller and larger in the simulated world while the guest writes, zeroes, discards and flushes and
//! snapshots are taken; and the power may go at any step. Plain images, those with subclusters, a base, encryption, and data
//! files of both kinds.
//!
//! After each cut a check finds nothing but leaks; the disk has its old size or its new one; each sector reads as it was
//! flushed or as it was asked to be since; and snapshots are as they were. Where a disk has become smaller, a program that only
//! changes the size in the header finds zeros behind its end.

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, UNIX_EPOCH};

use block::{AlignedBuf, Context, Op, ask};
use qcow::format::header::at;
use qcow::image::{CreateOptions, NewDataFile, check, create, create_with_data_file};
use qcow::luks::{self, LuksOptions, Secret};
use qcow::{OpenOptions, QcowDisk};
use simulator::{Profile, Random, SimImage, SimWorld};

use crate::sectors::{Guest, assert_values, content, sectors};
use crate::snapshot_content::{as_disk, entries};
use crate::steps::run_to_end;

const DISK: &str = "disk";
const DATA: &str = "data";
const BASE: &str = "base";

/// The place of the guest's bytes, and their form.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Kind {
    Plain,
    Backed,
    Encrypted,
    DataFile,
    RawDataFile,
}

impl Kind {
    fn has_data_file(self) -> bool {
        matches!(self, Self::DataFile | Self::RawDataFile)
    }

    fn options(self, read_only: bool) -> OpenOptions {
        OpenOptions {
            read_only,
            secret: (self == Self::Encrypted).then(secret),
            backing_files: true,
            data_files: true,
            lock: None,
            ..OpenOptions::default()
        }
    }
}

fn secret() -> Secret {
    Secret::new(b"open sesame".to_vec())
}

struct Bench {
    world: SimWorld,
    guest: Guest,
    kind: Kind,
    /// The sizes that a cut may leave, in sectors.
    sizes: RefCell<Vec<usize>>,
    /// The size that the disk got when it last became smaller, or gets now.
    shrunk_to: Cell<Option<usize>>,
    /// The content of each snapshot.
    snapshots: RefCell<Vec<Vec<u8>>>,
}

impl Bench {
    fn new(seed: u64, random: &mut Random) -> Self {
        let world = SimWorld::new(seed, Profile::IMMEDIATE);
        let kind = random.pick(&[
            Kind::Plain,
            Kind::Plain,
            Kind::Backed,
            Kind::Encrypted,
            Kind::DataFile,
            Kind::RawDataFile,
        ]);
        let cluster_bits = random.pick(&[9, 9, 10, 12, 14]);
        let sectors = 24 + random.below(100);
        let backed = if kind == Kind::Backed { sectors } else { 0 };
        let cx = world.context(64);
        let disk = cx.block_on(async {
            let view = world.file(DISK, true).view(&cx).expect("a view");
            let mut options = CreateOptions::new(sectors * 512);
            options.cluster_size = 1 << cluster_bits;
            options.extended_l2 = cluster_bits == 14;
            if kind == Kind::Encrypted {
                let cheap = LuksOptions {
                    iter_time: Duration::from_millis(1),
                    ..LuksOptions::default()
                };
                let (header, _) = luks::create(&secret(), &cheap).expect("a header");
                options.luks_header = Some(header);
            }
            if kind == Kind::Backed {
                let base = vec![0xBB; backed as usize * 512];
                world.set_contents(BASE, SimImage::from_bytes(&world.store(), &base));
                options.backing_file = Some(BASE.to_owned());
                options.backing_format = Some("raw".to_owned());
            }
            if kind.has_data_file() {
                options.data_file = Some(NewDataFile {
                    name: DATA.to_owned(),
                    raw: kind == Kind::RawDataFile,
                    keep: false,
                });
                let data = world.file(DATA, true).view(&cx).expect("a view");
                create_with_data_file(&view, &data, &options)
                    .await
                    .expect("an image");
            } else {
                create(&view, &options).await.expect("an image");
            }
            let disk = QcowDisk::open_on(&cx, &world, Path::new(DISK), &kind.options(false)).await;
            disk.expect("a disk")
        });
        let disk = disk.expect("nothing waits for ever");
        world.settle();
        world.set_profile(Profile::draw(random));
        let known: Vec<u8> = (0..sectors)
            .map(|at| if at < backed { 0xBB } else { 0 })
            .collect();
        Self {
            sizes: RefCell::new(vec![known.len()]),
            guest: Guest::new(&cx, disk, (1 << cluster_bits) / 512, known),
            shrunk_to: Cell::default(),
            snapshots: RefCell::default(),
            world,
            kind,
        }
    }

    /// Records that all that the guest knows is durable now.
    fn flushed(&self) {
        self.guest.flushed();
        *self.sizes.borrow_mut() = vec![self.guest.sectors() as usize];
    }

    /// One request of the guest, answered.
    async fn request(&self, random: &mut Random) {
        if random.below(8) == 0 {
            self.guest.flush().await;
            self.flushed();
        } else {
            self.guest.change(random).await;
        }
    }

    async fn shrink(&self, random: &mut Random) {
        let guest = &self.guest;
        let size = 1 + random.below(guest.sectors());
        self.sizes.borrow_mut().push(size as usize);
        self.shrunk_to.set(Some(size as usize));
        let shrunk = guest.disk.shrink(&guest.cx, size * 512).await;
        shrunk.expect("a smaller disk");
        guest.known.borrow_mut().truncate(size as usize);
        self.flushed();
        let buffer = AlignedBuf::zeroed(512).into();
        let past = ask(&*guest.queue, Op::Read, size * 512, 512, buffer).await;
        past.expect_err("it is past the end");
    }

    async fn grow(&self, random: &mut Random) {
        let more = 1 + random.below(60);
        self.sizes
            .borrow_mut()
            .push((self.guest.sectors() + more) as usize);
        self.guest.grow(more).await;
        self.shrunk_to.set(None);
        self.flushed();
    }

    /// Takes a snapshot, whose name is its number. Nothing is asked for meanwhile, so that its content is known.
    async fn snapshot(&self) {
        let known = self.guest.known.borrow().clone();
        let name = self.snapshots.borrow().len().to_string();
        self.snapshots.borrow_mut().push(known);
        let created = self
            .guest
            .disk
            .create_snapshot(&self.guest.cx, &name, UNIX_EPOCH)
            .await;
        created.expect("a snapshot");
        self.flushed();
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
        if bench.kind == Kind::Backed {
            world.set_contents(BASE, bench.world.contents(BASE));
        }
        let cx = world.context(64);
        Self { world, cx }
    }

    /// Reads the disk in an image.
    fn read(&self, bench: &Bench, image: &[u8], what: &str) -> Vec<u8> {
        self.world
            .set_contents(DISK, SimImage::from_bytes(&self.world.store(), image));
        content(&self.world, &self.cx, DISK, &bench.kind.options(true), what)
    }

    fn look(&self, bench: &Bench, what: &str, random: &mut Random) {
        let image = bench.world.crash_space(DISK).draw(random).to_bytes();
        let mut raw = Vec::new();
        if bench.kind.has_data_file() {
            let data = bench.world.crash_space(DATA).draw(random);
            raw = data.to_bytes();
            self.world.set_contents(DATA, data);
        }
        let found = self.read(bench, &image, what);
        let view = self.world.file(DISK, false).view(&self.cx).expect("a view");
        let report = self.cx.block_on(check(&view)).expect("it turns");
        let report = report.expect("a check");
        assert_eq!(report.corruptions, 0, "{what}: {:?}", report.findings);
        let sizes = bench.sizes.borrow();
        assert!(sizes.contains(&found.len()), "{what}: {} sectors", found.len());
        let durable = bench.guest.durable.borrow();
        assert_values(&found, &durable, what);
        if bench.kind == Kind::RawDataFile {
            let raw = sectors(&raw[..found.len() * 512], what);
            assert_values(&raw, &durable, &format!("{what}, the raw file"));
        }
        self.look_behind(bench, &image, &found, what);
        self.look_at_snapshots(bench, &image, what);
    }

    /// Behind the end of a disk that has become smaller there are zeros, if another program changes nothing but the size. That
    /// hides a base by itself, and a data file has its own end.
    fn look_behind(&self, bench: &Bench, image: &[u8], found: &[u8], what: &str) {
        let is_shrunk = bench.shrunk_to.get() == Some(found.len());
        if !is_shrunk || !matches!(bench.kind, Kind::Plain | Kind::Encrypted) {
            return;
        }
        let sectors = (found.len() as u64).next_multiple_of(bench.guest.cluster_sectors);
        let mut longer = image.to_vec();
        longer[at::SIZE..at::SIZE + 8].copy_from_slice(&(sectors * 512).to_be_bytes());
        let mut expected = found.to_vec();
        expected.resize(sectors as usize, 0);
        assert_eq!(
            self.read(bench, &longer, what),
            expected,
            "{what}: behind the end"
        );
    }

    fn look_at_snapshots(&self, bench: &Bench, image: &[u8], what: &str) {
        for entry in entries(image) {
            let number: usize = String::from_utf8_lossy(&entry.name).parse().expect("a number");
            let found = self.read(bench, &as_disk(image, &entry), what);
            assert!(
                found == bench.snapshots.borrow()[number],
                "{what}: snapshot {number} has changed"
            );
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
            for _ in 0..own.below(6) {
                in_task.request(&mut own).await;
            }
            match own.below(6) {
                0 if !in_task.kind.has_data_file() => in_task.snapshot().await,
                0 | 1 => in_task.grow(&mut own).await,
                _ => in_task.shrink(&mut own).await,
            }
        };
        let what = format!("seed {seed}, {:?}, round {round}", bench.kind);
        run_to_end(&bench.world, &bench.guest.cx, &what, task, || {
            if random.one_in(4) {
                judge.look(&bench, &what, random);
            }
        });
    }
    let Ok(bench) = Rc::try_unwrap(bench) else {
        panic!("a task has not ended")
    };
    let Bench {
        world, guest, kind, ..
    } = bench;
    let what = format!("seed {seed}, {kind:?}");
    let known = guest.close(&world, DISK, &kind.options(true), &what);
    if kind.has_data_file() {
        let data = world.contents(DATA).to_bytes();
        assert_eq!(data.len(), known.len() * 512, "{what}: the data file's length");
    }
}

#[test]
fn disk_survives_a_cut_at_any_step_of_shrink_and_growth() {
    for seed in 0..200 {
        run(seed);
    }
}
