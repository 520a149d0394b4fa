//! A probe of the host's KVM that shares no code with the program under test.
//!
//! A host may have `/dev/kvm` and not be able to run a guest: a KVM that nests without hardware that helps emulates a part
//! of the instructions only. So the probe runs representative code, and says where that stops. Where it succeeds, a
//! machine of ours that fails has a fault of ours.

#![expect(unsafe_code, reason = "the memory of a machine")]

use std::io;

use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_pit_config, kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Error, Kvm, VcpuExit};

/// The memory of the probe's machine.
const MEMORY_BYTES: usize = 2 << 20;
/// The address of its code.
const CODE: usize = 0x1000;
/// The end of its stack.
const STACK: u64 = 0x8000;
/// The port that says that the code has come to its end.
const END_PORT: u16 = 0x600;
/// More exits than the code makes.
const EXITS_MAX: usize = 16;

/// The code that every machine of ours runs: 32 bits without paging, a stack, calls, an interrupt table, CPUID, string
/// instructions, and ports.
const PLAIN: &[&[u8]] = &[
    // call the next instruction; pop edi
    &[0xE8, 0, 0, 0, 0, 0x5F],
    // push 0; push 0; lidt [esp]; add esp, 8
    &[0x6A, 0, 0x6A, 0, 0x0F, 0x01, 0x1C, 0x24, 0x83, 0xC4, 0x08],
    // mov eax, 1; cpuid; rdtsc
    &[0xB8, 1, 0, 0, 0, 0x0F, 0xA2, 0x0F, 0x31],
    // mov ecx, 64; mov edi, 0x10000; rep stosb
    &[0xB9, 64, 0, 0, 0, 0xBF, 0, 0, 1, 0, 0xF3, 0xAA],
    // mov dx, 0x3fd; in al, dx
    &[0x66, 0xBA, 0xFD, 0x03, 0xEC],
];

/// The code that a kernel of a distribution runs before it prints a line, beyond that: registers of 128 bits.
const VECTORS: &[&[u8]] = &[
    // mov eax, cr4; or eax, OSFXSR | OSXMMEXCPT; mov cr4, eax
    &[0x0F, 0x20, 0xE0, 0x0D, 0, 0x06, 0, 0, 0x0F, 0x22, 0xE0],
    // mov esp, 0x8000; xorps xmm0, xmm0; movups [esp - 16], xmm0; movdqu xmm1, [esp - 16]
    &[
        0xBC, 0, 0x80, 0, 0, 0x0F, 0x57, 0xC0, 0x0F, 0x11, 0x44, 0x24, 0xF0,
    ],
    &[0xF3, 0x0F, 0x6F, 0x4C, 0x24, 0xF0],
];

/// Fails, with the reason, if this host's KVM cannot run the simplest kernels.
///
/// # Errors
///
/// The missing feature, as a sentence.
pub fn runs_tiny_kernels() -> Result<(), String> {
    run(PLAIN)
}

/// Fails, with the reason, if this host's KVM cannot run the kernels of distributions.
///
/// # Errors
///
/// The missing feature, as a sentence.
pub fn runs_stock_kernels() -> Result<(), String> {
    run(&[PLAIN, VECTORS].concat())
}

/// Anonymous memory, for as long as the machine lives.
struct Memory(*mut u8);

impl Memory {
    fn with(code: &[u8]) -> Result<Self, String> {
        // SAFETY: a new private mapping; no memory is passed.
        let place = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                MEMORY_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if place == libc::MAP_FAILED {
            return Err(format!("there is no memory: {}", io::Error::last_os_error()));
        }
        let place: *mut u8 = place.cast();
        assert!(CODE + code.len() < MEMORY_BYTES);
        // SAFETY: the mapping is longer than where the code ends, and nobody else has it.
        unsafe { std::ptr::copy_nonoverlapping(code.as_ptr(), place.add(CODE), code.len()) };
        Ok(Self(place))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and the machine that had it has gone.
        unsafe { libc::munmap(self.0.cast(), MEMORY_BYTES) };
    }
}

fn refused(what: &'static str) -> impl FnOnce(Error) -> String {
    move |error| {
        format!(
            "KVM refuses {what}: {}",
            io::Error::from_raw_os_error(error.errno())
        )
    }
}

fn run(steps: &[&[u8]]) -> Result<(), String> {
    let [low, high] = END_PORT.to_le_bytes();
    // mov dx, END_PORT; out dx, al; hlt
    let code = [&steps.concat()[..], &[0x66, 0xBA, low, high, 0xEE, 0xF4]].concat();
    let memory = Memory::with(&code)?;
    let kvm = Kvm::new().map_err(|error| {
        let error = io::Error::from_raw_os_error(error.errno());
        format!("/dev/kvm cannot be opened: {error}")
    })?;
    let vm = kvm.create_vm().map_err(refused("a machine"))?;
    vm.set_tss_address(0xFFFB_D000)
        .map_err(refused("a task state segment"))?;
    vm.create_irq_chip().map_err(refused("interrupt controllers"))?;
    vm.create_pit2(kvm_pit_config::default())
        .map_err(refused("a timer"))?;
    let region = kvm_userspace_memory_region {
        memory_size: MEMORY_BYTES as u64,
        userspace_addr: memory.0.addr() as u64,
        ..Default::default()
    };
    // SAFETY: the mapping lives until after the machine, which was made later.
    unsafe { vm.set_user_memory_region(region) }.map_err(refused("memory"))?;
    let mut cpu = vm.create_vcpu(0).map_err(refused("a CPU"))?;
    let features = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES);
    let features = features.map_err(refused("a list of features"))?;
    cpu.set_cpuid2(&features).map_err(refused("a CPU's features"))?;
    let mut special = cpu.get_sregs().map_err(refused("a CPU's segments"))?;
    let segment = |selector, kind| kvm_segment {
        limit: 0xFFFF_FFFF,
        selector,
        type_: kind,
        present: 1,
        db: 1,
        s: 1,
        g: 1,
        ..Default::default()
    };
    let data = segment(0x18, 0x3);
    special.cs = segment(0x10, 0xB);
    (special.ds, special.es, special.ss) = (data, data, data);
    special.cr0 = 0x11;
    cpu.set_sregs(&special).map_err(refused("a CPU's segments"))?;
    let mut registers = cpu.get_regs().map_err(refused("a CPU's registers"))?;
    (registers.rip, registers.rsp, registers.rflags) = (CODE as u64, STACK, 2);
    cpu.set_regs(&registers).map_err(refused("a CPU's registers"))?;
    for _ in 0..EXITS_MAX {
        let stopped = match cpu.run() {
            Ok(VcpuExit::IoOut(END_PORT, _)) => return Ok(()),
            Ok(VcpuExit::IoIn(_, data)) => {
                data.fill(0);
                continue;
            }
            Ok(other) => format!("{other:?}"),
            Err(error) if error.errno() == libc::EINTR => continue,
            Err(error) => io::Error::from_raw_os_error(error.errno()).to_string(),
        };
        let at = cpu.get_regs().map_or(0, |registers| registers.rip);
        let at = usize::try_from(at).unwrap_or(0).saturating_sub(CODE);
        let bytes = code.get(at..code.len().min(at + 8)).unwrap_or_default();
        return Err(format!(
            "/dev/kvm opens, but this host's KVM stops at the instruction {bytes:02x?} of a probe ({stopped})"
        ));
    }
    Err("/dev/kvm opens, but a probe's CPU does not come to its end".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A probe that always succeeds would turn a fault of the host into one of ours.
    #[test]
    fn probe_names_what_stops_it() {
        if let Err(why) = runs_tiny_kernels() {
            assert!(why.contains("kvm") || why.contains("KVM"), "{why}");
            return;
        }
        // An interrupt table of no entries, and an invalid instruction.
        let why =
            run(&[&[0x6A, 0, 0x6A, 0, 0x0F, 0x01, 0x1C, 0x24, 0x0F, 0x0B]]).expect_err("a triple fault");
        assert!(why.contains("Shutdown"), "{why}");
    }
}
