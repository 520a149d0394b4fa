//! The image of a disk whose client migrates its guest: it is opened when a queue is to run, and released when none does.
//!
//! Invariant: no queue is started before the image is here. What opens it meanwhile is waited for before a client goes, and before it
//! learns where a queue has stopped.

use std::sync::Arc;

use vhost::vhost_user::{Error as MessageError, Result};

use super::super::CloseError;
use super::super::image::{DetachedDisk, Image, OpenEnd, Opened, Place};
use super::super::vring::Vring;
use super::{Backend, LOG_ALL};
use crate::blk::BlockDevice;

impl Backend {
    /// Returns true if a queue is to run and waits for the image.
    pub(in super::super) fn waits_for_image(&self) -> bool {
        self.waits_for_image
    }

    /// Returns what can be read from when the image has been opened, or could not be; `None` while nobody opens it.
    pub(in super::super) fn image_opens(&self) -> Option<OpenEnd> {
        self.image.as_ref().and_then(|image| image.opens())
    }

    /// Looks for the image, and starts what waits for it, or tries again to open it.
    pub(in super::super) fn try_again(&mut self) -> Result<()> {
        self.waits_for_image = match self.image.as_ref().and_then(|image| image.end_opening()) {
            // What fails is tried again after a while.
            Some(opened) => !self.take_image(opened),
            None => false,
        };
        if self.waits_for_image {
            Ok(())
        } else {
            self.start_all()
        }
    }

    /// Waits until nobody opens the image any more.
    pub(in super::super) fn settle_image(&mut self) {
        if let Some(opened) = self.image.as_ref().and_then(|image| image.end_opening()) {
            self.take_image(opened);
        }
    }

    /// Has the image that was opened; returns false if it was not.
    fn take_image(&self, opened: Opened) -> bool {
        let Some(image) = &self.image else {
            return false;
        };
        let disk = match opened {
            Ok(disk) => disk,
            Err(error) => {
                note_failure(&self.device, &*error);
                return false;
            }
        };
        let is_changed = self.device.disk().info().size_bytes != disk.info().size_bytes;
        self.device.set_disk(disk);
        image.set_place(Place::Here);
        tracing::info!(
            event = "image-opened",
            disk = image.name(),
            "opened the image for a guest that runs here now"
        );
        if is_changed {
            // Whoever does not listen sees it when it starts again.
            self.channel.notify().ok();
        }
        true
    }

    /// Releases the image if the client has stopped its last queue while it migrates its guest: the guest may continue elsewhere as soon
    /// as this was answered.
    ///
    /// # Errors
    ///
    /// If the image cannot be closed cleanly. Then it stays locked.
    pub(super) fn release_if_migrating(&mut self) -> Result<()> {
        let Some(image) = self.image.as_ref().filter(|image| !image.is_away()) else {
            return Ok(());
        };
        let is_logged = self.features & LOG_ALL != 0 && self.log.is_some();
        let is_over = is_logged && self.vrings.iter().all(Vring::is_at_rest);
        if !is_over {
            return Ok(());
        }
        let info = self.device.disk().info();
        image.owner().detach();
        let closed = super::super::close_on(&self.workers, self.device.disk());
        if let Err(error) = closed {
            let disk = match error {
                CloseError::Disk(error) => DetachedDisk::unclean(info, error),
                CloseError::Worker(_) => DetachedDisk::new(info),
            };
            self.device.set_disk(Arc::new(disk));
            image.owner().keep();
            image.set_place(Place::Unclean);
            self.worker_gone |= matches!(error, CloseError::Worker(_));
            tracing::error!(
                event = "image-kept",
                disk = image.name(),
                error = &error as &dyn std::error::Error,
                "the image was not closed cleanly, and stays locked: its guest migrates, and would not notice elsewhere that what \
                 it wrote last may be lost; end this server to let it go on with the image as it is"
            );
            // The answer has no room for the reason.
            return Err(MessageError::InvalidParam);
        }
        self.device.set_disk(Arc::new(DetachedDisk::new(info)));
        image.owner().release();
        image.set_place(Place::Away);
        tracing::info!(
            event = "image-released",
            disk = image.name(),
            "the guest migrates: another server may open the image"
        );
        Ok(())
    }
}

/// Returns true if the image is here. If another server had it, it is opened from now on, and wanted.
pub(super) fn fetch(image: Option<&Image>, device: &BlockDevice, waits: &mut bool) -> bool {
    let Some(image) = image.filter(|image| image.is_away()) else {
        return true;
    };
    // Once for each time that it is tried.
    if !std::mem::replace(waits, true)
        && let Err(error) = image.begin_to_open()
    {
        note_failure(device, &*error);
    }
    false
}

fn note_failure(device: &BlockDevice, error: &(dyn std::error::Error + Send + Sync + 'static)) {
    if let Some(held_back) = device.log_limit().admit() {
        let error = error as &dyn std::error::Error;
        tracing::warn!(error, held_back, "a queue waits until the image can be opened");
    }
}
