//! fio on the raw file: what this machine can do when nothing is in between. It submits in batches, with registered files and
//! buffers, and does not look at the clock for each request, so that it is a limit and no peer.

use std::io;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::client::drive::Timing;
use crate::process;
use crate::workload::{CLUSTER_BYTES, Pattern, Sample, Workload};

/// The number of requests that fio submits at once.
const BATCH: u16 = 8;

/// Runs `workload` with fio's io_uring engine on the raw file at `path`.
///
/// The sample has no latencies: they would have a clock read for each request. Of [`Pattern::OncePerCluster`] it has the blocks in
/// order, as an engine allocates clusters whatever the guest's order is, and not the sync at their end.
///
/// # Errors
///
/// If fio is missing, fails or prints something else than its JSON.
pub(crate) fn run(path: &Path, direct: bool, workload: &Workload, timing: Timing) -> io::Result<Sample> {
    let block = u64::from(workload.block_bytes);
    let rw = match workload.pattern {
        Pattern::RandomRead => "randread".to_owned(),
        Pattern::RandomWrite | Pattern::WriteFlush => "randwrite".to_owned(),
        Pattern::SequentialRead => "read".to_owned(),
        Pattern::SequentialWrite => "write".to_owned(),
        Pattern::OncePerCluster => format!("write:{}", CLUSTER_BYTES - block),
    };
    let mut fio = Command::new("fio");
    fio.args([
        "--name=limit",
        "--ioengine=io_uring",
        "--thread",
        "--output-format=json",
    ]);
    fio.args([
        "--norandommap",
        "--randrepeat=0",
        "--invalidate=0",
        "--allow_file_create=0",
        "--fallocate=none",
    ]);
    fio.args(["--registerfiles", "--fixedbufs", "--gtod_reduce=1"]);
    fio.arg(format!("--iodepth_batch_submit={}", workload.depth.min(BATCH)));
    fio.arg("--iodepth_batch_complete_min=1");
    fio.arg(format!("--iodepth_batch_complete_max={}", workload.depth));
    fio.arg(format!("--rw={rw}"));
    fio.arg(format!("--bs={block}"));
    fio.arg(format!("--iodepth={}", workload.depth));
    fio.arg(format!("--direct={}", u8::from(direct)));
    fio.arg(format!("--size={}", workload.disk_bytes));
    if workload.pattern == Pattern::OncePerCluster {
        let clusters = workload.disk_bytes / CLUSTER_BYTES;
        fio.arg(format!("--io_size={}", clusters * block));
    } else {
        fio.arg("--time_based");
        fio.arg(format!("--runtime={}ms", timing.measure.as_millis()));
        fio.arg(format!("--ramp_time={}ms", timing.warm_up.as_millis()));
    }
    if workload.pattern == Pattern::WriteFlush {
        fio.arg("--fdatasync=1");
    }
    fio.arg(format!("--filename={}", path.display()));
    let text = process::output(fio, timing.measure * 3 + Duration::from_secs(60))?;
    parse(&text, workload.pattern.writes())
        .ok_or_else(|| io::Error::other(format!("fio printed no result: {}", text.trim())))
}

/// Reads the one job of fio's JSON.
fn parse(text: &str, writes: bool) -> Option<Sample> {
    // Notes may precede the JSON.
    let json: Value = serde_json::from_str(text.get(text.find('{')?..)?).ok()?;
    let job = json.get("jobs")?.get(0)?;
    let side = job.get(if writes { "write" } else { "read" })?;
    let ops = side.get("total_ios")?.as_u64()?;
    let iops = side.get("iops")?.as_f64()?;
    let runtime = side.get("runtime")?.as_f64()? / 1000.0;
    let cpu = job.get("usr_cpu")?.as_f64()? + job.get("sys_cpu")?.as_f64()?;
    let seconds = if iops > 0.0 { ops as f64 / iops } else { runtime };
    Some(Sample {
        ops,
        seconds,
        cpu_seconds: cpu / 100.0 * seconds,
        ..Sample::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_reads_a_job_after_a_note() {
        let text = r#"note: something
            {"jobs": [{"usr_cpu": 10.0, "sys_cpu": 40.0, "read": {"total_ios": 2000, "iops": 1000.0,
             "runtime": 2000}}]}"#;
        let sample = parse(text, false).unwrap_or_default();
        assert_eq!(sample.ops, 2000);
        assert!((sample.iops() - 1000.0).abs() < 1e-6);
        assert!((sample.cpu_seconds - 1.0).abs() < 1e-9);
        assert_eq!(parse("fio: failed", false), None);
    }
}
