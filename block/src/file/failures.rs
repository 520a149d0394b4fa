//! The consequences of failed ops for an image, and their log messages.
//!
//! Invariant: every failed sync is recorded, whoever submitted it and whether or not anybody waits for its result.

use std::rc::Rc;
use std::sync::Arc;

use super::image_file::ImageFile;
use crate::error::IoError;
use crate::handle::{Kind, Observer};
use crate::report::Action;
use crate::sync::atomic::Ordering;
use crate::timer::Timers;

/// Observer that records and logs one worker's failed ops.
pub(super) struct ViewObserver {
    pub(super) file: Arc<ImageFile>,
    pub(super) timers: Rc<Timers>,
}

impl Observer for ViewObserver {
    fn failed(&self, kind: Kind, offset: u64, error: IoError) {
        let file = &*self.file;
        let action = match kind {
            Kind::Read => Action::Read,
            Kind::Write { .. } => Action::Write,
            Kind::DataSync => Action::Sync,
            Kind::Allocate { .. } => Action::Allocate,
            Kind::Truncate => Action::SetLength,
            Kind::Watch | Kind::Command { .. } => return,
        };
        if error == IoError::Cancelled || action == Action::Allocate && file.is_refusal(error) {
            return;
        }
        let forced = matches!(kind, Kind::Write { dsync: true }) && !error.is_no_space();
        let synced = kind == Kind::DataSync || forced;
        let waits = !synced && error.is_no_space() && file.delays.is_wanted();
        let consequence = if synced {
            file.syncs.fail(error.errno());
            "no FLUSH succeeds until the image is reopened"
        } else if waits {
            "writes wait until there is space"
        } else if error.is_no_space() {
            "writes that need space fail"
        } else {
            "what needed it fails"
        };
        let now = self.timers.now();
        let logged = file
            .reports
            .host_error(&file.path, action, offset, error, consequence, now);
        if logged && waits {
            file.short.store(true, Ordering::Relaxed);
        }
    }
}
