//! Handling of corrupt metadata.
//!
//! As in QEMU, the image is durably marked corrupt in its header, so that no program writes it before it has been
//! repaired. This process accepts no more writes for it. Reads of sound data go on. Acknowledged changes can still be
//! flushed: each write is checked to go to its proper place.

use std::rc::Rc;

use block::IoError;
use block::report::Kind;

use super::{Queue, background, header};
use crate::format::{ClusterUse, GuestOffset, HostOffset, Incompatible, L2Table, Version};
use crate::metadata::Lookup;
use crate::metadata::cluster_use::{Exposed, InUse};
use crate::metadata::write_back::Misplaced;

/// Logs the corruption that a lookup at a guest offset found, marks the image, and returns the error for the request.
pub(super) fn found(queue: &Rc<Queue>, lookup: Lookup, offset: GuestOffset) -> IoError {
    let guest_offset = offset.bytes();
    let image = queue.shared.file.path().display();
    match lookup {
        Lookup::Corrupt(error) => {
            if let Some(held_back) = admit(queue, "the mapping") {
                tracing::error!(%image, guest_offset, %error, held_back, "the mapping is corrupt");
            }
        }
        Lookup::PastEnd(host) => {
            if let Some(held_back) = admit(queue, "past the end") {
                let host = host.bytes();
                tracing::error!(%image, guest_offset, host, held_back, "the mapping leads past the end of the file");
            }
        }
        // A refused entry was logged when it was loaded.
        Lookup::Found { .. } | Lookup::Miss(_) | Lookup::Refused => {}
    }
    mark(queue);
    IoError::Corrupt
}

/// Logs the exposed entries of the table bytes at `offset`, and marks the image.
pub(super) fn exposed(queue: &Rc<Queue>, offset: HostOffset, entries: &[Exposed]) -> IoError {
    if let (Some(first), Some(_)) = (entries.first(), admit(queue, "an entry")) {
        let image = queue.shared.file.path().display();
        let entry = offset.bytes() + L2Table::offset_of(&queue.shared.geometry, first.index);
        let host = first.host.bytes();
        let others = entries.len() - 1;
        tracing::error!(%image, entry, host, others, "an L2 entry leads to {}", first.reason);
    }
    mark(queue);
    IoError::Corrupt
}

/// Logs that a cluster in use has a reference count of zero, marks the image, and returns the error for the request.
pub(super) fn in_use(queue: &Rc<Queue>, found: InUse) -> IoError {
    if admit(queue, "a count").is_some() {
        let image = queue.shared.file.path().display();
        let offset = queue.shared.geometry.host_offset(found.cluster).bytes();
        tracing::error!(%image, offset, "a cluster has a reference count of zero and is in use by {}", found.by.phrase());
    }
    mark(queue);
    IoError::Corrupt
}

/// Logs that a table was about to be written to a wrong place, marks the image, and returns the error for the
/// request.
pub(super) fn misplaced(queue: &Rc<Queue>, found: Misplaced) -> IoError {
    let image = queue.shared.file.path().display();
    let (offset, what) = (found.offset.bytes(), found.what.phrase());
    let there = found.there.map_or("nothing known", ClusterUse::phrase);
    tracing::error!(%image, offset, what, there, "metadata was about to be written where it does not belong");
    mark(queue);
    IoError::Corrupt
}

/// Returns `Some` if this corruption may be logged now, with the number of messages suppressed before, if any.
fn admit(queue: &Queue, what: &'static str) -> Option<Option<u64>> {
    let kind = Kind::Corrupt(what);
    queue.shared.file.reports().admit(kind, queue.cx.now())
}

/// Marks the image corrupt, once. The caller holds no lock.
pub(super) fn mark(queue: &Rc<Queue>) {
    let shared = &queue.shared;
    if let Ok(mut metadata) = shared.write() {
        metadata.corrupt = true;
    }
    if !shared.mark_corrupt() || shared.policy.read_only || shared.geometry.version() == Version::V2 {
        return;
    }
    background::start(queue, async |queue: Rc<Queue>| {
        let written = header::change(&queue, |fields| {
            fields.set_incompatible(fields.incompatible() | Incompatible::CORRUPT);
        });
        let marked = match written.await {
            Ok(()) => queue.file.sync().await,
            Err(error) => Err(error),
        };
        if let Err(error) = marked {
            let image = queue.shared.file.path().display();
            tracing::error!(%image, %error, "the image cannot be marked corrupt");
        }
    });
}

#[cfg(test)]
mod tests {
    use block::ring::RingKind;
    use block::{AlignedBuf, Buffer, Context, Disk, IoError, Op, Request};

    use crate::format::ClusterUse;
    use crate::image::testing::World;
    use crate::{OpenOptions, QcowDisk};

    async fn ask(queue: &dyn block::DiskQueue, op: Op, buffer: Buffer) -> Result<(), IoError> {
        let len = buffer.len() as u64;
        block::ask(queue, op, 0, len, buffer).await.map(drop)
    }

    /// Simulates a bug of the engine: a table is about to be written where the use map knows another kind of table, or
    /// nothing at all.
    #[test]
    fn flush_refuses_to_write_a_misplaced_table() {
        for there in [None, Some(ClusterUse::RefcountBlock)] {
            let world = World::new();
            world.qemu_img(&["create", "-f", "qcow2", "a.qcow2", "1M"]);
            world.qemu_io("a.qcow2", &["write -P 1 0 64k"]);
            let before = std::fs::read(world.path("a.qcow2")).unwrap();
            let disk = QcowDisk::open(&world.path("a.qcow2"), &OpenOptions::default()).unwrap();
            let cx = Context::new(RingKind::Syscalls, 64).unwrap();
            let queue = std::sync::Arc::clone(&disk).open_queue(&cx).unwrap();
            let asked = async {
                let zeros = Op::WriteZeroes {
                    unmap: false,
                    fua: false,
                };
                let (request, answer) = Request::local(zeros, 0, 65536, Buffer::default());
                queue.submit(request);
                assert_eq!(answer.await.result, Ok(()));
                {
                    let mut metadata = disk.shared.write().unwrap();
                    let table = metadata.table_offset(0).unwrap().unwrap();
                    let table = metadata.geometry().host_cluster(table);
                    metadata.refcounts.uses.freed(table);
                    if let Some(structure) = there {
                        metadata.refcounts.uses.made(structure, table, 1);
                    }
                }
                assert_eq!(
                    ask(&*queue, Op::Flush, Buffer::default()).await,
                    Err(IoError::Corrupt)
                );
                let data = AlignedBuf::from_slice(&[7; 4096]).into();
                let written = ask(&*queue, Op::Write { fua: false }, data).await;
                assert_eq!(written, Err(IoError::Corrupt));
                let read = AlignedBuf::zeroed(512).into();
                assert_eq!(ask(&*queue, Op::Read, read).await, Ok(()));
            };
            cx.block_on(asked).unwrap();
            while cx.tasks() > 0 {
                cx.run_ready();
                cx.ring().turn(false).unwrap();
            }
            let mut after = std::fs::read(world.path("a.qcow2")).unwrap();
            assert_eq!(after[79] & 2, 2, "it is not marked");
            after[79] &= !2;
            assert!(after == before, "more than the mark has changed");
        }
    }
}
