//! One of several operations of a request that are under way at once.

use std::pin::Pin;
use std::task::{Context, Poll};

use block::file::IoFuture;
use block::{IoError, LocalBoxFuture};

/// An operation of a request, to be waited for with [`block::join_all`].
pub(super) enum Part {
    /// One op of the ring, without a box.
    Io(IoFuture),
    /// Several steps.
    Task(LocalBoxFuture<'static, Result<(), IoError>>),
}

impl Future for Part {
    type Output = Result<(), IoError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.get_mut() {
            Self::Io(io) => Pin::new(io).poll(cx),
            Self::Task(task) => task.as_mut().poll(cx),
        }
    }
}
