//! The clients of a control socket, and who makes room for another one.
//!
//! Invariant: a client that says nothing keeps nobody out for longer than a moment. One whose request is carried out, or that watches,
//! keeps its place.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// The most clients at a time.
pub(super) const CLIENTS_MAX: usize = 8;
/// The time after which a client that has said nothing, or not all of its request, has to go for another one.
pub(super) const SILENT_MIN: Duration = Duration::from_millis(250);
/// The longest wait for a place.
pub(super) const ROOM_MAX: Duration = Duration::from_secs(1);

/// The clients that are connected.
#[derive(Debug, Default)]
pub(super) struct Clients {
    list: Mutex<List>,
    gone: Condvar,
}

#[derive(Debug, Default)]
struct List {
    next: u64,
    clients: Vec<Client>,
}

#[derive(Debug)]
struct Client {
    number: u64,
    connection: Arc<UnixStream>,
    /// The time since which it is to say something, if it is: its connection, or its last answer.
    silent_since: Option<Instant>,
}

impl Clients {
    /// Lets a client in. If there are as many as there can be, it waits for one to go, and has the one go that has been silent for
    /// longest. Returns `None` if that takes too long.
    ///
    /// The connection is shared: a duplicate would need a descriptor of its own, and the process may have none left.
    pub(super) fn admit(self: &Arc<Self>, connection: &Arc<UnixStream>) -> Option<Place> {
        let deadline = Instant::now() + ROOM_MAX;
        let mut list = self.list.lock();
        while list.clients.len() >= CLIENTS_MAX {
            let now = Instant::now();
            if now >= deadline {
                return None;
            }
            let silent = list
                .clients
                .iter_mut()
                .filter_map(|client| Some((client.silent_since?, client)));
            let until = match silent.min_by_key(|(since, _)| *since) {
                Some((since, client)) if now >= since + SILENT_MIN => {
                    client.silent_since = None;
                    // Its thread reads the end, and gives the place back.
                    client.connection.shutdown(Shutdown::Both).unwrap_or_default();
                    deadline
                }
                Some((since, _)) => deadline.min(since + SILENT_MIN),
                None => deadline,
            };
            self.gone.wait_until(&mut list, until);
        }
        let number = list.next;
        list.next += 1;
        list.clients.push(Client {
            number,
            connection: Arc::clone(connection),
            silent_since: Some(Instant::now()),
        });
        let clients = Arc::clone(self);
        Some(Place { clients, number })
    }
}

/// The place of a client, until it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    clients: Arc<Clients>,
    number: u64,
}

impl Place {
    /// Says whether the client is to say something, or has.
    pub(super) fn awaits(&self, awaits: bool) {
        let mut list = self.clients.list.lock();
        if let Some(client) = list
            .clients
            .iter_mut()
            .find(|client| client.number == self.number)
        {
            client.silent_since = awaits.then(Instant::now);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut list = self.clients.list.lock();
        list.clients.retain(|client| client.number != self.number);
        self.clients.gone.notify_all();
    }
}
