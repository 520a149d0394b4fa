//! Inflight tracking: a server that finds what another left, and clients that lie about it.
//!
//! A kill is played by copying all shared memory while the disk holds requests up: the copy is what a killed
//! server would have left, and a second server goes on with it.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use block::throttle::{Limiter, Rate, RateLimits, ThrottledDisk};
use block::{Disk, IoError, Op};
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserInflight;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::tests::{Client, SECOND, World, wait};
use crate::conformance::holds_within;
use crate::testing::{DATA, MemDisk, REGION_BYTES};
use crate::virtqueue::InflightRegion;
use ringdisk_driver::blk::{DISCARD, FLUSH, IN, IOERR, OK, OUT};
use ringdisk_gen::Random;

const SIZE: u16 = 64;

/// A memfd of the same contents, sealed as ours are.
pub(super) fn copy(shape: &VhostUserInflight, file: &File) -> File {
    let (_, copy) = super::inflight::make(shape, 2).expect("inflight memory");
    let mut bytes = vec![0; shape.mmap_size as usize];
    file.read_exact_at(&mut bytes, 0).expect("the contents");
    copy.write_all_at(&bytes, 0).expect("a copy");
    copy
}

pub(super) fn inflight(client: &mut Client) -> (VhostUserInflight, File) {
    let asked = VhostUserInflight::new(0, 0, 2, SIZE);
    let (shape, file) = client.frontend.get_inflight_fd(&asked).expect("GET_INFLIGHT_FD");
    client
        .frontend
        .set_inflight_fd(&shape, file.as_raw_fd())
        .expect("SET_INFLIGHT_FD");
    (shape, file)
}

/// Method: answers before the kill move the indices; both queues have requests in flight, and one was never seen.
#[test]
fn new_server_answers_inflight_requests_first_and_in_order() {
    let disk = MemDisk::new();
    let world = World::restartable(disk.disk(), 2);
    let mut client = world.client(2);
    let (shape, file) = inflight(&mut client);
    for _ in 0..70 {
        assert_eq!(client.ask(0, FLUSH, 0, &[]), OK);
    }
    disk.hold();
    // Descriptors are taken in turn, so heads are not in the order of the table.
    let sectors: Vec<u64> = (0..15).map(|n| 40 - n).collect();
    for &sector in &sectors {
        client.submit(0, OUT, sector, &[(DATA, 512, false)]);
    }
    client.submit(1, OUT, 100, &[(DATA, 512, false)]);
    wait("the requests", || disk.held() == 16);

    let left = copy(&shape, &file);
    let mut next = client.copied();
    next.frozen_submit(0, OUT, 7, &[(DATA, 512, false)]);
    let second_disk = MemDisk::new();
    let second = World::restartable(second_disk.disk(), 2);
    assert!(next.reconnect(&second.path, Some((&shape, &left))));
    for _ in 0..16 {
        assert_eq!(next.answer(0).1, 1);
    }
    next.answer(1);
    assert_eq!(next.drivers[0].take_used(), None, "an answer too many");
    let offsets: Vec<u64> = second_disk
        .log()
        .into_iter()
        .filter(|(op, offset, _)| matches!(op, Op::Write { .. }) && *offset != 100 * 512)
        .map(|(_, offset, _)| offset / 512)
        .collect();
    let expected: Vec<u64> = sectors.into_iter().chain([7]).collect();
    assert_eq!(offsets, expected);
    // The client is called even if the killed server had published and not told.
    assert!(next.calls[0].read().is_ok());
    assert_eq!(next.ask(0, FLUSH, 0, &[]), OK);
    disk.release();
}

#[test]
fn restarted_queue_continues_from_its_base() {
    let disk = MemDisk::new();
    let world = World::restartable(disk.disk(), 2);
    let mut client = world.client(2);
    inflight(&mut client);
    for round in 0..5 {
        for _ in 0..30 {
            assert_eq!(client.ask(0, FLUSH, 0, &[]), OK);
        }
        let base = client.frontend.get_vring_base(0).expect("GET_VRING_BASE");
        assert_eq!(base, 30 * (round + 1));
        client.start(0, base as u16);
    }
    assert_eq!(disk.log().len(), 150);
}

/// A disk on which two requests are carried out, and the next ones wait for an hour.
fn limited(disk: &MemDisk) -> Arc<ThrottledDisk> {
    let ops = Rate {
        size: 2,
        refill: Duration::from_secs(3600),
        one_time_burst: 0,
    };
    let limits = RateLimits {
        ops: Some(ops),
        bandwidth: None,
    };
    ThrottledDisk::new(disk.disk(), Limiter::new(&limits))
}

/// Submits ten writes together, and waits until two of them have reached the disk: then all have been taken.
fn submit_ten(client: &mut Client, disk: &MemDisk) {
    for sector in 0..10 {
        client.drivers[0].request(OUT, sector, &[(DATA, 512, false)]);
    }
    client.kick(0);
    wait("the first ones", || disk.log().len() == 2);
}

/// The first sector of each request that reached the disk.
fn sectors_of(disk: &MemDisk) -> Vec<u64> {
    disk.log()
        .into_iter()
        .map(|(_, offset, _)| offset / 512)
        .collect()
}

/// Asks for the base of the first queue, and returns it, which must come after `disk_ends` only.
fn base_after(client: &Client, disk_ends: impl FnOnce()) -> u32 {
    let frontend = client.frontend.clone();
    let base = std::thread::spawn(move || frontend.get_vring_base(0));
    assert!(!holds_within(Duration::from_millis(50), || base.is_finished()));
    disk_ends();
    base.join().expect("no panic").expect("GET_VRING_BASE")
}

/// Requests that wait for a rate limit are neither hurried through it nor answered: the next server has them.
#[test]
fn base_is_told_at_once_and_requests_that_have_not_begun_are_carried_along() {
    let disks = [MemDisk::new(), MemDisk::new()];
    let world = World::restartable(limited(&disks[0]), 2);
    let mut client = world.client(2);
    let (shape, file) = inflight(&mut client);
    submit_ten(&mut client, &disks[0]);
    assert_eq!(client.frontend.get_vring_base(0).expect("GET_VRING_BASE"), 10);
    assert_eq!(sectors_of(&disks[0]), [0, 1]);
    client.answer(0);
    client.answer(0);
    assert_eq!(client.drivers[0].take_used(), None, "an answer too many");
    let next = World::restartable(disks[1].disk(), 2);
    assert!(client.reconnect(&next.path, Some((&shape, &file))));
    for _ in 2..10 {
        client.answer(0);
    }
    assert_eq!(client.drivers[0].take_used(), None, "an answer too many");
    assert_eq!(sectors_of(&disks[1]), (2..10).collect::<Vec<u64>>());
    assert_eq!(client.ask(0, FLUSH, 0, &[]), OK);
}

/// A client that goes on with the same server does not give its inflight memory again.
#[test]
fn suspended_queue_goes_on_where_it_was_with_its_own_server() {
    let disk = MemDisk::new();
    let throttled = limited(&disk);
    let world = World::restartable(Arc::clone(&throttled) as Arc<dyn Disk>, 2);
    let mut client = world.client(2);
    inflight(&mut client);
    submit_ten(&mut client, &disk);
    for _ in 0..2 {
        assert_eq!(client.frontend.get_vring_base(0).expect("GET_VRING_BASE"), 10);
        client.start(0, 10);
    }
    throttled.set_limits(&RateLimits::default());
    for _ in 0..10 {
        client.answer(0);
    }
    assert_eq!(sectors_of(&disk), (0..10).collect::<Vec<u64>>());
    assert_eq!(client.ask(0, FLUSH, 0, &[]), OK);
}

/// The requests that the disk has begun are waited for. The next server's FLUSH would succeed, and the guest would not learn what was lost.
#[test]
fn flush_that_fails_while_its_queue_is_suspended_is_told() {
    let disk = MemDisk::new();
    let world = World::restartable(disk.disk(), 2);
    let mut client = world.client(2);
    inflight(&mut client);
    disk.hold();
    let head = client.submit(0, FLUSH, 0, &[]);
    wait("the request", || disk.held() == 1);
    let disk_ends = || {
        disk.fail(Some(IoError::Host { errno: libc::EIO }));
        disk.release();
    };
    assert_eq!(base_after(&client, disk_ends), 1);
    assert_eq!(client.drivers[0].take_used(), Some((u32::from(head), 1)));
    assert_eq!(client.drivers[0].status(head), IOERR);
}

/// Of the three segments of a discard the disk has carried out two.
#[test]
fn chain_is_carried_along_whole_if_one_of_its_segments_has_not_begun() {
    let disks = [MemDisk::new(), MemDisk::new()];
    let world = World::restartable(limited(&disks[0]), 2);
    let mut client = world.client(2);
    let (shape, file) = inflight(&mut client);
    for (index, sector) in [8u64, 16, 24].into_iter().enumerate() {
        let segment = [sector.to_le_bytes(), 8u64.to_le_bytes()].concat();
        client.drivers[0].write(DATA + 16 * index as u64, &segment);
    }
    disks[0].hold();
    let head = client.submit(0, DISCARD, 0, &[(DATA, 48, false)]);
    wait("two segments", || disks[0].held() == 2);
    assert_eq!(base_after(&client, || disks[0].release()), 1);
    assert_eq!(sectors_of(&disks[0]), [8, 16]);
    assert_eq!(client.drivers[0].take_used(), None);
    let next = World::restartable(disks[1].disk(), 2);
    assert!(client.reconnect(&next.path, Some((&shape, &file))));
    assert_eq!(client.answer(0).0, u32::from(head));
    assert_eq!(client.drivers[0].status(head), OK);
    assert_eq!(sectors_of(&disks[1]), [8, 16, 24]);
}

/// Without the feature a request is answered before the base, whatever becomes of it.
#[test]
fn base_without_inflight_memory_is_told_after_all_answers() {
    let disk = MemDisk::new();
    let world = World::restartable(limited(&disk), 2);
    let mut client = world.client(2);
    submit_ten(&mut client, &disk);
    assert_eq!(client.frontend.get_vring_base(0).expect("GET_VRING_BASE"), 10);
    for _ in 0..10 {
        assert!(client.drivers[0].take_used().is_some());
    }
}

/// False contents cost the client its own queue at most: they are refused, or the queue runs on them.
#[test]
fn inflight_memory_of_any_content_harms_only_its_client() {
    let disk = MemDisk::new();
    let world = World::restartable(disk.disk(), 2);
    for seed in 1..=60 {
        let mut random = Random::new(seed * 7919);
        let mut client = world.client(2);
        let (shape, file) = inflight(&mut client);
        for _ in 0..random.below(4) {
            client.ask(0, IN, 0, &[(DATA, 512, true)]);
        }
        let left = copy(&shape, &file);
        for _ in 0..random.below(40) {
            // The header more often than the rest.
            let at = if random.below(2) == 0 {
                random.below(16)
            } else {
                random.below(shape.mmap_size)
            };
            let value = random.pick(&[0, 1, 2, 63, 64, 0xff]);
            left.write_all_at(&[value], at).expect("a lie");
        }
        let mut next = client.copied();
        let second = World::restartable(disk.disk(), 2);
        // A lie is refused or believed.
        next.reconnect(&second.path, Some((&shape, &left)));
        drop(next);
        let mut other = second.client(2);
        assert_eq!(other.ask(1, FLUSH, 0, &[]), OK, "seed {seed}");
    }
}

#[test]
fn set_inflight_fd_refuses_unusable_memory() {
    let world = World::restartable(MemDisk::new().disk(), 2);
    let mut client = world.client(2);
    let asked = VhostUserInflight::new(0, 0, 2, SIZE);
    let (shape, file) = client.frontend.get_inflight_fd(&asked).expect("GET_INFLIGHT_FD");
    assert_eq!(
        (shape.num_queues, shape.queue_size, shape.mmap_offset),
        (2, SIZE, 0)
    );
    assert!(file.set_len(0).is_err(), "sealed");
    let refused = |client: &mut Client, shape: VhostUserInflight, file: &File| {
        let result = client.frontend.set_inflight_fd(&shape, file.as_raw_fd());
        assert!(result.is_err(), "accepted");
        assert_eq!(client.ask(0, FLUSH, 0, &[]), OK);
    };
    let bytes = shape.mmap_size;
    refused(&mut client, VhostUserInflight::new(bytes, 0, 3, SIZE), &file);
    refused(&mut client, VhostUserInflight::new(bytes, 0, 2, 0x8001), &file);
    refused(&mut client, VhostUserInflight::new(bytes, 0, 2, 2 * SIZE), &file);
    let needed = 2 * InflightRegion::bytes(SIZE) as u64;
    refused(&mut client, VhostUserInflight::new(needed - 1, 0, 2, SIZE), &file);
    refused(&mut client, VhostUserInflight::new(bytes, 4096, 2, SIZE), &file);
    refused(
        &mut client,
        VhostUserInflight::new(bytes, u64::MAX, 2, SIZE),
        &file,
    );
    let plain = tempfile::tempfile().expect("a file");
    plain.set_len(bytes).expect("its length");
    refused(&mut client, VhostUserInflight::new(bytes, 0, 2, SIZE), &plain);
    let eventfd = EventFd::new(EFD_NONBLOCK).expect("an eventfd");
    let result = client.frontend.set_inflight_fd(&shape, eventfd.as_raw_fd());
    assert!(result.is_err(), "no file at all");

    // A question for too much has no refusal but a hang-up.
    let asked = VhostUserInflight::new(0, 0, 2, u16::MAX);
    assert!(client.frontend.get_inflight_fd(&asked).is_err());
    let mut client = world.client(2);
    assert!(
        client
            .frontend
            .get_inflight_fd(&VhostUserInflight::new(0, 0, 3, SIZE))
            .is_err()
    );
    let mut client = world.client(2);
    assert_eq!(client.ask(0, FLUSH, 0, &[]), OK);
}

#[test]
fn inflight_feature_is_offered_only_if_restartable() {
    use vhost::vhost_user::message::VhostUserProtocolFeatures as Features;
    let offers = |world: World| {
        let mut client = world.client(1);
        let offered = client
            .frontend
            .get_protocol_features()
            .expect("GET_PROTOCOL_FEATURES");
        offered.contains(Features::INFLIGHT_SHMFD)
    };
    assert!(!offers(World::new(MemDisk::new().disk(), 1)));
    assert!(offers(World::restartable(MemDisk::new().disk(), 1)));
}

/// A client can truncate its memory at any moment. An unhandled SIGBUS would end the server of every client.
#[test]
fn shrunk_memory_harms_only_its_client() {
    let disk = MemDisk::new();
    let (world, other) = (World::new(disk.disk(), 1), World::new(disk.disk(), 1));
    let mut neighbour = other.client(1);
    for _ in 0..3 {
        let mut client = world.client(1);
        assert_eq!(client.ask(0, FLUSH, 0, &[]), OK);
        client.file.set_len(0).expect("a shorter file");
        for _ in 0..3 {
            client.kicks[0].write(1).expect("a kick");
            assert_eq!(neighbour.ask(0, IN, 0, &[(DATA, 512, true)]), OK);
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
    }
    let mut client = world.client(1);
    assert_eq!(client.ask(0, FLUSH, 0, &[]), OK);
}

/// A write whose data are gone must not be answered with success. The rings are in another region.
#[test]
fn write_from_truncated_memory_fails_and_breaks_the_queue() {
    let disk = MemDisk::new();
    let world = World::new(disk.disk(), 2);
    let mut client = world.client(2);
    let error = EventFd::new(EFD_NONBLOCK).expect("an eventfd");
    client.frontend.set_vring_err(0, &error).expect("SET_VRING_ERR");
    client.drivers[0].write(SECOND, &[7; 512]);
    assert_eq!(client.ask(0, OUT, 0, &[(SECOND, 512, false)]), OK);
    client.file.set_len(REGION_BYTES).expect("a shorter file");
    assert_eq!(client.ask(0, OUT, 0, &[(SECOND, 512, false)]), IOERR);
    wait("the error event", || error.read().is_ok());
    // The same memory is as bad for the other queue.
    assert_eq!(client.ask(1, IN, 0, &[(DATA, 512, true)]), IOERR);
    drop(client);
    let mut next = world.client(2);
    assert_eq!(next.ask(0, OUT, 0, &[(SECOND, 512, false)]), OK);
}
