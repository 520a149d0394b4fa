//! The sandbox, tried from inside: each way out is attempted by a process that went in, and fails; what
//! serving takes goes on working.
//!
//! A test runs itself as a child that goes in and then tries. The child's attempts are raw system calls, so that
//! nothing but the kernel can say no.
#![expect(unsafe_code, reason = "tries to break out by raw system calls")]
#![expect(clippy::print_stderr, reason = "a child tells its parent what failed")]

mod foreign;
mod missing;

use std::fs::File;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use ringdisk::sandbox::{self, AllowedFiles, Task};

const INSIDE: &str = "RINGDISK_TEST_INSIDE";

/// Runs the test `name` again, as a child inside the sandbox, in a folder with an image and a secret.
fn inside(name: &str, task: Task, attempts: fn(&Path)) {
    inside_after(name, || {}, task, attempts);
}

/// As [`inside`], but `before` prepares the child. What it said.
fn inside_after(name: &str, before: fn(), task: Task, attempts: fn(&Path)) -> String {
    if let Some(folder) = std::env::var_os(INSIDE) {
        let folder = PathBuf::from(folder);
        let allowed = AllowedFiles {
            writable: vec![folder.join("image")],
            readable: vec![folder.join("base")],
            removable_in: vec![folder.join("sockets")],
            ..AllowedFiles::default()
        };
        before();
        sandbox::restrict_files(&allowed).expect("file restrictions");
        sandbox::restrict_calls(task).expect("call restrictions");
        attempts(&folder);
        return String::new();
    }
    let folder = tempfile::tempdir().expect("a folder");
    for file in ["image", "base", "secret"] {
        std::fs::write(folder.path().join(file), [7; 4096]).expect("a file");
    }
    std::fs::create_dir(folder.path().join("sockets")).expect("a folder");
    std::fs::write(folder.path().join("sockets/socket"), "").expect("a socket, nearly");
    let output: Output = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", name, "--nocapture", "--test-threads=1"])
        .env(INSIDE, folder.path())
        .output()
        .expect("a child");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(folder.path().join("secret").exists());
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Makes a system call, which must fail with one of these errors.
fn refused(what: &str, errnos: &[i32], call: libc::c_long, arguments: [usize; 6]) {
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: a raw call with arguments that are harmless, or point to live C strings and structures of the
    // callers, should the kernel carry it out after all. The child ends with the test.
    let result = unsafe { libc::syscall(call, a, b, c, d, e, f) };
    let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
    if result >= 0 || !errnos.contains(&errno) {
        eprintln!("{what}: result {result}, errno {errno}");
        std::process::exit(1);
    }
}

/// Tries what no thread may do, whatever its task.
fn try_everything() {
    const NO: &[i32] = &[libc::EPERM];
    let none = [0; 6];
    let shell = c"/bin/sh".as_ptr() as usize;
    let arguments = [shell, 0];
    let argv = (&raw const arguments) as usize;
    let own = std::process::id() as usize;
    refused("exec", NO, libc::SYS_execve, [shell, argv, 0, 0, 0, 0]);
    refused(
        "exec at",
        NO,
        libc::SYS_execveat,
        [libc::AT_FDCWD as usize, shell, argv, 0, 0, 0],
    );
    refused(
        "socket",
        NO,
        libc::SYS_socket,
        [libc::AF_UNIX as usize, libc::SOCK_STREAM as usize, 0, 0, 0, 0],
    );
    refused(
        "tcp",
        NO,
        libc::SYS_socket,
        [libc::AF_INET as usize, libc::SOCK_STREAM as usize, 0, 0, 0, 0],
    );
    refused("connect", NO, libc::SYS_connect, none);
    refused("bind", NO, libc::SYS_bind, none);
    refused(
        "ptrace",
        NO,
        libc::SYS_ptrace,
        [libc::PTRACE_ATTACH as usize, 1, 0, 0, 0, 0],
    );
    refused(
        "read another's memory",
        NO,
        libc::SYS_process_vm_readv,
        [1, 0, 0, 0, 0, 0],
    );
    refused("kill", NO, libc::SYS_kill, [1, 0, 0, 0, 0, 0]);
    refused(
        "signal another's thread",
        NO,
        libc::SYS_tgkill,
        [1, 1, 0, 0, 0, 0],
    );
    refused("open a process", NO, libc::SYS_pidfd_open, [own, 0, 0, 0, 0, 0]);
    refused(
        "fork",
        NO,
        libc::SYS_clone,
        [libc::SIGCHLD as usize, 0, 0, 0, 0, 0],
    );
    refused("clone3", &[libc::ENOSYS], libc::SYS_clone3, none);
    refused(
        "a new namespace",
        NO,
        libc::SYS_unshare,
        [libc::CLONE_NEWUSER as usize, 0, 0, 0, 0, 0],
    );
    refused("mount", NO, libc::SYS_mount, none);
    refused("chroot", NO, libc::SYS_chroot, none);
    refused("become root", NO, libc::SYS_setuid, none);
    refused(
        "a ring of one's own",
        NO,
        libc::SYS_io_uring_setup,
        [8, 0, 0, 0, 0, 0],
    );
    refused("bpf", NO, libc::SYS_bpf, none);
    refused("userfaultfd", NO, libc::SYS_userfaultfd, none);
    refused("perf", NO, libc::SYS_perf_event_open, none);
    refused("a module", NO, libc::SYS_init_module, none);
    refused("keys", NO, libc::SYS_keyctl, none);
    refused("rename", NO, libc::SYS_renameat2, none);
    refused("link", NO, libc::SYS_linkat, none);
    refused("make a folder", NO, libc::SYS_mkdirat, none);
    refused("change a mode", NO, libc::SYS_fchmod, none);
    refused("change an owner", NO, libc::SYS_fchown, none);
    refused(
        "type into a terminal",
        NO,
        libc::SYS_ioctl,
        [0, libc::TIOCSTI as usize, 0, 0, 0, 0],
    );
    refused(
        "be signalled by I/O",
        NO,
        libc::SYS_fcntl,
        [0, libc::F_SETOWN as usize, own, 0, 0, 0],
    );
    refused("a further filter", NO, libc::SYS_seccomp, none);
    refused(
        "be dumpable",
        NO,
        libc::SYS_prctl,
        [libc::PR_SET_DUMPABLE as usize, 1, 0, 0, 0, 0],
    );
    let exec = (libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC) as usize;
    let private = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as usize;
    refused(
        "executable memory",
        NO,
        libc::SYS_mmap,
        [0, 4096, exec, private, usize::MAX, 0],
    );
    let page = vec![0u8; 8192];
    let aligned = page.as_ptr() as usize / 4096 * 4096 + 4096;
    refused(
        "memory made executable",
        NO,
        libc::SYS_mprotect,
        [aligned, 4096, exec, 0, 0, 0],
    );
}

/// Does what every thread must be able to do.
fn live() {
    let threads: Vec<_> = (0u8..4)
        .map(|number| {
            std::thread::spawn(move || vec![number; 1 << 20].iter().map(|&n| u64::from(n)).sum::<u64>())
        })
        .collect();
    for (number, thread) in (0u8..).zip(threads) {
        assert_eq!(thread.join().expect("a thread"), u64::from(number) << 20);
    }
    std::thread::sleep(std::time::Duration::from_millis(1));
    block::event::eventfd().expect("an eventfd");
}

fn open_at(path: &Path, flags: libc::c_int) -> [usize; 6] {
    // Leaked: it must live as long as the call, and the child ends soon.
    let path = std::ffi::CString::new(path.to_str().expect("UTF-8"))
        .expect("no zero")
        .into_raw();
    [
        libc::AT_FDCWD as usize,
        path as usize,
        flags as usize,
        0o600,
        0,
        0,
    ]
}

#[test]
fn queue_thread_opens_nothing_and_cannot_escape() {
    inside(
        "queue_thread_opens_nothing_and_cannot_escape",
        Task::Queue,
        |folder| {
            const NO: &[i32] = &[libc::EPERM];
            try_everything();
            for file in ["image", "secret"] {
                refused(
                    "open",
                    NO,
                    libc::SYS_openat,
                    open_at(&folder.join(file), libc::O_RDONLY),
                );
            }
            refused(
                "unlink",
                NO,
                libc::SYS_unlinkat,
                open_at(&folder.join("sockets/socket"), 0),
            );
            refused("accept", NO, libc::SYS_accept4, [0; 6]);
            refused("send", NO, libc::SYS_sendmsg, [0; 6]);
            refused("memfd", NO, libc::SYS_memfd_create, [0; 6]);
            live();
            // A thread of a restricted thread is restricted too.
            std::thread::spawn(try_everything).join().expect("a thread");
        },
    );
}

/// A CPU thread that could change its machine, or make another one, could escape.
#[test]
fn cpu_thread_opens_nothing_and_makes_no_machine() {
    inside(
        "cpu_thread_opens_nothing_and_makes_no_machine",
        Task::Cpu,
        |folder| {
            const NO: &[i32] = &[libc::EPERM];
            try_everything();
            for file in ["image", "secret"] {
                refused(
                    "open",
                    NO,
                    libc::SYS_openat,
                    open_at(&folder.join(file), libc::O_RDONLY),
                );
            }
            refused("accept", NO, libc::SYS_accept4, [0; 6]);
            refused("memfd", NO, libc::SYS_memfd_create, [0; 6]);
            for (what, order) in [
                ("a machine", 0xAE01),
                ("memory for the guest", 0x4020_AE46),
                ("a CPU", 0xAE41),
                ("a CPU's registers", 0x4090_AE82),
                ("a device of the kernel's", 0xC00C_AEE0),
            ] {
                refused(what, NO, libc::SYS_ioctl, [0, order, 0, 0, 0, 0]);
            }
            // What it may ask of KVM reaches the descriptor, which is none of KVM's.
            let reaches = &[
                libc::ENOTTY,
                libc::EINVAL,
                libc::ENOTCONN,
                libc::EBADF,
                libc::EOPNOTSUPP,
            ];
            refused("run", reaches, libc::SYS_ioctl, [usize::MAX, 0xAE80, 0, 0, 0, 0]);
            refused(
                "a kick",
                reaches,
                libc::SYS_ioctl,
                [usize::MAX, 0x4040_AE79, 0, 0, 0, 0],
            );
            live();
            std::thread::spawn(try_everything).join().expect("a thread");
        },
    );
}

#[test]
fn control_thread_opens_only_images_and_cannot_escape() {
    inside(
        "control_thread_opens_only_images_and_cannot_escape",
        Task::Control,
        |folder| {
            const NO: &[i32] = &[libc::EACCES];
            try_everything();
            let (read, write) = (libc::O_RDONLY, libc::O_RDWR);
            for path in ["/etc/passwd", "/proc/self/mem", "/dev/null", "/"] {
                refused(path, NO, libc::SYS_openat, open_at(Path::new(path), read));
            }
            refused(
                "the secret",
                NO,
                libc::SYS_openat,
                open_at(&folder.join("secret"), read),
            );
            refused(
                "writing a backing file",
                NO,
                libc::SYS_openat,
                open_at(&folder.join("base"), write),
            );
            refused(
                "a new file",
                NO,
                libc::SYS_openat,
                open_at(&folder.join("new"), write | libc::O_CREAT),
            );
            refused(
                "removing an image",
                NO,
                libc::SYS_unlinkat,
                open_at(&folder.join("image"), 0),
            );
            live();
            let mut bytes = Vec::new();
            File::open(folder.join("base"))
                .expect("the backing file")
                .read_to_end(&mut bytes)
                .expect("its bytes");
            assert_eq!(bytes, [7; 4096]);
            let image = File::options()
                .read(true)
                .write(true)
                .open(folder.join("image"))
                .expect("the image");
            image.set_len(8192).expect("its length");
            assert!(image.try_clone().expect("a duplicate").as_raw_fd() > 2);
            std::fs::remove_file(folder.join("sockets/socket")).expect("the socket");
        },
    );
}
