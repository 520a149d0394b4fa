//! The interface between a worker and the queues that it serves.
//!
//! Invariant: a frontend is called by its worker only, and none of its methods blocks.

use crate::ring::EventToken;

/// Source of a worker's requests and receiver of the answers: a virtqueue, a ublk queue.
///
/// Called by its worker only. None of these may block.
pub trait Frontend {
    /// Takes all available requests and submits them. Returns true if there were any.
    fn poll(&mut self) -> bool;

    /// Publishes all available answers, with at most one notification. Returns true if there were any.
    fn publish(&mut self) -> bool;

    /// Asks for a notification when a request comes, because the worker is about to sleep. Returns
    /// true if a request or an answer to publish is there already; the worker then does not sleep.
    fn prepare_sleep(&mut self) -> bool;

    /// Turns notifications off: the worker polls again.
    fn end_sleep(&mut self);

    /// Returns true if requests arrive as ring completions. Polling such a frontend is no cheaper than asking to be
    /// woken, so the worker may sleep right after a busy round.
    fn comes_through_ring(&self) -> bool {
        false
    }

    /// Has the frontend take no more requests, and leave those that have not begun to whoever serves the source next, if it keeps records
    /// of them. It is removed next.
    fn suspend(&mut self) {}

    /// Returns the number of requests taken and not yet published.
    fn in_flight(&self) -> usize;

    /// Ends the frontend's service: called once, after removal was requested and [`Frontend::in_flight`] has
    /// reached zero. The frontend is dropped next. From the request on, [`Frontend::poll`] is not called any more.
    fn removed(&mut self) {}
}

/// The id of a worker's frontend.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct FrontendId(pub(super) u64);

impl FrontendId {
    /// The token of its watches, past the worker's own.
    pub(super) fn token(self) -> EventToken {
        self.0 + 1
    }
}
