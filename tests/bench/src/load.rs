//! The load that others put on this machine. A figure taken meanwhile decides nothing.

use std::fs;
use std::io;
use std::time::Duration;

/// The time of a look.
const MOMENT: Duration = Duration::from_millis(600);
/// Looks until one finds the machine quiet: what the last row left to do, such as discards of its images, soon ends.
const LOOKS: u32 = 4;
/// The CPUs that others may use while we sleep.
const OTHERS_MAX: f64 = 0.15;
/// The CPUs that the host may take from this machine while we measure.
const STEAL_MAX: f64 = 0.1;

/// The CPU time of this machine since it was started, in ticks of all CPUs together.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Times {
    cpus: f64,
    all: f64,
    busy: f64,
    steal: f64,
}

impl Times {
    fn now() -> io::Result<Self> {
        let text = fs::read_to_string("/proc/stat")?;
        Self::parse(&text).ok_or_else(|| io::Error::other("/proc/stat has no line of CPU times"))
    }

    /// Reads `cpu user nice system idle iowait irq softirq steal …`; guests' time is part of user's.
    fn parse(stat: &str) -> Option<Self> {
        let of_cpu = |line: &&str| line.starts_with("cpu") && !line.starts_with("cpu ");
        let cpus = stat.lines().filter(of_cpu).count();
        let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
        let ticks: Vec<f64> = line
            .split_ascii_whitespace()
            .map_while(|word| word.parse().ok())
            .collect();
        let [user, nice, system, idle, waiting, irq, soft_irq, steal] = *ticks.first_chunk()?;
        let busy = user + nice + system + irq + soft_irq;
        Some(Self {
            cpus: cpus.max(1) as f64,
            all: busy + idle + waiting + steal,
            busy,
            steal,
        })
    }

    /// The CPUs that were busy since `before`, and those that the host took.
    fn since(&self, before: &Self) -> (f64, f64) {
        let all = (self.all - before.all).max(1.0);
        let cpus = |ticks: f64| ticks.max(0.0) / all * self.cpus;
        (cpus(self.busy - before.busy), cpus(self.steal - before.steal))
    }
}

/// Watches the load of others between measurements.
#[derive(Debug)]
pub(crate) struct Watch {
    /// The times when the last look ended.
    last: Times,
}

impl Watch {
    /// Starts watching.
    ///
    /// # Errors
    ///
    /// If the kernel does not tell CPU times.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { last: Times::now()? })
    }

    /// Sleeps a moment, and returns what others did then, if that is too much to measure beside; or what the host took since the last
    /// look. To be called while no process of ours runs.
    ///
    /// # Errors
    ///
    /// If the kernel does not tell CPU times.
    pub(crate) fn look(&mut self) -> io::Result<Option<String>> {
        let mut before = Times::now()?;
        let (_, stolen) = before.since(&self.last);
        let mut found = None;
        for _ in 0..LOOKS {
            std::thread::sleep(MOMENT);
            let now = Times::now()?;
            let (busy, steal) = now.since(&before);
            before = now;
            found = too_much(busy + steal, now.cpus);
            if found.is_none() {
                break;
            }
        }
        self.last = before;
        Ok(found.or_else(|| too_much_stolen(stolen, before.cpus)))
    }
}

fn too_much(others: f64, cpus: f64) -> Option<String> {
    (others > OTHERS_MAX).then(|| {
        format!(
            "the machine is busy: others use {others:.2} of {cpus} CPUs, {OTHERS_MAX} at most may be used"
        )
    })
}

fn too_much_stolen(stolen: f64, cpus: f64) -> Option<String> {
    (stolen > STEAL_MAX).then(|| {
        format!(
            "the machine is busy: its host took {stolen:.2} of {cpus} CPUs, {STEAL_MAX} at most may be taken"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};

    #[test]
    fn busy_and_stolen_time_are_shares_of_the_time_between_two_looks() -> io::Result<()> {
        let stat = |line: &str| {
            let text = format!("cpu  {line}\ncpu0 1 2\ncpu1 1 2\nintr 5\n");
            Times::parse(&text).ok_or_else(|| io::Error::other(text))
        };
        let before = stat("100 0 50 1000 20 5 5 10 3 0")?;
        // 200 ticks on: 60 busy, 40 stolen, 90 idle and 10 waiting for a disk.
        let after = stat("140 0 60 1090 30 10 10 50 3 0")?;
        let (busy, steal) = after.since(&before);
        assert!((busy - 0.6).abs() < 1e-9, "{busy} of two CPUs");
        assert!((steal - 0.4).abs() < 1e-9, "{steal} of two CPUs");
        assert_eq!(after.since(&after), (0.0, 0.0));
        assert_eq!(Times::parse("intr 5\n"), None);
        Ok(())
    }

    #[test]
    fn bounds_of_load_are_named_with_what_was_found() {
        assert_eq!(too_much(0.15, 2.0), None);
        assert!(too_much(0.5, 2.0).is_some_and(|reason| reason.contains("others use 0.50 of 2 CPUs")));
        assert_eq!(too_much_stolen(0.1, 2.0), None);
        assert!(too_much_stolen(0.2, 2.0).is_some_and(|reason| reason.contains("took 0.20 of 2 CPUs")));
    }

    /// A process that computes until it is dropped.
    struct Spinning(Child);

    impl Drop for Spinning {
        fn drop(&mut self) {
            // Both fail only if it is gone.
            let _gone = self.0.kill();
            let _reaped = self.0.wait();
        }
    }

    #[test]
    fn look_finds_a_process_that_computes() -> io::Result<()> {
        let mut watch = Watch::new()?;
        let _spinning = Spinning(Command::new("sh").args(["-c", "while :; do :; done"]).spawn()?);
        assert!(
            watch
                .look()?
                .is_some_and(|reason| reason.contains("the machine is busy"))
        );
        Ok(())
    }
}
