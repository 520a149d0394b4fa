//! The Debian package with a real systemd: installed, used, upgraded under running servers, and removed, in a guest that has nothing of
//! ours. Not part of the suite, because it needs what builds packages: `make deb` runs it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use lab::nested::{Nested, Size, Toolbox};
use lab::{Error, Scratch};

const MIB: u64 = 1 << 20;
const SCRIPT: &str = include_str!("../guest/package.sh");

/// The packages of systemd and of what it needs that the lab's root does not have.
const SYSTEMD: [&str; 5] = [
    "systemd",
    "libsystemd-shared",
    "libapparmor1",
    "libfdisk1",
    "libip4tc2",
];

/// Runs a command in `folder`, and returns what it printed.
fn run(command: &mut Command, folder: &Path) -> String {
    let output = command
        .current_dir(folder)
        .output()
        .expect("a program that builds packages");
    assert!(
        output.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// Returns the files of a folder whose names end in `.deb`.
fn packages(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("a folder");
    let files = entries.map(|entry| entry.expect("an entry").path());
    files
        .filter(|file| file.extension().is_some_and(|extension| extension == "deb"))
        .collect()
}

#[test]
fn package_is_installed_used_upgraded_and_removed() -> Result<(), Error> {
    let lab = lab::require();
    let scratch = Scratch::new()?;
    let debs = scratch.file("debs");
    std::fs::create_dir(&debs).expect("a folder");
    let tree = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    run(Command::new("packaging/deb.sh").arg(&debs), &tree);
    // apt's own user may not write to the folder, and need not.
    let download = ["-q", "-o", "APT::Sandbox::User=root", "download"];
    run(Command::new("apt-get").args(download).args(SYSTEMD), &debs);

    let mut toolbox = Toolbox::new(&lab, &scratch)?;
    let found = packages(&debs);
    assert_eq!(found.len(), 1 + SYSTEMD.len(), "{found:?}");
    for file in found {
        toolbox = toolbox.file(&file)?;
    }
    let nested = Nested {
        lab: &lab,
        scratch: &scratch,
        toolbox: &toolbox,
        bytes: 256 * MIB,
        script: SCRIPT,
        patience: Duration::from_secs(600),
        size: Size::default(),
    };
    let (outcome, _) = nested.run()?;
    let all = outcome.lines().collect::<Vec<_>>().join("\n");
    let has = |wanted: &str| {
        assert!(
            outcome.lines().any(|line| line.trim_end() == wanted.trim_end()),
            "no {wanted:?}: {all}"
        )
    };
    has(&format!("version ringdisk {}", env!("CARGO_PKG_VERSION")));
    let pages: u32 = outcome
        .value("pages ")
        .and_then(|count| count.parse().ok())
        .unwrap_or(0);
    assert!(pages > 30, "{all}");
    assert!(
        outcome.value("manual ").is_some_and(|count| count != "0"),
        "{all}"
    );
    has("completed vhost-user");
    for unit in [
        "ringdisk-vhost-user@vm",
        "ringdisk-ublk@data",
        "ringdisk-devices@lab",
    ] {
        for ended in ["started", "reloaded", "reloaded again", "stopped"] {
            has(&format!("{ended} {unit} 0"));
        }
        for done in ["restarted", "handed over", "handed over again"] {
            has(&format!("{done} {unit}"));
        }
        has(&format!("state {unit} success inactive "));
    }
    for done in ["started", "reloaded", "stopped"] {
        has(&format!("{done} ringdisk-serve@vms 0"));
    }
    for said in ["followed", "refused", "gone", "flawless c", "flawless d"] {
        has(said);
    }
    has("socket 660");
    let controlled = outcome.value("controlled ").unwrap_or_default();
    assert!(
        controlled.starts_with("0 ") && controlled.contains(r#""protocol":1"#),
        "{all}"
    );
    has("written 0");
    for (what, places) in [
        ("added ", ["/dev/ublkb0"].as_slice()),
        ("both ", &["/dev/ublkb0", "/dev/ublkb3"]),
        ("grown devices ", &[]),
        ("devices ", &["/dev/ublkb7", "/dev/ublkb8"]),
    ] {
        let said = outcome.value(what).unwrap_or_default();
        let has_all = places.iter().all(|place| said.contains(place));
        assert!(said.starts_with("0 ") && has_all, "{what}{said}: {all}");
    }
    has("upgraded under running servers");
    has("flawless a");
    has("flawless b");
    for said in ["refused devices", "flawless e", "flawless f", "flawless g"] {
        has(said);
    }
    let left: Vec<&str> = outcome.lines().filter(|line| line.starts_with("left ")).collect();
    // What an administrator has written.
    let known = ["left /etc/ringdisk", "left /run/ringdisk"];
    assert!(left.iter().all(|line| known.contains(line)), "{left:?}");
    assert_eq!(outcome.complaints(), Vec::<&str>::new(), "{}", outcome.console());
    Ok(())
}
