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
use crate::load::Watch;
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
    /// The rows that lack a part, or were measured on a busy machine. They are measured anew if the run is resumed.
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
                    .map(|(what, target)| (format!("{}/{what}", row.name), *target))
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
        peer: Program::storage_daemon(),
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
        peers_failed: Vec::new(),
    };
    let mut watch = Watch::new()?;
    let mut look = || watch.look();
    let files = (&*store, &*summary);
    let problems = measure(
        arguments,
        &all,
        &selected,
        &mut bench,
        &mut progress,
        files,
        &mut look,
    )?;
    if arguments.keep_images {
        println!("images left in {}", arguments.images.display());
    } else {
        bench.images.remove_all()?;
    }

    let entries = in_order(&all, &progress);
    println!("\n{}\n", report::table(&entries));
    let kept = conclude(&entries, &summary) || !arguments.strict;
    problems
        .iter()
        .for_each(|problem| eprintln!("not measured: {problem}"));
    Ok(if problems.is_empty() && kept {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Prints what became of each target. Returns false if one is missed, or its figures were not taken.
fn conclude(entries: &[Entry], summary: &Path) -> bool {
    let promised = entries.iter().filter(|entry| entry.target.is_some());
    let (decided, open): (Vec<_>, Vec<_>) = promised.partition(|entry| entry.met.is_some());
    let (met, missed): (Vec<_>, Vec<_>) = decided.into_iter().partition(|entry| entry.met == Some(true));
    let (lacking, undecided): (Vec<_>, Vec<_>) =
        open.into_iter().partition(|entry| entry.lacks_measurement());
    println!(
        "{} of {} targets met, {} undecided, {} not measured; figures in {}",
        met.len(),
        met.len() + missed.len() + undecided.len() + lacking.len(),
        undecided.len(),
        lacking.len(),
        summary.display()
    );
    for entry in &missed {
        println!("missed: {}", entry.row);
    }
    for entry in undecided {
        println!(
            "undecided: {}: {}",
            entry.row,
            entry.undecided.as_deref().unwrap_or_default()
        );
    }
    for entry in entries {
        if let Some(reason) = &entry.not_measured {
            println!("not measured: {}: {reason}", entry.row);
        }
    }
    missed.is_empty() && lacking.is_empty()
}

/// Says loudly that this machine is busy.
fn warn_of_load(reason: &str) {
    eprintln!("!!!\n!!! {reason}\n!!! What is measured now decides nothing.\n!!!");
}

/// Measures the rows that are still missing; answers what went wrong. `files` are those of the progress and of the summary. `look`
/// returns a reason if the machine is too busy to decide anything: it is asked before and after each row.
fn measure(
    arguments: &RunArguments,
    all: &[Row],
    selected: &[&Row],
    bench: &mut Bench,
    progress: &mut Progress,
    (store, summary): (&Path, &Path),
    look: &mut dyn FnMut() -> io::Result<Option<String>>,
) -> io::Result<Vec<String>> {
    let begun = Instant::now();
    // From here on the file tells of this run only.
    report::write(summary, &in_order(all, progress))?;
    let mut problems = Vec::new();
    bench.images.settle()?;
    let mut before = look()?;
    before.iter().for_each(|reason| warn_of_load(reason));
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
        let measured = row.measure(bench);
        bench.images.settle()?;
        let after = look()?;
        after.iter().for_each(|reason| warn_of_load(reason));
        let busy = before.or_else(|| after.clone());
        before = after;
        for failure in bench.peers_failed.drain(..) {
            eprintln!("{}: a peer failed, and is left out: {failure}", row.name);
            progress.partial.insert(row.name.to_owned());
        }
        for problem in bench.problems.drain(..) {
            eprintln!("{}: {problem}", row.name);
            problems.push(format!("{}: {problem}", row.name));
            progress.partial.insert(row.name.to_owned());
        }
        match measured {
            Ok(mut entries) => {
                if let Some(reason) = &busy {
                    entries.iter_mut().for_each(|entry| entry.leave_undecided(reason));
                    progress.partial.insert(row.name.to_owned());
                }
                println!("{}", report::table(&entries));
                progress.rows.insert(row.name.to_owned(), entries);
                report::write_json(store, progress)?;
                report::write(summary, &in_order(all, progress))?;
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

/// The rows of an interrupted run with the same id; none if there was no run. Another run's stay as they are.
fn kept(store: &Path, id: &str) -> io::Result<BTreeMap<String, Vec<Entry>>> {
    let text = match fs::read_to_string(store) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        text => text?,
    };
    let mut last: Progress = serde_json::from_str(&text)?;
    last.rows.retain(|row, _| !last.partial.contains(row));
    if last.id != id {
        return Err(io::Error::other(format!(
            "cannot resume: the last run was of {}, and this is of {id}; begin anew without --resume, or elsewhere with --out",
            last.id
        )));
    }
    println!("keeping {} rows of the last run", last.rows.len());
    Ok(last.rows)
}

/// Names what makes figures comparable: the settings and the last commit, of those that change more than pages.
fn run_id(arguments: &RunArguments) -> String {
    let mut git = Command::new("git");
    git.args(["log", "-1", "--format=%h", "--", ":/", ":!/docs", ":!/*.md"]);
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
        return Ok(Program::storage_daemon());
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

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::report::Better;

    /// Runs two rows, each with a figure that meets its target, where `look` sees the load of others.
    fn two_rows(mut look: impl FnMut() -> Option<String>) -> (Vec<Entry>, Progress, Vec<String>) {
        let scratch = lab::Scratch::new().unwrap();
        let arguments = crate::Arguments::parse_from(["ringdisk-bench", "--seconds", "0.1"]).run;
        let row = |name: &'static str| {
            Row::new(name, vec![("iops", 2.0.into())], |row, bench| {
                if row.name == "second" {
                    bench.peers_failed.push("the peer is gone".to_owned());
                }
                let name = format!("{}/iops", row.name);
                let entry = Entry::new(name, "IOPS", Better::Higher, 3.0, ("x", 1.0));
                Ok(vec![entry.target(Some(2.0))])
            })
        };
        let all = [row("first"), row("second")];
        let selected: Vec<&Row> = all.iter().collect();
        let mut bench = Bench::of_test(&scratch.file(""), Program::storage_daemon()).unwrap();
        let mut progress = Progress::default();
        let (store, summary) = (scratch.file("run.json"), scratch.file("summary.json"));
        let problems = measure(
            &arguments,
            &all,
            &selected,
            &mut bench,
            &mut progress,
            (&store, &summary),
            &mut || Ok(look()),
        );
        (report::read(&summary).unwrap(), progress, problems.unwrap())
    }

    #[test]
    fn busy_machine_leaves_every_row_undecided_with_the_reason() {
        let busy = || Some("the machine is busy: others use 1.00 of 2 CPUs".to_owned());
        let (entries, progress, problems) = two_rows(busy);
        assert_eq!(problems, [""; 0], "a busy machine is no error");
        for entry in &entries {
            assert_eq!(entry.met, None);
            assert!(
                entry
                    .undecided
                    .as_ref()
                    .is_some_and(|reason| reason.contains("others use 1.00"))
            );
            assert!(!entry.lacks_measurement());
        }
        assert_eq!(
            (entries.len(), progress.partial.len()),
            (2, 2),
            "to be measured anew"
        );
        assert!(conclude(&entries, Path::new("summary.json")), "nothing is missed");
    }

    #[test]
    fn load_decides_nothing_about_the_rows_before_and_after_it_alone() {
        let mut looks = [None, None, Some("busy".to_owned())].into_iter();
        let (entries, ..) = two_rows(move || looks.next().flatten());
        assert_eq!(entries[0].met, Some(true));
        assert_eq!(
            (entries[1].met, entries[1].undecided.as_deref()),
            (None, Some("busy"))
        );
    }

    #[test]
    fn quiet_machine_decides_and_a_failed_peer_ends_nothing() {
        let (entries, progress, problems) = two_rows(|| None);
        assert!(entries.iter().all(|entry| entry.met == Some(true)), "{entries:?}");
        assert_eq!((entries.len(), problems.len()), (2, 0));
        assert!(progress.partial.contains("second") && !progress.partial.contains("first"));
    }

    #[test]
    fn resumed_run_keeps_rows_of_its_own_id_and_refuses_those_of_another() {
        let scratch = lab::Scratch::new().unwrap();
        let store = scratch.file("run.json");
        assert!(kept(&store, "one").unwrap().is_empty(), "no run to go on with");
        let (_, mut progress, _) = two_rows(|| None);
        progress.id = "one".to_owned();
        let partial = progress.partial.len();
        report::write_json(&store, &progress).unwrap();
        assert_eq!(kept(&store, "one").unwrap().len(), 2 - partial);
        let error = kept(&store, "another").unwrap_err().to_string();
        assert!(error.contains("of one, and this is of another"), "{error}");
    }

    #[test]
    fn strict_run_wants_every_target_measured() {
        let lacking = Entry::without_peer("a".into(), "IOPS", 3.0, "x", "x is gone").target(Some(2.0));
        assert!(!conclude(&[lacking], Path::new("summary.json")));
        let shown = Entry::without_peer("a".into(), "IOPS", 3.0, "x", "x is gone");
        assert!(
            conclude(&[shown], Path::new("summary.json")),
            "nothing was promised"
        );
    }
}
