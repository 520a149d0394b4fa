//! The heartbeat of a guest: a serial port on which it ticks every second, and answers with evidence if asked.
//!
//! It tells a guest whose emulator has stopped from one in which only a program hangs. What it runs lies in the
//! guest's memory: no disk that somebody serves can stop it.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::process::{self, GLANCE, read_lossy};
use crate::{Error, Scratch};

/// A guest that did not tick for so long has stopped. One of eight on two CPUs has been seen to tick every 4 s.
pub(crate) const STOPPED: Duration = Duration::from_secs(30);
/// The longest wait for evidence.
const EVIDENCE_MAX: Duration = Duration::from_secs(60);
/// The last line of the evidence.
const END: &str = "evidence ends";

/// The beginning of the guest's script. What the guest runs on its third serial port is a copy in memory.
pub(crate) const SCRIPT: &str = include_str!("../guest/heartbeat.sh");

/// The host's end of that port.
#[derive(Debug)]
pub(crate) struct Heartbeat {
    /// A FIFO whose other end QEMU reads; open for reading too, so that QEMU need not wait for a writer.
    questions: PathBuf,
    asking: File,
    log: PathBuf,
    /// The emulator's log: the processors' state at each reset.
    resets: PathBuf,
}

/// The state of a guest's heartbeat.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Pulse {
    /// It never ticked: its script was not reached.
    Never,
    /// Its last tick was so long ago.
    Stopped(Duration),
    /// It ticks.
    Beats,
}

impl Heartbeat {
    /// The port of the guest `name`, with its files in `scratch`.
    pub(crate) fn new(scratch: &Scratch, name: &str) -> Result<Self, Error> {
        let log = scratch.file(&format!("{name}.heartbeat"));
        // What an earlier guest of this name left is not this one's pulse.
        fs::write(&log, "").map_err(|source| Error::File {
            action: "create",
            path: log.clone(),
            source,
        })?;
        let questions = scratch.file(&format!("{name}.questions"));
        fs::remove_file(&questions).ok();
        let mut command = Command::new("mkfifo");
        command.arg(&questions);
        process::run_ok(command)?;
        let asking = File::options().read(true).write(true).open(&questions);
        let asking = asking.map_err(|source| Error::File {
            action: "open",
            path: questions.clone(),
            source,
        })?;
        Ok(Self {
            questions,
            asking,
            log,
            resets: scratch.file(&format!("{name}.resets")),
        })
    }

    /// Adds the port to QEMU's command line, as the next one.
    pub(crate) fn add_to(&self, command: &mut Command) {
        let (questions, log) = (self.questions.display(), self.log.display());
        command
            .arg("-chardev")
            .arg(format!("file,id=beat,path={log},input-path={questions}"));
        // By itself it would share its interrupt with the first port, where edges get lost.
        command.args(["-device", "isa-serial,chardev=beat,index=2,irq=5"]);
        command.args(["-d", "cpu_reset", "-D"]).arg(&self.resets);
    }

    /// The pulse, where no tick for `limit` means that it has stopped.
    pub(crate) fn pulse(&self, limit: Duration) -> Pulse {
        pulse(&self.log, limit)
    }

    /// The processors' state when the guest restarted by itself, as far as it is known: the first reset that a triple fault caused, or
    /// else the last reset.
    pub(crate) fn state_at_reset(&self) -> String {
        state_at_reset(&read_lossy(&self.resets))
    }

    /// Asks the guest what its processes are doing. Says so if there is no answer.
    pub(crate) fn evidence(&self) -> String {
        if let Err(error) = (&self.asking).write_all(b"say\n") {
            return format!("the guest cannot be asked: {error}");
        }
        let until = Instant::now() + EVIDENCE_MAX;
        loop {
            let said = read_lossy(&self.log);
            if said.contains(END) || Instant::now() >= until {
                let lines: Vec<_> = said.lines().filter(|line| *line != "tick").collect();
                return lines.join("\n");
            }
            thread::sleep(GLANCE);
        }
    }
}

/// The lines of a processor's state up to its floating-point registers.
const STATE_LINES: usize = 22;

fn state_at_reset(resets: &str) -> String {
    let at = resets.find("Triple fault").or_else(|| resets.rfind("CPU Reset"));
    let lines = resets[at.unwrap_or_default()..].lines();
    let state: Vec<_> = lines
        .filter(|line| !line.starts_with("FPR"))
        .take(STATE_LINES)
        .collect();
    state.join("\n")
}

fn pulse(log: &Path, limit: Duration) -> Pulse {
    let last = fs::metadata(log).ok().filter(|log| log.len() > 0);
    let Some(last) = last.and_then(|log| log.modified().ok()) else {
        return Pulse::Never;
    };
    // A clock that was set back makes it a fresh one: then nothing is retried.
    match last.elapsed() {
        Ok(age) if age >= limit => Pulse::Stopped(age),
        _ => Pulse::Beats,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_at_reset_is_that_of_the_triple_fault() {
        let resets = "CPU Reset (CPU 0)\nEIP=0\nTriple fault\nCPU Reset (CPU 1)\nRIP=ffff\n";
        assert_eq!(
            state_at_reset(resets),
            "Triple fault\nCPU Reset (CPU 1)\nRIP=ffff"
        );
        assert_eq!(
            state_at_reset("CPU Reset (CPU 0)\nEIP=0\n"),
            "CPU Reset (CPU 0)\nEIP=0"
        );
        assert_eq!(state_at_reset(""), "");
    }

    #[test]
    fn pulse_stops_when_the_last_tick_is_old() {
        let scratch = Scratch::new().unwrap();
        let heartbeat = Heartbeat::new(&scratch, "guest").unwrap();
        let limit = Duration::from_secs(30);
        assert_eq!(heartbeat.pulse(limit), Pulse::Never);
        fs::write(&heartbeat.log, "tick\n").unwrap();
        assert_eq!(heartbeat.pulse(limit), Pulse::Beats);
        let log = fs::File::options().append(true).open(&heartbeat.log).unwrap();
        let old = std::time::SystemTime::now() - Duration::from_secs(40);
        log.set_modified(old).unwrap();
        assert!(matches!(heartbeat.pulse(limit), Pulse::Stopped(age) if age.as_secs() >= 40));
    }
}
