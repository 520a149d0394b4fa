//! Waits that end: what a test waits for and does not come fails the test, and says what it was. A wait without a limit
//! takes the results of its whole binary with it.

use std::process::{Child, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// The longest wait for what takes milliseconds on a machine with nothing else to do.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Looks until something is there, and returns it.
///
/// # Panics
///
/// If `what` is not there after [`PATIENCE`].
#[track_caller]
pub fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "no {what} after {PATIENCE:?}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// Looks until it is so.
///
/// # Panics
///
/// As [`wait_for`].
#[track_caller]
pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    wait_for(what, || is_so().then_some(()));
}

/// Waits for the end of a child, whose output must fit the pipes that nobody reads meanwhile.
///
/// # Panics
///
/// If it has not ended after [`PATIENCE`], or is no child any more.
#[track_caller]
pub fn wait_for_end(child: &mut Child) -> ExitStatus {
    wait_for("end of the process", || child.try_wait().expect("a child"))
}

/// A flag that is set when this is dropped. Whoever works until then ends also if the test fails, which otherwise waited for it for ever.
#[derive(Debug)]
pub struct SetOnDrop<'a>(pub &'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn wait_returns_what_was_found_at_last() {
        let mut looks = 0;
        let found = wait_for("third look", || {
            looks += 1;
            (looks == 3).then_some(looks)
        });
        assert_eq!(found, 3);
        let mut child = Command::new("sh")
            .args(["-c", "sleep 0.05; exit 3"])
            .spawn()
            .expect("sh");
        assert_eq!(wait_for_end(&mut child).code(), Some(3));
    }
}
