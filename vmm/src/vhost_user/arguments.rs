//! The command line of `ringdisk vhost-user`.

use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;

use super::served::{Options, Place};
use super::wanted::{Disks, Places, Wanted, check_disks};
use super::workers::SharedWorkers;
use crate::disk_config::{RateLimitGroups, table_cache_bytes};
use crate::error::CommandFailure;
use crate::socket::{self, Access};
use crate::takeover::TakeoverArguments;
use crate::{background, disks, metrics};

#[derive(Args, Debug)]
pub(crate) struct VhostUserArguments {
    /// Unix socket to listen on; one for each --disk, in the same order
    ///
    /// Without --socket and --fd, the sockets are those that a service manager passes (LISTEN_FDS).
    #[arg(long, num_args = 1.., value_name = "PATH", conflicts_with = "fd")]
    socket: Vec<PathBuf>,
    /// Descriptor of a listening Unix socket, instead of --socket; one for each --disk, in the same order
    ///
    /// The file of the socket is left alone.
    #[arg(long, num_args = 1.., value_name = "NUMBER")]
    fd: Vec<RawFd>,
    /// Mode of the sockets, in octal [default: 600, or 660 with --socket-group]
    #[arg(long, value_name = "MODE")]
    socket_mode: Option<String>,
    /// Group of the sockets, a name or number, whose users may then connect
    #[arg(long, value_name = "GROUP")]
    socket_group: Option<String>,
    /// Disk: path=FILE and other key=value pairs
    #[arg(long, required_unless_present = "images", num_args = 1.., value_name = "KEY=VALUE,...")]
    disk: Vec<String>,
    /// Folder whose images `ringdisk ctl disk-add` may add as further disks, and where it may create their sockets
    ///
    /// The sandbox lets the server open all files there, at any depth. Without the sandbox any image can be added.
    #[arg(long, num_args = 1.., value_name = "FOLDER", requires = "control")]
    images: Vec<PathBuf>,
    /// Rate limits that several disks share: id=NAME with the bw_... and ops_... keys of --disk. A disk joins with
    /// rate_limit_group=NAME
    #[arg(long, num_args = 1.., value_name = "KEY=VALUE,...")]
    rate_limit_group: Vec<String>,
    /// Number of worker threads that the queues of all disks share, and the CPUs they run on: 4, 3@0-2 or 2@node0 2@node1
    ///
    /// For many disks, most of which are idle. By default each queue has a worker of its own, which is the fastest.
    #[arg(long, num_args = 1.., value_name = "NUMBER[@CPUS]")]
    workers: Vec<SharedWorkers>,
    /// Memory for the tables of all images together, such as 2G: those of idle disks make room for those of busy ones
    ///
    /// By default each image has what its l2_cache allows. For many images at least 256K each.
    #[arg(long, value_name = "SIZE", value_parser = table_cache_bytes)]
    table_cache: Option<u64>,
    /// Let guests continue with a new server if this one is killed
    ///
    /// Requests in flight are recorded in memory of the client, which must support inflight tracking and reconnect. A write
    /// is answered only when its mapping is in the image, so allocating writes wait for a flush. Overwrites and reads
    /// cost nothing extra.
    #[arg(long)]
    restartable: bool,
    #[command(flatten)]
    takeover: TakeoverArguments,
    /// Expect guests that migrate from another server of the same images
    ///
    /// Each image is opened when its guest begins to run here, and the other server has released it. Until then only its size and
    /// kind are looked at.
    #[arg(long, conflicts_with = "takeover")]
    incoming: bool,
    /// Control socket to create, for `ringdisk ctl`
    #[arg(long, value_name = "SOCKET")]
    control: Option<PathBuf>,
    /// Serve statistics for Prometheus at this address: unix:PATH, or 127.0.0.1:PORT
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<metrics::Address>,
    /// Tell the service manager (NOTIFY_SOCKET) at least twice in this many seconds that all workers work
    ///
    /// Without it as often as the manager asks for (WATCHDOG_USEC), which it does not ask a server that takes over.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=86400))]
    watchdog: Option<u32>,
    /// Write the process id to this file when clients can connect; it is removed at the end
    #[arg(long, value_name = "FILE")]
    pidfile: Option<PathBuf>,
    /// Drop every privilege that serving does not need, before the first client connects
    #[arg(long, value_name = "on|off", default_value = "on", value_parser = ["on", "off"])]
    sandbox: String,
    /// Continue in the background as soon as clients can connect; exits with 0 if they can
    #[arg(long)]
    daemonize: bool,
    /// Given once to the intermediate process of --daemonize, twice to the process that stays.
    #[arg(long, hide = true, action = clap::ArgAction::Count)]
    detached: u8,
}

impl VhostUserArguments {
    /// Serves.
    ///
    /// # Errors
    ///
    /// As [`super::run`], and if the command line is wrong.
    pub(crate) fn run(self) -> Result<u8, CommandFailure> {
        if self.detached == 1 {
            return background::pass_on();
        }
        let wanted = self.wanted(&socket::inherited::descriptors())?;
        if self.daemonize {
            return background::start();
        }
        super::run(wanted)
    }

    /// Returns what the server is to do; `passed` are the descriptors from a service manager.
    ///
    /// # Errors
    ///
    /// [`CommandFailure::Usage`].
    pub(crate) fn wanted(&self, passed: &[RawFd]) -> Result<Wanted, CommandFailure> {
        let groups = RateLimitGroups::parse(&self.rate_limit_group)?;
        let disks = disks::parse_own(&self.disk, &groups)?;
        // Those that are added later may join.
        if self.images.is_empty() {
            groups.check_joined()?;
        }
        let options = Options {
            restartable: self.restartable,
            takeover: self.takeover.is_wanted(),
            takeover_within: self.takeover.within(),
            incoming: self.incoming,
            watchdog: self.watchdog.map(|seconds| Duration::from_secs(seconds.into())),
            sandbox: self.sandbox == "on",
            table_cache_bytes: self.table_cache,
            detached: self.detached > 0,
            access: self.access()?,
        };
        let (places, option) = self.places(passed)?;
        if places.len() != disks.len() {
            return Err(CommandFailure::Usage(format!(
                "{} {option} for {} --disk; each disk needs its own socket",
                places.len(),
                disks.len()
            )));
        }
        let served = places.into_iter().zip(disks).collect::<Vec<_>>();
        check_disks(&served, self.control.as_deref(), &self.workers, options)?;
        Ok(Wanted {
            disks: Disks { served, groups },
            places: Places {
                control: self.control.clone(),
                takeover_from: self.takeover.from().map(Path::to_owned),
                metrics: self.metrics.clone(),
                pid_file: self.pidfile.clone(),
                images: self.images.clone(),
            },
            workers: self.workers.clone(),
            options,
            file: None,
        })
    }

    /// Returns the sockets of `ringdisk vhost-user`, and how they were given.
    fn places(&self, passed: &[RawFd]) -> Result<(Vec<Place>, &'static str), CommandFailure> {
        let descriptors = |given: &[RawFd]| given.iter().copied().map(Place::Descriptor).collect();
        if !self.fd.is_empty() {
            return Ok((descriptors(&self.fd), "--fd"));
        }
        if !self.socket.is_empty() {
            let places = self.socket.iter().cloned().map(Place::Path).collect();
            return Ok((places, "--socket"));
        }
        if passed.is_empty() && self.disk.is_empty() {
            return Ok((Vec::new(), "--socket"));
        }
        if passed.is_empty() {
            let wanted = "--socket is missing; expected a path for each --disk, --fd, or sockets of a service manager (LISTEN_FDS)";
            return Err(CommandFailure::Usage(wanted.to_owned()));
        }
        if self.daemonize {
            let wrong = "--daemonize with sockets of a service manager (LISTEN_FDS), which are for this process only; expected one of them";
            return Err(CommandFailure::Usage(wrong.to_owned()));
        }
        Ok((descriptors(passed), "sockets in LISTEN_FDS"))
    }

    /// Returns who may connect to the sockets of `ringdisk vhost-user`.
    fn access(&self) -> Result<Access, CommandFailure> {
        let (mode, group) = (self.socket_mode.as_deref(), self.socket_group.as_deref());
        if let (Some(_), [first, ..]) = (mode.or(group), &self.fd[..]) {
            return Err(CommandFailure::Usage(format!(
                "--socket-mode and --socket-group with --fd {first}: its file belongs to the process that created it; expected --socket"
            )));
        }
        Access::parse(mode, group).map_err(|error| CommandFailure::Usage(error.to_string()))
    }
}
