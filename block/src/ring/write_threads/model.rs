//! Random orders of a worker that hands ops over and sleeps, and of the threads that perform them.

use std::collections::BTreeSet;

use super::*;
use crate::ring::driver::FileSlot;

/// Fails (nobody is left to run) if a worker sleeps without another look at what has ended.
#[test]
fn worker_gets_each_report_once_while_it_falls_asleep() {
    let run = || {
        let files = [(); 2].map(|()| tempfile::tempfile_in("/dev/shm").unwrap());
        let mut writes = WriteThreads::default();
        assert!(writes.prepare_sleep(), "nothing is under way");
        let mut expected = BTreeSet::new();
        let mut taken = Vec::new();
        for round in 1..=3u64 {
            for (index, file) in (0u32..).zip(&files) {
                if !writes.serves(index) {
                    writes.start(index).unwrap();
                }
                // More than are reported together, in the second round.
                let count = if round == 2 {
                    REPORTED_TOGETHER as u64 + 1
                } else {
                    1
                };
                for number in 0..count {
                    let fd = file.as_raw_fd();
                    let op = DetachedOp::truncation(FileSlot { fd, fixed: None }, round * 100 + number);
                    let user_data = u64::from(index) << 32 | round << 16 | number;
                    writes.push(index, op, user_data);
                    expected.insert(user_data);
                }
            }
            writes.hand_over();
            // The next round begins with some of this one under way.
            let still = if round == 3 { 0 } else { expected.len() - 1 };
            while expected.len() > still {
                if writes.prepare_sleep() {
                    let fd = writes.wake_fd().unwrap();
                    crate::ring::sys::poll_readable(&[fd], true).unwrap();
                    crate::ring::sys::take_event(fd);
                    writes.end_sleep();
                }
                writes.take(&mut taken);
                for report in taken.drain(..) {
                    assert!(expected.remove(&report.user_data), "{report:?} is not expected");
                    assert_eq!(report.result, 0);
                }
            }
        }
        for file in &files {
            let len = file.metadata().unwrap().len();
            assert_eq!(len, 300, "the ops of a file are performed in their order");
        }
        writes.end(0);
        assert!(!writes.serves(0) && writes.serves(1));
    };
    shuttle::check_random(run, 2000);
}
