//! The threads that run a guest's CPUs.
//!
//! Invariants: when a pause or a stop returns, no CPU runs guest code; the signal that interrupts a CPU is repeated until it
//! has answered, so none is lost between the check for a request and the entry into the guest.

#![expect(unsafe_code, reason = "a signal handler, and signals to threads")]

use std::io;
use std::os::unix::thread::JoinHandleExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use kvm_ioctls::{VcpuExit, VcpuFd};
use parking_lot::{Condvar, Mutex};

use super::bus::Bus;
use super::{MachineError, Stop};
use crate::sandbox::{self, Task};

/// The state that CPUs are asked to enter.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Wish {
    Run,
    Pause,
    End,
}

#[derive(Debug)]
struct State {
    wish: Mutex<Wish>,
    changed: Condvar,
    /// The number of CPUs that do not run guest code, and will not until they are asked to.
    still: AtomicUsize,
    /// Exits to this program, by kind: ports, memory, others.
    exits: [AtomicU64; 3],
}

/// All CPUs of a machine.
#[derive(Debug)]
pub(super) struct Cpus {
    state: Arc<State>,
    /// Empty once they were ended.
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// Counts of exits from the guest to this program, by kind.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, serde::Serialize)]
pub struct Exits {
    /// For ports.
    pub ports: u64,
    /// For memory where no RAM is.
    pub memory: u64,
    /// For anything else, signals included.
    pub others: u64,
}

fn kick_signal() -> libc::c_int {
    libc::SIGRTMIN() + 1
}

/// Makes the kick's signal interrupt a system call and do nothing else.
fn prepare_signal() -> io::Result<()> {
    extern "C" fn nothing(_: libc::c_int) {}
    // SAFETY: an all-zero `sigaction` is a valid value of that plain C struct.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = nothing as *const () as usize;
    // SAFETY: `action` lives across the call, and its handler is async-signal-safe: it does nothing.
    if unsafe { libc::sigaction(kick_signal(), &raw const action, std::ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

impl Cpus {
    /// Starts a thread for each CPU, all paused.
    ///
    /// With `sandbox` each gives up what it does not need before it is paused.
    pub(super) fn start(
        cpus: Vec<VcpuFd>,
        bus: &Arc<Bus>,
        stop: &Arc<Stop>,
        sandbox: bool,
    ) -> Result<Self, MachineError> {
        prepare_signal().map_err(MachineError::Threads)?;
        let state = Arc::new(State {
            wish: Mutex::new(Wish::Pause),
            changed: Condvar::new(),
            still: AtomicUsize::new(0),
            exits: Default::default(),
        });
        let mut started = Self {
            state,
            threads: Mutex::default(),
        };
        for (index, cpu) in cpus.into_iter().enumerate() {
            let (state, bus, stop) = (Arc::clone(&started.state), Arc::clone(bus), Arc::clone(stop));
            let thread = std::thread::Builder::new()
                .name(format!("cpu {index}"))
                .spawn(move || {
                    let guard = Last { index, state, stop };
                    if sandbox && let Err(error) = sandbox::confine_thread(Task::Cpu) {
                        // It never runs the guest: the machine ends.
                        guard.stop.fail(format!("CPU {index}: {error}"));
                        stand_still(&guard.state);
                        return;
                    }
                    run(cpu, index, &guard.state, &bus, &guard.stop);
                })
                .map_err(MachineError::Threads)?;
            started.threads.get_mut().push(thread);
        }
        Ok(started)
    }

    /// Changes what is wanted, unless the CPUs have been ended.
    fn wish(&self, wish: Wish) {
        let mut place = self.state.wish.lock();
        if *place != Wish::End {
            *place = wish;
        }
        drop(place);
        self.state.changed.notify_all();
    }

    /// Lets all CPUs run.
    pub(super) fn resume(&self) {
        self.wish(Wish::Run);
    }

    /// Has no CPU run guest code, from when this returns until [`Cpus::resume`].
    pub(super) fn pause(&self) {
        self.wish(Wish::Pause);
        self.wait_still();
    }

    /// Returns true if CPUs are paused.
    pub(super) fn is_paused(&self) -> bool {
        *self.state.wish.lock() == Wish::Pause
    }

    fn wait_still(&self) {
        let threads = self.threads.lock();
        while self.state.still.load(Ordering::SeqCst) < threads.len() {
            kick(&threads);
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Returns the counts of exits from the guest.
    pub(super) fn exits(&self) -> Exits {
        let [ports, memory, others] = self
            .state
            .exits
            .each_ref()
            .map(|count| count.load(Ordering::Relaxed));
        Exits {
            ports,
            memory,
            others,
        }
    }

    /// Ends all CPUs.
    pub(super) fn end(&self) {
        self.wish(Wish::End);
        self.wait_still();
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!("a CPU thread panicked");
            }
        }
    }
}

/// A CPU's thread until its end. One that panics never runs again, and must not be waited for: the machine ends.
struct Last {
    index: usize,
    state: Arc<State>,
    stop: Arc<Stop>,
}

impl Drop for Last {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.state.still.fetch_add(1, Ordering::SeqCst);
            self.stop
                .fail(format!("the thread of CPU {} panicked", self.index));
        }
    }
}

fn kick(threads: &[JoinHandle<()>]) {
    for thread in threads.iter().filter(|thread| !thread.is_finished()) {
        // SAFETY: the thread has not been joined, so its handle is valid; the signal's handler does nothing.
        unsafe { libc::pthread_kill(thread.as_pthread_t(), kick_signal()) };
    }
}

fn run(mut cpu: VcpuFd, index: usize, state: &State, bus: &Bus, stop: &Stop) {
    loop {
        {
            let mut wish = state.wish.lock();
            if *wish == Wish::Pause
                && let Err(error) = mark_paused(&cpu)
            {
                tracing::debug!(cpu = index, %error, "cannot notify the guest's clock of the pause");
            }
            if *wish != Wish::Run {
                state.still.fetch_add(1, Ordering::SeqCst);
                while *wish == Wish::Pause {
                    state.changed.wait(&mut wish);
                }
                if *wish == Wish::End {
                    // It stays still for good.
                    return;
                }
                state.still.fetch_sub(1, Ordering::SeqCst);
            }
        }
        let kind = match cpu.run() {
            Ok(VcpuExit::IoIn(port, data)) => {
                bus.read_port(port, data);
                0
            }
            Ok(VcpuExit::IoOut(port, data)) => {
                bus.write_port(port, data);
                0
            }
            Ok(VcpuExit::MmioRead(address, data)) => {
                bus.read_memory(address, data);
                1
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                bus.write_memory(address, data);
                1
            }
            Ok(VcpuExit::Shutdown) => {
                tracing::warn!(
                    cpu = index,
                    "a triple fault: the guest's kernel failed, or restarts as a last resort"
                );
                stop.ask(super::Reason::Reset);
                park(state);
                2
            }
            Ok(VcpuExit::SystemEvent(..)) => {
                stop.ask(super::Reason::Reset);
                park(state);
                2
            }
            Ok(VcpuExit::Hlt | VcpuExit::Intr) => 2,
            Ok(VcpuExit::InternalError | VcpuExit::FailEntry(..)) => {
                stop.fail(format!(
                    "KVM stopped CPU {index}: it cannot run this guest's code. Some hosts nest without hardware that \
                     helps; what their KVM cannot emulate ends here"
                ));
                park(state);
                2
            }
            Ok(other) => {
                let message = format!("{other:?}");
                stop.fail(format!("KVM stopped CPU {index}: {message}"));
                park(state);
                2
            }
            Err(error) if [libc::EINTR, libc::EAGAIN].contains(&error.errno()) => 2,
            Err(error) => {
                let source = io::Error::from_raw_os_error(error.errno());
                stop.fail(format!("KVM cannot run CPU {index}: {source}"));
                park(state);
                2
            }
        };
        state.exits[kind].fetch_add(1, Ordering::Relaxed);
    }
}

/// Marks the guest's KVM clock as paused (`KVM_KVMCLOCK_CTRL`), so that its watchdogs do not take the time for a hang.
fn mark_paused(cpu: &VcpuFd) -> io::Result<()> {
    match cpu.kvmclock_ctrl() {
        Ok(()) => Ok(()),
        // The guest has another clock, or none yet.
        Err(error) if error.errno() == libc::EINVAL => Ok(()),
        Err(error) => Err(io::Error::from_raw_os_error(error.errno())),
    }
}

/// Is still, for good: this CPU must not run.
fn stand_still(state: &State) {
    state.still.fetch_add(1, Ordering::SeqCst);
}

/// Waits until something else is wanted than to run: this CPU cannot.
fn park(state: &State) {
    let mut wish = state.wish.lock();
    while *wish == Wish::Run {
        state.changed.wait(&mut wish);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Reason;

    /// A pause or an end must not wait forever for a CPU whose thread is gone.
    #[test]
    fn panicked_cpu_counts_as_still_and_ends_the_machine() {
        let state = Arc::new(State {
            wish: Mutex::new(Wish::Run),
            changed: Condvar::new(),
            still: AtomicUsize::new(0),
            exits: Default::default(),
        });
        let stop = Arc::new(Stop::default());
        let thread = |panics: bool| {
            let guard = Last {
                index: 3,
                state: Arc::clone(&state),
                stop: Arc::clone(&stop),
            };
            std::thread::spawn(move || {
                let _guard = guard;
                assert!(!panics, "as is asked for");
            })
        };
        thread(false).join().expect("no panic");
        assert_eq!((state.still.load(Ordering::SeqCst), stop.is_asked()), (0, false));
        thread(true).join().expect_err("a panic");
        assert_eq!(state.still.load(Ordering::SeqCst), 1);
        let message = "the thread of CPU 3 panicked".to_owned();
        assert_eq!(stop.wait(), Reason::Failed(message));
        let cpus = Cpus {
            state,
            threads: Mutex::new(vec![std::thread::spawn(|| ())]),
        };
        // It is the one that is still: this returns.
        cpus.end();
    }
}
