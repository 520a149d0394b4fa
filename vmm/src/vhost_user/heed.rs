//! Signals that a server heeds: the first stop stops it, the second ends the process, and SIGHUP has the configuration file followed.
//!
//! Invariant: a stop is noticed from the beginning of the start on, which may take minutes where many images are opened.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use virtio_devices::vhost_user::StopToken;

use super::orders::Orders;
use super::served::Options;
use crate::error::EXIT_FAILURE;
use crate::sandbox::{self, Task};
use crate::signals::{StopSignals, is_log_read};

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
    /// Heeds signals from now on, which no thread that is started later receives; SIGHUP as a reload if there is a file.
    ///
    /// # Errors
    ///
    /// If the kernel refuses it.
    pub(super) fn start(has_file: bool, options: Options) -> std::io::Result<Self> {
        let signals = if has_file {
            StopSignals::block_with_reload()?
        } else {
            StopSignals::block()?
        };
        let heard = Self {
            stop: StopToken::new()?,
            serving: Arc::default(),
            reloads: has_file.then(Arc::default),
        };
        heed_signals(signals, heard.clone(), options)?;
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

    /// Waits for a stop signal. Has the configuration file followed meanwhile.
    fn next_stop(&self, signals: StopSignals) -> std::io::Result<&'static str> {
        loop {
            let signal = signals.wait()?;
            match &self.reloads {
                Some(reloads) if signal == "SIGHUP" => {
                    // Whoever starts reads the file just now, or has; and nobody waits for what came of this.
                    if let Some(orders) = reloads.get() {
                        orders.reload();
                    }
                }
                _ => return Ok(signal),
            }
        }
    }
}

/// Starts the thread that turns the first stop signal into a stop, and the second into the end. So is the first one, if
/// what is to be serving does not notice the stop because it is still being opened.
fn heed_signals(signals: StopSignals, heard: Heard, options: Options) -> std::io::Result<()> {
    let wait_and_stop = move || {
        if options.sandbox {
            sandbox::confine_thread(Task::Control)?;
        }
        let signal = heard.next_stop(signals)?;
        heard.stop.stop();
        if is_log_read() {
            tracing::info!(event = "stopping", signal, "stopping");
        }
        if !heard.serving.load(Ordering::SeqCst) {
            std::thread::sleep(START_END_MAX);
            if !heard.serving.load(Ordering::SeqCst) {
                give_up(signal, "exiting before all images were open");
            }
        }
        let signal = heard.next_stop(signals)?;
        give_up(signal, "exiting with requests in flight")
    };
    let report = move || {
        let result: std::io::Result<()> = wait_and_stop();
        if let Err(error) = result {
            tracing::error!(%error, "cannot wait for signals");
        }
    };
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(report)?;
    Ok(())
}

/// Ends the process as it is.
fn give_up(signal: &str, why: &str) -> ! {
    if is_log_read() {
        tracing::error!(signal, "{why}");
    }
    std::process::exit(EXIT_FAILURE.into());
}
