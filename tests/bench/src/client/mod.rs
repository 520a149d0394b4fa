//! A vhost-user-blk client: the guest's driver without a guest.
//!
//! `virtio-driver` speaks the protocol and places the rings; [`ring`] drives them, [`drive`] keeps a
//! fixed number of requests in flight and counts. The same client serves every server.
#![expect(
    unsafe_code,
    reason = "hands the rings' memory from virtio-driver to our own driver"
)]

pub(crate) mod drive;
mod memory;
pub(crate) mod null_device;
pub(crate) mod ring;

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;

use virtio_driver::virtqueue::{Virtqueue, VirtqueueLayout};
use virtio_driver::{VhostUser, VirtioBlkConfig, VirtioBlkFeatureFlags, VirtioFeatureFlags, VirtioTransport};

use memory::SharedMemory;
use ring::{QUEUE_SIZE, RequestBuf, Ring, RingMemory, SLOTS_MAX};

type Transport = VhostUser<VirtioBlkConfig, RequestBuf>;

/// The memory that the rings point into. The transport unmaps the queues when it is dropped.
struct Mapped {
    _transport: Transport,
    _data: SharedMemory,
}

/// A connected disk: its size, and one driver for each queue.
#[derive(Debug)]
pub(crate) struct Connection {
    /// The size of the disk, in bytes.
    pub(crate) disk_bytes: u64,
    /// The size of one request's buffer, in bytes.
    pub(crate) block_bytes: u32,
    /// The queues, each to be used from one thread. The connection ends when the last is dropped.
    pub(crate) rings: Vec<Ring>,
}

impl Connection {
    /// Connects to the server at `socket` and sets up `queues` queues, whose slots have buffers of
    /// `block_bytes` each, filled with bytes that are no zeros.
    ///
    /// # Errors
    ///
    /// If nobody listens, the server lacks a feature the measurement needs, or memory is short.
    pub(crate) fn open(socket: &Path, queues: u16, block_bytes: u32) -> io::Result<Self> {
        let mut wanted = VirtioFeatureFlags::VERSION_1.bits()
            | VirtioFeatureFlags::RING_EVENT_IDX.bits()
            | VirtioBlkFeatureFlags::FLUSH.bits()
            | VirtioBlkFeatureFlags::CONFIG_WCE.bits();
        if queues > 1 {
            wanted |= VirtioBlkFeatureFlags::MQ.bits();
        }
        let path = socket
            .to_str()
            .ok_or_else(|| io::Error::other("the socket's path is not UTF-8"))?;
        let mut transport = Transport::new(path, wanted)?;
        let needed = wanted & !VirtioBlkFeatureFlags::CONFIG_WCE.bits();
        let missing = needed & !transport.get_features();
        if missing != 0 {
            return Err(io::Error::other(format!(
                "the server does not offer virtio features {missing:#x}"
            )));
        }
        let config = transport.get_config()?;
        let disk_bytes = u64::from(config.capacity) * 512;
        if queues > 1 && u16::from(config.num_queues) < queues {
            let offered = u16::from(config.num_queues);
            return Err(io::Error::other(format!(
                "the server offers {offered} queues, {queues} are needed"
            )));
        }

        let slots = usize::from(SLOTS_MAX);
        let block = block_bytes as usize;
        let data = SharedMemory::new(usize::from(queues) * slots * block)?;
        for (index, byte) in (0..data.len()).zip((1..=251_u8).cycle()) {
            // SAFETY: `index` is inside the mapping, which the server does not know yet.
            unsafe { data.base().add(index).write(byte) };
        }
        transport.map_mem_region(data.base() as usize, data.len(), data.raw_fd(), 0)?;

        let features = VirtioFeatureFlags::from_bits_truncate(transport.get_features());
        let layout =
            VirtqueueLayout::new::<RequestBuf>(usize::from(queues), usize::from(QUEUE_SIZE), features)?;
        let bytes = transport.alloc_queue_mem(&layout)?;
        let (base, len) = (bytes.as_mut_ptr(), bytes.len());
        let translators: Vec<_> = (0..queues).map(|_| transport.iova_translator()).collect();
        let mut placed = Vec::new();
        let mut memories = Vec::new();
        for (index, translator) in translators.into_iter().enumerate() {
            let start = index * layout.end_offset;
            assert!(
                start + layout.end_offset <= len,
                "queue memory is shorter than its layout"
            );
            // SAFETY: inside the queue memory by the assert above; each queue's part is its own; the
            // slice ends with `placed`, before any ring uses the memory.
            let part = unsafe { std::slice::from_raw_parts_mut(base.add(start), layout.end_offset) };
            placed.push(Virtqueue::<RequestBuf>::new(
                translator, part, QUEUE_SIZE, features,
            )?);
            // SAFETY: all offsets of the layout lie below `end_offset`.
            let at = |offset: usize| unsafe { base.add(start + offset) };
            // SAFETY: each queue has `slots` blocks of the data memory.
            let blocks = unsafe { data.base().add(index * slots * block) };
            memories.push(RingMemory {
                descriptors: at(0),
                available: at(layout.driver_area_offset),
                used: at(layout.device_area_offset),
                requests: at(layout.req_offset).cast(),
                data: blocks,
                block_bytes,
            });
        }
        transport.setup_queues(&placed)?;
        drop(placed);

        let mut doorbells = Vec::new();
        for queue in 0..usize::from(queues) {
            let call = transport.get_completion_fd(queue).as_fd().try_clone_to_owned()?;
            doorbells.push((transport.get_submission_notifier(queue), File::from(call)));
        }
        let mapped: Arc<dyn Send + Sync> = Arc::new(Mapped {
            _transport: transport,
            _data: data,
        });
        let rings = memories
            .into_iter()
            .zip(doorbells)
            .map(|(memory, (kick, call))| {
                // SAFETY: the parts are those that `virtio-driver` laid out for QUEUE_SIZE entries, with
                // one request buffer per entry and so per slot; `Virtqueue::new` checked that these are
                // aligned; all of it is mapped while `mapped` lives, and this is the queue's only ring.
                unsafe { Ring::new(memory, Arc::clone(&mapped), kick, call) }
            })
            .collect();
        Ok(Self {
            disk_bytes,
            block_bytes,
            rings,
        })
    }
}
