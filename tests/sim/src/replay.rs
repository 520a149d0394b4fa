//! A run as one line of text, which runs it again: a failure prints it, and the file of kept seeds holds such lines.
//!
//! `seed N` is the run of that seed, `guest N` one whose queues are a guest's virtqueues, `registered N` one some of
//! whose requests have registered pages, `ublk N` one whose disk is a ublk device, `churn N` one that frees what is being
//! read, `growth N` one whose disk grows by any amount, `snapshots N` one whose disk has snapshots created, applied and
//! deleted, `bitmaps N` one whose image has persistent bitmaps, `resize N` one whose disk becomes smaller and
//! larger, `compact N` one whose image is compacted, `mixed N` one whose image is compacted while its disk gets other sizes and has
//! snapshots.
//! `seed N schedule S plan A,B,C` is what is left of it after shrinking: only those requests of the plan (by
//! number, from zero), with things in the order of `S`. A shortened run may also have `lanes N`, `space N` (how many ops
//! find space), `plain NAME,NAME` (what a guest, or a device, does without), `calm NAME,NAME` (faults that are off),
//! `sectors A:N` (request `A` is about `N` sectors) and `look ALL,DRAWS` (which crash states are looked at).
//! `scenario NAME order N` is a scenario.

use std::fmt::Write as _;

use simulator::Profile;
use virtio_devices::ublk::{Recovery, Transport};

use crate::explore::Source;
use crate::plan::{Case, Explore, Quiesce, Ublk, Virtio};
use crate::scenario;

/// A line that is not one of ours.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{line:?}: {problem}")]
pub struct BadLine {
    line: String,
    problem: String,
}

/// A habit of disks by name, and how to switch it off.
type Fault = (&'static str, fn(&mut Profile));

/// Everything that can be switched off.
pub(crate) const FAULTS: [Fault; 15] = [
    ("reorder", |profile| profile.reorder = false),
    ("piecewise", |profile| profile.piecewise = 0),
    ("linger", |profile| profile.linger = 0),
    ("late", |profile| profile.late = 0),
    ("late_reads", |profile| profile.late_reads = 0),
    ("short", |profile| profile.short = 0),
    ("again", |profile| profile.again = 0),
    ("cancel", |profile| profile.cancel = 0),
    ("read_error", |profile| profile.read_error = 0),
    ("write_error", |profile| profile.write_error = 0),
    ("sync_error", |profile| profile.sync_error = 0),
    ("allocate_error", |profile| profile.allocate_error = 0),
    ("no_space", |profile| profile.no_space = 0),
    ("no_punch", |profile| profile.no_punch = false),
    ("no_zero_range", |profile| profile.no_zero_range = false),
];

/// Something a guest or a device may do, by name, and how to leave it.
type Habit<T> = (&'static str, fn(&mut T));

/// Everything a ublk device can do without.
pub(crate) const UBLK_HABITS: [Habit<Ublk>; 10] = [
    ("kills", |ublk| ublk.kills = 0),
    ("handovers", |ublk| ublk.handovers = 0),
    ("hasty", |ublk| ublk.hasty = false),
    ("recovery", |ublk| ublk.recovery = Recovery::Reissue),
    ("unregistered", |ublk| ublk.unregistered = 0),
    ("places", |ublk| ublk.places = ublk.depth),
    ("split", |ublk| ublk.io_bytes_max = 65536),
    ("transport", |ublk| ublk.transport = Transport::UserCopy),
    ("quiesce", |ublk| ublk.quiesce = Quiesce::Lacking),
    ("shared_workers", |ublk| ublk.queues_per_worker = 1),
];

/// The names of what `now` does without and `before` did not.
fn plain<T: Copy + PartialEq>(habits: &[Habit<T>], now: T, before: T) -> Vec<&'static str> {
    let off = |mut thing: T, leave: fn(&mut T)| {
        let was = thing;
        leave(&mut thing);
        thing == was
    };
    let left = habits
        .iter()
        .filter(|(_, leave)| off(now, *leave) && !off(before, *leave));
    left.map(|habit| habit.0).collect()
}

/// Everything a guest can do without.
pub(crate) const HABITS: [Habit<Virtio>; 6] = [
    ("kills", |virtio| virtio.kills = 0),
    ("stops", |virtio| virtio.stops = 0),
    ("event_idx", |virtio| virtio.event_idx = false),
    ("indirect", |virtio| virtio.indirect = false),
    ("writethrough", |virtio| virtio.writethrough = false),
    ("start", |virtio| virtio.start = 0),
];

/// Leaves a habit; `false` if there is none of that name.
fn leave<T>(habits: &[Habit<T>], name: &str, thing: &mut T) -> bool {
    let found = habits.iter().find(|habit| habit.0 == name);
    found.map(|habit| habit.1(thing)).is_some()
}

fn source_line(source: &Source) -> String {
    match source {
        Source::Seed(seed) => format!("seed {seed}"),
        Source::Guest(seed) => format!("guest {seed}"),
        Source::Registered(seed) => format!("registered {seed}"),
        Source::Ublk(seed) => format!("ublk {seed}"),
        Source::Churn(seed) => format!("churn {seed}"),
        Source::Growth(seed) => format!("growth {seed}"),
        Source::Snapshots(seed) => format!("snapshots {seed}"),
        Source::Bitmaps(seed) => format!("bitmaps {seed}"),
        Source::Resize(seed) => format!("resize {seed}"),
        Source::Compact(seed) => format!("compact {seed}"),
        Source::Mixed(seed) => format!("mixed {seed}"),
        Source::Scenario(name, order) => format!("scenario {} order {order}", name.replace(' ', "_")),
    }
}

/// The line of a run that came from `source` and may have been shortened.
#[must_use]
pub fn line_of(source: &Source, case: &Case) -> String {
    let mut line = source_line(source);
    let Some(original) = source.case() else {
        return line;
    };
    let mut put = |text: std::fmt::Arguments<'_>| line.write_fmt(text).unwrap_or_default();
    // Shrinking takes requests out and keeps the order of the others.
    let mut numbers: Vec<usize> = Vec::new();
    let mut sectors: Vec<String> = Vec::new();
    let mut from = 0;
    for planned in &case.plan {
        let same = |(_, other): &(usize, &crate::plan::Planned)| {
            other.ask == planned.ask
                && other.first == planned.first
                && other.count >= planned.count
                && other.alone == planned.alone
                && other.lane.min(case.lanes - 1) == planned.lane
        };
        let found = original.plan.iter().enumerate().skip(from).find(same);
        let Some((index, other)) = found else { continue };
        if other.count != planned.count {
            sectors.push(format!("{}:{}", numbers.len(), planned.count));
        }
        numbers.push(index);
        from = index + 1;
    }
    if case.schedule != original.schedule {
        put(format_args!(" schedule {}", case.schedule));
    }
    if numbers.len() != original.plan.len() {
        let list: Vec<String> = numbers.iter().map(usize::to_string).collect();
        put(format_args!(" plan {}", list.join(",")));
    }
    if !sectors.is_empty() {
        put(format_args!(" sectors {}", sectors.join(",")));
    }
    if let Some(ops) = case.space.filter(|_| case.space != original.space) {
        put(format_args!(" space {ops}"));
    }
    if case.lanes != original.lanes {
        put(format_args!(" lanes {}", case.lanes));
    }
    let calm: Vec<&str> = FAULTS
        .iter()
        .filter(|(_, change)| {
            let mut calmer = original.profile;
            change(&mut calmer);
            let off = |profile: Profile| {
                let mut again = profile;
                change(&mut again);
                format!("{again:?}") == format!("{profile:?}")
            };
            off(case.profile) && !off(original.profile)
        })
        .map(|fault| fault.0)
        .collect();
    if !calm.is_empty() {
        put(format_args!(" calm {}", calm.join(",")));
    }
    let guests = case.virtio.zip(original.virtio);
    let devices = case.ublk.zip(original.ublk);
    let mut without = guests.map_or(Vec::new(), |(now, before)| plain(&HABITS, now, before));
    without.extend(devices.map_or(Vec::new(), |(now, before)| plain(&UBLK_HABITS, now, before)));
    if !without.is_empty() {
        put(format_args!(" plain {}", without.join(",")));
    }
    if case.explore != original.explore {
        let Explore { all_up_to, draws } = case.explore;
        put(format_args!(" look {all_up_to},{draws}"));
    }
    line
}

/// The run that a line names.
///
/// # Errors
///
/// [`BadLine`].
pub fn parse(line: &str) -> Result<(Source, Case), BadLine> {
    let bad = |problem: String| BadLine {
        line: line.to_owned(),
        problem,
    };
    let words: Vec<&str> = line.split_whitespace().collect();
    let number = |text: &str| {
        text.parse::<u64>()
            .map_err(|error| bad(format!("{text:?} is no number: {error}")))
    };
    let list = |text: &str| text.split(',').map(number).collect::<Result<Vec<u64>, _>>();
    let mut source = None;
    let mut case: Option<Case> = None;
    let mut pairs = words.chunks_exact(2);
    for pair in &mut pairs {
        let (key, value) = (pair[0], pair[1]);
        match (key, &mut case) {
            ("seed", None) => {
                let seed = number(value)?;
                source = Some(Source::Seed(seed));
                case = Some(Case::draw(seed));
            }
            ("guest", None) => {
                let seed = number(value)?;
                source = Some(Source::Guest(seed));
                case = Some(Case::draw_guest(seed));
            }
            ("registered", None) => {
                let seed = number(value)?;
                source = Some(Source::Registered(seed));
                case = Some(Case::draw_registered(seed));
            }
            ("ublk", None) => {
                let seed = number(value)?;
                source = Some(Source::Ublk(seed));
                case = Some(Case::draw_ublk(seed));
            }
            ("churn", None) => {
                let seed = number(value)?;
                source = Some(Source::Churn(seed));
                case = Some(Case::draw_churn(seed));
            }
            ("growth", None) => {
                let seed = number(value)?;
                source = Some(Source::Growth(seed));
                case = Some(Case::draw_growing(seed));
            }
            ("snapshots", None) => {
                let seed = number(value)?;
                source = Some(Source::Snapshots(seed));
                case = Some(Case::draw_snapshots(seed));
            }
            ("bitmaps", None) => {
                let seed = number(value)?;
                source = Some(Source::Bitmaps(seed));
                case = Some(Case::draw_bitmaps(seed));
            }
            ("resize", None) => {
                let seed = number(value)?;
                source = Some(Source::Resize(seed));
                case = Some(Case::draw_resizing(seed));
            }
            ("compact", None) => {
                let seed = number(value)?;
                source = Some(Source::Compact(seed));
                case = Some(Case::draw_compacting(seed));
            }
            ("mixed", None) => {
                let seed = number(value)?;
                source = Some(Source::Mixed(seed));
                case = Some(Case::draw_mixed(seed));
            }
            ("scenario", None) => {
                let name = value.replace('_', " ");
                let found = scenario::all().into_iter().find(|scenario| scenario.name == name);
                let found = found.ok_or_else(|| bad(format!("there is no scenario {name:?}")))?;
                source = Some(Source::Scenario(found.name, 0));
                case = Some(found.case(0));
            }
            ("order", Some(case)) => {
                let order = number(value)?;
                if let Some(Source::Scenario(name, _)) = source {
                    source = Some(Source::Scenario(name, order));
                }
                let again = source.as_ref().and_then(Source::case);
                *case = again.ok_or_else(|| bad("only scenarios have an order".to_owned()))?;
            }
            ("space", Some(case)) => case.space = Some(number(value)?),
            ("schedule", Some(case)) => case.schedule = number(value)?,
            ("lanes", Some(case)) => {
                case.lanes = (number(value)? as usize).clamp(1, 16);
                let last = case.lanes - 1;
                case.plan
                    .iter_mut()
                    .for_each(|planned| planned.lane = planned.lane.min(last));
            }
            ("plan", Some(case)) => {
                let all = case.plan.clone();
                let numbers = list(value)?;
                case.plan = numbers
                    .iter()
                    .filter_map(|&index| all.get(index as usize).copied())
                    .collect();
            }
            ("sectors", Some(case)) => {
                for item in value.split(',') {
                    let (index, count) = item
                        .split_once(':')
                        .ok_or_else(|| bad(format!("{item:?} is not REQUEST:SECTORS")))?;
                    let index = number(index)? as usize;
                    if let Some(planned) = case.plan.get_mut(index) {
                        planned.count = number(count)?;
                    }
                }
            }
            ("calm", Some(case)) => {
                for name in value.split(',') {
                    let fault = FAULTS.iter().find(|fault| fault.0 == name);
                    let fault = fault.ok_or_else(|| bad(format!("there is no fault {name:?}")))?;
                    fault.1(&mut case.profile);
                }
            }
            ("plain", Some(case)) => {
                for name in value.split(',') {
                    let known = match (&mut case.virtio, &mut case.ublk) {
                        (Some(virtio), _) => leave(&HABITS, name, virtio),
                        (None, Some(ublk)) => leave(&UBLK_HABITS, name, ublk),
                        (None, None) => false,
                    };
                    if !known {
                        return Err(bad(format!("it has no habit {name:?}")));
                    }
                }
            }
            ("look", Some(case)) => {
                let numbers = list(value)?;
                if let [all_up_to, draws] = numbers[..] {
                    case.explore = Explore {
                        all_up_to: u128::from(all_up_to),
                        draws,
                    };
                }
            }
            _ => return Err(bad(format!("{key:?} is not expected here"))),
        }
    }
    match (source, case) {
        (Some(source), Some(case)) if pairs.remainder().is_empty() => Ok((source, case)),
        _ => Err(bad(
            "expected pairs of a name and a value, `seed N` first".to_owned()
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shortened_run_round_trips_through_its_line() {
        for seed in 0..50 {
            let source = Source::Seed(seed);
            let mut case = Case::draw(seed);
            assert_eq!(line_of(&source, &case), format!("seed {seed}"));
            let mut index = 0;
            case.plan.retain(|_| {
                index += 1;
                index % 3 == 0
            });
            case.schedule = 99;
            case.profile.short = 0;
            case.profile.reorder = false;
            case.explore.draws = 40;
            if let Some(planned) = case.plan.iter_mut().find(|planned| planned.count > 3) {
                planned.count = 3;
            }
            let line = line_of(&source, &case);
            let (again, parsed) = parse(&line).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(again, source);
            assert_eq!(format!("{parsed:?}"), format!("{case:?}"), "{line}");
        }
    }

    #[test]
    fn guest_without_habits_round_trips_through_its_line() {
        for seed in 0..50 {
            let source = Source::Guest(seed);
            let mut case = Case::draw_guest(seed);
            assert_eq!(line_of(&source, &case), format!("guest {seed}"));
            for (at, (_, leave)) in (0..).zip(HABITS) {
                if seed >> at & 1 == 1 {
                    case.virtio.as_mut().map(leave);
                }
            }
            let line = line_of(&source, &case);
            let (again, parsed) = parse(&line).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(again, source);
            assert_eq!(format!("{parsed:?}"), format!("{case:?}"), "{line}");
        }
    }

    #[test]
    fn ublk_device_without_habits_round_trips_through_its_line() {
        for seed in 0..1200 {
            let source = Source::Ublk(seed);
            let mut case = Case::draw_ublk(seed);
            assert_eq!(line_of(&source, &case), format!("ublk {seed}"));
            for (at, (_, leave)) in (0..).zip(UBLK_HABITS) {
                if seed >> at & 1 == 1 {
                    case.ublk.as_mut().map(leave);
                }
            }
            let line = line_of(&source, &case);
            let (again, parsed) = parse(&line).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(again, source);
            assert_eq!(format!("{parsed:?}"), format!("{case:?}"), "{line}");
        }
    }

    #[test]
    fn registered_run_round_trips_through_its_line() {
        for seed in 0..50 {
            let source = Source::Registered(seed);
            let mut case = Case::draw_registered(seed);
            assert_eq!(line_of(&source, &case), format!("registered {seed}"));
            case.plan.truncate(5);
            case.profile.short = 0;
            let line = line_of(&source, &case);
            let (again, parsed) = parse(&line).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(again, source);
            assert_eq!(format!("{parsed:?}"), format!("{case:?}"), "{line}");
            // The rest of the run is that of the seed alone.
            case = Case::draw_registered(seed);
            case.registered = None;
            assert_eq!(format!("{case:?}"), format!("{:?}", Case::draw(seed)));
        }
    }

    #[test]
    fn churn_run_round_trips_through_its_line() {
        for seed in 0..50 {
            let source = Source::Churn(seed);
            let mut case = Case::draw_churn(seed);
            assert_eq!(line_of(&source, &case), format!("churn {seed}"));
            case.plan.truncate(40);
            case.profile.late = 0;
            let line = line_of(&source, &case);
            let (again, parsed) = parse(&line).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(again, source);
            assert_eq!(format!("{parsed:?}"), format!("{case:?}"), "{line}");
        }
    }

    #[test]
    fn growth_and_snapshots_runs_round_trip_through_their_lines() {
        for (kind, seed) in (0..50).flat_map(|seed| [("growth", seed), ("snapshots", seed)]) {
            let source = match kind {
                "growth" => Source::Growth(seed),
                _ => Source::Snapshots(seed),
            };
            let mut case = source.case().expect("a seed has a run");
            assert_eq!(line_of(&source, &case), format!("{kind} {seed}"));
            case.plan.truncate(9);
            let line = line_of(&source, &case);
            let (again, parsed) = parse(&line).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(again, source);
            assert_eq!(format!("{parsed:?}"), format!("{case:?}"), "{line}");
        }
    }

    #[test]
    fn scenario_round_trips_through_its_line() {
        let scenario = &scenario::all()[3];
        let source = Source::Scenario(scenario.name, 2);
        let line = line_of(&source, &scenario.case(2));
        let (again, case) = parse(&line).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(again, source);
        assert_eq!(format!("{case:?}"), format!("{:?}", scenario.case(2)));
    }

    #[test]
    fn parse_refuses_other_text() {
        for line in [
            "",
            "seed",
            "seed x",
            "plan 1",
            "seed 1 wonder 2",
            "scenario none",
            "seed 1 calm x",
            "seed 1 plain kills",
            "guest 1 plain x",
            "ublk 1 plain event_idx",
        ] {
            parse(line).expect_err(line);
        }
    }
}
