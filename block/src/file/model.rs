//! Random orders of writes that share a block of the host's, from two workers.

use std::rc::Rc;
use std::sync::Arc;

use smallvec::smallvec;

use super::*;
use crate::buffer::{AlignedBuf, Buffer, Piece};
use crate::sync::thread;
use crate::task::Context;

/// Fails if a read-modify-write does not lock its range, locks too little of it, or unlocks without waking.
#[test]
fn misaligned_writes_of_two_workers_to_one_block_land() {
    let run = || {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(12288).unwrap();
        let alignment = Alignment {
            memory: 512,
            offset: 4096,
        };
        let image = ImageFile::with_alignment("test".into(), file, true, false, alignment);
        let image = Arc::new(image);
        // Each worker writes every other sector, some of them across two blocks.
        let write = |image: Arc<ImageFile>, which: u64| {
            let cx = Context::syscalls();
            let view = image.view(&cx).unwrap();
            let tasks: Vec<_> = (0..2u64)
                .map(|index| {
                    let view = view.clone();
                    let (at, len) = [(3584, 1024), (4608 + 512 * which, 512)][index as usize];
                    // The range across the blocks is both workers', with the same bytes.
                    let fill = if index == 0 { 9 } else { which as u8 + 1 };
                    async move {
                        let buffer = Rc::new(Buffer::from(AlignedBuf::from_slice(&vec![fill; len])));
                        view.write(at, smallvec![Piece::whole(&buffer)], false)
                            .await
                            .unwrap();
                    }
                })
                .collect();
            tasks.into_iter().for_each(|task| cx.spawn(task));
            cx.block_on(async {
                while cx.tasks() > 0 {
                    view.sync().await.unwrap();
                }
            })
            .unwrap();
        };
        let other = {
            let image = Arc::clone(&image);
            thread::spawn(move || write(image, 1))
        };
        write(Arc::clone(&image), 0);
        other.join().unwrap();
        let cx = Context::syscalls();
        let view = image.view(&cx).unwrap();
        let found = cx.block_on(view.read_at(0, 12288)).unwrap().unwrap();
        for (sector, bytes) in found.chunks_exact(512).enumerate() {
            let expected = match sector {
                7 | 8 => 9,
                9 => 1,
                10 => 2,
                _ => 0,
            };
            assert!(
                bytes.iter().all(|&byte| byte == expected),
                "sector {sector}: {}",
                bytes[0]
            );
        }
        assert!(image.ranges.is_empty());
    };
    shuttle::check_random(run, 1000);
    shuttle::check_pct(run, 1000, 3);
}
