//! `ringdisk run`: a machine of our own, from its first instruction to a clean end.
//!
//! What must stay true: whatever ends the guest (itself, a signal, a key, a failure), its requests are answered and
//! its images closed cleanly before the program ends; and nothing is started before every disk is open and locked.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use block::worker::WorkerConfig;
use block::{Context, Disk};
use virtio_devices::transport::PciDiskConfig;

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
    fn close(self) -> Result<(), CommandFailure> {
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

    let mut ended = Ok(EXIT_OK);
    loop {
        let machine = match start(&config.machine, &disks, &console, &stop) {
            Ok(machine) => machine,
            Err(error) => {
                ended = Err(failed(error));
                break;
            }
        };
        machine.resume();
        let reason = stop.wait();
        tracing::info!(?reason, exits = ?machine.exits(), "the machine ends");
        machine.end();
        match reason {
            Reason::Reset if stop.restarted() => {}
            Reason::Failed(told) => {
                ended = Err(CommandFailure::Failed(told.into()));
                break;
            }
            _ => break,
        }
    }
    drop(console);
    for disk in disks {
        let closed = disk.close();
        ended = ended.and_then(|code| closed.map(|()| code));
    }
    ended
}

fn start(
    config: &MachineConfig,
    disks: &[Attached],
    console: &Console,
    stop: &Arc<Stop>,
) -> Result<Machine, MachineError> {
    let machine = Machine::new(config, console, stop)?;
    for disk in disks {
        let plugged = machine.plug(None, disk.opened.disk(), disk.function());
        match plugged {
            Ok(slot) => tracing::info!(disk = %disk.name(), slot, "plugged in"),
            Err(error) => {
                machine.end();
                return Err(error);
            }
        }
    }
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
