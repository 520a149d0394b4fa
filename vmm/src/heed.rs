//! Signals that a server heeds: the first stop stops it, the second ends the process, and SIGHUP may mean something else than a stop.
//!
//! Invariant: a stop is noticed from the beginning of the start on, which may take minutes where many images are opened.

use std::io;
use std::thread;

use crate::error::EXIT_FAILURE;
use crate::signals::{StopSignals, is_log_read};

/// The reactions of a server to signals.
pub(crate) struct Reactions<C, R, S> {
    /// Confines the thread that waits for them.
    pub(crate) confine: C,
    /// The meaning of SIGHUP, if it is no stop.
    pub(crate) reload: Option<R>,
    /// The reaction to the first stop.
    pub(crate) stop: S,
}

/// Starts the thread that waits for signals and reacts. No thread that is started later receives them.
///
/// # Errors
///
/// If the kernel refuses it.
pub(crate) fn start(
    reactions: Reactions<
        impl FnOnce() -> io::Result<()> + Send + 'static,
        impl Fn() + Send + 'static,
        impl FnOnce(&'static str) + Send + 'static,
    >,
) -> io::Result<()> {
    let Reactions {
        confine,
        reload,
        stop,
    } = reactions;
    let signals = match reload {
        Some(_) => StopSignals::block_with_reload()?,
        None => StopSignals::block()?,
    };
    let next_stop = move || {
        loop {
            match (signals.wait()?, &reload) {
                ("SIGHUP", Some(reload)) => reload(),
                (signal, _) => return io::Result::Ok(signal),
            }
        }
    };
    let react = move || -> io::Result<()> {
        confine()?;
        stop(next_stop()?);
        give_up(next_stop()?, "exiting with requests in flight")
    };
    let report = move || {
        if let Err(error) = react() {
            tracing::error!(%error, "cannot wait for signals");
        }
    };
    thread::Builder::new().name("signals".to_owned()).spawn(report)?;
    Ok(())
}

/// Ends the process as it is.
pub(crate) fn give_up(signal: &str, why: &str) -> ! {
    if is_log_read() {
        tracing::error!(signal, "{why}");
    }
    std::process::exit(EXIT_FAILURE.into());
}
