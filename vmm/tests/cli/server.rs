//! A running server, as a person or a script starts it.

use std::io::Read;
use std::process::{Child, Command, Stdio};

use ringdisk_gen::patience::{PATIENCE, wait_for_end};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::world::{Ended, World};

/// A running `ringdisk vhost-user`; killed when dropped.
pub(crate) struct Server {
    child: Option<Child>,
    /// Its output so far.
    said: String,
}

impl Server {
    /// Starts a server and waits until it says that it serves its disks.
    pub(crate) fn start(world: &World, pairs: &[(&str, &str)]) -> Self {
        Self::start_as(&[], world, pairs)
    }

    /// As [`Server::start`], with further arguments.
    pub(crate) fn start_as(arguments: &[&str], world: &World, pairs: &[(&str, &str)]) -> Self {
        Self::run(&["--default-signal"], arguments, world, pairs)
    }

    /// As [`Server::start`], with options of `env` about signals and variables: we ourselves may have been
    /// started to ignore some signals.
    pub(crate) fn start_with(environment: &[&str], world: &World, pairs: &[(&str, &str)]) -> Self {
        Self::run(environment, &[], world, pairs)
    }

    /// With options of `env`, and further arguments.
    pub(crate) fn run(
        environment: &[&str],
        arguments: &[&str],
        world: &World,
        pairs: &[(&str, &str)],
    ) -> Self {
        let ringdisk = world.ringdisk_command();
        let mut command = Command::new("env");
        command
            .args(environment)
            .arg(ringdisk.get_program())
            .arg("vhost-user")
            .args(arguments);
        command.current_dir(world.path("")).env_remove("RINGDISK_LOG");
        for (socket, disk) in pairs {
            command.args(["--socket", socket, "--disk", disk]);
        }
        Self::spawn(&mut command, pairs.len())
    }

    /// Runs a command that becomes a server, and waits until it says that it serves so many disks. It is not asked by
    /// connecting: that client may still be there when the next one comes.
    pub(crate) fn spawn(command: &mut Command, disks: usize) -> Self {
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("run ringdisk");
        let mut server = Self {
            child: Some(child),
            said: String::new(),
        };
        for _ in 0..disks {
            let mut line = server.read_line();
            if line.starts_with("took over ") {
                line = server.read_line();
            }
            assert!(
                line.starts_with("serving "),
                "the server ended: {:?}",
                server.wait()
            );
        }
        server
    }

    /// The next line that the server prints; nothing if it has ended.
    pub(crate) fn read_line(&mut self) -> String {
        let child = self.child.as_mut().expect("a child");
        let stdout = child.stdout.as_mut().expect("a pipe");
        let mut line = Vec::new();
        let mut byte = [0];
        // No byte more is taken from what is left for the end.
        let patience = Timespec::try_from(PATIENCE).expect("a minute");
        while !line.ends_with(b"\n") {
            let ready = poll(&mut [PollFd::new(stdout, PollFlags::IN)], Some(&patience));
            assert_eq!(ready, Ok(1), "it says no more than {line:?}");
            if stdout.read(&mut byte).expect("read its output") == 0 {
                break;
            }
            line.push(byte[0]);
        }
        let line = String::from_utf8(line).expect("UTF-8 on stdout");
        self.said += &line;
        line
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.child
            .as_mut()
            .expect("a child")
            .try_wait()
            .expect("wait")
            .is_none()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.as_ref().expect("a child").id()
    }

    pub(crate) fn signal(&self, name: &str) {
        let sent = Command::new("kill")
            .args([&format!("-{name}"), &self.pid().to_string()])
            .status();
        assert!(sent.expect("run kill").success());
    }

    pub(crate) fn wait(&mut self) -> Ended {
        wait_for_end(self.child.as_mut().expect("a child"));
        let child = self.child.take().expect("a child");
        let mut ended: Ended = child.wait_with_output().expect("its output").into();
        ended.stdout.insert_str(0, &self.said);
        ended
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().expect("kill the server");
            child.wait().expect("reap the server");
        }
    }
}
