//! The judge of images that a power cut left: it opens and checks each with the engine, compares the guest's sectors
//! with the oracle, and asks `qemu-img` about a few.

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use block::{AlignedBuf, Buffer, Context, Disk, IoError, Op, ask};
use qcow::format::header::at;
use qcow::format::{Incompatible, Version};
use qcow::image::{CheckReport, RepairScope, Verdict, check, repair};
use qcow::{OpenOptions, QcowDisk};
use rustc_hash::FxHashSet;
use simulator::{Profile, Random, SECTOR, SimImage, SimWorld, Store};

use crate::bitmaps::{self, Counts, Exactness};
use crate::content::{ZERO, word, word_of};
use crate::oracle::{BLOCK_SECTORS, Found, Oracle};
use crate::shape::{Beginning, Below, DATA, DISK, DataFileKind, chain, u64_at, write_words};
use crate::snapshots;

/// Counts of the images that were judged, over many runs.
#[derive(Debug, Default)]
pub struct Tally {
    /// Fingerprints of all images looked at.
    pub images: FxHashSet<u64>,
    /// The number of judgements: the same image is judged anew when more was promised of it.
    pub judged: u64,
    /// The number of images that were written to again after the cut.
    pub resumed: u64,
    /// The number of those in which the power went a second time.
    pub cut_again: u64,
    /// The number of images whose leaks were repaired.
    pub mended: u64,
    /// The number of images with snapshots that the run has made, each of which was read.
    pub with_snapshots: u64,
    /// Counts of bitmaps and their bits.
    pub bitmaps: Counts,
    /// The number of images that QEMU was asked about.
    pub asked_qemu: u64,
    /// Of every so many images QEMU is asked about one; 0 for none.
    pub qemu_every: u64,
    /// One is due.
    qemu_due: bool,
}

impl Tally {
    /// Takes over what another has counted.
    pub fn add(&mut self, other: Self) {
        self.images.extend(other.images);
        self.judged += other.judged;
        self.resumed += other.resumed;
        self.cut_again += other.cut_again;
        self.mended += other.mended;
        self.with_snapshots += other.with_snapshots;
        self.bitmaps.add(other.bitmaps);
        self.asked_qemu += other.asked_qemu;
    }
}

/// The demand on an image beyond the rules for every image.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Demand {
    /// Leaks are allowed.
    Sound,
    /// It is what a cut left: so many leaks at most are.
    Leaks(u64),
    /// It was closed cleanly: not even leaks.
    Flawless,
}

/// The remains of a cut: the words of the disk's sectors, the number of leaked clusters, and the snapshots.
#[derive(Debug)]
struct Left {
    words: Vec<u64>,
    leaks: u64,
    snapshots: Found,
    bitmaps: Counts,
}

/// Of so many images one loses power a second time.
const CUT_AGAIN: u64 = 96;

/// Of so many images that leak clusters one is repaired.
const MENDED: u64 = 24;

/// Of so many images of a disk that became smaller one is looked at behind its end.
const LOOKED_BEHIND: u64 = 4;

/// The most states of a second cut that are judged.
const LOOKS: usize = 4;

/// So many blocks of a disk are always read; of what is behind, those that were never touched only now and then.
const WHOLE: u64 = 8;

/// The behaviour of the disk between two cuts.
const SLOW: Profile = Profile {
    immediate: false,
    reorder: true,
    piecewise: 300,
    linger: 300,
    ..Profile::IMMEDIATE
};

/// Looks at the images of one run.
#[derive(Debug)]
pub struct Judge {
    world: SimWorld,
    cx: Context,
    beginning: Rc<Beginning>,
    options: OpenOptions,
    /// Kept for the next look.
    buffer: Option<AlignedBuf>,
    random: Random,
    /// The source of the choice of images to repair: its own, so that other chances stay as they are.
    mends: Random,
    /// Every image is written again.
    resumes_all: bool,
    /// Images judged with so many promises.
    done: FxHashSet<(u64, u64)>,
    /// The data file beside the next images, if there is one.
    data: Option<SimImage>,
}

impl Judge {
    /// A judge of a run that began with `beginning`, in a world of `store`; one that writes every image again, or some.
    #[must_use]
    pub fn new(beginning: &Rc<Beginning>, store: &Store, seed: u64, resumes_all: bool) -> Self {
        let world = SimWorld::with_store(seed, Profile::IMMEDIATE, store);
        beginning.install(&world);
        Self {
            cx: world.context(64),
            world,
            options: beginning.shape.options(),
            beginning: Rc::clone(beginning),
            buffer: None,
            random: Random::new(!seed),
            mends: Random::new(seed.rotate_left(40)),
            resumes_all,
            done: FxHashSet::default(),
            data: None,
        }
    }

    /// Has the next images judged with this data file beside them.
    pub fn set_data(&mut self, data: SimImage) {
        self.data = Some(data);
    }

    /// Puts an image into a world, and the data file beside it.
    fn put(&self, world: &SimWorld, image: &SimImage) {
        world.set_contents(DISK, image.clone());
        if let Some(data) = &self.data {
            world.set_contents(DATA, data.clone());
        }
    }

    /// Judges an image unless that was done. The words that its sectors hold, if it was.
    ///
    /// # Errors
    ///
    /// Says what is wrong with it.
    pub fn judge(
        &mut self,
        image: &SimImage,
        oracle: &Oracle,
        demand: Demand,
        tally: &mut Tally,
    ) -> Result<(), String> {
        let data = self.data.as_ref().map_or(0, SimImage::fingerprint);
        let fingerprint = image.fingerprint() ^ data.rotate_left(1);
        if !self.done.insert((
            fingerprint,
            oracle.promises() << 1 | u64::from(demand == Demand::Flawless),
        )) {
            return Ok(());
        }
        tally.judged += 1;
        let new = tally.images.insert(fingerprint);
        let left = self.look(image, oracle, demand)?;
        self.judge_raw_data(oracle, left.words.len())?;
        let sectors = left.words.len() as u64;
        if new && oracle.has_shrunk_to(sectors) && self.random.one_in(LOOKED_BEHIND) {
            self.look_behind(image, sectors)?;
        }
        let begun_with = usize::from(self.beginning.snapshot.is_some());
        tally.bitmaps.add(left.bitmaps);
        tally.with_snapshots += u64::from(new && left.snapshots.len() > begun_with);
        if left.leaks > 0 && new && self.mends.one_in(MENDED) {
            tally.mended += 1;
            self.mend(image, &left)?;
        }
        if new && (self.resumes_all || self.random.one_in(24)) {
            tally.resumed += 1;
            self.resume(image, &left, oracle)?;
        }
        if new && self.random.one_in(CUT_AGAIN) {
            tally.cut_again += 1;
            self.cut_again(image, &left, oracle)
                .map_err(|text| format!("a second time: {text}"))?;
        }
        let every = tally.qemu_every;
        tally.qemu_due |= new && every > 0 && (tally.images.len() as u64).is_multiple_of(every);
        // QEMU's check would count what only a rebuild makes right.
        let shape = &self.beginning.shape;
        let is_for_qemu = !shape.encrypted && shape.data_file.is_none();
        if tally.qemu_due && is_for_qemu && !is_dirty(image) {
            tally.qemu_due = false;
            tally.asked_qemu += 1;
            self.ask_qemu(image, &left.words)?;
        }
        Ok(())
    }

    /// Checks all that must hold of an image. Returns what it holds.
    fn look(&mut self, image: &SimImage, oracle: &Oracle, demand: Demand) -> Result<Left, String> {
        self.put(&self.world, image);
        let mut buffer = self.buffer.take();
        let (world, cx, options) = (&self.world, &self.cx, &self.options);
        let random = &mut self.random;
        let result = cx.block_on(async {
            let view = world
                .file(DISK, true)
                .view(cx)
                .map_err(|error| error.to_string())?;
            let dirty = is_dirty(image);
            let mut leaks = 0;
            if !dirty {
                leaks = demand_check(&view, demand, "as the cut left it").await?;
            }
            let disk = open(world, cx, options).await?;
            let found = read_some(&disk, cx, &mut buffer, |block| {
                block < WHOLE || !oracle.is_untouched(block) || random.one_in(16)
            })
            .await?;
            oracle.judge_size(found.len() as u64)?;
            oracle.judge(found.iter().copied())?;
            drop(disk);
            if dirty {
                // Opening it has mended it.
                demand_check(&view, Demand::Flawless, "after its refcounts were rebuilt").await?;
            }
            let words = found.into_iter().flatten().collect::<Vec<u64>>();
            Ok::<_, String>((words, leaks))
        });
        self.buffer = buffer;
        let (words, leaks) = result.map_err(|error| format!("looking at it hangs: {error}"))??;
        self.drain()?;
        let snapshots = self.snapshots(image)?;
        oracle.judge_snapshots(&snapshots)?;
        let is_closed = demand == Demand::Flawless;
        let exactness = Exactness {
            kept: oracle.keeps_bitmaps,
            exact: is_closed && oracle.keeps_bitmaps,
        };
        let is_asked = |sector| oracle.is_asked(sector);
        let bitmaps = self.bitmaps(image, &words, oracle, is_asked, exactness)?;
        Ok(Left {
            words,
            leaks,
            snapshots,
            bitmaps,
        })
    }

    /// Compares the bitmaps of an image, if it is to have some, with the words of its disk.
    fn bitmaps(
        &self,
        image: &SimImage,
        words: &[u64],
        oracle: &Oracle,
        is_asked: impl Fn(u64) -> bool,
        demand: Exactness,
    ) -> Result<Counts, String> {
        if self.beginning.shape.bitmaps.is_none() {
            return Ok(Counts::default());
        }
        let found = bitmaps::of_image(image)?;
        let was = |sector: u64| {
            let was = self.beginning.words.get(sector as usize);
            let was = was.copied().unwrap_or(ZERO);
            oracle.was_always_there(sector).then_some(was)
        };
        bitmaps::judge(&found, was, words, is_asked, demand)
    }

    /// A raw data file reads by itself as the disk may. It may have a younger value than its image, whose entry is older.
    fn judge_raw_data(&self, oracle: &Oracle, sectors: usize) -> Result<(), String> {
        let is_raw = self.beginning.shape.data_file == Some(DataFileKind::Raw);
        let Some(data) = self.data.as_ref().filter(|_| is_raw) else {
            return Ok(());
        };
        let bytes = data.to_bytes();
        let words = bytes.chunks(SECTOR).map(word_of).take(sectors);
        let judged = oracle.judge(words);
        judged.map_err(|text| format!("the raw data file by itself: {text}"))
    }

    /// Behind the end of a disk that has become smaller there are zeros, if a program that makes it larger changes nothing but the
    /// size. That shows what is below by itself, and a data file has its own end.
    fn look_behind(&mut self, image: &SimImage, sectors: u64) -> Result<(), String> {
        let shape = self.beginning.shape;
        let per_cluster = shape.cluster() / SECTOR as u64;
        let is_plain = shape.below == Below::Nothing && shape.data_file.is_none();
        if !is_plain || sectors.is_multiple_of(per_cluster) {
            return Ok(());
        }
        let mut longer = image.clone();
        let bytes = sectors.next_multiple_of(per_cluster) * SECTOR as u64;
        longer.patch(at::SIZE as u64, &bytes.to_be_bytes());
        self.put(&self.world, &longer);
        let (world, cx) = (&self.world, &self.cx);
        let options = OpenOptions {
            read_only: true,
            ..self.options.clone()
        };
        let result = cx.block_on(async {
            let disk = open(world, cx, &options).await?;
            read_some(&disk, cx, &mut None, |block| block >= sectors / BLOCK_SECTORS).await
        });
        let words = result.map_err(|error| format!("looking behind the end hangs: {error}"))??;
        let other = (0..)
            .zip(&words)
            .skip(sectors as usize)
            .find(|(_, word)| **word != Some(ZERO));
        match other {
            None => Ok(()),
            Some((sector, word)) => Err(format!(
                "behind the end of a disk that became smaller sector {sector} is not zeros, but {word:x?}"
            )),
        }
    }

    /// Repairs an image's leaks, of which there are none then; and what it holds stays.
    fn mend(&mut self, image: &SimImage, left: &Left) -> Result<(), String> {
        let words = &left.words;
        self.put(&self.world, image);
        let (world, cx, options) = (&self.world, &self.cx, &self.options);
        let result = cx.block_on(async {
            let view = world
                .file(DISK, true)
                .view(cx)
                .map_err(|error| error.to_string())?;
            let report = repair(&view, RepairScope::Leaks).await;
            report.map_err(|error| format!("its leaks cannot be repaired: {}", chain(&error)))?;
            demand_check(&view, Demand::Flawless, "with its leaks repaired").await?;
            let disk = open(world, cx, options).await?;
            let blocks: Vec<&[u64]> = words.chunks(BLOCK_SECTORS as usize).collect();
            let found = read_some(&disk, cx, &mut None, |block| {
                block < WHOLE
                    || blocks
                        .get(block as usize)
                        .is_none_or(|words| words.iter().any(|&word| word != ZERO))
            })
            .await?;
            let same = found.iter().copied().eq(words.iter().map(|&word| Some(word)));
            same.then_some(())
                .ok_or("repairing leaks changes what the disk holds")?;
            Ok::<_, String>(())
        });
        result.map_err(|error| format!("repairing leaks hangs: {error}"))??;
        self.drain()?;
        self.compare_snapshots(left)
    }

    /// Lets tasks end that nobody waits for, before the image under them is another.
    fn drain(&self) -> Result<(), String> {
        for _ in 0..10_000 {
            if self.cx.tasks() == 0 && self.cx.ring().in_flight() == 0 {
                return Ok(());
            }
            self.cx.run_ready();
            self.cx.ring().turn(false).map_err(|error| error.to_string())?;
        }
        Err(format!("{} tasks do not end", self.cx.tasks()))
    }

    /// Reads the snapshots of an image, each through an image whose active table is the snapshot's.
    fn snapshots(&mut self, image: &SimImage) -> Result<Found, String> {
        let mut found = Found::new();
        let options = OpenOptions {
            read_only: true,
            ..self.options.clone()
        };
        for (name, patched) in snapshots::of_image(image, self.beginning.shape.bytes)? {
            self.put(&self.world, &patched);
            let (world, cx) = (&self.world, &self.cx);
            let result = cx.block_on(async {
                let disk = open(world, cx, &options).await?;
                read_all(&disk, cx, &mut None).await
            });
            let words = result.map_err(|error| format!("looking at snapshot {name} hangs: {error}"))??;
            found.insert(name, words);
        }
        Ok(found)
    }

    /// The image in the world has the snapshots that the cut had left.
    fn compare_snapshots(&mut self, left: &Left) -> Result<(), String> {
        let image = self.world.contents(DISK);
        let mut oracle = Oracle::new(&[]);
        oracle.keep_snapshots(left.snapshots.clone());
        oracle.judge_snapshots(&self.snapshots(&image)?)
    }

    /// Goes on with an image after the cut: what is written then must not harm what is there. `before` has what was asked for until then.
    fn resume(&mut self, image: &SimImage, left: &Left, before: &Oracle) -> Result<(), String> {
        let words = &left.words;
        self.put(&self.world, image);
        let mut requests = Requests::new();
        for version in 0..6 {
            let write = draw_write(&mut self.random, words.len() as u64, 1 << 60, version);
            requests.extend([Some(write), None]);
        }
        let oracle = Rc::new(RefCell::new(Oracle::new(words)));
        let (world, cx, options) = (&self.world, &self.cx, &self.options);
        let may_be_full = self.beginning.shape.device > 0;
        let phase = Cell::new("opening or writing");
        let result = cx.block_on(async {
            let view = world
                .file(DISK, true)
                .view(cx)
                .map_err(|error| error.to_string())?;
            let disk = go_on(
                world.clone(),
                cx.clone(),
                options.clone(),
                Rc::clone(&oracle),
                requests,
                may_be_full,
            )
            .await?;
            phase.set("closing");
            let closed = Arc::clone(&disk).close(cx).await;
            closed.map_err(|error| format!("closing after the cut fails: {error}"))?;
            drop(disk);
            let len = world.contents(DISK).len();
            if may_be_full && len != image.len() {
                return Err(format!(
                    "a device of {} bytes is one of {len} after the cut",
                    image.len()
                ));
            }
            phase.set("looking at it again");
            demand_check(&view, Demand::Sound, "written to and closed after the cut").await?;
            let disk = open(world, cx, options).await?;
            let found = read_some(&disk, cx, &mut None, |block| {
                block < WHOLE || !oracle.borrow().is_untouched(block)
            })
            .await?;
            let judged = oracle.borrow().judge(found.iter().copied());
            judged.map_err(|text| format!("written to and closed: {text}"))?;
            Ok(found.into_iter().flatten().collect::<Vec<u64>>())
        });
        let words = result.map_err(|error| format!("after the cut {} hangs: {error}", phase.get()))??;
        self.drain()?;
        let closed = self.world.contents(DISK);
        let judged = self.bitmaps(&closed, &words, before, |_| true, Exactness::default());
        judged.map_err(|text| format!("written to and closed: {text}"))?;
        self.compare_snapshots(left)
    }

    /// Goes on with an image after the cut, on a disk that is slow and does things in any order, until the power goes a second
    /// time: while the image is opened, which may rebuild its refcounts, or while it is written. `before` has what was asked for until
    /// the first cut.
    fn cut_again(&mut self, image: &SimImage, left: &Left, before: &Oracle) -> Result<(), String> {
        let words = &left.words;
        let world = SimWorld::with_store(self.random.draw(), SLOW, &self.world.store());
        self.beginning.install(&world);
        self.put(&world, image);
        let first_data = self.data.clone();
        let cx = world.context(64);
        let mut oracle = Oracle::new(words);
        oracle.keep_snapshots(left.snapshots.clone());
        oracle.keep_least_size(before);
        let oracle = Rc::new(RefCell::new(oracle));
        let ended: Rc<RefCell<Option<Result<(), String>>>> = Rc::default();
        let requests = draw_requests(&mut self.random, words.len() as u64);
        let task = go_on(
            world.clone(),
            cx.clone(),
            self.options.clone(),
            Rc::clone(&oracle),
            requests,
            self.beginning.shape.device > 0,
        );
        let place = Rc::clone(&ended);
        cx.spawn(async move {
            let result = task.await.map(drop);
            *place.borrow_mut() = Some(result);
        });
        let (mut changes, mut looks, mut idle) = (world.changes(), 0, 0);
        while ended.borrow().is_none() && looks < LOOKS && idle < 64 {
            cx.run_ready();
            cx.ring().turn(false).map_err(|error| error.to_string())?;
            cx.run_ready();
            idle = if world.step() { 0 } else { idle + 1 };
            if world.changes() != changes && self.random.one_in(8) {
                changes = world.changes();
                looks += 1;
                let left = world.crash_space(DISK).draw(&mut self.random);
                if self.data.is_some() {
                    self.data = Some(world.crash_space(DATA).draw(&mut self.random));
                }
                self.look(&left, &oracle.borrow(), Demand::Sound)?;
            }
        }
        // What is in flight ends without effect, and lets go of its memory.
        world.cut_power();
        for _ in 0..10_000 {
            while world.step() {}
            cx.ring().turn(false).map_err(|error| error.to_string())?;
            cx.run_ready();
            if cx.tasks() == 0 && cx.ring().in_flight() == 0 {
                break;
            }
        }
        self.data = first_data;
        let ended = ended.borrow_mut().take();
        match ended {
            Some(Err(text)) if looks < LOOKS && idle < 64 => Err(text),
            _ if idle >= 64 => Err("going on after the cut hangs".to_owned()),
            _ => Ok(()),
        }
    }

    /// QEMU's tools come to the same verdict and read the same bytes.
    fn ask_qemu(&mut self, image: &SimImage, words: &[u64]) -> Result<(), String> {
        let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
        let path = folder.path().join(DISK);
        let write =
            |path: &Path, bytes: &[u8]| std::fs::write(path, bytes).map_err(|error| error.to_string());
        write(&path, &image.to_bytes())?;
        for (name, bytes) in &self.beginning.below {
            write(&folder.path().join(name), bytes)?;
        }
        self.world.set_contents(DISK, image.clone());
        let (world, cx) = (&self.world, &self.cx);
        let ours = cx.block_on(async {
            let view = world.file(DISK, false).view(cx)?;
            check(&view).await.map_err(std::io::Error::other)
        });
        let ours = ours
            .and_then(|result| result)
            .map_err(|error| error.to_string())?;
        let theirs = lab::image::check(&path).map_err(|error| error.to_string())?;
        let agree = matches!(
            (&theirs, ours.verdict()),
            (lab::image::Verdict::Clean, Verdict::Clean) | (lab::image::Verdict::Leaks(_), Verdict::Leaks)
        );
        if !agree {
            return Err(format!("qemu-img check says {theirs:?}, ours {ours:?}"));
        }
        let raw = folder.path().join("raw");
        lab::image::convert(&path, &raw, "raw").map_err(|error| error.to_string())?;
        let read = std::fs::read(&raw).map_err(|error| error.to_string())?;
        let differs = read
            .chunks(SECTOR)
            .zip(words)
            .position(|(sector, &word)| word_of(sector) != Some(word));
        match differs {
            None => Ok(()),
            Some(sector) => Err(format!(
                "qemu-img reads other bytes than we do in sector {sector}"
            )),
        }
    }
}

/// The requests to an image after a cut: writes of these words from a sector on, and FLUSHes (`None`).
type Requests = Vec<Option<(u64, Vec<u64>)>>;

/// A write of a few sectors, which hold words of their own from then on.
fn draw_write(random: &mut Random, sectors: u64, salt: u64, version: u64) -> (u64, Vec<u64>) {
    let count = 1 + random.below(12.min(sectors));
    let first = random.below(sectors - count + 1);
    let words = (first..first + count).map(|sector| word(salt, version, sector));
    (first, words.collect())
}

fn draw_requests(random: &mut Random, sectors: u64) -> Requests {
    let one = |version| (!random.one_in(3)).then(|| draw_write(random, sectors, 1 << 59, version));
    (0..8).map(one).collect()
}

/// Opens an image and carries out what is asked of it, one thing after the other. Writes find no room on a device that is full.
async fn go_on(
    world: SimWorld,
    cx: Context,
    options: OpenOptions,
    oracle: Rc<RefCell<Oracle>>,
    requests: Requests,
    may_be_full: bool,
) -> Result<Arc<QcowDisk>, String> {
    let disk = open(&world, &cx, &options).await?;
    let queue = Arc::clone(&disk).open_queue(&cx).map_err(|error| chain(&error))?;
    for request in requests {
        if let Some((first, words)) = request {
            let asked = oracle.borrow_mut().ask_change(first, words.iter().copied());
            let wrote = write_words(&*queue, first, &words).await;
            let full = may_be_full && wrote == Err(NO_SPACE);
            if let (Err(error), false) = (wrote, full) {
                return Err(format!("a write after the cut fails: {error}"));
            }
            oracle.borrow_mut().answer_change(&asked, !full, false);
        } else {
            let asked = oracle.borrow_mut().ask_flush();
            let flushed = ask(&*queue, Op::Flush, 0, 0, Buffer::default()).await;
            flushed.map_err(|error| format!("a FLUSH after the cut fails: {error}"))?;
            oracle.borrow_mut().answer_flush(&asked);
        }
    }
    Ok(disk)
}

/// The error of a write for which the host has no space.
const NO_SPACE: IoError = IoError::Host {
    errno: rustix::io::Errno::NOSPC.raw_os_error(),
};

fn is_dirty(image: &SimImage) -> bool {
    let mut header = [0; 512];
    image.read(0, &mut header);
    let v3 = header[at::VERSION..][..4] == Version::V3.number().to_be_bytes();
    let features = u64_at(&header, at::INCOMPATIBLE_FEATURES);
    v3 && features & Incompatible::DIRTY.bits() != 0
}

/// Demands what must hold of an image. Returns how many clusters leak.
async fn demand_check(view: &block::file::FileView, demand: Demand, when: &str) -> Result<u64, String> {
    let report = check(view)
        .await
        .map_err(|error| format!("check fails {when}: {}", chain(&error)))?;
    let fine = match report.verdict() {
        Verdict::Clean => true,
        Verdict::Leaks => match demand {
            Demand::Sound => true,
            Demand::Leaks(most) => report.leaks <= most,
            Demand::Flawless => false,
        },
        Verdict::Corrupt | Verdict::Incomplete => false,
    };
    if fine && !report.marked_corrupt {
        return Ok(report.leaks);
    }
    if let (Demand::Leaks(most), Verdict::Leaks) = (demand, report.verdict()) {
        return Err(format!(
            "more leaks {when} than {most}, all that may be: {}",
            describe(&report)
        ));
    }
    Err(format!("the image is not sound {when}: {}", describe(&report)))
}

fn describe(report: &CheckReport) -> String {
    let mut text = format!(
        "{} corruptions, {} leaks, {} errors",
        report.corruptions, report.leaks, report.check_errors
    );
    for finding in report.findings.iter().take(4) {
        text += &format!(
            "; {} at {:#x}: {}",
            finding.structure, finding.offset, finding.message
        );
    }
    text
}

async fn open(world: &SimWorld, cx: &Context, options: &OpenOptions) -> Result<Arc<QcowDisk>, String> {
    QcowDisk::open_on(cx, world, Path::new(DISK), options)
        .await
        .map_err(|error| format!("the image cannot be opened after the cut: {}", chain(&error)))
}

/// The words of all sectors of a disk.
async fn read_all(
    disk: &Arc<QcowDisk>,
    cx: &Context,
    buffer: &mut Option<AlignedBuf>,
) -> Result<Vec<Option<u64>>, String> {
    read_some(disk, cx, buffer, |_| true).await
}

/// The words of a disk's sectors, those of its unwanted blocks taken for zeros.
async fn read_some(
    disk: &Arc<QcowDisk>,
    cx: &Context,
    buffer: &mut Option<AlignedBuf>,
    is_wanted: impl FnMut(u64) -> bool,
) -> Result<Vec<Option<u64>>, String> {
    let bytes = disk.info().size_bytes;
    let queue = Arc::clone(disk).open_queue(cx).map_err(|error| chain(&error))?;
    let mut words = Vec::with_capacity((bytes / SECTOR as u64) as usize);
    let block_bytes = BLOCK_SECTORS * SECTOR as u64;
    let blocks = bytes.div_ceil(block_bytes);
    let wanted: Vec<bool> = (0..blocks).map(is_wanted).collect();
    // Blocks that are alike in this go together.
    for run in wanted.chunk_by(|one, other| one == other) {
        let from = words.len() as u64 * SECTOR as u64;
        let len = (run.len() as u64 * block_bytes).min(bytes - from);
        if !run[0] {
            words.resize(words.len() + len as usize / SECTOR, Some(ZERO));
            continue;
        }
        let memory = match buffer.take() {
            Some(memory) if memory.len() == len as usize => memory,
            _ => AlignedBuf::zeroed(len as usize),
        };
        let read = ask(&*queue, Op::Read, from, len, memory.into()).await;
        let read = read.map_err(|error| format!("the disk cannot be read after the cut: {error}"))?;
        let memory = read.into_owned().ok_or("the buffer did not come back")?;
        words.extend(memory.chunks(SECTOR).map(word_of));
        *buffer = Some(memory);
    }
    Ok(words)
}
