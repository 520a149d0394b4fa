//! Commands to the driver's control device. Each is bounded in time; each error names the command, the device and a
//! remedy.
//!
//! [`ControlDevice`] executes commands on a ring of this process. The bound holds for the caller, but a command that
//! hangs in the kernel may keep its process from exiting. A program that must be able to exit has another process execute
//! its commands, behind the same seam, [`Carrier`].

#![expect(
    unsafe_code,
    reason = "hands the driver addresses of the buffers of its commands"
)]

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use block::AlignedBuf;
use block::ring::{ControlError, ControlRing};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::abi::{
    ANY_DEVICE, CONTROL_PATH, Command, ControlCommand, DeviceInfo, Flags, NO_QUEUE, Params, SECTOR_BYTES,
};

/// The longest time that the driver may take for a command that does not wait for others.
const PROMPT: Duration = Duration::from_secs(20);
/// The longest time that it may take for one that waits for a server's queues, or for requests to end.
const PATIENT: Duration = Duration::from_secs(60);
/// The time after which the log mentions that a deleted device is still open.
const LET_GO: Duration = Duration::from_secs(5);
/// The bytes of the set of CPUs that a queue's submitters run on: 8192 CPUs.
const CPU_SET_BYTES: usize = 1024;

/// An error of opening the control device.
#[derive(Debug, thiserror::Error)]
pub enum OpenControlError {
    /// There is none.
    #[error("there is no {CONTROL_PATH}: load the driver with `modprobe ublk_drv` (Linux 6.0 or later)")]
    NoDriver,
    /// We may not.
    #[error(
        "no permission to open {CONTROL_PATH}: run as root, or install the udev rules for users (docs/howto-ublk.md)"
    )]
    Permission,
    /// Something else.
    #[error("cannot open {CONTROL_PATH}")]
    Open(#[source] io::Error),
    /// The ring cannot be made.
    #[error(
        "io_uring is refused here, and ublk needs it (is kernel.io_uring_disabled set, or a seccomp filter in force?)"
    )]
    Ring(#[source] io::Error),
}

/// A command came to nothing.
#[derive(Debug, thiserror::Error)]
#[error("{}{} failed{}", command.name(), of(*device), advice(*command, source))]
pub struct CommandError {
    /// The command.
    pub command: Command,
    /// The device it was about.
    pub device: Option<u32>,
    /// The cause.
    #[source]
    pub source: ControlError,
}

impl CommandError {
    /// Returns the driver's error, if it answered.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        self.source.errno()
    }
}

fn of(device: Option<u32>) -> String {
    device.map_or_else(String::new, |id| format!(" of /dev/ublkb{id}"))
}

/// Returns advice for the user, in brackets.
fn advice(command: Command, error: &ControlError) -> &'static str {
    if let ControlError::Stuck(_) = error {
        return " (the kernel hangs: see its log, and restart the machine to be rid of the device)";
    }
    match (command, error.errno()) {
        (_, Some(libc::EPERM | libc::EACCES)) => " (run as root; or as its owner, whose /dev/ublkc… must be)",
        (Command::AddDev, Some(libc::EEXIST)) => " (the number is taken: see `ringdisk ublk list`)",
        (Command::AddDev, Some(libc::EINVAL)) => {
            " (the driver refuses a flag or a size: see `ringdisk ublk features`)"
        }
        (Command::AddDev, Some(libc::ENOSPC)) => " (there are too many devices)",
        (_, Some(libc::ENODEV)) => " (there is no such device: see `ringdisk ublk list`)",
        (Command::StartUserRecovery | Command::EndUserRecovery, Some(libc::EBUSY)) => {
            " (its server is still there, or has not ended yet)"
        }
        (Command::StartUserRecovery, Some(libc::EOPNOTSUPP)) => {
            " (it was made without recovery: delete it and add it again)"
        }
        (Command::TryStopDev, Some(libc::EBUSY)) => " (it is in use)",
        (Command::UpdateSize | Command::QuiesceDev | Command::TryStopDev, Some(libc::EOPNOTSUPP)) => {
            " (this kernel is too old for it)"
        }
        _ => "",
    }
}

/// A command, but for the bytes that it exchanges.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ControlCall {
    /// The command.
    pub command: Command,
    /// The device it is about.
    pub device: u32,
    /// Its number, if it takes one.
    pub data: u64,
    /// The length of the device's path, which comes first in its bytes.
    pub path_bytes: u16,
    /// The timeout for the driver.
    pub patience: Duration,
}

/// Executes commands.
pub trait Carrier: fmt::Debug + Send {
    /// Carries out one, which reads and writes the bytes of `buffer`. Returns the driver's answer, not negative, or the
    /// error: [`ControlError::Stuck`] when there is none in time.
    ///
    /// # Errors
    ///
    /// [`ControlError`]. After [`ControlError::Stuck`] there may be no other command.
    fn carry(&mut self, call: &ControlCall, buffer: &mut AlignedBuf) -> Result<i32, ControlError>;

    /// Carries out several that exchange no bytes, in any order and at once where it can, as long as none is stuck. The answers
    /// are in the order of `calls`.
    fn carry_all(&mut self, calls: &[ControlCall]) -> Vec<Result<i32, ControlError>> {
        let mut none = AlignedBuf::zeroed(0);
        calls.iter().map(|call| self.carry(call, &mut none)).collect()
    }
}

/// Opens the control device.
///
/// # Errors
///
/// [`OpenControlError`], which says what is missing.
pub fn open_control() -> Result<File, OpenControlError> {
    let file = OpenOptions::new().read(true).write(true).open(CONTROL_PATH);
    file.map_err(|error| match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENXIO | libc::ENODEV) => OpenControlError::NoDriver,
        Some(libc::EACCES | libc::EPERM) => OpenControlError::Permission,
        _ => OpenControlError::Open(error),
    })
}

/// Carries commands out by itself.
#[derive(Debug)]
pub struct ControlDevice {
    file: File,
    ring: ControlRing,
}

impl ControlDevice {
    /// Commands to `file`, which [`open_control`] has opened.
    ///
    /// # Errors
    ///
    /// [`OpenControlError::Ring`].
    pub fn new(file: File) -> Result<Self, OpenControlError> {
        let ring = ControlRing::new().map_err(OpenControlError::Ring)?;
        Ok(Self { file, ring })
    }
}

/// The data of a command's submission entry.
fn payload(call: &ControlCall, address: u64, len: usize) -> [u8; 80] {
    let fixed = ControlCommand {
        dev_id: call.device,
        queue_id: NO_QUEUE,
        addr: if len > 0 { address } else { 0 },
        // No buffer here is longer than a page.
        len: len as u16,
        data: call.data,
        dev_path_len: call.path_bytes,
        ..ControlCommand::default()
    };
    let mut bytes = [0; 80];
    let fixed = fixed.as_bytes();
    bytes[..fixed.len()].copy_from_slice(fixed);
    bytes
}

impl Carrier for ControlDevice {
    fn carry(&mut self, call: &ControlCall, buffer: &mut AlignedBuf) -> Result<i32, ControlError> {
        let len = buffer.len();
        let payload = |address: u64| payload(call, address, len);
        let code = call.command.code();
        // SAFETY: `addr` and `len` name all of `buffer` and nothing else, and no command of the driver touches
        // its buffer after it was answered.
        unsafe {
            self.ring
                .call(self.file.as_fd(), code, buffer, payload, call.patience)
        }
    }

    fn carry_all(&mut self, calls: &[ControlCall]) -> Vec<Result<i32, ControlError>> {
        let command = |call: &ControlCall| (call.command.code(), payload(call, 0, 0));
        let commands: Vec<_> = calls.iter().map(command).collect();
        let patience = calls.iter().map(|call| call.patience).max();
        // SAFETY: the commands have no buffers.
        unsafe {
            self.ring
                .call_all(self.file.as_fd(), &commands, patience.unwrap_or_default())
        }
    }
}

/// The driver's control device.
#[derive(Debug)]
pub struct Control {
    carrier: Box<dyn Carrier>,
    /// Devices of unprivileged users. Their commands pass the path of the character device, to which the caller needs
    /// access.
    by_path: BTreeSet<u32>,
}

impl Control {
    /// Opens it, to execute commands in this process.
    ///
    /// # Errors
    ///
    /// [`OpenControlError`], which says what is missing.
    pub fn open() -> Result<Self, OpenControlError> {
        Ok(Self::over(Box::new(ControlDevice::new(open_control()?)?)))
    }

    /// Opens it like [`Control::open`], with `carrier` to execute commands.
    #[must_use]
    pub fn over(carrier: Box<dyn Carrier>) -> Self {
        Self {
            carrier,
            by_path: BTreeSet::new(),
        }
    }

    fn call(
        &mut self,
        command: Command,
        device: u32,
        data: u64,
        buffer: &mut AlignedBuf,
        path_bytes: usize,
        patience: Duration,
    ) -> Result<i32, CommandError> {
        let call = ControlCall {
            command,
            device,
            data,
            path_bytes: path_bytes as u16,
            patience,
        };
        self.carrier.carry(&call, buffer).map_err(|source| CommandError {
            command,
            device: (device != ANY_DEVICE).then_some(device),
            source,
        })
    }

    /// Returns the start of a command's buffer: the path of its device, or nothing.
    fn path(&self, command: Command, device: u32) -> Vec<u8> {
        let wanted = match command {
            Command::GetDevInfo2 => true,
            Command::AddDev | Command::GetFeatures => false,
            _ => self.by_path.contains(&device),
        };
        if !wanted {
            return Vec::new();
        }
        let mut path = char_path(device).into_bytes();
        path.push(0);
        path
    }

    /// Takes note of how a device is to be commanded.
    fn meet(&mut self, info: DeviceInfo) -> DeviceInfo {
        if info.flags().contains(Flags::UNPRIVILEGED_DEV) {
            self.by_path.insert(info.dev_id);
        } else {
            self.by_path.remove(&info.dev_id);
        }
        info
    }

    /// A command without a buffer.
    fn plain(
        &mut self,
        command: Command,
        device: u32,
        data: u64,
        patience: Duration,
    ) -> Result<(), CommandError> {
        let path = self.path(command, device);
        let mut buffer = AlignedBuf::zeroed(path.len());
        buffer.copy_from_slice(&path);
        self.call(command, device, data, &mut buffer, path.len(), patience)
            .map(drop)
    }

    /// A command that exchanges one structure.
    fn exchange<T: FromBytes + IntoBytes + Immutable>(
        &mut self,
        command: Command,
        device: u32,
        value: &T,
    ) -> Result<T, CommandError> {
        let path = self.path(command, device);
        let mut buffer = AlignedBuf::zeroed(path.len() + size_of::<T>());
        let (front, back) = buffer.split_at_mut(path.len());
        front.copy_from_slice(&path);
        back.copy_from_slice(value.as_bytes());
        self.call(command, device, 0, &mut buffer, path.len(), PROMPT)?;
        let answer = T::read_from_bytes(&buffer[path.len()..]);
        answer.map_err(|_| CommandError {
            command,
            device: Some(device),
            source: ControlError::Ring(io::ErrorKind::InvalidData.into()),
        })
    }

    /// Returns the features of the driver. Drivers before 6.5 cannot report them; for these it returns those that all
    /// drivers have.
    ///
    /// # Errors
    ///
    /// [`CommandError`].
    pub fn features(&mut self) -> Result<Flags, CommandError> {
        match self.exchange(Command::GetFeatures, 0, &0u64) {
            Ok(bits) => Ok(Flags::from_bits_retain(bits)),
            Err(error) if matches!(error.errno(), Some(libc::EOPNOTSUPP | libc::EINVAL)) => {
                Ok(Flags::USER_RECOVERY | Flags::USER_RECOVERY_REISSUE)
            }
            Err(error) => Err(error),
        }
    }

    /// Makes a device, with the number in `wanted` or any. Returns what the driver made of it.
    ///
    /// # Errors
    ///
    /// [`CommandError`].
    pub fn add(&mut self, wanted: &DeviceInfo) -> Result<DeviceInfo, CommandError> {
        let made = self.exchange(Command::AddDev, wanted.dev_id, wanted)?;
        Ok(self.meet(made))
    }

    /// Returns the information of a device.
    ///
    /// # Errors
    ///
    /// [`CommandError`].
    pub fn info(&mut self, device: u32) -> Result<DeviceInfo, CommandError> {
        let info = self.exchange(Command::GetDevInfo2, device, &DeviceInfo::default())?;
        Ok(self.meet(info))
    }

    /// Says what the disk is like, and reads back what the driver took of it.
    ///
    /// # Errors
    ///
    /// [`CommandError`].
    pub fn set_params(&mut self, device: u32, params: &Params) -> Result<Params, CommandError> {
        self.exchange(Command::SetParams, device, params)?;
        self.params(device)
    }

    /// Returns the parameters of a device's disk.
    ///
    /// # Errors
    ///
    /// [`CommandError`].
    pub fn params(&mut self, device: u32) -> Result<Params, CommandError> {
        let asked = Params {
            len: size_of::<Params>() as u32,
            ..Params::default()
        };
        self.exchange(Command::GetParams, device, &asked)
    }

    /// The CPUs whose requests come to `queue`.
    ///
    /// # Errors
    ///
    /// [`CommandError`].
    pub fn queue_affinity(&mut self, device: u32, queue: u16) -> Result<Vec<usize>, CommandError> {
        let command = Command::GetQueueAffinity;
        let path = self.path(command, device);
        let mut buffer = AlignedBuf::zeroed(path.len() + CPU_SET_BYTES);
        buffer[..path.len()].copy_from_slice(&path);
        self.call(command, device, queue.into(), &mut buffer, path.len(), PROMPT)?;
        let bits = buffer[path.len()..].iter().enumerate().flat_map(|(index, byte)| {
            (0..8usize)
                .filter(move |bit| byte & 1 << bit != 0)
                .map(move |bit| index * 8 + bit)
        });
        Ok(bits.collect())
    }

    /// Makes the block device appear. Its queues must wait for requests, or do so soon; the driver reads the disk
    /// before it answers.
    ///
    /// # Errors
    ///
    /// [`CommandError`].
    pub fn start(&mut self, device: u32) -> Result<(), CommandError> {
        let pid = std::process::id().into();
        self.plain(Command::StartDev, device, pid, PATIENT)
    }

    /// Removes the block device. Its server answers the requests in flight, and its tags are aborted.
    ///
    /// # Errors
    ///
    /// [`CommandError`].
    pub fn stop(&mut self, device: u32) -> Result<(), CommandError> {
        self.plain(Command::StopDev, device, 0, PATIENT)
    }

    /// Removes block devices like [`Control::stop`], at once, because the driver mostly waits in each. The answers are in the
    /// order of `devices`: [`CommandError`] for each that failed.
    pub fn stop_all(&mut self, devices: &[u32]) -> Vec<Result<(), CommandError>> {
        self.plain_all(Command::StopDev, devices, 0)
    }

    /// Removes the block device like [`Control::stop`], unless a process has it open.
    ///
    /// # Errors
    ///
    /// [`CommandError`]: `EBUSY` if it is in use.
    pub fn try_stop(&mut self, device: u32) -> Result<(), CommandError> {
        self.plain(Command::TryStopDev, device, 0, PATIENT)
    }

    /// Removes a device. Waits until its server has released it, and for a moment until no process has it open: only
    /// then its number is free.
    ///
    /// # Errors
    ///
    /// [`CommandError`].
    pub fn delete(&mut self, device: u32) -> Result<(), CommandError> {
        let deleted = self.plain(Command::DelDevAsync, device, 0, PATIENT);
        self.wait_deleted(device, deleted)
    }

    /// Removes devices like [`Control::delete`], at once. The answers are in the order of `devices`: [`CommandError`] for each
    /// that failed.
    pub fn delete_all(&mut self, devices: &[u32]) -> Vec<Result<(), CommandError>> {
        let deleted = self.plain_all(Command::DelDevAsync, devices, 0);
        let each = deleted.into_iter().zip(devices);
        each.map(|(deleted, &device)| self.wait_deleted(device, deleted))
            .collect()
    }

    /// Waits for the end of a device whose removal was begun with the answer `deleted`.
    fn wait_deleted(&mut self, device: u32, deleted: Result<(), CommandError>) -> Result<(), CommandError> {
        match deleted {
            // An older driver knows only how to wait.
            Err(error) if matches!(error.errno(), Some(libc::EOPNOTSUPP | libc::EINVAL)) => {
                return self.plain(Command::DelDev, device, 0, PATIENT);
            }
            deleted => deleted?,
        }
        let deadline = Instant::now() + LET_GO;
        while self
            .exchange(Command::GetDevInfo, device, &DeviceInfo::default())
            .is_ok()
        {
            if Instant::now() > deadline {
                tracing::warn!(
                    device,
                    "the removed device is still open; its number stays in use until it is closed"
                );
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Changes the size of a disk that is served.
    ///
    /// # Errors
    ///
    /// [`CommandError`].
    pub fn update_size(&mut self, device: u32, size_bytes: u64) -> Result<(), CommandError> {
        self.plain(Command::UpdateSize, device, size_bytes / SECTOR_BYTES, PROMPT)
    }

    /// Lets nothing new come to the server of a device: it waits for the next one. What the server has it can still
    /// answer. The driver then waits up to `wait`, until each queue has a tag without a request.
    ///
    /// # Errors
    ///
    /// [`CommandError`]: `EBUSY` if requests were in flight until the timeout; new ones are held back in any case.
    pub fn quiesce(&mut self, device: u32, wait: Duration) -> Result<(), CommandError> {
        // Zero is for ever.
        let wait_ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX).max(1);
        self.plain(Command::QuiesceDev, device, wait_ms, PROMPT + wait)
    }

    /// Begins to serve a device whose server is gone, waiting at most `patience` for the driver to notice that.
    ///
    /// # Errors
    ///
    /// [`CommandError`]: `EBUSY` if the server is still there.
    pub fn start_recovery(&mut self, device: u32, patience: Duration) -> Result<(), CommandError> {
        let began = Instant::now();
        let mut pause = Duration::from_millis(1);
        loop {
            match self.plain(Command::StartUserRecovery, device, 0, PATIENT) {
                Err(error) if error.errno() == Some(libc::EBUSY) && began.elapsed() < patience => {
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(Duration::from_millis(200));
                }
                result => return result,
            }
        }
    }

    /// Lets I/O of devices flow to this process. Their queues must wait for requests, or do so soon. The answers are in
    /// the order of `devices`: [`CommandError`] for each that failed.
    pub fn end_recovery(&mut self, devices: &[u32]) -> Vec<Result<(), CommandError>> {
        self.plain_all(Command::EndUserRecovery, devices, std::process::id().into())
    }

    /// A command without a buffer to each of `devices`, at once. The answers are in their order.
    fn plain_all(&mut self, command: Command, devices: &[u32], data: u64) -> Vec<Result<(), CommandError>> {
        let call = |&device: &u32| ControlCall {
            command,
            device,
            data,
            path_bytes: 0,
            patience: PATIENT,
        };
        // The others pass a path, and so have a buffer.
        let together = devices.iter().filter(|device| !self.by_path.contains(device));
        let calls: Vec<ControlCall> = together.map(call).collect();
        let mut answers = self.carrier.carry_all(&calls).into_iter();
        let each = devices.iter().map(|&device| {
            if self.by_path.contains(&device) {
                return self.plain(command, device, data, PATIENT);
            }
            let lost = || Err(ControlError::Lost(io::ErrorKind::BrokenPipe.into()));
            let answer = answers.next().unwrap_or_else(lost);
            answer.map(drop).map_err(|source| CommandError {
                command,
                device: Some(device),
                source,
            })
        });
        each.collect()
    }
}

/// The path of a device's character device.
#[must_use]
pub fn char_path(device: u32) -> String {
    format!("/dev/ublkc{device}")
}

/// The path of a device's block device.
#[must_use]
pub fn block_path(device: u32) -> String {
    format!("/dev/ublkb{device}")
}
