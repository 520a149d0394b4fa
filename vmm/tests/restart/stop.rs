//! Stop signals at bad times: before anything is open, without a descriptor to spare, and while the server cannot
//! drain, when the second one ends it all the same.
//!
//! A debugger's stop holds up one thread, the queue's, as a disk that hangs would.
#![expect(unsafe_code, reason = "ptrace(2) has no safe wrapper at hand")]

use std::time::{Duration, Instant};

use crate::client::{BLOCK, Client};
use crate::server::World;
use ringdisk_gen::Random;

/// The thread of `pid` with this name.
fn thread(pid: u32, name: &str) -> libc::pid_t {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("a process");
    let mut tids = tasks.filter_map(|task| {
        let task = task.expect("a thread");
        let found = std::fs::read_to_string(task.path().join("comm")).expect("its name");
        (found.trim() == name).then(|| task.file_name().to_string_lossy().parse().expect("a number"))
    });
    tids.next().expect("a thread of that name")
}

/// Stops a thread until the process ends.
fn hold_up(tid: libc::pid_t) {
    for request in [libc::PTRACE_SEIZE, libc::PTRACE_INTERRUPT] {
        // SAFETY: neither request passes memory.
        let result = unsafe { libc::ptrace(request, tid, 0, 0) };
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    }
    reap(tid);
}

/// Waits for a thread that is traced to stop or end.
fn reap(tid: libc::pid_t) {
    // SAFETY: no memory is passed.
    unsafe { libc::waitpid(tid, std::ptr::null_mut(), libc::__WALL) };
}

#[test]
fn second_signal_ends_a_server_that_cannot_drain() {
    let world = World::new("cluster_size=65536", 64 * BLOCK);
    let mut server = world.serve(&[]);
    let mut client = Client::new(64, false);
    client.connect(&world.path("socket"));
    client.work(&mut Random::new(9), Duration::from_millis(5));
    let queue = thread(server.pid(), "queue 0");
    hold_up(queue);
    server.signal("TERM");
    std::thread::sleep(Duration::from_millis(300));
    assert!(
        server.is_running(),
        "it drains, and says nothing: {}",
        world.log()
    );
    let second = Instant::now();
    server.signal("TERM");
    reap(queue);
    assert_eq!(server.wait(), Some(1));
    assert!(
        second.elapsed() < Duration::from_secs(5),
        "{:?}",
        second.elapsed()
    );
    let log = world.log();
    assert!(log.contains("exiting with requests in flight"), "{log}");
}

/// Waits for something that a traced process does; gives its signal back to it, if that is what it was. Returns the
/// event of ptrace(2), or 0.
fn next_event(pid: libc::pid_t) -> libc::c_int {
    let mut status = 0;
    // SAFETY: the status is a live, exclusive local.
    let found = unsafe { libc::waitpid(pid, &raw mut status, libc::__WALL) };
    assert!(found == pid && libc::WIFSTOPPED(status), "it ended: {status:#x}");
    let event = status >> 16;
    if event == 0 {
        // SAFETY: passes a number.
        unsafe { libc::ptrace(libc::PTRACE_CONT, pid, 0, libc::WSTOPSIG(status)) };
    } else if event == libc::PTRACE_EVENT_STOP {
        // SAFETY: passes no memory.
        unsafe { libc::ptrace(libc::PTRACE_CONT, pid, 0, 0) };
    }
    event
}

/// Lets `pid`, which has stopped itself, run until it starts its first thread, and holds up the one that started it.
fn hold_up_at_first_thread(pid: libc::pid_t) {
    // SAFETY: neither request passes memory.
    let seized = unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid, 0, libc::PTRACE_O_TRACECLONE) };
    assert_eq!(seized, 0, "{}", std::io::Error::last_os_error());
    // SAFETY: a signal to a child of ours.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGCONT) }, 0);
    while next_event(pid) != libc::PTRACE_EVENT_CLONE {}
    let mut thread: libc::c_ulong = 0;
    // SAFETY: the kernel writes one number to a live, exclusive local.
    let told = unsafe { libc::ptrace(libc::PTRACE_GETEVENTMSG, pid, 0, &raw mut thread) };
    assert_eq!(told, 0, "{}", std::io::Error::last_os_error());
    let thread = thread as libc::pid_t;
    reap(thread);
    // SAFETY: passes no memory; the thread has stopped, as every new one that is traced.
    assert_eq!(unsafe { libc::ptrace(libc::PTRACE_DETACH, thread, 0, 0) }, 0);
}

/// Opening an image may take minutes, longer than a supervisor waits. The test holds the opening thread.
#[test]
fn signal_ends_a_server_while_it_opens_images() {
    let world = World::new("cluster_size=65536", 64 * BLOCK);
    let wrapper = [
        "sh",
        "-c",
        "kill -STOP $$; exec env --default-signal \"$@\"",
        "sh",
    ];
    let server = world.serve_in(&wrapper, &[]);
    let pid = server.pid() as libc::pid_t;
    let deadline = Instant::now() + Duration::from_secs(20);
    while !std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(") T ")) {
        assert!(Instant::now() < deadline, "it does not stop itself");
        std::thread::sleep(Duration::from_millis(1));
    }
    hold_up_at_first_thread(pid);
    let begin = Instant::now();
    server.signal("TERM");
    let mut status = 0;
    loop {
        // SAFETY: the status is a live, exclusive local.
        let found = unsafe { libc::waitpid(pid, &raw mut status, libc::__WALL | libc::WNOHANG) };
        if found == pid {
            break;
        }
        assert!(
            begin.elapsed() < Duration::from_secs(20),
            "it is not heard: {}",
            world.log()
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(libc::WIFEXITED(status), "{status:#x}");
    assert_eq!(libc::WEXITSTATUS(status), 1);
    let log = world.log();
    assert!(log.contains("exiting before all images were open"), "{log}");
    world.assert_sound(false);
}

#[test]
fn stop_needs_no_descriptor() {
    let world = World::new("cluster_size=65536", 64 * BLOCK);
    let mut server = world.serve(&[]);
    let mut client = Client::new(64, false);
    client.connect(&world.path("socket"));
    client.work(&mut Random::new(9), Duration::from_millis(5));
    client.drain();
    drop(client);
    // The client's thread waits for the next one: nothing wakes it but the stop.
    std::thread::sleep(Duration::from_millis(200));
    let pid = server.pid() as libc::pid_t;
    let lowest = (0..).find(|fd| !std::path::Path::new(&format!("/proc/{pid}/fd/{fd}")).exists());
    let lowest: libc::rlim_t = lowest.expect("a free number");
    let none = libc::rlimit {
        rlim_cur: lowest,
        rlim_max: lowest,
    };
    // SAFETY: the kernel reads the limits, and a null old value is allowed.
    let limited = unsafe { libc::prlimit(pid, libc::RLIMIT_NOFILE, &raw const none, std::ptr::null_mut()) };
    assert_eq!(limited, 0, "{}", std::io::Error::last_os_error());
    server.signal("TERM");
    let deadline = Instant::now() + Duration::from_secs(20);
    while server.is_running() {
        assert!(Instant::now() < deadline, "it does not end: {}", world.log());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(server.wait(), Some(0), "{}", world.log());
    world.assert_sound(false);
}
