//! Power cuts under the real binary, judged from below: QCOW2 straight on a device of dm-log-writes, which notes what the
//! kernel sent to the disk and when a FLUSH covered it. io_uring serves it as a block device that `qemu-io` works on, plain
//! system calls in `ringdisk io`. The cuts are judged on this machine, by QEMU's tools and the plan of the requests
//! ([`lab::crash`]). `make soak-crash SECONDS=…` goes on with new seeds for as long as it is told.

use std::fs;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::{CPUS, PATIENCE, on_each, run_in, said};
use lab::crash::cut::{self, Cut, Kept};
use lab::crash::log::{self, Entry};
use lab::crash::plan::Plan;
use lab::crash::{BACKING, DISK, World};
use lab::{Error, Kernel, Scratch};

/// The rounds of requests that each server gets, and the cuts of each run that are judged.
const ROUNDS: u32 = 40;
const CUTS: usize = 60;
/// The FLUSHes of each run that are judged as if they had done nothing.
const LIES: usize = 6;
/// Room for what is logged, in bytes; the file is sparse.
const LOG: u64 = 1 << 30;
/// The clusters that may leak in a cut, in bytes: no more than are replaced between two write-backs, all of the disk at
/// most.
const LEAKED: u64 = DISK;

/// The server of the image.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Way {
    /// `ringdisk ublk add`, on io_uring, by this transport.
    Ublk(&'static str),
    /// `ringdisk io`, on plain system calls.
    Syscalls,
}

/// Those of a kernel: each ring once among all.
fn ways(kernel: Kernel) -> &'static [Way] {
    match kernel {
        Kernel::V6_12 => &[Way::Ublk("user-copy"), Way::Syscalls],
        Kernel::V7 => &[Way::Ublk("zero-copy")],
    }
}

const CRASH: &str = include_str!("../../guest/ublk/crash.sh");

/// The command of the script that has one image served and worked on.
fn serve(run: &Run) -> String {
    let switch = |on: bool| if on { "on" } else { "off" };
    // A device that outlives its server has its metadata written back before it is told to be durable.
    let recovery = if run.recovery { "reissue" } else { "off" };
    let (name, direct) = (&run.name, switch(run.direct));
    match run.way {
        Way::Ublk(transport) => format!("device {name} {direct} {transport} {recovery}\n"),
        Way::Syscalls => format!("syscalls {name} {direct}\n"),
    }
}

/// One image, the requests to it, and who serves it.
struct Run {
    name: String,
    way: Way,
    direct: bool,
    recovery: bool,
    cluster: u64,
    world: World,
    plan: Plan,
    seed: u64,
}

impl Run {
    fn new(scratch: &Scratch, way: Way, number: usize, seed: u64) -> Result<Self, Error> {
        let name = format!("crash{number}");
        let cluster = [4096, 65536, 16384][(seed % 3) as usize];
        let world = World::new(scratch, &name, cluster)?;
        let plan = Plan::new(seed, DISK, ROUNDS);
        let file = scratch.file(&format!("{name}.plan"));
        fs::write(&file, plan.text()).expect("a plan");
        Ok(Self {
            name,
            way,
            direct: (seed / 3).is_multiple_of(2),
            // The other one on the other kernel.
            recovery: (seed / 6 + u64::from(way == Way::Ublk("zero-copy"))).is_multiple_of(2),
            cluster,
            world,
            plan,
            seed,
        })
    }

    /// Judges what the guest left, and tells what was judged.
    fn judge(&self, scratch: &Scratch, all: &str) -> Result<String, Error> {
        let entries = log::read(&scratch.file(&format!("{}.log", self.name)))?;
        let initial = fs::read(self.world.device()).expect("the device at first");
        let last = fs::read(scratch.file(&self.name)).expect("the device in the end");
        let about = format!(
            "seed {}, {:?}, recovery {}, direct {}, clusters of {}",
            self.seed, self.way, self.recovery, self.direct, self.cluster
        );
        // Else the log is not what happened, and cuts of it mean nothing.
        assert_eq!(cut::difference(&initial, &entries, &last), None, "{about}: {all}");
        let marks = entries.iter().filter(|entry| matches!(entry, Entry::Mark(_)));
        assert_eq!(marks.count() as u32, self.plan.marks(), "{about}: {all}");

        let whole = Cut {
            end: entries.len(),
            kept: Kept::All,
            seed: 0,
        };
        let cuts = cut::draw(&entries, CUTS, self.seed);
        let leaks = cuts.iter().chain([&whole]).map(|&cut| {
            let mark = cut::last_mark(&entries, cut.end).unwrap_or(0);
            let device = cut::device(&initial, &entries, cut);
            let judged = self.world.judge(&self.plan, &device, mark);
            judged.unwrap_or_else(|wrong| panic!("{about}: {cut:?} of {} entries: {wrong}", entries.len()))
        });
        let leaks: Vec<u64> = leaks.collect();
        let most = leaks.iter().copied().max().unwrap_or(0);
        assert!(most * self.cluster <= LEAKED, "{about}: {most} clusters leaked");
        assert_eq!(leaks.last(), Some(&0), "{about}: the server ended cleanly");
        self.refuse_broken(&initial, &entries, &about);
        Ok(format!(
            "{about}: {} requests, {} entries, {} cuts, at most {most} leaked",
            self.plan.requests(),
            entries.len(),
            cuts.len()
        ))
    }

    /// Shows that the judge can fail: on FLUSHes that did nothing, and on a log that lacks one write which a FLUSH covers.
    fn refuse_broken(&self, initial: &[u8], entries: &[Entry], about: &str) {
        let marks: Vec<usize> = (0..entries.len())
            .filter(|&index| matches!(entries[index], Entry::Mark(_)))
            .collect();
        let refuses = |device: &[u8], mark: u32| self.world.judge(&self.plan, device, mark).is_err();
        let seen: Vec<u32> = (1..self.plan.marks())
            .filter(|&mark| self.plan.is_seen(mark))
            .collect();
        assert!(seen.len() >= LIES, "{about}: {seen:?}");
        for &mark in seen.iter().step_by(seen.len() / LIES) {
            let before = Cut {
                end: marks[mark as usize - 1],
                kept: Kept::All,
                seed: 0,
            };
            let device = cut::device(initial, entries, before);
            assert!(
                refuses(&device, mark),
                "{about}: mark {mark} holds without its FLUSH"
            );
        }

        // One write need not matter: it may lower a count, or be of a cluster that was freed again.
        let end = marks[marks.len() - 1] + 1;
        let mut writes = (0..end)
            .rev()
            .filter(|&index| matches!(entries[index], Entry::Write { .. }));
        let last = self.plan.marks() - 1;
        let lost = writes.any(|lost| refuses(&cut::without(initial, &entries[..end], lost), last));
        assert!(lost, "{about}: no lost write was seen");
    }
}

/// Boots once, has each way serve an image of its own, and judges them.
fn once(kernel: Kernel, lab: &lab::Lab, seed: u64) -> Result<Vec<String>, Error> {
    let scratch = Scratch::new()?;
    let runs: Vec<Run> = ways(kernel)
        .iter()
        .enumerate()
        .map(|(number, &way)| Run::new(&scratch, way, number, seed + number as u64))
        .collect::<Result<_, _>>()?;
    let served: String = runs.iter().map(serve).collect();
    let tools = |mut tools: lab::nested::Toolbox| {
        tools = tools.file(&scratch.file(BACKING))?;
        for run in &runs {
            tools = tools.file(&scratch.file(&format!("{}.plan", run.name)))?;
        }
        Ok(tools)
    };
    let script = format!("{CRASH}{served}");
    let outcome = run_in(lab, &scratch, CPUS, &script, tools, |mut guest| {
        for run in &runs {
            let log = format!("{}.log", run.name);
            let (device, logged) = (scratch.file(&run.name), scratch.file(&log));
            fs::copy(run.world.device(), &device).expect("a device");
            let file = fs::File::create(&logged).expect("a log");
            file.set_len(LOG).expect("room for a log");
            guest = guest.raw_disk(&run.name, &device).raw_disk(&log, &logged);
        }
        guest.patience(PATIENCE)
    })?;
    let all = said(&outcome);
    let fallback = |line: &str| line.contains("using plain system calls");
    for run in &runs {
        let name = &run.name;
        assert!(all.contains(&format!("client {name} 0")), "{all}");
        let key = format!("complaint {name} ");
        let mut complaints = outcome.lines().filter(|line| line.starts_with(&key));
        match run.way {
            Way::Ublk(transport) => {
                assert_eq!(complaints.next(), None, "{all}");
                let made = outcome.value(&format!("made {name} ")).unwrap_or_default();
                assert!(made.contains(&format!(r#""transport":"{transport}""#)), "{all}");
                assert!(all.contains(&format!("server {name} 0")), "{all}");
            }
            Way::Syscalls => {
                let complaints: Vec<&str> = complaints.collect();
                assert!(!complaints.is_empty(), "io_uring is not refused: {all}");
                assert!(complaints.iter().all(|line| fallback(line)), "{all}");
            }
        }
    }
    assert_eq!(outcome.complaints(), Vec::<&str>::new(), "{}", outcome.console());
    runs.iter().map(|run| run.judge(&scratch, &all)).collect()
}

/// Runs of one `RINGDISK_CRASH_SEED` begin with the same requests and cuts; what the kernel makes of them differs.
#[test]
#[expect(
    clippy::print_stdout,
    reason = "seeds, and what was judged, are what somebody who soaks wants to know"
)]
fn power_cut_at_any_write_loses_no_flushed_data() -> Result<(), Error> {
    let number = |name: &str| -> Option<u64> { std::env::var(name).ok()?.parse().ok() };
    let seconds = number("RINGDISK_SOAK_SECONDS").unwrap_or(0);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
    let first = number("RINGDISK_CRASH_SEED").unwrap_or(now.as_secs() % 1_000_000_000);
    let begin = Instant::now();
    on_each(|kernel, lab| {
        for seed in (first..).step_by(10) {
            println!("{kernel:?}: RINGDISK_CRASH_SEED={seed}");
            for told in once(kernel, lab, seed)? {
                println!("{kernel:?}: {told}");
            }
            if begin.elapsed() >= Duration::from_secs(seconds) {
                break;
            }
        }
        Ok(())
    })
}
