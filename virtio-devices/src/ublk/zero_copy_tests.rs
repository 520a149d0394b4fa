//! Queues whose requests have registered pages: the model of the driver registers memory with a real ring, and what is
//! asked is carried out on a real file.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use block::file::{FileOptions, ImageFile};
use block::raw::RawDisk;
use block::ring::RingKind;
use block::worker::Worker;
use block::{Buffer, Context, Disk, DiskQueue, Request};
use simulator::pages::Tags;

use super::abi::op;
use super::config::first_slot;
use super::model::{Io, Model, ModelChannel, RingTable};
use super::queue::UblkQueue;
use super::queue_state::{Counts, QueueState};
use ringdisk_gen::Random;

const IO_BYTES_MAX: u32 = 64 << 10;
const DISK_BYTES: u64 = 1 << 20;
/// The size of the area that one request in [`Load`] uses.
const AREA_BYTES: usize = 32 << 10;

fn disk() -> Arc<dyn Disk> {
    let file = tempfile::tempfile().expect("a file");
    file.set_len(DISK_BYTES).expect("room");
    let options = FileOptions {
        write: true,
        ..FileOptions::default()
    };
    let file = ImageFile::from_fd("disk.raw".as_ref(), file, options);
    RawDisk::new(file, DISK_BYTES, true)
}

/// A worker with queues that share its ring, played by the test.
struct Server {
    worker: Worker,
    models: Vec<Model>,
    states: Vec<Arc<QueueState>>,
}

impl Server {
    /// Serves these queues of `depth` with a table of so many places; a short ring's ops do less than they were asked.
    fn new(
        disk: &Arc<dyn Disk>,
        models: &[Model],
        (depth, places): (u16, u16),
        from: u32,
        short: Option<u64>,
    ) -> Self {
        let open = |cx: &Context| Arc::clone(disk).open_queue(cx).expect("a queue");
        Self::with(models, (depth, places), from, short, open)
    }

    fn with(
        models: &[Model],
        (depth, places): (u16, u16),
        from: u32,
        short: Option<u64>,
        open: impl Fn(&Context) -> Box<dyn DiskQueue>,
    ) -> Self {
        let ring = Tags::on_ring(RingKind::IoUring, 64, places, IO_BYTES_MAX as usize, short);
        let (cx, tags) = ring.expect("these tests need io_uring");
        let table = RingTable::new(&Rc::new(tags), places);
        let mut worker = Worker::by_hand(cx.clone());
        let mut states = Vec::new();
        for (model, number) in models.iter().zip(0..) {
            let state = QueueState::new(0, Arc::new(|_| {}));
            model.register_with(&table);
            let channel = model.channel(first_slot(number, models.len() as u16, depth));
            let shared = Arc::clone(&state);
            let queue: UblkQueue<ModelChannel> =
                UblkQueue::start(&cx, channel, open(&cx), depth, IO_BYTES_MAX, Some(from), shared);
            worker.add(Box::new(queue), Vec::new()).expect("no kicks");
            model.end_recovery();
            states.push(state);
        }
        Self {
            worker,
            models: models.to_vec(),
            states,
        }
    }

    fn round(&mut self) {
        self.worker.round().expect("a round");
        for model in &self.models {
            assert_eq!(model.take_fault(), None);
        }
    }

    fn until(&mut self, what: &str, done: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !done() {
            assert!(Instant::now() < deadline, "{what}");
            self.round();
        }
    }

    fn ask(&mut self, model: &Model, io: Io) -> Io {
        let number = model.request(io);
        self.until("an answer", || model.io(number).result.is_some());
        model.io(number)
    }

    fn counts(&self) -> Counts {
        let mut sum = Counts::default();
        for state in &self.states {
            sum += state.counts();
        }
        sum
    }

    /// It is killed. What it has started ends before the driver lets a successor in.
    fn die(self, models: &[Model]) {
        for state in &self.states {
            state.abandon();
        }
        let ring = self.worker.context().ring().clone();
        drop(self);
        while ring.in_flight() > 0 {
            ring.turn(true).expect("a turn");
        }
        for model in models {
            model.refuse(0);
            model.server_gone();
        }
    }
}

fn read(sector: u64, bytes: usize) -> Io {
    Io::new(op::READ, sector, (bytes / 512) as u32)
}

/// Only size and registration decide; each way moves the right bytes.
#[test]
fn zero_copy_serves_only_long_registered_requests() {
    let (disk, model) = (disk(), Model::new(4));
    let models = [model.clone()];
    let mut server = Server::new(&disk, &models, (4, 4), 8192, None);
    let mut expected = Counts::default();
    for (round, bytes, failing) in [
        (1, 16384, 0),
        (2, 8192, 0),
        (3, 4096, 0),
        (4, 16384, 2),
        (5, 4096, 2),
    ] {
        let data: Vec<u8> = (0..bytes).map(|at| (at / 512 + round * 31) as u8).collect();
        model.fail_registrations(failing);
        assert_eq!(
            server.ask(&model, Io::write(64, &data)).result,
            Some(bytes as i32)
        );
        let back = server.ask(&model, read(64, bytes));
        assert_eq!((back.result, back.data), (Some(bytes as i32), data));
        match (failing, bytes) {
            (0, 8192..) => expected.zero_copied += 2,
            _ => expected.copied += 2,
        }
        expected.fallbacks += u64::from(failing);
        expected.requests += 2;
        expected.bytes += 2 * bytes as u64;
    }
    // What has no data has no pages.
    for what in [op::FLUSH, op::DISCARD, op::WRITE_ZEROES] {
        let sectors = if what == op::FLUSH { 0 } else { 16 };
        assert_eq!(server.ask(&model, Io::new(what, 64, sectors)).result, Some(0));
        expected.requests += 1;
    }
    assert_eq!(server.ask(&model, read(64, 8192)).data, [0; 8192]);
    expected.zero_copied += 1;
    expected.requests += 1;
    expected.bytes += 8192;
    assert_eq!(server.counts(), expected);
    server.die(&models);
}

#[test]
fn failed_request_gives_its_buffer_slot_back() {
    let (disk, model) = (disk(), Model::new(1));
    let models = [model.clone()];
    let mut server = Server::new(&disk, &models, (1, 1), 0, None);
    for _ in 0..4 {
        let past = server.ask(&model, read(DISK_BYTES / 512, 4096));
        assert_eq!(past.result, Some(-libc::EINVAL));
        assert_eq!(server.ask(&model, read(0, 4096)).result, Some(4096));
    }
    let counts = server.counts();
    assert_eq!((counts.zero_copied, counts.errors), (8, 4));
    server.die(&models);
}

/// Tags beyond the end of the table are served as well.
#[test]
fn requests_without_a_buffer_slot_are_copied_and_counted() {
    let (disk, model) = (disk(), Model::new(8));
    let models = [model.clone()];
    let mut server = Server::new(&disk, &models, (8, 3), 0, None);
    let numbers: Vec<usize> = (0..8u8)
        .map(|area| model.request(Io::write(u64::from(area) * 8, &[area + 1; 4096])))
        .collect();
    server.until("answers", || model.unanswered() == 0);
    assert!(
        numbers
            .iter()
            .all(|&number| model.io(number).result == Some(4096))
    );
    let counts = server.counts();
    assert_eq!((counts.zero_copied, counts.copied, counts.fallbacks), (3, 5, 5));
    for area in 0..8u8 {
        assert_eq!(
            server.ask(&model, read(u64::from(area) * 8, 4096)).data,
            [area + 1; 4096]
        );
    }
    server.die(&models);
}

/// A disk that answers while it still holds what it was given.
#[derive(Debug)]
struct Hoarder {
    kept: Rc<RefCell<Vec<Rc<Buffer>>>>,
}

impl DiskQueue for Hoarder {
    fn submit(&self, mut request: Request) {
        self.kept.borrow_mut().push(Rc::new(request.take_buffer()));
        request.finish(Ok(()));
    }
}

/// An op that still names the slot would reach the next request's pages.
#[test]
fn answer_waits_until_no_op_names_its_pages() {
    let model = Model::new(2);
    let models = [model.clone()];
    let kept = Rc::new(RefCell::new(Vec::new()));
    let hoarder = |_: &Context| -> Box<dyn DiskQueue> {
        Box::new(Hoarder {
            kept: Rc::clone(&kept),
        })
    };
    let mut server = Server::with(&models, (2, 2), 0, None, hoarder);
    let first = model.request(Io::write(0, &[1; 4096]));
    let second = model.request(Io::write(8, &[2; 4096]));
    for _ in 0..16 {
        server.round();
    }
    assert_eq!((kept.borrow().len(), model.unanswered()), (2, 2));
    let held = kept.borrow_mut().remove(1);
    server.round();
    assert_eq!(model.io(first).result, None, "its pages are still named");
    assert_eq!(model.io(second).result, None);
    // The younger one need not wait for the older.
    drop(held);
    server.until("the second", || model.io(second).result.is_some());
    assert_eq!(model.io(first).result, None);
    kept.borrow_mut().clear();
    server.until("the first", || model.io(first).result.is_some());
    server.die(&models);
}

/// Areas of the disk, one request at a time in each.
struct Load {
    held: Vec<u8>,
    /// The queue, the request, and what it writes.
    under_way: Vec<Option<(usize, usize, Option<u8>)>>,
}

impl Load {
    fn new() -> Self {
        let areas = DISK_BYTES as usize / AREA_BYTES;
        Self {
            held: vec![0; areas],
            under_way: vec![None; areas],
        }
    }

    fn start(&mut self, random: &mut Random, models: &[Model], byte: u8) {
        let area = random.below(self.held.len() as u64) as usize;
        if self.under_way[area].is_some() {
            return;
        }
        let queue = random.below(models.len() as u64) as usize;
        let sector = (area * AREA_BYTES / 512) as u64;
        let writes = random.below(2) == 0;
        let io = match writes {
            true => Io::write(sector, &[byte; AREA_BYTES]),
            // Less than all of it, so that sizes differ.
            false => read(sector, 512 << random.below(7)),
        };
        let number = models[queue].request(io);
        self.under_way[area] = Some((queue, number, writes.then_some(byte)));
    }

    /// Looks at what was answered.
    fn settle(&mut self, models: &[Model], seed: u64) {
        for (held, under_way) in self.held.iter_mut().zip(&mut self.under_way) {
            let Some((queue, number, writes)) = *under_way else {
                continue;
            };
            let io = models[queue].io(number);
            if io.result.is_none() {
                continue;
            }
            assert_eq!(io.result, Some(io.sectors as i32 * 512), "seed {seed}");
            match writes {
                Some(byte) => *held = byte,
                None => {
                    let wrong = io.data.iter().position(|byte| byte != held);
                    assert_eq!(
                        wrong.map(|at| (at, io.data.len(), io.data[at])),
                        None,
                        "seed {seed}: {held}"
                    );
                }
            }
            *under_way = None;
        }
    }
}

/// Two queues of one ring with short ops, failed registrations, full rings and killed servers. Each answer comes once.
#[test]
fn requests_use_only_their_own_pages_across_server_deaths() {
    for seed in 1..24u64 {
        let mut random = Random::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let disk = disk();
        let depth = 1 + random.below(6) as u16;
        // Sometimes too few.
        let places = 2 * depth - random.below(2) as u16;
        let models = [Model::new(depth), Model::new(depth)];
        let from = [0, 4096, 16384][random.below(3) as usize];
        let start = |seed| Server::new(&disk, &models, (depth, places), from, Some(seed));
        let mut server = start(seed);
        let mut load = Load::new();
        for step in 0..300u64 {
            match random.below(16) {
                0..9 => load.start(&mut random, &models, (step % 251) as u8 + 1),
                9 => models[0].refuse(random.below(4) as u32),
                10 => models[1].fail_registrations(random.below(4) as u32),
                11 if random.below(6) == 0 => {
                    server.die(&models);
                    server = start(seed * 1000 + step);
                }
                _ => server.round(),
            }
            load.settle(&models, seed);
        }
        models.iter().for_each(|model| model.refuse(0));
        server.until("answers", || models.iter().all(|model| model.unanswered() == 0));
        load.settle(&models, seed);
        for area in 0..load.held.len() {
            let back = server.ask(&models[0], read((area * AREA_BYTES / 512) as u64, AREA_BYTES));
            assert_eq!(
                back.data, [load.held[area]; AREA_BYTES],
                "seed {seed}, area {area}"
            );
        }
        assert!(server.counts().zero_copied > 0, "seed {seed}");
        server.die(&models);
    }
}
