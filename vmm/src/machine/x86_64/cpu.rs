//! The CPUs' state before the first instruction.

use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, Msrs, kvm_fpu, kvm_msr_entry, kvm_regs, kvm_segment};
use kvm_ioctls::{Cap, VcpuFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::boot::{Entry, Mode};
use crate::machine::MachineError;
use crate::machine::kvm::KvmMachine;
use crate::machine::kvm_error::refuses;

/// The addresses of the first CPU's tables, in memory that kernels reuse later.
const GDT: u64 = 0x500;
const PML4: u64 = 0x9000;
const PDPT: u64 = 0xA000;
const PAGE_DIRECTORIES: u64 = 0xB000;
const STACK: u64 = 0x8FF0;

const CR0_PE: u64 = 1;
const CR0_ET: u64 = 1 << 4;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
const PRESENT_WRITABLE: u64 = 3;
const LARGE: u64 = 1 << 7;

const MSR_MISC_ENABLE: u32 = 0x1A0;
const MISC_FAST_STRINGS: u64 = 1;
const MSR_MTRR_DEFAULT: u32 = 0x2FF;
/// Enabled, write-back.
const MTRR_WRITE_BACK: u64 = 1 << 11 | 6;

/// Makes `count` CPUs; the first one begins at `entry`, the others wait to be started by it.
pub(in crate::machine) fn make_cpus(
    machine: &KvmMachine,
    count: u16,
    entry: &Entry,
) -> Result<Vec<VcpuFd>, MachineError> {
    (0..count)
        .map(|index| {
            let cpu = machine.vm().create_vcpu(index.into()).map_err(refuses("a CPU"))?;
            set_cpuid(machine, &cpu, index, count)?;
            set_msrs(&cpu)?;
            let fpu = kvm_fpu {
                fcw: 0x37F,
                mxcsr: 0x1F80,
                ..Default::default()
            };
            cpu.set_fpu(&fpu)
                .map_err(refuses("a CPU's floating-point state"))?;
            set_lapic(&cpu)?;
            if index == 0 {
                begin(machine.memory(), &cpu, entry)?;
            }
            Ok(cpu)
        })
        .collect()
}

fn set_cpuid(machine: &KvmMachine, cpu: &VcpuFd, index: u16, count: u16) -> Result<(), MachineError> {
    const HYPERVISOR: u32 = 1 << 31;
    const TSC_DEADLINE: u32 = 1 << 24;
    let supported = machine.kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES);
    let mut cpuid = supported.map_err(refuses("what CPUs there can be"))?;
    let id = u32::from(index);
    let id_bits = u32::from(count).next_power_of_two().trailing_zeros();
    for entry in cpuid.as_mut_slice() {
        match entry.function {
            1 => {
                entry.ebx = entry.ebx & 0x0000_FFFF | id << 24 | u32::from(count) << 16;
                entry.ecx |= HYPERVISOR;
                if machine.kvm.check_extension(Cap::TscDeadlineTimer) {
                    entry.ecx |= TSC_DEADLINE;
                }
            }
            // One package, as many cores as CPUs, one thread each.
            4 => entry.eax = entry.eax & 0x0000_3FFF | (u32::from(count) - 1) << 26,
            0xB | 0x1F => {
                entry.edx = id;
                let (bits, level, kind) = match entry.index {
                    0 => (0, 1, 1),
                    1 => (id_bits, u32::from(count), 2),
                    _ => (0, 0, 0),
                };
                (entry.eax, entry.ebx, entry.ecx) = (bits, level, kind << 8 | entry.index);
            }
            0x8000_0008 => entry.ecx = id_bits << 12 | (u32::from(count) - 1),
            0x8000_001E => (entry.eax, entry.ebx, entry.ecx) = (id, id, 0),
            _ => {}
        }
    }
    cpu.set_cpuid2(&cpuid).map_err(refuses("a CPU's features"))
}

fn set_msrs(cpu: &VcpuFd) -> Result<(), MachineError> {
    let entries = [
        (MSR_MISC_ENABLE, MISC_FAST_STRINGS),
        (MSR_MTRR_DEFAULT, MTRR_WRITE_BACK),
    ]
    .map(|(index, data)| kvm_msr_entry {
        index,
        data,
        ..Default::default()
    });
    for entry in entries {
        let one = Msrs::from_entries(&[entry])
            .map_err(|error| MachineError::Threads(std::io::Error::other(error)))?;
        // A processor that has no such register does without.
        cpu.set_msrs(&one).map_err(refuses("a CPU's registers"))?;
    }
    Ok(())
}

/// Connects the legacy controller's and the non-maskable interrupt's lines.
fn set_lapic(cpu: &VcpuFd) -> Result<(), MachineError> {
    const LVT_LINT0: usize = 0x350;
    const LVT_LINT1: usize = 0x360;
    const EXTERNAL: u32 = 7;
    const NMI: u32 = 4;
    let mut lapic = cpu.get_lapic().map_err(refuses("a CPU's interrupt controller"))?;
    for (register, mode) in [(LVT_LINT0, EXTERNAL), (LVT_LINT1, NMI)] {
        // The registers are the bytes of 32-bit words.
        let bytes = &mut lapic.regs[register..register + 4];
        let mut word = [0; 4];
        for (to, from) in word.iter_mut().zip(&*bytes) {
            *to = *from as u8;
        }
        let value = u32::from_le_bytes(word) & !0x700 | mode << 8;
        for (to, from) in bytes.iter_mut().zip(value.to_le_bytes()) {
            *to = from as libc::c_char;
        }
    }
    cpu.set_lapic(&lapic)
        .map_err(refuses("a CPU's interrupt controller"))
}

/// A flat segment for the first instruction, and its descriptor: code or data, of 64 or 32 bits.
fn segment(index: u16, code: bool, long: bool) -> (kvm_segment, u64) {
    let kind: u8 = if code { 0xB } else { 0x3 };
    let segment = kvm_segment {
        base: 0,
        limit: 0xFFFF_FFFF,
        selector: index * 8,
        type_: kind,
        present: 1,
        dpl: 0,
        db: u8::from(!long),
        s: 1,
        l: u8::from(long),
        g: 1,
        ..Default::default()
    };
    let flags = 1 << 3 | u64::from(!long) << 2 | u64::from(long) << 1;
    let descriptor = 0xFFFF | u64::from(kind) << 40 | 1 << 44 | 1 << 47 | 0xF << 48 | flags << 52;
    (segment, descriptor)
}

/// Sets the first CPU to the kernel's first instruction.
fn begin(memory: &GuestMemoryMmap, cpu: &VcpuFd, entry: &Entry) -> Result<(), MachineError> {
    let long = entry.mode == Mode::Long;
    let put = |value: u64, at: u64| {
        let written = memory.write_obj(value, GuestAddress(at));
        written.map_err(|_| {
            MachineError::Boot(super::BootError::NoRoom {
                what: "tables",
                bytes: 0x1_0000,
            })
        })
    };
    // The boot protocol names the selectors: code 0x10, data 0x18.
    let (code, code_descriptor) = segment(2, true, long);
    let (data, data_descriptor) = segment(3, false, false);
    for (index, descriptor) in [0, 0, code_descriptor, data_descriptor].into_iter().enumerate() {
        put(descriptor, GDT + index as u64 * 8)?;
    }
    let mut sregs = cpu.get_sregs().map_err(refuses("a CPU's segments"))?;
    (sregs.gdt.base, sregs.gdt.limit) = (GDT, 4 * 8 - 1);
    (sregs.idt.base, sregs.idt.limit) = (0, 0xFFF);
    sregs.cs = code;
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.cr0 = CR0_PE | CR0_ET;
    sregs.cr4 = 0;
    if long {
        // The first four GiB, where they are.
        put(PDPT | PRESENT_WRITABLE, PML4)?;
        for gib in 0..4 {
            let directory = PAGE_DIRECTORIES + gib * 0x1000;
            put(directory | PRESENT_WRITABLE, PDPT + gib * 8)?;
            for page in 0..512 {
                let address = gib << 30 | page << 21;
                put(address | LARGE | PRESENT_WRITABLE, directory + page * 8)?;
            }
        }
        sregs.cr3 = PML4;
        sregs.cr4 = CR4_PAE;
        sregs.cr0 |= CR0_PG;
        sregs.efer = EFER_LME | EFER_LMA;
    }
    cpu.set_sregs(&sregs).map_err(refuses("a CPU's segments"))?;
    let regs = kvm_regs {
        rflags: 2,
        rip: entry.address,
        rsp: STACK,
        rbp: STACK,
        // One protocol wants its parameters here, the other there.
        rsi: if long { entry.parameters } else { 0 },
        rbx: if long { 0 } else { entry.parameters },
        ..Default::default()
    };
    cpu.set_regs(&regs).map_err(refuses("a CPU's registers"))
}
