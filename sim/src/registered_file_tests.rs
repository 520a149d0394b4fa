//! Registered pages between a guest and files of every alignment: aligned or not, with memory beside them or not.

use std::io;
use std::rc::Rc;
use std::sync::Arc;

use block::buffer::{AlignedBuf, Buffer, Piece};
use block::disk::Disk;
use block::file::{Alignment, FileOptions, ImageFile};
use block::raw::RawDisk;
use block::request::{CompletionSink, Done, Op, Request};
use block::ring::{Pieces, RingKind};
use block::task::Context;
use smallvec::smallvec;

use super::Random;
use super::pages::Tags;

const PLACE: usize = 600 << 10;
/// The byte that fills the pages beside a request's bytes.
const BESIDE: u8 = 0xA5;

const RINGS: [(RingKind, Option<u64>); 4] = [
    (RingKind::IoUring, None),
    (RingKind::IoUring, Some(7)),
    (RingKind::Syscalls, None),
    (RingKind::Syscalls, Some(9)),
];

fn world(ring: (RingKind, Option<u64>), places: u16) -> (Context, Tags) {
    Tags::on_ring(ring.0, 32, places, PLACE, ring.1)
        .expect("these tests need io_uring: kernel.io_uring_disabled=0")
}

fn image(alignment: Alignment, contents: &[u8]) -> Arc<ImageFile> {
    let mut file = tempfile::tempfile().expect("a temporary file");
    io::Write::write_all(&mut file, contents).expect("its contents");
    Arc::new(ImageFile::with_alignment(
        "test".into(),
        file,
        true,
        false,
        alignment,
    ))
}

/// A file with direct I/O, for which the kernel has the alignment.
fn direct(contents: &[u8]) -> Arc<ImageFile> {
    let path = tempfile::NamedTempFile::new_in("/var/tmp").expect("a temporary file");
    std::fs::write(path.path(), contents).expect("its contents");
    let options = FileOptions {
        write: true,
        direct: true,
    };
    ImageFile::open(path.path(), options).expect("direct I/O in /var/tmp")
}

fn pattern(random: &mut Random, len: usize) -> Vec<u8> {
    let salt = random.draw() as u8;
    (0..len)
        .map(|i| (i * 7 % 251) as u8 ^ (i >> 9) as u8 ^ salt)
        .collect()
}

/// Returns the alignment, in bytes, that a driver can promise of pages that begin `skip` bytes into a block.
fn promise(skip: usize) -> usize {
    if skip == 0 {
        4096
    } else {
        1 << skip.trailing_zeros().min(12)
    }
}

fn alignments() -> Vec<Alignment> {
    [(1, 1), (4, 512), (512, 512), (512, 4096), (4096, 4096)]
        .map(|(memory, offset)| Alignment { memory, offset })
        .into()
}

/// Method: pieces of registered pages, memory and zeros, cut anywhere, are written and read anywhere; compare with an
/// array, and what lies beside the pieces with what was there.
#[test]
fn image_file_moves_pieces_of_any_kind_exactly() {
    for ring in RINGS {
        let mut files: Vec<Option<Alignment>> = alignments().into_iter().map(Some).collect();
        files.push(None);
        for alignment in files {
            let (cx, tags) = world(ring, 2);
            let mut random = Random::new(11);
            let mut model = pattern(&mut random, 1 << 20);
            let image = match alignment {
                Some(alignment) => image(alignment, &model),
                None => direct(&model),
            };
            let view = image.view(&cx).expect("a view");
            for _ in 0..12 {
                let what = format!("{ring:?} {alignment:?}");
                let (offset, skip) = if random.one_in(2) {
                    (random.below(400 << 10), random.pick(&[0, 100, 512]))
                } else {
                    (4096 * random.below(100), random.pick(&[0, 4096, 512]))
                };
                let unit = random.pick(&[1, 512, 4096]);
                let mut lens = [0; 3].map(|_| unit * random.below((150 << 10) / unit as u64 + 1) as usize);
                if random.one_in(3) {
                    (lens[0], lens[2]) = (0, 0);
                }
                let offset = offset as usize;
                let all: usize = lens.iter().sum();
                let bytes = pattern(&mut random, all);
                let guests = tags.buffer(0, skip, lens[1].max(1), promise(skip));
                let guests = Rc::new(guests.expect("a free tag"));
                tags.write(0, 0, &vec![BESIDE; PLACE]);
                tags.write(0, skip, &bytes[lens[0]..lens[0] + lens[1]]);
                let ours = |bytes: &[u8]| Rc::new(Buffer::from(AlignedBuf::from_slice(bytes)));
                let (head, tail) = (ours(&bytes[..lens[0]]), ours(&bytes[lens[0] + lens[1]..]));
                // Two pieces of one registered buffer, next to each other.
                let cut = lens[1] / 2;
                let middle = |offset, len| Piece::Bytes {
                    buffer: Rc::clone(&guests),
                    offset,
                    len,
                };
                let mut pieces: Pieces = smallvec![Piece::whole(&head)];
                pieces.push(middle(0, cut));
                pieces.push(middle(cut, lens[1] - cut));
                let zeros = random.one_in(2);
                pieces.push(if zeros {
                    Piece::Zeros(lens[2])
                } else {
                    Piece::whole(&tail)
                });
                pieces.retain(|piece| !piece.is_empty());
                let dsync = random.one_in(4);
                let write = view.write(offset as u64, pieces, dsync);
                let result = cx.block_on(write).expect("the ring turns");
                assert_eq!(result, Ok(()), "{what}");
                model[offset..offset + all].copy_from_slice(&bytes);
                if zeros {
                    model[offset + lens[0] + lens[1]..][..lens[2]].fill(0);
                }
                drop((head, tail, guests));
                let found = cx.block_on(view.read_at(0, model.len())).expect("the ring turns");
                assert!(
                    found.expect("a read")[..] == model,
                    "{what}: {lens:?} at {offset}"
                );

                // And back, past the end now and then: with memory before the pages.
                let offset = if random.one_in(4) {
                    model.len() - 3000
                } else {
                    offset
                };
                let all = all.max(1);
                let guests = Rc::new(tags.buffer(0, skip, all, promise(skip)).expect("a free tag"));
                tags.write(0, 0, &vec![BESIDE; PLACE]);
                let before = Rc::new(Buffer::from(AlignedBuf::zeroed(lens[0])));
                let mut pieces: Pieces = smallvec![Piece::whole(&before), Piece::whole(&guests)];
                pieces.retain(|piece| !piece.is_empty());
                let read = view.start_read(offset as u64, pieces);
                let result = cx.block_on(read).expect("the ring turns");
                assert_eq!(result, Ok(()), "{what}");
                let mut expected = model[offset..model.len().min(offset + lens[0] + all)].to_vec();
                expected.resize(lens[0] + all, 0);
                let mut found = vec![0; lens[0]];
                before.memory().expect("ours").read(0, &mut found);
                let mut place = vec![0; PLACE];
                tags.read(0, 0, &mut place);
                found.extend_from_slice(&place[skip..skip + all]);
                assert!(found == expected, "{what}: a read of {all} at {offset}");
                let mut beside = place[..skip].iter().chain(&place[skip + all..]);
                assert!(
                    beside.all(|&byte| byte == BESIDE),
                    "{what}: beside a read of {all}"
                );
            }
        }
    }
}

fn turn_until(cx: &Context, sink: &CompletionSink, count: usize) -> Vec<Done> {
    let mut done = Vec::new();
    while done.len() < count {
        cx.run_ready();
        cx.ring().turn(false).expect("the ring turns");
        sink.drain_into(&mut done);
    }
    done
}

/// Method: many requests of registered pages to a raw disk at once, none of which share a sector; compare the file.
#[test]
fn raw_disk_serves_many_registered_requests_at_once() {
    const SIZE: usize = 1 << 20;
    for ring in RINGS {
        for alignment in alignments() {
            let what = format!("{ring:?} {alignment:?}");
            let (cx, tags) = world(ring, 8);
            let mut random = Random::new(5);
            let mut model = pattern(&mut random, SIZE);
            // The last sectors are none of the file, and read as zeros.
            model[SIZE - 5000..].fill(0);
            let file = image(alignment, &model[..SIZE - 5000]);
            let disk = RawDisk::new(Arc::clone(&file), SIZE as u64, true);
            let queue = Arc::clone(&disk).open_queue(&cx).expect("a queue");
            let sink = CompletionSink::new();
            for round in 0..8 {
                let share = SIZE / 8;
                for tag in 0..8u16 {
                    let first = usize::from(tag) * share + 512 * random.below(100) as usize;
                    let most = ((usize::from(tag) + 1) * share - first) / 512;
                    let len = 512 * (1 + random.below(most as u64) as usize);
                    let skip = random.pick(&[0, 4, 512, 4096]);
                    let buffer = tags.buffer(tag, skip, len, promise(skip)).expect("a free tag");
                    let read = random.one_in(2);
                    let op = match read {
                        true => Op::Read,
                        false => Op::Write {
                            fua: random.one_in(3),
                        },
                    };
                    tags.write(tag, 0, &vec![BESIDE; PLACE]);
                    if !read {
                        let bytes = pattern(&mut random, len);
                        tags.write(tag, skip, &bytes);
                        model[first..first + len].copy_from_slice(&bytes);
                    }
                    // Where its bytes are, whether it reads or writes.
                    let key = (first << 24 | skip) as u64;
                    queue.submit(Request::new(op, first as u64, len as u64, buffer, &sink, key));
                }
                for done in turn_until(&cx, &sink, 8) {
                    assert_eq!(done.result, Ok(()), "{what}, round {round}");
                    let (first, skip) = ((done.tag >> 24) as usize, (done.tag & 0xff_ffff) as usize);
                    let tag = (first / share) as u16;
                    let mut place = vec![0; PLACE];
                    tags.read(tag, 0, &mut place);
                    let end = skip + done.buffer.len();
                    assert!(
                        place[skip..end] == model[first..first + done.buffer.len()],
                        "{what}, round {round}: {} bytes at {first}",
                        done.buffer.len()
                    );
                    let mut beside = place[..skip].iter().chain(&place[end..]);
                    assert!(beside.all(|&byte| byte == BESIDE), "{what}, round {round}");
                }
            }
            let view = file.view(&cx).expect("a view");
            let found = cx.block_on(view.read_at(0, SIZE)).expect("the ring turns");
            assert!(found.expect("a read")[..] == model, "{what}");
        }
    }
}

/// A block that several requests write parts of is read, changed and written by one of them at a time, though the new
/// bytes arrive by I/O.
#[test]
fn registered_writes_to_one_block_all_land() {
    let alignment = Alignment {
        memory: 512,
        offset: 4096,
    };
    for ring in RINGS {
        let (cx, tags) = world(ring, 8);
        let view = image(alignment, &[9; 8192]).view(&cx).expect("a view");
        for tag in 0..8u16 {
            tags.write(tag, 0, &[tag as u8; 512]);
            let guests = Rc::new(tags.buffer(tag, 0, 512, 512).expect("a free tag"));
            let view = view.clone();
            cx.spawn(async move {
                let write = view.write(
                    4096 + 512 * u64::from(tag),
                    smallvec![Piece::whole(&guests)],
                    false,
                );
                write.await.expect("a write");
            });
        }
        cx.block_on(async {
            while cx.tasks() > 0 {
                view.sync().await.expect("a sync");
            }
        })
        .expect("the ring turns");
        let found = cx.block_on(view.read_at(0, 8192)).expect("the ring turns");
        let found = found.expect("a read");
        assert!(found[..4096].iter().all(|&byte| byte == 9));
        for (tag, sector) in (0u8..).zip(found[4096..].chunks(512)) {
            assert!(sector.iter().all(|&byte| byte == tag), "{ring:?}: sector {tag}");
        }
    }
}
