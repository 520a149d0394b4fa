//! Processes that cannot outlive their test.
//!
//! A [`Process`] writes everything it says into a log file, is killed when dropped, and is killed by the
//! kernel when the thread that started it ends: keep it on the thread that made it.
#![expect(
    unsafe_code,
    reason = "SIGTERM and the parent-death signal have no safe interface"
)]

use std::fs::{self, File};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::Error;

/// The interval at which the lab looks for something it waits for.
pub(crate) const GLANCE: Duration = Duration::from_millis(20);

/// The longest end of a log that an error quotes, in bytes.
const TAIL_BYTES: usize = 4096;

/// A running program and its log.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    command: String,
    log: PathBuf,
}

impl Process {
    /// Starts `command` with both its outputs in `log`.
    pub(crate) fn start(mut command: Command, log: PathBuf) -> Result<Self, Error> {
        let out = File::create(&log).map_err(|source| Error::File {
            action: "create",
            path: log.clone(),
            source,
        })?;
        let err = out.try_clone().map_err(|source| Error::File {
            action: "share",
            path: log.clone(),
            source,
        })?;
        let text = describe(&command);
        command.stdin(Stdio::null()).stdout(out).stderr(err);
        // SAFETY: `pre_exec` requires the closure to be async-signal-safe: it runs in the forked child of
        // a process with threads. It makes one system call, allocates nothing and takes no lock.
        unsafe { command.pre_exec(die_with_parent) };
        match command.spawn() {
            Ok(child) => Ok(Self {
                child,
                command: text,
                log,
            }),
            Err(source) => Err(Error::Spawn {
                command: text,
                source,
            }),
        }
    }

    /// The command line, for messages.
    pub(crate) fn command(&self) -> &str {
        &self.command
    }

    /// The process id.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// The exit status, if it has ended.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Asks it to end (SIGTERM). One that has ended is left alone.
    pub(crate) fn ask_to_end(&mut self) {
        if self.ended().is_none() {
            let id = libc::pid_t::try_from(self.child.id()).expect("process ids fit pid_t");
            // SAFETY: `kill` has no memory preconditions. The id is still ours: the child was not reaped,
            // so the number cannot have been given to another process.
            unsafe { libc::kill(id, libc::SIGTERM) };
        }
    }

    /// Kills it (SIGKILL) and waits until it is gone.
    pub(crate) fn kill(&mut self) {
        // Either fails only if it has ended already, which is what is wanted.
        self.child.kill().ok();
        self.child.wait().ok();
    }

    /// Waits for it to end, at most until `deadline`.
    pub(crate) fn wait_until(&mut self, deadline: Instant) -> Option<ExitStatus> {
        loop {
            if let Some(status) = self.ended() {
                return Some(status);
            }
            if Instant::now() >= deadline {
                return None;
            }
            thread::sleep(GLANCE);
        }
    }

    /// Everything it has said so far.
    pub(crate) fn log(&self) -> String {
        read_lossy(&self.log)
    }

    /// The end of what it said, for messages.
    pub(crate) fn log_tail(&self) -> String {
        tail(&self.log())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Runs in a forked child: asks the kernel to kill it when its parent ends.
fn die_with_parent() -> std::io::Result<()> {
    // SAFETY: this `prctl` takes a signal number and touches no memory.
    let result = unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    if result == 0 {
        Ok(())
    } else {
        Err(std::io::Error::last_os_error())
    }
}

/// Runs `command` to its end and gives its exit status and both its outputs.
pub(crate) fn run(mut command: Command) -> Result<(ExitStatus, String), Error> {
    let text = describe(&command);
    let output = command
        .stdin(Stdio::null())
        .output()
        .map_err(|source| Error::Spawn {
            command: text,
            source,
        })?;
    let mut said = String::from_utf8_lossy(&output.stdout).into_owned();
    said.push_str(&String::from_utf8_lossy(&output.stderr));
    Ok((output.status, said))
}

/// Runs `command`, which must exit with 0, and gives what it printed.
pub(crate) fn run_ok(command: Command) -> Result<String, Error> {
    let text = describe(&command);
    let (status, output) = run(command)?;
    if status.success() {
        Ok(output)
    } else {
        Err(Error::Tool {
            command: text,
            status: status.to_string(),
            output,
        })
    }
}

/// A command line as a person would type it (without quoting).
pub(crate) fn describe(command: &Command) -> String {
    let mut text = command.get_program().to_string_lossy().into_owned();
    for argument in command.get_args() {
        text.push(' ');
        text.push_str(&argument.to_string_lossy());
    }
    text
}

/// A log as text; empty while it does not exist.
pub(crate) fn read_lossy(path: &Path) -> String {
    fs::read(path)
        .map(|bytes| String::from_utf8_lossy(&bytes).replace('\r', ""))
        .unwrap_or_default()
}

/// The last part of a log, short enough for a message.
pub(crate) fn tail(log: &str) -> String {
    let mut start = log.len().saturating_sub(TAIL_BYTES);
    while !log.is_char_boundary(start) {
        start += 1;
    }
    log.get(start..).unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Scratch;

    #[test]
    fn dropped_process_is_gone() {
        let scratch = Scratch::new().unwrap();
        let mut command = Command::new("sleep");
        command.arg("1000");
        let process = Process::start(command, scratch.file("log")).unwrap();
        let entry = PathBuf::from(format!("/proc/{}", process.id()));
        assert!(entry.exists());
        drop(process);
        assert!(!entry.exists());
    }

    #[test]
    fn run_ok_quotes_a_failing_command_and_its_output() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo no such luck; exit 7"]);
        let message = run_ok(command).unwrap_err().to_string();
        assert!(
            message.contains("exit 7") && message.contains("no such luck"),
            "{message}"
        );
    }

    #[test]
    fn tail_never_splits_a_character() {
        let log = "é".repeat(TAIL_BYTES);
        assert!(tail(&log).chars().all(|c| c == 'é'));
    }
}
