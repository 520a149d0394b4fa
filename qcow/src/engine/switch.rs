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

use block::buffer::Piece;
use block::canary::{Rule, broken};
use block::{AlignedBuf, Buffer, IoError, join_all};
use smallvec::smallvec;

use super::encryption::owned;
use super::exclusive::Exclusive;
use super::{Queue, Shared, header};
use crate::format::{ClusterUse, HeaderFields, HostCluster, HostOffset, L1Entry};
use crate::metadata::refcounts::{Stuck, TablePlace};
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
        Ok(Self {
            queue,
            next,
            left: Vec::new(),
            released: Released::default(),
            followed_bytes: 0,
            searched_bytes: 0,
            replaces_l1: false,
        })
    }

    /// Returns the number of L2 tables to read or write at once.
    pub(super) fn tables_at_once(&self) -> usize {
        (BATCH_BYTES / self.next.geometry().cluster_size()).clamp(1, 256) as usize
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
        let bytes = self.queue.file.read_at(offset.bytes(), size).await?;
        refcounts.insert_block(index, &bytes);
        Ok(())
    }

    /// Takes a cluster for an L2 table of the next state.
    pub(super) async fn new_l2_table(&mut self) -> Result<HostOffset, Stopped> {
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

    /// Writes tables of the next state.
    pub(super) async fn write(&self, tables: Vec<(HostOffset, Vec<u8>)>) -> Result<(), IoError> {
        let writes = tables.into_iter().map(|(offset, bytes)| {
            let buffer = Rc::new(AlignedBuf::from_slice(&bytes).into());
            let pieces = smallvec![Piece::whole(&buffer)];
            self.queue.file.start_write(offset.bytes(), pieces)
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
