//! The requests of guests in a run: drawn from the seed before it begins, so that a failing plan can be shortened.

use std::fmt;

use simulator::{Profile, Random, SECTOR};
use virtio_devices::ublk::{Recovery, Transport};

use crate::shape::Shape;
use crate::{bitmaps, compaction, growth, mixed, resize};

/// One request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Ask {
    /// Read sectors.
    Read,
    /// Write sectors.
    Write {
        /// Durably.
        fua: bool,
    },
    /// Make all writes durable.
    Flush,
    /// Forget sectors.
    Discard,
    /// Make sectors read as zeros.
    Zeroes {
        /// Their space may go.
        unmap: bool,
        /// Durably.
        fua: bool,
    },
    /// Make the disk this many bytes long.
    Grow(u64),
    /// Make the disk this many bytes short.
    Shrink(u64),
    /// Compact the image.
    Compact {
        /// Stop when the progress has been reported so many times; 0 for never.
        reports: u32,
        /// A cluster at a time, and not more than eight in a second.
        slow: bool,
    },
    /// Create the snapshot of this number.
    Snapshot(u32),
    /// Delete the snapshot of this number.
    Unsnapshot(u32),
    /// Make the disk what it was in the snapshot of this number.
    Apply(u32),
    /// Add the bitmap of this number, which does not record changes.
    Bitmap(u32),
}

impl Ask {
    /// Returns true for an operation on snapshots, which runs alone.
    #[must_use]
    pub(crate) fn is_of_snapshots(self) -> bool {
        matches!(self, Self::Snapshot(_) | Self::Unsnapshot(_) | Self::Apply(_))
    }

    /// Returns true for another operation on the whole image.
    #[must_use]
    pub(crate) fn is_operation(self) -> bool {
        matches!(self, Self::Bitmap(_) | Self::Shrink(_) | Self::Compact { .. })
    }
}

/// A request of one queue.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Planned {
    /// The index of the queue.
    pub lane: usize,
    /// The kind of request.
    pub ask: Ask,
    /// The first sector.
    pub first: u64,
    /// The number of sectors.
    pub count: u64,
    /// It is not asked before everything this queue asked is answered.
    pub alone: bool,
}

impl Planned {
    /// A request of the first queue, asked when those before it have been answered.
    #[must_use]
    pub fn new(ask: Ask, first: u64, count: u64) -> Self {
        Self {
            lane: 0,
            ask,
            first,
            count,
            alone: true,
        }
    }
}

impl fmt::Display for Planned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            lane, first, count, ..
        } = self;
        let when = if self.alone { ", alone" } else { "" };
        match self.ask {
            Ask::Flush => write!(f, "queue {lane}: flush{when}"),
            Ask::Grow(bytes) => write!(f, "queue {lane}: grow to {bytes} bytes{when}"),
            Ask::Shrink(bytes) => write!(f, "queue {lane}: shrink to {bytes} bytes{when}"),
            Ask::Compact { reports, slow } => {
                let speed = if slow { " slowly" } else { "" };
                write!(f, "queue {lane}: compact{speed}")?;
                match reports {
                    0 => write!(f, "{when}"),
                    _ => write!(f, " up to report {reports}{when}"),
                }
            }
            Ask::Snapshot(number) => write!(f, "queue {lane}: create snapshot s{number}{when}"),
            Ask::Unsnapshot(number) => write!(f, "queue {lane}: delete snapshot s{number}{when}"),
            Ask::Apply(number) => write!(f, "queue {lane}: apply snapshot s{number}{when}"),
            Ask::Bitmap(number) => write!(f, "queue {lane}: add bitmap {number}{when}"),
            ask => {
                let what = match ask {
                    Ask::Read => "read",
                    Ask::Write { fua: false } => "write",
                    Ask::Write { fua: true } => "write-fua",
                    Ask::Discard => "discard",
                    Ask::Zeroes { unmap: false, .. } => "write-zeroes",
                    _ => "write-zeroes-unmap",
                };
                write!(f, "queue {lane}: {what} sectors {first}..{}{when}", first + count)
            }
        }
    }
}

/// The crash states of a step that are judged.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Explore {
    /// All of them, if there are no more than this.
    pub all_up_to: u128,
    /// So many by chance otherwise.
    pub draws: u64,
}

/// Virtqueues between the guest and the disk, and the mishaps of the server.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Virtio {
    /// The entries of each queue.
    pub size: u16,
    /// The first index of the rings.
    pub start: u16,
    /// Both sides say from which index on they want to be told.
    pub event_idx: bool,
    /// Chains may have tables of their own.
    pub indirect: bool,
    /// The driver has switched the write cache off.
    pub writethrough: bool,
    /// The number of times that the server is killed, and another goes on with what it left.
    pub kills: u32,
    /// The number of times that a queue is stopped, and started again on another mapping of the guest's memory.
    pub stops: u32,
}

impl Virtio {
    fn draw(random: &mut Random) -> Self {
        Self {
            size: random.pick(&[4, 8, 16, 128]),
            start: random.pick(&[0, 0, 65_530]),
            event_idx: random.one_in(2),
            indirect: random.one_in(2),
            writethrough: random.one_in(5),
            kills: random.pick(&[0, 0, 1, 2]),
            stops: random.pick(&[0, 0, 1, 3]),
        }
    }
}

/// The behaviour of the driver when it is told that a server is about to leave.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Quiesce {
    /// It cannot be told, as before Linux 6.16.
    Lacking,
    /// It brings nothing new, and ends each tag as soon as that waits.
    EndsTags,
    /// It brings nothing new.
    HoldsBack,
}

/// A ublk device between the queues and the disk: the habits of its driver, and the mishaps of the server.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Ublk {
    /// The way that data travels between driver and server.
    pub transport: Transport,
    /// The tags of each queue.
    pub depth: u16,
    /// The most bytes of a request; the host makes several of what is longer.
    pub io_bytes_max: u32,
    /// From how many bytes on requests go by their registered pages, with [`Transport::ZeroCopy`].
    pub zero_copy_from: u32,
    /// The number of places for registered pages in a queue; other requests are copied.
    pub places: u16,
    /// The share of the host's turns in which the next registrations are made to fail, in thousandths.
    pub unregistered: u32,
    /// The fate of I/O without a server.
    pub recovery: Recovery,
    /// The driver gives up a dead server at once and not when its last I/O has ended, as before Linux 6.16.
    pub hasty: bool,
    /// The number of times that the server is killed, and another goes on.
    pub kills: u32,
    /// The number of times that a server hands the device over to another one.
    pub handovers: u32,
    /// The behaviour of the driver when a server hands over.
    pub quiesce: Quiesce,
    /// The number of queues that share a worker.
    pub queues_per_worker: u16,
}

impl Ublk {
    fn draw(random: &mut Random) -> Self {
        let depth = random.pick(&[1, 2, 4, 16]);
        Self {
            transport: random.pick(&[
                Transport::ZeroCopy,
                Transport::ZeroCopy,
                Transport::UserCopy,
                Transport::Copy,
            ]),
            depth,
            io_bytes_max: random.pick(&[4096, 8192, 65536]),
            zero_copy_from: random.pick(&[0, 0, 4096, 16384]),
            places: random.pick(&[depth, depth, depth.div_ceil(2)]),
            unregistered: random.pick(&[0, 0, 100]),
            recovery: random.pick(&[
                Recovery::Reissue,
                Recovery::Reissue,
                Recovery::Reissue,
                Recovery::Wait,
                Recovery::Fail,
            ]),
            hasty: random.one_in(3),
            kills: random.pick(&[0, 1, 1, 2]),
            handovers: random.pick(&[0, 0, 1, 2]),
            quiesce: random.pick(&[Quiesce::Lacking, Quiesce::EndsTags, Quiesce::HoldsBack]),
            queues_per_worker: random.pick(&[1, 1, 2, 4]),
        }
    }

    /// Returns true if servers follow each other, so that what was answered must outlive them.
    #[must_use]
    pub fn restarts(&self) -> bool {
        self.kills > 0 || self.handovers > 0
    }
}

/// Requests whose bytes only the kernel reaches: a driver has registered their pages.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Registered {
    /// The number of places in a queue; requests beyond that have memory.
    pub places: u16,
    /// The pages have no address: their first byte is called 0.
    pub from_zero: bool,
    /// The share of requests with data that have registered pages if there is a place, in thousandths.
    pub share: u32,
    /// Pages begin anywhere, and the driver promises no more.
    pub unaligned: bool,
}

impl Registered {
    fn draw(random: &mut Random) -> Self {
        Self {
            places: random.pick(&[1, 4, 16]),
            from_zero: random.one_in(2),
            share: random.pick(&[300, 800, 1000]),
            unaligned: random.one_in(3),
        }
    }
}

/// Everything that determines a run.
#[derive(Clone, Debug)]
pub struct Case {
    /// The seed it was drawn from.
    pub seed: u64,
    /// The seed of the order of things.
    pub schedule: u64,
    /// The image it begins with.
    pub shape: Shape,
    /// The requests made before anything can go wrong.
    pub before: Vec<Planned>,
    /// The behaviour of the disk.
    pub profile: Profile,
    /// The number of queues, each on a worker of its own but those of a ublk device, some of which share one.
    pub lanes: usize,
    /// The most requests of a queue in flight.
    pub depth: usize,
    /// The share of turns that workers, guests and the host take while ops are in flight, in thousandths; the others
    /// are the disk's.
    pub worker_turns: u32,
    /// The virtqueues between the guest and the disk, if the guest has some.
    pub virtio: Option<Virtio>,
    /// The ublk device that the host has of the disk, if it has one.
    pub ublk: Option<Ublk>,
    /// The registered pages of some requests, if some have them.
    pub registered: Option<Registered>,
    /// Two queues keep step ([`Pace`](crate::pace::Pace)).
    pub paced: bool,
    /// A queue goes on writing, beyond its plan, while its operation on the whole image is under way. A late op is late by what others
    /// do then, and not until the next moment that they do nothing.
    pub writes_on: bool,
    /// After so many ops that took space there is none, until all is answered. Each image is then written again after the cut.
    pub space: Option<u64>,
    /// The requests, each queue's in this order.
    pub plan: Vec<Planned>,
    /// The crash states that are judged.
    pub explore: Explore,
}

/// Faults and habits of a disk by chance; each is on in some runs and off in others.
fn draw_profile(random: &mut Random) -> Profile {
    let calm = random.one_in(2);
    let some = |random: &mut Random, most: u64| {
        if random.one_in(3) {
            1 + random.below(most) as u32
        } else {
            0
        }
    };
    let error = |random: &mut Random, most: u64| {
        if calm { 0 } else { some(random, most) }
    };
    Profile {
        immediate: false,
        reorder: !random.one_in(8),
        piecewise: some(random, 800),
        linger: some(random, 900),
        late: some(random, 200),
        late_reads: 0,
        short: some(random, 500),
        again: some(random, 200),
        cancel: error(random, 60),
        read_error: error(random, 60),
        write_error: error(random, 80),
        sync_error: error(random, 150),
        allocate_error: error(random, 150),
        no_space: error(random, 20),
        no_punch: random.one_in(8),
        no_zero_range: random.one_in(8),
    }
}

impl Case {
    /// The run of a seed.
    #[must_use]
    pub fn draw(seed: u64) -> Self {
        let random = &mut Random::new(seed);
        let mut shape = Shape::draw(random);
        shape.draw_rare(&mut Random::new(seed.rotate_left(19)));
        let profile = draw_profile(random);
        let lanes = 1 + random.below(4) as usize;
        let plan = draw_plan(random, &shape, lanes);
        let mut case = Self {
            seed,
            schedule: random.draw(),
            shape,
            before: Vec::new(),
            profile,
            lanes,
            depth: random.pick(&[1, 2, 4, 16]),
            worker_turns: random.pick(&[100, 300, 500, 700]),
            virtio: None,
            ublk: None,
            registered: None,
            paced: false,
            writes_on: false,
            space: None,
            plan,
            explore: Explore {
                all_up_to: 4,
                draws: 3,
            },
        };
        bitmaps::calm(&mut case);
        case
    }

    /// The run of a seed whose queues are a guest's virtqueues.
    #[must_use]
    pub fn draw_guest(seed: u64) -> Self {
        let mut case = Self::draw(seed);
        let virtio = Virtio::draw(&mut Random::new(!seed));
        if virtio.kills > 0 {
            case.restart();
            // From a source of its own, so that other guests stay what they are.
            let random = &mut Random::new(seed.rotate_left(24));
            match random.below(4) {
                0 => case.grow_beside(random),
                1 => case.profile.sync_error = 30 + random.below(200) as u32,
                _ => {}
            }
        }
        case.virtio = Some(virtio);
        bitmaps::calm(&mut case);
        case
    }

    /// The run of a seed whose disk is a ublk device.
    #[must_use]
    pub fn draw_ublk(seed: u64) -> Self {
        let mut case = Self::draw(seed);
        let ublk = Ublk::draw(&mut Random::new(seed.rotate_left(16)));
        if ublk.restarts() {
            case.restart();
        }
        case.ublk = Some(ublk);
        case
    }

    /// Leaves out what no server could tell the next one.
    fn restart(&mut self) {
        // What a power cut leaves of what the host forgot at a failed sync is known to the process that was told, and to no
        // other.
        self.profile.sync_error = 0;
        let sectors = self.shape.bytes / SECTOR as u64;
        self.plan.retain(|planned| {
            !matches!(planned.ask, Ask::Grow(_)) && planned.first + planned.count <= sectors
        });
    }

    /// Returns true if servers follow each other.
    #[must_use]
    pub fn restarts(&self) -> bool {
        self.virtio.is_some_and(|virtio| virtio.kills > 0) || self.ublk.is_some_and(|ublk| ublk.restarts())
    }

    /// Returns true if time passes while workers are at work. It stands still otherwise.
    #[must_use]
    pub(crate) fn passes_time(&self) -> bool {
        self.schedule % 2 == 1
    }

    /// The run of a seed some of whose requests have registered pages.
    #[must_use]
    pub fn draw_registered(seed: u64) -> Self {
        let mut case = Self::draw(seed);
        case.registered = Some(Registered::draw(&mut Random::new(seed.rotate_left(32))));
        case
    }

    /// The run of a seed that frees clusters and writes them again all the time, while late reads of them are under way.
    #[must_use]
    pub fn draw_churn(seed: u64) -> Self {
        let mut case = Self::draw(seed);
        let random = &mut Random::new(seed.rotate_left(48));
        case.shape = Shape {
            cluster_bits: random.pick(&[9, 9, 12]),
            bytes: 64 << 10,
            alignment: case.shape.alignment,
            ..Shape::PLAIN
        };
        case.profile.late = 0;
        case.profile.late_reads = random.pick(&[100, 300, 600]);
        case.lanes = 2;
        case.depth = 16;
        let sectors = case.shape.cluster() / SECTOR as u64;
        if (seed >> 4) % 2 == 1 {
            case.shape.cluster_bits = 9;
            case.before = vec![Planned::new(Ask::Write { fua: false }, 0, LOOPED)];
            case.plan = draw_loop_plan(random);
            return case;
        }
        case.paced = true;
        case.before = vec![Planned::new(Ask::Write { fua: false }, 0, CHURNED / 2 * sectors)];
        case.plan = draw_churn_plan(random, sectors);
        if random.one_in(2) {
            case.grow_beside(random);
        }
        case
    }

    /// The run of a seed whose disk grows by any amount, while other queues change what lies before its end.
    #[must_use]
    pub fn draw_growing(seed: u64) -> Self {
        growth::draw(seed)
    }

    /// The run of a seed whose disk becomes smaller and larger, while other queues change what lies before its end.
    #[must_use]
    pub fn draw_resizing(seed: u64) -> Self {
        resize::draw(seed)
    }

    /// The run of a seed whose image is compacted while all queues go on.
    #[must_use]
    pub fn draw_compacting(seed: u64) -> Self {
        compaction::draw(seed)
    }

    /// The run of a seed whose image is compacted while its disk gets other sizes and has snapshots.
    #[must_use]
    pub fn draw_mixed(seed: u64) -> Self {
        mixed::draw(seed)
    }

    /// The run of a seed whose disk has snapshots created, applied and deleted while all queues go on.
    #[must_use]
    pub fn draw_snapshots(seed: u64) -> Self {
        crate::snapshots::draw(seed)
    }

    /// The run of a seed whose image has persistent bitmaps, while snapshots are applied and bitmaps added.
    #[must_use]
    pub fn draw_bitmaps(seed: u64) -> Self {
        bitmaps::draw(seed)
    }

    /// Has the first queue make the disk larger a few times, beside everything else.
    fn grow_beside(&mut self, random: &mut Random) {
        let mut bytes = self.shape.size();
        let (count, times) = (self.plan.len() as u64, 1 + random.below(4));
        for number in (0..times).rev() {
            let place = (count * number + random.below(count)) / times;
            let place = place as usize;
            self.plan.insert(
                place,
                Planned {
                    alone: false,
                    ..Planned::new(Ask::Grow(0), 0, 0)
                },
            );
        }
        for planned in &mut self.plan {
            if let Ask::Grow(larger) = &mut planned.ask {
                bytes = growth::larger(&self.shape, bytes, 1 << 20, random);
                *larger = bytes;
            }
        }
    }

    /// Returns the number of sectors that the disk has at its largest.
    #[must_use]
    pub fn sectors(&self) -> u64 {
        let grown = self
            .before
            .iter()
            .chain(&self.plan)
            .filter_map(|planned| match planned.ask {
                Ask::Grow(bytes) => Some(bytes),
                _ => None,
            });
        grown.fold(self.shape.size(), u64::max) / SECTOR as u64
    }
}

/// The number of clusters in use by a run that frees clusters; half of them are mapped at a time.
const CHURNED: u64 = 12;

/// In each of 30 rounds one queue reads a cluster, among others. As soon as that was asked for the other one forgets the
/// cluster, makes that durable, and writes one that is not mapped, which wants the space at once. A cluster has so many
/// `sectors`.
fn draw_churn_plan(random: &mut Random, sectors: u64) -> Vec<Planned> {
    let mut plan = Vec::new();
    let mut add = |lane, ask, number: u64, alone| {
        plan.push(Planned {
            lane,
            ask,
            first: number * sectors,
            count: sectors,
            alone,
        });
    };
    let mut mapped: Vec<u64> = (0..CHURNED / 2).collect();
    let mut unmapped: Vec<u64> = (CHURNED / 2..CHURNED).collect();
    for _ in 0..30 {
        let dropped = mapped.swap_remove(random.below(CHURNED / 2) as usize);
        let fresh = unmapped.swap_remove(random.below(CHURNED / 2) as usize);
        add(0, Ask::Read, dropped, true);
        for _ in 0..random.below(3) {
            let another = random.pick(&mapped);
            add(0, Ask::Read, random.pick(&[dropped, another]), false);
        }
        add(1, Ask::Discard, dropped, true);
        // The space is free some time after the first one was answered.
        for _ in 0..1 + random.below(2) {
            add(1, Ask::Flush, 0, true);
        }
        add(1, Ask::Write { fua: false }, fresh, true);
        mapped.push(fresh);
        unmapped.push(dropped);
    }
    plan
}

/// The number of clusters of a sector that a run of loops uses.
const LOOPED: u64 = 72;

/// Loops of discards of far more than may wait to be freed, and of writes by both queues, which then wait for rounds of the engine's
/// own. A FLUSH is rare.
fn draw_loop_plan(random: &mut Random) -> Vec<Planned> {
    let mut plan = Vec::new();
    for round in 0..12 {
        let lane = round % 2;
        let (first, count) = (random.below(LOOPED / 3), LOOPED / 3 + random.below(LOOPED / 3));
        let drop = random.pick(&[
            Ask::Discard,
            Ask::Zeroes {
                unmap: true,
                fua: false,
            },
        ]);
        let mut add = |lane, ask, first, count, alone| {
            plan.push(Planned {
                lane,
                ask,
                first,
                count,
                alone,
            });
        };
        add(lane, drop, first, count, random.one_in(2));
        if random.one_in(3) {
            add(1 - lane, Ask::Read, first, count.min(8), false);
        }
        let mut here = first;
        while here < first + count {
            let len = (1 + random.below(12)).min(first + count - here);
            let fua = random.one_in(12);
            let to = random.below(2) as usize;
            add(to, Ask::Write { fua }, here, len, random.one_in(3));
            here += len;
        }
        if random.one_in(5) {
            add(lane, Ask::Flush, 0, 0, random.one_in(2));
        }
    }
    plan
}

/// The most sectors of a request with data: so many fit a request's place in a guest's memory.
pub(crate) const DATA_SECTORS_MAX: u64 = 72;

/// Requests by chance. They meet often: half of them begin in one of a few places.
fn draw_plan(random: &mut Random, shape: &Shape, lanes: usize) -> Vec<Planned> {
    let mut bytes = shape.bytes;
    let count = 20 + random.below(100);
    let places: Vec<u64> = (0..4).map(|_| random.below(bytes / SECTOR as u64)).collect();
    // What this run does much of, and what it leaves alone.
    let weights: Vec<u64> = [20, 60, 10, 30, 20, 20, 2, 4]
        .into_iter()
        .map(|most| {
            if random.one_in(4) {
                0
            } else {
                random.below(most) + 1
            }
        })
        .collect();
    let grows = weights[6] > 0 && random.one_in(3);
    let largest = random.pick(&[1, 4, 8, 24, 64]);
    let mut plan = Vec::new();
    for _ in 0..count {
        let total: u64 = weights.iter().sum::<u64>() + 8;
        let mut turn = random.below(total);
        let kind = weights.iter().position(|&weight| {
            let found = turn < weight;
            turn = turn.saturating_sub(weight);
            found
        });
        let sectors = bytes / SECTOR as u64;
        let ask = match kind {
            Some(0) => Ask::Read,
            Some(1) | None => Ask::Write { fua: false },
            Some(2) => Ask::Write { fua: true },
            Some(3) => Ask::Flush,
            Some(4) => Ask::Discard,
            Some(5) => Ask::Zeroes {
                unmap: random.one_in(2),
                fua: random.one_in(8),
            },
            Some(6) if grows => {
                bytes += shape.cluster() * (1 + random.below(64));
                Ask::Grow(bytes)
            }
            Some(_) => Ask::Flush,
        };
        let near = random.pick(&places).saturating_sub(random.below(9)) + random.below(9);
        let first = if random.one_in(2) {
            near
        } else {
            random.below(sectors)
        }
        .min(sectors - 1);
        let cluster = shape.cluster() / SECTOR as u64;
        let (mut first, mut length) = (first, 1 + random.below(largest));
        if random.one_in(3) {
            // Whole clusters.
            first -= first % cluster;
            length = cluster * (1 + length / cluster);
        }
        if matches!(ask, Ask::Read | Ask::Write { .. }) {
            length = length.min(DATA_SECTORS_MAX);
        }
        plan.push(Planned {
            lane: random.below(lanes as u64) as usize,
            ask,
            first,
            count: length.min(sectors - first),
            alone: random.one_in(8),
        });
    }
    plan
}
