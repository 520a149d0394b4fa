//! State of a simulated world: files, ops in flight, and their next steps.
//!
//! Life cycle of an op: submitted, taking effect (at once or in pieces), done, completed. Random choices are
//! drawn when an op's turn comes, from the world's one source.
//!
//! Invariants: the memory of an op is touched only between its submission and its completion; all iteration is
//! in the order of submission.

#![expect(unsafe_code, reason = "touches the memory of ops, as a kernel would")]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::RawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use super::file::Contents;
use super::image::{SECTOR, SimImage, Store};
use super::memory;
use super::pages::{self, Pages, Way};
use super::profile::{Faults, Profile};
use super::random::Random;
use super::trace::{Event, Trace, What};
use block::buffer::IoSlice;
use block::canary::{Rule, broken};
use block::file::Alignment;
use block::ring::driver::{Completion, KernelOp, Kind};

/// A file of the world. A memfd represents it outside, and is identified by its inode.
#[derive(Debug)]
struct SimFile {
    name: PathBuf,
    descriptor: File,
    identity: (u64, u64),
    alignment: Alignment,
    /// True if its length is fixed, as a block device's.
    fixed_size: bool,
    contents: Contents,
    /// Set if it is not a disk but the door of these pages, with their bytes.
    pages: Option<Rc<Pages>>,
}

impl SimFile {
    fn len(&self) -> u64 {
        match &self.pages {
            Some(pages) => pages.len() as u64,
            None => self.contents.now.len(),
        }
    }
}

/// A slot in a ring's buffer table.
#[derive(Debug)]
pub(super) struct FixedPlace {
    pub(super) pages: Rc<Pages>,
    /// Its bytes in the pages.
    pub(super) range: Range<usize>,
    /// The kernel's name for the first of them.
    pub(super) base: u64,
}

impl FixedPlace {
    /// Returns the memory behind a stretch that an op names; `None` past its end, or if ops must not go this way.
    fn find(&self, stretch: &IoSlice, way: Way) -> Option<IoSlice> {
        let skip = (stretch.ptr().addr() as u64).checked_sub(self.base)?;
        let skip = usize::try_from(skip).ok()?;
        let start = self.range.start + skip;
        let inside = skip.checked_add(stretch.len())? <= self.range.len();
        let allowed = inside && self.pages.allows(&(start..start + stretch.len()), way);
        allowed.then(|| self.pages.stretch(start, stretch.len()))
    }
}

/// Outcome of an op.
#[derive(Clone, Copy, Debug)]
struct Fate {
    /// The number of bytes that take effect.
    bytes: u64,
    /// The error, if the result is not the number of bytes.
    errno: Option<i32>,
}

#[derive(Debug)]
struct SimOp {
    id: u64,
    ring: u32,
    user_data: u64,
    kind: Kind,
    file: usize,
    offset: u64,
    /// The number of bytes of the operation.
    len: u64,
    slices: *const IoSlice,
    slice_count: usize,
    /// The one stretch that replaces the slices, if it is a registered buffer's.
    fixed: Option<IoSlice>,
    submitted: u64,
    not_before: u64,
    fate: Option<Fate>,
    /// The number of bytes that have taken effect.
    done: u64,
    /// The result, once its effect is over and only the completion is to come.
    result: Option<i32>,
    cancelled: bool,
}

/// The turn of an op that is held: never, until it is released.
const HELD: u64 = u64::MAX;

/// The whole state of a simulated world.
#[derive(Debug)]
pub(super) struct World {
    random: Random,
    pub(super) profile: Profile,
    store: Store,
    files: Vec<SimFile>,
    ops: Vec<SimOp>,
    completions: Vec<Vec<Completion>>,
    /// The registered buffers of each ring.
    fixed: Vec<Vec<FixedPlace>>,
    time: u64,
    next_op: u64,
    /// The time until which there is no space.
    full_until: u64,
    /// The number of ops that may still take space; `None` if not limited.
    pub(super) space_left: Option<u64>,
    /// True if an op has found no space left because of that limit.
    pub(super) starved: bool,
    dead: bool,
    /// The next op is held when it is submitted.
    pub(super) hold_next: bool,
    /// Rings before this one are those of processes that were killed.
    first_alive: u32,
    pub(super) changes: u64,
    pub(super) faults: Faults,
    pub(super) trace: Trace,
}

impl World {
    pub(super) fn new(seed: u64, profile: Profile, store: Store) -> Self {
        Self {
            random: Random::new(seed),
            profile,
            store,
            files: Vec::new(),
            ops: Vec::new(),
            completions: Vec::new(),
            fixed: Vec::new(),
            time: 0,
            next_op: 0,
            full_until: 0,
            space_left: None,
            starved: false,
            dead: false,
            hold_next: false,
            first_alive: 0,
            changes: 0,
            faults: Faults::default(),
            trace: Trace::default(),
        }
    }

    pub(super) fn store(&self) -> &Store {
        &self.store
    }

    pub(super) fn time(&self) -> u64 {
        self.time
    }

    pub(super) fn add_ring(&mut self) -> u32 {
        self.completions.push(Vec::new());
        self.fixed.push(Vec::new());
        (self.completions.len() - 1) as u32
    }

    /// Gives a ring its registered buffers.
    pub(super) fn set_fixed(&mut self, ring: u32, places: Vec<FixedPlace>) {
        self.fixed[ring as usize] = places;
    }

    /// Makes the door of pages one of the world's files.
    pub(super) fn add_door(&mut self, pages: &Rc<Pages>) {
        let descriptor = pages.descriptor();
        self.add_file(PathBuf::from("door"), descriptor, Some(Rc::clone(pages)));
    }

    fn add_file(&mut self, name: PathBuf, descriptor: File, pages: Option<Rc<Pages>>) {
        let meta = descriptor.metadata().expect("a memfd has an inode");
        self.files.push(SimFile {
            name,
            identity: (meta.dev(), meta.ino()),
            descriptor,
            alignment: Alignment::NONE,
            fixed_size: false,
            contents: Contents::new(SimImage::new(&self.store)),
            pages,
        });
    }

    pub(super) fn exists(&self, name: &Path) -> bool {
        self.files.iter().any(|file| file.name == name)
    }

    pub(super) fn find_or_make(&mut self, name: &Path) -> usize {
        if let Some(index) = self.files.iter().position(|file| file.name == name) {
            return index;
        }
        self.add_file(name.to_owned(), pages::memfd(), None);
        self.files.len() - 1
    }

    /// Returns the file that a descriptor represents.
    pub(super) fn find(&self, fd: RawFd) -> io::Result<Option<u32>> {
        // SAFETY: an all-zero `stat` is a valid value of that plain C struct.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: `stat` lives across the call.
        if unsafe { libc::fstat(fd, &raw mut stat) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let identity = (stat.st_dev, stat.st_ino);
        let index = self.files.iter().position(|file| file.identity == identity);
        Ok(index.map(|index| index as u32))
    }

    pub(super) fn descriptor(&self, file: usize) -> (File, Alignment) {
        let file = &self.files[file];
        let descriptor = file.descriptor.try_clone();
        (
            descriptor.expect("a descriptor for a simulated file"),
            file.alignment,
        )
    }

    pub(super) fn set_alignment(&mut self, file: usize, alignment: Alignment) {
        self.files[file].alignment = alignment;
    }

    pub(super) fn fix_size(&mut self, file: usize) {
        self.files[file].fixed_size = true;
    }

    pub(super) fn has_fixed_size(&self, file: usize) -> bool {
        self.files[file].fixed_size
    }

    pub(super) fn contents(&mut self, file: usize) -> &Contents {
        &self.files[file].contents
    }

    pub(super) fn set_contents(&mut self, file: usize, image: SimImage) {
        self.files[file].contents = Contents::new(image);
        self.changes += 1;
    }

    pub(super) fn settle(&mut self) {
        for file in &mut self.files {
            file.contents.make_durable();
        }
        self.changes += 1;
    }

    pub(super) fn cut_power(&mut self) {
        self.dead = true;
    }

    pub(super) fn kill_process(&mut self) {
        self.first_alive = self.completions.len() as u32;
        self.ops.iter_mut().for_each(|op| op.cancelled = true);
        // Only the dead process knew that a write with an effect had failed. Its successors read the data, and a
        // sync of theirs covers it.
        let in_flight: Vec<u64> = self.ops.iter().map(|op| op.id).collect();
        for file in &mut self.files {
            file.contents.complete_ended(&in_flight, self.time);
        }
    }

    pub(super) fn release(&mut self) {
        let held = self.ops.iter_mut().filter(|op| op.not_before == HELD);
        held.for_each(|op| op.not_before = self.time);
    }

    pub(super) fn is_only_late(&self) -> bool {
        let late = self.ops.iter().all(|op| op.not_before > self.time);
        late && !self.ops.is_empty() && self.completions.iter().all(Vec::is_empty)
    }

    pub(super) fn in_flight(&self) -> usize {
        self.ops.len() + self.completions.iter().map(Vec::len).sum::<usize>()
    }

    pub(super) fn has_completion(&self, ring: u32) -> bool {
        !self.completions[ring as usize].is_empty()
    }

    pub(super) fn reap(&mut self, ring: u32, out: &mut Vec<Completion>) {
        out.append(&mut self.completions[ring as usize]);
    }

    pub(super) fn cancel(&mut self, ring: u32, user_data: u64) {
        let same = |op: &&mut SimOp| op.ring == ring && op.user_data == user_data;
        if let Some(op) = self.ops.iter_mut().find(same) {
            op.cancelled = true;
        }
    }

    /// Submits an op.
    ///
    /// # Safety
    ///
    /// As for [`block::ring::driver::Driver::push`].
    pub(super) unsafe fn submit(&mut self, ring: u32, op: &KernelOp, user_data: u64) {
        self.time += 1;
        let id = self.next_op;
        self.next_op += 1;
        let mut slices: &[IoSlice] = if op.slice_count == 0 {
            &[]
        } else {
            // SAFETY: `slices` points at `slice_count` valid entries (contract of `push`).
            unsafe { std::slice::from_raw_parts(op.slices, op.slice_count) }
        };
        let transfer = matches!(op.kind, Kind::Read | Kind::Write { .. });
        let len = if transfer {
            slices.iter().map(|slice| slice.len() as u64).sum()
        } else {
            op.len
        };
        if ring < self.first_alive {
            self.push_completion(ring, user_data, -libc::ECANCELED);
            return;
        }
        let Some(file) = op.file.fixed else {
            self.push_completion(ring, user_data, -libc::EBADF);
            return;
        };
        let mut behind = None;
        if let Some(fixed) = op.fixed {
            let place = self.fixed[ring as usize].get(usize::from(fixed.index));
            let way = match op.kind {
                Kind::Read => Way::Filled,
                _ => Way::Taken,
            };
            behind = place.and_then(|place| place.find(slices.first()?, way));
            if behind.is_none() || slices.len() != 1 {
                // As in Linux for a slot that is empty, ends before the stretch does, or is for the other direction.
                self.push_completion(ring, user_data, -libc::EFAULT);
                return;
            }
            slices = behind.as_slice();
        }
        let align = self.files[file as usize].alignment;
        let aligned = |slice: &IoSlice| {
            slice.ptr().addr().is_multiple_of(align.memory)
                && (slice.len() as u64).is_multiple_of(align.offset)
        };
        // As in Linux, a read past the end is answered before its alignment is checked.
        let past_end = op.kind == Kind::Read && op.offset >= self.files[file as usize].len();
        if transfer && !past_end && !(op.offset.is_multiple_of(align.offset) && slices.iter().all(aligned)) {
            self.push_completion(ring, user_data, -libc::EINVAL);
            return;
        }
        for slice in slices {
            let start = slice.ptr().addr();
            memory::hold(id, start..start + slice.len(), op.kind == Kind::Read);
        }
        if let Some(pages) = &self.files[file as usize].pages
            && transfer
            && op.offset + len <= pages.len() as u64
        {
            let start = op.offset as usize;
            let way = match op.kind {
                Kind::Read => Way::Taken,
                _ => Way::Filled,
            };
            if !pages.allows(&(start..start + len as usize), way) {
                self.push_completion(ring, user_data, -libc::EACCES);
                return;
            }
            let stretch = pages.stretch(start, len as usize);
            let start = stretch.ptr().addr();
            memory::hold(id, start..start + stretch.len(), op.kind != Kind::Read);
        }
        let mut op = SimOp {
            id,
            ring,
            user_data,
            kind: op.kind,
            file: file as usize,
            offset: op.offset,
            len,
            slices: op.slices,
            slice_count: op.slice_count,
            fixed: behind,
            submitted: self.time,
            not_before: self.time,
            fate: None,
            done: 0,
            result: None,
            cancelled: false,
        };
        self.note(&op, What::Submitted);
        if self.profile.immediate {
            op.fate = Some(self.bounds(&op));
            self.take_effect(&mut op, u64::MAX);
            self.complete(op);
            return;
        }
        let late_reads = if op.kind == Kind::Read {
            self.profile.late_reads
        } else {
            0
        };
        if self.random.chance(self.profile.late) || self.random.chance(late_reads) {
            op.not_before += 20 + self.random.below(400);
        }
        if std::mem::take(&mut self.hold_next) {
            op.not_before = HELD;
        }
        self.ops.push(op);
    }

    fn push_completion(&mut self, ring: u32, user_data: u64, result: i32) {
        self.completions[ring as usize].push(Completion {
            user_data,
            result,
            more: false,
        });
    }

    fn note(&mut self, op: &SimOp, what: What) {
        self.trace.note(Event {
            time: self.time,
            ring: op.ring,
            op: op.id,
            file: op.file as u32,
            kind: op.kind,
            offset: op.offset,
            len: op.len,
            what,
        });
    }

    /// Takes one step. Returns false if no op is in flight, or only held ones.
    pub(super) fn step(&mut self) -> bool {
        if self.ops.is_empty() {
            return false;
        }
        if !self.dead && self.ops.iter().all(|op| op.not_before == HELD) {
            return false;
        }
        self.time += 1;
        if self.dead {
            let op = self.ops.remove(0);
            self.answer(&op, -libc::EIO);
            return true;
        }
        if self.full_until < self.time && self.random.chance(self.profile.no_space) {
            self.full_until = self.time + self.random.below(300);
        }
        let index = self.choose();
        let mut op = self.ops.remove(index);
        if op.result.is_some() {
            self.complete(op);
            return true;
        }
        if op.fate.is_none() {
            op.fate = Some(self.fate(&op));
        }
        let most = if self.random.chance(self.profile.piecewise) {
            SECTOR as u64 * (1 + self.random.below(op.len / SECTOR as u64 + 1))
        } else {
            u64::MAX
        };
        self.take_effect(&mut op, most);
        if op.result.is_none() || self.random.chance(self.profile.linger) {
            if self.random.chance(self.profile.late) {
                op.not_before = self.time + self.random.below(200);
            }
            self.ops.insert(index, op);
        } else {
            self.complete(op);
        }
        true
    }

    /// Chooses the op whose turn it is.
    fn choose(&mut self) -> usize {
        let ready = self.ops.iter().filter(|op| op.not_before <= self.time).count() as u64;
        if ready == 0 {
            // All are late: time passes.
            let next = self.ops.iter().enumerate().min_by_key(|(_, op)| op.not_before);
            let (index, time) = next.map_or((0, 0), |(index, op)| (index, op.not_before));
            self.time = self.time.max(time);
            return index;
        }
        let turn = if self.profile.reorder {
            self.random.below(ready)
        } else {
            0
        };
        let mut ready = self
            .ops
            .iter()
            .enumerate()
            .filter(|(_, op)| op.not_before <= self.time);
        ready.nth(turn as usize).map_or(0, |(index, _)| index)
    }

    /// Takes space for an op. Returns false if there is none.
    fn take_space(&mut self) -> bool {
        match &mut self.space_left {
            Some(0) => {
                self.starved = true;
                return false;
            }
            Some(left) => *left -= 1,
            None => {}
        }
        self.profile.no_space == 0 || self.time >= self.full_until
    }

    /// Returns the outcome of an op without injected faults. As in Linux, a write to a block device stops at its end
    /// and fails past it, and its length cannot be changed.
    fn bounds(&self, op: &SimOp) -> Fate {
        let file = &self.files[op.file];
        let whole = Fate {
            bytes: op.len,
            errno: None,
        };
        if !file.fixed_size {
            return whole;
        }
        let room = file.len().saturating_sub(op.offset);
        let errno = match op.kind {
            Kind::Write { .. } if room == 0 => libc::ENOSPC,
            Kind::Write { .. } => {
                return Fate {
                    bytes: op.len.min(room),
                    errno: None,
                };
            }
            Kind::Allocate { mode: 0 } => libc::EOPNOTSUPP,
            Kind::Allocate { .. } if op.len > room => libc::EINVAL,
            Kind::Truncate => libc::EINVAL,
            _ => return whole,
        };
        Fate {
            bytes: 0,
            errno: Some(errno),
        }
    }

    /// Draws the outcome of an op.
    fn fate(&mut self, op: &SimOp) -> Fate {
        let profile = self.profile;
        let fail = |errno| Fate {
            bytes: 0,
            errno: Some(errno),
        };
        if op.cancelled && self.random.one_in(2) {
            return fail(libc::ECANCELED);
        }
        if self.random.chance(profile.again) {
            return fail(self.random.pick(&[libc::EAGAIN, libc::EINTR]));
        }
        let part = |random: &mut Random| random.below(op.len / SECTOR as u64 + 1) * SECTOR as u64;
        if self.random.chance(profile.cancel) {
            let bytes = part(&mut self.random);
            return Fate {
                bytes,
                errno: Some(libc::ECANCELED),
            };
        }
        let mode = match op.kind {
            Kind::Allocate { mode } => mode,
            _ => 0,
        };
        if mode & libc::FALLOC_FL_PUNCH_HOLE != 0 && profile.no_punch
            || mode & libc::FALLOC_FL_ZERO_RANGE != 0 && profile.no_zero_range
        {
            return fail(libc::EOPNOTSUPP);
        }
        let error = match op.kind {
            Kind::Read => profile.read_error,
            Kind::Write { .. } => profile.write_error,
            Kind::DataSync => profile.sync_error,
            _ => profile.allocate_error,
        };
        if self.random.chance(error) {
            let bytes = part(&mut self.random);
            return Fate {
                bytes,
                errno: Some(libc::EIO),
            };
        }
        let needs_space = matches!(op.kind, Kind::Write { .. })
            || matches!(op.kind, Kind::Allocate { .. }) && mode & libc::FALLOC_FL_PUNCH_HOLE == 0;
        if needs_space
            && self.files[op.file].pages.is_none()
            && !self.files[op.file].contents.has_space(op.offset, op.len)
            && !self.take_space()
        {
            return fail(libc::ENOSPC);
        }
        let mut bytes = op.len;
        match self.bounds(op) {
            Fate {
                errno: None,
                bytes: room,
            } => bytes = bytes.min(room),
            refused => return refused,
        }
        let transfer = matches!(op.kind, Kind::Read | Kind::Write { .. });
        if transfer && op.len > SECTOR as u64 && self.random.chance(profile.short) {
            let unit = self.files[op.file].alignment.offset.max(SECTOR as u64);
            bytes = (unit * (1 + self.random.below(op.len / unit))).min(bytes);
        }
        Fate { bytes, errno: None }
    }

    /// Lets at most `most` more bytes of an op take effect; sets its result if that was all.
    fn take_effect(&mut self, op: &mut SimOp, most: u64) {
        let fate = op.fate.unwrap_or(Fate {
            bytes: op.len,
            errno: None,
        });
        // The op that versions are kept for; none in an immediate world.
        let owner = (!self.profile.immediate).then_some(op.id);
        let all = self.files[op.file].len();
        let SimFile { contents, pages, .. } = &mut self.files[op.file];
        let failed = fate.errno.map(|errno| -errno);
        match op.kind {
            Kind::Read => {
                let there = all.saturating_sub(op.offset).min(fate.bytes);
                let part = most.min(there.saturating_sub(op.done));
                let mut bytes = vec![0; part as usize];
                match pages {
                    Some(pages) => pages.read((op.offset + op.done) as usize, &mut bytes),
                    None => contents.now.read(op.offset + op.done, &mut bytes),
                }
                op.copy(
                    |memory, at| memory.copy_from_slice(&bytes[at..at + memory.len()]),
                    part,
                );
                op.done += part;
                if op.done >= there {
                    // A driver that calls a short read a whole one.
                    let moved = if broken(Rule::ShortReadIsSuccess) {
                        op.len
                    } else {
                        op.done
                    };
                    op.result = Some(failed.unwrap_or(moved as i32));
                }
            }
            Kind::Write { .. } => {
                let part = most.min(fate.bytes - op.done);
                let mut bytes = vec![0; part as usize];
                op.copy(
                    |memory, at| bytes[at..at + memory.len()].copy_from_slice(memory),
                    part,
                );
                match pages {
                    Some(pages) => pages.write((op.offset + op.done) as usize, &bytes),
                    None => {
                        contents.write(owner, op.offset + op.done, &bytes);
                        self.changes += u64::from(part > 0);
                    }
                }
                op.done += part;
                if op.done == fate.bytes {
                    op.result = Some(failed.unwrap_or(op.done as i32));
                }
            }
            Kind::DataSync => op.result = Some(failed.unwrap_or(0)),
            Kind::Allocate { mode } => {
                let keep_size = mode & libc::FALLOC_FL_KEEP_SIZE != 0;
                if failed.is_none() {
                    if mode & libc::FALLOC_FL_PUNCH_HOLE != 0 {
                        contents.zero(owner, op.offset, op.len, false);
                    } else if mode & libc::FALLOC_FL_ZERO_RANGE != 0 {
                        contents.zero(owner, op.offset, op.len, true);
                    } else {
                        contents.preallocate(owner, op.offset, op.len, keep_size);
                    }
                    self.changes += 1;
                }
                op.result = Some(failed.unwrap_or(0));
            }
            Kind::Truncate => {
                if failed.is_none() {
                    contents.truncate(owner, op.len);
                    self.changes += 1;
                }
                op.result = Some(failed.unwrap_or(0));
            }
            Kind::Watch | Kind::Command { .. } => op.result = Some(-libc::EINVAL),
        }
        let (kind, submitted) = (op.kind, op.submitted);
        if kind != Kind::DataSync {
            self.note(op, What::Effect);
        } else if failed == Some(-libc::EIO) && !self.profile.immediate {
            let random = &mut self.random;
            let lost = random.pick(&[200, 500, 900, 1000]);
            self.files[op.file]
                .contents
                .fail_sync(submitted, || random.chance(lost));
            self.changes += 1;
        }
    }

    /// Completes an op whose effect is over.
    fn complete(&mut self, op: SimOp) {
        let result = op.result.unwrap_or(-libc::EIO);
        self.note_fault(&op, -result);
        let counts = result >= 0 || op.ring < self.first_alive;
        if !self.profile.immediate && counts && self.files[op.file].pages.is_none() {
            let contents = &mut self.files[op.file].contents;
            match op.kind {
                Kind::DataSync if result < 0 => {}
                Kind::DataSync => {
                    contents.sync(op.submitted);
                    self.changes += 1;
                }
                Kind::Read | Kind::Watch | Kind::Command { .. } => {}
                Kind::Write { dsync } => {
                    contents.complete(op.id, op.offset, op.done, self.time);
                    if dsync && op.done > 0 && result >= 0 {
                        contents.force(op.id, op.offset, op.done);
                        self.changes += 1;
                    }
                }
                Kind::Allocate { .. } => contents.complete(op.id, op.offset, op.len, self.time),
                // The range cut off lies past its length, however far.
                Kind::Truncate => contents.complete(op.id, op.len, u64::MAX / 2, self.time),
            }
        }
        self.answer(&op, result);
    }

    fn note_fault(&mut self, op: &SimOp, errno: i32) {
        let now = Some(self.time);
        let at_door = self.files[op.file].pages.is_some();
        match (op.kind, errno) {
            (_, ..=0 | libc::EAGAIN | libc::EINTR | libc::EOPNOTSUPP) => {}
            (_, libc::ECANCELED) => self.faults.cancel = now,
            _ if at_door => self.faults.door = now,
            (Kind::Read, _) => self.faults.read = now,
            (Kind::Write { dsync }, _) => {
                self.faults.write = now;
                if dsync {
                    self.faults.sync = now;
                }
            }
            (Kind::DataSync, _) => self.faults.sync = now,
            _ => self.faults.allocate = now,
        }
    }

    fn answer(&mut self, op: &SimOp, result: i32) {
        self.note(op, What::Completed(result));
        memory::let_go(op.id);
        self.push_completion(op.ring, op.user_data, result);
    }
}

impl SimOp {
    /// Calls `f` with each stretch of the next `len` bytes of the op's memory, and the position of the stretch
    /// in those bytes.
    fn copy(&self, mut f: impl FnMut(&mut [u8], usize), len: u64) {
        if self.slice_count == 0 || len == 0 {
            return;
        }
        let slices = match &self.fixed {
            Some(stretch) => std::slice::from_ref(stretch),
            // SAFETY: the op has not completed, so the list is there (contract of `submit`).
            None => unsafe { std::slice::from_raw_parts(self.slices, self.slice_count) },
        };
        let mut skip = self.done as usize;
        let (mut at, mut left) = (0, len as usize);
        for slice in slices {
            if skip >= slice.len() {
                skip -= slice.len();
                continue;
            }
            let part = left.min(slice.len() - skip);
            let start = slice.ptr().wrapping_add(skip);
            if self.kind == Kind::Read {
                // SAFETY: the op has not completed, so its memory is there and writable, and nobody else
                // has a reference to it (contract of `submit`); this thread is the only one.
                f(unsafe { std::slice::from_raw_parts_mut(start, part) }, at);
            } else {
                // SAFETY: as above, for reading; a copy, as the memory may be read-only.
                let mut copy = unsafe { std::slice::from_raw_parts(start, part) }.to_vec();
                f(&mut copy, at);
            }
            skip = 0;
            at += part;
            left -= part;
            if left == 0 {
                break;
            }
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.ops.iter().for_each(|op| memory::let_go(op.id));
    }
}
