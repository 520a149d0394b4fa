//! The control socket of a running machine: one JSON object per line in, one per line out.
//!
//! Invariants: no input stops the machine; a request is completed before the next one is read; a client that sends
//! nothing, an incomplete request or too much occupies one thread of eight and nothing else.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use virtio_devices::connect::{Cancel, connect_within};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use crate::disk_config::{DiskConfig, DiskConfigError};
use crate::error::CommandFailure;
use crate::key_value;
use crate::socket::{Socket, SocketError};

/// The longest request, in bytes.
const REQUEST_MAX: u64 = 64 << 10;
/// The most clients at a time.
const CLIENTS_MAX: usize = 8;
/// After what time a client that could not be let in is tried again.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);
/// The longest time that a machine may take to accept a client that has no limit of its own: one that runs accepts at
/// once.
const CONNECT_MAX: Duration = Duration::from_secs(10);

/// A request to a control socket.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(tag = "command", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// Returns the state and the disks.
    Info {},
    /// Stop the guest; when it is answered, its images hold every write that the guest believes done.
    Pause {},
    /// Resumes the guest.
    Resume {},
    /// Make a disk larger.
    DiskResize {
        /// The disk, by its id or, without one, its path.
        id: String,
        /// Its new size in bytes.
        size: u64,
    },
    /// Add a disk.
    DiskAdd {
        /// The keys of `--disk`.
        disk: DiskKeys,
    },
    /// Ask the guest to let a disk go, and close it when it has.
    DiskRemove {
        /// The disk, by its id or, without one, its path.
        id: String,
    },
    /// Passes descriptors of the locks of all images, for the next server of the devices. They come with spaces
    /// before the answer; see [`ask_for_locks`].
    PassLocks {},
    /// Hands the block devices over to the caller, and exits.
    HandOver {
        /// The protocol version: 1.
        version: u32,
        /// All devices that the server has.
        devices: Vec<u32>,
    },
}

/// The keys of `--disk` with their values.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct DiskKeys(BTreeMap<String, Setting>);

/// The value of a key: as text, or in the form that JSON has for it.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(untagged)]
enum Setting {
    /// `on` or `off`.
    Switch(bool),
    Number(u64),
    Text(String),
}

impl DiskKeys {
    /// The keys of a `--disk` text.
    ///
    /// # Errors
    ///
    /// As [`DiskConfig::parse`].
    pub fn parse(text: &str) -> Result<Self, DiskConfigError> {
        DiskConfig::parse(text)?;
        let items = key_value::items(text).map_err(DiskConfigError::Syntax)?;
        let keys = items.into_iter();
        Ok(Self(
            keys.map(|(key, value)| (key.to_owned(), Setting::Text(value.to_owned())))
                .collect(),
        ))
    }

    /// The disk that they describe.
    ///
    /// # Errors
    ///
    /// As [`DiskConfig::parse`].
    pub fn config(&self) -> Result<DiskConfig, DiskConfigError> {
        let text = |setting: &Setting| match setting {
            Setting::Switch(true) => "on".to_owned(),
            Setting::Switch(false) => "off".to_owned(),
            Setting::Number(number) => number.to_string(),
            Setting::Text(text) => text.clone(),
        };
        let items: Vec<_> = self.0.iter().map(|(key, setting)| (key, text(setting))).collect();
        DiskConfig::from_items(items.iter().map(|(key, value)| (key.as_str(), value.as_str())))
    }
}

/// Executes requests. Returns the fields to send beside `"ok": true`, or the error's text.
pub type Handler = dyn Fn(Request) -> Result<Value, String> + Send + Sync;

/// Called after an answer was sent.
pub type Told = dyn Fn() + Send + Sync;

/// Returns the descriptors for [`Request::PassLocks`].
pub type Locks = dyn Fn() -> io::Result<Vec<OwnedFd>> + Send + Sync;

/// The server of a control socket.
#[derive(Clone)]
pub struct Server {
    /// Carries requests out.
    pub handler: Arc<Handler>,
    /// Is called after each answer, whether or not the client has taken it.
    pub told: Arc<Told>,
    /// Has the descriptors of image locks.
    pub locks: Arc<Locks>,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").finish_non_exhaustive()
    }
}

/// A control socket that is served until it is dropped.
#[derive(Debug)]
pub struct Control {
    _socket: Socket,
}

impl Control {
    /// Listens at `path`, with mode 0600, and serves clients on threads of their own.
    ///
    /// # Errors
    ///
    /// [`SocketError`], naming the path.
    pub fn serve(path: &Path, handler: Arc<Handler>) -> Result<Self, SocketError> {
        let server = Server {
            handler,
            told: Arc::new(|| ()),
            locks: Arc::new(|| Ok(Vec::new())),
        };
        Self::serve_on(Socket::listen(path)?, &server)
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
        // One that is asked to poll would spin here.
        listener.set_nonblocking(false).map_err(failed)?;
        let clients = Arc::new(AtomicUsize::new(0));
        let accept = move || {
            loop {
                let stream = match listener.accept() {
                    Ok((stream, _)) => stream,
                    Err(error) => {
                        // No descriptor left, perhaps: others give theirs back.
                        tracing::debug!(%error, "a client of the control socket");
                        std::thread::sleep(ACCEPT_AGAIN);
                        continue;
                    }
                };
                let seat = Seat::take(&clients);
                if seat.is_none() {
                    let error = "too many clients at a time";
                    tell(&stream, &json!({"ok": false, "error": error})).unwrap_or_default();
                    continue;
                }
                let server = server.clone();
                let serve = move || {
                    let _seat = seat;
                    if let Err(error) = serve_client(&stream, &server) {
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
        Ok(Self { _socket: socket })
    }
}

/// A client's place among those at a time, until it is dropped, however its thread ends.
struct Seat(Arc<AtomicUsize>);

impl Seat {
    fn take(clients: &Arc<AtomicUsize>) -> Option<Self> {
        let seat = Self(Arc::clone(clients));
        (clients.fetch_add(1, Ordering::SeqCst) < CLIENTS_MAX).then_some(seat)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Carries a request out. A mistake of ours in doing so is an answer too, and the next request is heard.
fn carry_out(handler: &Handler, request: Request) -> Result<Value, String> {
    let done = catch_unwind(AssertUnwindSafe(|| handler(request)));
    done.unwrap_or_else(|_| Err("internal error; see the log on standard error".to_owned()))
}

fn tell(mut stream: &UnixStream, answer: &Value) -> io::Result<()> {
    stream.write_all(format!("{answer}\n").as_bytes())
}

/// Answers one client's requests, line by line.
fn serve_client(stream: &UnixStream, server: &Server) -> io::Result<()> {
    let mut reader = BufReader::new(stream);
    loop {
        let mut line = Vec::new();
        reader
            .by_ref()
            .take(REQUEST_MAX + 1)
            .read_until(b'\n', &mut line)?;
        if line.is_empty() {
            return Ok(());
        }
        if line.last() != Some(&b'\n') {
            let error = if line.len() as u64 > REQUEST_MAX {
                format!("the request is longer than {REQUEST_MAX} bytes")
            } else {
                "the request is incomplete; expected one JSON object on one line".to_owned()
            };
            return tell(stream, &json!({"ok": false, "error": error}));
        }
        let answer = match serde_json::from_slice::<Request>(&line) {
            Ok(Request::PassLocks {}) => match pass_locks(stream, server) {
                Ok(count) => json!({"ok": true, "locks": count}),
                Err(error) => json!({"ok": false, "error": error.to_string()}),
            },
            Ok(request) => match carry_out(&*server.handler, request) {
                Ok(Value::Object(mut fields)) => {
                    fields.insert("ok".to_owned(), true.into());
                    Value::Object(fields)
                }
                Ok(_) => json!({"ok": true}),
                Err(error) => json!({"ok": false, "error": error}),
            },
            Err(error) => json!({"ok": false, "error": format!("invalid request: {error}")}),
        };
        let sent = tell(stream, &answer);
        (server.told)();
        sent?;
    }
}

/// Sends the descriptors of image locks, each with a space. Returns how many there are.
fn pass_locks(stream: &UnixStream, server: &Server) -> io::Result<usize> {
    let locks = (server.locks)()?;
    for lock in &locks {
        stream.send_with_fd(&b" "[..], lock.as_raw_fd())?;
    }
    Ok(locks.len())
}

/// An error of a request to a control socket.
#[derive(Debug)]
pub enum AskError {
    /// There is no answer.
    Unanswered(io::Error),
    /// It was refused, with this reason.
    Refused(String),
}

/// Asks the machine behind the socket at `path`; answers what it says.
///
/// # Errors
///
/// A failure that names the socket, or what the machine refused.
pub fn ask(path: &Path, request: &Request) -> Result<Value, CommandFailure> {
    ask_within(path, request, None).map_err(|error| match error {
        AskError::Unanswered(error) => {
            CommandFailure::about(format!("no machine answers at {}", path.display()), error)
        }
        AskError::Refused(told) => CommandFailure::Failed(told.into()),
    })
}

/// Sends a request like [`ask`], with a limit for the whole exchange.
///
/// # Errors
///
/// [`AskError`]; `TimedOut` if it took too long.
pub fn ask_within(path: &Path, request: &Request, patience: Option<Duration>) -> Result<Value, AskError> {
    let stream = begin(path, request, patience).map_err(unanswered)?;
    hear(&stream, String::new())
}

/// Asks the server of block devices behind the socket at `path` for the locks of its images.
///
/// # Errors
///
/// As [`ask_within`].
pub fn ask_for_locks(path: &Path, patience: Duration) -> Result<Vec<OwnedFd>, AskError> {
    let stream = begin(path, &Request::PassLocks {}, Some(patience)).map_err(unanswered)?;
    let mut locks = Vec::new();
    let mut byte = [0];
    loop {
        match stream
            .recv_with_fd(&mut byte)
            .map_err(|error| unanswered(error.into()))?
        {
            (0, _) => return Err(unanswered(io::ErrorKind::UnexpectedEof.into())),
            (_, Some(lock)) => locks.push(lock.into()),
            (_, None) => break,
        }
    }
    hear(&stream, String::from_utf8_lossy(&byte).into_owned())?;
    Ok(locks)
}

fn unanswered(error: io::Error) -> AskError {
    match error.kind() {
        io::ErrorKind::WouldBlock => AskError::Unanswered(io::ErrorKind::TimedOut.into()),
        _ => AskError::Unanswered(error),
    }
}

/// Sends a request.
fn begin(path: &Path, request: &Request, patience: Option<Duration>) -> io::Result<UnixStream> {
    let stream = connect_within(path, patience.unwrap_or(CONNECT_MAX), &Cancel::never())?;
    stream.set_read_timeout(patience)?;
    stream.set_write_timeout(patience)?;
    tell(&stream, &serde_json::to_value(request)?)?;
    Ok(stream)
}

/// Waits for the answer, of which `line` is there already.
fn hear(stream: &UnixStream, mut line: String) -> Result<Value, AskError> {
    BufReader::new(stream).read_line(&mut line).map_err(unanswered)?;
    let answer: Value = serde_json::from_str(&line).map_err(|error| unanswered(error.into()))?;
    if answer["ok"] == Value::Bool(true) {
        return Ok(answer);
    }
    let told = answer["error"]
        .as_str()
        .unwrap_or("it says nothing that makes sense");
    Err(AskError::Refused(told.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn served() -> (tempfile::TempDir, std::path::PathBuf, Control) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("control");
        let handler = |request| match request {
            Request::Info {} => Ok(json!({"state": "running"})),
            Request::Pause {} => Err("it will not".to_owned()),
            Request::Resume {} => Ok(Value::Null),
            // As a panic is, and without its noise.
            Request::DiskResize { size: 13, .. } => std::panic::resume_unwind(Box::new("bad luck")),
            Request::DiskResize { id, size } => Ok(json!({ "id": id, "size": size })),
            Request::DiskAdd { disk } => match disk.config() {
                Ok(config) => Ok(json!({"id": config.name(), "queues": config.num_queues})),
                Err(error) => Err(error.to_string()),
            },
            Request::DiskRemove { id } => Ok(json!({ "id": id })),
            Request::HandOver { devices, .. } => Ok(json!({ "devices": devices })),
            Request::PassLocks {} => Err("it is not for the handler".to_owned()),
        };
        let control = Control::serve(&path, Arc::new(handler)).expect("a socket");
        (folder, path, control)
    }

    fn say(path: &Path, bytes: &[u8]) -> String {
        let mut stream = UnixStream::connect(path).expect("it listens");
        stream.write_all(bytes).expect("it reads");
        stream.shutdown(std::net::Shutdown::Write).expect("a socket");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("text");
        answer
    }

    #[test]
    fn requests_are_answered_in_turn_on_one_connection() {
        let (_folder, path, _control) = served();
        let answer = say(
            &path,
            b"{\"command\":\"info\"}\n{\"command\":\"pause\"}\n{\"command\":\"resume\"}\n",
        );
        let lines: Vec<Value> = answer
            .lines()
            .map(|line| serde_json::from_str(line).expect("JSON"))
            .collect();
        assert_eq!(
            lines,
            [
                json!({"ok": true, "state": "running"}),
                json!({"ok": false, "error": "it will not"}),
                json!({"ok": true}),
            ]
        );
        let resize = Request::DiskResize {
            id: "a".to_owned(),
            size: 7,
        };
        let answer = ask(&path, &resize).expect("an answer");
        assert_eq!(answer, json!({"ok": true, "id": "a", "size": 7}));
    }

    /// Every line of the page that is a request is one, and every request is on the page.
    #[test]
    fn the_documented_requests_are_the_ones_there_are() {
        let page = include_str!("../../docs/control.md");
        let mut examples: Vec<Value> = Vec::new();
        for block in page.split("```json\n").skip(1) {
            let block = block.split("```").next().expect("the end of the block");
            let values = serde_json::Deserializer::from_str(block).into_iter();
            examples.extend(values.map(|value| value.expect("JSON")));
        }
        let (requests, answers): (Vec<Value>, Vec<Value>) = examples
            .into_iter()
            .partition(|value| value.get("command").is_some());
        let mut commands: Vec<&str> = Vec::new();
        for request in requests {
            let parsed: Request = serde_json::from_value(request).expect("a request");
            commands.push(match parsed {
                Request::Info {} => "info",
                Request::Pause {} => "pause",
                Request::Resume {} => "resume",
                Request::DiskAdd { disk } => {
                    disk.config().expect("a disk");
                    "disk-add"
                }
                Request::DiskRemove { .. } => "disk-remove",
                Request::DiskResize { .. } => "disk-resize",
                Request::HandOver { .. } => "hand-over",
                Request::PassLocks {} => "pass-locks",
            });
        }
        assert_eq!(
            commands,
            [
                "info",
                "pause",
                "resume",
                "disk-add",
                "disk-remove",
                "disk-resize",
                "pass-locks",
                "hand-over"
            ]
        );
        assert_eq!(answers.len(), 9, "an answer for each, and an error");
        for answer in answers {
            let refused = answer["error"].is_string();
            assert_eq!(answer["ok"], Value::Bool(!refused), "{answer}");
        }
    }

    #[test]
    fn ask_for_locks_returns_every_description_and_further_requests_are_heard() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("control");
        let image = std::fs::File::create(folder.path().join("image")).expect("a file");
        let own = image.try_clone().expect("a descriptor");
        let server = Server {
            handler: Arc::new(|_| Ok(json!({"state": "running"}))),
            told: Arc::new(|| ()),
            locks: Arc::new(move || (0..300).map(|_| Ok(own.try_clone()?.into())).collect()),
        };
        let socket = Socket::listen(&path).expect("a socket");
        let _control = Control::serve_on(socket, &server).expect("it serves");
        let locks = ask_for_locks(&path, Duration::from_secs(20)).expect("locks");
        assert_eq!(locks.len(), 300);
        // The same description: they share a position.
        let mut last = std::fs::File::from(locks.into_iter().next_back().expect("one"));
        last.write_all(b"four").expect("written");
        assert_eq!(
            std::io::Seek::stream_position(&mut &image).expect("a position"),
            4
        );
        assert!(ask(&path, &Request::Info {}).is_ok());

        let (_folder, path, _control) = served();
        assert!(
            ask_for_locks(&path, Duration::from_secs(20))
                .expect("none")
                .is_empty()
        );
    }

    #[test]
    fn a_disk_is_added_by_the_keys_of_the_command_line() {
        let (_folder, path, _control) = served();
        let text = r#"path="a,b.qcow2",id=a,num_queues=2,queue_affinity=[0@[0],1@[1-2]],readonly=on"#;
        let keys = DiskKeys::parse(text).expect("a disk");
        assert_eq!(keys.config(), DiskConfig::parse(text));
        let answer = ask(&path, &Request::DiskAdd { disk: keys.clone() }).expect("an answer");
        assert_eq!(answer, json!({"ok": true, "id": "a", "queues": 2}));
        // The forms that JSON has for them mean the same.
        let json = r#"{"path":"a,b.qcow2","id":"a","num_queues":2,"queue_affinity":"[0@[0],1@[1-2]]","readonly":true}"#;
        let written: DiskKeys = serde_json::from_str(json).expect("keys");
        assert_eq!(written.config(), keys.config());
        for (disk, said) in [
            (r#"{"path":"a","pth":"b"}"#, "unknown key `pth`"),
            (r#"{"id":"b"}"#, "`path` is missing"),
            (r#"{"path":"a","num_queues":0}"#, "`num_queues=0`"),
            (r#"{"path":"a","num_queues":-1}"#, "invalid request"),
            (
                r#"{"path":"a","readonly":1}"#,
                "`readonly=1`: readonly takes on or off",
            ),
            (r#"{"path":["a"]}"#, "invalid request"),
            (r#""path=a""#, "invalid request"),
        ] {
            let request = format!("{{\"command\":\"disk-add\",\"disk\":{disk}}}\n");
            let answer = say(&path, request.as_bytes());
            assert!(
                answer.contains(said) && answer.contains("\"ok\":false"),
                "{disk}: {answer}"
            );
        }
    }

    #[test]
    fn what_makes_no_sense_is_answered_and_the_next_client_served() {
        let (_folder, path, _control) = served();
        for (bytes, said) in [
            (
                &b"{\"command\":\"dance\"}\n"[..],
                "invalid request: unknown variant `dance`",
            ),
            (b"{\"command\":\"pause\",\"really\":true}\n", "invalid request: "),
            (
                b"{\"command\":\"disk-resize\",\"id\":\"a\"}\n",
                "missing field `size`",
            ),
            (b"nonsense\n", "invalid request: "),
            (b"{\"command\":\"inf", "the request is incomplete"),
            (&[b'x'; 70_000], "longer than 65536 bytes"),
        ] {
            let answer = say(&path, bytes);
            assert!(
                answer.contains(said) && answer.contains("\"ok\":false"),
                "{answer}"
            );
        }
        assert!(ask(&path, &Request::Info {}).is_ok());
    }

    #[test]
    fn a_mistake_of_ours_is_an_answer_and_costs_no_seat() {
        let (_folder, path, _control) = served();
        for _ in 0..2 * CLIENTS_MAX {
            let answer = say(
                &path,
                b"{\"command\":\"disk-resize\",\"id\":\"a\",\"size\":13}\n{\"command\":\"info\"}\n",
            );
            assert!(
                answer.contains("internal error") && answer.contains("running"),
                "{answer}"
            );
        }
    }

    #[test]
    fn whoever_does_not_answer_in_time_is_not_waited_for_and_an_end_comes_after_its_answer() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("control");
        let silent = std::os::unix::net::UnixListener::bind(&path).expect("a socket");
        let asked = ask_within(&path, &Request::Info {}, Some(Duration::from_millis(30)));
        assert!(matches!(asked, Err(AskError::Unanswered(error)) if error.kind() == io::ErrorKind::TimedOut));
        drop(silent);
        std::fs::remove_file(&path).expect("it is there");
        // Nor one that accepts nobody and whose backlog is full: connecting would take as long as it does.
        let deaf = Socket::listen(&path).expect("a socket");
        let connect = || connect_within(&path, Duration::from_millis(10), &Cancel::never());
        let waiting: Vec<UnixStream> = std::iter::from_fn(|| connect().ok()).collect();
        let asked = ask_within(&path, &Request::Info {}, Some(Duration::from_millis(30)));
        assert!(matches!(asked, Err(AskError::Unanswered(error)) if error.kind() == io::ErrorKind::TimedOut));
        drop((deaf, waiting));

        let (count, heard) = (Arc::new(AtomicUsize::new(0)), folder.path().join("other"));
        let (asked, told) = (Arc::clone(&count), Arc::clone(&count));
        let handler = move |_| Ok(json!({ "before": asked.load(Ordering::SeqCst) }));
        let told = move || {
            told.fetch_add(1, Ordering::SeqCst);
        };
        let server = Server {
            handler: Arc::new(handler),
            told: Arc::new(told),
            locks: Arc::new(|| Ok(Vec::new())),
        };
        let socket = Socket::listen(&heard).expect("a socket");
        let _control = Control::serve_on(socket, &server).expect("threads");
        let answer = say(&heard, b"{\"command\":\"info\"}\n{\"command\":\"info\"}\n");
        assert!(
            answer.contains("\"before\":0") && answer.contains("\"before\":1"),
            "{answer}"
        );
        assert_eq!(count.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn clients_that_say_nothing_leave_room_for_others_when_they_go() {
        let (_folder, path, _control) = served();
        let silent: Vec<UnixStream> = (0..CLIENTS_MAX)
            .map(|_| UnixStream::connect(&path).expect("it listens"))
            .collect();
        // They are threads of their own: wait until all have been let in.
        let full = (0..500).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            say(&path, b"").contains("too many clients")
        });
        assert!(full, "all were let in");
        drop(silent);
        let free = (0..500).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            ask(&path, &Request::Info {}).is_ok()
        });
        assert!(free, "nobody was let in again");
    }
}
