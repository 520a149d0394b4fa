//! Children: started so that they cannot outlive us, watched, and ended by their process id.
#![expect(
    unsafe_code,
    reason = "asks the kernel to end a child with its parent, and for CPU times"
)]

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// The time that a server has to end by itself after SIGTERM.
const GRACE: Duration = Duration::from_secs(20);

/// A running child. Dropped, it is killed.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    name: String,
    log: PathBuf,
}

impl Process {
    /// Starts `command` with its output going to the file `log`.
    ///
    /// # Errors
    ///
    /// If the program or the log cannot be opened; the message names the program.
    pub(crate) fn start(mut command: Command, log: &Path) -> io::Result<Self> {
        let name = command.get_program().to_string_lossy().into_owned();
        let out = File::create(log)?;
        command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out);
        die_with_parent(&mut command);
        let child = command.spawn().map_err(|error| named(&name, error))?;
        Ok(Self {
            child,
            name,
            log: log.to_owned(),
        })
    }

    /// The child's process id.
    #[must_use]
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Fails, with the end of its log, if the child has ended.
    ///
    /// # Errors
    ///
    /// If it has ended.
    pub(crate) fn still_runs(&mut self) -> io::Result<()> {
        match self.child.try_wait()? {
            None => Ok(()),
            Some(status) => Err(io::Error::other(format!(
                "{} ended, {status}: {}",
                self.name,
                self.last_words()
            ))),
        }
    }

    /// The end of what the child has printed.
    #[must_use]
    pub(crate) fn last_words(&self) -> String {
        let text = fs::read(&self.log).unwrap_or_default();
        let from = text.len().saturating_sub(600);
        String::from_utf8_lossy(&text[from..]).trim().to_owned()
    }

    /// Asks the child to end, and waits until it has.
    ///
    /// # Errors
    ///
    /// If it does not end in time (it is killed then) or ends with an error.
    pub(crate) fn stop(mut self) -> io::Result<()> {
        // SAFETY: signals a child that has not been waited for, so the id is still its own.
        unsafe { libc::kill(self.child.id() as libc::pid_t, libc::SIGTERM) };
        let since = Instant::now();
        while since.elapsed() < GRACE {
            if let Some(status) = self.child.try_wait()? {
                return if status.success() {
                    Ok(())
                } else {
                    Err(self.failed(status))
                };
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Err(io::Error::other(format!(
            "{} did not end {} s after SIGTERM",
            self.name,
            GRACE.as_secs()
        )))
    }

    fn failed(&self, status: ExitStatus) -> io::Error {
        io::Error::other(format!("{}: {status}: {}", self.name, self.last_words()))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only if the child is gone already, which is what is wanted.
        let _gone = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// Runs `command` to its end and answers what it printed to its standard output.
///
/// # Errors
///
/// If it cannot be started, fails (the message carries its standard error), or takes longer than `limit`.
pub(crate) fn output(mut command: Command, limit: Duration) -> io::Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    die_with_parent(&mut command);
    let mut child = command.spawn().map_err(|error| named(&name, error))?;
    let mut pipes = (child.stdout.take(), child.stderr.take());
    let readers = (
        std::thread::spawn(move || read_all(pipes.0.take())),
        std::thread::spawn(move || read_all(pipes.1.take())),
    );
    let since = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if since.elapsed() > limit || crate::interrupted() {
            child.kill()?;
            child.wait()?;
            return Err(io::Error::other(format!(
                "{name} was ended after {} s",
                since.elapsed().as_secs()
            )));
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let text = |reader: std::thread::JoinHandle<String>| reader.join().unwrap_or_default();
    let (out, err) = (text(readers.0), text(readers.1));
    if status.success() {
        return Ok(out);
    }
    let words: Vec<_> = err.trim().lines().rev().take(5).collect();
    let words: Vec<_> = words.into_iter().rev().collect();
    Err(io::Error::other(format!(
        "{name}: {status}: {}",
        words.join(" / ")
    )))
}

fn read_all(pipe: Option<impl Read>) -> String {
    let mut bytes = Vec::new();
    if let Some(mut pipe) = pipe {
        // A pipe that breaks ends with its child, whose status tells why.
        let _broken = pipe.read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn named(name: &str, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("cannot start {name}: {error}"))
}

fn die_with_parent(command: &mut Command) {
    // SAFETY: between fork and exec only `prctl` is called, which is async-signal-safe and takes no
    // memory.
    unsafe {
        command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        })
    };
}

/// The CPU time all threads of a process have used, user and system, in seconds.
///
/// # Errors
///
/// If the process is gone.
pub(crate) fn cpu_seconds(pid: u32) -> io::Result<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let ticks =
        cpu_ticks(&stat).ok_or_else(|| io::Error::other(format!("/proc/{pid}/stat is odd: {stat}")))?;
    // SAFETY: answers a constant of the system.
    let per_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    Ok(ticks as f64 / per_second as f64)
}

/// utime + stime (fields 14 and 15). The name in field 2 may hold anything, so count behind its end.
fn cpu_ticks(stat: &str) -> Option<u64> {
    let mut fields = stat
        .get(stat.rfind(')')? + 1..)?
        .split_ascii_whitespace()
        .skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(user + system)
}

/// The CPU time this process has used, in seconds, to the microsecond.
#[must_use]
pub(crate) fn own_cpu_seconds() -> f64 {
    // SAFETY: `rusage` is plain integers, for which zero is a value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: fills the struct we own.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

/// The resident memory of a process that is not shared memory, in MiB: without what a client lent it.
///
/// # Errors
///
/// If the process is gone.
pub(crate) fn resident_mib(pid: u32) -> io::Result<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    Ok(resident_kib(&status) as f64 / 1024.0)
}

fn resident_kib(status: &str) -> u64 {
    status
        .lines()
        .filter_map(|line| {
            line.strip_prefix("RssAnon:")
                .or_else(|| line.strip_prefix("RssFile:"))
        })
        .filter_map(|rest| rest.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok())
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_ticks_skips_a_name_with_spaces_and_brackets() {
        let stat = "7 (a) b (c)) S 1 2 3 4 5 6 7 8 9 10 300 45 0 0 20 0 1 0";
        assert_eq!(cpu_ticks(stat), Some(345));
        assert_eq!(cpu_ticks("7 (a S 1"), None);
    }

    #[test]
    fn resident_kib_excludes_shared_memory() {
        let status =
            "Name:\tx\nVmRSS:\t 9000 kB\nRssAnon:\t 1000 kB\nRssFile:\t 2000 kB\nRssShmem:\t 6000 kB\n";
        assert_eq!(resident_kib(status), 3000);
    }

    #[test]
    fn own_process_has_memory_and_cpu_time() {
        let spin = Instant::now();
        while spin.elapsed() < Duration::from_millis(30) {}
        assert!(own_cpu_seconds() > 0.01);
        assert!(cpu_seconds(std::process::id()).is_ok());
        assert!(resident_mib(std::process::id()).is_ok_and(|mib| mib > 0.5));
    }

    #[test]
    fn output_quotes_a_failing_child() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo no such luck >&2; exit 3"]);
        let error = output(command, Duration::from_secs(10)).map_err(|error| error.to_string());
        assert!(error.is_err_and(|text| text.contains("no such luck") && text.contains('3')));
    }
}
