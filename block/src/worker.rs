//! The worker: one thread, one ring, one executor, and the frontends it serves.
//!
//! Every event a worker waits for comes through its ring: kicks and wake-ups are watched eventfds, I/O
//! ends as completions. One system call both submits and waits. An idle worker first polls for a bounded
//! time, which grows while polling finds work and shrinks to zero on an idle disk. Only then does it ask its
//! guests for notifications and sleep. If even requests come through the ring and the worker does not poll,
//! the call that submits a round's ops is the one that waits.
//!
//! Invariants: between asking for notifications and sleeping every queue is checked once more; a frontend is
//! removed only when each of its requests has been answered and published.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::disk::LocalBoxFuture;
use crate::ring::{EventToken, FixedTable, Ring, RingError, RingKind, Watch};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::thread::{self, JoinHandle};
use crate::sync::{Mutex, mpsc};
use crate::task::{Context, RunQueue};

/// Source of a worker's requests and receiver of the answers: a virtqueue, a ublk queue.
///
/// Called by its worker only. None of these may block.
pub trait Frontend {
    /// Takes all available requests and submits them. Returns true if there were any.
    fn poll(&mut self) -> bool;

    /// Publishes all available answers, with at most one notification. Returns true if there were any.
    fn publish(&mut self) -> bool;

    /// Asks for a notification when a request comes, because the worker is about to sleep. Returns
    /// true if a request or an answer to publish is there already; the worker then does not sleep.
    fn prepare_sleep(&mut self) -> bool;

    /// Turns notifications off: the worker polls again.
    fn end_sleep(&mut self);

    /// Returns true if requests arrive as ring completions. Polling such a frontend is no cheaper than asking to be
    /// woken, so the worker may sleep right after a busy round.
    fn comes_through_ring(&self) -> bool {
        false
    }

    /// Returns the number of requests taken and not yet published.
    fn in_flight(&self) -> usize;

    /// Ends the frontend's service: called once, after removal was requested and [`Frontend::in_flight`] has
    /// reached zero. The frontend is dropped next. From the request on, [`Frontend::poll`] is not called any more.
    fn removed(&mut self) {}
}

/// The id of a worker's frontend.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct FrontendId(u64);

/// Last step of a worker's thread before it serves, such as dropping privileges that only its setup needs.
#[derive(Clone)]
pub struct StartHook(Arc<dyn Fn() -> io::Result<()> + Send + Sync>);

impl StartHook {
    /// Makes a hook that calls `f` once on each worker's thread.
    pub fn new(f: impl Fn() -> io::Result<()> + Send + Sync + 'static) -> Self {
        Self(Arc::new(f))
    }

    /// Calls it, on a thread that is about to serve.
    ///
    /// # Errors
    ///
    /// The error of the hook.
    pub fn run(&self) -> io::Result<()> {
        (self.0)()
    }
}

impl fmt::Debug for StartHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StartHook")
    }
}

/// Configuration of a worker.
#[derive(Clone, Debug)]
pub struct WorkerConfig {
    /// The thread's name.
    pub name: String,
    /// The ring's driver.
    pub ring: RingKind,
    /// The number of ops that may be in flight.
    pub depth: u32,
    /// The number of slots in the ring's table for buffers that a kernel driver registers.
    pub registered_buffers: u16,
    /// The CPUs to run on; empty for all.
    pub cpus: Vec<usize>,
    /// The longest time to poll before sleeping; zero never polls.
    pub poll_max: Duration,
    /// The thread's last step before it serves.
    pub on_start: Option<StartHook>,
}

impl Default for WorkerConfig {
    fn default() -> Self {
        Self {
            name: "ringdisk".to_owned(),
            ring: RingKind::Auto,
            depth: 256,
            registered_buffers: 0,
            cpus: Vec::new(),
            poll_max: Duration::from_micros(50),
            on_start: None,
        }
    }
}

/// Error: a worker could not be started.
#[derive(Debug, thiserror::Error)]
pub enum StartWorkerError {
    /// The thread could not be made.
    #[error("cannot start a worker thread")]
    Thread(#[source] io::Error),
    /// The ring could not be made.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// The wake-up could not be watched.
    #[error("cannot set up the worker's wake-up")]
    Wake(#[source] io::Error),
    /// The worker's hook failed.
    #[error("cannot prepare the worker's thread")]
    Hook(#[source] io::Error),
    /// The CPUs cannot be used.
    #[error("cannot run a worker on CPUs {cpus:?}; it may run on CPUs {allowed}")]
    Affinity {
        /// The requested CPUs.
        cpus: Vec<usize>,
        /// The CPUs it may use, such as `0-3,6`.
        allowed: String,
        /// The reason.
        #[source]
        source: io::Error,
    },
}

/// The worker has ended: it was stopped, or it failed.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("the worker has ended")]
pub struct WorkerGone;

type Command = Box<dyn FnOnce(&mut Worker) + Send>;

#[derive(Default)]
struct Commands {
    list: Mutex<Vec<Command>>,
    waiting: AtomicBool,
    stop: AtomicBool,
    ended: AtomicBool,
}

/// State of a worker, on its thread. Reached through [`WorkerHandle::run`], or made [by hand](Worker::by_hand).
pub struct Worker {
    cx: Context,
    frontends: Vec<Entry>,
    next_id: u64,
    commands: Arc<Commands>,
    poll: PollTime,
}

struct Entry {
    id: FrontendId,
    frontend: Box<dyn Frontend>,
    watches: Vec<Watch>,
    /// Senders that are dropped when the removal is done; not empty once removal was requested.
    removal: Vec<mpsc::Sender<()>>,
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker")
            .field("cx", &self.cx)
            .field("frontends", &self.frontends.len())
            .finish_non_exhaustive()
    }
}

/// The wake-up's token; frontends' watches all share the other. Events only end a sleep; the next round finds the
/// work by polling.
const WAKE: EventToken = 0;
const KICK: EventToken = 1;

impl Worker {
    /// Makes a worker without a thread: its owner calls [`Worker::round`], and can interleave several of them in one
    /// thread.
    #[must_use]
    pub fn by_hand(cx: Context) -> Self {
        let poll = PollTime {
            window: Duration::ZERO,
            max: Duration::ZERO,
        };
        Self::new(cx, Arc::default(), poll)
    }

    fn new(cx: Context, commands: Arc<Commands>, poll: PollTime) -> Self {
        Self {
            cx,
            frontends: Vec::new(),
            next_id: 0,
            commands,
            poll,
        }
    }

    /// Returns the worker's ring, executor and pool.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.cx
    }

    /// Adds a frontend, which is woken by the eventfds in `kicks`.
    ///
    /// # Errors
    ///
    /// If a kick cannot be watched.
    pub fn add(
        &mut self,
        frontend: Box<dyn Frontend>,
        kicks: Vec<std::os::fd::OwnedFd>,
    ) -> io::Result<FrontendId> {
        let watches = kicks
            .into_iter()
            .map(|fd| self.cx.ring().watch(fd, KICK))
            .collect::<io::Result<Vec<_>>>()?;
        let id = FrontendId(self.next_id);
        self.next_id += 1;
        self.frontends.push(Entry {
            id,
            frontend,
            watches,
            removal: Vec::new(),
        });
        Ok(id)
    }

    /// Requests a frontend's removal; `done` is dropped when it has drained and is gone. An unknown frontend
    /// counts as gone.
    pub fn remove(&mut self, id: FrontendId, done: mpsc::Sender<()>) {
        if let Some(entry) = self.frontends.iter_mut().find(|entry| entry.id == id) {
            entry.watches.clear();
            entry.removal.push(done);
        }
    }

    fn run_commands(&mut self) -> bool {
        if !self.commands.waiting.load(Ordering::Acquire) {
            return false;
        }
        let list = {
            let mut list = self.commands.list.lock();
            self.commands.waiting.store(false, Ordering::Release);
            std::mem::take(&mut *list)
        };
        for command in list {
            command(self);
        }
        true
    }

    /// Runs one round: new requests, tasks, the ring, answers. Never waits. Returns true if anything happened.
    ///
    /// # Errors
    ///
    /// If the ring has failed.
    pub fn round(&mut self) -> io::Result<bool> {
        let mut worked = self.run_commands();
        for entry in &mut self.frontends {
            if entry.removal.is_empty() {
                worked |= entry.frontend.poll();
            }
        }
        worked |= self.cx.run_ready();
        if self.cx.ring().turn(false)? > 0 {
            worked = true;
            self.cx.run_ready();
        }
        for entry in &mut self.frontends {
            worked |= entry.frontend.publish();
        }
        self.frontends.retain_mut(|entry| {
            let gone = !entry.removal.is_empty() && entry.frontend.in_flight() == 0;
            if gone {
                entry.frontend.removed();
            }
            !gone
        });
        Ok(worked)
    }

    fn drained(&self) -> bool {
        self.commands.stop.load(Ordering::Acquire)
            && self.frontends.is_empty()
            && self.cx.tasks() == 0
            && self.cx.ring().in_flight() == 0
            && !self.commands.waiting.load(Ordering::Acquire)
    }

    /// Returns true if the worker may sleep even after a busy round, unless [`Worker::prepare_sleep`] finds more work.
    #[must_use]
    pub fn may_sleep_at_once(&self) -> bool {
        // A frontend that is being removed is not polled.
        let may = |entry: &Entry| entry.removal.is_empty() && entry.frontend.comes_through_ring();
        self.frontends.iter().all(may)
    }

    /// Asks every source of work to wake this worker, and checks each once more. Returns false if there is work
    /// already. The caller must call [`Worker::end_sleep`] next, or after the sleep.
    pub fn prepare_sleep(&mut self) -> bool {
        let mut stay = false;
        for entry in &mut self.frontends {
            if entry.removal.is_empty() {
                stay |= entry.frontend.prepare_sleep();
            }
        }
        !stay && self.cx.run_queue().prepare_sleep()
    }

    /// Returns true if another worker or a task has woken this one since [`Worker::prepare_sleep`].
    #[must_use]
    pub fn is_woken(&self) -> bool {
        !self.cx.run_queue().is_sleeping()
    }

    /// Turns wake-ups and notifications off again.
    pub fn end_sleep(&mut self) {
        self.cx.run_queue().end_sleep();
        for entry in &mut self.frontends {
            entry.frontend.end_sleep();
        }
    }

    /// Sleeps until an event comes, unless there is work already.
    fn sleep(&mut self) -> io::Result<()> {
        if self.prepare_sleep() {
            let commanded = self.commands.waiting.load(Ordering::SeqCst);
            let stopped = self.commands.stop.load(Ordering::SeqCst) && self.drained();
            self.cx.ring().turn(!commanded && !stopped)?;
        }
        self.end_sleep();
        Ok(())
    }

    fn serve(&mut self) -> io::Result<()> {
        let mut events = Vec::new();
        let mut idle_since: Option<Instant> = None;
        loop {
            let worked = self.round()?;
            self.cx.ring().take_events(&mut events);
            events.clear();
            // Polling is for guests' requests only. I/O in flight wakes the worker just as fast, and a task without
            // I/O waits for another thread, which may need this CPU.
            let waits_for_guests = self.cx.ring().in_flight() == 0 && self.cx.tasks() == 0;
            let polls = waits_for_guests && !self.poll.window.is_zero();
            if worked {
                if let Some(since) = idle_since.take() {
                    self.poll.found(since.elapsed());
                }
                if polls || !self.may_sleep_at_once() {
                    continue;
                }
            } else if self.drained() {
                return Ok(());
            }
            if polls {
                let since = *idle_since.get_or_insert_with(Instant::now);
                if since.elapsed() < self.poll.window {
                    std::hint::spin_loop();
                    continue;
                }
            }
            let before = idle_since.take().unwrap_or_else(Instant::now);
            self.sleep()?;
            if waits_for_guests {
                self.poll.slept(before.elapsed());
            }
        }
    }
}

/// Adaptive polling time before a sleep.
#[derive(Debug)]
struct PollTime {
    window: Duration,
    max: Duration,
}

impl PollTime {
    const FIRST: Duration = Duration::from_micros(8);

    /// Records that polling found work after `waited`.
    fn found(&mut self, waited: Duration) {
        if waited * 2 > self.window {
            self.grow();
        }
    }

    /// Records a sleep: grows the window if polling a little longer would have avoided it, else halves it.
    fn slept(&mut self, total: Duration) {
        if total < self.max {
            self.grow();
        } else {
            self.window /= 2;
            if self.window < Duration::from_micros(2) {
                self.window = Duration::ZERO;
            }
        }
    }

    fn grow(&mut self) {
        self.window = (self.window * 2)
            .clamp(Self::FIRST, self.max.max(Self::FIRST))
            .min(self.max);
    }
}

/// A running worker. Dropping the handle stops it and waits until it has drained.
pub struct WorkerHandle {
    commands: Arc<Commands>,
    queue: Arc<RunQueue>,
    driver: &'static str,
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for WorkerHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkerHandle")
            .field("driver", &self.driver)
            .finish_non_exhaustive()
    }
}

impl WorkerHandle {
    /// Starts a worker.
    ///
    /// # Errors
    ///
    /// If its thread or ring cannot be made.
    pub fn spawn(config: WorkerConfig) -> Result<Self, StartWorkerError> {
        let commands = Arc::new(Commands::default());
        let (report, started) = mpsc::channel();
        let shared = Arc::clone(&commands);
        let thread = thread::Builder::new()
            .name(config.name.clone())
            .spawn(move || {
                let ended = Arc::clone(&shared);
                match set_up(&config, shared) {
                    Ok((mut worker, _watch)) => {
                        let facts = (Arc::clone(worker.cx.run_queue()), worker.cx.ring().driver_name());
                        if report.send(Ok(facts)).is_ok()
                            && let Err(error) = worker.serve()
                        {
                            tracing::error!(%error, "a worker's ring has failed; its requests fail");
                        }
                    }
                    // The receiver waits below; an error without a receiver can be dropped.
                    Err(error) => report.send(Err(error)).unwrap_or_default(),
                }
                ended.ended.store(true, Ordering::SeqCst);
                // Late commands are dropped, and with them their answers' senders.
                ended.list.lock().clear();
            })
            .map_err(StartWorkerError::Thread)?;
        let gone = || StartWorkerError::Thread(io::ErrorKind::BrokenPipe.into());
        let (queue, driver) = started.recv().map_err(|_| gone())??;
        Ok(Self {
            commands,
            queue,
            driver,
            thread: Some(thread),
        })
    }

    /// Returns the name of the ring's driver.
    #[must_use]
    pub fn driver_name(&self) -> &'static str {
        self.driver
    }

    fn command(&self, command: Command) {
        let mut list = self.commands.list.lock();
        if self.commands.ended.load(Ordering::SeqCst) {
            return;
        }
        list.push(command);
        self.commands.waiting.store(true, Ordering::SeqCst);
        drop(list);
        self.queue.wake();
    }

    /// Runs `f` on the worker's thread, between two rounds, and returns what it returns.
    ///
    /// # Errors
    ///
    /// If the worker has ended.
    pub fn run<T: Send + 'static>(
        &self,
        f: impl FnOnce(&mut Worker) -> T + Send + 'static,
    ) -> Result<T, WorkerGone> {
        let (answer, answered) = mpsc::channel();
        // An answer without a waiter may be dropped.
        self.command(Box::new(move |worker| answer.send(f(worker)).unwrap_or_default()));
        answered.recv().map_err(|_| WorkerGone)
    }

    /// Runs the future that `f` makes on the worker, and returns its output.
    ///
    /// # Errors
    ///
    /// If the worker has ended.
    pub fn block_on<T: Send + 'static>(
        &self,
        f: impl FnOnce(&Context) -> LocalBoxFuture<'static, T> + Send + 'static,
    ) -> Result<T, WorkerGone> {
        let (answer, answered) = mpsc::channel();
        self.command(Box::new(move |worker| {
            let future = f(&worker.cx);
            worker
                .cx
                .spawn(async move { answer.send(future.await).unwrap_or_default() });
        }));
        answered.recv().map_err(|_| WorkerGone)
    }

    /// Removes a frontend: takes no more requests from it, and returns when those taken have been answered
    /// and published and the frontend has been dropped.
    ///
    /// # Errors
    ///
    /// If the worker has ended.
    pub fn remove(&self, id: FrontendId) -> Result<(), WorkerGone> {
        let (done, gone) = mpsc::channel();
        self.run(move |worker| worker.remove(id, done))?;
        // The sender is dropped with the frontend, so the channel's end is the answer.
        if gone.recv().is_err() && self.commands.ended.load(Ordering::SeqCst) {
            return Err(WorkerGone);
        }
        Ok(())
    }

    /// Removes every frontend, lets tasks and I/O end, and ends the thread.
    pub fn stop(mut self) {
        self.shut_down();
    }

    fn shut_down(&mut self) {
        self.commands.stop.store(true, Ordering::SeqCst);
        self.command(Box::new(|worker| {
            let (done, _) = mpsc::channel();
            let ids: Vec<_> = worker.frontends.iter().map(|entry| entry.id).collect();
            ids.into_iter().for_each(|id| worker.remove(id, done.clone()));
        }));
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("a worker panicked");
        }
    }
}

impl Drop for WorkerHandle {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.shut_down();
        }
    }
}

fn set_up(config: &WorkerConfig, commands: Arc<Commands>) -> Result<(Worker, Watch), StartWorkerError> {
    if !config.cpus.is_empty() {
        crate::task::pin_to(&config.cpus).map_err(|source| StartWorkerError::Affinity {
            cpus: config.cpus.clone(),
            allowed: crate::task::allowed_cpus(),
            source,
        })?;
    }
    let table = FixedTable::sparse(config.registered_buffers);
    let cx = Context::try_on(Ring::with_fixed(config.ring, config.depth, &table)?)?;
    let wake = cx.run_queue().wake_fd().map_err(StartWorkerError::Wake)?;
    let watch = cx.ring().watch(wake, WAKE).map_err(StartWorkerError::Wake)?;
    let poll = PollTime {
        window: Duration::ZERO,
        max: config.poll_max,
    };
    if let Some(hook) = &config.on_start {
        hook.run().map_err(StartWorkerError::Hook)?;
    }
    Ok((Worker::new(cx, commands, poll), watch))
}

#[cfg(all(test, loom))]
mod model;

#[cfg(all(test, shuttle))]
mod guest_model;

#[cfg(test)]
mod sleep_tests;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::{AlignedBuf, Buffer};
    use crate::disk::{Disk, DiskQueue};
    use crate::file::{FileOptions, ImageFile};
    use crate::raw::RawDisk;
    use crate::request::{CompletionSink, Done, Op, Request};
    use std::os::fd::AsRawFd;
    use std::rc::Rc;

    /// A frontend fed through a channel, like a guest with a very simple queue.
    struct Channel {
        queue: Box<dyn DiskQueue>,
        requests: mpsc::Receiver<(Op, u64)>,
        answers: mpsc::Sender<Done2>,
        sink: Rc<CompletionSink>,
        in_flight: usize,
    }
    type Done2 = (u64, bool);

    impl Frontend for Channel {
        fn poll(&mut self) -> bool {
            let mut any = false;
            while let Ok((op, offset)) = self.requests.try_recv() {
                let buffer = if op == Op::Flush {
                    Buffer::default()
                } else {
                    AlignedBuf::zeroed(4096).into()
                };
                let len = buffer.len() as u64;
                self.in_flight += 1;
                self.queue
                    .submit(Request::new(op, offset, len, buffer, &self.sink, offset));
                any = true;
            }
            any
        }
        fn publish(&mut self) -> bool {
            let mut done: Vec<Done> = Vec::new();
            self.sink.drain_into(&mut done);
            self.in_flight -= done.len();
            let any = !done.is_empty();
            for done in done {
                self.answers
                    .send((done.tag, done.result.is_ok()))
                    .expect("the test waits");
            }
            any
        }
        fn prepare_sleep(&mut self) -> bool {
            self.poll()
        }
        fn end_sleep(&mut self) {}
        fn in_flight(&self) -> usize {
            self.in_flight
        }
    }

    #[test]
    fn requests_are_served_until_the_worker_is_stopped_and_none_is_left_behind() {
        for ring in [RingKind::IoUring, RingKind::Syscalls] {
            let file = tempfile::tempfile().expect("a temporary file");
            file.set_len(1 << 20).expect("its length");
            let options = FileOptions {
                write: true,
                direct: false,
            };
            let disk = RawDisk::new(ImageFile::from_fd("test".as_ref(), file, options), 1 << 20, true);
            let config = WorkerConfig {
                ring,
                poll_max: Duration::from_micros(20),
                ..WorkerConfig::default()
            };
            let worker = WorkerHandle::spawn(config).expect("a worker");
            let (send, requests) = mpsc::channel();
            let (answers, answered) = mpsc::channel();
            let kick = crate::task::eventfd().expect("an eventfd");
            let kicked = kick.try_clone().expect("a duplicate");
            let id = worker
                .run(move |worker| {
                    let queue = disk.open_queue(worker.context()).expect("a queue");
                    let channel = Channel {
                        queue,
                        requests,
                        answers,
                        sink: CompletionSink::new(),
                        in_flight: 0,
                    };
                    worker.add(Box::new(channel), vec![kicked]).expect("a frontend")
                })
                .expect("the worker runs");
            for round in 0..50 {
                for n in 0..8 {
                    let op = if n == 7 {
                        Op::Flush
                    } else {
                        Op::Write { fua: false }
                    };
                    send.send((op, n * 4096)).expect("the frontend listens");
                }
                crate::ring::signal_event(kick.as_raw_fd());
                if round % 10 == 0 {
                    std::thread::yield_now();
                }
                for _ in 0..8 {
                    assert!(
                        answered
                            .recv_timeout(Duration::from_secs(10))
                            .expect("an answer")
                            .1
                    );
                }
            }
            worker.remove(id).expect("the worker runs");
            assert!(send.send((Op::Flush, 0)).is_err(), "the frontend is gone");
            worker.stop();
        }
    }

    #[test]
    fn a_future_runs_on_the_worker_and_its_output_comes_back() {
        let worker = WorkerHandle::spawn(WorkerConfig::default()).expect("a worker");
        let here = std::thread::current().id();
        let there = worker
            .block_on(|_cx| Box::pin(async { std::thread::current().id() }))
            .expect("the worker runs");
        assert_ne!(here, there);
    }

    #[test]
    fn polling_grows_while_it_pays_and_stops_on_an_idle_disk() {
        let mut poll = PollTime {
            window: Duration::ZERO,
            max: Duration::from_micros(50),
        };
        poll.slept(Duration::from_micros(20));
        assert_eq!(poll.window, PollTime::FIRST);
        for _ in 0..5 {
            poll.found(poll.window);
        }
        assert_eq!(poll.window, poll.max);
        for _ in 0..10 {
            poll.slept(Duration::from_millis(5));
        }
        assert_eq!(poll.window, Duration::ZERO);
    }
}
