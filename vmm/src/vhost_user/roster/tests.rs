//! Disks that fail, in a server within the test.

use block::lock::LockSet;
use block::worker::{WorkerConfig, WorkerPool};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;
use virtio_devices::connect::{Cancel, connect_within};
use virtio_devices::vhost_user::{Reception, StopToken};

use super::super::orders::Orders;
use super::super::served::{Options, Place, Workers, failure_hook, find, serve};
use super::*;
use crate::disk_config::{DiskConfig, RateLimitGroups};
use crate::sd_notify::Manager;
use crate::socket::Socket;

/// A server of raw disks on workers of a pool.
pub(in super::super) struct House {
    folder: tempfile::TempDir,
    pub(in super::super) stop: StopToken,
    pub(in super::super) shared: Arc<WorkerPool>,
    pub(in super::super) roster: Arc<Roster>,
    serving: JoinHandle<Result<(), String>>,
}

impl House {
    /// With a disk of each name, each on a worker of its own.
    pub(in super::super) fn of<const N: usize>(names: [&str; N]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let stop = StopToken::new().expect("a token");
        let reception = Arc::new(Reception::new(stop.clone()).expect("descriptors"));
        let on_failure = failure_hook(&reception);
        let worker = WorkerConfig {
            on_failure: Some(on_failure.clone()),
            ..WorkerConfig::default()
        };
        let shared = Arc::new(WorkerPool::start(vec![worker; N]).expect("workers"));
        let (options, lock_set) = (Options::default(), LockSet::default());
        let served = names.map(|name| {
            let image = folder.path().join(name);
            std::fs::write(&image, [0; 4096]).expect("an image");
            let text = format!("path={},image_type=raw,id={name}", image.display());
            let config = DiskConfig::parse(&text).expect("a disk");
            let path = folder.path().join(format!("{name}.sock"));
            let socket = Socket::listen(&path).expect("a socket");
            let found = find(&config, options, &lock_set).expect("an image");
            let workers = Workers {
                shared: Some(&shared),
                on_failure: &on_failure,
            };
            let place = (Place::Path(path), socket);
            serve(place, config, found, options, workers).expect("a server")
        });
        let setup = Setup {
            options,
            shared: Some(Arc::clone(&shared)),
            images: Vec::new(),
            taken: Vec::new(),
            file: None,
            manager: Arc::new(Manager::find()),
        };
        let groups = RateLimitGroups::default();
        let roster = Roster::new(served.into(), reception, &stop, lock_set, groups, setup);
        let orders = Orders::start(&roster).expect("a thread");
        let serving = {
            let roster = Arc::clone(&roster);
            thread::spawn(move || roster.serve(&orders).map_err(text))
        };
        Self {
            folder,
            stop,
            shared,
            roster,
            serving,
        }
    }

    pub(in super::super) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(in super::super) fn names(&self) -> Vec<String> {
        let served = self.roster.served();
        served.iter().map(|disk| disk.name.clone()).collect()
    }

    pub(in super::super) fn connects(&self, name: &str) -> bool {
        let socket = self.path(&format!("{name}.sock"));
        connect_within(&socket, Duration::from_secs(5), &Cancel::never()).is_ok()
    }

    /// Waits for the end, and returns the reason of it.
    pub(in super::super) fn end(self) -> Option<String> {
        self.serving.join().expect("no panic").expect("no failure");
        assert!(self.stop.is_stopped());
        let (served, failure) = self.roster.end();
        served
            .iter()
            .for_each(|disk| super::super::served::close(disk).expect("a clean close"));
        failure.map(text)
    }
}

/// Of two disks, each on a worker of a pool, the one goes whose worker has failed, and then the other, with which the server
/// ends.
#[test]
fn disk_whose_worker_fails_goes_alone_and_the_last_one_ends_the_server() {
    let house = House::of(["a", "b"]);
    let fail = |worker: usize| {
        let failed = house.shared.workers()[worker].run(|_| panic!("as after a failure of its ring"));
        assert!(failed.is_err());
    };
    assert!(house.connects("a") && house.connects("b"));
    fail(0);
    while house.names() != ["b"] {
        thread::sleep(Duration::from_millis(1));
    }
    assert!(!house.connects("a") && house.connects("b") && !house.stop.is_stopped());
    fail(1);
    while !house.names().is_empty() {
        thread::sleep(Duration::from_millis(1));
    }
    let failure = house.end().expect("a reason to start again");
    assert!(failure.contains("a: a worker has ended"), "{failure}");
}
