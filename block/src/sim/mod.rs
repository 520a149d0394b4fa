//! The third ring: a simulated world of disks, seeded and deterministic.
//!
//! A [`SimWorld`] holds files and the ops in flight on them. [`SimWorld::context`] makes a worker's context
//! whose ring runs on it; everything above the ring is what production runs. Nothing happens by itself: the
//! world's owner lets it take one [step](SimWorld::step) at a time, between the rounds of as many
//! [workers](crate::worker::Worker::by_hand) as there are, all in one thread.
//!
//! What a disk does, each as the seed has it and the [`Profile`] allows: ops take effect in any order,
//! whole or piece by piece, at any moment between submission and completion, and complete later still;
//! writes stay in a volatile cache until a sync that was submitted after they had completed; a power cut
//! leaves [any subset](CrashSpace) of the sectors that were not synced; any op may fail, be cut short,
//! be cancelled or asked to be repeated; space runs out and comes back. Direct and buffered I/O look the
//! same, but that a file with an [alignment](SimWorld::set_alignment) refuses what is not aligned. The
//! memory of ops is [watched](memory). What a driver of the kernel registers is played by [pages](pages::Pages), in
//! the world and on a real ring.
//!
//! What must stay true: the same seed and the same calls give the same [trace](SimWorld::trace_hash). No
//! decision depends on an address, a clock, a descriptor's number or the order of a randomly seeded map.

mod crash;
mod driver;
mod file;
mod image;
pub mod memory;
pub mod pages;
mod random;
mod short;
mod trace;
mod world;

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

pub use crash::CrashSpace;
pub use image::{SECTOR, SimImage, Store};
pub use random::Random;
pub use trace::Event;

use crate::file::{Alignment, FileOptions, ImageFile, OpenFileError, OpenFiles};
use crate::ring::Ring;
use crate::task::Context;
use driver::SimDriver;
use pages::{Pages, Tags};
use world::{FixedPlace, World};

/// How a world's disks behave. Chances are in a thousand; the default is a disk without faults that does
/// one thing after the other, in the order of submission.
#[derive(Clone, Copy, Debug, Default)]
pub struct Profile {
    /// Carry out each op while it is submitted, durably: for setting things up and for looking at them.
    pub immediate: bool,
    /// Ops take effect in any order.
    pub reorder: bool,
    /// An op takes effect piece by piece, with other things between.
    pub piecewise: u32,
    /// An op's completion comes some steps after its effect.
    pub linger: u32,
    /// An op is left alone for a long time.
    pub late: u32,
    /// A read is, beside what `late` has it.
    pub late_reads: u32,
    /// A read or write does only a part.
    pub short: u32,
    /// `EAGAIN` or `EINTR`, without effect.
    pub again: u32,
    /// `ECANCELED`, unasked, with any part of the effect.
    pub cancel: u32,
    /// `EIO` for a read.
    pub read_error: u32,
    /// `EIO` for a write, with any part of the effect.
    pub write_error: u32,
    /// `EIO` for a sync; the cache forgets any part of what it covered.
    pub sync_error: u32,
    /// `EIO` for an allocation, a punch or a change of length.
    pub allocate_error: u32,
    /// The chance at each step that space runs out; it comes back after a while.
    pub no_space: u32,
    /// The host cannot punch holes.
    pub no_punch: bool,
    /// The host cannot zero ranges.
    pub no_zero_range: bool,
}

impl Profile {
    /// Everything happens at once and nothing fails.
    pub const IMMEDIATE: Self = Self {
        immediate: true,
        reorder: false,
        piecewise: 0,
        linger: 0,
        late: 0,
        late_reads: 0,
        short: 0,
        again: 0,
        cancel: 0,
        read_error: 0,
        write_error: 0,
        sync_error: 0,
        allocate_error: 0,
        no_space: 0,
        no_punch: false,
        no_zero_range: false,
    };

    /// Whether requests may fail on this disk.
    #[must_use]
    pub fn has_errors(&self) -> bool {
        let errors = [
            self.cancel,
            self.read_error,
            self.write_error,
            self.sync_error,
            self.allocate_error,
            self.no_space,
        ];
        errors.iter().any(|&chance| chance > 0)
    }
}

/// When a world last made an op fail, by the op's kind, as [`SimWorld::time`] has it. What is to be asked again does not
/// count, nor what the host cannot do.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Faults {
    /// A read.
    pub read: Option<u64>,
    /// A write.
    pub write: Option<u64>,
    /// A sync, or a write that was to be durable.
    pub sync: Option<u64>,
    /// An allocation, a punch or a change of length.
    pub allocate: Option<u64>,
    /// An op on registered pages, at their door.
    pub door: Option<u64>,
    /// An op of any kind that ended with `ECANCELED`.
    pub cancel: Option<u64>,
}

/// A world of simulated disks. Cheap to clone; all clones are the same world.
#[derive(Clone, Debug)]
pub struct SimWorld {
    world: Rc<RefCell<World>>,
}

impl SimWorld {
    /// A world without files, whose chances `seed` determines.
    #[must_use]
    pub fn new(seed: u64, profile: Profile) -> Self {
        Self::with_store(seed, profile, &Store::default())
    }

    /// As [`SimWorld::new`], on the sectors of other worlds, so that images go from one to the other.
    #[must_use]
    pub fn with_store(seed: u64, profile: Profile, store: &Store) -> Self {
        Self {
            world: Rc::new(RefCell::new(World::new(seed, profile, store.clone()))),
        }
    }

    /// The sectors this world's files are made of.
    #[must_use]
    pub fn store(&self) -> Store {
        self.world.borrow().store().clone()
    }

    /// Changes how disks behave from here on.
    pub fn set_profile(&self, profile: Profile) {
        self.world.borrow_mut().profile = profile;
    }

    /// A worker's context on this world, with room for `depth` ops in flight.
    ///
    /// # Panics
    ///
    /// If the process has no file descriptor left.
    #[must_use]
    pub fn context(&self, depth: u32) -> Context {
        let driver = SimDriver::new(Rc::clone(&self.world));
        Context::on(Ring::with_driver(Box::new(driver), depth, 0))
    }

    /// As [`SimWorld::context`], with so many registered buffers of `place_bytes` each. The first byte of one is called
    /// 0, as if a driver of the kernel had registered it, or by its address.
    ///
    /// # Panics
    ///
    /// If the process has no file descriptor or no memory left.
    #[must_use]
    pub fn context_with_tags(
        &self,
        depth: u32,
        places: u16,
        place_bytes: usize,
        from_zero: bool,
    ) -> (Context, Tags) {
        let driver = SimDriver::new(Rc::clone(&self.world));
        let pages = Pages::new(usize::from(places) * place_bytes);
        {
            let mut world = self.world.borrow_mut();
            world.add_door(&pages);
            let fixed = (0..places).map(|tag| {
                let range = pages::place(tag, place_bytes);
                FixedPlace {
                    base: pages.base(range.start, from_zero),
                    pages: Rc::clone(&pages),
                    range,
                }
            });
            world.set_fixed(driver.ring(), fixed.collect());
        }
        let cx = Context::on(Ring::with_driver(Box::new(driver), depth, places.into()));
        let tags = Tags::new(cx.ring(), &pages, place_bytes, from_zero);
        (cx, tags)
    }

    /// The file `name`, made empty if there is none.
    ///
    /// # Panics
    ///
    /// If the process has no file descriptor left.
    #[must_use]
    pub fn file(&self, name: impl AsRef<Path>, write: bool) -> Arc<ImageFile> {
        let mut world = self.world.borrow_mut();
        let file = world.find_or_make(name.as_ref());
        let (descriptor, alignment) = world.descriptor(file);
        let block_device = world.has_fixed_size(file);
        Arc::new(ImageFile::with_alignment(
            name.as_ref().to_owned(),
            descriptor,
            write,
            block_device,
            alignment,
        ))
    }

    /// What I/O on a file must be aligned to, from the next [`SimWorld::file`] on.
    pub fn set_alignment(&self, name: impl AsRef<Path>, alignment: Alignment) {
        let mut world = self.world.borrow_mut();
        let file = world.find_or_make(name.as_ref());
        world.set_alignment(file, alignment);
    }

    /// From the next [`SimWorld::file`] on a file is a block device of the length that it has: a write behind its end
    /// fails with `ENOSPC`, and its length cannot be changed.
    pub fn fix_size(&self, name: impl AsRef<Path>) {
        let mut world = self.world.borrow_mut();
        let file = world.find_or_make(name.as_ref());
        world.fix_size(file);
    }

    /// What readers of a file see now.
    #[must_use]
    pub fn contents(&self, name: impl AsRef<Path>) -> SimImage {
        let mut world = self.world.borrow_mut();
        let file = world.find_or_make(name.as_ref());
        world.contents(file).now.clone()
    }

    /// Makes a file hold `image`, durably. No op may be in flight on it.
    pub fn set_contents(&self, name: impl AsRef<Path>, image: SimImage) {
        let mut world = self.world.borrow_mut();
        let file = world.find_or_make(name.as_ref());
        world.set_contents(file, image);
    }

    /// Makes all that was written durable.
    pub fn settle(&self) {
        self.world.borrow_mut().settle();
    }

    /// What a power cut now can leave of a file.
    #[must_use]
    pub fn crash_space(&self, name: impl AsRef<Path>) -> CrashSpace {
        let mut world = self.world.borrow_mut();
        let file = world.find_or_make(name.as_ref());
        CrashSpace::new(world.contents(file))
    }

    /// Lets so many ops take space from here on: of each later one that needs some every attempt fails with `ENOSPC`. `None`
    /// for any number.
    pub fn limit_space(&self, ops: Option<u64>) {
        self.world.borrow_mut().space_left = ops;
    }

    /// Returns true if an op has failed because of [`SimWorld::limit_space`].
    #[must_use]
    pub fn is_starved(&self) -> bool {
        self.world.borrow().starved
    }

    /// Holds the next op that is submitted: it has no effect and no completion until [`SimWorld::release`].
    pub fn hold_next(&self) {
        self.world.borrow_mut().hold_next = true;
    }

    /// Lets go of all ops that are held.
    pub fn release(&self) {
        self.world.borrow_mut().release();
    }

    /// Lets one thing happen. `false` if no op is in flight but those that are [held](SimWorld::hold_next).
    pub fn step(&self) -> bool {
        self.world.borrow_mut().step()
    }

    /// Returns true if each op in flight is one that is left alone for a long time, which the next step would end.
    #[must_use]
    pub fn is_only_late(&self) -> bool {
        self.world.borrow().is_only_late()
    }

    /// How many ops are in flight, completions that were not reaped included.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.world.borrow().in_flight()
    }

    /// A number that grows whenever what a power cut can leave may have changed.
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.world.borrow().changes
    }

    /// How many steps were taken and ops submitted so far.
    #[must_use]
    pub fn time(&self) -> u64 {
        self.world.borrow().time()
    }

    /// Returns what was made to fail so far.
    #[must_use]
    pub fn faults(&self) -> Faults {
        self.world.borrow().faults
    }

    /// The process dies that all contexts so far belong to, while the host goes on: what these submit from here
    /// on has no effect and ends with `ECANCELED`; what is in flight the host carries out, or gives up before it
    /// begins. What readers of files see stays.
    pub fn kill_process(&self) {
        self.world.borrow_mut().kill_process();
    }

    /// Whether a context has completions to reap. Contexts are numbered from zero as they are made.
    #[must_use]
    pub fn has_completion(&self, context: u32) -> bool {
        self.world.borrow().has_completion(context)
    }

    /// From here on no op has an effect and each ends with `EIO`: for letting go of workers after a cut.
    pub fn cut_power(&self) {
        self.world.borrow_mut().cut_power();
    }

    /// Keeps the events from here on, to be read with [`SimWorld::trace`].
    pub fn record(&self) {
        self.world.borrow_mut().trace.record();
    }

    /// The events kept since [`SimWorld::record`].
    #[must_use]
    pub fn trace(&self) -> Vec<Event> {
        self.world.borrow().trace.events().to_vec()
    }

    /// A hash of every event so far, kept or not.
    #[must_use]
    pub fn trace_hash(&self) -> u64 {
        self.world.borrow().trace.hash()
    }
}

impl OpenFiles for SimWorld {
    /// Opens a file of this world; one that does not exist is an error, as on a host. `direct` is ignored:
    /// alignment is a property of the file.
    fn open(&self, path: &Path, options: FileOptions) -> Result<Arc<ImageFile>, OpenFileError> {
        if !self.world.borrow().exists(path) {
            return Err(OpenFileError::Open {
                path: path.to_owned(),
                source: std::io::ErrorKind::NotFound.into(),
            });
        }
        Ok(self.file(path, options.write))
    }
}

#[cfg(test)]
mod tests;
