//! Waiting for several operations of one request.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;

use smallvec::SmallVec;

use crate::error::IoError;

/// Waits until every operation has ended. All are polled, so that all make progress.
///
/// Does not return earlier after an error either: the memory that they name is the caller's.
///
/// # Errors
///
/// The error of the first operation that failed.
pub async fn join_all<F>(ops: impl IntoIterator<Item = F>) -> Result<(), IoError>
where
    F: Future<Output = Result<(), IoError>> + Unpin,
{
    let mut ops: SmallVec<[Option<F>; 3]> = ops.into_iter().map(Some).collect();
    let mut result = Ok(());
    poll_fn(|cx| {
        let mut pending = false;
        for place in &mut ops {
            let Some(op) = place else { continue };
            match Pin::new(op).poll(cx) {
                Poll::Ready(ended) => {
                    *place = None;
                    result = result.and(ended);
                }
                Poll::Pending => pending = true,
            }
        }
        if pending { Poll::Pending } else { Poll::Ready(()) }
    })
    .await;
    result
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;
    use std::task::{Context, Waker};

    use super::*;

    /// An operation, ended by setting its result.
    type Op = Rc<Cell<Option<Result<(), IoError>>>>;

    fn ended(op: &Op) -> impl Future<Output = Result<(), IoError>> + Unpin + 'static {
        let op = Rc::clone(op);
        poll_fn(move |_| op.take().map_or(Poll::Pending, Poll::Ready))
    }

    #[test]
    fn join_all_returns_earliest_error_after_last_op() {
        let ops: [Op; 4] = Default::default();
        let mut cx = Context::from_waker(Waker::noop());
        let mut all = Box::pin(join_all(ops.iter().map(ended)));
        let host = |errno| Err(IoError::Host { errno });
        // By time, not by place.
        for (index, result) in [(2, Ok(())), (3, host(5)), (0, host(28))] {
            ops[index].set(Some(result));
            assert!(all.as_mut().poll(&mut cx).is_pending(), "{index}");
        }
        ops[1].set(Some(Ok(())));
        assert_eq!(all.as_mut().poll(&mut cx), Poll::Ready(host(5)));
    }

    #[test]
    fn join_all_of_nothing_is_ready_at_once() {
        let mut cx = Context::from_waker(Waker::noop());
        let none: [std::future::Ready<_>; 0] = [];
        assert_eq!(
            Box::pin(join_all(none)).as_mut().poll(&mut cx),
            Poll::Ready(Ok(()))
        );
    }
}
