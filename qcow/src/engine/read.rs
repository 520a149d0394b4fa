//! Reads that are not one known piece: several extents, compressed clusters, tables to load.
//!
//! Everything that can start is started before anything is waited for. Everything started is waited for before the
//! request is answered, also after an error, because its memory belongs to the guest.

use std::rc::Rc;

use block::buffer::Piece;
use block::file::IoFuture;
use block::join_all;
use block::{Buffer, IoError, Op, Request};
use smallvec::SmallVec;

use super::part::Part;
use super::{Queue, compressed, corrupt, load};
use crate::format::{CompressedExtent, GuestOffset};
use crate::metadata::{Extent, Lookup};

/// The largest number of extents of one request under way at once.
const EXTENTS_MAX: usize = 64;

/// Fills `buffer` from `at` on with `len` guest bytes from `offset` on.
pub(super) async fn read(
    queue: &Rc<Queue>,
    buffer: &Rc<Buffer>,
    at: usize,
    offset: GuestOffset,
    len: u64,
) -> Result<(), IoError> {
    let end = offset + len;
    let mut here = offset;
    let mut parts = Vec::new();
    let mut result = Ok(());
    while here < end && result.is_ok() {
        let mut extents: SmallVec<[(GuestOffset, u64, Extent); 8]> = SmallVec::new();
        let mut miss = None;
        let mut wrong = None;
        {
            let metadata = queue.metadata()?;
            while here < end && extents.len() < EXTENTS_MAX {
                match metadata.lookup(here, end - here) {
                    Lookup::Found { extent, len } => {
                        extents.push((here, len, extent));
                        here += len;
                    }
                    Lookup::Miss(slice) => {
                        miss = Some(slice);
                        break;
                    }
                    lookup => {
                        wrong = Some(lookup);
                        break;
                    }
                }
            }
        }
        for (from, len, extent) in extents {
            let place = at + (from - offset) as usize;
            start(queue, buffer, place, from, len as usize, extent, &mut parts);
        }
        // Pieces that have ended keep their slots of the ring until they are polled, and loading a table needs one.
        if parts.len() >= EXTENTS_MAX || miss.is_some() {
            result = join_all(std::mem::take(&mut parts)).await;
        }
        if let Some(lookup) = wrong {
            result = Err(corrupt::found(queue, lookup, here));
        }
        if let Some(slice) = miss {
            result = result.and(load::load_l2(queue, slice).await);
        }
    }
    let ended = join_all(parts).await;
    result.and(ended)
}

/// Starts the read of one extent.
fn start(
    queue: &Rc<Queue>,
    buffer: &Rc<Buffer>,
    at: usize,
    offset: GuestOffset,
    len: usize,
    extent: Extent,
    parts: &mut Vec<Part>,
) {
    match extent {
        Extent::Data { at: host, .. } => {
            let piece = Piece::Bytes {
                buffer: Rc::clone(buffer),
                offset: at,
                len,
            };
            parts.push(Part::Io(queue.data.start_read(host, offset, piece)));
        }
        Extent::Zero => start_zeros(queue, buffer, at, len, parts),
        Extent::Unallocated => start_backing(queue, buffer, at, offset, len, parts),
        Extent::Compressed(extent) => {
            let within = queue.shared.geometry.offset_in_cluster(offset.bytes()) as usize;
            let task = copy_compressed(Rc::clone(queue), extent, within, Rc::clone(buffer), at, len);
            parts.push(Part::Task(Box::pin(task)));
        }
    }
}

/// Starts the read of unmapped bytes: the backing file's, zeros past its end.
pub(super) fn start_backing(
    queue: &Rc<Queue>,
    buffer: &Rc<Buffer>,
    at: usize,
    offset: GuestOffset,
    len: usize,
    parts: &mut Vec<Part>,
) {
    let below = match &queue.backing {
        Some((backing, size)) if offset.bytes() < *size => {
            let below = len.min(usize::try_from(*size - offset.bytes()).unwrap_or(usize::MAX));
            let part = Buffer::part(buffer, at, below);
            let (request, answer) = Request::local(Op::Read, offset.bytes(), below as u64, part);
            backing.submit(request);
            parts.push(Part::Task(Box::pin(async move { answer.await.result })));
            below
        }
        _ => 0,
    };
    start_zeros(queue, buffer, at + below, len - below, parts);
}

/// Fills a part of the buffer with zeros, which takes I/O if the buffer is not memory.
fn start_zeros(queue: &Queue, buffer: &Rc<Buffer>, at: usize, len: usize, parts: &mut Vec<Part>) {
    let zeros = queue.cx.ring().fill_zeros(buffer, at, len);
    parts.extend(zeros.map(|op| Part::Io(IoFuture::Op(op))));
}

async fn copy_compressed(
    queue: Rc<Queue>,
    extent: CompressedExtent,
    within: usize,
    buffer: Rc<Buffer>,
    at: usize,
    len: usize,
) -> Result<(), IoError> {
    let cluster = compressed::cluster(&queue, extent).await?;
    if within + len > cluster.len() {
        return Err(IoError::Corrupt);
    }
    match queue.cx.ring().copy(&cluster, within, &buffer, at, len) {
        Some(copy) => copy.await,
        None => Ok(()),
    }
}
