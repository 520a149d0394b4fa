//! Two queues with a client each beside one queue with one: what a request costs must not grow.
//!
//! The clients sleep instead of polling: two that poll would leave the server's two threads no CPU.

use std::io;

use super::{Bench, Row, Served, in_turns, measure_served, workload};
use crate::client::drive::Wait;
use crate::images::Source;
use crate::report::{Better, Entry};
use crate::workload::{Pattern, Sample};

/// The CPU time of a request may grow to 1.1 of what it is with one queue.
const TARGET: f64 = 1.0 / 1.1;

/// The rows of this part.
#[must_use]
pub(crate) fn rows() -> Vec<Row> {
    vec![Row {
        name: "vhost/cached/two-queues-read-4k-d64",
        promises: vec![("server-cpu", TARGET.into())],
        run: Box::new(run),
    }]
}

fn run(row: &Row, bench: &mut Bench) -> io::Result<Vec<Entry>> {
    let served = |queues| Served {
        source: Source::Data,
        direct: false,
        queues,
        workload: workload(Source::Data, Pattern::RandomRead, 4 << 10, 64),
        wait: Wait::Sleep,
        cache_kib: None,
    };
    let program = bench.ours.clone();
    let name = format!("{}, one queue", program.name());
    let measure = |bench: &mut Bench, queues| measure_served(bench, &program, &served(queues));
    in_turns(bench, &[2, 1], measure, |turns| match turns {
        [two, one] => vec![
            row.compare(
                "server-cpu",
                "CPU s/M",
                Better::Lower,
                two,
                (&name, one),
                Sample::cpu_per_million,
            ),
            row.compare("iops", "IOPS", Better::Higher, two, (&name, one), Sample::iops),
        ],
        _ => Vec::new(),
    })
}
