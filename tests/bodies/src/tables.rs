//! The snapshot table, the bitmap directory and a bitmap's table, changed in any way in an image that is sound otherwise:
//! describing and checking it changes nothing, and both agree on what there is.

use block::Context;
use qcow::image::{CheckReport, Severity, check, info};
use ringdisk_gen::{Content, Image, ImageSpec, Snapshot, Structure};

use crate::cursor::Cursor;
use crate::host::MemoryFile;

/// The tables that are replaced.
const TABLES: [Structure; 4] = [
    Structure::SnapshotTable,
    Structure::BitmapDirectory,
    Structure::BitmapTable,
    Structure::SnapshotL1Table,
];

/// Chooses the image, the table and another number of snapshots; the rest of the bytes is xored with the table.
///
/// # Panics
///
/// If that does not hold.
pub fn body(bytes: &[u8]) -> &'static str {
    let mut cursor = Cursor::new(bytes);
    let bits = cursor.pick(&[9, 10, 12]);
    let table = cursor.pick(&TABLES);
    let mut spec = ImageSpec::new(bits, 16 << bits);
    spec.clusters = [(0, Content::Data(1)), (1, Content::Zero)].into();
    spec.bitmap = true;
    spec.snapshots = vec![
        Snapshot::default(),
        Snapshot {
            own: [(1, Content::Data(2)), (3, Content::Zero)].into(),
        },
    ];
    let mut image = Image::new(spec);
    let place = image.all(table).next().expect("the image has one of each");
    let snapshots = cursor.byte();
    // Up to the end of its last cluster: a table may seem to be longer than it was made.
    let room = place.len.next_multiple_of(1 << bits) as usize;
    let start = place.offset as usize;
    for (byte, change) in image.bytes[start..start + room].iter_mut().zip(cursor.rest()) {
        *byte ^= change;
    }
    // The number of snapshots that the header states.
    image.bytes[63] ^= snapshots;
    judge(&image.bytes)
}

fn judge(bytes: &[u8]) -> &'static str {
    let (file, cx) = (MemoryFile::new(bytes), Context::syscalls());
    let view = file.view(&cx);
    let described = cx.block_on(info(&view)).expect("the ring turns");
    let checked = cx.block_on(check(&view)).expect("the ring turns");
    assert!(file.holds(bytes), "looking changed the image");
    let (Ok(described), Ok(report)) = (&described, &checked) else {
        return "refused";
    };
    let named = described
        .snapshots
        .iter()
        .map(|snapshot| snapshot.name.len())
        .sum::<usize>();
    assert!(named <= bytes.len(), "names are longer than the file");
    if !is_sound(report) {
        return "damaged";
    }
    let listed = described.snapshots.len() as u64 + described.snapshots_not_listed;
    assert_eq!(
        listed,
        u64::from(bytes[63]),
        "sound, but not as many snapshots as the header states"
    );
    "sound"
}

fn is_sound(report: &CheckReport) -> bool {
    assert!(report.findings.len() <= 1000);
    report
        .findings
        .iter()
        .all(|finding| finding.severity == Severity::Leak)
}
