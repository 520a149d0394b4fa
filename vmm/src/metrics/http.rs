//! As much of HTTP/1.1 as a scrape needs: one request for each connection, GET or HEAD, without a body.
//!
//! Invariants: a client has [`TIME_MAX`] for everything, from its connection to the last byte of its answer; what is kept of its
//! request is at most [`HEAD_MAX`] bytes.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

use super::address::Acceptor;
use super::text::CONTENT_TYPE;

use crate::seat::Seat;

/// The most clients at a time.
pub(super) const CLIENTS_MAX: usize = 8;
/// The most bytes of a request's line and headers.
pub(super) const HEAD_MAX: usize = 8 << 10;
/// The longest time that a client may take.
pub(super) const TIME_MAX: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 5 });
/// The time after which a client that could not be accepted is tried again.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// A connected client.
#[derive(Debug)]
pub(super) enum Connection {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Connection {
    /// Bounds the next read and write.
    fn limit(&self, time: Duration) -> io::Result<()> {
        let time = Some(time);
        match self {
            Self::Unix(stream) => stream
                .set_read_timeout(time)
                .and_then(|()| stream.set_write_timeout(time)),
            Self::Tcp(stream) => stream
                .set_read_timeout(time)
                .and_then(|()| stream.set_write_timeout(time)),
        }
    }

    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.read(bytes),
            Self::Tcp(stream) => stream.read(bytes),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.write(bytes),
            Self::Tcp(stream) => stream.write(bytes),
        }
    }
}

/// A client and the moment until which it is served.
struct Client {
    connection: Connection,
    until: Instant,
}

impl Client {
    fn limit(&self) -> io::Result<()> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        self.connection.limit(left)
    }

    /// Reads the request's line and headers.
    fn read_head(&mut self) -> io::Result<Head> {
        let mut head = Vec::new();
        let mut bytes = [0; 1024];
        loop {
            self.limit()?;
            let len = match self.connection.read(&mut bytes) {
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                read => read?,
            };
            if len == 0 {
                return Ok(Head::Incomplete);
            }
            head.extend_from_slice(&bytes[..len]);
            if let Some(end) = head.windows(4).position(|four| four == b"\r\n\r\n") {
                head.truncate(end);
                return Ok(Head::Complete(head));
            }
            if head.len() > HEAD_MAX {
                return Ok(Head::TooLong);
            }
        }
    }

    fn write_all(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            self.limit()?;
            match self.connection.write(bytes) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(len) => bytes = &bytes[len..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// What a client has sent.
enum Head {
    Complete(Vec<u8>),
    Incomplete,
    TooLong,
}

/// An answer.
#[derive(Debug, Eq, PartialEq)]
pub(super) struct Answer {
    status: &'static str,
    content_type: &'static str,
    /// A further header line.
    header: &'static str,
    body: String,
    /// False after HEAD: the body's length is given without it.
    has_body: bool,
}

impl Answer {
    fn error(status: &'static str) -> Self {
        Self {
            status,
            content_type: "text/plain; charset=utf-8",
            header: "",
            body: format!("{status}\n"),
            has_body: true,
        }
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        let Self {
            status,
            content_type,
            header,
            body,
            has_body,
        } = self;
        let len = body.len();
        let mut text = format!(
            "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len}\r\n{header}Connection: close\r\n\r\n"
        );
        if *has_body {
            text.push_str(body);
        }
        text.into_bytes()
    }
}

/// Returns the answer to a request's line and headers.
pub(super) fn answer(head: &[u8], text: impl FnOnce() -> String) -> Answer {
    let line = head.split(|&byte| byte == b'\n').next().unwrap_or_default();
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let Ok(line) = std::str::from_utf8(line) else {
        return Answer::error("400 Bad Request");
    };
    let mut words = line.split(' ');
    let (Some(method), Some(target), Some(version), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return Answer::error("400 Bad Request");
    };
    let is_method = !method.is_empty() && method.bytes().all(|byte| byte.is_ascii_uppercase());
    if !is_method || !target.starts_with('/') {
        return Answer::error("400 Bad Request");
    }
    if !matches!(version, "HTTP/1.1" | "HTTP/1.0") {
        return Answer::error("505 HTTP Version Not Supported");
    }
    if !matches!(method, "GET" | "HEAD") {
        return Answer {
            header: "Allow: GET, HEAD\r\n",
            ..Answer::error("405 Method Not Allowed")
        };
    }
    let path = target.split('?').next().unwrap_or_default();
    let answer = match path {
        "/metrics" => Answer {
            content_type: CONTENT_TYPE,
            body: text(),
            ..Answer::error("200 OK")
        },
        _ => Answer {
            body: "not found; the statistics are at /metrics\n".to_owned(),
            ..Answer::error("404 Not Found")
        },
    };
    Answer {
        has_body: method == "GET",
        ..answer
    }
}

/// Serves clients for ever: `text` makes the statistics.
pub(super) fn serve(acceptor: &Acceptor, text: &Arc<dyn Fn() -> String + Send + Sync>) {
    let clients = Arc::new(AtomicUsize::new(0));
    loop {
        let connection = match acceptor.accept() {
            Ok(connection) => connection,
            Err(error) => {
                // No descriptor left, perhaps: others give theirs back.
                tracing::debug!(%error, "a client of the statistics");
                std::thread::sleep(ACCEPT_AGAIN);
                continue;
            }
        };
        let seat = Seat::take(&clients, CLIENTS_MAX);
        let mut client = Client {
            connection,
            until: Instant::now() + TIME_MAX,
        };
        if seat.is_none() {
            // It fits the buffer of a new connection, so this does not wait.
            let busy = Answer::error("503 Service Unavailable").bytes();
            client.write_all(&busy).unwrap_or_default();
            continue;
        }
        let text = Arc::clone(text);
        let serve = move || {
            let _seat = seat;
            if let Err(error) = serve_client(&mut client, &*text) {
                tracing::debug!(%error, "a client of the statistics");
            }
        };
        let thread = std::thread::Builder::new().name("metrics".to_owned());
        if let Err(error) = thread.spawn(serve) {
            tracing::debug!(%error, "a client of the statistics");
        }
    }
}

/// Answers a client's one request.
fn serve_client(client: &mut Client, text: &dyn Fn() -> String) -> io::Result<()> {
    let answer = match client.read_head()? {
        Head::Complete(head) => answer(&head, text),
        Head::TooLong => Answer::error("431 Request Header Fields Too Large"),
        Head::Incomplete => return Ok(()),
    };
    client.write_all(&answer.bytes())
}
