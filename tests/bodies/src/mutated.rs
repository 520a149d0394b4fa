//! A sound image with fields changed on purpose, in the hands of a guest.
//!
//! Invariants: a reader and a failed open change nothing, and no other file is asked for. And if the check found
//! nothing wrong with the image, it is as good as any: what was written is read back, what was not is as it was,
//! snapshots too, and afterwards the check finds nothing corrupt.

use block::{Context, Op};
use qcow::image::{CheckReport, Verdict, check};
use ringdisk_gen::image::{put, u64_in};
use ringdisk_gen::{Image, Structure};

use crate::cursor::Cursor;
use crate::guest::{Guest, options};
use crate::host::{Files, MemoryFile};
use crate::mutate::{BACKING, mutate, spec};

const SECTOR: u64 = 512;
/// The length of the part of a disk that is looked at: mutations make disks of any size.
const DISK_MAX: u64 = 1 << 20;
/// The most requests of a case.
const REQUESTS_MAX: u32 = 24;
/// The length of the backing file: shorter and longer than disks are.
const BACKING_BYTES: usize = 40 << 10;

/// The sectors that the disk must hold; `None` where that is not known.
struct Model(Vec<Option<Vec<u8>>>);

impl Model {
    /// Returns the sectors that are read now.
    fn of(guest: &Guest) -> Self {
        let size = guest.size().min(DISK_MAX);
        let mut sectors = Vec::new();
        for offset in (0..size).step_by(4096) {
            let len = 4096.min(size - offset);
            match guest.read(offset, len) {
                Ok(bytes) => {
                    sectors.extend(bytes.chunks(SECTOR as usize).map(|sector| Some(sector.to_vec())))
                }
                Err(_) => sectors.extend((0..len / SECTOR).map(|index| {
                    let sector = guest.read(offset + index * SECTOR, SECTOR);
                    sector.ok()
                })),
            }
        }
        Self(sectors)
    }

    fn set(&mut self, first: u64, sectors: impl IntoIterator<Item = Option<Vec<u8>>>) {
        for (place, sector) in self.0[first as usize..].iter_mut().zip(sectors) {
            *place = sector;
        }
    }

    /// Fails if a sector that is known reads differently. One that cannot be read must not have been readable.
    fn assert_agrees(&self, now: &Self, what: &str) {
        assert_eq!(self.0.len(), now.0.len(), "{what}: the size of the disk");
        for (sector, (was, is)) in self.0.iter().zip(&now.0).enumerate() {
            if let Some(was) = was {
                assert!(Some(was) == is.as_ref(), "{what}: sector {sector} has changed");
            }
        }
    }
}

fn look(file: &MemoryFile) -> Option<CheckReport> {
    let cx = Context::syscalls();
    let view = file.view(&cx);
    cx.block_on(check(&view)).expect("the ring turns").ok()
}

/// Builds, mutates, looks, reads and writes.
///
/// # Panics
///
/// If that does not hold.
pub fn body(data: &[u8]) -> &'static str {
    let mut cursor = Cursor::new(data);
    let image = Image::new(spec(&mut cursor));
    let bytes = mutate(&mut cursor, &image);
    let mut files = Files::with("case", &bytes);
    let backed = image.spec.backing.is_some();
    if backed {
        let base: Vec<u8> = (0..BACKING_BYTES).map(|at| (at / 512) as u8 ^ 0x33).collect();
        files.add(BACKING, &base);
    }
    let file = files.file("case");
    let before = look(file);
    let sound = before
        .as_ref()
        .is_some_and(|report| report.verdict() == Verdict::Clean && !report.marked_corrupt);

    let Ok(guest) = Guest::open(&files, "case", &options(true, backed)) else {
        assert!(file.holds(&bytes), "a failed open changed the image");
        return "refused";
    };
    let model = Model::of(&guest);
    let _any = guest.close();
    assert!(file.holds(&bytes), "looking and reading changed the image");
    if !backed {
        assert!(files.missed().is_empty(), "{:?} were asked for", files.missed());
    }
    let snapshots = if sound {
        read_snapshots(&image, file)
    } else {
        Vec::new()
    };

    let guest = match Guest::open(&files, "case", &options(false, backed)) {
        Ok(guest) => guest,
        Err(error) => {
            assert!(file.holds(&bytes), "a failed open changed the image: {error}");
            return "only read";
        }
    };
    let mut run = Run {
        model,
        sound,
        failed: false,
    };
    run.ask_all(&mut cursor, guest, &files, backed);
    if !sound {
        return "written";
    }
    let after = look(file).expect("what was sound can be checked");
    assert_eq!(
        (after.corruptions, after.check_errors),
        (0, 0),
        "{:#?}",
        after.findings
    );
    // What cannot be read cannot be copied either, and then a cluster may be lost.
    let may_leak = run.failed || !counts_stand(&image, &bytes);
    assert!(may_leak || after.leaks == 0, "{:#?}", after.findings);
    let guest = Guest::open(&files, "case", &options(true, backed)).expect("what was sound can be opened");
    run.model.assert_agrees(&Model::of(&guest), "after a clean close");
    let _any = guest.close();
    let now = read_snapshots(&image, file);
    for (was, is) in snapshots.iter().zip(&now) {
        was.assert_agrees(is, "a snapshot");
    }
    "written, sound"
}

/// Returns true if no count was mutated. One of a cluster behind the end of the file is no leak until the file reaches
/// it.
fn counts_stand(image: &Image, bytes: &[u8]) -> bool {
    let counts = [Structure::RefcountTable, Structure::RefcountBlock];
    let mut places = counts.into_iter().flat_map(|kind| image.all(kind));
    let same = |from: u64, len: u64| {
        let range = from as usize..(from + len) as usize;
        bytes.get(range.clone()) == image.bytes.get(range)
    };
    same(48, 12) && same(96, 4) && places.all(|place| same(place.offset, place.len))
}

struct Run {
    model: Model,
    /// Nothing was wrong with the image.
    sound: bool,
    /// A request failed.
    failed: bool,
}

impl Run {
    fn ask_all(&mut self, cursor: &mut Cursor<'_>, mut guest: Guest, files: &Files, backed: bool) {
        let sectors = self.model.0.len() as u64;
        for _ in 0..REQUESTS_MAX {
            if cursor.is_empty() || sectors == 0 {
                break;
            }
            let first = cursor.below(sectors);
            let most = cursor.pick(&[1, 8, 64, 300]).min(sectors - first);
            let count = 1 + cursor.below(most);
            self.ask(cursor, &guest, first, count);
            if cursor.one_in(16) {
                self.close(guest);
                match Guest::open(files, "case", &options(false, backed)) {
                    Ok(again) => guest = again,
                    // What was found meanwhile may make it unfit to be written.
                    Err(error) => return assert!(!self.sound, "it cannot be opened again: {error}"),
                }
            }
        }
        if self.sound {
            self.model.assert_agrees(&Model::of(&guest), "after all requests");
        }
        self.close(guest);
    }

    fn close(&mut self, guest: Guest) {
        let closed = guest.close();
        assert!(closed.is_ok() || !self.sound, "a close fails: {closed:?}");
    }

    fn ask(&mut self, cursor: &mut Cursor<'_>, guest: &Guest, first: u64, count: u64) {
        let (offset, len) = (first * SECTOR, count * SECTOR);
        let known = vec![None; count as usize];
        match cursor.below(8) {
            0 => {
                let read = guest.read(offset, len);
                self.failed |= read.is_err();
                if let (Ok(bytes), true) = (read, self.sound) {
                    for (was, is) in self.model.0[first as usize..].iter().zip(bytes.chunks(512)) {
                        assert!(
                            was.as_ref().is_none_or(|was| was == is),
                            "a read at {offset:#x} differs"
                        );
                    }
                }
            }
            1..=4 => {
                let tag = cursor.byte();
                let bytes: Vec<u8> = (0..len).map(|at| tag ^ (at / SECTOR) as u8).collect();
                let done = guest.write(offset, &bytes, cursor.one_in(8));
                self.failed |= done.is_err();
                match done {
                    Ok(()) => self
                        .model
                        .set(first, bytes.chunks(512).map(|sector| Some(sector.to_vec()))),
                    Err(_) => self.model.set(first, known),
                }
            }
            5 => {
                let (unmap, fua) = (cursor.one_in(2), cursor.one_in(8));
                let done = guest.tell(Op::WriteZeroes { unmap, fua }, offset, len);
                self.failed |= done.is_err();
                let zeros = done.is_ok().then(|| vec![0; 512]);
                self.model.set(first, vec![zeros; count as usize]);
            }
            6 => {
                self.failed |= guest.tell(Op::Discard, offset, len).is_err();
                self.discarded(guest, first, count);
            }
            _ => self.failed |= guest.tell(Op::Flush, 0, 0).is_err(),
        }
    }

    /// A discard makes zeros of some of its range, and leaves the rest as it was.
    fn discarded(&mut self, guest: &Guest, first: u64, count: u64) {
        for sector in first..first + count {
            let now = guest.read(sector * SECTOR, SECTOR).ok();
            let was = &mut self.model.0[sector as usize];
            if let (Some(was), Some(now), true) = (was.as_ref(), now.as_ref(), self.sound) {
                assert!(
                    now == was || *now == [0; 512],
                    "a discard made something up in sector {sector}"
                );
            }
            *was = now;
        }
    }
}

/// Returns the sectors of snapshots, each read as the disk of a copy whose header leads to it.
fn read_snapshots(image: &Image, file: &MemoryFile) -> Vec<Model> {
    let bytes = file.read(0, usize::MAX);
    let table = image
        .all(Structure::SnapshotTable)
        .next()
        .map_or(0, |place| place.offset);
    if table == 0 || u64_in(&bytes, 64) != table {
        return Vec::new();
    }
    let tables = image.all(Structure::SnapshotL1Table).map(|place| place.offset);
    let models = tables.map(|l1| {
        let mut copy = bytes.clone();
        put(&mut copy, 40, &l1.to_be_bytes());
        let mut files = Files::with("snapshot", &copy);
        files.add(BACKING, &[]);
        let opened = Guest::open(&files, "snapshot", &options(true, true));
        opened.map_or(Model(Vec::new()), |guest| Model::of(&guest))
    });
    models.collect()
}
