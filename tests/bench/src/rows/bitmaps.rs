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
    let close = [Source::ScratchBitmap, Source::Scratch];
    let durable = [Source::WideBitmap, Source::Wide];
    #[rustfmt::skip]
    let rows = [
        ("engine/cached/write-4k-bitmap-d64", close, false, WORKING_SET_BYTES, 0.97),
        ("engine/disk/write-4k-bitmap-d64", close, true, WORKING_SET_BYTES, 0.97),
        ("engine/disk/write-4k-durable-bitmap-d64", durable, true, Source::Wide.disk_bytes(), 0.6),
    ];
    rows.map(|(name, sides, direct, disk_bytes, ratio)| Row {
        name,
        promises: promises(&[(FIGURE, ratio)]),
        run: Box::new(move |row, bench| {
            let timing = match sides[1] {
                // A bit that is set costs nothing: it is the first writes that count.
                Source::Wide => Timing {
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
            let entries = beside.run(row, bench, (FIGURE, "without a bitmap"), clear);
            if sides[1] == Source::Wide {
                // They take more space with each turn.
                sides.iter().try_for_each(|side| bench.images.forget(*side))?;
            }
            entries
        }),
    })
    .into()
}

/// Clears the bitmap, if there is one: each turn begins with no bit set.
fn clear(bench: &Bench, (source, image): (Source, &Image)) -> io::Result<()> {
    let Program::Ringdisk(ringdisk) = &bench.ours else {
        return Err(io::Error::other("only our own engine is measured"));
    };
    if !source.has_bitmap() {
        return Ok(());
    }
    let mut command = Command::new(ringdisk);
    command
        .args(["image", "bitmap", "clear"])
        .arg(&image.path)
        .arg(BITMAP);
    process::output(command, LIMIT).map(drop)
}
