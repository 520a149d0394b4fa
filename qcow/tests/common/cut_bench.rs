//! A disk in the simulated world that a guest writes, zeroes, discards and flushes, with snapshots; and a judge of what a cut
//! of the power leaves of it.
//!
//! After each cut: a check finds nothing but leaks, before anything is repaired; what was flushed is there; each snapshot
//! that was reported created, and not asked to be deleted, is there; and each that is there has the content of its moment.
//! While one is applied, the disk is what it was or what the snapshot has, as a whole.

#![allow(dead_code, reason = "each test uses its part of this module")]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use block::{AlignedBuf, Buffer, Context, Disk, DiskQueue, IoError, Op, ask};
use qcow::image::{CreateOptions, check, create};
use qcow::{DiskSize, OpenOptions, QcowDisk, SnapshotError, SnapshotSelector};
use simulator::{Profile, Random, SimImage, SimWorld};

use crate::snapshot_content::{as_disk, content, entries};

pub(crate) const DISK: &str = "disk";
pub(crate) const BASE: &str = "base";

/// The values that each sector may have: one, or several while a change is not durable.
pub(crate) type Sectors = Vec<Vec<u8>>;

pub(crate) struct Bench {
    pub(crate) world: SimWorld,
    pub(crate) cx: Context,
    pub(crate) disk: Arc<QcowDisk>,
    pub(crate) queue: Box<dyn DiskQueue>,
    pub(crate) sectors: u64,
    /// The content as the guest knows it.
    pub(crate) known: RefCell<Vec<u8>>,
    /// The contents that a cut may leave.
    pub(crate) durable: RefCell<Sectors>,
    /// The whole content that the disk gets by an application that is under way.
    pub(crate) applying: RefCell<Option<Vec<u8>>>,
    /// The content of each snapshot, and true once it was reported.
    pub(crate) snapshots: RefCell<BTreeMap<String, (Vec<u8>, bool)>>,
    /// The contents of snapshots that are deleted, and that a cut may bring back: the program that deleted them was killed.
    pub(crate) deleted: RefCell<BTreeMap<String, Vec<u8>>>,
}

pub(crate) fn options() -> OpenOptions {
    OpenOptions {
        backing_files: true,
        lock: None,
        ..OpenOptions::default()
    }
}

impl Bench {
    pub(crate) fn new(seed: u64, random: &mut Random) -> Self {
        let world = SimWorld::new(seed, Profile::IMMEDIATE);
        let cluster_bits = random.pick(&[9, 9, 9, 10, 12]);
        let sectors = 24 + random.below(60);
        let backed = random.pick(&[0, sectors / 2]);
        let cx = world.context(64);
        let disk = cx.block_on(async {
            let view = world.file(DISK, true).view(&cx).expect("a view");
            let mut create_options = CreateOptions::new(sectors * 512);
            create_options.cluster_size = 1 << cluster_bits;
            create_options.refcount_bits = random.pick(&[2, 4, 8, 16, 32, 64]);
            if backed > 0 {
                let base = vec![0xBB; backed as usize * 512];
                world.set_contents(BASE, SimImage::from_bytes(&world.store(), &base));
                create_options.backing_file = Some(BASE.to_owned());
                create_options.backing_format = Some("raw".to_owned());
            }
            create(&view, &create_options).await.expect("an image");
            let disk = QcowDisk::open_on(&cx, &world, Path::new(DISK), &options()).await;
            disk.expect("a disk")
        });
        let disk = disk.expect("nothing waits for ever");
        let queue = Arc::clone(&disk).open_queue(&cx).expect("a queue");
        world.settle();
        world.set_profile(Profile::draw(random));
        let known: Vec<u8> = (0..sectors)
            .map(|at| if at < backed { 0xBB } else { 0 })
            .collect();
        Self {
            durable: RefCell::new(known.iter().map(|&byte| vec![byte]).collect()),
            known: RefCell::new(known),
            applying: RefCell::default(),
            snapshots: RefCell::default(),
            deleted: RefCell::default(),
            world,
            cx,
            disk,
            queue,
            sectors,
        }
    }

    /// Goes on with a new program, which finds what the killed one has left. Nothing of that one is in flight any more.
    pub(crate) fn after_a_kill(&self, judge: &Judge) -> Self {
        let image = self.world.contents(DISK).to_bytes();
        let known = content(&judge.world, &judge.cx, &image);
        let mut durable = self.durable.borrow().clone();
        if let Some(applied) = &*self.applying.borrow() {
            durable
                .iter_mut()
                .zip(applied)
                .for_each(|(values, &byte)| values.push(byte));
        }
        assert!(
            known
                .iter()
                .zip(&durable)
                .all(|(byte, values)| values.contains(byte))
        );
        let listed = entries(&image);
        let (mut snapshots, mut deleted) = (BTreeMap::new(), self.deleted.borrow().clone());
        for (name, (content, _)) in &*self.snapshots.borrow() {
            if listed.iter().any(|entry| entry.name == name.as_bytes()) {
                snapshots.insert(name.clone(), (content.clone(), false));
            } else {
                deleted.insert(name.clone(), content.clone());
            }
        }
        let cx = self.world.context(64);
        let disk = cx.block_on(QcowDisk::open_on(&cx, &self.world, Path::new(DISK), &options()));
        let disk = disk.expect("nothing waits for ever").expect("a disk");
        let queue = Arc::clone(&disk).open_queue(&cx).expect("a queue");
        Self {
            world: self.world.clone(),
            cx,
            disk,
            queue,
            sectors: self.sectors,
            known: RefCell::new(known),
            durable: RefCell::new(durable),
            applying: RefCell::default(),
            snapshots: RefCell::new(snapshots),
            deleted: RefCell::new(deleted),
        }
    }

    /// All that was answered, and all that was found, is durable.
    fn is_durable(&self, known: &[u8]) {
        *self.durable.borrow_mut() = known.iter().map(|&byte| vec![byte]).collect();
        let mut snapshots = self.snapshots.borrow_mut();
        snapshots.values_mut().for_each(|(_, is_sure)| *is_sure = true);
        self.deleted.borrow_mut().clear();
    }

    /// One request of the guest, answered. It fails if the program is killed.
    pub(crate) async fn request(&self, random: &mut Random) -> Result<(), IoError> {
        let count = 1 + random.below(self.sectors.min(12));
        let first = random.below(self.sectors - count + 1);
        let kind = random.below(7);
        if kind == 0 {
            let known = self.known.borrow().clone();
            ask(&*self.queue, Op::Flush, 0, 0, Buffer::default()).await?;
            self.is_durable(&known);
            return Ok(());
        }
        let byte = if kind <= 2 {
            0
        } else {
            1 + random.below(0x70) as u8
        };
        for at in first..first + count {
            self.durable.borrow_mut()[at as usize].push(byte);
        }
        let (op, buffer) = match kind {
            1 | 2 => {
                let unmap = kind == 1;
                (Op::WriteZeroes { unmap, fua: false }, Buffer::default())
            }
            _ => {
                let bytes = AlignedBuf::from_slice(&vec![byte; count as usize * 512]);
                (Op::Write { fua: false }, bytes.into())
            }
        };
        ask(&*self.queue, op, first * 512, count * 512, buffer).await?;
        self.known.borrow_mut()[first as usize..][..count as usize].fill(byte);
        Ok(())
    }

    /// Creates, applies or deletes a snapshot. Nothing is asked for meanwhile, so that its content is known. It fails if the program is
    /// killed.
    pub(crate) async fn snapshot(&self, round: u64, random: &mut Random) -> Result<(), SnapshotError> {
        let names: Vec<String> = self.snapshots.borrow().keys().cloned().collect();
        if !names.is_empty() && random.one_in(3) {
            let name = names[random.below(names.len() as u64) as usize].clone();
            let content = self.snapshots.borrow()[&name].0.clone();
            *self.applying.borrow_mut() = Some(content.clone());
            let which = SnapshotSelector::Name(name);
            let applied = self.disk.apply_snapshot(&self.cx, &which, DiskSize::Fixed);
            match applied.await {
                // A killed program may leave counts that are too high.
                Err(SnapshotError::RefcountFull { .. }) => {
                    *self.applying.borrow_mut() = None;
                    return Ok(());
                }
                applied => applied?,
            };
            *self.applying.borrow_mut() = None;
            *self.known.borrow_mut() = content;
        } else if !names.is_empty() && random.one_in(2) {
            let name = names[random.below(names.len() as u64) as usize].clone();
            if let Some((_, is_sure)) = self.snapshots.borrow_mut().get_mut(&name) {
                *is_sure = false;
            }
            let which = SnapshotSelector::Name(name.clone());
            self.disk.delete_snapshot(&self.cx, &which).await?;
            self.snapshots.borrow_mut().remove(&name);
        } else {
            let name = format!("s{round}");
            let known = self.known.borrow().clone();
            self.snapshots
                .borrow_mut()
                .insert(name.clone(), (known.clone(), false));
            match self.disk.create_snapshot(&self.cx, &name, UNIX_EPOCH).await {
                Ok(_) => {
                    if let Some((_, is_sure)) = self.snapshots.borrow_mut().get_mut(&name) {
                        *is_sure = true;
                    }
                }
                // Counts of two bits are soon full.
                Err(SnapshotError::RefcountFull { .. }) => {
                    self.snapshots.borrow_mut().remove(&name);
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
        // It made durable what was answered before.
        self.is_durable(&self.known.borrow());
        Ok(())
    }
}

/// A world to look at what a cut leaves.
pub(crate) struct Judge {
    pub(crate) world: SimWorld,
    pub(crate) cx: Context,
}

impl Judge {
    pub(crate) fn new(bench: &Bench) -> Self {
        let world = SimWorld::with_store(0, Profile::IMMEDIATE, &bench.world.store());
        world.set_contents(BASE, bench.world.contents(BASE));
        let cx = world.context(64);
        Self { world, cx }
    }

    pub(crate) fn look(&self, bench: &Bench, what: &str, random: &mut Random) {
        let cut = bench.world.crash_space(DISK).draw(random);
        let image = cut.to_bytes();
        self.world.set_contents(DISK, cut);
        let view = self.world.file(DISK, false).view(&self.cx).expect("a view");
        let report = self
            .cx
            .block_on(check(&view))
            .expect("it turns")
            .expect("a check");
        assert_eq!(report.corruptions, 0, "{what}: {:?}", report.findings);
        let found = content(&self.world, &self.cx, &image);
        let durable = bench.durable.borrow();
        let is_applied = bench.applying.borrow().as_ref() == Some(&found);
        for (sector, (byte, values)) in found.iter().zip(durable.iter()).enumerate() {
            assert!(
                is_applied || values.contains(byte),
                "{what}: sector {sector} has {byte:#x}, expected {values:x?}"
            );
        }
        let listed = entries(&image);
        let snapshots = bench.snapshots.borrow();
        let deleted = bench.deleted.borrow();
        let there = snapshots
            .iter()
            .map(|(name, (expected, is_sure))| (name, expected, *is_sure));
        let back = deleted.iter().map(|(name, expected)| (name, expected, false));
        for (name, expected, is_sure) in there.chain(back) {
            let entry = listed.iter().find(|entry| entry.name == name.as_bytes());
            assert!(entry.is_some() || !is_sure, "{what}: snapshot {name} is gone");
            if let Some(entry) = entry {
                let found = content(&self.world, &self.cx, &as_disk(&image, entry));
                assert!(found == *expected, "{what}: snapshot {name} has changed");
            }
        }
        let is_known = |name: &[u8]| {
            let mut names = snapshots.keys().chain(deleted.keys());
            names.any(|known| known.as_bytes() == name)
        };
        assert!(
            listed.iter().all(|entry| is_known(&entry.name)),
            "{what}: a snapshot that nobody knows"
        );
    }
}
