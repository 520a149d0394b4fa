//! Placeholder disk while another process owns the image; every request fails.

use std::io;
use std::sync::Arc;

use block::{Context, Disk, DiskInfo, DiskQueue, IoError, LocalBoxFuture, OpenQueueError};

/// A disk that is not there.
#[derive(Debug)]
pub(super) struct DetachedDisk;

impl Disk for DetachedDisk {
    fn info(&self) -> DiskInfo {
        DiskInfo {
            size_bytes: 0,
            read_only: true,
            preferred_io_bytes: 512,
            physical_block_bytes: 512,
            discard: false,
            discard_granularity_bytes: 512,
            write_zeroes: false,
        }
    }

    fn open_queue(self: Arc<Self>, _cx: &Context) -> Result<Box<dyn DiskQueue>, OpenQueueError> {
        Err(OpenQueueError {
            disk: "a closed disk".to_owned(),
            source: io::ErrorKind::NotConnected.into(),
        })
    }

    fn close(self: Arc<Self>, _cx: &Context) -> LocalBoxFuture<'static, Result<(), IoError>> {
        Box::pin(async { Ok(()) })
    }
}
