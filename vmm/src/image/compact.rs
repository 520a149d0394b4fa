//! `ringdisk image compact`: makes the file of an image that is not served shorter.

use std::io::{IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use qcow::{CompactOptions, CompactProgress, Compacted};

use super::{failure, unclaimed};
use crate::error::{CommandFailure, EXIT_FAILURE, EXIT_OK};
use crate::secret_file::read_secret;
use crate::signals::StopSignals;
use crate::size::{human_short, parse_bytes};

/// The time between two lines of progress.
const LINE_AFTER: Duration = Duration::from_millis(200);

/// The command line of `image compact`.
#[derive(Args, Debug)]
pub struct CompactArguments {
    /// Most bytes to move in a second, such as 50M [default: no limit]
    #[arg(long, value_name = "SIZE", value_parser = parse_rate)]
    rate: Option<u64>,
    /// File with the secret that opens an encrypted image, or a descriptor such as /dev/fd/3; a newline at its end counts
    #[arg(long, value_name = "PATH")]
    secret_file: Option<PathBuf>,
    /// Image file; no program may have it open for writing
    path: PathBuf,
}

/// Parses a rate in bytes per second.
pub(crate) fn parse_rate(text: &str) -> Result<u64, String> {
    match parse_bytes(text) {
        Ok(0) => Err("expected at least one byte in a second".to_owned()),
        Ok(rate) => Ok(rate),
        Err(error) => Err(error.to_string()),
    }
}

/// Compacts the image and prints a line about the result. Exits with 1 if it was interrupted.
pub(super) fn run(arguments: &CompactArguments, out: &mut dyn Write) -> Result<u8, CommandFailure> {
    unclaimed(&arguments.path)?;
    let secret = arguments.secret_file.as_deref().map(read_secret).transpose()?;
    let is_stopped = stop_flag()?;
    let mut line = ProgressLine::default();
    let options = CompactOptions { rate: arguments.rate };
    let compacted = qcow::offline::compact_image(&arguments.path, secret, &options, |progress| {
        line.show(progress);
        match is_stopped.load(Ordering::Relaxed) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    });
    line.clear();
    let compacted = compacted.map_err(|error| failure(&arguments.path, error))?;
    writeln!(out, "{}: {}", arguments.path.display(), describe(&compacted))?;
    Ok(if compacted.is_stopped {
        EXIT_FAILURE
    } else {
        EXIT_OK
    })
}

/// Returns a flag that a stop signal sets. A second signal ends the process at once, which a power cut does as well.
fn stop_flag() -> Result<Arc<AtomicBool>, CommandFailure> {
    let about = |error| CommandFailure::about("cannot wait for signals", error);
    let signals = StopSignals::block().map_err(about)?;
    let flag = Arc::new(AtomicBool::new(false));
    let is_stopped = Arc::clone(&flag);
    let wait = move || {
        while signals.wait().is_ok() {
            if is_stopped.swap(true, Ordering::Relaxed) {
                std::process::exit(i32::from(EXIT_FAILURE));
            }
        }
    };
    let thread = std::thread::Builder::new().name("signals".to_owned());
    thread.spawn(wait).map_err(about)?;
    Ok(flag)
}

/// Returns a compaction's result in words.
pub(crate) fn describe(compacted: &Compacted) -> String {
    let Compacted {
        before_bytes,
        after_bytes,
        moved_bytes,
        fixed,
        is_stopped,
    } = compacted;
    let mut text = format!(
        "{} before, {} now, {} moved",
        human_short(*before_bytes),
        human_short(*after_bytes),
        human_short(*moved_bytes)
    );
    for (index, clusters) in fixed.iter().enumerate() {
        let before = if index == 0 { "; cannot be moved: " } else { ", " };
        let plural = if clusters.count == 1 {
            "cluster"
        } else {
            "clusters"
        };
        text.push_str(&format!(
            "{before}{} {plural} {}",
            clusters.count, clusters.reason
        ));
    }
    if *is_stopped {
        text.push_str("; interrupted: run it again to go on");
    }
    text
}

/// A line on a terminal that shows the progress.
#[derive(Debug)]
struct ProgressLine {
    is_shown: bool,
    next: Option<Instant>,
}

impl Default for ProgressLine {
    fn default() -> Self {
        Self {
            is_shown: false,
            next: std::io::stderr().is_terminal().then(Instant::now),
        }
    }
}

impl ProgressLine {
    fn show(&mut self, progress: &CompactProgress) {
        let now = Instant::now();
        if self.next.is_none_or(|next| now < next) {
            return;
        }
        self.next = Some(now + LINE_AFTER);
        self.is_shown = true;
        let all = progress.moved_bytes + progress.left_bytes;
        let (moved, all) = (human_short(progress.moved_bytes), human_short(all));
        // A terminal that takes nothing is no reason to fail.
        write!(std::io::stderr(), "\r{moved} of {all} moved\x1b[K").unwrap_or_default();
    }

    fn clear(&mut self) {
        if std::mem::take(&mut self.is_shown) {
            write!(std::io::stderr(), "\r\x1b[K").unwrap_or_default();
        }
    }
}

#[cfg(test)]
mod tests {
    use qcow::{Fixed, FixedClusters};

    use super::*;

    #[test]
    fn describe_names_what_cannot_move_and_an_interruption() {
        let mut compacted = Compacted {
            before_bytes: 20 << 30,
            after_bytes: 10 << 30,
            moved_bytes: 9 << 30,
            fixed: Vec::new(),
            is_stopped: false,
        };
        assert_eq!(describe(&compacted), "20 GiB before, 10 GiB now, 9 GiB moved");
        compacted.fixed = [(Fixed::Bitmaps, 12), (Fixed::Header, 1)]
            .map(|(reason, count)| FixedClusters { reason, count })
            .into();
        compacted.is_stopped = true;
        assert_eq!(
            describe(&compacted),
            "20 GiB before, 10 GiB now, 9 GiB moved; cannot be moved: 12 clusters used by bitmaps, 1 cluster used by the header; \
             interrupted: run it again to go on"
        );
    }

    #[test]
    fn rate_is_a_size_other_than_zero() {
        assert_eq!(parse_rate("2M"), Ok(2 << 20));
        assert!(parse_rate("0").is_err() && parse_rate("fast").is_err());
    }
}
