//! Servers of a disk over vhost-user-blk: our own binary, or QEMU's storage daemon beside it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use ringdisk_gen::sockets;

use crate::process::{GLANCE, Process};
use crate::{Error, prepare};

/// The longest time for a server to listen.
const START: Duration = Duration::from_secs(60);
/// The longest time for a server to drain, flush and exit after SIGTERM.
const STOP: Duration = Duration::from_secs(60);

/// A process that serves one disk at a socket. Dropping it kills it; a test that cares calls [`stop`](Self::stop).
#[derive(Debug)]
pub struct Server {
    process: Process,
    socket: PathBuf,
    /// It is `qemu-storage-daemon`.
    is_peer: bool,
}

impl Server {
    /// Starts `ringdisk vhost-user` with the `--disk` value `disk` (`path=…,num_queues=2,…`) and waits
    /// until it listens at `socket`.
    ///
    /// # Errors
    ///
    /// [`Error::RingdiskNotBuilt`]; [`Error::Ended`] with its log if it gives up; [`Error::Timeout`].
    pub fn ringdisk(socket: &Path, disk: &str) -> Result<Self, Error> {
        Self::ringdisk_with(&[], socket, disk)
    }

    /// As [`Server::ringdisk`], with further arguments.
    ///
    /// # Errors
    ///
    /// As [`Server::ringdisk`].
    pub fn ringdisk_with(arguments: &[&str], socket: &Path, disk: &str) -> Result<Self, Error> {
        let mut command = Command::new(prepare::ringdisk_binary()?);
        command
            .arg("vhost-user")
            .args(arguments)
            .arg("--socket")
            .arg(socket)
            .arg("--disk")
            .arg(disk);
        Self::start(command, socket)
    }

    /// Starts `qemu-storage-daemon` on the QCOW2 image `image` with `queues` queues: the peer, and the
    /// proof that a failing test is not the lab's own fault.
    ///
    /// # Errors
    ///
    /// As [`Server::ringdisk`].
    pub fn storage_daemon(socket: &Path, image: &Path, queues: u16) -> Result<Self, Error> {
        let mut command = Command::new("qemu-storage-daemon");
        command.args(["--object", "iothread,id=io", "--blockdev"]);
        command.arg(format!(
            "driver=file,node-name=file,filename={},discard=unmap",
            image.display()
        ));
        command.args([
            "--blockdev",
            "driver=qcow2,node-name=disk,file=file,discard=unmap",
            "--export",
        ]);
        command.arg(format!(
            "type=vhost-user-blk,id=export,node-name=disk,addr.type=unix,addr.path={},writable=on,\
             num-queues={queues},iothread=io",
            socket.display()
        ));
        let mut server = Self::start(command, socket)?;
        server.is_peer = true;
        Ok(server)
    }

    fn start(command: Command, socket: &Path) -> Result<Self, Error> {
        let mut log = socket.as_os_str().to_owned();
        log.push(".log");
        let mut server = Self {
            process: Process::start(command, log.into())?,
            socket: socket.to_owned(),
            is_peer: false,
        };
        let deadline = Instant::now() + START;
        while !sockets::listens(socket).unwrap_or_default() {
            if let Some(status) = server.process.ended() {
                return Err(server.wrong_end(&status.to_string(), "before it listened"));
            }
            if Instant::now() >= deadline {
                return Err(server.too_slow("listening at the socket", START));
            }
            thread::sleep(GLANCE);
        }
        Ok(server)
    }

    /// The socket it listens at.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Everything it has said so far.
    #[must_use]
    pub fn log(&self) -> String {
        self.process.log()
    }

    /// Its process id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Asks it to end (SIGTERM), waits, and checks that it exited with 0.
    ///
    /// # Errors
    ///
    /// [`Error::Ended`] if it had ended before or ends with another status; [`Error::Timeout`] if it does
    /// not end within a minute.
    pub fn stop(mut self) -> Result<(), Error> {
        if let Some(status) = self.process.ended() {
            return Err(self.wrong_end(&status.to_string(), "before it was asked to"));
        }
        if self.is_peer {
            // Without the kernel's table it is ended at once.
            sockets::wait_until_closed(&self.socket).ok();
        }
        self.process.ask_to_end();
        match self.process.wait_until(Instant::now() + STOP) {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(self.wrong_end(&status.to_string(), "not 0, after SIGTERM")),
            None => Err(self.too_slow("exit after SIGTERM", STOP)),
        }
    }

    /// Waits until it has ended by itself, with 0: another one has taken over.
    ///
    /// # Errors
    ///
    /// [`Error::Ended`] if it ends with another status; [`Error::Timeout`] if it does not end within a minute.
    pub fn succeeded(mut self) -> Result<(), Error> {
        match self.process.wait_until(Instant::now() + STOP) {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(self.wrong_end(&status.to_string(), "not 0, after a takeover")),
            None => Err(self.too_slow("exit after a takeover", STOP)),
        }
    }

    /// Kills it as a crash would (SIGKILL): nothing is drained, flushed or closed.
    ///
    /// # Errors
    ///
    /// [`Error::Ended`] if it was dead before the blow.
    pub fn kill(mut self) -> Result<(), Error> {
        if let Some(status) = self.process.ended() {
            return Err(self.wrong_end(&status.to_string(), "before it was killed"));
        }
        self.process.kill();
        Ok(())
    }

    /// Returns where its threads are, and the end of its log, to tell why it does not answer.
    #[must_use]
    pub fn evidence(&self) -> String {
        let mut said = format!("`{}`:\n", self.process.command());
        let threads = fs::read_dir(format!("/proc/{}/task", self.id()));
        for thread in threads.into_iter().flatten().flatten() {
            for file in ["comm", "wchan", "syscall", "stack"] {
                // The stack is shown to root alone.
                let text =
                    fs::read_to_string(thread.path().join(file)).unwrap_or_else(|error| error.to_string());
                said.push_str(&format!(
                    "  {} {file}: {}\n",
                    thread.path().display(),
                    text.trim_end()
                ));
            }
        }
        said + &self.process.log_tail()
    }

    fn wrong_end(&self, status: &str, expected: &'static str) -> Error {
        Error::Ended {
            command: self.process.command().to_owned(),
            status: status.to_owned(),
            expected,
            log: self.process.log_tail(),
        }
    }

    fn too_slow(&self, what: &str, limit: Duration) -> Error {
        Error::Timeout {
            what: format!("{what} of `{}`", self.process.command()),
            seconds: limit.as_secs(),
            log: self.process.log_tail(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Scratch;

    #[test]
    fn storage_daemon_error_quotes_its_output() {
        let scratch = Scratch::new().unwrap();
        let missing = scratch.file("missing.qcow2");
        let error = Server::storage_daemon(&scratch.file("socket"), &missing, 1).unwrap_err();
        assert!(error.to_string().contains("missing.qcow2"), "{error}");
    }
}
