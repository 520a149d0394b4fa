//! How a machine monitor attaches a QCOW2 disk to a virtio transport of its own: [`Attached`] is all it takes.
//!
//! Run it with an image: `cargo run --example embed -- disk.qcow2`. `main` plays the transport and the guest: it reads
//! the disk's first sector through a virtqueue, and prints how it begins.
#![expect(clippy::print_stdout, reason = "an example shows something")]

use std::error::Error;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use block::task::eventfd;
use block::worker::{WorkerConfig, WorkerHandle};
use qcow::{OpenOptions, QcowDisk};
use virtio_devices::blk::{BlockDevice, BlockDeviceConfig, BlockQueueConfig, Notify, RunningQueue};
use virtio_devices::virtqueue::RingAddresses;
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

    /// A reset or a pause: when this returns nothing of the queue touches guest memory any more. The answer is where
    /// the queue goes on, as `next_available`, should it start again.
    fn stop(&mut self) -> Result<u16, Box<dyn Error>> {
        let Some(running) = self.running.take() else {
            return Ok(0);
        };
        Ok(running.stop(&self.worker)?.next_available())
    }

    /// The machine ends: the image is left as a clean shutdown should.
    fn close(self) -> Result<(), Box<dyn Error>> {
        let disk = Arc::clone(self.device.disk());
        Ok(self.worker.block_on(move |cx| disk.close(cx))??)
    }
}

/// How the guest hears of answers.
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

/// The guest's memory: three parts of a queue, and a request's header, data and status.
const RINGS: RingAddresses = RingAddresses {
    descriptors: 0x1000,
    available: 0x2000,
    used: 0x3000,
};
const HEADER: u64 = 0x4000;
const DATA: u64 = 0x5000;
const STATUS: u64 = 0x6000;

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args_os().nth(1).ok_or("name an image")?;
    let mut disk = Attached::open(Path::new(&path))?;
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)])?;
    // What the driver would write: read sector 0; a header to read, data and a status to write.
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
        memory.write_slice(&descriptor, GuestAddress(RINGS.descriptors + 16 * index as u64))?;
    }
    memory.write_obj(1u16, GuestAddress(RINGS.available + 2))?;
    let (kick, interrupt) = (eventfd()?, eventfd()?);
    rustix::io::write(&kick, &1u64.to_ne_bytes())?;
    let version_1 = 1 << 32;
    let features = disk.device.features() & version_1;
    let notify = Box::new(Interrupt(interrupt.try_clone()?));
    let queue = BlockQueueConfig::new(memory.clone(), 128, RINGS, features, notify);
    disk.start(kick, queue)?;
    rustix::io::read(&interrupt, &mut [0; 8])?;
    let (status, first): (u8, [u8; 8]) = (
        memory.read_obj(GuestAddress(STATUS))?,
        memory.read_obj(GuestAddress(DATA))?,
    );
    println!(
        "status {status}, {} bytes, the disk begins with {first:02x?}",
        disk.device.disk().info().size_bytes
    );
    disk.stop()?;
    disk.close()
}
