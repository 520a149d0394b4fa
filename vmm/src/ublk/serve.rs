//! The server: creates devices for disks, or recovers those whose server was killed, and serves them until the end.
//!
//! Invariants: after a stop signal every device is stopped, drained and deleted, and each image closed cleanly,
//! even if another one fails. A device with a broken queue does no more I/O, and is left untouched until this process
//! exits: then it can be recovered.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use block::lock::LockSet;
use block::worker::WorkerConfig;
use parking_lot::Mutex;
use serde_json::json;
use virtio_devices::ublk::{
    CloseError, Control, Events, QueueEvent, RecoveringDevice, Recovery, Transport, TransportChoice,
    UblkConfig, UblkDevice, block_path, may_administer,
};

use super::arguments::{AddArguments, RecoverArguments, ServeArguments, UpgradeArguments};
use super::claimed_file::ClaimedFile;
use super::groups::Groups;
use super::resume::{self, Found};
use super::sooner::Sooner;
use super::state::{self, DeviceState};
use super::upgrade::{self, Predecessor};
use super::{devices, fence, hand_over, helper, links, page_cache, parallel, usage};
use crate::control::{Control as ControlSocket, Request, Server as ControlServer};
use crate::disk_config::DiskConfig;
use crate::error::{CommandFailure, EXIT_FAILURE, EXIT_OK};
use crate::open::{self, OpenedDisk, Opening};
use crate::signals::StopSignals;
use crate::socket::Socket;
use crate::{background, limits, once, sd_notify, size};

/// The longest time that I/O of a killed server may keep its image locked: as long as a request may take the driver.
const UNLOCK_MAX: Duration = Duration::from_secs(30);

/// A device and the image behind it. Dropped in this order: the image's lock goes last.
struct Served {
    device: UblkDevice,
    name: String,
    serial: Option<String>,
    opened: OpenedDisk,
    /// True if it had another server before.
    recovered: bool,
}

/// The state that the main thread and the control socket share.
struct Shared {
    control: Control,
    devices: BTreeMap<u32, Served>,
    /// The images of detached devices, held until this process exits.
    left: Vec<OpenedDisk>,
    /// They are another server's now, and this process is about to end.
    handed_over: bool,
}

impl Shared {
    /// Lets go of a device: it stays as it is until the end of this process, which the driver takes for its server's death. So
    /// does its image's lock.
    fn leave(&mut self, served: Served) {
        let Served { device, opened, .. } = served;
        drop(device);
        self.left.push(opened);
    }

    /// Lets go of all devices that this process has not made: they are the next server's, as they would be had it not come.
    fn leave_recovered(&mut self) {
        let (recovered, made) = std::mem::take(&mut self.devices)
            .into_iter()
            .partition::<BTreeMap<_, _>, _>(|(_, served)| served.recovered);
        self.devices = made;
        recovered.into_values().for_each(|served| self.leave(served));
    }
}

type Server = Arc<Mutex<Shared>>;

/// An event for the main thread.
enum Event {
    Stop(&'static str),
    Queue(QueueEvent),
}

/// A disk to be served, and how.
struct Wanted {
    /// The device to recover; `None` makes a new one.
    recover: Option<u32>,
    /// A device that is deleted first, because it never had a server.
    half_made: Option<u32>,
    text: String,
    rate_limit_group: Option<String>,
    directory: PathBuf,
    disk: DiskConfig,
    config: UblkConfig,
    /// True if answered writes must outlive this process.
    outlives: bool,
    /// True if the host may read the contents.
    partitions: bool,
}

/// `ringdisk ublk add`.
///
/// # Errors
///
/// A failure that names the disk; no device of this call is left then.
pub(super) fn add(arguments: &AddArguments) -> Result<u8, CommandFailure> {
    let transport = match arguments.transport.as_str() {
        "copy" => TransportChoice::Only(Transport::Copy),
        "user-copy" => TransportChoice::Only(Transport::UserCopy),
        "zero-copy" => TransportChoice::Only(Transport::ZeroCopy),
        _ => TransportChoice::Auto,
    };
    let recovery = match arguments.recovery.as_str() {
        // The driver lets no I/O wait for a user.
        _ if !may_administer() => Recovery::Off,
        "wait" => Recovery::Wait,
        "fail" => Recovery::Fail,
        "off" => Recovery::Off,
        _ => Recovery::Reissue,
    };
    let io_bytes_max = size::parse_bytes(&arguments.max_io)
        .ok()
        .and_then(|bytes| u32::try_from(bytes).ok())
        .filter(|bytes| bytes.is_power_of_two() && (4096..=1 << 25).contains(bytes));
    let Some(io_bytes_max) = io_bytes_max else {
        let found = &arguments.max_io;
        let told = format!("--max-io {found}: expected a power of two from 4K to 32M");
        return Err(CommandFailure::Usage(told));
    };
    let zero_copy_from = size::parse_bytes(&arguments.zero_copy_from)
        .ok()
        .and_then(|bytes| u32::try_from(bytes).ok());
    let Some(zero_copy_from) = zero_copy_from else {
        let found = &arguments.zero_copy_from;
        let told = format!("--zero-copy-from {found}: expected a size such as 64K, below 4G");
        return Err(CommandFailure::Usage(told));
    };
    let directory = here()?;
    let mut groups = Groups::parse(&arguments.serve.rate_limit_group)?;
    let texts = &arguments.disk;
    let disks = texts
        .iter()
        .map(|text| parse(text))
        .collect::<Result<Vec<_>, _>>()?;
    once::check_images(&disks)?;
    let mut wanted = Vec::new();
    for ((text, mut disk), nth) in texts.iter().zip(disks).zip(0u32..) {
        let rate_limit_group = groups.join(&mut disk, None)?;
        let id = arguments.id.map(|first| first.saturating_add(nth));
        let found = match id {
            Some(id) if arguments.or_recover => resume::look(id, text, &directory)?,
            _ => Found::Nothing,
        };
        let config = UblkConfig {
            id,
            transport,
            zero_copy_from,
            recovery,
            io_bytes_max,
            partitions: arguments.partitions,
            ..config(&disk, &arguments.serve)?
        };
        let recover = id.filter(|_| found == Found::Waits);
        wanted.push(Wanted {
            recover,
            half_made: id.filter(|_| found == Found::HalfMade),
            text: text.clone(),
            rate_limit_group,
            directory: directory.clone(),
            disk,
            config,
            outlives: recover.is_some() || recovery != Recovery::Off,
            partitions: arguments.partitions,
        });
    }
    if arguments.serve.daemonize {
        return background::start();
    }
    serve(wanted, Vec::new(), &arguments.serve)
}

/// `ringdisk ublk recover`.
///
/// # Errors
///
/// A failure that names the device or the disk; the device waits for another server then.
pub(super) fn recover(arguments: &RecoverArguments) -> Result<u8, CommandFailure> {
    let ids = if arguments.all {
        devices::waiting()?
    } else {
        devices::refuse_served(&arguments.devices)?;
        arguments.devices.clone()
    };
    if !arguments.disk.is_empty() && arguments.disk.len() != ids.len() {
        let told = format!("{} --disk for {} devices", arguments.disk.len(), ids.len());
        return Err(CommandFailure::Usage(told));
    }
    if ids.is_empty() {
        writeln!(std::io::stderr(), "no device waits for a server")?;
        return Ok(EXIT_OK);
    }
    let wanted = again(&ids, &arguments.disk, &arguments.serve)?;
    if arguments.serve.daemonize {
        return background::start();
    }
    serve(wanted, Vec::new(), &arguments.serve)
}

/// `ringdisk ublk upgrade`.
///
/// # Errors
///
/// A failure that names the device, the disk or its server. Unless it says otherwise, that server continues.
pub(super) fn upgrade(arguments: &UpgradeArguments) -> Result<u8, CommandFailure> {
    let ids = match arguments.server {
        Some(pid) => devices::served_by(pid)?,
        None => arguments.devices.clone(),
    };
    let predecessors = upgrade::find(&ids, arguments.all)?;
    let ids: Vec<u32> = predecessors.iter().flat_map(Predecessor::devices).collect();
    if ids.is_empty() {
        writeln!(std::io::stderr(), "no device has a server to take over from")?;
        return Ok(EXIT_OK);
    }
    let wanted = again(&ids, &[], &arguments.serve)?;
    for wanted in &wanted {
        open::rehearse(&wanted.disk).map_err(|error| CommandFailure::Failed(error.into()))?;
    }
    if arguments.serve.daemonize {
        return background::start();
    }
    serve(wanted, predecessors, &arguments.serve)
}

/// Devices that there are already, with their disks as they are given or, where none are, remembered.
fn again(ids: &[u32], disks: &[String], arguments: &ServeArguments) -> Result<Vec<Wanted>, CommandFailure> {
    let mut groups = Groups::parse(&arguments.rate_limit_group)?;
    let mut wanted = Vec::new();
    for (index, &id) in ids.iter().enumerate() {
        let remembered = DeviceState::load(id);
        let (text, directory) = match (disks.get(index), &remembered) {
            (Some(text), _) => (text.clone(), here()?),
            (None, Some(state)) => (state.disk.clone(), state.directory.clone()),
            (None, None) => {
                let told = format!("no saved state for {}; pass --disk", block_path(id));
                return Err(CommandFailure::Failed(told.into()));
            }
        };
        let mut disk = parse(&text)?;
        let each = remembered.as_ref().map(|state| state.queues_per_worker);
        let partitions = remembered.as_ref().is_some_and(|state| state.partitions);
        let group = remembered.and_then(|state| state.rate_limit_group);
        let rate_limit_group = groups.join(&mut disk, group.as_deref())?;
        disk.path = directory.join(&disk.path);
        let mut config = config(&disk, arguments)?;
        config.queues_per_worker = arguments.queues_per_worker.or(each).unwrap_or(1);
        wanted.push(Wanted {
            recover: Some(id),
            half_made: None,
            text,
            rate_limit_group,
            directory,
            disk,
            config,
            outlives: true,
            partitions,
        });
    }
    Ok(wanted)
}

fn here() -> Result<PathBuf, CommandFailure> {
    std::env::current_dir().map_err(|error| CommandFailure::about("cannot read the current directory", error))
}

/// A disk as it is given.
fn parse(text: &str) -> Result<DiskConfig, CommandFailure> {
    let disk = DiskConfig::parse(text)?;
    disk.is_own()?;
    Ok(disk)
}

/// Returns the device configuration that follows from the disk's.
fn config(disk: &DiskConfig, serve: &ServeArguments) -> Result<UblkConfig, CommandFailure> {
    if disk.queue_size > 4096 {
        let (name, found) = (disk.name(), disk.queue_size);
        let told = format!("disk {name} has queue_size={found}; expected at most 4096 for a ublk device");
        return Err(CommandFailure::Usage(told));
    }
    let worker = WorkerConfig {
        on_start: fence::worker_hook(serve.is_confined()),
        ..UblkConfig::default_worker()
    };
    Ok(UblkConfig {
        name: disk.name(),
        num_queues: disk.num_queues,
        queue_depth: disk.queue_size,
        queues_per_worker: serve.queues_per_worker.unwrap_or(1),
        registered_buffers_max: serve.registered_buffers,
        workers: disk.workers(&worker),
        ..UblkConfig::default()
    })
}

/// Serves all of them until the end, some of them instead of others who do so now.
fn serve(
    mut wanted: Vec<Wanted>,
    predecessors: Vec<Predecessor>,
    arguments: &ServeArguments,
) -> Result<u8, CommandFailure> {
    let start = |error: std::io::Error| CommandFailure::about("cannot wait for signals", error);
    if arguments.detached > 0 {
        background::leave_session().map_err(start)?;
    }
    let signals = StopSignals::block().map_err(start)?;
    let (sender, events) = mpsc::channel();
    // An upgrade that is broken off would leave the devices without a server: there the second signal ends it.
    let may_end = Arc::new(Mutex::new(predecessors.is_empty()));
    let early = Early {
        may_end: Arc::clone(&may_end),
        confined: arguments.is_confined(),
    };
    stop_on_signal(signals, sender.clone(), early).map_err(start)?;
    // Files, rings and wake-ups of each queue.
    limits::prepare_descriptors(
        wanted
            .iter()
            .map(|disk| 32 + 16 * u64::from(disk.disk.num_queues))
            .sum(),
    );
    let control = helper::control()?;
    state::make_folder().map_err(|error| CommandFailure::about(state::folder().display(), error))?;
    let server: Server = Arc::new(Mutex::new(Shared {
        control,
        devices: BTreeMap::new(),
        left: Vec::new(),
        handed_over: false,
    }));
    state::sweep(&state::folder());
    let socket = state::socket(std::process::id());
    let shared = Arc::clone(&server);
    let answer = move |request| answer(&shared, request);
    let (shared, own) = (Arc::clone(&server), socket.clone());
    let told = move || {
        if shared.lock().handed_over {
            hand_over::end(&own);
        }
    };
    // Who connects before the devices are there is answered then.
    let listening = Socket::listen(&socket).map_err(|error| CommandFailure::Failed(error.into()))?;
    let manager = sd_notify::Manager::find();

    let before = predecessors.first().map(Predecessor::pid);
    if before.is_some() {
        // If we fail with what others have left, the manager is to start again what recovers it.
        manager.main(std::process::id());
    }
    let taken =
        upgrade::take(predecessors).inspect_err(|_| before.iter().for_each(|&pid| manager.main(pid)))?;
    wanted.retain(|disk| disk.recover.is_none_or(|id| !taken.was_refused(id)));

    // What is wrong with an image shows before the first device is there.
    let orphaned = |failure| taken.orphaned(failure);
    let lock_set = taken.lock_set.clone();
    let opened = parallel::each(wanted, |disk| open_disk(disk, &lock_set)).map_err(orphaned)?;
    // Those who had them have ended.
    lock_set.keep();
    *may_end.lock() = false;
    let (mut first_failure, mut brought) = match bring_up(&server, opened, &sender, &socket, arguments) {
        Ok((lines, failure)) => (failure.map(orphaned), Some(lines)),
        Err(failure) => (Some(orphaned(failure)), None),
    };
    first_failure = taken.end().or(first_failure);
    server.lock().devices.keys().copied().for_each(upgrade::mend);
    if brought.is_some() && arguments.is_confined() {
        let devices: Vec<String> = server.lock().devices.keys().map(|&id| block_path(id)).collect();
        // Threads that are started from here on are inside.
        if let Err(failure) = fence::confine(devices) {
            first_failure = Some(failure);
            brought = None;
        }
    }
    let asked = ControlServer {
        handler: Arc::new(answer),
        told: Arc::new(told),
        locks: Arc::new(move || lock_set.descriptors()),
    };
    let _socket = ControlSocket::serve_on(listening, &asked)
        .inspect_err(|error| tracing::error!(%error, "cannot serve the control socket; `ublk info` and `ublk upgrade` will fail"));
    if let Some(mut lines) = brought {
        if arguments.detached > 0 {
            lines += background::READY;
            lines.push('\n');
        }
        // Before whoever waits for us to be in the background ends.
        manager.ready();
        // Whoever does not read this is served as well.
        std::io::stdout().write_all(lines.as_bytes()).unwrap_or_default();
        let failure = wait(&server, &events);
        first_failure = first_failure.or(failure);
    } else {
        server.lock().leave_recovered();
    }
    let mut shared = server.lock();
    while let Some((_, served)) = shared.devices.pop_first() {
        if let Err(failure) = close(&mut shared.control, served) {
            first_failure.get_or_insert(failure);
        }
    }
    first_failure.map_or(Ok(EXIT_OK), Err)
}

/// Opens and locks a disk. One whose server was killed is locked until the last of its I/O has ended.
fn open_disk(wanted: &Wanted, lock_set: &LockSet) -> Result<OpenedDisk, CommandFailure> {
    let begun = Instant::now();
    let device = wanted.recover.or(wanted.half_made);
    let had_server = device.is_some();
    let how = Opening {
        persist_mappings: wanted.outlives,
        device,
        lock_set: lock_set.clone(),
    };
    loop {
        match open::open_as(&wanted.disk, &how) {
            Err(error) if had_server && error.is_locked() && begun.elapsed() < UNLOCK_MAX => {
                std::thread::sleep(Duration::from_millis(5));
            }
            disk => return disk.map_err(|error| CommandFailure::Failed(error.into())),
        }
    }
}

/// A device that is on its way.
enum Begun {
    Made(UblkDevice),
    /// Nothing is asked of it yet.
    Recovering(RecoveringDevice),
}

/// Serves the disks; answers the lines that say so. I/O of devices in recovery flows only when all of them have their
/// queues: that of the first would take the others' time. If one of them fails then, it waits for another server, and the
/// others are served: that failure is the second part of the answer.
fn bring_up(
    server: &Server,
    disks: Vec<(Wanted, OpenedDisk)>,
    events: &mpsc::Sender<Event>,
    socket: &Path,
    arguments: &ServeArguments,
) -> Result<(String, Option<CommandFailure>), CommandFailure> {
    let mut shared = server.lock();
    let about = |wanted: &Wanted, error| CommandFailure::about(wanted.disk.name(), error);
    let (mut begun, mut failure, mut late) = (Vec::new(), None, None);
    for (wanted, opened) in disks {
        if let Some(id) = wanted.half_made
            // Its image is ours now, so nobody is about to serve it.
            && let Err(error) = shared.control.delete(id)
        {
            failure = Some(CommandFailure::Failed(error.into()));
            break;
        }
        let events = events.clone();
        // If nobody listens any more, the process is ending.
        let events: Events = Arc::new(move |event| events.send(Event::Queue(event)).unwrap_or_default());
        let (control, config) = (&mut shared.control, &wanted.config);
        let device = match wanted.recover {
            None => UblkDevice::add(control, opened.disk(), config, &events).map(Begun::Made),
            Some(id) => {
                UblkDevice::recover(control, id, opened.disk(), config, &events).map(Begun::Recovering)
            }
        };
        match device {
            Ok(device) => begun.push((wanted, opened, device)),
            Err(error) => {
                failure = Some(about(&wanted, error));
                break;
            }
        }
    }
    let (mut served, mut recovering, mut waiting) = (Vec::new(), Vec::new(), Vec::new());
    for (wanted, opened, device) in begun {
        match device {
            Begun::Made(device) => served.push((wanted, opened, device)),
            Begun::Recovering(device) => {
                recovering.push(device);
                waiting.push((wanted, opened));
            }
        }
    }
    // From now on I/O flows, and everybody's threads are after a CPU: what is left to do here goes first.
    let _sooner = Sooner::begin();
    // All of them wait for another server if one cannot be had.
    if failure.is_none() {
        let finished = RecoveringDevice::finish(recovering, &mut shared.control);
        for ((wanted, opened), device) in waiting.into_iter().zip(finished) {
            match device {
                Ok(device) => served.push((wanted, opened, device)),
                Err(error) => {
                    tracing::error!(disk = %wanted.disk.name(), %error, "the device was not recovered");
                    late.get_or_insert(about(&wanted, error));
                    shared.left.push(opened);
                }
            }
        }
    }
    let mut lines = String::new();
    for (wanted, opened, device) in served {
        lines += &remember(&mut shared, wanted, opened, device, socket, arguments);
    }
    let nobody = shared.devices.is_empty();
    match failure.or_else(|| late.take_if(|_| nobody)) {
        Some(failure) => Err(failure),
        None => Ok((lines, late)),
    }
}

/// Keeps a device that is served; answers the line that says so.
fn remember(
    shared: &mut Shared,
    wanted: Wanted,
    opened: OpenedDisk,
    device: UblkDevice,
    socket: &Path,
    arguments: &ServeArguments,
) -> String {
    let (id, name) = (device.id(), wanted.disk.name());
    let remembered = DeviceState {
        id,
        pid: std::process::id(),
        disk: wanted.text,
        directory: wanted.directory,
        queues_per_worker: wanted.config.queues_per_worker,
        rate_limit_group: wanted.rate_limit_group,
        control: socket.to_owned(),
        sequence: state::sequence(Path::new(state::BLOCK_DEVICES), id),
        outlives: Recovery::of(device.info().flags()) != Recovery::Off,
        partitions: wanted.partitions,
        files: opened
            .disk()
            .files()
            .iter()
            .filter_map(|file| ClaimedFile::of(file))
            .collect(),
    };
    if let Err(error) = remembered.store() {
        tracing::warn!(%error, device = id, "cannot save the state of the device; `ublk recover` will need --disk");
    }
    links::make(id, wanted.disk.serial.as_deref());
    let path = block_path(id);
    let line = if arguments.json {
        let transport = device.transport().to_string();
        let queues = device.info().nr_hw_queues;
        json!({"id": id, "path": path, "disk": name, "transport": transport, "queues": queues}).to_string()
    } else {
        path
    };
    shared.devices.insert(
        id,
        Served {
            device,
            name,
            serial: wanted.disk.serial,
            opened,
            recovered: wanted.recover.is_some(),
        },
    );
    line + "\n"
}

/// Waits for a stop, or the end of every device. The failure is the first there was.
fn wait(server: &Server, events: &mpsc::Receiver<Event>) -> Option<CommandFailure> {
    let mut first_failure = None;
    while let Ok(event) = events.recv() {
        let mut shared = server.lock();
        if shared.handed_over {
            continue;
        }
        match event {
            Event::Stop(signal) => {
                tracing::info!(signal, "stopping");
                return first_failure;
            }
            Event::Queue(QueueEvent::Ended { device }) => {
                if shared
                    .devices
                    .get(&device)
                    .is_some_and(|served| served.device.is_ended())
                    && let Some(served) = shared.devices.remove(&device)
                {
                    tracing::info!(device, "the device was deleted");
                    if let Err(failure) = close(&mut shared.control, served) {
                        first_failure.get_or_insert(failure);
                    }
                }
            }
            Event::Queue(QueueEvent::Broken { device, what }) => {
                if let Some(served) = shared.devices.remove(&device) {
                    let told = format!("{}: {what}; run `ringdisk ublk recover`", block_path(device));
                    tracing::error!(device, %what, "detaching from a broken device");
                    shared.leave(served);
                    first_failure.get_or_insert(CommandFailure::Failed(told.into()));
                }
            }
        }
        if shared.devices.is_empty() {
            break;
        }
    }
    first_failure
}

/// Stops and deletes one device and closes its image.
fn close(control: &mut Control, served: Served) -> Result<(), CommandFailure> {
    let Served {
        device,
        name,
        serial,
        opened: _opened,
        recovered: _,
    } = served;
    let (id, path) = (device.id(), block_path(device.id()));
    if !device.is_ended() {
        match usage::user_of(&path) {
            Ok(Some(user)) => {
                tracing::warn!(device = id, %user, "the device was removed while in use; its users get I/O errors");
                page_cache::sync();
            }
            Ok(None) => {}
            // The sandbox does not let us see who has it open.
            Err(_) => page_cache::flush(path.clone()),
        }
    }
    links::remove_own(id, serial.as_deref());
    let closed = device.close(control);
    if let Err(CloseError::Undrained { .. }) = &closed {
        // Only the end of the process frees what the kernel waits for, and it must come soon.
        tracing::error!(device = id, "exiting: requests are still in flight");
        std::process::exit(EXIT_FAILURE.into());
    }
    state::forget(id, Some(std::process::id()));
    match &closed {
        Ok(()) => tracing::info!(disk = %name, device = id, "the image was closed cleanly"),
        Err(error) => tracing::error!(disk = %name, device = id, %error, "the image was not closed cleanly"),
    }
    closed.map_err(|error| CommandFailure::about(name, error))
}

/// Carries out what the control socket is asked.
fn answer(server: &Server, request: Request) -> Result<serde_json::Value, String> {
    let mut shared = server.lock();
    let Shared {
        control,
        devices,
        handed_over,
        ..
    } = &mut *shared;
    match request {
        Request::Info {} => {
            let list = devices.iter().map(|(id, served)| {
                let counts = served.device.counts();
                json!({
                    "id": id,
                    "disk": served.name,
                    "transport": served.device.transport().to_string(),
                    "workers": served.device.workers(),
                    "requests": counts.requests,
                    "bytes": counts.bytes,
                    "errors": counts.errors,
                    "zero_copied": counts.zero_copied,
                    "copied": counts.copied,
                    "fallbacks": counts.fallbacks,
                })
            });
            Ok(
                json!({"devices": list.collect::<Vec<_>>(), "hand_over": hand_over::VERSION, "passes_locks": true}),
            )
        }
        Request::HandOver {
            version,
            devices: asked,
        } => {
            let devices: Vec<&UblkDevice> = devices.values().map(|served| &served.device).collect();
            let left = hand_over::leave(control, &devices, version, &asked)?;
            *handed_over = true;
            Ok(left)
        }
        Request::DiskResize { id, size } => {
            let served = id.parse().ok().and_then(|id: u32| devices.get(&id));
            let served = served.ok_or_else(|| format!("this server has no device {id}"))?;
            let resized = served.device.resize(control, size);
            let size = resized.map_err(|error| crate::error::chain(&error))?;
            Ok(json!({ "size": size }))
        }
        _ => Err("a ublk server does not support this request".to_owned()),
    }
}

/// The state that a stop signal needs before the devices are ready.
struct Early {
    /// Nothing is made yet: the process may just end.
    may_end: Arc<Mutex<bool>>,
    confined: bool,
}

/// Starts the thread that turns the first stop signal into a stop, and the second into the end. The first one is the end
/// already while images are opened and their locks are waited for.
fn stop_on_signal(signals: StopSignals, events: mpsc::Sender<Event>, early: Early) -> std::io::Result<()> {
    let wait_and_stop = move || -> std::io::Result<()> {
        if early.confined {
            fence::confine_early()?;
        }
        let signal = signals.wait()?;
        let may_end = early.may_end.lock();
        if *may_end {
            tracing::error!(signal, "stopped before the devices were ready");
            std::process::exit(EXIT_FAILURE.into());
        }
        drop(may_end);
        events.send(Event::Stop(signal)).unwrap_or_default();
        let signal = signals.wait()?;
        tracing::error!(signal, "exiting with requests in flight");
        std::process::exit(EXIT_FAILURE.into());
    };
    let report = move || {
        if let Err(error) = wait_and_stop() {
            tracing::error!(%error, "cannot wait for signals");
        }
    };
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(report)?;
    Ok(())
}
