//! Canaries: rules that a special build can break on purpose, to prove that the simulator detects it.
//!
//! A rule is broken at a seam if one can break it: by the simulated kernel and disk (`sim/src/world/canaries.rs`), between
//! a frontend and its disk (`tests/sim/src/served.rs`), by the guest, its memory, or the model of the ublk driver. The
//! product itself is asked for the rest, which nothing outside can break: the order in which the engine writes metadata
//! and data, who waits for whom (writers, discards, grace periods), copy-on-write, the place that data is
//! encrypted for, persistent bitmaps, the end of a smaller disk, locks, and the count of changes.
//!
//! Without the feature `canary` nothing is ever broken: [`broken`] is a constant, and so is every branch on it.
//! The same build can also kill its simulated process between two stores to a guest's memory ([`may_store`]).
//! Only the explorer's own build, with a target folder of its own, has the feature.

/// A rule of the architecture, by the name of the canary that breaks it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[expect(missing_docs, reason = "`name` says it")]
pub enum Rule {
    L2BeforeRefcount,
    L2BeforeData,
    L1BeforeTable,
    ReuseBeforePunch,
    ReuseInFlight,
    GraceEndsEarly,
    FlushMissesQueue,
    NeighbourDropped,
    SubclustersReplaced,
    SubclustersLeftBehind,
    InPlaceShared,
    SecondWriterRuns,
    ClearRuns,
    ShortReadIsSuccess,
    LostCompletion,
    DoubleCompletion,
    LockAcrossAwait,
    FailedSyncForgotten,
    ChangeNotCounted,
    ForcedWriteIsNot,
    MemoryFreedEarly,
    VirtqueueLostUsed,
    VirtqueueDoubleUsed,
    FlushAnsweredEarly,
    InflightClearedEarly,
    AnswerNotNotified,
    SleepWithoutLook,
    RemovedInFlight,
    BufferBackEarly,
    RegisteredStaysBehind,
    ZerosNotAwaited,
    MappingForgotten,
    EncryptedForElsewhere,
    DataFileSyncedLate,
    BitsAfterEntries,
    BitsAfterData,
    InUseAfterChanges,
    AppliedUnmarked,
    HeaderBeforeTables,
    ShrunkKeepsTail,
    BlockBeforeCount,
    CutBeforeTable,
    MovedUnderWrite,
    CopyLedToEarly,
    OldPlaceFreedEarly,
    CopiedSliceNotRedone,
    CountsNotRedone,
    UblkCommitEarly,
    UblkPagesBackEarly,
    UblkTagForgotten,
    UblkServesOn,
    UblkLeavesEarly,
    UblkSleepsOnAnswers,
}

impl Rule {
    /// Every rule that can be broken.
    pub const ALL: [Self; 53] = [
        Self::L2BeforeRefcount,
        Self::L2BeforeData,
        Self::L1BeforeTable,
        Self::ReuseBeforePunch,
        Self::ReuseInFlight,
        Self::GraceEndsEarly,
        Self::FlushMissesQueue,
        Self::NeighbourDropped,
        Self::SubclustersReplaced,
        Self::SubclustersLeftBehind,
        Self::InPlaceShared,
        Self::SecondWriterRuns,
        Self::ClearRuns,
        Self::ShortReadIsSuccess,
        Self::LostCompletion,
        Self::DoubleCompletion,
        Self::LockAcrossAwait,
        Self::FailedSyncForgotten,
        Self::ChangeNotCounted,
        Self::ForcedWriteIsNot,
        Self::MemoryFreedEarly,
        Self::VirtqueueLostUsed,
        Self::VirtqueueDoubleUsed,
        Self::FlushAnsweredEarly,
        Self::InflightClearedEarly,
        Self::AnswerNotNotified,
        Self::SleepWithoutLook,
        Self::RemovedInFlight,
        Self::BufferBackEarly,
        Self::RegisteredStaysBehind,
        Self::ZerosNotAwaited,
        Self::MappingForgotten,
        Self::EncryptedForElsewhere,
        Self::DataFileSyncedLate,
        Self::BitsAfterEntries,
        Self::BitsAfterData,
        Self::InUseAfterChanges,
        Self::AppliedUnmarked,
        Self::HeaderBeforeTables,
        Self::ShrunkKeepsTail,
        Self::BlockBeforeCount,
        Self::CutBeforeTable,
        Self::MovedUnderWrite,
        Self::CopyLedToEarly,
        Self::OldPlaceFreedEarly,
        Self::CopiedSliceNotRedone,
        Self::CountsNotRedone,
        Self::UblkCommitEarly,
        Self::UblkPagesBackEarly,
        Self::UblkTagForgotten,
        Self::UblkServesOn,
        Self::UblkLeavesEarly,
        Self::UblkSleepsOnAnswers,
    ];

    /// Returns the rule's short name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::L2BeforeRefcount => "l2-before-refcount",
            Self::L2BeforeData => "l2-before-data",
            Self::L1BeforeTable => "l1-before-table",
            Self::ReuseBeforePunch => "reuse-before-punch",
            Self::ReuseInFlight => "reuse-with-io-in-flight",
            Self::GraceEndsEarly => "grace-ends-early",
            Self::FlushMissesQueue => "flush-misses-another-queue",
            Self::NeighbourDropped => "copy-on-write-drops-neighbour",
            Self::SubclustersReplaced => "publish-drops-other-subclusters",
            Self::SubclustersLeftBehind => "new-cluster-lacks-subclusters",
            Self::InPlaceShared => "in-place-write-to-shared",
            Self::SecondWriterRuns => "second-writer-does-not-wait",
            Self::ClearRuns => "clear-does-not-wait",
            Self::ShortReadIsSuccess => "short-read-is-success",
            Self::LostCompletion => "lost-completion",
            Self::DoubleCompletion => "double-completion",
            Self::LockAcrossAwait => "lock-held-across-await",
            Self::FailedSyncForgotten => "failed-sync-forgotten",
            Self::ChangeNotCounted => "change-not-counted",
            Self::ForcedWriteIsNot => "forced-write-is-not-durable",
            Self::MemoryFreedEarly => "memory-freed-early",
            Self::VirtqueueLostUsed => "used-entry-lost",
            Self::VirtqueueDoubleUsed => "used-entry-doubled",
            Self::FlushAnsweredEarly => "flush-answered-early",
            Self::InflightClearedEarly => "inflight-cleared-early",
            Self::AnswerNotNotified => "answer-not-notified",
            Self::SleepWithoutLook => "sleep-without-last-look",
            Self::RemovedInFlight => "queue-removed-in-flight",
            Self::BufferBackEarly => "guest-buffer-back-early",
            Self::RegisteredStaysBehind => "registered-address-stays-behind",
            Self::ZerosNotAwaited => "zeros-not-awaited",
            Self::MappingForgotten => "mapping-dies-with-its-server",
            Self::EncryptedForElsewhere => "copy-encrypted-for-its-old-place",
            Self::DataFileSyncedLate => "data-file-synced-after-entries",
            Self::BitsAfterEntries => "bitmap-bits-after-entries",
            Self::BitsAfterData => "bitmap-bits-after-data",
            Self::InUseAfterChanges => "bitmap-in-use-after-changes",
            Self::AppliedUnmarked => "applied-snapshot-unmarked",
            Self::HeaderBeforeTables => "header-before-its-tables",
            Self::ShrunkKeepsTail => "shrunk-disk-keeps-its-tail",
            Self::BlockBeforeCount => "moved-block-before-its-count",
            Self::CutBeforeTable => "file-cut-before-its-table",
            Self::MovedUnderWrite => "cluster-moved-under-a-write",
            Self::CopyLedToEarly => "copy-led-to-before-durable",
            Self::OldPlaceFreedEarly => "old-place-freed-before-entries",
            Self::CopiedSliceNotRedone => "copied-slice-not-redone",
            Self::CountsNotRedone => "changed-counts-not-redone",
            Self::UblkCommitEarly => "ublk-committed-before-written",
            Self::UblkPagesBackEarly => "ublk-pages-back-under-an-op",
            Self::UblkTagForgotten => "ublk-fetched-tag-forgotten",
            Self::UblkServesOn => "ublk-serves-on-after-close",
            Self::UblkLeavesEarly => "ublk-leaves-before-answers",
            Self::UblkSleepsOnAnswers => "ublk-sleeps-on-answers",
        }
    }
}

#[cfg(feature = "canary")]
thread_local! {
    static BROKEN: std::cell::Cell<(Option<Rule>, u64)> = const { std::cell::Cell::new((None, 0)) };
}

#[cfg(feature = "canary")]
thread_local! {
    static STORES: std::cell::Cell<u64> = const { std::cell::Cell::new(u64::MAX) };
}

/// Limits the stores outliving the process that this thread's simulated process may still make; `None` for no limit.
#[cfg(feature = "canary")]
pub fn kill_after(stores: Option<u64>) {
    STORES.set(stores.unwrap_or(u64::MAX));
}

/// Returns true if this thread's simulated process has been killed.
#[cfg(feature = "canary")]
#[must_use]
pub fn is_killed() -> bool {
    STORES.get() == 0
}

/// Returns true if the process is still alive. Must be called before each store that outlives it and that a
/// guest or a successor relies on.
#[cfg(feature = "canary")]
#[must_use]
pub fn may_store() -> bool {
    match STORES.get() {
        0 => false,
        u64::MAX => true,
        left => {
            STORES.set(left - 1);
            true
        }
    }
}

/// Returns true: without the feature `canary` the process is alive.
#[cfg(not(feature = "canary"))]
#[must_use]
#[inline(always)]
pub const fn may_store() -> bool {
    true
}

/// Breaks a rule on this thread, or none.
#[cfg(feature = "canary")]
pub fn set(rule: Option<Rule>) {
    BROKEN.set((rule, 0));
}

/// Returns true if `rule` is broken on this thread.
#[cfg(feature = "canary")]
#[must_use]
pub fn broken(rule: Rule) -> bool {
    BROKEN.get().0 == Some(rule)
}

/// Returns true if `rule` is broken this time: at each `every`th call.
#[cfg(feature = "canary")]
#[must_use]
pub fn strikes(rule: Rule, every: u64) -> bool {
    let (set, count) = BROKEN.get();
    if set != Some(rule) {
        return false;
    }
    BROKEN.set((set, count + 1));
    (count + 1).is_multiple_of(every)
}

/// Returns false: without the feature `canary` no rule is broken.
#[cfg(not(feature = "canary"))]
#[must_use]
#[inline(always)]
pub const fn broken(_rule: Rule) -> bool {
    false
}

/// Returns false: without the feature `canary` no rule is broken at any call.
#[cfg(not(feature = "canary"))]
#[must_use]
#[inline(always)]
pub const fn strikes(_rule: Rule, _every: u64) -> bool {
    false
}
