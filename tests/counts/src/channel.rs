//! The end of a ublk driver whose host reads without a pause: each answered tag has the next request at once.

use block::ring::{LeaseError, NoSlot};
use block::{AlignedBuf, Buffer, IoError};
use virtio_devices::ublk::abi::{IO_RES_OK, IoDescriptor, op};
use virtio_devices::ublk::{Channel, PagesError};

/// The bytes of each request.
pub(crate) const REQUEST_BYTES: usize = 4096;

/// A read, of another cluster for each tag.
pub(crate) fn read_under(tag: u16) -> IoDescriptor {
    IoDescriptor {
        op_flags: op::READ.into(),
        nr_sectors: REQUEST_BYTES as u32 / 512,
        start_sector: u64::from(tag) * 128,
        addr: 0,
    }
}

/// A driver that does nothing but to ask again.
#[derive(Debug)]
pub(crate) struct NullChannel {
    ready: Vec<u16>,
    buffers: Vec<Option<AlignedBuf>>,
}

impl NullChannel {
    /// A driver of a queue with `tags` tags.
    pub(crate) fn new(tags: u16) -> Self {
        let buffer = |_| Some(AlignedBuf::zeroed(REQUEST_BYTES));
        Self {
            ready: Vec::with_capacity(usize::from(tags)),
            buffers: (0..tags).map(buffer).collect(),
        }
    }

    fn buffer(&mut self, tag: u16) -> Buffer {
        let buffer = self.buffers[usize::from(tag)].take();
        buffer.expect("a tag has one request at a time").into()
    }
}

impl Channel for NullChannel {
    fn fetch(&mut self, tag: u16) -> Result<(), NoSlot> {
        self.ready.push(tag);
        Ok(())
    }

    fn commit_and_fetch(&mut self, tag: u16, result: i32) -> Result<(), NoSlot> {
        assert_eq!(
            result, REQUEST_BYTES as i32,
            "the request under tag {tag} is answered well"
        );
        self.ready.push(tag);
        Ok(())
    }

    fn has_results(&self) -> bool {
        !self.ready.is_empty()
    }

    fn take_results(&mut self, out: &mut Vec<(u64, i32)>) {
        out.extend(self.ready.drain(..).map(|tag| (u64::from(tag), IO_RES_OK)));
    }

    fn descriptor(&self, tag: u16) -> IoDescriptor {
        read_under(tag)
    }

    fn data(&mut self, tag: u16, _len: usize) -> Result<Buffer, IoError> {
        Ok(self.buffer(tag))
    }

    fn room(&mut self, tag: u16, _len: usize) -> Buffer {
        self.buffer(tag)
    }

    fn deliver(&mut self, _tag: u16, _data: &Buffer) -> Result<(), IoError> {
        Ok(())
    }

    fn give_back(&mut self, tag: u16, buffer: Buffer) {
        self.buffers[usize::from(tag)] = buffer.into_owned();
    }

    fn pages(&mut self, tag: u16, _len: usize) -> Result<Buffer, PagesError> {
        Err(PagesError::Lease(LeaseError::InUse { index: tag }))
    }

    fn is_free(&self, _tag: u16) -> bool {
        true
    }
}
