//! Rules of the engine broken on purpose: what watches over them must see each one.
//!
//! Only a build with the feature `canary` can break any. There each rule is broken in a process of its own, as a
//! rule about locks may stop the thread it is broken on.

use block::canary::Rule;

/// The rule called `name`.
#[must_use]
pub fn find(name: &str) -> Option<Rule> {
    Rule::ALL.into_iter().find(|rule| rule.name() == name)
}

/// Where to begin to look. One rule is seen by about one seed in three thousand only: a read must be late by as long as it
/// takes to free its cluster, make that durable and write it again. It begins near a seed that is known; when what
/// seeds draw has changed, another is to be looked for.
#[cfg(feature = "canary")]
fn first_seed(rule: Option<Rule>) -> u64 {
    match rule {
        Some(Rule::ReuseInFlight) => 3101,
        _ => 1,
    }
}

/// Runs seeds with a rule broken, or with none, until one fails: how many that took, and how it failed.
#[cfg(feature = "canary")]
#[must_use]
pub fn hunt(rule: Option<Rule>, seeds_max: u64) -> Option<(u64, String)> {
    use crate::explore::Source;
    use crate::judge::Tally;
    use crate::run::run;
    use crate::watchdog::Watchdog;

    let watchdog = Watchdog::start();
    block::canary::set(rule);
    let first = first_seed(rule);
    let found = (first..first.saturating_add(seeds_max)).find_map(|seed| {
        let source = Source::of_number(seed);
        watchdog.beat(|| format!("{source} with {} broken", rule.map_or("nothing", Rule::name)));
        let outcome = run(&source.case()?, false, &mut Tally::default());
        Some((seed - first + 1, outcome.failure?.to_string()))
    });
    block::canary::set(None);
    watchdog.done();
    found
}
