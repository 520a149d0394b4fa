//! Work in rounds that callers share: a sync of a file, a write-back of metadata.
//!
//! One round runs at a time. It may not cover changes made since it began, so callers that arrive while one runs
//! share the next one, whichever of them leads it.
//!
//! Invariants: a caller is answered only by a round that began after its call; a round ends however its task ends,
//! with an error if the task was dropped.

use std::future::poll_fn;
use std::task::Poll;

use crate::error::IoError;
use crate::sync::{Mutex, WaitList};

/// The rounds of one kind of work, under a lock.
#[derive(Debug, Default)]
pub struct Rounds {
    running: bool,
    /// The number of rounds that have begun.
    begun: u64,
    /// The number of rounds that have ended, and the error of the last of them.
    ended: u64,
    error: Option<IoError>,
    waiters: WaitList,
}

/// The round that a task leads, until it is dropped.
struct Round<'a> {
    rounds: &'a Mutex<Rounds>,
    result: Result<(), IoError>,
}

impl Drop for Round<'_> {
    fn drop(&mut self) {
        let mut rounds = self.rounds.lock();
        rounds.running = false;
        rounds.ended = rounds.begun;
        rounds.error = self.result.err();
        let woken = rounds.waiters.take();
        drop(rounds);
        drop(woken);
    }
}

impl Rounds {
    /// Returns true while a round runs.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.running
    }

    /// Waits until the round that is running has ended, if one is.
    pub async fn end_of_running(rounds: &Mutex<Self>) {
        let need = {
            let rounds = rounds.lock();
            if rounds.running { rounds.begun } else { 0 }
        };
        poll_fn(|cx| {
            let mut rounds = rounds.lock();
            if rounds.ended >= need {
                return Poll::Ready(());
            }
            rounds.waiters.register(cx.waker());
            Poll::Pending
        })
        .await;
    }

    /// Runs `round`, or waits for one that another caller began after this call, and returns its result.
    ///
    /// # Errors
    ///
    /// The round's error, whoever led it; [`IoError::Dropped`] if the task that led it was dropped.
    pub async fn share(
        rounds: &Mutex<Self>,
        round: impl AsyncFnOnce() -> Result<(), IoError>,
    ) -> Result<(), IoError> {
        let need = rounds.lock().begun + 1;
        let shared = poll_fn(|cx| {
            let mut rounds = rounds.lock();
            if rounds.ended >= need {
                return Poll::Ready(Some(rounds.error.map_or(Ok(()), Err)));
            }
            if rounds.running {
                rounds.waiters.register(cx.waker());
                return Poll::Pending;
            }
            rounds.running = true;
            rounds.begun += 1;
            Poll::Ready(None)
        })
        .await;
        if let Some(result) = shared {
            return result;
        }
        let mut leads = Round {
            rounds,
            result: Err(IoError::Dropped),
        };
        leads.result = round().await;
        leads.result
    }
}

#[cfg(all(test, loom))]
mod model;

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::{Cell, RefCell};
    use std::pin::Pin;
    use std::rc::Rc;
    use std::task::Waker;

    use super::*;
    use crate::task::Context;

    /// Work that ends when it is told to.
    #[derive(Default)]
    pub(crate) struct Slow {
        pub(crate) begun: Cell<u32>,
        answer: Cell<Option<Result<(), IoError>>>,
        waker: RefCell<Option<Waker>>,
    }

    impl Slow {
        pub(crate) fn end(&self, result: Result<(), IoError>) {
            self.answer.set(Some(result));
            if let Some(waker) = self.waker.take() {
                waker.wake();
            }
        }

        pub(crate) async fn work(&self) -> Result<(), IoError> {
            self.begun.set(self.begun.get() + 1);
            poll_fn(|cx| match self.answer.take() {
                Some(result) => Poll::Ready(result),
                None => {
                    *self.waker.borrow_mut() = Some(cx.waker().clone());
                    Poll::Pending
                }
            })
            .await
        }
    }

    pub(crate) type Answers = Rc<RefCell<Vec<Result<(), IoError>>>>;

    /// Starts a task that notes how `asked` ends.
    pub(crate) fn note(
        cx: &Context,
        answers: &Answers,
        asked: impl Future<Output = Result<(), IoError>> + 'static,
    ) {
        let answers = Rc::clone(answers);
        cx.spawn(async move {
            let result = asked.await;
            answers.borrow_mut().push(result);
        });
        cx.run_ready();
    }

    fn is_pending(asked: &mut (impl Future + Unpin)) -> bool {
        let mut cx = std::task::Context::from_waker(Waker::noop());
        Pin::new(asked).poll(&mut cx).is_pending()
    }

    fn ask(cx: &Context, rounds: &Rc<Mutex<Rounds>>, slow: &Rc<Slow>, answers: &Answers) {
        let (rounds, slow) = (Rc::clone(rounds), Rc::clone(slow));
        note(cx, answers, async move {
            Rounds::share(&rounds, || slow.work()).await
        });
    }

    #[test]
    fn callers_during_a_round_share_the_next_one() {
        let (cx, rounds, slow, answers) = (
            Context::syscalls(),
            Rc::default(),
            Rc::<Slow>::default(),
            Answers::default(),
        );
        for _ in 0..4 {
            ask(&cx, &rounds, &slow, &answers);
        }
        assert_eq!(slow.begun.get(), 1);
        assert!(rounds.lock().is_running());
        slow.end(Ok(()));
        cx.run_ready();
        assert_eq!((slow.begun.get(), answers.borrow().len()), (2, 1));
        slow.end(Ok(()));
        cx.run_ready();
        assert_eq!((slow.begun.get(), answers.borrow().len()), (2, 4));
        assert!(answers.borrow().iter().all(Result::is_ok));
        assert!(!rounds.lock().is_running());
        ask(&cx, &rounds, &slow, &answers);
        assert_eq!(slow.begun.get(), 3);
        slow.end(Ok(()));
        cx.run_ready();
    }

    #[test]
    fn end_of_running_round_begins_no_other() {
        let (cx, rounds, slow, answers) = (
            Context::syscalls(),
            Rc::default(),
            Rc::<Slow>::default(),
            Answers::default(),
        );
        let wait = |rounds: &Rc<Mutex<Rounds>>| {
            let rounds = Rc::clone(rounds);
            note(&cx, &answers, async move {
                Rounds::end_of_running(&rounds).await;
                Ok(())
            });
        };
        wait(&rounds);
        assert_eq!(answers.borrow().len(), 1, "none is running");
        let full = Err(IoError::Host { errno: libc::ENOSPC });
        ask(&cx, &rounds, &slow, &answers);
        wait(&rounds);
        assert_eq!(answers.borrow().len(), 1);
        slow.end(full);
        cx.run_ready();
        assert_eq!((slow.begun.get(), answers.borrow().len()), (1, 3));
        assert!(answers.borrow().contains(&full));
    }

    #[test]
    fn round_error_reaches_exactly_its_sharers() {
        let (cx, rounds, slow, answers) = (
            Context::syscalls(),
            Rc::default(),
            Rc::<Slow>::default(),
            Answers::default(),
        );
        for _ in 0..3 {
            ask(&cx, &rounds, &slow, &answers);
        }
        slow.end(Ok(()));
        cx.run_ready();
        let full = Err(IoError::Host { errno: libc::ENOSPC });
        slow.end(full);
        cx.run_ready();
        ask(&cx, &rounds, &slow, &answers);
        slow.end(Ok(()));
        cx.run_ready();
        assert_eq!(*answers.borrow(), [Ok(()), full, full, Ok(())]);
    }

    #[test]
    fn abandoned_round_is_no_success_for_waiting_callers() {
        let (cx, slow, answers) = (Context::syscalls(), Rc::<Slow>::default(), Answers::default());
        let rounds = Rc::<Mutex<Rounds>>::default();
        {
            let mut given_up = Box::pin(Rounds::share(&rounds, std::future::pending));
            assert!(is_pending(&mut given_up));
            ask(&cx, &rounds, &slow, &answers);
            assert_eq!(slow.begun.get(), 0);
        }
        cx.run_ready();
        assert_eq!(slow.begun.get(), 1, "the next one is its own");
        slow.end(Ok(()));
        cx.run_ready();
        assert_eq!(*answers.borrow(), [Ok(())]);
    }

    #[test]
    fn abandoned_round_fails_its_sharers() {
        let (cx, slow, answers) = (Context::syscalls(), Rc::<Slow>::default(), Answers::default());
        let rounds = Rc::<Mutex<Rounds>>::default();
        let mut first = Box::pin(Rounds::share(&rounds, std::future::pending));
        let mut second = Box::pin(Rounds::share(&rounds, std::future::pending));
        assert!(is_pending(&mut first) && is_pending(&mut second));
        ask(&cx, &rounds, &slow, &answers);
        drop(first);
        // It leads before the task has come to look.
        assert!(is_pending(&mut second));
        cx.run_ready();
        assert!(answers.borrow().is_empty());
        drop(second);
        cx.run_ready();
        assert_eq!(*answers.borrow(), [Err(IoError::Dropped)]);
        assert_eq!(slow.begun.get(), 0);
    }
}
