//! Makes a failing run short: fewer requests, fewer queues, fewer faults, as long as it fails.
//!
//! A shorter plan is another run, in which the failing order of things may not come up. So each attempt is
//! made in a few orders and looks at more crash states; the order that failed is kept.

use std::time::{Duration, Instant};

use crate::judge::Tally;
use crate::plan::{Case, Explore};
use crate::replay::{FAULTS, HABITS, UBLK_HABITS};
use crate::run::{Failure, run};

/// In how many orders an attempt is made.
const ORDERS: u64 = 6;

/// The shortest run found in `time` that fails in the same way, and how it fails.
#[must_use]
pub fn shrink(case: &Case, failure: &Failure, time: Duration) -> (Case, Failure) {
    let end = Instant::now() + time;
    let mut best = (case.clone(), failure.clone());
    best.0.explore = Explore {
        all_up_to: case.explore.all_up_to.max(16),
        draws: case.explore.draws.clamp(12, 64),
    };
    let mut changed = true;
    while changed && Instant::now() < end {
        changed = false;
        let mut chunk = best.0.plan.len().div_ceil(2).max(1);
        loop {
            let mut at = 0;
            while at < best.0.plan.len() && Instant::now() < end {
                let mut shorter = best.0.clone();
                let upto = (at + chunk).min(shorter.plan.len());
                shorter.plan.drain(at..upto);
                if let Some(found) = fails(&shorter, failure) {
                    best = found;
                    changed = true;
                } else {
                    at += chunk;
                }
            }
            if chunk == 1 || Instant::now() >= end {
                break;
            }
            chunk = chunk.div_ceil(2);
        }
        for simpler in simpler(&best.0) {
            if Instant::now() < end
                && let Some(found) = fails(&simpler, failure)
            {
                best = found;
                changed = true;
            }
        }
    }
    best
}

/// Returns true if two failures say the same, but for numbers and values.
fn is_alike(one: &Failure, other: &Failure) -> bool {
    let words = |failure: &Failure| -> Vec<String> {
        let words = failure.what.split(|char: char| !char.is_ascii_alphanumeric());
        let is_plain = |word: &&str| !word.is_empty() && !word.contains(|char: char| char.is_ascii_digit());
        words.filter(is_plain).map(str::to_owned).collect()
    };
    words(one) == words(other)
}

/// Runs a case in a few orders; the one that fails as `known` does, if any.
fn fails(case: &Case, known: &Failure) -> Option<(Case, Failure)> {
    let own = case.schedule;
    let orders = std::iter::once(own).chain((1..ORDERS).map(|step| own.wrapping_add(step)));
    for schedule in orders {
        let mut attempt = case.clone();
        attempt.schedule = schedule;
        if let Some(failure) = run(&attempt, false, &mut Tally::default()).failure
            && is_alike(&failure, known)
        {
            return Some((attempt, failure));
        }
    }
    None
}

/// The same run with one thing less.
fn simpler(case: &Case) -> Vec<Case> {
    let mut list = Vec::new();
    if case.lanes > 1 {
        let mut one = case.clone();
        one.lanes -= 1;
        one.plan
            .iter_mut()
            .for_each(|planned| planned.lane = planned.lane.min(one.lanes - 1));
        list.push(one);
    }
    for (_, change) in FAULTS {
        let mut calmer = case.clone();
        change(&mut calmer.profile);
        if format!("{:?}", calmer.profile) != format!("{:?}", case.profile) {
            list.push(calmer);
        }
    }
    for (_, leave) in HABITS {
        let mut plainer = case.clone();
        if let Some(virtio) = &mut plainer.virtio {
            leave(virtio);
        }
        if plainer.virtio != case.virtio {
            list.push(plainer);
        }
    }
    for (_, leave) in UBLK_HABITS {
        let mut plainer = case.clone();
        if let Some(ublk) = &mut plainer.ublk {
            leave(ublk);
        }
        if plainer.ublk != case.ublk {
            list.push(plainer);
        }
    }
    for index in 0..case.plan.len() {
        if case.plan[index].count > 1 {
            let mut smaller = case.clone();
            smaller.plan[index].count /= 2;
            list.push(smaller);
        }
    }
    list
}
