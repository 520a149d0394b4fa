//! The x86-specific part of the machine. A port to another architecture is a module with the same functions:
//!
//! | function | what it does |
//! |---|---|
//! | [`memory_layout`] | cuts the guest's memory into the pieces around the hole for devices |
//! | [`before_cpus`] | makes interrupt controllers |
//! | [`pin_routes`] | how interrupt numbers below [`PINS`] reach them |
//! | [`check`], [`check_command_line`] | whether there is a kernel to start, and its command line fits |
//! | [`load`] | puts kernel, initramfs, command line and tables in memory; answers where to begin |
//! | [`make_cpus`] | makes the CPUs, the first of them at that place |
//! | [`Power`] | the ports at which a guest switches itself off or restarts |
//! | [`AcpiTimer`], [`Cmos`] | the clocks that firmware reads |

mod acpi;
mod boot;
mod boot_error;
mod clocks;
mod cpu;
mod hotplug_aml;

use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE,
    KVM_PIT_SPEAKER_DUMMY, kvm_irq_routing_entry, kvm_pit_config,
};
use kvm_ioctls::VmFd;

pub(super) use boot::{check, check_command_line, load};
pub use boot_error::BootError;
pub(super) use clocks::{AcpiTimer, CMOS_PORT, CMOS_PORTS, Cmos, TIMER_PORT, TIMER_PORTS};
pub(super) use cpu::make_cpus;

use super::bus::Ports;
use super::kvm_error::refuses;
use super::{MachineError, Reason, Stop};
use std::sync::Arc;

/// The pins of the I/O APIC.
pub(super) const PINS: u32 = 24;
/// The pin of the serial port.
pub(super) const SERIAL_PIN: u32 = 4;
/// The pin of the hot-plug registers, and their ports.
pub(super) const HOTPLUG_PIN: u32 = 5;
pub(super) const HOTPLUG_PORT: u16 = 0x610;
/// The ports of the serial port.
pub(super) const SERIAL_PORT: u16 = 0x3F8;
pub(super) const SERIAL_PORTS: u16 = 8;
/// The most CPUs.
pub(super) const CPUS_MAX: u16 = 32;

/// The end of memory below 4 GiB; device windows follow.
pub(super) const HOLE: u64 = 0xC000_0000;
/// The address at which memory continues.
const FOUR_GIB: u64 = 1 << 32;
/// The address range of the PCI functions' windows.
pub(super) const WINDOWS: std::ops::Range<u64> = HOLE..0xF000_0000;
const IOAPIC: u32 = 0xFEC0_0000;
const LAPIC: u32 = 0xFEE0_0000;
/// Pages that KVM wants for itself on Intel's processors, above all that answers.
const TSS: usize = 0xFFFB_D000;
const IDENTITY_MAP: u64 = 0xFFFB_C000;

/// Power-off and reset registers, as named in the ACPI tables.
pub(super) const SLEEP_PORT: u16 = 0x600;
pub(super) const RESET_PORT: u16 = 0x601;
pub(super) const POWER_PORTS: u16 = 2;
pub(super) const RESET_VALUE: u8 = 1;
/// The sleep type of "soft off", and the bit that says go.
const SLEEP_OFF: u8 = 5;
const SLEEP_ENABLE: u8 = 1 << 5;
/// The keyboard controller, which is only here for its reset line.
pub(super) const KEYBOARD_PORT: u16 = 0x60;
pub(super) const KEYBOARD_PORTS: u16 = 5;
const KEYBOARD_COMMAND: u16 = 4;
const KEYBOARD_RESET: u8 = 0xFE;

/// The pieces of `bytes` of memory: guest address and length of each.
pub(super) fn memory_layout(bytes: u64) -> Vec<(u64, u64)> {
    let low = bytes.min(HOLE);
    let mut pieces = vec![(0, low)];
    if bytes > low {
        pieces.push((FOUR_GIB, bytes - low));
    }
    pieces
}

/// Makes interrupt controllers and a timer.
pub(super) fn before_cpus(vm: &VmFd) -> Result<(), MachineError> {
    vm.set_identity_map_address(IDENTITY_MAP)
        .map_err(refuses("the identity map"))?;
    vm.set_tss_address(TSS)
        .map_err(refuses("the task state segment"))?;
    vm.create_irq_chip().map_err(refuses("interrupt controllers"))?;
    let pit = kvm_pit_config {
        // Port 0x61 is read by kernels that calibrate their clocks.
        flags: KVM_PIT_SPEAKER_DUMMY,
        ..Default::default()
    };
    vm.create_pit2(pit).map_err(refuses("a timer"))
}

/// The routes of the controllers' pins.
pub(super) fn pin_routes() -> Vec<kvm_irq_routing_entry> {
    let to = |chip, gsi, pin| {
        let mut entry = kvm_irq_routing_entry {
            gsi,
            type_: KVM_IRQ_ROUTING_IRQCHIP,
            ..Default::default()
        };
        entry.u.irqchip.irqchip = chip;
        entry.u.irqchip.pin = pin;
        entry
    };
    let pic = (0..16).filter(|&gsi| gsi != 2).map(|gsi| match gsi {
        0..8 => to(KVM_IRQCHIP_PIC_MASTER, gsi, gsi),
        _ => to(KVM_IRQCHIP_PIC_SLAVE, gsi, gsi - 8),
    });
    // Without a legacy controller the timer is on pin 2, as on most machines.
    let ioapic = (0..PINS).map(|gsi| to(KVM_IRQCHIP_IOAPIC, gsi, if gsi == 0 { 2 } else { gsi }));
    pic.chain(ioapic).collect()
}

/// The ports at which a guest ends its own machine.
#[derive(Debug)]
pub(super) struct Power(pub(super) Arc<Stop>);

impl Ports for Power {
    fn read(&mut self, _: u16, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&mut self, offset: u16, data: &[u8]) {
        match (SLEEP_PORT + offset, data) {
            (SLEEP_PORT, &[value]) if value == SLEEP_OFF << 2 | SLEEP_ENABLE => self.0.ask(Reason::PowerOff),
            (RESET_PORT, &[RESET_VALUE]) => self.0.ask(Reason::Reset),
            _ => {}
        }
    }
}

/// The one function of a keyboard controller that remains: reset.
#[derive(Debug)]
pub(super) struct Keyboard(pub(super) Arc<Stop>);

impl Ports for Keyboard {
    fn read(&mut self, _: u16, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&mut self, offset: u16, data: &[u8]) {
        if (offset, data) == (KEYBOARD_COMMAND, &[KEYBOARD_RESET]) {
            self.0.ask(Reason::Reset);
        }
    }
}
