//! The body over whole images: describe, check and repair whatever the bytes are.

use std::cell::RefCell;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use block::Context;
use block::file::{FileOptions, FileView, ImageFile};
use qcow::image::{Extent, Verdict, check, info, repair};

/// Files larger than this teach nothing new and take long.
const FILE_MAX: usize = 1 << 20;

/// One file in memory, used over and over.
struct Scratch {
    cx: Context,
    file: File,
    view: FileView,
}

impl Scratch {
    fn new() -> Self {
        let file = tempfile::tempfile_in("/dev/shm").expect("a file in /dev/shm");
        let options = FileOptions {
            write: true,
            direct: false,
        };
        let cx = Context::syscalls();
        let shared = file.try_clone().expect("a second descriptor");
        let view = ImageFile::from_fd(Path::new("fuzzed"), shared, options).view(&cx);
        Self {
            file,
            view: view.expect("a third descriptor"),
            cx,
        }
    }

    fn fill(&self, bytes: &[u8]) {
        self.file.set_len(0).expect("an empty file");
        self.file.write_all_at(bytes, 0).expect("a full file");
    }

    fn holds(&self, bytes: &[u8]) -> bool {
        let mut found = vec![0; bytes.len()];
        let same_len = self
            .file
            .metadata()
            .is_ok_and(|metadata| metadata.len() == bytes.len() as u64);
        same_len && self.file.read_exact_at(&mut found, 0).is_ok() && found == bytes
    }
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch::new());
}

/// The bytes as an image: looking changes nothing, and a repair ends clean or changes nothing.
///
/// # Panics
///
/// If that does not hold.
pub fn image(bytes: &[u8]) {
    if bytes.len() > FILE_MAX {
        return;
    }
    SCRATCH.with_borrow(|scratch| {
        scratch.fill(bytes);
        let Scratch { cx, view, .. } = scratch;
        let described = cx.block_on(info(view)).expect("the ring turns");
        let checked = cx.block_on(check(view)).expect("the ring turns");
        assert!(scratch.holds(bytes), "looking changed the image");
        if let Ok(report) = &checked {
            assert!(described.is_ok(), "checked, but not described: {described:?}");
            assert!(report.findings.len() <= 1000);
        }
        match cx.block_on(repair(view, Extent::All)).expect("the ring turns") {
            Ok(report) => {
                assert_eq!(report.after.verdict(), Verdict::Clean, "{report:#?}");
                if report.before.verdict() == Verdict::Clean {
                    assert!(report.before.dirty || report.before.marked_corrupt || scratch.holds(bytes));
                }
            }
            Err(error) => assert!(scratch.holds(bytes), "a failed repair changed the image: {error}"),
        }
    });
}
