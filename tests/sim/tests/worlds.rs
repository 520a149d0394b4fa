//! Runs that `cargo test` makes by itself: few, and not optimised. `make test` explores many more.

use ringdisk_sim::explore::Source;
use ringdisk_sim::judge::Tally;
use ringdisk_sim::run::run;
use ringdisk_sim::{kept_lines, replay, scenario};

/// Two runs of one seed are the same to the last event and the last crash state.
#[test]
fn a_seed_gives_the_same_trace_and_the_same_crash_states_every_time() {
    for seed in 500..512 {
        let case = Source::of_number(seed).case().expect("a number has a run");
        let (mut first, mut second) = (Tally::default(), Tally::default());
        let one = run(&case, true, &mut first);
        // Memory is elsewhere the second time, and must not matter.
        let _shift: Vec<Vec<u8>> = (1..200).map(|n| vec![0; n * 37]).collect();
        let two = run(&case, true, &mut second);
        assert!(one.failure.is_none(), "seed {seed}: {:?}", one.failure);
        assert_eq!(one.trace_hash, two.trace_hash, "seed {seed}");
        assert_eq!(one.trace, two.trace, "seed {seed}");
        assert_eq!(first.images, second.images, "seed {seed}");
        assert!(!one.trace.is_empty() && !first.images.is_empty());
    }
}

#[test]
fn runs_that_failed_once_do_not_fail_again() {
    for line in kept_lines() {
        let (_, case) = replay::parse(line).unwrap_or_else(|error| panic!("{error}"));
        let failure = run(&case, false, &mut Tally::default()).failure;
        assert!(failure.is_none(), "{line}: {failure:?}");
    }
}

/// Each kind of metadata change, in the order it was asked for, at every step.
#[test]
fn every_scenario_survives_a_cut_at_every_step() {
    for mut scenario in scenario::all() {
        scenario.all_up_to = 16;
        let mut tally = Tally::default();
        let outcome = run(&scenario.case(0), false, &mut tally);
        assert!(
            outcome.failure.is_none(),
            "{}: {:?}",
            scenario.name,
            outcome.failure
        );
        assert!(outcome.cuts > 3, "{}: only {} cuts", scenario.name, outcome.cuts);
    }
}
