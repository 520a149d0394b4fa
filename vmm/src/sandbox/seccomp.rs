//! System calls: each thread may make those of its task.
//!
//! A call that is not on the list fails with EPERM and is not executed. It does not kill the process: a call missing from a
//! list by mistake would then take every guest's disk away, and an attacker gains nothing from the error.
//!
//! Arguments are checked where a call can do more than is needed: memory is never made executable, signals go to this
//! process only, descriptors are duplicated, locked and sealed but not otherwise controlled, and a new task is a thread of
//! this process.

use std::collections::BTreeMap;

use block::report::LoggedOnce;
use seccompiler::{
    BpfProgram, Error, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

use super::SandboxError;

/// The role of a thread, which determines its system calls.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Task {
    /// Serves queues: disk I/O, through a ring or without.
    Queue,
    /// Speaks with clients, starts and stops: what a queue does, and opening files, and messages.
    Control,
    /// Runs a guest's CPU: the calls of a queue, messages to a vhost-user backend, KVM's ioctls for interrupts and kicks, and
    /// those that start and stop queues which the kernel runs.
    Cpu,
    /// Talks to a vhost-user backend: the calls of a CPU, and connecting.
    Backend,
    /// Serves queues of a block device of the host: what a queue does, and telling the kernel that memory is not to be had
    /// by writing to that device, and that the host's partitions are none of its.
    UblkQueue,
    /// Looks after such devices: asks the driver, answers questions, and removes what is to go with them.
    UblkControl,
    /// Tells clients of `--metrics` what this process counts: accepts, reads and writes connections, and reads what is open of
    /// `/proc`.
    Metrics,
}

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Memory, time, threads, waiting: what every thread of a Rust program may need.
const EVERY: &[libc::c_long] = &[
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_membarrier,
    libc::SYS_futex,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_clone3,
    libc::SYS_close,
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_ppoll,
    libc::SYS_eventfd2,
];

/// Disk I/O.
const QUEUE: &[libc::c_long] = &[
    libc::SYS_io_uring_enter,
    // Only files can be registered: the ring's own restrictions see to that.
    libc::SYS_io_uring_register,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_fdatasync,
    libc::SYS_fsync,
    libc::SYS_fallocate,
    libc::SYS_ftruncate,
    libc::SYS_lseek,
    libc::SYS_fstat,
    // What a file lies on.
    libc::SYS_fstatfs,
    libc::SYS_statx,
    // A worker's alarm, for writes that wait for space and discarded space that returns.
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
];

/// Clients: accepting them, their messages, their memory; and opening an image again, which Landlock limits.
const CONTROL: &[libc::c_long] = &[
    libc::SYS_accept4,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_shutdown,
    libc::SYS_getsockopt,
    libc::SYS_geteuid,
    libc::SYS_memfd_create,
    libc::SYS_openat,
    libc::SYS_newfstatat,
    libc::SYS_unlinkat,
    libc::SYS_rt_sigtimedwait,
    // A client that comes back from another server.
    libc::SYS_dup3,
    // The sockets of many disks.
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
];

/// Messages to a vhost-user backend, which a CPU sends when its guest sets a queue up.
const CPU: &[libc::c_long] = &[
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_shutdown,
];

/// Connections with such a backend; sockets are made of one kind only.
const BACKEND: &[libc::c_long] = &[libc::SYS_connect];

/// Linux: `include/uapi/linux/prctl.h`.
const PR_SET_IO_FLUSHER: u64 = 57;

/// Rights are given up.
const UBLK_QUEUE: &[libc::c_long] = &[libc::SYS_capget, libc::SYS_capset];

/// Questions at a socket, signals, and the end: the host's memory written to the device, links and files removed.
const UBLK_CONTROL: &[libc::c_long] = &[
    libc::SYS_accept4,
    // Image locks for the next server.
    libc::SYS_sendmsg,
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_shutdown,
    libc::SYS_getsockopt,
    libc::SYS_geteuid,
    libc::SYS_openat,
    libc::SYS_newfstatat,
    libc::SYS_readlinkat,
    libc::SYS_unlinkat,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_sync,
];

/// Connections of clients, and the list of this process's descriptors.
const METRICS: &[libc::c_long] = &[
    libc::SYS_accept4,
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_shutdown,
    libc::SYS_pread64,
    libc::SYS_lseek,
    libc::SYS_fstat,
    libc::SYS_getdents64,
];

/// KVM ioctls of a CPU's thread and of one that reconnects a disk: run the guest, tell its clock of a pause, set up
/// kicks and interrupts. Linux: `include/uapi/linux/kvm.h`.
const KVM: [u32; 7] = [
    0x0000_AE80, // KVM_RUN
    0x0000_AEAD, // KVM_KVMCLOCK_CTRL
    0x4008_AE61, // KVM_IRQ_LINE
    0x4020_AE76, // KVM_IRQFD
    0x4008_AE6A, // KVM_SET_GSI_ROUTING
    0x4040_AE79, // KVM_IOEVENTFD
    0x0000_AE03, // KVM_CHECK_EXTENSION
];

/// Ioctls by which a CPU's thread starts and stops the queues of a network interface that the kernel runs. Linux:
/// `include/uapi/linux/vhost.h`, `if_tun.h`.
const NETWORK: [u32; 9] = [
    0x4008_AF00, // VHOST_SET_FEATURES
    0x4008_AF10, // VHOST_SET_VRING_NUM
    0x4028_AF11, // VHOST_SET_VRING_ADDR
    0x4008_AF12, // VHOST_SET_VRING_BASE
    0xC008_AF12, // VHOST_GET_VRING_BASE
    0x4008_AF20, // VHOST_SET_VRING_KICK
    0x4008_AF21, // VHOST_SET_VRING_CALL
    0x4008_AF30, // VHOST_NET_SET_BACKEND
    0x4004_54D0, // TUNSETOFFLOAD
];

/// System calls that newer ones replace, and that older C libraries still use.
#[cfg(target_arch = "x86_64")]
const OLD_EVERY: &[libc::c_long] = &[libc::SYS_poll];
#[cfg(target_arch = "x86_64")]
const OLD_CONTROL: &[libc::c_long] = &[libc::SYS_unlink, libc::SYS_epoll_wait];
#[cfg(target_arch = "x86_64")]
const OLD_UBLK_CONTROL: &[libc::c_long] = &[libc::SYS_unlink, libc::SYS_readlink];
#[cfg(not(target_arch = "x86_64"))]
const OLD_EVERY: &[libc::c_long] = &[];
#[cfg(not(target_arch = "x86_64"))]
const OLD_CONTROL: &[libc::c_long] = &[];
#[cfg(not(target_arch = "x86_64"))]
const OLD_UBLK_CONTROL: &[libc::c_long] = &[];

/// The permitted `fcntl` commands.
const FCNTL: [libc::c_int; 9] = [
    libc::F_DUPFD_CLOEXEC,
    libc::F_GETFD,
    libc::F_GETFL,
    libc::F_SETFL,
    libc::F_OFD_SETLK,
    libc::F_OFD_GETLK,
    libc::F_GET_SEALS,
    libc::F_ADD_SEALS,
    libc::F_SETFD,
];

fn rule(argument: u8, op: SeccompCmpOp, value: u64) -> Result<SeccompRule, Error> {
    let condition =
        SeccompCondition::new(argument, SeccompCmpArgLen::Dword, op, value).map_err(Error::from)?;
    SeccompRule::new(vec![condition]).map_err(Error::from)
}

fn number(value: libc::c_int) -> u64 {
    u64::from(value.cast_unsigned())
}

/// The calls of `task`, by number, with what their arguments may be.
fn rules(task: Task) -> Result<Rules, Error> {
    let mut rules = Rules::new();
    let mut allow =
        |list: &[libc::c_long]| list.iter().for_each(|&call| drop(rules.insert(call, Vec::new())));
    allow(EVERY);
    allow(OLD_EVERY);
    if task != Task::Metrics {
        allow(QUEUE);
    }
    match task {
        Task::Queue => {}
        Task::Metrics => allow(METRICS),
        Task::Control => {
            allow(CONTROL);
            allow(OLD_CONTROL);
        }
        Task::Cpu => allow(CPU),
        Task::Backend => {
            allow(CPU);
            allow(BACKEND);
        }
        Task::UblkQueue => allow(UBLK_QUEUE),
        Task::UblkControl => {
            allow(UBLK_CONTROL);
            allow(OLD_UBLK_CONTROL);
        }
    }
    let no_exec = || rule(2, SeccompCmpOp::MaskedEq(number(libc::PROT_EXEC)), 0);
    rules.insert(libc::SYS_mmap, vec![no_exec()?]);
    rules.insert(libc::SYS_mprotect, vec![no_exec()?]);
    let commands = FCNTL
        .iter()
        .map(|&command| rule(1, SeccompCmpOp::Eq, number(command)));
    rules.insert(libc::SYS_fcntl, commands.collect::<Result<_, _>>()?);
    if task == Task::Control {
        let local = rule(0, SeccompCmpOp::Eq, number(libc::AF_UNIX))?;
        rules.insert(libc::SYS_socketpair, vec![local]);
    }
    if matches!(task, Task::Control | Task::UblkControl) {
        let nonblocking = rule(1, SeccompCmpOp::Eq, libc::FIONBIO)?;
        rules.insert(libc::SYS_ioctl, vec![nonblocking]);
    }
    if matches!(
        task,
        Task::Control | Task::UblkControl | Task::Backend | Task::Metrics
    ) {
        let timeouts = [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO]
            .iter()
            .map(|&option| rule(2, SeccompCmpOp::Eq, number(option)));
        rules.insert(libc::SYS_setsockopt, timeouts.collect::<Result<_, _>>()?);
    }
    if task == Task::Backend {
        let local = || rule(0, SeccompCmpOp::Eq, number(libc::AF_UNIX));
        rules.insert(libc::SYS_socket, vec![local()?]);
        rules.insert(libc::SYS_socketpair, vec![local()?]);
    }
    if matches!(task, Task::Cpu | Task::Backend) {
        let network = NETWORK.iter().filter(|_| task == Task::Cpu);
        let orders = KVM
            .iter()
            .chain(network)
            .map(|&order| rule(1, SeccompCmpOp::Eq, order.into()));
        rules.insert(libc::SYS_ioctl, orders.collect::<Result<_, _>>()?);
    }
    let mut settings = vec![rule(0, SeccompCmpOp::Eq, number(libc::PR_SET_NAME))?];
    if task == Task::UblkQueue {
        settings.push(rule(0, SeccompCmpOp::Eq, PR_SET_IO_FLUSHER)?);
    }
    rules.insert(libc::SYS_prctl, settings);
    let ours = u64::from(std::process::id());
    rules.insert(libc::SYS_tgkill, vec![rule(0, SeccompCmpOp::Eq, ours)?]);
    let thread = number(libc::CLONE_THREAD | libc::CLONE_VM | libc::CLONE_SIGHAND);
    rules.insert(
        libc::SYS_clone,
        vec![rule(0, SeccompCmpOp::MaskedEq(thread), thread)?],
    );
    Ok(rules)
}

/// The kernel's errno for an action, which has 16 bits for it.
fn errno(value: libc::c_int) -> SeccompAction {
    SeccompAction::Errno(value.cast_unsigned())
}

/// Both filters of a task. A call has to pass both.
fn programs(task: Task) -> Result<[BpfProgram; 2], Error> {
    let arch = TargetArch::try_from(std::env::consts::ARCH).map_err(Error::from)?;
    let listed = SeccompFilter::new(rules(task)?, errno(libc::EPERM), SeccompAction::Allow, arch);
    // What clone3 is to do lies in memory, where no filter can look. Told that there is no such call, the C
    // library uses clone, whose flags the other filter sees.
    let unknown: Rules = [(libc::SYS_clone3, Vec::new())].into();
    let without = SeccompFilter::new(unknown, SeccompAction::Allow, errno(libc::ENOSYS), arch);
    let compile = |filter: Result<SeccompFilter, seccompiler::BackendError>| {
        filter.and_then(BpfProgram::try_from).map_err(Error::from)
    };
    Ok([compile(listed)?, compile(without)?])
}

pub(super) fn restrict(task: Task) -> Result<(), SandboxError> {
    static LOGGED: LoggedOnce = LoggedOnce::new();
    // The second goes in first: the first does not allow a further one.
    let [listed, without] = programs(task)?;
    for program in [without, listed] {
        match seccompiler::apply_filter(&program) {
            Ok(()) => {}
            Err(Error::Seccomp(error))
                if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EINVAL)) =>
            {
                if LOGGED.admit() {
                    tracing::warn!(
                        "this kernel has no seccomp filters: system calls are not restricted; the rest of the \
                         sandbox is on"
                    );
                }
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
