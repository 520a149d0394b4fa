//! `ringdisk run` where KVM is real: in an emulated guest whose processor has AMD's extensions. The machine it runs
//! boots the lab's Linux from an overlay through our own virtio-pci; QEMU's tools judge what is left.

#[path = "run/firmware.rs"]
mod firmware;

use std::path::{Path, PathBuf};
use std::time::Duration;

use lab::nested::{Nested, Size, Toolbox};
use lab::{Error, Lab, Outcome, Scratch, image};

const MIB: u64 = 1 << 20;

/// The beginning of every outer script. `run SCRIPT ARGUMENTS…` runs a machine whose console goes to `SCRIPT.log`.
const OUTER: &str = include_str!("../guest/run/functions.sh");

/// Runs `script` in the outer guest, with `inner` to be run by machines. Gives what was said, and the outer guest's
/// disk as a raw image with an ext4 file system.
fn nested(
    lab: &Lab,
    scratch: &Scratch,
    inner: &[(&str, &str)],
    script: &str,
) -> Result<(Outcome, PathBuf), Error> {
    let toolbox = Toolbox::new(lab, scratch)?;
    nested_with(lab, scratch, toolbox, inner, script)
}

/// As [`nested`], with a toolbox that holds more.
fn nested_with(
    lab: &Lab,
    scratch: &Scratch,
    mut toolbox: Toolbox,
    inner: &[(&str, &str)],
    script: &str,
) -> Result<(Outcome, PathBuf), Error> {
    for (name, script) in inner {
        toolbox = toolbox.script(lab, name, script)?;
    }
    let script = format!("{OUTER}{script}");
    let nested = Nested {
        lab,
        scratch,
        toolbox: &toolbox,
        bytes: 512 * MIB,
        script: &script,
        patience: Duration::from_secs(400),
        size: Size::default(),
    };
    nested.run()
}

/// Takes a file out of the outer guest's disk.
fn take(scratch: &Scratch, tools: &Path, name: &str) -> Result<PathBuf, Error> {
    let target = scratch.file(name);
    image::extract(tools, &format!("/{name}"), &target)?;
    Ok(target)
}

/// Returns the lines of the inner guest's console.
fn inner(outcome: &Outcome) -> Vec<&str> {
    outcome
        .lines()
        .filter_map(|line| line.strip_prefix("inner "))
        .collect()
}

/// The functions of a machine with a network interface.
const NETWORK: &str = include_str!("../guest/run/network.inner.sh");
const WORK: &str = include_str!("../guest/run/work.inner.sh");

#[test]
fn machine_on_an_overlay_works_restarts_and_powers_off() -> Result<(), Error> {
    work_twice(false, [6, 0])
}

/// While the guest works, the server is killed and followed by another, three times; after its restart the machine connects to the same
/// server again.
#[test]
fn machine_works_on_a_disk_of_vhost_user_servers_that_are_killed() -> Result<(), Error> {
    work_twice(true, [4, 2])
}

/// A machine with three disks works, restarts, works again and ends; one of them is another program's if `served`. `drivers`
/// says how many disks it was told of that io_uring carries out the I/O of, or another program.
fn work_twice(served: bool, drivers: [usize; 2]) -> Result<(), Error> {
    let lab = lab::require();
    let scratch = Scratch::new()?;
    let script = format!(
        "served={}\n{}",
        if served { "yes" } else { "no" },
        include_str!("../guest/run/work.sh")
    );
    let rounds = if served {
        "rounds=6\nnetwork=no"
    } else {
        "rounds=1\nnetwork=yes"
    };
    let inner_script = format!("{rounds}\n{NETWORK}{WORK}");
    let (outcome, tools) = nested(&lab, &scratch, &[("work", &inner_script)], &script)?;
    let said = inner(&outcome);
    let all = said.join("\n");
    let count = |wanted: &str| said.iter().filter(|line| line.contains(wanted)).count();
    assert_eq!(outcome.value("ended "), Some("0"), "{all}");
    assert_eq!(
        count("@@exit 0"),
        2,
        "it worked, and again after its restart: {all}"
    );
    assert_eq!(count("disk data 393216 ro=0 serial=DATA"), 2, "{all}");
    assert_eq!(count("disk frozen 32768 ro=1 serial="), 2, "{all}");
    let sevens = scratch.file("sevens");
    std::fs::write(&sevens, [7; 4096]).map_err(|source| Error::File {
        action: "write",
        path: sevens.clone(),
        source,
    })?;
    assert_eq!(count(&format!("frozen {}", image::sha256(&sevens)?)), 1, "{all}");
    assert_eq!(count("a read-only disk was written"), 0, "{all}");
    assert_eq!(count(": OK"), 3, "{all}");
    assert_eq!(count("trimmed "), 1, "{all}");
    let busy = said
        .iter()
        .filter_map(|line| line.strip_prefix("interrupts ")?.parse::<u64>().ok());
    assert_eq!(
        busy.filter(|&count| count > 0).count(),
        2,
        "both queues were at work: {all}"
    );

    if !served {
        let offered = outcome.value("offered ").expect("bytes to fetch");
        assert_eq!(
            count(&format!("fetched {offered}")),
            2,
            "before the restart and after it: {all}"
        );
        assert_eq!(outcome.value("came "), Some(offered), "{all}");
        let random = said
            .iter()
            .filter_map(|line| line.strip_prefix("random ")?.trim().parse().ok());
        let random: Vec<u64> = random.collect();
        assert!(
            random.len() == 2 && random.iter().all(|&bytes| bytes > 65_000),
            "random bytes cannot be compressed: {all}"
        );
        assert_eq!(count("address 52:54:00:12:34:56"), 2, "{all}");
        let others = outcome.lines().collect::<Vec<_>>();
        assert!(
            others.contains(&"gone tap0"),
            "the machine had made it: {others:?}"
        );
    }
    if served {
        assert_eq!(outcome.value("served "), Some("0"), "{all}");
        let again = outcome
            .lines()
            .filter(|line| line.contains("reconnected to the vhost-user backend"));
        assert_eq!(again.count(), 3, "{all}");
    }
    // Three disks, twice.
    let lines = || outcome.lines().filter(|line| line.contains("plugged in"));
    let told_driver = ["io_uring", "vhost-user"].map(|driver| {
        let told = format!("driver=\"{driver}\"");
        lines().filter(|line| line.contains(&told)).count()
    });
    assert_eq!(
        told_driver,
        drivers,
        "what carries out the I/O of each disk is told: {:?}",
        outcome.lines().collect::<Vec<_>>()
    );

    // Kicks and interrupts go past the machine: what comes to it is set-up, however much the disks did.
    let exits: Vec<u64> = outcome
        .lines()
        .filter_map(|line| line.split("memory: ").nth(1)?.split(',').next()?.parse().ok())
        .collect();
    assert_eq!(exits.len(), 2, "{:?}", outcome.lines().collect::<Vec<_>>());
    assert!(
        exits.iter().all(|&count| count < 1000),
        "{exits:?} accesses to registers"
    );

    let data = take(&scratch, &tools, "data.qcow2")?;
    // A server that is killed may leave leaks.
    if served {
        image::check_sound(&data)?;
    } else {
        image::check_flawless(&data)?;
    }
    let raw = data.with_extension("raw");
    image::convert(&data, &raw, "raw")?;
    let guests = said
        .iter()
        .find_map(|line| line.strip_prefix("data ")?.split(' ').next());
    assert_eq!(
        guests,
        Some(image::sha256(&raw)?.as_str()),
        "QEMU reads what the guest read"
    );
    Ok(())
}

const LOAD: &str = include_str!("../guest/run/killed_machine.inner.sh");

#[test]
fn machine_killed_under_load_leaves_bootable_images() -> Result<(), Error> {
    let lab = lab::require();
    let scratch = Scratch::new()?;
    let script = include_str!("../guest/run/killed_machine.sh");
    let (outcome, tools) = nested(&lab, &scratch, &[("load", LOAD)], script)?;
    let all = inner(&outcome).join("\n");
    assert_eq!(outcome.value("ended "), Some("0"), "{all}");
    assert!(all.contains("/mnt/kept: OK") && all.contains("@@exit 0"), "{all}");
    let errors: Vec<_> = outcome
        .lines()
        .filter(|line| line.starts_with("check ") && line.contains("ERROR"))
        .collect();
    assert!(errors.is_empty(), "{errors:?}");
    image::check_sound(&take(&scratch, &tools, "data.qcow2")?)?;
    Ok(())
}

/// Counts in the first sector, and says so when the disk has answered; until the disk has grown.
const COUNT: &str = include_str!("../guest/run/paused.inner.sh");

#[test]
fn disk_in_use_has_snapshots_is_complete_when_paused_and_grows() -> Result<(), Error> {
    let lab = lab::require();
    let scratch = Scratch::new()?;
    let script = include_str!("../guest/run/paused.sh");
    let inner_script = format!("{NETWORK}{COUNT}");
    let (outcome, tools) = nested(&lab, &scratch, &[("count", &inner_script)], script)?;
    let all = outcome.lines().collect::<Vec<_>>().join("\n");
    let value = |key: &str| outcome.value(key).unwrap_or_else(|| panic!("no {key:?}: {all}"));
    assert_eq!(value("ended "), "0", "{all}");
    assert!(value("before ").contains(r#""state":"running""#), "{all}");
    assert!(value("paused ").contains(r#""state":"paused""#), "{all}");
    assert_eq!(
        value("still "),
        "yes",
        "nothing is written while it is paused: {all}"
    );
    let network = r#""networks":[{"address":"0000:00:1f.0","mac":"52:54:00:12:34:56","tap":"tap0"}]"#;
    assert!(value("before ").contains(network), "{all}");
    assert!(all.contains("heard before"), "{all}");
    assert!(
        all.contains(
            "inner seed #cloud-config\ninner seed hostname: paused\ninner seed instance-id: ringdisk-"
        ),
        "{all}"
    );
    assert_eq!(
        value("silent "),
        "paused",
        "nothing comes to a paused machine: {all}"
    );
    assert_eq!(value("heard "), "again", "{all}");
    assert!(value("unknown ").contains("dance"), "{all}");
    assert!(
        value("nodisk ").contains("there is no disk `nodisk`; there are: root.qcow2, data.qcow2, cloud-init"),
        "{all}"
    );
    assert!(
        value("smaller ").contains("cannot resize disk data.qcow2 to 1048576 bytes"),
        "{all}"
    );
    assert!(value("grown ").contains("268435456"), "{all}");
    assert!(
        all.contains("inner size 393216 524288"),
        "the guest has seen it: {all}"
    );
    assert!(all.contains("inner behind the old end 0"), "{all}");
    assert!(all.contains("inner button pressed"), "{all}");

    assert!(value("first ").contains(r#""snapshot":"1""#), "{all}");
    assert!(value("second ").contains(r#""snapshot":"2""#), "{all}");
    assert!(value("deleted ").contains(r#""ok":true"#), "{all}");
    let listed = value("listed ");
    assert!(
        listed.contains(r#""name":"live""#) && !listed.contains("gone"),
        "{all}"
    );
    assert!(
        value("taken ").contains("there is a snapshot \"live\" already, with id=2"),
        "{all}"
    );
    assert!(value("unforced ").contains("the disk may be in use"), "{all}");

    let copy = take(&scratch, &tools, "copy.qcow2")?;
    // The guest may have left a cluster that it shared with the snapshot just before: its count goes down after the next FLUSH.
    image::check_sound(&copy)?;
    let raw = copy.with_extension("raw");
    image::convert(&copy, &raw, "raw")?;
    let held = count_in(&raw)?;
    let told: u64 = value("last wrote ").parse().unwrap_or(u64::MAX);
    assert!(
        held >= told,
        "the image holds {held}, the guest was told that {told} is written"
    );
    let data = take(&scratch, &tools, "data.qcow2")?;
    image::check_flawless(&data)?;
    let raw = data.with_extension("raw");
    image::convert_snapshot(&data, "live", &raw)?;
    let (kept, told): (u64, u64) = (count_in(&raw)?, value("live wrote ").parse().unwrap_or(u64::MAX));
    assert!(
        (told..=held).contains(&kept),
        "the snapshot holds {kept}, {told} was written before it was asked for and {held} after it"
    );
    Ok(())
}

/// Returns the number in the first sector of a raw image.
fn count_in(raw: &Path) -> Result<u64, Error> {
    let bytes = std::fs::read(raw).map_err(|source| Error::File {
        action: "read",
        path: raw.to_owned(),
        source,
    })?;
    Ok(String::from_utf8_lossy(&bytes[..512])
        .trim()
        .parse()
        .unwrap_or_default())
}

/// Finds the hot-plugged disk by its serial number, and does what `say` tells the outer script that it waits for.
const HOT: &str = include_str!("../guest/run/hot_plug.inner.sh");

/// The kernel is the ELF file inside the lab's, begun by PVH; on four CPUs, in huge pages of one NUMA node.
#[test]
fn disks_are_hot_plugged_and_removed() -> Result<(), Error> {
    let lab = lab::require();
    let scratch = Scratch::new()?;
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| Error::File {
            action: "copy",
            path,
            source,
        }
    };
    let bz_image = std::fs::read(lab.kernel()).map_err(failed(lab.kernel()))?;
    let elf = ringdisk_gen::kernel::vmlinux(&bz_image).expect("a kernel compressed with zstd");
    let vmlinux = scratch.file("vmlinux");
    std::fs::write(&vmlinux, elf).map_err(failed(&vmlinux))?;
    let toolbox = Toolbox::new(&lab, &scratch)?.file(&vmlinux)?;
    let script = include_str!("../guest/run/hot_plug.sh");
    let scripts = [("hot", HOT), ("few", "")];
    let (outcome, tools) = nested_with(&lab, &scratch, toolbox, &scripts, script)?;
    let all = outcome.lines().collect::<Vec<_>>().join("\n");
    let value = |key: &str| outcome.value(key).unwrap_or_else(|| panic!("no {key:?}: {all}"));
    let has = |wanted: &str| assert!(all.contains(wanted), "no {wanted:?}: {all}");
    has("inner @@exit 0");
    assert_eq!(value("ended "), "0", "{all}");
    has("missing ringdisk: ");
    has("few ringdisk: cannot allocate 536870912 bytes of guest memory in huge pages of 2097152 bytes");
    for wanted in [
        "pages before 256",
        "pages while 0",
        "pages after 256",
        "inner cpus 4",
        "twice ringdisk: disk data.qcow2 has the image data.qcow2 already; expected readonly=on or overlay=temporary for both",
        "id ringdisk: a disk has the id `data.qcow2` already",
        "queues ringdisk: disk hot.qcow2 has num_queues=5 for 4 CPUs",
        "corrupt ringdisk: zeros does not start with the QCOW2 magic",
        "nodisk ringdisk: there is no disk `hot`; there are: root.qcow2, data.qcow2",
        "again ringdisk: a disk has the id `hot` already",
        "paused ringdisk: the guest is paused; disk hot is removed after `resume`",
        "unlocked yes",
        "inner let go",
        "inner the load has failed",
        "nobody ringdisk: ",
        "far-twice ringdisk: a disk has the id `far` already",
        "inner far vdd of 2 queues",
        r#"far-removed {"id":"far","ok":true}"#,
        "served 0",
    ] {
        has(wanted);
    }
    assert!(!value("untouched ").contains("hot"), "{all}");
    let places = ["inner found ", "inner back "].map(|key| value(key).split(' ').nth(2));
    assert_eq!(places, [Some("0000:00:03.0"); 2], "{all}");
    assert!(value("asked ").contains(r#""removing":true"#), "{all}");
    assert!(!value("without ").contains("hot"), "{all}");
    assert!(value("far-with ").contains(r#""io":"vhost-user""#), "{all}");
    assert!(!value("far-without ").contains("far"), "{all}");
    let added = outcome.lines().filter(|line| line.starts_with("far-added "));
    let added = added.filter(|line| line.contains(r#""ok":true"#));
    assert_eq!(added.count(), 2, "{all}");
    has("inner grown 262144 393216");
    let checks: Vec<_> = outcome
        .lines()
        .filter(|line| line.starts_with("check "))
        .collect();
    assert!(
        checks.len() >= 3 && checks.iter().all(|line| !line.contains("ERROR")),
        "{checks:?}"
    );
    let sums = inner(&outcome)
        .iter()
        .filter(|line| line.ends_with(": OK"))
        .count();
    assert_eq!(sums, 6, "before and after the restart: {all}");
    has("inner after the restart");
    has("data 0");
    for name in ["hot.qcow2", "data.qcow2", "far.qcow2"] {
        image::check_flawless(&take(&scratch, &tools, name)?)?;
    }
    Ok(())
}
