//! A device whose queues run on workers of this process, one for each.

use std::io;
use std::sync::Arc;

use block::worker::{WorkerGone, WorkerHandle};
use vm_memory::GuestMemoryMmap;

use super::device::{Device, DeviceError, QueueInterrupt, QueueStart};
use super::error::ResizeError;
use super::function::{FunctionState, signal};
use crate::blk::{BlockDevice, BlockQueueConfig, Notify, RunQueueError, RunningQueue};

/// Raises the interrupts of one queue.
struct Events {
    interrupt: QueueInterrupt,
    shared: Arc<FunctionState>,
}

impl Notify for Events {
    fn used(&self) {
        if let Some(event) = self.interrupt.event() {
            signal(event);
        }
    }

    fn broken(&self) {
        self.shared.needs_reset();
    }
}

/// The device and its workers.
#[derive(Debug)]
pub(super) struct InProcess {
    device: Arc<BlockDevice>,
    memory: GuestMemoryMmap,
    shared: Arc<FunctionState>,
    queues: Vec<(WorkerHandle, Option<RunningQueue>)>,
}

impl InProcess {
    /// A device whose queue of the same place each worker runs.
    pub(super) fn new(
        device: BlockDevice,
        memory: GuestMemoryMmap,
        shared: Arc<FunctionState>,
        workers: Vec<WorkerHandle>,
    ) -> Self {
        Self {
            device: Arc::new(device),
            memory,
            shared,
            queues: workers.into_iter().map(|worker| (worker, None)).collect(),
        }
    }

    fn worker(&self) -> Result<&WorkerHandle, WorkerGone> {
        self.queues.first().map(|(worker, _)| worker).ok_or(WorkerGone)
    }
}

impl Device for InProcess {
    fn features(&self) -> u64 {
        self.device.features()
    }

    fn read_config(&self, offset: u64, data: &mut [u8], features: u64) {
        let bytes = self.device.read_config(offset, data.len(), features);
        data.copy_from_slice(&bytes);
    }

    fn write_config(&mut self, offset: u64, data: &[u8], features: u64) -> Result<(), DeviceError> {
        match self.device.write_config(offset, data, features) {
            // From now on an answered write counts as durable, those before included.
            Ok(true) => self.flush().map_err(Into::into),
            Ok(false) => Ok(()),
            Err(error) => {
                tracing::debug!(disk = %self.shared.name, %error, "a guest's write is ignored");
                Ok(())
            }
        }
    }

    fn start(&mut self, index: u16, start: &QueueStart<'_>) -> Result<(), DeviceError> {
        let Some((worker, running)) = self.queues.get_mut(usize::from(index)) else {
            return Err(WorkerGone.into());
        };
        let kick = start.kick.try_clone_to_owned().map_err(RunQueueError::Kick)?;
        let events = Events {
            interrupt: start.interrupt.clone(),
            shared: Arc::clone(&self.shared),
        };
        let memory = self.memory.clone();
        let (size, addresses, features) = (start.size, start.addresses, start.features);
        let mut config = BlockQueueConfig::new(memory, size, addresses, features, Box::new(events));
        config.next_available = start.next_available;
        config.stats = self.device.stats().queue(index);
        *running = Some(RunningQueue::start(worker, &self.device, Some(kick), config)?);
        Ok(())
    }

    fn stop(&mut self, index: u16) -> Result<u16, DeviceError> {
        let place = self.queues.get_mut(usize::from(index));
        let Some((worker, Some(running))) = place.map(|(worker, running)| (worker, running.take())) else {
            return Err(WorkerGone.into());
        };
        Ok(running.stop(worker)?.next_available())
    }

    fn rewire(&mut self, _: u16, _: &QueueInterrupt) -> Result<(), DeviceError> {
        // The queue looks each time which interrupt is chosen.
        Ok(())
    }

    fn reset(&mut self) {
        self.device.reset();
    }

    fn flush(&mut self) -> io::Result<()> {
        let disk = self.device.disk();
        let worker = self.worker().map_err(io::Error::other)?;
        crate::blk::flush(worker, disk).map_err(io::Error::other)
    }

    fn resize(&mut self, size_bytes: u64) -> Result<u64, ResizeError> {
        let disk = self.device.disk();
        self.worker()?.block_on(move |cx| disk.resize(cx, size_bytes))??;
        Ok(self.device.disk().info().size_bytes)
    }

    fn driver_name(&self) -> &'static str {
        self.worker().map_or("none", WorkerHandle::driver_name)
    }
}
