//! `ringdisk run`: a machine of our own, from its first instruction to a clean end.
//!
//! What must stay true: whatever ends the guest (itself, a signal, a key, a failure), its requests are answered and
//! its images closed cleanly before the program ends; and nothing is started before every disk is open and locked.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use block::worker::WorkerConfig;
use block::{Context, Disk};
use virtio_devices::transport::PciDiskConfig;

use serde_json::{Value, json};

use crate::control::{Control, Request};
use crate::disk_config::DiskConfig;
use crate::error::{CommandFailure, EXIT_FAILURE, EXIT_OK};
use crate::machine::{
    Console, ConsoleConfig, Machine, MachineConfig, MachineError, Reason, Stop, restore_terminal,
};
use crate::open::{self, OpenedDisk};
use crate::signals::StopSignals;

/// What to run.
#[derive(Clone, Debug)]
pub struct RunConfig {
    /// The machine.
    pub machine: MachineConfig,
    /// Its disks.
    pub disks: Vec<DiskConfig>,
    /// Its console.
    pub console: ConsoleConfig,
    /// Where it can be asked and told things.
    pub control: Option<PathBuf>,
}

/// A disk of the machine, open for as long as the program runs; machines come and go as the guest restarts.
struct Attached {
    config: DiskConfig,
    opened: OpenedDisk,
}

impl Attached {
    fn name(&self) -> String {
        self.config.name()
    }

    /// How the machine shows it.
    fn function(&self) -> PciDiskConfig {
        let config = &self.config;
        let worker = |queue: u16| {
            WorkerConfig {
                name: format!("queue {queue}"),
                // Requests beyond this wait for a free slot.
                depth: u32::from(config.queue_size).clamp(128, 1024) * 2,
                cpus: config.cpus_of(queue).unwrap_or_default().to_vec(),
                poll_max: config.poll_us.map_or(WorkerConfig::default().poll_max, |us| {
                    Duration::from_micros(us.into())
                }),
                ..WorkerConfig::default()
            }
        };
        PciDiskConfig {
            name: self.name(),
            num_queues: config.num_queues,
            queue_size: config.queue_size,
            serial: config.serial.clone().unwrap_or_default(),
            workers: (0..config.num_queues).map(worker).collect(),
        }
    }

    /// Closes the image as a clean shutdown should.
    fn close(&self) -> Result<(), CommandFailure> {
        let name = self.name();
        let disk: Arc<dyn Disk> = self.opened.disk();
        let cx = Context::syscalls();
        let closed = cx.block_on(disk.close(&cx));
        let about = |error: Box<dyn std::error::Error + Send + Sync>| {
            CommandFailure::about(format!("disk {name} was not closed cleanly"), error)
        };
        closed
            .map_err(|error| about(error.into()))?
            .map_err(|error| about(error.into()))
    }
}

/// What the control socket reaches: the machine of the moment, and its disks.
struct Desk {
    config: MachineConfig,
    disks: Vec<Attached>,
    machine: Mutex<Option<Machine>>,
}

impl Desk {
    /// Does something with the machine, unless it is just starting again or ending.
    fn with<T>(&self, work: impl FnOnce(&Machine) -> Result<T, String>) -> Result<T, String> {
        let machine = self.machine.lock().unwrap_or_else(PoisonError::into_inner);
        work(machine.as_ref().ok_or("the machine is starting or ending")?)
    }

    fn set(&self, machine: Option<Machine>) {
        *self.machine.lock().unwrap_or_else(PoisonError::into_inner) = machine;
    }

    /// The slot of the disk with this id or, if it has none, this path.
    fn slot_of(&self, id: &str) -> Result<usize, String> {
        let found = self.disks.iter().position(|disk| disk.name() == id);
        let names = || {
            self.disks
                .iter()
                .map(Attached::name)
                .collect::<Vec<_>>()
                .join(", ")
        };
        found
            .map(|index| index + 1)
            .ok_or_else(|| format!("there is no disk `{id}`; there are: {}", names()))
    }

    fn answer(&self, request: Request) -> Result<Value, String> {
        match request {
            Request::Info {} => self.with(|machine| Ok(self.info(machine))),
            Request::Pause {} => self.with(|machine| match machine.pause() {
                Ok(()) => Ok(json!({"state": "paused"})),
                Err(error) => Err(format!(
                    "the guest is paused, but a disk's writes are not durable: {error}"
                )),
            }),
            Request::Resume {} => self.with(|machine| {
                machine.resume();
                Ok(json!({"state": "running"}))
            }),
            Request::DiskResize { id, size } => {
                let slot = self.slot_of(&id)?;
                self.with(|machine| {
                    let grown = machine.resize(slot, size);
                    let size = grown
                        .map_err(|error| format!("disk {id} cannot be made {size} bytes large: {error}"))?;
                    Ok(json!({ "id": id, "size": size }))
                })
            }
        }
    }

    fn info(&self, machine: &Machine) -> Value {
        let disks: Vec<Value> = (1..)
            .zip(&self.disks)
            .map(|(slot, disk)| {
                let info = disk.opened.disk().info();
                json!({
                    "id": disk.name(),
                    "path": disk.config.path,
                    "address": format!("0000:00:{slot:02x}.0"),
                    "size": info.size_bytes,
                    "readonly": info.read_only,
                    "queues": disk.config.num_queues,
                    "io": machine.driver_name(slot),
                })
            })
            .collect();
        json!({
            "state": if machine.is_paused() { "paused" } else { "running" },
            "cpus": self.config.cpus,
            "memory": self.config.memory.bytes,
            "exits": machine.exits(),
            "disks": disks,
        })
    }
}

/// Refuses disks that name one image or one id twice.
fn check_names(disks: &[DiskConfig]) -> Result<(), CommandFailure> {
    let mut ids = BTreeMap::new();
    let mut paths: BTreeMap<PathBuf, usize> = BTreeMap::new();
    for (index, disk) in disks.iter().enumerate() {
        if let Some(id) = &disk.id
            && ids.insert(id.clone(), index).is_some()
        {
            return Err(CommandFailure::Usage(format!("two disks have the id `{id}`")));
        }
        let path = disk.path.canonicalize().unwrap_or_else(|_| disk.path.clone());
        let other = paths.insert(path, index);
        let shared = other.is_some_and(|other| !(disk.readonly && disks[other].readonly));
        if shared {
            let path = disk.path.display();
            return Err(CommandFailure::Usage(format!(
                "two disks have the image {path}; it can be shared only if both are readonly=on"
            )));
        }
    }
    Ok(())
}

/// Runs the machine until its end. Answers the exit code.
///
/// # Errors
///
/// A failure that names what it is about. Images that could be closed cleanly have been.
pub fn run(config: &RunConfig) -> Result<u8, CommandFailure> {
    check_names(&config.disks)?;
    let payload = config.machine.payload.check();
    payload.map_err(|error| CommandFailure::Failed(error.into()))?;
    let signals =
        StopSignals::block().map_err(|error| CommandFailure::about("cannot wait for signals", error))?;
    let failed = |error: MachineError| CommandFailure::Failed(error.into());
    let mut disks = Vec::new();
    for disk in &config.disks {
        let opened = open::open(disk).map_err(|error| CommandFailure::Failed(error.into()))?;
        let config = disk.clone();
        disks.push(Attached { config, opened });
    }
    let stop = Arc::new(Stop::default());
    let console =
        Console::open(&config.console, &stop).map_err(|error| CommandFailure::Failed(error.into()))?;
    stop_on_signal(signals, &stop)
        .map_err(|error| CommandFailure::about("cannot wait for signals", error))?;

    let desk = Arc::new(Desk {
        config: config.machine.clone(),
        disks,
        machine: Mutex::new(None),
    });
    let control = match &config.control {
        Some(path) => {
            let asked = Arc::clone(&desk);
            let control = Control::serve(path, Arc::new(move |request| asked.answer(request)));
            Some(control.map_err(|error| CommandFailure::Failed(error.into()))?)
        }
        None => None,
    };

    let mut ended = Ok(EXIT_OK);
    loop {
        match start(&desk, &console, &stop) {
            Ok(machine) => desk.set(Some(machine)),
            Err(error) => {
                ended = Err(failed(error));
                break;
            }
        }
        let reason = stop.wait();
        // Whoever asks at the control socket is answered first.
        let machine = desk.machine.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(machine) = machine {
            tracing::info!(?reason, exits = ?machine.exits(), "the machine ends");
            machine.end();
        }
        match reason {
            Reason::Reset if stop.restarted() => {}
            Reason::Failed(told) => {
                ended = Err(CommandFailure::Failed(told.into()));
                break;
            }
            _ => break,
        }
    }
    drop((console, control));
    for disk in &desk.disks {
        let closed = disk.close();
        ended = ended.and_then(|code| closed.map(|()| code));
    }
    ended
}

fn start(desk: &Desk, console: &Console, stop: &Arc<Stop>) -> Result<Machine, MachineError> {
    let machine = Machine::new(&desk.config, console, stop)?;
    for disk in &desk.disks {
        let plugged = machine.plug(None, disk.opened.disk(), disk.function());
        match plugged {
            Ok(slot) => {
                let driver = machine.driver_name(slot);
                tracing::info!(disk = %disk.name(), slot, driver, "plugged in");
            }
            Err(error) => {
                machine.end();
                return Err(error);
            }
        }
    }
    machine.resume();
    Ok(machine)
}

/// The first signal ends the machine, a second one the program.
fn stop_on_signal(signals: StopSignals, stop: &Arc<Stop>) -> std::io::Result<()> {
    let stop = Arc::clone(stop);
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || {
            let mut asked = false;
            while let Ok(signal) = signals.wait() {
                if asked {
                    restore_terminal();
                    tracing::error!(signal, "giving up on a clean end");
                    std::process::exit(EXIT_FAILURE.into());
                }
                asked = true;
                stop.ask(Reason::Signal(signal));
            }
        })?;
    Ok(())
}
