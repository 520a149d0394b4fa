//! The index over images of a few blocks each, which count who is asked.

use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::AlignedBuf;
use crate::disk::ask;
use crate::file::{FileOptions, ImageFile};
use crate::ring::RingKind;

const BLOCK: u64 = 4096;

/// Small numbers that follow from a seed.
pub(super) fn numbers(mut seed: u64) -> impl FnMut(u64) -> u64 {
    move |below| {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % below
    }
}

/// An image with a byte for each block it has, above another one.
#[derive(Debug, Default)]
struct Image {
    blocks: Vec<Option<u8>>,
    below: Option<Arc<Image>>,
    /// The blocks whose status cannot be told, as if a table of theirs could not be read.
    broken: Vec<u64>,
    /// The status is a range too long.
    lies: bool,
    /// The file of its blocks, each at its [`place`](Image::place). Without one its blocks count as compressed.
    file: Option<Arc<ImageFile>>,
    /// No read may go to the file by itself.
    hides_file: bool,
    requests: AtomicU64,
}

impl Image {
    fn size(&self) -> u64 {
        self.blocks.len() as u64 * BLOCK
    }

    /// The images from this one downwards.
    fn all(self: &Arc<Self>) -> Vec<Arc<Image>> {
        std::iter::successors(Some(Arc::clone(self)), |image| image.below.clone()).collect()
    }

    /// The depth that decides a block, and its byte.
    fn decide(&self, block: u64) -> (u32, u8) {
        match (self.blocks.get(block as usize), &self.below) {
            (Some(Some(byte)), _) => (0, *byte),
            (Some(None), Some(below)) if block * BLOCK < below.size() => {
                let (depth, byte) = below.decide(block);
                (depth + 1, byte)
            }
            _ => (0, 0),
        }
    }

    /// The offset of a block in the file: the first ones lie behind the last three.
    fn place(&self, block: u64) -> u64 {
        (block + 3) % self.blocks.len() as u64 * BLOCK
    }

    /// Puts its blocks and those of the images below into files.
    fn into_files(mut self: Arc<Self>) -> Arc<Self> {
        let image = Arc::get_mut(&mut self).expect("it is not shared");
        let mut bytes = vec![b'!'; image.size() as usize];
        for (block, byte) in (0..).zip(&image.blocks) {
            let at = image.place(block) as usize;
            bytes[at..at + BLOCK as usize].fill(byte.unwrap_or(b'!'));
        }
        let file = tempfile::tempfile().expect("a file");
        file.write_all_at(&bytes, 0).expect("its bytes");
        image.file = Some(ImageFile::from_fd("layer".as_ref(), file, FileOptions::default()));
        image.below = image.below.take().map(Self::into_files);
        self
    }

    /// The content of a block that the image of this depth decides, as a status has it.
    fn content(&self, block: u64, depth: u32) -> Content {
        match (depth, &self.below, &self.file) {
            (1.., Some(below), _) => below.content(block, depth - 1),
            (_, _, None) => Content::Compressed,
            _ if self.decide(block).1 == 0 => Content::Zero,
            _ => Content::Data {
                at: Some(self.place(block)),
            },
        }
    }

    /// The requests since the last call, of each image from this one downwards.
    fn take_requests(self: &Arc<Self>) -> Vec<u64> {
        let images = self.all();
        let taken = images
            .iter()
            .map(|image| image.requests.swap(0, Ordering::Relaxed));
        taken.collect()
    }
}

impl Disk for Image {
    fn info(&self) -> DiskInfo {
        DiskInfo {
            size_bytes: self.size(),
            read_only: true,
            preferred_io_bytes: BLOCK as u32,
            physical_block_bytes: 512,
            discard: false,
            discard_granularity_bytes: 0,
            write_zeroes: false,
        }
    }

    fn open_queue(self: Arc<Self>, cx: &Context) -> Result<Box<dyn DiskQueue>, OpenQueueError> {
        let below = match &self.below {
            Some(below) => Some(Rc::from(Arc::clone(below).open_queue(cx)?)),
            None => None,
        };
        let view = self.file.as_ref().map(|file| file.view(cx).expect("a view"));
        let cx = cx.clone();
        Ok(Box::new(Queue {
            image: self,
            below,
            view,
            cx,
        }))
    }

    fn close(self: Arc<Self>, _: &Context) -> LocalBoxFuture<'static, Result<(), IoError>> {
        Box::pin(async { Ok(()) })
    }
}

#[derive(Debug)]
struct Queue {
    image: Arc<Image>,
    below: Option<Rc<dyn DiskQueue>>,
    view: Option<FileView>,
    cx: Context,
}

/// Reads block by block, and asks the queue below for each that the image does not have.
async fn walk(image: Arc<Image>, below: Option<Rc<dyn DiskQueue>>, mut request: Request) {
    let (first, count) = (request.offset / BLOCK, request.len / BLOCK);
    let buffer = Rc::new(request.take_buffer());
    let mut result = Ok(());
    for at in 0..count {
        let place = (at * BLOCK) as usize;
        let own = image.blocks.get((first + at) as usize).copied().flatten();
        match &below {
            _ if image.broken.contains(&(first + at)) => result = Err(IoError::Corrupt),
            Some(below)
                if own.is_none() && (first + at) * BLOCK < image.below.as_ref().map_or(0, |b| b.size()) =>
            {
                let part = Buffer::part(&buffer, place, BLOCK as usize);
                let (read, answer) = Request::local(Op::Read, (first + at) * BLOCK, BLOCK, part);
                below.submit(read);
                result = result.and(answer.await.result);
            }
            _ => {
                let memory = buffer.memory().expect("memory");
                memory.fill(place, BLOCK as usize, own.unwrap_or(0));
            }
        }
    }
    request.finish_with(Rc::try_unwrap(buffer).unwrap_or_default(), result);
}

impl DiskQueue for Queue {
    fn submit(&self, request: Request) {
        self.image.requests.fetch_add(1, Ordering::Relaxed);
        if let Err(error) = request.check(self.image.size(), true) {
            return request.finish(Err(error));
        }
        let (image, below) = (Arc::clone(&self.image), self.below.clone());
        self.cx.spawn(walk(image, below, request));
    }

    fn status(&self, offset: u64, len: u64) -> LocalBoxFuture<'_, Result<Vec<StatusRange>, IoError>> {
        let broken = self.image.all().iter().any(|image| {
            let mut broken = image.broken.iter();
            broken.any(|block| (offset..offset + len).contains(&(block * BLOCK)))
        });
        Box::pin(async move {
            check_range(offset, len, self.image.size())?;
            if broken {
                return Err(IoError::Corrupt);
            }
            let mut ranges = StatusRanges::default();
            // Not all at once, as for a scattered mapping.
            let end = (offset + len).min(offset + 5 * BLOCK);
            for at in (offset..end).step_by(BLOCK as usize) {
                let depth = self.image.decide(at / BLOCK).0;
                ranges.push(StatusRange {
                    offset: at,
                    len: BLOCK * if self.image.lies { 1 << 20 } else { 1 },
                    content: self.image.content(at / BLOCK, depth),
                    depth,
                });
            }
            Ok(ranges.into_vec())
        })
    }

    fn below(&self) -> Option<Rc<dyn DiskQueue>> {
        self.below.clone()
    }

    fn data_file(&self) -> Option<FileView> {
        self.view.clone().filter(|_| !self.image.hides_file)
    }
}

/// Images from the upper to the lower, each given by its blocks: a letter is data, a point is what lies below.
fn chain(images: &[&str]) -> Arc<Image> {
    let stack = |below: Option<Arc<Image>>, blocks: &&str| {
        Some(Arc::new(Image {
            blocks: blocks
                .bytes()
                .map(|byte| (byte != b'.').then_some(byte))
                .collect(),
            below,
            ..Image::default()
        }))
    };
    images.iter().rev().fold(None, stack).expect("an image")
}

/// A queue on the image with an index of its own.
fn indexed(image: &Arc<Image>, cx: &Context) -> (ChainIndexes, Box<dyn DiskQueue>) {
    let indexes = ChainIndexes::default();
    let disk = indexes.indexed(Arc::clone(image) as Arc<dyn Disk>, &[], BLOCK, 0, false);
    (indexes, disk.open_queue(cx).expect("a queue"))
}

/// Reads blocks. The letter of each, or the error.
fn read(cx: &Context, queue: &dyn DiskQueue, first: u64, count: u64) -> Result<String, IoError> {
    let len = count * BLOCK;
    let buffer = AlignedBuf::from_slice(&vec![b'?'; len as usize]).into();
    let read = cx.block_on(ask(queue, Op::Read, first * BLOCK, len, buffer));
    let bytes = read
        .expect("the ring turns")?
        .into_owned()
        .expect("our own buffer");
    let letters = bytes.chunks_exact(BLOCK as usize).map(|block| {
        assert!(
            block.iter().all(|byte| *byte == block[0]),
            "a block is all of one byte"
        );
        if block[0] == 0 { '0' } else { char::from(block[0]) }
    });
    Ok(letters.collect())
}

#[test]
fn read_asks_only_the_layer_that_decides() {
    let cx = Context::syscalls();
    let image = chain(&["..a.....", "bb......", ".c.c.", "dddd"]);
    let (indexes, queue) = indexed(&image, &cx);
    assert_eq!(read(&cx, &*queue, 0, 1).as_deref(), Ok("b"));
    assert_eq!(
        image.take_requests(),
        [1, 1, 0, 0],
        "without an index, one after the other"
    );
    assert!(indexes.bytes() > 0, "the read has built it");
    for (block, byte, asked) in [
        (0, "b", [0, 1, 0, 0]),
        (1, "b", [0, 1, 0, 0]),
        (2, "a", [1, 0, 0, 0]),
        (3, "c", [0, 0, 1, 0]),
        (4, "0", [0, 0, 1, 0]),
        (5, "0", [0, 1, 0, 0]),
        (7, "0", [0, 1, 0, 0]),
    ] {
        assert_eq!(read(&cx, &*queue, block, 1).as_deref(), Ok(byte));
        assert_eq!(image.take_requests(), asked, "block {block}");
    }
    assert_eq!(read(&cx, &*queue, 0, 8).as_deref(), Ok("bbac0000"));
    assert_eq!(image.take_requests(), [1, 2, 1, 0], "a part each");
}

#[test]
fn read_of_a_known_place_asks_no_layer() {
    let cx = Context::syscalls();
    let image = chain(&["..a.....", "bcdefghi", "........"]).into_files();
    let (_indexes, queue) = indexed(&image, &cx);
    assert_eq!(read(&cx, &*queue, 0, 1).as_deref(), Ok("b"));
    image.take_requests();
    for (first, bytes, asked) in [
        (0, "b", [0, 0, 0]),
        (2, "a", [0, 0, 0]),
        (7, "i", [0, 0, 0]),
        (3, "ef", [0, 0, 0]),
        (0, "bcaefghi", [0, 1, 0]),
        (4, "fg", [0, 1, 0]),
        (5, "ghi", [0, 0, 0]),
    ] {
        assert_eq!(
            read(&cx, &*queue, first, bytes.len() as u64).as_deref(),
            Ok(bytes)
        );
        assert_eq!(image.take_requests(), asked, "{bytes}: in one piece, or not");
    }
}

#[test]
fn read_that_is_no_data_of_a_file_asks_its_layer() {
    let cx = Context::syscalls();
    let mut image = chain(&["..", "b.", ".."]).into_files();
    let top = Arc::get_mut(&mut image).expect("it is not shared");
    let middle = top.below.as_mut().and_then(Arc::get_mut);
    middle.expect("it is not shared").hides_file = true;
    let (indexes, queue) = indexed(&image, &cx);
    read(&cx, &*queue, 0, 1).expect("a read");
    image.take_requests();
    for (block, byte, has_place, asked) in [(0, "b", true, [0, 1, 0]), (1, "0", false, [0, 0, 1])] {
        let found = indexes.living()[0].reader().find(block * BLOCK, BLOCK);
        assert_eq!(found.place.is_some(), has_place);
        assert_eq!(read(&cx, &*queue, block, 1).as_deref(), Ok(byte));
        assert_eq!(image.take_requests(), asked);
    }
}

#[test]
fn read_that_its_file_refuses_asks_its_layer() {
    // A ring with room for 16 ops.
    let cx = Context::new(RingKind::Syscalls, 16).expect("a ring");
    let none = "....................";
    let image = chain(&[none, "bcdefghijklmnopqrstu", none]).into_files();
    let (_indexes, queue) = indexed(&image, &cx);
    assert_eq!(read(&cx, &*queue, 0, 1).as_deref(), Ok("b"));
    image.take_requests();
    let answers: Vec<_> = (0..20)
        .map(|block| {
            let buffer = AlignedBuf::zeroed(BLOCK as usize).into();
            let (request, answer) = Request::local(Op::Read, block * BLOCK, BLOCK, buffer);
            queue.submit(request);
            answer
        })
        .collect();
    let asked = image.take_requests();
    assert!(asked[0] == 0 && (4..20).contains(&asked[1]), "{asked:?}");
    for (answer, byte) in answers.into_iter().zip(b'b'..) {
        let done = cx.block_on(answer).expect("the ring turns");
        let bytes = done.buffer.into_owned().expect("our own buffer");
        assert!(done.result.is_ok() && bytes.iter().all(|found| *found == byte));
    }
}

#[test]
fn requests_that_no_index_answers_go_to_the_uppermost_layer() {
    let cx = Context::syscalls();
    let image = chain(&["a.", "bb", "cc"]);
    let (_indexes, queue) = indexed(&image, &cx);
    assert_eq!(read(&cx, &*queue, 1, 1).as_deref(), Ok("b"));
    image.take_requests();
    for (offset, len) in [
        (BLOCK, 2 * BLOCK),
        (2 * BLOCK, BLOCK),
        (u64::MAX - 511, BLOCK),
        (1, BLOCK),
    ] {
        let buffer = AlignedBuf::zeroed(len as usize).into();
        let answer = cx
            .block_on(ask(&*queue, Op::Read, offset, len, buffer))
            .expect("the ring turns");
        let expected = if offset == 1 {
            IoError::Misaligned
        } else {
            IoError::OutOfRange
        };
        assert_eq!(answer.map(drop), Err(expected), "{len} at {offset}");
    }
    let write = ask(&*queue, Op::Discard, 0, BLOCK, Buffer::default());
    assert_eq!(
        cx.block_on(write).expect("the ring turns").map(drop),
        Err(IoError::ReadOnly)
    );
    assert_eq!(image.take_requests()[1..], [0, 0]);
    assert_eq!(
        cx.block_on(queue.status(BLOCK, 2 * BLOCK))
            .expect("the ring turns"),
        Err(IoError::OutOfRange)
    );
}

#[test]
fn status_is_the_same_with_and_without_an_index() {
    let cx = Context::syscalls();
    let image = chain(&["..a.....", "bb......", ".c.c.", "dddd"]);
    let plain = Arc::clone(&image).open_queue(&cx).expect("a queue");
    let (_indexes, queue) = indexed(&image, &cx);
    let status = |queue: &dyn DiskQueue| {
        let (mut here, mut ranges) = (0, StatusRanges::default());
        while here < image.size() {
            let answer = cx.block_on(queue.status(here, image.size() - here));
            for range in answer.expect("the ring turns").expect("a status") {
                assert_eq!(range.offset, here);
                here = range.end();
                ranges.push(range);
            }
        }
        ranges.into_vec()
    };
    let expected = status(&*plain);
    assert_eq!(
        expected.iter().map(|range| range.depth).collect::<Vec<_>>(),
        [1, 0, 2, 1]
    );
    assert_eq!(status(&*queue), expected, "before it is built");
    read(&cx, &*queue, 0, 1).expect("a read");
    image.take_requests();
    assert_eq!(status(&*queue), expected);
}

#[test]
fn layer_without_status_is_walked_and_not_asked_again() {
    for lies in [false, true] {
        let cx = Context::syscalls();
        let bottom = Image {
            blocks: vec![Some(b'c'); 4],
            broken: if lies { vec![] } else { vec![3] },
            ..Image::default()
        };
        let top = Image {
            blocks: vec![Some(b'a'), None, None, None],
            below: Some(Arc::new(bottom)),
            lies,
            ..Image::default()
        };
        let image = Arc::new(top);
        let (indexes, queue) = indexed(&image, &cx);
        for turn in 0..3 {
            assert_eq!(
                read(&cx, &*queue, 1, 1).as_deref(),
                Ok("c"),
                "sound blocks are read"
            );
            assert_eq!(
                image.take_requests(),
                [1, 1],
                "as without an index, in turn {turn}"
            );
            let error = if lies { Ok("c") } else { Err(&IoError::Corrupt) };
            assert_eq!(read(&cx, &*queue, 3, 1).as_deref(), error);
            image.take_requests();
        }
        let whole = indexes.living()[0].reader().find(0, 4 * BLOCK);
        assert_eq!(
            (whole.layer, whole.missing),
            (0, None),
            "it is not tried again and again"
        );
    }
}

#[test]
fn queue_that_is_dropped_ends_the_build() {
    let cx = Context::syscalls();
    let image = chain(&["a.", "bb", "cc"]);
    let (indexes, queue) = indexed(&image, &cx);
    let (request, _answer) = Request::local(Op::Read, 0, BLOCK, AlignedBuf::zeroed(BLOCK as usize).into());
    queue.submit(request);
    assert_eq!(cx.tasks(), 2, "the read, and the build");
    drop(queue);
    assert_eq!(indexes.count(), 0, "no task keeps the index, nor the images");
    cx.block_on(std::future::ready(())).expect("the ring turns");
    while cx.tasks() > 0 {
        cx.run_ready();
    }
}

#[test]
fn disks_on_the_same_locked_images_share_an_index() {
    let cx = Context::syscalls();
    let indexes = ChainIndexes::default();
    let image = chain(&["a.", "bb", "cc"]);
    let layer = |inode, size_bytes| LayerIdentity {
        file: Some((1, inode)),
        format: "test",
        size_bytes,
    };
    let open = |layers: &[LayerIdentity], shared| {
        indexes.indexed(Arc::clone(&image) as Arc<dyn Disk>, layers, BLOCK, 0, shared)
    };
    let layers = [layer(7, 8192), layer(8, 8192)];
    let (first, second) = (open(&layers, true), open(&layers, true));
    assert_eq!(indexes.count(), 1);
    let queues = [&first, &second].map(|disk| Arc::clone(disk).open_queue(&cx).expect("a queue"));
    assert_eq!(read(&cx, &*queues[0], 1, 1).as_deref(), Ok("b"));
    image.take_requests();
    assert_eq!(read(&cx, &*queues[1], 1, 1).as_deref(), Ok("b"));
    assert_eq!(image.take_requests(), [0, 1, 0], "what the first built");
    let unknown = LayerIdentity {
        file: None,
        ..layer(7, 8192)
    };
    let others = [
        open(&layers, false),
        open(&[layer(7, 8192), layer(9, 8192)], true),
        open(&[layer(7, 8192), layer(8, 4096)], true),
        open(&[unknown.clone(), layer(8, 8192)], true),
        open(&[unknown, layer(8, 8192)], true),
    ];
    assert_eq!(
        indexes.count(),
        6,
        "other images, other sizes, no locks, no identity"
    );
    drop((first, second, queues));
    assert_eq!(indexes.count(), 5, "the last user is gone");
    let again = open(&layers, true);
    assert_eq!(
        read(&cx, &*again.open_queue(&cx).expect("a queue"), 1, 1).as_deref(),
        Ok("b")
    );
    assert_eq!(image.take_requests()[0], 1, "a new index knows nothing");
    drop(others);
    assert_eq!(indexes.count(), 0);
}

#[test]
fn reads_are_right_while_spans_are_dropped_and_built_again() {
    let cx = Context::syscalls();
    // Spans of 512 blocks that take 512 bytes each, in an index with room for a third of them.
    const SPANS: u64 = 300;
    let blocks = SPANS * 512;
    let image = |keeps: fn(u64) -> bool, below| Image {
        blocks: (0..blocks)
            .map(|block| keeps(block).then_some(b'a' + (block % 23) as u8))
            .collect(),
        below,
        ..Image::default()
    };
    let bottom = Arc::new(image(|block| block % 5 != 0, None));
    let top = Arc::new(image(|block| block % 2 == 0, Some(bottom)));
    let (indexes, queue) = indexed(&top, &cx);
    let mut asked = [0, 0];
    for step in 0..4000 {
        // Most reads near each other, some far away.
        let block = if step % 4 == 0 {
            (step * 7919 + 1) % blocks
        } else {
            step * 31 % (20 * 512)
        };
        let expected = char::from(match top.decide(block) {
            (_, 0) => b'0',
            (_, byte) => byte,
        });
        assert_eq!(
            read(&cx, &*queue, block, 1),
            Ok(expected.to_string()),
            "block {block}"
        );
        assert!(indexes.bytes() <= 64 << 10, "{} bytes", indexes.bytes());
        let requests = top.take_requests();
        asked = [0, 1].map(|layer| asked[layer] + requests[layer]);
    }
    // With all it needs, each read would be one request; without an index, every other one would be two.
    let extra = asked[0] + asked[1] - 4000;
    assert!(
        (100..1200).contains(&extra),
        "{extra} requests went through the layers one by one"
    );
}
