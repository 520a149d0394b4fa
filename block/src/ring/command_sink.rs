//! The queue through which a ring reports the ends of commands to their owner.
//!
//! The slots name it as the recipient of a command's result, so it knows neither slots nor commands.
//!
//! Invariant: reporting a result calls nobody; the owner polls the sink.

use std::cell::RefCell;
use std::rc::Rc;

/// Queue of results of one owner's commands, until it takes them.
#[derive(Debug, Default)]
pub struct CommandSink {
    results: RefCell<Vec<(u64, i32)>>,
}

impl CommandSink {
    /// Makes an empty sink.
    #[must_use]
    pub fn new() -> Rc<Self> {
        Rc::new(Self::default())
    }

    /// Returns true if no result is waiting.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.results.borrow().is_empty()
    }

    /// Appends all results to `out`, in the order in which the commands ended: the tag, and the driver's answer.
    pub fn drain_into(&self, out: &mut Vec<(u64, i32)>) {
        let mut results = self.results.borrow_mut();
        if out.is_empty() {
            // Moves nothing.
            std::mem::swap(out, &mut *results);
        } else {
            out.append(&mut results);
        }
    }

    pub(super) fn push(&self, tag: u64, result: i32) {
        self.results.borrow_mut().push((tag, result));
    }
}
