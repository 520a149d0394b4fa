//! Every order in which a worker can sleep, take commands and end.

use std::time::Duration;

use loom::thread;

use super::*;
use crate::ring::RingKind;
use crate::sync::atomic::AtomicUsize;
use crate::sync::modelled::check;

/// Fails (nobody is left to run) if a worker sleeps without another look at its commands, and if either fence
/// between announcing sleep and that look is missing.
#[test]
fn worker_runs_queued_commands_before_it_ends() {
    check(3, || {
        let commands = Arc::new(Commands::default());
        let config = WorkerConfig {
            ring: RingKind::Syscalls,
            depth: 16,
            poll_max: Duration::ZERO,
            ..WorkerConfig::default()
        };
        let (mut worker, _watch) = set_up(&config, Arc::clone(&commands)).unwrap();
        let mut handle = WorkerHandle {
            commands,
            queue: Arc::clone(worker.cx.run_queue()),
            driver: "syscalls",
            thread: None,
        };
        let done = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&done);
        let owner = thread::spawn(move || {
            let first = Arc::clone(&counted);
            handle.command(Box::new(move |_| {
                first.fetch_add(1, Ordering::SeqCst);
            }));
            handle.command(Box::new(move |worker| {
                worker.cx.spawn(async move {
                    counted.fetch_add(1, Ordering::SeqCst);
                });
            }));
            handle.shut_down();
        });
        worker.serve().unwrap();
        owner.join().unwrap();
        assert_eq!(done.load(Ordering::SeqCst), 2);
    });
}
