//! `ringdisk ublk` under real kernels, 6.12 and 7.x: block devices of QCOW2 and raw images, worked on hard, killed,
//! recovered and deleted. QEMU's tools judge the images after each of it, inside the guest.
//!
//! A kernel that waits for a server in vain hangs: then the guest does not end, and the test says so.

use std::panic;
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use lab::nested::Toolbox;
use lab::{Error, Guest, Kernel, Lab, Outcome, Scratch, Server, image};

#[path = "ublk/additions.rs"]
mod additions;
#[path = "ublk/claims.rs"]
mod claims;
#[path = "ublk/configured.rs"]
mod configured;
#[path = "ublk/crash.rs"]
mod crash;
#[path = "ublk/formats.rs"]
mod formats;
#[path = "ublk/half_recovered.rs"]
mod half_recovered;
#[path = "ublk/hand_over.rs"]
mod hand_over;
#[path = "ublk/lvm.rs"]
mod lvm;
#[path = "ublk/operations.rs"]
mod operations;
#[path = "ublk/scale.rs"]
mod scale;
#[path = "ublk/soak.rs"]
mod soak;
#[path = "ublk/upgrade.rs"]
mod upgrade;
#[path = "ublk/users.rs"]
mod users;
#[path = "ublk/zero_copy.rs"]
mod zero_copy;

const MIB: u64 = 1 << 20;

/// The beginning of every script. The images are in memory; `ringdisk` is on the disk `tools`.
const PRELUDE: &str = include_str!("../guest/ublk/functions.sh");

/// The memory of a guest, in MiB.
const MEMORY_MIB: u32 = 1536;

/// The time that a guest may take. The longest takes two minutes and a half when alone, and six beside others.
const PATIENCE: Duration = Duration::from_secs(900);

/// Leave for a guest with so many CPUs to be there: of all tests together, guests have three for each of this machine's,
/// and half of its memory. More would only be in each other's way, and in that of those whose time is measured.
struct Place {
    cpus: u64,
}

/// The guests that are there, and those that wait: the first to come is the first to go in.
#[derive(Debug)]
struct Places {
    cpus: u64,
    came: u64,
    went_in: u64,
}

static PLACES: Mutex<Places> = Mutex::new(Places {
    cpus: 0,
    came: 0,
    went_in: 0,
});
static CHANGED: Condvar = Condvar::new();

impl Place {
    /// Waits for leave.
    fn take(cpus: u16) -> Self {
        let cpus = u64::from(cpus);
        let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let total = info.lines().find_map(|line| line.strip_prefix("MemTotal:"));
        let kib: Option<u64> = total.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok());
        let guests = kib.unwrap_or(0) / 1024 / 2 / u64::from(MEMORY_MIB);
        let processors = thread::available_parallelism().map_or(1, |count| count.get() as u64);
        let most = (3 * processors).min(2 * guests).max(cpus);

        let mut places = PLACES.lock().unwrap_or_else(PoisonError::into_inner);
        let turn = places.came;
        places.came += 1;
        let waits = |places: &mut Places| places.went_in != turn || places.cpus + cpus > most;
        let mut places = CHANGED
            .wait_while(places, waits)
            .unwrap_or_else(PoisonError::into_inner);
        places.went_in += 1;
        places.cpus += cpus;
        CHANGED.notify_all();
        Self { cpus }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        PLACES.lock().unwrap_or_else(PoisonError::into_inner).cpus -= self.cpus;
        CHANGED.notify_all();
    }
}

/// The CPUs of a guest where something may go wrong only with several. Two emulated ones wait for each other wherever a program begins
/// or ends, and take nearly twice the time of one: what our programs decide for themselves is tried with one.
const CPUS: u16 = 2;

/// Runs `script` in a guest with so many CPUs, with more tools, that is not as the others. Once more after a known fault of QEMU or of
/// the guest's kernel.
fn run_in<'lab>(
    lab: &'lab Lab,
    scratch: &Scratch,
    cpus: u16,
    script: &str,
    more: impl FnOnce(Toolbox) -> Result<Toolbox, Error>,
    other: impl Fn(Guest<'lab>) -> Guest<'lab>,
) -> Result<Outcome, Error> {
    let _place = Place::take(cpus);
    let toolbox = more(Toolbox::new(lab, scratch)?)?;
    let once = || -> Result<Outcome, Error> {
        let tools = toolbox.make(160 * MIB)?;
        let root = scratch.file("root.qcow2");
        image::overlay(&root, lab.base())?;
        let disks = [
            ("root", format!("path={},backing_files=on", root.display())),
            (
                "tools",
                format!("path={},image_type=raw,readonly=on", tools.display()),
            ),
        ];
        let mut guest = Guest::new(lab)
            .cpus(cpus)
            .memory_mib(MEMORY_MIB)
            .patience(PATIENCE)
            .script(&format!("{PRELUDE}{script}"));
        let mut servers = Vec::new();
        for (name, disk) in disks {
            let socket = scratch.file(&format!("{name}.sock"));
            servers.push(Server::ringdisk(&socket, &disk)?);
            guest = guest.disk(name, &socket, 1);
        }
        let outcome = other(guest).run(scratch, "guest")?;
        for server in servers {
            server.stop()?;
        }
        Ok(outcome)
    };
    once().or_else(|failure| match failure.reason_to_begin_again() {
        Some(reason) => {
            lab::begun_again(reason, &failure.to_string());
            once()
        }
        None => Err(failure),
    })
}

/// Does `each` with every kernel, with all of them at the same time: guests wait more than they work.
fn on_each(each: impl Fn(Kernel, &Lab) -> Result<(), Error> + Sync) -> Result<(), Error> {
    let each = &each;
    thread::scope(|scope| {
        let labs = [Kernel::V6_12, Kernel::V7].map(|kernel| (kernel, lab::require_kernel(kernel)));
        let running: Vec<_> = labs
            .into_iter()
            .filter_map(|(kernel, lab)| {
                // The harness names a test's thread after it, and a test is known by that.
                let named = thread::Builder::new().name(lab::test_name());
                let spawn = |lab| named.spawn_scoped(scope, move || each(kernel, &lab));
                Some(spawn(lab?).expect("a thread"))
            })
            .collect();
        // The first to fail is told, when all have ended.
        let ended: Vec<_> = running.into_iter().map(thread::ScopedJoinHandle::join).collect();
        ended
            .into_iter()
            .try_for_each(|ended| ended.unwrap_or_else(|failure| panic::resume_unwind(failure)))
    })
}

/// Runs `script` on each kernel and hands what it said to `judge`.
fn on_both(script: &str, judge: impl Fn(Kernel, &Outcome) + Sync) -> Result<(), Error> {
    on_each_own(|_| script.to_owned(), judge)
}

/// As [`on_both`], with a script of each kernel's own: what depends on our programs alone is tried on one of them.
fn on_each_own(
    script: impl Fn(Kernel) -> String + Sync,
    judge: impl Fn(Kernel, &Outcome) + Sync,
) -> Result<(), Error> {
    on_each(|kernel, lab| {
        let scratch = Scratch::new()?;
        judge(
            kernel,
            &run_in(lab, &scratch, CPUS, &script(kernel), Ok, |guest| guest)?,
        );
        Ok(())
    })
}

/// Runs `script` on the newest kernel that is to be had, and hands what it said to `judge`: what our programs decide for themselves,
/// whatever the driver is.
fn on_newest(cpus: u16, script: &str, judge: impl Fn(Kernel, &Outcome)) -> Result<(), Error> {
    let (kernel, lab) = newest();
    let scratch = Scratch::new()?;
    judge(kernel, &run_in(&lab, &scratch, cpus, script, Ok, |guest| guest)?);
    Ok(())
}

/// The newest kernel that is to be had, and its lab.
fn newest() -> (Kernel, Lab) {
    let newer = [Kernel::V7, Kernel::V6_12].into_iter();
    let mut there = newer.filter_map(|kernel| Some((kernel, lab::require_kernel(kernel)?)));
    there.next().expect("the kernel of the lab itself")
}

/// The transports that a kernel has.
fn transports(kernel: Kernel) -> &'static [&'static str] {
    match kernel {
        Kernel::V6_12 => &["copy", "user-copy"],
        Kernel::V7 => &["copy", "user-copy", "zero-copy"],
    }
}

/// Each transport on one kernel: what a server does there is the same on all. The pairs are covered by
/// [`devices_of_every_transport_keep_their_data`] and, with servers that are killed, by [`soak`].
fn own_transports(kernel: Kernel) -> &'static [&'static str] {
    match kernel {
        Kernel::V6_12 => &["copy", "user-copy"],
        Kernel::V7 => &["zero-copy"],
    }
}

/// One transport on each kernel: how many devices there are, or what a server may do, depends on no transport.
fn own_transport(kernel: Kernel) -> &'static str {
    own_transports(kernel).last().expect("each kernel has some")
}

fn said(outcome: &Outcome) -> String {
    outcome.lines().collect::<Vec<_>>().join("\n")
}

/// Returns what `key` was said to be, which must have `text` in it.
fn told<'a>(outcome: &'a Outcome, key: &str, text: &str) -> &'a str {
    let line = outcome.value(&format!("{key} ")).unwrap_or_default();
    assert!(line.contains(text), "{key}: {line}: {}", said(outcome));
    line
}

const WORK: &str = include_str!("../guest/ublk/work.sh");

#[test]
fn devices_of_every_transport_keep_their_data() -> Result<(), Error> {
    on_both(WORK, |kernel, outcome| {
        let all = said(outcome);
        let count = |wanted: &str| outcome.lines().filter(|line| line.contains(wanted)).count();
        for &transport in transports(kernel) {
            let in_force = format!(r#""transport":"{transport}""#);
            let made = outcome.lines().filter(|line| line.starts_with("made "));
            let made = made.filter(|line| line.contains(&in_force)).count();
            let formats = if transport == "zero-copy" { 2 } else { 1 };
            assert_eq!(made, formats, "{transport} was in force: {all}");
            assert_eq!(count(&format!("stopped {transport} ")), formats, "{all}");
            assert_eq!(count(&format!("same {transport} ")), formats, "{all}");
            zero_copy::assert_in_force(transport, outcome);
        }
        assert_eq!(count("flawless q.qcow2"), transports(kernel).len() - 1, "{all}");
        assert_eq!(outcome.complaints(), Vec::<&str>::new(), "{}", outcome.console());
    })
}

/// File systems on devices of one server; who may have what, and who may remove it.
const LIFE: &str = include_str!("../guest/ublk/life.sh");

#[test]
fn devices_in_use_carry_file_systems_and_cannot_be_removed() -> Result<(), Error> {
    on_both(LIFE, |kernel, outcome| {
        let all = said(outcome);
        let value = |key: &str| outcome.value(key).unwrap_or_else(|| panic!("no {key:?}: {all}"));
        let has = |key: &str, text: &str| assert!(value(key).contains(text), "{key}: {text}: {all}");
        has("devices ", "/dev/ublkb4 /dev/ublkb5");
        for (key, text) in [
            ("locked ", "a.qcow2"),
            ("locked ", "1 ringdisk: "),
            (
                "taken ",
                "1 ringdisk: c.qcow2: ADD_DEV of /dev/ublkb4 failed (the number is taken",
            ),
            ("missing ", "1 ringdisk: cannot open none.qcow2"),
            ("nothing ", "there is no such device"),
            ("mounted ", "1 ringdisk: /dev/ublkb4 is in use (it is mounted"),
            ("opened ", "1 ringdisk: /dev/ublkb5 is in use (process"),
            ("deleted ", "0 "),
            ("life ", "0"),
            ("remembered ", "0"),
            ("background ", "/dev/ublkb0 /dev/ublkb1"),
            ("served-by ", "ringdisk"),
            ("pidfile ", "gone"),
            ("sums ", "fine"),
            ("read-only ", "1 "),
            ("all ", "0 "),
            ("left ", "0"),
            ("smaller ", "1 "),
        ] {
            has(key, text);
        }
        let list: String = value("list ").to_owned();
        assert_eq!(
            list.matches(r#""state":"live""#).count(),
            2,
            "no half-made device: {list}"
        );
        has("info ", r#""workers":1"#);
        if kernel == Kernel::V7 {
            has("info ", r#""transport":"zero-copy""#);
        } else {
            has("info ", r#""transport":"user-copy""#);
            has(
                "zero-copy ",
                "1 ringdisk: c.qcow2: this kernel's ublk driver has no zero copy (Linux 6.16)",
            );
        }
        assert_eq!(
            outcome
                .lines()
                .filter(|line| line.starts_with("trimmed "))
                .count(),
            2,
            "{all}"
        );
        assert_eq!(
            outcome
                .lines()
                .filter(|line| line.starts_with("flawless "))
                .count(),
            5,
            "{all}"
        );
        assert_eq!(value("partitions "), "/dev/ublkb0", "{all}");
        assert_eq!(value("wanted "), "/dev/ublkb0, /dev/ublkb0p1", "{all}");
        if kernel == Kernel::V7 {
            has("grown ", "0 134217728");
            assert_eq!(value("size "), "134217728", "{all}");
            has("virtual", "128 MiB");
        } else {
            has("grown ", "1 ringdisk: this kernel's ublk driver cannot");
            assert_eq!(value("size "), "67108864", "{all}");
            has("virtual", "64 MiB");
        }
        let complaints = outcome.complaints();
        assert_eq!(complaints, Vec::<&str>::new(), "{}", outcome.console());
    })
}

/// Devices of many kinds, each removed under load.
const CHURN: &str = include_str!("../guest/ublk/churn.sh");

/// Others, or the end of the server, remove devices while every tag of every queue is under way.
#[test]
fn devices_removed_under_load_leave_nothing_behind() -> Result<(), Error> {
    on_both(CHURN, |kernel, outcome| {
        let all = said(outcome);
        let count = |wanted: &str| outcome.lines().filter(|line| line.starts_with(wanted)).count();
        let rounds = transports(kernel).len() + 1;
        assert_eq!(
            count("refused 1 ringdisk: /dev/ublkb0 is in use"),
            rounds,
            "{all}"
        );
        assert_eq!(count("forced 0"), 2, "{all}");
        assert_eq!(
            (count("server 0"), count("flawless q.qcow2")),
            (rounds, rounds),
            "{all}"
        );
        assert_eq!((count("left 0"), count("remembered 0")), (1, 1), "{all}");
        let slow = |line: &&str| {
            line.split(' ')
                .nth(2)
                .and_then(|ms| ms.parse().ok())
                .unwrap_or(u64::MAX)
                > 30_000
        };
        let gone: Vec<&str> = outcome.lines().filter(|line| line.starts_with("gone ")).collect();
        assert!(!gone.iter().any(slow), "{gone:?}");
        // Whoever used them was told so; nothing else went wrong.
        let told = |line: &&&str| !(line.contains("I/O error") && line.contains("dev ublkb"));
        let complaints = outcome.complaints();
        let others: Vec<_> = complaints.iter().filter(told).collect();
        assert!(others.is_empty(), "{others:?}");
    })
}

/// Servers that are killed under load, and others that go on with their devices.
const DEATH: &str = include_str!("../guest/ublk/death.sh");

#[test]
fn io_waits_for_the_next_server_after_a_kill_without_loss() -> Result<(), Error> {
    on_both(DEATH, |kernel, outcome| {
        let all = said(outcome);
        let value = |key: &str| outcome.value(key).unwrap_or_else(|| panic!("no {key:?}: {all}"));
        let count = |wanted: &str| outcome.lines().filter(|line| line.starts_with(wanted)).count();
        for &transport in own_transports(kernel) {
            assert_eq!(count(&format!("recovered {transport} ")), 3, "{all}");
            for line in ["load {} 0", "sums {} fine", "server {} 0", "same {}"] {
                assert_eq!(count(&line.replace("{}", transport)), 1, "{line}: {all}");
            }
            // The successor does as the first one did.
            zero_copy::assert_in_force(transport, outcome);
        }
        assert!(value("unknown ").contains("there is no such device"), "{all}");
        assert!(value("wrong ").starts_with("1 "), "{all}");
        assert_eq!(
            count("living 1 "),
            3 * own_transports(kernel).len(),
            "a device that is served is left alone: {all}"
        );
        assert!(value("orphan ").starts_with("0"), "{all}");
        assert_eq!(value("left "), "0", "{all}");
        assert_eq!(outcome.complaints(), Vec::<&str>::new(), "{}", outcome.console());
    })
}
