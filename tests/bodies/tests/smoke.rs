//! Each body over some thousands of inputs of fixed seeds.
//!
//! `BODY_CASES=n` runs so many of each, `BODY_CASE=n` that one alone.

#![expect(
    clippy::print_stdout,
    reason = "how far cases came is what a reader of the log wants to know"
)]

use std::collections::BTreeMap;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use ringdisk_bodies::inputs::Inputs;
use ringdisk_bodies::{Body, body};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The longest time for one case, on a machine that is busy with other things.
const TIME_MAX: Duration = Duration::from_secs(60);

/// The address space of this process: what allocates as a field of its input says ends it.
const ADDRESS_SPACE_BYTES: u64 = 3 << 30;

fn limit_memory() {
    let hard = getrlimit(Resource::As).maximum;
    let limit = Rlimit {
        current: Some(ADDRESS_SPACE_BYTES),
        maximum: hard,
    };
    setrlimit(Resource::As, limit).expect("a smaller limit");
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

/// Runs cases in a thread, which tells before each what it will do: one that does not end is known by its number.
fn run(body: &'static Body) {
    limit_memory();
    let (tell, told) = channel();
    let cases = match number("BODY_CASE") {
        Some(case) => case..case + 1,
        None => 0..number("BODY_CASES").unwrap_or(body.cases),
    };
    let begin = Instant::now();
    let worker = std::thread::spawn({
        let cases = cases.clone();
        move || {
            let inputs = Inputs::new(body);
            let mut reached = BTreeMap::new();
            for case in cases {
                tell.send(case).expect("somebody listens");
                *reached.entry((body.run)(&inputs.get(case))).or_insert(0_u64) += 1;
            }
            reached
        }
    });
    let mut last = 0;
    loop {
        match told.recv_timeout(TIME_MAX) {
            Ok(case) => last = case,
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => panic!("{}: case {last} does not end", body.name),
        }
    }
    let name = body.name;
    let reached = worker.join().unwrap_or_else(|_| {
        panic!(
            "{name}: case {last} fails; BODY_CASE={last} cargo test -p ringdisk-bodies --test smoke {name}"
        )
    });
    let seconds = begin.elapsed().as_secs_f64();
    println!(
        "{name}: {} cases in {seconds:.1} s: {reached:?}",
        cases.end - cases.start
    );
    if number("BODY_CASE").is_none() && number("BODY_CASES").is_none() {
        for (label, least) in body.reaches {
            let share = reached.get(label).unwrap_or(&0) * 100_000 / body.cases;
            assert!(
                share >= *least,
                "{name}: only {share} of 100,000 cases came to {label:?}, not {least}: {reached:?}"
            );
        }
    }
}

macro_rules! smoke {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            run(body(stringify!($name)));
        })*

        #[test]
        fn every_body_is_run() {
            let run = [$(stringify!($name)),*];
            let all: Vec<&str> = ringdisk_bodies::BODIES.iter().map(|body| body.name).collect();
            assert_eq!(all, run);
        }
    };
}

smoke! { header extensions luks tables l2_entry check whole mutated model virtqueue rings vhost_user differential disk_config }
