//! `info`, `check`, and all that a guest can ask, of every class: a clear error or EIO, and nothing touched that should
//! not be.

use ringdisk_gen::image::u64_in;
use ringdisk_gen::malformed::{self, CLUSTER, Case, Fate};

use crate::world::{CASE, Ended, World};

/// Reads all of the disk, together and in pieces that a damage elsewhere does not concern.
const READ: [&str; 5] = [
    "read -q 0 4M",
    "read -q 0 64k",
    "read -q 64k 64k",
    "read -q 2M 64k",
    "read -q 4095k 1k",
];
/// Reads all, writes over what is there and what is not, gives space back, and writes again.
const WRITE: [&str; 12] = [
    "read -q 0 4M",
    "write -q -P 0x5a 512 1k",
    "write -q -P 0x5a 30k 40k",
    "write -q -P 0x5a 80k 6k",
    "write -q -P 0x5a 1M 64k",
    "write -q -f -P 0x5a 2050k 8k",
    "discard -q 16k 16k",
    "flush",
    "write -q -z -u 36k 9k",
    "discard -q 0 1M",
    "flush",
    "write -q -P 0x5a 0 256k",
];
/// The bytes that guests write here, and that nothing else in an image looks like.
const GUEST: [u8; 8] = [0x5A; 8];

fn io(world: &World, what: &str, disk: &str, commands: &[&str]) -> Ended {
    let mut arguments = vec!["io", "--disk", disk];
    commands.iter().for_each(|line| arguments.extend(["-c", line]));
    world.ringdisk(what, &arguments)
}

/// One image, used in every way.
fn face(world: &World, case: &Case, base: &[u8]) {
    let bytes = case.apply(base);
    world.put(&bytes);
    look(world, case);
    read(world, case);
    write(world, case, &bytes);
}

fn what(case: &Case, way: &str) -> String {
    format!("{}: {}, {way}", case.class, case.name)
}

fn look(world: &World, case: &Case) {
    let before = world.fingerprint();
    for (way, arguments) in [
        ("info", ["image", "info", CASE]),
        ("check", ["image", "check", CASE]),
    ] {
        let what = what(case, way);
        let ended = world.ringdisk(&what, &arguments);
        let told = ended.refusal().is_some() || ended.stderr.is_empty() && !ended.stdout.is_empty();
        assert!(told, "{what}: {ended:?}");
        assert!(way == "check" || ended.code <= 1, "{what}: {ended:?}");
        assert_eq!(world.fingerprint(), before, "{what}: the image has changed");
    }
}

fn read(world: &World, case: &Case) {
    let before = world.fingerprint();
    let what = what(case, "read");
    let disk = format!("path={CASE},image_type=qcow2,readonly=on");
    let ended = io(world, &what, &disk, &READ);
    assert_eq!(
        world.fingerprint(),
        before,
        "{what}: a reader has changed the image"
    );
    assert_fate(&what, case.fate, &ended, true);
}

fn write(world: &World, case: &Case, bytes: &[u8]) {
    let what = what(case, "write");
    let before = world.fingerprint();
    let writer = io(world, &what, &format!("path={CASE},image_type=qcow2"), &WRITE);
    assert_fate(&what, case.fate, &writer, false);
    if writer.refusal().is_some() {
        assert_eq!(
            world.fingerprint(),
            before,
            "{what}: a failed open has changed the image"
        );
    } else {
        assert_structures_stand(&what, bytes, &world.bytes());
    }
}

fn assert_fate(what: &str, fate: Fate, ended: &Ended, reader: bool) {
    let refusal = ended.refusal();
    // What fails is said, each in a line of its own.
    let said = ended.stdout.contains("failed") || ended.stdout.contains("rror") || refusal.is_some();
    assert!(
        ended.code == 0 || ended.code == 1 && (said || !ended.stderr.is_empty()),
        "{what}: {ended:?}"
    );
    match (fate, refusal) {
        (Fate::Refused(says), Some(line)) => assert!(line.contains(says), "{what} says no {says:?}: {line}"),
        (Fate::NotWritable(says), Some(line)) if !reader => {
            assert!(line.contains(says), "{what} says no {says:?}: {line}");
        }
        (Fate::NotWritable(_), None) if reader => {}
        (Fate::Refused(_) | Fate::NotWritable(_), _) => panic!("{what}: expected {fate:?}: {ended:?}"),
        (Fate::Eio, Some(_)) if !reader => {}
        (Fate::Opens | Fate::Eio, Some(line)) => panic!("{what}: expected {fate:?}: {line}"),
        (Fate::Eio, None) if reader => assert_eq!(ended.code, 1, "{what}: expected {fate:?}: {ended:?}"),
        _ => {}
    }
}

/// A guest's bytes never lie over the header, the L1 table, or the refcount table.
fn assert_structures_stand(what: &str, before: &[u8], after: &[u8]) {
    if before.len() < CLUSTER as usize || after.len() < 104 {
        return;
    }
    for range in [0..8, 20..36, 60..64, 96..104] {
        assert_eq!(
            after[range.clone()],
            before[range.clone()],
            "{what}: header bytes {range:?}"
        );
    }
    let (l1, table) = (u64_in(after, 40) as usize, u64_in(after, 48) as usize);
    for (structure, at, len) in [("L1 table", l1, 16), ("refcount table", table, CLUSTER as usize)] {
        let bytes = after.get(at..at.saturating_add(len)).unwrap_or_default();
        let guest = bytes.chunks_exact(8).any(|entry| entry == GUEST);
        assert!(!guest, "{what}: a guest's bytes are in the {structure}");
    }
}

#[test]
fn command_survives_every_defect_class() {
    let (world, base) = (World::new(), malformed::base());
    let cases = malformed::cases(&base);
    for case in &cases {
        face(&world, case, &base.bytes);
    }
    assert!(cases.len() > 300);
}

#[test]
fn command_survives_every_defect_of_bitmaps() {
    let (world, base) = (World::new(), malformed::bitmap_base());
    for case in &malformed::bitmap_cases(&base) {
        face(&world, case, &base.bytes);
        let what = what(case, "bitmap list");
        let ended = world.ringdisk(&what, &["image", "bitmap", "list", CASE]);
        assert!(ended.code <= 1, "{what}: {ended:?}");
    }
}

/// Each eighth pair; the library's own test covers all of them.
#[test]
fn command_survives_pairs_of_defects() {
    let (world, base) = (World::new(), malformed::base());
    let pairs = malformed::pairs(&malformed::cases(&base));
    for case in pairs.iter().step_by(8) {
        let bytes = case.apply(&base.bytes);
        world.put(&bytes);
        write(&world, case, &bytes);
    }
    assert!(pairs.len() > 8 * 400);
}

/// The control of the tests above: a sound image passes them within the same limits.
#[test]
fn sound_image_passes_within_the_limits() {
    let (world, base) = (World::new(), malformed::base());
    world.put(&base.bytes);
    world.ringdisk("check", &["image", "check", CASE]);
    for (disk, commands) in [
        (format!("path={CASE},readonly=on"), &READ[..]),
        (format!("path={CASE}"), &WRITE[..]),
        (format!("path={CASE},num_queues=4"), &READ[..]),
    ] {
        let ended = io(&world, "sound", &disk, commands);
        assert_eq!((ended.code, ended.stderr.as_str()), (0, ""), "{ended:?}");
    }
    assert_eq!(world.ringdisk("check", &["image", "check", CASE]).code, 0);
}
