//! An idle server is not I/O wait: an operator's alarms on `/proc/pressure/io` and `iowait` stay silent.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::client::{BLOCK, Client};
use crate::server::World;
use ringdisk_gen::Random;
use ringdisk_gen::patience::wait_until;

/// A control group of version 2 with nothing but a server in it: the kernel counts its stalls apart from all others'.
struct Group(PathBuf);

impl Group {
    /// Returns why there can be none as an error.
    fn new() -> Result<Self, String> {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").map_err(|error| error.to_string())?;
        let root = mounts
            .lines()
            .find(|line| line.contains(" - cgroup2 "))
            .and_then(|line| line.split(' ').nth(4))
            .ok_or("no cgroup2 is mounted")?;
        let group = Path::new(root).join(format!("ringdisk-test-{}", std::process::id()));
        std::fs::create_dir(&group).map_err(|error| format!("cannot make {}: {error}", group.display()))?;
        let group = Self(group);
        match group.0.join("io.pressure").exists() {
            true => Ok(group),
            false => Err("the kernel does not count pressure (psi=1)".to_owned()),
        }
    }

    /// The time for which a task of the group has been in I/O wait so far.
    fn stalled(&self) -> Duration {
        let pressure = std::fs::read_to_string(self.0.join("io.pressure")).expect("the pressure");
        let some = pressure.lines().find(|line| line.starts_with("some "));
        let total = some.and_then(|line| line.rsplit_once("total="));
        let micros = total.and_then(|(_, total)| total.parse().ok());
        Duration::from_micros(micros.unwrap_or_else(|| panic!("a total in {pressure:?}")))
    }

    /// Fails the test if I/O wait is counted while the server has nothing to do.
    fn assert_no_io_wait(&self, when: &str) {
        let (before, start) = (self.stalled(), Instant::now());
        std::thread::sleep(Duration::from_secs(1));
        let (stalled, elapsed) = (self.stalled() - before, start.elapsed());
        assert!(stalled < elapsed / 20, "{when}: {stalled:?} of {elapsed:?}");
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The kernel removes an ended process from its group some time after it can be waited for.
        let deadline = Instant::now() + Duration::from_secs(10);
        while std::fs::remove_dir(&self.0).is_err() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// `IORING_ENTER_NO_IOWAIT` is there since Linux 6.15.
fn kernel_can_tell() -> Result<(), String> {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").map_err(|error| error.to_string())?;
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .map(str::parse::<u32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) if (major, minor) >= (6, 15) => Ok(()),
        _ => Err(format!(
            "Linux {} has no IORING_ENTER_NO_IOWAIT (6.15)",
            release.trim()
        )),
    }
}

#[test]
#[expect(clippy::print_stdout, reason = "what cannot run here is said and counted")]
fn idle_server_does_not_count_as_io_wait() {
    let group = match kernel_can_tell().and_then(|()| Group::new()) {
        Ok(group) => group,
        Err(why) => {
            println!("cannot run here: I/O wait of an idle server, because {why}");
            return;
        }
    };
    let world = World::new("cluster_size=65536", 64 * BLOCK);
    let join = format!("echo $$ >{}/cgroup.procs && exec \"$@\"", group.0.display());
    let server = world.serve_in(&["env", "--default-signal", "sh", "-c", &join, "sh"], &[]);
    wait_until("server", || world.path("socket").exists());
    group.assert_no_io_wait("before there is a client");

    let mut client = Client::new(64, false);
    client.connect(&world.path("socket"));
    client.work(&mut Random::new(9), Duration::from_millis(50));
    client.drain();
    group.assert_no_io_wait("with an idle client");
    server.kill();
}
