//! The disk as lanes, guests and the host use it: as it is, or behind a queue that breaks a rule.
//!
//! A rule that can be broken between a frontend and its disk is broken here, not in the engine ([`block::canary`]).

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use block::canary::{Rule, broken, strikes};
use block::delay::HoldOff;
use block::status::StatusRange;
use block::{
    Buffer, Context, Disk, DiskInfo, DiskQueue, IoError, LocalBoxFuture, Op, OpenQueueError, Request,
};

/// A kind of frontend.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Frontend {
    Lane,
    Virtio,
    Ublk,
}

/// The rules that can be broken between a frontend and its disk.
const BREAKABLE: [Rule; 6] = [
    Rule::FlushAnsweredEarly,
    Rule::ForcedWriteIsNot,
    Rule::FailedSyncForgotten,
    Rule::BufferBackEarly,
    Rule::UblkCommitEarly,
    Rule::UblkPagesBackEarly,
];

/// Returns the disk for such a frontend to open queues of.
pub(crate) fn served(disk: Arc<dyn Disk>, frontend: Frontend) -> Arc<dyn Disk> {
    if !BREAKABLE.iter().any(|&rule| broken(rule)) {
        return disk;
    }
    Arc::new(Disobedient {
        disk,
        frontend,
        has_failed: AtomicBool::new(false),
    })
}

#[derive(Debug)]
struct Disobedient {
    disk: Arc<dyn Disk>,
    frontend: Frontend,
    /// A FLUSH has failed.
    has_failed: AtomicBool,
}

impl Disk for Disobedient {
    fn info(&self) -> DiskInfo {
        self.disk.info()
    }

    fn open_queue(self: Arc<Self>, cx: &Context) -> Result<Box<dyn DiskQueue>, OpenQueueError> {
        Ok(Box::new(DisobedientQueue {
            queue: Arc::clone(&self.disk).open_queue(cx)?,
            disk: self,
            cx: cx.clone(),
        }))
    }

    fn close(self: Arc<Self>, cx: &Context) -> LocalBoxFuture<'static, Result<(), IoError>> {
        Arc::clone(&self.disk).close(cx)
    }

    fn hold_off(&self) -> Option<HoldOff> {
        self.disk.hold_off()
    }
}

#[derive(Debug)]
struct DisobedientQueue {
    queue: Box<dyn DiskQueue>,
    disk: Arc<Disobedient>,
    cx: Context,
}

impl DiskQueue for DisobedientQueue {
    fn submit(&self, mut request: Request) {
        if self.is_early(&request) {
            return self.answer_early(request);
        }
        match &mut request.op {
            Op::Flush if broken(Rule::FlushAnsweredEarly) => return request.finish(Ok(())),
            Op::Flush if broken(Rule::FailedSyncForgotten) => return self.flush(request),
            Op::Write { fua } | Op::WriteZeroes { fua, .. } if broken(Rule::ForcedWriteIsNot) => *fua = false,
            _ => {}
        }
        self.queue.submit(request);
    }

    fn status(&self, offset: u64, len: u64) -> LocalBoxFuture<'_, Result<Vec<StatusRange>, IoError>> {
        self.queue.status(offset, len)
    }
}

impl DisobedientQueue {
    /// Only the first FLUSH that fails is known to have failed.
    fn flush(&self, request: Request) {
        let (flush, answer) = Request::local(Op::Flush, 0, 0, Buffer::default());
        self.queue.submit(flush);
        let disk = Arc::clone(&self.disk);
        self.cx.spawn(async move {
            let result = answer.await.result;
            let is_known = result.is_err() && disk.has_failed.swap(true, Ordering::Relaxed);
            request.finish(if is_known { Ok(()) } else { result });
        });
    }

    /// Returns true if a request with data is answered before the disk has done it.
    fn is_early(&self, request: &Request) -> bool {
        let is_registered = request.buffer.memory().is_none();
        match (self.disk.frontend, request.op) {
            (Frontend::Virtio, Op::Read) => strikes(Rule::BufferBackEarly, 5),
            (Frontend::Ublk, _) if is_registered => strikes(Rule::UblkPagesBackEarly, 5),
            (Frontend::Ublk, Op::Write { .. }) => strikes(Rule::UblkCommitEarly, 7),
            _ => false,
        }
    }

    /// Answers a request and carries it out with the same bytes, which nobody keeps for it any more.
    fn answer_early(&self, mut request: Request) {
        let bytes = Rc::new(request.take_buffer());
        let part = Buffer::part(&bytes, 0, bytes.len());
        let (late, answer) = Request::local(request.op, request.offset, request.len, part);
        self.queue.submit(late);
        drop(answer);
        request.finish(Ok(()));
    }
}
