//! Compaction: what lies near the end of the file moves into free clusters nearer its start, and the file is cut.
//!
//! A pass looks for the place where the file could end ([`survey`]), moves what lies after it, and cuts the file ([`cut`]).
//! Clusters of the disk alone move as a guest's write would move them ([`tables`], [`guest`]), those that snapshots use, and
//! compressed data, one reference after the other ([`snapshots`], [`shared`]). A cluster is counted before anything leads to it, its bytes
//! are in the file before an entry leads to them, and it is freed as a guest's cluster is. So requests go on beside them,
//! a cut of the power leaves leaks at most, and an image whose compaction was interrupted is only less compact.
//!
//! Invariants:
//!
//! - the file never becomes longer, and what has moved and is not freed is bounded ([`STEP_BYTES_MAX`]);
//! - memory is bounded: by [`STEP_BYTES_MAX`], the table caches, and the survey's window;
//! - the file is cut alone, with everything durable, and only where nothing is counted or known to be in use.

mod bitmaps;
mod copy;
mod cut;
mod error;
mod foreign;
mod guest;
mod pack;
mod shared;
mod snapshots;
mod survey;
mod tables;

use std::ops::ControlFlow;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use block::{Context, IoError, LocalBoxFuture};

pub use error::{CompactError, Fixed, FixedClusters};

use super::{Encryption, QcowDisk, Queue, Shared, exclusive, flush, header, reclaim, space};
use crate::format::HostCluster;
use crate::metadata::Blocked;
use survey::Survey;

/// The most bytes that move before what they leave is freed.
const STEP_BYTES_MAX: u64 = 8 << 20;
/// The parts of a second that are moved at once, with a limited rate.
const STEPS_PER_SECOND: u64 = 8;
/// The time between two reports while it waits.
const LOOK_AFTER: Duration = Duration::from_millis(100);
/// The time that old clusters have to be freed in. Requests in flight may delay it.
const FREEING_MAX: Duration = Duration::from_secs(2);
/// The most bytes of clusters that wait to be freed when a step begins.
const WAITING_BYTES_MAX: u64 = 32 << 20;
/// The most passes. A guest that writes meanwhile may take what a pass has freed.
const PASSES_MAX: u32 = 256;

/// The options of a compaction.
#[derive(Clone, Copy, Debug, Default)]
pub struct CompactOptions {
    /// The most bytes to move in a second; `None` for as many as possible.
    pub rate: Option<u64>,
}

/// The progress of a compaction.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct CompactProgress {
    /// The number of bytes that have moved.
    pub moved_bytes: u64,
    /// The number of bytes that are yet to move, as far as it is known; 0 while the image is looked through.
    pub left_bytes: u64,
}

/// The result of a compaction.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Compacted {
    /// The length of the file before, in bytes.
    pub before_bytes: u64,
    /// The length of the file now, in bytes.
    pub after_bytes: u64,
    /// The number of bytes that have moved.
    pub moved_bytes: u64,
    /// Clusters that could not move, although there was room for them nearer the start.
    pub fixed: Vec<FixedClusters>,
    /// The caller stopped it.
    pub is_stopped: bool,
}

impl QcowDisk {
    /// Returns the error with which [`QcowDisk::compact`] refuses this image before it begins; `None` if it does not.
    #[must_use]
    pub fn compact_refusal(&self) -> Option<CompactError> {
        let shared = &self.shared;
        if shared.file.is_block_device() {
            return Some(CompactError::BlockDevice);
        }
        if matches!(shared.encryption, Encryption::Locked) {
            return Some(CompactError::Locked);
        }
        shared
            .policy
            .read_only
            .then_some(CompactError::Io(IoError::ReadOnly))
    }

    /// Moves clusters from the end of the image file into free ones nearer its start, and cuts the file, durably. Requests
    /// of all queues go on meanwhile, except for moments. `progress` is called after each step; with
    /// [`ControlFlow::Break`] the compaction ends, and what has moved stays moved.
    ///
    /// The image has to be sound: nothing that is in use counts zero. The disk must not be closed before the call returns.
    ///
    /// # Errors
    ///
    /// [`CompactError`]; with the image as sound as it was, and perhaps less long.
    pub async fn compact(
        &self,
        cx: &Context,
        options: &CompactOptions,
        mut progress: impl FnMut(&CompactProgress) -> ControlFlow<()>,
    ) -> Result<Compacted, CompactError> {
        let queue = self
            .queue(cx)
            .map_err(|error| CompactError::Queue(error.source))?;
        if let Some(error) = self.compact_refusal() {
            return Err(error);
        }
        let compaction = Compaction {
            queue: &queue,
            options,
            progress: &mut progress,
            state: CompactProgress::default(),
            is_begun: false,
            is_stopped: false,
        };
        compaction.start().await
    }
}

/// A compaction that is under way.
struct Compaction<'a> {
    queue: &'a Rc<Queue>,
    options: &'a CompactOptions,
    progress: &'a mut dyn FnMut(&CompactProgress) -> ControlFlow<()>,
    state: CompactProgress,
    /// The image has been announced to be changed.
    is_begun: bool,
    is_stopped: bool,
}

impl<'a> Compaction<'a> {
    /// Boxed: so it is compiled here, once, and not into each of its callers.
    fn start(self) -> LocalBoxFuture<'a, Result<Compacted, CompactError>> {
        Box::pin(self.run())
    }

    async fn run(mut self) -> Result<Compacted, CompactError> {
        let queue = self.queue;
        let file = &queue.file;
        let before_bytes = file.len()?;
        let mut fixed = Vec::new();
        for _ in 0..PASSES_MAX {
            let Some(found) = self.survey().await? else { break };
            let size = self.queue.shared.geometry.cluster_size();
            self.state.left_bytes = found.to_move * size;
            if found.to_move > 0 {
                self.begin().await?;
                let _preferred = Preferred::new(self.queue, found.bound)?;
                self.pass(&found).await?;
            } else if file.len()? <= found.end.index() * size {
                fixed = found.fixed;
                break;
            }
            fixed = found.fixed;
            let cut = cut::cut(self.queue).await?;
            if self.is_stopped || cut.end >= found.end || cut.end <= found.bound && cut.removed == 0 {
                break;
            }
        }
        file.sync().await?;
        Ok(Compacted {
            before_bytes,
            after_bytes: file.len()?,
            moved_bytes: self.state.moved_bytes,
            fixed,
            is_stopped: self.is_stopped,
        })
    }

    /// Moves what lies after the bound of a survey.
    async fn pass(&mut self, found: &Survey) -> Result<(), CompactError> {
        // First what needs several clusters side by side.
        self.move_runs(found.bound).await?;
        self.move_bitmaps(found.bound).await?;
        self.move_l2_tables(found.bound).await?;
        self.move_foreign_tables(found.bound).await?;
        if !self.queue.shared.geometry.has_data_file() {
            self.move_guest_clusters(found.bound).await?;
            self.move_shared_data(found).await?;
        }
        // When the others have left what they count.
        self.move_blocks(found.bound).await
    }

    /// Announces that the image is changed: features that this program does not know may not hold any more.
    async fn begin(&mut self) -> Result<(), CompactError> {
        if !std::mem::replace(&mut self.is_begun, true) {
            let _turn = exclusive::turn(self.queue).await?;
            header::change(self.queue, |_| ()).await?;
            self.queue.file.sync().await?;
        }
        Ok(())
    }

    /// Returns the number of clusters to move in a step.
    fn step_clusters(&self) -> u64 {
        let bytes = self.options.rate.map_or(STEP_BYTES_MAX, |rate| {
            (rate / STEPS_PER_SECOND).min(STEP_BYTES_MAX)
        });
        (bytes / self.queue.shared.geometry.cluster_size()).max(1)
    }

    /// Reports a step, which is durable. Then waits, if the rate is limited.
    async fn end_step(&mut self, clusters: u64) -> Result<(), CompactError> {
        let bytes = clusters * self.queue.shared.geometry.cluster_size();
        self.state.moved_bytes += bytes;
        self.state.left_bytes = self.state.left_bytes.saturating_sub(bytes);
        self.look();
        let Some(rate) = self.options.rate else {
            return Ok(());
        };
        let mut left = Duration::from_secs_f64(bytes as f64 / rate.max(1) as f64);
        while !self.is_stopped && !left.is_zero() {
            let time = left.min(LOOK_AFTER);
            left -= time;
            self.queue.cx.sleep(time).await.map_err(IoError::from)?;
            self.look();
        }
        Ok(())
    }

    /// Reports the progress, and notes if the caller wants the compaction to end.
    fn look(&mut self) {
        self.is_stopped |= (self.progress)(&self.state).is_break();
    }
}

/// Clusters before the bound of a pass are handed out first until this is dropped: what requests write meanwhile does not keep
/// the file long.
struct Preferred<'a>(&'a Shared);

impl<'a> Preferred<'a> {
    fn new(queue: &'a Rc<Queue>, bound: HostCluster) -> Result<Self, IoError> {
        let preferred = Self(&queue.shared);
        queue.shared.write()?.refcounts.prefer_below(Some(bound));
        Ok(preferred)
    }
}

impl Drop for Preferred<'_> {
    fn drop(&mut self) {
        if let Ok(mut metadata) = self.0.write() {
            metadata.refcounts.prefer_below(None);
        }
    }
}

/// The result of a step.
#[derive(Clone, Copy, Debug)]
struct Step {
    /// The number of clusters that have moved.
    clusters: u64,
    /// There are no others to move, or there is no room.
    is_last: bool,
}

impl Step {
    const NONE_LEFT: Self = Self {
        clusters: 0,
        is_last: true,
    };
}

/// Makes changes durable, and frees what they dropped: then it takes no space any more. The caller has the turn to change the image as
/// a whole: an operation that runs alone would not wait for the counts that are lowered here, and not see them.
///
/// # Errors
///
/// [`CompactError::Busy`] if requests in flight keep too much from being freed.
async fn settle(queue: &Rc<Queue>) -> Result<(), CompactError> {
    let shared = &queue.shared;
    flush::flush(queue).await?;
    let mut watch = shared.epochs.watch();
    let mut timeout = pin!(queue.cx.sleep(FREEING_MAX));
    loop {
        reclaim::reclaim(queue).await?;
        if !shared.freeing.lock().is_pending() {
            return Ok(());
        }
        if !space::is_ended_before(watch.ended(), timeout.as_mut()).await? {
            break;
        }
    }
    let waiting = queue.metadata()?.returning.clusters();
    match waiting * shared.geometry.cluster_size() <= WAITING_BYTES_MAX {
        true => Ok(()),
        false => Err(CompactError::Busy),
    }
}

/// As [`change`], by a caller without the turn: an operation that runs alone waits for the tables that are read here.
async fn look<T, B: Into<Blocked>>(
    queue: &Rc<Queue>,
    look: impl FnMut(&mut crate::metadata::Metadata) -> Result<T, B>,
) -> Result<T, IoError> {
    let _guard = exclusive::admit(queue, queue.enter()).await?;
    change(queue, look).await
}

/// Repeats a change of the metadata until nothing blocks it.
async fn change<T, B: Into<Blocked>>(
    queue: &Rc<Queue>,
    mut change: impl FnMut(&mut crate::metadata::Metadata) -> Result<T, B>,
) -> Result<T, IoError> {
    super::write::change(queue, |metadata| change(metadata).map_err(Into::into)).await
}

/// Returns `count` clusters from `first` on.
fn clusters_at(first: HostCluster, count: u64) -> impl Iterator<Item = HostCluster> {
    first.until(first + count)
}
