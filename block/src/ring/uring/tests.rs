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
fn a_ring_opens_connects_and_sends_nothing_and_registers_only_files() {
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
fn short_ops_on_files_in_memory_have_ended_when_they_were_pushed_and_no_others() {
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
fn bytes_of_registered_buffers_go_straight_between_a_file_in_memory_and_the_door() {
    use std::io::{Read as _, Seek as _, Write as _};
    use std::os::fd::AsRawFd as _;
    let mut driver = UringDriver::new(8, &FixedTable::sparse(4)).expect("these tests need io_uring");
    let memfd = |len: u64| {
        let fd = rustix::fs::memfd_create("file", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
        let file = std::fs::File::from(fd);
        file.set_len(len).expect("a length");
        file
    };
    let (mut image, mut door, sparse) = (memfd(0), memfd(8192), memfd(1 << 20));
    if !sys::is_in_memory(image.as_raw_fd()) {
        println!("cannot run here: mapped files, because this kernel's tmpfs says that it never blocks");
        return;
    }
    image.write_all(&[7; 4096]).expect("memory");
    let at_door = driver.register_file(door.as_raw_fd()).expect("a place");
    let files = [&image, &sparse].map(|file| driver.register_file(file.as_raw_fd()).expect("a place"));
    let mut carry_out = |file: FileSlot, kind: Kind, offset: u64, len: usize| {
        let slice = IoSlice::new(std::ptr::without_provenance_mut(0), len);
        let fixed = FixedOp {
            index: 0,
            door: at_door,
            door_offset: 100,
        };
        // SAFETY: the bytes are a registered buffer's.
        unsafe { carried_out(&mut driver, (file, kind, offset), slice, Some(fixed)) }
    };
    let write = Kind::Write { dsync: false };
    assert_eq!(carry_out(files[0], Kind::Read, 1000, 96), Some(96));
    let mut bytes = Vec::new();
    door.read_to_end(&mut bytes).expect("readable");
    assert_eq!(
        (&bytes[..100], &bytes[100..196], bytes[196]),
        (&[0; 100][..], &[7; 96][..], 0)
    );
    // A file that has grown.
    image.write_all(&[8; 4096]).expect("memory");
    assert_eq!(carry_out(files[0], write, 8000, 192), Some(192));
    image.rewind().expect("the start");
    bytes.clear();
    image.read_to_end(&mut bytes).expect("readable");
    assert_eq!(
        (bytes[7999], &bytes[8000..8096], &bytes[8096..]),
        (8, &[7; 96][..], &[0; 96][..])
    );
    // What is past the end, mostly holes, cut off, or too long goes the long way, which fails here: nobody has
    // registered a buffer.
    assert_eq!(carry_out(files[0], write, 8000, 193), None);
    assert_eq!(carry_out(files[0], Kind::Read, 8000, 193), None);
    // A file that grows is looked at again, but not each time.
    image.write_all(&[9; 4096]).expect("memory");
    let looked = (0..1000).position(|_| carry_out(files[0], Kind::Read, 8192, 96) == Some(96));
    assert_eq!(looked, Some(253), "three ops have missed before");
    assert_eq!(carry_out(files[1], Kind::Read, 0, 96), None);
    let blocks = std::os::unix::fs::MetadataExt::blocks(&sparse.metadata().expect("a file"));
    assert_eq!(blocks, 0, "a hole that was read is memory now");
    image.set_len(4096).expect("shorter");
    assert_eq!(carry_out(files[0], Kind::Read, 4096, 96), None);
    image.set_len(0).expect("shorter");
    assert_eq!(carry_out(files[0], Kind::Read, 0, 96), None);
}

#[test]
#[expect(clippy::print_stdout, reason = "what cannot run here says so")]
fn long_copies_are_shared_between_the_kernel_and_the_worker_and_each_ends_once() {
    use std::os::fd::AsRawFd as _;
    const LEN: usize = 1 << 20;
    const COUNT: usize = 32;
    let memfd = || {
        let fd = rustix::fs::memfd_create("file", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
        std::fs::File::from(fd)
    };
    let (image, door) = (memfd(), memfd());
    if !sys::is_in_memory(image.as_raw_fd()) {
        println!("cannot run here: long copies, because this kernel's tmpfs says that it never blocks");
        return;
    }
    let bytes: Vec<u8> = (0..COUNT * LEN).map(|at| (at / 4096 % 251) as u8).collect();
    std::os::unix::fs::FileExt::write_all_at(&image, &bytes, 0).expect("memory");
    door.set_len((COUNT * LEN) as u64).expect("memory");
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let fd = door.as_raw_fd();
    // SAFETY: a new mapping, at an address of the kernel's choice, that lives as long as the process.
    let memory = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            COUNT * LEN,
            protection,
            libc::MAP_SHARED,
            fd,
            0,
        )
    };
    assert_ne!(memory, libc::MAP_FAILED);
    let table = FixedTable::of_memory(vec![IoSlice::new(memory.cast(), COUNT * LEN)]);
    let mut driver = UringDriver::new(64, &table).expect("these tests need io_uring");
    let at_door = driver.register_file(fd).expect("a place");
    let file = driver.register_file(image.as_raw_fd()).expect("a place");
    for round in 0..3 {
        let mut at_once = 0;
        for at in (0..COUNT).map(|index| index * LEN) {
            let slice = IoSlice::new(memory.cast::<u8>().wrapping_add(at), LEN);
            let op = KernelOp {
                kind: Kind::Read,
                file,
                offset: at as u64,
                len: 0,
                slices: &raw const slice,
                slice_count: 1,
                fixed: Some(FixedOp {
                    index: 0,
                    door: at_door,
                    door_offset: at as u64,
                }),
                at_door: false,
            };
            // SAFETY: the slice's memory stays mapped; a fixed op takes its address and length at once.
            unsafe { driver.push(&op, at as u64) }.expect("room");
            at_once += usize::from(driver.done.last().is_some_and(|done| done.user_data == at as u64));
        }
        assert!((1..=COUNT - LONG_COPIES_MAX).contains(&at_once), "{at_once}");
        let mut done = Vec::new();
        while done.len() < COUNT {
            driver.enter(Wait::Io).expect("the ring turns");
            driver.reap(&mut done);
        }
        assert!(done.iter().all(|done| done.result as usize == LEN));
        let mut ended: Vec<_> = done.iter().map(|done| done.user_data as usize / LEN).collect();
        ended.sort_unstable();
        assert!(ended.iter().copied().eq(0..COUNT));
        assert!(driver.long_copies.is_empty());
        let mut seen = vec![0; COUNT * LEN];
        std::os::unix::fs::FileExt::read_exact_at(&door, &mut seen, 0).expect("readable");
        assert!(seen == bytes, "round {round}: what was read is not what is there");
        std::os::unix::fs::FileExt::write_all_at(&door, &vec![0; COUNT * LEN], 0).expect("memory");
    }
}

#[test]
fn a_place_that_is_a_door_alone_is_served_at_once_whatever_the_file_and_the_length() {
    use std::io::Read as _;
    use std::os::fd::AsRawFd as _;
    let table = FixedTable::sparse(2).with_doors(2);
    assert_eq!(table.len(), 4);
    let mut driver = UringDriver::new(8, &table).expect("these tests need io_uring");
    let bytes: Vec<u8> = (0..3 * IN_MEMORY_BYTES_MAX).map(|at| (at % 251) as u8).collect();
    let on_disk = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).expect("a file");
    let memfd = || {
        let fd = rustix::fs::memfd_create("file", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
        std::fs::File::from(fd)
    };
    let (dense, sparse) = (memfd(), memfd());
    for file in [&on_disk, &dense, &sparse] {
        std::os::unix::fs::FileExt::write_all_at(file, &bytes, 0).expect("room");
    }
    sparse.set_len(1 << 30).expect("a hole");
    for image in [on_disk, dense, sparse] {
        let mut door = memfd();
        let at_door = driver.register_file(door.as_raw_fd()).expect("a place");
        let file = driver.register_file(image.as_raw_fd()).expect("a place");
        for (kind, offset, index) in [
            (Kind::Read, 0, 2),
            (Kind::Write { dsync: false }, bytes.len() as u64, 3),
        ] {
            let slice = IoSlice::new(std::ptr::without_provenance_mut(0), bytes.len());
            let op = KernelOp {
                kind,
                file,
                offset,
                len: 0,
                slices: &raw const slice,
                slice_count: 1,
                fixed: Some(FixedOp {
                    index,
                    door: at_door,
                    door_offset: 0,
                }),
                at_door: false,
            };
            // SAFETY: the slice lives until the completion has been reaped, and names no memory.
            unsafe { driver.push(&op, 7) }.expect("room");
            let done = driver.done.pop().expect("it was carried out at once");
            assert_eq!(done.result as usize, bytes.len(), "{kind:?}");
        }
        let mut seen = Vec::new();
        door.read_to_end(&mut seen).expect("readable");
        assert!(seen == bytes, "what was read is not what is there");
        let mut seen = vec![0; bytes.len()];
        std::os::unix::fs::FileExt::read_exact_at(&image, &mut seen, bytes.len() as u64).expect("readable");
        assert!(seen == bytes, "what was written is not what came");
        driver.unregister_file(file);
        driver.unregister_file(at_door);
    }
}
