//! Compressed clusters: read, inflated on a few threads shared by all queues, and cached briefly.
//!
//! Neighbouring reads of one compressed cluster inflate it once. Reads during the inflation wait for it, and reads
//! shortly after find the result. Compressed bytes are immutable as long as an L2 entry refers to them, so an
//! inflated cluster stays valid.
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
use std::sync::Arc;
use std::task::{Poll, Waker};

use block::buffer::Piece;
use block::sync::mpsc::{Receiver, Sender, channel};
use block::sync::thread::{self, JoinHandle};
use block::sync::{Mutex, SingleFlight};
use block::{AlignedBuf, Buffer, IoError};
use flate2::{Decompress, FlushDecompress};
use libdeflater::Decompressor;
use zstd::stream::raw::{DParameter, Decoder, InBuffer, Operation, OutBuffer};

use super::Queue;
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

    fn keep(&mut self, host: HostOffset, cluster: Rc<Buffer>) {
        self.kept.push_back((host, cluster));
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
    let found = poll_fn(|cx| {
        let mut inflated = queue.inflated.borrow_mut();
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
    if shared.geometry.host_cluster(host) >= shared.read()?.refcounts.end() {
        let host = host.bytes();
        tracing::error!(%image, host, "a compressed cluster lies past the end of the file");
        return Err(IoError::Corrupt);
    }
    let input = Rc::new(Buffer::from(queue.cx.pool().take(extent.len_max as usize)));
    queue.data.start_read(host, Piece::whole(&input)).await?;
    let input = Rc::try_unwrap(input)
        .ok()
        .and_then(Buffer::into_owned)
        .ok_or(IoError::Dropped)?;
    let out_bytes = usize::try_from(shared.geometry.cluster_size()).map_err(|_| IoError::OutOfRange)?;
    let evicted = queue.inflated.borrow_mut().evict(out_bytes);
    let output = evicted.unwrap_or_else(|| AlignedBuf::zeroed(out_bytes));
    let (input, output) = if out_bytes <= INLINE_BYTES || !shared.inflater.is_running() {
        let mut output = output;
        let mut inflated = queue.inflated.borrow_mut();
        if inflated.inline.is_none() {
            inflated.inline = Some(Inflate::new()?);
        }
        let result = match &mut inflated.inline {
            Some(inflate) => inflate.inflate(shared.compression, &input, &mut output),
            None => Err(IoError::Dropped),
        };
        (Some(input), result.map(|()| output))
    } else {
        shared.inflater.inflate(shared.compression, input, output).await
    };
    if let Some(input) = input {
        queue.cx.pool().put(input);
    }
    let output = output.inspect_err(|error| {
        let host = host.bytes();
        tracing::error!(%image, host, %error, "a compressed cluster cannot be inflated");
    })?;
    let cluster = Rc::new(Buffer::from(output));
    queue.inflated.borrow_mut().keep(host, Rc::clone(&cluster));
    drop(guard);
    Ok(cluster)
}

/// One thread's decompressors.
struct Inflate {
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

/// The result of a job: its input buffer, for reuse, and the cluster.
type Inflated = (Option<AlignedBuf>, Result<AlignedBuf, IoError>);

type Answer = Arc<Mutex<(Option<Inflated>, Option<Waker>)>>;

struct Job {
    kind: CompressionType,
    /// The compressed bytes and the output buffer; `None` once they were used.
    buffers: Option<(AlignedBuf, AlignedBuf)>,
    answer: Answer,
}

impl Drop for Job {
    fn drop(&mut self) {
        // A job that dies with its thread is answered too.
        answer(&self.answer, (None, Err(IoError::Dropped)));
    }
}

fn answer(to: &Answer, result: Inflated) {
    let mut slot = to.lock();
    if slot.0.is_none() {
        slot.0 = Some(result);
    }
    let waker = slot.1.take();
    drop(slot);
    if let Some(waker) = waker {
        waker.wake();
    }
}

/// The job queue's sender and the threads that serve it.
type Running = (Sender<Job>, Vec<JoinHandle<()>>);

/// The inflating threads. They start with the first job.
pub(crate) struct Inflater {
    threads: usize,
    running: Mutex<Option<Running>>,
    /// The number of threads that can be started, to simulate a process limit.
    #[cfg(test)]
    pub(crate) can_start: std::sync::atomic::AtomicUsize,
}

impl fmt::Debug for Inflater {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inflater")
            .field("threads", &self.threads)
            .finish_non_exhaustive()
    }
}

impl Inflater {
    /// Creates an inflater with `threads` threads. With none, each queue's worker inflates for itself.
    pub(crate) fn new(threads: usize) -> Self {
        Self {
            threads,
            running: Mutex::new(None),
            #[cfg(test)]
            can_start: std::sync::atomic::AtomicUsize::new(threads),
        }
    }

    /// Starts the threads if they are not running. Returns `false` if there are none: the worker inflates then.
    fn is_running(&self) -> bool {
        if self.threads == 0 {
            return false;
        }
        let mut running = self.running.lock();
        if running.is_none() {
            match self.start() {
                Ok(threads) => *running = Some(threads),
                // Tried again with the next cluster: threads may be available by then.
                Err(error) => tracing::debug!(%error, "no thread to inflate clusters can be started"),
            }
        }
        running.is_some()
    }

    fn start(&self) -> Result<Running, IoError> {
        let (send, receive) = channel::<Job>();
        let receive = Arc::new(Mutex::new(receive));
        let mut handles = Vec::new();
        for _ in 0..self.threads {
            let receive = Arc::clone(&receive);
            match self.spawn(move || serve(&receive)) {
                Ok(handle) => handles.push(handle),
                // Fewer threads suffice.
                Err(_) if !handles.is_empty() => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok((send, handles))
    }

    fn spawn(&self, work: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
        #[cfg(test)]
        {
            use std::sync::atomic::Ordering::Relaxed;
            let left = self
                .can_start
                .fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1));
            left.map_err(|_| std::io::ErrorKind::WouldBlock)?;
        }
        let thread = thread::Builder::new().name("ringdisk-inflate".to_owned());
        thread.spawn(work)
    }

    fn send(
        &self,
        kind: CompressionType,
        input: AlignedBuf,
        output: AlignedBuf,
        answer: &Answer,
    ) -> Result<(), IoError> {
        let running = self.running.lock();
        let job = Job {
            kind,
            buffers: Some((input, output)),
            answer: Arc::clone(answer),
        };
        match &*running {
            Some((send, _)) => send.send(job).map_err(|_| IoError::Dropped),
            None => Err(IoError::Dropped),
        }
    }

    async fn inflate(&self, kind: CompressionType, input: AlignedBuf, output: AlignedBuf) -> Inflated {
        let slot: Answer = Arc::default();
        if let Err(error) = self.send(kind, input, output, &slot) {
            return (None, Err(error));
        }
        poll_fn(|cx| {
            let mut slot = slot.lock();
            match slot.0.take() {
                Some(result) => Poll::Ready(result),
                None => {
                    slot.1 = Some(cx.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }
}

impl Drop for Inflater {
    fn drop(&mut self) {
        if let Some((send, handles)) = self.running.lock().take() {
            drop(send);
            for handle in handles {
                if handle.join().is_err() {
                    tracing::error!("an inflating thread panicked");
                }
            }
        }
    }
}

fn serve(jobs: &Mutex<Receiver<Job>>) {
    let Ok(mut inflate) = Inflate::new() else { return };
    loop {
        let job = jobs.lock().recv();
        let Ok(mut job) = job else { return };
        let Some((input, mut output)) = job.buffers.take() else {
            continue;
        };
        let result = inflate.inflate(job.kind, &input, &mut output);
        answer(&job.answer, (Some(input), result.map(|()| output)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// Without threads, reads of large clusters succeed as before. Threads that can be started later are used then,
    /// as many as there are.
    #[test]
    fn clusters_are_inflated_on_the_worker_without_threads() {
        use crate::image::testing::World;
        use crate::{OpenOptions, QcowDisk};
        use block::ring::RingKind;
        use block::{Context, Disk, Op, Request};
        use std::sync::atomic::Ordering;

        let world = World::new();
        std::fs::write(world.path("plain"), vec![7; 1 << 18]).expect("a file");
        world.qemu_img(&["convert", "-c", "-f", "raw", "-O", "qcow2", "plain", "a.qcow2"]);
        let disk = QcowDisk::open(&world.path("a.qcow2"), &OpenOptions::default()).expect("an image");
        let inflater = &disk.shared.inflater;
        assert!(inflater.threads > 1);
        let cx = Context::new(RingKind::Syscalls, 64).expect("a ring");
        let queue = Arc::clone(&disk).open_queue(&cx).expect("a queue");
        for (at, threads) in [(0, 0), (1 << 16, 0), (1 << 17, 1)] {
            inflater.can_start.store(threads, Ordering::Relaxed);
            let (request, answer) = Request::local(Op::Read, at, 65536, AlignedBuf::zeroed(65536).into());
            queue.submit(request);
            let done = cx.block_on(answer).expect("the ring turns");
            assert_eq!(done.result, Ok(()));
            assert!(
                done.buffer
                    .into_owned()
                    .expect("our own")
                    .iter()
                    .all(|&byte| byte == 7)
            );
            let running = inflater.running.lock();
            assert_eq!(running.as_ref().map_or(0, |(_, handles)| handles.len()), threads);
        }
    }

    fn deflated(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::default());
        encoder.write_all(bytes).expect("in memory");
        encoder.finish().expect("in memory")
    }

    #[test]
    fn what_was_cut_short_is_an_error() {
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
    fn what_was_compressed_comes_back_and_what_follows_is_ignored() {
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
    fn too_little_and_garbage_are_errors_and_too_much_is_cut() {
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
