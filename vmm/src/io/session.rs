//! A session of `ringdisk io`: commands in, requests to the queues, lines out.
//!
//! Invariants: a foreground command has finished when the next one starts; one that writes a part of a sector runs
//! while no other is in flight; when the session ends, every job has ended and was reported.

use std::collections::HashMap;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::mpsc;

use block::status::{Content, StatusRange};
use block::worker::{WorkerConfig, WorkerGone};
use block::{Disk, IoError};

use super::command::{Command, Range, Transfer, help};
use super::worker_queue::{Job, Outcome, Work, WorkerQueue, WorkerQueueError};
use super::{output, transfer};
use crate::size::human;

/// The most background jobs at a time; the next one waits. Bounds the buffers a script can hold.
const BACKGROUND_MAX: usize = 1024;

/// An error that ends a session. A request that the disk refuses is not among these: it is reported and counted, and
/// the session continues.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// A queue could not be set up.
    #[error(transparent)]
    WorkerQueue(#[from] WorkerQueueError),
    /// A worker has ended before its time.
    #[error(transparent)]
    Worker(#[from] WorkerGone),
    /// The disk could not be closed cleanly.
    #[error("the disk could not be closed cleanly")]
    Close(#[source] IoError),
    /// The output cannot be written.
    #[error("cannot write the output")]
    Output(#[source] io::Error),
}

/// The state needed to report a job when it ends.
struct Pending {
    name: &'static str,
    work: Work,
    quiet: bool,
}

/// An open disk, its queues, and the jobs in flight.
pub(super) struct Session<'a> {
    disk: Arc<dyn Disk>,
    queues: Vec<WorkerQueue>,
    outcomes: mpsc::Receiver<Outcome>,
    pending: HashMap<u64, Pending>,
    next_job: u64,
    next_queue: usize,
    failures: u64,
    out: &'a mut dyn Write,
}

impl<'a> Session<'a> {
    /// Starts one worker for each configuration, each with a queue of `disk`.
    pub(super) fn open(
        disk: Arc<dyn Disk>,
        workers: Vec<WorkerConfig>,
        out: &'a mut dyn Write,
    ) -> Result<Self, SessionError> {
        let (sender, outcomes) = mpsc::channel();
        let queues = workers
            .into_iter()
            .map(|config| WorkerQueue::open(&disk, config, sender.clone()))
            .collect::<Result<_, _>>()?;
        let pending = HashMap::new();
        Ok(Self {
            disk,
            queues,
            outcomes,
            pending,
            next_job: 0,
            next_queue: 0,
            failures: 0,
            out,
        })
    }

    /// Carries out one command. `false` if it ends the session.
    pub(super) fn run(&mut self, command: Command) -> Result<bool, SessionError> {
        match command {
            Command::Transfer {
                name,
                transfer,
                range,
                quiet,
                background,
            } => {
                let work = Work::Transfer(transfer, range);
                let named = Pending { name, work, quiet };
                if !background {
                    self.run_alone_or_beside(named)?;
                } else if transfer::touches_edges(transfer, range) {
                    self.wait_all()?;
                    self.run_alone_or_beside(named)?;
                } else {
                    if self.pending.len() >= BACKGROUND_MAX {
                        self.wait_one()?;
                    }
                    let queue = self.next_queue % self.queues.len();
                    self.next_queue = queue + 1;
                    self.start(queue, named)?;
                }
            }
            Command::Flush => self.run_alone_or_beside(Pending {
                name: "flush",
                work: Work::Flush,
                quiet: false,
            })?,
            Command::AioFlush => self.wait_all()?,
            Command::Length => self.print(&format!("{}\n", human(self.disk.info().size_bytes)))?,
            Command::Map => self.map()?,
            Command::Help => self.print(&help())?,
            Command::Quit => return Ok(false),
        }
        Ok(true)
    }

    /// Prints what the disk's own image holds and what it does not, when background jobs have ended.
    fn map(&mut self) -> Result<(), SessionError> {
        self.wait_all()?;
        let size = self.disk.info().size_bytes;
        let (mut here, mut run) = (0, None);
        while here < size {
            let left = Range {
                offset: here,
                len: size - here,
            };
            let ranges = match self.queues[0].status(left)? {
                Ok(ranges) => ranges,
                Err(error) => return self.fail(&format!("map failed: {error}\n")),
            };
            for StatusRange {
                offset,
                len,
                content,
                depth,
            } in ranges
            {
                here = offset + len;
                let allocated = depth == 0 && content != Content::Absent;
                match &mut run {
                    Some((Range { len: before, .. }, same)) if *same == allocated => *before += len,
                    _ => {
                        if let Some((range, allocated)) = run.replace((Range { offset, len }, allocated)) {
                            self.print(&output::mapped(range, allocated))?;
                        }
                    }
                }
            }
        }
        match run {
            Some((range, allocated)) => self.print(&output::mapped(range, allocated)),
            None => Ok(()),
        }
    }

    /// Counts and reports a line that is not a command.
    pub(super) fn fail(&mut self, line: &str) -> Result<(), SessionError> {
        self.failures += 1;
        self.print(line)
    }

    /// Waits for the jobs in flight, closes the disk cleanly, and returns the number of failed commands.
    ///
    /// The disk is closed even if the outcome of a job cannot be reported any more.
    pub(super) fn close(mut self) -> Result<u64, SessionError> {
        let printed = self.wait_all();
        let workers = self
            .queues
            .drain(..)
            .map(WorkerQueue::close)
            .collect::<Result<Vec<_>, _>>()?;
        if let Some(worker) = workers.first() {
            let disk = Arc::clone(&self.disk);
            worker
                .block_on(move |cx| disk.close(cx))?
                .map_err(SessionError::Close)?;
        }
        printed.map(|()| self.failures)
    }

    /// Runs a foreground job: on the first queue, and waits for it. Background jobs continue, unless a part of a
    /// sector is written.
    fn run_alone_or_beside(&mut self, job: Pending) -> Result<(), SessionError> {
        if let Work::Transfer(transfer, range) = job.work
            && transfer::touches_edges(transfer, range)
        {
            self.wait_all()?;
        }
        let number = self.start(0, job)?;
        while self.pending.contains_key(&number) {
            self.wait_one()?;
        }
        Ok(())
    }

    fn start(&mut self, queue: usize, job: Pending) -> Result<u64, SessionError> {
        let number = self.next_job;
        self.next_job += 1;
        let work = job.work;
        self.queues[queue].start(Job { number, work })?;
        self.pending.insert(number, job);
        Ok(number)
    }

    fn wait_all(&mut self) -> Result<(), SessionError> {
        while !self.pending.is_empty() {
            self.wait_one()?;
        }
        Ok(())
    }

    /// Waits for one job to end, whichever it is, and reports it.
    fn wait_one(&mut self) -> Result<(), SessionError> {
        let outcome = self.outcomes.recv().map_err(|_| WorkerGone)?;
        if let Some(pending) = self.pending.remove(&outcome.number) {
            self.print_outcome(&pending, &outcome)?;
        }
        Ok(())
    }

    fn print_outcome(&mut self, pending: &Pending, outcome: &Outcome) -> Result<(), SessionError> {
        let data = match &outcome.result {
            Ok(data) => data,
            Err(error) => return self.fail(&format!("{} failed: {error}\n", failing_name(pending.name))),
        };
        let Work::Transfer(transfer, range) = pending.work else {
            return Ok(());
        };
        if let Transfer::Read { check, dump } = transfer {
            if let Some(line) = check.and_then(|check| output::verify(data, range, check).err()) {
                self.fail(&line)?;
            }
            if dump && !pending.quiet {
                self.print(&output::dump(data, range.offset))?;
            }
        }
        if pending.quiet {
            return Ok(());
        }
        self.print(&output::report(verb(transfer), range, outcome.took))
    }

    fn print(&mut self, text: &str) -> Result<(), SessionError> {
        self.out.write_all(text.as_bytes()).map_err(SessionError::Output)
    }
}

/// Returns what `qemu-io` calls a command that failed: an `aio_read` is a `readv` there.
fn failing_name(command: &'static str) -> &'static str {
    match command {
        "aio_read" => "readv",
        other => other,
    }
}

/// Returns what the report of a finished transfer begins with.
fn verb(transfer: Transfer) -> &'static str {
    match transfer {
        Transfer::Read { .. } => "read",
        Transfer::Write { .. } => "wrote",
        Transfer::Discard => "discard",
    }
}
