//! The queue against drivers that do as they should and drivers that don't.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use ringdisk_driver::{Desc, Driver, INDIRECT, NEXT, WRITE};
use ringdisk_gen::Random;
use vm_memory::{MmapRegion, VolatileMemory};

use crate::testing::{BASE, DATA, END, REGION_BYTES, TABLE, driver, guest_memory};

const SIZE: u16 = 16;

fn setup(driver: &Driver) -> QueueSetup {
    QueueSetup {
        size: driver.size,
        addresses: driver.rings.into(),
        next_available: 0,
        event_idx: true,
        indirect: true,
    }
}

fn pair() -> (Driver, Virtqueue) {
    let driver = driver(guest_memory(None), 0, SIZE);
    let queue = Virtqueue::new(driver.memory.clone(), &setup(&driver)).expect("a queue");
    (driver, queue)
}

/// Takes the only chain there is.
fn take(queue: &mut Virtqueue) -> Result<(u16, Chain), QueueError> {
    assert_eq!(queue.available(), Ok(1));
    let mut chain = Chain::default();
    let head = queue.take(&mut chain)?;
    Ok((head, chain))
}

#[test]
fn take_follows_readable_and_writable_buffers() {
    let (mut driver, mut queue) = pair();
    driver.write(DATA, &[1; 16]);
    let head = driver.chain(&[(DATA, 16, false), (DATA + 64, 32, false), (DATA + 512, 65, true)]);
    driver.make_available(head);
    let (found, mut chain) = take(&mut queue).expect("a chain");
    assert_eq!(found, head);
    assert_eq!((chain.readable_bytes(), chain.writable_bytes()), (48, 65));
    let status = chain.take_status().expect("a status");
    assert_eq!(
        chain.take_header(queue.memory()),
        Some([0x0101_0101_0101_0101; 2])
    );
    assert_eq!((chain.readable_bytes(), chain.writable_bytes()), (32, 64));
    assert_eq!(queue.memory().buffer(chain.writable()).len(), 64);
    queue.memory().write_byte(status, 7);
    assert_eq!(driver.read(DATA + 512 + 64, 1), [7]);
}

#[test]
fn take_header_joins_a_header_split_anywhere() {
    let header: Vec<u8> = (1..=16).collect();
    let expected = [0x0807_0605_0403_0201, 0x100f_0e0d_0c0b_0a09];
    for cut in 1..16 {
        for odd in [0, 3] {
            let (mut driver, mut queue) = pair();
            driver.write(DATA + odd, &header[..cut]);
            driver.write(DATA + 256, &header[cut..]);
            driver.write(DATA + 256 + 16 - cut as u64, &[0xee; 4]);
            // The second buffer holds the rest of the header and four bytes of data.
            let rest = (16 - cut) as u32 + 4;
            let head = driver.chain(&[
                (DATA + odd, cut as u32, false),
                (DATA + 256, rest, false),
                (DATA + 512, 1, true),
            ]);
            driver.make_available(head);
            let (_, mut chain) = take(&mut queue).expect("a chain");
            assert_eq!(chain.take_header(queue.memory()), Some(expected), "cut at {cut}");
            assert_eq!(chain.readable_bytes(), 4);
            let mut data = [0; 4];
            queue
                .memory()
                .buffer(chain.readable())
                .memory()
                .expect("a guest's")
                .read(0, &mut data);
            assert_eq!(data, [0xee; 4]);
        }
    }
}

#[test]
fn buffer_may_span_two_adjacent_regions() {
    let (mut driver, mut queue) = pair();
    let edge = BASE + REGION_BYTES;
    driver.write(edge - 2, &[1, 2, 3, 4]);
    let head = driver.chain(&[(edge - 2, 4, false), (edge - 1, 2, true)]);
    driver.make_available(head);
    let (_, mut chain) = take(&mut queue).expect("a chain");
    let mut bytes = [0; 4];
    queue
        .memory()
        .buffer(chain.readable())
        .memory()
        .expect("a guest's")
        .read(0, &mut bytes);
    assert_eq!(bytes, [1, 2, 3, 4]);
    let status = chain.take_status().expect("a status");
    queue.memory().write_byte(status, 9);
    assert_eq!(driver.read(edge - 2, 4), [1, 2, 9, 4]);
    assert_eq!(chain.writable_bytes(), 1);
}

#[test]
fn indirect_table_may_follow_descriptors_and_exceed_the_queue() {
    let (mut driver, mut queue) = pair();
    let count = u32::from(SIZE) * 2;
    driver.descriptor(0, Desc(DATA, 8, NEXT, 1));
    // Odd addresses are allowed for a table.
    let table = TABLE + 1;
    driver.descriptor(1, Desc(table, count * 16, INDIRECT | WRITE, 0));
    for index in 0..count as u16 {
        let last = u32::from(index) + 1 == count;
        let flags = WRITE | if last { 0 } else { NEXT };
        driver.descriptor_in(table, index, Desc(DATA + 4096, 2, flags, index + 1));
    }
    driver.make_available(0);
    let (_, chain) = take(&mut queue).expect("a chain");
    assert_eq!(
        (chain.readable_bytes(), chain.writable_bytes()),
        (8, 2 * u64::from(count))
    );
}

/// Each way to make a chain impossible to follow, and its error.
#[test]
fn take_names_what_breaks_a_chain() {
    type Case = (&'static str, fn(&Driver), QueueError);
    let cases: &[Case] = &[
        (
            "a loop of one",
            |driver| driver.descriptor(0, Desc(DATA, 1, NEXT, 0)),
            QueueError::TooLong { head: 0, limit: SIZE },
        ),
        (
            "a loop of two",
            |driver| {
                driver.descriptor(0, Desc(DATA, 1, NEXT, 5));
                driver.descriptor(5, Desc(DATA, 1, NEXT, 0));
            },
            QueueError::TooLong { head: 0, limit: SIZE },
        ),
        (
            "a successor outside the table",
            |driver| driver.descriptor(0, Desc(DATA, 1, NEXT, SIZE)),
            QueueError::DescriptorIndex {
                index: SIZE,
                size: SIZE as u32,
            },
        ),
        (
            "a loop in an indirect table",
            |driver| {
                driver.descriptor(0, Desc(TABLE, 32, INDIRECT, 0));
                driver.descriptor_in(TABLE, 0, Desc(DATA, 1, NEXT, 1));
                driver.descriptor_in(TABLE, 1, Desc(DATA, 1, NEXT, 0));
            },
            QueueError::TooLong {
                head: 0,
                limit: CHAIN_MAX,
            },
        ),
        (
            "a successor outside an indirect table",
            |driver| {
                driver.descriptor(0, Desc(TABLE, 32, INDIRECT, 0));
                driver.descriptor_in(TABLE, 0, Desc(DATA, 1, NEXT, 2));
            },
            QueueError::DescriptorIndex { index: 2, size: 2 },
        ),
        (
            "an indirect table in an indirect table",
            |driver| {
                driver.descriptor(0, Desc(TABLE, 16, INDIRECT, 0));
                driver.descriptor_in(TABLE, 0, Desc(TABLE, 16, INDIRECT, 0));
            },
            QueueError::IndirectNested { head: 0 },
        ),
        (
            "a successor of an indirect table",
            |driver| driver.descriptor(0, Desc(TABLE, 16, INDIRECT | NEXT, 1)),
            QueueError::IndirectHasNext { head: 0 },
        ),
        (
            "an empty indirect table",
            |driver| driver.descriptor(0, Desc(TABLE, 0, INDIRECT, 0)),
            QueueError::IndirectLength { head: 0, len: 0 },
        ),
        (
            "half a descriptor in an indirect table",
            |driver| driver.descriptor(0, Desc(TABLE, 24, INDIRECT, 0)),
            QueueError::IndirectLength { head: 0, len: 24 },
        ),
        (
            "an indirect table that ends outside memory",
            |driver| driver.descriptor(0, Desc(END - 16, 32, INDIRECT, 0)),
            QueueError::IndirectOutsideMemory {
                head: 0,
                address: END - 16,
            },
        ),
        (
            "an indirect table at the end of the address space",
            |driver| driver.descriptor(0, Desc(u64::MAX - 15, 16, INDIRECT, 0)),
            QueueError::IndirectOutsideMemory {
                head: 0,
                address: u64::MAX - 15,
            },
        ),
    ];
    for (name, lay_out, expected) in cases {
        let (mut driver, mut queue) = pair();
        lay_out(&driver);
        driver.make_available(0);
        assert_eq!(take(&mut queue).map(|(head, _)| head), Err(*expected), "{name}");
    }
}

/// Each defect inside a chain whose end is known: the chain can still be answered.
#[test]
fn defective_chain_keeps_its_status_byte() {
    let status = (DATA, 1, true);
    let outside = |address, len| ChainDefect::OutsideMemory { address, len };
    type Case = (&'static str, (u64, u32, bool), ChainDefect);
    let cases: &[Case] = &[
        ("below memory", (0, 16, false), outside(0, 16)),
        ("above memory", (END, 1, true), outside(END, 1)),
        ("across the end", (END - 8, 16, true), outside(END - 8, 16)),
        ("across the start", (BASE - 1, 2, true), outside(BASE - 1, 2)),
        ("around zero", (u64::MAX, 2, true), outside(u64::MAX, 2)),
        (
            "as long as can be",
            (BASE, u32::MAX, true),
            outside(BASE, u32::MAX),
        ),
        ("empty, readable", (DATA, 0, false), ChainDefect::ZeroLength),
        ("empty, writable", (DATA, 0, true), ChainDefect::ZeroLength),
    ];
    for (name, buffer, expected) in cases {
        let (mut driver, mut queue) = pair();
        let head = driver.chain(&[*buffer, status]);
        driver.make_available(head);
        let (_, mut chain) = take(&mut queue).expect("a chain");
        assert_eq!(chain.defect(), Some(*expected), "{name}");
        let place = chain.take_status().expect("a status byte");
        queue.memory().write_byte(place, 1);
        assert_eq!(driver.read(DATA, 1), [1], "{name}");
    }

    let (mut driver, mut queue) = pair();
    let head = driver.chain(&[(DATA, 8, true), (DATA, 8, false), status]);
    driver.make_available(head);
    let (_, mut chain) = take(&mut queue).expect("a chain");
    assert_eq!(chain.defect(), Some(ChainDefect::ReadableAfterWritable));
    assert!(chain.take_status().is_some());
}

#[test]
fn take_status_needs_a_writable_last_byte() {
    for end in [(DATA, 16, false), (DATA, 0, true), (END, 1, true)] {
        let (mut driver, mut queue) = pair();
        let head = driver.chain(&[(DATA, 16, true), end]);
        driver.make_available(head);
        let (_, mut chain) = take(&mut queue).expect("a chain");
        assert_eq!(chain.take_status(), None, "{end:?}");
    }
}

#[test]
fn queue_refuses_a_jumping_index_and_a_head_outside() {
    let (mut driver, queue) = pair();
    driver.available = SIZE + 1;
    driver.publish();
    let jumped = QueueError::AvailableIndex {
        found: SIZE + 1,
        expected: 0,
        size: SIZE,
    };
    assert_eq!(queue.available(), Err(jumped));
    driver.available = u16::MAX;
    driver.publish();
    assert!(queue.available().is_err(), "an index that goes back");

    let (mut driver, mut queue) = pair();
    driver.make_available(SIZE);
    let outside = QueueError::DescriptorIndex {
        index: SIZE,
        size: SIZE.into(),
    };
    assert_eq!(take(&mut queue).map(|(head, _)| head), Err(outside));
}

#[test]
fn take_refuses_indirect_tables_not_negotiated() {
    let mut driver = driver(guest_memory(None), 0, SIZE);
    let mut setup = setup(&driver);
    setup.indirect = false;
    let mut queue = Virtqueue::new(driver.memory.clone(), &setup).expect("a queue");
    driver.descriptor(0, Desc(TABLE, 16, INDIRECT, 0));
    driver.make_available(0);
    let error = take(&mut queue).map(|(head, _)| head);
    assert_eq!(error, Err(QueueError::IndirectNotNegotiated { head: 0 }));
}

#[test]
fn new_refuses_rings_of_wrong_place_alignment_or_size() {
    let driver = driver(guest_memory(None), 0, SIZE);
    let start = |change: &dyn Fn(&mut QueueSetup)| {
        let mut setup = setup(&driver);
        change(&mut setup);
        Virtqueue::new(driver.memory.clone(), &setup).map(|_| ())
    };
    assert_eq!(start(&|_| {}), Ok(()));
    for size in [0, 3, 40_000] {
        assert_eq!(
            start(&|setup| setup.size = size),
            Err(SetupError::Size { size: size.into() })
        );
    }
    let outside = |part, address, len| SetupError::OutsideMemory { part, address, len };
    assert_eq!(
        start(&|setup| setup.addresses.descriptors = END - 16),
        Err(outside("descriptor table", END - 16, 256))
    );
    assert_eq!(
        start(&|setup| setup.addresses.available = 0),
        Err(outside("available ring", 0, 38))
    );
    // Two mappings are not one, even if the guest sees them side by side.
    let edge = BASE + REGION_BYTES - 4;
    assert_eq!(
        start(&|setup| setup.addresses.used = edge),
        Err(outside("used ring", edge, 134))
    );
    for (part, offset, align) in [
        ("descriptor table", 8, 16),
        ("available ring", 1, 2),
        ("used ring", 2, 4),
    ] {
        let change = |setup: &mut QueueSetup| match part {
            "descriptor table" => setup.addresses.descriptors += offset,
            "available ring" => setup.addresses.available += offset,
            _ => setup.addresses.used += offset,
        };
        let error = start(&change).expect_err("misaligned");
        assert!(
            matches!(error, SetupError::Misaligned { part: found, align: needs, .. } if (found, needs) == (part, align)),
            "{error}"
        );
    }
}

#[test]
fn publish_shows_all_used_entries_at_once() {
    let (mut driver, mut queue) = pair();
    queue.give_back(3, 10);
    queue.give_back(5, 20);
    assert_eq!(driver.take_used(), None);
    assert_eq!(queue.unpublished(), 2);
    queue.publish();
    assert_eq!(queue.unpublished(), 0);
    assert_eq!(driver.take_used(), Some((3, 10)));
    assert_eq!(driver.take_used(), Some((5, 20)));
    assert_eq!(driver.take_used(), None);
}

#[test]
fn publish_notifies_at_start_and_past_the_event_index() {
    let (driver, mut queue) = pair();
    driver.set_used_event(0x8000);
    let mut round = |count| {
        (0..count).for_each(|_| queue.give_back(0, 0));
        queue.publish()
    };
    assert!(round(1), "the first round after a start always notifies");
    assert!(!round(3));
    driver.set_used_event(4);
    assert!(round(1), "the entry asked for");
    assert!(!round(1), "an event that has passed");
    driver.set_used_event(8);
    assert!(round(SIZE), "the entry asked for is inside the round");
    assert!(!round(0), "nothing was given back");
}

#[test]
fn flags_decide_notifications_without_event_indices() {
    let mut driver = driver(guest_memory(None), 0, SIZE);
    let mut setup = setup(&driver);
    setup.event_idx = false;
    let mut queue = Virtqueue::new(driver.memory.clone(), &setup).expect("a queue");
    assert_eq!(driver.used_flags(), 1, "no kicks while it polls");
    assert_eq!(queue.enable_notifications(), Ok(false));
    assert_eq!(driver.used_flags(), 0);
    driver.make_available(0);
    assert_eq!(queue.enable_notifications(), Ok(true));
    queue.disable_notifications();
    assert_eq!(driver.used_flags(), 1);
    queue.give_back(0, 0);
    assert!(queue.publish());
    driver.write(driver.rings.available, &[1]);
    queue.give_back(0, 0);
    assert!(!queue.publish());
}

#[test]
fn enable_notifications_finds_a_chain_made_just_before() {
    let (mut driver, mut queue) = pair();
    assert_eq!(queue.enable_notifications(), Ok(false));
    assert_eq!(driver.avail_event(), 0);
    let head = driver.chain(&[(DATA, 16, true)]);
    driver.make_available(head);
    assert_eq!(queue.enable_notifications(), Ok(true));
    take(&mut queue).expect("a chain");
    assert_eq!(queue.enable_notifications(), Ok(false));
    assert_eq!(driver.avail_event(), 1);
}

/// Fails if the chain that comes after a sleep is kicked for although the worker is awake.
#[test]
fn disabled_notifications_want_no_kick_with_event_indices() {
    let (mut driver, mut queue) = pair();
    let mut chain = || {
        let head = driver.chain(&[(DATA, 16, true)]);
        driver.stage(head);
        driver.publish()
    };
    assert!(!chain(), "a queue that starts is looked at");
    take(&mut queue).expect("a chain");
    for _ in 0..3 {
        assert_eq!(queue.enable_notifications(), Ok(false));
        queue.disable_notifications();
        assert!(!chain(), "the worker is awake");
        take(&mut queue).expect("a chain");
        assert_eq!(queue.enable_notifications(), Ok(false));
        assert!(chain(), "the worker sleeps");
        queue.disable_notifications();
        take(&mut queue).expect("a chain");
    }
}

#[test]
fn queue_indices_wrap_around() {
    let mut driver = driver(guest_memory(None), 0, SIZE);
    let mut setup = setup(&driver);
    setup.next_available = u16::MAX - 1;
    driver.start_at(u16::MAX - 1);
    let mut queue = Virtqueue::new(driver.memory.clone(), &setup).expect("a queue");
    driver.set_used_event(u16::MAX);
    for round in 0..4 {
        let head = driver.chain(&[(DATA, 16, true)]);
        driver.make_available(head);
        let (found, _) = take(&mut queue).expect("a chain");
        queue.give_back(found, round);
        queue.publish();
        assert_eq!(driver.take_used(), Some((head.into(), round)));
    }
    assert_eq!(queue.next_available(), 2);
}

/// A descriptor that is often nearly right.
pub(crate) fn nearly_right(random: &mut Random) -> Desc {
    let edge = BASE + REGION_BYTES;
    let address = match random.below(8) {
        0 => random.draw(),
        1 => random.pick(&[0, BASE - 1, END - 1, END, u64::MAX, edge - 3]),
        2 => TABLE + random.below(64),
        _ => DATA + random.below(65536),
    };
    let len = match random.below(8) {
        0 => random.draw() as u32,
        1 => random.pick(&[0, 1, 15, 17, u32::MAX]),
        2 => 16 * random.below(8) as u32,
        3 => 512 * random.below(64) as u32,
        _ => random.pick(&[16, 1, 512, 4096]),
    };
    let flags = match random.below(8) {
        0 => random.draw() as u16,
        1 => INDIRECT,
        _ => random.pick(&[0, NEXT, NEXT, WRITE, NEXT | WRITE]),
    };
    let next = match random.below(8) {
        0 => random.draw() as u16,
        _ => random.below(u64::from(SIZE)) as u16,
    };
    Desc(address, len, flags, next)
}

/// Taking chains ends, and every slice lies inside guest memory (`QueueMemory` panics otherwise).
#[test]
fn take_stays_inside_memory_for_random_rings() {
    for seed in 1..=300 {
        let mut random = Random::new(seed);
        let (mut driver, mut queue) = pair();
        let mut chain = Chain::default();
        for _ in 0..200 {
            for index in 0..SIZE {
                if random.below(4) == 0 {
                    driver.descriptor(index, nearly_right(&mut random));
                }
                driver.descriptor_in(TABLE, index, nearly_right(&mut random));
            }
            let heads = random.below(4) as u16;
            for _ in 0..heads {
                let head = random.below(u64::from(SIZE) + 1) as u16;
                driver.stage(head);
            }
            driver.publish();
            let count = queue
                .available()
                .unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            assert_eq!(count, heads, "seed {seed}");
            for _ in 0..count {
                if let Ok(head) = queue.take(&mut chain) {
                    let status = chain.take_status();
                    let header = chain.take_header(queue.memory());
                    let defect = chain.defect().is_some();
                    if let Some(status) = status {
                        queue.memory().write_byte(status, 0xaa);
                    }
                    if !defect {
                        let buffer = queue.memory().buffer(chain.readable());
                        assert_eq!(
                            buffer.len() as u64,
                            chain.readable_bytes(),
                            "seed {seed}: {header:?}"
                        );
                        let buffer = queue.memory().buffer(chain.writable());
                        assert_eq!(buffer.len() as u64, chain.writable_bytes(), "seed {seed}");
                        let memory = buffer.memory().expect("a guest's memory");
                        memory.fill(0, buffer.len().min(4096), 0x55);
                    }
                    queue.give_back(head, 0);
                    queue.publish();
                } else {
                    // A broken queue stops; this one goes on, with the chain left out.
                    queue.skip_for_test();
                }
            }
        }
    }
}

#[test]
fn every_write_to_the_used_ring_is_logged() {
    let (mut driver, mut queue) = pair();
    // Another address than the ring's, as the client may say.
    let used_ring = 9 * 4096 + 8;
    let log = Arc::new(DirtyLog::new(MmapRegion::new(4096).expect("a mapping")));
    let bits = || log.map().get_atomic_ref::<AtomicU64>(0).expect("a word");
    let marked = || bits().swap(0, Ordering::SeqCst) == 1 << 9;
    queue.log_writes(QueueLog {
        log: Arc::clone(&log),
        used_ring,
    });
    assert!(marked(), "what was written before");
    queue.enable_notifications().expect("a sound ring");
    assert!(marked());
    queue.disable_notifications();
    assert!(marked());
    let head = driver.chain(&[(DATA, 16, true)]);
    driver.make_available(head);
    let (head, _) = take(&mut queue).expect("a chain");
    assert!(!marked());
    queue.give_back(head, 0);
    queue.publish();
    assert!(marked());
}
