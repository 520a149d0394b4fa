//! Rate limits through `ringdisk io`: how long a script takes.

use std::time::{Duration, Instant};

use crate::world::World;

/// Returns the time that `ringdisk io` takes for background reads of `count` times `len` bytes on four queues.
fn took(world: &World, arguments: &[&str], count: usize, len: &str) -> Duration {
    let read = format!("aio_read -q 0 {len}");
    let mut command = world.ringdisk_command();
    command.args(["io", "--queues", "4"]).args(arguments);
    for _ in 0..count {
        command.args(["-c", &read]);
    }
    let began = Instant::now();
    let output = command.output().expect("run ringdisk");
    let took = began.elapsed();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    took
}

/// Expects that work never takes less than so many seconds, and not much more. What else the machine does makes it longer
/// only, so the shortest of three counts.
fn assert_takes(seconds: f64, what: &str, work: impl Fn() -> Duration) {
    let mut all = Vec::new();
    while all.len() < 3 {
        let took = work().as_secs_f64();
        assert!(took >= 0.99 * seconds, "{what}: {took} s, expected {seconds}");
        all.push(took);
        if took < seconds + 0.8 {
            return;
        }
    }
    panic!("{what}: {all:?} s, expected {seconds}");
}

#[test]
fn rate_limits_hold_for_bytes_requests_and_groups() {
    let world = World::new();
    world.sparse_file("a.img", 1 << 20);
    let limited = "path=a.img,image_type=raw";
    // What a full bucket holds passes at once; the rest takes two seconds.
    for (limits, count, len) in [
        ("bw_size=4M,bw_refill_time=200", 4 * (4 + 40), "256k"),
        (
            "bw_size=1M,bw_refill_time=50,bw_one_time_burst=7M",
            4 * (8 + 40),
            "256k",
        ),
        ("ops_size=50,ops_refill_time=250", 50 + 400, "512"),
    ] {
        let disk = format!("{limited},{limits}");
        assert_takes(2.0, limits, || took(&world, &["--disk", &disk], count, len));
    }
    let group = ["--rate-limit-group", "id=g,ops_size=50,ops_refill_time=250"];
    let disk = format!("{limited},rate_limit_group=g");
    let arguments = [&["--disk", &disk][..], &group].concat();
    assert_takes(1.0, "a group", || took(&world, &arguments, 250, "512"));
}

#[test]
fn invalid_rate_limit_is_one_line_and_exit_code_2() {
    let world = World::new();
    for (arguments, said) in [
        (
            &["io", "--disk", "path=a,bw_size=1M"][..],
            "--disk: `bw_size` is given without `bw_refill_time`, which takes milliseconds from 1 to 4294967295",
        ),
        (
            &[
                "vhost-user",
                "--socket",
                "s",
                "--disk",
                "path=a,rate_limit_group=g",
            ],
            "--disk: `rate_limit_group=g`: there is no --rate-limit-group",
        ),
        (
            &[
                "run",
                "--kernel",
                "k",
                "--disk",
                "path=a,rate_limit_group=g",
                "--rate-limit-group",
                "id=h",
            ],
            "--rate-limit-group: `h` limits nothing; expected bw_size with bw_refill_time, or ops_size with ops_refill_time",
        ),
        (
            &[
                "io",
                "--disk",
                "path=a",
                "--rate-limit-group",
                "id=h,ops_size=1,ops_refill_time=1",
            ],
            "--rate-limit-group: no disk has `rate_limit_group=h`, so the group limits nothing",
        ),
        (
            &[
                "vhost-user",
                "--socket",
                "s",
                "--disk",
                "path=a",
                "--rate-limit-group",
                "id=h,ops_size=1,ops_refill_time=1",
            ],
            "--rate-limit-group: no disk has `rate_limit_group=h`, so the group limits nothing",
        ),
    ] {
        assert_eq!(world.ringdisk(arguments).refused(2), said);
    }
}
