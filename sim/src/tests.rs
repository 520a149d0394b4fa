//! Tests of the simulated disk: it keeps its promises, and does nothing that a real one could not do.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;

use block::buffer::{AlignedBuf, Buffer, Piece};
use block::disk::{Disk, DiskQueue};
use block::error::IoError;
use block::file::{Alignment, FileOptions, FileView, ImageFile, OpenFileError, OpenFiles};
use block::raw::RawDisk;
use block::request::{CompletionSink, Done, Op, Request};
use block::worker::{Frontend, Worker};
use smallvec::smallvec;

use super::memory::GuardAlloc;
use super::*;

#[global_allocator]
static ALLOCATOR: GuardAlloc<std::alloc::System> = GuardAlloc(std::alloc::System);

const A: u8 = 0xAA;
const B: u8 = 0xBB;

fn world(profile: Profile) -> (SimWorld, FileView) {
    let world = SimWorld::new(7, profile);
    let view = world.file("disk", true).view(&world.context(64)).expect("a view");
    (world, view)
}

/// Runs a future to its end; the world moves whenever nothing else does.
fn run<T>(view: &FileView, future: impl Future<Output = T>) -> T {
    view.context()
        .block_on(future)
        .expect("something is always in flight")
}

fn write(view: &FileView, sector: u64, bytes: &[u8]) -> Result<(), IoError> {
    run(
        view,
        view.write_at(sector * SECTOR as u64, AlignedBuf::from_slice(bytes)),
    )
}

/// Every distinct image a cut can leave.
fn crashes(world: &SimWorld) -> Vec<SimImage> {
    let space = world.crash_space("disk");
    let count = space.count();
    assert!(count <= 4096, "{count} combinations are too many for a test");
    let mut seen = BTreeSet::new();
    (0..count)
        .map(|number| space.nth(number))
        .filter(|image| seen.insert(image.fingerprint()))
        .collect()
}

fn sector(image: &SimImage, index: u64) -> u8 {
    let mut bytes = [0; SECTOR];
    image.read(index * SECTOR as u64, &mut bytes);
    assert!(
        bytes.iter().all(|&byte| byte == bytes[0]),
        "a sector is never torn"
    );
    bytes[0]
}

#[test]
fn cut_keeps_synced_and_any_subset_of_unsynced_sectors() {
    let (world, view) = world(Profile::default());
    write(&view, 0, &[A; 4 * SECTOR]).expect("a write");
    run(&view, view.sync()).expect("a sync");
    assert_eq!(crashes(&world).len(), 1);
    write(&view, 1, &[B; 3 * SECTOR]).expect("a write");
    let found: BTreeSet<Vec<u8>> = crashes(&world)
        .iter()
        .map(|image| (0..4).map(|index| sector(image, index)).collect())
        .collect();
    let expected: BTreeSet<Vec<u8>> = (0..8u8)
        .map(|bits| {
            let later = (0..3).map(|bit| if bits >> bit & 1 == 0 { A } else { B });
            std::iter::once(A).chain(later).collect()
        })
        .collect();
    assert_eq!(found, expected);
}

#[test]
fn cut_may_keep_any_version_since_the_last_sync() {
    let (world, view) = world(Profile::default());
    for version in 1..=5 {
        write(&view, 0, &[version; SECTOR]).expect("a write");
    }
    let found: BTreeSet<u8> = crashes(&world).iter().map(|image| sector(image, 0)).collect();
    assert_eq!(found, (0..=5).collect());
    let random = &mut Random::new(3);
    let space = world.crash_space("disk");
    let drawn: BTreeSet<u8> = (0..2000).map(|_| sector(&space.draw(random), 0)).collect();
    assert_eq!(drawn, found, "chance finds what counting finds");
}

/// The sync is submitted while the write is in flight, and completes after it.
#[test]
fn sync_covers_only_ops_completed_before_it_was_submitted() {
    let (world, view) = world(Profile::default());
    write(&view, 0, &[A; SECTOR]).expect("a write");
    run(&view, view.sync()).expect("a sync");
    let bytes = Rc::new(Buffer::from(AlignedBuf::from_slice(&[B; SECTOR])));
    let late = view.start_write(0, smallvec![Piece::whole(&bytes)]);
    let (request, answer) = Request::local(Op::Flush, 0, 0, Buffer::default());
    view.submit(0, request).expect("room");
    run(&view, async {
        answer.await.result.expect("a sync");
        late.await.expect("a write");
    });
    let found: Vec<u8> = crashes(&world).iter().map(|image| sector(image, 0)).collect();
    assert_eq!(found, [A, B]);
    run(&view, view.sync()).expect("a sync");
    let found: Vec<u8> = crashes(&world).iter().map(|image| sector(image, 0)).collect();
    assert_eq!(found, [B]);
}

/// A write reports that it was cancelled but has had its effect. The process that got the report takes nothing for granted;
/// one that starts after a kill knows nothing of it, reads the bytes, and makes them durable.
#[test]
fn sync_makes_cancelled_write_durable_only_after_a_kill() {
    for killed in [false, true] {
        let (world, view) = world(Profile::default());
        write(&view, 0, &[A; SECTOR]).expect("a write");
        run(&view, view.sync()).expect("a sync");
        world.set_profile(Profile {
            cancel: 1000,
            ..Profile::default()
        });
        while sector(&world.contents("disk"), 0) == A {
            assert_eq!(write(&view, 0, &[B; SECTOR]), Err(IoError::Cancelled));
        }
        world.set_profile(Profile::default());
        let mut syncing = view;
        if killed {
            world.kill_process();
            let cx = world.context(64);
            syncing = world.file("disk", true).view(&cx).expect("a view");
        }
        run(&syncing, syncing.sync()).expect("a sync");
        let found: BTreeSet<u8> = crashes(&world).iter().map(|image| sector(image, 0)).collect();
        let expected = if killed {
            BTreeSet::from([B])
        } else {
            BTreeSet::from([A, B])
        };
        assert_eq!(found, expected, "killed: {killed}");
    }
}

/// A write of one sector reads and writes its whole block: what was punched or zeroed beside it stays zero.
#[test]
fn write_keeps_zeros_beside_it_in_the_same_block() {
    let block = Alignment {
        memory: 512,
        offset: 4096,
    };
    let profile = Profile {
        reorder: true,
        ..Profile::default()
    };
    for seed in 0..200 {
        let world = SimWorld::new(seed, profile);
        world.set_alignment("disk", block);
        let view = world.file("disk", true).view(&world.context(64)).expect("a view");
        write(&view, 0, &[A; 16 * SECTOR]).expect("a write");
        let at = |sector: u64| sector * SECTOR as u64;
        let other = view.clone();
        view.context().spawn(async move {
            let buffer = Rc::new(Buffer::from(AlignedBuf::from_slice(&[B; SECTOR])));
            other
                .write(at(3), smallvec![Piece::whole(&buffer)], false)
                .await
                .expect("a write");
        });
        run(&view, async {
            if seed % 2 == 0 {
                assert!(view.punch(at(4), at(2)).await.expect("a punch"));
            } else {
                view.zero(at(4), at(2)).await.expect("zeros");
            }
            while view.context().tasks() > 0 {
                view.sync().await.expect("a sync");
            }
            let found = view.read_at(0, 8 * SECTOR).await.expect("a read");
            let found: Vec<u8> = found.chunks(SECTOR).map(|bytes| bytes[0]).collect();
            assert_eq!(found, [A, A, A, B, 0, 0, A, A], "seed {seed}");
        });
    }
}

#[test]
fn forced_write_makes_only_itself_and_its_length_durable() {
    // With direct I/O: through the page cache a forced write is a write and a sync of everything.
    let (world, view) = world(Profile::default());
    let alignment = Alignment {
        memory: 512,
        offset: 512,
    };
    world.set_alignment("disk", alignment);
    let view = world.file("disk", true).view(view.context()).expect("a view");
    write(&view, 0, &[A; SECTOR]).expect("a write");
    let bytes = Rc::new(Buffer::from(AlignedBuf::from_slice(&[B; SECTOR])));
    let forced = view.write(4 * SECTOR as u64, smallvec![Piece::whole(&bytes)], true);
    run(&view, forced).expect("a forced write");
    let found = crashes(&world);
    assert!(found.iter().all(|image| sector(image, 4) == B));
    let firsts: BTreeSet<u8> = found.iter().map(|image| sector(image, 0)).collect();
    assert_eq!(firsts, [0, A].into());
}

/// The write that made the file longer is in flight; another one, inside that length, is synced.
#[test]
fn sync_keeps_data_inside_length_of_a_pending_write() {
    let (world, view) = world(Profile::default());
    let bytes = Rc::new(Buffer::from(AlignedBuf::from_slice(&[A; SECTOR])));
    let far = view.start_write(7 * SECTOR as u64, smallvec![Piece::whole(&bytes)]);
    world.set_profile(Profile {
        linger: 1000,
        late: 1000,
        ..Profile::default()
    });
    world.step();
    world.set_profile(Profile::default());
    let near = view.write_at(SECTOR as u64, AlignedBuf::from_slice(&[B; SECTOR]));
    run(&view, near).expect("a write");
    run(&view, view.sync()).expect("a sync");
    assert_eq!(world.in_flight(), 1, "the other write has not completed");
    let found = crashes(&world);
    assert!(found.iter().all(|image| sector(image, 1) == B));
    run(&view, far).expect("a write");
}

/// Linux: pages that could not be written back are clean afterwards. A later sync succeeds and has
/// written nothing of them.
#[test]
fn data_lost_by_failed_sync_stays_lost_but_readable() {
    let (world, view) = world(Profile::default());
    write(&view, 0, &[A; 2 * SECTOR]).expect("a write");
    run(&view, view.sync()).expect("a sync");
    write(&view, 0, &[B; 2 * SECTOR]).expect("a write");
    world.set_profile(Profile {
        sync_error: 1000,
        ..Profile::default()
    });
    // A file remembers that a sync failed, so that each try, and what follows, opens it anew.
    let open = || world.file("disk", true).view(view.context()).expect("a view");
    let mut lost = false;
    for _ in 0..8 {
        let view = open();
        write(&view, 0, &[B; 2 * SECTOR]).expect("a write");
        run(&view, view.sync()).expect_err("a failed sync");
    }
    world.set_profile(Profile::default());
    let view = open();
    run(&view, view.sync()).expect("a sync");
    let seen = run(&view, view.read_at(0, 2 * SECTOR)).expect("a read");
    assert_eq!(&seen[..], &[B; 2 * SECTOR]);
    lost |= crashes(&world).len() > 1;
    assert!(lost, "eight failed syncs forgot something");
    // Written anew, it is as durable as anything.
    write(&view, 0, &[B; 2 * SECTOR]).expect("a write");
    run(&view, view.sync()).expect("a sync");
    assert!(crashes(&world).iter().all(|image| sector(image, 1) == B));
}

#[test]
fn lengths_and_holes_are_as_volatile_as_data() {
    let (world, view) = world(Profile::default());
    write(&view, 0, &[A; 4 * SECTOR]).expect("a write");
    run(&view, view.sync()).expect("a sync");
    assert!(run(&view, view.punch(SECTOR as u64, SECTOR as u64)).expect("a punch"));
    assert_eq!(
        crashes(&world)
            .iter()
            .map(|image| sector(image, 1))
            .collect::<Vec<_>>(),
        [A, 0]
    );
    run(&view, view.sync()).expect("a sync");
    run(&view, view.set_len(2 * SECTOR as u64)).expect("a cut");
    run(&view, view.set_len(4 * SECTOR as u64)).expect("room");
    run(&view, view.preallocate(0, 6 * SECTOR as u64)).expect("room");
    let seen = run(&view, view.read_at(0, 6 * SECTOR)).expect("a read");
    assert!(seen[2 * SECTOR..].iter().all(|&byte| byte == 0));
    let found = crashes(&world);
    let lens: BTreeSet<u64> = found.iter().map(|image| image.len() / SECTOR as u64).collect();
    assert_eq!(lens, [2, 4, 6].into());
    assert!(found.iter().any(|image| sector(image, 3) == A));
    run(&view, view.sync()).expect("a sync");
    let [image] = &crashes(&world)[..] else {
        panic!("all of it is durable")
    };
    assert_eq!((image.len(), sector(image, 3)), (6 * SECTOR as u64, 0));
}

#[test]
fn ring_hides_short_results_and_repeats() {
    let profile = Profile {
        short: 700,
        again: 300,
        piecewise: 500,
        linger: 500,
        reorder: true,
        ..Profile::default()
    };
    let (_world, view) = world(profile);
    let bytes: Vec<u8> = (0..16 * SECTOR).map(|at| (at / 100) as u8).collect();
    write(&view, 3, &bytes).expect("a write");
    let seen = run(&view, view.read_at(0, 25 * SECTOR)).expect("a read");
    assert_eq!(seen[3 * SECTOR..19 * SECTOR], bytes[..]);
    assert!(seen[19 * SECTOR..].iter().all(|&byte| byte == 0));
}

#[test]
fn every_fault_occurs_and_space_returns() {
    let profile = Profile {
        cancel: 50,
        read_error: 50,
        write_error: 50,
        sync_error: 50,
        allocate_error: 50,
        no_space: 5,
        ..Profile::default()
    };
    let (_world, view) = world(profile);
    let mut found = BTreeSet::new();
    let mut spaces = Vec::new();
    for round in 0..3000 {
        let wrote = write(&view, round, &[A; SECTOR]);
        spaces.push(wrote.is_err_and(IoError::is_no_space));
        let read = run(&view, view.read_at(0, SECTOR)).map(drop);
        let others = [
            wrote,
            read,
            run(&view, view.sync()),
            run(&view, view.zero(0, 512)),
        ];
        found.extend(others.into_iter().filter_map(Result::err).map(IoError::errno));
    }
    assert_eq!(found, [libc::EIO, libc::ENOSPC, libc::ECANCELED].into());
    let returns = spaces.windows(2).filter(|pair| pair[0] && !pair[1]).count();
    assert!(returns > 3, "space came back {returns} times");
}

#[test]
fn punch_reports_a_host_without_holes() {
    let (_world, view) = world(Profile {
        no_punch: true,
        no_zero_range: true,
        ..Profile::default()
    });
    write(&view, 0, &[A; SECTOR]).expect("a write");
    assert!(!run(&view, view.punch(0, 512)).expect("an answer"));
    run(&view, view.zero(0, 512)).expect("zeros all the same");
    assert_eq!(run(&view, view.read_at(0, 512)).expect("a read")[..], [0; 512]);
}

#[test]
fn misaligned_op_is_refused_like_direct_io() {
    let world = SimWorld::new(1, Profile::default());
    let align = Alignment {
        memory: 512,
        offset: 512,
    };
    world.set_alignment("disk", align);
    let view = world.file("disk", true).view(&world.context(16)).expect("a view");
    // The view bounces what is misaligned; the ring alone does not.
    write(&view, 0, &[A; 700]).expect("a bounced write");
    assert_eq!(
        run(&view, view.read_at(0, 700)).expect("a bounced read")[..],
        [A; 700]
    );
    let other = SimWorld::new(1, Profile::default());
    other.set_alignment("disk", align);
    let file = ImageFile::with_alignment(
        "disk".into(),
        {
            let mut inner = other.world.borrow_mut();
            let index = inner.find_or_make("disk".as_ref());
            inner.descriptor(index).0
        },
        true,
        false,
        Alignment::NONE,
    );
    let view = Arc::new(file).view(&other.context(16)).expect("a view");
    let refused = write(&view, 0, &[A; 700]).expect_err("refused");
    assert_eq!(refused.errno(), libc::EINVAL);
}

/// A block of the host is larger than a sector, and the file ends inside one. While the end is read the file
/// grows, and direct I/O does not go on from where it stopped.
#[test]
fn direct_read_at_end_of_a_growing_file_succeeds() {
    let world = SimWorld::new(1, Profile::default());
    let align = Alignment {
        memory: 512,
        offset: 4096,
    };
    let bytes = [A; 4096 + 1024];
    world.set_contents("disk", SimImage::from_bytes(&world.store(), &bytes));
    world.set_alignment("disk", align);
    let view = world.file("disk", true).view(&world.context(16)).expect("a view");
    let memory = Rc::new(Buffer::from(AlignedBuf::from_slice(&[B; 8192])));
    let read = view.start_read(0, smallvec![Piece::whole(&memory)]);
    // The read has stopped at the end, and is not told before the file has grown.
    world.set_profile(Profile {
        linger: 1000,
        late: 1000,
        ..Profile::default()
    });
    world.step();
    world.set_profile(Profile::default());
    run(&view, view.preallocate(4096 + 1024, 1 << 20)).expect("room");
    assert_eq!(world.in_flight(), 1, "the read has not completed");
    run(&view, read).expect("a read");
    let mut seen = [B; 8192];
    memory.memory().expect("ours").read(0, &mut seen);
    assert_eq!(seen[..5120], bytes);
    assert_eq!(seen[5120..], [0; 3072]);
}

/// A frontend fed by hand.
struct Lane {
    queue: Box<dyn DiskQueue>,
    todo: Rc<RefCell<Vec<(Op, u64)>>>,
    sink: Rc<CompletionSink>,
    in_flight: usize,
    answered: Rc<Cell<usize>>,
}

impl Frontend for Lane {
    fn poll(&mut self) -> bool {
        let todo = std::mem::take(&mut *self.todo.borrow_mut());
        for &(op, offset) in &todo {
            let buffer = match op {
                Op::Flush => Buffer::default(),
                _ => AlignedBuf::from_slice(&[offset as u8; 1024]).into(),
            };
            let len = buffer.len() as u64;
            self.in_flight += 1;
            self.queue
                .submit(Request::new(op, offset, len, buffer, &self.sink, 0));
        }
        !todo.is_empty()
    }
    fn publish(&mut self) -> bool {
        let mut done: Vec<Done> = Vec::new();
        self.sink.drain_into(&mut done);
        self.in_flight -= done.len();
        self.answered.set(self.answered.get() + done.len());
        !done.is_empty()
    }
    fn prepare_sleep(&mut self) -> bool {
        unreachable!("a worker driven by hand never sleeps")
    }
    fn end_sleep(&mut self) {}
    fn in_flight(&self) -> usize {
        self.in_flight
    }
}

/// Three workers on one disk, in one thread, until all is answered. Returns the trace's hash and length.
fn interleave(seed: u64) -> (u64, usize) {
    let profile = Profile {
        reorder: true,
        piecewise: 300,
        linger: 300,
        late: 50,
        short: 100,
        again: 50,
        write_error: 20,
        ..Profile::default()
    };
    let world = SimWorld::new(seed, profile);
    world.record();
    let disk = RawDisk::new(world.file("disk", true), 1 << 20, true);
    let answered = Rc::new(Cell::new(0));
    let mut chance = Random::new(seed);
    let mut asked = 0;
    let mut lanes: Vec<_> = (0..3)
        .map(|_| {
            let mut worker = Worker::by_hand(world.context(16));
            let todo = Rc::new(RefCell::new(Vec::new()));
            let lane = Lane {
                queue: Arc::clone(&disk).open_queue(worker.context()).expect("a queue"),
                todo: Rc::clone(&todo),
                sink: CompletionSink::new(),
                in_flight: 0,
                answered: Rc::clone(&answered),
            };
            worker.add(Box::new(lane), Vec::new()).expect("a frontend");
            (worker, todo)
        })
        .collect();
    while answered.get() < 300 {
        let turn = chance.below(3) as usize;
        let (worker, todo) = &mut lanes[turn];
        if asked < 300 {
            let op = chance.pick(&[
                Op::Read,
                Op::Write { fua: false },
                Op::Write { fua: true },
                Op::Flush,
            ]);
            todo.borrow_mut().push((op, 512 * chance.below(2000)));
            asked += 1;
        }
        worker.round().expect("a round");
        world.step();
    }
    (world.trace_hash(), world.trace().len())
}

/// A raw disk's growth is in the file, whatever is cut, when it is answered; one that fails leaves all as it was.
#[test]
fn raw_growth_is_durable_or_changes_nothing() {
    let (world, view) = world(Profile::default());
    write(&view, 0, &[A; 4 * SECTOR]).expect("a write");
    run(&view, view.sync()).expect("a sync");
    let disk = RawDisk::open(world.file("disk", true), true, view.context()).expect("a disk");
    let resize = |sectors: u64| {
        run(
            &view,
            Arc::clone(&disk).resize(view.context(), sectors * SECTOR as u64),
        )
    };
    let sizes = || (disk.info().size_bytes, world.contents("disk").len());
    let sectors = |count: u64| (count * SECTOR as u64, count * SECTOR as u64);
    resize(6).expect("growth");
    assert_eq!(sizes(), sectors(6));
    for image in crashes(&world) {
        assert_eq!(image.len(), 6 * SECTOR as u64, "what was answered is durable");
    }
    let no_length = Profile {
        allocate_error: 1000,
        ..Profile::default()
    };
    let no_sync = Profile {
        sync_error: 1000,
        ..Profile::default()
    };
    for profile in [no_length, no_sync] {
        world.set_profile(profile);
        assert_eq!(resize(9).expect_err("it fails").errno(), libc::EIO);
        assert_eq!(sizes(), sectors(6));
    }
}

/// With direct I/O in blocks larger than a sector, a write of the last sector would lengthen a file that ends inside a
/// block, and the next open would find a larger disk.
#[test]
fn raw_open_refuses_direct_writes_with_partial_last_block() {
    for (sectors, block, write, opens) in [
        (20, 4096, true, false),
        (20, 4096, false, true),
        (20, 512, true, true),
        (24, 4096, true, true),
    ] {
        let (world, view) = world(Profile::IMMEDIATE);
        super::tests::write(&view, 0, &vec![A; sectors * SECTOR]).expect("a write");
        let alignment = Alignment {
            memory: 512,
            offset: block,
        };
        world.set_alignment("disk", alignment);
        let opened = RawDisk::open(world.file("disk", write), true, view.context());
        assert_eq!(opened.is_ok(), opens, "{sectors} sectors, blocks of {block}");
        let (Ok(disk), true) = (opened, write) else {
            continue;
        };
        let queue = Arc::clone(&disk).open_queue(view.context()).expect("a queue");
        let bytes = AlignedBuf::from_slice(&[B; SECTOR]).into();
        let last = ((sectors - 1) * SECTOR) as u64;
        let (request, answer) = Request::local(Op::Write { fua: false }, last, SECTOR as u64, bytes);
        queue.submit(request);
        let answered = view.context().block_on(answer).expect("the ring turns");
        assert_eq!(answered.result, Ok(()));
        assert_eq!(world.contents("disk").len(), (sectors * SECTOR) as u64);
        // Nor does it grow to such a size.
        let grown = run(
            &view,
            Arc::clone(&disk).resize(view.context(), 27 * SECTOR as u64),
        );
        assert_eq!(grown.is_ok(), block == 512);
    }
}

#[test]
fn trace_is_the_same_for_the_same_seed_only() {
    let (first, len) = interleave(5);
    // Memory is elsewhere the second time, and must not matter.
    let _shift: Vec<Vec<u8>> = (1..50).map(|n| vec![0; n * 100]).collect();
    assert_eq!(interleave(5), (first, len));
    assert!(len > 700, "{len} events");
    assert_ne!(interleave(6).0, first);
}

#[test]
fn block_on_fails_when_nothing_can_wake_it() {
    let (_world, view) = world(Profile::default());
    let error = view.context().block_on(std::future::pending::<()>());
    error.expect_err("nothing will ever come");
}

#[test]
fn pending_write_has_no_effect_after_a_cut() {
    let (world, view) = world(Profile::default());
    let bytes = Rc::new(Buffer::from(AlignedBuf::from_slice(&[A; SECTOR])));
    let late = view.start_write(0, smallvec![Piece::whole(&bytes)]);
    world.cut_power();
    assert_eq!(run(&view, late).expect_err("no power").errno(), libc::EIO);
    assert_eq!(world.contents("disk").len(), 0);
}

#[test]
fn open_fails_for_a_missing_file() {
    let (world, _view) = world(Profile::default());
    world
        .open("disk".as_ref(), FileOptions::default())
        .expect("a file");
    let error = world.open("other".as_ref(), FileOptions::default());
    assert!(matches!(error, Err(OpenFileError::Open { .. })));
}

/// A block device: what fits is written, what lies behind its end is refused, and its length stays.
#[test]
fn fixed_size_file_takes_only_what_fits() {
    for profile in [Profile::IMMEDIATE, Profile::default()] {
        let world = SimWorld::new(7, profile);
        let image = SimImage::from_bytes(&world.store(), &[A; 4 * SECTOR]);
        world.set_contents("disk", image);
        world.fix_size("disk");
        let view = world.file("disk", true).view(&world.context(64)).expect("a view");
        assert!(view.file().is_block_device());
        write(&view, 3, &[B; SECTOR]).expect("the last sector");
        let full = Err(IoError::Host { errno: libc::ENOSPC });
        assert_eq!(write(&view, 4, &[B; SECTOR]), full);
        assert_eq!(write(&view, 2, &[B; 3 * SECTOR]), full, "half of it fits");
        for len in [0, 1 << 20] {
            assert!(run(&view, view.set_len(len)).is_err());
        }
        assert!(run(&view, view.preallocate(0, 1 << 20)).is_err());
        assert_eq!(run(&view, view.punch(0, SECTOR as u64)), Ok(true));
        assert_eq!(run(&view, view.punch(0, 8 * SECTOR as u64)), Ok(false));
        assert_eq!(view.len(), Ok(4 * SECTOR as u64));
        let now = world.contents("disk");
        assert_eq!(
            (0..4).map(|at| sector(&now, at)).collect::<Vec<_>>(),
            [0, A, B, B]
        );
    }
}
