//! A few threads for work that waits for disks: images are opened in parallel.

use std::thread;

use parking_lot::Mutex;

/// The most threads at once. They wait for disks, not for CPUs.
const THREADS_MAX: usize = 8;

/// Does `work` with each of `items`, several at once. Answers them in their order, each with what came of it.
///
/// # Errors
///
/// The first error, in the order of `items`. No item after a failed one is started; those in progress are finished
/// and dropped.
pub(crate) fn each<T: Send, R: Send, E: Send>(
    items: Vec<T>,
    work: impl Fn(&T) -> Result<R, E> + Sync,
) -> Result<Vec<(T, R)>, E> {
    let threads = THREADS_MAX.min(items.len());
    let left = Mutex::new((items.into_iter().enumerate(), false));
    let done = Mutex::new(Vec::new());
    let take_all = || {
        loop {
            let next = {
                let mut left = left.lock();
                if left.1 { None } else { left.0.next() }
            };
            let Some((index, item)) = next else { return };
            let result = work(&item);
            if result.is_err() {
                left.lock().1 = true;
            }
            let mut done = done.lock();
            done.push((index, item, result));
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads {
            // Without a thread more it takes longer, and that is all.
            if thread::Builder::new().spawn_scoped(scope, take_all).is_err() {
                break;
            }
        }
        take_all();
    });
    let mut done = done.into_inner();
    done.sort_unstable_by_key(|(index, ..)| *index);
    let each = done.into_iter().map(|(_, item, result)| Ok((item, result?)));
    each.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;

    #[test]
    fn each_runs_in_parallel_and_answers_in_order() {
        let items: Vec<usize> = (0..3 * THREADS_MAX).collect();
        // Passed only if so many are at it at once.
        let together = Barrier::new(THREADS_MAX);
        let done = each(items, |&item| {
            together.wait();
            Ok::<_, ()>(item * 2)
        });
        let expected: Vec<_> = (0..3 * THREADS_MAX).map(|item| (item, item * 2)).collect();
        assert_eq!(done, Ok(expected));
        assert_eq!(
            each(Vec::<u8>::new(), |_| Err::<(), _>("no work")),
            Ok(Vec::new())
        );
    }

    #[test]
    fn each_returns_the_first_error_and_starts_no_more() {
        let begun = Mutex::new(0);
        let failed = each((0..1000).collect(), |&item: &usize| {
            *begun.lock() += 1;
            if item >= 4 { Err(item) } else { Ok(()) }
        });
        assert_eq!(failed, Err(4));
        let begun = *begun.lock();
        assert!(begun < 100, "{begun} were begun");
    }
}
