//! Creating a device: chosen flags, the driver's parameters, workers and queues, and the start.
//!
//! Invariant: a failure at any step is undone, so that no incomplete device remains.

use std::sync::Arc;

use block::Disk;

use super::super::abi::{ANY_DEVICE, DeviceInfo, Flags};
use super::super::channel::Transport;
use super::super::config::{self, Recovery, TransportChoice, UblkConfig};
use super::super::control::Control;
use super::super::error::AddError;
use super::super::params;
use super::super::queue_state::Events;
use super::super::rights::may_administer;
use super::{NODE, UblkDevice, open_char};

impl UblkDevice {
    /// Makes a device of `disk` and serves it. What happens to it later comes through `events`.
    ///
    /// # Errors
    ///
    /// [`AddError`]; no device is left behind then.
    pub fn add(
        control: &mut Control,
        disk: Arc<dyn Disk>,
        config: &UblkConfig,
        events: &Events,
    ) -> Result<Self, AddError> {
        config::check(config)?;
        let features = control.features()?;
        let owned = !may_administer();
        let transport = match (owned, config.transport) {
            (false, choice) => config::choose(choice, features)?,
            (true, _) if !features.contains(Flags::UNPRIVILEGED_DEV) => {
                return Err(AddError::Unsupported {
                    what: "devices for users without rights",
                    since: "Linux 6.3",
                });
            }
            // The driver trusts nobody else with the memory of requests.
            (true, TransportChoice::Auto | TransportChoice::Only(Transport::Copy)) => Transport::Copy,
            (true, TransportChoice::Only(transport)) => return Err(AddError::Rights(transport)),
        };
        // Nor with the time of those who wait for a server.
        let recovery = if owned { Recovery::Off } else { config.recovery };
        let recovery = recovery.flags();
        if !owned && config.recovery == Recovery::Fail && !features.contains(Flags::USER_RECOVERY_FAIL_IO) {
            return Err(AddError::Unsupported {
                what: "recovery=fail",
                since: "Linux 6.13",
            });
        }
        let mut wanted = recovery | Flags::CMD_IOCTL_ENCODE | transport.flags();
        if owned {
            wanted |= Flags::UNPRIVILEGED_DEV;
        }
        // What a kernel may lack without anybody's loss.
        let mut welcome = Flags::UPDATE_SIZE | Flags::QUIESCE | Flags::SAFE_STOP_DEV;
        if !config.partitions {
            welcome |= Flags::NO_AUTO_PART_SCAN;
        }
        let quiesce = if recovery.is_empty() {
            Flags::QUIESCE
        } else {
            Flags::empty()
        };
        wanted |= features & welcome & !quiesce;
        let asked = DeviceInfo {
            nr_hw_queues: config.num_queues,
            queue_depth: config.queue_depth,
            max_io_buf_bytes: config.io_bytes_max,
            dev_id: config.id.unwrap_or(ANY_DEVICE),
            ublksrv_pid: -1,
            flags: wanted.bits(),
            // For the next server, which is to do as this one.
            ublksrv_flags: match config.transport {
                TransportChoice::Auto => config.zero_copy_from.into(),
                TransportChoice::Only(_) => 0,
            },
            ..DeviceInfo::default()
        };
        let info = control.add(&asked)?;
        let device = info.dev_id;
        match Self::bring_up(control, info, wanted, transport, disk, config, events) {
            Ok(device) => {
                tracing::info!(disk = %config.name, device = info.dev_id, %transport, flags = ?info.flags(), "live");
                Ok(device)
            }
            Err(failure) => match control.delete(device) {
                Ok(()) => Err(failure),
                Err(clean_up) => Err(AddError::CleanUp {
                    device,
                    failure: Box::new(failure),
                    clean_up,
                }),
            },
        }
    }

    /// Describes a device that was just made, serves it, and makes its disk appear.
    fn bring_up(
        control: &mut Control,
        info: DeviceInfo,
        wanted: Flags,
        transport: Transport,
        disk: Arc<dyn Disk>,
        config: &UblkConfig,
        events: &Events,
    ) -> Result<Self, AddError> {
        let dropped = wanted & !info.flags();
        if !dropped.is_empty() {
            return Err(AddError::Flags(dropped));
        }
        if info.flags().contains(Flags::UNPRIVILEGED_DEV) {
            // Every command looks at it, and it becomes the user's a moment later.
            drop(open_char(info.dev_id, NODE)?);
        }
        let asked = params::describe(&disk.info(), info.max_io_buf_bytes);
        params::verify(&asked, &control.set_params(info.dev_id, &asked)?)?;
        let served = Self::serve(control, info, transport, disk, config, events)?;
        if let Err(error) = control.start(info.dev_id) {
            served.take_down(control);
            return Err(error.into());
        }
        Ok(served)
    }
}
