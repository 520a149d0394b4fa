//! Retries of operations that the host had no space for.
//!
//! Invariant: only operations that the host refused are retried, never those whose data it may have lost.

use super::view::FileView;
use crate::delay::{RETRY_MAX, RETRY_MIN};
use crate::error::IoError;
use crate::sync::atomic::Ordering;

impl FileView {
    /// Retries `work` until there is space for it, or until waits are ended.
    pub(super) async fn with_space(
        &self,
        mut work: impl AsyncFnMut() -> Result<(), IoError>,
    ) -> Result<(), IoError> {
        let (mut time, mut waited) = (RETRY_MIN, false);
        loop {
            match work().await {
                Err(error) if error.is_no_space() => {
                    waited = true;
                    if !self.file.delays.wait(&self.cx, time).await {
                        return Err(error);
                    }
                    time = (time * 2).min(RETRY_MAX);
                }
                Ok(()) if waited && self.file.short.swap(false, Ordering::Relaxed) => {
                    let image = self.file.path.display();
                    tracing::warn!(event = "space-again", %image, "the host has space again; writes go on");
                    return Ok(());
                }
                result => return result,
            }
        }
    }

    /// Waits a moment for the host's space, if such waits are enabled. Returns true if the caller should retry.
    pub async fn wait_for_space(&self) -> bool {
        self.file.delays.wait(&self.cx, RETRY_MAX / 4).await
    }
}
