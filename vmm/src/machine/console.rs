//! The guest's serial port: a 16550 at the first port, connected to the terminal, a file, a socket or nothing.
//!
//! On a terminal every key goes to the guest, ^C too; ^A x ends the machine and ^A ^A sends a ^A.
//!
//! Invariants: the terminal's settings are restored however the program ends; output that is not read never keeps the
//! machine from stopping.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, IsTerminal, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use vm_superio::serial::{Error as SerialError, NoEvents};
use vm_superio::{Serial, Trigger};
use vmm_sys_util::eventfd::EventFd;

use super::bus::Ports;
use super::{Reason, Stop};
use crate::socket::{Socket, SocketError};

/// The destination of the serial console.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub enum ConsoleConfig {
    /// Standard input and output.
    #[default]
    Terminal,
    /// A file, created or truncated, that receives the guest's output. The guest gets no input.
    File(PathBuf),
    /// One client after another on a Unix socket, which is made.
    Socket(PathBuf),
    /// Nowhere.
    Off,
}

/// The terminal's original settings, restored when the program ends.
static FOUND: Mutex<Option<Termios>> = Mutex::new(None);

/// Puts the terminal back as it was found. May be called at any time, and more than once.
pub fn restore_terminal() {
    if let Some(found) = FOUND.lock().take() {
        tcsetattr(io::stdin(), OptionalActions::Now, &found).unwrap_or_default();
    }
}

/// The terminal in raw mode, until it is dropped.
#[derive(Debug)]
struct RawTerminal;

impl RawTerminal {
    fn new() -> io::Result<Self> {
        let found = tcgetattr(io::stdin())?;
        let mut raw = found.clone();
        raw.make_raw();
        // What we and the log print still ends its lines as usual.
        raw.output_modes = found.output_modes;
        *FOUND.lock() = Some(found);
        tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
        Ok(Self)
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        restore_terminal();
    }
}

/// The destination of the guest's output.
#[derive(Clone, Debug)]
enum Sink {
    Stdout,
    File(Arc<File>),
    /// The client of the moment.
    Client(Arc<Mutex<Option<UnixStream>>>),
    Nowhere,
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Stdout => write_out(bytes),
            Self::File(file) => (&**file).write_all(bytes).unwrap_or_default(),
            Self::Client(client) => {
                let mut client = client.lock();
                // What the client has no room for is lost: the guest does not wait.
                if let Some(stream) = &mut *client
                    && let Err(error) = stream.write_all(bytes)
                    && error.kind() != io::ErrorKind::WouldBlock
                {
                    *client = None;
                }
            }
            Self::Nowhere => {}
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes to standard output as fast as it is read. If it is not read, a CPU's thread waits here until it is kicked
/// because the machine pauses or ends; the unwritten rest is lost.
fn write_out(mut bytes: &[u8]) {
    let out = rustix::stdio::stdout();
    while !bytes.is_empty() {
        let mut ready = [PollFd::new(&out, PollFlags::OUT)];
        let written = poll(&mut ready, None).and_then(|_| {
            // A terminal that has room for one byte would wait for room for more.
            rustix::io::write(out, bytes.get(..1).unwrap_or_default())
        });
        match written {
            Ok(count) => bytes = bytes.get(count..).unwrap_or_default(),
            Err(Errno::AGAIN) => {}
            Err(_) => return,
        }
    }
}

/// The interrupt line.
#[derive(Debug)]
struct Line(EventFd);

impl Trigger for Line {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

type Uart = Serial<Line, NoEvents, Sink>;

/// The serial port as the bus and the input thread share it.
#[derive(Clone)]
pub(super) struct SerialPort(Arc<Mutex<Uart>>);

impl std::fmt::Debug for SerialPort {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SerialPort")
    }
}

impl Ports for SerialPort {
    fn read(&mut self, offset: u16, data: &mut [u8]) {
        if let Some(byte) = data.first_mut() {
            *byte = self.0.lock().read(offset as u8);
        }
    }

    fn write(&mut self, offset: u16, data: &[u8]) {
        if let Some(byte) = data.first()
            && let Err(error) = self.0.lock().write(offset as u8, *byte)
        {
            tracing::debug!(?error, "the serial port");
        }
    }
}

/// The console of one run of the program; machines come and go behind it as the guest restarts.
#[derive(Debug)]
pub struct Console {
    sink: Sink,
    port: Arc<Mutex<Option<SerialPort>>>,
    /// Wakes the input thread for its end.
    end: Option<(OwnedFd, std::thread::JoinHandle<()>)>,
    _raw: Option<RawTerminal>,
    _socket: Option<Socket>,
}

/// An error of setting up the console.
#[derive(Debug, thiserror::Error)]
pub enum ConsoleError {
    /// A file, the terminal or a thread cannot be had.
    #[error("cannot set up the console at {place}")]
    Os {
        /// The file, socket or terminal.
        place: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The socket cannot be listened on.
    #[error(transparent)]
    Socket(#[from] SocketError),
}

/// The source of the guest's input.
enum Source {
    Stdin,
    Clients(UnixListener, Arc<Mutex<Option<UnixStream>>>),
}

impl ConsoleConfig {
    /// The socket that it is at, if it is at one.
    #[must_use]
    pub fn socket(&self) -> Option<&Path> {
        match self {
            Self::Socket(path) => Some(path),
            _ => None,
        }
    }
}

impl Console {
    /// Opens the console. Keys that end the machine go to `stop`.
    ///
    /// # Errors
    ///
    /// [`ConsoleError`], naming the place.
    pub fn open(config: &ConsoleConfig, stop: &Arc<Stop>) -> Result<Self, ConsoleError> {
        let at = |place: &std::path::Path| {
            let place = place.display().to_string();
            move |source| ConsoleError::Os { place, source }
        };
        let port = Arc::new(Mutex::new(None));
        let (sink, source, raw, socket) = match config {
            ConsoleConfig::Terminal => {
                let raw = io::stdin().is_terminal().then(RawTerminal::new).transpose();
                let raw = raw.map_err(at("the terminal".as_ref()))?;
                (Sink::Stdout, Some(Source::Stdin), raw, None)
            }
            ConsoleConfig::File(path) => {
                let file = File::create(path).map_err(at(path))?;
                (Sink::File(Arc::new(file)), None, None, None)
            }
            ConsoleConfig::Socket(path) => {
                let socket = Socket::listen(path)?;
                let listener = socket.listener().try_clone().map_err(at(path))?;
                let client = Arc::default();
                let source = Source::Clients(listener, Arc::clone(&client));
                (Sink::Client(client), Some(source), None, Some(socket))
            }
            ConsoleConfig::Off => (Sink::Nowhere, None, None, None),
        };
        let end = match source {
            Some(source) => {
                let event = block::event::eventfd().map_err(at("its events".as_ref()))?;
                let end = event.try_clone().map_err(at("its events".as_ref()))?;
                let input = Input {
                    end,
                    port: Arc::clone(&port),
                    stop: Arc::clone(stop),
                    escaped: false,
                    raw: raw.is_some(),
                };
                let thread = std::thread::Builder::new()
                    .name("console".to_owned())
                    .spawn(move || input.run(source))
                    .map_err(at("its thread".as_ref()))?;
                Some((event, thread))
            }
            None => None,
        };
        Ok(Self {
            sink,
            port,
            end,
            _raw: raw,
            _socket: socket,
        })
    }

    /// A serial port for a new machine, whose interrupt is `line`.
    pub(super) fn attach(&self, line: EventFd) -> SerialPort {
        let serial = SerialPort(Arc::new(Mutex::new(Serial::new(Line(line), self.sink.clone()))));
        *self.port.lock() = Some(serial.clone());
        serial
    }

    /// Lets go of the last machine's port: what is typed from now on waits for the next one's.
    pub(crate) fn detach(&self) {
        *self.port.lock() = None;
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        if let Some((event, thread)) = self.end.take() {
            rustix::io::write(&event, &1u64.to_ne_bytes()).unwrap_or_default();
            thread.join().unwrap_or_default();
        }
    }
}

/// The thread that brings keys to the guest.
struct Input {
    end: OwnedFd,
    port: Arc<Mutex<Option<SerialPort>>>,
    stop: Arc<Stop>,
    /// The last key was ^A.
    escaped: bool,
    raw: bool,
}

const ESCAPE: u8 = 1;
/// The number of bytes buffered for a guest that does not read, and the interval of checks whether it reads.
const PENDING_MAX: usize = 4096;
/// After what time a client that could not be let in is tried again.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);
const AGAIN: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 2_000_000,
};

/// The result of a wait for input.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Waited {
    /// There is something to read, or its end.
    Input,
    HangUp,
    Time,
    /// The console ends.
    End,
}

impl Input {
    fn run(mut self, source: Source) {
        let ended = match source {
            Source::Stdin => self.copy(&io::stdin().as_fd().try_clone_to_owned()),
            Source::Clients(listener, client) => self.serve(&listener, &client),
        };
        if let Err(error) = ended {
            tracing::warn!(%error, "console input has stopped");
        }
    }

    /// Waits until something can be read, `from` has been hung up, or time is up.
    fn wait(&self, from: impl AsFd, read: bool, time: Option<&Timespec>) -> io::Result<Waited> {
        loop {
            let input = if read { PollFlags::IN } else { PollFlags::empty() };
            let mut events = [PollFd::new(&self.end, PollFlags::IN), PollFd::new(&from, input)];
            match poll(&mut events, time) {
                Ok(_) => {
                    let [end, from] = events.map(|event| event.revents());
                    return Ok(match (end.is_empty(), from.is_empty()) {
                        (false, _) => Waited::End,
                        (true, true) => Waited::Time,
                        (true, false) if read => Waited::Input,
                        (true, false) => Waited::HangUp,
                    });
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn serve(&mut self, listener: &UnixListener, client: &Mutex<Option<UnixStream>>) -> io::Result<()> {
        while self.wait(listener, true, None)? == Waited::Input {
            let accepted = listener.accept().and_then(|(stream, _)| {
                let output = stream.try_clone()?;
                output.set_nonblocking(true)?;
                Ok((stream, output))
            });
            let (stream, output) = match accepted {
                Ok(both) => both,
                Err(error) => {
                    // No descriptor left, perhaps: others give theirs back.
                    tracing::debug!(%error, "a console's client was not let in");
                    std::thread::sleep(ACCEPT_AGAIN);
                    continue;
                }
            };
            *client.lock() = Some(output);
            let input = Ok(OwnedFd::from(stream));
            if let Err(error) = self.copy(&input) {
                tracing::debug!(%error, "a client of the console has disconnected");
            }
            *client.lock() = None;
        }
        Ok(())
    }

    fn copy(&mut self, from: &io::Result<OwnedFd>) -> io::Result<()> {
        let fd = from.as_ref().map_err(|error| io::Error::from(error.kind()))?;
        let mut file = File::from(fd.try_clone()?);
        let mut bytes = [0; 256];
        let mut pending = VecDeque::new();
        loop {
            let room = pending.len() < PENDING_MAX;
            let time = (!pending.is_empty()).then_some(&AGAIN);
            // At a terminal what is too much is lost, so that ^A x is heard whatever the guest does; a client waits.
            match self.wait(fd, room || self.raw, time)? {
                Waited::End | Waited::HangUp => return Ok(()),
                Waited::Time => {}
                Waited::Input => {
                    let count = match file.read(&mut bytes) {
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                        count => count?,
                    };
                    let Some(read @ [_, ..]) = bytes.get(..count) else {
                        return Ok(());
                    };
                    for key in read.iter().filter_map(|&byte| self.key(byte)) {
                        if room {
                            pending.push_back(key);
                        }
                    }
                }
            }
            self.give(&mut pending);
        }
    }

    /// Returns the byte that the guest gets for a key, if any.
    fn key(&mut self, byte: u8) -> Option<u8> {
        if !self.raw {
            return Some(byte);
        }
        if std::mem::take(&mut self.escaped) {
            if byte == b'x' {
                self.stop.ask(Reason::Signal("^A x"));
                return None;
            }
            return Some(byte);
        }
        self.escaped = byte == ESCAPE;
        (!self.escaped).then_some(byte)
    }

    /// Gives the guest what it takes. Before there is a machine, what is typed waits for it.
    fn give(&self, pending: &mut VecDeque<u8>) {
        let Some(port) = self.port.lock().clone() else {
            return;
        };
        match port.0.lock().enqueue_raw_bytes(pending.make_contiguous()) {
            Ok(count) => drop(pending.drain(..count)),
            Err(SerialError::FullFifo) => {}
            Err(_) => pending.clear(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    use std::process::Command;

    /// The port's data register, and the line status whose bit 0 says that there is data.
    const DATA: u16 = 0;
    const STATUS: u16 = 5;

    /// The next byte that a guest reads at a port.
    fn heard(port: &mut SerialPort) -> u8 {
        let until = std::time::Instant::now() + Duration::from_secs(20);
        let mut byte = [0];
        loop {
            port.read(STATUS, &mut byte);
            if byte[0] & 1 != 0 {
                port.read(DATA, &mut byte);
                return byte[0];
            }
            assert!(std::time::Instant::now() < until, "nothing was typed");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn input_between_two_machines_waits_for_the_second() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("console");
        let console =
            Console::open(&ConsoleConfig::Socket(path.clone()), &Arc::default()).expect("a console");
        let line = || EventFd::new(0).expect("an event");
        let mut port = console.attach(line());
        let mut client = UnixStream::connect(&path).expect("a client");
        client.write_all(b"a").expect("room");
        assert_eq!(heard(&mut port), b'a');
        console.detach();
        client.write_all(b"b").expect("room");
        // Time enough to give it to the first machine, were it still there.
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(heard(&mut console.attach(line())), b'b');
    }

    const INSIDE: &str = "RINGDISK_TEST_PANICS";

    /// Method: the test runs itself on a terminal, sets raw mode, and panics.
    #[test]
    fn terminal_is_restored_after_a_panic() {
        if std::env::var_os(INSIDE).is_some() {
            let stop = Arc::default();
            let _console = Console::open(&ConsoleConfig::Terminal, &stop).expect("a console");
            let modes = tcgetattr(io::stdin()).expect("its modes").local_modes;
            assert!(
                modes.contains(rustix::termios::LocalModes::ICANON),
                "raw mode is on"
            );
            return;
        }
        let far = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a pseudo-terminal");
        grantpt(&far).expect("its near end");
        unlockpt(&far).expect("its near end");
        let near = ptsname(&far, Vec::new()).expect("its name");
        let near = File::options()
            .read(true)
            .write(true)
            .open(near.to_str().expect("UTF-8"))
            .expect("its near end");
        let before = format!("{:?}", tcgetattr(&near).expect("its modes"));
        let child = Command::new(std::env::current_exe().expect("this program"))
            .args([
                "--exact",
                "machine::console::tests::terminal_is_restored_after_a_panic",
            ])
            .args(["--nocapture", "--test-threads=1"])
            .env(INSIDE, "1")
            .stdin(near.try_clone().expect("a descriptor"))
            .output()
            .expect("a child");
        let said = String::from_utf8_lossy(&child.stderr);
        assert!(
            !child.status.success() && said.contains("raw mode is on"),
            "{said}"
        );
        assert_eq!(format!("{:?}", tcgetattr(&near).expect("its modes")), before);
    }
}
