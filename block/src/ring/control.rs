//! Commands that set up a device, each with a timeout, and commands that are abandoned on purpose.
//!
//! They go through a small ring of their own, because they take submission entries of 128 bytes and may block in the
//! kernel without bound. A command that has not ended in time keeps its memory for ever, and its ring takes no other:
//! its effect on the device is then unknown.

#![expect(unsafe_code, reason = "the memory of a command is its caller's promise")]

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue};

use crate::buffer::AlignedBuf;

/// Error of a command.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The driver refused.
    #[error(transparent)]
    Refused(io::Error),
    /// The command has not ended in time.
    #[error("no answer in {} s", .0.as_secs())]
    Stuck(Duration),
    /// The ring failed, and not the command.
    #[error("io_uring failed")]
    Ring(#[source] io::Error),
    /// The executor of commands has ended.
    #[error("what carries out commands has ended")]
    Lost(#[source] io::Error),
}

impl ControlError {
    /// Returns the driver's error number, if the driver refused the command.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Refused(error) => error.raw_os_error(),
            _ => None,
        }
    }
}

/// The most commands that [`ControlRing::call_all`] has in the kernel at a time. Each occupies a kernel thread while it waits.
const TOGETHER_MAX: u32 = 32;

/// A ring for commands of a control device.
pub struct ControlRing {
    ring: IoUring<squeue::Entry128, cqueue::Entry>,
    /// Set when a command did not end in time.
    stuck: Option<Duration>,
    /// The number of the last command.
    number: u64,
}

impl fmt::Debug for ControlRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ControlRing")
            .field("stuck", &self.stuck)
            .finish_non_exhaustive()
    }
}

impl ControlRing {
    /// Makes a ring.
    ///
    /// # Errors
    ///
    /// If the kernel refuses io_uring, or has none with entries of 128 bytes (Linux 5.19).
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            ring: IoUring::builder().build(TOGETHER_MAX)?,
            stuck: None,
            number: 0,
        })
    }

    /// Submits command `code` of `file`'s driver and waits for its end. `data` makes the command's data from the
    /// address of `buffer`, whose bytes the driver may read and write. Returns the driver's answer, not negative.
    ///
    /// # Errors
    ///
    /// [`ControlError`]. After [`ControlError::Stuck`] the ring takes no other command, and `buffer` is empty.
    ///
    /// # Safety
    ///
    /// The command may make the driver read and write memory of `buffer` only, and only until it has ended.
    pub unsafe fn call(
        &mut self,
        file: BorrowedFd<'_>,
        code: u32,
        buffer: &mut AlignedBuf,
        data: impl FnOnce(u64) -> [u8; 80],
        timeout: Duration,
    ) -> Result<i32, ControlError> {
        if let Some(timeout) = self.stuck {
            return Err(ControlError::Stuck(timeout));
        }
        let data = data(buffer.as_mut_ptr().addr() as u64);
        // SAFETY: the memory the command names is `buffer`'s (the caller's contract), which is borrowed until this
        // returns; if the command has not ended by then, it is leaked below.
        let pushed = unsafe { self.push(file, code, data) };
        let answer = pushed.and_then(|()| self.wait(1, timeout).remove(0));
        if self.stuck.is_some() {
            Box::leak(Box::new(std::mem::replace(buffer, AlignedBuf::zeroed(0))));
        }
        answer
    }

    /// Submits commands of `file`'s driver, each a code and its data, and waits for their ends. Several at a time are in the
    /// kernel, which may execute them in any order and at once. Returns the driver's answers, not negative, in the order of
    /// `commands`, or [`ControlError`] for each that failed. After [`ControlError::Stuck`] the ring takes no other command.
    ///
    /// # Safety
    ///
    /// The commands must not make the driver touch memory.
    pub unsafe fn call_all(
        &mut self,
        file: BorrowedFd<'_>,
        commands: &[(u32, [u8; 80])],
        timeout: Duration,
    ) -> Vec<Result<i32, ControlError>> {
        let mut answers = Vec::with_capacity(commands.len());
        for commands in commands.chunks(TOGETHER_MAX as usize) {
            if let Some(timeout) = self.stuck {
                answers.extend(commands.iter().map(|_| Err(ControlError::Stuck(timeout))));
                continue;
            }
            // SAFETY: the commands name no memory (the caller's contract).
            let push = |&(code, data): &(u32, [u8; 80])| unsafe { self.push(file, code, data) };
            let pushed: Vec<_> = commands.iter().map(push).collect();
            let count = pushed.iter().filter(|pushed| pushed.is_ok()).count();
            let mut ended = self.wait(count, timeout).into_iter();
            let lost = || Err(ControlError::Ring(io::ErrorKind::WouldBlock.into()));
            answers.extend(
                pushed
                    .into_iter()
                    .map(|pushed| pushed.and_then(|()| ended.next().unwrap_or_else(lost))),
            );
        }
        answers
    }

    /// Queues a command under the next number.
    ///
    /// # Errors
    ///
    /// [`ControlError::Ring`] if the queue is full.
    ///
    /// # Safety
    ///
    /// The memory that the command names must be valid for what its driver does until it has ended.
    unsafe fn push(&mut self, file: BorrowedFd<'_>, code: u32, data: [u8; 80]) -> Result<(), ControlError> {
        let entry = opcode::UringCmd80::new(Fd(file.as_raw_fd()), code)
            .cmd(data)
            .build()
            .user_data(self.number + 1);
        // SAFETY: by the contract of this function.
        unsafe { self.ring.submission().push(&entry) }
            .map_err(|_| ControlError::Ring(io::ErrorKind::WouldBlock.into()))?;
        self.number += 1;
        Ok(())
    }

    /// Submits the `count` commands that were pushed last and waits for their ends. Returns the answers in their order.
    fn wait(&mut self, count: usize, timeout: Duration) -> Vec<Result<i32, ControlError>> {
        let deadline = std::time::Instant::now() + timeout;
        let first = self.number + 1 - count as u64;
        let mut ended = vec![None; count];
        let mut failure = None;
        loop {
            for entry in self.ring.completion() {
                let index = entry.user_data().checked_sub(first);
                let index = index.and_then(|index| usize::try_from(index).ok());
                // A command that was stuck has no place here.
                if let Some(ended) = index.and_then(|index| ended.get_mut(index)) {
                    *ended = Some(entry.result());
                }
            }
            let left = deadline.saturating_duration_since(std::time::Instant::now());
            if left.is_zero() || ended.iter().all(Option::is_some) {
                break;
            }
            let time = Timespec::from(left);
            match self
                .ring
                .submitter()
                .submit_with_args(1, &SubmitArgs::new().timespec(&time))
            {
                Ok(_) => {}
                Err(error) if matches!(error.raw_os_error(), Some(libc::ETIME | libc::EINTR)) => {}
                Err(error) => {
                    failure = error.raw_os_error();
                    break;
                }
            }
        }
        if ended.iter().any(Option::is_none) {
            self.stuck = Some(timeout);
        }
        let answer = |ended| match (ended, failure) {
            (Some(errno @ ..0), _) => {
                let errno = i32::saturating_neg(errno);
                Err(ControlError::Refused(io::Error::from_raw_os_error(errno)))
            }
            (Some(answer), _) => Ok(answer),
            (None, Some(errno)) => Err(ControlError::Ring(io::Error::from_raw_os_error(errno))),
            (None, None) => Err(ControlError::Stuck(timeout)),
        };
        ended.into_iter().map(answer).collect()
    }
}

/// Starts commands `code` of `file`'s driver on a thread that ends at once, and with it the commands. Those of a group
/// are started together: no signal comes between them. Returns the number of commands of each group that have waited.
///
/// State that the driver ties to the waiting thread then belongs to a thread that has ended.
///
/// # Errors
///
/// If the thread or its ring cannot be made, or the ring fails.
///
/// # Safety
///
/// The commands must not make the driver touch memory.
pub unsafe fn start_and_end(file: OwnedFd, code: u32, groups: Vec<Vec<[u8; 16]>>) -> io::Result<Vec<usize>> {
    let short_lived = move || {
        let longest = groups.iter().map(Vec::len).max().unwrap_or(0).max(1);
        let entries = u32::try_from(longest.next_power_of_two());
        let mut ring = IoUring::new(entries.map_err(|_| io::ErrorKind::InvalidInput)?)?;
        let mut waiting = Vec::with_capacity(groups.len());
        for group in &groups {
            for &data in group {
                let entry = opcode::UringCmd16::new(Fd(file.as_raw_fd()), code).cmd(data);
                // SAFETY: the command touches no memory (the caller's contract).
                unsafe { ring.submission().push(&entry.build()) }
                    .map_err(|_| io::Error::from(io::ErrorKind::WouldBlock))?;
            }
            let mut started = 0;
            while started < group.len() {
                started += ring.submit()?;
            }
            // A completion of an earlier group can only lower the count.
            waiting.push(group.len().saturating_sub(ring.completion().count()));
        }
        Ok(waiting)
    };
    let thread = std::thread::Builder::new().name("short-lived".to_owned());
    let ended = thread.spawn(short_lived)?.join();
    ended.unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn start_and_end_reports_no_waits_for_unknown_commands() {
        let file = tempfile::tempfile().expect("a file");
        let groups = vec![vec![[0; 16]; 3], Vec::new(), vec![[0; 16]; 128]];
        // SAFETY: a file carries out no command.
        let waited = unsafe { start_and_end(file.into(), 7, groups) }.expect("these tests need io_uring");
        assert_eq!(waited, [0, 0, 0]);
    }

    #[test]
    fn control_ring_reports_unknown_command_as_unsupported() {
        let file = tempfile::tempfile().expect("a file");
        let mut ring = ControlRing::new().expect("these tests need io_uring");
        let mut buffer = AlignedBuf::zeroed(64);
        for _ in 0..5 {
            // SAFETY: the command names no memory.
            let answer =
                unsafe { ring.call(file.as_fd(), 7, &mut buffer, |_| [0; 80], Duration::from_secs(5)) };
            let error = answer.expect_err("a file has no commands");
            assert_eq!(error.errno(), Some(libc::EOPNOTSUPP), "{error}");
        }
        assert_eq!(buffer.len(), 64);
    }

    #[test]
    fn call_all_answers_each_command_past_the_ring_s_room() {
        let file = tempfile::tempfile().expect("a file");
        let mut ring = ControlRing::new().expect("these tests need io_uring");
        for count in [0, 1, TOGETHER_MAX as usize, 2 * TOGETHER_MAX as usize + 1] {
            let commands = vec![(7, [0; 80]); count];
            // SAFETY: a file carries out no command.
            let answers = unsafe { ring.call_all(file.as_fd(), &commands, Duration::from_secs(5)) };
            let errnos: Vec<_> = answers
                .iter()
                .map(|answer| answer.as_ref().err().and_then(ControlError::errno))
                .collect();
            assert_eq!(errnos, vec![Some(libc::EOPNOTSUPP); count]);
        }
    }
}
