//! A repair that the power cuts, in the simulated world: whatever subset of its unsynced sectors is kept, the image
//! is no more dangerous than it was, to look at and to write to, and a second repair mends it.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::Path;
use std::process::Command;
use std::rc::Rc;
use std::sync::Arc;

use block::{AlignedBuf, Buffer, Context, Disk, DiskQueue, IoError, Op};
use qcow::image::{CheckReport, RepairScope, Severity, Verdict, check, repair};
use qcow::{OpenOptions, QcowDisk};
use simulator::{Profile, Random, SimImage, SimWorld};

const DISK: &str = "disk";
const CLUSTER: u64 = 512;
const COPIED: u64 = 1 << 63;
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
const BLOCK_COUNTS: u64 = 64;
const GUEST_CLUSTERS: u64 = 192;
const DIRTY: u8 = 1;
const CORRUPT: u8 = 2;
/// All states of an instant up to so many, and so many drawn of more.
const STATES_PER_INSTANT: u128 = 512;

/// An image as bytes, and what its tables lead to. Without compressed clusters.
#[derive(Clone)]
struct Image(Vec<u8>);

impl Image {
    fn u64(&self, at: u64) -> u64 {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&self.0[at as usize..][..8]);
        u64::from_be_bytes(bytes)
    }

    fn put(&mut self, at: u64, value: u64) {
        self.0[at as usize..][..8].copy_from_slice(&value.to_be_bytes());
    }

    /// Returns the offsets of the L1 tables of the disk and of its snapshot.
    fn l1s(&self) -> [u64; 2] {
        [self.u64(40), self.u64(self.u64(64))]
    }

    fn bits(&self) -> u8 {
        self.0[79]
    }

    /// Returns the offset of a host cluster's count.
    fn count_at(&self, cluster: u64) -> u64 {
        self.u64(self.u64(48) + cluster / BLOCK_COUNTS * 8) + cluster % BLOCK_COUNTS * 8
    }

    /// Returns the offsets of a guest cluster's L1 entry and, if that leads to a table, of its L2 entry.
    fn entries(&self, l1: u64, guest: u64) -> (u64, Option<u64>) {
        let at = l1 + guest / 64 * 8;
        let table = self.u64(at) & OFFSET;
        (at, (table != 0).then(|| table + guest % 64 * 8))
    }

    /// The host offset of a guest cluster; zero if it has none.
    fn host(&self, l1: u64, guest: u64) -> u64 {
        let raw = self.entries(l1, guest).1.map_or(0, |at| self.u64(at));
        if raw & 1 == 0 { raw & OFFSET } else { 0 }
    }

    fn cluster(&self, l1: u64, guest: u64) -> Vec<u8> {
        let at = self.host(l1, guest) as usize;
        let end = self.0.len().min(at + CLUSTER as usize);
        let mut bytes = if at == 0 {
            Vec::new()
        } else {
            self.0[at..end].to_vec()
        };
        bytes.resize(CLUSTER as usize, 0);
        bytes
    }

    /// Returns the contents of the disk and of its snapshot, by cluster.
    fn contents(&self) -> [Vec<Vec<u8>>; 2] {
        self.l1s()
            .map(|l1| (0..GUEST_CLUSTERS).map(|guest| self.cluster(l1, guest)).collect())
    }

    /// Host clusters that two different guest clusters have, of the disk or the snapshot.
    fn crossed(&self) -> BTreeSet<u64> {
        let mut owners: BTreeMap<u64, BTreeSet<u64>> = BTreeMap::new();
        for l1 in self.l1s() {
            for guest in 0..GUEST_CLUSTERS {
                owners.entry(self.host(l1, guest)).or_default().insert(guest);
            }
        }
        owners.retain(|&host, guests| host != 0 && guests.len() > 1);
        owners.into_keys().collect()
    }

    /// Entries of the disk's tables that say that nobody else refers to what somebody else refers to.
    fn wrongly_copied(&self) -> BTreeSet<u64> {
        let mut references: BTreeMap<u64, u32> = BTreeMap::new();
        let mut claims = BTreeSet::new();
        for (active, l1) in [true, false].into_iter().zip(self.l1s()) {
            for guest in 0..GUEST_CLUSTERS {
                let (at, entry) = self.entries(l1, guest);
                let places = [(guest % 64 == 0).then_some(at), entry];
                for at in places.into_iter().flatten() {
                    let raw = self.u64(at);
                    *references.entry(raw & OFFSET).or_default() += 1;
                    if active && raw & COPIED != 0 {
                        claims.insert((at, raw & OFFSET));
                    }
                }
            }
        }
        let wrong = claims.into_iter().filter(|(_, host)| references[host] > 1);
        wrong.map(|(at, _)| at).collect()
    }
}

/// A world in which everything happens at once, on the sectors of `world`, with this image.
fn calm(world: &SimWorld, image: SimImage) -> (SimWorld, Context) {
    let calm = SimWorld::with_store(0, Profile::IMMEDIATE, &world.store());
    calm.set_contents(DISK, image);
    let cx = calm.context(64);
    (calm, cx)
}

fn bytes_of(world: &SimWorld) -> Image {
    Image(world.contents(DISK).to_bytes())
}

fn look(world: &SimWorld, cx: &Context) -> CheckReport {
    let view = world.file(DISK, false).view(cx).expect("a view");
    let report = cx.block_on(check(&view)).expect("nothing waits for ever");
    report.expect("a check")
}

/// Returns the corruptions but for COPIED flags, with their offsets: while a flag and a count are both mended, one is
/// first.
fn wrong(report: &CheckReport) -> BTreeSet<(u64, String)> {
    let corrupt = report
        .findings
        .iter()
        .filter(|finding| finding.severity != Severity::Leak && !finding.message.contains("COPIED"));
    corrupt
        .map(|finding| (finding.offset, finding.message.clone()))
        .collect()
}

/// Clusters that are in use and count zero.
fn uncounted(report: &CheckReport) -> BTreeSet<u64> {
    let zero = report
        .findings
        .iter()
        .filter(|finding| finding.message.starts_with("refcount is 0,"));
    zero.map(|finding| finding.offset).collect()
}

/// The damage that a guest does by writing to a damaged image.
#[derive(Debug, Default)]
struct Harm {
    /// Host clusters in use that count zero.
    uncounted: BTreeSet<u64>,
    /// Host clusters that two have.
    crossed: BTreeSet<u64>,
    /// Clusters of the disk (0) or its snapshot (1) that do not read as they should.
    lost: BTreeSet<(usize, u64)>,
}

async fn ask(queue: &dyn DiskQueue, op: Op, offset: u64, buffer: Buffer) -> Result<(), IoError> {
    let len = buffer.len() as u64;
    block::ask(queue, op, offset, len, buffer).await.map(drop)
}

/// Opens the image for writing, writes to shared, own and fresh clusters, closes it; and again. `None` if it may
/// not be opened.
fn write_to(world: &SimWorld, cx: &Context, should: &[Vec<Vec<u8>>; 2]) -> Option<Harm> {
    let mut should = should.clone();
    let mut unsure = BTreeSet::new();
    for (round, targets) in [&[1, 120, 6, 190, 40, 60], &[20, 21, 22, 23, 24, 25]]
        .into_iter()
        .enumerate()
    {
        let options = OpenOptions {
            lock: None,
            ..OpenOptions::default()
        };
        let opened = cx.block_on(QcowDisk::open_on(cx, world, Path::new(DISK), &options));
        let Ok(disk) = opened.expect("nothing waits for ever") else {
            if round == 0 {
                return None;
            }
            break;
        };
        let written = cx.block_on(async {
            let queue = Arc::clone(&disk).open_queue(cx).expect("a queue");
            let mut written = Vec::new();
            for &guest in targets {
                let bytes = AlignedBuf::from_slice(&[0xE0 + round as u8; CLUSTER as usize]);
                let write = Op::Write { fua: false };
                written.push(ask(&*queue, write, guest * CLUSTER, bytes.into()).await);
            }
            let flushed = ask(&*queue, Op::Flush, 0, Buffer::default()).await;
            drop(queue);
            let closed = disk.close(cx).await;
            (written, flushed.is_ok() && closed.is_ok())
        });
        let (written, kept) = written.expect("nothing waits for ever");
        for (&guest, result) in targets.iter().zip(written) {
            if result.is_ok() && kept {
                should[0][guest as usize] = vec![0xE0 + round as u8; CLUSTER as usize];
            } else {
                unsure.insert(guest);
            }
        }
    }
    world.settle();
    let image = bytes_of(world);
    let found = image.contents();
    let mut harm = Harm {
        uncounted: uncounted(&look(world, cx)),
        crossed: image.crossed(),
        ..Harm::default()
    };
    for (which, (should, found)) in should.iter().zip(&found).enumerate() {
        for (guest, (should, found)) in should.iter().zip(found).enumerate() {
            if should != found && !(which == 0 && unsure.contains(&(guest as u64))) {
                harm.lost.insert((which, guest as u64));
            }
        }
    }
    Some(harm)
}

/// Repairs the image step by step; `look` sees what a cut can leave whenever that changes.
fn repair_step_by_step(world: &SimWorld, scope: RepairScope, mut look: impl FnMut()) {
    let cx = world.context(64);
    let view = world.file(DISK, true).view(&cx).expect("a view");
    let done = Rc::new(Cell::new(false));
    let set_done = Rc::clone(&done);
    cx.spawn(async move {
        let report = repair(&view, scope).await.expect("a repair");
        if scope == RepairScope::All {
            assert_eq!(
                report.after.verdict(),
                Verdict::Clean,
                "{:?}",
                report.after.findings
            );
        }
        set_done.set(true);
    });
    let mut changes = None;
    while !done.get() {
        cx.run_ready();
        cx.ring().turn(false).expect("the ring turns");
        cx.run_ready();
        if changes.replace(world.changes()) != Some(world.changes()) {
            look();
        }
        world.step();
    }
    look();
}

/// A sound image of 512-byte clusters with counts of 64 bits, several refcount blocks, and a snapshot that shares
/// some of its clusters.
fn sound() -> Image {
    let folder = tempfile::tempdir().expect("a folder");
    let run = |tool: &str, args: &[&str]| {
        let output = Command::new(tool).args(args).current_dir(folder.path()).output();
        let output = output.unwrap_or_else(|error| panic!("cannot run {tool} ({error}): install qemu-utils"));
        assert!(output.status.success(), "{tool} {args:?}: {output:?}");
    };
    let options = "cluster_size=512,refcount_bits=64";
    run(
        "qemu-img",
        &["create", "-q", "-f", "qcow2", "-o", options, "disk.qcow2", "96k"],
    );
    let first = ["-c", "write -P 1 0 8k", "-c", "write -P 3 32k 32k"];
    run(
        "qemu-io",
        &[&["-f", "qcow2"], &first[..], &["disk.qcow2"]].concat(),
    );
    run("qemu-img", &["snapshot", "-c", "before", "disk.qcow2"]);
    let more = ["-c", "write -P 2 3k 2k", "-c", "write -P 4 64k 32k"];
    run(
        "qemu-io",
        &[&["-f", "qcow2"], &more[..], &["disk.qcow2"]].concat(),
    );
    let mut bytes = std::fs::read(folder.path().join("disk.qcow2")).expect("an image");
    bytes.resize(bytes.len().next_multiple_of(CLUSTER as usize), 0);
    Image(bytes)
}

/// Ways to damage it, each with its name.
fn damaged(sound: &Image) -> Vec<(&'static str, Image)> {
    let active = sound.l1s()[0];
    let shared = |guest: u64| {
        (
            sound.host(active, guest) / CLUSTER,
            sound.entries(active, guest).1,
        )
    };
    let case = |change: &dyn Fn(&mut Image)| {
        let mut image = sound.clone();
        change(&mut image);
        image
    };
    let set_count = |image: &mut Image, cluster: u64, count: u64| image.put(image.count_at(cluster), count);
    let flip = |image: &mut Image, at: u64| image.put(at, image.u64(at) ^ COPIED);
    // 0 to 5, 10 to 15 and 64 to 127 are shared with the snapshot, 6 to 9 and 128 to 191 are the disk's own.
    let (one, two, own, far) = (shared(1), shared(120), shared(6), shared(190));
    let entry = |place: (u64, Option<u64>)| place.1.expect("an entry");
    let low = |image: &mut Image| {
        set_count(image, one.0, 1);
        flip(image, entry(one));
        set_count(image, two.0, 1);
        flip(image, entry(two));
    };
    let high = |image: &mut Image| {
        set_count(image, one.0, 9);
        set_count(image, own.0, 2);
        flip(image, entry(own));
        set_count(image, far.0, 3);
        flip(image, entry(two));
    };
    let leak = |image: &mut Image| {
        image.put(entry(own), 0);
        image.put(entry(far), 0);
        image.put(entry(one), 0);
        image.put(entry(shared(130)), 0);
    };
    let zero = |image: &mut Image| {
        set_count(image, own.0, 0);
        set_count(image, two.0, 0);
        set_count(image, far.0, 0);
    };
    let mark = |image: &mut Image, bits: u8| image.0[79] |= bits;
    let no_block = |image: &mut Image| image.put(image.u64(48) + 8, 0);
    let no_data_block = |image: &mut Image| image.put(image.u64(48) + far.0 / BLOCK_COUNTS * 8, 0);
    vec![
        ("leaks", case(&leak)),
        ("counts too low, flags to match", case(&low)),
        ("counts of zero", case(&zero)),
        ("counts too high, flags wrong", case(&high)),
        (
            "counts too low and too high",
            case(&|image| {
                low(image);
                set_count(image, far.0, 5);
                set_count(image, own.0, 2);
                flip(image, entry(own));
            }),
        ),
        (
            "dirty, all sorts",
            case(&|image| {
                low(image);
                leak(image);
                mark(image, DIRTY);
            }),
        ),
        (
            "corrupt, all sorts",
            case(&|image| {
                high(image);
                zero(image);
                mark(image, CORRUPT);
            }),
        ),
        ("a refcount block lost", case(&no_block)),
        (
            "data's refcount block lost, counts too low",
            case(&|image| {
                low(image);
                no_data_block(image);
            }),
        ),
        (
            "a refcount table entry that leads nowhere, counts too low",
            case(&|image| {
                low(image);
                image.put(image.u64(48) + 5 * 8, 1);
            }),
        ),
        (
            "a refcount block lost, counts too low",
            case(&|image| {
                low(image);
                no_block(image);
            }),
        ),
        (
            "a refcount block lost, dirty and corrupt",
            case(&|image| {
                low(image);
                no_block(image);
                mark(image, DIRTY | CORRUPT);
            }),
        ),
    ]
}

#[test]
fn full_repair_cut_by_power_loss_makes_nothing_worse() {
    cut_everywhere(RepairScope::All);
}

#[test]
fn leak_repair_cut_by_power_loss_makes_nothing_worse() {
    cut_everywhere(RepairScope::Leaks);
}

/// A program that discarded clusters was killed before that was durable. A repair frees nothing that a cut may bring back, and writes
/// nothing there.
#[test]
fn repair_after_a_killed_program_frees_nothing_that_comes_back() {
    /// A guest cluster that has a table and no cluster.
    const LAST: u64 = 20;
    let mut sound = sound();
    let l1 = sound.l1s()[0];
    // A cluster behind all tables, where rebuilt ones would lie.
    let (last, entry) = (sound.0.len() as u64, sound.entries(l1, LAST).1.expect("a table"));
    sound.0.extend([5; CLUSTER as usize]);
    sound.put(entry, last | COPIED);
    sound.put(sound.count_at(last / CLUSTER), 1);
    let mut no_block = sound.clone();
    no_block.put(no_block.u64(48) + 8, 0);
    for (what, scope, durable) in [
        ("leaks", RepairScope::Leaks, sound.clone()),
        ("all", RepairScope::All, sound.clone()),
        ("rebuilt", RepairScope::All, no_block),
    ] {
        let world = SimWorld::new(1, Profile::default());
        let start = SimImage::from_bytes(&world.store(), &durable.0);
        world.set_contents(DISK, start.clone());
        let (judge, cx) = calm(&world, start);
        let was_uncounted = uncounted(&look(&judge, &cx));
        let dropped: Vec<u64> = (176..GUEST_CLUSTERS)
            .chain([LAST])
            .filter_map(|guest| durable.entries(l1, guest).1)
            .collect();
        let cx = world.context(64);
        let view = world.file(DISK, true).view(&cx).expect("a view");
        cx.spawn(async move {
            for at in dropped {
                let written = view.write_at(at, AlignedBuf::from_slice(&[0; 8])).await;
                written.expect("a write");
            }
        });
        while cx.tasks() > 0 {
            cx.run_ready();
            cx.ring().turn(false).expect("the ring turns");
            world.step();
        }
        let zeros = vec![0; CLUSTER as usize];
        let mut random = Random::new(7);
        let mut cuts = 0;
        repair_step_by_step(&world, scope, || {
            let space = world.crash_space(DISK);
            for _ in 0..64 {
                let state = space.draw(&mut random);
                let (cut, cx) = calm(&world, state);
                let now: Vec<_> = uncounted(&look(&cut, &cx))
                    .difference(&was_uncounted)
                    .copied()
                    .collect();
                assert!(now.is_empty(), "{what}: {now:x?} count zero");
                let contents = bytes_of(&cut).contents();
                for (should, found) in sound.contents().iter().zip(&contents) {
                    let is_other =
                        |(should, found): &(&Vec<u8>, &Vec<u8>)| should != found && **found != zeros;
                    let other = should.iter().zip(found).position(|pair| is_other(&pair));
                    assert_eq!(other, None, "{what}: a cluster has other contents");
                }
                cuts += 1;
            }
        });
        assert!(cuts > 100, "{what}: {cuts}");
    }
}

#[expect(clippy::print_stdout, reason = "how far it looked is part of the result")]
fn cut_everywhere(scope: RepairScope) {
    let (mut judged, mut drawn) = (0, 0);
    let sound = sound();
    for (what, damaged) in damaged(&sound) {
        let world = SimWorld::new(1, Profile::default());
        let start = SimImage::from_bytes(&world.store(), &damaged.0);
        world.set_contents(DISK, start.clone());
        let contents = damaged.contents();
        let (judge, cx) = calm(&world, start.clone());
        let before = look(&judge, &cx);
        assert_ne!(before.verdict(), Verdict::Clean, "{what}");
        if scope == RepairScope::Leaks && (before.leaks == 0 || what.contains("lost")) {
            continue;
        }
        let (was_wrong, was_uncounted) = (wrong(&before), uncounted(&before));
        let was_copied = damaged.wrongly_copied();
        let harm_before = write_to(&judge, &cx, &contents).unwrap_or_default();
        // A cluster that counted zero before may have been handed out to a second owner at any time.
        let known_uncounted = &harm_before.uncounted | &was_uncounted;
        let known_crossed = &harm_before.crossed | &was_uncounted;
        let mut known_lost = harm_before.lost;
        for (which, l1) in damaged.l1s().into_iter().enumerate() {
            let lost = (0..GUEST_CLUSTERS).filter(|&guest| was_uncounted.contains(&damaged.host(l1, guest)));
            known_lost.extend(lost.map(|guest| (which, guest)));
        }
        let mut seen = HashSet::new();
        let mut random = Random::new(7);
        let mut written = 0;
        repair_step_by_step(&world, scope, || {
            let space = world.crash_space(DISK);
            let all = space.count() <= STATES_PER_INSTANT;
            drawn += u64::from(!all);
            for number in 0..space.count().min(STATES_PER_INSTANT) {
                let state = if all {
                    space.nth(number)
                } else {
                    space.draw(&mut random)
                };
                if !seen.insert(state.fingerprint()) {
                    continue;
                }
                judged += 1;
                let name = format!("{what}, cut {}", seen.len());
                let (cut, cx) = calm(&world, state.clone());
                let image = bytes_of(&cut);
                let report = look(&cut, &cx);
                let now: Vec<_> = wrong(&report).difference(&was_wrong).cloned().collect();
                assert!(now.is_empty(), "{name}: {now:?}");
                let now: Vec<_> = uncounted(&report).difference(&was_uncounted).copied().collect();
                assert!(now.is_empty(), "{name}: {now:x?} count zero");
                let now: Vec<_> = image.wrongly_copied().difference(&was_copied).copied().collect();
                assert!(now.is_empty(), "{name}: {now:x?} are shared and say not");
                assert!(image.contents() == contents, "{name}: other contents");
                if damaged.bits() & !image.bits() != 0 {
                    assert_eq!(report.verdict(), Verdict::Clean, "{name}: {:?}", report.findings);
                    assert_eq!(image.bits(), 0, "{name}");
                }

                if let Some(harm) = write_to(&cut, &cx, &contents) {
                    written += 1;
                    let now: Vec<_> = harm.uncounted.difference(&known_uncounted).copied().collect();
                    assert!(now.is_empty(), "{name}: {now:x?} count zero once written to");
                    let now: Vec<_> = harm.crossed.difference(&known_crossed).copied().collect();
                    assert!(now.is_empty(), "{name}: {now:x?} belong to two once written to");
                    let now: Vec<_> = harm.lost.difference(&known_lost).copied().collect();
                    assert!(now.is_empty(), "{name}: {now:?} lost once written to");
                }

                let (again, cx) = calm(&world, state);
                let view = again.file(DISK, true).view(&cx).expect("a view");
                let report = cx
                    .block_on(repair(&view, RepairScope::All))
                    .expect("nothing waits for ever");
                let after = report.expect("a repair").after;
                assert_eq!(after.verdict(), Verdict::Clean, "{name}: {:?}", after.findings);
                assert!(!after.dirty && !after.marked_corrupt, "{name}");
                assert!(
                    bytes_of(&again).contents() == contents,
                    "{name}: repaired to other contents"
                );
            }
        });
        assert!(seen.len() > 1, "{what}: nothing was written");
        assert!(
            written > 0 || damaged.bits() != 0,
            "{what}: none could be written to"
        );
        println!("{what}: {} states, {written} of them written to", seen.len());
    }
    println!("{judged} states; at {drawn} instants there were more than {STATES_PER_INSTANT}");
    assert!(judged > 10, "{judged}");
}
