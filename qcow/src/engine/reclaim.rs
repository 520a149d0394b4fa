//! Reclaim of dropped clusters: they become usable again.
//!
//! A dropped cluster comes here once a FLUSH has made the drop durable. The order is then:
//!
//! 1. Every request that could have seen the old mapping has ended (epochs).
//! 2. The host's space is punched and the punch has completed.
//! 3. The count goes down.
//! 4. Only with that the allocator may find the cluster.
//!
//! Invariant: one pass runs at a time, so that two drops of one cluster (compressed clusters share host clusters) are
//! counted one after the other.

use std::collections::VecDeque;
use std::rc::Rc;

use block::IoError;
use block::canary::{Rule, broken};
use block::epoch::is_past_grace;
use block::join_all;
use rustc_hash::FxHashMap;

use super::{Queue, Shared, background, idle, load};
use crate::format::HostCluster;
use crate::invariant::invariant;
use crate::metadata::free_runs::runs_of;
use crate::metadata::refcounts::{Refcounts, Stuck};
use crate::metadata::{Dropped, Drops};

/// Drops that wait to be freed.
#[derive(Debug, Default)]
pub(super) struct Freeing {
    /// Drops, by the epoch in which they became durable.
    batches: VecDeque<(u64, Drops)>,
    running: bool,
    /// Set if another pass did not begin because one is running.
    missed: bool,
    /// The number of clusters that have become usable again.
    freed: u64,
}

impl Freeing {
    pub(super) fn push(&mut self, epoch: u64, drops: Drops) {
        // The pass looks at the oldest batch alone.
        invariant!(
            self.batches.back().is_none_or(|&(last, _)| last <= epoch),
            "drops of epoch {epoch} come after later ones"
        );
        self.batches.push_back((epoch, drops));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.batches.is_empty()
    }

    /// Returns true if drops wait to be freed, or are being freed.
    pub(super) fn is_pending(&self) -> bool {
        self.running || !self.batches.is_empty()
    }

    /// Returns the number of clusters that have become usable again since the image was opened.
    pub(super) fn freed(&self) -> u64 {
        self.freed
    }
}

struct PassGuard<'a> {
    shared: &'a Shared,
    /// True if nothing was past grace.
    is_idle: bool,
}

impl Drop for PassGuard<'_> {
    fn drop(&mut self) {
        let is_missed = {
            let mut freeing = self.shared.freeing.lock();
            invariant!(freeing.running, "two passes free clusters at once");
            freeing.running = false;
            std::mem::take(&mut freeing.missed)
        };
        // Wakes tasks that wait for clusters or found this pass running. An idle pass wakes nobody else: a waiter
        // runs one itself.
        if is_missed || !self.is_idle {
            self.shared.epochs.wake();
        }
    }
}

/// Clusters of a batch that wait no more when this is dropped: they are free, or leaked.
struct Returned<'a> {
    shared: &'a Shared,
    clusters: u64,
}

impl Drop for Returned<'_> {
    fn drop(&mut self) {
        if let Ok(mut metadata) = self.shared.write() {
            metadata.returning.end(self.clusters);
        }
    }
}

/// Starts a pass that nobody waits for.
pub(super) fn in_background(queue: &Rc<Queue>) {
    background::start(queue, async |queue: Rc<Queue>| {
        if let Err(error) = reclaim(&queue).await {
            let image = queue.shared.file.path().display();
            tracing::warn!(%image, %error, "freed clusters could not be reclaimed; they are leaked");
        }
        if !queue.shared.freeing.lock().is_empty() {
            idle::look_again(&queue);
        }
    });
}

/// Frees the drops that are past grace. Others stay for the next pass.
pub(super) async fn reclaim(queue: &Rc<Queue>) -> Result<(), IoError> {
    let shared = &queue.shared;
    if shared.is_corrupt() {
        // The count by which a cluster seems unused may be the wrong one.
        return Ok(());
    }
    {
        let mut freeing = shared.freeing.lock();
        if freeing.running {
            freeing.missed = true;
            return Ok(());
        }
        if freeing.batches.is_empty() {
            return Ok(());
        }
        freeing.running = true;
    }
    let mut pass = PassGuard {
        shared,
        is_idle: true,
    };
    loop {
        let now = shared.epochs.advance();
        let batch = {
            let mut freeing = shared.freeing.lock();
            match freeing.batches.front() {
                Some(&(epoch, _)) if is_past_grace(epoch, now) || broken(Rule::ReuseInFlight) => {
                    freeing.batches.pop_front()
                }
                _ => None,
            }
        };
        let Some((_, drops)) = batch else { return Ok(()) };
        pass.is_idle = false;
        let _returned = Returned {
            shared,
            clusters: drops.sole(),
        };
        for part in parts(drops.list()) {
            free(queue, part).await?;
        }
    }
}

/// The largest number of clusters whose counts are lowered under one hold of the lock.
const CLUSTERS_PER_LOCK: usize = 256;

/// The most clusters that are freed at once: memory is needed for each.
const CLUSTERS_AT_ONCE: u64 = 1 << 16;

/// Cuts drops into parts of at most [`CLUSTERS_AT_ONCE`] clusters.
fn parts(drops: &[Dropped]) -> impl Iterator<Item = Vec<Dropped>> {
    let mut drops = drops.iter().copied();
    let mut next = drops.next();
    std::iter::from_fn(move || {
        let (mut part, mut room) = (Vec::new(), CLUSTERS_AT_ONCE);
        while room > 0
            && let Some(Dropped { first, count }) = next
        {
            let taken = count.min(room);
            part.push(Dropped { first, count: taken });
            room -= taken;
            next = match count - taken {
                0 => drops.next(),
                rest => Some(Dropped {
                    first: first + taken,
                    count: rest,
                }),
            };
        }
        (!part.is_empty()).then_some(part)
    })
}

async fn free(queue: &Rc<Queue>, drops: Vec<Dropped>) -> Result<(), IoError> {
    let mut references: FxHashMap<HostCluster, u64> = FxHashMap::default();
    for Dropped { first, count } in drops {
        for cluster in first.until(first + count) {
            *references.entry(cluster).or_default() += 1;
        }
    }
    let mut references: Vec<(HostCluster, u64)> = references.into_iter().collect();
    references.sort_unstable();

    // The counts to write. No other task changes them: the allocator only touches counts of zero.
    let mut left = Vec::with_capacity(references.len());
    for &(cluster, dropped) in &references {
        let count = count_of(queue, cluster).await?;
        if count < dropped {
            let image = queue.shared.file.path().display();
            tracing::error!(%image, %cluster, count, dropped, "a cluster has fewer references than were dropped");
            super::corrupt::mark(queue);
            return Err(IoError::Corrupt);
        }
        left.push((cluster, count - dropped));
    }
    let unused = left
        .iter()
        .filter(|(_, count)| *count == 0)
        .map(|(cluster, _)| *cluster)
        .collect();
    let runs = runs_of(unused);
    let zero = punch(queue, &runs).await;

    for chunk in left.chunks(CLUSTERS_PER_LOCK) {
        let mut rest = chunk;
        while !rest.is_empty() {
            let stuck = lower(&mut queue.shared.write()?.refcounts, &mut rest, zero);
            if let Err(stuck) = stuck {
                load::unstick(queue, stuck).await?;
            }
        }
    }
    queue.shared.freeing.lock().freed += runs.iter().map(|run| run.1).sum::<u64>();
    Ok(())
}

/// Lowers counts until one cannot be; takes those that were from `rest`.
fn lower(refcounts: &mut Refcounts, rest: &mut &[(HostCluster, u64)], zero: bool) -> Result<(), Stuck> {
    while let [(cluster, count), tail @ ..] = *rest {
        refcounts.lower(*cluster, *count, zero)?;
        *rest = tail;
    }
    Ok(())
}

async fn count_of(queue: &Rc<Queue>, cluster: HostCluster) -> Result<u64, IoError> {
    loop {
        let count = queue.shared.write()?.refcounts.get(cluster);
        match count {
            Ok(count) => return Ok(count),
            Err(stuck) => load::unstick(queue, stuck).await?,
        }
    }
}

/// The largest number of punches under way at once.
const PUNCHES_MAX: usize = 32;

/// Returns the space of these runs to the host. Returns true if all of them read as zeros now.
async fn punch(queue: &Rc<Queue>, runs: &[(HostCluster, u64)]) -> bool {
    let geometry = queue.shared.geometry;
    let mut zero = true;
    for some in runs.chunks(PUNCHES_MAX) {
        let parts = some.iter().map(|&(first, count)| {
            // Not through `data`: with a data file these are places of tables, here.
            let file = queue.file.clone();
            Box::pin(async move {
                match file
                    .punch(
                        geometry.host_offset(first).bytes(),
                        count * geometry.cluster_size(),
                    )
                    .await
                {
                    Ok(true) => Ok(()),
                    Ok(false) => Err(IoError::Unsupported),
                    Err(error) => Err(error),
                }
            })
        });
        // A cluster that could not be punched is as free as one that could; it is only not zero.
        zero &= join_all(parts).await.is_ok();
    }
    zero
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::pin::pin;
    use std::sync::Arc;
    use std::task::Waker;

    use block::ring::RingKind;
    use block::{AlignedBuf, Buffer, Context, Disk, Op, Request};

    use super::{CLUSTERS_AT_ONCE, PassGuard, parts};
    use crate::format::{HostCluster, HostOffset};
    use crate::image::testing::World;
    use crate::metadata::Dropped;
    use crate::{OpenOptions, QcowDisk};

    #[test]
    fn parts_have_every_dropped_cluster_and_are_bounded() {
        let counts = [1, CLUSTERS_AT_ONCE - 1, 2 * CLUSTERS_AT_ONCE + 5, 7, 1];
        let at = |index: usize| HostCluster::new(index as u64 * 10 * CLUSTERS_AT_ONCE);
        let drops = counts.iter().enumerate();
        let drops: Vec<Dropped> = drops
            .map(|(index, &count)| Dropped {
                first: at(index),
                count,
            })
            .collect();
        let clusters = |drops: &[Dropped]| -> Vec<HostCluster> {
            let each = drops.iter();
            each.flat_map(|drop| drop.first.until(drop.first + drop.count))
                .collect()
        };
        let cut: Vec<Vec<Dropped>> = parts(&drops).collect();
        assert_eq!(cut.len(), 4);
        assert!(
            cut.iter()
                .all(|part| clusters(part).len() as u64 <= CLUSTERS_AT_ONCE)
        );
        assert!(clusters(&cut.concat()) == clusters(&drops));
        assert_eq!(parts(&[]).count(), 0);
    }

    /// A request that waits for clusters would otherwise wait until its time is over.
    #[test]
    fn pass_wakes_waiters_if_it_freed_clusters_or_was_found_running() {
        let world = World::new();
        world.qemu_img(&["create", "-f", "qcow2", "a.qcow2", "1M"]);
        let disk = QcowDisk::open(&world.path("a.qcow2"), &OpenOptions::default()).expect("an image");
        let shared = &disk.shared;
        for (missed, is_idle) in [(false, true), (true, true), (false, false), (true, false)] {
            {
                let mut freeing = shared.freeing.lock();
                (freeing.running, freeing.missed) = (true, missed);
            }
            let mut watch = shared.epochs.watch();
            drop(PassGuard { shared, is_idle });
            let woken = pin!(watch.ended()).poll(&mut std::task::Context::from_waker(Waker::noop()));
            assert_eq!(
                woken.is_ready(),
                missed || !is_idle,
                "missed: {missed}, idle: {is_idle}"
            );
            let freeing = shared.freeing.lock();
            assert!(!freeing.running && !freeing.missed);
        }
    }

    /// Frees clusters while another thread allocates, and then allocates as many as were freed.
    fn free_while_another_worker_allocates(world: &World) {
        const BYTES: u64 = 16 << 20;
        let disk = QcowDisk::open(&world.path("a.qcow2"), &OpenOptions::default()).unwrap();
        let cx = Context::new(RingKind::Syscalls, 64).unwrap();
        let queue = Arc::clone(&disk).open_queue(&cx).unwrap();
        let ask = async |op: Op, len: u64, buffer: Buffer| {
            let (request, answer) = Request::local(op, 0, len, buffer);
            queue.submit(request);
            assert_eq!(answer.await.result, Ok(()));
        };
        let buffer = AlignedBuf::zeroed(512).into();
        cx.block_on(ask(Op::Read, 512, buffer)).unwrap();
        let first = HostOffset::new(disk.cached_host_offset(0).unwrap());
        let first = disk.geometry().host_cluster(first);

        let other = std::thread::spawn({
            let disk = Arc::clone(&disk);
            // It looks and allocates under one hold of the lock, as a request does.
            move || loop {
                let mut metadata = disk.shared.write().unwrap();
                if metadata.refcounts.peek(first) == Some(0) {
                    break metadata.refcounts.allocate(64).unwrap();
                }
            }
        });
        cx.block_on(async {
            ask(Op::Discard, BYTES, Buffer::default()).await;
            ask(Op::Flush, 0, Buffer::default()).await;
        })
        .unwrap();
        let run = other.join().unwrap();
        let mut given: HashSet<_> = run.first.until(run.first + run.count).collect();
        let mut metadata = disk.shared.write().unwrap();
        for _ in 0..BYTES / 4096 - 64 {
            let run = metadata.refcounts.allocate(1).expect("a free cluster");
            assert!(given.insert(run.first), "{} is handed out twice", run.first);
        }
    }

    /// In an image opened a moment ago the scan has yet to pass the clusters that are freed: it finds them by their
    /// counts, while another worker lowers these.
    ///
    /// Method: threads, repeated until an interleaving is likely.
    #[test]
    fn scan_hands_clusters_out_once_during_frees() {
        let world = World::new();
        world.qemu_img(&[
            "create",
            "-q",
            "-f",
            "qcow2",
            "-o",
            "cluster_size=4096",
            "full.qcow2",
            "64M",
        ]);
        world.qemu_io("full.qcow2", &["write -q 0 16M"]);
        for _ in 0..40 {
            std::fs::copy(world.path("full.qcow2"), world.path("a.qcow2")).unwrap();
            free_while_another_worker_allocates(&world);
        }
    }
}
