//! Features, configuration space, cache mode, resets.

use block::Op;
use ringdisk_driver::blk::{
    CONFIG_BYTES, DISCARD, F_CONFIG_WCE, F_DISCARD, F_FLUSH, F_MQ, F_RO, F_VERSION_1, F_WRITE_ZEROES, FLUSH,
    OK, OUT, UNSUPP, WRITE_ZEROES, WRITEBACK_AT,
};

use super::{ALL, Grows, Guest, QUEUE_SIZE, SILENCE, Transport, holds_within, with_queues};
use crate::testing::{DATA, DISK_BYTES, MemDisk};

pub(crate) fn features_follow_the_disk<T: Transport>() {
    let mut guest = Guest::<T>::before(MemDisk::new(), 1);
    let offered = guest.transport.offered();
    assert_eq!(offered & ALL, ALL);
    assert_eq!(offered & (F_RO | F_MQ), 0, "neither read-only nor several queues");
    let poor = MemDisk::with(|info| {
        info.read_only = true;
        info.discard = false;
    });
    let mut guest = Guest::<T>::before(poor, 2);
    let offered = guest.transport.offered();
    assert_eq!(offered & (F_RO | F_MQ), F_RO | F_MQ);
    assert_eq!(offered & (F_DISCARD | F_WRITE_ZEROES), 0);
}

pub(crate) fn features_not_offered_are_refused<T: Transport>() {
    let mut guest = Guest::<T>::before(MemDisk::with(|info| info.discard = false), 1);
    for feature in [F_DISCARD, F_MQ, F_RO, 1 << 60] {
        assert!(!guest.transport.start(F_VERSION_1 | feature), "{feature:#x}");
    }
    guest.start(F_VERSION_1 | F_FLUSH);
    assert_eq!(guest.ask(FLUSH, 0, &[]), (OK, 1));
}

fn word(config: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(config[at..at + 4].try_into().expect("four bytes"))
}

pub(crate) fn config_follows_the_disk<T: Transport>() {
    let mut guest = Guest::<T>::before(MemDisk::new(), 2);
    let config = guest.transport.config();
    assert_eq!(config.len(), CONFIG_BYTES);
    assert_eq!(config[..8], (DISK_BYTES / 512).to_le_bytes(), "capacity");
    assert_eq!(word(&config, 12), u32::from(QUEUE_SIZE) - 2, "seg_max");
    assert_eq!(word(&config, 20), 512, "blk_size");
    assert_eq!(config[24], 3, "physical_block_exp of 4096 bytes");
    assert_eq!(config[26..28], [8, 0], "min_io_size");
    assert_eq!(word(&config, 28), 128, "opt_io_size of 64 KiB");
    assert_eq!(config[32], 1, "writeback");
    assert_eq!(config[34..36], [2, 0], "num_queues");
    assert_eq!(
        [36, 40, 44].map(|at| word(&config, at)),
        [1 << 20, 32, 128],
        "discard"
    );
    assert_eq!(
        [48, 52].map(|at| word(&config, at)),
        [1 << 20, 32],
        "write-zeroes"
    );
    assert_eq!(config[56..], [1, 0, 0, 0], "write_zeroes_may_unmap");
    let poor = MemDisk::with(|info| info.discard = false);
    let config = Guest::<T>::before(poor, 1).transport.config();
    assert_eq!(config[36..48], [0; 12], "no discard");
    assert_eq!(config[34..36], [1, 0], "num_queues");
}

pub(crate) fn config_is_read_only_except_the_cache_mode<T: Transport>() {
    for (features, writable) in [(ALL, true), (ALL & !F_CONFIG_WCE, false)] {
        let mut guest = Guest::<T>::with(features, 1);
        let before = guest.transport.config();
        for (offset, bytes) in [(0, &[0xFF_u8; 8][..]), (20, &[0; 4]), (WRITEBACK_AT, &[2])] {
            guest.transport.write_config(offset, bytes);
            assert_eq!(guest.transport.config(), before, "{bytes:?} at {offset}");
        }
        guest.transport.write_config(WRITEBACK_AT, &[0]);
        let mode = guest.transport.config()[WRITEBACK_AT as usize];
        assert_eq!(mode == 0, writable, "features {features:#x}");
        assert_eq!(guest.ask(FLUSH, 0, &[]), (OK, 1), "no reset is needed");
    }
}

pub(crate) fn cache_mode_decides_which_writes_are_durable<T: Transport>() {
    let write = |fua| (Op::Write { fua }, 0, 512);
    let data = [(DATA, 512, false)];
    for (features, fua) in [
        (ALL, false),
        (ALL & !F_CONFIG_WCE, false),
        (ALL & !F_CONFIG_WCE & !F_FLUSH, true),
        // It chose nothing and cannot flush.
        (ALL & !F_FLUSH, true),
    ] {
        let mut guest = Guest::<T>::with(features, 1);
        assert_eq!(guest.ask(OUT, 0, &data), (OK, 1));
        assert_eq!(guest.disk.log(), [write(fua)], "features {features:#x}");
    }
    let mut guest = Guest::<T>::new();
    assert_eq!(guest.ask(OUT, 0, &data), (OK, 1));
    // What was answered before counts as durable from now on.
    guest.transport.write_config(WRITEBACK_AT, &[0]);
    assert_eq!(guest.disk.log(), [write(false), (Op::Flush, 0, 0)]);
    assert_eq!(guest.transport.config()[WRITEBACK_AT as usize], 0);
    assert_eq!(guest.ask(OUT, 0, &data), (OK, 1));
    let segments = guest.segments(&[(0, 1, 0)]);
    assert_eq!(guest.ask(WRITE_ZEROES, 0, &[segments]), (OK, 1));
    guest.transport.write_config(WRITEBACK_AT, &[1]);
    assert_eq!(guest.ask(OUT, 0, &data), (OK, 1));
    let (unmap, fua) = (false, true);
    let zeroes = (Op::WriteZeroes { unmap, fua }, 0, 512);
    assert_eq!(guest.disk.log()[2..], [write(true), zeroes, write(false)]);
}

/// Virtio 1.2, "5.2.5.2": a driver that may choose the mode and cannot flush begins in writethrough.
pub(crate) fn cache_mode_is_writethrough_without_flush<T: Transport>() {
    let absent = F_FLUSH | F_CONFIG_WCE;
    for (without, mode) in [(0, 1), (F_FLUSH, 0), (F_CONFIG_WCE, 1), (absent, 1)] {
        let mut guest = Guest::<T>::with(ALL & !without, 1);
        let config = guest.transport.config();
        assert_eq!(config[WRITEBACK_AT as usize], mode, "without {without:#x}");
    }
}

pub(crate) fn reset_drains_requests_in_flight<T: Transport + Send>() {
    let mut guest = Guest::<T>::new();
    guest.disk.hold();
    let head = guest.submit(0, OUT, 2, &[(DATA, 512, false)]);
    guest.wait_held(1);
    let (transport, disk) = (&mut guest.transport, &guest.disk);
    std::thread::scope(|scope| {
        let reset = scope.spawn(|| {
            transport.reset();
            // The guest may use its memory for something else from now on.
            transport.driver(0).take_used()
        });
        std::thread::sleep(SILENCE);
        assert!(!reset.is_finished(), "the request has not ended");
        disk.release();
        assert_eq!(reset.join().expect("no panic"), Some((head.into(), 1)));
    });
}

pub(crate) fn reset_device_starts_over<T: Transport>() {
    let mut guest = Guest::<T>::new();
    for _ in 0..3 {
        assert_eq!(guest.ask(FLUSH, 0, &[]), (OK, 1));
    }
    guest.transport.reset();
    guest.submit(0, FLUSH, 0, &[]);
    assert!(
        !holds_within(SILENCE, || guest.driver(0).take_used().is_some()),
        "a queue runs after a reset"
    );
    assert_eq!(guest.disk.log().len(), 3);
    // The next driver accepts something else, and begins in empty rings.
    guest.start(ALL & !F_DISCARD);
    assert_eq!(guest.ask(FLUSH, 0, &[]), (OK, 1));
    let segments = guest.segments(&[(0, 1, 0)]);
    assert_eq!(guest.ask(DISCARD, 0, &[segments]), (UNSUPP, 1));
    assert_eq!(guest.disk.log().len(), 4);
}

/// Not for vhost-user, whose client keeps a copy of the mode: `vhost_user/state_tests.rs`.
pub(crate) fn reset_restores_writeback<T: Transport>() {
    let mut guest = Guest::<T>::new();
    guest.transport.write_config(WRITEBACK_AT, &[0]);
    guest.transport.reset();
    assert_eq!(guest.transport.config()[WRITEBACK_AT as usize], 1);
    guest.start(ALL);
    assert_eq!(guest.ask(OUT, 0, &[(DATA, 512, false)]), (OK, 1));
    assert_eq!(guest.disk.log().last(), Some(&(Op::Write { fua: false }, 0, 512)));
}

pub(crate) fn grown_disk_is_shown_and_writable<T: Grows>() {
    let mut guest = Guest::<T>::before(MemDisk::new(), 2);
    guest.start(with_queues(ALL, 2));
    let end = DISK_BYTES / 512;
    let data = [(DATA, 512, false)];
    assert_ne!(guest.ask(OUT, end, &data).0, OK, "behind the end");
    guest.transport.grow(&guest.disk, 2 * DISK_BYTES);
    assert_eq!(guest.transport.config()[..8], (2 * end).to_le_bytes());
    for (queue, sector) in [(0, end), (1, 2 * end - 1)] {
        assert_eq!(guest.ask_on(queue, OUT, sector, &data), (OK, 1));
    }
    assert_ne!(guest.ask(OUT, 2 * end, &data).0, OK, "behind the new end");
    let segments = guest.segments(&[(end, 8, 0)]);
    assert_eq!(guest.ask(WRITE_ZEROES, 0, &[segments]), (OK, 1));
}
