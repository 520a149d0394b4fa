//! Signals of a vhost-user server: a stop stops it, and SIGHUP has the configuration file followed.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use virtio_devices::vhost_user::StopToken;

use super::orders::Orders;
use super::served::Options;
use crate::heed::{self, Reactions, give_up};
use crate::sandbox::{self, Task};
use crate::signals::is_log_read;

/// The longest time that a start interrupted by a signal may take to end by itself, between two images.
const START_END_MAX: Duration = Duration::from_secs(1);

/// The stop and the reload that signals ask for.
#[derive(Clone)]
pub(super) struct Heard {
    pub(super) stop: StopToken,
    /// True while stops are noticed by those who serve.
    serving: Arc<AtomicBool>,
    /// Those who follow the configuration file on SIGHUP, as soon as there are some; without a file that is a stop, too.
    reloads: Option<Arc<OnceLock<Orders>>>,
}

impl Heard {
    /// Heeds signals from now on; SIGHUP as a reload if there is a file.
    ///
    /// # Errors
    ///
    /// If the kernel refuses it.
    pub(super) fn start(has_file: bool, options: Options) -> std::io::Result<Self> {
        let heard = Self {
            stop: StopToken::new()?,
            serving: Arc::default(),
            reloads: has_file.then(Arc::default),
        };
        let reload = heard.reloads.clone().map(|reloads| {
            move || {
                // Whoever starts reads the file just now, or has; and nobody waits for what came of this.
                if let Some(orders) = reloads.get() {
                    orders.reload();
                }
            }
        });
        let (stop, serving) = (heard.stop.clone(), Arc::clone(&heard.serving));
        let reactions = Reactions {
            confine: move || {
                if options.sandbox {
                    sandbox::confine_thread(Task::Control)?;
                }
                Ok(())
            },
            reload,
            stop: move |signal| {
                stop.stop();
                if is_log_read() {
                    tracing::info!(event = "stopping", signal, "stopping");
                }
                // What is to be serving does not notice the stop while it is still being opened.
                if !serving.load(Ordering::SeqCst) {
                    thread::sleep(START_END_MAX);
                    if !serving.load(Ordering::SeqCst) {
                        give_up(signal, "exiting before all images were open");
                    }
                }
            },
        };
        heed::start(reactions)?;
        Ok(heard)
    }

    /// Has those who serve notice a stop from now on.
    pub(super) fn is_served(&self) {
        self.serving.store(true, Ordering::SeqCst);
    }

    /// Has these follow the configuration file from now on.
    pub(super) fn follow(&self, orders: &Orders) {
        if let Some(reloads) = &self.reloads {
            reloads.set(orders.clone()).unwrap_or_default();
        }
    }
}
