//! Threads that perform the buffered writes of files whose file system takes none without blocking.
//!
//! io_uring punts such a write to a kernel thread of its own, and is woken by each that ends. Here each file has one
//! thread, which takes all writes of a worker's round at once, and reports several at a time
//! ([decision](https://github.com/ringdisk/ringdisk/blob/main/docs/decisions/buffered-writes.md)).
//!
//! ```text
//!  worker: push… ── hand_over: a batch ──▶ thread of the file: perform, perform, …
//!          take  ◀── ended list, eventfd if the worker sleeps ──┘
//! ```
//!
//! Invariants: a write is reported once, after it has been performed; a worker that announced its sleep before the report
//! is woken.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use smallvec::SmallVec;

use super::driver::Completion;
use super::sys::DetachedOp;
use crate::sleeper::Sleeper;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::mpsc::{Receiver, Sender, channel};
use crate::sync::thread::{Builder, JoinHandle};
use crate::task::eventfd;

/// The number of writes that a thread reports together, unless it has no more to do or they are long. A worker that is
/// woken for fewer takes turns with the thread on a machine of few CPUs; for more, its guest waits.
const REPORTED_TOGETHER: usize = 8;

/// The bytes written after which a thread reports at once.
const REPORTED_BYTES: u64 = 32 << 10;

/// One write, and the number under which it is reported.
struct Job {
    op: DetachedOp,
    user_data: u64,
}

/// The writes that have been performed and not been taken.
struct Ended {
    list: Mutex<Vec<Completion>>,
    len: AtomicUsize,
    worker: Sleeper,
    wake: OwnedFd,
}

impl Ended {
    fn report(&self, batch: impl Iterator<Item = Completion>) {
        {
            let mut list = self.list.lock();
            list.extend(batch);
            self.len.store(list.len(), Ordering::SeqCst);
        }
        self.worker.wake();
    }

    /// Performs all jobs, in their order.
    fn perform(&self, jobs: Vec<Job>) {
        let mut batch: SmallVec<[Completion; REPORTED_TOGETHER]> = SmallVec::new();
        let mut bytes = 0;
        for Job { op, user_data } in jobs {
            let result = op.perform();
            bytes += u64::try_from(result).unwrap_or_default();
            batch.push(Completion {
                user_data,
                result,
                more: false,
            });
            if batch.len() == REPORTED_TOGETHER || bytes >= REPORTED_BYTES {
                self.report(batch.drain(..));
                bytes = 0;
            }
        }
        if !batch.is_empty() {
            self.report(batch.drain(..));
        }
    }
}

/// The thread of one file.
struct WriteThread {
    /// The file's index among the driver's registered files.
    file: u32,
    /// Writes to be handed over.
    pushed: Vec<Job>,
    /// `None` once the thread is to end.
    jobs: Option<Sender<Vec<Job>>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for WriteThread {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("a thread that writes has panicked");
        }
    }
}

/// The write threads of one driver.
#[derive(Default)]
pub(super) struct WriteThreads {
    ended: Option<Arc<Ended>>,
    threads: Vec<WriteThread>,
}

impl fmt::Debug for WriteThreads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WriteThreads({})", self.threads.len())
    }
}

fn serve(jobs: &Receiver<Vec<Job>>, ended: &Ended) {
    while let Ok(batch) = jobs.recv() {
        ended.perform(batch);
    }
}

impl WriteThreads {
    /// Returns true if `file` has a thread.
    #[inline]
    pub(super) fn serves(&self, file: u32) -> bool {
        self.threads.iter().any(|thread| thread.file == file)
    }

    /// Starts a thread for `file`, which has none.
    ///
    /// # Errors
    ///
    /// If the process can have no more threads or descriptors.
    pub(super) fn start(&mut self, file: u32) -> io::Result<()> {
        let ended = match &self.ended {
            Some(ended) => Arc::clone(ended),
            None => {
                let wake = eventfd()?;
                let ended = Ended {
                    list: Mutex::new(Vec::new()),
                    len: AtomicUsize::new(0),
                    worker: Sleeper::new(wake.try_clone()?),
                    wake,
                };
                Arc::clone(self.ended.insert(Arc::new(ended)))
            }
        };
        let (jobs, receiver) = channel();
        let thread = Builder::new()
            .name("writes".to_owned())
            .spawn(move || serve(&receiver, &ended))?;
        self.threads.push(WriteThread {
            file,
            pushed: Vec::new(),
            jobs: Some(jobs),
            thread: Some(thread),
        });
        Ok(())
    }

    /// Ends the thread of `file`, if it has one. Its writes have ended.
    pub(super) fn end(&mut self, file: u32) {
        self.threads.retain(|thread| thread.file != file);
    }

    /// Returns the eventfd that is signalled when a write ends while the worker sleeps; `None` before the first thread.
    pub(super) fn wake_fd(&self) -> Option<RawFd> {
        self.ended.as_ref().map(|ended| ended.wake.as_raw_fd())
    }

    /// Queues a write of `file`, whose thread was started, for [`WriteThreads::hand_over`].
    pub(super) fn push(&mut self, file: u32, op: DetachedOp, user_data: u64) {
        if let Some(thread) = self.threads.iter_mut().find(|thread| thread.file == file) {
            thread.pushed.push(Job { op, user_data });
        }
    }

    /// Hands what was pushed over to the threads.
    #[inline]
    pub(super) fn hand_over(&mut self) {
        for thread in &mut self.threads {
            if thread.pushed.is_empty() {
                continue;
            }
            let batch = std::mem::take(&mut thread.pushed);
            let sent = thread.jobs.as_ref().map(|jobs| jobs.send(batch));
            if let (Some(Err(unsent)), Some(ended)) = (sent, &self.ended) {
                // The thread is gone, which only a panic can do.
                ended.perform(unsent.0);
            }
        }
    }

    /// Announces that the worker sleeps. Returns false if a write has ended already; then it must not.
    #[inline]
    pub(super) fn prepare_sleep(&self) -> bool {
        let Some(ended) = &self.ended else { return true };
        ended.worker.announce();
        if ended.len.load(Ordering::SeqCst) != 0 {
            ended.worker.end();
            return false;
        }
        true
    }

    /// Ends an announced sleep.
    #[inline]
    pub(super) fn end_sleep(&self) {
        if let Some(ended) = &self.ended {
            ended.worker.end();
        }
    }

    /// Appends the completions of the writes that have ended to `out`.
    #[inline]
    pub(super) fn take(&self, out: &mut Vec<Completion>) {
        let Some(ended) = &self.ended else { return };
        if ended.len.load(Ordering::SeqCst) == 0 {
            return;
        }
        let mut list = ended.list.lock();
        out.append(&mut list);
        ended.len.store(0, Ordering::SeqCst);
    }
}

#[cfg(all(test, shuttle))]
mod model;
