//! Snapshots that are created, applied and deleted in the simulated world while the guest writes, zeroes, discards and
//! flushes; and the power may go at any step.

use std::rc::Rc;

use simulator::Random;

use crate::cut_bench::{Bench, DISK, Judge};
use crate::snapshot_content::{content, entries};
use crate::steps::run_to_end;

fn run(seed: u64) {
    let random = &mut Random::new(seed);
    let bench = Rc::new(Bench::new(seed, random));
    let judge = Judge::new(&bench);
    for round in 0..8 {
        let in_task = Rc::clone(&bench);
        let mut own = Random::new(seed << 8 | round);
        let task = async move {
            for _ in 0..own.below(6) {
                in_task.request(&mut own).await;
            }
            in_task.snapshot(round, &mut own).await;
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
    assert!(
        content(&judge.world, &judge.cx, &image) == *known.borrow(),
        "seed {seed}"
    );
    assert_eq!(entries(&image).len(), snapshots.borrow().len(), "seed {seed}");
}

#[test]
fn snapshots_survive_a_cut_at_any_step_of_create_apply_and_delete() {
    for seed in 0..150 {
        run(seed);
    }
}
