//! `ringdisk io`: requests to a disk from the command line, through the engine that guests use.
//!
//! It understands the language of `qemu-io`, as far as it is about data, and answers in its words, so
//! that one script can ask both. Background requests go over several queues, each on a worker of its
//! own, as a guest's would.

use std::io::{BufRead, Write};

use block::worker::WorkerConfig;

use crate::disk_config::{DiskConfig, MAX_QUEUES};
use crate::error::{CommandFailure, EXIT_FAILURE, EXIT_OK};
use crate::open;

pub mod command;
pub mod output;
mod session;
mod transfer;
mod worker_queue;

pub use session::SessionError;
pub use worker_queue::WorkerQueueError;

use command::Command;
use session::Session;

/// Opens the disk, runs `commands` (or the lines of standard input, if there are none), and closes it.
///
/// Returns 0, or 1 if any command failed. Commands given as arguments are all parsed before the
/// disk is opened.
///
/// # Errors
///
/// A usage failure for a command that is none or contradictory options; a failure if the disk cannot be
/// opened, served or closed.
pub fn run(config: DiskConfig, queues: Option<u16>, commands: &[String]) -> Result<u8, CommandFailure> {
    let queues = queue_count(&config, queues)?;
    let parsed = commands
        .iter()
        .map(|line| Command::parse(line).map_err(|error| CommandFailure::Usage(error.to_string())))
        .collect::<Result<Vec<_>, _>>()?;
    let opened = open::open(&config).map_err(|error| CommandFailure::Failed(error.into()))?;
    let workers = (0..queues)
        .map(|queue| config.worker(queue, &WorkerConfig::default()))
        .collect();

    let mut out = std::io::stdout().lock();
    let mut session = Session::open(opened.disk(), workers, &mut out).map_err(about(&config))?;
    let done = if commands.is_empty() {
        run_lines(&mut session, std::io::stdin().lock(), &config)
    } else {
        run_all(&mut session, parsed.into_iter().flatten(), &config)
    };
    // Whatever happened, what was written must not be lost.
    let closed = session.close().map_err(about(&config));
    done?;
    let failures = closed?;
    out.flush()?;
    Ok(if failures == 0 { EXIT_OK } else { EXIT_FAILURE })
}

/// Returns the number of queues: `--queues`, or else that of the disk.
fn queue_count(config: &DiskConfig, queues: Option<u16>) -> Result<u16, CommandFailure> {
    match queues {
        None => Ok(config.num_queues),
        Some(count) if (1..=MAX_QUEUES).contains(&count) => Ok(count),
        Some(count) => Err(CommandFailure::Usage(format!(
            "--queues {count}: expected a number from 1 to {MAX_QUEUES}"
        ))),
    }
}

/// Carries out parsed commands, up to one that ends the session.
fn run_all(
    session: &mut Session<'_>,
    commands: impl Iterator<Item = Command>,
    config: &DiskConfig,
) -> Result<(), CommandFailure> {
    for command in commands {
        if !session.run(command).map_err(about(config))? {
            break;
        }
    }
    Ok(())
}

/// Runs the lines of standard input. A line that is not a command is reported and counts as failed.
fn run_lines(
    session: &mut Session<'_>,
    lines: impl BufRead,
    config: &DiskConfig,
) -> Result<(), CommandFailure> {
    for line in lines.lines() {
        let line = line.map_err(|error| CommandFailure::about("cannot read standard input", error))?;
        let go_on = match Command::parse(&line) {
            Ok(None) => true,
            Ok(Some(command)) => session.run(command).map_err(about(config))?,
            Err(error) => {
                session.fail(&format!("{error}\n")).map_err(about(config))?;
                true
            }
        };
        if !go_on {
            break;
        }
    }
    Ok(())
}

/// A session's error with the disk's name; a closed output stays one.
fn about(config: &DiskConfig) -> impl Fn(SessionError) -> CommandFailure + '_ {
    |error| match error {
        SessionError::Output(error) => error.into(),
        error => CommandFailure::about(config.name(), error),
    }
}
