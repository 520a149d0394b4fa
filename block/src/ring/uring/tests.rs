//! What the ring takes, what it carries out at once, and by which way.

use super::*;

fn result_of(driver: &mut UringDriver, entry: squeue::Entry) -> i32 {
    driver.push_entry(entry.user_data(7)).expect("room");
    let mut done = Vec::new();
    while done.is_empty() {
        driver.enter(Wait::Io).expect("the ring turns");
        driver.reap(&mut done);
    }
    done[0].result
}

#[test]
fn uring_driver_refuses_ops_and_registrations_off_its_list() {
    let mut driver = UringDriver::new(8, &FixedTable::sparse(4)).expect("these tests need io_uring");
    let here = Fd(libc::AT_FDCWD);
    let address = libc::sockaddr_un {
        sun_family: libc::AF_UNIX as libc::sa_family_t,
        sun_path: [0; 108],
    };
    let forbidden = [
        opcode::OpenAt::new(here, c"/etc/passwd".as_ptr()).build(),
        opcode::UnlinkAt::new(here, c"/nonexistent".as_ptr()).build(),
        opcode::Socket::new(libc::AF_UNIX, libc::SOCK_STREAM, 0).build(),
        opcode::Connect::new(Fd(0), (&raw const address).cast(), 2).build(),
        opcode::Send::new(Fd(0), c"x".as_ptr().cast(), 1).build(),
        opcode::Nop::new().build(),
        opcode::UringCmd16::new(Fd(0), 1).build(),
        opcode::Read::new(Fd(0), std::ptr::null_mut(), 0)
            .build()
            .flags(squeue::Flags::IO_LINK),
    ];
    for entry in forbidden {
        assert_eq!(result_of(&mut driver, entry), -libc::EACCES);
    }
    let registered = driver.ring.submitter().register_eventfd(0);
    let error = registered.expect_err("not on the list").raw_os_error();
    assert_eq!(error, Some(libc::EACCES));
    let none = [libc::iovec {
        iov_base: std::ptr::null_mut(),
        iov_len: 0,
    }];
    // SAFETY: an empty place is no memory.
    let registered = unsafe { driver.ring.submitter().register_buffers_update(0, &none, None) };
    let error = registered.expect_err("not on the list").raw_os_error();
    assert_eq!(error, Some(libc::EACCES));
}

/// The result of an op if it was carried out while it was pushed; otherwise waits for its end.
///
/// # Safety
///
/// The memory of `slice` is valid, unless there is `fixed`.
unsafe fn carried_out(
    driver: &mut UringDriver,
    (file, kind, offset): (FileSlot, Kind, u64),
    slice: IoSlice,
    fixed: Option<FixedOp>,
) -> Option<i32> {
    let op = KernelOp {
        kind,
        file,
        offset,
        len: 0,
        slices: &raw const slice,
        slice_count: 1,
        fixed,
        at_door: false,
    };
    // SAFETY: the slice lives until the completion has been reaped; the caller vouches for its memory.
    unsafe { driver.push(&op, 7) }.expect("room");
    let at_once = driver.done.first().map(|done| done.result);
    let mut done = Vec::new();
    while done.is_empty() {
        driver.enter(Wait::Io).expect("the ring turns");
        driver.reap(&mut done);
    }
    at_once
}

/// The same for memory, on a file that is registered for it alone.
fn at_once(driver: &mut UringDriver, fd: RawFd, kind: Kind, memory: &mut [u8]) -> Option<i32> {
    let file = driver.register_file(fd).expect("a place");
    let slice = IoSlice::new(memory.as_mut_ptr(), memory.len());
    // SAFETY: the memory is borrowed for longer.
    let at_once = unsafe { carried_out(driver, (file, kind, 0), slice, None) };
    driver.unregister_file(file);
    at_once
}

#[test]
#[expect(clippy::print_stdout, reason = "what cannot run here says so")]
fn push_performs_only_short_tmpfs_ops_at_once() {
    use std::os::fd::AsRawFd as _;
    let mut driver = UringDriver::new(8, &FixedTable::default()).expect("these tests need io_uring");
    let file = rustix::fs::memfd_create("file", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
    let fd = file.as_raw_fd();
    if !sys::is_in_memory(fd) {
        println!(
            "cannot run here: ops on files in memory at once, because this kernel's tmpfs says that it never blocks"
        );
        return;
    }
    let (mut short, mut long) = (vec![7; 4096], vec![0; IN_MEMORY_BYTES_MAX + 1]);
    let write = Kind::Write { dsync: false };
    assert_eq!(at_once(&mut driver, fd, write, &mut short), Some(4096));
    assert_eq!(at_once(&mut driver, fd, Kind::DataSync, &mut []), Some(0));
    assert_eq!(at_once(&mut driver, fd, Kind::Read, &mut long), None);
    short.fill(0);
    assert_eq!(at_once(&mut driver, fd, Kind::Read, &mut short), Some(4096));
    assert_eq!(short, [7; 4096]);
    assert_eq!(&long[..4096], &short);
    // What may wait for a disk does so in the kernel.
    let other = std::fs::File::open("/proc/version").expect("a file on no disk and no tmpfs");
    let fd = other.as_raw_fd();
    assert_eq!(at_once(&mut driver, fd, Kind::Read, &mut short), None);
}

#[test]
#[expect(clippy::print_stdout, reason = "what cannot run here says so")]
fn push_performs_short_registered_tmpfs_ops_through_door() {
    use std::os::fd::AsRawFd as _;
    use std::os::unix::fs::FileExt as _;
    let mut driver = UringDriver::new(8, &FixedTable::sparse(1)).expect("these tests need io_uring");
    let memfd = || {
        let fd = rustix::fs::memfd_create("file", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
        std::fs::File::from(fd)
    };
    let (image, door) = (memfd(), memfd());
    if !sys::is_in_memory(image.as_raw_fd()) {
        println!("cannot run here: files in memory, because this kernel's tmpfs says that it never blocks");
        return;
    }
    image.write_all_at(&[7; 4096], 0).expect("memory");
    door.set_len(64 << 10).expect("memory");
    let (at_door, file) = (
        driver.register_file(door.as_raw_fd()).expect("a place"),
        driver.register_file(image.as_raw_fd()).expect("a place"),
    );
    let mut perform = |kind: Kind, offset: u64, len: usize| {
        let slice = IoSlice::new(std::ptr::without_provenance_mut(0), len);
        let fixed = FixedOp {
            index: 0,
            door: at_door,
            door_offset: 100,
        };
        // SAFETY: the bytes are a registered buffer's.
        unsafe { carried_out(&mut driver, (file, kind, offset), slice, Some(fixed)) }
    };
    let read = |file: &std::fs::File, at: u64, len: usize| {
        let mut bytes = vec![0; len];
        file.read_exact_at(&mut bytes, at).expect("readable");
        bytes
    };
    assert_eq!(perform(Kind::Read, 1000, 96), Some(96));
    assert_eq!(read(&door, 0, 100), [0; 100]);
    assert_eq!(read(&door, 100, 97), [&[7; 96][..], &[0]].concat());
    // Up to the end of the file; the ring's slot goes on from there.
    assert_eq!(perform(Kind::Read, 4000, 512), Some(96));
    assert_eq!(perform(Kind::Read, 4096, 96), Some(0));
    door.write_all_at(&[9; 512], 100).expect("memory");
    assert_eq!(perform(Kind::Write { dsync: false }, 8000, 512), Some(512));
    assert_eq!(read(&image, 8000, 512), [9; 512]);
    // A long one is the kernel's, which fails here: nobody has registered a buffer.
    assert_eq!(perform(Kind::Read, 0, IN_MEMORY_BYTES_MAX + 1), None);
    assert_eq!(perform(Kind::Read, 0, IN_MEMORY_BYTES_MAX), Some(8512));
}

#[test]
fn sync_now_starts_pushed_ops_first() {
    use std::os::fd::AsRawFd as _;
    use std::os::unix::fs::FileExt as _;
    let mut driver = UringDriver::new(8, &FixedTable::default()).expect("these tests need io_uring");
    let file = tempfile::tempfile().expect("a file");
    let slot = driver.register_file(file.as_raw_fd()).expect("a place");
    let mut bytes = [7; 512];
    let slice = IoSlice::new(bytes.as_mut_ptr(), bytes.len());
    let op = KernelOp {
        kind: Kind::Write { dsync: false },
        file: slot,
        offset: 0,
        len: 0,
        slices: &raw const slice,
        slice_count: 1,
        fixed: None,
        at_door: false,
    };
    // SAFETY: slice and bytes live until the completion has been reaped.
    unsafe { driver.push(&op, 7) }.expect("room");
    assert_eq!(driver.unstarted, 1);
    assert_eq!(driver.sync_now(slot), Some(0));
    assert_eq!(driver.unstarted, 0);
    let mut done = Vec::new();
    while done.is_empty() {
        driver.enter(Wait::Io).expect("the ring turns");
        driver.reap(&mut done);
    }
    assert_eq!(done[0].result, 512);
    let mut found = [0; 512];
    file.read_exact_at(&mut found, 0).expect("readable");
    assert_eq!(found, bytes);
    let pipe = std::io::pipe().expect("a pipe").1;
    let slot = driver.register_file(pipe.as_raw_fd()).expect("a place");
    assert_eq!(driver.sync_now(slot), Some(-libc::EINVAL), "a pipe has no syncs");
}

/// io_uring would punt each of them to a kernel thread.
#[test]
#[expect(clippy::print_stdout, reason = "what cannot run here says so")]
fn push_hands_buffered_writes_that_would_wait_to_thread_of_file() {
    use std::os::fd::AsRawFd as _;
    use std::os::unix::fs::FileExt as _;
    const BYTES: usize = 512;
    let mut driver = UringDriver::new(64, &FixedTable::default()).expect("these tests need io_uring");
    let image = tempfile::tempfile().expect("a temporary file");
    let file = driver.register_file(image.as_raw_fd()).expect("a place");
    let index = file.fixed.expect("registered");
    let data: Vec<u8> = (1..=20).flat_map(|byte| [byte; BYTES]).collect();
    let write = Kind::Write { dsync: false };
    let slices: Vec<IoSlice> = data
        .chunks_exact(BYTES)
        .map(|chunk| IoSlice::new(chunk.as_ptr().cast_mut(), BYTES))
        .collect();
    let op = |number: usize, kind: Kind| KernelOp {
        kind,
        file,
        offset: (number * BYTES) as u64,
        len: 0,
        slices: &raw const slices[number],
        slice_count: 1,
        fixed: None,
        at_door: false,
    };
    // SAFETY: slices and data live to the end of the test, and are only read.
    if unsafe { sys::write_without_waiting(&op(0, write)) } != -libc::EOPNOTSUPP {
        println!(
            "cannot run here: threads that write, because this file system takes writes without waiting"
        );
        return;
    }
    let wait_for = |driver: &mut UringDriver, count: usize| {
        let mut done: Vec<Completion> = Vec::new();
        while done.len() < count {
            driver.enter(Wait::Io).expect("the ring turns");
            driver.reap(&mut done);
        }
        done.sort_by_key(|done| done.user_data);
        done
    };
    for round in 0..3 {
        for number in 0..slices.len() {
            // SAFETY: as above.
            unsafe { driver.push(&op(number, write), number as u64) }.expect("room");
        }
        // The watch of the threads alone; later not even that.
        assert_eq!(driver.unstarted, usize::from(round == 0));
        let done = wait_for(&mut driver, slices.len());
        let reported: Vec<_> = done.iter().map(|done| (done.user_data, done.result)).collect();
        let expected: Vec<_> = (0..slices.len() as u64)
            .map(|number| (number, BYTES as i32))
            .collect();
        assert_eq!(reported, expected);
        let mut found = vec![0; data.len()];
        image.read_exact_at(&mut found, 0).expect("all of it");
        assert_eq!(found, data);
        image.set_len(0).expect("empty again");
    }
    // A sync takes its time, and others would wait behind it.
    // SAFETY: as above.
    unsafe { driver.push(&op(3, Kind::Write { dsync: true }), 7) }.expect("room");
    assert_eq!(driver.unstarted, 1);
    assert_eq!(wait_for(&mut driver, 1)[0].result, BYTES as i32);
    assert!(driver.writes.serves(index));
    driver.unregister_file(file);
    assert!(!driver.writes.serves(index));
}
