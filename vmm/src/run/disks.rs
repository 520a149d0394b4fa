//! The disks of `ringdisk run`. They stay open while machines come and go with the guest's restarts.
//!
//! Invariants: a disk that the guest has released is closed before its removal is reported, and before the program exits; no
//! disk is closed while a machine has it.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use block::ring::RingKind;
use block::worker::{StartHook, WorkerConfig};
use block::{Context, Disk};
use parking_lot::{Condvar, Mutex};
use virtio_devices::connect::Cancel;
use virtio_devices::stats::DiskStats;
use virtio_devices::transport::{PciDiskConfig, PlugError, VhostUserBackend, VhostUserDiskConfig};

use crate::disk_config::DiskConfig;
use crate::error::CommandFailure;
use crate::exchange::ServedDisk;
use crate::machine::{Machine, MachineError};
use crate::metrics::DiskReport;
use crate::open::{self, OpenError, OpenedDisk};
use crate::sandbox::{self, Task};

/// The longest time that readers of a closed disk's properties may take.
const SHARED_MAX: Duration = Duration::from_secs(5);

/// The result of a removal, once it has ended.
#[derive(Debug, Default)]
pub(super) struct Departure {
    ended: Mutex<Option<Result<(), String>>>,
    changed: Condvar,
}

impl Departure {
    fn end(&self, result: Result<(), String>) {
        *self.ended.lock() = Some(result);
        self.changed.notify_all();
    }

    /// Waits until the disk is closed: whether that went well. `None`: it was not within `patience`.
    pub(super) fn wait(&self, patience: Duration) -> Option<Result<(), String>> {
        let mut ended = self.ended.lock();
        let is_missing = |ended: &mut Option<_>| ended.is_none();
        self.changed.wait_while_for(&mut ended, is_missing, patience);
        ended.clone()
    }
}

/// The destination of a disk's requests.
pub(super) enum Source {
    /// To an image that this process has open.
    Image(Arc<dyn Disk>),
    /// To another program.
    Backend(VhostUserBackend),
}

/// Returns a start hook by which a thread gives up what its task does not need.
pub(super) fn confined(task: Task) -> StartHook {
    StartHook::new(move || Ok(sandbox::confine_thread(task)?))
}

/// A disk of the machine, open and locked.
#[derive(Debug)]
pub(super) struct Attached {
    pub(super) config: DiskConfig,
    /// The image; `None` if another program serves it.
    opened: Option<OpenedDisk>,
    /// Those of its queues, which go on when the guest restarts; of an image only.
    stats: Arc<DiskStats>,
    /// The disk, for requests of the control socket.
    pub(super) served: Arc<ServedDisk>,
    sandbox: bool,
    /// True if the guest was asked to release it.
    pub(super) asked: bool,
    departure: Arc<Departure>,
}

impl Attached {
    /// Opens and locks the image. With `sandbox`, its queues' threads give up what queues do not need.
    pub(super) fn open(config: &DiskConfig, sandbox: bool) -> Result<Self, OpenError> {
        let opened = (!config.vhost_user).then(|| open::open(config)).transpose()?;
        let stats = Arc::default();
        let served = ServedDisk::new(format!("disk {}", config.name()), config, &stats);
        opened.iter().for_each(|opened| served.attach(opened));
        Ok(Self {
            opened,
            served,
            stats,
            sandbox,
            config: config.clone(),
            asked: false,
            departure: Arc::default(),
        })
    }

    pub(super) fn name(&self) -> String {
        self.config.name()
    }

    fn wanted_slot(&self) -> Option<usize> {
        self.config.pci.device_id.map(usize::from)
    }

    /// Returns its statistics; `None` if another program serves it, which has them.
    fn report(&self) -> Option<DiskReport> {
        let _image = self.opened.as_ref()?;
        let engine = self.served.engine_counts();
        Some(DiskReport::new(self.name(), self.stats.snapshot(), engine))
    }

    pub(super) fn disk(&self) -> Option<Arc<dyn Disk>> {
        self.opened.as_ref().map(OpenedDisk::disk)
    }

    /// Returns the PCI configuration of an image's disk.
    fn function(&self) -> PciDiskConfig {
        let config = &self.config;
        let worker = WorkerConfig {
            on_start: self.hook(Task::Queue),
            ..WorkerConfig::default()
        };
        PciDiskConfig {
            name: self.name(),
            num_queues: config.num_queues,
            queue_size: config.queue_size,
            serial: config.serial.clone().unwrap_or_default(),
            workers: config.workers(&worker),
            stats: Arc::clone(&self.stats),
        }
    }

    /// Returns the PCI configuration of a disk that another program serves.
    fn backend(&self) -> VhostUserDiskConfig {
        VhostUserDiskConfig {
            name: self.name(),
            socket: self.config.path.clone(),
            num_queues: self.config.num_queues,
            queue_size: self.config.queue_size,
            on_start: self.hook(Task::Backend),
        }
    }

    /// Returns the start hook of a thread that a guest or a backend reaches: the sandbox.
    fn hook(&self, task: Task) -> Option<StartHook> {
        self.sandbox.then(|| confined(task))
    }

    /// Returns the image, or a new connection to the backend. Connecting may take seconds, or until `cancel`; call it
    /// without locks that others wait for.
    pub(super) fn source(&self, cancel: &Cancel) -> Result<Source, PlugError> {
        Ok(match self.disk() {
            Some(disk) => Source::Image(disk),
            None => Source::Backend(VhostUserBackend::connect(self.backend(), cancel)?),
        })
    }

    fn plug(&self, machine: &Machine, slot: Option<usize>, source: Source) -> Result<usize, MachineError> {
        let slot = match source {
            Source::Image(disk) => machine.plug(slot, disk, self.function())?,
            Source::Backend(backend) => machine.plug_vhost_user(slot, backend)?,
        };
        let driver = machine.shown(slot).map_or("none", |shown| shown.driver_name);
        tracing::info!(event = "disk-added", disk = %self.name(), slot, driver, "plugged in");
        Ok(slot)
    }

    /// Closes the image as a clean shutdown should, and releases its lock.
    pub(super) fn close(self) -> Result<(), CommandFailure> {
        let name = self.name();
        self.served.detach();
        let Some(opened) = self.opened else {
            return Ok(());
        };
        let about = |error: Box<dyn std::error::Error + Send + Sync>| {
            CommandFailure::about(format!("disk {name} was not closed cleanly"), error)
        };
        let closed = Context::new(RingKind::Syscalls, 64)
            .map_err(std::io::Error::from)
            .and_then(|cx| cx.block_on(opened.disk().close(&cx)));
        let released = opened.release(SHARED_MAX);
        closed
            .map_err(|error| about(error.into()))?
            .map_err(|error| about(error.into()))?;
        if released {
            Ok(())
        } else {
            Err(about("its image is closed but still locked".into()))
        }
    }
}

/// Assigns slots: first to disks with a given slot, then to the others, the lowest free ones in order. Duplicates
/// were refused before.
fn in_slots(disks: Vec<Attached>) -> BTreeMap<usize, Attached> {
    let (placed, others): (Vec<_>, Vec<_>) = disks.into_iter().partition(|disk| disk.wanted_slot().is_some());
    let mut slots: BTreeMap<usize, Attached> = placed
        .into_iter()
        .filter_map(|disk| Some((disk.wanted_slot()?, disk)))
        .collect();
    for disk in others {
        // A bus that is full says so when it is plugged.
        let slot = (1..).find(|slot| !slots.contains_key(slot)).unwrap_or_default();
        slots.insert(slot, disk);
    }
    slots
}

/// All of them, by slot.
#[derive(Debug)]
pub(super) struct Disks {
    present: Mutex<BTreeMap<usize, Attached>>,
    /// The thread that closes removed disks; `None` after it was joined.
    closer: Mutex<Option<(Sender<Attached>, JoinHandle<()>)>>,
}

impl Disks {
    /// Returns these disks, each in its given slot or in the lowest slot that no disk was given.
    ///
    /// # Errors
    ///
    /// If there is no thread to close them later.
    pub(super) fn new(disks: Vec<Attached>) -> std::io::Result<Self> {
        let (leaving, left) = mpsc::channel::<Attached>();
        let closer = std::thread::Builder::new()
            .name("closer".to_owned())
            .spawn(move || left.into_iter().for_each(depart))?;
        Ok(Self {
            present: Mutex::new(in_slots(disks)),
            closer: Mutex::new(Some((leaving, closer))),
        })
    }

    /// Plugs all of them into a machine that does not run yet.
    pub(super) fn plug_all(&self, machine: &Machine, cancel: &Cancel) -> Result<(), MachineError> {
        for (&slot, disk) in &*self.present.lock() {
            let source = disk.source(cancel)?;
            disk.plug(machine, Some(slot), source)?;
        }
        Ok(())
    }

    /// Plugs a further one into a machine that runs, into the slot that is answered.
    ///
    /// # Errors
    ///
    /// The error's text, with the disk.
    pub(super) fn add(
        &self,
        machine: &Machine,
        disk: Attached,
        source: Source,
    ) -> Result<usize, (MachineError, Attached)> {
        // A guest may let it go before it is told of it: that waits until it is here.
        let mut present = self.present.lock();
        let slot = match disk.plug(machine, disk.wanted_slot(), source) {
            Ok(slot) => slot,
            Err(error) => return Err((error, disk)),
        };
        present.insert(slot, disk);
        drop(present);
        machine.announce(slot);
        Ok(slot)
    }

    /// Fails if a disk with this id, or this image, exists and cannot be shared.
    pub(super) fn check(&self, config: &DiskConfig) -> Result<(), String> {
        let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
        for disk in self.present.lock().values() {
            let name = disk.name();
            if name == config.name() {
                return Err(format!("a disk has the id `{name}` already; choose another id"));
            }
            let shared = !disk.config.writes_image() && !config.writes_image();
            if !shared && real(&disk.config.path) == real(&config.path) {
                let path = config.path.display();
                return Err(format!(
                    "disk {name} has the image {path} already; expected readonly=on or overlay=temporary for both"
                ));
            }
        }
        Ok(())
    }

    /// Does something with the disk of this id or, if it has none, this path, and its slot.
    ///
    /// # Errors
    ///
    /// If there is none; names those there are.
    pub(super) fn find<T>(
        &self,
        id: &str,
        work: impl FnOnce(usize, &mut Attached) -> T,
    ) -> Result<T, String> {
        let mut present = self.present.lock();
        if let Some((&slot, disk)) = present.iter_mut().find(|(_, disk)| disk.name() == id) {
            return Ok(work(slot, disk));
        }
        let mut names: Vec<String> = present.values().map(Attached::name).collect();
        if names.is_empty() {
            names.push("none".to_owned());
        }
        let names = names.join(", ");
        Err(format!("there is no disk `{id}`; there are: {names}"))
    }

    /// Notes that the guest is asked to let a disk go. Answers the slot, and where to wait.
    pub(super) fn ask(&self, id: &str) -> Result<(usize, Arc<Departure>), String> {
        self.find(id, |slot, disk| {
            disk.asked = true;
            (slot, Arc::clone(&disk.departure))
        })
    }

    /// Returns the statistics of the disks that this process serves.
    pub(super) fn reports(&self) -> Vec<DiskReport> {
        let reports = self.map(|_, disk| disk.report());
        reports.into_iter().flatten().collect()
    }

    /// Calls `look` with each disk and its slot, and returns the results.
    pub(super) fn map<T>(&self, look: impl Fn(usize, &Attached) -> T) -> Vec<T> {
        let present = self.present.lock();
        present.iter().map(|(&slot, disk)| look(slot, disk)).collect()
    }

    /// Removes the disk in `slot`, which the guest has released; it is closed in the background.
    pub(super) fn leave(&self, slot: usize) {
        let Some(disk) = self.present.lock().remove(&slot) else {
            return;
        };
        let (name, asked) = (disk.name(), disk.asked);
        tracing::info!(disk = %name, slot, asked, "the guest has released a disk");
        let closer = self.closer.lock().as_ref().map(|(leaving, _)| leaving.clone());
        // Nobody else closes disks at the program's end, when no guest runs any more.
        match closer.map(|leaving| leaving.send(disk)) {
            Some(Ok(())) => {}
            Some(Err(mpsc::SendError(disk))) => depart(disk),
            None => tracing::error!(disk = %name, "a disk was released after the machine had stopped"),
        }
    }

    /// The guest starts again, with no idea of what it was asked for: the disks that were to go are gone then.
    pub(super) fn leave_asked(&self) {
        let asked = self.map(|slot, disk| disk.asked.then_some(slot));
        asked.into_iter().flatten().for_each(|slot| self.leave(slot));
    }

    /// Closes all; no machine runs any more. Answers the first that went wrong.
    pub(super) fn close(&self) -> Result<(), CommandFailure> {
        if let Some((leaving, closer)) = self.closer.lock().take() {
            drop(leaving);
            if closer.join().is_err() {
                tracing::error!("the thread that closes disks panicked");
            }
        }
        let mut result = Ok(());
        for (_, disk) in std::mem::take(&mut *self.present.lock()) {
            let closed = disk.close();
            result = result.and(closed);
        }
        result
    }
}

/// Closes a disk and notifies its waiters.
fn depart(disk: Attached) {
    let (name, departure) = (disk.name(), Arc::clone(&disk.departure));
    let closed = disk.close().map_err(|failure| failure.line().unwrap_or_default());
    match &closed {
        Ok(()) => tracing::info!(event = "disk-removed", disk = %name, "removed"),
        Err(error) => tracing::error!(%error, "cannot close a disk that the guest has released"),
    }
    departure.end(closed);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Raw images `a` and `b` of 1 MiB, open, in the slots 1 and 2.
    fn two() -> (tempfile::TempDir, Disks) {
        let folder = tempfile::tempdir().expect("a folder");
        let disks = ["a", "b"].map(|id| {
            let path = folder.path().join(id);
            let file = std::fs::File::create(&path).expect("an image");
            file.set_len(1 << 20).expect("its length");
            Attached::open(&config(&folder, id), false).expect("a disk")
        });
        let disks = Disks::new(disks.into()).expect("a thread");
        (folder, disks)
    }

    fn config(folder: &tempfile::TempDir, id: &str) -> DiskConfig {
        let path = folder.path().join(id);
        DiskConfig::parse(&format!("path={},id={id},image_type=raw", path.display())).expect("a disk")
    }

    const SOON: Duration = Duration::from_secs(20);
    const NOW: Duration = Duration::ZERO;

    #[test]
    fn departure_ends_after_image_is_closed() {
        let (folder, disks) = two();
        let (slot, departure) = disks.ask("b").expect("a disk");
        assert_eq!((slot, departure.wait(NOW)), (2, None));
        assert_eq!(
            disks.map(|slot, disk| (slot, disk.asked)),
            [(1, false), (2, true)]
        );
        assert!(
            Attached::open(&config(&folder, "b"), false).is_err(),
            "it is locked"
        );
        // Somebody who still looks at it holds the answer up.
        let looked_at = disks.find("b", |_, disk| disk.disk()).expect("a disk");
        disks.leave(2);
        assert_eq!(departure.wait(Duration::from_millis(100)), None);
        drop(looked_at);
        assert_eq!(departure.wait(SOON), Some(Ok(())));
        Attached::open(&config(&folder, "b"), false).expect("nobody has it any more");
        assert_eq!(
            disks.ask("b").expect_err("it is gone"),
            "there is no disk `b`; there are: a"
        );
        // An empty slot that is let go is nothing.
        disks.leave(2);
        disks.leave(31);
        disks.close().expect("a clean close");
    }

    #[test]
    fn leave_asked_removes_only_requested_disks() {
        let (_folder, disks) = two();
        let (_, departure) = disks.ask("a").expect("a disk");
        disks.leave_asked();
        assert_eq!(departure.wait(SOON), Some(Ok(())));
        assert_eq!(disks.map(|slot, disk| (slot, disk.name())), [(2, "b".to_owned())]);
        disks.close().expect("a clean close");
    }

    #[test]
    fn close_waits_for_departing_disks() {
        let (folder, disks) = two();
        let (_, departure) = disks.ask("a").expect("a disk");
        disks.leave(1);
        disks.close().expect("a clean close");
        assert_eq!(departure.wait(NOW), Some(Ok(())));
        for id in ["a", "b"] {
            Attached::open(&config(&folder, id), false).expect("nobody has it any more");
        }
    }

    #[test]
    fn check_refuses_ids_and_images_in_use() {
        let (folder, disks) = two();
        let refused = |text: String| {
            let config = DiskConfig::parse(&text).expect("a disk");
            disks.check(&config).expect_err("it is in use")
        };
        let path = folder.path().display();
        let said = refused(format!("path={path}/c,id=a"));
        assert_eq!(said, "a disk has the id `a` already; choose another id");
        let said = refused(format!(
            "path={path}/../{}/a,id=c",
            folder.path().file_name().expect("a name").display()
        ));
        assert!(said.starts_with("disk a has the image "), "{said}");
        disks.check(&config(&folder, "c")).expect("it is not there yet");
        disks.close().expect("a clean close");
    }
}
