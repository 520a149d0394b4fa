//! Operation sequences on the asynchronous engine, several queues at once, against a plain array of bytes.
//!
//! The disk below is simulated: ops take effect in any order and piece by piece, come back short, late or to be
//! repeated. What is in flight together never shares a sector, but often a cluster.

use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use block::{AlignedBuf, Buffer, CompletionSink, Context, Disk, DiskQueue, Done, Op, Request};
use qcow::QcowDisk;
use qcow::image::{Verdict, check};
use ringdisk_gen::array::{Array, Ask};
use ringdisk_gen::{Image, ImageSpec};
use simulator::{Profile, SimImage, SimWorld};

use crate::cursor::Cursor;
use crate::guest::options;
use crate::mutate::{BACKING, spec};

const DISK: &str = "disk";
const SECTOR: u64 = 512;
/// The number of requests in flight at once.
const TAGS: usize = 12;
/// The most decisions of a case.
const DECISIONS_MAX: u32 = 400;
/// A case that takes more turns hangs.
const TURNS_MAX: u32 = 1_000_000;
/// The length of the backing file, in bytes.
const BACKING_BYTES: usize = 40 << 10;

struct Lane {
    cx: Context,
    queue: Box<dyn DiskQueue>,
    sink: Rc<CompletionSink>,
}

struct Run {
    world: SimWorld,
    spec: ImageSpec,
    lanes: Vec<Lane>,
    model: Array,
    answered: u64,
}

/// Builds an image, asks and compares, closes, checks, and does it again.
///
/// # Panics
///
/// If something differs, fails, hangs or is left inconsistent.
pub fn body(data: &[u8]) -> &'static str {
    let mut cursor = Cursor::new(data);
    let mut spec = spec(&mut cursor);
    spec.extensions.clear();
    let image = Image::new(spec);
    let backing: Vec<u8> = (0..BACKING_BYTES).map(|at| (at / 512) as u8 ^ 0x33).collect();
    let world = SimWorld::new(cursor.u64(), Profile::IMMEDIATE);
    world.set_contents(DISK, SimImage::from_bytes(&world.store(), &image.bytes));
    world.set_contents(BACKING, SimImage::from_bytes(&world.store(), &backing));
    let mut run = Run {
        model: Array::new(contents(&image, &backing), image.cluster(), TAGS),
        spec: image.spec,
        lanes: Vec::new(),
        answered: 0,
        world,
    };
    loop {
        run.session(&mut cursor);
        if cursor.is_empty() {
            break;
        }
    }
    if run.answered == 0 {
        "nothing asked"
    } else {
        "answered"
    }
}

/// Returns the disk that the guest sees at first.
fn contents(image: &Image, backing: &[u8]) -> Vec<u8> {
    match image.spec.backing {
        Some(_) => image.guest_over(backing),
        None => image.guest(),
    }
}

impl Run {
    /// From an open to a close.
    fn session(&mut self, cursor: &mut Cursor<'_>) {
        let contexts: Vec<Context> = (0..=cursor.below(3)).map(|_| self.world.context(32)).collect();
        let mut options = options(false, true);
        options.sparse = !cursor.one_in(4);
        options.discard_no_unref = cursor.one_in(4);
        options.persist_mappings = cursor.one_in(8);
        options.l2_cache_bytes = Some(cursor.pick(&[4096, 64 << 10]));
        // Version 2 has no zero clusters to hide a backing file's with.
        let uncovers = self.spec.version == 2 && self.spec.backing.is_some();
        self.model.discards = options.sparse && !uncovers;
        let cx = contexts[0].clone();
        let opened = cx.block_on(QcowDisk::open_on(&cx, &self.world, Path::new(DISK), &options));
        let disk = opened.expect("nothing waits for ever").expect("a sound image");
        let lane = |cx: &Context| Lane {
            cx: cx.clone(),
            queue: Arc::clone(&disk).open_queue(cx).expect("a queue"),
            sink: CompletionSink::new(),
        };
        self.lanes = contexts.iter().map(lane).collect();
        self.world.set_profile(profile(cursor));
        for _ in 0..DECISIONS_MAX {
            if cursor.is_empty() || cursor.one_in(100) {
                break;
            }
            if cursor.below(3) == 0 {
                self.turn();
            } else {
                self.ask(cursor);
            }
        }
        self.settle();
        self.world.set_profile(Profile::IMMEDIATE);
        self.lanes.clear();
        let closed = cx.block_on(Arc::clone(&disk).close(&cx));
        closed.expect("nothing waits for ever").expect("a clean close");
        crate::guest::settle(&cx);
        drop(disk);
        self.world.settle();
        self.judge(&cx);
    }

    /// The image as another would find it.
    fn judge(&self, cx: &Context) {
        let view = self.world.file(DISK, false).view(cx).expect("a view");
        let report = cx.block_on(check(&view)).expect("nothing waits for ever");
        let report = report.expect("an image");
        assert_eq!(report.verdict(), Verdict::Clean, "{:#?}", report.findings);
        let opened = cx.block_on(QcowDisk::open_on(
            cx,
            &self.world,
            Path::new(DISK),
            &options(true, true),
        ));
        let disk = opened.expect("nothing waits for ever").expect("an image");
        let queue = Arc::clone(&disk).open_queue(cx).expect("a queue");
        let expected = self.model.bytes();
        let buffer = AlignedBuf::from_slice(&vec![0xCC; expected.len()]);
        let (request, answer) = Request::local(Op::Read, 0, expected.len() as u64, buffer.into());
        queue.submit(request);
        let done = cx.block_on(answer).expect("nothing waits for ever");
        assert_eq!(done.result, Ok(()));
        assert_same(&done.buffer.into_owned().expect("our own buffer"), expected);
    }

    /// Each lane and the disk do something.
    fn turn(&mut self) {
        let mut done = Vec::new();
        for lane in &self.lanes {
            lane.cx.run_ready();
            lane.cx.ring().turn(false).expect("the ring turns");
            lane.cx.run_ready();
            lane.sink.drain_into(&mut done);
        }
        done.into_iter().for_each(|done| self.take(done));
        self.world.step();
    }

    /// Turns until nothing is under way.
    fn settle(&mut self) {
        for _ in 0..TURNS_MAX {
            let idle = |lane: &Lane| lane.cx.tasks() == 0 && lane.cx.ring().in_flight() == 0;
            if self.model.is_idle() && self.lanes.iter().all(idle) {
                return;
            }
            self.turn();
        }
        let late: Vec<_> = (0..TAGS).filter(|&tag| self.model.is_in_flight(tag)).collect();
        let ranges: Vec<_> = late.iter().map(|&tag| self.model.range(tag)).collect();
        panic!("{ranges:?} are never answered");
    }

    fn ask(&mut self, cursor: &mut Cursor<'_>) {
        let Some(tag) = self.model.free_tag() else {
            return self.turn();
        };
        let sectors = self.model.bytes().len() as u64 / SECTOR;
        let first = cursor.below(sectors);
        let most = cursor.pick(&[1, 4, 16, 200]).min(sectors - first);
        let end = first + 1 + cursor.below(most);
        let (first, end) = (first * SECTOR, end * SECTOR);
        if !self.model.is_free(&(first..end)) {
            return self.turn();
        }
        let (op, buffer, ask) = match cursor.below(8) {
            0 | 1 => {
                let buffer = AlignedBuf::from_slice(&vec![0xCC; (end - first) as usize]);
                (Op::Read, buffer.into(), Ask::Read)
            }
            2..=4 => {
                let tag = cursor.byte();
                let fill: Vec<u8> = (first..end).map(|at| tag ^ (at / SECTOR) as u8).collect();
                let fua = cursor.one_in(8);
                let buffer = AlignedBuf::from_slice(&fill).into();
                (Op::Write { fua }, buffer, Ask::Write(fill))
            }
            5 => {
                let (unmap, fua) = (cursor.one_in(2), cursor.one_in(8));
                (Op::WriteZeroes { unmap, fua }, Buffer::default(), Ask::Zeroes)
            }
            6 => (Op::Discard, Buffer::default(), Ask::Discard),
            _ => (Op::Flush, Buffer::default(), Ask::Flush),
        };
        let (first, end) = if op == Op::Flush { (0, 0) } else { (first, end) };
        assert!(self.model.begin(tag, first..end, ask), "it is free");
        let lane = &self.lanes[cursor.below(self.lanes.len() as u64) as usize];
        let request = Request::new(op, first, end - first, buffer, &lane.sink, tag as u64);
        lane.queue.submit(request);
    }

    fn take(&mut self, done: Done) {
        let tag = done.tag as usize;
        assert_eq!(done.result, Ok(()), "{:?}", self.model.range(tag));
        self.answered += 1;
        let read = self.model.is_read(tag).then(|| done.buffer.into_owned());
        let bytes = read.map(|buffer| buffer.expect("our own buffer").to_vec());
        let ended = self.model.end(tag, &bytes.unwrap_or_default());
        ended.unwrap_or_else(|difference| panic!("{difference}"));
    }
}

fn assert_same(found: &[u8], expected: &[u8]) {
    if let Some(at) = (0..expected.len()).find(|&at| found[at] != expected[at]) {
        panic!(
            "byte {at:#x} is {:#04x}, expected {:#04x}",
            found[at], expected[at]
        );
    }
}

/// A disk on which nothing fails for good.
fn profile(cursor: &mut Cursor<'_>) -> Profile {
    let mut chance = || cursor.pick(&[0, 0, 30, 200]);
    Profile {
        reorder: true,
        piecewise: chance(),
        linger: chance(),
        late: chance() / 10,
        short: chance(),
        again: chance(),
        ..Profile::default()
    }
}
