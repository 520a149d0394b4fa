//! Detaching from a device in whose rings the driver still waits: one of its queues is broken, or its recovery has failed.
//!
//! Invariants: such a ring is not closed before the process exits. Closing it harms drivers before 6.15: their
//! cancelling races with requests that are on their way to the ring. So the device's workers remain without work:
//! requests that the driver still sends are not answered, and go to the next server with the others. The disk stays open and
//! locked as long, so that nobody else changes it under the requests that are repeated.

use std::sync::Arc;
use std::time::{Duration, Instant};

use block::Disk;
use block::worker::WorkerHandle;
use parking_lot::Mutex;

use super::super::queue_state::Duty;
use super::{Queue, UblkDevice};

/// The longest time that the disk may take to answer what it has.
const ANSWERS: Duration = Duration::from_secs(5);

/// The remains of a detached device.
#[derive(Debug)]
struct Parked {
    _disk: Arc<dyn Disk>,
    _workers: Vec<WorkerHandle>,
}

/// Never emptied.
static PARKED: Mutex<Vec<Parked>> = Mutex::new(Vec::new());

impl UblkDevice {
    /// Leaves the device with this process, when the disk has answered what it has.
    pub(super) fn park(&mut self) {
        let device = self.info.dev_id;
        // Whoever waits for the host's space would wait for ever.
        let _held = self.disk.hold_off();
        for queue in &self.queues {
            let state = Arc::clone(&queue.state);
            // A worker that has ended does nothing by any duty.
            let set = self.workers[queue.worker].run(move |_| state.set_duty(Duty::Keep));
            if set.is_err() {
                tracing::debug!(device, "a worker of a detached device has ended");
            }
        }
        let until = Instant::now() + ANSWERS;
        let busy = |queue: &Queue| self.workers[queue.worker].run(|_| ()).is_ok() && !queue.is_quiet();
        while self.queues.iter().any(busy) {
            if Instant::now() > until {
                tracing::error!(device, "the disk of a detached device does not answer");
                break;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        let parked = Parked {
            _disk: Arc::clone(&self.disk),
            _workers: std::mem::take(&mut self.workers),
        };
        tracing::info!(device, "the device stays detached until this process exits");
        let mut all = PARKED.lock();
        all.push(parked);
    }
}

impl Queue {
    /// Returns true if the disk has nothing of it.
    fn is_quiet(&self) -> bool {
        self.state.unfinished() == Some(0)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc;

    use block::worker::{Frontend, FrontendId, WorkerConfig};

    use super::super::super::abi::{DeviceInfo, op};
    use super::super::super::channel::Transport;
    use super::super::super::model::{Io, Model};
    use super::super::super::queue::UblkQueue;
    use super::super::super::queue_state::{QueueEvent, QueueState};
    use super::*;
    use crate::testing::MemDisk;

    /// Reports when its worker, and with it the worker's ring, is dropped; makes the driver end every tag when asked.
    struct Watch {
        gone: Arc<AtomicBool>,
        ends: mpsc::Receiver<()>,
        model: Model,
    }

    impl Drop for Watch {
        fn drop(&mut self) {
            self.gone.store(true, Ordering::SeqCst);
        }
    }

    impl Frontend for Watch {
        fn poll(&mut self) -> bool {
            let ends = self.ends.try_recv().is_ok();
            if ends {
                self.model.abort();
            }
            ends
        }
        fn publish(&mut self) -> bool {
            false
        }
        fn prepare_sleep(&mut self) -> bool {
            false
        }
        fn end_sleep(&mut self) {}
        fn in_flight(&self) -> usize {
            0
        }
    }

    struct World {
        device: Option<UblkDevice>,
        gone: Arc<AtomicBool>,
        end: mpsc::Sender<()>,
        events: Arc<Mutex<Vec<QueueEvent>>>,
    }

    /// A device of one queue whose driver is a model. It has one request at the disk.
    fn world(disk: &MemDisk) -> World {
        let events: Arc<Mutex<Vec<QueueEvent>>> = Arc::default();
        let heard = Arc::clone(&events);
        let state = QueueState::new(1, Arc::new(move |event| heard.lock().push(event)));
        let gone = Arc::new(AtomicBool::new(false));
        let (end, ends) = mpsc::channel();
        let worker = WorkerHandle::spawn(WorkerConfig::default()).expect("a worker");
        let (opened, shared, watched) = (disk.disk(), Arc::clone(&state), Arc::clone(&gone));
        let id: FrontendId = worker
            .run(move |worker| {
                let model = Model::new(4);
                let queue = opened.open_queue(worker.context()).expect("a queue");
                let queue =
                    UblkQueue::start(worker.context(), model.channel(0), queue, 4, 4096, None, shared);
                model.request(Io::new(op::READ, 0, 1));
                let watch = Watch {
                    gone: watched,
                    ends,
                    model,
                };
                worker.add(Box::new(watch), Vec::new()).expect("no kicks");
                worker.add(Box::new(queue), Vec::new()).expect("no kicks")
            })
            .expect("it runs");
        let device = UblkDevice {
            info: DeviceInfo::default(),
            transport: Transport::Copy,
            disk: disk.disk(),
            queues: vec![Queue { state, worker: 0, id }],
            stats: Arc::default(),
            workers: vec![worker],
        };
        World {
            device: Some(device),
            gone,
            end,
            events,
        }
    }

    #[test]
    fn ring_outlives_its_device_only_while_the_driver_waits() {
        let disk = MemDisk::new();
        let mut waiting = world(&disk);
        let device = waiting.device.take();
        let (done, dropped) = mpsc::channel();
        std::thread::spawn(move || {
            drop(device);
            done.send(()).expect("it is waited for");
        });
        let told = dropped.recv_timeout(Duration::from_secs(20));
        told.expect("a device that is let go does not wait for its driver");
        assert!(!waiting.gone.load(Ordering::SeqCst), "the ring is open");
        assert_eq!(*waiting.events.lock(), [], "nothing is broken");

        let mut ended = world(&disk);
        let device = ended.device.take().expect("it is there");
        let until = Instant::now() + Duration::from_secs(20);
        while !device.is_ended() {
            assert!(Instant::now() < until, "the driver ends no tag");
            // The worker may sleep.
            ended.end.send(()).expect("the worker is there");
            device.workers[0].run(|_| ()).expect("it runs");
        }
        drop(device);
        assert!(ended.gone.load(Ordering::SeqCst), "nobody needs the ring");
    }
}
