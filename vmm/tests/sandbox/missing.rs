//! Kernels without a piece of the sandbox: it is said once, and the rest is on.
//!
//! A kernel without a system call is played by a filter that the child puts up before it goes in: the call fails
//! with the error of such a kernel.

use std::collections::BTreeMap;
use std::path::Path;

use block::ring::RingKind;
use block::worker::{WorkerConfig, WorkerHandle};
use ringdisk::logging;
use ringdisk::sandbox::{self, Task};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch,
};

use crate::{INSIDE, inside_after, live, open_at, refused, try_everything};

const NO_LANDLOCK: &str = "this kernel has no Landlock";
const NO_SECCOMP: &str = "this kernel has no seccomp filters";
const NO_RINGS: &str = "io_uring is refused here";

/// Has a call fail from now on; with `argument`, only if its second one is that.
fn without(call: libc::c_long, argument: Option<u64>, errno: i32) {
    let rules = argument.map(|value| {
        let equal =
            SeccompCondition::new(1, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value).expect("a condition");
        SeccompRule::new(vec![equal]).expect("a rule")
    });
    let rules: BTreeMap<i64, Vec<SeccompRule>> = [(call, rules.into_iter().collect())].into();
    let arch = TargetArch::try_from(std::env::consts::ARCH).expect("an architecture");
    let action = SeccompAction::Errno(errno.cast_unsigned());
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, action, arch).expect("a filter");
    let program = BpfProgram::try_from(filter).expect("a program");
    seccompiler::apply_filter(&program).expect("a kernel with seccomp");
}

fn no_landlock() {
    logging::start(Some("warn")).expect("a log");
    without(libc::SYS_landlock_create_ruleset, None, libc::ENOSYS);
}

fn no_seccomp() {
    logging::start(Some("warn")).expect("a log");
    without(libc::SYS_seccomp, None, libc::EINVAL);
}

fn neither() {
    no_landlock();
    without(libc::SYS_seccomp, None, libc::ENOSYS);
}

fn assert_said_once(log: &str, said: &[&str]) {
    for line in [NO_LANDLOCK, NO_SECCOMP, NO_RINGS] {
        let expected = usize::from(said.contains(&line));
        assert_eq!(log.matches(line).count(), expected, "{line}: {log}");
    }
}

fn files_are_restricted(folder: &Path) {
    const NO: &[i32] = &[libc::EACCES];
    for path in [Path::new("/etc/passwd"), &folder.join("secret")] {
        refused("open", NO, libc::SYS_openat, open_at(path, libc::O_RDONLY));
    }
    let base = open_at(&folder.join("base"), libc::O_RDWR);
    refused("writing a backing file", NO, libc::SYS_openat, base);
}

/// The bits of `no_new_privs` cannot be taken back.
fn no_new_privileges() {
    let off = [libc::PR_SET_NO_NEW_PRIVS as usize, 0, 0, 0, 0, 0];
    refused(
        "new privileges",
        &[libc::EPERM, libc::EINVAL],
        libc::SYS_prctl,
        off,
    );
}

#[test]
fn sandbox_without_landlock_restricts_system_calls() {
    let log = inside_after(
        "missing::sandbox_without_landlock_restricts_system_calls",
        no_landlock,
        Task::Queue,
        |_| {
            try_everything();
            no_new_privileges();
            live();
        },
    );
    if std::env::var_os(INSIDE).is_none() {
        assert_said_once(&log, &[NO_LANDLOCK]);
    }
}

#[test]
fn sandbox_without_seccomp_restricts_files() {
    let log = inside_after(
        "missing::sandbox_without_seccomp_restricts_files",
        no_seccomp,
        Task::Control,
        |folder| {
            files_are_restricted(folder);
            no_new_privileges();
            // Each thread finds out for itself; it is said once.
            let other = std::thread::spawn(|| sandbox::restrict_calls(Task::Queue).expect("no error"));
            other.join().expect("a thread");
            live();
        },
    );
    if std::env::var_os(INSIDE).is_none() {
        assert_said_once(&log, &[NO_SECCOMP]);
    }
}

#[test]
fn sandbox_without_both_warns_and_gains_no_privileges() {
    let log = inside_after(
        "missing::sandbox_without_both_warns_and_gains_no_privileges",
        neither,
        Task::Control,
        |_| {
            no_new_privileges();
            live();
        },
    );
    if std::env::var_os(INSIDE).is_none() {
        assert_said_once(&log, &[NO_LANDLOCK, NO_SECCOMP]);
    }
}

/// A ring that cannot be restricted is not used at all.
#[test]
fn ring_without_restrictions_falls_back_to_syscalls() {
    const REGISTER_RESTRICTIONS: u64 = 11;
    let log = inside_after(
        "missing::ring_without_restrictions_falls_back_to_syscalls",
        || {
            logging::start(Some("warn")).expect("a log");
            without(
                libc::SYS_io_uring_register,
                Some(REGISTER_RESTRICTIONS),
                libc::EINVAL,
            );
            for _ in 0..2 {
                let worker = WorkerHandle::spawn(WorkerConfig {
                    ring: RingKind::Auto,
                    ..WorkerConfig::default()
                });
                assert_eq!(worker.expect("a worker").driver_name(), "syscalls");
            }
        },
        Task::Queue,
        |_| try_everything(),
    );
    if std::env::var_os(INSIDE).is_none() {
        assert_said_once(&log, &[NO_RINGS]);
    }
}
