//! A vhost-user client that sends what it likes: messages, lengths, descriptors, memory. It costs its sender the
//! connection at most: the server goes on, and answers the next client at once.

use std::error::Error;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use block::ring::RingKind;
use block::worker::WorkerConfig;
use block::{Disk, DiskInfo};
use rustix::fs::{MemfdFlags, SealFlags};
use virtio_devices::vhost_user::{ImageOwner, ServeError, StopToken, VhostUserConfig, VhostUserServer};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use crate::cursor::Cursor;
use crate::device::{AVAILABLE, DESCRIPTORS, MemoryDisk, USED, lay_out};
use crate::memory::{BASE, REGION_BYTES};

/// The most messages of a case.
const MESSAGES_MAX: u32 = 64;
/// The longest time for the server to answer the next client. A machine may be busy.
const TIME_MAX: Duration = Duration::from_secs(30);
/// The longest stay of a client that waits for an answer.
const ANSWER_MAX: Duration = Duration::from_millis(2);
/// The address at which the client says that it has mapped its memory.
const USER: u64 = 0x7f00_0000_0000;
const QUEUES: u16 = 2;

/// The owner of an image that is not always there when it is wanted: a guest migrates, and comes back.
#[derive(Debug, Default)]
struct Owner(AtomicU64);

impl ImageOwner for Owner {
    fn detach(&self) {}

    fn release(&self) {}

    fn keep(&self) {}

    fn open(&self) -> Result<Arc<dyn Disk>, Box<dyn Error + Send + Sync>> {
        match self.0.fetch_add(1, Ordering::Relaxed) % 3 {
            0 => Err("somebody else has it".into()),
            _ => Ok(MemoryDisk::new()),
        }
    }

    fn look(&self) -> Option<DiskInfo> {
        Some(MemoryDisk::new().info())
    }
}

/// One server for the whole process: that it survives is what is tested.
struct Server {
    address: SocketAddr,
    thread: JoinHandle<Result<(), ServeError>>,
}

fn server() -> &'static Server {
    static SERVER: OnceLock<Server> = OnceLock::new();
    SERVER.get_or_init(|| {
        let name = format!("ringdisk-bodies-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(name).expect("an address");
        let listener = UnixListener::bind_addr(&address).expect("a socket");
        let worker = WorkerConfig {
            ring: RingKind::Syscalls,
            ..WorkerConfig::default()
        };
        let config = VhostUserConfig {
            num_queues: QUEUES,
            workers: vec![worker; QUEUES.into()],
            restartable: true,
            ..VhostUserConfig::default()
        };
        let mut server = VhostUserServer::start(MemoryDisk::new(), &config).expect("a server");
        server.share_image(Arc::new(Owner::default()), false);
        let stop = StopToken::new().expect("a token");
        let thread = std::thread::spawn(move || server.serve(&listener, &stop));
        Server { address, thread }
    })
}

/// The files that a client can pass along.
struct Belongings {
    memory: File,
    sealed: File,
    event: OwnedFd,
    null: File,
}

impl Belongings {
    fn new() -> Self {
        let memfd = |flags| {
            let file = rustix::fs::memfd_create("ringdisk-client", MemfdFlags::CLOEXEC | flags);
            let file = File::from(file.expect("a file in memory"));
            file.set_len(2 * REGION_BYTES).expect("its length");
            file
        };
        let sealed = memfd(MemfdFlags::ALLOW_SEALING);
        rustix::fs::fcntl_add_seals(&sealed, SealFlags::SHRINK | SealFlags::SEAL).expect("a seal");
        Self {
            memory: memfd(MemfdFlags::empty()),
            sealed,
            event: block::event::eventfd().expect("an eventfd"),
            null: File::open("/dev/null").expect("/dev/null"),
        }
    }

    /// Returns true if the first queue's used ring has an entry.
    fn is_answered(&self) -> bool {
        let mut used = [0; 2];
        let looked = self.memory.read_exact_at(&mut used, USED + 2 - BASE);
        looked.is_ok() && used != [0; 2]
    }

    fn write(&self, address: u64, bytes: &[u8]) {
        let at = address.wrapping_sub(BASE);
        if at
            .checked_add(bytes.len() as u64)
            .is_some_and(|end| end <= 2 * REGION_BYTES)
        {
            self.memory.write_all_at(bytes, at).expect("the client's memory");
        }
    }
}

/// A message as bytes: code, flags, size, body.
fn message(code: u32, flags: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = [code, flags, body.len() as u32].map(u32::to_ne_bytes).concat();
    bytes.extend(body);
    bytes
}

/// Version 1; and an answer is wanted.
const FLAGS: u32 = 0x9;

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// Two numbers of 32 bits, as many messages begin.
fn pair(first: u32, second: u32) -> u64 {
    u64::from_ne_bytes(
        [first.to_ne_bytes(), second.to_ne_bytes()]
            .concat()
            .try_into()
            .unwrap_or_default(),
    )
}

struct Client {
    stream: UnixStream,
    has: Belongings,
    gone: bool,
}

impl Client {
    fn send(&mut self, bytes: &[u8], fds: &[RawFd]) {
        if bytes.is_empty() || self.gone {
            return;
        }
        let (header, body) = bytes.split_at(bytes.len().min(12));
        let sent = self.stream.send_with_fds(&[header], fds).is_ok();
        self.gone = !sent || (&self.stream).write_all(body).is_err();
    }

    fn say(&mut self, code: u32, body: &[u64]) {
        self.send(&message(code, FLAGS, &words(body)), &[]);
    }

    /// Sends the messages that a client should begin with.
    fn introduce(&mut self) {
        self.say(3, &[]);
        self.say(1, &[]);
        self.say(2, &[1 << 26 | 1 << 28 | 1 << 29 | 1 << 32 | 1 << 30]);
        self.say(
            16,
            &[1 << 0 | 1 << 1 | 1 << 3 | 1 << 9 | 1 << 12 | 1 << 15 | 1 << 19],
        );
    }

    /// Memory, and queues that run in it.
    fn set_up(&mut self) {
        let memory = self.has.memory.as_raw_fd();
        let table = words(&[pair(1, 0), BASE, 2 * REGION_BYTES, USER, 0]);
        self.send(&message(5, FLAGS, &table), &[memory]);
        self.say(8, &[pair(0, 16)]);
        self.say(10, &[pair(0, 0)]);
        let at = |address: u64| USER + address - BASE;
        self.say(9, &[pair(0, 0), at(DESCRIPTORS), at(USED), at(AVAILABLE), 0]);
        let event = self.has.event.as_raw_fd();
        self.send(&message(12, FLAGS, &words(&[0])), &[event]);
        self.send(&message(13, FLAGS, &words(&[0])), &[event]);
        self.say(18, &[pair(0, 1)]);
    }

    /// A log of the pages that are written, as the migration of a guest begins.
    fn set_log(&mut self) {
        let bytes = (BASE + 2 * REGION_BYTES).div_ceil(8 * 4096);
        let log = self.has.sealed.as_raw_fd();
        self.send(&message(6, 1, &words(&[bytes, 0])), &[log]);
    }

    /// Stays for a moment, or until a request of the first queue is answered.
    fn await_answer(&self) {
        let begin = Instant::now();
        while !self.gone && !self.has.is_answered() && begin.elapsed() < ANSWER_MAX {
            std::thread::yield_now();
        }
    }

    fn kick(&self) {
        let file = self.has.event.try_clone().map(File::from);
        let _full = file.and_then(|mut file| file.write_all(&1_u64.to_ne_bytes()));
    }

    fn any_message(&mut self, cursor: &mut Cursor<'_>) {
        // What is understood, more often than what is not.
        const CODES: [u32; 31] = [
            1, 2, 3, 4, 5, 5, 5, 6, 6, 8, 9, 9, 10, 11, 11, 12, 13, 14, 15, 16, 17, 18, 24, 25, 31, 32, 34,
            36, 37, 42, 43,
        ];
        let code = if cursor.one_in(16) {
            cursor.u32()
        } else {
            cursor.pick(&CODES)
        };
        let number = |cursor: &mut Cursor<'_>| match cursor.below(6) {
            0 => cursor.u64(),
            1 => cursor.pick(&[0, 1, 2, 0x100, 0x101, u64::MAX, 1 << 63]),
            2 => USER + cursor.below(2 * REGION_BYTES),
            3 => pair(
                cursor.below(3) as u32,
                cursor.pick(&[0, 1, 2, 16, 64, 256, 32768, u32::MAX]),
            ),
            4 => BASE * cursor.below(5),
            _ => cursor.below(4),
        };
        let count = cursor.pick(&[0, 1, 1, 1, 2, 5, 5, 9, 3]);
        let mut body: Vec<u8> = (0..count).flat_map(|_| number(cursor).to_ne_bytes()).collect();
        if cursor.one_in(4) {
            body = cursor.bytes(300).to_vec();
        }
        let flags = if cursor.one_in(16) {
            cursor.u32()
        } else {
            cursor.pick(&[FLAGS, FLAGS, 1])
        };
        let mut bytes = message(code, flags, &body);
        if cursor.one_in(16) {
            let at = cursor.below(12) as usize;
            bytes[at] = cursor.byte();
        }
        if cursor.one_in(32) {
            bytes.truncate(cursor.below(bytes.len() as u64) as usize);
        }
        let mut fds = Vec::new();
        for _ in 0..cursor.pick(&[0, 0, 1, 1, 2, 9]) {
            fds.push(match cursor.below(6) {
                0 => self.has.null.as_raw_fd(),
                1 => self.has.sealed.as_raw_fd(),
                2 | 3 => self.has.event.as_raw_fd(),
                _ => self.has.memory.as_raw_fd(),
            });
        }
        self.send(&bytes, &fds);
    }
}

/// Sends messages, writes memory and kicks; then another client asks for the features.
///
/// # Panics
///
/// If that client is not answered, or the server has ended.
pub fn body(data: &[u8]) -> &'static str {
    let server = server();
    let mut cursor = Cursor::new(data);
    let stream = UnixStream::connect_addr(&server.address).expect("a connection");
    // A server that waits for more does not answer, and does not read.
    stream
        .set_nonblocking(true)
        .expect("a socket that does not block");
    let mut client = Client {
        stream,
        has: Belongings::new(),
        gone: false,
    };
    let beginning = cursor.below(4);
    if beginning > 0 {
        client.introduce();
    }
    if beginning > 1 {
        client.set_up();
    }
    if beginning > 2 {
        client.set_log();
    }
    for _ in 0..MESSAGES_MAX {
        if cursor.is_empty() || client.gone {
            break;
        }
        match cursor.below(8) {
            0..=2 => client.any_message(&mut cursor),
            3 | 4 if cursor.one_in(2) => client.kick(),
            4 if cursor.one_in(16) => {
                // Memory goes away under the server.
                client
                    .has
                    .memory
                    .set_len(cursor.below(REGION_BYTES))
                    .expect("its length");
            }
            _ => {
                let has = &client.has;
                lay_out(&mut cursor, 16, &mut |address, bytes| has.write(address, bytes));
            }
        }
    }
    // Whether a kick is noticed before the client hangs up is a race, which a server on an idle machine mostly loses. Some
    // clients stay until it is.
    if beginning > 1 && data.len().is_multiple_of(8) {
        client.await_answer();
    }
    // What it did not say whole ends with its side of the connection.
    let _gone = client.stream.shutdown(std::net::Shutdown::Write);
    let Client { stream, has, gone } = client;
    drop(stream);
    assert_answers(server);
    match (gone, beginning) {
        _ if has.is_answered() && beginning > 1 => "served",
        (true, _) => "hung up on",
        (false, 0) => "stranger",
        (false, 1) => "introduced",
        (false, _) => "set up",
    }
}

/// The server answers a client that behaves.
fn assert_answers(server: &Server) {
    let mut stream = UnixStream::connect_addr(&server.address).expect("a connection");
    stream.set_read_timeout(Some(TIME_MAX)).expect("a time limit");
    stream.write_all(&message(1, 1, &[])).expect("a listener");
    let mut answer = [0; 20];
    let answered = stream.read_exact(&mut answer);
    assert!(!server.thread.is_finished(), "the server has ended");
    answered.expect("the server answers");
    assert_eq!(answer[0], 1, "another message was answered");
}
