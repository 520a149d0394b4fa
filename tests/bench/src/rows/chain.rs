//! Reads through a long chain of images beside reads through a short one: our engine in-process, one thread, no guest.

use std::io;

use super::{Bench, Row, in_turns, workload};
use crate::cache;
use crate::engines::{self, Engine};
use crate::images::Source;
use crate::report::{Better, Entry};
use crate::workload::{Pattern, Sample};

/// The share of the short chain's rate that the long one must keep.
const SHORT: f64 = 0.95;

/// The rows of this part.
#[must_use]
pub(crate) fn rows() -> Vec<Row> {
    vec![Row {
        name: "engine/cached/read-4k-chain-32",
        promises: vec![("one-below", SHORT.into())],
        run: Box::new(run),
    }]
}

fn run(row: &Row, bench: &mut Bench) -> io::Result<Vec<Entry>> {
    let measure = |bench: &mut Bench, source: Source| {
        let image = bench.images.image(source)?;
        cache::prepare(&image, true)?;
        let workload = workload(source, Pattern::RandomRead, 4 << 10, 64);
        engines::measure(Engine::Ringdisk, &image, false, &workload, bench.timing)
    };
    in_turns(bench, &[Source::Chain, Source::Overlay], measure, |samples| {
        let (chain, short) = (&samples[0], ("one image below", &samples[1]));
        vec![
            row.compare("one-below", "IOPS", Better::Higher, chain, short, Sample::iops),
            row.compare(
                "cpu",
                "CPU s/M",
                Better::Lower,
                chain,
                short,
                Sample::cpu_per_million,
            ),
        ]
    })
}
