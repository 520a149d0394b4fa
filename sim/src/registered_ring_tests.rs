//! Registered buffers on every driver: pages that are memory, registered, and a file, all at once.
//!
//! These pages have an address too, so they cannot show that nothing reaches a buffer's bytes by it. The simulated
//! world registers them from address zero, where nobody's memory is.

use std::cell::Cell;
use std::rc::Rc;

use block::buffer::{AlignedBuf, Buffer, Piece, RegisteredSlot, RegistrationError};
use block::error::IoError;
use block::request::{CompletionSink, Op, Request};
use block::ring::{Door, FileHandle, FixedTable, LeaseError, Ring, RingKind};
use block::task;
use smallvec::smallvec;

use super::pages::{TagError, Tags};
use super::{Profile, SimImage, SimWorld};

const PLACE: usize = 1 << 20;

/// A context of each kind with four places, and a file there that begins with `contents`.
fn worlds(contents: &[u8]) -> Vec<(task::Context, Tags, FileHandle)> {
    let mut worlds = Vec::new();
    for (kind, short) in [
        (RingKind::IoUring, None),
        (RingKind::IoUring, Some(1)),
        (RingKind::Syscalls, None),
        (RingKind::Syscalls, Some(2)),
    ] {
        let (cx, tags) = Tags::on_ring(kind, 16, 4, PLACE, short)
            .expect("these tests need io_uring: kernel.io_uring_disabled=0");
        let file = tempfile::tempfile().expect("a temporary file");
        std::io::Write::write_all(&mut &file, contents).expect("its contents");
        let file = cx.ring().register(file.into()).expect("a registered file");
        worlds.push((cx, tags, file));
    }
    for (seed, from_zero) in [(3, false), (4, true)] {
        let profile = Profile {
            reorder: true,
            piecewise: 500,
            short: 500,
            again: 100,
            ..Profile::default()
        };
        let world = SimWorld::new(seed, profile);
        let (cx, tags) = world.context_with_tags(16, 4, PLACE, from_zero);
        world.set_contents("disk", SimImage::from_bytes(&world.store(), contents));
        let fd = std::os::fd::AsFd::as_fd(&*world.file("disk", true))
            .try_clone_to_owned()
            .expect("a duplicate");
        let file = cx.ring().register(fd).expect("a registered file");
        worlds.push((cx, tags, file));
    }
    worlds
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 % 251) as u8 ^ (i >> 12) as u8).collect()
}

fn shared(tags: &Tags, tag: u16, skip: usize, len: usize) -> Rc<Buffer> {
    Rc::new(tags.buffer(tag, skip, len, 512).expect("a free tag"))
}

fn bytes(tags: &Tags, tag: u16, skip: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    tags.read(tag, skip, &mut bytes);
    bytes
}

#[test]
fn ring_reads_back_registered_pages_into_others() {
    let data = pattern(700_000);
    for (cx, tags, file) in worlds(&[]) {
        let name = cx.ring().driver_name();
        tags.write(0, 512, &data);
        let from = shared(&tags, 0, 512, data.len());
        let to = shared(&tags, 1, 1024, data.len());
        let both = async {
            let write = cx.ring().write(&file, 512, smallvec![Piece::whole(&from)], true);
            write.await?;
            cx.ring().read(&file, 512, smallvec![Piece::whole(&to)]).await
        };
        let result = cx.block_on(both).expect("the ring turns");
        result.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(bytes(&tags, 1, 1024, data.len()) == data, "{name}");
        // And nothing beside it was touched.
        assert_eq!(bytes(&tags, 1, 0, 1024), [0; 1024], "{name}");
        assert_eq!(bytes(&tags, 1, 1024 + data.len(), 512), [0; 512], "{name}");
    }
}

/// The fast path: one op per request, which holds the lease on its slot.
#[test]
fn request_holds_registered_buffer_until_answer_is_dropped() {
    let data = pattern(8192);
    for (cx, tags, file) in worlds(&data) {
        let name = cx.ring().driver_name();
        let sink = CompletionSink::new();
        let buffer = tags.buffer(2, 0, 4096, 512).expect("a free tag");
        let request = Request::new(Op::Read, 0, 4096, buffer, &sink, 1);
        cx.ring()
            .submit_request(&file, 4096, request)
            .expect("a free slot");
        let in_use = TagError::Lease(LeaseError::InUse { index: 2 });
        assert_eq!(
            tags.buffer(2, 0, 512, 512).expect_err("in flight"),
            in_use,
            "{name}"
        );
        while sink.is_empty() {
            cx.ring().turn(true).expect("a turn");
        }
        let mut done = Vec::new();
        sink.drain_into(&mut done);
        assert_eq!(done[0].result, Ok(()), "{name}");
        assert!(bytes(&tags, 2, 0, 4096) == data[4096..], "{name}");
        // The answer has it.
        assert_eq!(tags.buffer(2, 0, 512, 512).expect_err("held"), in_use, "{name}");
        done.clear();
        tags.buffer(2, 0, 512, 512).expect("a free tag");
    }
}

/// There is no memory to fill: the zeros go through the door.
#[test]
fn read_past_end_zeroes_registered_pages() {
    let data = pattern(600 << 10);
    for (cx, tags, file) in worlds(&data) {
        let name = cx.ring().driver_name();
        tags.write(0, 0, &vec![0xCC; PLACE]);
        let to = shared(&tags, 0, 512, PLACE - 1024);
        let read = cx.ring().read(&file, 512, smallvec![Piece::whole(&to)]);
        cx.block_on(read).expect("the ring turns").expect("a read");
        let mut expected = vec![0xCC; PLACE];
        expected[512..PLACE - 512].fill(0);
        expected[512..data.len()].copy_from_slice(&data[512..]);
        assert!(bytes(&tags, 0, 0, PLACE) == expected, "{name}");

        // And as a request, wholly past the end.
        tags.write(0, 0, &vec![0xCC; PLACE]);
        drop(to);
        let sink = CompletionSink::new();
        let request = Request::new(Op::Read, 0, 8192, tags.buffer(0, 0, 8192, 512).unwrap(), &sink, 1);
        cx.ring()
            .submit_request(&file, 1 << 30, request)
            .expect("a free slot");
        while sink.is_empty() {
            cx.ring().turn(true).expect("a turn");
        }
        assert_eq!(
            bytes(&tags, 0, 0, 8193),
            [vec![0; 8192], vec![0xCC]].concat(),
            "{name}"
        );
    }
}

#[test]
fn copies_and_zeros_through_the_door_keep_both_buffers() {
    let data = pattern(300_000);
    for (cx, tags, _file) in worlds(&[]) {
        let name = cx.ring().driver_name();
        let ours = Rc::new(Buffer::from(AlignedBuf::from_slice(&data)));
        let back = Rc::new(Buffer::from(AlignedBuf::zeroed(data.len())));
        let guests = shared(&tags, 3, 512, data.len());
        let copy = cx.ring().copy(&ours, 100, &guests, 100, data.len() - 200);
        let copy = copy.expect("an op, as it is I/O");
        assert_eq!(Rc::strong_count(&guests), 2, "{name}: the op has it too");
        cx.block_on(copy).expect("the ring turns").expect("a copy");
        let zeros = cx.ring().fill_zeros(&guests, 1000, 150_000).expect("an op");
        cx.block_on(zeros).expect("the ring turns").expect("zeros");
        let fetch = cx.ring().copy(&guests, 0, &back, 0, data.len()).expect("an op");
        cx.block_on(fetch).expect("the ring turns").expect("a copy");
        let mut expected = data.clone();
        expected[..100].fill(0);
        expected[data.len() - 100..].fill(0);
        expected[1000..151_000].fill(0);
        let mut found = vec![0; data.len()];
        back.memory().expect("ours").read(0, &mut found);
        assert!(found == expected, "{name}");
        // Between memory and memory there is nothing to wait for.
        assert!(cx.ring().copy(&ours, 0, &back, 0, 512).is_none());
        assert!(cx.ring().fill_zeros(&back, 0, 512).is_none());
    }
}

#[test]
fn answer_with_zeros_fills_registered_pages() {
    for (cx, tags, _file) in worlds(&[]) {
        tags.write(1, 0, &vec![0xCC; PLACE]);
        let sink = CompletionSink::new();
        let buffer = tags.buffer(1, 512, 200_000, 512).expect("a free tag");
        let request = Request::new(Op::Read, 0, 200_000, buffer, &sink, 1);
        cx.ring().answer_with_zeros(request).expect("a free slot");
        assert!(
            tags.buffer(1, 0, 512, 512).is_err(),
            "{}: the op has it",
            cx.ring().driver_name()
        );
        while sink.is_empty() {
            cx.ring().turn(true).expect("a turn");
        }
        let mut expected = vec![0xCC; PLACE];
        expected[512..200_512].fill(0);
        assert!(
            bytes(&tags, 1, 0, PLACE) == expected,
            "{}",
            cx.ring().driver_name()
        );
    }
}

/// Bytes missing behind a door must not become zeros on a disk.
#[test]
fn door_that_ends_early_is_an_error_not_zeros() {
    for kind in [RingKind::IoUring, RingKind::Syscalls] {
        let ring = Ring::with_fixed(kind, 16, &FixedTable::sparse(1)).expect("a ring");
        let cx = task::Context::on(ring.clone());
        let door = tempfile::tempfile().expect("a temporary file");
        door.set_len(1000).expect("its length");
        let file = tempfile::tempfile().expect("a temporary file");
        let kept = file.try_clone().expect("a duplicate");
        let file = ring.register(file.into()).expect("a registered file");
        let guests = Rc::new(
            Buffer::registered(block::buffer::Registration {
                fixed: ring.lease_fixed(0).expect("a place"),
                base: 0,
                len: 4096,
                door: Door::new(ring.register(door.into()).expect("a registered file")),
                door_offset: 0,
                align: 512,
                hold: Rc::new(()),
            })
            .expect("a buffer"),
        );
        let ours = Rc::new(Buffer::from(AlignedBuf::zeroed(4096)));
        let fetch = ring.copy(&guests, 0, &ours, 0, 4096).expect("an op");
        let failed = Err(IoError::Host { errno: libc::EIO });
        assert_eq!(cx.block_on(fetch).expect("the ring turns"), failed);
        // The kernel has no such buffer; without a table its door is all there is.
        let errno = if kind == RingKind::IoUring {
            libc::EFAULT
        } else {
            libc::EIO
        };
        let write = ring.write(&file, 0, smallvec![Piece::whole(&guests)], false);
        let failed = Err(IoError::Host { errno });
        assert_eq!(cx.block_on(write).expect("the ring turns"), failed, "{kind:?}");
        assert_eq!(kept.metadata().expect("a length").len(), 0, "nothing was written");
    }
}

#[test]
fn ring_refuses_buffers_no_op_can_name() {
    let mut worlds = worlds(&[1; 8192]);
    let (other, _tags, other_file) = worlds.pop().expect("a world");
    let (cx, tags, file) = worlds.swap_remove(0);
    let guests = shared(&tags, 0, 0, 4096);
    let ours = Rc::new(Buffer::from(AlignedBuf::zeroed(4096)));
    let both = smallvec![Piece::whole(&guests), Piece::whole(&ours)];
    let mixed = cx.ring().read(&file, 0, both);
    let result = cx.block_on(mixed).expect("the ring turns");
    assert_eq!(result, Err(IoError::Unsupported));

    let foreign = other
        .ring()
        .read(&other_file, 0, smallvec![Piece::whole(&guests)]);
    let result = other.block_on(foreign).expect("the ring turns");
    assert_eq!(result, Err(IoError::ForeignBuffer));
    let sink = CompletionSink::new();
    let buffer = tags.buffer(1, 0, 4096, 512).expect("a free tag");
    let request = Request::new(Op::Read, 0, 4096, buffer, &sink, 1);
    other
        .ring()
        .submit_request(&other_file, 0, request)
        .expect("an answer");
    let mut done = Vec::new();
    sink.drain_into(&mut done);
    assert_eq!(done[0].result, Err(IoError::ForeignBuffer));

    let pages = shared(&tags, 2, 0, 4096);
    let between = cx.ring().copy(&guests, 0, &pages, 0, 512).expect("an answer");
    let result = cx.block_on(between).expect("the ring turns");
    assert_eq!(result, Err(IoError::Unsupported));

    assert!(guests.memory().is_none(), "it has no addresses here");
    assert!(guests.as_owned().is_none());
    let none = LeaseError::NoPlace { index: 4, places: 4 };
    assert_eq!(cx.ring().lease_fixed(4).expect_err("past the end"), none);
    let bad = |base, len, align| {
        Buffer::registered(block::buffer::Registration {
            fixed: cx.ring().lease_fixed(3).expect("a place"),
            base,
            len,
            door: Door::new(file.clone()),
            door_offset: 0,
            align,
            hold: Rc::new(()),
        })
        .expect_err("no op could name it")
    };
    assert_eq!(bad(0, 512, 3), RegistrationError::Alignment { align: 3 });
    assert_eq!(bad(0, 512, 0), RegistrationError::Alignment { align: 0 });
    assert!(matches!(
        bad(u64::MAX - 5, 512, 1),
        RegistrationError::TooLong { .. }
    ));
}

#[test]
fn buffer_part_alignment_follows_whole_and_offset() {
    let (cx, tags) = Tags::on_ring(RingKind::Syscalls, 16, 1, 65536, None).expect("a ring");
    let whole = Rc::new(tags.buffer(0, 0, 65536, 4096).expect("a free tag"));
    assert!(whole.is_aligned(4096, 4096));
    assert!(!whole.is_aligned(8192, 512));
    let part = Rc::new(Buffer::part(&whole, 1536, 8192));
    assert!(part.is_aligned(512, 512) && !part.is_aligned(1024, 512));
    assert!(
        !part.is_aligned(512, 4096),
        "its stretches of pages do not end at blocks"
    );
    let within = Buffer::part(&part, 2560, 4096);
    assert!(
        within.is_aligned(4096, 4096),
        "4096 bytes into the whole, a block begins"
    );
    assert!(!within.is_aligned(8192, 512));
    assert_eq!(within.len(), 4096);
    assert!(!whole.is_range_aligned(0, 100, 512, 512));
    // A part keeps its whole, and with it the place.
    drop((whole, part));
    assert!(cx.ring().lease_fixed(0).is_err());
    drop(within);
    cx.ring().lease_fixed(0).expect("nobody has it any more");
}

/// As a frontend has it: one request after another, and none before the last op of the one before.
#[test]
fn registered_slot_makes_one_buffer_at_a_time() {
    let ring = Ring::with_fixed(RingKind::Syscalls, 16, &FixedTable::sparse(1)).expect("a ring");
    let file = tempfile::tempfile().expect("a temporary file");
    let file = ring.register(file.into()).expect("a registered file");
    let slot = RegisteredSlot::new(block::buffer::Registration {
        fixed: ring.lease_fixed(0).expect("a place"),
        base: 0,
        len: 8192,
        door: Door::new(file.clone()),
        door_offset: 0,
        align: 512,
        hold: Rc::new(()),
    });
    let slot = slot.expect("a slot");
    let in_use = LeaseError::InUse { index: 0 };
    assert_eq!(ring.lease_fixed(0).expect_err("it is the slot's"), in_use);
    for len in [4096, 8192] {
        let whole = Rc::new(slot.buffer(len).expect("nothing names it"));
        assert_eq!(whole.len(), len);
        assert_eq!(slot.buffer(512).expect_err("a buffer names it"), in_use);
        let part = Rc::new(Buffer::part(&whole, 512, 512));
        drop(whole);
        assert!(!slot.is_free(), "a part names it");
        drop(ring.read(&file, 0, smallvec![Piece::whole(&part)]));
        drop(part);
        assert!(!slot.is_free(), "the op names it");
        while ring.in_flight() > 0 {
            ring.turn(true).expect("a turn");
        }
        assert!(slot.is_free());
    }
    drop(slot);
    ring.lease_fixed(0).expect("nobody has it any more");
}

/// The hold is dropped last of all, so that its owner may lease the slot again at once.
#[test]
fn hold_is_dropped_after_last_op_and_lease() {
    struct Hold(Ring, Rc<Cell<Option<bool>>>);
    impl Drop for Hold {
        fn drop(&mut self) {
            self.1.set(Some(self.0.lease_fixed(0).is_ok()));
        }
    }
    let ring = Ring::with_fixed(RingKind::Syscalls, 16, &FixedTable::sparse(1)).expect("a ring");
    let file = tempfile::tempfile().expect("a temporary file");
    let file = ring.register(file.into()).expect("a registered file");
    let gone = Rc::new(Cell::new(None));
    let whole = Buffer::registered(block::buffer::Registration {
        fixed: ring.lease_fixed(0).expect("a place"),
        base: 0,
        len: 4096,
        door: Door::new(file.clone()),
        door_offset: 0,
        align: 512,
        hold: Rc::new(Hold(ring.clone(), Rc::clone(&gone))),
    });
    let whole = Rc::new(whole.expect("a buffer"));
    let part = Rc::new(Buffer::part(&whole, 512, 512));
    drop(whole);
    drop(ring.read(&file, 0, smallvec![Piece::whole(&part)]));
    drop(part);
    assert_eq!(gone.get(), None, "the op names a part of it");
    while ring.in_flight() > 0 {
        ring.turn(true).expect("a turn");
    }
    assert_eq!(gone.get(), Some(true));
}

/// The caller stops waiting; the kernel does not.
#[test]
fn dropped_future_keeps_its_slot_leased_until_op_ends() {
    for (cx, tags, file) in worlds(&[5; 4096]) {
        let buffer = shared(&tags, 0, 0, 4096);
        drop(cx.ring().read(&file, 0, smallvec![Piece::whole(&buffer)]));
        drop(buffer);
        assert!(
            tags.buffer(0, 0, 512, 512).is_err(),
            "{}",
            cx.ring().driver_name()
        );
        while cx.ring().in_flight() > 0 {
            cx.ring().turn(true).expect("a turn");
        }
        tags.buffer(0, 0, 512, 512).expect("a free tag");
        assert_eq!(bytes(&tags, 0, 0, 4096), [5; 4096]);
    }
}
