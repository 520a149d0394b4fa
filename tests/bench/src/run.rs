//! One run: which rows, in which order, and what becomes of their results.
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "the run reports as it goes"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::client::drive::Timing;
use crate::images::Images;
use crate::report::{self, Entry};
use crate::rows::{self, Bench, Row};
use crate::server::Program;
use crate::{Ours, RunArguments, process};

/// The longest time to build our server.
const BUILD: Duration = Duration::from_secs(1200);

/// The results of a run so far, under the settings in `id`: rows of one id may stand side by side.
#[derive(Debug, Default, Deserialize, Serialize)]
struct Progress {
    id: String,
    rows: BTreeMap<String, Vec<Entry>>,
    /// The rows that lack a part. They are measured anew if the run is resumed.
    #[serde(default)]
    partial: BTreeSet<String>,
}

/// Measures what is asked for.
///
/// # Errors
///
/// If the run cannot begin; rows that fail are reported and make the run end with failure.
pub(crate) fn run(arguments: &RunArguments) -> io::Result<ExitCode> {
    let all = rows::all(arguments.before.is_some());
    if arguments.list {
        all.iter().for_each(|row| println!("{}", row.name));
        return Ok(ExitCode::SUCCESS);
    }
    let summary = arguments.out.join("summary.json");
    if arguments.markdown {
        let promises: Vec<_> = all
            .iter()
            .flat_map(|row| {
                row.promises
                    .iter()
                    .map(|(what, ratio)| (format!("{}/{what}", row.name), *ratio))
            })
            .collect();
        let entries = match report::read(&summary) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            entries => entries?,
        };
        println!("{}", report::markdown(&promises, &entries));
        return Ok(ExitCode::SUCCESS);
    }
    let wanted = |row: &&Row| {
        arguments.filters.is_empty()
            || arguments
                .filters
                .iter()
                .any(|filter| row.name.contains(filter.as_str()))
    };
    let selected: Vec<&Row> = all.iter().filter(wanted).collect();
    if selected.is_empty() {
        return Err(io::Error::other("no row has such a name; --list shows them all"));
    }
    if !(0.1..=600.0).contains(&arguments.seconds) {
        return Err(io::Error::other("--seconds takes 0.1 to 600"));
    }

    fs::create_dir_all(&arguments.out)?;
    let store = arguments.out.join("run.json");
    let id = run_id(arguments);
    let mut progress = Progress {
        id,
        ..Progress::default()
    };
    if arguments.resume {
        progress.rows = kept(&store, &progress.id)?;
    }
    let mut bench = Bench {
        ours: our_program(arguments)?,
        peer: Program::StorageDaemon,
        images: Images::new(&arguments.images, arguments.keep_images)?,
        before: arguments.before.clone(),
        pairs: arguments.pairs,
        pairs_max: arguments.until_decided.unwrap_or(0).max(arguments.pairs),
        wait: arguments.wait,
        timing: Timing {
            warm_up: Duration::from_secs_f64((arguments.seconds / 5.0).clamp(0.1, 1.0)),
            measure: Duration::from_secs_f64(arguments.seconds),
        },
        problems: Vec::new(),
    };
    let problems = measure(arguments, &selected, &mut bench, &mut progress, &store, &summary)?;
    if arguments.keep_images {
        println!("images left in {}", arguments.images.display());
    } else {
        bench.images.remove_all()?;
    }

    let entries = in_order(&all, &progress);
    println!("\n{}\n", report::table(&entries));
    let (undecided, decided): (Vec<_>, Vec<_>) = entries
        .iter()
        .filter(|entry| entry.met.is_some())
        .partition(|entry| entry.is_undecided());
    let (met, missed): (Vec<_>, Vec<_>) = decided.into_iter().partition(|entry| entry.met == Some(true));
    println!(
        "{} of {} targets met, {} undecided; figures in {}",
        met.len(),
        met.len() + missed.len() + undecided.len(),
        undecided.len(),
        summary.display()
    );
    let kept = !arguments.strict || missed.is_empty();
    for (what, entries) in [("missed", missed), ("undecided", undecided)] {
        entries.iter().for_each(|entry| println!("{what}: {}", entry.row));
    }
    problems
        .iter()
        .for_each(|problem| eprintln!("not measured: {problem}"));
    Ok(if problems.is_empty() && kept {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Measures the rows that are still missing; answers what went wrong.
fn measure(
    arguments: &RunArguments,
    selected: &[&Row],
    bench: &mut Bench,
    progress: &mut Progress,
    store: &Path,
    summary: &Path,
) -> io::Result<Vec<String>> {
    let begun = Instant::now();
    let all = rows::all(arguments.before.is_some());
    // From here on the file tells of this run only.
    report::write(summary, &in_order(&all, progress))?;
    let mut problems = Vec::new();
    for (index, row) in selected.iter().enumerate() {
        if progress.rows.contains_key(row.name) {
            continue;
        }
        if crate::interrupted() {
            problems.push(format!("{}: interrupted", row.name));
            continue;
        }
        let minutes = begun.elapsed().as_secs_f64() / 60.0;
        if arguments.minutes.is_some_and(|limit| minutes > limit) {
            problems.push(format!("{}: no time left, go on with --resume", row.name));
            continue;
        }
        println!("[{}/{}] {}", index + 1, selected.len(), row.name);
        match row.measure(bench) {
            Ok(entries) => {
                println!("{}", report::table(&entries));
                for problem in bench.problems.drain(..) {
                    eprintln!("{}: {problem}", row.name);
                    problems.push(format!("{}: {problem}", row.name));
                    progress.partial.insert(row.name.to_owned());
                }
                progress.rows.insert(row.name.to_owned(), entries);
                report::write_json(store, progress)?;
                report::write(summary, &in_order(&all, progress))?;
            }
            Err(error) => {
                eprintln!("{}: {error}", row.name);
                problems.push(format!("{}: {error}", row.name));
            }
        }
    }
    Ok(problems)
}

fn in_order(all: &[Row], progress: &Progress) -> Vec<Entry> {
    all.iter()
        .filter_map(|row| progress.rows.get(row.name))
        .flatten()
        .cloned()
        .collect()
}

/// The rows of an interrupted run with the same id.
fn kept(store: &Path, id: &str) -> io::Result<BTreeMap<String, Vec<Entry>>> {
    let text = match fs::read_to_string(store) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        text => text?,
    };
    let mut last: Progress = serde_json::from_str(&text)?;
    last.rows.retain(|row, _| !last.partial.contains(row));
    if last.id != id {
        println!("the last run had other settings or another commit: nothing to resume");
        return Ok(BTreeMap::new());
    }
    println!("keeping {} rows of the last run", last.rows.len());
    Ok(last.rows)
}

/// Names what makes figures comparable: the commit and the settings.
fn run_id(arguments: &RunArguments) -> String {
    let mut git = Command::new("git");
    git.args(["rev-parse", "--short", "HEAD"]);
    let commit = process::output(git, Duration::from_secs(10)).unwrap_or_default();
    let commit = if commit.trim().is_empty() {
        "unknown"
    } else {
        commit.trim()
    };
    let RunArguments {
        pairs,
        until_decided,
        seconds,
        ours,
        wait,
        before,
        ..
    } = arguments;
    format!("{commit}, {pairs} x {seconds} s, {until_decided:?}, {ours:?}, {wait:?}, {before:?}")
}

/// Our side: the binary given, or the one built now beside this program.
fn our_program(arguments: &RunArguments) -> io::Result<Program> {
    if arguments.ours == Ours::StorageDaemon {
        return Ok(Program::StorageDaemon);
    }
    if let Some(binary) = &arguments.ringdisk {
        return Ok(Program::Ringdisk(binary.canonicalize()?));
    }
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Command::new(cargo);
    build.args(["build", "-q", "--release", "-p", "ringdisk", "--bin", "ringdisk"]);
    process::output(build, BUILD)?;
    let directory = std::env::current_exe()?
        .parent()
        .map(PathBuf::from)
        .unwrap_or_default();
    let binary = directory.join("ringdisk");
    if !binary.is_file() {
        let shown = binary.display();
        return Err(io::Error::other(format!(
            "no server at {shown}; name it with --ringdisk"
        )));
    }
    Ok(Program::Ringdisk(binary))
}
