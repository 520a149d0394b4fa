//! The explorer: searches for faults and power cuts that damage an image, in the simulated world of `simulator`.
//!
//! ```text
//!  seed or Scenario ──▶ Case: Shape (image), habits and faults of the disk, Plan (requests)
//!                        │
//!                       run ──▶ lanes, virtqueue guests, ublk devices ──▶ production engine ──▶ simulated disk
//!                        │                                                                        │ each turn
//!                       oracle (what was promised) ◀── judge ◀── crash states: what a cut may leave
//! ```
//!
//! A [case](plan::Case) is an image of some [shape](shape::Shape), a disk with some habits and faults, and the requests of a
//! few guest queues: [directly to the disk](lane), as drivers of [virtqueues](guest), or of a [ublk device](ublk) of the
//! host's. The [servers](server) of the latter two may be killed and replaced. A [run](run::run) lets the production engine
//! and its workers serve them, turn by turn. After each turn of the disk a [judge](judge::Judge) compares the state that a
//! power cut would leave with the [oracle](oracle::Oracle). [Scenarios](scenario) are small and explored completely;
//! [seeds](explore) are drawn without end. A failing case is [shortened](shrink) and printed as [one line](replay).
//!
//! ```sh
//! make explore                                                      # scenarios, kept seeds and new ones
//! cargo run --release -p ringdisk-sim --features assertions,canary -- explore --from SEED    # repeats a printed seed
//! make canaries                                                     # each rule broken on purpose must be detected
//! ```
//!
//! Invariant: a line and a commit determine a run, to the last byte of its trace.

pub mod arena;
pub mod bitmaps;
pub mod block_layer;
mod book;
pub mod canaries;
mod compaction;
pub mod content;
pub mod explore;
mod growth;
pub mod guest;
pub mod hand_over;
pub mod judge;
pub mod lane;
pub mod leaks;
mod mixed;
mod operations;
pub mod oracle;
pub mod pace;
mod places;
pub mod plan;
pub mod record;
pub mod replay;
mod resize;
pub mod run;
pub mod scenario;
pub mod serve;
mod served;
pub mod server;
pub mod shape;
pub mod shrink;
mod snapshots;
mod troubles;
pub mod ublk;
pub mod watchdog;

/// Notices memory that is freed while an op uses it.
#[global_allocator]
static ALLOCATOR: simulator::memory::GuardAlloc<std::alloc::System> =
    simulator::memory::GuardAlloc(std::alloc::System);

/// Runs that failed once, and must not again: one line each, see [`replay`].
pub const KEPT: &str = include_str!("../seeds.txt");

/// The lines of [`KEPT`] that name a run.
pub fn kept_lines() -> impl Iterator<Item = &'static str> {
    KEPT.lines()
        .map(|line| line.split('#').next().unwrap_or_default().trim())
        .filter(|line| !line.is_empty())
}
