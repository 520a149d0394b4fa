//! State of a simulated world: files, ops in flight, and their next steps.
//!
//! Life cycle of an op: submitted, taking effect (at once or in pieces), done, completed. Random choices are
//! drawn when an op's turn comes, from the world's one source.
//!
//! Invariants: the memory of an op is touched only between its submission and its completion; all iteration is
//! in the order of submission.

#![expect(unsafe_code, reason = "identifies a file by its descriptor")]

mod canaries;
mod fate;
mod op;
mod steps;
mod submit;

use std::fs::File;
use std::io;
use std::os::fd::RawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use block::file::Alignment;
use block::ring::driver::{Completion, Kind};

use super::file::Contents;
use super::image::{SimImage, Store};
use super::memory;
use super::pages::{self, Pages};
use super::profile::{Faults, Profile};
use super::random::Random;
use super::trace::{Event, Trace, What};
use canaries::Canaries;
use op::{HELD, SimOp};
pub(super) use submit::FixedPlace;

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
    /// The time of the workers' clocks.
    pub(super) clock: Duration,
    next_op: u64,
    /// The time until which there is no space.
    full_until: u64,
    /// The number of ops that may still take space; `None` if not limited.
    pub(super) space_left: Option<u64>,
    /// True if an op has found no space left because of that limit.
    pub(super) starved: bool,
    dead: bool,
    /// The op to be held when it is submitted, counted from the next one.
    pub(super) hold: Option<u64>,
    /// Rings before this one are those of processes that were killed.
    first_alive: u32,
    pub(super) changes: u64,
    pub(super) faults: Faults,
    pub(super) trace: Trace,
    canaries: Canaries,
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
            clock: Duration::ZERO,
            next_op: 0,
            full_until: 0,
            space_left: None,
            starved: false,
            dead: false,
            hold: None,
            first_alive: 0,
            changes: 0,
            faults: Faults::default(),
            trace: Trace::default(),
            canaries: Canaries::default(),
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
        self.hold = None;
    }

    pub(super) fn is_only_late(&self) -> bool {
        let late = self.ops.iter().all(|op| op.not_before > self.time);
        late && !self.ops.is_empty() && self.completions.iter().all(Vec::is_empty)
    }

    pub(super) fn in_flight(&self) -> usize {
        self.ops.len() + self.completions.iter().map(Vec::len).sum::<usize>()
    }

    pub(super) fn bytes_in_flight(&self) -> u64 {
        let moving = |op: &&SimOp| matches!(op.kind, Kind::Read | Kind::Write { .. });
        self.ops.iter().filter(moving).map(|op| op.len).sum()
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
}

impl Drop for World {
    fn drop(&mut self) {
        self.ops.iter().for_each(|op| memory::let_go(op.id));
    }
}
