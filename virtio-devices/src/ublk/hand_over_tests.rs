//! A queue that another server goes on with: what it still does, what it keeps, and that nothing is lost between the two.

use block::{IoError, Op};

use super::abi::op;
use super::model::Io;
use super::queue_state::{Duty, QueueEvent};
use super::tests::World;
use crate::testing::MemDisk;

fn writes(disk: &MemDisk) -> usize {
    let is_write = |(op, ..): &(Op, u64, u64)| matches!(op, Op::Write { .. });
    disk.log().into_iter().filter(is_write).count()
}

/// After the last count no byte reaches the disk, however many requests the driver still brings.
#[test]
fn kept_requests_reach_the_disk_only_through_the_next_server() {
    let disk = MemDisk::new();
    let mut old = World::new(&disk, 4);
    // Some are at the disk when it begins, one is done, and more come.
    old.model.request(Io::write(0, &[1; 512]));
    old.rounds();
    disk.hold();
    let numbers: Vec<usize> = (1..3)
        .map(|sector| old.model.request(Io::write(sector, &[sector as u8; 512])))
        .collect();
    let read = old.model.request(Io::new(op::READ, 0, 1));
    old.rounds();
    assert_eq!(disk.held(), 3);
    old.state.set_duty(Duty::Keep);
    let late: Vec<usize> = (3..9)
        .map(|sector| old.model.request(Io::write(sector, &[sector as u8; 512])))
        .collect();
    assert_eq!(old.state.unfinished(), None, "nobody has counted");
    old.rounds();
    assert_eq!(old.state.unfinished(), Some(3), "the disk has them");
    disk.release();
    old.rounds();
    assert_eq!(old.state.unfinished(), Some(0));
    let (asked, bytes) = (disk.log().len(), disk.bytes(0, 8192));
    assert_eq!(old.model.unanswered(), 9, "the next server answers them");
    for sector in 9..12 {
        old.model.request(Io::write(sector, &[sector as u8; 512]));
    }
    old.rounds();
    assert_eq!((disk.log().len(), disk.bytes(0, 8192)), (asked, bytes));

    let model = old.model.clone();
    old.state.abandon();
    drop(old);
    model.server_gone();
    let mut new = World::on(&disk, model, 4);
    new.model.end_recovery();
    for _ in 0..8 {
        new.rounds();
    }
    assert_eq!(new.model.unanswered(), 0);
    for number in numbers.into_iter().chain(late) {
        assert_eq!(new.result(number), 512);
    }
    assert_eq!(new.model.io(read).data, [1; 512]);
    let expected: Vec<u8> = (0..12u8).flat_map(|sector| [sector.max(1); 512]).collect();
    let mut expected = expected;
    expected[..512].fill(1);
    assert_eq!(disk.bytes(0, 12 * 512), expected);
}

/// A driver that brings nothing new gets an answer to every request it has brought.
#[test]
fn finish_duty_counts_requests_until_each_is_answered() {
    let disk = MemDisk::new();
    let mut world = World::new(&disk, 4);
    disk.hold();
    let numbers: Vec<usize> = (0..4)
        .map(|sector| world.model.request(Io::write(sector, &[7; 512])))
        .collect();
    world.rounds();
    world.state.set_duty(Duty::Finish);
    world.rounds();
    assert_eq!(world.state.unfinished(), Some(4));
    disk.release();
    // Answers that find no slot are not given yet.
    world.model.refuse(40);
    world.rounds();
    assert_eq!((world.state.unfinished(), writes(&disk)), (Some(4), 4));
    world.model.refuse(0);
    world.rounds();
    assert_eq!(world.state.unfinished(), Some(0));
    for number in numbers {
        assert_eq!(world.result(number), 512);
    }
    // The driver ends its tags, or leaves them to the end of the process.
    world.model.abort();
    world.rounds();
    assert_eq!((world.state.unfinished(), world.state.tags()), (Some(0), 0));
}

/// A write that fails because its server goes, such as one that waits for space, is no error for its issuer.
#[test]
fn failed_request_is_kept_if_the_next_server_may_repeat_it() {
    for (duty, kept) in [(Duty::Finish, false), (Duty::FinishWell, true)] {
        let disk = MemDisk::new();
        let mut old = World::new(&disk, 4);
        disk.hold();
        let fine = old.model.request(Io::write(0, &[1; 512]));
        let failing = old.model.request(Io::write(1, &[2; 512]));
        old.rounds();
        old.state.set_duty(duty);
        disk.fail(Some(IoError::Host { errno: libc::ENOSPC }));
        disk.release();
        old.rounds();
        assert_eq!(old.state.unfinished(), Some(0));
        if !kept {
            assert_eq!(old.result(failing), -libc::ENOSPC);
            old.model.abort();
            old.rounds();
            continue;
        }
        assert_eq!(old.model.unanswered(), 2);
        disk.fail(None);
        let model = old.model.clone();
        old.state.abandon();
        drop(old);
        model.server_gone();
        let mut new = World::on(&disk, model, 4);
        new.model.end_recovery();
        new.rounds();
        assert_eq!((new.result(fine), new.result(failing)), (512, 512));
        assert_eq!(disk.bytes(512, 512), [2; 512]);
        new.model.abort();
        new.rounds();
    }
}

/// An impossible result of the driver ends the queue, not the device. Its requests, that tag's included, are kept.
#[test]
fn broken_queue_leaves_its_requests_to_the_next_server() {
    for lie in [-libc::EINVAL, -libc::EBUSY, -libc::EIO, 7] {
        let disk = MemDisk::new();
        let mut old = World::new(&disk, 4);
        disk.hold();
        let at_disk = old.model.request(Io::write(0, &[1; 512]));
        old.rounds();
        old.model.lie(lie);
        let lost = old.model.request(Io::write(1, &[2; 512]));
        old.rounds();
        let error = std::io::Error::from_raw_os_error(lie.saturating_neg());
        let what = format!("the driver answers {lie} under tag 1: {error}");
        assert_eq!(old.events(), [QueueEvent::Broken { device: 5, what }]);
        assert_eq!(old.state.tags(), 3, "the others are the driver's still");
        // As its owner lets go of it.
        old.state.set_duty(Duty::Keep);
        let late = old.model.request(Io::write(2, &[3; 512]));
        old.rounds();
        assert_eq!(old.state.unfinished(), Some(1), "the disk has one");
        disk.release();
        old.rounds();
        assert_eq!((old.state.unfinished(), old.model.unanswered()), (Some(0), 3));
        assert_eq!(writes(&disk), 1, "nothing else has reached the disk");

        let model = old.model.clone();
        old.state.abandon();
        drop(old);
        assert_eq!(model.server_gone(), 3);
        let mut new = World::on(&disk, model, 4);
        new.model.end_recovery();
        new.rounds();
        for (number, byte) in [(at_disk, 1u8), (lost, 2), (late, 3)] {
            assert_eq!(new.result(number), 512, "{lie}");
            assert_eq!(disk.bytes(usize::from(byte - 1) * 512, 512), [byte; 512]);
        }
        assert_eq!(new.events(), []);
        new.model.abort();
        new.rounds();
    }
}

/// As many requests as tags, at once and one after the other: ordered writes must reach the disk in order.
#[test]
fn queue_submits_requests_in_driver_order() {
    let disk = MemDisk::new();
    let mut world = World::new(&disk, 16);
    for round in 0..8u64 {
        for sector in 0..16 {
            world.model.request(Io::write(round * 16 + sector, &[7; 512]));
        }
        world.rounds();
    }
    let offsets: Vec<u64> = disk.log().into_iter().map(|(_, offset, _)| offset).collect();
    let expected: Vec<u64> = (0..128).map(|sector| sector * 512).collect();
    assert_eq!(offsets, expected);
}
