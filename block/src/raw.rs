//! The raw format: the smallest disk there is, and the yardstick for the others.
//!
//! Guest offset and host offset are the same. Sizes that are not a multiple of 512 bytes are rounded down.

use std::sync::Arc;

use smallvec::smallvec;
use std::rc::Rc;

use crate::buffer::Piece;
use crate::disk::{Disk, DiskInfo, DiskQueue, LocalBoxFuture, OpenQueueError};
use crate::error::IoError;
use crate::file::{FileView, ImageFile};
use crate::hold::HoldOff;
use crate::request::{Op, Request};
use crate::task::Context;

/// A file or block device offered as it is.
#[derive(Debug)]
pub struct RawDisk {
    file: Arc<ImageFile>,
    info: DiskInfo,
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
        Arc::new(Self { file, info })
    }

    /// Offers `file` with the size it has now.
    ///
    /// # Errors
    ///
    /// If its size cannot be found out.
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
        Ok(Self::new(file, size, discard))
    }
}

impl Disk for RawDisk {
    fn info(&self) -> DiskInfo {
        self.info
    }

    fn files(&self) -> Vec<std::path::PathBuf> {
        vec![self.file.path().to_owned()]
    }

    fn open_queue(self: Arc<Self>, cx: &Context) -> Result<Box<dyn DiskQueue>, OpenQueueError> {
        let view = self.file.view(cx).map_err(|source| OpenQueueError {
            disk: self.file.path().display().to_string(),
            source,
        })?;
        Ok(Box::new(RawQueue {
            view,
            info: self.info,
        }))
    }

    fn close(self: Arc<Self>, cx: &Context) -> LocalBoxFuture<'static, Result<(), IoError>> {
        self.file.hold_off().for_good();
        let view = self.file.view(cx);
        let read_only = self.info.read_only;
        Box::pin(async move { if read_only { Ok(()) } else { view?.sync().await } })
    }

    fn hold_off(&self) -> Option<HoldOff> {
        Some(self.file.hold_off())
    }
}

#[derive(Debug)]
struct RawQueue {
    view: FileView,
    info: DiskInfo,
}

impl DiskQueue for RawQueue {
    fn submit(&self, request: Request) {
        if let Err(error) = request.check(self.info.size_bytes, self.info.read_only) {
            return request.finish(Err(error));
        }
        if request.len == 0 && request.op != Op::Flush {
            return request.finish(Ok(()));
        }
        // A disk that cannot be written has nothing to lose.
        if request.op == Op::Flush && self.info.read_only {
            return request.finish(Ok(()));
        }
        match self.view.submit(request.offset, request) {
            Ok(()) => {}
            Err(request) => {
                let view = self.view.clone();
                self.view.context().spawn(carry_out(view, request));
            }
        }
    }
}

/// Answers a request that does not fit one op.
async fn carry_out(view: FileView, mut request: Request) {
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
    fn every_operation_does_what_it_says_on_both_rings() {
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
}
