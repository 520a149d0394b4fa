//! One disk request, and the token that ensures it is answered exactly once.
//!
//! A frontend makes a [`Request`] and submits it; its last owner calls [`Request::finish`].
//! A request that is dropped unanswered answers [`IoError::Dropped`], so a code path that forgets it causes
//! an error and never a hung guest. The answer returns the buffer, so that an embedder can reuse it.

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use crate::buffer::Buffer;
use crate::epoch::EpochGuard;
use crate::error::IoError;

/// Operation of a request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Op {
    /// Fill the buffer from the disk.
    Read,
    /// Store the buffer on the disk; with `fua`, durably before the answer.
    Write {
        /// Force unit access: the data, and the metadata that reaches it, are durable when answered.
        fua: bool,
    },
    /// Make every write that was answered before this request was submitted durable.
    Flush,
    /// The range's contents are no longer needed; what it reads as is up to the disk.
    Discard,
    /// The range reads as zeros afterwards.
    WriteZeroes {
        /// The disk may give the space back.
        unmap: bool,
        /// As for a write.
        fua: bool,
    },
}

impl Op {
    /// Returns true if the operation changes the disk.
    #[must_use]
    pub fn is_write(self) -> bool {
        !matches!(self, Self::Read | Self::Flush)
    }
}

/// The answer to a request.
#[derive(Debug)]
pub struct Done {
    /// The tag the frontend gave the request.
    pub tag: u64,
    /// The result. `Ok` means the whole length.
    pub result: Result<(), IoError>,
    /// The request's buffer, returned to its owner for reuse.
    pub buffer: Buffer,
}

/// Queue of answers to one frontend's requests, until it publishes them.
///
/// There is one per virtqueue; all waiting answers are taken out together.
#[derive(Debug, Default)]
pub struct CompletionSink {
    done: Answers,
}

/// Answers that nobody has taken yet.
#[derive(Debug)]
enum Answers {
    /// Those of a frontend.
    Queue(RefCell<Vec<Done>>),
    /// The one that a future waits for.
    Local(RefCell<LocalAnswers>),
}

impl Default for Answers {
    fn default() -> Self {
        Self::Queue(RefCell::default())
    }
}

#[derive(Debug, Default)]
struct LocalAnswers {
    done: Option<Done>,
    waker: Option<Waker>,
}

impl CompletionSink {
    /// Makes an empty sink.
    #[must_use]
    pub fn new() -> Rc<Self> {
        Rc::new(Self::default())
    }

    /// Returns true if no answer is waiting.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        match &self.done {
            Answers::Queue(done) => done.borrow().is_empty(),
            Answers::Local(local) => local.borrow().done.is_none(),
        }
    }

    /// Appends all waiting answers to `out`, in the order in which they were given.
    pub fn drain_into(&self, out: &mut Vec<Done>) {
        match &self.done {
            // Moves nothing.
            Answers::Queue(done) if out.is_empty() => std::mem::swap(out, &mut *done.borrow_mut()),
            Answers::Queue(done) => out.append(&mut done.borrow_mut()),
            Answers::Local(local) => out.extend(local.borrow_mut().done.take()),
        }
    }

    #[inline]
    fn push(&self, answer: Done) {
        match &self.done {
            Answers::Queue(done) => done.borrow_mut().push(answer),
            Answers::Local(local) => {
                let mut local = local.borrow_mut();
                local.done = Some(answer);
                let waker = local.waker.take();
                drop(local);
                if let Some(waker) = waker {
                    waker.wake();
                }
            }
        }
    }
}

/// One request to a disk queue: bytes `offset..offset + len` of the guest's disk.
///
/// Not `Send`: a request lives and is answered on the worker it was made on.
#[derive(Debug)]
pub struct Request {
    /// The operation.
    pub op: Op,
    /// The first byte, in bytes from the start of the guest's disk; a multiple of 512.
    pub offset: u64,
    /// The length in bytes; a multiple of 512. Zero for a flush.
    pub len: u64,
    /// The memory to read into or write from; empty for operations without data.
    pub buffer: Buffer,
    /// Held until the request is answered: prevents reuse of the host clusters the request may have seen.
    pub guard: Option<EpochGuard>,
    /// Receives the answer; `None` if it has it.
    sink: Option<Rc<CompletionSink>>,
    tag: u64,
}

/// A request is moved several times on its way. Up to this size the compiler moves it in registers, above by calls of
/// `memcpy`.
const _: () = assert!(size_of::<Request>() <= 128);

impl Request {
    /// Makes a request that is answered into `sink` under `tag`.
    #[must_use]
    pub fn new(op: Op, offset: u64, len: u64, buffer: Buffer, sink: &Rc<CompletionSink>, tag: u64) -> Self {
        Self {
            op,
            offset,
            len,
            buffer,
            guard: None,
            sink: Some(Rc::clone(sink)),
            tag,
        }
    }

    /// Makes a request that is answered to a future on the same worker.
    pub fn local(op: Op, offset: u64, len: u64, buffer: Buffer) -> (Self, LocalAnswer) {
        let sink = Rc::new(CompletionSink {
            done: Answers::Local(RefCell::default()),
        });
        (Self::new(op, offset, len, buffer, &sink, 0), LocalAnswer { sink })
    }

    /// Answers the request.
    #[inline]
    pub fn finish(mut self, result: Result<(), IoError>) {
        self.answer(result);
    }

    /// Takes the buffer out, for parts of the request to share. Return it with
    /// [`Request::finish_with`]; otherwise the answer carries an empty one.
    #[must_use]
    pub fn take_buffer(&mut self) -> Buffer {
        std::mem::take(&mut self.buffer)
    }

    /// Puts `buffer` back and answers.
    pub fn finish_with(mut self, buffer: Buffer, result: Result<(), IoError>) {
        self.buffer = buffer;
        self.answer(result);
    }

    /// Makes the checks common to all disks: the range lies inside `disk_bytes` and is made of whole sectors,
    /// the buffer is as long as the request, and a read-only disk is not written.
    ///
    /// # Errors
    ///
    /// Returns the [`IoError`] that the request should be answered with.
    #[inline]
    pub fn check(&self, disk_bytes: u64, read_only: bool) -> Result<(), IoError> {
        if self.op == Op::Flush {
            return Ok(());
        }
        if read_only && self.op.is_write() {
            return Err(IoError::ReadOnly);
        }
        if (self.offset | self.len) & 511 != 0 {
            return Err(IoError::Misaligned);
        }
        check_range(self.offset, self.len, disk_bytes)?;
        if matches!(self.op, Op::Read | Op::Write { .. }) && self.buffer.len() as u64 != self.len {
            return Err(IoError::BufferLength);
        }
        Ok(())
    }

    #[inline]
    fn answer(&mut self, result: Result<(), IoError>) {
        // Drop the protection of the request's clusters and memory before the answer: the answer's
        // receiver may free both.
        self.guard = None;
        if let Some(sink) = self.sink.take() {
            sink.push(Done {
                tag: self.tag,
                result,
                buffer: std::mem::take(&mut self.buffer),
            });
        }
    }
}

impl Drop for Request {
    #[inline]
    fn drop(&mut self) {
        if self.sink.is_some() {
            self.answer(Err(IoError::Dropped));
        }
    }
}

/// The answer to a [`Request::local`], as a future.
#[derive(Debug)]
#[must_use = "an answer nobody awaits is an error nobody sees"]
pub struct LocalAnswer {
    sink: Rc<CompletionSink>,
}

impl Future for LocalAnswer {
    type Output = Done;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Done> {
        let Answers::Local(local) = &self.sink.done else {
            return Poll::Pending;
        };
        let mut local = local.borrow_mut();
        if let Some(done) = local.done.take() {
            return Poll::Ready(done);
        }
        let before = local.waker.replace(cx.waker().clone());
        drop(local);
        drop(before);
        Poll::Pending
    }
}

/// Checks that `offset..offset + len` lies on a disk of `size_bytes`.
///
/// # Errors
///
/// [`IoError::OutOfRange`].
pub fn check_range(offset: u64, len: u64, size_bytes: u64) -> Result<(), IoError> {
    match offset.checked_add(len) {
        Some(end) if end <= size_bytes => Ok(()),
        _ => Err(IoError::OutOfRange),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_request_completes_once_with_an_error() {
        let sink = CompletionSink::new();
        drop(Request::new(Op::Flush, 0, 0, Buffer::default(), &sink, 7));
        let mut done = Vec::new();
        sink.drain_into(&mut done);
        assert_eq!(done.len(), 1);
        assert_eq!((done[0].tag, done[0].result), (7, Err(IoError::Dropped)));
    }

    #[test]
    fn finished_request_does_not_complete_again_on_drop() {
        let sink = CompletionSink::new();
        Request::new(Op::Flush, 0, 0, Buffer::default(), &sink, 1).finish(Ok(()));
        let mut done = Vec::new();
        sink.drain_into(&mut done);
        assert_eq!(done.len(), 1);
        assert_eq!(done[0].result, Ok(()));
    }

    #[test]
    fn request_check_refuses_a_range_that_wraps_around() {
        let sink = CompletionSink::new();
        let request = Request::new(Op::Discard, !511, 1024, Buffer::default(), &sink, 0);
        assert_eq!(request.check(1 << 40, false), Err(IoError::OutOfRange));
    }
}
