//! Orders to change the roster, and the thread that carries them out.
//!
//! In a sandbox only this thread may open files and make sockets and workers. Whoever orders something waits for what came of it, and
//! may be confined more than that.
//!
//! Invariant: an order that was taken is answered, or its asker is told that the server is stopping.

use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::thread;

use serde_json::Value;
use virtio_devices::vhost_user::ServeError;

use super::roster::Roster;
use crate::control::DiskKeys;

/// A change of the roster.
pub(super) enum Order {
    Add(DiskKeys, Option<PathBuf>, Answer),
    Remove(String, Answer),
    /// Follow what the configuration file says now.
    Reload(Answer),
    Failed(u64, ServeError),
}

/// The place for what came of an order.
pub(super) type Answer = mpsc::Sender<Result<Value, String>>;

/// Whoever carries out orders.
#[derive(Clone)]
pub(super) enum Orders {
    /// A thread that may open files and make sockets and workers.
    Thread(mpsc::Sender<Order>),
    /// Any: no disk can be added.
    Anybody(Arc<Roster>),
}

impl Orders {
    /// Starts the thread that carries out orders, where disks can be added. It is as confined as the calling one.
    ///
    /// # Errors
    ///
    /// If it cannot be started.
    pub(super) fn start(roster: &Arc<Roster>) -> std::io::Result<Self> {
        let roster = Arc::clone(roster);
        if !roster.setup.takes_orders() {
            return Ok(Self::Anybody(roster));
        }
        let (sender, orders) = mpsc::channel();
        let carry_out = move || orders.into_iter().for_each(|order| carry_out(&roster, order));
        thread::Builder::new().name("disks".to_owned()).spawn(carry_out)?;
        Ok(Self::Thread(sender))
    }

    /// Carries out an order, and waits for what came of it.
    ///
    /// # Errors
    ///
    /// The reason as a sentence.
    pub(super) fn ask(&self, order: impl FnOnce(Answer) -> Order) -> Result<Value, String> {
        let (answer, answered) = mpsc::channel();
        let order = order(answer);
        match self {
            // An order that cannot be sent drops its answer.
            Self::Thread(thread) => thread.send(order).unwrap_or_default(),
            Self::Anybody(roster) => carry_out(roster, order),
        }
        answered.recv().map_err(|_| "the server is stopping")?
    }

    /// Has the configuration file followed, and does not wait for that. What comes of it is in the log.
    pub(super) fn reload(&self) {
        let (answer, _nobody) = mpsc::channel();
        if let Self::Thread(thread) = self {
            thread.send(Order::Reload(answer)).unwrap_or_default();
        }
    }

    /// Has a disk closed that failed, and does not wait for that.
    pub(super) fn failed(&self, number: u64, error: ServeError) {
        let order = Order::Failed(number, error);
        match self {
            Self::Thread(thread) => thread.send(order).unwrap_or_default(),
            Self::Anybody(roster) => {
                let closing = Arc::clone(roster);
                let thread = thread::Builder::new().name("failed".to_owned());
                if let Err(error) = thread.spawn(move || carry_out(&closing, order)) {
                    tracing::error!(%error, "cannot close a disk that failed; stopping");
                    roster.stop();
                }
            }
        }
    }
}

fn carry_out(roster: &Arc<Roster>, order: Order) {
    // Whoever asked may have gone.
    match order {
        Order::Add(keys, socket, answer) => answer.send(roster.add(&keys, socket)).unwrap_or_default(),
        Order::Remove(id, answer) => answer.send(roster.remove(&id)).unwrap_or_default(),
        Order::Reload(answer) => answer.send(roster.reload()).unwrap_or_default(),
        Order::Failed(number, error) => roster.fail(number, error),
    }
}
