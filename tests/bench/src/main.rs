//! Benchmarks of Ringdisk beside its peers: `make bench`.
//!
//! Every figure is the median of several measurements, ours and the peer's taking turns in one run on one
//! machine: ratios mean something, absolute figures only here. A row in which our side fails is reported and left out;
//! the run then ends with an error. A peer that fails is named, and the figures beside it are not measured. Where others use the
//! machine, nothing is decided. What was measured goes to `target/bench/summary.json` after each row.

mod cache;
mod client;
mod content;
mod engines;
mod fio;
mod histogram;
mod images;
mod load;
mod peer;
mod process;
mod report;
mod rows;
mod run;
mod server;
mod signals;
mod space;
mod target;
mod workload;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};

use client::drive::Wait;
pub(crate) use signals::interrupted;

/// Measures Ringdisk beside its peers.
#[derive(Debug, Parser)]
#[command(name = "ringdisk-bench")]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    run: RunArguments,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Runs one workload on one engine in this process (used by the runner itself).
    #[command(hide = true, name = "engine-task")]
    Engine {
        /// The task, as JSON.
        task: String,
    },
}

/// The rows to measure, and the way to measure them.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct RunArguments {
    /// Only rows whose name contains one of these.
    filters: Vec<String>,
    /// Print the rows' names and end.
    #[arg(long)]
    list: bool,
    /// Keep the rows that the last run with the same settings has measured.
    #[arg(long)]
    resume: bool,
    /// Print what is promised beside the last run's figures as Markdown, and end.
    #[arg(long)]
    markdown: bool,
    /// Leave the images for the next run, and use those of the last.
    #[arg(long)]
    keep_images: bool,
    /// Number of measurements of each side of a row.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=99))]
    pairs: u32,
    /// Measure a row so often at the most while one of its targets is undecided. Rows in guests are measured as often as `--pairs` says.
    #[arg(long, value_name = "PAIRS", value_parser = clap::value_parser!(u32).range(1..=99))]
    until_decided: Option<u32>,
    /// Seconds of each measurement.
    #[arg(long, env = "RINGDISK_BENCH_SECONDS", default_value_t = 3.0)]
    seconds: f64,
    /// Begin no new row after so many minutes; --resume goes on with the rest. Without it, all rows are measured.
    #[arg(long)]
    minutes: Option<f64>,
    /// Directory of the images while they are measured; must be on a disk.
    #[arg(long, env = "RINGDISK_BENCH_DIR", default_value = "target/bench/images")]
    images: PathBuf,
    /// Directory of the results.
    #[arg(long, default_value = "target/bench")]
    out: PathBuf,
    /// Our server's binary; built if not given.
    #[arg(long, env = "RINGDISK_BIN")]
    ringdisk: Option<PathBuf>,
    /// Compare with an older build, instead of with peers: the directory of its `ringdisk` and `ringdisk-bench`.
    #[arg(long, value_name = "DIR")]
    before: Option<PathBuf>,
    /// Fail if a target is missed or not measured, and not merely undecided.
    #[arg(long)]
    strict: bool,
    /// Way in which all clients over vhost-user wait for answers, instead of as each row has it.
    #[arg(long, value_enum)]
    wait: Option<Wait>,
    /// Server on our side over vhost-user. With the peer on both sides every ratio should be near 1.
    #[arg(long, value_enum, default_value_t = Ours::Ringdisk)]
    ours: Ours,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum Ours {
    Ringdisk,
    StorageDaemon,
}

#[expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a program that prints results"
)]
fn main() -> ExitCode {
    signals::install();
    let arguments = Arguments::parse();
    let ended = match arguments.command {
        Some(Command::Engine { task }) => engines::run_here(&task).map(|json| {
            println!("{json}");
            ExitCode::SUCCESS
        }),
        None => run::run(&arguments.run),
    };
    ended.unwrap_or_else(|error| {
        eprintln!("ringdisk-bench: {error}");
        ExitCode::FAILURE
    })
}
