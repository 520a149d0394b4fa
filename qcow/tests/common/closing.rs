//! The end of a disk in the simulated world.

use std::sync::Arc;

use block::{Context, Disk};
use qcow::QcowDisk;
use qcow::image::{Verdict, check};
use simulator::{Profile, SimWorld};

/// Closes a disk that is the file `name`, on a worker whose tasks may have to end first. Its image has no flaw then.
#[track_caller]
pub(crate) fn close(world: &SimWorld, cx: &Context, disk: &Arc<QcowDisk>, name: &str, what: &str) {
    let closed = cx.block_on(Arc::clone(disk).close(cx));
    closed.expect("nothing waits for ever").expect("a clean close");
    world.settle();
    assert_flawless(world, cx, name, what);
}

/// Demands that the image `name`, which nobody has open, has no flaw.
#[track_caller]
pub(crate) fn assert_flawless(world: &SimWorld, cx: &Context, name: &str, what: &str) {
    world.set_profile(Profile::IMMEDIATE);
    let view = world.file(name, false).view(cx).expect("a view");
    let report = cx.block_on(check(&view)).expect("it turns").expect("a check");
    assert_eq!(report.verdict(), Verdict::Clean, "{what}: {:?}", report.findings);
}
