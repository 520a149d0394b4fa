//! `ringdisk serve`: serves what a configuration file describes, and follows it.
//!
//! A file has disks for other programs' machines (`[[disk]]`, see [`vhost_user`]) or devices of the host (`[[device]]`, see [`ublk`]).

use std::path::{Path, PathBuf};

use clap::Args;

use crate::config_file;
use crate::error::{CommandFailure, EXIT_OK, chain};
use crate::takeover::TakeoverArguments;
use crate::ublk::file::{DevicesFile, KIND as DEVICES};
use crate::vhost_user::{ConfigFile, KIND as DISKS, Start};
use crate::{background, ublk, vhost_user};

/// The arguments of `ringdisk serve`.
#[derive(Args, Debug)]
pub(crate) struct ServeArguments {
    /// Configuration file: options as settings, and a [[disk]] for each vhost-user disk or a [[device]] for each block device
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Only read the file, and say what is wrong with it
    #[arg(long, conflicts_with_all = ["takeover", "incoming", "daemonize"])]
    check: bool,
    #[command(flatten)]
    takeover: TakeoverArguments,
    /// Expect guests that migrate from another server of the same images
    #[arg(long, conflicts_with = "takeover")]
    incoming: bool,
    /// Continue in the background as soon as clients can connect, or the devices are ready; exits with 0 then
    #[arg(long)]
    daemonize: bool,
    /// Given once to the intermediate process of --daemonize, twice to the process that stays.
    #[arg(long, hide = true, action = clap::ArgAction::Count)]
    detached: u8,
}

impl ServeArguments {
    /// Serves.
    ///
    /// # Errors
    ///
    /// As [`vhost_user::run`] and [`ublk::follow`], and if something is wrong with the file.
    pub(crate) fn run(self) -> Result<u8, CommandFailure> {
        if self.detached == 1 {
            return background::pass_on();
        }
        // It is read again by a thread that has no working directory.
        let path = std::path::absolute(&self.config)?;
        let wrong = |error| CommandFailure::Usage(chain(&error));
        let text = config_file::read(&path).map_err(wrong)?;
        if config_file::is_of(DEVICES, DISKS, &path, &text).map_err(wrong)? {
            let file = DevicesFile::parse(&path, &text).map_err(wrong)?;
            return self.serve_devices(file);
        }
        let file = ConfigFile::parse(&path, &text).map_err(wrong)?;
        let start = Start {
            takeover: self.takeover.is_wanted(),
            takeover_from: self.takeover.from().map(Path::to_owned),
            takeover_within: self.takeover.within(),
            incoming: self.incoming,
            detached: self.detached > 0,
        };
        let wanted = file.wanted(start)?;
        if self.check {
            return Ok(EXIT_OK);
        }
        if self.daemonize {
            return background::start();
        }
        vhost_user::run(wanted)
    }

    fn serve_devices(self, file: DevicesFile) -> Result<u8, CommandFailure> {
        if self.incoming {
            let message = "--incoming with a file of devices, which have no guests that migrate; expected a file of [[disk]]";
            return Err(CommandFailure::Usage(message.to_owned()));
        }
        if self.check {
            return Ok(EXIT_OK);
        }
        let start = ublk::Start {
            takeover: self.takeover,
            daemonize: self.daemonize,
            detached: self.detached,
        };
        ublk::follow(file, start)
    }
}
