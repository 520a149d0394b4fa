//! Configuration of a device: its size, its transport of data, its workers, and the policy for I/O without a server.
//!
//! It has its own module because adding, recovering and handing over a device all read it. Invariant: nothing here talks to the
//! driver; a value out of range is refused before the first command.

use std::fmt;
use std::time::Duration;

use block::worker::WorkerConfig;

use super::abi::{Flags, IO_BYTES_MAX, QUEUE_DEPTH_MAX, QUEUES_MAX, REGISTERED_BUFFERS_MAX};
use super::channel::Transport;
use super::error::AddError;

/// The length in bytes from which on [`TransportChoice::Auto`] serves requests by their registered pages: every request. The
/// driver registers the pages of all of them, and a copy on top of that saves nothing: measured in
/// docs/decisions/zero-copy.md.
pub const ZERO_COPY_FROM: u32 = 0;

/// The requested transport of a device.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum TransportChoice {
    /// The best that the kernel has.
    #[default]
    Auto,
    /// This one, or an error.
    Only(Transport),
}

/// The policy for I/O while a device has no server.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Recovery {
    /// It waits for the next server, and what the old one had taken is done again.
    #[default]
    Reissue,
    /// It waits for the next server; what the old one had taken fails.
    Wait,
    /// It fails until there is a next server.
    Fail,
    /// The device goes with its server.
    Off,
}

impl Recovery {
    /// Returns the flags with which a device is created.
    #[must_use]
    pub fn flags(self) -> Flags {
        match self {
            Self::Reissue => Flags::USER_RECOVERY | Flags::USER_RECOVERY_REISSUE,
            Self::Wait => Flags::USER_RECOVERY,
            Self::Fail => Flags::USER_RECOVERY | Flags::USER_RECOVERY_FAIL_IO,
            Self::Off => Flags::empty(),
        }
    }

    /// Returns the policy of a device with these flags.
    #[must_use]
    pub fn of(flags: Flags) -> Self {
        if !flags.contains(Flags::USER_RECOVERY) {
            Self::Off
        } else if flags.contains(Flags::USER_RECOVERY_REISSUE) {
            Self::Reissue
        } else if flags.contains(Flags::USER_RECOVERY_FAIL_IO) {
            Self::Fail
        } else {
            Self::Wait
        }
    }
}

impl fmt::Display for Recovery {
    /// As `--recovery` has it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Reissue => "reissue",
            Self::Wait => "wait",
            Self::Fail => "fail",
            Self::Off => "off",
        })
    }
}

/// The configuration of a device.
#[derive(Clone, Debug)]
pub struct UblkConfig {
    /// The disk's name, for logs.
    pub name: String,
    /// The device's number; any if absent.
    pub id: Option<u32>,
    /// The number of queues, 1 to 4096. The driver makes no more than there are CPUs.
    pub num_queues: u16,
    /// The depth of each queue, 1 to 4096.
    pub queue_depth: u16,
    /// The most bytes a request moves: a power of two, 4 KiB to 32 MiB.
    pub io_bytes_max: u32,
    /// The transfer of request data.
    pub transport: TransportChoice,
    /// The length in bytes from which on [`TransportChoice::Auto`] serves requests without copies.
    pub zero_copy_from: u32,
    /// The most registered-buffer slots that a worker's ring has, up to 16384. Requests under tags for which
    /// none is left are copied.
    pub registered_buffers_max: u16,
    /// The policy for I/O after this server is gone.
    pub recovery: Recovery,
    /// The number of queues that share a worker thread; at least 1.
    pub queues_per_worker: u16,
    /// The settings of the queues' workers, in order; [`UblkConfig::default_worker`] for a queue without an entry. Queues
    /// that share a worker share their CPUs, and have the other settings of the first. A queue without CPUs has those whose
    /// requests come to it. The device sets name, ring, depth and registered buffers itself.
    pub workers: Vec<WorkerConfig>,
    /// True if the host scans for partitions. Leave it off for contents that a guest wrote.
    pub partitions: bool,
}

impl UblkConfig {
    /// Returns the settings of a worker that was given none. It does not poll: requests arrive as ring completions, which end
    /// the system call that submitted its answers, and the host's program that makes the next request may need the CPU.
    #[must_use]
    pub fn default_worker() -> WorkerConfig {
        WorkerConfig {
            poll_max: Duration::ZERO,
            ..WorkerConfig::default()
        }
    }
}

impl Default for UblkConfig {
    fn default() -> Self {
        Self {
            name: "disk".to_owned(),
            id: None,
            num_queues: 1,
            queue_depth: 128,
            io_bytes_max: 1 << 20,
            transport: TransportChoice::Auto,
            zero_copy_from: ZERO_COPY_FROM,
            registered_buffers_max: REGISTERED_BUFFERS_MAX,
            recovery: Recovery::Reissue,
            queues_per_worker: 1,
            workers: Vec::new(),
            partitions: false,
        }
    }
}

/// Checks the numbers of a configuration.
pub(super) fn check(config: &UblkConfig) -> Result<(), AddError> {
    let range = |what, found: u64, expected, fits: bool| {
        let error = AddError::Range {
            what,
            found,
            expected,
        };
        if fits { Ok(()) } else { Err(error) }
    };
    let (queues, depth, bytes) = (config.num_queues, config.queue_depth, config.io_bytes_max);
    let few = (1..=QUEUES_MAX).contains(&queues);
    range("the number of queues", queues.into(), "1 to 4096", few)?;
    let short = (1..=QUEUE_DEPTH_MAX).contains(&depth);
    range("the queue's depth", depth.into(), "1 to 4096", short)?;
    let small = bytes.is_power_of_two() && (4096..=IO_BYTES_MAX).contains(&bytes);
    let expected = "a power of two from 4096 to 33554432";
    range("the largest request", bytes.into(), expected, small)
}

/// Returns the number of registered-buffer slots that the ring of a worker with `tags` tags needs.
pub(super) fn registered_slots(tags: u32, config: &UblkConfig) -> u16 {
    let most = config.registered_buffers_max.min(REGISTERED_BUFFERS_MAX);
    u16::try_from(tags).unwrap_or(u16::MAX).min(most)
}

/// Returns the slot of the first tag of `queue` in the buffer table of its worker's ring, which `queues_per_worker` queues of
/// `depth` tags share.
#[must_use]
pub fn first_slot(queue: u16, queues_per_worker: u16, depth: u16) -> u16 {
    (queue % queues_per_worker.max(1)).saturating_mul(depth)
}

/// The transport that the driver's features and the choice come to.
pub(super) fn choose(choice: TransportChoice, features: Flags) -> Result<Transport, AddError> {
    let unsupported = |what, since| Err(AddError::Unsupported { what, since });
    match choice {
        TransportChoice::Auto => Ok(Transport::of(features)),
        TransportChoice::Only(transport) if features.contains(transport.flags()) => Ok(transport),
        TransportChoice::Only(Transport::ZeroCopy) => unsupported("zero copy", "Linux 6.16"),
        TransportChoice::Only(_) => unsupported("user copy", "Linux 6.5"),
    }
}
