//! A file that outgrows its refcount table: the table moves while the disk is served.

use crate::common::{Folder, Lane, assert_same, close, open};
use block::ring::RingKind;
use qcow::OpenOptions;

const CHUNK: u64 = 384 << 10;

/// Method: with 512-byte clusters a table of one cluster counts 8 MiB of file in 16 bits, and 2 MiB in 64. After every few
/// writes a FLUSH, after which a copy of the file, as a crash would leave it, must be sound and hold everything; after the
/// close the image must be flawless. Space that is given back before the last move must be found again.
#[test]
fn outgrown_refcount_table_moves_soundly_at_every_flush() {
    for (bits, size) in [(16, 24 * CHUNK), (64, 16 * CHUNK)] {
        let folder = Folder::new();
        let options = format!("cluster_size=512,refcount_bits={bits}");
        let length = size.to_string();
        folder.qemu_img(&["create", "-f", "qcow2", "-o", &options, "disk.qcow2", &length]);
        let place = || crate::common::u64_at(&folder.path("disk.qcow2"), 48);
        let first_place = place();
        let mut places = vec![first_place];
        let disk = open(&folder.path("disk.qcow2"), &OpenOptions::default());
        let lane = Lane::new(&disk, RingKind::IoUring);
        let mut model = vec![0u8; size as usize];
        for chunk in 0..size / CHUNK {
            let at = chunk * CHUNK;
            let bytes: Vec<u8> = (0..CHUNK)
                .map(|i| ((i / 512 + chunk * 7) % 251) as u8 + 1)
                .collect();
            lane.write(at, &bytes);
            model[at as usize..(at + CHUNK) as usize].copy_from_slice(&bytes);
            if chunk % 4 == 1 {
                // Part of what was just written goes again, to be reused by later chunks.
                lane.discard(at, CHUNK / 4);
                model[at as usize..(at + CHUNK / 4) as usize].fill(0);
            }
            if chunk % 4 == 3 {
                lane.flush();
                if places.last() != Some(&place()) {
                    places.push(place());
                }
                std::fs::copy(folder.path("disk.qcow2"), folder.path("copy.qcow2")).expect("a copy");
                folder.assert_flawless("copy.qcow2", true);
                let what = format!("{bits} bits, after chunk {chunk}");
                assert_same(&folder.qemu_reads("copy.qcow2"), &model, &what);
            }
        }
        lane.settle();
        drop(lane);
        close(disk);
        assert!(
            places.len() > 1,
            "{bits} bits: the refcount table stayed at {first_place:#x}"
        );
        folder.assert_flawless("disk.qcow2", false);
        assert_same(&folder.qemu_reads("disk.qcow2"), &model, "after the close");
        // What was moved is what the next one opens.
        let disk = open(&folder.path("disk.qcow2"), &OpenOptions::default());
        let lane = Lane::new(&disk, RingKind::Syscalls);
        lane.write(0, &[0xEE; 4096]);
        model[..4096].fill(0xEE);
        assert_same(&lane.read(0, size), &model, "after opening it again");
        drop(lane);
        close(disk);
        folder.assert_flawless("disk.qcow2", false);
    }
}
