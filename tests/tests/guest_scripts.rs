//! The scripts of guests, `tests/guest/**`, and those of this folder: each is in use, and its shells can read it.

use std::path::{Path, PathBuf};
use std::process::Command;

use lab::Scratch;

/// The shells of a guest, `/bin/sh` of its root and of its initramfs, with the package that brings each.
const GUEST: [(&[&str], &str); 2] = [(&["dash"], "dash"), (&["busybox", "sh"], "busybox-static")];
const HOST: [(&[&str], &str); 1] = [(&["bash"], "bash")];

/// The longest script that may be a literal in Rust, in lines.
const LITERAL_MAX: usize = 8;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The tracked files that exist below `folder`, relative to the root.
fn tracked(folder: &str) -> Vec<String> {
    let mut git = Command::new("git");
    git.args(["ls-files", "--cached", "--others", "--exclude-standard", folder]);
    let output = git.current_dir(root()).output();
    let output = output.unwrap_or_else(|error| panic!("cannot run git ({error}): install the package git"));
    assert!(output.status.success(), "{output:?}");
    let files = String::from_utf8_lossy(&output.stdout);
    files
        .lines()
        .filter(|file| root().join(file).exists())
        .map(str::to_owned)
        .collect()
}

fn scripts() -> Vec<String> {
    let files = tracked("tests/guest");
    let scripts: Vec<_> = files.into_iter().filter(|file| file.ends_with(".sh")).collect();
    assert!(scripts.len() > 30, "{scripts:?}");
    scripts
}

/// Returns what the shells complain of in the script at `path`, which they read and do not run.
fn complaints(shells: &[(&[&str], &str)], path: &Path) -> String {
    let read = |&(shell, package): &(&[&str], &str)| {
        let mut command = Command::new(shell[0]);
        command.args(&shell[1..]).arg("-n").arg(path);
        let output = command.output();
        let output =
            output.unwrap_or_else(|error| panic!("cannot run {} ({error}): install {package}", shell[0]));
        if output.status.success() {
            return String::new();
        }
        format!("{}: {}", shell[0], String::from_utf8_lossy(&output.stderr))
    };
    shells.iter().map(read).collect()
}

#[test]
fn every_script_parses_in_its_shells() {
    let guests = scripts();
    let guests = guests.iter().map(String::as_str);
    for script in guests.chain(["tests/guest/init", "tests/guest/lab-init"]) {
        assert_eq!(complaints(&GUEST, &root().join(script)), "", "{script}");
    }
    for script in tracked("tests/*.sh") {
        if !script.starts_with("tests/guest/") {
            assert_eq!(complaints(&HOST, &root().join(&script)), "", "{script}");
        }
    }
}

#[test]
fn complaints_name_a_script_error() {
    let scratch = Scratch::new().unwrap();
    let path = scratch.file("script");
    std::fs::write(&path, "for n in 1 2; do echo $n\n").unwrap();
    let said = complaints(&GUEST, &path);
    assert!(said.contains("dash: ") && said.contains("busybox: "), "{said}");
    assert!(complaints(&HOST, &path).contains("bash: "));
}

/// `include_str!` ends with a script's name.
#[test]
fn guest_scripts_are_in_use_and_described() {
    let sources: String = tracked("tests")
        .iter()
        .filter(|file| file.ends_with(".rs"))
        .map(|file| std::fs::read_to_string(root().join(file)).unwrap())
        .collect();
    for script in scripts() {
        let name = script.trim_start_matches("tests/");
        assert!(
            sources.contains(&format!("{name}\")")),
            "nothing includes {script}"
        );
        let text = std::fs::read_to_string(root().join(&script)).unwrap();
        assert!(text.starts_with("# "), "{script} does not open with what it does");
    }
}

/// The names of the functions that `text` defines.
fn functions(text: &str) -> Vec<&str> {
    let heads = text.lines().filter_map(|line| line.split_once("()"));
    heads
        .map(|(name, _)| name)
        .filter(|name| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'))
        .collect()
}

/// A shared function that calls another would call the script's.
#[test]
fn no_script_defines_a_shared_function_again() {
    let read = |file: &str| std::fs::read_to_string(root().join(file)).unwrap();
    let shared = read("tests/guest/functions.sh");
    assert!(functions(&shared).contains(&"soon"));
    for script in scripts() {
        let folder = script.rsplit_once('/').map_or("", |(folder, _)| folder);
        let family = format!("{folder}/functions.sh");
        let mut known = functions(&shared);
        let text = if root().join(&family).exists() {
            read(&family)
        } else {
            String::new()
        };
        if script != family {
            known.extend(functions(&text));
        }
        if script == "tests/guest/functions.sh" {
            continue;
        }
        for name in functions(&read(&script)) {
            assert!(!known.contains(&name), "{script} defines {name} again");
        }
    }
}

#[test]
fn no_long_script_is_a_literal_in_rust() {
    for file in tracked("tests").iter().filter(|file| file.ends_with(".rs")) {
        let text = std::fs::read_to_string(root().join(file)).unwrap();
        for literal in text.split("r#\"").skip(1) {
            let lines = literal.split("\"#").next().unwrap_or_default().lines().count();
            assert!(
                lines <= LITERAL_MAX,
                "{file} has a literal of {lines} lines: scripts are files in tests/guest"
            );
        }
    }
}
