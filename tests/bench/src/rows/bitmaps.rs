//! The cost of an enabled persistent bitmap for writes of allocated clusters.

use std::io;
use std::process::Command;
use std::time::Duration;

use super::features::{Beside, promises};
use super::{Bench, Row};
use crate::client::drive::Timing;
use crate::images::{BITMAP, Image, Source};
use crate::process;
use crate::server::Program;
use crate::workload::{Pattern, Workload};

/// The bytes that are written again and again.
const WORKING_SET_BYTES: u64 = 1 << 30;
/// The longest time to clear a bitmap.
const LIMIT: Duration = Duration::from_secs(60);
const FIGURE: &str = "without";

/// The rows of this part.
#[must_use]
pub(crate) fn rows() -> Vec<Row> {
    // The same file: the time of a write in place depends on the file's extents.
    let close = [Source::ScratchBitmap, Source::ScratchBitmapOff];
    let durable = [Source::WideBitmap, Source::WideBitmapOff];
    #[rustfmt::skip]
    let rows = [
        ("engine/cached/write-4k-bitmap-d64", close, false, WORKING_SET_BYTES, 0.97),
        ("engine/disk/write-4k-bitmap-d64", close, true, WORKING_SET_BYTES, 0.97),
        ("engine/disk/write-4k-durable-bitmap-d64", durable, true, Source::WideBitmap.disk_bytes(), 0.6),
    ];
    rows.map(|(name, sides, direct, disk_bytes, ratio)| Row {
        name,
        promises: promises(&[(FIGURE, ratio)]),
        run: Box::new(move |row, bench| {
            let timing = match sides[1] {
                // A bit that is set costs nothing: it is the first writes that count.
                Source::WideBitmapOff => Timing {
                    warm_up: Duration::ZERO,
                    ..bench.timing
                },
                _ => bench.timing,
            };
            let beside = Beside {
                sides,
                direct,
                workload: Workload {
                    pattern: Pattern::RandomWrite,
                    block_bytes: 4 << 10,
                    depth: 64,
                    disk_bytes,
                },
                timing,
            };
            let entries = beside.run(row, bench, (FIGURE, "bitmap disabled"), set_up);
            if sides[1] == Source::WideBitmapOff {
                // No other row needs it, and it is large.
                sides.iter().try_for_each(|side| bench.images.forget(*side))?;
            }
            entries
        }),
    })
    .into()
}

/// Enables and clears the bitmap, so that each turn begins with no bit set, or disables it.
fn set_up(bench: &Bench, (source, image): (Source, &Image)) -> io::Result<()> {
    let Program::Ringdisk(ringdisk) = &bench.ours else {
        return Err(io::Error::other("only our own engine is measured"));
    };
    let steps: &[&str] = match source {
        Source::ScratchBitmapOff | Source::WideBitmapOff => &["disable"],
        _ => &["enable", "clear"],
    };
    for step in steps {
        let mut command = Command::new(ringdisk);
        command
            .args(["image", "bitmap", step])
            .arg(&image.path)
            .arg(BITMAP);
        process::output(command, LIMIT)?;
    }
    Ok(())
}
