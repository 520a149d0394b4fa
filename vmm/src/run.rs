//! `ringdisk run`: a machine on KVM, from its first instruction to a clean end.
//!
//! Invariants: whatever ends the guest (itself, a signal, a key, a failure), its requests are answered and its images
//! closed cleanly before the program exits; nothing is started before every disk is open and locked.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::{Value, json};
use virtio_devices::connect::Cancel;
use virtio_devices::transport::{PciNetworkConfig, TapError};

use crate::cloud_init::{self, Seed};
use crate::control::{Control, DiskKeys, Request};
use crate::disk_config::{DiskConfig, RateLimitGroups};
use crate::error::{CommandFailure, EXIT_FAILURE, EXIT_OK, chain};
use crate::exchange::{self, Listed, ServedDisk};
use crate::limits;
use crate::machine::{
    Console, ConsoleConfig, Machine, MachineConfig, MachineError, Reason, SLOTS, Stop, restore_terminal,
};
use crate::metrics::{self, Metrics};
use crate::net_config::NetConfig;
use crate::once;
use crate::sandbox::Task;
use crate::signals::{StopSignals, is_log_read};
use crate::socket::Socket;

mod disks;
#[cfg(test)]
mod snapshot_tests;

use disks::{Attached, Disks, confined};

/// The configuration of `ringdisk run`.
#[derive(Clone, Debug)]
pub struct RunConfig {
    /// The machine.
    pub machine: MachineConfig,
    /// Its disks.
    pub disks: Vec<DiskConfig>,
    /// Its network interfaces: the first one is in the last slot, the next ones before it.
    pub nets: Vec<NetConfig>,
    /// The user data of cloud-init in the guest, or the folder with all that it reads.
    pub cloud_init: Option<PathBuf>,
    /// True if it has a source of entropy, in the slot before those.
    pub rng: bool,
    /// The groups whose rate limits disks share, those that are added later too.
    pub rate_limit_groups: RateLimitGroups,
    /// Its console.
    pub console: ConsoleConfig,
    /// The path of its control socket.
    pub control: Option<PathBuf>,
    /// The address of its statistics.
    pub metrics: Option<metrics::Address>,
    /// True if it ends when the guest restarts.
    pub no_reboot: bool,
}

/// The state that control requests use: the current machine and its disks.
struct Desk {
    config: MachineConfig,
    /// By slot.
    nets: BTreeMap<usize, PciNetworkConfig>,
    /// The slot of the source of entropy, if it has one.
    rng: Option<usize>,
    rate_limit_groups: RateLimitGroups,
    disks: Arc<Disks>,
    /// Locked before the disks.
    machine: Mutex<Option<Machine>>,
    /// The stop and restart requests of the machine.
    stop: Arc<Stop>,
    /// Held while a disk is added, so that two disks of one name are detected.
    adding: Mutex<()>,
}

/// The longest time that a guest may take to release a disk before the request reports that it has not.
const REMOVAL_MAX: Duration = Duration::from_secs(10);

impl Desk {
    /// Does something with the machine, unless it is just starting again or ending.
    fn with<T>(&self, work: impl FnOnce(&Machine) -> Result<T, String>) -> Result<T, String> {
        let machine = self.machine.lock();
        work(machine.as_ref().ok_or("the machine is starting or ending")?)
    }

    /// Starts the guest of a machine. Requests that come from now on wait until that has happened: the guest may have
    /// said already that it runs.
    fn start(&self, machine: Machine) {
        let mut current = self.machine.lock();
        machine.resume();
        *current = Some(machine);
    }

    /// Returns the condition that cancels waits for a backend: the machine stops or restarts.
    fn cancel(&self) -> Cancel {
        let stop = Arc::clone(&self.stop);
        Cancel::when(move || stop.is_asked())
    }

    /// Adds a disk to the machine. If that fails all is as it was.
    fn add(&self, keys: &DiskKeys) -> Result<Value, String> {
        let mut config = keys.config().map_err(|error| error.to_string())?;
        let joined = self.rate_limit_groups.join(&mut config);
        joined.map_err(|error| error.to_string())?;
        check_queues(&config, self.config.cpus)?;
        let _alone = self.adding.lock();
        self.disks.check(&config)?;
        let disk = Attached::open(&config, self.config.sandbox).map_err(|error| chain(&error))?;
        let name = disk.name();
        let refused = |error| format!("cannot add disk {name}: {error}");
        let source = disk
            .source(&self.cancel())
            .map_err(|error| refused(chain(&error)))?;
        // Whatever keeps it from the machine, its image is closed as it should be.
        let mut disk = Some(disk);
        let added = self.with(|machine| {
            let Some(opened) = disk.take() else {
                return Err("it is added already".to_owned());
            };
            self.disks.add(machine, opened, source).map_err(|(error, back)| {
                disk = Some(back);
                chain(&error)
            })
        });
        if let Some(Err(failure)) = disk.map(Attached::close) {
            tracing::error!(error = failure.line(), "cannot add a disk");
        }
        let slot = added.map_err(refused)?;
        Ok(json!({"id": name, "address": address(slot)}))
    }

    /// Asks the guest to let a disk go, and waits until it is closed.
    fn remove(&self, id: &str) -> Result<Value, String> {
        let (departure, paused) = self.with(|machine| {
            let (slot, departure) = self.disks.ask(id)?;
            machine.ask_for(slot);
            Ok((departure, machine.is_paused()))
        })?;
        if paused {
            return Err(format!(
                "the guest is paused; disk {id} is removed after `resume`, when the guest releases it"
            ));
        }
        match departure.wait(REMOVAL_MAX) {
            Some(Ok(())) => Ok(json!({ "id": id })),
            Some(Err(error)) => Err(format!("disk {id} is removed, but {error}")),
            None => Err(format!(
                "the guest has not released disk {id} within {} s; the request stays pending, and the disk is removed when it does",
                REMOVAL_MAX.as_secs()
            )),
        }
    }

    fn describe(&self, machine: &Machine) -> Value {
        let disks = self.disks.map(|slot, disk| {
            let shown = machine.shown(slot);
            json!({
                "id": disk.name(),
                "path": disk.config.path,
                "address": address(slot),
                "size": shown.map_or(0, |shown| shown.size_bytes),
                "readonly": shown.is_none_or(|shown| shown.read_only),
                "queues": disk.config.num_queues,
                "io": shown.map_or("none", |shown| shown.driver_name),
                "removing": disk.asked,
            })
        });
        let networks: Vec<Value> = self
            .nets
            .iter()
            .map(|(&slot, net)| {
                json!({
                    "tap": net.tap.name(),
                    "mac": net.mac.to_string(),
                    "address": address(slot),
                })
            })
            .collect();
        json!({
            "state": if machine.is_paused() { "paused" } else { "running" },
            "cpus": self.config.cpus,
            "memory": self.config.memory.bytes,
            "exits": machine.exits(),
            "disks": disks,
            "networks": networks,
        })
    }
}

impl exchange::Desk for Desk {
    const SERVER: &'static str = "a machine of `ringdisk run`";

    fn info(&self) -> Result<Value, String> {
        self.with(|machine| Ok(self.describe(machine)))
    }

    fn disks(&self) -> Result<Vec<Listed>, String> {
        self.with(|machine| {
            Ok(self.disks.map(|slot, disk| Listed {
                id: disk.name(),
                place: address(slot),
                io: machine
                    .shown(slot)
                    .map_or("none", |shown| shown.driver_name)
                    .to_owned(),
                disk: Arc::clone(&disk.served),
            }))
        })
    }

    fn disk(&self, id: &str) -> Result<Arc<ServedDisk>, String> {
        self.disks.find(id, |_, disk| Arc::clone(&disk.served))
    }

    /// Makes a disk larger or, with `force`, smaller, and notifies the guest.
    fn resize(&self, id: &str, size: u64, force: bool) -> Result<Value, String> {
        let failed = |error: String| format!("cannot resize disk {id} to {size} bytes: {error}");
        self.with(|_| Ok(()))?;
        let disk = self.disk(id)?;
        let _alone = disk.change(size, force).map_err(failed)?;
        self.with(|machine| {
            let slot = self.disks.find(id, |slot, _| slot)?;
            let size = machine
                .resize(slot, size)
                .map_err(|error| failed(error.to_string()))?;
            Ok(json!({ "id": id, "size": size }))
        })
    }

    fn stop(&self) {
        self.stop.ask(Reason::Signal("a stop request"));
    }

    fn special(&self, request: Request) -> Result<Value, String> {
        match request {
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
            Request::PowerButton {} => self.with(|machine| {
                machine.press_power_button();
                Ok(json!({}))
            }),
            Request::Reset {} => self.with(|_| {
                self.stop.ask(Reason::Reset);
                Ok(json!({}))
            }),
            Request::DiskAdd { socket: Some(_), .. } => Err(
                "a machine has no sockets for its disks; `socket` is for `ringdisk vhost-user`".to_owned(),
            ),
            Request::DiskAdd { disk, socket: None } => self.add(&disk),
            Request::DiskRemove { id } => self.remove(&id),
            other => Err(exchange::refusal(Self::SERVER, &other)),
        }
    }
}

/// Returns the guest's PCI address of what is in `slot`.
fn address(slot: usize) -> String {
    format!("0000:00:{slot:02x}.0")
}

/// Refuses a disk with more queues than the machine has CPUs.
///
/// # Errors
///
/// The error, as a sentence.
pub fn check_queues(disk: &DiskConfig, cpus: u16) -> Result<(), String> {
    if disk.num_queues <= cpus {
        return Ok(());
    }
    Err(format!(
        "disk {} has num_queues={} for {cpus} CPUs; expected at most one queue per CPU",
        disk.name(),
        disk.num_queues,
    ))
}

/// Refuses disks that name one image, one backend's socket, one id or one slot twice; `others` are ids that are taken.
fn check_names(disks: &[DiskConfig], others: Option<&str>) -> Result<(), CommandFailure> {
    once::check_images(disks)?;
    let backends = disks.iter().filter(|disk| disk.vhost_user);
    once::check_sockets(&backends.map(|disk| disk.path.clone()).collect::<Vec<_>>())?;
    let mut ids: BTreeMap<_, _> = others.map(|id| (id.to_owned(), usize::MAX)).into_iter().collect();
    let mut slots = BTreeMap::new();
    for (index, disk) in disks.iter().enumerate() {
        if let Some(id) = &disk.id
            && ids.insert(id.clone(), index).is_some()
        {
            return Err(CommandFailure::Usage(format!("two disks have the id `{id}`")));
        }
        if let Some(slot) = disk.pci.device_id
            && slots.insert(slot, index).is_some()
        {
            return Err(CommandFailure::Usage(format!(
                "two disks have pci_device_id={slot}; expected a different slot for each"
            )));
        }
    }
    Ok(())
}

/// Refuses more network interfaces and sources of entropy than the bus has slots.
fn check_others(config: &RunConfig) -> Result<(), CommandFailure> {
    let (found, most) = (config.nets.len() + usize::from(config.rng), SLOTS - 1);
    if found <= most {
        return Ok(());
    }
    Err(CommandFailure::Usage(format!(
        "{found} devices by --net and --rng; expected {most} at most, as many as the PCI bus has slots"
    )))
}

/// Runs the machine until its end. Answers the exit code.
///
/// # Errors
///
/// A failure that names what it is about. Images that could be closed cleanly have been.
pub fn run(config: &RunConfig) -> Result<u8, CommandFailure> {
    let seed = config.cloud_init.as_ref().map(|_| cloud_init::ID);
    check_names(&config.disks, seed)?;
    check_others(config)?;
    let numbers = config.machine.check();
    numbers.map_err(|error| CommandFailure::Usage(chain(&error)))?;
    let payload = config.machine.payload.check();
    payload.map_err(|error| CommandFailure::Failed(error.into()))?;
    // Heard from here on: an image that is opened may have to be rebuilt first, which takes its time.
    let signals = StopSignals::block();
    let stop = Arc::new(Stop::default());
    let opened = Arc::new(AtomicBool::new(false));
    signals
        .and_then(|signals| stop_on_signal(signals, &stop, &opened))
        .map_err(|error| CommandFailure::about("cannot wait for signals", error))?;
    // A queue takes several, and disks come later, too.
    if let Err(error) = limits::raise_descriptors() {
        tracing::warn!(%error, "cannot raise the file descriptor limit");
    }
    // Before an image is opened: the address may be in use.
    let address = config.metrics.as_ref();
    let metrics = address.map(|address| Metrics::start(address, config.machine.sandbox, false));
    let metrics = metrics
        .transpose()
        .map_err(|error| CommandFailure::Failed(error.into()))?;
    // The slots of disks count from the first one.
    let mut slots = (1..SLOTS).rev();
    let nets = config.nets.iter().zip(&mut slots);
    let nets = nets.map(|(net, slot)| Ok((slot, net.open()?)));
    let nets = nets.collect::<Result<_, TapError>>();
    let nets = nets.map_err(|error| CommandFailure::Failed(error.into()))?;
    let seed = config.cloud_init.as_deref().map(Seed::make).transpose();
    let seed = seed.map_err(|error| CommandFailure::Failed(error.into()))?;
    let last = seed.iter().map(Seed::disk).collect::<Result<Vec<_>, _>>();
    let last = last.map_err(|error| CommandFailure::Failed(error.into()))?;
    let mut disks = Vec::new();
    for disk in config.disks.iter().chain(&last) {
        disks.push(
            Attached::open(disk, config.machine.sandbox)
                .map_err(|error| CommandFailure::Failed(error.into()))?,
        );
    }
    let disks = Disks::new(disks);
    let desk = Arc::new(Desk {
        config: config.machine.clone(),
        nets,
        rng: slots.next().filter(|_| config.rng),
        rate_limit_groups: config.rate_limit_groups.clone(),
        disks: Arc::new(disks.map_err(|error| CommandFailure::about("cannot start a thread", error))?),
        machine: Mutex::default(),
        stop,
        adding: Mutex::default(),
    });
    if let Some(metrics) = &metrics {
        let disks = Arc::clone(&desk.disks);
        metrics.report(Arc::new(move || disks.reports()));
    }
    opened.store(true, Ordering::SeqCst);
    let ended = live(config, &desk);
    let closed = desk.disks.close();
    ended.and(closed).map(|()| EXIT_OK)
}

/// One machine after another, until one ends that is not to start again.
fn live(config: &RunConfig, desk: &Arc<Desk>) -> Result<(), CommandFailure> {
    let stop = &desk.stop;
    let console =
        Console::open(&config.console, stop).map_err(|error| CommandFailure::Failed(error.into()))?;
    let _control = match &config.control {
        Some(path) => {
            let socket = Socket::listen(path);
            let control = socket.and_then(|socket| Control::serve_on(socket, &exchange::server(desk)));
            Some(control.map_err(|error| CommandFailure::Failed(error.into()))?)
        }
        None => None,
    };
    let mut restarts = Restarts::default();
    loop {
        let began = Instant::now();
        match prepare(desk, &console) {
            Ok(machine) => desk.start(machine),
            // A start that was cancelled is an end as any other.
            Err(_) if matches!(stop.asked(), Some(Reason::Signal(_))) => return Ok(()),
            Err(error) => return Err(CommandFailure::Failed(error.into())),
        }
        let reason = stop.wait();
        // Whoever asks at the control socket is answered first.
        let machine = desk.machine.lock().take();
        if let Some(machine) = machine {
            tracing::info!(?reason, exits = ?machine.exits(), "the machine stops");
            machine.end();
        }
        console.detach();
        match reason {
            Reason::Reset if stop.restarted() => {
                if config.no_reboot {
                    tracing::info!("the guest restarts; the machine stops (--no-reboot)");
                    return Ok(());
                }
                desk.disks.leave_asked();
                if stop.wait_for(restarts.next(began.elapsed())) {
                    return Ok(());
                }
            }
            Reason::Failed(message) => return Err(CommandFailure::Failed(message.into())),
            _ => return Ok(()),
        }
    }
}

/// The time after which a restart of the guest is not treated as a restart loop.
const STARTED: Duration = Duration::from_secs(1);
/// So many machines in a row may end sooner than that before the next one is waited for.
const QUICK_MAX: u32 = 3;
/// The longest wait between two machines.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// The restarts of a guest. One that fails as soon as it starts would take all of a CPU of the host for nothing.
#[derive(Debug, Default)]
struct Restarts {
    /// Machines in a row that ended as soon as they started.
    quick: u32,
}

impl Restarts {
    /// Returns the delay before the guest of a machine that ran for `time` starts again.
    fn next(&mut self, time: Duration) -> Duration {
        if time >= STARTED {
            self.quick = 0;
            tracing::info!(event = "guest-restarted", "the guest restarts");
            return Duration::ZERO;
        }
        self.quick = self.quick.saturating_add(1);
        let wait = match self.quick.checked_sub(QUICK_MAX + 1) {
            None => Duration::ZERO,
            Some(doubled) => STARTED.saturating_mul(1 << doubled.min(8)).min(WAIT_MAX),
        };
        tracing::warn!(
            in_a_row = self.quick,
            ?wait,
            "the guest restarts within a second of its start; delaying the next start"
        );
        wait
    }
}

/// Returns a machine with its disks, paused.
fn prepare(desk: &Desk, console: &Console) -> Result<Machine, MachineError> {
    let disks = Arc::clone(&desk.disks);
    let ejected = Arc::new(move |slot| disks.leave(slot));
    let machine = Machine::new(&desk.config, console, &desk.stop, ejected)?;
    let mut nets = desk.nets.iter();
    let plugged = nets.try_for_each(|(&slot, net)| machine.plug_network(slot, net.clone()));
    let plugged = plugged.and_then(|()| {
        let hook = desk.config.sandbox.then(|| confined(Task::Queue));
        desk.rng.map_or(Ok(()), |slot| machine.plug_entropy(slot, hook))
    });
    if let Err(error) = plugged.and_then(|()| desk.disks.plug_all(&machine, &desk.cancel())) {
        machine.end();
        return Err(error);
    }
    Ok(machine)
}

/// The first signal ends the machine, a second one the program. Before all images are `opened` there is no machine, and
/// nothing was written that has to be finished: the first one ends the program.
fn stop_on_signal(signals: StopSignals, stop: &Arc<Stop>, opened: &Arc<AtomicBool>) -> std::io::Result<()> {
    let (stop, opened) = (Arc::clone(stop), Arc::clone(opened));
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || {
            let mut asked = false;
            while let Ok(signal) = signals.wait() {
                let opening = !opened.load(Ordering::SeqCst);
                if asked || opening {
                    restore_terminal();
                    if is_log_read() && opening {
                        tracing::error!(signal, "exiting before all images were open");
                    } else if is_log_read() {
                        tracing::error!(signal, "exiting with requests in flight");
                    }
                    std::process::exit(EXIT_FAILURE.into());
                }
                asked = true;
                stop.ask(Reason::Signal(signal));
            }
        })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restarts_back_off_when_a_guest_restarts_at_once() {
        let mut restarts = Restarts::default();
        let quick = Duration::from_millis(5);
        let waits: Vec<u64> = (0..12).map(|_| restarts.next(quick).as_secs()).collect();
        assert_eq!(waits, [0, 0, 0, 1, 2, 4, 8, 16, 32, 60, 60, 60]);
        assert_eq!(restarts.next(STARTED), Duration::ZERO);
        assert_eq!(restarts.next(quick), Duration::ZERO, "counted anew");
    }
}
