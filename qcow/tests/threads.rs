//! Workers that share one image, in many random orders of everything they share. `make models` runs this.
//!
//! The checker shuttle decides who goes on at every lock, atomic, channel, wake-up and I/O; ops are in flight for a while
//! and end in any order. Sequential consistency is taken for granted here: memory orderings are the business of the small
//! models in `block`. Each run starts from a fresh copy of a small image, on which several actors per worker
//! write, read, discard and flush sectors of their own in clusters that are everybody's.
//!
//! Checked: what an actor reads is what it last wrote; what was answered before a FLUSH began is in the file when it
//! ends (read by the few lines of `on_disk.rs`, not by the engine); after a clean close every cluster's reference
//! count is exactly what the tables use; nobody waits for ever. A failure prints the schedule, and
//! `THREADS_REPLAY=<file>` runs it again.

#![cfg(shuttle)]

mod common;
#[path = "common/on_disk.rs"]
mod on_disk;

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use block::ring::RingKind;
use block::sync::mpsc;
use block::worker::{WorkerConfig, WorkerHandle};
use block::{AlignedBuf, Buffer, Context, Disk, DiskQueue, Op, Request};
use common::{Folder, close, join, open};
use on_disk::OnDisk;
use qcow::{OpenOptions, QcowDisk, SnapshotSelector};
use shuttle::rand::{Rng, thread_rng};

const SECTOR: u64 = 512;

/// The values that every sector was given, in order; those before `answered` are no longer acceptable.
///
/// Shared by all threads, but behind the checker's back: it is the observer's, and nobody is stopped in it.
#[derive(Debug, Default)]
struct History {
    /// Per sector: the contents it was given, `None` for zeros. The first is what the image came with.
    given: Vec<Vec<Option<u64>>>,
    answered: Vec<usize>,
}

type Shared = Arc<std::sync::Mutex<History>>;

fn note<T>(history: &Shared, what: impl FnOnce(&mut History) -> T) -> T {
    what(&mut history.lock().expect("no observer panicked"))
}

/// A sector's bytes for one value.
fn bytes_of(value: Option<u64>) -> Vec<u8> {
    value.map_or_else(
        || vec![0; SECTOR as usize],
        |value| value.to_le_bytes().repeat(SECTOR as usize / 8),
    )
}

/// The work of one case.
#[derive(Clone, Debug)]
struct Case {
    cluster: u64,
    disk: u64,
    workers: usize,
    actors: usize,
    requests: usize,
    compressed: bool,
    /// The clusters that actors of every worker touch: the first of each of so many stretches this far apart.
    places: u64,
    distance: u64,
    /// Each actor also creates snapshots, which it deletes a moment later.
    snapshots: bool,
    options: OpenOptions,
}

impl Case {
    fn template(&self, folder: &Folder) -> Vec<u8> {
        let options = format!("cluster_size={}", self.cluster);
        let size = self.disk.to_string();
        if self.compressed {
            let plain = std::fs::File::create(folder.path("plain.raw")).expect("a plain image");
            plain.set_len(self.disk).expect("its length");
            for place in 0..self.places {
                let at = place * self.distance;
                common::patch(
                    &folder.path("plain.raw"),
                    at,
                    &bytes_of(Some(1)).repeat((self.cluster / SECTOR) as usize),
                );
            }
            let args = [
                "convert",
                "-c",
                "-f",
                "raw",
                "-O",
                "qcow2",
                "-o",
                &options,
                "plain.raw",
                "disk.qcow2",
            ];
            folder.qemu_img(&args);
        } else {
            folder.qemu_img(&["create", "-f", "qcow2", "-o", &options, "disk.qcow2", &size]);
        }
        std::fs::read(folder.path("disk.qcow2")).expect("the image")
    }
}

/// One sequence of requests on sectors of its own.
struct Actor {
    case: Arc<Case>,
    history: Shared,
    path: Arc<PathBuf>,
    /// The index, in each place, of the sector that is its own.
    index: u64,
    queue: Rc<dyn DiskQueue>,
    disk: Arc<QcowDisk>,
    cx: Context,
}

impl Actor {
    /// Takes a snapshot, after which what was answered before is in the file, and deletes it.
    async fn snapshot(&self) {
        let before = note(&self.history, |history| history.answered.clone());
        let name = self.index.to_string();
        let created = self.disk.create_snapshot(&self.cx, &name, UNIX_EPOCH).await;
        created.expect("a snapshot");
        let image = OnDisk::read(&self.path);
        for (sector, &from) in before.iter().enumerate().filter(|(_, from)| **from > 0) {
            self.assert_in_file(&image, sector, from);
        }
        let deleted = self
            .disk
            .delete_snapshot(&self.cx, &SnapshotSelector::Name(name))
            .await;
        deleted.expect("a deletion");
    }

    async fn ask(&self, op: Op, sector: u64, buffer: Buffer) -> Buffer {
        let len = if op == Op::Flush { 0 } else { SECTOR };
        let (request, answer) = Request::local(op, sector * SECTOR, len, buffer);
        self.queue.submit(request);
        let done = answer.await;
        if let Err(error) = done.result {
            panic!("{op:?} of sector {sector}: {error}");
        }
        done.buffer
    }

    /// Gives `sector` a value (`None`: zeros) by `op`.
    async fn give(&self, op: Op, sector: u64) {
        let index = sector as usize;
        let (value, version) = note(&self.history, |history| {
            let given = &mut history.given[index];
            let value = matches!(op, Op::Write { .. }).then(|| sector << 32 | given.len() as u64 + 1);
            given.push(value);
            (value, given.len() - 1)
        });
        let buffer = match op {
            Op::Write { .. } => AlignedBuf::from_slice(&bytes_of(value)).into(),
            _ => Buffer::default(),
        };
        self.ask(op, sector, buffer).await;
        note(&self.history, |history| history.answered[index] = version);
    }

    /// Reads a sector, perhaps somebody else's: what it was last given, or something it is being given.
    async fn read(&self, sector: u64) {
        let buffer = AlignedBuf::from_slice(&[0xCC; SECTOR as usize]).into();
        let index = sector as usize;
        let from = note(&self.history, |history| history.answered[index]);
        let read = self.ask(Op::Read, sector, buffer).await.into_owned();
        let read = read.expect("our own buffer");
        let given = note(&self.history, |history| history.given[index].clone());
        assert!(
            given[from..].iter().any(|value| *bytes_of(*value) == *read),
            "sector {sector} is not what was written there: {:?} is none of {given:?} from {from} on",
            &read[..8]
        );
    }

    /// FLUSH, and what the file holds then.
    async fn flush(&self) {
        let before = note(&self.history, |history| history.answered.clone());
        self.ask(Op::Flush, 0, Buffer::default()).await;
        let image = OnDisk::read(&self.path);
        for (sector, &from) in before.iter().enumerate().filter(|(_, from)| **from > 0) {
            self.assert_in_file(&image, sector, from);
        }
    }

    /// The file has the `from`th value that the sector was given, or a later one.
    fn assert_in_file(&self, image: &OnDisk, sector: usize, from: usize) {
        let found = image.sector(sector as u64);
        let given = note(&self.history, |history| history.given[sector].clone());
        assert!(
            given[from..].iter().any(|value| bytes_of(*value) == found),
            "sector {sector} was durable and is not in the file: {:?} is none of {given:?} from {from} on",
            &found[..8]
        );
    }

    async fn run(self) {
        for _ in 0..self.case.requests {
            let place = thread_rng().gen_range(0..self.case.places);
            let sector = place * self.case.distance / SECTOR + self.index;
            let zeroes = Op::WriteZeroes {
                unmap: thread_rng().gen_range(0..4) > 0,
                fua: false,
            };
            match thread_rng().gen_range(0..if self.case.snapshots { 13 } else { 10 }) {
                0..=3 => self.give(Op::Write { fua: false }, sector).await,
                4 => {
                    self.give(Op::Write { fua: true }, sector).await;
                    let from = note(&self.history, |history| history.answered[sector as usize]);
                    self.assert_in_file(&OnDisk::read(&self.path), sector as usize, from);
                }
                5..=6 => {
                    let actors = (self.case.workers * self.case.actors) as u64;
                    let others = thread_rng().gen_range(0..actors);
                    self.read(sector - self.index + others).await;
                }
                7..=8 => self.give(zeroes, sector).await,
                9 => self.flush().await,
                _ => self.snapshot().await,
            }
        }
    }
}

/// One run from a fresh image to a clean close.
fn run(case: &Arc<Case>, path: &Path, template: &[u8]) {
    std::fs::write(path, template).expect("a fresh image");
    let sectors = (case.disk / SECTOR) as usize;
    let history: Shared = Arc::default();
    note(&history, |history| {
        history.answered = vec![0; sectors];
        history.given = vec![vec![None]; sectors];
        if case.compressed {
            for place in 0..case.places {
                let at = (place * case.distance / SECTOR) as usize;
                history.given[at..at + (case.cluster / SECTOR) as usize].fill(vec![Some(1)]);
            }
        }
    });
    let disk = open(path, &case.options);
    let shared_path = Arc::new(path.to_owned());
    let (ended, end) = mpsc::channel();
    let workers: Vec<WorkerHandle> = (0..case.workers)
        .map(|worker| {
            let config = WorkerConfig {
                ring: RingKind::Syscalls,
                depth: 16,
                poll_max: Duration::ZERO,
                ..WorkerConfig::default()
            };
            let handle = WorkerHandle::spawn(config).expect("a worker");
            let (disk, case, history) = (Arc::clone(&disk), Arc::clone(case), Arc::clone(&history));
            let (path, ended) = (Arc::clone(&shared_path), ended.clone());
            let ran = handle.run(move |on| {
                let opened = Arc::clone(&disk).open_queue(on.context());
                let queue: Rc<dyn DiskQueue> = Rc::from(opened.expect("a queue"));
                let actors: Vec<_> = (0..case.actors)
                    .map(|actor| Actor {
                        case: Arc::clone(&case),
                        history: Arc::clone(&history),
                        path: Arc::clone(&path),
                        index: (actor * case.workers + worker) as u64,
                        queue: Rc::clone(&queue),
                        disk: Arc::clone(&disk),
                        cx: on.context().clone(),
                    })
                    .map(Actor::run)
                    .collect();
                drop((queue, disk));
                on.context().spawn(async move {
                    join(actors).await;
                    ended.send(()).expect("somebody waits");
                });
            });
            ran.expect("the worker lives");
            handle
        })
        .collect();
    drop(ended);
    for _ in 0..case.workers {
        end.recv().expect("every worker ends its actors");
    }
    workers.into_iter().for_each(WorkerHandle::stop);
    close(disk);
    let image = OnDisk::read(path);
    note(&history, |history| {
        for (sector, given) in history
            .given
            .iter()
            .enumerate()
            .filter(|(_, given)| given.len() > 1)
        {
            let last = given.last().copied().flatten();
            assert_eq!(
                image.sector(sector as u64),
                bytes_of(last),
                "sector {sector} after the close"
            );
        }
    });
    image.assert_exact();
}

fn check(runs: usize, case: Case) {
    let folder = Folder::new();
    let template = case.template(&folder);
    let memory = tempfile::tempdir_in("/dev/shm").expect("a folder in /dev/shm");
    let path = memory.path().join("disk.qcow2");
    let case = Arc::new(case);
    let body = move || run(&case, &path, &template);
    if let Some(schedule) = std::env::var_os("THREADS_REPLAY") {
        return shuttle::replay_from_file(body, schedule);
    }
    let runs = std::env::var("THREADS_RUNS")
        .ok()
        .and_then(|times| times.parse::<usize>().ok())
        .map_or(runs, |times| runs * times);
    let mut config = shuttle::Config::new();
    config.stack_size = 1 << 20;
    config.max_steps = shuttle::MaxSteps::FailAfter(2_000_000);
    config.failure_persistence = shuttle::FailurePersistence::File(Some(env!("CARGO_TARGET_TMPDIR").into()));
    let random = shuttle::scheduler::RandomScheduler::new(runs / 2);
    let pct = shuttle::scheduler::PctScheduler::new(3, runs / 2);
    shuttle::Runner::new(random, config.clone()).run(body.clone());
    shuttle::Runner::new(pct, config).run(body);
}

fn case() -> Case {
    Case {
        cluster: 2048,
        disk: 64 << 10,
        workers: 2,
        actors: 2,
        requests: 4,
        compressed: false,
        places: 2,
        distance: 2048,
        snapshots: false,
        options: OpenOptions {
            lock: None,
            ..OpenOptions::default()
        },
    }
}

/// Fails if a write does not wait for another that is allocating the same cluster, if a reservation's waiters
/// are not woken, and if a FLUSH is answered by a round that had begun before it was asked for.
#[test]
fn workers_writing_parts_of_the_same_clusters_agree() {
    check(2000, case());
}

/// Fails if two reclaiming passes run at once.
#[test]
fn workers_freeing_and_reusing_clusters_agree() {
    check(
        2000,
        Case {
            cluster: 512,
            workers: 3,
            actors: 1,
            requests: 8,
            distance: 4096,
            ..case()
        },
    );
}

/// Fails if a slice is dropped that is dirty or being written, and if a load's waiters are not woken.
#[test]
fn workers_evicting_each_others_tables_agree() {
    let mut case = Case {
        cluster: 512,
        disk: 2 << 20,
        workers: 3,
        actors: 1,
        requests: 12,
        places: 40,
        distance: 32 << 10,
        ..case()
    };
    case.options.l2_cache_bytes = Some(4096);
    check(1000, case);
}

/// Fails if the inflating threads lose a job, an answer or a wake-up.
#[test]
fn workers_writing_into_compressed_clusters_agree() {
    // Each takes as long as several of the others.
    check(
        400,
        Case {
            cluster: 8192,
            compressed: true,
            actors: 1,
            distance: 8192,
            options: OpenOptions {
                inflate_threads: 2,
                ..case().options
            },
            ..case()
        },
    );
}

/// Fails if the task of a request gets through while an operation runs alone, if one that it holds off is not woken, and if
/// what one operation leaves to the background runs into the next.
#[test]
fn workers_that_take_snapshots_while_others_write_agree() {
    check(
        1000,
        Case {
            cluster: 512,
            actors: 2,
            distance: 4096,
            snapshots: true,
            ..case()
        },
    );
}
