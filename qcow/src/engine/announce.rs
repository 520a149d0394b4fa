//! Announcements to other programs before the image changes: persistent bitmaps that go out of date, and autoclear
//! features that no longer hold.
//!
//! Invariants:
//!
//! - An announcement is durable before the first change of guest-visible data, and before the disk's size changes.
//! - An image that is only read stays unchanged.
//! - A bitmap that does not record changes is left alone unless the disk's size changes.

use block::sync::Mutex;
use block::sync::atomic::{AtomicBool, Ordering};
use block::{AlignedBuf, IoError};

use super::turn::Turns;
use super::{Queue, header};
use crate::format::{Autoclear, BitmapFlags};
use crate::image::bitmaps::Mark;

/// The marks and bits to write before a change.
#[derive(Debug, Default)]
pub(crate) struct Announcement {
    /// Bitmaps that record changes; the first change makes them out of date.
    pub(crate) recording: Vec<Mark>,
    /// Bitmaps that do not record changes; they cover a disk of the size they were made for.
    pub(crate) disabled: Vec<Mark>,
    /// The autoclear bits to keep, if others are set.
    pub(crate) keep: Option<Autoclear>,
}

impl Announcement {
    /// Adds a bitmap, unless somebody has marked it as in use.
    pub(crate) fn add(&mut self, mark: Mark) {
        if mark.flags.contains(BitmapFlags::IN_USE) {
            return;
        }
        let list = match mark.flags.contains(BitmapFlags::AUTO) {
            true => &mut self.recording,
            false => &mut self.disabled,
        };
        list.push(mark);
    }
}

/// An announcement and its progress.
#[derive(Debug)]
pub(super) struct Announcements {
    /// Set once everything that must be durable before a write is durable.
    writes: AtomicBool,
    rest: Mutex<Announcement>,
    turns: Turns,
}

impl Announcements {
    pub(super) fn new(announcement: Announcement) -> Self {
        let nothing = announcement.recording.is_empty() && announcement.keep.is_none();
        Self {
            writes: AtomicBool::new(nothing),
            rest: Mutex::new(announcement),
            turns: Turns::default(),
        }
    }

    /// Replaces what is to be announced, as the bitmaps have been replaced. Nothing is under way meanwhile.
    pub(super) fn replace(&self, next: Announcement) {
        let nothing = next.recording.is_empty() && next.keep.is_none();
        *self.rest.lock() = next;
        self.writes.store(nothing, Ordering::Release);
    }

    /// Returns true if the guest's data may be changed.
    #[inline]
    pub(super) fn allow_writes(&self) -> bool {
        self.writes.load(Ordering::Acquire)
    }
}

/// Announces once, durably, that the guest's data is about to change.
pub(super) async fn writes(queue: &Queue) -> Result<(), IoError> {
    let announcements = &queue.shared.announcements;
    if announcements.allow_writes() {
        return Ok(());
    }
    let _turn = announcements.turns.take().await;
    if announcements.allow_writes() {
        return Ok(());
    }
    let (marks, keep) = {
        let rest = announcements.rest.lock();
        (rest.recording.clone(), rest.keep)
    };
    mark_in_use(queue, &marks).await?;
    if let Some(keep) = keep {
        header::change(queue, |fields| fields.set_autoclear(keep)).await?;
        queue.file.sync().await?;
    }
    announcements.writes.store(true, Ordering::Release);
    Ok(())
}

/// Announces once, durably, that the disk's size is about to change.
pub(super) async fn resize(queue: &Queue) -> Result<(), IoError> {
    writes(queue).await?;
    let announcements = &queue.shared.announcements;
    let _turn = announcements.turns.take().await;
    let marks = announcements.rest.lock().disabled.clone();
    mark_in_use(queue, &marks).await?;
    announcements.rest.lock().disabled.clear();
    Ok(())
}

/// Marks bitmaps as in use. A QEMU that crashed leaves the same mark, and no program trusts such a bitmap.
async fn mark_in_use(queue: &Queue, marks: &[Mark]) -> Result<(), IoError> {
    if marks.is_empty() {
        return Ok(());
    }
    for mark in marks {
        let flags = (mark.flags | BitmapFlags::IN_USE).bits().to_be_bytes();
        queue
            .file
            .write_at(mark.offset, AlignedBuf::from_slice(&flags))
            .await?;
    }
    queue.file.sync().await
}
