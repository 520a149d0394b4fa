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

/// The units, each with the command that it starts, and the one that a reload runs.
const UNITS: [(&str, &str, &str); 4] = [
    ("ringdisk-devices", "serve", "serve"),
    ("ringdisk-serve", "serve", "serve"),
    ("ringdisk-ublk", "ublk add", "ublk upgrade"),
    ("ringdisk-vhost-user", "vhost-user", "vhost-user"),
];

#[test]
fn unit_files_pass_systemd_analyze() {
    for (name, command, _) in UNITS {
        judge_unit(name, command);
    }
}

fn judge_unit(name: &str, command: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let unit = packaging(&format!("{name}@.service"));
    let here = unit.replace("/usr/bin/ringdisk", env!("CARGO_BIN_EXE_ringdisk"));
    assert_ne!(unit, here, "it starts the installed binary");
    let verify = |text: &str| {
        fs::write(folder.path().join(format!("{name}@.service")), text).expect("a file");
        let output = Command::new("systemd-analyze")
            .args(["verify", "--man=no", "--recursive-errors=no"])
            .arg(folder.path().join(format!("{name}@data.service")))
            .output()
            .expect("systemd-analyze is needed by this test (tests/setup.sh installs systemd)");
        // It warns, with success, of settings that it does not know.
        (
            output.status.success(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        )
    };
    let (fine, said) = verify(&here);
    assert!(fine && !said.contains(name), "{said}");
    // And would have said so.
    let (_, said) = verify(&here.replace("TimeoutStopSec=", "TimeoutStopSeconds="));
    assert!(said.contains("TimeoutStopSeconds"), "{said}");
    let (fine, said) = verify(&here.replace(
        &format!(" {command}"),
        &format!(" {command}\nExecStart=/no/such/program"),
    ));
    assert!(!fine || said.contains("/no/such/program"), "{said}");
}

/// The options in the unit exist, and so do the commands in the rules.
#[test]
fn unit_and_rules_use_existing_commands() {
    let world = World::new();
    for (name, start, reload) in UNITS {
        let unit = packaging(&format!("{name}@.service"));
        for (setting, command) in [("ExecStart", start), ("ExecReload", reload)] {
            let words: Vec<&str> = command.split(' ').chain(["--help"]).collect();
            let help = world.ringdisk(&words).success();
            let line = format!("{setting}=/usr/bin/ringdisk {command} ");
            let options = unit.lines().find_map(|found| found.strip_prefix(&line));
            let options = options.unwrap_or_else(|| panic!("no {line}"));
            for option in options.split(' ').filter(|word| word.starts_with("--")) {
                assert!(help.contains(option), "{option}");
            }
        }
        // The server that comes with a takeover is not the process that systemd started.
        let hands_over = name != "ringdisk-serve";
        assert_eq!(unit.contains("\nNotifyAccess=all\n"), hands_over, "{name}");
    }
    // Its number is the manager's to fill in.
    assert!(packaging("ringdisk-ublk@.service").contains(" --server $MAINPID "));
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
