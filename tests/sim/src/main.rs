//! The command line of the explorer: see `ringdisk-sim --help`.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a command line program")]

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime};

use block::canary::Rule;
use clap::{Parser, Subcommand};
use ringdisk_sim::explore::{Explored, Failed, Goal, Limit, Source, explore};
use ringdisk_sim::judge::Tally;
use ringdisk_sim::plan::Case;
use ringdisk_sim::run::{Failure, run};
use ringdisk_sim::shrink::shrink;
use ringdisk_sim::watchdog::{STUCK, Watchdog};
use ringdisk_sim::{kept_lines, replay, scenario};

/// Explores what faults and power cuts can do to images, in a simulated world.
#[derive(Debug, Parser)]
struct Arguments {
    #[command(subcommand)]
    command: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Runs kept lines, every scenario, and seeds until enough distinct crash states were judged: half of them of the same seeds
    /// each time, half of new ones.
    Explore {
        /// The number of distinct crash states to judge.
        #[arg(long, default_value_t = 200_000)]
        states: u64,
        /// The least number of seeds to run.
        #[arg(long, default_value_t = 200)]
        seeds: u64,
        /// The first of the new seeds; drawn from the clock by default.
        #[arg(long)]
        from: Option<u64>,
        /// The most seconds of CPU time for each thread.
        #[arg(long, default_value_t = 600)]
        seconds: u64,
        /// The number of threads; one for each CPU by default.
        #[arg(long)]
        threads: Option<usize>,
        /// Fail unless so many states were judged per second and thread.
        #[arg(long)]
        rate: Option<u64>,
    },
    /// Runs seeds and lists every one that fails, without looking for shorter runs.
    Survey {
        /// The first seed.
        #[arg(long, default_value_t = 1)]
        from: u64,
        /// The number of seeds.
        #[arg(long, default_value_t = 1000)]
        seeds: u64,
        /// The kind of all runs: `seed`, `guest`, `registered`, `ublk`, `churn`, `growth`, `snapshots`,
        /// `bitmaps`, `resize`, `compact` or `mixed`; by default each seed's number decides.
        #[arg(long)]
        kind: Option<String>,
    },
    /// Goes on from the seed after the last that was ever run.
    Soak {
        /// The time to run, in seconds.
        #[arg(long, default_value_t = 60)]
        seconds: u64,
        /// The file that keeps the next seed.
        #[arg(long, default_value = "target/soak/next-seed")]
        state: PathBuf,
        /// The number of threads; one for each CPU by default.
        #[arg(long)]
        threads: Option<usize>,
    },
    /// Runs one line again and tells what happens.
    Replay {
        /// `seed N …`, `guest N …`, `registered N …`, `ublk N …`, `churn N …`, `growth N …`, `snapshots N …`, `bitmaps N …`,
        /// `resize N …`, `compact N …`, `mixed N …` or `scenario NAME order N …`, as a failure prints it.
        #[arg(required = true)]
        line: Vec<String>,
        /// Print what happens on the disk.
        #[arg(long)]
        trace: bool,
        /// Do not look for a shorter failing run.
        #[arg(long)]
        as_is: bool,
    },
    /// Explores new seeds with nothing broken, then breaks each rule on purpose and demands that it is seen (a build with the
    /// feature `canary`).
    Canaries {
        /// The number of distinct crash states to judge with nothing broken.
        #[arg(long, default_value_t = 40_000)]
        states: u64,
        /// The most seeds for each rule; the default takes about 40 seconds for a rule that is not detected.
        #[arg(long, default_value_t = 1000)]
        seeds: u64,
    },
    /// Breaks one rule in this process.
    #[command(hide = true)]
    Canary {
        /// The name of the rule.
        rule: String,
        /// The most seeds.
        #[arg(long)]
        seeds: u64,
    },
}

fn main() -> ExitCode {
    let done = match Arguments::parse().command {
        Task::Explore {
            states,
            seeds,
            from,
            seconds,
            threads,
            rate,
        } => {
            let goal = Goal {
                states: states / 2,
                seeds: seeds / 2,
                limit: Limit::Cpu(Duration::from_secs(seconds / 2)),
            };
            run_kept()
                && explore_once("same", 1, goal, true, threads, rate)
                && explore_once("new", from.unwrap_or_else(new_seed), goal, false, threads, rate)
        }
        Task::Survey { from, seeds, kind } => survey(from, seeds, kind.as_deref()),
        Task::Soak {
            seconds,
            state,
            threads,
        } => soak(Duration::from_secs(seconds), &state, threads),
        Task::Replay { line, trace, as_is } => replay_line(&line.join(" "), trace, as_is),
        Task::Canaries { states, seeds } => canaries(states, seeds),
        Task::Canary { rule, seeds } => return canary(&rule, seeds),
    };
    if done {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn cpus(threads: Option<usize>) -> usize {
    threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// The commit of the working folder.
fn commit() -> String {
    let output = Command::new("git")
        .args(["describe", "--always", "--dirty", "--abbrev=12"])
        .output();
    output.ok().map_or_else(
        || "unknown".to_owned(),
        |output| String::from_utf8_lossy(&output.stdout).trim().to_owned(),
    )
}

fn run_kept() -> bool {
    let mut count = 0;
    for line in kept_lines() {
        match replay::parse(line) {
            Err(error) => {
                eprintln!("FAILED: {error}");
                return false;
            }
            Ok((source, case)) => {
                count += 1;
                if let Some(failure) = run(&case, false, &mut Tally::default()).failure {
                    report(&Failed {
                        what: source,
                        case,
                        failure,
                    });
                    return false;
                }
            }
        }
    }
    println!("kept: {count} runs that failed once do not fail");
    true
}

fn survey(from: u64, seeds: u64, kind: Option<&str>) -> bool {
    let watchdog = Watchdog::start();
    let mut failed = 0;
    for seed in from..from + seeds {
        let line = match kind {
            Some(kind) => format!("{kind} {seed}"),
            None => Source::of_number(seed).to_string(),
        };
        let (source, case) = match replay::parse(&line) {
            Ok(parsed) => parsed,
            Err(error) => {
                eprintln!("{error}");
                return false;
            }
        };
        watchdog.beat(|| source.to_string());
        if let Some(failure) = run(&case, false, &mut Tally::default()).failure {
            failed += 1;
            println!("{source}: {failure}");
        }
    }
    println!("{failed} of {seeds} seeds fail");
    failed == 0
}

/// The first of as many seeds as any run takes, by the clock: past those that `soak` counts through.
fn new_seed() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(1 << 40, |now| now.as_secs() << 16)
}

fn explore_once(
    which: &str,
    from: u64,
    goal: Goal,
    scenarios: bool,
    threads: Option<usize>,
    rate: Option<u64>,
) -> bool {
    let threads = cpus(threads);
    if scenarios {
        println!(
            "scenarios: every cut, every subset up to {} states (then so many by chance), {} orders each",
            scenario::ALL_UP_TO,
            ringdisk_sim::explore::ORDERS
        );
    }
    println!("seeds: the {which} ones, from {from} on");
    let begun = Instant::now();
    let explored = explore(from, goal, scenarios, threads, QEMU_EVERY, &|line| {
        println!("  {line}")
    });
    let took = begun.elapsed();
    summary(&explored, from, took);
    if let Some(failed) = &explored.failed {
        report(failed);
        return false;
    }
    let states = explored.tally.images.len() as u64;
    if states < goal.states {
        eprintln!(
            "FAILED: {states} distinct crash states in {took:.0?} ({:.0?} of CPU time), expected {}",
            explored.busy, goal.states
        );
        return false;
    }
    let reached = per_second(&explored);
    if rate.is_some_and(|rate| reached < rate) {
        eprintln!("FAILED: {reached} crash states per second and thread, expected {rate:?}");
        return false;
    }
    true
}

/// Of so many crash states QEMU is asked about one.
const QEMU_EVERY: u64 = 1009;

fn per_second(explored: &Explored) -> u64 {
    (explored.tally.judged as f64 / explored.busy.as_secs_f64().max(1e-9)) as u64
}

fn summary(explored: &Explored, from: u64, took: Duration) {
    println!(
        "explored: {} distinct crash states (judged {} times), seeds {from}..{}, {} requests, {} FLUSHes, in {took:.1?}",
        explored.tally.images.len(),
        explored.tally.judged,
        explored.next_seed,
        explored.answered,
        explored.flushes,
    );
    println!(
        "explored: {} per second and thread; {} images written to again after the cut, {} cut again then, {} with leaks \
         repaired, {} with snapshots ({} snapshots created, applied and deleted), {} held against qemu-img",
        per_second(explored),
        explored.tally.resumed,
        explored.tally.cut_again,
        explored.tally.mended,
        explored.tally.with_snapshots,
        explored.snapshots,
        explored.tally.asked_qemu,
    );
    let bits = explored.tally.bitmaps;
    println!(
        "explored: {} bitmaps held against what has changed, with {} bits, {} of them without a change; {} in use",
        bits.trusted, bits.set, bits.extra, bits.in_use
    );
}

/// The command that runs this build of the explorer.
const AGAIN: &str = if cfg!(feature = "assertions") {
    "cargo run --release -p ringdisk-sim --features assertions,canary --"
} else {
    "cargo run --release -p ringdisk-sim --"
};

/// Tells about a failure: the shortest run that still fails, and how to see it again.
fn report(failed: &Failed) {
    eprintln!("FAILED: {} {}", failed.what, failed.failure);
    eprintln!("  commit:  {}", commit());
    eprintln!(
        "  again:   {AGAIN} replay {}",
        replay::line_of(&failed.what, &failed.case)
    );
    eprintln!("  looking for a shorter one...");
    let (case, failure) = shrink(&failed.case, &failed.failure, Duration::from_secs(60));
    tell(&failed.what, &case, &failure);
}

fn tell(source: &Source, case: &Case, failure: &Failure) {
    let line = replay::line_of(source, case);
    eprintln!("SHORTEST: {failure}");
    eprintln!("  {:?}", case.shape);
    eprintln!("  {:?}", case.profile);
    if let Some(virtio) = &case.virtio {
        eprintln!("  {virtio:?}");
    }
    if let Some(ublk) = &case.ublk {
        eprintln!("  {ublk:?}");
    }
    for planned in &case.plan {
        eprintln!("    {planned}");
    }
    let outcome = run(case, true, &mut Tally::default());
    let skip = outcome.trace.len().saturating_sub(120);
    if skip > 0 {
        eprintln!("  ({skip} events before)");
    }
    for event in &outcome.trace[skip..] {
        eprintln!("  {event}");
    }
    eprintln!("  again:   {AGAIN} replay --as-is {line}");
    eprintln!("  keep it: add this line to tests/sim/seeds.txt: {line}");
}

fn replay_line(line: &str, trace: bool, as_is: bool) -> bool {
    let (source, case) = match replay::parse(line) {
        Ok(parsed) => parsed,
        Err(error) => {
            eprintln!("{error}");
            return false;
        }
    };
    let mut tally = Tally::default();
    let outcome = run(&case, trace, &mut tally);
    if trace {
        for event in &outcome.trace {
            println!("{event}");
        }
    }
    println!(
        "{source}: {} cuts, {} crash states, {} requests, trace {:016x}",
        outcome.cuts,
        tally.images.len(),
        outcome.answered,
        outcome.trace_hash
    );
    match outcome.failure {
        None => println!("it does not fail"),
        Some(failure) if as_is => tell(&source, &case, &failure),
        Some(failure) => {
            report(&Failed {
                what: source,
                case,
                failure,
            });
            return false;
        }
    }
    true
}

fn soak(time: Duration, state: &Path, threads: Option<usize>) -> bool {
    // Seeds below are those of `explore`.
    const FIRST: u64 = 1_000_000;
    let from = std::fs::read_to_string(state)
        .ok()
        .and_then(|text| text.trim().parse().ok());
    let from = from.unwrap_or(FIRST);
    let goal = Goal {
        states: u64::MAX,
        seeds: 0,
        limit: Limit::Elapsed(time),
    };
    let begun = Instant::now();
    let explored = explore(from, goal, false, cpus(threads), 20_011, &|line| {
        println!("  {line}")
    });
    summary(&explored, from, begun.elapsed());
    if let Some(failed) = &explored.failed {
        report(failed);
        return false;
    }
    let folder = state.parent().map_or(Ok(()), std::fs::create_dir_all);
    if let Err(error) = folder.and_then(|()| std::fs::write(state, explored.next_seed.to_string())) {
        eprintln!("cannot keep the next seed in {}: {error}", state.display());
        return false;
    }
    true
}

#[cfg(feature = "canary")]
fn canary(rule: &str, seeds: u64) -> ExitCode {
    use ringdisk_sim::canaries::{Hunted, find, hunt};
    let Some(found) = find(rule) else {
        eprintln!("there is no rule {rule:?}");
        return ExitCode::FAILURE;
    };
    match hunt(found, seeds) {
        Hunted::Seen(seed, what) => {
            println!("{seed} {what}");
            ExitCode::SUCCESS
        }
        Hunted::NotSeen(other) => {
            eprintln!("in {seeds} seeds; what failed otherwise: {other:?}");
            ExitCode::FAILURE
        }
        Hunted::Unsound(what) => {
            eprintln!("; with nothing broken fails {what}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(not(feature = "canary"))]
fn canary(_rule: &str, _seeds: u64) -> ExitCode {
    eprintln!("this build breaks no rules: see `make canaries`");
    ExitCode::FAILURE
}

/// Breaks each rule, as many at a time as there are CPUs.
fn canaries(states: u64, seeds: u64) -> bool {
    if !cfg!(feature = "canary") {
        eprintln!("this build breaks no rules: see `make canaries`");
        return false;
    }
    // Only this build kills servers between two stores, and without a rule broken none of that may be seen.
    println!("canaries: nothing is broken, and servers are killed between two stores");
    let goal = Goal {
        states,
        seeds: 150,
        limit: Limit::Cpu(Duration::from_secs(600)),
    };
    if !explore_once("new", new_seed(), goal, false, None, None) {
        return false;
    }
    let (seen, next) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..cpus(None) {
            scope.spawn(|| {
                while let Some(&rule) = Rule::ALL.get(next.fetch_add(1, Ordering::Relaxed)) {
                    seen.fetch_add(usize::from(is_seen(rule, seeds)), Ordering::Relaxed);
                }
            });
        }
    });
    let seen = seen.into_inner();
    println!(
        "canaries: {seen} of {} rules broken on purpose were seen",
        Rule::ALL.len()
    );
    seen == Rule::ALL.len()
}

/// Breaks a rule in a process of its own. Returns true if that was seen.
fn is_seen(rule: Rule, seeds: u64) -> bool {
    // This very build: another one may take its file's place meanwhile.
    let mut command = Command::new("/proc/self/exe");
    command.args(["canary", rule.name(), "--seeds", &seeds.to_string()]);
    if rule == Rule::LockAcrossAwait {
        // The one rule that stops the thread it is broken on.
        command.env("RINGDISK_SIM_PATIENCE", "20");
    }
    let output = match command.output() {
        Ok(output) => output,
        Err(error) => {
            eprintln!("cannot start this program again: {error}");
            return false;
        }
    };
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let complained = String::from_utf8_lossy(&output.stderr).into_owned();
    let (complained, name) = (complained.trim(), rule.name());
    match output.status.code() {
        Some(0) => {
            let (seed, what) = said.trim().split_once(' ').unwrap_or(("?", ""));
            println!("canary {name:<28} seen in {seed} seeds: {what}");
            true
        }
        Some(STUCK) if rule == Rule::LockAcrossAwait && ends_unbroken(complained) => {
            println!("canary {name:<28} seen: {complained}");
            true
        }
        _ => {
            eprintln!("FAILED: canary {name} NOT seen: {} {complained}", output.status);
            false
        }
    }
}

/// Returns true if the run that a stopped process complained of (`FAILED: KIND NUMBER with …`) does not fail with nothing broken.
fn ends_unbroken(complaint: &str) -> bool {
    let line: Vec<&str> = complaint.split_whitespace().skip(1).take(2).collect();
    let watchdog = Watchdog::start();
    watchdog.beat(|| line.join(" "));
    let parsed = replay::parse(&line.join(" "));
    let failure = parsed.map(|(_, case)| run(&case, false, &mut Tally::default()).failure);
    matches!(failure, Ok(None))
}
