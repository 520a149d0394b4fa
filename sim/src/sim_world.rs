//! A simulated world as its owner sees it: files, contexts, steps, power cuts.
//!
//! Invariant: all clones are one world, and all of it runs in one thread.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use block::Context;
use block::file::{Alignment, FileOptions, ImageFile, OpenFileError, OpenFiles};
use block::ring::Ring;
use block::timer::Clock;

use super::crash::CrashSpace;
use super::driver::SimDriver;
use super::image::{SimImage, Store};
use super::pages::{self, Pages, Tags};
use super::profile::{Faults, Profile};
use super::trace::Event;
use super::world::{FixedPlace, World};

/// The clock of a world's workers.
#[derive(Debug)]
struct SimClock(Rc<RefCell<World>>);

impl Clock for SimClock {
    fn now(&self) -> Duration {
        self.0.borrow().clock
    }

    fn wake_at(&self, _: &Ring, _: Duration) -> std::io::Result<()> {
        // Workers look at the time in each round, and none sleeps.
        Ok(())
    }
}

/// A world of simulated disks. Cheap to clone; all clones are the same world.
#[derive(Clone, Debug)]
pub struct SimWorld {
    pub(super) world: Rc<RefCell<World>>,
}

impl SimWorld {
    /// Makes a world without files, whose random choices `seed` determines.
    #[must_use]
    pub fn new(seed: u64, profile: Profile) -> Self {
        Self::with_store(seed, profile, &Store::default())
    }

    /// As [`SimWorld::new`], on the sectors of other worlds, so that images can be moved between them.
    #[must_use]
    pub fn with_store(seed: u64, profile: Profile, store: &Store) -> Self {
        Self {
            world: Rc::new(RefCell::new(World::new(seed, profile, store.clone()))),
        }
    }

    /// Returns the store of this world's sectors.
    #[must_use]
    pub fn store(&self) -> Store {
        self.world.borrow().store().clone()
    }

    /// Changes the behaviour of disks from now on.
    pub fn set_profile(&self, profile: Profile) {
        self.world.borrow_mut().profile = profile;
    }

    /// Makes a worker's context on this world, with room for `depth` ops in flight.
    ///
    /// # Panics
    ///
    /// If the process has no file descriptor left.
    #[must_use]
    pub fn context(&self, depth: u32) -> Context {
        let driver = SimDriver::new(Rc::clone(&self.world));
        Context::with_clock(Ring::with_driver(Box::new(driver), depth, 0), self.clock())
    }

    fn clock(&self) -> Rc<SimClock> {
        Rc::new(SimClock(Rc::clone(&self.world)))
    }

    /// Lets time pass for all workers. It stands still otherwise, so that a run does not depend on the host's speed.
    pub fn pass(&self, time: Duration) {
        self.world.borrow_mut().clock += time;
    }

    /// As [`SimWorld::context`], with `places` registered buffers of `place_bytes` each. The first byte of one is named
    /// 0, as if a kernel driver had registered it, or by its address.
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
        let ring = Ring::with_driver(Box::new(driver), depth, places.into());
        let cx = Context::with_clock(ring, self.clock());
        let tags = Tags::new(cx.ring(), &pages, place_bytes, from_zero);
        (cx, tags)
    }

    /// Opens the file `name`, made empty if there is none.
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

    /// Sets the alignment that I/O on a file requires, from the next [`SimWorld::file`] on.
    pub fn set_alignment(&self, name: impl AsRef<Path>, alignment: Alignment) {
        let mut world = self.world.borrow_mut();
        let file = world.find_or_make(name.as_ref());
        world.set_alignment(file, alignment);
    }

    /// Turns a file into a block device of its current length, from the next [`SimWorld::file`] on. A write past its
    /// end fails with `ENOSPC`, and its length cannot be changed.
    pub fn fix_size(&self, name: impl AsRef<Path>) {
        let mut world = self.world.borrow_mut();
        let file = world.find_or_make(name.as_ref());
        world.fix_size(file);
    }

    /// Returns the contents that readers of a file see now.
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

    /// Makes all writes durable.
    pub fn settle(&self) {
        self.world.borrow_mut().settle();
    }

    /// Returns the crash states of a file, for a power cut now.
    #[must_use]
    pub fn crash_space(&self, name: impl AsRef<Path>) -> CrashSpace {
        let mut world = self.world.borrow_mut();
        let file = world.find_or_make(name.as_ref());
        CrashSpace::new(world.contents(file))
    }

    /// Lets only this number of ops take space from now on: every attempt of each later one that needs space fails with
    /// `ENOSPC`. `None` for no limit.
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
        self.hold_after(0);
    }

    /// As [`SimWorld::hold_next`], once `ops` others have been submitted.
    pub fn hold_after(&self, ops: u64) {
        self.world.borrow_mut().hold = Some(ops);
    }

    /// Returns true if an op is yet to be held.
    #[must_use]
    pub fn is_to_hold(&self) -> bool {
        self.world.borrow().hold.is_some()
    }

    /// Releases all ops that are held, and holds none any more.
    pub fn release(&self) {
        self.world.borrow_mut().release();
    }

    /// Takes one step. Returns false if no op is in flight except those that are [held](SimWorld::hold_next).
    pub fn step(&self) -> bool {
        self.world.borrow_mut().step()
    }

    /// Returns true if every op in flight is one delayed for a long time; the next step would end the delay.
    #[must_use]
    pub fn is_only_late(&self) -> bool {
        self.world.borrow().is_only_late()
    }

    /// Returns the number of ops in flight, including completions that were not reaped.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.world.borrow().in_flight()
    }

    /// Returns the bytes that all reads and writes in flight move. Their memory is held meanwhile.
    #[must_use]
    pub fn bytes_in_flight(&self) -> u64 {
        self.world.borrow().bytes_in_flight()
    }

    /// Returns a counter that grows whenever the crash states may have changed.
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.world.borrow().changes
    }

    /// Returns the number of steps taken and ops submitted so far.
    #[must_use]
    pub fn time(&self) -> u64 {
        self.world.borrow().time()
    }

    /// Returns the times of the last failed ops so far.
    #[must_use]
    pub fn faults(&self) -> Faults {
        self.world.borrow().faults
    }

    /// Kills the process that all contexts so far belong to, while the host continues. Ops that these submit from
    /// now on have no effect and end with `ECANCELED`. Ops in flight are performed, or dropped before they begin.
    /// The contents that readers of files see stay.
    pub fn kill_process(&self) {
        self.world.borrow_mut().kill_process();
    }

    /// Returns true if a context has completions to reap. Contexts are numbered from zero as they are made.
    #[must_use]
    pub fn has_completion(&self, context: u32) -> bool {
        self.world.borrow().has_completion(context)
    }

    /// Lets no op have an effect from now on and each end with `EIO`, to drop workers after a power cut.
    pub fn cut_power(&self) {
        self.world.borrow_mut().cut_power();
    }

    /// Keeps the events from now on, to be read with [`SimWorld::trace`].
    pub fn record(&self) {
        self.world.borrow_mut().trace.record();
    }

    /// Returns the events kept since [`SimWorld::record`].
    #[must_use]
    pub fn trace(&self) -> Vec<Event> {
        self.world.borrow().trace.events().to_vec()
    }

    /// Returns a hash of every event so far, kept or not.
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
        let file = self.file(path, options.write);
        if options.write {
            // A world has no locks; processes that open a file for writing take turns.
            file.assume_sole_writer();
        }
        Ok(file)
    }
}
