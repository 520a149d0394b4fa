//! The hot paths: how each is set up, a round of it, and the bound of its instructions.

use std::hint::black_box;
use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::sync::Arc;

use block::file::{FileOptions, ImageFile};
use block::raw::RawDisk;
use block::ring::{FixedTable, Ring, RingKind};
use block::throttle::{Limiter, RateLimits, ThrottledDisk};
use block::worker::Frontend;
use block::{AlignedBuf, CompletionSink, Context, Disk, DiskQueue, Done, Op, Request};
use qcow::image::{CreateOptions, Preallocation, create};
use qcow::{OpenOptions, QcowDisk};
use tempfile::TempDir;
use virtio_devices::ublk::{Channel, Counts, KernelChannel, QueueState, Transport, UblkQueue};

use crate::channel::{NullChannel, REQUEST_BYTES, read_under};
use crate::guest::{BATCH, Guest};

const CLUSTER: u64 = 64 << 10;
/// The size of each disk in bytes: one L2 table.
const DISK: u64 = 8192 * CLUSTER;
/// The bytes that a cached slice of an L2 table maps; of one with extended entries half of them.
const SLICE: u64 = 512 * CLUSTER;

/// A hot path.
pub(crate) struct Path {
    /// The name to print.
    pub(crate) name: &'static str,
    /// The most instructions of one request.
    pub(crate) instructions_max: f64,
    /// Two numbers of rounds; what the second takes more than the first is counted. [`BATCH`] requests make a round.
    pub(crate) rounds: [u32; 2],
    /// Sets it up, and returns what does one round.
    pub(crate) start: fn() -> Box<dyn FnMut()>,
}

/// Rounds of a path that can be repeated for ever.
pub(crate) const MANY: [u32; 2] = [100, 1100];
/// Rounds of a path that uses up clusters.
const FEW: [u32; 2] = [16, 48];

const fn path(
    name: &'static str,
    instructions_max: f64,
    rounds: [u32; 2],
    start: fn() -> Box<dyn FnMut()>,
) -> Path {
    Path {
        name,
        instructions_max,
        rounds,
        start,
    }
}

/// All hot paths, each with its bound: what it takes with rustc 1.95, and a few per cent.
pub(crate) const PATHS: [Path; 17] = [
    path("lookup", 212.0, MANY, lookup),
    path("cached-read", 1100.0, MANY, cached_read),
    path("cached-read-subclusters", 1100.0, MANY, || {
        requests(Opened::with_subclusters(), Op::Read, scattered())
    }),
    path("cached-read-fragmented", 1145.0, MANY, || {
        cached_read_fragmented(false)
    }),
    path("cached-read-fragmented-subclusters", 1155.0, MANY, || {
        cached_read_fragmented(true)
    }),
    path("cached-read-below", 1350.0, MANY, || cached_read_below(1)),
    path("cached-read-chain-32", 1305.0, MANY, || cached_read_below(32)),
    path("cached-write", 1135.0, MANY, cached_write),
    path("cached-write-subclusters", 1135.0, MANY, || {
        requests(Opened::with_subclusters(), Op::Write { fua: false }, scattered())
    }),
    path("allocating-write", 9000.0, FEW, allocating_write),
    path("copy-on-write", 13150.0, FEW, copy_on_write),
    path("virtqueue-read", 2100.0, MANY, || virtqueue_read(false)),
    path("virtqueue-read-indirect", 2180.0, MANY, || virtqueue_read(true)),
    path("ublk-read", 1245.0, MANY, ublk_read),
    path("ublk-read-zero-copy", 1810.0, MANY, || {
        kernel_channel_read(Opened::new(true, false), Transport::ZeroCopy)
    }),
    path("ublk-read-zero-copy-raw", 1545.0, MANY, || {
        kernel_channel_read(Opened::raw(), Transport::ZeroCopy)
    }),
    path("ublk-read-user-copy", 1950.0, MANY, || {
        kernel_channel_read(Opened::new(true, false), Transport::UserCopy)
    }),
];

/// An open image in a folder of its own, all of whose tables are cached.
struct Opened<D = QcowDisk> {
    disk: Arc<D>,
    folder: TempDir,
}

/// The length of a folder's path in bytes. What the allocator does depends on the lengths of the names that were held before: of two
/// programs in different places one took 0.7 % more. The program's own path still matters, by as much if it is long; the bounds of the
/// paths that allocate have room for that.
const FOLDER_BYTES: usize = 128;

/// Makes a folder beside this program, which is no tmpfs: files in memory have a path of their own.
fn folder() -> TempDir {
    const RANDOM_BYTES: usize = 6;
    let program = std::env::current_exe().expect("this program's path");
    let beside = program.parent().expect("its folder");
    let padding = FOLDER_BYTES.saturating_sub(beside.as_os_str().len() + 1 + RANDOM_BYTES);
    let mut builder = tempfile::Builder::new();
    let name = "-".repeat(padding);
    let builder = builder.prefix(&name).rand_bytes(RANDOM_BYTES);
    builder.tempdir_in(beside).expect("a folder")
}

impl Opened<RawDisk> {
    /// Opens a raw image.
    fn raw() -> Self {
        let folder = folder();
        let path = folder.path().join("disk.raw");
        let file = std::fs::File::create(&path).expect("a file");
        file.set_len(DISK).expect("its length");
        let image = ImageFile::open(&path, FileOptions::default()).expect("the file");
        let cx = Context::new(RingKind::Syscalls, 64).expect("a ring");
        Self {
            disk: RawDisk::open(image, true, &cx).expect("a disk"),
            folder,
        }
    }
}

impl<D: Disk + 'static> Opened<D> {
    fn open_queue(&self, cx: &Context) -> Box<dyn DiskQueue> {
        let disk: Arc<dyn Disk> = Arc::clone(&self.disk) as Arc<dyn Disk>;
        disk.open_queue(cx).expect("a queue")
    }
}

impl Opened {
    /// Makes an image and opens it: with clusters that are `mapped`, above a `backing` image of such clusters or not.
    fn new(mapped: bool, backing: bool) -> Self {
        let folder = folder();
        let cx = Context::new(RingKind::Syscalls, 64).expect("a ring");
        let base = backing.then_some("base.qcow2");
        if let Some(base) = base {
            make(&folder, &cx, base, true, None);
        }
        make(&folder, &cx, "disk.qcow2", mapped, base);
        let opened = Self::open(folder, "disk.qcow2", backing);
        opened.warm(&cx);
        opened
    }

    /// Makes an image with extended L2 entries whose clusters are mapped, and opens it.
    fn with_subclusters() -> Self {
        let folder = folder();
        let cx = Context::new(RingKind::Syscalls, 64).expect("a ring");
        let mut options = create_options(true, None);
        options.extended_l2 = true;
        make_as(&folder, &cx, "disk.qcow2", &options);
        let opened = Self::open(folder, "disk.qcow2", false);
        opened.warm(&cx);
        opened
    }

    /// Makes an image, with extended L2 entries or not, in whose first slices no two clusters lie one behind the other, and opens it.
    fn fragmented(extended_l2: bool) -> Self {
        let folder = folder();
        let cx = Context::new(RingKind::Syscalls, 64).expect("a ring");
        let mut options = create_options(false, None);
        options.extended_l2 = extended_l2;
        make_as(&folder, &cx, "disk.qcow2", &options);
        let opened = Self::open(folder, "disk.qcow2", false);
        let queue = opened.open_queue(&cx);
        let write = Op::Write { fua: false };
        for cluster in 0..SLICE / CLUSTER {
            run(&cx, &*queue, write, (cluster ^ 1) * CLUSTER, CLUSTER as usize);
        }
        run(&cx, &*queue, Op::Flush, 0, 0);
        opened
    }

    /// Makes an empty image above so many others, which have the clusters of the first slice in turn, and opens it.
    fn above(images: u64) -> Self {
        let mut folder = folder();
        let cx = Context::new(RingKind::Syscalls, 64).expect("a ring");
        let mut below = None;
        for number in 0..images {
            let name = format!("{number}.qcow2");
            make(&folder, &cx, &name, false, below.as_deref());
            let layer = Self::open(folder, &name, true);
            let queue = layer.open_queue(&cx);
            let clusters =
                (0..SLICE / CLUSTER).filter(|cluster| (cluster * 13 + cluster / 32) % images == number);
            let write = Op::Write { fua: false };
            clusters.for_each(|cluster| run(&cx, &*queue, write, cluster * CLUSTER, 4096));
            run(&cx, &*queue, Op::Flush, 0, 0);
            folder = layer.folder;
            below = Some(name);
        }
        make(&folder, &cx, "disk.qcow2", false, below.as_deref());
        let opened = Self::open(folder, "disk.qcow2", true);
        let queue = opened.open_queue(&cx);
        // The first read has a chain's index built beside it; those after it load the tables of each image.
        for cluster in 0..SLICE / CLUSTER {
            run(&cx, &*queue, Op::Read, cluster * CLUSTER, 4096);
        }
        while cx.tasks() > 0 {
            cx.run_ready();
        }
        opened
    }

    fn open(folder: TempDir, name: &str, backing_files: bool) -> Self {
        let options = OpenOptions {
            backing_files,
            ..OpenOptions::default()
        };
        Self {
            disk: QcowDisk::open(&folder.path().join(name), &options).expect("the image opens"),
            folder,
        }
    }

    /// Writes one cluster, and reads from each slice of the tables: the null ring could load none.
    fn warm(&self, cx: &Context) {
        let queue = self.open_queue(cx);
        run(cx, &*queue, Op::Write { fua: false }, DISK - CLUSTER, 4096);
        run(cx, &*queue, Op::Flush, 0, 0);
        (0..DISK)
            .step_by(SLICE as usize / 2)
            .for_each(|offset| run(cx, &*queue, Op::Read, offset, 4096));
    }
}

/// Creates an image: with clusters that are `mapped` or not, above the image `below` or none.
fn make(folder: &TempDir, cx: &Context, name: &str, mapped: bool, below: Option<&str>) {
    make_as(folder, cx, name, &create_options(mapped, below));
}

fn create_options(mapped: bool, below: Option<&str>) -> CreateOptions {
    let mut options = CreateOptions::new(DISK);
    if mapped {
        options.preallocation = Preallocation::Metadata;
    }
    options.backing_file = below.map(str::to_owned);
    options.backing_format = below.map(|_| "qcow2".to_owned());
    options
}

fn make_as(folder: &TempDir, cx: &Context, name: &str, options: &CreateOptions) {
    let path = folder.path().join(name);
    drop(std::fs::File::create(&path).expect("a file"));
    let write = FileOptions {
        write: true,
        direct: false,
    };
    let view = ImageFile::open(&path, write)
        .expect("the file")
        .view(cx)
        .expect("a view");
    let created = cx.block_on(create(&view, options)).expect("the ring turns");
    created.expect("an image");
}

/// Has one request done.
fn run(cx: &Context, queue: &dyn DiskQueue, op: Op, offset: u64, len: usize) {
    let (request, answer) = Request::local(op, offset, len as u64, AlignedBuf::zeroed(len).into());
    queue.submit(request);
    let answer = cx.block_on(answer).expect("the ring turns");
    answer.result.expect("it succeeds");
}

fn null_ring() -> Context {
    Context::new(RingKind::Null, 256).expect("a ring")
}

/// A queue on the null ring with [`BATCH`] requests in flight.
struct Queue {
    queue: Box<dyn DiskQueue>,
    cx: Context,
    sink: Rc<CompletionSink>,
    done: Vec<Done>,
    buffers: Vec<AlignedBuf>,
    _opened: Opened,
}

impl Queue {
    fn new(opened: Opened) -> Self {
        let cx = null_ring();
        Self {
            queue: opened.open_queue(&cx),
            cx,
            sink: CompletionSink::new(),
            done: Vec::new(),
            buffers: (0..BATCH).map(|_| AlignedBuf::zeroed(4096)).collect(),
            _opened: opened,
        }
    }

    /// Has a request done in each of so many clusters.
    fn round(&mut self, op: Op, mut next: impl FnMut() -> u64) {
        for buffer in self.buffers.drain(..) {
            let offset = next();
            self.queue
                .submit(Request::new(op, offset, 4096, buffer.into(), &self.sink, 0));
        }
        while self.done.len() < usize::from(BATCH) {
            self.cx.ring().turn(false).expect("the ring turns");
            self.cx.run_ready();
            self.sink.drain_into(&mut self.done);
        }
        for done in self.done.drain(..) {
            done.result.expect("it succeeds");
            self.buffers.extend(done.buffer.into_owned());
        }
    }
}

/// Returns offsets that visit all clusters of a disk in no simple order.
fn scattered() -> impl FnMut() -> u64 {
    let mut cluster = 0;
    move || {
        cluster = (cluster + 5039) % (DISK / CLUSTER);
        cluster * CLUSTER
    }
}

/// Returns the offsets of one cluster after another.
fn in_order() -> impl FnMut() -> u64 {
    let mut clusters = 0..DISK / CLUSTER - 1;
    move || clusters.next().expect("there are clusters left") * CLUSTER
}

fn lookup() -> Box<dyn FnMut()> {
    let opened = Opened::new(true, false);
    let reader = opened.disk.mapping_reader();
    let mut next = scattered();
    Box::new(move || {
        for _ in 0..BATCH {
            let found = reader.cached_host_offset(black_box(next()));
            assert!(black_box(found).is_some());
        }
    })
}

fn requests(opened: Opened, op: Op, mut next: impl FnMut() -> u64 + 'static) -> Box<dyn FnMut()> {
    let mut queue = Queue::new(opened);
    Box::new(move || queue.round(op, &mut next))
}

fn cached_read_fragmented(extended_l2: bool) -> Box<dyn FnMut()> {
    let mut next = scattered();
    let within_first = move || next() % SLICE;
    requests(Opened::fragmented(extended_l2), Op::Read, within_first)
}

fn cached_read() -> Box<dyn FnMut()> {
    requests(Opened::new(true, false), Op::Read, scattered())
}

/// A read through an empty image of the first slice's clusters, which are spread evenly over `images` below it.
fn cached_read_below(images: u64) -> Box<dyn FnMut()> {
    let mut next = scattered();
    requests(Opened::above(images), Op::Read, move || next() % SLICE)
}

fn cached_write() -> Box<dyn FnMut()> {
    requests(Opened::new(true, false), Op::Write { fua: false }, scattered())
}

fn allocating_write() -> Box<dyn FnMut()> {
    requests(Opened::new(false, false), Op::Write { fua: false }, in_order())
}

fn copy_on_write() -> Box<dyn FnMut()> {
    requests(Opened::new(false, true), Op::Write { fua: false }, in_order())
}

/// A cached read from a guest's descriptors to its used ring, of a disk whose rate is not limited but could be, as servers have it.
fn virtqueue_read(indirect: bool) -> Box<dyn FnMut()> {
    let opened = Opened::new(true, false);
    let limiter = Limiter::new(&RateLimits::default());
    let disk = ThrottledDisk::new(Arc::clone(&opened.disk) as Arc<dyn Disk>, limiter);
    let mut guest = Guest::new(disk, null_ring(), indirect);
    Box::new(move || {
        let _image = &opened;
        guest.round(|cx| cx.ring().turn(false).map(drop).expect("the ring turns"));
    })
}

/// A cached read from the ublk driver's descriptor to the answer that fetches the next one.
fn ublk_read() -> Box<dyn FnMut()> {
    let cx = null_ring();
    ublk_rounds(Opened::new(true, false), cx, NullChannel::new(BATCH), None)
}

/// The same on the kernel's end of a driver. A file stands for its device, and answers each command at once.
fn kernel_channel_read<D: Disk + 'static>(opened: Opened<D>, transport: Transport) -> Box<dyn FnMut()> {
    let table = FixedTable::sparse(BATCH);
    let ring = Ring::with_fixed(RingKind::Null, 256, &table).expect("a ring");
    let cx = Context::on(ring);
    let device = std::fs::File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(opened.folder.path().join("device"))
        .expect("a file");
    device.write_all_at(&descriptors(), 0).expect("descriptors");
    let bytes = REQUEST_BYTES as u32;
    let channel = KernelChannel::open(&cx, device.into(), 0, BATCH, transport, bytes, 0).expect("a channel");
    let zero_copy_from = (transport == Transport::ZeroCopy).then_some(0);
    ublk_rounds(opened, cx, channel, zero_copy_from)
}

/// A read under each tag, as a driver describes it.
fn descriptors() -> Vec<u8> {
    let of_tag = |tag: u16| {
        let read = read_under(tag);
        let halves = [read.op_flags, read.nr_sectors].map(u32::to_ne_bytes);
        let words = [read.start_sector, read.addr].map(u64::to_ne_bytes);
        [halves.concat(), words.concat()].concat()
    };
    (0..BATCH).flat_map(of_tag).collect()
}

fn ublk_rounds<D: Disk + 'static>(
    opened: Opened<D>,
    cx: Context,
    channel: impl Channel + 'static,
    zero_copy_from: Option<u32>,
) -> Box<dyn FnMut()> {
    let state = QueueState::new(0, Arc::new(|_| {}));
    let mut queue = UblkQueue::start(
        &cx,
        channel,
        opened.open_queue(&cx),
        BATCH,
        REQUEST_BYTES as u32,
        zero_copy_from,
        Arc::clone(&state),
    );
    cx.ring().turn(false).expect("the ring turns");
    let mut rounds = 0;
    Box::new(move || {
        let _image = &opened;
        queue.poll();
        cx.ring().turn(false).expect("the ring turns");
        queue.publish();
        // The commands that fetch the next requests.
        cx.ring().turn(false).expect("the ring turns");
        rounds += 1;
        let Counts {
            requests,
            zero_copied,
            ..
        } = state.counts();
        assert_eq!(requests, rounds * u64::from(BATCH));
        assert_eq!(zero_copied, zero_copy_from.map_or(0, |_| requests));
    })
}
