//! Snapshots that are created, applied and deleted in the simulated world while the guest writes, zeroes, discards and
//! flushes; and the power may go at any step.

use std::cell::Cell;
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
                in_task.request(&mut own).await.expect("an answer");
            }
            in_task.snapshot(round, &mut own).await.expect("an operation");
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

/// As [`run`], and the program may be killed at any step; another one goes on with what it finds. Returns the times that it was killed.
fn run_with_kills(seed: u64) -> u32 {
    let random = &mut Random::new(seed);
    let mut bench = Rc::new(Bench::new(seed, random));
    let judge = Judge::new(&bench);
    let mut kills = 0;
    for round in 0..12 {
        let what = format!("seed {seed}, round {round}");
        let (is_over, is_killed) = (Rc::new(Cell::new(false)), Rc::new(Cell::new(false)));
        let (in_task, over, killed) = (Rc::clone(&bench), Rc::clone(&is_over), Rc::clone(&is_killed));
        let mut own = Random::new(seed << 8 | round);
        bench.cx.spawn(async move {
            let work = async {
                for _ in 0..own.below(6) {
                    in_task.request(&mut own).await?;
                }
                in_task.snapshot(round, &mut own).await
            };
            let ended = work.await;
            assert!(ended.is_ok() || killed.get(), "{ended:?}");
            over.set(true);
        });
        let turn = || {
            bench.cx.run_ready();
            bench.cx.ring().turn(false).expect("the ring turns");
            bench.world.step()
        };
        let mut left = 1 + random.below(120);
        while !is_over.get() && left > 0 {
            left -= 1;
            turn();
            if random.one_in(4) {
                judge.look(&bench, &what, random);
            }
        }
        if is_over.get() {
            continue;
        }
        kills += 1;
        is_killed.set(true);
        bench.world.kill_process();
        while bench.world.step() {}
        let next = bench.after_a_kill(&judge);
        // Nothing of this has an effect: the task only lets go of what a process has.
        while !is_over.get() || bench.cx.tasks() > 0 {
            turn();
        }
        bench = Rc::new(next);
    }
    kills
}

#[test]
fn snapshots_survive_a_kill_and_a_cut_after_it() {
    let kills: u32 = (0..600).map(run_with_kills).sum();
    assert!(kills > 2000, "{kills}");
}

#[test]
fn snapshots_survive_a_cut_at_any_step_of_create_apply_and_delete() {
    for seed in 0..150 {
        run(seed);
    }
}
