//! Every order in which a worker can go to sleep and others can wake it.

use std::task::Poll;

use loom::thread;

use super::*;
use crate::sync::modelled::check;

/// Events that a task waits for, set by other threads.
#[derive(Default)]
struct Events {
    state: Mutex<(usize, Option<Waker>)>,
}

impl Events {
    fn set(&self) {
        let waker = {
            let mut state = self.state.lock();
            state.0 += 1;
            state.1.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    async fn wait_for(&self, count: usize) {
        std::future::poll_fn(|cx| {
            let mut state = self.state.lock();
            if state.0 >= count {
                return Poll::Ready(());
            }
            state.1 = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

/// Fails (nobody is left to run) if the worker looks for ready tasks before it announces sleep, if a waker checks for
/// a sleeping worker before it queues the task, and if either fence is missing.
#[test]
fn task_woken_by_two_threads_runs_as_worker_falls_asleep() {
    check(3, || {
        let events = Arc::new(Events::default());
        let others: Vec<_> = (0..2)
            .map(|_| {
                let events = Arc::clone(&events);
                thread::spawn(move || events.set())
            })
            .collect();
        let cx = Context::new(RingKind::Syscalls, 16).unwrap();
        let done = Rc::new(Cell::new(false));
        let (seen, spawned) = (Rc::clone(&done), Arc::clone(&events));
        let main = Rc::new(RefCell::new(None::<Waker>));
        let waker = Rc::clone(&main);
        cx.spawn(async move {
            spawned.wait_for(2).await;
            seen.set(true);
            if let Some(waker) = waker.take() {
                waker.wake();
            }
        });
        cx.block_on(std::future::poll_fn(|cx| {
            if done.get() {
                return Poll::Ready(());
            }
            main.replace(Some(cx.waker().clone()));
            Poll::Pending
        }))
        .unwrap();
        assert_eq!(cx.tasks(), 0);
        others.into_iter().for_each(|other| other.join().unwrap());
    });
}

/// Fails if `block_on` sleeps without another look at whether its own future was woken.
#[test]
fn block_on_repolls_future_woken_by_another_thread() {
    check(3, || {
        let events = Arc::new(Events::default());
        let other = {
            let events = Arc::clone(&events);
            thread::spawn(move || events.set())
        };
        let cx = Context::new(RingKind::Syscalls, 16).unwrap();
        cx.block_on(events.wait_for(1)).unwrap();
        other.join().unwrap();
    });
}
