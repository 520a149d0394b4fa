//! The disk as lanes, guests and the host use it: as it is, or behind a queue that breaks a rule.
//!
//! A rule that can be broken between a frontend and its disk is broken here, not in the engine ([`block::canary`]).

use std::sync::Arc;

use block::canary::{Rule, broken};
use block::delay::HoldOff;
use block::status::StatusRange;
use block::{Context, Disk, DiskInfo, DiskQueue, IoError, LocalBoxFuture, Op, OpenQueueError, Request};

/// Returns the disk to open queues of.
pub(crate) fn served(disk: Arc<dyn Disk>) -> Arc<dyn Disk> {
    if [Rule::FlushAnsweredEarly, Rule::ForcedWriteIsNot].map(broken) == [false; 2] {
        return disk;
    }
    Arc::new(Disobedient(disk))
}

#[derive(Debug)]
struct Disobedient(Arc<dyn Disk>);

impl Disk for Disobedient {
    fn info(&self) -> DiskInfo {
        self.0.info()
    }

    fn open_queue(self: Arc<Self>, cx: &Context) -> Result<Box<dyn DiskQueue>, OpenQueueError> {
        Ok(Box::new(DisobedientQueue(Arc::clone(&self.0).open_queue(cx)?)))
    }

    fn close(self: Arc<Self>, cx: &Context) -> LocalBoxFuture<'static, Result<(), IoError>> {
        Arc::clone(&self.0).close(cx)
    }

    fn hold_off(&self) -> Option<HoldOff> {
        self.0.hold_off()
    }
}

#[derive(Debug)]
struct DisobedientQueue(Box<dyn DiskQueue>);

impl DiskQueue for DisobedientQueue {
    fn submit(&self, mut request: Request) {
        match &mut request.op {
            Op::Flush if broken(Rule::FlushAnsweredEarly) => return request.finish(Ok(())),
            Op::Write { fua } | Op::WriteZeroes { fua, .. } if broken(Rule::ForcedWriteIsNot) => *fua = false,
            _ => {}
        }
        self.0.submit(request);
    }

    fn status(&self, offset: u64, len: u64) -> LocalBoxFuture<'_, Result<Vec<StatusRange>, IoError>> {
        self.0.status(offset, len)
    }
}
