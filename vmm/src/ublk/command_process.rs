//! Driver commands, executed by a second process.
//!
//! A command that hangs in the kernel also keeps its process from exiting, and some kernels hang. So a second process of
//! this program executes all commands, one at a time or several together, which it receives over a socket. If an answer
//! does not come in time, the first process reports that and exits. The second one exits when its socket is closed, or
//! when the kernel lets it.
//!
//! Invariants: every wait for the second process is bounded, also the one for its exit. It has nothing open but the control
//! device and the socket, because others would wait for anything else.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use block::AlignedBuf;
use block::ring::ControlError;
use virtio_devices::ublk::abi;
use virtio_devices::ublk::{Carrier, Control, ControlCall, ControlDevice, OpenControlError, open_control};

use super::priority;
use crate::error::{CommandFailure, EXIT_OK};
use crate::sandbox::Task;
use crate::signals::StopSignals;

/// The extra time that the process gets beyond the driver's limit: it starts up first, and bounds the command itself.
const GRACE: Duration = Duration::from_secs(5);
/// The most bytes that a command exchanges.
const BYTES_MAX: usize = 4096;
/// The most commands that are executed together.
const TOGETHER_MAX: usize = 64;

/// Result codes of a command, on the socket.
const ANSWERED: u32 = 0;
const REFUSED: u32 = 1;
const STUCK: u32 = 2;
const FAILED: u32 = 3;

/// Opens the control device, for commands that another process executes.
///
/// # Errors
///
/// The missing feature, or the reason why no process can be started.
pub(super) fn control() -> Result<Control, CommandFailure> {
    let failed = |error: OpenControlError| CommandFailure::Failed(error.into());
    let file = open_control().map_err(failed)?;
    let again = |error| CommandFailure::about("cannot start a process for commands to the driver", error);
    // Says what is wrong with io_uring here, if anything is.
    ControlDevice::new(file.try_clone().map_err(again)?).map_err(failed)?;
    let process = CommandProcess::start(program(), file).map_err(again)?;
    Ok(Control::over(Box::new(process)))
}

/// This program, as the second process. Its file may have been replaced meanwhile, so it is not looked up by name.
fn program() -> Command {
    let mut program = Command::new("/proc/self/exe");
    program.arg0("ringdisk").args(["ublk", "commands"]);
    program
}

/// Writes back the host's page cache, for at most `patience`: disks may hang, and a process that waits for them in
/// the kernel cannot exit. Returns `false` if the timeout expires.
///
/// # Errors
///
/// If there cannot be another process.
pub(super) fn sync(patience: Duration) -> io::Result<bool> {
    let null = Stdio::null;
    let child = program()
        .arg("--sync")
        .stdin(null())
        .stdout(null())
        .stderr(null())
        .spawn()?;
    Ok(ends_until(child, Instant::now() + patience))
}

/// Waits for the end of a process on a thread of its own, so that it does not stay as a zombie. Who is confined cannot wait for
/// processes; there they stay until its own end.
fn reap(mut child: Child) {
    let wait = move || drop(child.wait());
    if let Err(error) = std::thread::Builder::new().name("reaper".to_owned()).spawn(wait) {
        tracing::debug!(%error, "cannot wait for the command process");
    }
}

/// Waits for the good end of a process.
fn ends_until(mut child: Child, until: Instant) -> bool {
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return status.success(),
            Ok(None) if Instant::now() < until => std::thread::sleep(Duration::from_millis(2)),
            _ => {
                reap(child);
                return false;
            }
        }
    }
}

/// The second process, as the first one sees it.
#[derive(Debug)]
struct CommandProcess {
    program: Command,
    /// For the next one, if this one is killed.
    file: File,
    child: Option<Child>,
    socket: UnixStream,
    /// Set when a command had no answer.
    stuck: Option<Duration>,
    grace: Duration,
}

impl CommandProcess {
    /// Starts `program`, which finds the control device in its standard input and the socket in its output.
    fn start(mut program: Command, file: File) -> io::Result<Self> {
        let (child, socket) = spawn(&mut program, &file)?;
        Ok(Self {
            program,
            file,
            child: Some(child),
            socket,
            stuck: None,
            grace: GRACE,
        })
    }

    /// The second process's number.
    fn process(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// Waits for the next answer.
    fn receive_answer(&mut self, patience: Duration) -> io::Result<Answer> {
        let deadline = Instant::now() + patience + self.grace;
        let mut head = [0; 12];
        read_until(&mut self.socket, &mut head, deadline)?;
        let [kind, value, bytes] = words(&head);
        let mut back = vec![0; (bytes as usize).min(BYTES_MAX)];
        read_until(&mut self.socket, &mut back, deadline)?;
        Ok(Answer {
            kind,
            value: value.cast_signed(),
            bytes: back,
        })
    }
}

/// The answer of the command process.
struct Answer {
    kind: u32,
    value: i32,
    bytes: Vec<u8>,
}

impl CommandProcess {
    /// Converts an answer, or its absence, to a result.
    fn judge(
        &mut self,
        answer: io::Result<Answer>,
        patience: Duration,
        buffer: &mut AlignedBuf,
    ) -> Result<i32, ControlError> {
        let error = match answer {
            Ok(answer) if answer.kind == ANSWERED && answer.bytes.len() == buffer.len() => {
                buffer.copy_from_slice(&answer.bytes);
                return Ok(answer.value);
            }
            Ok(answer) if answer.kind == REFUSED => {
                return Err(ControlError::Refused(io::Error::from_raw_os_error(answer.value)));
            }
            Ok(answer) if answer.kind == FAILED => {
                return Err(ControlError::Ring(io::Error::from_raw_os_error(answer.value)));
            }
            Ok(answer) if answer.kind == STUCK => io::ErrorKind::TimedOut.into(),
            Ok(_) => io::ErrorKind::InvalidData.into(),
            Err(error) => error,
        };
        if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) {
            self.stuck = Some(patience);
            return Err(ControlError::Stuck(patience));
        }
        // Somebody has killed it; what became of the command is not known. The next one has another process.
        if let Ok((child, socket)) = spawn(&mut self.program, &self.file) {
            self.child.replace(child).into_iter().for_each(reap);
            self.socket = socket;
        }
        Err(ControlError::Lost(error))
    }
}

impl Carrier for CommandProcess {
    fn carry(&mut self, call: &ControlCall, buffer: &mut AlignedBuf) -> Result<i32, ControlError> {
        if let Some(patience) = self.stuck {
            return Err(ControlError::Stuck(patience));
        }
        let asked = self.socket.write_all(&encode(call, buffer));
        let answer = asked.and_then(|()| self.receive_answer(call.patience));
        self.judge(answer, call.patience, buffer)
    }

    fn carry_all(&mut self, calls: &[ControlCall]) -> Vec<Result<i32, ControlError>> {
        let mut none = AlignedBuf::zeroed(0);
        let mut answers = Vec::with_capacity(calls.len());
        for calls in calls.chunks(TOGETHER_MAX) {
            if let Some(patience) = self.stuck {
                answers.extend(calls.iter().map(|_| Err(ControlError::Stuck(patience))));
                continue;
            }
            let process = self.process();
            let behind = (0..calls.len()).rev();
            let asked: Vec<u8> = calls
                .iter()
                .zip(behind)
                .flat_map(|(call, behind)| encode_with(call, &[], behind as u32))
                .collect();
            let mut asked = self.socket.write_all(&asked);
            let mut is_silent = false;
            for call in calls {
                let answer = match std::mem::replace(&mut asked, Ok(())) {
                    // What became of the others is not known either.
                    Ok(()) if self.process() != process => {
                        answers.push(Err(ControlError::Lost(io::ErrorKind::BrokenPipe.into())));
                        continue;
                    }
                    // Behind an answer that has not come there is none.
                    Ok(()) if is_silent => Err(io::ErrorKind::TimedOut.into()),
                    Ok(()) => self.receive_answer(call.patience),
                    Err(error) => Err(error),
                };
                is_silent |= answer.is_err();
                answers.push(self.judge(answer, call.patience, &mut none));
            }
        }
        answers
    }
}

impl Drop for CommandProcess {
    fn drop(&mut self) {
        // It ends by itself when the socket is closed. One that is stuck ends when the kernel lets it.
        let Some(mut child) = self.child.take() else {
            return;
        };
        if self.stuck.is_some()
            && let Err(error) = child.kill()
        {
            tracing::debug!(%error, "cannot kill the command process");
        }
        reap(child);
    }
}

fn spawn(program: &mut Command, file: &File) -> io::Result<(Child, UnixStream)> {
    let (socket, other) = UnixStream::pair()?;
    socket.set_write_timeout(Some(GRACE))?;
    let child = program
        .stdin(file.try_clone()?)
        .stdout(OwnedFd::from(other))
        .stderr(Stdio::null())
        .spawn()?;
    // The other end is to be the process's alone, or its end would not show.
    program.stdin(Stdio::null()).stdout(Stdio::null());
    Ok((child, socket))
}

fn words<const N: usize>(bytes: &[u8]) -> [u32; N] {
    let mut words = [0; N];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(4)) {
        *word = u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    }
    words
}

/// A command on the socket that is executed alone: eight words and its bytes.
fn encode(call: &ControlCall, bytes: &[u8]) -> Vec<u8> {
    encode_with(call, bytes, 0)
}

/// As [`encode`], for a command that is executed together with so many `behind` it.
fn encode_with(call: &ControlCall, bytes: &[u8], behind: u32) -> Vec<u8> {
    let patience = u32::try_from(call.patience.as_millis()).unwrap_or(u32::MAX);
    let (low, high) = (call.data as u32, (call.data >> 32) as u32);
    let words = [
        call.command.code(),
        call.device,
        low,
        high,
        patience,
        call.path_bytes.into(),
        bytes.len() as u32,
        behind,
    ];
    let mut message: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    message.extend_from_slice(bytes);
    message
}

/// Fills `bytes`, or says that it took too long.
fn read_until(socket: &mut UnixStream, bytes: &mut [u8], deadline: Instant) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        socket.set_read_timeout(Some(left))?;
        match socket.read(&mut bytes[done..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => done += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// `ringdisk ublk commands`: the second process. Carries out what it is asked until the socket is closed, or writes what
/// the host keeps in memory.
///
/// # Errors
///
/// If it was not started by ringdisk.
pub(super) fn serve(sync: bool) -> Result<u8, CommandFailure> {
    if sync {
        rustix::fs::sync();
        return Ok(EXIT_OK);
    }
    let failed = |error: io::Error| CommandFailure::about("this command is internal to ringdisk", error);
    // What stops the first process, such as a key, may reach this one too, which is needed then.
    StopSignals::block().map_err(failed)?;
    priority::raise();
    let file = io::stdin().as_fd().try_clone_to_owned().map_err(failed)?;
    let socket = io::stdout().as_fd().try_clone_to_owned().map_err(failed)?;
    let mut device = ControlDevice::new(file.into()).map_err(|error| CommandFailure::Failed(error.into()))?;
    // As its server is, from when that has devices on; it has nothing to lose either way.
    if let Err(error) = crate::sandbox::confine_thread(Task::UblkControl) {
        tracing::debug!(%error, "the command process is not confined");
    }
    // The end of the socket is the end of this process.
    serve_on(UnixStream::from(socket), &mut device).unwrap_or_default();
    Ok(EXIT_OK)
}

/// Carries out commands until the socket ends.
fn serve_on(mut socket: UnixStream, device: &mut dyn Carrier) -> io::Result<()> {
    loop {
        let mut asked = read_call(&mut socket)?;
        if asked.behind == 0 {
            let answer = match &asked.call {
                Some(call) => device.carry(call, &mut asked.buffer),
                None => Err(ControlError::Refused(io::Error::from_raw_os_error(
                    libc::EOPNOTSUPP,
                ))),
            };
            socket.write_all(&encode_answer(&answer, &asked.buffer))?;
            continue;
        }
        let mut calls: Vec<ControlCall> = asked.call.into_iter().collect();
        for _ in 0..asked.behind.min(TOGETHER_MAX as u32) {
            calls.extend(read_call(&mut socket)?.call);
        }
        for answer in device.carry_all(&calls) {
            socket.write_all(&encode_answer(&answer, &[]))?;
        }
    }
}

/// A command that was read from the socket.
struct Asked {
    /// `None` for one that this program does not know.
    call: Option<ControlCall>,
    buffer: AlignedBuf,
    /// The number of commands behind it that are executed together with it.
    behind: u32,
}

fn read_call(socket: &mut UnixStream) -> io::Result<Asked> {
    let mut head = [0; 32];
    socket.read_exact(&mut head)?;
    let [code, id, low, high, patience, path_bytes, bytes, behind] = words(&head);
    let mut sent = vec![0; (bytes as usize).min(BYTES_MAX)];
    socket.read_exact(&mut sent)?;
    let call = abi::Command::of_code(code).map(|command| ControlCall {
        command,
        device: id,
        data: u64::from(high) << 32 | u64::from(low),
        path_bytes: u16::try_from(path_bytes).unwrap_or(u16::MAX),
        patience: Duration::from_millis(patience.into()),
    });
    let buffer = match sent.len() {
        0 => AlignedBuf::zeroed(0),
        _ => AlignedBuf::from_slice(&sent),
    };
    Ok(Asked { call, buffer, behind })
}

/// An answer on the socket: three words and the bytes that the driver left.
fn encode_answer(answer: &Result<i32, ControlError>, buffer: &[u8]) -> Vec<u8> {
    let errno = |error: &io::Error| error.raw_os_error().unwrap_or(libc::EIO).cast_unsigned();
    let (kind, value, back) = match answer {
        Ok(value) => (ANSWERED, value.cast_unsigned(), buffer),
        Err(ControlError::Refused(error)) => (REFUSED, errno(error), &[][..]),
        Err(ControlError::Stuck(_)) => (STUCK, 0, &[][..]),
        Err(ControlError::Ring(error) | ControlError::Lost(error)) => (FAILED, errno(error), &[][..]),
    };
    let words = [kind, value, back.len() as u32];
    let mut message: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    message.extend_from_slice(back);
    message
}

#[cfg(test)]
mod tests {
    use super::*;
    use virtio_devices::ublk::abi::DeviceInfo;

    /// A driver that answers with the number of the device, and refuses and hangs at will.
    #[derive(Debug)]
    struct Driver;

    impl Carrier for Driver {
        fn carry(&mut self, call: &ControlCall, buffer: &mut AlignedBuf) -> Result<i32, ControlError> {
            match call.device {
                7 => Err(ControlError::Refused(io::Error::from_raw_os_error(libc::EBUSY))),
                8 => Err(ControlError::Stuck(call.patience)),
                device => {
                    buffer.iter_mut().for_each(|byte| *byte ^= 0xff);
                    Ok(device.cast_signed() + (call.data >> 40) as i32)
                }
            }
        }
    }

    fn call(device: u32, patience: Duration) -> ControlCall {
        ControlCall {
            command: abi::Command::AddDev,
            device,
            data: 5 << 40,
            path_bytes: 0,
            patience,
        }
    }

    /// A helper whose process does nothing but exist, as one that the kernel holds.
    fn hung() -> CommandProcess {
        let mut program = Command::new("sleep");
        program.arg("1000");
        let mut helper =
            CommandProcess::start(program, tempfile::tempfile().expect("a file")).expect("a process");
        helper.grace = Duration::from_millis(100);
        helper
    }

    fn kill(helper: &mut CommandProcess) {
        let child = helper.child.as_mut().expect("a process");
        child.kill().expect("it is ours");
    }

    /// Returns true if there is no such process in the end, not even a zombie.
    fn is_gone(process: Option<u32>) -> bool {
        let path = format!("/proc/{}", process.expect("a process"));
        (0..2000).any(|_| {
            std::thread::sleep(Duration::from_millis(10));
            !std::path::Path::new(&path).exists()
        })
    }

    #[test]
    fn helper_leaves_no_zombie_on_drop() {
        let mut helper = hung();
        let stuck = helper.carry(&call(1, Duration::ZERO), &mut AlignedBuf::zeroed(0));
        assert!(matches!(stuck, Err(ControlError::Stuck(_))), "{stuck:?}");
        let process = helper.process();
        drop(helper);
        assert!(is_gone(process));
    }

    /// A helper that `Driver` answers for.
    fn answered(helper: &mut CommandProcess) -> std::thread::JoinHandle<io::Result<()>> {
        let (ours, theirs) = UnixStream::pair().expect("a socket");
        helper.socket = ours;
        std::thread::spawn(move || serve_on(theirs, &mut Driver))
    }

    #[test]
    fn carry_passes_calls_and_answers_unchanged() {
        let mut helper = hung();
        let driver = answered(&mut helper);
        let patience = Duration::from_secs(20);
        let mut buffer = AlignedBuf::from_slice(&[1, 2, 3]);
        let answer = helper.carry(&call(3, patience), &mut buffer);
        assert_eq!(
            (answer.expect("an answer"), &buffer[..]),
            (8, &[0xfe, 0xfd, 0xfc][..])
        );
        let mut none = AlignedBuf::zeroed(0);
        assert_eq!(helper.carry(&call(4, patience), &mut none).expect("an answer"), 9);
        let refused = helper.carry(&call(7, patience), &mut none).expect_err("refused");
        assert_eq!(refused.errno(), Some(libc::EBUSY));
        let stuck = helper.carry(&call(8, patience), &mut none).expect_err("stuck");
        assert!(
            matches!(stuck, ControlError::Stuck(after) if after == patience),
            "{stuck}"
        );
        // Nothing else is asked of it.
        let stuck = helper.carry(&call(3, patience), &mut none).expect_err("stuck");
        assert!(matches!(stuck, ControlError::Stuck(_)), "{stuck}");
        drop(helper);
        assert!(
            driver.join().expect("it does not panic").is_err(),
            "the socket's end"
        );
    }

    /// Answers several calls only if it has them together.
    #[derive(Debug)]
    struct Together;

    impl Carrier for Together {
        fn carry(&mut self, _: &ControlCall, _: &mut AlignedBuf) -> Result<i32, ControlError> {
            Err(ControlError::Refused(io::Error::from_raw_os_error(libc::EDEADLK)))
        }

        fn carry_all(&mut self, calls: &[ControlCall]) -> Vec<Result<i32, ControlError>> {
            let driver = |call: &ControlCall| Driver.carry(call, &mut AlignedBuf::zeroed(0));
            calls.iter().map(driver).collect()
        }
    }

    #[test]
    fn carry_all_passes_calls_together_and_answers_in_order() {
        let mut helper = hung();
        let (ours, theirs) = UnixStream::pair().expect("a socket");
        helper.socket = ours;
        let driver = std::thread::spawn(move || serve_on(theirs, &mut Together));
        let patience = Duration::from_secs(20);
        let devices = || (100..101 + TOGETHER_MAX as u32).chain([7, 3]);
        let calls: Vec<ControlCall> = devices().map(|device| call(device, patience)).collect();
        let said = |answer: Result<i32, ControlError>| answer.map_err(|error| error.errno());
        let answers: Vec<_> = helper.carry_all(&calls).into_iter().map(said).collect();
        let expected = devices().map(|device| match device {
            7 => Err(Some(libc::EBUSY)),
            device => Ok(device.cast_signed() + 5),
        });
        assert_eq!(answers, expected.collect::<Vec<_>>());
        // One that is stuck keeps no answer from the others, and is the last.
        let calls = [8, 3].map(|device| call(device, patience));
        let mut answers = helper.carry_all(&calls).into_iter();
        let stuck = answers.next().expect("an answer");
        assert!(
            matches!(stuck, Err(ControlError::Stuck(after)) if after == patience),
            "{stuck:?}"
        );
        assert_eq!(answers.next().map(said), Some(Ok(8)));
        assert!(matches!(helper.carry_all(&calls)[1], Err(ControlError::Stuck(_))));
        drop(helper);
        assert!(
            driver.join().expect("it does not panic").is_err(),
            "the socket's end"
        );
    }

    #[test]
    fn carry_times_out_on_a_hung_process() {
        let began = Instant::now();
        let mut helper = hung();
        let mut buffer = AlignedBuf::from_slice(&[0; 64]);
        let stuck = helper.carry(&call(1, Duration::from_millis(200)), &mut buffer);
        assert!(matches!(stuck, Err(ControlError::Stuck(_))), "{stuck:?}");
        let mut control = Control::over(Box::new(helper));
        let message = control.add(&DeviceInfo::default()).expect_err("it hangs");
        let message = crate::error::chain(&message);
        assert!(
            message.starts_with("ADD_DEV of /dev/ublkb0 failed (the kernel hangs: see its log"),
            "{message}"
        );
        drop(control);
        assert!(began.elapsed() < Duration::from_secs(10));
    }

    #[test]
    fn ends_until_waits_no_longer_than_its_deadline() {
        let start = |name: &str| Command::new(name).arg("1000").spawn().expect("a process");
        let began = Instant::now();
        assert!(ends_until(start("true"), began + Duration::from_secs(60)));
        assert!(!ends_until(start("false"), began + Duration::from_secs(60)));
        let id = {
            let child = start("sleep");
            let id = child.id();
            assert!(!ends_until(child, Instant::now() + Duration::from_millis(50)));
            id
        };
        assert!(began.elapsed() < Duration::from_secs(30));
        let id = rustix::process::Pid::from_raw(id.cast_signed()).expect("a process");
        rustix::process::kill_process(id, rustix::process::Signal::KILL).expect("it is ours");
    }

    #[test]
    fn killed_process_fails_one_command_and_is_replaced() {
        let mut helper = hung();
        kill(&mut helper);
        let before = helper.process();
        let mut none = AlignedBuf::zeroed(0);
        let lost = helper.carry(&call(1, Duration::from_secs(20)), &mut none);
        assert!(matches!(lost, Err(ControlError::Lost(_))), "{lost:?}");
        assert_ne!(helper.process(), before);
        assert!(is_gone(before), "it is waited for");
        kill(&mut helper);
        let calls = [1, 2, 3].map(|device| call(device, Duration::from_secs(20)));
        let answers = helper.carry_all(&calls);
        assert!(
            answers
                .iter()
                .all(|lost| matches!(lost, Err(ControlError::Lost(_)))),
            "{answers:?}"
        );
        kill(&mut helper);
    }
}
