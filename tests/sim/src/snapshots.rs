//! Snapshots that a queue creates, applies and deletes, beside the requests of all queues; and those of an image, as they are on
//! disk.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use block::Context;
use qcow::format::SnapshotEntry;
use qcow::format::header::at;
use qcow::{DiskSize, QcowDisk, SnapshotError, SnapshotSelector};
use simulator::{Random, SimImage};

use crate::oracle::{Asked, End};
use crate::plan::{Ask, Case, Planned};
use crate::record::Record;
use crate::shape::{Shape, u64_at};
use crate::troubles::{self, end_of};

/// An operation that ended.
#[derive(Debug)]
struct Ended {
    planned: Planned,
    /// The time at which it was asked for.
    since: u64,
    /// The change of the whole disk that an application is.
    change: Option<Asked>,
    result: Result<(), SnapshotError>,
}

/// The operations of one queue, one at a time.
#[derive(Debug)]
pub(crate) struct Snapshotting {
    shape: Shape,
    record: Rc<RefCell<Record>>,
    pub(crate) under_way: usize,
    ended: Rc<RefCell<Vec<Ended>>>,
}

/// The name of the snapshot that an image begins with.
pub(crate) const BEFORE: &str = "before";
/// The number of that snapshot.
pub(crate) const BEFORE_NUMBER: u32 = u32::MAX;

fn name_of(number: u32) -> String {
    match number {
        BEFORE_NUMBER => BEFORE.to_owned(),
        _ => format!("s{number}"),
    }
}

impl Snapshotting {
    pub(crate) fn new(shape: Shape, record: &Rc<RefCell<Record>>) -> Self {
        Self {
            shape,
            record: Rc::clone(record),
            under_way: 0,
            ended: Rc::default(),
        }
    }

    /// Creates the snapshot of a number, applies it or deletes it.
    pub(crate) fn ask(&mut self, cx: &Context, disk: &Arc<QcowDisk>, planned: Planned) {
        self.under_way += 1;
        let (disk, task_cx, ended) = (Arc::clone(disk), cx.clone(), Rc::clone(&self.ended));
        let (since, change) = {
            let mut record = self.record.borrow_mut();
            record.note_asked(&self.shape, &planned);
            let mut change = None;
            match planned.ask {
                Ask::Snapshot(number) => record.oracle.ask_snapshot(name_of(number)),
                Ask::Unsnapshot(number) => {
                    record.oracle.ask_deletion(&name_of(number));
                }
                Ask::Apply(number) => change = record.oracle.ask_application(&name_of(number)),
                _ => {}
            }
            (record.time(), change)
        };
        cx.spawn(async move {
            let result = match planned.ask {
                Ask::Snapshot(number) => {
                    let created = disk.create_snapshot(&task_cx, &name_of(number), UNIX_EPOCH).await;
                    created.map(drop)
                }
                Ask::Unsnapshot(number) => {
                    let which = SnapshotSelector::Name(name_of(number));
                    disk.delete_snapshot(&task_cx, &which).await
                }
                Ask::Apply(number) => {
                    let which = SnapshotSelector::Name(name_of(number));
                    disk.apply_snapshot(&task_cx, &which, DiskSize::Fixed).await
                }
                _ => Ok(()),
            };
            ended.borrow_mut().push(Ended {
                planned,
                since,
                change,
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
            change,
            result,
        } in ended
        {
            self.under_way -= 1;
            let mut record = self.record.borrow_mut();
            let (well, end) = (result.is_ok(), end_of(&result));
            record.snapshots += u64::from(well);
            record.applied += u64::from(well && matches!(planned.ask, Ask::Apply(_)));
            let expected = match (planned.ask, &result) {
                // Of clusters of very narrow counts.
                (Ask::Snapshot(_), Err(SnapshotError::RefcountFull { bits, .. })) => *bits < 8,
                // Its creation failed, or is not part of the plan.
                (Ask::Unsnapshot(number) | Ask::Apply(number), Err(SnapshotError::NotFound(_))) => {
                    !record.oracle.has_snapshot(&name_of(number))
                }
                // It has grown since, or become smaller.
                (Ask::Apply(_), Err(SnapshotError::OtherSize { then, now, .. })) => {
                    then < now || record.has_shrunk_or_tried()
                }
                // This machine is slow.
                (_, Err(SnapshotError::Busy)) => true,
                _ => false,
            };
            match planned.ask {
                Ask::Snapshot(number) => record.oracle.answer_snapshot(&name_of(number), end),
                Ask::Unsnapshot(number) => record.oracle.answer_deletion(&name_of(number), end),
                _ => {}
            }
            match (change, end) {
                (None, _) => {}
                (Some(change), End::Done) => record.oracle.answer_change(&change, true, true),
                (Some(change), End::Unknown) => record.oracle.answer_change(&change, false, false),
                (Some(change), End::Undone) => record.oracle.withdraw_change(&change),
            }
            let outcome = match result {
                Err(_) if expected => Ok(()),
                result => record.host_result(&planned, result),
            };
            record.ended(&planned, since, outcome);
        }
        any
    }
}

/// The run of a seed whose disk has snapshots created, applied and deleted while all queues go on.
pub(crate) fn draw(seed: u64) -> Case {
    let mut case = Case::draw(seed);
    let random = &mut Random::new(seed.rotate_left(56));
    case.profile = troubles::draw(case.profile, seed);
    let shape = &mut case.shape;
    // A data file has one version.
    shape.data_file = None;
    if !shape.extended {
        shape.cluster_bits = shape.cluster_bits.min(12);
    }
    shape.refcount_bits = shape.refcount_bits.max(random.pick(&[1, 2, 2, 8]));
    if shape.device > 0 {
        shape.device = shape.device.max(random.pick(&[shape.device, 256 << 10]));
    }
    if shape.v2 {
        // Such a disk does not grow while it has snapshots.
        let sectors = shape.bytes / simulator::SECTOR as u64;
        case.plan.retain(|planned| {
            !matches!(planned.ask, Ask::Grow(_)) && planned.first + planned.count <= sectors
        });
    }
    case.plan.truncate(70);
    let mut numbers: Vec<u32> = Vec::new();
    let mut place = 0;
    for number in 0..3 + random.below(5) as u32 {
        place += random.below(1 + case.plan.len() as u64 / 4) as usize;
        let ask = if !numbers.is_empty() && random.one_in(3) {
            Ask::Apply(numbers[random.below(numbers.len() as u64) as usize])
        } else if !numbers.is_empty() && random.one_in(2) {
            Ask::Unsnapshot(numbers.swap_remove(random.below(numbers.len() as u64) as usize))
        } else {
            numbers.push(number);
            Ask::Snapshot(number)
        };
        let planned = Planned {
            alone: random.one_in(4),
            ..Planned::new(ask, 0, 0)
        };
        case.plan.insert(place.min(case.plan.len()), planned);
        place += 1;
    }
    case
}

/// The snapshots of an image: the name of each, and the image with the snapshot's mapping in place of the disk's. A
/// snapshot that does not record its size has `bytes`.
///
/// # Errors
///
/// Says which entry is malformed.
pub(crate) fn of_image(image: &SimImage, bytes: u64) -> Result<Vec<(String, SimImage)>, String> {
    let mut header = [0; 512];
    image.read(0, &mut header);
    let count = u64_at(&header, at::NB_SNAPSHOTS) >> 32;
    let mut offset = u64_at(&header, at::SNAPSHOTS_OFFSET);
    let mut snapshots = Vec::new();
    for index in 0..count {
        let mut entry = [0; 1024];
        image.read(offset, &mut entry);
        let malformed = |error| format!("snapshot {index} is malformed: {error}");
        offset += SnapshotEntry::peek_len(&entry).map_err(malformed)? as u64;
        let entry = SnapshotEntry::parse(&entry).map_err(malformed)?;
        let mut patched = image.clone();
        patched.patch(at::L1_TABLE_OFFSET as u64, &entry.l1_offset.bytes().to_be_bytes());
        patched.patch(at::L1_SIZE as u64, &entry.l1_entries.to_be_bytes());
        patched.patch(at::SIZE as u64, &entry.disk_size().unwrap_or(bytes).to_be_bytes());
        snapshots.push((String::from_utf8_lossy(&entry.name).into_owned(), patched));
    }
    Ok(snapshots)
}
