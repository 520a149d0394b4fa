//! The house rules that a machine can check, over the files that git tracks.

#[path = "tidy/modules.rs"]
mod modules;

use std::path::{Path, PathBuf};
use std::process::Command;

/// Files that may contain `unsafe` code; each says why at its top.
const UNSAFE: [&str; 59] = [
    "block/src/buffer.rs",
    "block/src/buffer/aligned.rs",
    "block/src/buffer/memory.rs",
    "block/src/epoch/model.rs",
    "block/src/event.rs",
    "block/src/file/alignment.rs",
    "block/src/file/flags.rs",
    "block/src/lock.rs",
    "block/src/ring/command.rs",
    "block/src/ring/control.rs",
    "block/src/ring/copy_through.rs",
    "block/src/ring/counting.rs",
    "block/src/ring/driver.rs",
    "block/src/ring/fixed.rs",
    "block/src/ring/in_flight.rs",
    "block/src/ring/null.rs",
    "block/src/ring/sys.rs",
    "block/src/ring/syscall.rs",
    "block/src/ring/uring.rs",
    "block/src/ring/uring/tests.rs",
    "block/src/sync/sharded.rs",
    "block/src/sync/sharded/model.rs",
    "block/src/worker/cpus.rs",
    "sim/src/driver.rs",
    "sim/src/memory.rs",
    "sim/src/pages.rs",
    "sim/src/short.rs",
    "sim/src/world.rs",
    "sim/src/world/op.rs",
    "sim/src/world/submit.rs",
    "tests/bench/src/cache.rs",
    "tests/bench/src/client/memory.rs",
    "tests/bench/src/client/mod.rs",
    "tests/bench/src/client/null_device.rs",
    "tests/bench/src/client/ring.rs",
    "tests/bench/src/process.rs",
    "tests/bench/src/signals.rs",
    "tests/bodies/src/memory.rs",
    "tests/gen/src/kvm.rs",
    "tests/src/process.rs",
    "virtio-devices/src/connect.rs",
    "virtio-devices/src/testing.rs",
    "virtio-devices/src/transport/tap.rs",
    "virtio-devices/src/ublk/channel.rs",
    "virtio-devices/src/ublk/control.rs",
    "virtio-devices/src/vhost_user/event.rs",
    "virtio-devices/src/vhost_user/sigbus.rs",
    "virtio-devices/src/vhost_user/inflight.rs",
    "virtio-devices/src/virtqueue/inflight.rs",
    "virtio-devices/src/virtqueue/memory.rs",
    "virtio-devices/src/virtqueue/ring.rs",
    "vmm/src/limits.rs",
    "vmm/src/machine/kvm.rs",
    "vmm/src/machine/memory.rs",
    "vmm/src/machine/vcpu.rs",
    "vmm/src/signals.rs",
    "vmm/src/socket.rs",
    "vmm/tests/restart/stop.rs",
    "vmm/tests/sandbox/main.rs",
];

const LINES_MAX: usize = 1000;
const COLUMNS_MAX: usize = 140;
const BYTES_MAX: u64 = 100 << 10;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The tracked files that exist, relative to the root, whose names end in one of `endings`.
fn tracked(endings: &[&str]) -> Vec<String> {
    let output = Command::new("git")
        .args(["ls-files"])
        .current_dir(root())
        .output();
    let output = output.unwrap_or_else(|error| panic!("cannot run git ({error}): install the package git"));
    assert!(
        output.status.success(),
        "git ls-files: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let files: Vec<String> = String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter(|file| endings.iter().any(|ending| file.ends_with(ending)))
        .filter(|file| root().join(file).exists())
        .map(str::to_owned)
        .collect();
    assert!(!files.is_empty(), "git tracks no file that ends in {endings:?}");
    files
}

fn read(file: &str) -> String {
    std::fs::read_to_string(root().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

#[test]
fn source_files_are_short_enough_to_review_whole() {
    for file in tracked(&[".rs"]) {
        let text = read(&file);
        let lines = text.lines().count();
        assert!(lines <= LINES_MAX, "{file} has {lines} lines; split it");
        for (number, line) in (1..).zip(text.lines()) {
            let columns = line.chars().count();
            assert!(columns <= COLUMNS_MAX, "{file}:{number} has {columns} columns");
        }
    }
}

#[test]
fn unsafe_code_stays_in_known_files() {
    for file in tracked(&[".rs"]) {
        let found = read(&file).lines().any(|line| {
            let code = line.split("//").next().unwrap_or_default();
            ["unsafe {", "unsafe fn", "unsafe impl", "unsafe trait"]
                .iter()
                .any(|word| code.contains(word))
        });
        if file != "tests/tests/tidy.rs" {
            assert!(
                !found || UNSAFE.contains(&file.as_str()),
                "{file} has unsafe code and is not on the list"
            );
        }
    }
}

#[test]
fn code_has_no_marks_of_unfinished_work() {
    let marks = [
        ["FIX", "ME"].concat(),
        ["TO", "DO"].concat(),
        ["todo", "!("].concat(),
        ["#[", "ignore"].concat(),
    ];
    for file in tracked(&[".rs", ".sh", "Makefile", ".toml"]) {
        let text = read(&file);
        for mark in &marks {
            assert!(!text.contains(mark.as_str()), "{file} contains {mark}");
        }
    }
}

#[test]
fn source_files_are_reached_and_say_their_purpose() {
    for file in tracked(&[".rs"]) {
        let text = read(&file);
        assert!(
            text.starts_with("//!") || text.starts_with("#!["),
            "{file} does not open with why it exists"
        );
        let path = Path::new(&file);
        let stem = path
            .file_stem()
            .and_then(|stem| stem.to_str())
            .unwrap_or_default();
        let own = ["lib", "main", "mod", "build"].contains(&stem);
        let apart = ["/tests/", "/benches/", "/bin/", "/examples/", "fuzz_targets/"];
        if own || apart.iter().any(|part| file.contains(part)) {
            continue;
        }
        // A module is named by its parent: `mod.rs`, `lib.rs`, `main.rs` beside it, or `folder.rs` above.
        let folder = path.parent().unwrap_or(Path::new(""));
        let mut parents = vec![folder.with_extension("rs")];
        parents.extend(["mod.rs", "lib.rs", "main.rs"].map(|name| folder.join(name)));
        let named = parents
            .iter()
            .filter(|parent| root().join(parent).exists())
            .any(|parent| {
                read(&parent.to_string_lossy())
                    .lines()
                    .any(|line| line.trim_end().ends_with(&format!("mod {stem};")))
            });
        assert!(named, "{file} is no module of anything");
    }
}

#[test]
fn no_large_file_is_tracked() {
    for file in tracked(&[""]) {
        let bytes = std::fs::metadata(root().join(&file)).map_or(0, |meta| meta.len());
        assert!(
            bytes <= BYTES_MAX || file.ends_with("Cargo.lock"),
            "{file} has {bytes} bytes"
        );
    }
}

/// Shipped code must not contain the simulated world, the model of the ublk driver, or rules that can be broken on purpose.
#[test]
fn binary_is_built_without_test_support() {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args([
            "tree",
            "--package",
            "ringdisk",
            "--edges",
            "normal,features",
            "--offline",
        ])
        .args(["--prefix", "none"])
        .current_dir(root())
        .output()
        .unwrap_or_else(|error| panic!("cannot run cargo ({error})"));
    let tree = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && tree.contains("ringdisk-block"),
        "cargo tree: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    for line in tree.lines() {
        let serves_tests = ["ringdisk-simulator", "feature \"canary\"", "feature \"model\""];
        assert!(
            !serves_tests.iter().any(|part| line.contains(part)),
            "the binary depends on {line}"
        );
    }
}
