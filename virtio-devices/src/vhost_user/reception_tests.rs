//! Many disks behind one reception and a few workers.

use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use block::worker::{FailureHook, WorkerConfig, WorkerPool};
use parking_lot::Mutex;
use vm_memory::{Bytes, GuestAddress};

use super::reception::{Reception, Seat};
use super::tests::{Client, wait};
use super::{PausedClient, StopToken, VhostUserConfig, VhostUserServer};
use crate::testing::{DATA, MemDisk};
use ringdisk_driver::blk::{IN, OK, OUT};

type Served = Vec<(Arc<VhostUserServer>, Arc<UnixListener>, Option<PausedClient>)>;

/// Servers of as many disks, on two workers, and their sockets.
struct House {
    directory: tempfile::TempDir,
    stop: StopToken,
    pool: Arc<WorkerPool>,
    reception: Arc<Reception>,
    count: usize,
}

impl House {
    fn of(count: usize) -> (Self, Served) {
        let stop = StopToken::new().expect("a token");
        let house = Self {
            directory: tempfile::tempdir().expect("a directory"),
            reception: Arc::new(Reception::new(stop.clone()).expect("descriptors")),
            pool: Arc::new(WorkerPool::start(vec![WorkerConfig::default(); 2]).expect("workers")),
            stop,
            count,
        };
        let served = (0..count).map(|disk| house.open(disk)).collect();
        (house, served)
    }

    /// A disk that is served by nobody yet.
    fn open(&self, disk: usize) -> (Arc<VhostUserServer>, Arc<UnixListener>, Option<PausedClient>) {
        let config = VhostUserConfig {
            pool: Some(Arc::clone(&self.pool)),
            ..VhostUserConfig::default()
        };
        self.open_with(disk, &config)
    }

    fn open_with(
        &self,
        disk: usize,
        config: &VhostUserConfig,
    ) -> (Arc<VhostUserServer>, Arc<UnixListener>, Option<PausedClient>) {
        let server = VhostUserServer::start(MemDisk::new().disk(), config).expect("a server");
        let listener = UnixListener::bind(self.path(disk)).expect("a socket");
        (Arc::new(server), Arc::new(listener), None)
    }

    fn path(&self, disk: usize) -> PathBuf {
        self.directory.path().join(format!("{disk}.sock"))
    }

    /// Serves them in a thread, which gives them back with the clients that are connected then.
    fn serve(&self, mut served: Served) -> JoinHandle<Served> {
        for (disk, (server, listener, client)) in served.iter_mut().enumerate() {
            let seat = Seat {
                server: Arc::clone(server),
                listener: Arc::clone(listener),
                client: client.take(),
            };
            self.reception.enter(disk as u64, seat);
        }
        let reception = Arc::clone(&self.reception);
        std::thread::spawn(move || {
            let ended = reception.serve(&mut |disk, error| panic!("{disk}: {error}"));
            for (disk, client) in ended.expect("descriptors") {
                if let Some((.., place)) = served.get_mut(disk as usize) {
                    *place = client;
                }
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

/// One disk goes while its client works and others do, and comes again under the same number.
#[test]
fn disks_come_and_go_beside_others() {
    let _alone = ALONE.lock();
    let (house, served) = House::of(3);
    let serving = house.serve(served);
    let mut stays = house.connect(0);
    use_disk(&mut stays, 1);
    for round in 0..4 {
        std::fs::remove_file(house.path(7)).unwrap_or_default();
        let (server, listener, _) = house.open(7);
        let weak = Arc::downgrade(&server);
        let client = None;
        house.reception.enter(
            7,
            Seat {
                server,
                listener,
                client,
            },
        );
        // Without a client, with one, and with one in the middle of a message.
        let mut client = (round > 0).then(|| house.connect(7));
        client.iter_mut().for_each(|client| use_disk(client, 9));
        let slow = (round == 3).then(|| {
            drop(client.take());
            let mut stream = UnixStream::connect(house.path(7)).expect("a connection");
            stream.write_all(&[1, 0, 0, 0, 1]).expect("half a header");
            stream
        });
        let left = house.reception.leave(7);
        left.recv_timeout(Duration::from_secs(20)).expect("it has left");
        assert_eq!(weak.strong_count(), 0, "nobody has the server any more");
        if let Some(client) = &mut client {
            assert!(
                client.is_gone(),
                "the client of a disk that has gone is disconnected"
            );
        }
        drop(slow);
        use_disk(&mut stays, 2 + round);
    }
    // One that is not there has left.
    let left = house.reception.leave(99);
    left.recv_timeout(Duration::from_secs(20)).expect("it has left");
    house.stop.stop();
    let served = serving.join().expect("no panic");
    assert_eq!(served.len(), 3);
    assert!(
        house.reception.leave(0).recv().is_err(),
        "nobody waits where nobody serves"
    );
}

/// One disk pauses again and again while its client works and others do, and goes on with that client.
#[test]
fn disk_pauses_alone_and_goes_on_with_its_client() {
    let _alone = ALONE.lock();
    let (house, served) = House::of(3);
    let (server, listener) = (Arc::clone(&served[1].0), Arc::clone(&served[1].1));
    let seat = |client| Seat {
        server: Arc::clone(&server),
        listener: Arc::clone(&listener),
        client,
    };
    let patience = Duration::from_secs(20);
    let serving = house.serve(served);
    let mut stays = house.connect(0);
    // Nobody is connected yet.
    let client = house
        .reception
        .pause(1)
        .recv_timeout(patience)
        .expect("it pauses");
    assert!(client.is_none());
    house.reception.enter(1, seat(client));
    let mut works = house.connect(1);
    for round in 0..8 {
        use_disk(&mut works, round);
        let paused = house.reception.pause(1);
        let client = paused.recv_timeout(patience).expect("it pauses");
        assert!(client.is_some(), "its client is kept");
        use_disk(&mut stays, round);
        house.reception.enter(1, seat(client));
        use_disk(&mut works, round + 1);
    }
    // One in the middle of a message is waited for, and disconnected when there is no patience left.
    drop(works);
    let mut slow = UnixStream::connect(house.path(1)).expect("a connection");
    slow.write_all(&[1, 0, 0, 0, 1]).expect("half a header");
    // It is read after it was accepted, for which the server has more time after each pause that comes before.
    let mut time = Duration::from_millis(1);
    let paused = loop {
        let paused = house.reception.pause(1);
        match paused.recv_timeout(Duration::from_millis(200)) {
            Ok(client) => house.reception.enter(1, seat(client)),
            Err(_) => break paused,
        }
        std::thread::sleep(time);
        time *= 2;
    };
    use_disk(&mut stays, 77);
    house.reception.interrupt(1);
    assert!(paused.recv_timeout(patience).expect("it pauses").is_none());
    house.reception.enter(1, seat(None));
    use_disk(&mut house.connect(1), 78);
    house.stop.stop();
    let served = serving.join().expect("no panic");
    assert_eq!(served.len(), 3);
    assert!(house.reception.pause(0).recv().is_err(), "nobody serves");
}

/// Disks of which one, whose worker has ended, is given up when its client asks for something, or when a worker says so; the
/// others do not notice.
fn disk_fails_alone(says_so: bool) {
    let _alone = ALONE.lock();
    let (house, _) = House::of(0);
    let hook = {
        let reception = Arc::downgrade(&house.reception);
        FailureHook::new(move || reception.upgrade().iter().for_each(|reception| reception.look()))
    };
    let worker = WorkerConfig {
        on_failure: says_so.then_some(hook),
        ..WorkerConfig::default()
    };
    let config = VhostUserConfig {
        workers: vec![worker],
        ..VhostUserConfig::default()
    };
    let served: Served = (0..3).map(|disk| house.open_with(disk, &config)).collect();
    let workers = Arc::clone(&served[1].0.workers);
    for (disk, (server, listener, _)) in served.into_iter().enumerate() {
        let client = None;
        house.reception.enter(
            disk as u64,
            Seat {
                server,
                listener,
                client,
            },
        );
    }
    let reception = Arc::clone(&house.reception);
    let (failed, failures) = std::sync::mpsc::channel();
    let serving = std::thread::spawn(move || {
        let mut told = |disk, _: super::ServeError| failed.send(disk).expect("somebody listens");
        reception.serve(&mut told).expect("descriptors")
    });
    let mut clients: Vec<Client> = (0..3).map(|disk| house.connect(disk)).collect();
    clients.iter_mut().for_each(|client| use_disk(client, 1));
    assert!(
        workers[0]
            .run(|_| panic!("as after a failure of its ring"))
            .is_err()
    );
    let unlucky = clients.remove(1);
    // What it asks for next cannot be done.
    let asks = says_so.then_some(unlucky);
    assert_eq!(failures.recv_timeout(Duration::from_secs(20)), Ok(1));
    assert!(asks.is_none_or(|client| client.is_gone()));
    clients.iter_mut().for_each(|client| use_disk(client, 2));
    house.stop.stop();
    let ended = serving.join().expect("no panic");
    let mut disks: Vec<u64> = ended.iter().map(|(disk, _)| *disk).collect();
    disks.sort_unstable();
    assert_eq!(disks, [0, 2]);
}

#[test]
fn disk_that_fails_harms_no_other() {
    disk_fails_alone(false);
}

#[test]
fn disk_whose_client_is_quiet_is_let_go_of_when_its_worker_says_that_it_failed() {
    disk_fails_alone(true);
}
