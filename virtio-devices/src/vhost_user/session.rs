//! A server's talk with one client after another: accepting it, its messages, and its end.
//!
//! ```text
//! nobody ──accept──▶ Client ──message, message, …──▶ gone: its queues drain ──▶ nobody
//!                      └──── a pause: its queues drain, and it waits for whoever goes on ────▶
//! ```
//!
//! Invariants: what a client asked for before it went has been answered and published when the next one is accepted; a pause
//! comes between two messages, and what was not read is for whoever goes on.

use std::fmt;
use std::io;
use std::ops::Deref;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use vhost::vhost_user::{BackendReqHandler, Error as MessageError};

use super::backend::Backend;
use super::image::DetachedDisk;
use super::stop_token::{ConnectionGuard, StopToken};
use super::{PausedClient, ServeError, VhostUserServer, event, lock};

/// The time after which the log names a waiting client and the connected one. The latter may be about to disconnect,
/// and a process that it forked may keep its connection open for a moment.
const WAITING_MIN: Duration = Duration::from_secs(1);

/// The delay before an image is tried again that another process has.
const IMAGE_RETRY: Duration = Duration::from_millis(20);

/// The delay before accepting is tried again after a lack of descriptors or memory.
const SHORTAGE: Duration = Duration::from_millis(100);

/// The talk of one server, between two messages.
pub(super) struct Session<S, L> {
    /// The disk's number with the token.
    disk: u64,
    server: S,
    listener: L,
    stop: StopToken,
    client: Option<Client>,
    /// True if nothing could be accepted the last time, which was logged.
    short: bool,
}

/// A connected client.
struct Client {
    disk: u64,
    messages: BackendReqHandler<Mutex<Backend>>,
    backend: Arc<Mutex<Backend>>,
    guard: ConnectionGuard,
    connection: UnixStream,
    /// False once another client waits, who then does so for as long as this one is served.
    looks_for_others: bool,
    /// The time to name the one that waits.
    report_at: Option<Instant>,
}

/// The reason why a talk has returned.
pub(super) enum Pause {
    /// Nothing came for a while, and nothing is due.
    Idle,
    /// It was asked to stop, and no client is connected.
    Stopped,
    /// It was asked to pause, with this client.
    Paused(Option<PausedClient>),
}

/// The end of a turn with a client.
enum Turn {
    /// Nothing came for a while.
    Idle,
    /// The client is served on.
    On,
    /// The client has gone, or is to go.
    Gone(MessageError),
}

impl<S: Deref<Target = VhostUserServer>, L> fmt::Debug for Session<S, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("server", &*self.server)
            .field("connected", &self.client.is_some())
            .finish_non_exhaustive()
    }
}

impl<S, L> Session<S, L>
where
    S: Deref<Target = VhostUserServer>,
    L: Deref<Target = UnixListener>,
{
    /// A talk about the disk of this number that begins with `client`, whose queues are started, if there is one.
    ///
    /// # Errors
    ///
    /// [`ServeError`]: a worker has ended.
    pub(super) fn new(
        disk: u64,
        server: S,
        listener: L,
        stop: &StopToken,
        client: Option<PausedClient>,
    ) -> Result<Self, ServeError> {
        let mut session = Self {
            disk,
            server,
            listener,
            stop: stop.clone(),
            client: None,
            short: false,
        };
        if let Some(client) = client {
            let client = session.server.go_on(client)?;
            session.begin(client)?;
        }
        Ok(session)
    }

    /// Returns the connection of the client, if there is one.
    pub(super) fn connection(&self) -> Option<&UnixStream> {
        self.client.as_ref().map(|client| &client.connection)
    }

    /// Returns the listening socket, while somebody who connects there is to be seen.
    pub(super) fn awaited(&self) -> Option<&UnixListener> {
        let looks = self.client.as_ref().is_none_or(|client| client.looks_for_others);
        looks.then_some(&*self.listener)
    }

    /// Talks to one client after another until it is asked to stop or to pause; or until nothing has come for `linger`, if there is
    /// such a time.
    ///
    /// # Errors
    ///
    /// [`ServeError`]: the listener or a worker failed. The talk is over then.
    pub(super) fn talk(&mut self, linger: Option<Duration>) -> Result<Pause, ServeError> {
        loop {
            let Some(client) = &mut self.client else {
                if self.stop.pauses(self.disk) {
                    return Ok(Pause::Paused(None));
                }
                if self.stop.ends(self.disk) {
                    return Ok(Pause::Stopped);
                }
                let watched = [Some(self.listener.as_fd()), Some(self.stop.event())];
                match event::wait_any(watched, linger).map_err(ServeError::Accept)? {
                    [true, _] => self.accept()?,
                    [false, true] => {}
                    // A signal ends a wait, too.
                    [false, false] if linger.is_some() => return Ok(Pause::Idle),
                    [false, false] => {}
                }
                continue;
            };
            if self.stop.pauses(self.disk) {
                let client = self.client.take().map(Client::pause).transpose()?;
                return Ok(Pause::Paused(client));
            }
            match client.turn(&self.server, &self.listener, &self.stop, linger) {
                Turn::On => {}
                Turn::Idle => return Ok(Pause::Idle),
                Turn::Gone(why) => self.end(&why)?,
            }
        }
    }

    /// Accepts a client.
    fn accept(&mut self) -> Result<(), ServeError> {
        if self.stop.pauses(self.disk) || self.stop.ends(self.disk) {
            return Ok(());
        }
        let server = &*self.server;
        match self.listener.accept() {
            Ok((stream, _)) => {
                self.short = false;
                // An accepted socket may have inherited this from a listener that polls.
                if let Err(error) = stream.set_nonblocking(false) {
                    tracing::warn!(disk = %server.name, %error, "cannot serve a client");
                    return Ok(());
                }
                if let Some(held_back) = server.log_limit.admit() {
                    tracing::info!(event = "client-connected", disk = %server.name, held_back, "a client has connected");
                }
                let client = server.receive(stream);
                self.begin(client)
            }
            Err(error) if is_short(&error) => {
                if !std::mem::replace(&mut self.short, true) {
                    tracing::warn!(disk = %server.name, %error, "cannot accept a connection now");
                }
                // The client goes on waiting; a stop does not.
                event::wait_readable_for(self.stop.event(), SHORTAGE).map_err(ServeError::Accept)?;
                Ok(())
            }
            Err(error) if is_passing(&error) => {
                tracing::debug!(disk = %server.name, %error, "a connection was closed before it was accepted");
                Ok(())
            }
            Err(error) => Err(ServeError::Accept(error)),
        }
    }

    /// Begins with a client whose queues run, or that has none yet.
    fn begin(&mut self, client: PausedClient) -> Result<(), ServeError> {
        let PausedClient {
            messages, backend, ..
        } = client;
        let watched = messages
            .try_clone_connection()
            .and_then(|connection| Ok((self.stop.watch(self.disk, connection.try_clone()?), connection)));
        match watched {
            Ok((guard, connection)) => {
                self.client = Some(Client {
                    disk: self.disk,
                    messages,
                    backend,
                    guard,
                    connection,
                    looks_for_others: true,
                    report_at: None,
                });
            }
            Err(error) => {
                tracing::warn!(disk = %self.server.name, %error, "cannot serve a client");
                lock(&backend).disconnect()?;
            }
        }
        Ok(())
    }

    /// Drains the queues of a client that has gone, or that is to go.
    fn end(&mut self, why: &MessageError) -> Result<(), ServeError> {
        let Some(client) = self.client.take() else {
            return Ok(());
        };
        let server = &*self.server;
        match why {
            _ if self.stop.ends(self.disk) => {
                tracing::info!(event = "client-gone", disk = %server.name, "disconnecting the client")
            }
            MessageError::Disconnected => {
                if let Some(held_back) = server.log_limit.admit() {
                    tracing::info!(event = "client-gone", disk = %server.name, held_back, "the client has disconnected");
                }
            }
            error => {
                if let Some(held_back) = server.device.log_limit().admit() {
                    tracing::warn!(event = "client-gone", disk = %server.name, %error, held_back, "disconnecting the client");
                }
            }
        }
        let disconnected = lock(&client.backend).disconnect();
        disconnected.map_err(Into::into)
    }
}

impl Client {
    /// Waits for what is next, and executes a message if it is one.
    fn turn(
        &mut self,
        server: &VhostUserServer,
        listener: &UnixListener,
        stop: &StopToken,
        linger: Option<Duration>,
    ) -> Turn {
        let others = self.looks_for_others.then_some(listener.as_fd());
        let (waits_for_image, opens) = {
            let backend = lock(&self.backend);
            (backend.waits_for_image(), backend.image_opens())
        };
        let opened = opens.as_ref().map(|end| end.as_fd());
        let watched = [Some(self.connection.as_fd()), Some(stop.event()), others, opened];
        let try_again = (waits_for_image && opens.is_none()).then_some(IMAGE_RETRY);
        let report = self
            .report_at
            .map(|at| at.saturating_duration_since(Instant::now()));
        let due = try_again.into_iter().chain(report).min();
        let patience = due.or(linger.filter(|_| opens.is_none()));
        match event::wait_any(watched, patience) {
            Ok(_) if stop.pauses(self.disk) => return Turn::On,
            Ok([.., true]) => return self.try_again(),
            Ok([true, ..]) => {}
            Ok([false, ..]) if stop.is_stopped() => return Turn::Gone(MessageError::Disconnected),
            Ok([false, _, true, _]) => {
                self.looks_for_others = false;
                self.report_at = Some(Instant::now() + WAITING_MIN);
                return Turn::On;
            }
            Ok(_) if due.is_none() && opens.is_none() && linger.is_some() => return Turn::Idle,
            Ok(_) => {
                if self.report_at.take_if(|at| *at <= Instant::now()).is_some() {
                    server.report_waiting(&self.connection);
                }
                return if try_again.is_some() {
                    self.try_again()
                } else {
                    Turn::On
                };
            }
            Err(error) => return Turn::Gone(MessageError::SocketError(error)),
        }
        self.execute(server)
    }

    /// Starts what waits for the image, if that can be opened now.
    fn try_again(&self) -> Turn {
        match lock(&self.backend).try_again() {
            Ok(()) => Turn::On,
            Err(_) => Turn::Gone(MessageError::BackendInternalError),
        }
    }

    /// Reads a message and executes it.
    fn execute(&mut self, server: &VhostUserServer) -> Turn {
        self.guard.reading(true);
        let watched = server
            .channel
            .watch(&self.connection)
            .map_err(MessageError::SocketError);
        let handled = watched.and_then(|()| self.messages.handle_request());
        self.guard.reading(false);
        // The answer has been sent, and is the client's even if this process dies now.
        lock(&self.backend).note_cache_mode();
        match handled {
            Ok(()) | Err(MessageError::SocketRetry(_)) => {}
            // The backend refused something and the client was told, if it wanted to know.
            Err(MessageError::ReqHandlerError(error)) if lock(&self.backend).answers_errors() => {
                if let Some(held_back) = server.device.log_limit().admit() {
                    tracing::warn!(disk = %server.name, %error, held_back, "refused a message of the client");
                }
            }
            Err(error) => return Turn::Gone(error),
        }
        if lock(&self.backend).worker_gone() {
            return Turn::Gone(MessageError::BackendInternalError);
        }
        Turn::On
    }

    /// Drains the client's queues for whoever goes on with it.
    fn pause(self) -> Result<PausedClient, ServeError> {
        let Self {
            messages,
            backend,
            guard,
            ..
        } = self;
        drop(guard);
        let mut client = lock(&backend);
        let stopped = client.stop_all();
        client.settle_image();
        drop(client);
        stopped?;
        Ok(PausedClient::new(messages, backend))
    }
}

impl VhostUserServer {
    /// Serves the clients that connect to `listener`, one after another, until `stop` is asked to stop.
    /// Requests that a client made before it went, or before the stop, have been answered and published when
    /// this returns. A client's mistakes end its connection, not the server.
    ///
    /// # Errors
    ///
    /// [`ServeError`]: the listener or a worker failed.
    pub fn serve(&self, listener: &UnixListener, stop: &StopToken) -> Result<(), ServeError> {
        self.serve_on(listener, stop, None).map(drop)
    }

    /// As [`VhostUserServer::serve`], beginning with a client that is connected already, if there is one. Returns
    /// also when `stop` is asked to pause, with the client that is connected then; its queues have drained and kept
    /// their places, and it has not noticed. A [`Reception`](super::Reception) does so for many disks, with few threads.
    ///
    /// # Errors
    ///
    /// [`ServeError`]: the listener or a worker failed.
    pub fn serve_on(
        &self,
        listener: &UnixListener,
        stop: &StopToken,
        client: Option<PausedClient>,
    ) -> Result<Option<PausedClient>, ServeError> {
        let mut session = Session::new(0, self, listener, stop, client)?;
        loop {
            match session.talk(None)? {
                Pause::Idle => {}
                Pause::Stopped => return Ok(None),
                Pause::Paused(client) => return Ok(client),
            }
        }
    }

    /// A client of whom nothing is known yet.
    pub(super) fn receive(&self, stream: UnixStream) -> PausedClient {
        self.look_at_image();
        let backend = Arc::new(Mutex::new(Backend::new(
            Arc::clone(&self.device),
            Arc::clone(&self.workers),
            self.restartable,
            self.channel.clone(),
            self.image.clone(),
        )));
        PausedClient::new(
            BackendReqHandler::from_stream(stream, Arc::clone(&backend)),
            backend,
        )
    }

    /// Shows the image that another server has as it is now.
    fn look_at_image(&self) {
        if let Some(info) = self.image.as_ref().and_then(|image| image.look()) {
            self.device.set_disk(Arc::new(DetachedDisk::new(info)));
        }
    }

    /// Logs that another client waits for this one to go: neither of them can know.
    fn report_waiting(&self, connection: &UnixStream) {
        if let Some(held_back) = self.device.log_limit().admit() {
            let connected = event::peer_process(connection.as_fd());
            tracing::warn!(
                disk = %self.name, connected_process = connected, held_back,
                "another client has connected and waits until the current one disconnects: one client is served at a time"
            );
        }
    }
}

/// Returns true if accepting may work later, when resources are free again.
fn is_short(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOBUFS)
    )
}

/// Returns true if another connection can still be accepted.
fn is_passing(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ECONNABORTED | libc::EINTR | libc::EAGAIN)
    )
}
