//! Handing a device over to another process while it is in use: an orderly end here, and a recovery there.
//!
//! The driver releases a server only when its process exits. So this process completes its part: its requests are answered,
//! or kept for the next server to repeat, the disk is closed cleanly, and then the process exits with its rings as they are.
//! Closing them earlier gains nothing, and harms drivers before 6.15: their cancelling races with requests that are
//! on their way to the ring.
//!
//! Invariants: once [`UblkDevice::drain_and_close`] has returned, no request of the driver reaches the disk any more. No request fails
//! because of the hand-over: if the driver can hold requests back, those that it has sent are answered; if not, unanswered
//! ones are repeated by the next server, which needs [`Recovery::Reissue`].

use std::sync::Arc;
use std::time::{Duration, Instant};

use block::IoError;
use block::worker::WorkerGone;

use super::super::abi::Flags;
use super::super::config::Recovery;
use super::super::control::{CommandError, Control};
use super::super::error::DRAIN;
use super::super::queue_state::Duty;
use super::UblkDevice;

/// The time that the driver may wait for a tag without a request. The exit of the process frees all tags anyway.
const QUIESCE: Duration = Duration::from_millis(1);

/// An error of handing a device over to another process.
#[derive(Debug, thiserror::Error)]
pub enum HandOverError {
    /// I/O would fail meanwhile.
    #[error("/dev/ublkb{device} {why}")]
    Refused {
        /// The device.
        device: u32,
        /// The reason.
        why: &'static str,
    },
    /// The driver refused a command.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// Requests do not end.
    #[error("the disk of /dev/ublkb{device} has not answered all requests in {:.1} s", waited.as_secs_f64())]
    Undrained {
        /// The device.
        device: u32,
        /// The time that was waited for them.
        waited: Duration,
    },
    /// A worker has ended.
    #[error(transparent)]
    Worker(#[from] WorkerGone),
    /// The disk says so.
    #[error("cannot close the disk of /dev/ublkb{device} cleanly")]
    Disk {
        /// The device.
        device: u32,
        /// The cause.
        #[source]
        source: IoError,
    },
}

impl Recovery {
    /// Returns the reason why a device with these flags cannot change servers without an error, if there is one.
    #[must_use]
    pub fn obstacle(flags: Flags) -> Option<&'static str> {
        match Self::of(flags) {
            Self::Off => Some("was made with --recovery off: it cannot outlive its server"),
            Self::Fail => Some("was made with --recovery fail: I/O fails while it has no server"),
            Self::Wait if !flags.contains(Flags::QUIESCE) => Some(
                "was made with --recovery wait: before Linux 6.16, requests in flight fail when the server changes",
            ),
            Self::Wait | Self::Reissue => None,
        }
    }
}

/// Returns the duty of the queues of a device with these flags while its server hands over. If the driver cannot hold
/// requests back, the queues keep new ones, because draining would never end.
#[must_use]
pub fn parting_duty(flags: Flags) -> Duty {
    match Recovery::of(flags) {
        _ if !flags.contains(Flags::QUIESCE) => Duty::Keep,
        Recovery::Reissue => Duty::FinishWell,
        _ => Duty::Finish,
    }
}

/// The next step for queues whose server hands over.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Step {
    /// Let their workers make another round.
    Wait,
    /// Have all of them keep what comes, and let their workers make another round.
    Keep,
    /// Close the disk: nothing of theirs reaches it any more.
    Close,
}

/// The progress of queues whose server hands over: each takes its [`parting_duty`], finishes its requests, and then
/// keeps the rest.
#[derive(Debug, Default)]
pub struct HandOverProgress {
    quiet_rounds: u32,
    keeps: bool,
}

impl HandOverProgress {
    /// Requests that the driver sent before it was told to stop arrive within one whole round. Such a round lies
    /// between two commands to a worker.
    const QUIET_ROUNDS: u32 = 3;

    /// Every worker was given a command between two of its rounds; after that, no queue had anything
    /// [unfinished](super::super::queue_state::QueueState::unfinished), or one had.
    pub fn after_round(&mut self, finished: bool) -> Step {
        self.quiet_rounds = if finished { self.quiet_rounds + 1 } else { 0 };
        if self.quiet_rounds < Self::QUIET_ROUNDS {
            return Step::Wait;
        }
        self.quiet_rounds = 0;
        match std::mem::replace(&mut self.keeps, true) {
            // Whatever still comes is not for this disk.
            false => Step::Keep,
            true => Step::Close,
        }
    }
}

impl UblkDevice {
    /// Begins to hand the device over: from now on there is less and less to do. There is no way back but the end of
    /// this process, and a successor.
    ///
    /// # Errors
    ///
    /// [`HandOverError`]; nothing has changed then.
    pub fn retire(&self, control: &mut Control) -> Result<(), HandOverError> {
        let (device, flags) = (self.info.dev_id, self.info.flags());
        if let Some(why) = Recovery::obstacle(flags) {
            return Err(HandOverError::Refused { device, why });
        }
        if flags.contains(Flags::QUIESCE) {
            match control.quiesce(device, QUIESCE) {
                // Nothing new comes all the same.
                Err(error) if error.errno() == Some(libc::EBUSY) => {}
                quiesced => quiesced?,
            }
        }
        self.set_duty(parting_duty(flags))
    }

    /// Waits until the disk has answered, for no longer than `patience`, and closes it as a clean shutdown should. Comes after
    /// [`UblkDevice::retire`]; all that can follow is the end of this process. The disk's lock is held until then.
    ///
    /// # Errors
    ///
    /// [`HandOverError`]. The device is to be recovered then as after a kill.
    pub fn drain_and_close(&self, patience: Duration) -> Result<(), HandOverError> {
        let device = self.info.dev_id;
        // Whoever waits for the host's space would wait for ever.
        let _held = self.disk.hold_off();
        let begun = Instant::now();
        let mut progress = HandOverProgress::default();
        loop {
            let waited = begun.elapsed();
            if waited > patience.min(DRAIN) {
                return Err(HandOverError::Undrained { device, waited });
            }
            for worker in &self.workers {
                worker.run(|_| ())?;
            }
            let finished = |queue: &super::Queue| queue.state.unfinished() == Some(0);
            let finished = self.queues.iter().all(finished);
            match progress.after_round(finished) {
                Step::Wait if finished => {}
                Step::Wait => std::thread::sleep(Duration::from_micros(200)),
                Step::Keep => self.set_duty(Duty::Keep)?,
                Step::Close => break,
            }
        }
        let disk = Arc::clone(&self.disk);
        if let Some(worker) = self.workers.first() {
            let closed = worker.block_on(move |cx| disk.close(cx))?;
            closed.map_err(|source| HandOverError::Disk { device, source })?;
        }
        Ok(())
    }

    /// Changes the queues' duty, between two rounds of their workers: when this returns, no queue acts by the old
    /// one.
    fn set_duty(&self, duty: Duty) -> Result<(), HandOverError> {
        for queue in &self.queues {
            let state = Arc::clone(&queue.state);
            self.workers[queue.worker].run(move |_| state.set_duty(duty))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three quiet rounds of finishing, then three of keeping; then the disk is closed.
    #[test]
    fn hand_over_progress_needs_three_quiet_rounds_per_phase() {
        let mut progress = HandOverProgress::default();
        let mut steps = |rounds: &[bool]| -> Vec<Step> {
            let step = |&finished: &bool| progress.after_round(finished);
            rounds.iter().map(step).collect()
        };
        use Step::{Close, Keep, Wait};
        assert_eq!(steps(&[true, true, false, true, true]), [Wait; 5]);
        assert_eq!(steps(&[true]), [Keep]);
        assert_eq!(steps(&[false, true, true, false, true, true]), [Wait; 6]);
        assert_eq!(steps(&[true]), [Close]);
    }

    /// Requests that cannot be repeated are always finished. A driver that keeps sending has its requests kept.
    #[test]
    fn parting_duty_follows_recovery_and_quiesce() {
        for (recovery, quiesce, duty) in [
            (Recovery::Reissue, Flags::empty(), Some(Duty::Keep)),
            (Recovery::Reissue, Flags::QUIESCE, Some(Duty::FinishWell)),
            (Recovery::Wait, Flags::QUIESCE, Some(Duty::Finish)),
            (Recovery::Wait, Flags::empty(), None),
            (Recovery::Fail, Flags::QUIESCE, None),
            (Recovery::Off, Flags::QUIESCE, None),
        ] {
            let flags = recovery.flags() | quiesce;
            let refused = Recovery::obstacle(flags);
            assert_eq!(refused.is_some(), duty.is_none(), "{recovery:?} {quiesce:?}");
            assert!(
                duty.is_none_or(|duty| parting_duty(flags) == duty),
                "{recovery:?}"
            );
        }
    }
}
