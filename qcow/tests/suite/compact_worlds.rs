//! Compaction in the simulated world while the guest writes, zeroes, discards and flushes; it is interrupted now and then,
//! and the power may go at any step. Snapshots stay as they are.

use std::cell::Cell;
use std::ops::ControlFlow;
use std::pin::Pin;
use std::rc::Rc;

use block::IoError;
use qcow::{CompactOptions, Compacted};
use simulator::Random;

use crate::cut_bench::{Bench, DISK, Judge};
use crate::snapshot_content::{content, entries};
use crate::steps::run_to_end;
use crate::used_clusters::used;

type BoxFuture<'a> = Pin<Box<dyn Future<Output = Result<(), IoError>> + 'a>>;

/// Compacts the image; one step in `interrupt` ends it early, or none with zero.
async fn compact(bench: &Bench, interrupt: u64, random: &mut Random) -> Compacted {
    let options = CompactOptions::default();
    let compacted = bench.disk.compact(&bench.cx, &options, |_| {
        match interrupt > 0 && random.one_in(interrupt) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    });
    compacted.await.expect("a compaction")
}

/// Runs a seed. Returns the number of bytes that moved.
fn run(seed: u64) -> u64 {
    let random = &mut Random::new(seed);
    let bench = Rc::new(Bench::new(seed, random));
    let judge = Judge::new(&bench);
    let has_snapshots = random.one_in(2);
    let moved = Rc::new(Cell::new(0));
    for round in 0..7 {
        let in_task = Rc::clone(&bench);
        let mut own = Random::new(seed << 8 | round);
        let (put, is_last) = (Rc::clone(&moved), round == 6);
        let task = async move {
            for _ in 0..own.below(12) {
                in_task.request(&mut own).await.expect("an answer");
            }
            if has_snapshots && own.one_in(3) {
                in_task.snapshot(round, &mut own).await.expect("an operation");
            }
            let interrupt = if is_last { 0 } else { own.pick(&[0, 0, 2, 5]) };
            let (mut first, mut second) = (Random::new(own.draw()), Random::new(own.draw()));
            let requests = if is_last { 0 } else { own.below(10) };
            let compacting = async {
                let compacted = compact(&in_task, interrupt, &mut first).await;
                put.set(put.get() + compacted.moved_bytes);
                assert!(!compacted.is_stopped || interrupt > 0);
                Ok(())
            };
            let asking = async {
                for _ in 0..requests {
                    in_task.request(&mut second).await?;
                }
                Ok(())
            };
            let both: [BoxFuture<'_>; 2] = [Box::pin(compacting), Box::pin(asking)];
            block::join_all(both).await.expect("nothing that fails");
        };
        let what = format!("seed {seed}, round {round}");
        run_to_end(&bench.world, &bench.cx, &what, task, || {
            if random.one_in(4) {
                judge.look(&bench, &what, random);
            }
        });
    }
    let Ok(bench) = Rc::try_unwrap(bench) else {
        panic!("a task has not ended")
    };
    let Bench {
        world,
        cx,
        disk,
        queue,
        known,
        snapshots,
        ..
    } = bench;
    drop(queue);
    crate::closing::close(&world, &cx, &disk, DISK, &format!("seed {seed}"));
    let image = world.contents(DISK).to_bytes();
    let (clusters, ideal) = used(&image);
    // The last one may be written in part.
    let len = image.len() as u64;
    assert!(
        len <= ideal && len + ideal / clusters > ideal,
        "seed {seed}: {len} bytes, and {clusters} clusters are in use"
    );
    assert!(
        content(&judge.world, &judge.cx, &image) == *known.borrow(),
        "seed {seed}"
    );
    assert_eq!(entries(&image).len(), snapshots.borrow().len(), "seed {seed}");
    moved.get()
}

#[test]
fn compaction_survives_a_cut_at_any_step_beside_requests() {
    let moved = (0..400).map(run).filter(|&bytes| bytes > 0).count();
    assert!(moved > 280, "in {moved} seeds only there was something to move");
}
