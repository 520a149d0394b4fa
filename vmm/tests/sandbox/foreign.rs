//! A guest's CPU sets up a disk that another program serves, loses it and finds it again, from inside the sandbox: the
//! thread that runs it can make no socket.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use block::worker::StartHook;
use ringdisk::disk_config::DiskConfig;
use ringdisk::open;
use ringdisk::sandbox::{self, Task};
use virtio_devices::connect::Cancel;
use virtio_devices::transport::{
    Interrupt, Machine, MsiMessage, PciFunction, VhostUserBackend, VhostUserDiskConfig, VirtioPciBlock,
};
use virtio_devices::vhost_user::{StopToken, VhostUserConfig, VhostUserServer};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};

/// A machine that does nothing with what it is asked.
#[derive(Debug)]
struct Idle;

#[derive(Debug)]
struct IdleInterrupt(OwnedFd);

impl Interrupt for IdleInterrupt {
    fn event(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    fn connect(&self, _: MsiMessage) -> std::io::Result<()> {
        Ok(())
    }

    fn disconnect(&self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Machine for Idle {
    fn watch(&self, _: u64, _: BorrowedFd<'_>) -> std::io::Result<()> {
        Ok(())
    }

    fn unwatch(&self, _: u64, _: BorrowedFd<'_>) -> std::io::Result<()> {
        Ok(())
    }

    fn interrupt(&self) -> std::io::Result<Box<dyn Interrupt>> {
        Ok(Box::new(IdleInterrupt(block::event::eventfd()?)))
    }
}

/// Serves `disk` at `socket` until the answer is called.
fn serve(socket: &Path, disk: Arc<dyn block::Disk>) -> impl FnOnce() {
    let _none_yet = std::fs::remove_file(socket);
    let listener = UnixListener::bind(socket).expect("a socket");
    let stop = StopToken::new().expect("a token");
    let server = VhostUserServer::start(disk, &VhostUserConfig::default()).expect("a server");
    let token = stop.clone();
    let thread = std::thread::spawn(move || server.serve(&listener, &token).expect("no failure"));
    move || {
        stop.stop();
        thread.join().expect("no panic");
    }
}

const READY: u8 = 15;
const NEEDS_RESET: u8 = 64;

/// Drives the function as a driver does until its queue runs; returns the status then.
fn drive(function: &mut VirtioPciBlock) -> u8 {
    let mut set = |offset: u64, bytes: &[u8]| function.write(offset, bytes);
    set(20, &[0]);
    set(20, &[3]);
    for (half, features) in [(0u32, 0u32), (1, 1)] {
        set(8, &half.to_le_bytes());
        set(12, &features.to_le_bytes());
    }
    set(20, &[11]);
    set(22, &[0, 0]);
    set(26, &[1, 0]);
    for (register, address) in [(32, 0x1000u64), (40, 0x2000), (48, 0x3000)] {
        set(register, &address.to_le_bytes());
    }
    set(28, &[1, 0]);
    set(20, &[READY]);
    status(function)
}

fn status(function: &mut VirtioPciBlock) -> u8 {
    let mut status = [0];
    function.read(20, &mut status);
    status[0]
}

/// Fails the test unless the thread that connects and the one that watches the connection are in the sandbox.
fn assert_confined() {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let found = confined_threads();
        if found == ["connector", "vhost-user"] {
            return;
        }
        // A thread bears its parent's name until it runs, and is listed for a moment after it was joined.
        assert!(Instant::now() < deadline, "{found:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Returns the names of the threads that connect and watch, in order; fails the test if one of them is not in the sandbox.
fn confined_threads() -> Vec<String> {
    let lines = ["Name", "NoNewPrivs", "Seccomp"].map(|name| format!("{name}:\t"));
    let tasks = std::fs::read_dir("/proc/self/task").expect("our threads");
    // One that has ended meanwhile has no status.
    let read = |task: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(task.ok()?.path().join("status")).ok()
    };
    let mut found = Vec::new();
    for status in tasks.filter_map(read) {
        let value = |name: &String| status.lines().find_map(|line| line.strip_prefix(name.as_str()));
        let [name, privileges, calls] = lines
            .each_ref()
            .map(|name| value(name).unwrap_or_default().to_owned());
        if name == "connector" || name == "vhost-user" {
            assert_eq!((&*privileges, &*calls), ("1", "2"), "{name}");
            found.push(name);
        }
    }
    found.sort();
    found
}

#[test]
fn confined_cpu_thread_sets_up_and_reconnects_a_backend() {
    let folder = tempfile::tempdir().expect("a folder");
    let (image, socket) = (folder.path().join("image"), folder.path().join("socket"));
    std::fs::File::create(&image)
        .and_then(|file| file.set_len(1 << 20))
        .expect("an image");
    let config = DiskConfig::parse(&format!("path={},image_type=raw", image.display())).expect("a disk");
    let disk = open::open(&config).expect("a disk");
    let stop = serve(&socket, disk.disk());

    let memory = tempfile::tempfile().expect("a file");
    memory.set_len(1 << 20).expect("its length");
    let range = (GuestAddress(0), 1 << 20, Some(FileOffset::new(memory, 0)));
    let memory = GuestMemoryMmap::from_ranges_with_files([range]).expect("memory");
    let shown = VhostUserDiskConfig {
        name: "disk".to_owned(),
        socket: socket.clone(),
        num_queues: 1,
        queue_size: 64,
        on_start: Some(StartHook::new(|| Ok(sandbox::confine_thread(Task::Backend)?))),
    };
    let backend = VhostUserBackend::connect(shown, &Cancel::never()).expect("a backend");
    let function = VirtioPciBlock::vhost_user(backend, memory, Arc::new(Idle), 0xC000_0000);
    let mut function = function.expect("a function");

    let (ready, at_work) = mpsc::channel();
    let (go_on, goes_on) = mpsc::channel();
    let cpu = std::thread::spawn(move || {
        sandbox::confine_thread(Task::Cpu).expect("restrictions");
        assert!(
            std::os::unix::net::UnixStream::pair().is_err(),
            "it can make sockets"
        );
        assert_eq!(drive(&mut function), READY);
        ready.send(()).expect("somebody listens");
        let deadline = Instant::now() + Duration::from_secs(20);
        while status(&mut function) != READY | NEEDS_RESET {
            assert!(Instant::now() < deadline, "it has not noticed");
            std::thread::sleep(Duration::from_millis(1));
        }
        ready.send(()).expect("somebody listens");
        goes_on.recv().expect("somebody tells");
        assert_eq!(drive(&mut function), READY, "connected again");
        ready.send(()).expect("somebody listens");
        goes_on.recv().expect("somebody tells");
        function.unplug().expect("a drain");
    });
    at_work.recv().expect("the first set-up");
    assert_confined();
    stop();
    at_work.recv().expect("the loss");
    let stop = serve(&socket, disk.disk());
    go_on.send(()).expect("it waits");
    at_work.recv().expect("the second set-up");
    assert_confined();
    go_on.send(()).expect("it waits");
    cpu.join().expect("no panic");
    stop();
}
