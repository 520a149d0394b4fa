//! A task in the simulated world, carried out one step of the disk at a time.

use std::cell::Cell;
use std::rc::Rc;

use block::Context;
use simulator::SimWorld;

/// The most steps of a task; more, and it waits for ever.
const STEPS_MAX: u32 = 200_000;

/// Runs `task` to its end, and calls `after_step` after each step of the disk. `what` names the run in a failure.
#[track_caller]
pub(crate) fn run_to_end(
    world: &SimWorld,
    cx: &Context,
    what: &str,
    task: impl Future<Output = ()> + 'static,
    mut after_step: impl FnMut(),
) {
    let is_over = Rc::new(Cell::new(false));
    let over = Rc::clone(&is_over);
    cx.spawn(async move {
        task.await;
        over.set(true);
    });
    let mut steps = 0;
    while !is_over.get() {
        cx.run_ready();
        cx.ring().turn(false).expect("the ring turns");
        world.step();
        steps += 1;
        assert!(steps < STEPS_MAX, "{what}: it does not end");
        after_step();
    }
}
