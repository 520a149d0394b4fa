//! Requests of each type: data, status, used length.

use std::sync::Arc;

use block::file::{FileOptions, ImageFile};
use block::raw::RawDisk;
use block::ring::RingKind;
use block::{IoError, Op};
use ringdisk_driver::blk::{
    DISCARD, F_DISCARD, F_FLUSH, F_RO, F_VERSION_1, FLUSH, GET_ID, IN, IOERR, NO_STATUS, OK, OUT, UNSUPP,
    WRITE_ZEROES, header,
};
use ringdisk_driver::{Desc, INDIRECT, NEXT, Part, WRITE};

use super::{ALL, Guest, SERIAL, SILENCE, Transport, holds_within, with_queues};
use crate::testing::{DATA, DISK_BYTES, END, MemDisk, RING_FEATURES, TABLE};

pub(crate) fn data_is_the_same_for_any_split_of_buffers<T: Transport>() {
    let mut guest = Guest::<T>::new();
    let data: Vec<u8> = (0..2048u32).map(|byte| (byte % 251) as u8).collect();
    guest.write(DATA, &data);
    let cut = [(DATA, 3, false), (DATA + 3, 1, false), (DATA + 4, 2044, false)];
    assert_eq!(guest.ask(OUT, 2, &cut), (OK, 1));
    assert_eq!(guest.disk.bytes(1024, 2048), data);
    let cut = [(DATA + 8192, 1000, true), (DATA + 16384, 1048, true)];
    assert_eq!(guest.ask(IN, 2, &cut), (OK, 2049));
    assert_eq!(guest.read(DATA + 8192, 1000), data[..1000]);
    assert_eq!(guest.read(DATA + 16384, 1048), data[1000..]);
}

pub(crate) fn indirect_request_with_status_after_data_is_served<T: Transport>() {
    let mut guest = Guest::<T>::new();
    guest.disk.set_bytes(512, &[7; 512]);
    guest.write(DATA, &header(IN, 1));
    guest.write(DATA + 4096 + 512, &[NO_STATUS]);
    let driver = guest.driver(0);
    driver.descriptor(9, Desc(TABLE, 32, INDIRECT, 0));
    driver.descriptor_in(TABLE, 0, Desc(DATA, 16, NEXT, 1));
    driver.descriptor_in(TABLE, 1, Desc(DATA + 4096, 513, WRITE, 0));
    driver.stage(9);
    guest.publish(0);
    assert_eq!(guest.answer(0), (9, 513));
    let mut expected = vec![7; 512];
    expected.push(OK);
    assert_eq!(guest.read(DATA + 4096, 513), expected);
}

pub(crate) fn flush_reaches_the_disk_and_get_id_returns_the_serial<T: Transport>() {
    let mut guest = Guest::<T>::new();
    assert_eq!(guest.ask(FLUSH, 0, &[]), (OK, 1));
    assert_eq!(guest.disk.log(), [(Op::Flush, 0, 0)]);
    guest.write(DATA, &[0xee; 32]);
    assert_eq!(guest.ask(GET_ID, 0, &[(DATA, 20, true)]), (OK, 21));
    let mut expected = SERIAL.as_bytes().to_vec();
    expected.resize(20, 0);
    expected.push(0xee);
    assert_eq!(guest.read(DATA, 21), expected);
    assert_eq!(guest.ask(GET_ID, 0, &[(DATA, 4, true)]), (OK, 5));
    assert_eq!(guest.ask(GET_ID, 0, &[]), (IOERR, 1));
}

pub(crate) fn malformed_requests_fail_without_reaching_the_disk<T: Transport>() {
    let mut guest = Guest::<T>::new();
    let read = |len| (DATA, len, true);
    let write = |len| (DATA, len, false);
    type Case = (&'static str, u32, u64, Vec<Part>, u8);
    let cases: &[Case] = &[
        ("no data to read", IN, 0, vec![], IOERR),
        ("no data to write", OUT, 0, vec![], IOERR),
        ("half a sector", IN, 0, vec![read(256)], IOERR),
        ("a sector and a byte", OUT, 0, vec![write(513)], IOERR),
        ("a sector that wraps around", IN, u64::MAX, vec![read(512)], IOERR),
        ("data in the wrong direction", IN, 0, vec![write(512)], IOERR),
        ("data to write that is writable", OUT, 0, vec![read(512)], IOERR),
        ("data outside memory", IN, 0, vec![(END, 512, true)], IOERR),
        ("data at zero", OUT, 0, vec![(0, 512, false)], IOERR),
        ("an empty buffer", IN, 0, vec![read(512), read(0)], IOERR),
        ("an unknown type", 77, 0, vec![read(512)], UNSUPP),
        ("an SCSI command", 2, 0, vec![read(512)], UNSUPP),
        ("a secure erase", 14, 0, vec![write(16)], UNSUPP),
        ("a discard of nothing", DISCARD, 0, vec![], IOERR),
        ("half a segment", WRITE_ZEROES, 0, vec![write(8)], IOERR),
        ("too many segments", DISCARD, 0, vec![write(33 * 16)], IOERR),
    ];
    guest.write(DATA, &[0; 1024]);
    for (name, kind, sector, data, status) in cases {
        assert_eq!(guest.ask(*kind, *sector, data), (*status, 1), "{name}");
    }
    assert_eq!(guest.disk.log(), []);
    assert!(!guest.transport.is_broken(0, SILENCE));
    // The disk itself refuses what lies behind its end.
    let end = DISK_BYTES / 512;
    assert_eq!(guest.ask(IN, end, &[read(512)]), (IOERR, 1));
    assert_eq!(guest.ask(IN, end - 1, &[read(512)]), (OK, 513));
}

pub(crate) fn short_header_fails<T: Transport>() {
    let mut guest = Guest::<T>::new();
    let driver = guest.driver(0);
    let head = driver.chain(&[(DATA, 15, false), (DATA + 64, 513, true)]);
    driver.stage(head);
    guest.publish(0);
    assert_eq!(guest.answer(0), (head.into(), 1));
    assert_eq!(guest.read(DATA + 64 + 512, 1), [IOERR]);
    assert_eq!(guest.disk.log(), []);
}

pub(crate) fn segments_run_separately_and_are_answered_once<T: Transport>() {
    let mut guest = Guest::<T>::new();
    guest.disk.set_bytes(0, &[9; 8192]);
    let segments = guest.segments(&[(0, 1, 0), (4, 2, 1), (8, 0, 0)]);
    assert_eq!(guest.ask(WRITE_ZEROES, 0, &[segments]), (OK, 1));
    let zero = |unmap| Op::WriteZeroes { unmap, fua: false };
    assert_eq!(
        guest.disk.log(),
        [(zero(false), 0, 512), (zero(true), 2048, 1024)]
    );
    let segments = guest.segments(&[(8, 4, 0), (1, 1, 0)]);
    assert_eq!(guest.ask(DISCARD, 0, &[segments]), (OK, 1));
    assert_eq!(
        guest.disk.log()[2..],
        [(Op::Discard, 4096, 2048), (Op::Discard, 512, 512)]
    );
    let segments = guest.segments(&[(8, 0, 0)]);
    assert_eq!(guest.ask(DISCARD, 0, &[segments]), (OK, 1));
    assert_eq!(guest.disk.log().len(), 4, "a segment of nothing asks for nothing");
}

pub(crate) fn segments_are_all_checked_before_the_first_runs<T: Transport>() {
    let mut guest = Guest::<T>::new();
    let end = DISK_BYTES / 512;
    for (segment, status) in [
        ((end, 1, 0), IOERR),
        ((end - 1, 2, 0), IOERR),
        ((u64::MAX, 1, 0), IOERR),
        ((u64::MAX / 512, 1, 0), IOERR),
        ((0, u32::MAX, 0), IOERR),
        ((0, 1, 2), UNSUPP),
        ((0, 1, 1), UNSUPP),
    ] {
        let segments = guest.segments(&[(0, 8, 0), segment]);
        assert_eq!(guest.ask(DISCARD, 0, &[segments]), (status, 1), "{segment:?}");
    }
    assert_eq!(guest.disk.log(), []);
}

pub(crate) fn failed_segment_fails_the_request_after_all_end<T: Transport>() {
    let mut guest = Guest::<T>::new();
    guest.disk.hold();
    let segments = guest.segments(&[(0, 1, 0), (4, 2, 0), (8, 8, 0)]);
    let head = guest.submit(0, DISCARD, 0, &[segments]);
    guest.wait_held(3);
    assert!(
        !holds_within(SILENCE, || guest.driver(0).status(head) != NO_STATUS),
        "it was answered while the disk holds its segments"
    );
    // The first two succeed.
    guest.disk.fail_from(4096, IoError::Host { errno: libc::ENOSPC });
    guest.disk.release();
    assert_eq!(guest.answer(0), (head.into(), 1));
    assert_eq!(guest.driver(0).status(head), IOERR);
    assert!(
        !holds_within(SILENCE, || guest.driver(0).take_used().is_some()),
        "it was answered twice"
    );
}

pub(crate) fn disk_errors_become_statuses<T: Transport>() {
    let mut guest = Guest::<T>::new();
    for (error, status) in [
        (IoError::Host { errno: libc::EIO }, IOERR),
        (IoError::Unsupported, UNSUPP),
    ] {
        guest.disk.fail(Some(error));
        assert_eq!(guest.ask(IN, 0, &[(DATA, 512, true)]), (status, 1), "{error}");
        assert_eq!(guest.ask(OUT, 0, &[(DATA, 512, false)]), (status, 1), "{error}");
        assert_eq!(guest.ask(FLUSH, 0, &[]), (status, 1), "{error}");
    }
    guest.disk.fail(None);
    assert_eq!(guest.ask(IN, 0, &[(DATA, 512, true)]), (OK, 513));
}

pub(crate) fn requests_without_their_feature_are_unsupported<T: Transport>() {
    let mut guest = Guest::<T>::with(RING_FEATURES | F_FLUSH, 1);
    let segments = guest.segments(&[(0, 1, 0)]);
    assert_eq!(guest.ask(DISCARD, 0, &[segments]), (UNSUPP, 1));
    assert_eq!(guest.ask(WRITE_ZEROES, 0, &[segments]), (UNSUPP, 1));
    assert_eq!(guest.disk.log(), []);
    let mut guest = Guest::<T>::with(RING_FEATURES | F_FLUSH | F_DISCARD, 1);
    let segments = guest.segments(&[(0, 1, 0)]);
    assert_eq!(guest.ask(DISCARD, 0, &[segments]), (OK, 1));
    assert_eq!(guest.ask(WRITE_ZEROES, 0, &[segments]), (UNSUPP, 1));
}

pub(crate) fn read_only_disk_fails_writes<T: Transport>() {
    let disk = MemDisk::with(|info| info.read_only = true);
    disk.set_bytes(0, &[3; 512]);
    let mut guest = Guest::<T>::before(disk, 1);
    guest.start(F_VERSION_1 | F_RO | F_FLUSH);
    guest.write(DATA, &[5; 512]);
    assert_eq!(guest.ask(OUT, 0, &[(DATA, 512, false)]), (IOERR, 1));
    assert_eq!(guest.ask(IN, 0, &[(DATA, 512, true)]), (OK, 513));
    assert_eq!(guest.read(DATA, 512), [3; 512]);
}

pub(crate) fn raw_file_serves_every_type_on_both_queues<T: Transport>() {
    for ring in [RingKind::IoUring, RingKind::Syscalls] {
        let file = tempfile::tempfile().expect("a temporary file");
        file.set_len(DISK_BYTES).expect("its length");
        let options = FileOptions {
            write: true,
            direct: false,
        };
        let image = ImageFile::from_fd("raw".as_ref(), file, options);
        let raw = RawDisk::new(image, DISK_BYTES, true);
        let mut guest = Guest {
            transport: T::new(Arc::clone(&raw) as Arc<dyn block::Disk>, 2, ring),
            disk: MemDisk::new(),
        };
        guest.start(with_queues(ALL, 2));
        for queue in 0..2 {
            let other = 1 - queue;
            let fill = queue as u8 + 5;
            guest.write(DATA, &[fill; 4096]);
            assert_eq!(guest.ask_on(queue, OUT, 8, &[(DATA, 4096, false)]), (OK, 1));
            assert_eq!(guest.ask_on(queue, FLUSH, 0, &[]), (OK, 1));
            let segments = guest.segments(&[(8, 1, 0), (15, 1, 1)]);
            assert_eq!(guest.ask_on(queue, WRITE_ZEROES, 0, &[segments]), (OK, 1));
            let read = [(DATA + 8192, 4096, true)];
            assert_eq!(guest.ask_on(other, IN, 8, &read), (OK, 4097));
            let mut expected = vec![fill; 4096];
            expected[..512].fill(0);
            expected[3584..].fill(0);
            assert_eq!(guest.read(DATA + 8192, 4096), expected);
            let segments = guest.segments(&[(0, 64, 0)]);
            assert_eq!(guest.ask_on(queue, DISCARD, 0, &[segments]), (OK, 1));
            assert_eq!(guest.ask_on(queue, GET_ID, 0, &[(DATA, 20, true)]), (OK, 21));
            assert_eq!(guest.read(DATA, SERIAL.len()), SERIAL.as_bytes());
        }
    }
}
