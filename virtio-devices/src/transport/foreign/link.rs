//! The connection with a backend: messages with a timeout, and a watcher thread.
//!
//! The watcher notices the backend's exit, receives the backend's own messages, and shuts down a connection whose backend
//! does not answer: the waiting caller then gets an error.
//!
//! Invariants: the watcher sends no message, so it never waits for an answer itself; the loss of a backend is reported
//! once.

use std::fmt;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use vhost::vhost_user::{
    Error as MessageError, Frontend, FrontendReqHandler, HandlerResult, VhostUserFrontendReqHandler,
};

use super::super::function::{FunctionState, signal};
use crate::connect::{Cancel, connect_within};
use crate::vhost_user::event::{Wait, duplicate, poll_all};

/// A request to the thread that connects.
#[derive(Debug)]
pub(super) enum Ask {
    /// The backend was lost: wait until it is back.
    Lost,
    /// A driver begins anew: try once whether it is back, if it was lost.
    Now(Sender<Result<(), BackendError>>),
    /// Ends the thread.
    End,
}

/// An error of a vhost-user backend, or of the connection with it.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// There is no listener.
    #[error("cannot connect to the vhost-user backend at {}", socket.display())]
    Connect {
        /// The backend's socket.
        socket: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The listener does not accept, and its backlog is full.
    #[error("the vhost-user backend at {} has not accepted a connection within {patience:?}", socket.display())]
    Busy {
        /// The backend's socket.
        socket: PathBuf,
        /// The timeout.
        patience: Duration,
    },
    /// The machine stops, or the connection is no longer needed.
    #[error("connecting to the vhost-user backend at {} was cancelled", socket.display())]
    Cancelled {
        /// The backend's socket.
        socket: PathBuf,
    },
    /// It answers too late, or never. One that serves another client does so.
    #[error("the vhost-user backend at {} has not answered {message} within {patience:?}", socket.display())]
    Silent {
        /// The backend's socket.
        socket: PathBuf,
        /// The message that was sent.
        message: &'static str,
        /// The timeout.
        patience: Duration,
    },
    /// It refuses, or what it says makes no sense.
    #[error("the vhost-user backend at {} failed at {message}", socket.display())]
    Message {
        /// The backend's socket.
        socket: PathBuf,
        /// The message that was sent.
        message: &'static str,
        /// The error.
        #[source]
        source: vhost::Error,
    },
    /// It does not do something that is needed.
    #[error("the vhost-user backend at {} does not support {what}", socket.display())]
    Lacks {
        /// The backend's socket.
        socket: PathBuf,
        /// The missing feature.
        what: &'static str,
    },
    /// It has fewer queues than were asked for.
    #[error("the vhost-user backend at {} has {found} queues; expected at least {asked}", socket.display())]
    Queues {
        /// The backend's socket.
        socket: PathBuf,
        /// The number of queues that it has.
        found: u64,
        /// The number of queues that are required.
        asked: u16,
    },
    /// It closed the connection.
    #[error("the vhost-user backend at {} closed the connection", socket.display())]
    Gone {
        /// The backend's socket.
        socket: PathBuf,
    },
    /// The guest's memory cannot be shared, or a ring is not in it.
    #[error("{what} at the guest's address {address:#x} is outside the guest memory that can be shared")]
    Memory {
        /// The object at that address.
        what: &'static str,
        /// The guest address.
        address: u64,
    },
    /// The host has no more descriptors or threads.
    #[error("cannot create an eventfd or a thread for a vhost-user backend")]
    Host(#[source] io::Error),
}

/// The longest time that a backend may take for its set-up: the connection and all messages together.
pub(super) const SETUP_PATIENCE: Duration = Duration::from_secs(5);
/// The longest time for a later message, which may have to drain a queue first.
const PATIENCE: Duration = Duration::from_secs(60);
/// The interval, in milliseconds, at which the watcher checks for an overdue answer.
const LOOK_MS: i32 = 100;
/// No descriptor, where one is waited for.
const NOBODY: RawFd = -1;

/// A limit to how long messages may take.
#[derive(Clone, Debug)]
enum Limit {
    /// All messages of the set-up, which can be cancelled.
    SetUp {
        until: Instant,
        patience: Duration,
        cancel: Cancel,
    },
    /// Each message. It is not cancelled: a queue that is stopped has to be drained.
    Each(Duration),
}

impl Limit {
    /// By when a message that is sent now must be answered, and how long that is in all.
    fn deadline(&self) -> (Option<Instant>, Duration) {
        match self {
            Self::SetUp { until, patience, .. } => (Some(*until), *patience),
            Self::Each(patience) => (Instant::now().checked_add(*patience), *patience),
        }
    }

    fn is_cancelled(&self) -> bool {
        matches!(self, Self::SetUp { cancel, .. } if cancel.is_cancelled())
    }
}

/// The state that the device and the watcher of a connection share.
pub(super) struct Link {
    socket: PathBuf,
    stream: UnixStream,
    frontend: Frontend,
    limit: Mutex<Limit>,
    /// The deadline for the answer to the current message.
    deadline: Mutex<Option<Instant>>,
    overdue: AtomicBool,
    gone: AtomicBool,
    /// The backend has reported a change of its configuration, which was not read since.
    stale: AtomicBool,
    /// Wakes the watcher.
    wake: OwnedFd,
    /// Signalled by the backend when a guest has broken a queue.
    broken: OwnedFd,
    /// The function, once there is one.
    function: OnceLock<Arc<FunctionState>>,
    /// The thread that waits for the backend to come back, if it records requests in flight.
    keeper: OnceLock<Sender<Ask>>,
    /// True if the backend expects an answer to its own messages.
    answers: AtomicBool,
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link")
            .field("socket", &self.socket)
            .field("gone", &self.gone)
            .finish_non_exhaustive()
    }
}

impl Link {
    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    pub(super) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::SeqCst)
    }

    /// Returns the eventfd that the backend signals when a guest has broken a queue.
    pub(super) fn broken(&self) -> BorrowedFd<'_> {
        self.broken.as_fd()
    }

    /// The backend waits for an answer when it says something by itself.
    pub(super) fn answer(&self) {
        self.answers.store(true, Ordering::SeqCst);
    }

    /// Reports events to `function` from now on; messages get the longer timeout and are not cancelled. With a
    /// `keeper`, a loss is reported to that one and not to the guest.
    pub(super) fn serve(&self, function: &Arc<FunctionState>, keeper: Option<&Sender<Ask>>) {
        *self.limit.lock() = Limit::Each(PATIENCE);
        // A connection serves one function, so this is the first.
        if let Some(keeper) = keeper {
            self.keeper.set(keeper.clone()).unwrap_or_default();
        }
        self.function.set(Arc::clone(function)).unwrap_or_default();
        if self.is_gone() {
            self.report_loss(function, &"it has closed the connection");
        }
    }

    fn report_loss(&self, function: &FunctionState, why: &dyn fmt::Display) {
        let (disk, socket) = (&function.name, self.socket.display());
        let admitted = function.log_limit.admit();
        if let Some(keeper) = self.keeper.get() {
            if let Some(held_back) = admitted {
                tracing::warn!(%disk, %socket, %why, held_back, "lost the vhost-user backend; requests wait until it is back");
            }
            // If nobody hears, the function has ended.
            return keeper.send(Ask::Lost).unwrap_or_default();
        }
        if let Some(held_back) = admitted {
            tracing::error!(%disk, %socket, %why, held_back, "lost the vhost-user backend; the disk needs a reset by its guest");
        }
        function.needs_reset();
    }

    /// Returns true if the configuration has changed since the last call.
    pub(super) fn take_stale(&self) -> bool {
        self.stale.swap(false, Ordering::SeqCst)
    }

    /// Sends a message and waits for what it is answered, if it is. One at a time.
    pub(super) fn send<T>(
        &self,
        message: &'static str,
        message_call: impl FnOnce(&mut Frontend) -> vhost::Result<T>,
    ) -> Result<T, BackendError> {
        let socket = || self.socket.clone();
        if self.is_gone() {
            return Err(BackendError::Gone { socket: socket() });
        }
        let (deadline, patience) = self.limit.lock().deadline();
        *self.deadline.lock() = deadline;
        signal(self.wake.as_fd());
        let answer = message_call(&mut self.frontend.clone());
        *self.deadline.lock() = None;
        answer.map_err(|source| {
            if self.overdue.load(Ordering::SeqCst) {
                return BackendError::Silent {
                    socket: socket(),
                    message,
                    patience,
                };
            }
            if self.limit.lock().is_cancelled() {
                return BackendError::Cancelled { socket: socket() };
            }
            // Who only says no is still there.
            let refusal = vhost::Error::VhostUserProtocol(MessageError::BackendInternalError);
            if source.to_string() != refusal.to_string() {
                self.lose(&source);
            }
            BackendError::Message {
                socket: socket(),
                message,
                source,
            }
        })
    }

    /// Handles the loss of the backend, or of trust in it.
    fn lose(&self, why: &dyn fmt::Display) {
        if self.gone.swap(true, Ordering::SeqCst) {
            return;
        }
        // One that is shut down already is as good.
        self.stream.shutdown(Shutdown::Both).unwrap_or_default();
        if let Some(function) = self.function.get() {
            self.report_loss(function, why);
        }
    }

    /// Sees to the connection until it is lost or ended.
    fn watch(&self, mut requests: FrontendReqHandler<ConfigChanges>, changes: &ConfigChanges) {
        let mut hears = true;
        while !self.is_gone() {
            let waits = self.deadline.lock().is_some();
            let says = if hears { requests.as_raw_fd() } else { NOBODY };
            let watched = [
                (self.stream.as_raw_fd(), Wait::HangUp),
                (self.wake.as_raw_fd(), Wait::Readable),
                (self.broken.as_raw_fd(), Wait::Readable),
                (says, Wait::Readable),
            ];
            let seen = poll_all(watched, if waits { LOOK_MS } else { -1 });
            let [hung_up, woken, broken, said] = match seen {
                Ok(seen) => seen,
                Err(error) => return self.lose(&error),
            };
            if hung_up {
                return self.lose(&"it has closed the connection");
            }
            if woken {
                take(self.wake.as_fd());
            }
            if broken {
                take(self.broken.as_fd());
                self.queue_broken();
            }
            if said {
                requests.set_reply_ack_flag(self.answers.load(Ordering::SeqCst));
                if let Err(error) = requests.handle_request() {
                    let socket = self.socket.display();
                    tracing::warn!(%socket, %error, "cannot read a message that the vhost-user backend sent");
                    // Its disk works without.
                    hears = false;
                }
                if changes.0.swap(false, Ordering::SeqCst) {
                    self.config_changed();
                }
            }
            let deadline = *self.deadline.lock();
            if deadline.is_some() && self.limit.lock().is_cancelled() {
                return self.lose(&"its set-up was cancelled");
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                self.overdue.store(true, Ordering::SeqCst);
                return self.lose(&"it does not answer");
            }
        }
    }

    fn config_changed(&self) {
        self.stale.store(true, Ordering::SeqCst);
        if let Some(function) = self.function.get() {
            function.config_changed();
        }
    }

    fn queue_broken(&self) {
        if let Some(function) = self.function.get() {
            if let Some(held_back) = function.log_limit.admit() {
                let disk = &function.name;
                tracing::warn!(%disk, held_back, "the guest broke a queue; the vhost-user backend has stopped it");
            }
            function.needs_reset();
        }
    }
}

/// Takes the signals of an eventfd that has some.
fn take(event: BorrowedFd<'_>) {
    rustix::io::read(event, &mut [0; 8]).map_or_else(drop, drop);
}

/// Notes what a backend says by itself.
#[derive(Default)]
struct ConfigChanges(AtomicBool);

impl VhostUserFrontendReqHandler for ConfigChanges {
    fn handle_config_change(&self) -> HandlerResult<u64> {
        self.0.store(true, Ordering::SeqCst);
        Ok(0)
    }
}

/// A connection, and the thread that watches it. Dropping it ends both.
#[derive(Debug)]
pub(super) struct Connection {
    link: Arc<Link>,
    /// The backend's end of the channel on which it says things by itself.
    channel: UnixStream,
    watcher: Option<JoinHandle<()>>,
}

impl Connection {
    /// Connects to the backend that listens at `socket`, for `queues` queues. The connection and its set-up may take as
    /// long as `patience`, unless `cancel` says otherwise first.
    pub(super) fn open(
        socket: &Path,
        queues: u16,
        patience: Duration,
        cancel: &Cancel,
    ) -> Result<Self, BackendError> {
        let until = Instant::now() + patience;
        let stream = connect_within(socket, patience, cancel).map_err(|source| {
            let socket = socket.to_owned();
            match source.kind() {
                io::ErrorKind::TimedOut => BackendError::Busy { socket, patience },
                io::ErrorKind::ConnectionAborted => BackendError::Cancelled { socket },
                _ => BackendError::Connect { socket, source },
            }
        })?;
        let host = BackendError::Host;
        let changes = Arc::new(ConfigChanges::default());
        let requests = FrontendReqHandler::new(Arc::clone(&changes));
        let requests = requests.map_err(|error| host(io::Error::other(error)))?;
        let channel = duplicate(requests.get_tx_raw_fd()).map_err(host)?;
        let link = Arc::new(Link {
            socket: socket.to_owned(),
            frontend: Frontend::from_stream(stream.try_clone().map_err(host)?, queues.into()),
            stream,
            limit: Mutex::new(Limit::SetUp {
                until,
                patience,
                cancel: cancel.clone(),
            }),
            deadline: Mutex::new(None),
            overdue: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            stale: AtomicBool::new(false),
            wake: block::event::eventfd().map_err(host)?,
            broken: block::event::eventfd().map_err(host)?,
            function: OnceLock::new(),
            keeper: OnceLock::new(),
            answers: AtomicBool::new(false),
        });
        let watched = Arc::clone(&link);
        let watcher = std::thread::Builder::new()
            .name("vhost-user".to_owned())
            .spawn(move || watched.watch(requests, &changes))
            .map_err(host)?;
        Ok(Self {
            link,
            channel: channel.into(),
            watcher: Some(watcher),
        })
    }

    pub(super) fn link(&self) -> &Link {
        &self.link
    }

    /// The backend's end of the channel on which it says things by itself.
    pub(super) fn channel(&self) -> &UnixStream {
        &self.channel
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // An end that is meant is no loss, and what is shut down already is as good.
        self.link.gone.store(true, Ordering::SeqCst);
        self.link.stream.shutdown(Shutdown::Both).unwrap_or_default();
        self.channel.shutdown(Shutdown::Both).unwrap_or_default();
        signal(self.link.wake.as_fd());
        if let Some(watcher) = self.watcher.take()
            && watcher.join().is_err()
        {
            tracing::error!("the thread that watches a vhost-user backend panicked");
        }
    }
}
