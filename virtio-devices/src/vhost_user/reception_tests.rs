//! Many disks behind one reception and a few workers.

use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use block::worker::{WorkerConfig, WorkerPool};
use parking_lot::Mutex;
use vm_memory::{Bytes, GuestAddress};

use super::reception::{Seat, serve_all};
use super::tests::{Client, wait};
use super::{PausedClient, StopToken, VhostUserConfig, VhostUserServer};
use crate::testing::{DATA, MemDisk};
use ringdisk_driver::blk::{IN, OK, OUT};

type Served = Vec<(VhostUserServer, UnixListener, Option<PausedClient>)>;

/// Servers of as many disks, on two workers, and their sockets.
struct House {
    directory: tempfile::TempDir,
    stop: StopToken,
    count: usize,
}

impl House {
    fn of(count: usize) -> (Self, Served) {
        let directory = tempfile::tempdir().expect("a directory");
        let pool = Arc::new(WorkerPool::start(vec![WorkerConfig::default(); 2]).expect("workers"));
        let stop = StopToken::new().expect("a token");
        let house = Self {
            directory,
            stop,
            count,
        };
        let server = |disk| {
            let config = VhostUserConfig {
                pool: Some(Arc::clone(&pool)),
                ..VhostUserConfig::default()
            };
            let server = VhostUserServer::start(MemDisk::new().disk(), &config).expect("a server");
            let listener = UnixListener::bind(house.path(disk)).expect("a socket");
            (server, listener, None)
        };
        let served = (0..count).map(server).collect();
        (house, served)
    }

    fn path(&self, disk: usize) -> PathBuf {
        self.directory.path().join(format!("{disk}.sock"))
    }

    /// Serves them in a thread, which gives them back with the clients that are connected then.
    fn serve(&self, mut served: Served) -> JoinHandle<Served> {
        let stop = self.stop.clone();
        std::thread::spawn(move || {
            let clients: Vec<_> = served.iter_mut().map(|(.., client)| client.take()).collect();
            let seats = served.iter().zip(clients);
            let seats = seats.map(|((server, listener, _), client)| Seat {
                server,
                listener,
                client,
            });
            let ended = serve_all(seats.collect(), &stop).expect("descriptors");
            for ((.., place), client) in served.iter_mut().zip(ended) {
                *place = client.expect("no failure");
            }
            served
        })
    }

    fn connect_all(&self) -> Vec<Client> {
        (0..self.count).map(|disk| self.connect(disk)).collect()
    }

    fn connect(&self, disk: usize) -> Client {
        Client::connect_unread(&self.path(disk), 1)
    }
}

/// Writes what only this disk has, and reads it.
fn use_disk(client: &mut Client, mark: u8) {
    let memory = client.memory.clone();
    let put = |byte| {
        memory
            .write_slice(&[byte; 512], GuestAddress(DATA))
            .expect("memory")
    };
    put(mark);
    assert_eq!(client.ask(0, OUT, 5, &[(DATA, 512, false)]), OK);
    put(!mark);
    assert_eq!(client.ask(0, IN, 5, &[(DATA, 512, true)]), OK);
    let mut found = [0; 512];
    memory.read_slice(&mut found, GuestAddress(DATA)).expect("memory");
    assert_eq!(found, [mark; 512]);
}

/// The number of threads of this process that talk to clients.
fn threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("threads");
    let names = tasks
        .flatten()
        .filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|name| name.trim() == "client").count()
}

/// Other tests of this module have such threads, too.
static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn idle_clients_need_no_threads() {
    let _alone = ALONE.lock();
    let (house, served) = House::of(60);
    let serving = house.serve(served);
    let mut clients = house.connect_all();
    for (mark, client) in clients.iter_mut().enumerate() {
        use_disk(client, mark as u8);
    }
    wait("the threads' rest", || threads() == 0);
    // Each is heard again.
    for (mark, client) in clients.iter_mut().enumerate().rev() {
        client.config();
        use_disk(client, 200 - mark as u8);
    }
    // One that goes makes place for the next.
    clients.truncate(50);
    for disk in 50..60 {
        use_disk(&mut house.connect(disk), 7);
    }
    house.stop.stop();
    let served = serving.join().expect("no panic");
    assert!(served.iter().all(|(.., client)| client.is_none()));
}

/// As many clients as there are threads at first, and more, stop in the middle of a message.
#[test]
fn clients_in_the_middle_of_a_message_keep_nobody_waiting() {
    let _alone = ALONE.lock();
    let (house, served) = House::of(40);
    let serving = house.serve(served);
    let slow = |disk| {
        let mut stream = UnixStream::connect(house.path(disk)).expect("a connection");
        stream.write_all(&[1, 0, 0, 0, 1]).expect("half a header");
        stream
    };
    let slow: Vec<UnixStream> = (0..30).map(slow).collect();
    let began = Instant::now();
    for disk in 30..40 {
        use_disk(&mut house.connect(disk), 1);
    }
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    drop(slow);
    use_disk(&mut house.connect(3), 2);
    house.stop.stop();
    serving.join().expect("no panic");
}

/// A pause gives back each client with its server, unnoticed; and a connection where nobody has spoken yet waits.
#[test]
fn pause_gives_back_every_client() {
    let _alone = ALONE.lock();
    let (house, mut served) = House::of(30);
    let mut clients: Vec<Client> = Vec::new();
    for round in 0..5 {
        let serving = house.serve(served);
        if round == 0 {
            clients = (0..30).step_by(2).map(|disk| house.connect(disk)).collect();
        }
        for (mark, client) in clients.iter_mut().enumerate() {
            use_disk(client, mark as u8 + round);
        }
        house.stop.pause(Duration::from_secs(10));
        served = serving.join().expect("no panic");
        for (disk, (.., client)) in served.iter().enumerate() {
            assert_eq!(client.is_some(), disk % 2 == 0, "{disk}");
        }
        house.stop.resume();
    }
    let serving = house.serve(served);
    house.stop.stop();
    let served = serving.join().expect("no panic");
    assert!(served.iter().all(|(.., client)| client.is_none()));
}
