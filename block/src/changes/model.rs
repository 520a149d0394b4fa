//! Every order in which writes on two threads can end, be answered and be flushed.

use std::sync::Arc;

use loom::thread;

use super::*;
use crate::sync::atomic::AtomicU32;
use crate::sync::modelled::{block_on, check};
use crate::sync_rounds::Syncs;

/// A file that two views write, each a number of its own.
#[derive(Default)]
struct Disk {
    syncs: Syncs,
    written: [AtomicU32; 2],
    durable: [AtomicU32; 2],
    /// The writes that the first view has answered.
    answered: AtomicU32,
}

impl Disk {
    /// A write, which nothing but its count orders before the syncs that note the count.
    fn write(&self, view: usize, counter: &ChangeCounter) {
        let written = self.written[view].load(Ordering::Relaxed);
        self.written[view].store(written + 1, Ordering::Relaxed);
        counter.add();
    }

    fn flush(&self) {
        let flushed = self.syncs.run(async || {
            for (written, durable) in self.written.iter().zip(&self.durable) {
                durable.store(written.load(Ordering::Relaxed), Ordering::Relaxed);
            }
            Ok(())
        });
        assert_eq!(block_on(flushed), Ok(()));
    }

    fn assert_durable(&self, view: usize, writes: u32) {
        let durable = self.durable[view].load(Ordering::Relaxed);
        assert!(durable >= writes, "a FLUSH has not covered a write before it");
    }
}

/// Fails if a change is counted after its answer, if a sync takes for covered what it has not noted before it began, if
/// the count does not order what was written, and if a view that goes takes its count with it.
#[test]
fn flush_covers_what_was_answered_on_any_view() {
    check(2, || {
        let disk = Arc::new(Disk::default());
        disk.syncs.changes().assume_alone();
        let other = Arc::clone(&disk);
        let writer = thread::spawn(move || {
            let counter = other.syncs.changes().counter();
            other.write(0, &counter);
            drop(counter);
            other.answered.store(1, Ordering::Release);
            other.flush();
            other.assert_durable(0, 1);
        });
        let counter = disk.syncs.changes().counter();
        disk.write(1, &counter);
        disk.flush();
        disk.assert_durable(1, 1);
        let answered = disk.answered.load(Ordering::Acquire);
        disk.flush();
        disk.assert_durable(0, answered);
        writer.join().unwrap();
        assert!(disk.syncs.changes().are_covered());
    });
}
