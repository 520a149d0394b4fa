//! The cost of requests: the number of operations that each asks of the host's disk, in the simulated world. A result
//! can be right and still take a read, a table or a pass too many, which no test of contents sees.

use std::path::Path;
use std::sync::Arc;

use block::file::Alignment;
use block::{AlignedBuf, Buffer, Context, Disk, DiskQueue, Op, Request};
use qcow::image::{CreateOptions, Preallocation, create};
use qcow::{BitmapChange, BitmapStorage, OpenOptions, QcowDisk, TableMemory};
use simulator::{Profile, SimImage, SimWorld};

const DISK: &str = "disk";
const CLUSTER: u64 = 4096;
const WRITE: Op = Op::Write { fua: false };

/// A disk of 64 MiB in clusters of 4 KiB, in which everything happens at once.
struct Bench {
    world: SimWorld,
    cx: Context,
    disk: Arc<QcowDisk>,
    queue: Box<dyn DiskQueue>,
}

impl Bench {
    fn new() -> Self {
        Self::with(None, Alignment::NONE, None)
    }

    /// As `options` say, in version 3.
    fn opened_as(options: &OpenOptions) -> Self {
        Self::new().open_again(options)
    }

    /// With a raw backing file of the same size, if one is named, a disk that takes only what is aligned, and so many bytes of
    /// L2 tables in memory.
    fn with(backing: Option<&str>, alignment: Alignment, l2_cache_bytes: Option<u64>) -> Self {
        let mut shape = CreateOptions::new(64 << 20);
        shape.cluster_size = CLUSTER;
        Self::made(shape, backing, alignment, l2_cache_bytes)
    }

    /// With an image of this shape.
    fn made(
        mut shape: CreateOptions,
        backing: Option<&str>,
        alignment: Alignment,
        l2_cache_bytes: Option<u64>,
    ) -> Self {
        let world = SimWorld::new(1, Profile::IMMEDIATE);
        let cx = world.context(64);
        if let Some(name) = backing {
            let bytes = vec![9; shape.size as usize];
            world.set_contents(name, SimImage::from_bytes(&world.store(), &bytes));
            shape.backing_file = Some(name.to_owned());
            shape.backing_format = Some("raw".to_owned());
        }
        world.set_alignment(DISK, alignment);
        let view = world.file(DISK, true).view(&cx).expect("a view");
        let created = cx.block_on(create(&view, &shape));
        created.expect("nothing waits for ever").expect("an image");
        let options = OpenOptions {
            l2_cache_bytes,
            ..Self::options()
        };
        Self::open(world, &options)
    }

    fn options() -> OpenOptions {
        OpenOptions {
            lock: None,
            backing_files: true,
            ..OpenOptions::default()
        }
    }

    fn open(world: SimWorld, options: &OpenOptions) -> Self {
        let cx = world.context(64);
        let disk = cx.block_on(QcowDisk::open_on(&cx, &world, Path::new(DISK), options));
        let disk = disk.expect("nothing waits for ever").expect("a disk");
        let queue = Arc::clone(&disk).open_queue(&cx).expect("a queue");
        Self {
            world,
            cx,
            disk,
            queue,
        }
    }

    /// Closes the disk and opens it with nothing in memory.
    fn open_again(self, options: &OpenOptions) -> Self {
        let Self {
            world,
            cx,
            disk,
            queue,
        } = self;
        drop(queue);
        let closed = cx.block_on(disk.close(&cx));
        closed.expect("nothing waits for ever").expect("a clean close");
        Self::open(world, options)
    }

    fn ask(&self, op: Op, offset: u64, len: u64) {
        self.ask_together(op, &[offset], len);
    }

    /// Submits requests at once, and waits for all answers.
    fn ask_together(&self, op: Op, offsets: &[u64], len: u64) {
        let submit = |offset: &u64| {
            let buffer = match op {
                Op::Read | Op::Write { .. } => AlignedBuf::from_slice(&vec![7; len as usize]).into(),
                _ => Buffer::default(),
            };
            let (request, answer) = Request::local(op, *offset, len, buffer);
            self.queue.submit(request);
            answer
        };
        let answers: Vec<_> = offsets.iter().map(submit).collect();
        for answer in answers {
            let done = self.cx.block_on(answer).expect("nothing waits for ever");
            done.result.expect("a request without faults");
        }
    }

    fn grow(&self, bytes: u64) {
        let grown = self.cx.block_on(self.disk.grow(&self.cx, bytes));
        grown.expect("nothing waits for ever").expect("a larger disk");
    }

    /// The operations that `work` asks of the disk, in order: what each does, and how many bytes of data.
    fn costs(&self, work: impl FnOnce()) -> Vec<(String, u64)> {
        self.world.record();
        let before = self.world.trace().len();
        work();
        let trace = self.world.trace();
        let submitted = trace[before..].iter().filter_map(|event| {
            let text = event.to_string();
            let kind = text.strip_suffix(", submitted")?.split(": ").nth(1)?;
            let kind = kind.split(' ').next()?.to_owned();
            Some((kind, event.len))
        });
        submitted.collect()
    }
}

fn op(kind: &str, clusters: u64) -> (String, u64) {
    (kind.to_owned(), clusters * CLUSTER)
}

#[test]
fn read_takes_one_op_per_host_extent() {
    let bench = Bench::new();
    bench.ask(WRITE, 0, 4 * CLUSTER);
    bench.ask(WRITE, 8 * CLUSTER, CLUSTER);
    let read = |offset, len| bench.costs(|| bench.ask(Op::Read, offset, len));
    assert_eq!(read(0, 4 * CLUSTER), [op("read", 4)]);
    assert_eq!(read(512, 512), [("read".to_owned(), 512)]);
    assert_eq!(read(0, 9 * CLUSTER), [op("read", 4), op("read", 1)]);
    assert_eq!(read(4 * CLUSTER, 4 * CLUSTER), [], "nothing is there");
    assert_eq!(read(64 << 19, 512 * CLUSTER), [], "there is no table either");
}

/// The read ends at the end of a table, and the next table is not loaded.
#[test]
fn read_loads_only_the_tables_of_its_range() {
    let bench = Bench::new();
    for table in 0..3 {
        bench.ask(WRITE, (table * 512 + 511) * CLUSTER, CLUSTER);
    }
    bench.ask(Op::Flush, 0, 0);
    let bench = bench.open_again(&Bench::options());
    let read = |offset, len| bench.costs(|| bench.ask(Op::Read, offset, len));
    let (table, data) = (op("read", 1), op("read", 1));
    let read_one = read(511 * CLUSTER, CLUSTER);
    assert_eq!(read_one, [table, data.clone()]);
    assert_eq!(read(511 * CLUSTER, CLUSTER), [data]);
}

/// A write in place with a durable mapping needs no metadata I/O: with FUA only its own sync, and with
/// `persist_mappings` none.
#[test]
fn write_with_durable_mapping_flushes_nothing() {
    let bench = Bench::new();
    bench.ask(WRITE, 0, CLUSTER);
    bench.ask(Op::Flush, 0, 0);
    let ops = bench.costs(|| bench.ask(Op::Write { fua: true }, 0, CLUSTER));
    assert_eq!(ops, [op("write", 1), op("sync", 0)]);
    let persists = OpenOptions {
        persist_mappings: true,
        ..Bench::options()
    };
    let bench = bench.open_again(&persists);
    bench.ask(Op::Flush, 0, 0);
    let ops = bench.costs(|| bench.ask(WRITE, 0, CLUSTER));
    assert_eq!(ops, [op("read", 1), op("write", 1)], "the table, and the bytes");
    let ops = bench.costs(|| bench.ask(WRITE, 0, CLUSTER));
    assert_eq!(ops, [op("write", 1)]);
}

/// The process before may have ended between the write of a header or an entry and its sync. The first change makes up for it.
#[test]
fn first_change_syncs_what_was_in_the_file() {
    let alignment = Alignment {
        offset: 512,
        memory: 512,
    };
    let (forced, zeroes) = (
        Op::Write { fua: true },
        Op::WriteZeroes {
            unmap: false,
            fua: false,
        },
    );
    for (change, first, later) in [
        (WRITE, vec![op("write", 1)], vec![op("write", 1)]),
        // It waits in a task, which has no plan of the write's place.
        (
            forced,
            vec![op("write", 1), op("sync", 0)],
            vec![op("write-dsync", 1)],
        ),
        (zeroes, vec![], vec![]),
        (Op::Discard, vec![], vec![]),
    ] {
        let bench = Bench::with(None, alignment, None);
        bench.ask(WRITE, 0, 2 * CLUSTER);
        let bench = bench.open_again(&Bench::options());
        bench.ask(Op::Read, 0, CLUSTER);
        let found = bench.costs(|| bench.ask(change, 0, CLUSTER));
        assert_eq!(found[0], op("sync", 0), "{change:?}");
        assert_eq!(found[1..], first, "{change:?}");
        let found = bench.costs(|| bench.ask(change, 0, CLUSTER));
        assert_eq!(found, later, "{change:?}");
    }
}

#[test]
fn write_into_new_clusters_takes_one_op() {
    let bench = Bench::new();
    // The first one makes the tables and reserves space ahead.
    bench.ask(WRITE, 0, CLUSTER);
    let write = |offset, len| bench.costs(|| bench.ask(WRITE, offset, len));
    assert_eq!(write(CLUSTER, 3 * CLUSTER), [op("write", 3)]);
    assert_eq!(write(CLUSTER, 3 * CLUSTER), [op("write", 3)], "in place");
    // A part of a cluster that nothing lies behind: the rest is known to be zeros.
    for (offset, len) in [(8, 512), (9, 1024)] {
        let ops = write(offset * CLUSTER + 512, len);
        assert_eq!(ops, [("write".to_owned(), len)]);
    }
}

#[test]
fn write_reads_only_clusters_it_replaces_in_part() {
    let top = Bench::with(Some("below"), Alignment::NONE, None);
    // The first one makes the tables and reserves space ahead.
    top.ask(WRITE, 0, CLUSTER);
    let write = |offset, len| top.costs(|| top.ask(WRITE, offset, len));
    assert_eq!(write(CLUSTER, 2 * CLUSTER), [op("write", 2)], "whole clusters");
    // Its beginning, its end, both of one cluster, both of two, one of two: what is around is read once.
    let (part, all) = (CLUSTER / 2, CLUSTER);
    for (offset, len, reads) in [
        (8 * all, part, 1),
        (9 * all + part, part, 1),
        (10 * all + 512, part, 1),
        (12 * all + part, all, 2),
        (14 * all, all + part, 1),
        (16 * all + part, part + all, 1),
    ] {
        let ops = write(offset, len);
        let clusters = (offset + len).div_ceil(all) - offset / all;
        let mut expected = vec![op("read", 1); reads];
        expected.push(op("write", clusters));
        assert_eq!(ops, expected, "{offset}+{len}");
    }
}

/// Subclusters of 2 KiB over a backing file: a write copies the rest of its own, and nothing of others.
#[test]
fn write_copies_no_neighbouring_subcluster() {
    for alignment in [1, 512, 4096] {
        let mut shape = CreateOptions::new(1 << 20);
        shape.extended_l2 = true;
        let alignment = Alignment {
            offset: alignment,
            memory: 1,
        };
        let top = Bench::made(shape, Some("below"), alignment, None);
        let cluster = 64 << 10;
        // The first one makes the tables and reserves space ahead.
        top.ask(WRITE, 0, cluster);
        let ops = |op, offset, len| top.costs(|| top.ask(op, offset, len));
        let one = |kind: &str, bytes: u64| (kind.to_owned(), bytes);
        let zeroes = Op::WriteZeroes {
            unmap: false,
            fua: false,
        };
        assert_eq!(
            ops(WRITE, 2 * cluster, 4096),
            [one("write", 4096)],
            "a new cluster"
        );
        assert_eq!(ops(WRITE, 2 * cluster + 8192, 4096), [one("write", 4096)]);
        assert_eq!(ops(WRITE, 2 * cluster, 4096), [one("write", 4096)], "in place");
        assert_eq!(
            ops(WRITE, 2 * cluster, 12288),
            [one("write", 12288)],
            "data, none and data"
        );
        assert_eq!(ops(zeroes, 2 * cluster + 4096, 8192), [], "bits of the mapping");
        assert_eq!(
            ops(zeroes, 5 * cluster + 4096, 8192),
            [],
            "and where nothing is mapped"
        );
        if alignment.offset == 4096 {
            continue;
        }
        let copied = [one("read", 2048), one("write", 2048)];
        assert_eq!(
            ops(WRITE, 3 * cluster + 20480 + 512, 512),
            copied,
            "a new cluster"
        );
        assert_eq!(ops(WRITE, 3 * cluster + 30 * 2048, 512), copied);
        assert_eq!(
            ops(WRITE, 3 * cluster + 31 * 2048 - 512, 512),
            [one("write", 512)]
        );
        let around = ops(WRITE, 3 * cluster + 512, 3 * 4096);
        let expected = [one("read", 2048), one("read", 2048), one("write", 7 * 2048)];
        assert_eq!(around, expected, "both ends of many");
        let around = ops(WRITE, 6 * cluster + 1024, 2048);
        assert_eq!(around, [one("read", 4096), one("write", 4096)], "of two, at once");
    }
}

#[test]
fn growth_over_unallocated_space_makes_no_tables() {
    let bench = Bench::new();
    bench.ask(WRITE, 0, CLUSTER);
    bench.ask(Op::Flush, 0, 0);
    let ops = bench.costs(|| bench.grow((64 << 20) + CLUSTER));
    // The header's sector, with syncs around it.
    let written = ops.iter().filter(|(kind, _)| kind != "sync");
    for one in written {
        assert_eq!(one, &("write".to_owned(), 512), "{ops:?}");
    }
}

#[test]
fn flush_writes_only_what_changed() {
    let bench = Bench::new();
    bench.ask(WRITE, 0, CLUSTER);
    bench.ask(Op::Flush, 0, 0);
    let (sync, table) = (op("sync", 0), op("write", 1));
    let none: [(String, u64); 0] = [];
    let zeroes = Op::WriteZeroes {
        unmap: true,
        fua: false,
    };
    // Counts before entries that need them, and entries before what they no longer lead to is freed. With nothing written
    // since the last sync, entries need none before them.
    let made = [&table, &sync, &table, &sync].map(Clone::clone);
    let freed = [&table, &sync, &op("punch", 1)].map(Clone::clone);
    let counted = [&table, &sync].map(Clone::clone);
    let data = std::slice::from_ref(&sync);
    for (what, request, cluster, asked, flushed) in [
        ("nothing", None, 0, &none[..], &none[..]),
        ("a write in place", Some(WRITE), 0, &[op("write", 1)], data),
        ("a write", Some(WRITE), 1, &[op("write", 1)], &made),
        ("a discard", Some(Op::Discard), 0, &none, &freed),
        ("a second discard", Some(Op::Discard), 0, &none, &counted),
        ("zeroes for what is zero", Some(zeroes), 0, &none, &none),
        ("zeroes", Some(zeroes), 1, &none, &freed),
    ] {
        let ops = bench.costs(|| {
            if let Some(request) = request {
                bench.ask(request, cluster * CLUSTER, CLUSTER);
            }
        });
        assert_eq!(ops, asked, "{what}");
        let ops = bench.costs(|| bench.ask(Op::Flush, 0, 0));
        assert_eq!(ops, flushed, "FLUSH after {what}");
    }
}

/// QEMU and file systems send many FLUSHes after which nothing was written.
#[test]
fn flush_after_flush_takes_no_op() {
    let bench = Bench::new();
    let other = Arc::clone(&bench.disk).open_queue(&bench.cx).expect("a queue");
    let flush_other = || {
        let (request, answer) = Request::local(Op::Flush, 0, 0, Buffer::default());
        other.submit(request);
        let done = bench.cx.block_on(answer).expect("nothing waits for ever");
        done.result.expect("a FLUSH");
    };
    let flush = || bench.ask(Op::Flush, 0, 0);
    let rounds = || bench.disk.counts().flush_rounds;
    let before = rounds();
    bench.ask(WRITE, 0, CLUSTER);
    flush();
    assert_eq!(rounds(), before + 1);
    assert_eq!(bench.costs(flush), []);
    assert_eq!(bench.costs(flush_other), [], "on any queue");
    for cluster in [0, 1] {
        let write = || bench.ask(WRITE, cluster * CLUSTER, CLUSTER);
        let once = bench.costs(|| {
            write();
            flush();
        });
        assert!(once.len() >= 2 && once.last() == Some(&op("sync", 0)), "{once:?}");
        assert_eq!(bench.costs(flush), []);
        assert_eq!(bench.costs(flush_other), []);
    }
    let written_here = bench.costs(|| {
        bench.ask(WRITE, 0, CLUSTER);
        flush_other();
    });
    assert_eq!(written_here, [op("write", 1), op("sync", 0)]);
    assert_eq!(bench.costs(flush), []);
    // A read changes nothing.
    bench.ask(Op::Read, 0, CLUSTER);
    assert_eq!(bench.costs(flush), []);
}

/// The header, the L1 table, the refcount table.
#[test]
fn open_reads_each_structure_once() {
    let bench = Bench::new();
    let options = OpenOptions {
        read_only: true,
        ..Bench::options()
    };
    let ops = bench.costs(|| {
        let opened = QcowDisk::open_on(&bench.cx, &bench.world, Path::new(DISK), &options);
        let opened = bench.cx.block_on(opened).expect("nothing waits for ever");
        drop(opened.expect("a disk"));
    });
    let reads = ops.iter().filter(|(kind, _)| kind == "read").count();
    assert_eq!((reads, ops.len()), (3, 3), "{ops:?}");
}

/// A process before this one may have written and not synced.
#[test]
fn first_flush_after_open_takes_a_sync() {
    let bench = Bench::new();
    bench.ask(WRITE, 0, CLUSTER);
    bench.ask(Op::Flush, 0, 0);
    let bench = bench.open_again(&Bench::options());
    let flush = || bench.ask(Op::Flush, 0, 0);
    assert_eq!(bench.costs(flush), [op("sync", 0)]);
    assert_eq!(bench.costs(flush), []);
}

/// Direct writes that make a file longer wait for each other in the host's file system.
#[test]
fn only_direct_writes_reserve_space_ahead() {
    const AHEAD: u64 = 4 << 20;
    for (offset, reserves) in [(1, false), (512, true)] {
        let bench = Bench::with(None, Alignment { offset, memory: 1 }, None);
        // The first cluster, and its L2 table.
        let end = bench.world.contents(DISK).len() + 2 * CLUSTER;
        let ops = bench.costs(|| bench.ask(WRITE, 0, CLUSTER));
        let reserved = ops.contains(&("allocate".to_owned(), AHEAD));
        assert_eq!(reserved, reserves);
        let trace = bench.world.trace();
        let mut places = trace.iter().filter(|event| event.len == AHEAD);
        assert!(places.all(|event| event.offset == end));
    }
}

/// Each of these writes changes another L2 table, and hardly any changes another refcount block.
#[test]
fn dirty_tables_are_written_before_they_fill_the_cache() {
    let bench = Bench::with(None, Alignment::NONE, Some(16 * CLUSTER));
    let ops = bench.costs(|| {
        for table in 0..16 {
            bench.ask(WRITE, table * 512 * CLUSTER, CLUSTER);
        }
    });
    assert!(ops.contains(&op("sync", 0)), "{ops:?}");
}

/// An image of 1 GiB whose clusters are all allocated. A slice of its refcount blocks counts 512.
fn full() -> CreateOptions {
    CreateOptions {
        refcount_bits: 64,
        preallocation: Preallocation::Metadata,
        ..CreateOptions::new(1 << 30)
    }
}

/// Two refcount blocks of 16 slices count a full file, and the third its end. The first slice is read alone, as one that is asked for at
/// random is.
#[test]
fn scan_of_a_full_file_reads_refcount_blocks_whole() {
    const CLUSTER: u64 = 64 << 10;
    const SLICE_COVERS: u64 = 512 * CLUSTER;
    let shape = full();
    // The slices that each read of a scan has, after so many others were changed.
    let scan = |table_memory: TableMemory, dirty: u64| {
        let options = OpenOptions {
            table_memory,
            sparse: true,
            ..Bench::options()
        };
        let bench = Bench::made(shape.clone(), None, Alignment::NONE, None).open_again(&options);
        bench.grow(2 << 30);
        for place in 0..dirty {
            bench.ask(Op::Discard, place * SLICE_COVERS, CLUSTER);
        }
        bench.ask(Op::Flush, 0, 0);
        bench.ask(Op::Flush, 0, 0);
        // They are used again first.
        for place in 0..dirty {
            bench.ask(WRITE, place * SLICE_COVERS, CLUSTER);
        }
        let ops = bench.costs(|| bench.ask(WRITE, 1 << 30, CLUSTER));
        let reads = ops.iter().filter(|(kind, _)| kind == "read");
        reads.map(|(_, bytes)| bytes / 4096).collect::<Vec<u64>>()
    };
    assert_eq!(scan(TableMemory::default(), 0), [1, 15, 16, 16]);
    // Where hardly any may be dropped, those that come ahead must not drive out the one that was asked for: it would be asked for for ever.
    let hardly = scan(TableMemory::new(0), 14);
    assert_eq!(hardly, [1; 17]);
    // With few, fewer at once, and none twice.
    let few = scan(TableMemory::new(0), 0);
    assert_eq!(few.iter().sum::<u64>(), 37, "{few:?}");
    assert!(few.iter().all(|slices| *slices <= 5), "{few:?}");
}

/// If a read of several slices fails, the one that is needed is read alone.
#[test]
fn slice_that_cannot_be_read_ahead_of_a_scan_fails_no_write() {
    let profile = Profile {
        read_error: 150,
        ..Profile::default()
    };
    let mut failures = 0;
    for seed in 0..400 {
        let world = SimWorld::new(seed, profile);
        let cx = world.context(64);
        let view = world.file(DISK, true).view(&cx).expect("a view");
        let ends = "nothing waits for ever";
        let created = cx.block_on(create(&view, &full())).expect(ends);
        let opened = cx.block_on(QcowDisk::open_on(&cx, &world, Path::new(DISK), &Bench::options()));
        let (Ok(_), Ok(disk)) = (created, opened.expect(ends)) else {
            continue;
        };
        let queue = Arc::clone(&disk).open_queue(&cx).expect("a queue");
        if cx.block_on(disk.grow(&cx, 2 << 30)).expect(ends).is_err() {
            continue;
        }
        world.record();
        let (request, answer) = Request::local(WRITE, 1 << 30, 512, AlignedBuf::from_slice(&[7; 512]).into());
        queue.submit(request);
        let result = cx.block_on(answer).expect(ends).result;
        let trace = world.trace();
        let failed = trace.iter().filter(|event| {
            event.to_string().contains("read") && event.to_string().contains("fails with errno 5")
        });
        let lens: Vec<u64> = failed.map(|event| event.len).collect();
        if !lens.is_empty() && lens.iter().all(|&len| len > 4096) {
            failures += 1;
            assert_eq!(result, Ok(()), "seed {seed}");
        }
    }
    assert!(failures > 10, "{failures} reads ahead failed");
}

#[test]
fn write_zeroes_over_backing_file_remaps_whole_clusters() {
    let top = Bench::with(Some("below"), Alignment::NONE, None);
    top.ask(WRITE, 0, CLUSTER);
    let zeroes = Op::WriteZeroes {
        unmap: true,
        fua: false,
    };
    assert_eq!(top.costs(|| top.ask(zeroes, 4 * CLUSTER, 8 * CLUSTER)), []);
    // The parts of clusters that a range begins and ends with are copied and written.
    let part = top.costs(|| top.ask(zeroes, 20 * CLUSTER + 512, CLUSTER));
    let both = [op("read", 1), op("write", 1), op("read", 1), op("write", 1)];
    assert_eq!(part, both);
}

/// Discards and write-zeroes free a cluster, punch it or keep it, as the request and the options say.
#[test]
fn cluster_is_freed_when_requested_and_allowed() {
    let zeroes = |unmap| Op::WriteZeroes { unmap, fua: false };
    let bare = Bench::options;
    let keeps_place = OpenOptions {
        discard_no_unref: true,
        ..bare()
    };
    let keeps_all = OpenOptions {
        sparse: false,
        ..bare()
    };
    // (how it is opened, the request, whether the cluster stays the guest's, whether it is punched)
    for (case, (options, request, stays, punched)) in [
        (bare(), zeroes(true), false, true),
        (bare(), zeroes(false), true, false),
        (bare(), Op::Discard, false, true),
        (keeps_place.clone(), zeroes(true), true, true),
        (keeps_place.clone(), zeroes(false), true, false),
        (keeps_place, Op::Discard, true, true),
        (keeps_all, zeroes(true), true, false),
    ]
    .into_iter()
    .enumerate()
    {
        let bench = Bench::opened_as(&options);
        bench.ask(WRITE, 0, CLUSTER);
        bench.ask(Op::Flush, 0, 0);
        let end = bench.world.contents(DISK).len();
        for round in 0..2 {
            let ops = bench.costs(|| {
                bench.ask(request, 0, CLUSTER);
                bench.ask(Op::Flush, 0, 0);
            });
            let is_punched = ops.iter().any(|(kind, _)| kind == "punch");
            assert_eq!(
                is_punched,
                punched && round == 0,
                "case {case}, round {round}: {ops:?}"
            );
        }
        // What stays is written in place; what was given back is used for anything.
        let counts = bench.costs(|| {
            bench.ask(WRITE, 0, CLUSTER);
            bench.ask(Op::Flush, 0, 0);
        });
        let tables = counts.iter().filter(|one| **one == op("write", 1)).count() - 1;
        assert_eq!(tables == 1, stays, "case {case}: {counts:?}");
        assert_eq!(bench.world.contents(DISK).len(), end, "case {case}");
    }
}

/// The first write in place of 4 MiB stores the bits of that region: a write of 4 KiB and a sync more, which such writes share. Others
/// there cost nothing, nor do bits that a FLUSH stores before its own sync, but for one write.
#[test]
fn durable_bitmap_costs_one_sync_per_region_that_is_written_in_place() {
    let shape = CreateOptions {
        cluster_size: CLUSTER,
        ..CreateOptions::new(64 << 20)
    };
    let bench = Bench::made(shape, None, Alignment::NONE, None);
    let mapped = [0, CLUSTER, 2 << 20, 8 << 20, 12 << 20, 16 << 20, 20 << 20];
    for at in mapped {
        bench.ask(WRITE, at, CLUSTER);
    }
    let add = BitmapChange::Add {
        granularity: Some(64 << 10),
        enabled: true,
    };
    let added = bench.cx.block_on(bench.disk.change_bitmap(&bench.cx, "b", &add));
    added.expect("nothing waits for ever").expect("a bitmap");
    let bench = bench.open_again(&OpenOptions {
        bitmaps: BitmapStorage::Durable,
        ..Bench::options()
    });
    // The tables are cached, and the bitmap is made durable.
    bench.ask(WRITE, 32 << 20, CLUSTER);
    bench.ask(Op::Flush, 0, 0);
    for at in mapped {
        bench.ask(Op::Read, at, CLUSTER);
    }
    let write = |at| bench.costs(|| bench.ask(WRITE, at, CLUSTER));
    assert_eq!(write(0), [op("write", 1), op("sync", 0), op("write", 1)]);
    for at in [0, CLUSTER, 2 << 20] {
        assert_eq!(write(at), [op("write", 1)], "in the region");
    }
    assert_eq!(write(8 << 20), [op("write", 1), op("sync", 0), op("write", 1)]);
    let together = bench.costs(|| bench.ask_together(WRITE, &[12 << 20, 16 << 20, 20 << 20], CLUSTER));
    let expected = [
        ("write", 1),
        ("sync", 0),
        ("write", 1),
        ("write", 1),
        ("write", 1),
    ];
    assert_eq!(together, expected.map(|(kind, clusters)| op(kind, clusters)));
    let flush = || bench.costs(|| bench.ask(Op::Flush, 0, 0));
    assert_eq!(flush(), [op("sync", 0)], "nothing is left to store");
    assert_eq!(
        write((32 << 20) + CLUSTER),
        [op("write", 1)],
        "an allocating write has no sync of its own"
    );
    let without = flush();
    assert_eq!(write(33 << 20), [op("write", 1)], "in the same table");
    let with = flush();
    let syncs = |costs: &[(String, u64)]| costs.iter().filter(|(kind, _)| kind == "sync").count();
    assert_eq!(syncs(&with), syncs(&without));
    assert_eq!(
        with.len(),
        without.len() + 1,
        "one write of bits: {with:?}, {without:?}"
    );
}
