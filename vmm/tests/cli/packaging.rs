//! Files that packages install beside the binary, as the programs that read them judge them.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::world::World;

fn packaging(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../packaging")
        .join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn unit_file_passes_systemd_analyze() {
    let folder = tempfile::tempdir().expect("a folder");
    let unit = packaging("ringdisk-ublk@.service");
    let here = unit.replace("/usr/bin/ringdisk", env!("CARGO_BIN_EXE_ringdisk"));
    assert_ne!(unit, here, "it starts the installed binary");
    let verify = |text: &str| {
        fs::write(folder.path().join("ringdisk-ublk@.service"), text).expect("a file");
        let output = Command::new("systemd-analyze")
            .args(["verify", "--man=no", "--recursive-errors=no"])
            .arg(folder.path().join("ringdisk-ublk@data.service"))
            .output()
            .expect("systemd-analyze is needed by this test (tests/setup.sh installs systemd)");
        // It warns, with success, of settings that it does not know.
        (
            output.status.success(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        )
    };
    let (fine, said) = verify(&here);
    assert!(fine && !said.contains("ringdisk-ublk"), "{said}");
    // And would have said so.
    let (_, said) = verify(&here.replace("TimeoutStopSec=150s", "TimeoutStopSeconds=150s"));
    assert!(said.contains("TimeoutStopSeconds"), "{said}");
    let (fine, said) = verify(&here.replace(" ublk add", " ublk add\nExecStart=/no/such/program"));
    assert!(!fine || said.contains("/no/such/program"), "{said}");
}

/// The options in the unit exist, and so do the commands in the rules.
#[test]
fn unit_and_rules_use_existing_commands() {
    let world = World::new();
    let unit = packaging("ringdisk-ublk@.service");
    for (setting, command) in [("ExecStart", "add"), ("ExecReload", "upgrade")] {
        let help = world.ringdisk(&["ublk", command, "--help"]).success();
        let line = format!("{setting}=/usr/bin/ringdisk ublk {command} ");
        let options = unit.lines().find_map(|found| found.strip_prefix(&line));
        let options = options.unwrap_or_else(|| panic!("no {line}"));
        for option in options.split(' ').filter(|word| word.starts_with("--")) {
            assert!(help.contains(option), "{option}");
        }
    }
    // The server that comes is not the process that systemd started, and its number is the manager's to fill in.
    assert!(unit.contains("\nNotifyAccess=all\n") && unit.contains(" --server $MAINPID "));
    let rule = packaging("60-ringdisk.rules");
    assert!(rule.contains("/usr/bin/ringdisk ublk udev %k"), "{rule}");
    let rule = packaging("59-ringdisk.rules");
    assert!(
        rule.contains("/usr/bin/ringdisk ublk udev --contents %k"),
        "{rule}"
    );
    // Of a device that nobody remembers it says nothing.
    assert_eq!(world.ringdisk(&["ublk", "udev", "ublkb1048575"]).success(), "");
    let contents = ["ublk", "udev", "--contents", "ublkb1048575"];
    assert_eq!(world.ringdisk(&contents).success(), "");
}
