//! A server as a command line or a configuration file describes it.

use std::path::{Path, PathBuf};

use super::file::ConfigFile;
use super::served::{Options, Place};
use super::workers::{self, SharedWorkers};
use crate::disk_config::{DiskConfig, RateLimitGroups};
use crate::error::CommandFailure;
use crate::metrics::Address;
use crate::{once, socket};

/// All that a server is told.
#[derive(Debug)]
pub struct Wanted {
    /// The disks that it begins with.
    pub disks: Disks,
    /// Paths and addresses, besides the sockets of the disks.
    pub places: Places,
    /// The workers that all queues share; without any, each queue has one of its own.
    pub workers: Vec<SharedWorkers>,
    /// How it serves.
    pub options: Options,
    /// The configuration file that says so, which is read again on SIGHUP.
    pub file: Option<ConfigFile>,
}

/// Paths and addresses of a server, besides the sockets of its disks.
#[derive(Clone, Debug, Default)]
pub struct Places {
    /// The path of the control socket.
    pub control: Option<PathBuf>,
    /// A control socket of the server to take over from, if it has none that is named after one of these.
    pub takeover_from: Option<PathBuf>,
    /// The address of the statistics.
    pub metrics: Option<Address>,
    /// The path of the file with the process id.
    pub pid_file: Option<PathBuf>,
    /// The folders of the images and sockets of disks that are added later.
    pub images: Vec<PathBuf>,
}

/// The disks that a server begins with.
#[derive(Debug)]
pub struct Disks {
    /// Those disks, with the sockets that they are served on.
    pub served: Vec<(Place, DiskConfig)>,
    /// The rate limit groups that later ones may join.
    pub groups: RateLimitGroups,
}

/// Checks disks that are to be served together.
///
/// # Errors
///
/// [`CommandFailure::Usage`]: two have the same image or socket, or one does not go with an option.
pub(super) fn check_disks(
    disks: &[(Place, DiskConfig)],
    control: Option<&Path>,
    workers: &[SharedWorkers],
    options: Options,
) -> Result<(), CommandFailure> {
    let configs = disks.iter().map(|(_, config)| config);
    once::check_images(configs.clone())?;
    if !workers.is_empty()
        && let Some(obstacle) = configs.clone().find_map(workers::obstacle)
    {
        return Err(CommandFailure::Usage(obstacle));
    }
    let sockets = disks.iter().filter_map(|(place, _)| match place {
        Place::Path(path) => Some(path.as_path()),
        Place::Descriptor(_) => None,
    });
    let sockets: Vec<&Path> = sockets.chain(control).collect();
    for path in &sockets {
        socket::check_path(path).map_err(|error| CommandFailure::Usage(error.to_string()))?;
    }
    once::check_sockets(&sockets)?;
    for (given, option) in options.outliving() {
        if given {
            configs
                .clone()
                .try_for_each(|disk| disk.may_outlive_process(option))?;
        }
    }
    Ok(())
}
