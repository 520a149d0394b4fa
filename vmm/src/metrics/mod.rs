//! The statistics of served disks for Prometheus: `--metrics`.
//!
//! One thread listens and starts a thread for each client. It exists before the disks are opened, so that an address in use is found
//! first, and outside the sandbox, which allows no new socket. When it listens it confines itself, and its clients' threads with
//! it: they can talk to whoever has connected and open nothing.
//!
//! ```text
//!  GET /metrics ──▶ http ──▶ text ◀── Report: disks (virtio_devices::stats), process (memory, descriptors)
//! ```
//!
//! In a takeover the old server has the address until it exits. The new one tries again until then and serves its disks meanwhile.
//!
//! Invariants: a client can read statistics and do nothing else; clients beyond the eighth, slow ones and those that do
//! not speak HTTP cost a thread for a bounded time and never a disk; a disk's workers do not notice who reads.

mod address;
mod http;
mod process;
#[cfg(test)]
mod tests;
mod text;

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use qcow::EngineCounts;
use virtio_devices::stats::DiskSnapshot;

use address::Listener;
pub use address::{Address, AddressError};
use process::Process;

use crate::sandbox::{self, Task};
use crate::socket::SocketError;

/// The longest wait for the address of a server that hands over.
const TAKEOVER_MAX: Duration = Duration::from_secs(60);
/// The time between two tries meanwhile.
const TRY_AGAIN: Duration = Duration::from_millis(50);

/// An error of serving statistics.
#[derive(Debug, thiserror::Error)]
pub enum MetricsError {
    /// Somebody else listens there.
    #[error("--metrics {address}: the address is in use; stop its server or choose another one")]
    InUse {
        /// The address.
        address: Address,
    },
    /// A Unix socket cannot be created.
    #[error("--metrics {address}")]
    Socket {
        /// The address.
        address: Address,
        /// The reason.
        #[source]
        source: SocketError,
    },
    /// A system call failed.
    #[error("cannot serve --metrics {address}")]
    Os {
        /// The address.
        address: Address,
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
}

/// The statistics of one disk, as they are reported.
#[derive(Clone, Debug)]
pub struct DiskReport {
    /// The labels that tell it from other disks: names and values.
    pub labels: Vec<(&'static str, String)>,
    /// Its requests.
    pub requests: DiskSnapshot,
    /// The work of its QCOW2 image's engine.
    pub engine: Option<EngineCounts>,
}

impl DiskReport {
    /// Returns a report about the disk of this name.
    #[must_use]
    pub fn new(name: String, requests: DiskSnapshot, engine: Option<EngineCounts>) -> Self {
        Self {
            labels: vec![("disk", name)],
            requests,
            engine,
        }
    }
}

/// Returns the statistics of all disks at this moment. It is called for each client.
pub type Source = dyn Fn() -> Vec<DiskReport> + Send + Sync;

/// State that the owner shares with the server's threads.
struct Shared {
    source: Mutex<Option<Arc<Source>>>,
    process: Process,
}

impl Shared {
    /// Returns the text to send.
    fn text(&self) -> String {
        let source = self.source.lock().clone();
        let disks = source.map_or_else(Vec::new, |source| source());
        text::render(&disks, &self.process.read())
    }
}

/// A server of statistics, which runs until the process exits.
pub struct Metrics {
    shared: Arc<Shared>,
    /// The socket, whose file is removed when this is dropped; `None` while its address is another server's.
    listener: Arc<Mutex<Option<Listener>>>,
}

impl Drop for Metrics {
    fn drop(&mut self) {
        // The thread that accepts has it too, and ends with the process.
        drop(self.listener.lock().take());
    }
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Metrics {
    /// Listens at `address`, on a thread of its own, which with `sandbox` confines itself. Call it before the calling thread is
    /// confined. With `takeover` the address may be the old server's: then it is taken as soon as that one has exited.
    ///
    /// # Errors
    ///
    /// [`MetricsError`], naming the address.
    pub fn start(address: &Address, sandbox: bool, takeover: bool) -> Result<Self, MetricsError> {
        let os = |source| MetricsError::Os {
            address: address.clone(),
            source,
        };
        let shared = Arc::new(Shared {
            source: Mutex::default(),
            process: Process::open().map_err(os)?,
        });
        let first = match address.listen() {
            Ok(listener) => Some(listener),
            Err(MetricsError::InUse { .. }) if takeover => None,
            Err(error) => return Err(error),
        };
        let place = Arc::new(Mutex::new(first));
        let server = Server {
            address: address.clone(),
            sandbox,
            place: Arc::clone(&place),
            shared: Arc::clone(&shared),
        };
        let serve = move || {
            if let Err(error) = server.serve() {
                tracing::error!(error = crate::error::chain(&*error), "no statistics are served");
            }
        };
        let thread = std::thread::Builder::new().name("metrics".to_owned());
        thread.spawn(serve).map_err(os)?;
        Ok(Self {
            shared,
            listener: place,
        })
    }

    /// Reports these disks from now on.
    pub fn report(&self, source: Arc<Source>) {
        *self.shared.source.lock() = Some(source);
    }
}

/// The thread that listens.
struct Server {
    address: Address,
    sandbox: bool,
    place: Arc<Mutex<Option<Listener>>>,
    shared: Arc<Shared>,
}

impl Server {
    /// Serves until the process exits, or fails.
    fn serve(self) -> Result<(), Box<dyn std::error::Error>> {
        self.take_address()?;
        if self.sandbox {
            sandbox::confine_thread(Task::Metrics)?;
        }
        let acceptor = self.place.lock().as_ref().map(Listener::acceptor).transpose()?;
        if let Some(acceptor) = acceptor {
            let shared = self.shared;
            http::serve(&acceptor, &(Arc::new(move || shared.text()) as _));
        }
        Ok(())
    }

    /// Waits until the address is ours, if it is not.
    fn take_address(&self) -> Result<(), MetricsError> {
        let began = Instant::now();
        while self.place.lock().is_none() {
            match self.address.listen() {
                Ok(listener) => *self.place.lock() = Some(listener),
                Err(MetricsError::InUse { .. }) if began.elapsed() < TAKEOVER_MAX => {
                    std::thread::sleep(TRY_AGAIN);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
