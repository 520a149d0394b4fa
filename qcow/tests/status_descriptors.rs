//! Block status of a process that has no descriptor left. In a process of its own, as the limit holds for all of it.

mod common;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use block::ring::RingKind;
use block::status::Content;
use block::{AlignedBuf, Context, Disk, Op, ask};
use common::Folder;
use qcow::{OpenOptions, QcowDisk};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// In each image every other cluster of those that the image above does not have holds data.
fn chain(folder: &Folder) {
    folder.qemu_img(&["create", "-q", "-f", "raw", "base.raw", "1m"]);
    for (name, below, format) in [
        ("middle.qcow2", "base.raw", "raw"),
        ("top.qcow2", "middle.qcow2", "qcow2"),
    ] {
        folder.qemu_img(&["create", "-q", "-f", "qcow2", "-F", format, "-b", below, name]);
    }
    for (name, format, step) in [
        ("base.raw", "raw", 1),
        ("middle.qcow2", "qcow2", 2),
        ("top.qcow2", "qcow2", 4),
    ] {
        let at = (0..16).step_by(step).map(|cluster| cluster * 65536);
        let commands: Vec<String> = at.map(|at| format!("write -q {at} 64k")).collect();
        folder.qemu_io(
            format,
            name,
            &commands.iter().map(String::as_str).collect::<Vec<_>>(),
        );
    }
}

#[test]
fn status_of_a_chain_opens_no_descriptor() {
    let folder = Folder::new();
    chain(&folder);
    let options = OpenOptions {
        read_only: true,
        backing_files: true,
        ..OpenOptions::default()
    };
    let disk = QcowDisk::open(&folder.path("top.qcow2"), &options).expect("the chain");
    for ring in [RingKind::Syscalls, RingKind::IoUring] {
        let cx = Context::new(ring, 64).expect("these tests need io_uring: kernel.io_uring_disabled=0");
        let queue = Arc::clone(&disk).open_queue(&cx).expect("a queue");
        let check = async {
            // Once it waits, the context has the descriptor that it waits with.
            let buffer = AlignedBuf::from_slice(&[0; 512]).into();
            ask(&*queue, Op::Read, 0, 512, buffer).await.expect("a read");
            let limit = getrlimit(Resource::Nofile);
            // A new descriptor would be the lowest that is free.
            let free = File::open(folder.path("base.raw")).expect("an image").as_raw_fd();
            let taken = Rlimit {
                current: Some(free as u64),
                ..limit
            };
            setrlimit(Resource::Nofile, taken).expect("a lower limit");
            let refused = File::open(folder.path("base.raw")).is_err();
            let status = queue.status(0, 1 << 20).await;
            setrlimit(Resource::Nofile, limit).expect("the limit of before");
            assert!(refused, "a descriptor is left");
            status.expect("a status")
        };
        let ranges = cx.block_on(check).expect("the ring turns");
        let depths: Vec<u32> = ranges.iter().map(|range| range.depth).collect();
        assert_eq!(depths, [0, 2, 1, 2].repeat(4));
        assert!(
            ranges
                .iter()
                .all(|range| matches!(range.content, Content::Data { .. }))
        );
    }
}
