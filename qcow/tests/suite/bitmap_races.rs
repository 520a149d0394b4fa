//! Changes of bitmaps in the simulated world, held at each of their I/Os.

use std::sync::Arc;

use qcow::BitmapChange;

use crate::snapshot_bench::{Bench, is_ok};

fn add(enabled: bool) -> BitmapChange {
    BitmapChange::Add {
        granularity: Some(512),
        enabled,
    }
}

/// The bits of another bitmap are in memory, and are stored with the change: whatever the host takes its time for, other threads get at
/// the metadata meanwhile.
#[test]
fn change_of_bitmaps_holds_no_lock_at_any_io() {
    let mut ios = 0;
    for io in 0.. {
        let bench = Bench::new(io);
        let (cx, disk) = (bench.workers.context(0).clone(), Arc::clone(&bench.disk));
        let added = bench.workers.run(0, async move {
            disk.change_bitmap(&cx, "recording", &add(true)).await
        });
        added.take().expect("an answer").expect("a bitmap");
        is_ok(&bench.write(1, 0, 1));
        let change = bench.hold(io, async |disk, cx| {
            disk.change_bitmap(&cx, "other", &add(false)).await
        });
        let is_over = change.borrow().is_some();
        assert!(bench.disk.is_unlocked(), "the metadata is locked at I/O {io}");
        bench.world.release();
        bench.workers.settle();
        change.take().expect("an answer").expect("a bitmap");
        bench.close();
        if is_over {
            ios = io;
            break;
        }
    }
    assert!(ios > 10, "only {ios} I/Os");
}
