//! Moves of guest clusters.
//!
//! 1. Queues are held off until every request in flight has ended ([`exclusive::pause`]): none writes in place any more.
//! 2. Guest clusters that lie after the bound are entered as in flight, with new clusters before it, and the queues go on.
//!    A request that changes one of these guest clusters waits; a read reads the old place.
//! 3. The bytes are copied. Then the entries lead to the copies, and the old clusters are dropped.
//! 4. A FLUSH makes the entries durable, and the old clusters are freed.
//!
//! Invariant: the turn to change the image as a whole is kept from 1 to 4, so that no other operation runs alone while
//! guest clusters are in flight.

use std::rc::Rc;
use std::time::Duration;

use block::IoError;

use super::copy::{Copy, PIECE_BYTES_MAX, copy_all};
use super::{CompactError, Compaction, look};
use crate::engine::exclusive::{self, Refused};
use crate::engine::{Queue, Shared, load};
use crate::format::{GuestCluster, HostCluster};
use crate::metadata::Blocked;
use crate::metadata::moves::{Move, Planned};

/// The time that requests in flight have to end while the queues are held off, and the number of attempts.
const PAUSE_MAX: Duration = Duration::from_millis(500);
const PAUSES_MAX: u32 = 8;
/// The time between two attempts.
const PAUSE_AGAIN_AFTER: Duration = Duration::from_millis(200);
/// The most slices that are looked through while queues are held off.
const SLICES_PER_PLAN: u32 = 64;

/// Moves that are planned and neither published nor abandoned.
struct Moves<'a> {
    shared: &'a Shared,
    list: Vec<Move>,
}

impl Moves<'_> {
    fn clusters(&self) -> u64 {
        self.list.iter().map(|planned| planned.count).sum()
    }

    /// Publishes the moves, or abandons them if the copies failed.
    fn end(mut self, copied: Result<(), IoError>) -> Result<(), IoError> {
        let list = std::mem::take(&mut self.list);
        let mut metadata = self.shared.write()?;
        let mut result = copied;
        let mut waiters = Vec::with_capacity(list.len());
        for planned in &list {
            waiters.push(match copied {
                Ok(()) => {
                    let (waiting, published) = metadata.publish_move(planned);
                    result = result.and(published);
                    waiting
                }
                Err(_) => metadata.abandon_move(planned, true),
            });
        }
        drop(metadata);
        drop(waiters);
        result
    }
}

impl Drop for Moves<'_> {
    fn drop(&mut self) {
        if self.list.is_empty() {
            return;
        }
        // The task was dropped, and its copies may be under way.
        let Ok(mut metadata) = self.shared.write() else {
            return;
        };
        let list = self.list.iter();
        let waiters: Vec<_> = list
            .map(|planned| metadata.abandon_move(planned, false))
            .collect();
        drop(metadata);
        drop(waiters);
    }
}

impl Compaction<'_> {
    /// Moves guest clusters that lie from `bound` on, in the order of the disk, while there is room before it.
    pub(super) async fn move_guest_clusters(&mut self, bound: HostCluster) -> Result<(), CompactError> {
        let mut at = GuestCluster::new(0);
        while !self.is_stopped {
            let end = self.queue.metadata()?.mapped_end();
            if at >= end {
                break;
            }
            let none = look(self.queue, |metadata| metadata.none_to_move_before(at, bound));
            if let Some(next) = none.await? {
                at = next;
                continue;
            }
            let moved = self.move_next(&mut at, end, bound).await?;
            let Some(clusters) = moved else { break };
            if clusters > 0 {
                self.end_step(clusters).await?;
            }
        }
        Ok(())
    }

    /// Moves the next guest clusters, from `at` on. Returns their number; `None` without room.
    async fn move_next(
        &self,
        at: &mut GuestCluster,
        end: GuestCluster,
        bound: HostCluster,
    ) -> Result<Option<u64>, CompactError> {
        let queue = self.queue;
        let _turn = exclusive::turn(queue).await?;
        let moves;
        let mut stop = Ok(Stop::Enough);
        {
            let _held = pause(queue).await?;
            moves = plan(queue, at, end, bound, self.step_clusters(), &mut stop)?;
        }
        let clusters = moves.clusters();
        if clusters == 0 {
            return match stop {
                Ok(Stop::Enough) => Ok(Some(0)),
                Ok(Stop::Full) => Ok(None),
                Err(blocked) => {
                    load::unblock(queue, blocked).await?;
                    Ok(Some(0))
                }
            };
        }
        let geometry = queue.shared.geometry;
        let copies = moves.list.iter().filter(|planned| planned.has_data);
        let copies = copies.map(|planned| Copy {
            guest: geometry.guest_offset(planned.guest),
            from: planned.from,
            to: planned.to,
            len: planned.count * geometry.cluster_size(),
            is_zero: planned.is_zero,
            is_table: false,
        });
        let copied = copy_all(queue, &copies.collect::<Vec<_>>()).await;
        moves.end(copied)?;
        super::settle(queue).await?;
        Ok(Some(clusters))
    }
}

/// The reason that no more is planned.
#[derive(Clone, Copy, Debug)]
enum Stop {
    /// There is enough for a step, or nothing left to look at for now.
    Enough,
    /// There is no room before the bound.
    Full,
}

/// Holds the queues off until no request is in flight.
async fn pause(queue: &Rc<Queue>) -> Result<impl Sized, CompactError> {
    let mut pauses = 1;
    loop {
        match exclusive::pause(queue, PAUSE_MAX).await {
            Err(Refused::Busy) if pauses < PAUSES_MAX => pauses += 1,
            paused => return Ok(paused?),
        }
        let slept = queue.cx.sleep(PAUSE_AGAIN_AFTER).await;
        slept.map_err(IoError::from)?;
    }
}

/// Plans moves of at most `most` clusters from `at` on; `at` moves on.
fn plan<'a>(
    queue: &'a Rc<Queue>,
    at: &mut GuestCluster,
    end: GuestCluster,
    bound: HostCluster,
    most: u64,
    stop: &mut Result<Stop, Blocked>,
) -> Result<Moves<'a>, IoError> {
    let shared = &*queue.shared;
    let piece = (PIECE_BYTES_MAX / shared.geometry.cluster_size()).max(1);
    let mut moves = Moves {
        shared,
        list: Vec::new(),
    };
    let mut metadata = shared.write()?;
    let (mut left, mut slices) = (most, 0);
    while left > 0 && *at < end && slices < SLICES_PER_PLAN {
        match metadata.plan_move(*at, bound, left.min(piece)) {
            Ok(Planned::Move(planned)) => {
                *at = planned.guest + planned.count;
                left -= planned.count;
                moves.list.push(planned);
            }
            Ok(Planned::Until(next)) => {
                *at = next;
                slices += 1;
            }
            Ok(Planned::Full) => {
                *stop = Ok(Stop::Full);
                break;
            }
            Err(blocked) => {
                *stop = Err(blocked);
                break;
            }
        }
    }
    Ok(moves)
}
