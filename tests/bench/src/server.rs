//! The servers that are compared: each serves one image on a vhost-user socket until it is stopped.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use ringdisk_gen::sockets;

use crate::images::{Format, Image};
use crate::process::{self, Process};

/// The time that a server has until it listens.
const START: Duration = Duration::from_secs(20);

/// A server's program.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum Program {
    /// `ringdisk vhost-user`, the binary at this path.
    Ringdisk(PathBuf),
    /// QEMU's storage daemon, the binary at this path or of this name.
    StorageDaemon(PathBuf),
}

impl Program {
    /// Returns QEMU's storage daemon as it is found on the path.
    #[must_use]
    pub(crate) fn storage_daemon() -> Self {
        Self::StorageDaemon("qemu-storage-daemon".into())
    }

    /// The name to print.
    #[must_use]
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Ringdisk(_) => "ringdisk",
            Self::StorageDaemon(_) => "qemu-storage-daemon",
        }
    }
}

/// The way to serve an image.
#[derive(Clone, Debug)]
pub(crate) struct Serve<'a> {
    /// The image.
    pub(crate) image: &'a Image,
    /// Past the page cache (`O_DIRECT`), or through it.
    pub(crate) direct: bool,
    /// The number of queues to offer.
    pub(crate) queues: u16,
    /// The budget of the L2 table cache in KiB, if not the server's own choice.
    pub(crate) l2_cache_kib: Option<u32>,
    /// Our server is to have a control socket, and the disk its image's path as a name.
    pub(crate) control: bool,
}

/// A server that listens.
#[derive(Debug)]
pub(crate) struct Server {
    process: Process,
    socket: PathBuf,
    control: PathBuf,
}

impl Server {
    /// Starts `program` and waits until it listens on a socket in `directory`.
    ///
    /// # Errors
    ///
    /// If it does not start, ends, or does not listen in time; with what it printed.
    pub(crate) fn start(program: &Program, serve: &Serve<'_>, directory: &Path) -> io::Result<Self> {
        let socket = directory.join("bench.sock");
        let control = directory.join("bench.control");
        for file in [&socket, &control] {
            match std::fs::remove_file(file) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        let command = match program {
            Program::Ringdisk(binary) => ringdisk(binary, serve, &socket, &control),
            Program::StorageDaemon(binary) => storage_daemon(binary, serve, &socket),
        };
        let mut process = Process::start(command, &directory.join("server.log"))?;
        let since = Instant::now();
        // Asking by connecting would cost the server a client; it listens once the socket is bound.
        while !sockets::listens(&socket)? {
            process.still_runs()?;
            if since.elapsed() > START {
                let words = process.last_words();
                return Err(io::Error::other(format!(
                    "{} does not listen: {words}",
                    program.name()
                )));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(Self {
            process,
            socket,
            control,
        })
    }

    /// Returns the path of the socket it listens at.
    #[must_use]
    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns the path of its control socket, if it was to have one.
    #[must_use]
    pub(crate) fn control(&self) -> &Path {
        &self.control
    }

    /// The CPU time it has used, in seconds.
    ///
    /// # Errors
    ///
    /// If it is gone.
    pub(crate) fn cpu_seconds(&self) -> io::Result<f64> {
        process::cpu_seconds(self.process.id())
    }

    /// Its own resident memory, in MiB.
    ///
    /// # Errors
    ///
    /// If it is gone.
    pub(crate) fn resident_mib(&self) -> io::Result<f64> {
        process::resident_mib(self.process.id())
    }

    /// Returns the end of its output, for an error that it may explain.
    #[must_use]
    pub(crate) fn last_words(&self) -> String {
        self.process.last_words()
    }

    /// Ends it cleanly, once it has closed the connections of clients that are gone.
    ///
    /// # Errors
    ///
    /// If it does not end, or ends with an error.
    pub(crate) fn stop(self) -> io::Result<()> {
        sockets::wait_until_closed(&self.socket)?;
        self.process.stop()
    }
}

fn on_off(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}

fn ringdisk(binary: &Path, serve: &Serve<'_>, socket: &Path, control: &Path) -> Command {
    let mut disk = OsString::from("path=");
    disk.push(&serve.image.path);
    disk.push(format!(
        ",image_type={},direct={},num_queues={},queue_size={},backing_files={}",
        serve.image.format.name(),
        on_off(serve.direct),
        serve.queues,
        crate::client::ring::QUEUE_SIZE,
        on_off(serve.image.backing.is_some()),
    ));
    if let Some(kib) = serve.l2_cache_kib {
        disk.push(format!(",l2_cache={kib}K"));
    }
    if let Some(secret) = &serve.image.secret_file {
        disk.push(",secret_file=");
        disk.push(secret);
    }
    let mut command = Command::new(binary);
    command
        .arg("vhost-user")
        .arg("--socket")
        .arg(socket)
        .arg("--disk")
        .arg(disk);
    if serve.control {
        command.arg("--control").arg(control);
    }
    command
}

/// As fast as it can be made: io_uring for every file, one I/O thread.
fn storage_daemon(binary: &Path, serve: &Serve<'_>, socket: &Path) -> Command {
    let mut command = Command::new(binary);
    command.args(["--object", "iothread,id=io0"]);
    if let Some(secret) = &serve.image.secret_file {
        let mut object = OsString::from("secret,id=key,file=");
        object.push(secret);
        command.arg("--object").arg(object);
    }
    let mut top = String::new();
    let chain = serve.image.backing.iter().map(|base| (&base.path, base.format));
    let chain = chain.chain([(&serve.image.path, serve.image.format)]);
    for (depth, (path, format)) in chain.enumerate() {
        let is_top = depth == usize::from(serve.image.backing.is_some());
        let mut file = OsString::from(format!("driver=file,node-name=f{depth},aio=io_uring,"));
        file.push(format!(
            "cache.direct={},read-only={},",
            on_off(serve.direct),
            on_off(!is_top)
        ));
        file.push("filename=");
        file.push(path);
        command.arg("--blockdev").arg(file);
        let mut node = format!(
            "driver={},node-name=n{depth},file=f{depth},cache.direct={},read-only={}",
            format.name(),
            on_off(serve.direct),
            on_off(!is_top),
        );
        if is_top {
            node.push_str(",discard=unmap");
        }
        if format == Format::Qcow2 {
            if let Some(kib) = serve.l2_cache_kib {
                node.push_str(&format!(",l2-cache-size={}", u64::from(kib) << 10));
            }
            if is_top && serve.image.secret_file.is_some() {
                node.push_str(",encrypt.format=luks,encrypt.key-secret=key");
            }
            if !top.is_empty() {
                node.push_str(&format!(",backing={top}"));
            }
        }
        command.arg("--blockdev").arg(node);
        top = format!("n{depth}");
    }
    let mut export = OsString::from(format!("type=vhost-user-blk,id=e,node-name={top},"));
    export.push(format!(
        "writable=on,num-queues={},iothread=io0,addr.type=unix,addr.path=",
        serve.queues
    ));
    export.push(socket);
    command.arg("--export").arg(export);
    command
}
