//! The move of persistent bitmaps, as far as they may move ([`bitmaps::move_below`]).

use super::tables::TABLES_PER_STEP;
use super::{CompactError, Compaction, settle};
use crate::engine::{BitmapsError, bitmaps, exclusive};
use crate::format::HostCluster;

impl Compaction<'_> {
    /// Moves clusters of bitmaps that lie from `bound` on.
    pub(super) async fn move_bitmaps(&mut self, bound: HostCluster) -> Result<(), CompactError> {
        let queue = self.queue;
        let most = self.step_clusters().min(TABLES_PER_STEP);
        while !self.is_stopped {
            let moved = match bitmaps::move_below(queue, bound, most).await {
                Ok(0) => break,
                Ok(moved) => moved,
                Err(BitmapsError::Io(error)) => return Err(error.into()),
                Err(BitmapsError::Busy) => return Err(CompactError::Busy),
                Err(BitmapsError::Closed) => return Err(CompactError::Closed),
                Err(error) => {
                    let image = queue.shared.file.path().display();
                    tracing::warn!(%image, %error, "bitmaps stay where they are");
                    break;
                }
            };
            {
                let _turn = exclusive::turn(queue).await?;
                settle(queue).await?;
            }
            self.end_step(moved).await?;
        }
        Ok(())
    }
}
