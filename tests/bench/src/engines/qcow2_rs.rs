//! `qcow2-rs`, on `tokio-uring`.

use std::fmt::Display;
use std::io;
use std::rc::Rc;

use ::qcow2_rs::dev::{Qcow2Dev, Qcow2DevParams};
use ::qcow2_rs::uring::Qcow2IoUring;
use ::qcow2_rs::utils::qcow2_setup_dev_uring;

use super::Task;
use super::aligned::Aligned;
use super::lanes::Lanes;
use crate::content;
use crate::workload::{Pattern, Sample};

type Device = Qcow2Dev<Qcow2IoUring>;

/// Runs a task.
pub(super) fn run(task: &Task) -> io::Result<Sample> {
    if task.raw {
        return Err(io::Error::other("qcow2-rs has no raw images"));
    }
    tokio_uring::start(all_lanes(task))
}

async fn all_lanes(task: &Task) -> io::Result<Sample> {
    // Blocks of 512 bytes and the crate's own cache sizes.
    let params = Qcow2DevParams::new(9, None, None, !task.pattern.writes(), task.direct);
    let device = Rc::new(qcow2_setup_dev_uring(&task.path, &params).await.map_err(failed)?);
    let mut buffer = Aligned::new(task.block_bytes as usize);
    for offset in task.samples() {
        device.read_at(buffer.as_mut(), offset).await.map_err(failed)?;
        content::check(offset, buffer.as_mut())?;
    }
    let lanes = Rc::new(Lanes::new(task));
    let running: Vec<_> = (0..task.depth)
        .map(|_| tokio_uring::spawn(lane(Rc::clone(&device), Rc::clone(&lanes))))
        .collect();
    for lane in running {
        lane.await.map_err(io::Error::other)??;
    }
    if task.pattern.writes() {
        flush(&device, &lanes).await?;
    }
    Ok(lanes.finish())
}

async fn lane(device: Rc<Device>, lanes: Rc<Lanes>) -> io::Result<()> {
    let mut buffer = Aligned::new(lanes.workload.block_bytes as usize);
    let mut now = lanes.now_ns();
    while let Some(offset) = lanes.next_offset() {
        if lanes.workload.pattern.writes() {
            device.write_at(buffer.as_mut(), offset).await.map_err(failed)?;
            if lanes.workload.pattern == Pattern::WriteFlush {
                flush(&device, &lanes).await?;
            }
        } else {
            let read = device.read_at(buffer.as_mut(), offset).await.map_err(failed)?;
            if read != buffer.as_mut().len() {
                return Err(io::Error::other(format!(
                    "qcow2-rs read {read} bytes at {offset:#x}"
                )));
            }
        }
        now = lanes.ended(now);
    }
    Ok(())
}

async fn flush(device: &Device, lanes: &Lanes) -> io::Result<()> {
    device.flush_meta().await.map_err(failed)?;
    device
        .fsync_range(0, lanes.workload.disk_bytes as usize)
        .await
        .map_err(failed)
}

fn failed(error: impl Display) -> io::Error {
    io::Error::other(format!("qcow2-rs: {error}"))
}
