//! Syncs of one image, over all its workers: one at a time, and none after one that failed.
//!
//! When a sync fails, the kernel may have dropped the pages it could not write, and it tells so *once*: workers'
//! descriptors are duplicates, which share what has been told already. A later sync, or one that runs beside the
//! failing one, may succeed and have made nothing durable. So an image remembers the first failure for as long as
//! it is open, and its syncs take turns: who asks while one runs shares the next one.
//!
//! What must stay true: a sync succeeds only if it began after it was asked for, and no sync of the image has
//! failed until it ended.

use crate::canary::{Rule, broken};
use crate::error::IoError;
use crate::rounds::Rounds;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicI32, Ordering};

/// The syncs of one image.
#[derive(Debug, Default)]
pub(crate) struct Syncs {
    /// The errno of the first that failed.
    failed: AtomicI32,
    rounds: Mutex<Rounds>,
}

impl Syncs {
    /// Remembers a failure. `true` if it is the first.
    pub(crate) fn fail(&self, errno: i32) -> bool {
        if broken(Rule::FailedSyncForgotten) {
            return true;
        }
        let first = self
            .failed
            .compare_exchange(0, errno, Ordering::SeqCst, Ordering::SeqCst);
        first.is_ok()
    }

    /// Whether nothing is known to have been lost.
    ///
    /// # Errors
    ///
    /// The first sync's that failed.
    #[inline]
    pub(crate) fn check(&self) -> Result<(), IoError> {
        match self.failed.load(Ordering::SeqCst) {
            0 => Ok(()),
            errno => Err(IoError::Host { errno }),
        }
    }

    /// Carries out `sync`, in turn, or shares another's.
    pub(crate) async fn run<F>(&self, sync: impl FnOnce() -> F) -> Result<(), IoError>
    where
        F: Future<Output = Result<(), IoError>>,
    {
        Rounds::share(&self.rounds, async || {
            self.check()?;
            sync().await?;
            self.check()
        })
        .await?;
        // Another may have failed between the round's end and now.
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
    fn after_a_failure_nothing_is_synced_any_more() {
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
