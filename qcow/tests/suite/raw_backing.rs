//! Raw backing files of any length: the overlay shows what QEMU shows.

use crate::common::{Folder, Lane, close, open};
use block::Disk;
use block::ring::RingKind;
use qcow::OpenOptions;

/// QEMU rounds the length of a raw file up to whole sectors, and reads zeros behind its end.
#[test]
fn raw_backing_partial_sector_is_read_and_copied() {
    for (len, direct, ring) in [
        (1000, false, RingKind::IoUring),
        (1000, true, RingKind::IoUring),
        (1000, false, RingKind::Syscalls),
        (65_537, true, RingKind::Syscalls),
        (65_537, false, RingKind::IoUring),
        (1, false, RingKind::IoUring),
    ] {
        let folder = Folder::new();
        std::fs::write(folder.path("base.raw"), vec![b'A'; len]).expect("a base image");
        let create = [
            "create",
            "-f",
            "qcow2",
            "-b",
            "base.raw",
            "-F",
            "raw",
            "disk.qcow2",
        ];
        folder.qemu_img(&create);
        let options = OpenOptions {
            backing_files: true,
            direct,
            ..OpenOptions::default()
        };
        let size = len.next_multiple_of(512);
        let mut model = vec![0; size];
        model[..len].fill(b'A');
        let disk = open(&folder.path("disk.qcow2"), &options);
        assert_eq!(disk.info().size_bytes, size as u64);
        let lane = Lane::new(&disk, ring);
        assert!(lane.read(0, size as u64) == model, "{len} bytes, direct {direct}");
        // What the write leaves of its cluster is copied; the last sector is in the same one, or alone in the next.
        lane.write(0, &[7; 512]);
        model[..512].fill(7);
        assert!(
            lane.read(0, size as u64) == model,
            "{len} bytes, direct {direct}, written"
        );
        // What lies behind the end of the file are zeros for a larger disk too.
        let cx = block::Context::syscalls();
        let grown = cx.block_on(disk.grow(&cx, 1 << 20)).expect("the ring turns");
        grown.expect("growth");
        model.resize(1 << 20, 0);
        assert!(
            lane.read(0, 1 << 20) == model,
            "{len} bytes, direct {direct}, grown"
        );
        drop(lane);
        close(disk);
        folder.assert_flawless("disk.qcow2", false);
        assert!(folder.qemu_reads("disk.qcow2") == model, "QEMU, {len} bytes");
    }
}
