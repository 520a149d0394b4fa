//! Whoever makes connections, on a thread of its own: a device is reset by a thread that runs a guest's CPU, and such a
//! thread may have given up the right to make sockets and threads that are more than itself.

use std::path::Path;
use std::sync::mpsc::{self, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use super::link::{BackendError, Connection};
use super::{Config, negotiate};

/// A connection with a backend, and what was agreed upon.
#[derive(Debug)]
pub(super) struct Agreed {
    pub(super) connection: Connection,
    /// The features that a guest may have.
    pub(super) features: u64,
    pub(super) config: Config,
}

type Answer = Sender<Result<Agreed, BackendError>>;

/// Makes connections with one backend, as often as it is asked.
#[derive(Debug)]
pub(super) struct Connector {
    socket: std::path::PathBuf,
    asked: Option<Sender<Answer>>,
    thread: Option<JoinHandle<()>>,
}

impl Connector {
    /// Starts the thread, which can do what the caller can.
    pub(super) fn start(socket: &Path, queues: u16, patience: Duration) -> Result<Self, BackendError> {
        let (asked, asks) = mpsc::channel::<Answer>();
        let place = socket.to_owned();
        let thread = std::thread::Builder::new()
            .name("connector".to_owned())
            .spawn(move || {
                for answer in asks {
                    // Who has asked waits for it.
                    answer.send(agree(&place, queues, patience)).unwrap_or_default();
                }
            })
            .map_err(BackendError::Host)?;
        Ok(Self {
            socket: socket.to_owned(),
            asked: Some(asked),
            thread: Some(thread),
        })
    }

    /// Connects and agrees about everything but the driver's features.
    pub(super) fn connect(&self) -> Result<Agreed, BackendError> {
        let gone = || BackendError::Gone {
            socket: self.socket.clone(),
        };
        let (answer, answered) = mpsc::channel();
        let asked = self.asked.as_ref().map(|asked| asked.send(answer));
        asked.ok_or_else(gone)?.map_err(|_| gone())?;
        answered.recv().map_err(|_| gone())?
    }
}

fn agree(socket: &Path, queues: u16, patience: Duration) -> Result<Agreed, BackendError> {
    let connection = Connection::open(socket, queues, patience)?;
    let (features, config) = negotiate(&connection, queues)?;
    Ok(Agreed {
        connection,
        features,
        config,
    })
}

impl Drop for Connector {
    fn drop(&mut self) {
        drop(self.asked.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that connects to a vhost-user backend has panicked");
        }
    }
}
