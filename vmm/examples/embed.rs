//! An example of a machine monitor that attaches a QCOW2 disk to a virtio transport of its own: [`Attached`] is all it
//! takes.
//!
//! The transport keeps its queue as a `virtio_queue::Queue`, hands its state over to [`Attached::start`] and takes it back from
//! [`Attached::stop`].
//!
//! Run it with an image: `cargo run --example embed -- disk.qcow2`. `main` plays the transport and the guest: it reads
//! the disk's first sector through a virtqueue, takes the queue back, hands it over once more, and prints what it found.
#![expect(clippy::print_stdout, reason = "an example shows something")]

use std::error::Error;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use block::event::eventfd;
use block::worker::{WorkerConfig, WorkerHandle};
use qcow::{OpenOptions, QcowDisk};
use virtio_devices::blk::{
    BlockDevice, BlockDeviceConfig, BlockQueueConfig, Notify, QueueReport, RunningQueue,
};
use virtio_devices::virtqueue::RingAddresses;
use virtio_queue::{Queue, QueueState, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// A disk with one queue. The transport asks `device` for features and configuration space, and calls
/// [`Attached::start`] when the driver has set the queue up.
struct Attached {
    device: Arc<BlockDevice>,
    worker: WorkerHandle,
    running: Option<RunningQueue>,
}

impl Attached {
    fn open(path: &Path) -> Result<Self, Box<dyn Error>> {
        let (num_queues, queue_size, serial) = (1, 128, "embedded");
        let shown = BlockDeviceConfig {
            num_queues,
            queue_size,
            serial,
        };
        let disk = QcowDisk::open(path, &OpenOptions::default())?;
        Ok(Self {
            device: Arc::new(BlockDevice::new(disk, &shown)?),
            worker: WorkerHandle::spawn(WorkerConfig::default())?,
            running: None,
        })
    }

    /// The driver is ready: `kick` is signalled when there are requests.
    fn start(&mut self, kick: OwnedFd, queue: BlockQueueConfig) -> Result<(), Box<dyn Error>> {
        self.running = Some(RunningQueue::start(
            &self.worker,
            &self.device,
            Some(kick),
            queue,
        )?);
        Ok(())
    }

    /// A reset or a pause: when this returns nothing of the queue touches guest memory any more. The report says where
    /// the queue goes on.
    fn stop(&mut self) -> Result<Arc<QueueReport>, Box<dyn Error>> {
        let running = self.running.take().ok_or("the queue does not run")?;
        Ok(running.stop(&self.worker)?)
    }

    /// The machine ends: the image is left as a clean shutdown should.
    fn close(self) -> Result<(), Box<dyn Error>> {
        let disk = self.device.disk();
        Ok(self.worker.block_on(move |cx| disk.close(cx))??)
    }
}

/// The transport's queue as the disk's. The state does not hold the memory and the features that the driver negotiated.
fn hand_over(
    state: &QueueState,
    memory: GuestMemoryMmap,
    features: u64,
    notify: Box<dyn Notify + Send>,
) -> Result<BlockQueueConfig, Box<dyn Error>> {
    if !state.ready {
        return Err("the driver has not set the queue up".into());
    }
    if state.event_idx_enabled != (features & EVENT_IDX != 0) {
        return Err("the queue's event index is not what was negotiated".into());
    }
    let in_flight = state.next_avail.wrapping_sub(state.next_used);
    if in_flight != 0 {
        return Err(format!("{in_flight} requests are in flight; answer them first").into());
    }
    let rings = RingAddresses {
        descriptors: state.desc_table,
        available: state.avail_ring,
        used: state.used_ring,
    };
    let queue = BlockQueueConfig::new(memory, state.size, rings, features, notify);
    Ok(BlockQueueConfig {
        next_available: state.next_avail,
        ..queue
    })
}

/// The transport's queue after the disk has served it.
fn take_back(state: &QueueState, report: &QueueReport) -> Result<QueueState, Box<dyn Error>> {
    if report.is_broken() {
        return Err("the guest broke the queue: reset it".into());
    }
    Ok(QueueState {
        next_avail: report.next_available(),
        next_used: report.next_used(),
        ..*state
    })
}

/// The event that tells the guest of answers.
struct Interrupt(OwnedFd);

impl Notify for Interrupt {
    fn used(&self) {
        rustix::io::write(&self.0, &1u64.to_ne_bytes()).unwrap_or_default();
    }

    fn broken(&self) {
        // A transport sets DEVICE_NEEDS_RESET here.
        self.used();
    }
}

const VERSION_1: u64 = 1 << 32;
const EVENT_IDX: u64 = 1 << 29;

/// Guest addresses of the available ring, and of a request's header, data and status.
const AVAILABLE: u64 = 0x2000;
const HEADER: u64 = 0x4000;
const DATA: u64 = 0x5000;
const STATUS: u64 = 0x6000;

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args_os().nth(1).ok_or("name an image")?;
    let mut disk = Attached::open(Path::new(&path))?;
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)])?;
    // What the driver would tell the transport.
    let mut queue = Queue::new(128)?;
    queue.set_desc_table_address(Some(0x1000), Some(0));
    queue.set_avail_ring_address(Some(AVAILABLE as u32), Some(0));
    queue.set_used_ring_address(Some(0x3000), Some(0));
    queue.set_ready(true);
    // What it would write: read sector 0; a header to read, data and a status to write.
    for (index, (at, len, flags, next)) in [(HEADER, 16u32, 1u16, 1u16), (DATA, 512, 3, 2), (STATUS, 1, 2, 0)]
        .iter()
        .enumerate()
    {
        let descriptor = [
            &at.to_le_bytes()[..],
            &len.to_le_bytes(),
            &flags.to_le_bytes(),
            &next.to_le_bytes(),
        ]
        .concat();
        memory.write_slice(&descriptor, GuestAddress(queue.desc_table() + 16 * index as u64))?;
    }
    let (kick, interrupt) = (eventfd()?, eventfd()?);
    let features = disk.device.features() & VERSION_1;
    for available in 1..=2_u16 {
        memory.write_obj(0xff_u8, GuestAddress(STATUS))?;
        memory.write_obj(available, GuestAddress(AVAILABLE + 2))?;
        rustix::io::write(&kick, &1u64.to_ne_bytes())?;
        let notify = Box::new(Interrupt(interrupt.try_clone()?));
        let state = queue.state();
        disk.start(
            kick.try_clone()?,
            hand_over(&state, memory.clone(), features, notify)?,
        )?;
        rustix::io::read(&interrupt, &mut [0; 8])?;
        queue = Queue::try_from(take_back(&state, &*disk.stop()?)?)?;
        let (status, first): (u8, [u8; 8]) = (
            memory.read_obj(GuestAddress(STATUS))?,
            memory.read_obj(GuestAddress(DATA))?,
        );
        println!(
            "status {status}, {} bytes, the disk begins with {first:02x?}; taken {}, used {}",
            disk.device.disk().info().size_bytes,
            queue.next_avail(),
            queue.next_used()
        );
    }
    disk.close()
}
