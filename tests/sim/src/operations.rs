//! Operations on the whole image that a queue asks for beside its requests, and that are not about snapshots.

use std::cell::RefCell;
use std::ops::ControlFlow;
use std::rc::Rc;
use std::sync::Arc;

use block::{Context, IoError};
use qcow::{
    BitmapsError, CompactError, CompactOptions, CompactProgress, Compacted, QcowDisk, ShrinkError,
    SnapshotError,
};
use simulator::SECTOR;

use crate::bitmaps;
use crate::oracle::End;
use crate::plan::{Ask, Planned};
use crate::record::Record;
use crate::shape::Shape;
use crate::troubles::end_of;

/// An operation that ended.
#[derive(Debug)]
struct Ended {
    planned: Planned,
    /// The time at which it was asked for.
    since: u64,
    result: Outcome,
}

/// The result of an operation.
#[derive(Debug)]
enum Outcome {
    Bitmap(Result<(), BitmapsError>),
    Compact(Result<Compacted, CompactError>),
    /// With the size that the disk had when it was asked for, in sectors.
    Shrink(u64, Result<(), ShrinkError>),
}

/// The operations of one queue, one at a time.
#[derive(Debug)]
pub(crate) struct Operations {
    shape: Shape,
    record: Rc<RefCell<Record>>,
    pub(crate) under_way: usize,
    ended: Rc<RefCell<Vec<Ended>>>,
}

impl Operations {
    pub(crate) fn new(shape: Shape, record: &Rc<RefCell<Record>>) -> Self {
        Self {
            shape,
            record: Rc::clone(record),
            under_way: 0,
            ended: Rc::default(),
        }
    }

    /// Begins an operation.
    pub(crate) fn ask(&mut self, cx: &Context, disk: &Arc<QcowDisk>, planned: Planned) {
        self.under_way += 1;
        let (disk, task_cx, ended) = (Arc::clone(disk), cx.clone(), Rc::clone(&self.ended));
        let shape = self.shape;
        let (since, old) = {
            let mut record = self.record.borrow_mut();
            record.note_asked(&self.shape, &planned);
            let old = match planned.ask {
                Ask::Shrink(bytes) => record.ask_shrink(bytes / SECTOR as u64),
                _ => record.sectors,
            };
            (record.time(), old)
        };
        cx.spawn(async move {
            let result = match planned.ask {
                Ask::Bitmap(number) => Outcome::Bitmap(bitmaps::add_disabled(&disk, &task_cx, number).await),
                Ask::Compact { reports, slow } => {
                    let rate = slow.then_some(SLOW_CLUSTERS * shape.cluster());
                    Outcome::Compact(compact(&disk, &task_cx, rate, reports).await)
                }
                Ask::Shrink(bytes) => Outcome::Shrink(old, disk.shrink(&task_cx, bytes).await),
                _ => return,
            };
            ended.borrow_mut().push(Ended {
                planned,
                since,
                result,
            });
        });
    }

    /// Notes operations that have ended. Returns true if there were any.
    pub(crate) fn note(&mut self) -> bool {
        let ended = std::mem::take(&mut *self.ended.borrow_mut());
        let any = !ended.is_empty();
        for Ended {
            planned,
            since,
            result,
        } in ended
        {
            self.under_way -= 1;
            let mut record = self.record.borrow_mut();
            let result = match result {
                Outcome::Bitmap(result) => note_bitmap(&mut record, &planned, result),
                Outcome::Compact(result) => note_compaction(&mut record, &planned, result),
                Outcome::Shrink(old, result) => note_shrink(&mut record, &planned, old, result),
            };
            record.ended(&planned, since, result);
        }
        any
    }
}

fn note_bitmap(
    record: &mut Record,
    planned: &Planned,
    result: Result<(), BitmapsError>,
) -> Result<(), IoError> {
    match result {
        Ok(()) => record.bitmaps += 1,
        // This machine is slow.
        Err(BitmapsError::Busy) => {}
        Err(error) => return record.host_result(planned, Err(error)),
    }
    Ok(())
}

fn note_shrink(
    record: &mut Record,
    planned: &Planned,
    old: u64,
    result: Result<(), ShrinkError>,
) -> Result<(), IoError> {
    let Ask::Shrink(bytes) = planned.ask else {
        return Ok(());
    };
    // Without its data file cut off the disk is smaller all the same.
    let end = match &result {
        Err(ShrinkError::DataFile(_)) => End::Done,
        result => end_of(result),
    };
    record.end_shrink(bytes / SECTOR as u64, old, end);
    match result {
        // This machine is slow; or the disk could not grow before.
        Ok(())
        | Err(ShrinkError::DataFile(IoError::Cancelled) | ShrinkError::Metadata(SnapshotError::Busy)) => {
            Ok(())
        }
        Err(ShrinkError::Size { bytes, now }) if bytes > now => Ok(()),
        result => record.host_result(planned, result),
    }
}

/// The clusters that a slow compaction moves in a second: each is a step.
const SLOW_CLUSTERS: u64 = 8;

/// Compacts an image, up to a report of its progress, or wholly with zero.
async fn compact(
    disk: &QcowDisk,
    cx: &Context,
    rate: Option<u64>,
    reports_max: u32,
) -> Result<Compacted, CompactError> {
    let mut reports = 0;
    let progress = |_: &CompactProgress| {
        reports += 1;
        match reports == reports_max {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    };
    disk.compact(cx, &CompactOptions { rate }, progress).await
}

fn note_compaction(
    record: &mut Record,
    planned: &Planned,
    result: Result<Compacted, CompactError>,
) -> Result<(), IoError> {
    match result {
        Ok(compacted) => record.moved_bytes += compacted.moved_bytes,
        // This machine is slow.
        Err(CompactError::Busy) => {}
        Err(error) => return record.host_result(planned, Err(error)),
    }
    Ok(())
}
