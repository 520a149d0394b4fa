//! Arbitrary bytes as an image in the hands of tools: looking changes nothing, and a repair ends clean or changes
//! nothing.

use block::Context;
use qcow::image::{RepairScope, Verdict, check, info, repair};

use crate::host::MemoryFile;

/// Describes, checks and repairs.
///
/// # Panics
///
/// If that does not hold.
pub fn body(bytes: &[u8]) -> &'static str {
    let (file, cx) = (MemoryFile::new(bytes), Context::syscalls());
    let view = file.view(&cx);
    let described = cx.block_on(info(&view)).expect("the ring turns");
    let checked = cx.block_on(check(&view)).expect("the ring turns");
    assert!(file.holds(bytes), "looking changed the image");
    if let Ok(report) = &checked {
        assert!(described.is_ok(), "checked, but not described: {described:?}");
        assert!(report.findings.len() <= 1000);
    }
    match cx
        .block_on(repair(&view, RepairScope::All))
        .expect("the ring turns")
    {
        Ok(report) => {
            assert_eq!(report.after.verdict(), Verdict::Clean, "{report:#?}");
            if report.before.verdict() == Verdict::Clean {
                assert!(report.before.dirty || report.before.marked_corrupt || file.holds(bytes));
                return "clean";
            }
            "repaired"
        }
        Err(error) => {
            assert!(file.holds(bytes), "a failed repair changed the image: {error}");
            if checked.is_ok() {
                "not repaired"
            } else {
                "no image"
            }
        }
    }
}
