//! Bounds on what is known, and what is said when a structure has no place for its count.

use super::*;

#[test]
fn entries_in_uses_its_memory_and_no_more() {
    for entry_bytes in [1, 8, 24, 40] {
        for shift in 12..30 {
            for memory in [1 << shift, (3 << shift) / 2, (2 << shift) - 1] {
                let entries = entries_in(memory, entry_bytes) as u64;
                // A power of two of places, each an entry and a byte, of which an eighth stays free.
                let places = (entries * 8 / 7).next_power_of_two();
                let taken = places * (entry_bytes as u64 + 1);
                assert!(taken <= memory, "{entries} entries of {entry_bytes} in {memory}");
                assert!(
                    taken > memory / 2,
                    "{entries} entries of {entry_bytes} in {memory}"
                );
            }
        }
    }
}

#[test]
fn use_map_counts_slices_past_its_limit_as_seen() {
    let mut uses = UseMap {
        watching: true,
        ..UseMap::default()
    };
    for word in 0..SEEN_MAX as u64 {
        assert!(!uses.saw_slice(word * 64));
    }
    assert!(!uses.saw_slice(1), "there is a word for it");
    assert!(uses.saw_slice(1) && uses.has_seen(1));
    assert!(uses.saw_slice(SEEN_MAX as u64 * 64), "there is none");
    assert_eq!(uses.seen.len(), SEEN_MAX);
}
