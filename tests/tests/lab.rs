//! The lab proves itself on somebody else's server, so that a failure elsewhere is not its own.

use std::process::Command;
use std::time::Duration;

use lab::{Guest, Kernel, Scratch, Server, image};

/// A guest writes, restarts, finds its file, and powers off; the image is flawless.
#[test]
fn guest_boots_and_reboots_on_qemu_storage_daemon() -> Result<(), lab::Error> {
    let lab = lab::require();
    let scratch = Scratch::new()?;
    let root = scratch.file("root.qcow2");
    image::overlay(&root, lab.base())?;
    let server = Server::storage_daemon(&scratch.file("root.sock"), &root, 2)?;

    let outcome = Guest::new(&lab)
        .disk("root", server.socket(), 2)
        .script(
            "uname -r
             test -b /dev/lab/root
             ls /sys/block/$(basename $(readlink /dev/lab/root))/mq | wc -l | sed 's/^/queues /'
             if [ -e /root/greeting ]; then cat /root/greeting; exit; fi
             echo hello from the first boot >/root/greeting
             lab-reboot",
        )
        .run(&scratch, "guest")?;

    assert_eq!(outcome.boots(), 2);
    assert_eq!(outcome.lines().next(), Some(lab.kernel_version()));
    assert_eq!(outcome.value("queues "), Some("2"));
    assert_eq!(outcome.value("hello "), Some("from the first boot"));
    assert_eq!(outcome.complaints(), Vec::<&str>::new(), "{}", outcome.console());
    server.stop()?;
    image::check_flawless(&root)
}

/// Both kernels boot the same root, and have the drivers that make a block device of a program.
#[test]
fn both_kernels_have_the_drivers_of_the_hosts_disks() -> Result<(), lab::Error> {
    for (kernel, major) in [(Kernel::V6_12, "6."), (Kernel::V7, "7.")] {
        let Some(lab) = lab::require_kernel(kernel) else {
            continue;
        };
        assert!(
            lab.kernel_version().starts_with(major),
            "{}",
            lab.kernel_version()
        );
        let scratch = Scratch::new()?;
        let root = scratch.file("root.qcow2");
        image::overlay(&root, lab.base())?;
        let server = Server::storage_daemon(&scratch.file("root.sock"), &root, 1)?;
        let outcome = Guest::new(&lab)
            .disk("root", server.socket(), 1)
            .script(
                "uname -r
                 modprobe -a ublk_drv nbd xfs dm-log-writes
                 test -c /dev/ublk-control
                 test -b /dev/nbd0
                 grep -w xfs /proc/filesystems >/dev/null && echo all there",
            )
            .run(&scratch, "guest")?;
        assert_eq!(outcome.lines().next(), Some(lab.kernel_version()));
        assert_eq!(outcome.value("all "), Some("there"));
        assert_eq!(outcome.complaints(), Vec::<&str>::new(), "{}", outcome.console());
        server.stop()?;
        image::check_flawless(&root)?;
    }
    Ok(())
}

/// A test must be able to fail: the script's status, the line it waits for, and an early end all come back.
#[test]
fn failed_script_is_an_error_with_its_output() -> Result<(), lab::Error> {
    let lab = lab::require();
    let scratch = Scratch::new()?;
    let root = scratch.file("root.qcow2");
    image::overlay(&root, lab.base())?;
    let server = Server::storage_daemon(&scratch.file("root.sock"), &root, 1)?;

    let mut guest = Guest::new(&lab)
        .disk("root", server.socket(), 1)
        .script("echo half done\ncat /no/such/file\necho not reached")
        .boot(&scratch, "guest")?;
    guest.wait_for(|line| line == "half done")?;
    let message = guest.finish().expect_err("the script failed").to_string();

    assert!(message.contains("script ended with 1"), "{message}");
    assert!(message.contains("/no/such/file"), "{message}");
    assert!(!message.contains("not reached"), "{message}");
    server.stop()
}

/// Only a stopped emulator is begun again: a guest with a hung program says itself which one hangs, and where.
#[test]
fn heartbeat_tells_a_hung_program_from_a_stopped_emulator() -> Result<(), lab::Error> {
    let lab = lab::require();
    let scratch = Scratch::new()?;
    let root = scratch.file("root.qcow2");
    image::overlay(&root, lab.base())?;
    let server = Server::storage_daemon(&scratch.file("root.sock"), &root, 1)?;
    let mut guest = Guest::new(&lab)
        .heartbeat()
        .disk("root", server.socket(), 1)
        .script("mkfifo /tmp/nobody\necho ready\ncat /tmp/nobody")
        .boot(&scratch, "guest")?;
    guest.wait_for(|line| line == "ready")?;
    let patience = Duration::from_secs(60);
    let deadline = std::time::Instant::now() + patience;
    while !guest.ticks(patience) {
        assert!(std::time::Instant::now() < deadline, "it never ticked");
        std::thread::sleep(Duration::from_millis(100));
    }
    let evidence = guest.evidence();
    assert!(
        evidence.contains("sh -eu /run/lab/script") && evidence.contains("do_wait"),
        "the shell waits for what hangs: {evidence}"
    );
    assert!(evidence.ends_with("evidence ends"), "{evidence}");

    let stop = Command::new("kill")
        .args(["-STOP", &guest.id().to_string()])
        .status();
    assert!(stop.expect("kill").success());
    std::thread::sleep(Duration::from_secs(3));
    assert!(!guest.ticks(Duration::from_secs(2)), "its emulator is stopped");
    guest.kill()?;
    server.kill()
}
