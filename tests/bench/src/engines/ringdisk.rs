//! Ours: a worker as production has it, with a frontend that invents its requests.
//!
//! A QCOW2 image goes to our QCOW2 disk, a raw one to our raw disk: the same worker, ring and requests.

use std::io;
use std::path::Path;
use std::rc::Rc;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use block::file::{FileOptions, ImageFile};
use block::raw::RawDisk;
use block::worker::{Frontend, WorkerConfig, WorkerHandle};
use block::{AlignedBuf, Buffer, CompletionSink, Context, Disk, DiskQueue, Done, Op, Request};
use qcow::{BitmapStorage, OpenOptions, QcowDisk};

use super::Task;
use super::lanes::Lanes;
use crate::content;
use crate::workload::{Pattern, Sample};

/// Runs a task.
pub(super) fn run(task: &Task) -> io::Result<Sample> {
    let cx = Context::syscalls();
    let disk = open(task, &cx)?;
    verify(task, &disk, &cx)?;
    let worker = WorkerHandle::spawn(WorkerConfig::default()).map_err(failed)?;
    let (answer, answered) = mpsc::channel();
    let (served, task_there) = (Arc::clone(&disk), task.clone());
    worker
        .run(move |worker| {
            let queue = served.open_queue(worker.context()).map_err(failed)?;
            let feeder = Feeder::new(queue, &task_there, answer);
            worker.add(Box::new(feeder), Vec::new()).map(drop)
        })
        .map_err(failed)??;
    let limit = Duration::from_millis(task.warm_up_ms + task.measure_ms) * 3 + Duration::from_secs(30);
    let sample = answered.recv_timeout(limit).map_err(failed)?;
    worker.stop();
    cx.block_on(disk.close(&cx))?.map_err(failed)?;
    sample
}

fn open(task: &Task, cx: &Context) -> io::Result<Arc<dyn Disk>> {
    let path: &Path = &task.path;
    let write = task.pattern.writes();
    if task.raw {
        let file = ImageFile::open(
            path,
            FileOptions {
                write,
                direct: task.direct,
            },
        )
        .map_err(failed)?;
        return Ok(RawDisk::open(file, true, cx).map_err(failed)?);
    }
    let options = OpenOptions {
        read_only: !write,
        direct: task.direct,
        backing_files: task.backing,
        data_files: task.data_file,
        bitmaps: match task.durable_bitmaps {
            true => BitmapStorage::Durable,
            false => BitmapStorage::Close,
        },
        ..OpenOptions::default()
    };
    Ok(QcowDisk::open(path, &options).map_err(failed)?)
}

/// Reads some blocks and compares them with their content.
fn verify(task: &Task, disk: &Arc<dyn Disk>, cx: &Context) -> io::Result<()> {
    let queue = Arc::clone(disk).open_queue(cx).map_err(failed)?;
    for offset in task.samples() {
        let buffer = AlignedBuf::zeroed(content::BLOCK_BYTES);
        let (len, buffer) = (buffer.len() as u64, buffer.into());
        let (request, answer) = Request::local(Op::Read, offset, len, buffer);
        queue.submit(request);
        let answer = cx.block_on(answer)?;
        answer.result.map_err(failed)?;
        let bytes = answer.buffer.into_owned();
        content::check(offset, bytes.as_deref().unwrap_or_default())?;
    }
    Ok(())
}

/// The current or next step of a slot.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum State {
    /// The next request of the workload is to be started.
    Idle,
    /// A read or a write is on its way.
    Data,
    /// A write has ended that a flush must follow.
    Written,
    /// That flush is on its way.
    Flush,
    /// The flush at the very end is on its way.
    LastFlush,
}

#[derive(Debug)]
struct Slot {
    state: State,
    /// Its memory, while no request has it.
    buffer: Buffer,
    started_ns: u64,
}

/// A frontend that keeps `depth` requests in flight until the time is over, then flushes and reports.
#[derive(Debug)]
struct Feeder {
    queue: Box<dyn DiskQueue>,
    sink: Rc<CompletionSink>,
    lanes: Lanes,
    slots: Vec<Slot>,
    /// The slots that wait for something to be started.
    ready: Vec<usize>,
    in_flight: usize,
    done: Vec<Done>,
    more: bool,
    flushed: bool,
    answer: Option<mpsc::Sender<io::Result<Sample>>>,
}

impl Feeder {
    fn new(queue: Box<dyn DiskQueue>, task: &Task, answer: mpsc::Sender<io::Result<Sample>>) -> Self {
        let depth = usize::from(task.depth);
        let slot = |_| {
            let bytes = vec![0xa5; task.block_bytes as usize];
            Slot {
                state: State::Idle,
                buffer: AlignedBuf::from_slice(&bytes).into(),
                started_ns: 0,
            }
        };
        Self {
            queue,
            sink: CompletionSink::new(),
            lanes: Lanes::new(task),
            slots: (0..depth).map(slot).collect(),
            ready: (0..depth).collect(),
            in_flight: 0,
            done: Vec::with_capacity(depth),
            more: true,
            flushed: !task.pattern.writes(),
            answer: Some(answer),
        }
    }

    fn submit(&mut self, slot: usize, op: Op, offset: u64, buffer: Buffer) {
        let len = buffer.len() as u64;
        self.in_flight += 1;
        self.queue
            .submit(Request::new(op, offset, len, buffer, &self.sink, slot as u64));
    }

    fn submit_flush(&mut self, slot: usize, state: State) {
        self.slots[slot].state = state;
        self.submit(slot, Op::Flush, 0, Buffer::default());
    }

    /// Starts what a slot waits for; `false` if the workload is at its end.
    fn start(&mut self, slot: usize, now_ns: u64) -> bool {
        if self.slots[slot].state == State::Written {
            self.submit_flush(slot, State::Flush);
            return true;
        }
        let Some(offset) = self.lanes.next_offset() else {
            return false;
        };
        let writes = self.lanes.workload.pattern.writes();
        let op = if writes {
            Op::Write { fua: false }
        } else {
            Op::Read
        };
        let buffer = std::mem::take(&mut self.slots[slot].buffer);
        self.slots[slot].state = State::Data;
        self.slots[slot].started_ns = now_ns;
        self.submit(slot, op, offset, buffer);
        true
    }

    fn ended(&mut self, done: Done) {
        self.in_flight -= 1;
        if let Err(error) = done.result {
            self.report(Err(failed(error)));
            return;
        }
        let index = done.tag as usize;
        let slot = &mut self.slots[index];
        let was = slot.state;
        slot.state = State::Idle;
        if was == State::Data {
            slot.buffer = done.buffer;
            if self.lanes.workload.pattern == Pattern::WriteFlush {
                slot.state = State::Written;
            }
        }
        if slot.state == State::Idle && was != State::LastFlush {
            self.lanes.ended(slot.started_ns);
        }
        self.ready.push(index);
    }

    fn report(&mut self, result: io::Result<Sample>) {
        self.more = false;
        self.flushed = true;
        if let Some(answer) = self.answer.take() {
            // Who has given up waiting has reported that.
            let _gave_up = answer.send(result);
        }
    }
}

impl Frontend for Feeder {
    fn poll(&mut self) -> bool {
        let mut any = false;
        if self.more && !self.ready.is_empty() {
            let now_ns = self.lanes.now_ns();
            while let Some(slot) = self.ready.pop() {
                if !self.start(slot, now_ns) {
                    self.more = false;
                    break;
                }
                any = true;
            }
        }
        if !self.more && self.in_flight == 0 && self.answer.is_some() {
            if self.flushed {
                let sample = self.lanes.finish();
                self.report(Ok(sample));
            } else {
                self.flushed = true;
                self.submit_flush(0, State::LastFlush);
            }
            any = true;
        }
        any
    }

    fn publish(&mut self) -> bool {
        if self.sink.is_empty() {
            return false;
        }
        let mut done = std::mem::take(&mut self.done);
        self.sink.drain_into(&mut done);
        for done in done.drain(..) {
            self.ended(done);
        }
        self.done = done;
        true
    }

    fn prepare_sleep(&mut self) -> bool {
        self.more && !self.ready.is_empty()
    }

    fn end_sleep(&mut self) {}

    fn in_flight(&self) -> usize {
        self.in_flight
    }
}

/// An error with its causes, in one line.
fn failed(error: impl std::error::Error) -> io::Error {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    io::Error::other(text)
}
