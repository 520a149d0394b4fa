//! Syncs of one image, over all its workers: one at a time, and none after one that failed.
//!
//! After a failed sync the kernel may have dropped the pages it could not write, and it reports that *once*: workers'
//! descriptors are duplicates, which share the error state. A later sync, or one that runs beside the failing one,
//! may succeed and have made nothing durable. So an image remembers the first failure for as long as it is open.
//! Its syncs run one at a time, and callers that arrive during one share the next.
//!
//! A sync with nothing to cover is none: it succeeds without a call of the host ([`crate::changes`]).
//!
//! Invariant: a sync succeeds only if it began after it was requested, or one before it covers every change that ended
//! before the request; and no sync of the image had failed by the time it ended.

use std::sync::Arc;

use crate::changes::Changes;
use crate::error::IoError;
use crate::rounds::Rounds;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicBool, AtomicI32, Ordering};

/// The syncs of one image.
#[derive(Debug, Default)]
pub(crate) struct Syncs {
    /// The errno of the first failed sync; 0 if none has failed.
    failed: AtomicI32,
    /// A sync has succeeded.
    succeeded: AtomicBool,
    rounds: Mutex<Rounds>,
    changes: Arc<Changes>,
}

impl Syncs {
    /// Returns the changes that syncs cover.
    pub(crate) fn changes(&self) -> &Arc<Changes> {
        &self.changes
    }

    /// Records a failure. Returns true if it is the first.
    pub(crate) fn fail(&self, errno: i32) -> bool {
        let first = self
            .failed
            .compare_exchange(0, errno, Ordering::SeqCst, Ordering::SeqCst);
        first.is_ok()
    }

    /// Fails if a sync has failed, so that written data may be lost.
    ///
    /// # Errors
    ///
    /// The error of the first sync that failed.
    #[inline]
    pub(crate) fn check(&self) -> Result<(), IoError> {
        match self.failed.load(Ordering::SeqCst) {
            0 => Ok(()),
            errno => Err(IoError::Host { errno }),
        }
    }

    /// Returns true if a sync has succeeded.
    #[inline]
    pub(crate) fn have_succeeded(&self) -> bool {
        self.succeeded.load(Ordering::Acquire)
    }

    /// Runs `sync` in its turn if there is anything for it to cover, or shares the round of another caller.
    pub(crate) async fn run<F>(&self, sync: impl FnOnce() -> F) -> Result<(), IoError>
    where
        F: Future<Output = Result<(), IoError>>,
    {
        Rounds::share(&self.rounds, async || {
            self.check()?;
            if self.changes.are_covered() {
                return Ok(());
            }
            // What ends from here on may miss the sync.
            let ended = self.changes.ended();
            sync().await?;
            self.check()?;
            self.changes.cover(ended);
            self.succeeded.store(true, Ordering::Release);
            Ok(())
        })
        .await?;
        // Another sync may have failed since the round ended.
        self.check()
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;
    use crate::rounds::tests::{Answers, Slow, note};
    use crate::task::Context;

    fn ask(cx: &Context, syncs: &Rc<Syncs>, slow: &Rc<Slow>, answers: &Answers) {
        let (syncs, slow) = (Rc::clone(syncs), Rc::clone(slow));
        note(cx, answers, async move { syncs.run(|| slow.work()).await });
    }

    #[test]
    fn syncs_fail_without_syncing_after_a_failure() {
        let (cx, slow, answers) = (Context::syscalls(), Rc::default(), Answers::default());
        let syncs = Rc::new(Syncs::default());
        ask(&cx, &syncs, &slow, &answers);
        ask(&cx, &syncs, &slow, &answers);
        // Something else finds out meanwhile: a forced write on another worker.
        assert!(syncs.fail(libc::EIO));
        slow.end(Ok(()));
        cx.run_ready();
        ask(&cx, &syncs, &slow, &answers);
        assert!(!syncs.fail(libc::ENOSPC));
        let lost = Err(IoError::Host { errno: libc::EIO });
        assert_eq!(*answers.borrow(), [lost, lost, lost]);
        assert_eq!(slow.begun.get(), 1);
    }
}
