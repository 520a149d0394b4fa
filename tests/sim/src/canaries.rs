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

/// Runs seeds from 1 on with a rule broken, or with none, until one fails: how many that took, and how it failed.
#[cfg(feature = "canary")]
#[must_use]
pub fn hunt(rule: Option<Rule>, seeds_max: u64) -> Option<(u64, String)> {
    use crate::explore::Source;
    use crate::judge::Tally;
    use crate::run::run;
    use crate::watchdog::Watchdog;

    let watchdog = Watchdog::start();
    block::canary::set(rule);
    let found = (1..=seeds_max).find_map(|seed| {
        let source = Source::of_number(seed);
        watchdog.beat(|| format!("{source} with {} broken", rule.map_or("nothing", Rule::name)));
        let outcome = run(&source.case()?, false, &mut Tally::default());
        Some((seed, outcome.failure?.to_string()))
    });
    block::canary::set(None);
    watchdog.done();
    found
}
