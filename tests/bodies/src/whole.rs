//! Arbitrary bytes as an image in the hands of a guest: opened, read all over, written.
//!
//! Invariants: a reader and a failed open change nothing, no other file is asked for, and a guest's bytes never replace
//! what the header says.

use block::Op;

use crate::guest::{Guest, options};
use crate::host::{Files, MemoryFile};

/// The most that is read at once, and of a stretch.
const PART: u64 = 64 << 10;
/// The number of stretches of a large disk that are read.
const STRETCHES: u64 = 16;
/// The byte that a guest writes.
const GUEST: u8 = 0x5A;

/// Opens, reads and writes.
///
/// # Panics
///
/// If that does not hold.
pub fn body(bytes: &[u8]) -> &'static str {
    let files = Files::with("case", bytes);
    let file = files.file("case");
    let Ok(guest) = Guest::open(&files, "case", &options(true, false)) else {
        assert!(file.holds(bytes), "a failed open changed the image");
        assert_no_others(&files);
        return "refused";
    };
    read_all_over(&guest);
    assert!(guest.tell(Op::Discard, 0, 512.min(guest.size())).is_err() || guest.size() == 0);
    let _any = guest.close();
    assert!(file.holds(bytes), "a reader changed the image");
    let written = write(&files, bytes);
    assert_no_others(&files);
    if written { "written" } else { "read" }
}

/// Opens the image to write to it, and does. `false` if it is refused.
fn write(files: &Files, bytes: &[u8]) -> bool {
    let file = files.file("case");
    let guest = match Guest::open(files, "case", &options(false, false)) {
        Ok(guest) => guest,
        Err(error) => {
            assert!(file.holds(bytes), "a failed open changed the image: {error}");
            return false;
        }
    };
    let size = guest.size();
    let block = vec![GUEST; 1536];
    for offset in places(size) {
        let len = 1536.min(size - offset) / 512 * 512;
        if len > 0 {
            // Whatever the answers: a damaged image is not written any more.
            let _any = guest.write(offset, &block[..len as usize], offset == 0);
            let zeroes = Op::WriteZeroes {
                unmap: offset.is_multiple_of(1024),
                fua: false,
            };
            let _any = guest.tell(zeroes, offset, 512);
        }
    }
    let _any = guest.tell(Op::Flush, 0, 0);
    let _any = guest.tell(Op::Discard, 0, size.min(256 << 10));
    let _any = guest.write(0, &block[..1536.min(size as usize)], false);
    read_all_over(&guest);
    let _any = guest.close();
    assert_header_stands(file, bytes);
    true
}

/// Returns the offsets at which a disk of `size` bytes is looked at: all over, and at its ends. Multiples of 512.
fn places(size: u64) -> impl Iterator<Item = u64> {
    let step = (size / STRETCHES).max(PART) / 512 * 512;
    let last = size.saturating_sub(PART / 2) / 512 * 512;
    let even = (0..STRETCHES).map(move |index| index * step);
    even.chain([last]).filter(move |&offset| offset < size)
}

fn read_all_over(guest: &Guest) {
    let size = guest.size();
    for offset in places(size) {
        let len = PART.min(size - offset);
        // Together, and what cannot be read together sector by sector.
        if guest.read(offset, len).is_err() {
            for at in (offset..offset + len).step_by(4096) {
                let _any = guest.read(at, 512.min(offset + len - at));
            }
        }
    }
}

fn assert_no_others(files: &Files) {
    assert!(files.missed().is_empty(), "{:?} were asked for", files.missed());
}

/// The fields that nobody changes while a disk is in use: all but tables that move and features that are marked.
fn assert_header_stands(file: &MemoryFile, before: &[u8]) {
    let after = file.read(0, 104);
    for range in [0..8, 20..36, 60..72, 96..104] {
        let was = before.get(range.clone());
        assert_eq!(
            after.get(range.clone()),
            was,
            "header bytes {range:?} have changed"
        );
    }
}
