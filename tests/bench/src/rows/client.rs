//! The client alone, against a device in this process that does nothing: the rate no row can pass.

use std::io;

use super::{Bench, Row, medians};
use crate::client::drive::{self, Wait};
use crate::client::null_device::NullDevice;
use crate::images::DATA_BYTES;
use crate::report::{Better, Entry};
use crate::workload::{Pattern, Workload};

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
    let mut samples = Vec::new();
    for _ in 0..bench.pairs {
        let (_device, connection) = NullDevice::start(workload.disk_bytes, workload.block_bytes)?;
        samples.push(drive::run(
            connection,
            &workload,
            Wait::Poll,
            bench.timing,
            &|| Ok(0.0),
        )?);
    }
    Ok(vec![row.alone(
        "iops",
        "IOPS",
        Better::Higher,
        medians(&samples).iops,
    )])
}
