//! The locks of one server, and their transfer to the next by their open file descriptions.
//!
//! A lock lives as long as its description, whichever process has it. The old server passes descriptors of all its
//! locks to the new one and, from then on, releases none of them explicitly. The new one takes its locks on the
//! inherited descriptions.
//!
//! Invariant: as long as two processes may have a description, neither releases its lock except by closing it.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use super::{ByteLock, ImageLock, unset};
use crate::sync::{Mutex, MutexGuard};

/// The image locks of one server, or of one of its disks ([`LockSet::part`]). Clones are the same set.
#[derive(Clone, Debug, Default)]
pub struct LockSet {
    shared: Arc<Shared>,
    /// True if nobody's end is waited for.
    at_once: bool,
}

#[derive(Debug, Default)]
struct Shared {
    /// The set that this one is a part of.
    whole: Option<LockSet>,
    /// Another process has these descriptions too, or may have.
    is_shared: AtomicBool,
    locks: Mutex<Locks>,
}

#[derive(Debug, Default)]
struct Locks {
    /// Descriptions from another process, or held over, not used so far.
    inherited: Vec<OwnedFd>,
    /// Those of locks that stay held over when they are dropped.
    held_over: Vec<Weak<OwnedFd>>,
    /// Descriptions of locks that are, or were, held, with their ranges.
    held: Vec<(Weak<OwnedFd>, Vec<ByteLock>)>,
}

/// Returns the device and inode of an open file.
fn identity(fd: BorrowedFd<'_>) -> Option<(u64, u64)> {
    let found = File::from(fd.try_clone_to_owned().ok()?).metadata().ok()?;
    Some((found.dev(), found.ino()))
}

impl LockSet {
    /// Makes a set that takes its locks on these descriptions, if one is of the file to be locked. Until
    /// [`LockSet::keep`] another process shares them: a lock that is dropped stays held there.
    #[must_use]
    pub fn inherit(descriptors: Vec<OwnedFd>) -> Self {
        let locks = Locks {
            inherited: descriptors,
            ..Locks::default()
        };
        let shared = Arc::new(Shared {
            whole: None,
            is_shared: true.into(),
            locks: Mutex::new(locks),
        });
        Self {
            shared,
            at_once: false,
        }
    }

    /// Returns a set of the locks of one disk, which are among those of this set, too.
    #[must_use]
    pub fn part(&self) -> Self {
        let shared = Arc::new(Shared {
            whole: Some(self.clone()),
            ..Shared::default()
        });
        Self {
            shared,
            at_once: self.at_once,
        }
    }

    /// As [`LockSet::part`], of a disk that another process hands over, with the descriptors of its locks: as [`LockSet::inherit`].
    #[must_use]
    pub fn part_inheriting(&self, descriptors: Vec<OwnedFd>) -> Self {
        let mut locks = Self::inherit(descriptors);
        if let Some(shared) = Arc::get_mut(&mut locks.shared) {
            shared.whole = Some(self.clone());
        }
        locks
    }

    /// Duplicates the descriptors of the locks that are held over, for another process.
    ///
    /// # Errors
    ///
    /// If the process has no descriptor left.
    pub fn held_over(&self) -> io::Result<Vec<OwnedFd>> {
        self.locks().inherited.iter().map(OwnedFd::try_clone).collect()
    }

    /// Returns the same set for one who tries again anyway: a lock that a killed process may hold is not waited for.
    #[must_use]
    pub fn at_once(&self) -> Self {
        Self {
            at_once: true,
            ..self.clone()
        }
    }

    /// Duplicates the descriptors of all locks that are held now, for another process or for [`LockSet::inherit`].
    ///
    /// # Errors
    ///
    /// If the process has no descriptor left.
    pub fn descriptors(&self) -> io::Result<Vec<OwnedFd>> {
        let locks = self.locks();
        let held = locks.held.iter().filter_map(|(fd, _)| fd.upgrade());
        held.map(|fd| fd.try_clone()).collect()
    }

    /// Leaves the locks to the process that shares their descriptions: from now on a dropped lock is not released.
    pub fn leave(&self) {
        self.shared.is_shared.store(true, Ordering::Release);
    }

    /// Holds the locks of a disk, which are these, over the time in which its `files` are closed and opened again: those that are
    /// dropped stay held, for whoever locks the files next as a part of this set. [`LockSet::keep`] ends that.
    ///
    /// # Errors
    ///
    /// If there is no such file, or it is not one that is locked; if the process has no descriptor left. Nothing is held over then that
    /// was not before.
    pub fn hold_over(&self, files: &[PathBuf]) -> io::Result<()> {
        let mut locks = self.locks();
        let held: Vec<_> = locks.held.iter().filter_map(|(fd, _)| fd.upgrade()).collect();
        let found: Vec<_> = held.iter().map(|fd| identity(fd.as_fd())).collect();
        for path in files {
            let file = fs::metadata(path)?;
            if !found.contains(&Some((file.dev(), file.ino()))) {
                let problem = format!("{} is another file than the one that is locked", path.display());
                return Err(io::Error::new(io::ErrorKind::NotFound, problem));
            }
        }
        let copies = held.iter().map(|fd| fd.try_clone());
        let copies = copies.collect::<io::Result<Vec<_>>>()?;
        locks.inherited.extend(copies);
        locks.held_over.extend(held.iter().map(Arc::downgrade));
        Ok(())
    }

    /// Makes the locks this process's alone: a dropped lock is released again. Closes unused inherited descriptions,
    /// and releases ranges that the other process had locked beyond those needed. The caller must ensure that no
    /// other process relies on the locks any more.
    pub fn keep(&self) {
        self.shared.is_shared.store(false, Ordering::Release);
        let mut locks = self.locks();
        locks.inherited.clear();
        locks.held_over.clear();
        for (fd, ranges) in &locks.held {
            let Some(fd) = fd.upgrade() else { continue };
            for range in outside(ranges) {
                if let Err(error) = unset(fd.as_raw_fd(), range) {
                    tracing::warn!(%error, start = range.start, "could not release an image lock");
                }
            }
        }
    }

    /// Returns true if a lock that a killed process may hold is waited for.
    pub(super) fn waits(&self) -> bool {
        !self.at_once
    }

    /// Returns true if a lock that is dropped stays with another process.
    pub(super) fn is_shared(&self) -> bool {
        self.shared.is_shared.load(Ordering::Acquire) || self.whole().is_some_and(Self::is_shared)
    }

    fn whole(&self) -> Option<&Self> {
        self.shared.whole.as_ref()
    }

    /// Returns true if a lock on this description stays when it is dropped.
    pub(super) fn stays(&self, fd: &Arc<OwnedFd>) -> bool {
        let is_held_over = |held: &Weak<OwnedFd>| std::ptr::eq(held.as_ptr(), Arc::as_ptr(fd));
        self.is_shared() || self.locks().held_over.iter().any(is_held_over)
    }

    /// Takes an inherited description of the file behind `fd` out of the set, or out of the one that it is a part of.
    pub(super) fn take_inherited(&self, fd: BorrowedFd<'_>) -> Option<OwnedFd> {
        self.take_own(fd).or_else(|| self.whole()?.take_inherited(fd))
    }

    /// Gives back a description that [`LockSet::take_inherited`] took.
    pub(super) fn give_back(&self, inherited: OwnedFd) {
        self.locks().inherited.push(inherited);
    }

    fn take_own(&self, fd: BorrowedFd<'_>) -> Option<OwnedFd> {
        let mut locks = self.locks();
        if locks.inherited.is_empty() {
            return None;
        }
        let wanted = identity(fd)?;
        let index = locks
            .inherited
            .iter()
            .position(|inherited| identity(inherited.as_fd()) == Some(wanted))?;
        Some(locks.inherited.swap_remove(index))
    }

    /// Adds a lock that was just taken.
    pub(super) fn add(&self, lock: &ImageLock) {
        let mut locks = self.locks();
        locks.held.retain(|(fd, _)| fd.strong_count() > 0);
        locks.held.push((Arc::downgrade(&lock.fd), lock.held.clone()));
        drop(locks);
        if let Some(whole) = self.whole() {
            whole.add(lock);
        }
    }

    fn locks(&self) -> MutexGuard<'_, Locks> {
        self.shared.locks.lock()
    }
}

/// Returns the ranges between, before and behind these.
fn outside(ranges: &[ByteLock]) -> Vec<ByteLock> {
    let mut ranges = ranges.to_vec();
    ranges.sort_unstable_by_key(|range| range.start);
    let (mut gaps, mut from) = (Vec::new(), Some(0));
    for range in ranges {
        if let Some(start) = from.filter(|&start| start < range.start) {
            gaps.push(ByteLock {
                start,
                len: range.start - start,
                exclusive: false,
            });
        }
        // A length of zero goes to the end.
        from = (range.len > 0).then_some(range.start + range.len);
    }
    gaps.extend(from.map(|start| ByteLock {
        start,
        len: 0,
        exclusive: false,
    }));
    gaps
}

#[cfg(test)]
mod tests {
    use super::super::{LockError, LockGranularity, LockMode, PERMISSION_BASE, UNSHARED_BASE, WRITE};
    use super::*;
    use std::path::Path;
    use std::time::Duration;

    struct World {
        folder: tempfile::TempDir,
    }

    impl World {
        fn new() -> Self {
            let world = Self {
                folder: tempfile::tempdir().expect("a folder"),
            };
            std::fs::write(world.path(), "an image").expect("a file");
            world
        }

        fn path(&self) -> PathBuf {
            self.folder.path().join("image")
        }

        fn open(&self) -> File {
            let mut options = File::options();
            options.read(true).write(true).open(self.path()).expect("a file")
        }

        /// Locks the image on a description of its own, if `set` has none.
        fn lock(&self, set: &LockSet, how: (LockMode, LockGranularity)) -> Result<ImageLock, LockError> {
            ImageLock::acquire(set, self.open().as_fd(), Path::new("image"), how.0, how.1)
        }

        /// Returns true if a stranger could write the image now. It does not try, so that it is in nobody's way.
        fn is_free(&self) -> bool {
            let file = self.open();
            let whole = ByteLock::whole_file(true);
            super::super::conflicts(file.as_raw_fd(), whole)
                .expect("a look")
                .is_none()
        }
    }

    const WAYS: [(LockMode, LockGranularity); 4] = [
        (LockMode::Write, LockGranularity::ByteRange),
        (LockMode::Write, LockGranularity::Full),
        (LockMode::Read, LockGranularity::ByteRange),
        (LockMode::Read, LockGranularity::Full),
    ];

    #[test]
    fn lock_set_hands_locks_over_without_a_gap() {
        for how in WAYS {
            let world = World::new();
            let old = LockSet::default();
            let held = world.lock(&old, how).expect("nobody has it");
            let passed = old.descriptors().expect("descriptors");
            old.leave();
            drop(held);
            assert!(!world.is_free(), "{how:?}: it is on its way");
            let new = LockSet::inherit(passed);
            let held = world.lock(&new, how).expect("it was handed over");
            assert!(!world.is_free(), "{how:?}");
            new.keep();
            assert!(!world.is_free(), "{how:?}");
            // And once more: the description that the first one made goes on.
            let passed = new.descriptors().expect("descriptors");
            assert_eq!(passed.len(), 1);
            new.leave();
            drop(held);
            let third = LockSet::inherit(passed);
            let held = world.lock(&third, how).expect("it was handed over");
            third.keep();
            drop(held);
            assert!(world.is_free(), "{how:?}: dropped, it is given back");
        }
    }

    #[test]
    fn lock_held_over_has_no_gap_while_its_file_is_opened_again() {
        for how in WAYS {
            let world = World::new();
            let set = LockSet::default().part();
            let held = world.lock(&set, how).expect("nobody has it");
            set.hold_over(&[world.path()]).expect("descriptors");
            drop(held);
            assert!(!world.is_free(), "{how:?}: it is held over");
            let again = world.lock(&set, how).expect("it was held over");
            set.keep();
            assert!(!world.is_free(), "{how:?}");
            drop(again);
            assert!(world.is_free(), "{how:?}: dropped, it is given back");
            // Nobody locks it again.
            let held = world.lock(&set, how).expect("nobody has it");
            set.hold_over(&[world.path()]).expect("descriptors");
            drop(held);
            set.keep();
            assert!(world.is_free(), "{how:?}: nobody wanted it");
            set.hold_over(&[world.folder.path().join("none")])
                .expect_err("there is no such file");
            let held = world.lock(&set, how).expect("nobody has it");
            std::fs::rename(world.path(), world.folder.path().join("aside")).expect("renamed");
            std::fs::write(world.path(), "another").expect("a file");
            let refused = set.hold_over(&[world.path()]).expect_err("it is another file");
            let said = refused.to_string();
            assert!(
                said.contains("is another file than the one that is locked"),
                "{said}"
            );
            drop(held);
        }
    }

    /// Has the bytes that a writer takes before it looks whether it may, as QEMU does.
    fn try_as_qemu(world: &World) -> File {
        let file = world.open();
        for byte in [PERMISSION_BASE + WRITE, UNSHARED_BASE + WRITE] {
            super::super::take(file.as_raw_fd(), ByteLock::byte(byte)).expect("both may have it");
        }
        file
    }

    #[test]
    fn lock_held_over_is_kept_whoever_tries_to_take_it_meanwhile() {
        let how = (LockMode::Write, LockGranularity::ByteRange);
        let world = World::new();
        let set = LockSet::default().part();
        let held = world.lock(&set, how).expect("nobody has it");
        set.hold_over(&[world.path()]).expect("descriptors");
        drop(held);
        // It is refused, of course, and goes.
        let trying = try_as_qemu(&world);
        let goes = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            drop(trying);
        });
        let again = world.lock(&set, how).expect("it was held over");
        goes.join().expect("no panic");
        // One that stays is told, and the lock is there for the next try.
        set.keep();
        set.hold_over(&[world.path()]).expect("descriptors");
        drop(again);
        let staying = try_as_qemu(&world);
        let refused = world.lock(&set, how).expect_err("somebody else is there");
        assert!(matches!(refused, LockError::Held { .. }), "{refused}");
        drop(staying);
        assert!(!world.is_free(), "it is held over");
        let again = world.lock(&set, how).expect("it was held over");
        set.keep();
        drop(again);
        assert!(world.is_free(), "dropped, it is given back");
    }

    /// Two disks have the same backing file. One of them is opened again, and then the other one ends.
    #[test]
    fn lock_held_over_is_not_that_of_another_disk() {
        for how in [WAYS[2], WAYS[3]] {
            let world = World::new();
            let all = LockSet::default();
            let (one, other) = (all.part(), all.part());
            let others = world.lock(&other, how).expect("a reader");
            let held = world.lock(&one, how).expect("another reader");
            one.hold_over(&[world.path()]).expect("descriptors");
            drop(held);
            let again = world.lock(&one, how).expect("it was held over");
            one.keep();
            drop(others);
            assert!(!world.is_free(), "{how:?}: the one that was opened again has it");
            assert_eq!(all.descriptors().expect("descriptors").len(), 1);
            drop(again);
            assert!(world.is_free(), "{how:?}");
        }
    }

    #[test]
    fn part_takes_what_the_whole_has_inherited() {
        for how in WAYS {
            let world = World::new();
            let old = LockSet::default();
            let held = world.lock(&old.part(), how).expect("nobody has it");
            let passed = old.descriptors().expect("descriptors");
            assert_eq!(passed.len(), 1);
            old.leave();
            drop(held);
            assert!(!world.is_free(), "{how:?}: it is on its way");
            let new = LockSet::inherit(passed);
            let held = world.lock(&new.part(), how).expect("it was handed over");
            new.keep();
            assert!(!world.is_free(), "{how:?}");
            drop(held);
            assert!(world.is_free(), "{how:?}: dropped, it is given back");
        }
    }

    #[test]
    fn lock_set_keeps_old_owners_locks_when_heir_fails() {
        for how in WAYS {
            let world = World::new();
            let old = LockSet::default();
            let held = world.lock(&old, how).expect("nobody has it");
            let new = LockSet::inherit(old.descriptors().expect("descriptors"));
            let adopted = world.lock(&new, how).expect("it was handed over");
            drop((adopted, new));
            assert!(!world.is_free(), "{how:?}: the old one has it");
            // The old one takes back what it had left.
            let own = old.descriptors().expect("descriptors");
            old.leave();
            drop(held);
            let again = LockSet::inherit(own);
            let held = world.lock(&again, how).expect("its own");
            again.keep();
            drop(held);
            assert!(world.is_free(), "{how:?}");
        }
    }

    #[test]
    fn lock_set_does_not_adopt_description_of_another_file() {
        let how = WAYS[0];
        let world = World::new();
        let old = LockSet::default();
        let _held = world.lock(&old, how).expect("nobody has it");
        let new = LockSet::inherit(old.descriptors().expect("descriptors"));
        // Another image has the name now, and somebody has it.
        std::fs::rename(world.path(), world.folder.path().join("aside")).expect("renamed");
        std::fs::write(world.path(), "another").expect("a file");
        let stranger = world.lock(&LockSet::default(), how).expect("nobody has it");
        let refused = world.lock(&new, how).expect_err("it is a stranger's");
        assert!(matches!(refused, LockError::Held { .. }), "{refused}");
        drop(stranger);
    }

    #[test]
    fn lock_set_releases_inherited_locks_it_does_not_need() {
        for (before, after) in [(WAYS[0], WAYS[2]), (WAYS[1], WAYS[2]), (WAYS[1], WAYS[0])] {
            let world = World::new();
            let old = LockSet::default();
            let held = world.lock(&old, before).expect("nobody has it");
            let passed = old.descriptors().expect("descriptors");
            old.leave();
            drop(held);
            let new = LockSet::inherit(passed);
            let _held = world.lock(&new, after).expect("it was handed over");
            new.keep();
            let reader = world.lock(&LockSet::default(), WAYS[2]);
            assert_eq!(reader.is_ok(), after.0 == LockMode::Read, "{before:?} {after:?}");
            drop(reader);
            let writer = world.lock(&LockSet::default(), WAYS[0]);
            assert!(writer.is_err(), "{before:?} {after:?}");
        }
    }
}
