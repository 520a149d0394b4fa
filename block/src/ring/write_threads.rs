//! Threads that perform the buffered writes of files whose file system takes none without blocking.
//!
//! io_uring punts such a write to a kernel thread of its own, and is woken by each that ends. Here each file has one
//! thread, which takes all writes of a worker's round at once, reports several at a time, and ends when it has had nothing to do for
//! a while
//! ([decision](https://github.com/ringdisk/ringdisk/blob/main/docs/decisions/buffered-writes.md)).
//!
//! ```text
//!  worker: push… ── hand_over: a batch ──▶ thread of the file: perform, perform, …
//!          take  ◀── ended list, eventfd if the worker sleeps ──┘
//! ```
//!
//! Invariants: a write is reported once, after it has been performed; a worker that announced its sleep before the report
//! is woken; a thread that ends has received all that was sent to it, and what is sent later has another one.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, TryRecvError};
use std::time::Duration;

use smallvec::SmallVec;

use super::driver::Completion;
use super::sys::DetachedOp;
use crate::event::eventfd;
use crate::sleeper::Sleeper;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::mpsc::{Receiver, Sender, channel};
use crate::sync::thread::{Builder, JoinHandle, yield_now};

/// The number of writes that a thread reports together, unless it has no more to do or they are long. A worker that is
/// woken for fewer takes turns with the thread on a machine of few CPUs; for more, its guest waits.
const REPORTED_TOGETHER: usize = 8;

/// The bytes written after which a thread reports at once.
const REPORTED_BYTES: u64 = 32 << 10;

/// The time after which a thread ends that has had nothing to do: a process may have many files that are rarely written.
const REST: Duration = Duration::from_secs(1);

/// Set in [`Thread::owed`] once the thread receives nothing any more.
const GONE: usize = 1 << (usize::BITS - 1);

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

/// A file that has a thread, at least while there is something to write.
struct Writer {
    /// Writes to be handed over.
    pushed: Vec<Job>,
    thread: Option<Thread>,
}

/// The thread of a file.
struct Thread {
    /// `None` once the thread is to end.
    jobs: Option<Sender<Vec<Job>>>,
    /// The number of batches that were sent and not received, and whether the thread has gone.
    owed: Arc<AtomicUsize>,
    thread: Option<JoinHandle<()>>,
}

impl Thread {
    fn start(ended: &Arc<Ended>) -> io::Result<Self> {
        let (jobs, receiver) = channel();
        let owed = Arc::new(AtomicUsize::new(0));
        let (ended, theirs) = (Arc::clone(ended), Arc::clone(&owed));
        let thread = Builder::new()
            .name("writes".to_owned())
            .spawn(move || serve(&receiver, &theirs, &ended))?;
        Ok(Self {
            jobs: Some(jobs),
            owed,
            thread: Some(thread),
        })
    }

    /// Gives the thread these jobs, or gives them back if it has gone.
    fn send(&self, batch: Vec<Job>) -> Result<(), Vec<Job>> {
        let Some(jobs) = self
            .jobs
            .as_ref()
            .filter(|_| self.owed.fetch_add(1, Ordering::SeqCst) & GONE == 0)
        else {
            return Err(batch);
        };
        jobs.send(batch).map_err(|unsent| unsent.0)
    }
}

impl Drop for Thread {
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
    /// By the file's index among the driver's registered files.
    writers: Vec<Option<Writer>>,
    /// The files with something to hand over.
    pushed: Vec<u32>,
}

impl fmt::Debug for WriteThreads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WriteThreads({})", self.writers.iter().flatten().count())
    }
}

fn serve(jobs: &Receiver<Vec<Job>>, owed: &AtomicUsize, ended: &Ended) {
    loop {
        match next(jobs) {
            Ok(batch) => {
                owed.fetch_sub(1, Ordering::SeqCst);
                ended.perform(batch);
            }
            Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) => {
                if owed
                    .compare_exchange(0, GONE, Ordering::SeqCst, Ordering::SeqCst)
                    .is_ok()
                {
                    if cfg!(shuttle) {
                        // Something may be sent before the channel is gone.
                        yield_now();
                    }
                    return;
                }
            }
        }
    }
}

/// Waits for the next batch, for as long as a thread rests. For the model checker, which has no time, that is not long.
fn next(jobs: &Receiver<Vec<Job>>) -> Result<Vec<Job>, RecvTimeoutError> {
    if !cfg!(shuttle) {
        return jobs.recv_timeout(REST);
    }
    match jobs.try_recv() {
        Ok(batch) => Ok(batch),
        Err(TryRecvError::Disconnected) => Err(RecvTimeoutError::Disconnected),
        Err(TryRecvError::Empty) => Err(RecvTimeoutError::Timeout),
    }
}

impl WriteThreads {
    /// Returns true if `file` has a thread.
    #[inline]
    pub(super) fn serves(&self, file: u32) -> bool {
        self.writers.get(file as usize).is_some_and(Option::is_some)
    }

    /// Starts a thread for `file`, which has none.
    ///
    /// # Errors
    ///
    /// If the process can have no more threads or descriptors.
    pub(super) fn start(&mut self, file: u32) -> io::Result<()> {
        let ended = match &self.ended {
            Some(ended) => ended,
            None => {
                let wake = eventfd()?;
                let ended = Ended {
                    list: Mutex::new(Vec::new()),
                    len: AtomicUsize::new(0),
                    worker: Sleeper::new(wake.try_clone()?),
                    wake,
                };
                self.ended.insert(Arc::new(ended))
            }
        };
        let writer = Writer {
            pushed: Vec::new(),
            thread: Some(Thread::start(ended)?),
        };
        let place = file as usize;
        if self.writers.len() <= place {
            self.writers.resize_with(place + 1, || None);
        }
        if let Some(place) = self.writers.get_mut(place) {
            *place = Some(writer);
        }
        Ok(())
    }

    /// Ends the thread of `file`, if it has one. Its writes have ended.
    pub(super) fn end(&mut self, file: u32) {
        if let Some(writer) = self.writers.get_mut(file as usize) {
            *writer = None;
        }
    }

    /// Returns the eventfd that is signalled when a write ends while the worker sleeps; `None` before the first thread.
    pub(super) fn wake_fd(&self) -> Option<RawFd> {
        self.ended.as_ref().map(|ended| ended.wake.as_raw_fd())
    }

    /// Queues a write of `file`, whose thread was started, for [`WriteThreads::hand_over`].
    pub(super) fn push(&mut self, file: u32, op: DetachedOp, user_data: u64) {
        if let Some(Some(writer)) = self.writers.get_mut(file as usize) {
            if writer.pushed.is_empty() {
                self.pushed.push(file);
            }
            writer.pushed.push(Job { op, user_data });
        }
    }

    /// Hands what was pushed over to the threads.
    #[inline]
    pub(super) fn hand_over(&mut self) {
        let Some(ended) = &self.ended else { return };
        for file in self.pushed.drain(..) {
            let Some(Some(writer)) = self.writers.get_mut(file as usize) else {
                continue;
            };
            let batch = std::mem::take(&mut writer.pushed);
            let sent = match &writer.thread {
                Some(thread) => thread.send(batch),
                None => Err(batch),
            };
            let Err(unsent) = sent else { continue };
            // The thread had a rest, and has gone.
            writer.thread = Thread::start(ended)
                .inspect_err(|error| tracing::debug!(%error, "a thread that writes cannot be started"))
                .ok();
            let sent = match &writer.thread {
                Some(thread) => thread.send(unsent),
                None => Err(unsent),
            };
            if let Err(unsent) = sent {
                ended.perform(unsent);
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
