//! Compressed clusters: read, inflated on a few threads shared by all queues, and cached briefly.
//!
//! Neighbouring reads of one compressed cluster inflate it once. Reads during the inflation wait for it, and reads
//! shortly after find the result. Compressed bytes are immutable as long as an L2 entry refers to them, so an
//! inflated cluster stays valid, until a compaction packs compressed data anew: then other data may come to its place.
//!
//! A stream first goes to libdeflate, which is two to three times as fast as the streaming decoders. It requires the
//! stream to end at the end of the cluster; any other stream goes to the streaming decoder, which stops there.
//!
//! Invariant: output is bounded by the cluster size, whatever the compressed bytes say, and a cluster that inflates
//! to less is an error.

use std::collections::VecDeque;
use std::fmt;
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::task::Poll;

use block::buffer::Piece;
use block::pool::Pool;
use block::sync::SingleFlight;
use block::{AlignedBuf, Buffer, IoError};
use flate2::{Decompress, FlushDecompress};
use libdeflater::Decompressor;
use zstd::stream::raw::{DParameter, Decoder, InBuffer, Operation, OutBuffer};

use super::Queue;
use super::counts::count;
use crate::format::{CompressedExtent, CompressionType, HostOffset};

/// The inflated clusters that a queue keeps, in bytes.
const KEPT_BYTES: usize = 4 << 20;
/// Clusters up to this size are inflated on the worker, because a hand-over to a thread costs as much.
const INLINE_BYTES: usize = 4096;
/// The largest window a zstd frame may ask for, as its logarithm: four times the largest cluster.
const ZSTD_WINDOW_LOG_MAX: u32 = 23;

/// The clusters that a queue inflated lately, by the offset of their compressed bytes.
#[derive(Debug, Default)]
pub(crate) struct InflatedClusters {
    kept: VecDeque<(HostOffset, Rc<Buffer>)>,
    /// The number of times that compressed data had moved when these were inflated.
    moves: u64,
    pending: SingleFlight<HostOffset>,
    /// The decompressors for small clusters, used on the worker.
    inline: Option<Inflate>,
}

impl InflatedClusters {
    fn find(&mut self, host: HostOffset) -> Option<Rc<Buffer>> {
        let index = self.kept.iter().position(|(key, _)| *key == host)?;
        let found = self.kept.remove(index)?;
        let cluster = Rc::clone(&found.1);
        self.kept.push_back(found);
        Some(cluster)
    }

    /// Forgets all clusters if compressed data has moved since they were inflated.
    fn renew(&mut self, moves: u64) {
        if self.moves != moves {
            self.moves = moves;
            self.kept.clear();
        }
    }

    /// Keeps a cluster that a request has inflated, which began when compressed data had moved `moves` times.
    fn keep(&mut self, host: HostOffset, cluster: Rc<Buffer>, moves: u64) {
        if self.moves == moves {
            self.kept.push_back((host, cluster));
        }
    }

    /// Removes the least recently used cluster if there are too many of `bytes` each.
    fn evict(&mut self, bytes: usize) -> Option<AlignedBuf> {
        let most = (KEPT_BYTES / bytes.max(1)).max(1);
        if self.kept.len() < most {
            return None;
        }
        let (_, cluster) = self.kept.pop_front()?;
        Rc::try_unwrap(cluster).ok().and_then(Buffer::into_owned)
    }
}

/// Ends an inflation, however its task ends, and wakes its waiters.
struct PendingGuard<'a>(&'a Queue, HostOffset);

impl Drop for PendingGuard<'_> {
    fn drop(&mut self) {
        let waiters = self.0.inflated.borrow_mut().pending.end(&self.1);
        drop(waiters);
    }
}

/// Returns the contents of a compressed cluster.
pub(super) async fn cluster(queue: &Queue, extent: CompressedExtent) -> Result<Rc<Buffer>, IoError> {
    let host = extent.host;
    let mut moves = 0;
    let found = poll_fn(|cx| {
        let mut inflated = queue.inflated.borrow_mut();
        moves = queue.shared.compressed_moves.load(Ordering::Acquire);
        inflated.renew(moves);
        if let Some(cluster) = inflated.find(host) {
            return Poll::Ready(Some(cluster));
        }
        if inflated.pending.begin(host, cx.waker()) {
            Poll::Ready(None)
        } else {
            Poll::Pending
        }
    })
    .await;
    if let Some(cluster) = found {
        return Ok(cluster);
    }
    let guard = PendingGuard(queue, host);
    let shared = &queue.shared;
    let image = shared.file.path().display();
    if shared.geometry.host_cluster(host) >= queue.metadata()?.refcounts.end() {
        let host = host.bytes();
        tracing::error!(%image, host, "a compressed cluster lies past the end of the file");
        return Err(IoError::Corrupt);
    }
    let input = Rc::new(Buffer::from(queue.cx.pool().take(extent.len_max as usize)));
    queue
        .data
        .start_read_as_stored(host, Piece::whole(&input))
        .await?;
    let input = Rc::try_unwrap(input)
        .ok()
        .and_then(Buffer::into_owned)
        .ok_or(IoError::Dropped)?;
    let out_bytes = usize::try_from(shared.geometry.cluster_size()).map_err(|_| IoError::OutOfRange)?;
    let evicted = queue.inflated.borrow_mut().evict(out_bytes);
    let output = evicted.unwrap_or_else(|| AlignedBuf::zeroed(out_bytes));
    let kind = shared.compression;
    let (input, output) = if out_bytes <= INLINE_BYTES || !shared.inflater.start() {
        let mut inflated = queue.inflated.borrow_mut();
        let inflate = match &mut inflated.inline {
            Some(inflate) => inflate,
            none => none.insert(Inflate::new()?),
        };
        inflate.inflate_owned(kind, input, output)
    } else {
        let work = move |inflate: &mut Inflate| inflate.inflate_owned(kind, input, output);
        shared.inflater.run(work).await?
    };
    queue.cx.pool().put(input);
    let output = output.inspect_err(|error| {
        let host = host.bytes();
        tracing::error!(%image, host, %error, "a compressed cluster cannot be inflated");
    })?;
    count(&shared.counters.clusters_inflated);
    let cluster = Rc::new(Buffer::from(output));
    queue.inflated.borrow_mut().keep(host, Rc::clone(&cluster), moves);
    drop(guard);
    Ok(cluster)
}

/// One thread's decompressors.
pub(crate) struct Inflate {
    deflate: Decompressor,
    zlib: Decompress,
    zstd: Decoder<'static>,
}

impl fmt::Debug for Inflate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Inflate")
    }
}

impl Inflate {
    fn new() -> Result<Self, IoError> {
        let mut zstd = Decoder::new()?;
        zstd.set_parameter(DParameter::WindowLogMax(ZSTD_WINDOW_LOG_MAX))?;
        // QCOW2's deflate streams have no zlib header.
        Ok(Self {
            deflate: Decompressor::new(),
            zlib: Decompress::new(false),
            zstd,
        })
    }

    /// Inflates `input` into all of `output`. Returns the input for reuse.
    fn inflate_owned(
        &mut self,
        kind: CompressionType,
        input: AlignedBuf,
        mut output: AlignedBuf,
    ) -> (AlignedBuf, Result<AlignedBuf, IoError>) {
        let result = self.inflate(kind, &input, &mut output);
        (input, result.map(|()| output))
    }

    /// Fills `output` exactly; input past the end of the stream is ignored.
    fn inflate(&mut self, kind: CompressionType, input: &[u8], output: &mut [u8]) -> Result<(), IoError> {
        let out_bytes = output.len();
        let written = match kind {
            CompressionType::Deflate => {
                if self.deflate.deflate_decompress(input, output) == Ok(out_bytes) {
                    return Ok(());
                }
                self.zlib.reset(false);
                // The output length reveals a stream error.
                let ended = self.zlib.decompress(input, output, FlushDecompress::Finish);
                if ended.is_err() {
                    return Err(IoError::Corrupt);
                }
                usize::try_from(self.zlib.total_out()).unwrap_or(usize::MAX)
            }
            CompressionType::Zstd => {
                self.zstd.reinit()?;
                let mut from = InBuffer::around(input);
                let mut to = OutBuffer::around(&mut *output);
                while to.pos() < out_bytes {
                    let before = (from.pos(), to.pos());
                    if self.zstd.run(&mut from, &mut to).is_err() || (from.pos(), to.pos()) == before {
                        return Err(IoError::Corrupt);
                    }
                }
                to.pos()
            }
        };
        if written == out_bytes {
            Ok(())
        } else {
            Err(IoError::Corrupt)
        }
    }
}

/// The threads that inflate clusters for all queues.
pub(crate) type Inflater = Pool<Inflate>;

/// Makes the threads; with none, each queue's worker inflates for itself.
pub(crate) fn inflater(threads: usize) -> Inflater {
    Pool::new("ringdisk-inflate", threads, Inflate::new)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// Other data may come to the place of what was inflated before.
    #[test]
    fn inflated_clusters_are_forgotten_when_compressed_data_has_moved() {
        let mut inflated = InflatedClusters::default();
        let (host, cluster) = (HostOffset::new(700), Rc::new(Buffer::default()));
        inflated.renew(4);
        inflated.keep(host, Rc::clone(&cluster), 4);
        inflated.renew(4);
        assert!(inflated.find(host).is_some());
        inflated.renew(5);
        assert!(inflated.find(host).is_none());
        // Its inflation began before the data moved.
        inflated.keep(host, cluster, 4);
        assert!(inflated.find(host).is_none());
    }

    #[test]
    fn compressed_read_inflates_on_worker_without_threads() {
        use crate::image::testing::World;
        use crate::{OpenOptions, QcowDisk};
        use block::ring::RingKind;
        use block::{Context, Disk, Op, Request};
        use std::sync::Arc;

        let world = World::new();
        std::fs::write(world.path("plain"), vec![7; 1 << 18]).expect("a file");
        world.qemu_img(&["convert", "-c", "-f", "raw", "-O", "qcow2", "plain", "a.qcow2"]);
        for inflate_threads in [0, 1] {
            let options = OpenOptions {
                inflate_threads,
                ..OpenOptions::default()
            };
            let disk = QcowDisk::open(&world.path("a.qcow2"), &options).expect("an image");
            let cx = Context::new(RingKind::Syscalls, 64).expect("a ring");
            let queue = Arc::clone(&disk).open_queue(&cx).expect("a queue");
            for at in [0, 1 << 16, 1 << 17] {
                let (request, answer) = Request::local(Op::Read, at, 65536, AlignedBuf::zeroed(65536).into());
                queue.submit(request);
                let done = cx.block_on(answer).expect("the ring turns");
                assert_eq!(done.result, Ok(()));
                let read = done.buffer.into_owned().expect("our own");
                assert!(read.iter().all(|&byte| byte == 7));
            }
        }
    }

    fn deflated(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::default());
        encoder.write_all(bytes).expect("in memory");
        encoder.finish().expect("in memory")
    }

    #[test]
    fn inflate_fails_on_truncated_data() {
        let plain: Vec<u8> = (0..65536u32).map(|i| (i * 7 % 253) as u8).collect();
        let mut inflate = Inflate::new().expect("decompressors");
        let zstd = zstd::bulk::compress(&plain, 3).expect("in memory");
        let mut out = vec![0; 65536];
        for (kind, bytes) in [
            (CompressionType::Deflate, deflated(&plain)),
            (CompressionType::Zstd, zstd),
        ] {
            for len in [0, 1, bytes.len() / 2, bytes.len() * 3 / 4] {
                let result = inflate.inflate(kind, &bytes[..len], &mut out);
                assert_eq!(result, Err(IoError::Corrupt), "{kind:?}, {len} bytes");
            }
            inflate.inflate(kind, &bytes, &mut out).expect("all of it");
        }
    }

    #[test]
    fn inflate_restores_data_and_ignores_trailing_bytes() {
        let plain: Vec<u8> = (0..65536u32).map(|i| (i * 7 % 253) as u8).collect();
        let mut inflate = Inflate::new().expect("decompressors");
        let mut zlib = deflated(&plain);
        zlib.extend_from_slice(&[0xAA; 300]);
        let mut zstd = zstd::bulk::compress(&plain, 3).expect("in memory");
        zstd.extend_from_slice(&[0; 300]);
        let mut out = vec![0; 65536];
        for _ in 0..2 {
            inflate
                .inflate(CompressionType::Deflate, &zlib, &mut out)
                .expect("deflate");
            assert_eq!(out, plain);
            out.fill(0);
            inflate
                .inflate(CompressionType::Zstd, &zstd, &mut out)
                .expect("zstd");
            assert_eq!(out, plain);
        }
    }

    #[test]
    fn inflate_refuses_short_or_garbage_and_cuts_excess() {
        let mut inflate = Inflate::new().expect("decompressors");
        let mut out = [1; 512];
        let short = deflated(&[1; 100]);
        assert!(
            inflate
                .inflate(CompressionType::Deflate, &short, &mut out)
                .is_err()
        );
        assert!(
            inflate
                .inflate(CompressionType::Deflate, &[0xff; 600], &mut out)
                .is_err()
        );
        assert!(
            inflate
                .inflate(CompressionType::Zstd, &[0xff; 600], &mut out)
                .is_err()
        );
        for (kind, bomb) in [
            (CompressionType::Deflate, deflated(&vec![0; 1 << 20])),
            (
                CompressionType::Zstd,
                zstd::bulk::compress(&vec![0; 1 << 20], 3).expect("in memory"),
            ),
        ] {
            out.fill(1);
            inflate.inflate(kind, &bomb, &mut out).expect("one cluster of it");
            assert_eq!(out, [0; 512]);
        }
    }
}
