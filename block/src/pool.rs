//! A few threads for work that would keep a worker from its queues: decompression, calls that block.
//!
//! Invariants:
//!
//! - A job is answered exactly once, also if its thread panics.
//! - The pool's threads end before it is gone, after the jobs that were sent.

use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Poll, Waker};

use crate::error::IoError;
use crate::sync::Mutex;
use crate::sync::mpsc::{Receiver, Sender, channel};
use crate::sync::thread::{self, JoinHandle};

/// Threads that share a queue of jobs. Each has a state of its own, as a decompressor.
pub struct Pool<S> {
    name: &'static str,
    threads: usize,
    state: fn() -> Result<S, IoError>,
    running: Mutex<Option<Running<S>>>,
    /// The number of threads that can be started, to simulate a process limit.
    #[cfg(test)]
    can_start: std::sync::atomic::AtomicUsize,
}

type Job<S> = Box<dyn FnOnce(&mut S) + Send>;

struct Running<S> {
    jobs: Sender<Job<S>>,
    threads: Vec<JoinHandle<()>>,
}

impl<S> fmt::Debug for Pool<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("name", &self.name)
            .field("threads", &self.threads)
            .finish_non_exhaustive()
    }
}

impl<S: 'static> Pool<S> {
    /// Creates a pool of `threads` threads called `name` (at most 15 bytes are shown), each with a `state`. They start
    /// with the first job.
    #[must_use]
    pub fn new(name: &'static str, threads: usize, state: fn() -> Result<S, IoError>) -> Self {
        Self {
            name,
            threads,
            state,
            running: Mutex::new(None),
            #[cfg(test)]
            can_start: std::sync::atomic::AtomicUsize::new(threads),
        }
    }

    /// Starts the threads if they are not running. Returns `false` if there are none; then the caller does the work
    /// itself. Fewer threads than were asked for suffice, and another attempt follows if none can be started.
    pub fn start(&self) -> bool {
        if self.threads == 0 {
            return false;
        }
        let mut running = self.running.lock();
        if running.is_none() {
            let (jobs, receiver) = channel::<Job<S>>();
            let receiver = Arc::new(Mutex::new(receiver));
            let threads: Vec<_> = (0..self.threads)
                .map_while(|_| self.spawn(Arc::clone(&receiver)).ok())
                .collect();
            if !threads.is_empty() {
                *running = Some(Running { jobs, threads });
            }
        }
        running.is_some()
    }

    fn spawn(&self, jobs: Arc<Mutex<Receiver<Job<S>>>>) -> std::io::Result<JoinHandle<()>> {
        #[cfg(test)]
        {
            use std::sync::atomic::Ordering::Relaxed;
            let left = self
                .can_start
                .fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1));
            left.map_err(|_| std::io::ErrorKind::WouldBlock)?;
        }
        let state = self.state;
        thread::Builder::new()
            .name(self.name.to_owned())
            .spawn(move || serve(&jobs, state))
            .inspect_err(|error| tracing::debug!(%error, name = self.name, "a thread cannot be started"))
    }

    /// Does `work` on one of the threads, which must have been [started](Pool::start).
    ///
    /// # Errors
    ///
    /// [`IoError::Dropped`] if there is no thread, or the thread has panicked.
    pub async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut S) -> T + Send + 'static,
    ) -> Result<T, IoError> {
        let answer = Arc::new(Answer::new(Waited {
            result: None,
            waker: None,
        }));
        let guard = AnswerOnDrop(Arc::clone(&answer), Err(IoError::Dropped));
        let job: Job<S> = Box::new(move |state| guard.give(work(state)));
        match &*self.running.lock() {
            // An error drops the job, which answers it.
            Some(running) => drop(running.jobs.send(job)),
            None => drop(job),
        }
        poll_fn(|cx| {
            let mut waited = answer.lock();
            match waited.result.take() {
                Some(result) => Poll::Ready(result),
                None => {
                    waited.waker = Some(cx.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }
}

/// The answer to a job, and the task that waits for it.
type Answer<T> = Mutex<Waited<T>>;

struct Waited<T> {
    result: Option<Result<T, IoError>>,
    waker: Option<Waker>,
}

/// Gives the answer when the job is gone, whether it was done or not.
struct AnswerOnDrop<T>(Arc<Answer<T>>, Result<T, IoError>);

impl<T> AnswerOnDrop<T> {
    /// Ends the job with this answer.
    fn give(mut self, answer: T) {
        self.1 = Ok(answer);
    }
}

impl<T> Drop for AnswerOnDrop<T> {
    fn drop(&mut self) {
        let result = std::mem::replace(&mut self.1, Err(IoError::Dropped));
        let waker = {
            let mut waited = self.0.lock();
            waited.result = Some(result);
            waited.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<S> Drop for Pool<S> {
    fn drop(&mut self) {
        let Some(Running { jobs, threads }) = self.running.lock().take() else {
            return;
        };
        drop(jobs);
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!(name = self.name, "a thread of a pool has panicked");
            }
        }
    }
}

fn serve<S>(jobs: &Mutex<Receiver<Job<S>>>, state: fn() -> Result<S, IoError>) {
    let mut state = match state() {
        Ok(state) => state,
        Err(error) => return tracing::error!(%error, "a thread of a pool has no state to work with"),
    };
    loop {
        let job = jobs.lock().recv();
        let Ok(job) = job else { return };
        job(&mut state);
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;
    use crate::ring::RingKind;
    use crate::task::Context;
    use std::sync::atomic::Ordering::Relaxed;

    fn context() -> Context {
        Context::new(RingKind::Syscalls, 8).expect("a ring")
    }

    #[test]
    fn pool_runs_every_job_on_its_threads_state() {
        let pool = Pool::new("test", 2, || Ok(40));
        assert!(pool.start());
        let cx = context();
        for _ in 0..100 {
            assert_eq!(cx.block_on(pool.run(|state| *state + 2)).expect("turns"), Ok(42));
        }
    }

    #[test]
    fn pool_starts_fewer_threads_and_retries_if_none_started() {
        let pool = Pool::new("test", 3, || Ok(()));
        let cx = context();
        pool.can_start.store(0, Relaxed);
        assert!(!pool.start());
        assert_eq!(
            cx.block_on(pool.run(|()| ())).expect("turns"),
            Err(IoError::Dropped)
        );
        pool.can_start.store(2, Relaxed);
        assert!(pool.start());
        assert_eq!(
            pool.running.lock().as_ref().map(|running| running.threads.len()),
            Some(2)
        );
        assert_eq!(cx.block_on(pool.run(|()| 7)).expect("turns"), Ok(7));
        assert!(!Pool::new("none", 0, || Ok(())).start());
    }

    #[test]
    fn pool_fails_jobs_when_thread_panics_or_has_no_state() {
        let cx = context();
        let pool = Pool::new("test", 1, || Ok(()));
        assert!(pool.start());
        let panics = pool.run(|()| panic!("a job of this test"));
        assert_eq!(
            cx.block_on(panics).expect("turns"),
            Err::<(), _>(IoError::Dropped)
        );
        let pool = Pool::<()>::new("test", 1, || Err(IoError::Unsupported));
        assert!(pool.start());
        assert_eq!(
            cx.block_on(pool.run(|()| ())).expect("turns"),
            Err(IoError::Dropped)
        );
    }
}
