//! A `ringdisk vhost-user` process and the folder it works in.

use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

use ringdisk_gen::patience::{wait_for_end, wait_until};

/// A folder with one image, `disk.qcow2`, and one socket, `socket`.
pub(crate) struct World {
    directory: tempfile::TempDir,
}

impl World {
    /// With an image of `bytes` and these options of `qemu-img`.
    pub(crate) fn new(options: &str, bytes: usize) -> Self {
        let world = Self {
            directory: tempfile::tempdir().expect("a folder"),
        };
        let bytes = bytes.to_string();
        world.qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, "disk.qcow2", &bytes]);
        world
    }

    /// With an image of `bytes`, and these ones of the same size, of which some are in the folder `images`.
    pub(crate) fn with_images(bytes: usize, images: &[&str]) -> Self {
        const OPTIONS: &str = "cluster_size=4096";
        let world = Self::new(OPTIONS, bytes);
        std::fs::create_dir(world.path("images")).expect("a folder");
        let bytes = bytes.to_string();
        for image in images {
            world.qemu_img(&["create", "-q", "-f", "qcow2", "-o", OPTIONS, image, &bytes]);
        }
        world
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Runs `qemu-img`, which must succeed.
    pub(crate) fn qemu_img(&self, arguments: &[&str]) {
        let output = self.try_qemu_img(arguments);
        assert!(output.status.success(), "qemu-img {arguments:?}: {output:?}");
    }

    /// Carries these commands of `qemu-io` out on the image.
    pub(crate) fn qemu_io(&self, commands: &[&str]) {
        let commands = commands.iter().flat_map(|command| ["-c", command]);
        let output = Command::new("qemu-io")
            .args(["-f", "qcow2", "-d", "unmap"])
            .args(commands)
            .arg("disk.qcow2")
            .current_dir(self.directory.path())
            .output()
            .expect("qemu-io is needed by this test (apt-get install qemu-utils)");
        assert!(output.status.success(), "qemu-io: {output:?}");
    }

    fn try_qemu_img(&self, arguments: &[&str]) -> Output {
        Command::new("qemu-img")
            .args(arguments)
            .current_dir(self.directory.path())
            .output()
            .expect("qemu-img is needed by this test (apt-get install qemu-utils)")
    }

    /// Fails the test if `qemu-img check` finds errors. Leaks, which a kill may leave, are mended first if
    /// `leaks` says that there may be some.
    pub(crate) fn assert_sound(&self, leaks: bool) {
        self.assert_image_sound("disk.qcow2", leaks);
    }

    /// As [`World::assert_sound`], of another image.
    pub(crate) fn assert_image_sound(&self, image: &str, leaks: bool) {
        let mut arguments = vec!["check", "-q", "-f", "qcow2"];
        if leaks {
            arguments.extend(["-r", "leaks"]);
        }
        arguments.push(image);
        let output = self.try_qemu_img(&arguments);
        assert_eq!(output.status.code(), Some(0), "{output:?}");
    }

    /// The disk's contents as QEMU reads them.
    pub(crate) fn contents(&self) -> Vec<u8> {
        self.contents_of("disk.qcow2")
    }

    /// As [`World::contents`], of another image.
    pub(crate) fn contents_of(&self, image: &str) -> Vec<u8> {
        self.qemu_img(&["convert", "-f", "qcow2", "-O", "raw", image, "disk.raw"]);
        std::fs::read(self.path("disk.raw")).expect("the contents")
    }

    /// Starts a server of the image with these further arguments; does not wait for it.
    pub(crate) fn serve(&self, arguments: &[&str]) -> Server {
        self.serve_in(&["env", "--default-signal"], arguments)
    }

    /// As [`World::serve`], by way of a program that starts another.
    pub(crate) fn serve_in(&self, wrapper: &[&str], arguments: &[&str]) -> Server {
        self.serve_disk(wrapper, "path=disk.qcow2,poll_us=0", arguments)
    }

    /// As [`World::serve_in`], a disk described otherwise.
    pub(crate) fn serve_disk(&self, wrapper: &[&str], disk: &str, arguments: &[&str]) -> Server {
        self.start(wrapper, &["socket".to_owned()], &[disk.to_owned()], arguments)
    }

    /// Starts a server of a disk at another socket.
    pub(crate) fn serve_at(&self, socket: &str, disk: &str, arguments: &[&str]) -> Server {
        let (sockets, disks) = ([socket.to_owned()], [disk.to_owned()]);
        self.serve_all(&sockets, &disks, arguments)
    }

    /// Starts a server of many disks.
    pub(crate) fn serve_all(&self, sockets: &[String], disks: &[String], arguments: &[&str]) -> Server {
        self.start(&["env", "--default-signal"], sockets, disks, arguments)
    }

    fn start(&self, wrapper: &[&str], sockets: &[String], disks: &[String], arguments: &[&str]) -> Server {
        let texts = |texts: &'static str, more: &[String]| {
            let more = more.iter().cloned();
            std::iter::once(texts.to_owned()).chain(more).collect::<Vec<_>>()
        };
        let served = [texts("--socket", sockets), texts("--disk", disks)].concat();
        let served = served.iter().map(String::as_str);
        let all: Vec<&str> = std::iter::once("vhost-user").chain(served).collect();
        self.command(wrapper, &[&all, arguments].concat())
    }

    /// Starts `ringdisk` with these arguments, by way of a program that starts another.
    pub(crate) fn command(&self, wrapper: &[&str], arguments: &[&str]) -> Server {
        let log = std::fs::File::options()
            .append(true)
            .create(true)
            .open(self.path("log"))
            .expect("a log");
        let child = Command::new(wrapper[0])
            .args(&wrapper[1..])
            .arg(env!("CARGO_BIN_EXE_ringdisk"))
            .args(arguments)
            .current_dir(self.directory.path())
            .env_remove("RINGDISK_LOG")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("run ringdisk");
        Server { child }
    }

    /// Returns whether `ringdisk ctl` succeeded at this control socket, and what it said.
    pub(crate) fn ctl(&self, socket: &str, arguments: &[&str]) -> (bool, String) {
        let output = Command::new(env!("CARGO_BIN_EXE_ringdisk"))
            .args(["ctl", "--json", "--socket"])
            .arg(self.path(socket))
            .args(arguments)
            .output()
            .expect("ringdisk");
        let said = [output.stdout, output.stderr].concat();
        (
            output.status.success(),
            String::from_utf8_lossy(&said).into_owned(),
        )
    }

    /// Waits until a control socket answers, which a server makes when it serves.
    #[track_caller]
    pub(crate) fn wait_for_control(&self, socket: &str) {
        wait_until(&format!("answer at {socket}: {}", self.log()), || {
            self.ctl(socket, &["info"]).0
        });
    }

    /// Returns the log of all servers so far.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap_or_default()
    }
}

impl Drop for World {
    #[expect(clippy::print_stderr, reason = "a failure is explained where it is shown")]
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("what the servers said:\n{}", self.log());
        }
    }
}

/// A running server; killed when dropped.
pub(crate) struct Server {
    child: Child,
}

impl Server {
    pub(crate) fn kill(mut self) {
        self.end();
    }

    fn end(&mut self) {
        // Either fails only if it has ended already.
        self.child.kill().ok();
        self.child.wait().ok();
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for it to end by itself; its exit code.
    pub(crate) fn wait(mut self) -> Option<i32> {
        wait_for_end(&mut self.child).code()
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("a child").is_none()
    }

    pub(crate) fn signal(&self, name: &str) {
        let arguments = [format!("-{name}"), self.pid().to_string()];
        let sent = Command::new("kill").args(arguments).status();
        assert!(sent.expect("run kill").success());
    }

    /// Asks it to stop; its exit code.
    pub(crate) fn stop(self) -> Option<i32> {
        self.signal("TERM");
        self.wait()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}
