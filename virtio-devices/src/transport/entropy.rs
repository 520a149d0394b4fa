//! A source of entropy: what a guest puts into the queue comes back full of the host's random bytes.
//!
//! A thread of its own does that; it sleeps nearly always, as a guest asks for a few bytes now and then. Spec: virtio 1.2,
//! 5.4.
//!
//! Invariants: a chain takes a bounded time, whatever its length; when a stop returns, the thread is out of the guest's memory.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;

use block::worker::StartHook;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use vm_memory::GuestMemoryMmap;

use super::device::{Device, DeviceError, QueueInterrupt, QueueStart};
use super::function::{FunctionState, signal};
use crate::vhost_user::event::{Wait, poll_all};
use crate::virtqueue::{Chain, QueueSetup, Virtqueue};

/// The entries of the queue at most.
pub(super) const QUEUE_SIZE: u16 = 64;
/// The most bytes for one chain; the guest sees that it got no more.
const BYTES_MAX: usize = 4096;

/// The device.
#[derive(Debug)]
pub(super) struct Entropy {
    memory: GuestMemoryMmap,
    /// Ends the queue that runs, if one does.
    stop: Option<OwnedFd>,
    /// `None` once it is to end.
    work: Option<Sender<Source>>,
    /// The available index at which the queue has stopped, each time.
    stopped: Receiver<u16>,
    /// `None` after it was joined.
    thread: Option<JoinHandle<()>>,
}

/// The parts of a queue that its thread needs.
struct Source {
    memory: GuestMemoryMmap,
    setup: QueueSetup,
    kick: OwnedFd,
    stop: OwnedFd,
    interrupt: QueueInterrupt,
}

impl Entropy {
    /// A device for a guest with this memory. Its thread runs `on_start` first: it is made here, as those who start the queue may
    /// not drop privileges any more.
    ///
    /// # Errors
    ///
    /// If there is no thread, or `on_start` fails.
    pub(super) fn new(
        memory: GuestMemoryMmap,
        shared: Arc<FunctionState>,
        on_start: Option<StartHook>,
    ) -> io::Result<Self> {
        let (work, asked) = mpsc::channel::<Source>();
        let (stops, stopped) = mpsc::channel();
        let (begins, begun) = mpsc::channel();
        let run = move || {
            let ready = on_start.map_or(Ok(()), |hook| hook.run());
            let goes_on = ready.is_ok();
            // Whoever waits for it is there as long as the thread is.
            begins.send(ready).unwrap_or_default();
            if goes_on {
                let work = asked.iter().map(|source| source.run(&shared));
                work.for_each(|next| stops.send(next).unwrap_or_default());
            }
        };
        let thread = std::thread::Builder::new()
            .name("entropy".to_owned())
            .spawn(run)?;
        begun.recv().map_err(io::Error::other)??;
        Ok(Self {
            memory,
            stop: None,
            work: Some(work),
            stopped,
            thread: Some(thread),
        })
    }
}

impl Device for Entropy {
    fn features(&self) -> u64 {
        1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_EVENT_IDX | 1 << VIRTIO_RING_F_INDIRECT_DESC
    }

    fn read_config(&self, _: u64, data: &mut [u8], _: u64) {
        data.fill(0);
    }

    fn write_config(&mut self, _: u64, _: &[u8], _: u64) -> Result<(), DeviceError> {
        Ok(())
    }

    fn start(&mut self, _: u16, start: &QueueStart<'_>) -> Result<(), DeviceError> {
        let has = |bit: u32| start.features & 1 << bit != 0;
        let setup = QueueSetup {
            size: start.size,
            addresses: start.addresses,
            next_available: start.next_available,
            event_idx: has(VIRTIO_RING_F_EVENT_IDX),
            indirect: has(VIRTIO_RING_F_INDIRECT_DESC),
        };
        // Here, as the guest is told at once of a queue that is not where it may be.
        drop(Virtqueue::new(self.memory.clone(), &setup)?);
        let stop = block::event::eventfd()?;
        let source = Source {
            memory: self.memory.clone(),
            setup,
            kick: start.kick.try_clone_to_owned()?,
            stop: stop.try_clone()?,
            interrupt: start.interrupt.clone(),
        };
        let work = self.work.as_ref().ok_or("its thread has ended")?;
        work.send(source).map_err(|_| "its thread has ended")?;
        self.stop = Some(stop);
        Ok(())
    }

    fn stop(&mut self, _: u16) -> Result<u16, DeviceError> {
        let stop = self.stop.take().ok_or("it does not run")?;
        signal(stop.as_fd());
        Ok(self.stopped.recv()?)
    }

    fn rewire(&mut self, _: u16, _: &QueueInterrupt) -> Result<(), DeviceError> {
        // The thread looks each time which interrupt is chosen.
        Ok(())
    }

    fn reset(&mut self) {}

    fn driver_name(&self) -> &'static str {
        "getrandom"
    }
}

impl Drop for Entropy {
    fn drop(&mut self) {
        // Before the end of the guest's memory.
        self.stop(0).map(drop).unwrap_or_default();
        self.work = None;
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap_or_default();
        }
    }
}

impl Source {
    /// Runs the queue until it is stopped, or broken. Answers the available index of the first chain that was not taken.
    fn run(self, shared: &FunctionState) -> u16 {
        let mut next = self.setup.next_available;
        let queue = Virtqueue::new(self.memory.clone(), &self.setup).map_err(DeviceError::from);
        let ran = queue.and_then(|mut queue| {
            let ran = self.serve(&mut queue);
            next = queue.next_available();
            ran
        });
        if let Err(error) = ran {
            if let Some(held_back) = shared.log_limit.admit() {
                tracing::warn!(device = %shared.name, %error, held_back, "cannot give a guest random bytes");
            }
            shared.needs_reset();
        }
        next
    }

    fn serve(&self, queue: &mut Virtqueue) -> Result<(), DeviceError> {
        let mut chain = Chain::default();
        let watched = [&self.kick, &self.stop].map(|event| (event.as_raw_fd(), Wait::Readable));
        loop {
            self.answer(queue, &mut chain)?;
            // A chain that came meanwhile brings no kick.
            if queue.enable_notifications()? {
                queue.disable_notifications();
            } else {
                let [kicked, stopped] = poll_all(watched, -1)?;
                if stopped {
                    return Ok(());
                }
                queue.disable_notifications();
                if kicked {
                    rustix::io::read(&self.kick, &mut [0; 8])?;
                }
            }
            if poll_all([watched[1]], 0)?[0] {
                return Ok(());
            }
        }
    }

    /// Answers what is available.
    fn answer(&self, queue: &mut Virtqueue, chain: &mut Chain) -> Result<(), DeviceError> {
        let mut bytes = [0; BYTES_MAX];
        for _ in 0..queue.available()? {
            let head = queue.take(chain)?;
            if let Some(defect) = chain.defect() {
                return Err(defect.into());
            }
            let wanted = usize::try_from(chain.writable_bytes()).unwrap_or(usize::MAX);
            let bytes = &mut bytes[..wanted.min(BYTES_MAX)];
            getrandom::fill(bytes).map_err(io::Error::from)?;
            let written = queue.memory().write_across(chain.writable(), bytes);
            queue.give_back(head, written as u32);
        }
        if queue.publish()
            && let Some(event) = self.interrupt.event()
        {
            signal(event);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
