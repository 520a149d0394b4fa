//! Explores what faults and power cuts can do to an image, in the simulated world of `block::sim`.
//!
//! A [case](plan::Case) is an image of some [shape](shape::Shape), a disk with some habits and faults, and what a
//! few guest queues ask for: [of the disk itself](lane), as drivers of [virtqueues](guest), or of a
//! [ublk device](ublk) of the host's; the [servers](server) of the latter two may be killed, and others follow. A
//! [run](run::run) lets the production engine and its workers serve them, turn by turn; after each turn of the disk a
//! [judge](judge::Judge) looks at what a power cut would leave and holds it against the [oracle](oracle::Oracle), which
//! knows what was promised. [Scenarios](scenario) are small and looked at whole; [seeds](explore) are drawn without end.
//! What fails is [shortened](shrink) and printed as [one line](replay).
//!
//! What must stay true: a line and a commit determine a run, to the last byte of its trace.

pub mod arena;
pub mod block_layer;
pub mod canaries;
pub mod content;
pub mod explore;
mod growth;
pub mod guest;
pub mod hand_over;
pub mod judge;
pub mod lane;
pub mod leaks;
pub mod oracle;
pub mod pace;
mod places;
pub mod plan;
pub mod replay;
pub mod run;
pub mod scenario;
pub mod serve;
pub mod server;
pub mod shape;
pub mod shrink;
pub mod ublk;
pub mod watchdog;

/// Notices memory that is freed while an op uses it.
#[global_allocator]
static ALLOCATOR: block::sim::memory::GuardAlloc<std::alloc::System> =
    block::sim::memory::GuardAlloc(std::alloc::System);

/// Runs that failed once, and must not again: one line each, see [`replay`].
pub const KEPT: &str = include_str!("../seeds.txt");

/// The lines of [`KEPT`] that name a run.
pub fn kept_lines() -> impl Iterator<Item = &'static str> {
    KEPT.lines()
        .map(|line| line.split('#').next().unwrap_or_default().trim())
        .filter(|line| !line.is_empty())
}
