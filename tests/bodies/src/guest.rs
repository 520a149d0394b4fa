//! A guest that asks one thing after the other, of an image in memory.

use std::path::Path;
use std::sync::Arc;

use block::{AlignedBuf, Buffer, Context, Disk, DiskQueue, IoError, Op, Request};
use qcow::{OpenError, OpenOptions, QcowDisk};

use crate::host::Files;

/// The byte that fills a guest's buffer before a read does.
const UNREAD: u8 = 0xCC;

/// An opened image and one queue of it.
#[derive(Debug)]
pub struct Guest {
    cx: Context,
    disk: Arc<QcowDisk>,
    queue: Box<dyn DiskQueue>,
}

/// Returns the options with which cases open images: nothing but the image itself matters, and one thread does
/// everything.
#[must_use]
pub fn options(read_only: bool, backing_files: bool) -> OpenOptions {
    OpenOptions {
        read_only,
        backing_files,
        // So small that tables are evicted.
        l2_cache_bytes: Some(64 << 10),
        inflate_threads: 0,
        lock: None,
        ..OpenOptions::default()
    }
}

impl Guest {
    /// Opens the file `name`.
    ///
    /// # Errors
    ///
    /// The reason why it was refused.
    ///
    /// # Panics
    ///
    /// If the host fails.
    pub fn open(files: &Files, name: &str, options: &OpenOptions) -> Result<Self, OpenError> {
        let cx = Context::syscalls();
        let opened = cx.block_on(QcowDisk::open_on(&cx, files, Path::new(name), options));
        let disk = opened.expect("the ring turns")?;
        let queue = Arc::clone(&disk).open_queue(&cx).expect("a queue");
        Ok(Self { cx, disk, queue })
    }

    /// The size of the disk in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.disk.info().size_bytes
    }

    /// Asks, and waits for the answer.
    ///
    /// # Errors
    ///
    /// The answer.
    ///
    /// # Panics
    ///
    /// If the host fails.
    pub fn ask(&self, op: Op, offset: u64, len: u64, buffer: Buffer) -> Result<Buffer, IoError> {
        let (request, answer) = Request::local(op, offset, len, buffer);
        self.queue.submit(request);
        let done = self.cx.block_on(answer).expect("the ring turns");
        done.result.map(|()| done.buffer)
    }

    /// Reads.
    ///
    /// # Errors
    ///
    /// The answer.
    ///
    /// # Panics
    ///
    /// If the host fails.
    pub fn read(&self, offset: u64, len: u64) -> Result<Vec<u8>, IoError> {
        let buffer = AlignedBuf::from_slice(&vec![UNREAD; len as usize]);
        let buffer = self.ask(Op::Read, offset, len, buffer.into())?;
        Ok(buffer.into_owned().expect("our own buffer").to_vec())
    }

    /// Writes.
    ///
    /// # Errors
    ///
    /// The answer.
    pub fn write(&self, offset: u64, bytes: &[u8], fua: bool) -> Result<(), IoError> {
        let buffer = AlignedBuf::from_slice(bytes).into();
        let done = self.ask(Op::Write { fua }, offset, bytes.len() as u64, buffer);
        done.map(drop)
    }

    /// Asks what takes no bytes along: a flush, zeros, a discard.
    ///
    /// # Errors
    ///
    /// The answer.
    pub fn tell(&self, op: Op, offset: u64, len: u64) -> Result<(), IoError> {
        self.ask(op, offset, len, Buffer::default()).map(drop)
    }

    /// Waits for what is still under way, and closes the image.
    ///
    /// # Errors
    ///
    /// The reason why it is not closed cleanly.
    ///
    /// # Panics
    ///
    /// If the host fails, or what is under way does not end.
    pub fn close(self) -> Result<(), IoError> {
        let Self { cx, disk, queue } = self;
        settle(&cx);
        drop(queue);
        let closed = cx.block_on(disk.close(&cx)).expect("the ring turns");
        settle(&cx);
        closed
    }
}

/// Turns until nothing is left to do.
///
/// # Panics
///
/// If it does not end.
pub fn settle(cx: &Context) {
    for _ in 0..1_000_000 {
        if cx.tasks() == 0 && cx.ring().in_flight() == 0 {
            return;
        }
        cx.run_ready();
        cx.ring().turn(false).expect("the ring turns");
    }
    panic!("what is under way does not end: {cx:?}");
}
