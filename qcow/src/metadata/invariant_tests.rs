//! States that only this crate's own code can break, broken on purpose: each is noticed.

use super::plan::{Action, Allocation};
use super::testing::{CLUSTER, metadata};
use super::write_back::WriteBackSet;
use super::*;
use crate::format::L2Entry;

/// Plans a write of the first guest cluster.
fn reserve(metadata: &mut Metadata) -> Allocation {
    let step = metadata.plan_write(GuestOffset::new(0), GuestOffset::new(CLUSTER), Growth::Free);
    match step.expect("an empty image").action {
        Action::Fill(fill) => fill.allocation,
        Action::Overwrite(at) => panic!("nothing is mapped, and {at} is to be overwritten"),
    }
}

fn shared_with_a_snapshot(metadata: &mut Metadata) {
    metadata.l1[0] = metadata.l1[0].with_copied(false);
}

#[test]
fn allocation_is_published_and_written_back() {
    let mut metadata = metadata();
    let allocation = reserve(&mut metadata);
    assert_eq!(metadata.publish(&allocation).1, Ok(()));
    let set = metadata.take_write_back_set();
    assert_eq!((set.new_tables.len(), set.l1.len()), (1, 1));
    metadata.end_write_back(set, true);
    assert!(metadata.is_clean());
}

#[test]
#[should_panic(expected = "is not in flight")]
fn publish_panics_when_called_twice() {
    let mut metadata = metadata();
    let allocation = reserve(&mut metadata);
    drop(metadata.publish(&allocation));
    drop(metadata.publish(&allocation));
}

#[test]
#[should_panic(expected = "is not in flight")]
fn abandon_panics_after_publish() {
    let mut metadata = metadata();
    let allocation = reserve(&mut metadata);
    drop(metadata.publish(&allocation));
    drop(metadata.abandon(&allocation));
}

#[test]
#[should_panic(expected = "is not published as it was planned")]
fn publish_panics_when_cluster_was_remapped() {
    let mut metadata = metadata();
    let allocation = reserve(&mut metadata);
    let other = L2Entry::data(HostOffset::new(9 * CLUSTER), true, metadata.geometry());
    metadata
        .set_mapping(0, GuestCluster::new(0), other)
        .expect("the slice is cached");
    drop(metadata.publish(&allocation));
}

#[test]
#[should_panic(expected = "is no entry of an L2 table")]
fn set_mapping_panics_when_entry_does_not_decode() {
    let mut metadata = metadata();
    reserve(&mut metadata);
    let set = metadata.set_mapping(0, GuestCluster::new(1), L2Entry::REFUSED);
    assert!(set.is_err());
}

#[test]
#[should_panic(expected = "an entry of a shared L2 table is changed")]
fn publish_panics_when_l2_table_is_shared() {
    let mut metadata = metadata();
    let allocation = reserve(&mut metadata);
    shared_with_a_snapshot(&mut metadata);
    drop(metadata.publish(&allocation));
}

#[test]
#[should_panic(expected = "belongs to no L2 table of this disk's own")]
fn write_back_panics_when_l2_table_is_shared() {
    let mut metadata = metadata();
    let allocation = reserve(&mut metadata);
    drop(metadata.publish(&allocation));
    shared_with_a_snapshot(&mut metadata);
    metadata.take_write_back_set();
}

#[test]
#[should_panic(expected = "too few for")]
fn write_back_panics_when_l1_table_is_too_short() {
    let mut metadata = metadata();
    metadata.size_bytes = 2 << 30;
    metadata.header_dirty = true;
    metadata.take_write_back_set();
}

#[test]
#[should_panic(expected = "two write-back sets at once")]
fn write_back_panics_when_a_set_is_already_taken() {
    let mut metadata = metadata();
    drop(metadata.take_write_back_set());
    drop(metadata.take_write_back_set());
}

#[test]
#[should_panic(expected = "no write-back set was taken")]
fn end_write_back_panics_when_no_set_was_taken() {
    metadata().end_write_back(WriteBackSet::default(), true);
}
