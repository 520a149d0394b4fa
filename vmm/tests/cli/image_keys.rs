//! Encrypted images: `ringdisk image create -o encrypt.format=luks` and `ringdisk image key`, beside QEMU's tools.

use serde_json::Value;

use crate::world::{Ended, World};

const FAST: &str = "encrypt.format=luks,encrypt.iter-time=1";
const SIZE: &str = "4M";

/// A directory with the secrets `one` and `two`, and the image `a.qcow2` that `one` opens.
fn world(options: &str) -> World {
    let world = World::new();
    for secret in ["one", "two"] {
        std::fs::write(world.path(secret), secret).expect("a secret");
    }
    let made = world.ringdisk(&[
        "image",
        "create",
        "-o",
        options,
        "--secret-file",
        "one",
        "a.qcow2",
        SIZE,
    ]);
    let line = made.success();
    assert!(
        line.starts_with("Formatting 'a.qcow2', fmt=qcow2 encrypt.format=luks encrypt."),
        "{line}"
    );
    world
}

/// Runs a command of `qemu-io` on the image, with a secret file.
fn qemu_io(world: &World, secret: &str, command: &str) -> Ended {
    let object = format!("secret,id=key,file={secret}");
    let image = "driver=qcow2,encrypt.key-secret=key,file.filename=a.qcow2";
    world.qemu(
        "qemu-io",
        &["--object", &object, "--image-opts", image, "-c", command],
    )
}

fn assert_opens(world: &World, secret: &str, opens: bool) {
    let ended = qemu_io(world, secret, "read 0 512");
    assert_eq!(ended.code == Some(0), opens, "{secret}: {ended:?}");
    assert!(opens || ended.stderr.contains("Invalid password"), "{ended:?}");
}

fn key(world: &World, arguments: &[&str]) -> Ended {
    world.ringdisk(&[&["image", "key"], arguments].concat())
}

#[test]
fn encrypted_images_are_ones_that_qemu_reads_writes_and_checks() {
    for more in [
        "",
        ",encrypt.cipher-alg=aes-128,encrypt.hash-alg=sha1,cluster_size=4k",
        ",encrypt.hash-alg=sha512,compat=0.10",
        ",extended_l2=on",
    ] {
        let world = world(&format!("{FAST}{more}"));
        qemu_io(&world, "one", "write -P 5 1M 1M").success();
        qemu_io(&world, "one", "read -P 5 1M 1M").success();
        assert_opens(&world, "two", false);
        let image = "driver=qcow2,encrypt.key-secret=key,file.filename=a.qcow2";
        let object = "secret,id=key,file=one";
        world
            .qemu("qemu-img", &["check", "--object", object, "--image-opts", image])
            .success();
        world.ringdisk(&["image", "check", "a.qcow2"]).success();

        let json = |text: String| -> Value { serde_json::from_str(&text).expect("JSON") };
        let ours = json(world.ringdisk(&["image", "info", "--json", "a.qcow2"]).success());
        let theirs = json(
            world
                .qemu("qemu-img", &["info", "--output=json", "a.qcow2"])
                .success(),
        );
        let encrypt = |info: &Value| info["format-specific"]["data"]["encrypt"].clone();
        assert!(encrypt(&theirs).is_object(), "{theirs}");
        assert_eq!(encrypt(&ours), encrypt(&theirs), "{more}");
        let listed = json(key(&world, &["list", "--json", "a.qcow2"]).success());
        assert_eq!(listed["slots"], encrypt(&theirs)["slots"]);
    }
}

#[test]
fn info_of_an_encrypted_image_has_the_lines_of_qemu_img() {
    let world = world(FAST);
    let ours = world.ringdisk(&["image", "info", "a.qcow2"]).success();
    let theirs = world.qemu("qemu-img", &["info", "a.qcow2"]).success();
    let lines = |text: &str| -> Vec<String> {
        let from = text.lines().skip_while(|line| line.trim() != "encrypt:");
        let to = from.take_while(|line| {
            !line.contains("corrupt:") && !line.contains("Ringdisk") && !line.contains("extended l2")
        });
        to.map(str::to_owned).collect()
    };
    let (ours, theirs) = (lines(&ours), lines(&theirs));
    assert!(ours.len() > 25, "{ours:?}");
    assert_eq!(ours, theirs);
}

#[test]
fn added_and_removed_secrets_are_qemus_too() {
    let world = world(FAST);
    let add = [
        "add",
        "--secret-file",
        "one",
        "--new-secret-file",
        "two",
        "--iter-time",
        "1",
        "a.qcow2",
    ];
    assert_eq!(key(&world, &add).success(), "1\n");
    assert_opens(&world, "one", true);
    assert_opens(&world, "two", true);
    let list = key(&world, &["list", "a.qcow2"]).success();
    assert!(
        list.starts_with("aes-256 xts-plain64, sha256\nslot 0: "),
        "{list}"
    );
    assert_eq!(list.lines().count(), 3, "{list}");
    let again = [&add[..7], &["--slot", "1", "a.qcow2"]].concat();
    let line = key(&world, &again).refused(1);
    assert!(line.contains("a.qcow2: key slot 1 is in use"), "{line}");

    assert_eq!(
        key(&world, &["remove", "--secret-file", "one", "a.qcow2"]).success(),
        "0\n"
    );
    assert_opens(&world, "one", false);
    assert_opens(&world, "two", true);
    let line = key(&world, &["remove", "--secret-file", "two", "a.qcow2"]).refused(1);
    assert!(line.contains("the only one in use"), "{line}");
    let line = key(&world, &["remove", "--secret-file", "one", "a.qcow2"]).refused(1);
    assert!(line.contains("opens none of the key slots"), "{line}");
    assert_opens(&world, "two", true);
}

#[test]
fn lost_secret_is_removed_by_its_slot() {
    let world = world(FAST);
    let add = [
        "add",
        "--secret-file",
        "one",
        "--new-secret-file",
        "two",
        "--iter-time",
        "1",
        "--slot",
        "5",
        "a.qcow2",
    ];
    assert_eq!(key(&world, &add).success(), "5\n");
    let own = key(
        &world,
        &["remove", "--secret-file", "one", "--slot", "0", "a.qcow2"],
    )
    .refused(1);
    assert!(own.contains("opens no key slot but 0"), "{own}");
    assert_eq!(
        key(
            &world,
            &["remove", "--secret-file", "one", "--slot", "5", "a.qcow2"]
        )
        .success(),
        "5\n"
    );
    assert_opens(&world, "one", true);
    assert_opens(&world, "two", false);
}

/// As for QEMU, and so that a secret means the same to both.
#[test]
fn newline_at_the_end_of_a_secret_file_counts() {
    let world = world(FAST);
    std::fs::write(world.path("line"), "one\n").expect("a secret");
    assert_opens(&world, "line", false);
    let add = [
        "add",
        "--secret-file",
        "line",
        "--new-secret-file",
        "two",
        "--iter-time",
        "1",
        "a.qcow2",
    ];
    let line = key(&world, &add).refused(1);
    assert!(
        line.contains("a newline at the end of a secret file counts"),
        "{line}"
    );
    let add = [
        "add",
        "--secret-file",
        "one",
        "--new-secret-file",
        "line",
        "--iter-time",
        "1",
        "a.qcow2",
    ];
    key(&world, &add).success();
    assert_opens(&world, "line", true);
}

#[test]
fn secret_may_come_through_a_descriptor() {
    let world = world(FAST);
    let mut command = world.ringdisk_command();
    let one = std::fs::File::open(world.path("one")).expect("a secret");
    let add = [
        "image",
        "key",
        "add",
        "--secret-file",
        "/dev/fd/0",
        "--new-secret-file",
        "two",
        "--iter-time",
        "1",
    ];
    let ended = command
        .args(add)
        .arg("a.qcow2")
        .stdin(one)
        .output()
        .expect("run ringdisk");
    Ended::from(ended).success();
    assert_opens(&world, "two", true);
}

#[test]
fn keys_of_an_image_in_use_are_left_alone() {
    use std::io::{BufRead, BufReader, Write};
    use std::process::{Command, Stdio};

    let world = world(FAST);
    let before = world.bytes("a.qcow2");
    let image = "driver=qcow2,encrypt.key-secret=key,file.filename=a.qcow2";
    let mut user = Command::new("qemu-io")
        .args(["--object", "secret,id=key,file=one", "--image-opts", image])
        .current_dir(world.path(""))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("qemu-io");
    // Its answer says that it has the image open.
    let stdin = user.stdin.as_mut().expect("its input");
    stdin.write_all(b"length\n").expect("a command");
    let mut answer = String::new();
    let mut output = BufReader::new(user.stdout.take().expect("its output"));
    while !answer.contains("4 MiB") {
        answer.clear();
        assert_ne!(output.read_line(&mut answer).expect("an answer"), 0, "it ended");
    }
    let add = [
        "add",
        "--secret-file",
        "one",
        "--new-secret-file",
        "two",
        "--iter-time",
        "1",
        "a.qcow2",
    ];
    let line = key(&world, &add).refused(1);
    assert!(line.contains("lock") || line.contains("in use"), "{line}");
    drop(user.stdin.take());
    user.wait().expect("its end");
    assert!(
        world.bytes("a.qcow2")[..592] == before[..592],
        "the header was changed"
    );
    key(&world, &add).success();
}

#[test]
fn image_without_key_slots_is_refused_by_name() {
    let world = world(FAST);
    world.qemu_create("plain.qcow2", "compat=1.1", "1M");
    for arguments in [
        &["list", "plain.qcow2"][..],
        &[
            "add",
            "--secret-file",
            "one",
            "--new-secret-file",
            "two",
            "plain.qcow2",
        ],
        &["remove", "--secret-file", "one", "plain.qcow2"],
    ] {
        let line = key(&world, arguments).refused(1);
        assert!(line.contains("plain.qcow2: the image has no key slots"), "{line}");
    }
}

#[test]
fn refused_creation_leaves_no_file() {
    let world = world(FAST);
    std::fs::write(world.path("bytes"), [0xff, 0xfe]).expect("a secret");
    std::fs::write(world.path("empty"), b"").expect("a secret");
    for (options, secret, code, expected) in [
        (FAST, "bytes", 1, "not UTF-8"),
        (FAST, "empty", 1, "secret file empty: it is empty"),
        (FAST, "missing", 1, "secret file missing: No such file"),
        (
            "encrypt.format=luks,encrypt.iter-time=1,preallocation=full",
            "one",
            2,
            "off with encryption",
        ),
        (
            "encrypt.format=luks,encrypt.iter-time=1,data_file=d",
            "one",
            2,
            "none with encryption",
        ),
    ] {
        let made = world.ringdisk(&[
            "image",
            "create",
            "-o",
            options,
            "--secret-file",
            secret,
            "b.qcow2",
            SIZE,
        ]);
        let line = made.refused(code);
        assert!(line.contains(expected), "{line}; expected {expected}");
        assert!(!world.path("b.qcow2").exists() && !world.path("d").exists());
    }
}

/// Runs commands of `ringdisk io` on a disk.
fn io(world: &World, disk: &str, commands: &[&str]) -> Ended {
    let mut arguments = vec!["io", "--disk", disk];
    commands
        .iter()
        .for_each(|command| arguments.extend(["-c", command]));
    world.ringdisk(&arguments)
}

#[test]
fn disk_with_a_secret_file_serves_what_qemu_encrypted() {
    let world = world(FAST);
    qemu_io(&world, "one", "write -P 5 1M 1M").success();
    let disk = "path=a.qcow2,secret_file=one,num_queues=2";
    io(
        &world,
        disk,
        &["read -P 5 1M 1M", "write -P 6 1536k 300k", "flush"],
    )
    .success();
    qemu_io(&world, "one", "read -P 6 1536k 300k").success();
    // A new secret opens the same data.
    key(
        &world,
        &[
            "add",
            "--secret-file",
            "one",
            "--new-secret-file",
            "two",
            "--iter-time",
            "1",
            "a.qcow2",
        ],
    )
    .success();
    io(&world, "path=a.qcow2,secret_file=two", &["read -P 6 1536k 300k"]).success();
}

#[test]
fn wrong_missing_and_needless_secret_files_are_refused_with_the_image() {
    let world = world(FAST);
    world
        .ringdisk(&["image", "create", "plain.qcow2", "1M"])
        .success();
    for (disk, expected) in [
        (
            "path=a.qcow2",
            "a.qcow2: it is encrypted (luks), and no secret was given; use secret_file=PATH",
        ),
        (
            "path=a.qcow2,secret_file=two",
            "a.qcow2: the secret opens none of the key slots in use",
        ),
        (
            "path=plain.qcow2,secret_file=one",
            "plain.qcow2: it is not encrypted, and a secret was given",
        ),
        (
            "path=a.qcow2,secret_file=missing",
            "a.qcow2: it has no secret: secret file missing: No such file",
        ),
        (
            "path=a.qcow2,overlay=temporary",
            "a.qcow2: it is encrypted (luks), and no secret was given",
        ),
    ] {
        let line = io(&world, disk, &["read 0 512"]).refused(1);
        assert!(line.contains(expected), "{line}; expected {expected}");
    }
    let snapshot = world.ringdisk(&["image", "snapshot", "create", "a.qcow2", "before"]);
    snapshot.success();
    io(
        &world,
        "path=a.qcow2,secret_file=one,snapshot=before",
        &["read -P 0 0 1M"],
    )
    .success();
}
