//! `qemu-img bench`: QEMU's engine without a guest. It steps through an image at a fixed distance, so it
//! can write one block per cluster, in order, which is kinder to it than our scattered order is to us.

use std::io;
use std::process::Command;
use std::time::Duration;

use super::Task;
use crate::process;
use crate::workload::{CLUSTER_BYTES, Pattern, Sample};

/// Writes at most so many clusters: some seconds of work.
const CLUSTERS: u64 = 65_536;

/// Runs a task, which must be [`Pattern::OncePerCluster`].
pub(super) fn run(task: &Task) -> io::Result<Sample> {
    if task.pattern != Pattern::OncePerCluster {
        return Err(io::Error::other(
            "qemu-img bench is measured on allocating writes only",
        ));
    }
    let ops = CLUSTERS.min(task.disk_bytes / CLUSTER_BYTES);
    let mut command = Command::new("qemu-img");
    command.args(["bench", "-f", "qcow2", "-w", "-i", "io_uring"]);
    command.args(["-t", if task.direct { "none" } else { "writeback" }]);
    command.args(["-c", &ops.to_string(), "--flush-interval", &ops.to_string()]);
    command.args(["-d", &task.depth.to_string(), "-s", &task.block_bytes.to_string()]);
    command.args(["-S", &CLUSTER_BYTES.to_string()]).arg(&task.path);
    let text = process::output(command, Duration::from_secs(300))?;
    let seconds =
        parse(&text).ok_or_else(|| io::Error::other(format!("qemu-img printed no time: {}", text.trim())))?;
    // It says nothing of latency and CPU time.
    Ok(Sample {
        ops,
        seconds,
        ..Sample::default()
    })
}

fn parse(text: &str) -> Option<f64> {
    text.lines().find_map(|line| {
        line.strip_prefix("Run completed in ")?
            .strip_suffix(" seconds.")?
            .parse()
            .ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_reads_the_time_of_a_run() {
        assert_eq!(
            parse("Sending 5 write requests\nRun completed in 3.250 seconds.\n"),
            Some(3.25)
        );
        assert_eq!(parse("qemu-img: no"), None);
    }
}
