//! The server of a control socket.
//!
//! Invariants: no input stops the machine; a request is completed before the next one is read; a client that sends
//! nothing, an incomplete request or too much occupies one thread of eight, until another client needs it.

use std::fmt;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use super::clients::{Clients, Place};
use super::gate::{Gate, Wanted};
use super::request::{Request, send_line};
use super::watch::{Watch, Watched};
use crate::socket::{Socket, SocketError};

/// The longest request, in bytes.
const REQUEST_MAX: u64 = 1 << 20;
/// After what time a client that could not be let in is tried again.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// Executes requests. Returns the fields to send beside `"ok": true`, or the error's text.
pub type Handler = dyn Fn(Request) -> Result<Value, String> + Send + Sync;

/// Called after an answer was sent.
pub type AfterAnswer = dyn Fn() + Send + Sync;

/// Hands disks over on a connection, as a [`Request::HandOver`] asks, and returns when that has ended, well or not. An error is a refusal,
/// before which nothing was said.
pub type HandOver = dyn Fn(&UnixStream, Request) -> Result<(), String> + Send + Sync;

/// The server of a control socket.
#[derive(Clone)]
pub struct Server {
    /// Carries requests out.
    pub handler: Arc<Handler>,
    /// Ends the program in order, after a [`Request::Stop`] was answered.
    pub stop: Arc<AfterAnswer>,
    /// Is called after each answer, whether or not the client has taken it.
    pub after_answer: Arc<AfterAnswer>,
    /// Hands disks over.
    pub hand_over: Arc<HandOver>,
}

impl Server {
    /// Returns a server that does nothing after an answer and hands nothing over.
    #[must_use]
    pub fn new(handler: Arc<Handler>) -> Self {
        Self {
            handler,
            stop: Arc::new(|| ()),
            after_answer: Arc::new(|| ()),
            hand_over: Arc::new(|_, _| Err("it has no disks to hand over".to_owned())),
        }
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").finish_non_exhaustive()
    }
}

/// A control socket that is served until it is dropped.
#[derive(Debug)]
pub struct Control {
    socket: Socket,
    gate: Arc<Gate>,
}

impl Control {
    /// Listens at `path`, with mode 0600, and serves clients on threads of their own.
    ///
    /// # Errors
    ///
    /// [`SocketError`], naming the path.
    pub fn serve(path: &Path, handler: Arc<Handler>) -> Result<Self, SocketError> {
        Self::serve_on(Socket::listen(path)?, &Server::new(handler))
    }

    /// As [`Control::serve`], on a socket that listens already, by threads as confined as the calling one.
    ///
    /// # Errors
    ///
    /// As [`Control::serve`].
    pub fn serve_on(socket: Socket, server: &Server) -> Result<Self, SocketError> {
        let server = server.clone();
        let path = socket.path().to_owned();
        let failed = |source| SocketError::Os {
            action: "serve",
            path: path.clone(),
            source,
        };
        let listener = socket.listener().try_clone().map_err(failed)?;
        // A client that was there may have gone before it is accepted.
        listener.set_nonblocking(true).map_err(failed)?;
        let gate = Arc::new(Gate::new().map_err(failed)?);
        let clients = Arc::new(Clients::default());
        let open = Arc::clone(&gate);
        let accept = move || {
            while open.wait(&listener) {
                let accepted = listener.accept();
                let stream =
                    match accepted.and_then(|(stream, _)| stream.set_nonblocking(false).map(|()| stream)) {
                        Ok(stream) => stream,
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                        Err(error) => {
                            // No descriptor left, perhaps: others give theirs back.
                            tracing::debug!(%error, "a client of the control socket");
                            std::thread::sleep(ACCEPT_AGAIN);
                            continue;
                        }
                    };
                let stream = Arc::new(stream);
                let Some(place) = clients.admit(&stream) else {
                    let error = "too many clients at a time";
                    send_line(&stream, &json!({"ok": false, "error": error})).unwrap_or_default();
                    continue;
                };
                let server = server.clone();
                let serve = move || {
                    if let Err(error) = serve_client(&stream, &place, &server) {
                        tracing::debug!(%error, "a client of the control socket");
                    }
                };
                let thread = std::thread::Builder::new().name("control".to_owned());
                if let Err(error) = thread.spawn(serve) {
                    tracing::debug!(%error, "a client of the control socket");
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("control".to_owned())
            .spawn(accept);
        thread.map_err(failed)?;
        Ok(Self { socket, gate })
    }

    /// Accepts no client any more, until [`Control::resume`]. Who connects meanwhile waits, and is accepted by whoever listens
    /// then. Clients that are connected stay.
    pub fn pause(&self) {
        self.gate.pause();
    }

    /// Ends a pause.
    pub fn resume(&self) {
        self.gate.change(Wanted::Open);
    }

    /// Returns the socket, to be handed over.
    #[must_use]
    pub fn socket(&self) -> &Socket {
        &self.socket
    }

    /// Leaves the socket's file to the server that it was handed over to.
    pub fn give_up(self) {
        self.gate.change(Wanted::Ended);
        self.socket.give_up();
    }
}

/// Carries a request out. A panic becomes an error, and the connection continues.
fn carry_out<T>(request: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    let done = catch_unwind(AssertUnwindSafe(request));
    done.unwrap_or_else(|_| Err("internal error; see the log on standard error".to_owned()))
}

/// Answers one client's requests, line by line.
fn serve_client(stream: &UnixStream, place: &Place, server: &Server) -> io::Result<()> {
    let mut reader = BufReader::new(stream);
    loop {
        let mut line = Vec::new();
        reader
            .by_ref()
            .take(REQUEST_MAX + 1)
            .read_until(b'\n', &mut line)?;
        place.awaits(false);
        if line.is_empty() {
            return Ok(());
        }
        if line.last() != Some(&b'\n') {
            let error = if line.len() as u64 > REQUEST_MAX {
                format!("the request is longer than {REQUEST_MAX} bytes")
            } else {
                "the request is incomplete; expected one JSON object on one line".to_owned()
            };
            return send_line(stream, &json!({"ok": false, "error": error}));
        }
        let request = serde_json::from_slice::<Request>(&line);
        let watched = match request {
            Ok(Request::Events {}) => Some(Watched::Events),
            Ok(Request::Log { level }) => Some(Watched::Log(level)),
            _ => None,
        };
        if let Some(watched) = watched {
            let watch = Watch::begin(watched);
            send_line(stream, &json!({"ok": true}))?;
            return watch.send_to(stream);
        }
        let stops = matches!(request, Ok(Request::Stop {}));
        let answer = match request {
            // What follows is no request of a line, and comes after the answer.
            Ok(Request::HandOver { .. }) if !reader.buffer().is_empty() => {
                json!({"ok": false, "error": "`hand-over` has to be the last request of a connection"})
            }
            Ok(request @ Request::HandOver { .. }) => {
                match carry_out(|| (server.hand_over)(stream, request)) {
                    Ok(()) => return Ok(()),
                    Err(error) => json!({"ok": false, "error": error}),
                }
            }
            Ok(request) => match carry_out(|| (server.handler)(request)) {
                Ok(Value::Object(mut fields)) => {
                    fields.insert("ok".to_owned(), true.into());
                    Value::Object(fields)
                }
                Ok(_) => json!({"ok": true}),
                Err(error) => json!({"ok": false, "error": error}),
            },
            Err(error) => json!({"ok": false, "error": format!("invalid request: {error}")}),
        };
        let sent = send_line(stream, &answer);
        (server.after_answer)();
        if stops && answer["ok"] == true {
            (server.stop)();
        }
        sent?;
        place.awaits(true);
    }
}
