//! Changes of the header while the image is open: one write of its first sector, which holds every field that
//! ever changes.
//!
//! What must stay true: one such write at a time, from one copy of the sector, so that none undoes another.

use std::future::poll_fn;
use std::task::{Poll, Waker};

use block::{AlignedBuf, IoError};

use super::Queue;

/// The header's first sector.
#[derive(Debug)]
pub(super) struct Sector {
    /// As it is on disk or is being written.
    bytes: Vec<u8>,
    writing: bool,
    waiters: Vec<Waker>,
}

impl Sector {
    /// The first 512 bytes of the file, as they are on disk.
    pub(super) fn new(bytes: Vec<u8>) -> Self {
        Self {
            bytes,
            writing: false,
            waiters: Vec::new(),
        }
    }
}

/// Ends a change, however its task ends.
struct Turn<'a>(&'a Queue);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut sector = self.0.shared.header.lock();
        sector.writing = false;
        let waiters = std::mem::take(&mut sector.waiters);
        drop(sector);
        waiters.into_iter().for_each(Waker::wake);
    }
}

/// Changes the header and writes it. Whoever needs it durable syncs.
pub(super) async fn change(queue: &Queue, change: impl FnOnce(&mut [u8; 512])) -> Result<(), IoError> {
    poll_fn(|cx| {
        let mut sector = queue.shared.header.lock();
        if sector.writing {
            sector.waiters.push(cx.waker().clone());
            return Poll::Pending;
        }
        sector.writing = true;
        Poll::Ready(())
    })
    .await;
    let _turn = Turn(queue);
    let bytes = {
        let mut sector = queue.shared.header.lock();
        change(sector.bytes.first_chunk_mut().ok_or(IoError::Corrupt)?);
        AlignedBuf::from_slice(&sector.bytes)
    };
    queue.file.write_at(0, bytes).await
}
