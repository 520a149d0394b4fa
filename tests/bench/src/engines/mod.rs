//! Engines without a guest: each runs one workload in a process of its own, on one thread.
//!
//! A process each, so that no engine pays for what another left behind, and one that crashes or hangs
//! costs its row and not the run. The child gets a [`Task`] and prints a [`Sample`], both as JSON.

#[cfg(any(test, feature = "peers"))]
mod aligned;
#[cfg(feature = "peers")]
mod imago;
mod lanes;
#[cfg(feature = "peers")]
mod qcow2_rs;
mod qemu_img;
mod ringdisk;

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::client::drive::Timing;
use crate::images::{Format, Image};
use crate::workload::{Pattern, Sample, Workload};
use crate::{content, process};

/// The number of blocks whose bytes each engine must have right before it is measured.
const VERIFIED: u32 = 64;

/// An engine that runs in-process.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
pub(crate) enum Engine {
    /// Ours. A raw image goes to our raw disk, a QCOW2 image to our QCOW2 disk.
    Ringdisk,
    /// The crate `imago`.
    Imago,
    /// The crate `qcow2-rs` on its `tokio-uring` back end.
    Qcow2Rs,
    /// `qemu-img bench`. It only steps through an image, so only one of the patterns fits.
    QemuImg,
}

impl Engine {
    /// The name to print.
    #[must_use]
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ringdisk => "ringdisk",
            Self::Imago => "imago",
            Self::Qcow2Rs => "qcow2-rs",
            Self::QemuImg => "qemu-img bench",
        }
    }
}

/// A measurement for a child to make.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Task {
    engine: Engine,
    path: PathBuf,
    raw: bool,
    backing: bool,
    #[serde(default)]
    data_file: bool,
    #[serde(default)]
    durable_bitmaps: bool,
    direct: bool,
    pattern: Pattern,
    block_bytes: u32,
    depth: u16,
    disk_bytes: u64,
    warm_up_ms: u64,
    measure_ms: u64,
    /// The number of blocks whose bytes are to be looked at before it is measured.
    #[serde(default)]
    verify: u32,
}

impl Task {
    /// The offsets of the blocks to be looked at first, in bytes.
    fn samples(&self) -> impl Iterator<Item = u64> + use<> {
        content::samples(self.disk_bytes, self.block_bytes, self.verify)
    }

    fn workload(&self) -> Workload {
        Workload {
            pattern: self.pattern,
            block_bytes: self.block_bytes,
            depth: self.depth,
            disk_bytes: self.disk_bytes,
        }
    }
}

/// Measures `workload` on `image` with `engine`, in a new process.
///
/// # Errors
///
/// If the engine fails or does not end; with what it printed.
pub(crate) fn measure(
    engine: Engine,
    image: &Image,
    direct: bool,
    workload: &Workload,
    timing: Timing,
) -> io::Result<Sample> {
    measure_with(&std::env::current_exe()?, engine, image, direct, workload, timing)
}

/// As [`measure`], with the engine as `program` has it: this program, or an older build of it.
///
/// # Errors
///
/// As for [`measure`].
pub(crate) fn measure_with(
    program: &Path,
    engine: Engine,
    image: &Image,
    direct: bool,
    workload: &Workload,
    timing: Timing,
) -> io::Result<Sample> {
    let verifiable = image.has_content && workload.block_bytes as usize >= content::BLOCK_BYTES;
    let task = Task {
        engine,
        path: image.path.clone(),
        raw: image.format == Format::Raw,
        backing: image.backing.is_some(),
        data_file: image.data_file.is_some(),
        durable_bitmaps: image.durable_bitmaps,
        direct,
        pattern: workload.pattern,
        block_bytes: workload.block_bytes,
        depth: workload.depth,
        disk_bytes: workload.disk_bytes,
        warm_up_ms: timing.warm_up.as_millis() as u64,
        measure_ms: timing.measure.as_millis() as u64,
        verify: if verifiable { VERIFIED } else { 0 },
    };
    if engine == Engine::QemuImg {
        return qemu_img::run(&task);
    }
    let mut child = Command::new(program);
    child.arg("engine-task").arg(serde_json::to_string(&task)?);
    let text = process::output(child, timing.measure * 3 + Duration::from_secs(60))?;
    let line = text.lines().last().unwrap_or_default();
    serde_json::from_str(line)
        .map_err(|_| io::Error::other(format!("{} printed no result: {}", engine.name(), text.trim())))
}

/// Runs a task that [`measure`] has passed on, in this process; answers what to print.
///
/// # Errors
///
/// If the task cannot be read or its engine fails.
pub(crate) fn run_here(json: &str) -> io::Result<String> {
    let task: Task = serde_json::from_str(json)?;
    let sample = match task.engine {
        Engine::Ringdisk => ringdisk::run(&task)?,
        #[cfg(feature = "peers")]
        Engine::Imago => imago::run(&task)?,
        #[cfg(feature = "peers")]
        Engine::Qcow2Rs => qcow2_rs::run(&task)?,
        #[cfg(not(feature = "peers"))]
        peer @ (Engine::Imago | Engine::Qcow2Rs) => {
            let name = peer.name();
            return Err(io::Error::other(format!(
                "this program was built without {name}; `cargo run -p ringdisk-bench --features peers` has it"
            )));
        }
        Engine::QemuImg => return Err(io::Error::other("qemu-img is a process already")),
    };
    Ok(serde_json::to_string(&sample)?)
}
