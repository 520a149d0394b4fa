//! The CPUs that a worker's thread may run on.

#![expect(unsafe_code, reason = "sched_setaffinity")]

use std::io;

/// Pins the calling thread to these CPUs.
pub(super) fn pin_to(cpus: &[usize]) -> io::Result<()> {
    // SAFETY: an all-zero `cpu_set_t` is the empty set of that plain C struct.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    let bits = 8 * size_of::<libc::cpu_set_t>();
    for &cpu in cpus {
        if cpu >= bits {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: `cpu` was just checked to lie inside the set.
        unsafe { libc::CPU_SET(cpu, &mut set) };
    }
    // SAFETY: `set` lives across the call and its size is given.
    if unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Returns the CPUs that the calling thread may run on, as the kernel writes them: `0-3,6`. Empty if they are unknown.
pub(super) fn allowed_cpus() -> String {
    // SAFETY: an all-zero `cpu_set_t` is the empty set of that plain C struct.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` lives across the call and its size is given. If the call fails, the set stays empty.
    unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) };
    // SAFETY: the index lies inside the set.
    let is_in = |cpu: usize| cpu < 8 * size_of::<libc::cpu_set_t>() && unsafe { libc::CPU_ISSET(cpu, &set) };
    let mut ranges: Vec<String> = Vec::new();
    let mut cpu = 0;
    while cpu < 8 * size_of::<libc::cpu_set_t>() {
        let first = cpu;
        while is_in(cpu) {
            cpu += 1;
        }
        match cpu - first {
            0 => cpu += 1,
            1 => ranges.push(first.to_string()),
            _ => ranges.push(format!("{first}-{}", cpu - 1)),
        }
    }
    ranges.join(",")
}
