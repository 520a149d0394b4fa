//! `imago`, on one thread of a Tokio runtime (of which it uses only the locks).

use std::io;
use std::rc::Rc;

use imago::file::File;
use imago::qcow2::Qcow2;
use imago::{FormatAccess, FormatDriverBuilder, PermissiveImplicitOpenGate, StorageOpenOptions};
use tokio::task::LocalSet;

use super::Task;
use super::aligned::Aligned;
use super::lanes::Lanes;
use crate::content;
use crate::workload::{Pattern, Sample};

/// Runs a task.
pub(super) fn run(task: &Task) -> io::Result<Sample> {
    if task.raw {
        return Err(io::Error::other("imago is measured on QCOW2 only"));
    }
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    LocalSet::new().block_on(&runtime, all_lanes(task))
}

async fn all_lanes(task: &Task) -> io::Result<Sample> {
    let image = Qcow2::<File>::builder_path(&task.path)
        .storage_open_options(StorageOpenOptions::new().direct(task.direct))
        .write(task.pattern.writes())
        .open(PermissiveImplicitOpenGate::default())
        .await?;
    let disk = Rc::new(FormatAccess::new(image));
    let mut buffer = Aligned::new(task.block_bytes as usize);
    for offset in task.samples() {
        disk.read(buffer.as_mut(), offset).await?;
        content::check(offset, buffer.as_mut())?;
    }
    let lanes = Rc::new(Lanes::new(task));
    let running: Vec<_> = (0..task.depth)
        .map(|_| tokio::task::spawn_local(lane(Rc::clone(&disk), Rc::clone(&lanes))))
        .collect();
    for lane in running {
        lane.await.map_err(io::Error::other)??;
    }
    if task.pattern.writes() {
        flush(&disk).await?;
    }
    Ok(lanes.finish())
}

async fn lane(disk: Rc<FormatAccess<File>>, lanes: Rc<Lanes>) -> io::Result<()> {
    let mut buffer = Aligned::new(lanes.workload.block_bytes as usize);
    let mut now = lanes.now_ns();
    while let Some(offset) = lanes.next_offset() {
        if lanes.workload.pattern.writes() {
            disk.write(&*buffer.as_mut(), offset).await?;
            if lanes.workload.pattern == Pattern::WriteFlush {
                flush(&disk).await?;
            }
        } else {
            disk.read(buffer.as_mut(), offset).await?;
        }
        now = lanes.ended(now);
    }
    Ok(())
}

async fn flush(disk: &FormatAccess<File>) -> io::Result<()> {
    disk.flush().await?;
    disk.sync().await
}
