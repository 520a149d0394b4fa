//! Many runs: every scenario in several orders, then seeds, on as many threads as there are CPUs.

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use crate::judge::Tally;
use crate::plan::{Case, Explore};
use crate::run::{Failure, run};
use crate::scenario::{Scenario, all};
use crate::watchdog::Watchdog;

/// In how many orders each scenario is run; the first is the order in which things were asked for.
pub const ORDERS: u64 = 4;

/// The condition on which an exploration stops.
#[derive(Clone, Copy, Debug)]
pub struct Goal {
    /// As soon as so many distinct crash states were judged, this exploration's scenarios included.
    pub states: u64,
    /// But not before so many seeds have run.
    pub seeds: u64,
    /// And at the latest at this.
    pub limit: Limit,
}

/// The most that an exploration may take.
#[derive(Clone, Copy, Debug)]
pub enum Limit {
    /// So much time.
    Elapsed(Duration),
    /// So much CPU time for each of its threads: a machine that is busy with other things does not end it early.
    Cpu(Duration),
}

impl Limit {
    /// Returns true for an exploration that began then, each of whose threads has taken so much CPU time.
    fn is_over(self, begun: Instant, cpu: Duration) -> bool {
        match self {
            Self::Elapsed(most) => begun.elapsed() >= most,
            Self::Cpu(most) => cpu >= most,
        }
    }
}

/// The CPU time that the current thread has taken.
fn cpu_time() -> Duration {
    let taken = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(
        taken.tv_sec.unsigned_abs(),
        u32::try_from(taken.tv_nsec).unwrap_or_default(),
    )
}

/// A run that failed.
#[derive(Clone, Debug)]
pub struct Failed {
    /// The source of the run.
    pub what: Source,
    /// The run.
    pub case: Case,
    /// The failure.
    pub failure: Failure,
}

/// The origin of a run.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Source {
    /// A scenario, in this order.
    Scenario(&'static str, u64),
    /// A seed whose queues ask the disk itself.
    Seed(u64),
    /// A seed whose queues are a guest's virtqueues.
    Guest(u64),
    /// A seed some of whose requests have registered pages.
    Registered(u64),
    /// A seed whose disk is a ublk device.
    Ublk(u64),
    /// A seed that frees clusters which are being read.
    Churn(u64),
    /// A seed whose disk grows by any amount.
    Growth(u64),
    /// A seed whose disk has snapshots created, applied and deleted.
    Snapshots(u64),
    /// A seed whose image has persistent bitmaps.
    Bitmaps(u64),
    /// A seed whose disk becomes smaller and larger.
    Resize(u64),
    /// A seed whose image is compacted.
    Compact(u64),
    /// A seed whose image is compacted while its disk gets other sizes and has snapshots.
    Mixed(u64),
}

impl Source {
    /// Returns the source of the run of a number. Of thirty-two numbers, eight are a guest's, two have registered pages,
    /// eight are ublk devices, three have disks that grow by any amount and one a disk that becomes smaller as well, one has an
    /// image that is compacted, one all of these, two have snapshots, two bitmaps, two free what is being read, and two ask the disk
    /// itself.
    #[must_use]
    pub fn of_number(number: u64) -> Self {
        if matches!(number % 8, 2 | 5) {
            Self::Ublk(number)
        } else if number % 16 == 9 {
            Self::Churn(number)
        } else if number % 32 == 27 {
            Self::Mixed(number)
        } else if matches!(number % 16, 6 | 11) {
            Self::Growth(number)
        } else if number % 16 == 15 {
            Self::Snapshots(number)
        } else if number % 16 == 14 {
            Self::Bitmaps(number)
        } else if number % 32 == 7 {
            Self::Resize(number)
        } else if number % 32 == 23 {
            Self::Compact(number)
        } else if number.is_multiple_of(2) {
            Self::Guest(number)
        } else if number % 4 == 3 {
            Self::Registered(number)
        } else {
            Self::Seed(number)
        }
    }

    /// The run it names; `None` for a scenario that does not exist.
    #[must_use]
    pub fn case(&self) -> Option<Case> {
        match self {
            Self::Scenario(name, order) => {
                let found = all().into_iter().find(|scenario| scenario.name == *name)?;
                Some(found.case(*order))
            }
            Self::Seed(seed) => Some(Case::draw(*seed)),
            Self::Guest(seed) => Some(Case::draw_guest(*seed)),
            Self::Registered(seed) => Some(Case::draw_registered(*seed)),
            Self::Ublk(seed) => Some(Case::draw_ublk(*seed)),
            Self::Churn(seed) => Some(Case::draw_churn(*seed)),
            Self::Growth(seed) => Some(Case::draw_growing(*seed)),
            Self::Snapshots(seed) => Some(Case::draw_snapshots(*seed)),
            Self::Bitmaps(seed) => Some(Case::draw_bitmaps(*seed)),
            Self::Resize(seed) => Some(Case::draw_resizing(*seed)),
            Self::Compact(seed) => Some(Case::draw_compacting(*seed)),
            Self::Mixed(seed) => Some(Case::draw_mixed(*seed)),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Scenario(name, order) => write!(f, "scenario {name:?}, order {order}"),
            Self::Seed(seed) => write!(f, "seed {seed}"),
            Self::Guest(seed) => write!(f, "guest {seed}"),
            Self::Registered(seed) => write!(f, "registered {seed}"),
            Self::Ublk(seed) => write!(f, "ublk {seed}"),
            Self::Churn(seed) => write!(f, "churn {seed}"),
            Self::Growth(seed) => write!(f, "growth {seed}"),
            Self::Snapshots(seed) => write!(f, "snapshots {seed}"),
            Self::Bitmaps(seed) => write!(f, "bitmaps {seed}"),
            Self::Resize(seed) => write!(f, "resize {seed}"),
            Self::Compact(seed) => write!(f, "compact {seed}"),
            Self::Mixed(seed) => write!(f, "mixed {seed}"),
        }
    }
}

/// The result of an exploration.
#[derive(Debug, Default)]
pub struct Explored {
    /// Counts of the images that were judged.
    pub tally: Tally,
    /// Seeds that were run to their end.
    pub seeds: u64,
    /// The first seed that was not run.
    pub next_seed: u64,
    /// The first failure by source, if any.
    pub failed: Option<Failed>,
    /// The CPU time that all threads took.
    pub busy: Duration,
    /// Requests answered, and FLUSHes among them.
    pub answered: u64,
    /// FLUSHes answered well.
    pub flushes: u64,
    /// Snapshots created and deleted.
    pub snapshots: u64,
}

/// Runs one scenario in one order; tells about it on one line.
pub fn explore_scenario(
    scenario: &Scenario,
    order: u64,
    tally: &mut Tally,
    say: &mut dyn FnMut(&str),
) -> Option<Failed> {
    let case = scenario.case(order);
    let before = tally.images.len();
    let outcome = run(&case, false, tally);
    let new = tally.images.len() - before;
    if order == 0 || outcome.failure.is_some() {
        let bound = if outcome.sampled > 0 {
            format!(
                "; {} of them had more than {}: so many by chance",
                outcome.sampled, scenario.all_up_to
            )
        } else {
            ", all of each".to_owned()
        };
        say(&format!(
            "{:<45} {:>4} cuts, {:>6} states{bound}; at most {} at once",
            scenario.name, outcome.cuts, new, outcome.widest
        ));
    }
    outcome.failure.map(|failure| Failed {
        what: Source::Scenario(scenario.name, order),
        case,
        failure,
    })
}

/// Runs one scenario again and again, each time with space for one op more, until it does not run out.
pub fn explore_space(scenario: &Scenario, tally: &mut Tally, say: &mut dyn FnMut(&str)) -> Option<Failed> {
    let before = tally.images.len();
    for ops in 0.. {
        let mut case = scenario.case(0);
        case.space = Some(ops);
        case.explore = Explore {
            all_up_to: 4,
            draws: 2,
        };
        let outcome = run(&case, false, tally);
        if let Some(failure) = outcome.failure {
            return Some(Failed {
                what: Source::Scenario(scenario.name, 0),
                case,
                failure,
            });
        }
        if !outcome.starved {
            let new = tally.images.len() - before;
            say(&format!(
                "{:<45} without space at each of {ops} ops: {new:>6} more states",
                scenario.name
            ));
            break;
        }
    }
    None
}

/// Runs every scenario, then seeds from `first_seed` on, until the goal is reached or something fails.
pub fn explore(
    first_seed: u64,
    goal: Goal,
    scenarios: bool,
    threads: usize,
    qemu_every: u64,
    say: &(dyn Fn(&str) + Sync),
) -> Explored {
    // Behind the orders, the runs that space ends in.
    let jobs: Vec<(Scenario, u64)> = if scenarios {
        let list = all();
        (0..=ORDERS)
            .flat_map(|order| list.iter().map(move |scenario| (scenario.clone(), order)))
            .collect()
    } else {
        Vec::new()
    };
    let next_job = AtomicU64::new(0);
    let next_seed = AtomicU64::new(first_seed);
    let states = AtomicU64::new(0);
    let stop = AtomicBool::new(false);
    let threads = u32::try_from(threads.max(1)).unwrap_or(u32::MAX);
    let begun = Instant::now();
    let total = Mutex::new(Explored::default());
    let watchdog = Watchdog::start();
    let work = |each_before: Duration| {
        let mut own = Explored::default();
        own.tally.qemu_every = qemu_every;
        while !stop.load(Ordering::Relaxed) {
            let before = own.tally.images.len();
            let job = next_job.fetch_add(1, Ordering::Relaxed);
            let failed = if let Some((scenario, order)) = jobs.get(job as usize) {
                watchdog.beat(|| format!("scenario {:?}, order {order}", scenario.name));
                if *order == ORDERS {
                    explore_space(scenario, &mut own.tally, &mut |line| say(line))
                } else {
                    explore_scenario(scenario, *order, &mut own.tally, &mut |line| say(line))
                }
            } else {
                let seeds = next_seed.load(Ordering::Relaxed) - first_seed;
                let reached = states.load(Ordering::Relaxed) >= goal.states && seeds >= goal.seeds;
                if reached || goal.limit.is_over(begun, each_before + cpu_time()) {
                    break;
                }
                let seed = next_seed.fetch_add(1, Ordering::Relaxed);
                let what = Source::of_number(seed);
                watchdog.beat(|| what.to_string());
                let case = what.case().unwrap_or_else(|| Case::draw(seed));
                let outcome = run(&case, false, &mut own.tally);
                own.seeds += 1;
                own.answered += outcome.answered;
                own.flushes += outcome.flushes;
                own.snapshots += outcome.snapshots;
                outcome.failure.map(|failure| Failed { what, case, failure })
            };
            let new = own.tally.images.len() - before;
            states.fetch_add(new as u64, Ordering::Relaxed);
            if failed.is_some() {
                own.failed = failed;
                stop.store(true, Ordering::Relaxed);
            }
        }
        watchdog.done();
        own.busy = cpu_time();
        let mut total = total.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        total.tally.add(own.tally);
        total.seeds += own.seeds;
        total.busy += own.busy;
        total.answered += own.answered;
        total.flushes += own.flushes;
        total.snapshots += own.snapshots;
        if total.failed.is_none() {
            total.failed = own.failed;
        }
    };
    let mut each = Duration::ZERO;
    loop {
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| work(each));
            }
        });
        let total = total.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        // Threads that met the same states have each counted them.
        let distinct = total.tally.images.len() as u64;
        each = total.busy / threads;
        if total.failed.is_some() || distinct >= goal.states || goal.limit.is_over(begun, each) {
            break;
        }
        states.store(distinct, Ordering::Relaxed);
    }
    let mut explored = total
        .into_inner()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    explored.next_seed = next_seed.into_inner();
    explored
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine that is busy with other things keeps a thread waiting, as a sleep does.
    #[test]
    fn limit_of_cpu_time_does_not_count_waiting() {
        let begun = Instant::now();
        let most = Duration::from_secs(1);
        std::thread::spawn(move || {
            std::thread::sleep(most);
            assert!(!Limit::Cpu(most).is_over(begun, cpu_time()));
            assert!(Limit::Elapsed(most).is_over(begun, cpu_time()));
            assert!(Limit::Cpu(most).is_over(begun, most + cpu_time()));
        })
        .join()
        .expect("a thread");
    }
}
