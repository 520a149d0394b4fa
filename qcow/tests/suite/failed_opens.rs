//! Opens that the host fails at any of their operations: nothing is written to an image that failed to open.
//!
//! Method: a simulated world fails operations by chance; each seed fails others. An image that was not closed cleanly is
//! rebuilt while it is opened, and that may have begun: then the guest's bytes are what they were, the header says that
//! the image is dirty until it no longer is, and the next open finds nothing wrong.

use std::path::Path;
use std::sync::Arc;

use block::{AlignedBuf, Buffer, Context, Disk, Op};
use qcow::OpenError;
use qcow::image::{CreateOptions, Verdict, check, create};
use qcow::{OpenOptions, QcowDisk};
use simulator::{Profile, SimImage, SimWorld};

const DISK: &str = "disk";
const BASE: &str = "base";
const BYTES: u64 = 64 << 10;
const CLUSTER: u64 = 512;
/// The offset of a version 3 header's byte with the dirty bit, the lowest of `incompatible_features`.
const DIRTY_AT: u64 = 79;

async fn open(world: &SimWorld, cx: &Context, name: &str) -> Result<Arc<QcowDisk>, OpenError> {
    let options = OpenOptions {
        lock: None,
        backing_files: true,
        ..OpenOptions::default()
    };
    QcowDisk::open_on(cx, world, Path::new(name), &options).await
}

async fn ask(disk: &Arc<QcowDisk>, cx: &Context, op: Op, offset: u64, buffer: Buffer) -> AlignedBuf {
    let queue = Arc::clone(disk).open_queue(cx).expect("a queue");
    let len = buffer.len() as u64;
    let done = block::ask(&*queue, op, offset, len, buffer).await;
    done.expect("nothing fails here")
        .into_owned()
        .expect("our own buffer")
}

/// An image and the one below it, both with data.
fn images() -> (SimWorld, Vec<u8>) {
    let world = SimWorld::new(1, Profile::IMMEDIATE);
    let cx = world.context(64);
    let made = cx.block_on(async {
        for (name, below) in [(BASE, None), (DISK, Some(BASE))] {
            let mut options = CreateOptions::new(BYTES);
            options.cluster_size = CLUSTER;
            options.backing_file = below.map(str::to_owned);
            options.backing_format = below.map(|_| "qcow2".to_owned());
            let view = world.file(name, true).view(&cx).expect("a view");
            create(&view, &options).await.expect("an image");
            let disk = open(&world, &cx, name).await.expect("a disk");
            for at in (0..BYTES).step_by(4096) {
                let bytes = AlignedBuf::from_slice(&[name.as_bytes()[0] ^ (at >> 12) as u8; 1536]);
                ask(
                    &disk,
                    &cx,
                    Op::Write { fua: false },
                    at + u64::from(below.is_none()) * 1024,
                    bytes.into(),
                )
                .await;
            }
            disk.close(&cx).await.expect("a close");
        }
        guest_bytes(&world, &cx).await
    });
    (world, made.expect("nothing waits for ever"))
}

async fn guest_bytes(world: &SimWorld, cx: &Context) -> Vec<u8> {
    let disk = open(world, cx, DISK).await.expect("a disk");
    let buffer = AlignedBuf::zeroed(BYTES as usize).into();
    ask(&disk, cx, Op::Read, 0, buffer).await.to_vec()
}

/// The world with these images in which each operation may fail.
fn failing(seed: u64, from: &SimWorld, disk: &SimImage, profile: Profile) -> SimWorld {
    let world = SimWorld::with_store(seed, profile, &from.store());
    world.set_contents(DISK, disk.clone());
    world.set_contents(BASE, from.contents(BASE));
    world
}

#[test]
fn open_writes_nothing_when_the_host_fails_it() {
    let (sound, _) = images();
    let disk = sound.contents(DISK);
    let (mut failed, mut opened) = (0, 0);
    for seed in 0..400 {
        let errors = Profile {
            read_error: 60,
            ..Profile::default()
        };
        let world = failing(seed, &sound, &disk, errors);
        let cx = world.context(64);
        let before = (
            world.changes(),
            world.contents(DISK).fingerprint(),
            world.contents(BASE).fingerprint(),
        );
        let result = cx
            .block_on(open(&world, &cx, DISK))
            .expect("nothing waits for ever");
        let after = (
            world.changes(),
            world.contents(DISK).fingerprint(),
            world.contents(BASE).fingerprint(),
        );
        assert_eq!(after, before, "seed {seed}: {result:?}");
        match result {
            Ok(_) => opened += 1,
            Err(_) => failed += 1,
        }
    }
    assert!(failed > 50 && opened > 50, "{failed} failed, {opened} opened");
}

#[test]
fn failed_rebuild_leaves_dirty_image_with_its_bytes() {
    let (sound, guest) = images();
    let mut dirty = sound.contents(DISK);
    let mut header = vec![0; 512];
    dirty.read(0, &mut header);
    header[DIRTY_AT as usize] |= 1;
    dirty.patch(0, &header);
    let base = sound.contents(BASE).fingerprint();
    let (mut untouched, mut begun, mut opened) = (0, 0, 0);
    for seed in 0..400 {
        let errors = Profile {
            read_error: 10,
            write_error: 60,
            sync_error: 100,
            ..Profile::default()
        };
        let world = failing(seed, &sound, &dirty, errors);
        let before = world.contents(DISK).fingerprint();
        let cx = world.context(64);
        let result = cx
            .block_on(open(&world, &cx, DISK))
            .expect("nothing waits for ever");
        let after = world.contents(DISK);
        let is_changed = after.fingerprint() != before;
        match &result {
            Ok(_) => opened += 1,
            Err(_) if is_changed => begun += 1,
            Err(_) => untouched += 1,
        }
        assert_eq!(
            world.contents(BASE).fingerprint(),
            base,
            "seed {seed}: the image below has changed"
        );
        drop(result);
        // The host is well again.
        let world = failing(seed, &sound, &after, Profile::IMMEDIATE);
        let cx = world.context(64);
        cx.block_on(async {
            assert!(
                guest_bytes(&world, &cx).await == guest,
                "seed {seed}: the guest's bytes have changed"
            );
            let view = world.file(DISK, true).view(&cx).expect("a view");
            let report = check(&view).await.expect("a check");
            // What a rebuild began behind all that is used may be leaked.
            assert!(
                matches!(report.verdict(), Verdict::Clean | Verdict::Leaks),
                "seed {seed}: {report:?}"
            );
        })
        .expect("nothing waits for ever");
    }
    assert!(
        untouched > 10 && begun > 10 && opened > 10,
        "{untouched} untouched, {begun} begun, {opened} opened"
    );
}
