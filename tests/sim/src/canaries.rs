//! Rules of the engine, broken on purpose: the checks that guard a rule must detect that it is broken.
//!
//! Only a build with the feature `canary` can break any. There each rule is broken in a process of its own, as a rule
//! about locks may stop the thread it is broken on.

use block::canary::Rule;

#[cfg(feature = "canary")]
use crate::explore::Source;

/// The rule called `name`.
#[must_use]
pub fn find(name: &str) -> Option<Rule> {
    Rule::ALL.into_iter().find(|rule| rule.name() == name)
}

/// Returns the texts of which a failure contains one if `rule` caused it. There are none for a rule whose failures are
/// too diverse to tell.
#[must_use]
pub const fn symptoms(rule: Rule) -> &'static [&'static str] {
    match rule {
        Rule::L2BeforeRefcount | Rule::L1BeforeTable => &["the image is not sound"],
        Rule::BitsAfterEntries | Rule::BitsAfterData | Rule::InUseAfterChanges | Rule::AppliedUnmarked => {
            &["lacks bit"]
        }
        Rule::ReuseInFlight | Rule::GraceEndsEarly => &["a read sees the value asked for at"],
        Rule::ShortReadIsSuccess | Rule::BufferBackEarly => &["a read sees 0xcccccccccccccccc"],
        Rule::LostCompletion
        | Rule::VirtqueueLostUsed
        | Rule::AnswerNotNotified
        | Rule::SleepWithoutLook
        | Rule::UblkTagForgotten
        | Rule::UblkSleepsOnAnswers => &["it hangs"],
        Rule::DoubleCompletion => &["was answered twice"],
        Rule::VirtqueueDoubleUsed => &["answered twice"],
        Rule::MemoryFreedEarly => &["was freed while the op was in flight"],
        Rule::LockAcrossAwait => &["a thread waits for itself", "the metadata is locked"],
        Rule::FlushMissesQueue
        | Rule::FailedSyncForgotten
        | Rule::ChangeNotCounted
        | Rule::ForcedWriteIsNot
        | Rule::FlushAnsweredEarly
        | Rule::MappingForgotten
        | Rule::DataFileSyncedLate
        | Rule::ReuseBeforePunch => &["after the cut sector"],
        Rule::ShrunkKeepsTail => &["behind the end", "expected zeros"],
        Rule::ZerosNotAwaited => &["used its registered pages"],
        Rule::UblkPagesBackEarly => &["while its pages are named", "used its registered pages"],
        Rule::UblkServesOn => &["that has closed its disk"],
        Rule::UblkLeavesEarly => &["because servers change"],
        _ => &[],
    }
}

/// Returns true if a failure with `rule` broken is one that the rule can be seen by.
#[must_use]
pub fn is_symptom(rule: Rule, failure: &str) -> bool {
    let known = symptoms(rule);
    known.is_empty() || known.iter().any(|text| failure.contains(text))
}

/// Returns the run of a number in which `rule` may be seen: rules that few runs come across are looked for in those of one kind.
#[cfg(feature = "canary")]
fn source_of(rule: Rule, number: u64) -> Source {
    match rule {
        Rule::BitsAfterEntries
        | Rule::BitsAfterData
        | Rule::InUseAfterChanges
        | Rule::AppliedUnmarked
        | Rule::HeaderBeforeTables => Source::Bitmaps(number),
        Rule::ShrunkKeepsTail => Source::Resize(number),
        Rule::BlockBeforeCount
        | Rule::CutBeforeTable
        | Rule::MovedUnderWrite
        | Rule::CopyLedToEarly
        | Rule::OldPlaceFreedEarly => Source::Compact(number),
        Rule::CopiedSliceNotRedone | Rule::CountsNotRedone => Source::Snapshots(number),
        _ => Source::of_number(number),
    }
}

/// The outcome of a hunt: seeds run with one rule broken.
#[cfg(feature = "canary")]
#[derive(Debug)]
pub enum Hunted {
    /// So many seeds failed, the last of them as the rule makes runs fail; and with nothing broken it does not.
    Seen(u64, String),
    /// None of the seeds failed so. Of others the first one.
    NotSeen(Option<String>),
    /// This one fails with nothing broken.
    Unsound(String),
}

/// Runs seeds from the first one on with a rule broken, until one fails as that rule makes runs fail.
#[cfg(feature = "canary")]
#[must_use]
pub fn hunt(rule: Rule, seeds_max: u64) -> Hunted {
    use crate::judge::Tally;
    use crate::run::run;
    use crate::watchdog::Watchdog;

    let watchdog = Watchdog::start();
    let mut other = None;
    for seed in 1..=seeds_max {
        let source = source_of(rule, seed);
        watchdog.beat(|| format!("{source} with {} broken", rule.name()));
        let Some(case) = source.case() else { continue };
        // The image that the run begins with is made by the rules, and kept.
        let _kept = crate::shape::beginning(case.shape);
        block::canary::set(Some(rule));
        let failure = run(&case, false, &mut Tally::default()).failure;
        block::canary::set(None);
        let Some(failure) = failure else { continue };
        let text = failure.to_string();
        if !is_symptom(rule, &text) {
            other.get_or_insert_with(|| format!("{source}: {text}"));
            continue;
        }
        return match run(&case, false, &mut Tally::default()).failure {
            None => Hunted::Seen(seed, text),
            Some(failure) => Hunted::Unsound(format!("{source}: {failure}")),
        };
    }
    Hunted::NotSeen(other)
}
