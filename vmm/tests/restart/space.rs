//! `werror=wait` from inside the sandbox: what the host has no space for waits, and is done when there is some; a stop
//! ends the wait, and loses nothing that was flushed.
//!
//! A test runs itself again in a mount namespace of its own, where the image is on a small tmpfs that can be filled.
#![expect(
    clippy::print_stdout,
    reason = "what cannot run here is counted by what it prints"
)]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::client::{Ask, BLOCK, Client};
use crate::server::{Server, World};

const BLOCKS: usize = 256;
/// The variable that names a test's folder while it runs in its own namespace.
const PLACE: &str = "RINGDISK_TEST_PLACE";
const MOUNT: &str = "mount -t tmpfs -o size=8m,huge=never none \"$RINGDISK_TEST_PLACE\" || exit 77; echo 'the folder is mounted'; \
    exec \"$0\" \"$@\"";
/// The line that is printed before the test runs itself. A failure after it is the test's, one before it the machine's.
const MOUNTED: &str = "the folder is mounted";

/// The small file system, in the test's own namespace; otherwise runs it there.
fn place(test: &str) -> Option<PathBuf> {
    if let Some(place) = std::env::var_os(PLACE) {
        return Some(place.into());
    }
    let folder = tempfile::tempdir().expect("a folder");
    let output = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "bash", "-c", MOUNT])
        .arg(std::env::current_exe().expect("this test"))
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(PLACE, folder.path())
        .output()
        .expect("unshare, of the package util-linux");
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    match output.status.code() {
        Some(0) => assert!(said.contains("1 passed"), "{test} did not run: {said}"),
        Some(77 | 1) if !said.contains(MOUNTED) => {
            println!("cannot run here: {test}, because nothing can be mounted: {said}");
        }
        _ => panic!("{test}: {said}"),
    }
    None
}

/// Takes all the space, and what comes free a moment later: a ring that ends lets go of its files by and by.
fn fill(folder: &Path) {
    let mut file = std::fs::File::create(folder.join("filler")).expect("a file");
    let mut quiet = 0;
    while quiet < 5 {
        let mut taken = false;
        for size in [BLOCK, 1] {
            while file.write_all(&vec![1; size]).is_ok() {
                taken = true;
            }
        }
        quiet = if taken { 0 } else { quiet + 1 };
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The file on the small file system.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Kind {
    Qcow2,
    Raw,
    /// The temporary overlay of an image elsewhere.
    Overlay,
}

const KINDS: [Kind; 3] = [Kind::Qcow2, Kind::Raw, Kind::Overlay];

/// A disk of zeros whose writes wait for space, and a client of its server.
struct Scene {
    world: World,
    image: PathBuf,
    kind: Kind,
    client: Client,
}

impl Scene {
    fn new(folder: &Path, kind: Kind, werror: &str) -> (Self, Server) {
        let world = World::new("cluster_size=65536", BLOCKS * BLOCK);
        let (name, format) = if kind == Kind::Raw {
            ("disk.img", "raw")
        } else {
            ("disk.qcow2", "qcow2")
        };
        let image = if kind == Kind::Overlay {
            world.path(name)
        } else {
            folder.join(name)
        };
        let path = image.to_str().expect("UTF-8");
        world.qemu_img(&["create", "-q", "-f", format, path, &(BLOCKS * BLOCK).to_string()]);
        let mut disk = format!("path={path},image_type={format},poll_us=0,werror={werror}");
        if kind == Kind::Overlay {
            disk += &format!(",overlay=temporary,overlay_dir={}", folder.display());
        }
        let server = world.serve_disk(&["env", "--default-signal"], &disk, &["--sandbox", "on"]);
        let mut client = Client::new(BLOCKS, false);
        client.connect(&world.path("socket"));
        let scene = Self {
            world,
            image,
            kind,
            client,
        };
        (scene, server)
    }

    fn ask(&mut self, ask: Ask, block: usize) {
        assert!(self.client.submit(ask, block));
    }

    /// Fills the file system with some flushed, and leaves two writes that wait for space: one in a cluster that is
    /// there, one that needs a new one.
    fn hold_two_writes(&mut self, folder: &Path) {
        self.ask(Ask::Write(11), 0);
        self.ask(Ask::Write(12), 20);
        self.client.drain();
        self.ask(Ask::Flush, 0);
        self.client.drain();
        fill(folder);
        self.ask(Ask::Write(13), 1);
        self.ask(Ask::Write(14), 200);
        let until = Instant::now() + Duration::from_millis(600);
        while Instant::now() < until {
            self.client.take_answers();
            assert!(self.client.in_flight() >= 2, "they did not wait");
            std::thread::sleep(Duration::from_millis(1));
        }
        // The others go on.
        self.ask(Ask::Read, 0);
        self.ask(Ask::Write(15), 20);
        let deadline = Instant::now() + Duration::from_secs(20);
        while self.client.in_flight() > 2 {
            self.client.take_answers();
            assert!(Instant::now() < deadline, "reads and overwrites need no space");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(self.client.in_flight(), 2, "they did not wait");
        let log = self.world.log();
        assert!(log.contains("writes wait until there is space"), "{log}");
    }

    /// After the server has ended: the image is sound and holds what the client knows.
    fn assert_kept(&self, folder: &Path) {
        std::fs::remove_file(folder.join("filler")).ok();
        match self.kind {
            Kind::Raw => {
                let contents = std::fs::read(&self.image).expect("the disk");
                self.client.assert_contents(&contents);
            }
            Kind::Qcow2 => {
                std::fs::copy(&self.image, self.world.path("disk.qcow2")).expect("a copy");
                self.world.assert_sound(false);
                self.client.assert_contents(&self.world.contents());
            }
            Kind::Overlay => {
                let contents = self.world.contents();
                assert!(contents.iter().all(|&byte| byte == 0), "the image has changed");
            }
        }
    }
}

#[test]
fn sandboxed_write_waits_for_space_and_completes() {
    let test = "space::sandboxed_write_waits_for_space_and_completes";
    let Some(folder) = place(test) else { return };
    for kind in KINDS {
        let (mut scene, server) = Scene::new(&folder, kind, "wait");
        scene.hold_two_writes(&folder);
        std::fs::remove_file(folder.join("filler")).expect("the filler");
        scene.client.drain();
        for (block, value) in [(0, 11), (1, 13), (20, 15), (200, 14)] {
            assert_eq!(scene.client.model[block], value);
            scene.ask(Ask::Read, block);
        }
        scene.client.drain();
        assert_eq!(server.stop(), Some(0), "{}", scene.world.log());
        let log = scene.world.log();
        assert_eq!(log.matches("writes go on").count(), 1, "{log}");
        assert!(!log.contains("held_back"), "nothing was: {log}");
        scene.assert_kept(&folder);
    }
}

/// The writes that waited fail, and were never acknowledged.
#[test]
fn sandboxed_stop_ends_space_waits_and_keeps_flushed_data() {
    let test = "space::sandboxed_stop_ends_space_waits_and_keeps_flushed_data";
    let Some(folder) = place(test) else { return };
    for kind in KINDS {
        let (mut scene, mut server) = Scene::new(&folder, kind, "wait");
        scene.hold_two_writes(&folder);
        server.signal("TERM");
        let deadline = Instant::now() + Duration::from_secs(5);
        while server.is_running() {
            assert!(
                Instant::now() < deadline,
                "it goes on waiting: {}",
                scene.world.log()
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(server.wait(), Some(0), "{}", scene.world.log());
        scene.assert_kept(&folder);
    }
}

/// A server at the destination would know nothing of what is lost, and answer a FLUSH that it is durable.
#[test]
fn image_that_cannot_be_closed_stays_locked_when_its_guest_migrates() {
    let test = "space::image_that_cannot_be_closed_stays_locked_when_its_guest_migrates";
    let Some(folder) = place(test) else { return };
    let (mut scene, server) = Scene::new(&folder, Kind::Qcow2, "report");
    scene.ask(Ask::Write(11), 0);
    scene.client.drain();
    fill(&folder);
    assert!(!scene.client.leave(), "the client is told");
    std::fs::remove_file(folder.join("filler")).expect("the filler");
    let disk = format!("path={},poll_us=0", scene.image.display());
    let second = scene.world.serve_at("second", &disk, &["--incoming"]);
    scene.client.connect(&scene.world.path("second"));
    scene.ask(Ask::Flush, 0);
    let until = Instant::now() + Duration::from_millis(300);
    while Instant::now() < until {
        scene.client.take_answers();
        assert_eq!(scene.client.in_flight(), 1, "it does not wait");
        std::thread::sleep(Duration::from_millis(1));
    }
    let heir = scene.world.serve_at("socket", &disk, &["--takeover"]);
    assert_eq!(heir.wait(), Some(1), "it is not handed over either");
    let log = scene.world.log();
    assert!(log.contains("stays locked until this server ends"), "{log}");
    // Whoever knows of it lets the guest go on.
    assert_eq!(server.stop(), Some(1), "{}", scene.world.log());
    let log = scene.world.log();
    assert!(log.contains("not closed cleanly, and stays locked"), "{log}");
    scene.client.drain();
    assert_eq!(second.stop(), Some(0), "{}", scene.world.log());
    let image = scene.image.to_str().expect("UTF-8");
    scene.world.assert_image_sound(image, true);
}

/// A guest whose overlay has no space is told so, and goes on when there is some.
#[test]
fn write_that_the_overlay_has_no_space_for_fails_and_is_repeated() {
    let test = "space::write_that_the_overlay_has_no_space_for_fails_and_is_repeated";
    let Some(folder) = place(test) else { return };
    let (mut scene, server) = Scene::new(&folder, Kind::Overlay, "report");
    scene.ask(Ask::Write(11), 0);
    scene.client.drain();
    scene.ask(Ask::Flush, 0);
    scene.client.drain();
    fill(&folder);
    // It is answered as a change of a disk that can only be read.
    scene.client.reads_only = true;
    scene.ask(Ask::Write(12), 200);
    scene.client.drain();
    scene.client.reads_only = false;
    let log = scene.world.log();
    assert!(log.contains("temporary overlay of "), "{log}");
    for block in [0, 200] {
        scene.ask(Ask::Read, block);
        scene.client.drain();
    }
    std::fs::remove_file(folder.join("filler")).expect("the filler");
    scene.ask(Ask::Write(12), 200);
    scene.client.drain();
    scene.ask(Ask::Read, 200);
    scene.client.drain();
    assert_eq!(server.stop(), Some(0), "{}", scene.world.log());
    scene.assert_kept(&folder);
}

/// One that has no space at all is not served, and the folder is named.
#[test]
fn overlay_without_space_is_refused_at_the_start() {
    let test = "space::overlay_without_space_is_refused_at_the_start";
    let Some(folder) = place(test) else { return };
    let world = World::new("cluster_size=65536", BLOCKS * BLOCK);
    fill(&folder);
    let disk = format!(
        "path=disk.qcow2,overlay=temporary,overlay_dir={}",
        folder.display()
    );
    let server = world.serve_disk(&["env", "--default-signal"], &disk, &[]);
    assert_eq!(server.wait(), Some(1));
    let log = world.log();
    let named = format!("temporary overlay of disk.qcow2 in {}", folder.display());
    assert!(log.contains(&named) && log.contains("No space left"), "{log}");
}
