//! Orders to change the roster, and the thread that carries them out.
//!
//! In a sandbox only this thread may open files and make sockets and workers. Whoever orders something waits for what came of it, and
//! may be confined more than that.
//!
//! Invariant: an order that was taken is answered, or its asker is told that the server is stopping.

use std::sync::Arc;
use std::thread;

use serde_json::Value;
use virtio_devices::vhost_user::ServeError;

use super::roster::Roster;
use crate::errands::Errands;

/// Whoever carries out orders.
#[derive(Clone)]
pub(super) struct Orders {
    roster: Arc<Roster>,
    /// A thread that may open files and make sockets and workers. `None`: anybody carries them out, as no disk can be added.
    thread: Option<Errands>,
}

impl Orders {
    /// Starts the thread that carries out orders, where disks can be added. It is as confined as the calling one.
    ///
    /// # Errors
    ///
    /// If it cannot be started.
    pub(super) fn start(roster: &Arc<Roster>) -> std::io::Result<Self> {
        let takes_orders = roster.setup.takes_orders();
        Ok(Self {
            roster: Arc::clone(roster),
            thread: takes_orders.then(|| Errands::start("disks")).transpose()?,
        })
    }

    /// Carries out an order, and waits for what came of it.
    ///
    /// # Errors
    ///
    /// The reason as a sentence.
    pub(super) fn ask(
        &self,
        order: impl FnOnce(&Arc<Roster>) -> Result<Value, String> + Send + 'static,
    ) -> Result<Value, String> {
        let Some(thread) = &self.thread else {
            return order(&self.roster);
        };
        let roster = Arc::clone(&self.roster);
        let answer = thread.ask(move || order(&roster));
        answer.unwrap_or_else(|| Err("the server is stopping".to_owned()))
    }

    /// Has the configuration file followed, and does not wait for that. What comes of it is in the log.
    pub(super) fn reload(&self) {
        if let Some(thread) = &self.thread {
            let roster = Arc::clone(&self.roster);
            thread.send(move || drop(roster.reload()));
        }
    }

    /// Has a disk closed that failed, and does not wait for that.
    pub(super) fn failed(&self, number: u64, error: ServeError) {
        let roster = Arc::clone(&self.roster);
        let close = move || roster.fail(number, error);
        if let Some(thread) = &self.thread {
            thread.send(close);
            return;
        }
        let thread = thread::Builder::new().name("failed".to_owned());
        if let Err(error) = thread.spawn(close) {
            tracing::error!(%error, "cannot close a disk that failed; stopping");
            self.roster.stop();
        }
    }
}
