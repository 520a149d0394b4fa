//! Syncs of one image, over all its workers: one at a time, and none after one that failed.
//!
//! When a sync fails, the kernel may have dropped the pages it could not write, and it tells so *once*: workers'
//! descriptors are duplicates, which share what has been told already. A later sync, or one that runs beside the
//! failing one, may succeed and have made nothing durable. So an image remembers the first failure for as long as
//! it is open, and its syncs take turns: who asks while one runs shares the next one.
//!
//! What must stay true: a sync succeeds only if it began after it was asked for, and no sync of the image has
//! failed until it ended.

use crate::sync::atomic::{AtomicI32, Ordering};
use std::future::poll_fn;
use std::task::{Poll, Waker};

use crate::sync::Mutex;

use crate::canary::{Rule, broken};
use crate::error::IoError;

/// The syncs of one image.
#[derive(Debug, Default)]
pub(crate) struct Syncs {
    /// The errno of the first that failed.
    failed: AtomicI32,
    rounds: Mutex<Rounds>,
}

#[derive(Debug, Default)]
struct Rounds {
    running: bool,
    /// How many have begun.
    begun: u64,
    /// How many have ended, and how the last one did.
    ended: u64,
    result: Option<IoError>,
    waiters: Vec<Waker>,
}

/// Ends a round, however its task ends.
struct Round<'a> {
    syncs: &'a Syncs,
    result: Result<(), IoError>,
}

impl Drop for Round<'_> {
    fn drop(&mut self) {
        let mut rounds = self.syncs.rounds.lock();
        rounds.running = false;
        rounds.ended = rounds.begun;
        rounds.result = self.result.err();
        let waiters = std::mem::take(&mut rounds.waiters);
        drop(rounds);
        waiters.into_iter().for_each(Waker::wake);
    }
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
        // One that is running may have passed over what was written since it began.
        let need = self.rounds.lock().begun + 1;
        let lead = poll_fn(|cx| {
            let mut rounds = self.rounds.lock();
            if rounds.ended >= need {
                return Poll::Ready(Err(rounds.result));
            }
            if rounds.running {
                rounds.waiters.push(cx.waker().clone());
                return Poll::Pending;
            }
            rounds.running = true;
            rounds.begun += 1;
            Poll::Ready(Ok(()))
        })
        .await;
        match lead {
            Err(None) => return self.check(),
            Err(Some(error)) => return Err(error),
            Ok(()) => {}
        }
        let mut round = Round {
            syncs: self,
            result: Err(IoError::Dropped),
        };
        let result = match self.check() {
            Ok(()) => sync().await,
            Err(error) => Err(error),
        };
        round.result = result.and_then(|()| self.check());
        round.result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::Context;
    use std::cell::{Cell, RefCell};
    use std::rc::Rc;

    /// A sync that ends when it is told to.
    #[derive(Default)]
    struct Slow {
        begun: Cell<u32>,
        answer: Cell<Option<Result<(), IoError>>>,
        waker: RefCell<Option<Waker>>,
    }

    impl Slow {
        fn end(&self, result: Result<(), IoError>) {
            self.answer.set(Some(result));
            if let Some(waker) = self.waker.take() {
                waker.wake();
            }
        }
    }

    type Answers = Rc<RefCell<Vec<Result<(), IoError>>>>;

    fn ask(cx: &Context, syncs: &Rc<Syncs>, slow: &Rc<Slow>, answers: &Answers) {
        let (syncs, slow, answers) = (Rc::clone(syncs), Rc::clone(slow), Rc::clone(answers));
        cx.spawn(async move {
            let sync = || {
                slow.begun.set(slow.begun.get() + 1);
                poll_fn(|cx| match slow.answer.take() {
                    Some(result) => Poll::Ready(result),
                    None => {
                        *slow.waker.borrow_mut() = Some(cx.waker().clone());
                        Poll::Pending
                    }
                })
            };
            let result = syncs.run(sync).await;
            answers.borrow_mut().push(result);
        });
        cx.run_ready();
    }

    #[test]
    fn who_asks_while_one_runs_shares_the_next_one() {
        let (cx, syncs, slow, answers) = (
            Context::syscalls(),
            Rc::default(),
            Rc::default(),
            Answers::default(),
        );
        for _ in 0..4 {
            ask(&cx, &syncs, &slow, &answers);
        }
        assert_eq!(slow.begun.get(), 1);
        slow.end(Ok(()));
        cx.run_ready();
        assert_eq!((slow.begun.get(), answers.borrow().len()), (2, 1));
        slow.end(Ok(()));
        cx.run_ready();
        assert_eq!((slow.begun.get(), answers.borrow().len()), (2, 4));
        assert!(answers.borrow().iter().all(Result::is_ok));
        ask(&cx, &syncs, &slow, &answers);
        assert_eq!(slow.begun.get(), 3);
        slow.end(Ok(()));
        cx.run_ready();
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

    #[test]
    fn a_sync_that_is_given_up_is_nobodys_success() {
        let (cx, slow, answers) = (Context::syscalls(), Rc::<Slow>::default(), Answers::default());
        let syncs = Rc::new(Syncs::default());
        {
            let mut given_up = Box::pin(syncs.run(std::future::pending));
            let waker = Waker::noop();
            assert!(
                given_up
                    .as_mut()
                    .poll(&mut std::task::Context::from_waker(waker))
                    .is_pending()
            );
            ask(&cx, &syncs, &slow, &answers);
            assert_eq!(slow.begun.get(), 0);
        }
        cx.run_ready();
        assert_eq!(slow.begun.get(), 1, "the next one is its own");
        slow.end(Ok(()));
        cx.run_ready();
        assert_eq!(*answers.borrow(), [Ok(())]);
    }
}
