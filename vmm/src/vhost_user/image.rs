//! The image of a served disk: open here, or with another server while its guest is there.
//!
//! Invariant: the lock of the image is held exactly while [`ServedImage`] has it open.

use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use block::lock::LockSet;
use block::{Disk, DiskInfo};
use parking_lot::Mutex;
use virtio_devices::vhost_user::ImageOwner;

use crate::disk_config::DiskConfig;
use crate::exchange::ServedDisk;
use crate::open::{self, OpenError, OpenedDisk, Opening};

/// The longest wait for the last users of a disk that was closed: answers on their way to whoever asked.
const RELEASE_MAX: Duration = Duration::from_secs(5);

/// An image that this process opens and closes.
#[derive(Debug)]
pub(super) struct ServedImage {
    /// The disk's name, for the log.
    name: String,
    /// The disk, for requests of the control socket.
    disk: Arc<ServedDisk>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    config: Arc<DiskConfig>,
    opening: Opening,
    /// `None` while the image is closed.
    opened: Option<OpenedDisk>,
    /// True if it is closed because a guest has migrated, or has yet to come.
    is_away: bool,
    /// True if it was not closed cleanly when its guest migrated. It stays locked.
    is_kept: bool,
}

/// An image, before its disk is served.
#[derive(Debug)]
pub(super) enum Found {
    /// Opened and locked, as it is to be opened again.
    Here(OpenedDisk, Opening),
    /// Looked at, while another server may have it.
    Away(Look, Opening),
}

/// What an image looks like that another server may have.
#[derive(Debug)]
pub(super) struct Look {
    info: DiskInfo,
    is_qcow2: bool,
    /// The files that it is made of, and those of them that will be written.
    files: Vec<PathBuf>,
    written: Vec<PathBuf>,
}

impl Look {
    /// Looks at the image of `config`: nothing is locked, and nothing written.
    ///
    /// # Errors
    ///
    /// [`OpenError`], naming the file.
    pub(super) fn new(config: &DiskConfig) -> Result<Self, OpenError> {
        let opened = open::look(config)?;
        let disk = opened.disk();
        let writes = config.writes_image();
        Ok(Self {
            // It was opened as one that is only read. What it can do beside that shows when it is opened to be written; whoever expects
            // more has those requests refused.
            info: DiskInfo {
                read_only: !writes,
                discard: writes && config.sparse,
                write_zeroes: writes,
                ..disk.info()
            },
            is_qcow2: opened.image().is_some(),
            files: disk.files(),
            written: if writes { opened.own_files() } else { Vec::new() },
        })
    }
}

impl Found {
    /// Returns the image's files that are read only, and those that are written.
    pub(super) fn files(&self) -> (Vec<PathBuf>, Vec<PathBuf>) {
        let (mut files, written) = match self {
            Self::Here(opened, _) => (opened.disk().files(), opened.disk().written_files()),
            Self::Away(look, _) => (look.files.clone(), look.written.clone()),
        };
        files.retain(|file| !written.contains(file));
        (files, written)
    }

    /// Returns what the disk shows.
    pub(super) fn info(&self) -> DiskInfo {
        match self {
            Self::Here(opened, _) => opened.disk().info(),
            Self::Away(look, _) => look.info,
        }
    }
}

impl ServedImage {
    /// The image of `disk`, as it was found.
    pub(super) fn new(config: DiskConfig, disk: Arc<ServedDisk>, found: Found) -> Arc<Self> {
        let is_away = matches!(found, Found::Away(..));
        let (opened, opening) = match found {
            Found::Here(opened, opening) => {
                disk.attach(&opened);
                (Some(opened), opening)
            }
            Found::Away(look, opening) => {
                disk.expect(look.info, look.is_qcow2);
                (None, opening)
            }
        };
        Arc::new(Self {
            name: config.name(),
            disk,
            state: Mutex::new(State {
                config: Arc::new(config),
                opening,
                opened,
                is_away,
                is_kept: false,
            }),
        })
    }

    /// Returns the configuration that the image was opened with, or is to be.
    pub(super) fn config(&self) -> Arc<DiskConfig> {
        Arc::clone(&self.state.lock().config)
    }

    /// Sets the configuration that the image is to be opened with.
    pub(super) fn set_config(&self, config: Arc<DiskConfig>) {
        let mut state = self.state.lock();
        let limits = |config: &DiskConfig| (config.rate_limits, config.rate_limit_group.clone());
        if limits(&state.config) != limits(&config) {
            self.disk.forget_limits(&config);
        }
        state.config = config;
    }

    /// Returns true if the image is closed because another server has it, or may have it.
    pub(super) fn is_away(&self) -> bool {
        self.state.lock().is_away
    }

    /// Returns the reason why the image can be neither opened anew nor handed over now, if there is one.
    pub(super) fn obstacle(&self) -> Option<&'static str> {
        let state = self.state.lock();
        if state.is_kept {
            Some("was not closed cleanly when its guest migrated, and stays locked until this server ends")
        } else if state.is_away {
            Some("is with another server, as its guest is")
        } else {
            None
        }
    }

    /// Returns the files that the open image is made of.
    pub(super) fn files(&self) -> Vec<PathBuf> {
        let state = self.state.lock();
        let opened = state.opened.as_ref();
        opened.map_or_else(Vec::new, |opened| opened.disk().files())
    }

    /// Lets go of the image, whose disk was closed.
    pub(super) fn close(&self) {
        self.state.lock().opened = None;
    }

    /// Returns the image's locks.
    pub(super) fn lock_set(&self) -> LockSet {
        self.state.lock().opening.lock_set.clone()
    }

    /// Opens an image that was closed for a takeover, with locks of these.
    ///
    /// # Errors
    ///
    /// [`OpenError`].
    pub(super) fn reopen(&self, locks: &LockSet) -> Result<Arc<dyn Disk>, OpenError> {
        self.state.lock().opening.lock_set = locks.part();
        self.open_again()
    }

    /// As [`ServedImage::reopen`], and waits until `deadline` for others to release the image.
    ///
    /// # Errors
    ///
    /// As there.
    pub(super) fn reopen_until(
        &self,
        locks: &LockSet,
        deadline: Instant,
    ) -> Result<Arc<dyn Disk>, OpenError> {
        loop {
            match self.reopen(locks) {
                Err(error) if error.is_locked() && Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                opened => return opened,
            }
        }
    }

    /// Opens an image that was closed.
    ///
    /// # Errors
    ///
    /// [`OpenError`].
    pub(super) fn open_again(&self) -> Result<Arc<dyn Disk>, OpenError> {
        self.open_now(false)
    }

    /// Opens the image. One who comes again does not wait for the lock.
    fn open_now(&self, comes_again: bool) -> Result<Arc<dyn Disk>, OpenError> {
        // Only the thread that serves the disk opens and closes it, or has another one open it. Whoever looks at the state does not wait
        // for it.
        let (config, mut opening) = {
            let state = self.state.lock();
            (Arc::clone(&state.config), state.opening.clone())
        };
        if comes_again {
            opening.lock_set = opening.lock_set.at_once();
        }
        let opened = open::open_as(&config, &opening)?;
        self.disk.attach(&opened);
        let disk = opened.disk();
        let mut state = self.state.lock();
        state.opened = Some(opened);
        state.is_away = false;
        Ok(disk)
    }
}

impl ImageOwner for ServedImage {
    fn detach(&self) {
        self.disk.detach();
    }

    fn release(&self) {
        let mut state = self.state.lock();
        state.is_away = true;
        let opened = state.opened.take();
        drop(state);
        if let Some(opened) = opened
            && !opened.release(RELEASE_MAX)
        {
            tracing::error!(
                disk = %self.name,
                "the image is still in use, and locked; its guest cannot run elsewhere before that ends"
            );
        }
    }

    fn keep(&self) {
        self.state.lock().is_kept = true;
    }

    fn open(&self) -> Result<Arc<dyn Disk>, Box<dyn Error + Send + Sync>> {
        Ok(self.open_now(true)?)
    }

    fn look(&self) -> Option<DiskInfo> {
        let look = Look::new(&self.config())
            .inspect_err(|error| tracing::warn!(disk = %self.name, %error, "cannot look at the image"))
            .ok()?;
        self.disk.expect(look.info, look.is_qcow2);
        Some(look.info)
    }
}
