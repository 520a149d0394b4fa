//! Recovering a device whose server is gone.
//!
//! Invariants: the driver has noticed the death before the recovery begins. A device that cannot be recovered waits for another
//! server, as it was found; it is never deleted here. I/O starts when every queue of every device that is recovered has a
//! server.

use std::sync::Arc;
use std::time::{Duration, Instant};

use block::Disk;

use super::super::abi::{DeviceState, Flags};
use super::super::channel::{Transport, end_half_recovery};
use super::super::config::UblkConfig;
use super::super::control::Control;
use super::super::error::AddError;
use super::super::queue_state::Events;
use super::{UblkDevice, open_char};

/// The longest time that the driver may take to notice that a server is gone: requests that it waits for in vain time
/// out.
const NOTICE: Duration = Duration::from_secs(90);

impl UblkDevice {
    /// Begins to serve a device whose server is gone, with the same disk. The image must be locked: then the old server's
    /// I/O has ended. Waits for the driver to notice the death. The number of queues, their depth and the transport are
    /// the device's, whatever `config` says.
    ///
    /// I/O does not start before [`RecoveringDevice::start_io`]. To recover several devices, call this for all of them
    /// first: the I/O of one would delay the others.
    ///
    /// # Errors
    ///
    /// [`AddError`]; the device waits for another server then.
    pub fn recover(
        control: &mut Control,
        device: u32,
        disk: Arc<dyn Disk>,
        config: &UblkConfig,
        events: &Events,
    ) -> Result<RecoveringDevice, AddError> {
        let info = control.info(device)?;
        if info.state() == DeviceState::Dead || !info.flags().contains(Flags::USER_RECOVERY) {
            let state = info.state();
            return Err(AddError::NotRecoverable { device, state });
        }
        let params = control.params(device)?;
        let device_bytes = params.basic.dev_sectors * 512;
        let disk_bytes = disk.info().size_bytes;
        if device_bytes != disk_bytes {
            return Err(AddError::Size {
                device,
                device_bytes,
                disk_bytes,
            });
        }
        let noticed = Instant::now() + NOTICE;
        // Drivers before 6.15, which have not this either, follow null pointers where a recovery has stopped half way. Later ones
        // must be spared: they let requests flow as soon as each queue has a server.
        if !control.features()?.contains(Flags::SUPPORT_ZERO_COPY) {
            let file = open_char(device, NOTICE)?;
            let unserved = end_half_recovery(file, &info)
                .map_err(|source| AddError::HalfRecovered { device, source })?;
            if unserved > 0 {
                tracing::info!(device, unserved, "cleaning up an interrupted recovery");
            }
        }
        control.start_recovery(device, noticed.saturating_duration_since(Instant::now()))?;
        let transport = Transport::of(info.flags());
        let served = Self::serve(control, info, transport, disk, config, events)?;
        let name = config.name.clone();
        Ok(RecoveringDevice { served, name })
    }
}

/// A device that has a server again, whose queues wait for requests. I/O to it waits still.
#[derive(Debug)]
#[must_use = "I/O waits until this is finished"]
pub struct RecoveringDevice {
    served: UblkDevice,
    name: String,
}

impl RecoveringDevice {
    /// Lets I/O flow, what the old server had taken first. The answers are in the order of `devices`: [`AddError`] for each
    /// that waits for another server.
    pub fn start_io(devices: Vec<Self>, control: &mut Control) -> Vec<Result<UblkDevice, AddError>> {
        let ids: Vec<u32> = devices.iter().map(|device| device.served.id()).collect();
        // All at once: the I/O of the first would take the time of the others.
        let ended = control.end_recovery(&ids);
        let each = devices.into_iter().zip(ended).map(|(device, ended)| {
            let Self { served, name } = device;
            ended?;
            tracing::info!(disk = %name, device = served.id(), transport = %served.transport, "recovered");
            Ok(served)
        });
        each.collect()
    }
}
