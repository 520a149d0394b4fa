//! A worker's thread, and the handle through which other threads reach the worker.
//!
//! Invariants: a command is run or dropped, and dropping it ends the wait for its answer; the thread ends only when
//! every frontend has drained.

use std::fmt;
use std::io;
use std::sync::Arc;

use super::config::{FailureHook, StartWorkerError, WorkerConfig};
use super::frontend::FrontendId;
use super::poll_time::PollTime;
use super::{Command, Commands, WAKE, Worker, cpus};
use crate::ring::{FixedTable, Ring, Watch};
use crate::sync::atomic::Ordering;
use crate::sync::mpsc;
use crate::sync::thread::{self, JoinHandle};
use crate::task::{Context, LocalBoxFuture, RunQueue};

/// The worker has ended: it was stopped, or it failed.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("the worker has ended")]
pub struct WorkerGone;

/// The end of a worker's thread, however it comes.
struct End {
    commands: Arc<Commands>,
    on_failure: Option<FailureHook>,
}

impl Drop for End {
    fn drop(&mut self) {
        self.commands.ended.store(true, Ordering::SeqCst);
        // Late commands are dropped, and with them their answers' senders. Outside the lock: what they own may ask for more.
        let late = std::mem::take(&mut *self.commands.list.lock());
        drop(late);
        if let Some(hook) = &self.on_failure
            && !self.commands.stop.load(Ordering::SeqCst)
        {
            hook.run();
        }
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
                // Dropped after the worker, also if that panics.
                let mut end = End {
                    commands: Arc::clone(&shared),
                    on_failure: None,
                };
                match set_up(&config, shared) {
                    Ok((mut worker, _watch)) => {
                        end.on_failure = config.on_failure;
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

    /// Returns true if it has ended by itself: its ring has failed, or it has panicked.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.commands.ended.load(Ordering::SeqCst)
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
            let entries = worker.awake.iter().chain(worker.asleep.values());
            let ids: Vec<_> = entries.map(|entry| entry.id).collect();
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

/// Makes the worker on its own thread, and the watch that wakes it.
fn set_up(config: &WorkerConfig, commands: Arc<Commands>) -> Result<(Worker, Watch), StartWorkerError> {
    if !config.cpus.is_empty() {
        cpus::pin_to(&config.cpus).map_err(|source| StartWorkerError::Affinity {
            cpus: config.cpus.clone(),
            allowed: cpus::allowed_cpus(),
            source,
        })?;
    }
    let table = FixedTable::sparse(config.registered_buffers);
    let cx = Context::try_on(Ring::with_fixed(config.ring, config.depth, &table)?)?;
    let wake = cx.run_queue().wake_fd().map_err(StartWorkerError::Wake)?;
    let watch = cx.ring().watch(wake, WAKE).map_err(StartWorkerError::Wake)?;
    if let Some(hook) = &config.on_start {
        hook.run().map_err(StartWorkerError::Hook)?;
    }
    Ok((Worker::new(cx, commands, PollTime::up_to(config.poll_max)), watch))
}

#[cfg(all(test, loom))]
mod model;
