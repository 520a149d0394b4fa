//! The client alone, against a device in this process that does nothing: the rate no row can pass.

use std::io;

use super::{Bench, Row, Turns, in_turns};
use crate::client::drive::{self, Wait};
use crate::client::null_device::NullDevice;
use crate::images::DATA_BYTES;
use crate::report::{Better, Entry};
use crate::workload::{Pattern, Sample, Workload};

/// The rows of this part.
pub(crate) fn rows() -> Vec<Row> {
    vec![Row {
        name: "client/null-device-4k-d64",
        promises: Vec::new(),
        run: Box::new(run),
    }]
}

fn run(row: &Row, bench: &mut Bench) -> io::Result<Vec<Entry>> {
    let workload = Workload {
        pattern: Pattern::RandomRead,
        block_bytes: 4 << 10,
        depth: 64,
        disk_bytes: DATA_BYTES,
    };
    let measure = |bench: &mut Bench, ()| {
        let (_device, connection) = NullDevice::start(workload.disk_bytes, workload.block_bytes)?;
        drive::run(connection, &workload, Wait::Poll, bench.timing, &|| Ok(0.0))
    };
    in_turns(bench, &[()], measure, |turns| {
        let iops = |turns: &Turns| row.alone("iops", "IOPS", Better::Higher, turns.median(Sample::iops));
        turns.iter().map(iops).collect()
    })
}
