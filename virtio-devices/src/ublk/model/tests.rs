//! The model's checks of servers that do wrong, and a device's life.

use super::super::channel::Channel;
use super::*;

const BYTES: usize = 1024;

/// A model whose server has fetched under every tag.
fn served(model: Model) -> (Model, ModelChannel) {
    let mut channel = model.channel(0);
    let depth = model.state.borrow().tags.len() as u16;
    for tag in 0..depth {
        channel.fetch(tag).expect("a slot");
    }
    model.end_recovery();
    assert_eq!(model.take_fault(), None);
    (model, channel)
}

/// Returns the results that the server has received.
fn taken(channel: &mut ModelChannel) -> Vec<(u64, i32)> {
    let mut results = Vec::new();
    channel.take_results(&mut results);
    results
}

fn fault(model: &Model) -> String {
    model.take_fault().expect("a fault")
}

#[test]
fn model_reports_what_the_kernel_would_refuse() {
    let (model, mut channel) = served(Model::new(2));
    channel.fetch(0).expect("a slot");
    assert!(fault(&model).contains("fetched for already"));
    channel.commit_and_fetch(1, 0).expect("a slot");
    assert!(fault(&model).contains("not the server's"));
    for (io, result) in [
        (Io::new(op::READ, 0, 2), 512),
        (Io::new(op::WRITE, 0, 2), 0),
        (Io::new(op::FLUSH, 0, 0), 512),
    ] {
        let number = model.request(io);
        assert_eq!(taken(&mut channel), [(0, 0)]);
        channel.commit_and_fetch(0, result).expect("a slot");
        assert!(fault(&model).contains("were committed"));
        assert_eq!(model.take_answered()[0].0, number);
        channel.commit_and_fetch(0, result).expect("a slot");
        assert!(fault(&model).contains("not the server's"), "answered twice");
    }
    model.server_gone();
    channel.fetch(0).expect("a slot");
    assert!(fault(&model).contains("a server that is gone"));
    model.end_recovery();
    assert!(fault(&model).contains("before tag 0 was fetched for"));
}

/// The driver copies written data when it hands a request out, and read data when the request is answered.
#[test]
fn model_copies_through_the_servers_buffer_in_copy_mode() {
    let (model, mut channel) = served(Model::in_copy_mode(1));
    let written = model.request(Io::write(0, &[7; BYTES]));
    let mut found = [0; BYTES];
    let buffer = channel.data(0, BYTES).expect("data");
    buffer.memory().expect("memory").read(0, &mut found);
    assert_eq!(found, [7; BYTES]);
    channel.give_back(0, buffer);
    channel.commit_and_fetch(0, BYTES as i32).expect("a slot");
    let read = model.request(Io::new(op::READ, 0, 2));
    let buffer = channel.room(0, BYTES);
    buffer.memory().expect("memory").fill(0, BYTES, 9);
    channel.deliver(0, &buffer).expect("no transfer");
    assert_eq!(model.io(read).data, [0; BYTES], "not answered yet");
    channel.give_back(0, buffer);
    channel.commit_and_fetch(0, BYTES as i32).expect("a slot");
    let answered = model.take_answered();
    assert_eq!((answered[0].0, answered[1].0), (written, read));
    assert_eq!(answered[1].1.data, [9; BYTES]);
    assert_eq!(model.take_fault(), None);
}

/// For each mode: a request of the dead server, one that had no tag when it died, and a later one.
#[test]
fn model_keeps_or_fails_requests_by_recovery_mode() {
    let served_later = (None, false);
    let failed = (Some(-libc::EIO), true);
    for (recovery, expected, reissued) in [
        (Recovery::Reissue, [served_later; 3], vec![0, 1]),
        (Recovery::Wait, [failed, served_later, served_later], vec![1, 2]),
        (Recovery::Fail, [failed; 3], vec![]),
    ] {
        let (model, channel) = served(Model::new(1));
        model.set_recovery(recovery);
        for sector in 0..2 {
            model.request(Io::new(op::READ, sector, 1));
        }
        drop(channel);
        model.server_gone();
        model.request(Io::new(op::READ, 2, 1));
        let found = [0, 1, 2].map(|number| {
            let io = model.io(number);
            (io.result, io.by_driver)
        });
        assert_eq!(found, expected, "{recovery:?}");
        // The next one gets what waits, the oldest first, but not before it has fetched everywhere.
        let mut next = model.channel(0);
        next.fetch(0).expect("a slot");
        assert!(!model.has_results());
        model.end_recovery();
        for sector in reissued {
            assert_eq!(taken(&mut next), [(0, IO_RES_OK)]);
            assert_eq!(next.descriptor(0).start_sector, sector);
            next.commit_and_fetch(0, 512).expect("a slot");
        }
        assert_eq!(model.take_fault(), None);
    }
}

#[test]
fn model_quiesce_ends_each_tag_once_answered() {
    let (model, mut channel) = served(Model::new(2));
    model.request(Io::new(op::READ, 0, 1));
    assert_eq!(taken(&mut channel), [(0, IO_RES_OK)]);
    model.quiesce();
    let late = model.request(Io::new(op::READ, 5, 1));
    assert_eq!(taken(&mut channel), [(1, IO_RES_ABORT)]);
    channel.commit_and_fetch(0, 512).expect("a slot");
    assert_eq!(taken(&mut channel), [(0, IO_RES_ABORT)]);
    assert_eq!(model.take_answered().len(), 1);
    model.server_gone();
    let (model, mut next) = served(model);
    assert_eq!(taken(&mut next), [(0, IO_RES_OK)]);
    assert_eq!(
        (next.descriptor(0).start_sector, model.io(late).result),
        (5, None)
    );
}

/// A driver that only holds back ends no idle tag and keeps the requests that the server kept.
#[test]
fn model_hold_back_leaves_requests_to_the_next_server() {
    let (model, mut channel) = served(Model::new(2));
    let kept = model.request(Io::new(op::READ, 7, 1));
    assert_eq!(taken(&mut channel), [(0, IO_RES_OK)]);
    model.hold_back();
    let late = model.request(Io::new(op::READ, 5, 1));
    assert_eq!(taken(&mut channel), []);
    assert_eq!(model.server_gone(), 1);
    let (model, mut next) = served(model);
    assert_eq!(taken(&mut next), [(0, IO_RES_OK), (1, IO_RES_OK)]);
    assert_eq!(
        [0, 1].map(|tag| next.descriptor(tag).start_sector),
        [kept, late].map(|number| model.io(number).sector)
    );
}

/// The server gives two queues of one ring the same slots of the ring's buffer table.
#[test]
fn model_reports_two_queues_that_share_a_buffer_slot() {
    let world = simulator::SimWorld::new(1, simulator::Profile::IMMEDIATE);
    let (_cx, tags) = world.context_with_tags(8, 4, BYTES, true);
    let table = RingTable::new(&Rc::new(tags), 4);
    for (second_place, fine) in [(1, true), (0, false)] {
        let queues = [Model::new(1), Model::new(1)];
        let mut channels: Vec<ModelChannel> = Vec::new();
        for (model, place) in queues.iter().zip([0, second_place]) {
            model.register_with(&table);
            let mut channel = model.channel(place);
            channel.fetch(0).expect("a slot");
            model.end_recovery();
            model.request(Io::new(op::READ, 0, 1));
            channels.push(channel);
        }
        let told = queues[1].take_fault();
        assert_eq!(told.is_none(), fine, "{told:?}");
        if fine {
            for channel in &mut channels {
                channel.commit_and_fetch(0, 512).expect("a slot");
            }
        } else {
            assert!(
                told.expect("a fault")
                    .contains("has the pages of request 0 of the ring's queue")
            );
        }
    }
}

#[test]
fn model_shuffle_is_decided_by_its_seed() {
    let tags = |seed| {
        let (model, mut channel) = served(Model::new(8));
        model.shuffle(seed);
        for sector in 0..8 {
            model.request(Io::new(op::READ, sector, 1));
        }
        taken(&mut channel)
            .iter()
            .map(|&(tag, _)| tag)
            .collect::<Vec<_>>()
    };
    assert_eq!(tags(1), tags(1));
    assert_ne!(tags(1), tags(2));
}
