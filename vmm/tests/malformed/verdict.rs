//! Our check beside `qemu-img check`: whether something is corrupt, and whether something is leaked.

#![expect(
    clippy::print_stdout,
    reason = "what was compared is what a reader of the log wants to know"
)]

use ringdisk_gen::image::Image;
use ringdisk_gen::malformed::{self, Case, Fate};
use serde_json::Value;

use crate::world::{CASE, World};

/// Corrupt, leaked.
type Verdict = (bool, bool);

/// The cases where we differ on purpose: class, part of the name, and why.
const DIFFERENCES: &[(&str, &str, &str)] = &[
    ("L2 entry", "to unaligned data", UNALIGNED),
    ("zero cluster's place", "to unaligned data", UNALIGNED),
    ("refcount block", "with reserved bits", RESERVED),
    (
        "refcounts of a dirty image",
        "a refcount block with reserved bits",
        RESERVED,
    ),
];
const UNALIGNED: &str = "corrupt to both; QEMU counts the two clusters it overlaps as used, to us it leads nowhere, \
                         and the one it led to before is leaked";
const RESERVED: &str = "corrupt to both; QEMU does not count the block it leads to, and calls it leaked; we do, as the \
                        counts in it are used";

fn verdict(json: &str) -> Option<Verdict> {
    let report: Value = serde_json::from_str(json).ok()?;
    let some = |key: &str| report.get(key).and_then(Value::as_u64).unwrap_or(0) > 0;
    (!some("check-errors")).then(|| (some("corruptions"), some("leaks")))
}

fn ours(world: &World, what: &str) -> Option<Verdict> {
    verdict(&world.ringdisk(what, &["image", "check", "--json", CASE]).stdout)
}

/// QEMU is told to leave the backing file alone, whatever its name.
fn theirs(world: &World) -> Option<Verdict> {
    let image =
        format!(r#"json:{{"driver":"qcow2","file":{{"driver":"file","filename":"{CASE}"}},"backing":null}}"#);
    let ended = world.qemu_img(&[0, 2, 3], &["check", "--output=json", &image])?;
    verdict(&ended.stdout)
}

fn is_known(case: &Case) -> Option<&'static str> {
    let known = |(class, name, _): &&(&str, &str, &str)| case.class == *class && case.name.contains(name);
    DIFFERENCES.iter().find(known).map(|(_, _, why)| *why)
}

/// Compares the verdicts on `cases`, of which QEMU must have one on more than `least`.
fn compare(base: &Image, cases: &[Case], least: usize) -> Vec<String> {
    let world = World::new();
    let (mut compared, mut stricter, mut neither, mut wrong) = (0, 0, 0, Vec::new());
    for case in cases {
        let what = format!("{}: {}", case.class, case.name);
        let bytes = case.apply(&base.bytes);
        world.put(&bytes);
        let ours = ours(&world, &what);
        let theirs = theirs(&world);
        assert!(world.bytes() == bytes, "{what}: a check has changed the image");
        match (ours, theirs) {
            (Some(ours), Some(theirs)) => {
                compared += 1;
                match (ours == theirs, is_known(case)) {
                    (true, None) | (false, Some(_)) => {}
                    (true, Some(why)) => wrong.push(format!("{what}: no difference any more ({why})")),
                    (false, None) => wrong.push(format!("{what}: we say {ours:?}, QEMU {theirs:?}")),
                }
            }
            (None, Some(_)) => stricter += 1,
            (_, None) => neither += 1,
        }
    }
    println!(
        "{compared} verdicts compared; {stricter} images we refuse and QEMU checks; {neither} it does not check"
    );
    assert!(compared > least, "QEMU checks next to nothing");
    wrong
}

#[test]
fn verdict_matches_qemu_on_every_defect_class() {
    let base = malformed::base();
    let cases = malformed::cases(&base);
    let wrong = compare(&base, &cases, cases.len() / 2);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn verdict_matches_qemu_on_every_defect_of_bitmaps() {
    let base = malformed::bitmap_base();
    // It opens few images whose bitmaps it does not understand.
    let wrong = compare(&base, &malformed::bitmap_cases(&base), 20);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn verdict_matches_qemu_on_pairs_of_defects() {
    let base = malformed::base();
    let pairs = malformed::pairs(&malformed::cases(&base));
    // What is refused for certain is no verdict to compare; of the rest a third.
    let open = pairs
        .into_iter()
        .filter(|case| !matches!(case.fate, Fate::Refused(_)));
    let cases: Vec<Case> = open.step_by(3).collect();
    let wrong = compare(&base, &cases, cases.len() / 2);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
