//! The instructions of one request on each hot path, and a bound for each: `make counts`.
//!
//! A path runs on the null ring: what is counted is ours alone, from a request to its answer. valgrind counts, so that the figures do
//! not depend on the machine's load or speed, and a change that makes a path longer is seen at once. They do depend on the compiler
//! (rustc 1.95 for the bounds) and on the profile, which is that of the released binary.
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a program that prints results"
)]

mod callgrind;
mod channel;
mod guest;
mod paths;

use std::io;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use guest::BATCH;
use paths::{PATHS, Path};

fn main() -> ExitCode {
    if let Some((name, rounds)) = callgrind::counted() {
        let path = PATHS.iter().find(|path| path.name == name);
        let mut round = (path.expect("a path of that name").start)();
        (0..rounds).for_each(|_| round());
        return ExitCode::SUCCESS;
    }
    let names: Vec<String> = std::env::args().skip(1).collect();
    let wanted = |path: &&Path| names.is_empty() || names.iter().any(|name| name == path.name);
    let wanted: Vec<&Path> = PATHS.iter().filter(wanted).collect();
    if wanted.is_empty() {
        eprintln!("no path has such a name");
        return ExitCode::FAILURE;
    }
    let verdicts: Vec<_> = (wanted.iter().zip(count(&wanted)))
        .map(|(path, counted)| {
            (
                path.name,
                counted.map(|count| verdict(count, path.instructions_max)),
            )
        })
        .collect();
    let mut kept = true;
    for (name, verdict) in verdicts {
        match verdict {
            Ok(Ok(text)) => println!("{name:<28} {text}"),
            Ok(Err(text)) => {
                eprintln!("{name:<28} {text}");
                kept = false;
            }
            Err(error) => {
                eprintln!("{name}: {error}");
                kept = false;
            }
        }
    }
    if kept {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Counts the instructions of one request on each path, on as many paths at a time as there are CPUs.
fn count(paths: &[&Path]) -> Vec<io::Result<f64>> {
    let next = AtomicUsize::new(0);
    let counts: Vec<_> = paths
        .iter()
        .map(|_| Mutex::new(Err(io::Error::other("not counted"))))
        .collect();
    let threads = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((path, count)) = {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    paths.get(index).zip(counts.get(index))
                } {
                    let counted =
                        callgrind::per_round(path.name, path.rounds).map(|count| count / f64::from(BATCH));
                    *count.lock().expect("no holder panics") = counted;
                }
            });
        }
    });
    let counts = counts.into_iter();
    counts
        .map(|count| count.into_inner().expect("no holder panics"))
        .collect()
}

/// Says how a count stands to its bound.
///
/// # Errors
///
/// If it is above it.
fn verdict(count: f64, bound: f64) -> Result<String, String> {
    let text = format!("{count:>9.1} instructions, of at most {bound}");
    if count > bound {
        return Err(format!(
            "{text}: {:.1} % too many. A path that must be longer gets another bound in tests/counts/src/paths.rs",
            (count / bound - 1.0) * 100.0
        ));
    }
    // A bound far above would let the path grow again.
    let room = if count < 0.9 * bound {
        "; the bound can be lowered"
    } else {
        ""
    };
    Ok(text + room)
}

#[cfg(test)]
mod tests {
    use std::alloc::System;

    use simulator::memory::{GuardAlloc, allocations};

    use super::*;

    #[global_allocator]
    static ALLOCATOR: GuardAlloc<System> = GuardAlloc(System);

    /// A request whose mapping is cached allocates nothing on its way, from the second on.
    #[test]
    fn paths_that_repeat_for_ever_allocate_nothing() {
        let repeating = PATHS.iter().filter(|path| path.rounds == paths::MANY);
        for path in repeating {
            let mut round = (path.start)();
            (0..8).for_each(|_| round());
            let before = allocations();
            (0..64).for_each(|_| round());
            assert_eq!(allocations() - before, 0, "{}", path.name);
        }
    }

    #[test]
    fn count_above_its_bound_fails() {
        assert!(verdict(100.0, 100.0).is_ok());
        assert!(verdict(100.1, 100.0).is_err_and(|text| text.contains("0.1 % too many")));
        assert!(verdict(89.0, 100.0).is_ok_and(|text| text.contains("can be lowered")));
    }

    #[test]
    fn paths_have_names_of_their_own_and_rounds_to_subtract() {
        for (index, path) in PATHS.iter().enumerate() {
            assert!(
                PATHS[..index].iter().all(|other| other.name != path.name),
                "{}",
                path.name
            );
            assert!(path.rounds[0] < path.rounds[1], "{}", path.name);
        }
    }

    /// Each path answers its requests well; that is asserted on the way.
    #[test]
    fn every_path_runs_its_rounds() {
        for path in &PATHS {
            let mut round = (path.start)();
            (0..path.rounds[1]).for_each(|_| round());
        }
    }
}
