//! The ACPI tables: which CPUs, interrupt controllers and devices there are, and how to switch off.
//!
//! The machine is what the specification calls hardware-reduced: no fixed registers beside those for sleep and
//! reset. ACPI 6.5, 5.2 and 4.1.

use acpi_tables::Aml;
use acpi_tables::aml::{self, Path};
use acpi_tables::fadt::{FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::boot::BootError;
use super::{
    IOAPIC, LAPIC, RESET_PORT, RESET_VALUE, SERIAL_PIN, SERIAL_PORT, SERIAL_PORTS, SLEEP_OFF, SLEEP_PORT,
    WINDOWS,
};

/// Where kernels look for the first table if nobody tells them.
const RSDP: u64 = 0xE_0000;
const TABLES: u64 = 0xE_0040;
const TABLES_END: u64 = 0xF_F000;
const OEM: [u8; 6] = *b"RNGDSK";
const OEM_TABLE: [u8; 8] = *b"RINGDISK";

/// Puts tables one behind the other.
struct Writer<'a> {
    memory: &'a GuestMemoryMmap,
    next: u64,
}

impl Writer<'_> {
    fn put(&mut self, table: &dyn Aml) -> Result<u64, BootError> {
        let mut bytes = Vec::new();
        table.to_aml_bytes(&mut bytes);
        let (at, len) = (self.next, bytes.len() as u64);
        let fits = at + len <= TABLES_END && self.memory.write_slice(&bytes, GuestAddress(at)).is_ok();
        if !fits {
            return Err(BootError::NoRoom {
                what: "ACPI tables",
                bytes: len,
            });
        }
        self.next = (at + len).next_multiple_of(64);
        Ok(at)
    }
}

/// Writes the tables. Answers where the first one is.
pub(super) fn write(memory: &GuestMemoryMmap, cpus: u16) -> Result<u64, BootError> {
    let mut writer = Writer { memory, next: TABLES };
    let dsdt = writer.put(&dsdt(cpus))?;
    let port = |port: u16| GAS::new(AddressSpace::SystemIo, 8, 0, AccessSize::ByteAccess, port.into());
    let mut fadt = FADTBuilder::new(OEM, OEM_TABLE, 1)
        .dsdt_64(dsdt)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup)
        .flag(Flags::Wbinvd);
    fadt.reset_reg = port(RESET_PORT);
    fadt.reset_value = RESET_VALUE;
    fadt.sleep_control_reg = port(SLEEP_PORT);
    fadt.sleep_status_reg = port(SLEEP_PORT);
    // No VGA, no clock in CMOS, and no keyboard controller worth looking for.
    fadt.iapc_boot_arch = (1 << 2 | 1 << 5).into();
    let fadt = writer.put(&fadt.finalize())?;
    let mut madt = MADT::new(OEM, OEM_TABLE, 1, LocalInterruptController::Address(LAPIC));
    for cpu in 0..cpus {
        let id = cpu as u8;
        madt.add_structure(ProcessorLocalApic::new(id, id, EnabledStatus::Enabled));
    }
    madt.add_structure(IoApic::new(0, IOAPIC, 0));
    let madt = writer.put(&madt)?;
    let mut xsdt = XSDT::new(OEM, OEM_TABLE, 1);
    xsdt.add_entry(fadt);
    xsdt.add_entry(madt);
    let xsdt = writer.put(&xsdt)?;
    let mut first = Writer { memory, next: RSDP };
    first.put(&Rsdp::new(OEM, xsdt))
}

/// The definition block: the PCI bus, the serial port, the CPUs, and what "off" is called.
fn dsdt(cpus: u16) -> Sdt {
    let mut body = Vec::new();
    let name = |name: &str| Path::new(name);
    aml::Device::new(
        name("_SB_.PCI0"),
        vec![
            &aml::Name::new(name("_HID"), &aml::EISAName::new("PNP0A03")),
            &aml::Name::new(name("_UID"), &aml::ZERO),
            &aml::Name::new(name("_BBN"), &aml::ZERO),
            &aml::Name::new(name("_SEG"), &aml::ZERO),
            &aml::Name::new(
                name("_CRS"),
                &aml::ResourceTemplate::new(vec![
                    &aml::AddressSpace::new_bus_number(0u16, 0u16),
                    &aml::IO::new(0xCF8, 0xCF8, 1, 8),
                    &aml::AddressSpace::new_io(0u16, 0xCF7u16, None),
                    &aml::AddressSpace::new_io(0xD00u16, 0xFFFFu16, None),
                    &aml::AddressSpace::new_memory(
                        aml::AddressSpaceCacheable::NotCacheable,
                        true,
                        WINDOWS.start as u32,
                        (WINDOWS.end - 1) as u32,
                        None,
                    ),
                ]),
            ),
        ],
    )
    .to_aml_bytes(&mut body);
    aml::Device::new(
        name("_SB_.COM1"),
        vec![
            &aml::Name::new(name("_HID"), &aml::EISAName::new("PNP0501")),
            &aml::Name::new(name("_UID"), &aml::ZERO),
            &aml::Name::new(
                name("_CRS"),
                &aml::ResourceTemplate::new(vec![
                    &aml::Interrupt::new(true, true, false, false, SERIAL_PIN),
                    &aml::IO::new(SERIAL_PORT, SERIAL_PORT, 1, SERIAL_PORTS as u8),
                ]),
            ),
        ],
    )
    .to_aml_bytes(&mut body);
    for cpu in 0..cpus {
        aml::Device::new(
            Path::new(&format!("_SB_.C{cpu:03}")),
            vec![
                &aml::Name::new(name("_HID"), &"ACPI0007"),
                &aml::Name::new(name("_UID"), &cpu),
            ],
        )
        .to_aml_bytes(&mut body);
    }
    aml::Name::new(name("_S5_"), &aml::Package::new(vec![&SLEEP_OFF])).to_aml_bytes(&mut body);
    let mut dsdt = Sdt::new(*b"DSDT", 36, 6, OEM, OEM_TABLE, 1);
    dsdt.append_slice(&body);
    dsdt
}
