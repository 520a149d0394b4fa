//! Announcements to other programs before the image changes: persistent bitmaps whose stored bits go out of date, and autoclear
//! features that no longer hold.
//!
//! Invariants:
//!
//! - An announcement is durable before the first change of guest-visible data, and before the disk's size changes. So is all that the open
//!   has found, which a killed program may have written: a mark that it made, and a snapshot that it deleted, whose clusters may be
//!   overwritten now.
//! - An image that is only read stays unchanged.
//! - The bits of bitmaps that record changes are in memory ([`Metadata::bitmaps`](crate::metadata::Metadata::bitmaps)) before the first
//!   change, unless they do not fit, or are damaged. Then the announcement is what is left of them.
//! - A bitmap that does not record changes is left alone unless the disk's size changes.

use std::rc::Rc;
use std::sync::Arc;

use block::canary::{Rule, broken};
use block::file::{FileView, ImageFile};
use block::sync::Mutex;
use block::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use block::{AlignedBuf, IoError};

use super::turn::Turns;
use super::{Queue, bitmaps, header};
use crate::format::bitmap::BITMAP_FLAGS_AT;
use crate::format::{Autoclear, BitmapDirectoryEntry, BitmapFlags, Header};
use crate::image::ReadError;
use crate::image::bitmaps::{BitmapDirectoryError, consistent_bitmaps, for_each_bitmap};
use crate::metadata::dirty_bits::DirtyBitmaps;

/// The place and value of a bitmap's flags.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Mark {
    /// The offset in bytes.
    pub(crate) offset: u64,
    /// The flags as they are on disk.
    pub(crate) flags: BitmapFlags,
}

/// The marks and bits to write before a change.
#[derive(Debug, Default)]
pub(crate) struct Announcement {
    /// Bitmaps that record changes; the first change makes what is stored of them out of date.
    pub(crate) recording: Vec<Mark>,
    /// Bitmaps that do not record changes; they cover a disk of the size they were made for.
    pub(crate) disabled: Vec<Mark>,
    /// The autoclear bits to keep, if others are set.
    pub(crate) keep: Option<Autoclear>,
}

impl Announcement {
    /// Returns the announcement of the bitmaps that nobody has marked as in use yet.
    ///
    /// # Errors
    ///
    /// [`BitmapDirectoryError`]; the caller may then clear [`Autoclear::BITMAPS`] instead, which leaves the bitmaps' clusters as leaks.
    pub(crate) async fn read(file: &FileView, header: &Header) -> Result<Self, BitmapDirectoryError> {
        let mut found = Self::default();
        let Some(extension) = consistent_bitmaps(header) else {
            return Ok(found);
        };
        let file_len = file.len().map_err(ReadError::Length)?;
        let each = |at: u64, entry: BitmapDirectoryEntry| {
            found.add(Mark {
                offset: at + BITMAP_FLAGS_AT as u64,
                flags: entry.flags,
            });
        };
        for_each_bitmap(file, header, &extension, file_len, each).await?;
        Ok(found)
    }

    /// Adds a bitmap, unless somebody has marked it as in use.
    pub(super) fn add(&mut self, mark: Mark) {
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

/// The duty of a change before it begins.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u8)]
pub(super) enum Duty {
    /// Something is to be announced, or made durable, first.
    Announce,
    /// Nothing.
    Nothing,
    /// The change is recorded in bitmaps.
    Record,
}

/// An announcement and its progress.
#[derive(Debug)]
pub(super) struct Announcements {
    /// A [`Duty`].
    duty: AtomicU8,
    rest: Mutex<Announcement>,
    /// Bitmaps that do not record changes are marked as in use, because the disk's size may have changed.
    are_all_marked: AtomicBool,
    /// Bits of bitmaps could not be made durable once: they are stored when the image is closed.
    is_degraded: AtomicBool,
    turns: Turns,
}

impl Announcements {
    /// Returns the announcements of the image in `file`.
    pub(super) fn new(file: &ImageFile, announcement: Announcement) -> Self {
        let new = Self {
            duty: AtomicU8::new(Duty::Nothing as u8),
            rest: Mutex::default(),
            are_all_marked: AtomicBool::new(false),
            is_degraded: AtomicBool::new(false),
            turns: Turns::default(),
        };
        new.replace(announcement, false);
        if !file.has_synced() {
            new.set(Duty::Announce);
        }
        new
    }

    /// Replaces what is to be announced, as the bitmaps have been replaced, durably. `records`: they are kept durable, and record
    /// already. Nothing is under way meanwhile.
    pub(super) fn replace(&self, next: Announcement, records: bool) {
        let duty = match next.recording.is_empty() && next.keep.is_none() {
            _ if records => Duty::Record,
            true => Duty::Nothing,
            false => Duty::Announce,
        };
        *self.rest.lock() = next;
        self.are_all_marked.store(false, Ordering::Release);
        self.set(duty);
    }

    fn set(&self, duty: Duty) {
        self.duty.store(duty as u8, Ordering::Release);
    }

    /// Returns true if a change of the guest's data has no duty.
    #[inline]
    pub(super) fn are_none(&self) -> bool {
        self.duty.load(Ordering::Acquire) == Duty::Nothing as u8
    }

    /// Returns the duty of a change of the guest's data.
    pub(super) fn duty(&self) -> Duty {
        match self.duty.load(Ordering::Acquire) {
            duty if duty == Duty::Nothing as u8 => Duty::Nothing,
            duty if duty == Duty::Record as u8 => Duty::Record,
            _ => Duty::Announce,
        }
    }

    /// Returns true if there are bitmaps that record changes.
    pub(super) fn have_recording(&self) -> bool {
        !self.rest.lock().recording.is_empty()
    }

    /// Returns true if there are bitmaps that do not record changes.
    pub(super) fn have_disabled(&self) -> bool {
        !self.rest.lock().disabled.is_empty()
    }

    /// Returns the offsets of the flags of bitmaps that record changes, and of those that do not, in order, as far as nobody had marked
    /// them as in use when they were read.
    pub(super) fn marks(&self) -> (Vec<u64>, Vec<u64>) {
        let rest = self.rest.lock();
        let offsets = |marks: &[Mark]| marks.iter().map(|mark| mark.offset).collect();
        (offsets(&rest.recording), offsets(&rest.disabled))
    }

    /// Returns true if bitmaps that do not record changes are marked as in use.
    pub(super) fn are_all_marked(&self) -> bool {
        self.are_all_marked.load(Ordering::Acquire)
    }

    /// Forgets the bitmaps that record changes: they stay marked as in use. Nothing is under way meanwhile.
    pub(super) fn forget_recording(&self) {
        self.rest.lock().recording.clear();
        self.set(Duty::Nothing);
    }

    /// Has bits stored when the image is closed from now on.
    pub(super) fn degrade(&self) {
        self.is_degraded.store(true, Ordering::Release);
    }

    pub(super) fn is_degraded(&self) -> bool {
        self.is_degraded.load(Ordering::Acquire)
    }
}

/// Announces once, durably, that the guest's data is about to change. The bits of bitmaps that record changes are in memory then.
pub(super) async fn writes(queue: &Rc<Queue>) -> Result<(), IoError> {
    let announcements = &queue.shared.announcements;
    if announcements.duty() != Duty::Announce {
        return Ok(());
    }
    let _turn = announcements.turns.take().await;
    if announcements.duty() != Duty::Announce {
        return Ok(());
    }
    let bitmaps = bits_in_memory(queue).await?;
    announce(queue, false).await?;
    put_in_force(queue, bitmaps, Duty::Record)
}

/// Announces, durably, that the guest's data is about to change and that no bitmap will have it: what is stored of durable bitmaps goes
/// out of date, too. No request is under way.
pub(super) async fn give_up(queue: &Rc<Queue>) -> Result<(), IoError> {
    let _turn = queue.shared.announcements.turns.take().await;
    announce(queue, false).await
}

/// Announces, durably, that the disk's size is about to become `size_bytes`. What is stored of durable bitmaps does not cover such a
/// disk: the next change stores them anew.
pub(super) async fn resize(queue: &Rc<Queue>, size_bytes: u64) -> Result<(), IoError> {
    let announcements = &queue.shared.announcements;
    let _turn = announcements.turns.take().await;
    let bitmaps = bits_in_memory(queue).await?;
    announce(queue, true).await?;
    let is_any = announcements.have_disabled();
    announcements.are_all_marked.store(is_any, Ordering::Release);
    let bitmaps = bitmaps.map(|bitmaps| {
        let memory_bytes = queue.shared.policy.bitmaps.memory_bytes;
        Arc::new(bitmaps.grown(size_bytes, memory_bytes))
    });
    let duty = match bitmaps::are_durable(queue) {
        true => Duty::Announce,
        false => Duty::Record,
    };
    put_in_force(queue, bitmaps, duty)
}

/// Returns the bitmaps that record changes with their bits. They are read before the first change.
async fn bits_in_memory(queue: &Rc<Queue>) -> Result<Option<Arc<DirtyBitmaps>>, IoError> {
    let announcements = &queue.shared.announcements;
    let present = queue.metadata()?.bitmaps.clone();
    if present.is_some() || announcements.duty() != Duty::Announce || !announcements.have_recording() {
        return Ok(present);
    }
    match bitmaps::load(queue).await {
        Ok(bitmaps) => Ok(Some(Arc::new(bitmaps)).filter(|bitmaps| !bitmaps.list.is_empty())),
        Err(bitmaps::BitmapsError::Io(error)) => Err(error),
        Err(error) => {
            let image = queue.shared.file.path().display();
            tracing::warn!(%image, %error, "the image's bitmaps cannot be kept; they are marked as in use");
            Ok(None)
        }
    }
}

fn put_in_force(queue: &Queue, bitmaps: Option<Arc<DirtyBitmaps>>, duty: Duty) -> Result<(), IoError> {
    let duty = if bitmaps.is_some() { duty } else { Duty::Nothing };
    let old = std::mem::replace(&mut queue.shared.write()?.bitmaps, bitmaps);
    queue.shared.announcements.set(duty);
    // Not under the lock: it may be large.
    drop(old);
    Ok(())
}

async fn announce(queue: &Queue, all: bool) -> Result<(), IoError> {
    let (mut marks, disabled, keep) = {
        let rest = queue.shared.announcements.rest.lock();
        (rest.recording.clone(), rest.disabled.clone(), rest.keep)
    };
    if all {
        marks.extend(disabled);
    }
    mark_in_use(queue, &marks).await?;
    let is_durable = marks.is_empty() && queue.shared.file.has_synced();
    if !is_durable && !broken(Rule::InUseAfterChanges) {
        queue.file.sync().await?;
    }
    if let Some(keep) = keep {
        header::change(queue, |fields| fields.set_autoclear(keep)).await?;
        queue.file.sync().await?;
    }
    Ok(())
}

/// Marks bitmaps as in use. A QEMU that crashed leaves the same mark, and no program trusts such a bitmap.
async fn mark_in_use(queue: &Queue, marks: &[Mark]) -> Result<(), IoError> {
    for mark in marks {
        let flags = (mark.flags | BitmapFlags::IN_USE).bits().to_be_bytes();
        queue
            .file
            .write_at(mark.offset, AlignedBuf::from_slice(&flags))
            .await?;
    }
    Ok(())
}
