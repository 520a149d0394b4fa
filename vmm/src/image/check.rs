//! `ringdisk image check`: checks an image, optionally repairs it, and reports both.

use std::error::Error;
use std::io::Write;

use block::Context;
use block::file::{FileOptions, ImageFile};
use block::lock::LockMode;
use clap::ValueEnum;
use qcow::format::ClusterUse;
use qcow::image::{self as tools, CheckReport, RepairError, RepairReport, RepairScope};
use serde::Serialize;

use super::{CheckArguments, lock, on_image, open_to_read, text, unclaimed, write_json};
use crate::error::{CommandFailure, chain};

/// The value of `--repair`.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum Repair {
    /// Leaked clusters: allocated, but not referenced
    Leaks,
    /// Leaked clusters, wrong or missing refcounts, and the flags that depend on them
    All,
}

impl From<Repair> for RepairScope {
    fn from(repair: Repair) -> Self {
        match repair {
            Repair::Leaks => Self::Leaks,
            Repair::All => Self::All,
        }
    }
}

/// The JSON output of a check with repair: the fields of `qemu-img`, and the reason if nothing was repaired.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Repaired {
    #[serde(flatten)]
    report: CheckReport,
    leaks_fixed: u64,
    corruptions_fixed: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    repair_refused: Option<String>,
}

pub(super) fn run(arguments: &CheckArguments, out: &mut dyn Write) -> Result<u8, CommandFailure> {
    if let Some(what) = arguments.repair {
        return repair(arguments, what.into(), out);
    }
    let file = open_to_read(&arguments.path, arguments.force_share).map_err(CommandFailure::Failed)?;
    let report = on_image(&file, &Context::syscalls(), async |view| {
        tools::check(&view).await
    })?;
    let report = report.map_err(|error| cannot("check", arguments, error))?;
    if arguments.json {
        write_json(out, &report)?;
    } else {
        out.write_all(text::check(&report).as_bytes())?;
    }
    Ok(report.verdict().exit_code())
}

fn cannot(
    what: &str,
    arguments: &CheckArguments,
    error: impl Error + Send + Sync + 'static,
) -> CommandFailure {
    CommandFailure::about(format!("cannot {what} {}", arguments.path.display()), error)
}

fn repair(arguments: &CheckArguments, scope: RepairScope, out: &mut dyn Write) -> Result<u8, CommandFailure> {
    let path = &arguments.path;
    let options = FileOptions {
        write: true,
        direct: false,
    };
    unclaimed(path)?;
    let file = ImageFile::open(path, options).map_err(|error| CommandFailure::Failed(error.into()))?;
    lock(&file, LockMode::Write).map_err(|error| CommandFailure::Failed(error.into()))?;
    let cx = Context::syscalls();
    let repaired = on_image(&file, &cx, async |view| tools::repair(&view, scope).await)?;
    let answer = match repaired {
        Ok(done) => Repaired {
            leaks_fixed: done.leaks_fixed(),
            corruptions_fixed: done.corruptions_fixed(),
            repair_refused: nothing_to_do(scope, &done),
            report: done.after,
        },
        Err(
            error @ (RepairError::Damaged(_) | RepairError::RefcountsDamaged | RepairError::TableTooLarge),
        ) => {
            let report = on_image(&file, &cx, async |view| tools::check(&view).await)?;
            Repaired {
                report: report.map_err(|error| cannot("check", arguments, error))?,
                leaks_fixed: 0,
                corruptions_fixed: 0,
                repair_refused: Some(refusal(&error)),
            }
        }
        Err(error) => return Err(cannot("repair", arguments, error)),
    };
    if arguments.json {
        write_json(out, &answer)?;
    } else {
        out.write_all(text::repaired(answer.leaks_fixed, answer.corruptions_fixed).as_bytes())?;
        out.write_all(text::check(&answer.report).as_bytes())?;
        // Last, where it is seen below a long list.
        if let Some(reason) = &answer.repair_refused {
            writeln!(
                out,
                "\nNothing was repaired, the image was not changed: {reason}."
            )?;
        }
    }
    Ok(answer.report.verdict().exit_code())
}

/// Returns the reason if a repair of `scope` changed nothing although the image has errors.
fn nothing_to_do(scope: RepairScope, done: &RepairReport) -> Option<String> {
    let needless = scope == RepairScope::Leaks && done.before.leaks == 0 && done.after.corruptions > 0;
    needless.then(|| "no cluster is leaked; use --repair all to repair corruption".to_owned())
}

/// Returns the reason why nothing was repaired, and the alternative.
fn refusal(error: &RepairError) -> String {
    let instead = match error {
        RepairError::Damaged(finding) if finding.structure == ClusterUse::SnapshotTable => {
            "; use `qemu-img check -r all` to repair snapshot table entries"
        }
        RepairError::Damaged(_) => {
            "; restore a backup, or serve the image with readonly=on and copy what can be read"
        }
        _ => "",
    };
    format!("{}{instead}", chain(error))
}
