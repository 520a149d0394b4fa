//! Kicks and interrupts, and chains that break a queue.

use ringdisk_driver::blk::{F_EVENT_IDX, FLUSH, IN, OK, header};
use ringdisk_driver::{Desc, Driver, INDIRECT, NEXT, WRITE};

use super::{ALL, Guest, PATIENCE, QUEUE_SIZE, SILENCE, Transport, holds_within, with_queues};
use crate::testing::{DATA, TABLE};

pub(crate) fn interrupt_comes_when_the_event_index_is_passed<T: Transport>() {
    let mut guest = Guest::<T>::new();
    // The first answer after a start always interrupts.
    assert_eq!(guest.ask(FLUSH, 0, &[]), (OK, 1));
    assert!(guest.transport.is_interrupted(0, PATIENCE));
    for round in 0..100u64 {
        // The next interrupt is wanted when the last answer of this round has come.
        let wanted = guest.driver(0).used.wrapping_add(19);
        guest.driver(0).set_used_event(wanted);
        for request in 0..20 {
            let sector = (round + request) % 2048;
            guest.driver(0).request(IN, sector, &[(DATA, 512, true)]);
        }
        guest.publish(0);
        assert!(guest.transport.is_interrupted(0, PATIENCE), "round {round}");
        assert_eq!(guest.driver(0).used_index(), wanted.wrapping_add(1));
        for _ in 0..20 {
            assert_eq!(guest.answer(0).1, 513, "round {round}");
        }
    }
    let far = guest.driver(0).used.wrapping_add(0x8000);
    guest.driver(0).set_used_event(far);
    assert_eq!(guest.ask(FLUSH, 0, &[]), (OK, 1));
    assert!(!guest.transport.is_interrupted(0, SILENCE), "not asked for");
}

pub(crate) fn interrupt_follows_the_flag_without_event_indices<T: Transport>() {
    let mut guest = Guest::<T>::with(ALL & !F_EVENT_IDX, 1);
    for _ in 0..3 {
        guest.driver(0).want_interrupt();
        assert_eq!(guest.ask(FLUSH, 0, &[]), (OK, 1));
        assert!(guest.transport.is_interrupted(0, PATIENCE));
        guest.driver(0).want_no_interrupt();
        assert_eq!(guest.ask(FLUSH, 0, &[]), (OK, 1));
        assert!(!guest.transport.is_interrupted(0, SILENCE), "not asked for");
    }
}

/// A kick that the device says it does not want must not be missed.
pub(crate) fn queue_needs_only_the_kicks_it_asked_for<T: Transport>() {
    for features in [ALL, ALL & !F_EVENT_IDX] {
        let mut guest = Guest::<T>::with(features, 1);
        for round in 0..300 {
            let head = guest.driver(0).request(FLUSH, 0, &[]);
            if guest.driver(0).publish() {
                guest.transport.kick(0);
            }
            assert_eq!(guest.answer(0), (head.into(), 1), "round {round}");
            if round % 100 == 0 {
                // It goes to sleep.
                std::thread::sleep(SILENCE);
            }
        }
    }
}

/// As many requests in flight as there are descriptors, each in an indirect table.
pub(crate) fn full_queue_is_served<T: Transport>() {
    let mut guest = Guest::<T>::new();
    guest.disk.hold();
    guest.write(DATA, &header(IN, 0));
    let driver = guest.driver(0);
    driver.descriptor_in(TABLE, 0, Desc(DATA, 16, NEXT, 1));
    driver.descriptor_in(TABLE, 1, Desc(DATA + 4096, 513, WRITE, 0));
    for head in 0..QUEUE_SIZE {
        driver.descriptor(head, Desc(TABLE, 32, INDIRECT, 0));
        driver.stage(head);
    }
    guest.publish(0);
    guest.wait_held(QUEUE_SIZE.into());
    guest.disk.release();
    let mut heads: Vec<u32> = (0..QUEUE_SIZE).map(|_| guest.answer(0).0).collect();
    heads.sort_unstable();
    assert_eq!(heads, (0..u32::from(QUEUE_SIZE)).collect::<Vec<_>>());
    assert_eq!(guest.driver(0).take_used(), None);
}

/// Chains that no device can answer; the other queue runs on.
pub(crate) fn broken_queue_is_reported_and_takes_nothing_more<T: Transport>() {
    type Break = fn(&mut Driver);
    let breaks: [(&str, Break); 4] = [
        ("an index that jumps", |driver| {
            driver.available = driver.available.wrapping_add(1000);
        }),
        ("a head outside the table", |driver| driver.stage(QUEUE_SIZE)),
        ("a chain without a status", |driver| {
            let head = driver.chain(&[(DATA, 16, false)]);
            driver.stage(head);
        }),
        ("a loop", |driver| {
            driver.descriptor(60, Desc(DATA, 16, NEXT, 60));
            driver.stage(60);
        }),
    ];
    for (name, break_it) in breaks {
        let mut guest = Guest::<T>::with(with_queues(ALL, 2), 2);
        assert_eq!(guest.ask(FLUSH, 0, &[]), (OK, 1), "{name}");
        break_it(guest.driver(0));
        guest.publish(0);
        assert!(guest.transport.is_broken(0, PATIENCE), "{name} is not told");
        guest.submit(0, FLUSH, 0, &[]);
        assert!(
            !holds_within(SILENCE, || guest.driver(0).take_used().is_some()),
            "{name}: the queue goes on"
        );
        assert_eq!(guest.ask_on(1, FLUSH, 0, &[]), (OK, 1), "{name}");
    }
}

pub(crate) fn repeated_chain_breaks_the_queue_and_is_answered_once<T: Transport>() {
    let mut guest = Guest::<T>::new();
    guest.disk.hold();
    let head = guest.submit(0, IN, 0, &[(DATA, 512, true)]);
    guest.wait_held(1);
    guest.driver(0).stage(head);
    guest.publish(0);
    assert!(guest.transport.is_broken(0, PATIENCE));
    guest.disk.release();
    assert_eq!(guest.answer(0), (head.into(), 513));
    assert_eq!(guest.driver(0).status(head), OK);
    assert!(
        !holds_within(SILENCE, || guest.driver(0).take_used().is_some()),
        "it was answered twice"
    );
}
