//! The switch from one state of the metadata to the next by one write of the header, for operations that run alone.
//!
//! The next state is built in free clusters ([`Metadata::next`]) and made durable; then the header's first sector, which
//! has the places of the L1 table, the refcount table and the snapshot table, puts it in force. So a cut at any write
//! leaves one of the two states, whole. The tables that only the old one needs are dropped afterwards, as clusters of the
//! guest are; a cut before they are freed leaves leaks.
//!
//! Invariants:
//! - nothing of the state in use is written before the switch;
//! - a refcount block is read at most once, and stays in memory to the end;
//! - the blocks that an operation follows references to are bounded ([`COUNTS_BYTES_MAX`]), and so are the others that it
//!   looks for free clusters in ([`SEARCH_BYTES_MAX`]), whatever an image claims.

use std::rc::Rc;
use std::sync::Arc;

use block::buffer::Piece;
use block::canary::{Rule, broken};
use block::{AlignedBuf, Buffer, IoError, join_all};
use rustc_hash::FxHashSet;
use smallvec::smallvec;

use super::encryption::owned;
use super::exclusive::Exclusive;
use super::{Queue, Shared, header, load};
use crate::format::{ClusterUse, Geometry, HeaderFields, HostCluster, HostOffset, L1Entry};
use crate::metadata::refcounts::{NO_SPACE, Stuck, TablePlace};
use crate::metadata::slices::Before;
use crate::metadata::{COUNTS_BYTES_MAX, Dropped, Metadata, Released, Relocation};

/// The largest number of bytes of tables that are read or written at once.
const BATCH_BYTES: u64 = 2 << 20;

/// The most bytes of refcount blocks that are read to find free clusters, and again at the end of the file. They count 4 TiB
/// of 64 KiB clusters with 16 bits each, all in use.
pub(super) const SEARCH_BYTES_MAX: u64 = 128 << 20;

/// The next state of an image's metadata, until it is in force.
pub(super) struct Switch<'a> {
    queue: &'a Rc<Queue>,
    pub(super) next: Metadata,
    /// Clusters that the old state alone uses.
    left: Vec<Dropped>,
    /// Clusters that lose their last reference.
    pub(super) released: Released,
    /// Bytes of refcount blocks that references were followed to.
    followed_bytes: u64,
    /// Bytes of other refcount blocks in which free clusters were looked for.
    searched_bytes: u64,
    replaces_l1: bool,
    /// Refcount blocks that were written to their new places before. One that changes once more moves once more.
    placed: FxHashSet<usize>,
    /// Tables and data lie before this cluster, and the file does not become longer.
    below: Option<HostCluster>,
    /// Clusters of the state in use, from which all are taken while requests go on.
    taken: Option<Taken>,
}

/// Clusters that were taken from the state in use for the next one, counted there. They are given back when this is dropped, unless
/// they are kept. Also the watch over what changes in the state in use, which ends then.
pub(super) struct Taken {
    shared: Arc<Shared>,
    clusters: Vec<HostCluster>,
}

impl Taken {
    /// Records that the next state is in force.
    pub(super) fn keep(mut self) {
        self.clusters.clear();
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        // With a poisoned lock nothing is written any more.
        let Ok(mut metadata) = self.shared.write() else {
            return;
        };
        let _changes = metadata.end_watch();
        for &cluster in &self.clusters {
            metadata.drop_clusters(Dropped::one(cluster), true);
        }
    }
}

/// The reason that an operation ends.
#[derive(Debug)]
pub(super) enum Stopped {
    /// The host failed an operation, or the image is corrupt.
    Failed(IoError),
    /// The cluster at this offset is counted in one refcount block more than an operation may read.
    TooManyCounts(HostOffset),
}

impl From<IoError> for Stopped {
    fn from(error: IoError) -> Self {
        Self::Failed(error)
    }
}

impl<'a> Switch<'a> {
    /// Begins with the state in use, which is durable and does not change in an exclusive section.
    pub(super) fn new<Turn>(queue: &'a Rc<Queue>, _section: &Exclusive<'_, Turn>) -> Result<Self, IoError> {
        let next = queue.shared.write()?.next();
        Ok(Self::of(queue, next, None))
    }

    /// Begins as [`Switch::new`] does, for a part of the operation that goes on after the section has ended, while requests change the
    /// state in use: what it was is followed. Clusters are taken from the state in use. It ends with [`Switch::into_taken`].
    pub(super) fn beside<Turn>(
        queue: &'a Rc<Queue>,
        _section: &Exclusive<'_, Turn>,
    ) -> Result<Self, IoError> {
        let shared = Arc::clone(&queue.shared);
        let mut metadata = shared.write()?;
        let next = metadata.beside();
        metadata.watch();
        drop(metadata);
        let clusters = Vec::new();
        Ok(Self::of(queue, next, Some(Taken { shared, clusters })))
    }

    fn of(queue: &'a Rc<Queue>, next: Metadata, taken: Option<Taken>) -> Self {
        Self {
            queue,
            next,
            left: Vec::new(),
            released: Released::default(),
            followed_bytes: 0,
            searched_bytes: 0,
            replaces_l1: false,
            placed: FxHashSet::default(),
            below: None,
            taken,
        }
    }

    /// Writes the refcount blocks that have changed to clusters of the state in use. Returns their indices and new places, and the
    /// clusters taken.
    pub(super) async fn into_taken(mut self) -> Result<(Vec<(usize, HostOffset)>, Option<Taken>), Stopped> {
        let mut blocks = Vec::new();
        for some in self.next.refcounts.changed_blocks().chunks(self.tables_at_once()) {
            let mut writes = Vec::new();
            for &index in some {
                let place = self.take(ClusterUse::RefcountBlock).await?;
                writes.push((place, self.next.refcounts.fresh_block(index)?.1));
                blocks.push((index, place));
            }
            self.write(writes).await?;
        }
        Ok((blocks, self.taken.take()))
    }

    /// Takes a cluster of the state in use for a table.
    async fn take(&mut self, what: ClusterUse) -> Result<HostOffset, Stopped> {
        loop {
            let mut metadata = self.queue.shared.write()?;
            let refcounts = &mut metadata.refcounts;
            let stuck = match refcounts.allocate(1) {
                Ok(run) => {
                    refcounts.uses.made(what, run.first, 1);
                    if let Some(taken) = &mut self.taken {
                        taken.clusters.push(run.first);
                    }
                    return Ok(metadata.geometry().host_offset(run.first));
                }
                Err(stuck) => stuck,
            };
            let Stuck::Load(slice) = stuck else {
                drop(metadata);
                load::unstick(self.queue, stuck).await?;
                continue;
            };
            if self.searched_bytes >= SEARCH_BYTES_MAX {
                if !refcounts.search_at_end() {
                    return Err(self.too_many(slice));
                }
                self.searched_bytes = 0;
                continue;
            }
            drop(metadata);
            self.searched_bytes += load::load_refcounts(self.queue, slice).await?;
        }
    }

    /// Makes L2 tables of the disk, read while requests change the state in use, what they were when this began.
    pub(super) fn restore<'b>(
        &self,
        tables: impl Iterator<Item = (usize, &'b mut AlignedBuf)>,
    ) -> Result<(), IoError> {
        if self.taken.is_some() {
            let metadata = self.queue.metadata()?;
            for (index, bytes) in tables {
                metadata.l2.restore(metadata.table_slices(index), bytes);
            }
        }
        Ok(())
    }

    /// Has refcount blocks in their new places, to which they were written before.
    pub(super) fn place_blocks(&mut self, blocks: &[(usize, HostOffset)]) -> Result<(), IoError> {
        for &(index, place) in blocks {
            let old = self.next.refcounts.replace_block(index, place)?;
            self.leave(self.next.geometry().host_cluster(old), 1);
            self.placed.insert(index);
        }
        Ok(())
    }

    /// Adds what was added to the counts of the state in use since the blocks were written that are in new places. `before` is what its
    /// slices were then. Clusters that the state in use counts and this one does not are released.
    pub(super) async fn add_changes(&mut self, before: &Before) -> Result<(), IoError> {
        for (&slice, before) in before {
            let index = self.next.refcounts.block_of(slice);
            if !self.placed.contains(&index) {
                continue;
            }
            if !self.next.refcounts.slices.contains(slice) {
                self.load_block_of(slice).await?;
            }
            let place = || {
                let metadata = self.queue.metadata()?;
                let cached = metadata.refcounts.slices.peek(slice).map(<[u8]>::to_vec);
                Ok::<_, IoError>((cached, metadata.refcounts.slice_offset(slice)?))
            };
            let now = self.slice(place()?).await?;
            self.next
                .refcounts
                .add_difference(slice, before.as_deref(), &now, &mut self.released)?;
        }
        Ok(())
    }

    /// Returns the bytes of an L2 slice of the state in use.
    pub(super) async fn l2_slice(&self, slice: u64) -> Result<Vec<u8>, IoError> {
        let place = || {
            let metadata = self.queue.metadata()?;
            let place = metadata.slice_offset(slice).map_err(|_| IoError::Corrupt)?;
            Ok::<_, IoError>((metadata.l2.peek(slice).map(<[u8]>::to_vec), place))
        };
        self.slice(place()?).await
    }

    /// Returns the bytes of a slice from memory, or from its place.
    async fn slice(
        &self,
        (cached, place): (Option<Vec<u8>>, Option<HostOffset>),
    ) -> Result<Vec<u8>, IoError> {
        let (None, place) = (&cached, place) else {
            return Ok(cached.unwrap_or_default());
        };
        let bytes = self.next.refcounts.slices.slice_bytes();
        let place = place.ok_or(IoError::Corrupt)?;
        Ok(self.queue.file.read_at(place.bytes(), bytes).await?.to_vec())
    }

    /// Returns the number of L2 tables to read or write at once.
    pub(super) fn tables_at_once(&self) -> usize {
        tables_at_once(self.next.geometry())
    }

    /// Has the operation fail, for lack of space, rather than put tables or data behind this cluster, or make the file longer.
    pub(super) fn stay_below(&mut self, bound: HostCluster) {
        self.below = Some(bound);
    }

    /// Repeats a step that takes free clusters until it has the counts that it needs.
    async fn step<T>(
        &mut self,
        mut step: impl FnMut(&mut Metadata, &mut Vec<Dropped>) -> Result<T, Stuck>,
    ) -> Result<T, Stopped> {
        loop {
            let slice = match step(&mut self.next, &mut self.left) {
                Ok(value) => return Ok(value),
                Err(Stuck::Load(slice)) => slice,
                Err(stuck) => return Err(self.failure(stuck)),
            };
            let size = self.next.geometry().cluster_size();
            if self.searched_bytes + size > SEARCH_BYTES_MAX {
                if !self.next.refcounts.search_at_end() {
                    return Err(self.too_many(slice));
                }
                self.searched_bytes = 0;
                continue;
            }
            self.searched_bytes += size;
            self.load_block_of(slice).await?;
        }
    }

    /// Repeats a step that follows references to their counts, until it has these.
    pub(super) async fn follow<T>(
        &mut self,
        mut step: impl FnMut(&mut Metadata, &mut Released) -> Result<T, Stuck>,
    ) -> Result<T, Stopped> {
        loop {
            let slice = match step(&mut self.next, &mut self.released) {
                Ok(value) => return Ok(value),
                Err(Stuck::Load(slice)) => slice,
                Err(stuck) => return Err(self.failure(stuck)),
            };
            self.followed_bytes += self.next.geometry().cluster_size();
            if self.followed_bytes > COUNTS_BYTES_MAX {
                return Err(self.too_many(slice));
            }
            self.load_block_of(slice).await?;
        }
    }

    fn too_many(&self, slice: u64) -> Stopped {
        let cluster = self.next.refcounts.slice_start(slice);
        Stopped::TooManyCounts(self.next.geometry().host_offset(cluster))
    }

    /// Returns the error of a step that cannot be repeated.
    fn failure(&self, stuck: Stuck) -> Stopped {
        Stopped::Failed(match stuck {
            Stuck::InUse(cluster) => super::corrupt::in_use(self.queue, cluster),
            Stuck::Failed(error) => error,
            Stuck::Load(_) => IoError::Corrupt,
        })
    }

    /// Reads the refcount block that a slice is part of. If it changes it is written whole.
    async fn load_block_of(&mut self, slice: u64) -> Result<(), IoError> {
        let size = self.next.geometry().cluster_size() as usize;
        let refcounts = &mut self.next.refcounts;
        let index = refcounts.block_of(slice);
        let offset = refcounts.block_offset(index)?.ok_or(IoError::Corrupt)?;
        let mut bytes = self.queue.file.read_at(offset.bytes(), size).await?;
        if self.taken.is_some() {
            let metadata = self.queue.metadata()?;
            metadata
                .refcounts
                .slices
                .restore(refcounts.block_slices(index), &mut bytes);
        }
        refcounts.insert_block(index, &bytes);
        Ok(())
    }

    /// Takes a cluster for an L2 table of the next state.
    pub(super) async fn new_l2_table(&mut self) -> Result<HostOffset, Stopped> {
        if self.taken.is_some() {
            return self.take(ClusterUse::L2Table).await;
        }
        let cluster = self.step(|next, _| Ok(next.refcounts.allocate(1)?.first)).await?;
        self.next.refcounts.uses.made(ClusterUse::L2Table, cluster, 1);
        Ok(self.next.geometry().host_offset(cluster))
    }

    /// Takes a cluster for data of the next state.
    pub(super) async fn new_data_cluster(&mut self) -> Result<HostOffset, Stopped> {
        let cluster = self.step(|next, _| Ok(next.refcounts.allocate(1)?.first)).await?;
        Ok(self.next.geometry().host_offset(cluster))
    }

    /// Writes a table of several clusters, and returns its place.
    pub(super) async fn new_table(
        &mut self,
        what: ClusterUse,
        mut bytes: Vec<u8>,
    ) -> Result<HostOffset, Stopped> {
        let geometry = *self.next.geometry();
        let clusters = geometry.clusters_for(bytes.len() as u64);
        bytes.resize((clusters * geometry.cluster_size()) as usize, 0);
        let first = self.step(|next, _| next.refcounts.allocate_run(clusters)).await?;
        if self.below.is_some_and(|bound| first + clusters > bound) {
            return Err(NO_SPACE.into());
        }
        self.next.refcounts.uses.made(what, first, clusters);
        let offset = geometry.host_offset(first);
        self.write(vec![(offset, bytes)]).await?;
        Ok(offset)
    }

    /// Replaces the L1 table. Returns the place of the old one, which is not dropped.
    pub(super) async fn replace_l1(&mut self, l1: &[L1Entry]) -> Result<TablePlace, Stopped> {
        self.replaces_l1 = true;
        self.step(|next, _| next.replace_l1(l1)).await
    }

    /// Drops clusters of the old state once the next one is in force.
    pub(super) fn leave(&mut self, first: HostCluster, count: u64) {
        if count > 0 {
            self.left.push(Dropped { first, count });
        }
    }

    /// Reads the clusters at `places`.
    pub(super) async fn read_clusters(&self, places: &[HostOffset]) -> Result<Vec<AlignedBuf>, IoError> {
        read_clusters(self.queue, places).await
    }

    /// Writes tables of the next state. Does not wait for space: somebody waits for the operation, and requests may.
    pub(super) async fn write(&self, tables: Vec<(HostOffset, Vec<u8>)>) -> Result<(), IoError> {
        let writes = tables.into_iter().map(|(offset, bytes)| {
            let (file, buffer) = (
                self.queue.file.clone(),
                Rc::new(AlignedBuf::from_slice(&bytes).into()),
            );
            let pieces = smallvec![Piece::whole(&buffer)];
            Box::pin(async move { file.write_once(offset.bytes(), pieces, false).await })
        });
        join_all(writes.collect::<Vec<_>>()).await
    }

    /// Makes the next state durable and puts it in force, with the header fields that `change` sets.
    ///
    /// # Errors
    ///
    /// [`Stopped`]. If the header's write failed, either state may be in force, and the image is not written any more.
    pub(super) async fn commit(mut self, change: impl FnOnce(&mut HeaderFields)) -> Result<(), Stopped> {
        let mut relocation = Relocation::default();
        self.step(|next, left| next.refcounts.relocate(&mut relocation, left))
            .await?;
        if self.below.is_some() && self.next.refcounts.end() > self.queue.metadata()?.refcounts.end() {
            return Err(NO_SPACE.into());
        }
        let blocks = self.next.refcounts.fresh_blocks();
        for some in blocks.chunks(self.tables_at_once()) {
            let blocks = some.iter().map(|&index| self.next.refcounts.fresh_block(index));
            self.write(blocks.collect::<Result<_, _>>()?).await?;
        }
        let geometry = *self.next.geometry();
        let (table, l1) = (self.next.refcounts.place, self.next.l1_place);
        self.write(vec![(table.offset, self.next.refcounts.table_bytes())])
            .await?;
        if self.replaces_l1 {
            let mut bytes = self.next.l1_bytes();
            bytes.resize((l1.clusters * geometry.cluster_size()) as usize, 0);
            self.write(vec![(l1.offset, bytes)]).await?;
        }
        let table_clusters = u32::try_from(table.clusters).map_err(|_| IoError::OutOfRange)?;
        let (size, l1_entries) = (self.next.size_bytes, self.next.l1_entries() as u32);
        let file = &self.queue.file;
        if !broken(Rule::HeaderBeforeTables) {
            file.sync().await?;
        }
        let mut deciding = Deciding {
            shared: &self.queue.shared,
            next: Some(self.next),
        };
        header::change(self.queue, |fields| {
            fields.set_refcount_table(table.offset, table_clusters);
            fields.set_disk(size, l1.offset, l1_entries);
            change(fields);
        })
        .await?;
        file.sync().await?;
        self.left.append(&mut self.released.into_drops());
        deciding.switched(self.left)?;
        Ok(())
    }
}

/// Returns the number of L2 tables to read or write at once.
pub(super) fn tables_at_once(geometry: &Geometry) -> usize {
    (BATCH_BYTES / geometry.cluster_size()).clamp(1, 256) as usize
}

/// Reads the clusters at `places`, all at once.
pub(super) async fn read_clusters(
    queue: &Rc<Queue>,
    places: &[HostOffset],
) -> Result<Vec<AlignedBuf>, IoError> {
    let size = queue.shared.geometry.cluster_size() as usize;
    let buffers: Vec<Rc<Buffer>> = places
        .iter()
        .map(|_| Rc::new(Buffer::from(queue.cx.pool().take(size))))
        .collect();
    let reads = places.iter().zip(&buffers).map(|(place, buffer)| {
        let pieces = smallvec![Piece::whole(buffer)];
        queue.file.start_read(place.bytes(), pieces)
    });
    join_all(reads.collect::<Vec<_>>()).await?;
    buffers.into_iter().map(owned).collect()
}

/// The time in which either state may be in force. If it ends without a decision the image is not written any more: what
/// suits one state would damage the other.
struct Deciding<'a> {
    shared: &'a Shared,
    next: Option<Metadata>,
}

impl Deciding<'_> {
    /// Puts the next state in force in memory.
    fn switched(&mut self, mut left: Vec<Dropped>) -> Result<(), IoError> {
        let mut metadata = self.shared.write()?;
        let Some(mut next) = self.next.take() else {
            return Ok(());
        };
        left.append(&mut next.refcounts.switched(&metadata.refcounts));
        for dropped in left {
            next.drop_clusters(dropped, true);
        }
        self.shared.set_size_bytes(next.size_bytes);
        let old = std::mem::replace(&mut *metadata, next);
        drop(metadata);
        // Not under the lock: it may be large.
        drop(old);
        Ok(())
    }
}

impl Drop for Deciding<'_> {
    fn drop(&mut self) {
        let Some(next) = &self.next else { return };
        let image = self.shared.file.path().display();
        tracing::error!(%image, "the header could not be written, or not be synced; the image is not written before it is opened anew");
        self.shared.stop_writes();
        if let Ok(mut metadata) = self.shared.write() {
            metadata.corrupt = true;
            metadata.refcounts.keep_tail_of(&next.refcounts);
        }
    }
}
