//! The raw format: the simplest disk, and the baseline for the others.
//!
//! Guest offset and host offset are the same. Sizes that are not a multiple of 512 bytes are rounded down.
//!
//! Invariants:
//!
//! - A disk that grows shows its new size only once the file has it durably. New bytes read as zeros, whatever lay
//!   past the disk's end before.
//! - No write makes the file longer: the next open would find a larger disk.

use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use smallvec::smallvec;

use crate::buffer::Piece;
use crate::delay::HoldOff;
use crate::disk::{Disk, DiskInfo, DiskQueue, OpenQueueError};
use crate::error::IoError;
use crate::file::{FileView, ImageFile};
use crate::open::{Access, Format, OpenError, Opening};
use crate::request::{Op, Request, check_range};
use crate::status::{Content, StatusRange, StatusRanges};
use crate::task::{Context, LocalBoxFuture};

/// A file or block device offered as it is.
#[derive(Debug)]
pub struct RawDisk {
    file: Arc<ImageFile>,
    /// Its size is the one it was opened with.
    opened: DiskInfo,
    size_bytes: AtomicU64,
    growing: AtomicBool,
}

impl RawDisk {
    /// Offers `file`, which is `size_bytes` long, read-only if it was not opened for writing.
    #[must_use]
    pub fn new(file: Arc<ImageFile>, size_bytes: u64, discard: bool) -> Arc<Self> {
        let block = file.alignment().offset.clamp(512, 1 << 20) as u32;
        let info = DiskInfo {
            size_bytes: size_bytes & !511,
            read_only: !file.is_writable(),
            preferred_io_bytes: block.max(4096),
            physical_block_bytes: block,
            discard: discard && file.is_writable(),
            discard_granularity_bytes: block.max(4096),
            write_zeroes: file.is_writable(),
        };
        Arc::new(Self {
            file,
            size_bytes: AtomicU64::new(info.size_bytes),
            opened: info,
            growing: AtomicBool::new(false),
        })
    }

    /// Offers `file` with the size it has now.
    ///
    /// # Errors
    ///
    /// If its size cannot be determined, or if a write of its last sector would make the file longer. Direct I/O does
    /// that if the file ends inside a block of the file system.
    pub fn open(file: Arc<ImageFile>, discard: bool, cx: &Context) -> Result<Arc<Self>, OpenQueueError> {
        let error = |source| OpenQueueError {
            disk: file.path().display().to_string(),
            source,
        };
        let size = file
            .view(cx)
            .map_err(error)?
            .len()
            .map_err(|source| error(source.into()))?;
        if file.is_writable() && !ends_at_a_block(&file, size) {
            let block = file.alignment().offset;
            return Err(error(std::io::Error::new(
                std::io::ErrorKind::InvalidInput,
                format!(
                    "its length, {size} bytes, is not a multiple of {block} bytes, the smallest write of direct I/O, so that writing \
                     the last sector would extend the file; pass direct=off, or extend it to a multiple of {block} bytes"
                ),
            )));
        }
        Ok(Self::new(file, size, discard))
    }
}

/// The raw format.
#[derive(Clone, Copy, Debug, Default)]
pub struct Raw {
    /// Return space to the host on discard.
    pub discard: bool,
    /// Hold a write that the host has no space for until there is some, instead of failing it.
    pub wait_for_space: bool,
}

impl Format for Raw {
    fn name(&self) -> &'static str {
        "raw"
    }

    fn open<'a>(
        &'a self,
        opening: &'a Opening<'a>,
        path: &'a Path,
        access: Access,
    ) -> LocalBoxFuture<'a, Result<Arc<dyn Disk>, OpenError>> {
        Box::pin(async move {
            let file = opening.open_file(path, access)?;
            if self.wait_for_space && access.is_write() {
                file.wait_for_space();
            }
            let cx = opening.context();
            if access != Access::Below {
                return Ok(RawDisk::open(file, self.discard, cx)? as Arc<dyn Disk>);
            }
            let size = file.view(cx).map_err(IoError::from).and_then(|view| view.len());
            let size = size.map_err(|source| OpenError::image(path, LengthError(source)))?;
            // Rounded up, as the image above may have been made for all of its bytes. The file reads as zeros past its end.
            let size = size.checked_next_multiple_of(512).unwrap_or(size);
            Ok(RawDisk::new(file, size, false) as Arc<dyn Disk>)
        })
    }
}

/// Error: the length of a raw image is unknown.
#[derive(Debug, thiserror::Error)]
#[error("cannot find the length of the file")]
struct LengthError(#[source] IoError);

/// Returns true if writing the last sectors of a disk of `size_bytes` on `file` leaves the file as long as it is.
fn ends_at_a_block(file: &ImageFile, size_bytes: u64) -> bool {
    (size_bytes & !511).is_multiple_of(file.alignment().offset)
}

/// Guard of a growth in progress: only one at a time.
struct Growing<'a>(&'a RawDisk);

impl Drop for Growing<'_> {
    fn drop(&mut self) {
        self.0.growing.store(false, Ordering::Release);
    }
}

impl RawDisk {
    async fn grow(&self, view: &FileView, size_bytes: u64) -> Result<(), IoError> {
        if self.opened.read_only {
            return Err(IoError::ReadOnly);
        }
        // The size of a block device is set elsewhere.
        if self.file.is_block_device() {
            return Err(IoError::Unsupported);
        }
        if self.growing.swap(true, Ordering::Acquire) {
            return Err(IoError::from_errno(libc::EBUSY));
        }
        let _alone = Growing(self);
        let old = self.size_bytes.load(Ordering::Acquire);
        let new = size_bytes & !511;
        if new < old || new > i64::MAX as u64 {
            return Err(IoError::OutOfRange);
        }
        if new == old {
            return Ok(());
        }
        if !ends_at_a_block(&self.file, new) {
            return Err(IoError::from_errno(libc::EINVAL));
        }
        let before = view.len()?;
        let grown = async {
            if before < new {
                view.set_len(new).await?;
            }
            // Half a sector, or bytes that another program has written there.
            if before > old {
                view.zero(old, before.min(new) - old).await?;
            }
            view.sync().await
        };
        if let Err(error) = grown.await {
            if before < new {
                // No request writes there. If the file stays too long, the disk still has its old size.
                view.set_len(before).await.unwrap_or_default();
            }
            return Err(error);
        }
        self.size_bytes.store(new, Ordering::Release);
        Ok(())
    }
}

impl Disk for RawDisk {
    fn info(&self) -> DiskInfo {
        DiskInfo {
            size_bytes: self.size_bytes.load(Ordering::Acquire),
            ..self.opened
        }
    }

    fn files(&self) -> Vec<std::path::PathBuf> {
        vec![self.file.path().to_owned()]
    }

    fn open_queue(self: Arc<Self>, cx: &Context) -> Result<Box<dyn DiskQueue>, OpenQueueError> {
        let view = self.file.view(cx).map_err(|source| OpenQueueError {
            disk: self.file.path().display().to_string(),
            source,
        })?;
        Ok(Box::new(RawQueue { view, disk: self }))
    }

    fn close(self: Arc<Self>, cx: &Context) -> LocalBoxFuture<'static, Result<(), IoError>> {
        self.file.hold_off().for_good();
        if self.opened.read_only {
            return Box::pin(async { Ok(()) });
        }
        let view = self.file.last_view(cx);
        Box::pin(async move { view?.sync().await })
    }

    fn resize(
        self: Arc<Self>,
        cx: &Context,
        size_bytes: u64,
    ) -> LocalBoxFuture<'static, Result<(), IoError>> {
        let view = self.file.view(cx);
        Box::pin(async move { self.grow(&view?, size_bytes).await })
    }

    fn hold_off(&self) -> Option<HoldOff> {
        Some(self.file.hold_off())
    }
}

/// Returns what of `from..to` is data and what are holes, as far as the file can tell.
fn allocation(view: &FileView, from: u64, to: u64) -> Vec<StatusRange> {
    let mut ranges = StatusRanges::default();
    let mut here = from;
    while here < to && !ranges.is_full() {
        let data = view.next_data(here).unwrap_or(to).clamp(here, to);
        let (content, end) = if data > here {
            (Content::Zero, data)
        } else {
            let hole = view.next_hole(here).filter(|&hole| hole > here).unwrap_or(to);
            (Content::Data { at: Some(here) }, hole.min(to))
        };
        ranges.push(StatusRange {
            offset: here,
            len: end - here,
            content,
            depth: 0,
        });
        here = end;
    }
    ranges.into_vec()
}

#[derive(Debug)]
struct RawQueue {
    view: FileView,
    disk: Arc<RawDisk>,
}

impl DiskQueue for RawQueue {
    fn submit(&self, request: Request) {
        let (disk, read_only) = (&self.disk, self.disk.opened.read_only);
        if let Err(error) = request.check(disk.size_bytes.load(Ordering::Acquire), read_only) {
            return request.finish(Err(error));
        }
        if request.len == 0 && request.op != Op::Flush {
            return request.finish(Ok(()));
        }
        // A read-only disk has nothing to flush.
        if request.op == Op::Flush && read_only {
            return request.finish(Ok(()));
        }
        match self.view.submit(request.offset, request) {
            Ok(()) => {}
            Err(request) => {
                let view = self.view.clone();
                self.view.context().spawn(execute(view, request));
            }
        }
    }

    fn status(&self, offset: u64, len: u64) -> LocalBoxFuture<'_, Result<Vec<StatusRange>, IoError>> {
        Box::pin(async move {
            check_range(offset, len, self.disk.size_bytes.load(Ordering::Acquire))?;
            Ok(allocation(&self.view, offset, offset + len))
        })
    }

    fn data_file(&self) -> Option<FileView> {
        self.disk.opened.read_only.then(|| self.view.clone())
    }
}

/// Answers a request that does not fit one op.
async fn execute(view: FileView, mut request: Request) {
    let (offset, len) = (request.offset, request.len);
    match request.op {
        Op::Read => {
            let buffer = Rc::new(request.take_buffer());
            let result = view.read(offset, smallvec![Piece::whole(&buffer)]).await;
            request.finish_with(Rc::try_unwrap(buffer).unwrap_or_default(), result);
        }
        Op::Write { fua } => {
            let buffer = Rc::new(request.take_buffer());
            let result = view.write(offset, smallvec![Piece::whole(&buffer)], fua).await;
            request.finish_with(Rc::try_unwrap(buffer).unwrap_or_default(), result);
        }
        Op::Flush => {
            let result = view.sync().await;
            request.finish(result);
        }
        Op::Discard => {
            let result = view.punch(offset, len).await.map(|_done| ());
            request.finish(result);
        }
        Op::WriteZeroes { unmap, fua } => {
            let result = write_zeroes(&view, offset, len, unmap, fua).await;
            request.finish(result);
        }
    }
}

async fn write_zeroes(view: &FileView, offset: u64, len: u64, unmap: bool, fua: bool) -> Result<(), IoError> {
    if !(unmap && view.punch(offset, len).await?) {
        view.zero(offset, len).await?;
    }
    if fua { view.sync().await } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::{AlignedBuf, Buffer};
    use crate::file::FileOptions;
    use crate::ring::RingKind;

    async fn ask(
        queue: &dyn DiskQueue,
        op: Op,
        offset: u64,
        len: u64,
        buffer: Buffer,
    ) -> crate::request::Done {
        let (request, answer) = Request::local(op, offset, len, buffer);
        queue.submit(request);
        answer.await
    }

    #[test]
    fn raw_disk_performs_every_operation_on_both_rings() {
        for kind in [RingKind::IoUring, RingKind::Syscalls] {
            let cx = Context::new(kind, 16).expect("these tests need io_uring");
            let file = tempfile::tempfile().expect("a temporary file");
            file.set_len(1 << 20).expect("its length");
            let image = ImageFile::from_fd(
                "test".as_ref(),
                file,
                FileOptions {
                    write: true,
                    direct: false,
                },
            );
            let disk = RawDisk::open(image, true, &cx).expect("a disk");
            let queue = Arc::clone(&disk).open_queue(&cx).expect("a queue");
            let check = async {
                let data = || Buffer::from(AlignedBuf::from_slice(&[3; 8192]));
                let write = Op::Write { fua: true };
                assert_eq!(ask(&*queue, write, 4096, 8192, data()).await.result, Ok(()));
                assert_eq!(
                    ask(&*queue, Op::Discard, 4096, 4096, Buffer::default())
                        .await
                        .result,
                    Ok(())
                );
                let zeroes = Op::WriteZeroes {
                    unmap: false,
                    fua: true,
                };
                assert_eq!(
                    ask(&*queue, zeroes, 8192, 512, Buffer::default()).await.result,
                    Ok(())
                );
                assert_eq!(
                    ask(&*queue, Op::Flush, 0, 0, Buffer::default()).await.result,
                    Ok(())
                );
                let done = ask(&*queue, Op::Read, 4096, 8192, data()).await;
                let bytes = done.buffer.into_owned().expect("our own buffer");
                assert!(bytes[..4608].iter().all(|&byte| byte == 0));
                assert!(bytes[4608..].iter().all(|&byte| byte == 3));
                let beyond = ask(&*queue, Op::Read, 1 << 20, 8192, data()).await;
                assert_eq!(beyond.result, Err(IoError::OutOfRange));
            };
            cx.block_on(check).expect("the ring turns");
            drop(queue);
            cx.block_on(disk.close(&cx))
                .expect("the ring turns")
                .expect("a clean close");
        }
    }

    #[test]
    fn raw_status_tells_holes_from_data_on_both_rings() {
        for kind in [RingKind::IoUring, RingKind::Syscalls] {
            let cx = Context::new(kind, 16).expect("these tests need io_uring");
            let file = tempfile::tempfile().expect("a temporary file");
            file.set_len(1 << 20).expect("its length");
            std::os::unix::fs::FileExt::write_all_at(&file, &[1; 65536], 256 << 10).expect("data");
            let image = ImageFile::from_fd("test".as_ref(), file, FileOptions::default());
            let disk = RawDisk::open(image, true, &cx).expect("a disk");
            let queue = Arc::clone(&disk).open_queue(&cx).expect("a queue");
            let status = |offset, len| cx.block_on(queue.status(offset, len)).expect("the ring turns");
            let range = |offset, len, content| StatusRange {
                offset,
                len,
                content,
                depth: 0,
            };
            let data = |at| Content::Data { at: Some(at) };
            assert_eq!(
                status(0, 1 << 20),
                Ok(vec![
                    range(0, 256 << 10, Content::Zero),
                    range(256 << 10, 64 << 10, data(256 << 10)),
                    range(320 << 10, 704 << 10, Content::Zero),
                ])
            );
            assert_eq!(
                status((256 << 10) + 512, 1024),
                Ok(vec![range((256 << 10) + 512, 1024, data((256 << 10) + 512))])
            );
            assert_eq!(status(1 << 20, 0), Ok(vec![]));
            assert_eq!(status(1 << 20, 512), Err(IoError::OutOfRange));
        }
    }

    /// A disk on a file of its own, with what was in it.
    fn on_file(bytes: &[u8]) -> (Arc<RawDisk>, std::fs::File, Context) {
        use std::io::Write;
        let cx = Context::new(RingKind::IoUring, 16).expect("these tests need io_uring");
        let mut file = tempfile::tempfile().expect("a temporary file");
        file.write_all(bytes).expect("its contents");
        let options = FileOptions {
            write: true,
            direct: false,
        };
        let image = ImageFile::from_fd("test".as_ref(), file.try_clone().expect("a descriptor"), options);
        (RawDisk::open(image, true, &cx).expect("a disk"), file, cx)
    }

    fn resize(cx: &Context, disk: &Arc<RawDisk>, size_bytes: u64) -> Result<(), IoError> {
        let growth = Arc::clone(disk).resize(cx, size_bytes);
        cx.block_on(growth).expect("the ring turns")
    }

    fn file_len(file: &std::fs::File) -> u64 {
        file.metadata().expect("its metadata").len()
    }

    #[test]
    fn raw_disk_grows_with_zeros_under_open_queues() {
        // Half a sector behind the end of the disk.
        let (disk, file, cx) = on_file(&[9; 4096 + 300]);
        let queue = Arc::clone(&disk).open_queue(&cx).expect("a queue");
        let read = |offset, len: usize| {
            let buffer = Buffer::from(AlignedBuf::from_slice(&vec![1; len]));
            let done = cx.block_on(ask(&*queue, Op::Read, offset, len as u64, buffer));
            let done = done.expect("the ring turns");
            done.result
                .map(|()| done.buffer.into_owned().expect("our own buffer"))
        };
        assert_eq!(read(4096, 512).map(|_| ()), Err(IoError::OutOfRange));
        assert_eq!(resize(&cx, &disk, 10_000), Ok(()));
        assert_eq!((disk.info().size_bytes, file_len(&file)), (9728, 9728));
        assert!(read(0, 4096).expect("the old part").iter().all(|&byte| byte == 9));
        assert!(
            read(4096, 9728 - 4096)
                .expect("the new part")
                .iter()
                .all(|&byte| byte == 0)
        );
        assert_eq!(resize(&cx, &disk, 9728), Ok(()), "it is so large");
        assert_eq!(resize(&cx, &disk, 4096), Err(IoError::OutOfRange));
        assert_eq!(resize(&cx, &disk, u64::MAX), Err(IoError::OutOfRange));
        assert_eq!(disk.info().size_bytes, 9728);
        // Somebody has made the file longer than is asked for: it is not cut, and nothing of that shows.
        use std::os::unix::fs::FileExt;
        file.write_all_at(&[7; 8192], 9728).expect("a write");
        assert_eq!(resize(&cx, &disk, 9728 + 4096), Ok(()));
        assert!(
            read(9728, 4096)
                .expect("the new part")
                .iter()
                .all(|&byte| byte == 0)
        );
        assert_eq!(file_len(&file), 9728 + 8192);
    }

    #[test]
    fn raw_resize_keeps_size_and_file_when_it_fails() {
        let (disk, _, cx) = on_file(&[9; 4096]);
        // Another growth is under way.
        disk.growing.store(true, Ordering::Release);
        assert_eq!(resize(&cx, &disk, 8192), Err(IoError::from_errno(libc::EBUSY)));
        disk.growing.store(false, Ordering::Release);
        assert_eq!(resize(&cx, &disk, 8192), Ok(()));
        // A file that is not to change its length.
        let fd = rustix::fs::memfd_create("sealed", rustix::fs::MemfdFlags::ALLOW_SEALING).expect("a memfd");
        let file = std::fs::File::from(fd);
        file.set_len(4096).expect("its length");
        rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::GROW).expect("a seal");
        let copy = || file.try_clone().expect("a descriptor");
        for (write, error) in [
            (true, IoError::from_errno(libc::EPERM)),
            (false, IoError::ReadOnly),
        ] {
            let options = FileOptions { write, direct: false };
            let image = ImageFile::from_fd("test".as_ref(), copy(), options);
            let disk = RawDisk::open(image, true, &cx).expect("a disk");
            assert_eq!(resize(&cx, &disk, 8192), Err(error));
            assert_eq!((disk.info().size_bytes, file_len(&file)), (4096, 4096));
            assert!(!disk.growing.load(Ordering::Acquire), "it may be tried again");
        }
    }
}
