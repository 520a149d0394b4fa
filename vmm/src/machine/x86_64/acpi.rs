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

use super::boot_error::BootError;
use super::hotplug_aml::{event_device, slots};
use super::{
    IOAPIC, LAPIC, RESET_PORT, RESET_VALUE, SERIAL_PIN, SERIAL_PORT, SERIAL_PORTS, SLEEP_OFF, SLEEP_PORT,
    WINDOWS,
};

/// The address at which kernels search for the first table by default.
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

/// The definition block: the PCI bus and its slots, the serial port, the CPUs, and what "off" is called.
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
    slots(&mut body);
    event_device(&mut body);
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

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::Bytes;

    /// The tables of a machine, by signature, found from the first one as a kernel finds them.
    fn tables(cpus: u16) -> Vec<([u8; 4], Vec<u8>)> {
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 1 << 20)]).expect("memory");
        let first = write(&memory, cpus).expect("room for tables");
        let bytes = |at: u64, len: usize| {
            let mut bytes = vec![0; len];
            memory.read_slice(&mut bytes, GuestAddress(at)).expect("memory");
            bytes
        };
        let u64_in =
            |bytes: &[u8], at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let table = |at: u64| {
            let len = u32::from_le_bytes(bytes(at + 4, 4).try_into().expect("four bytes"));
            let table = bytes(at, len as usize);
            let sum = table.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
            assert_eq!(sum, 0, "the checksum of {:?}", &table[..4]);
            (table[..4].try_into().expect("a signature"), table)
        };
        let rsdp = bytes(first, 36);
        assert_eq!(&rsdp[..8], b"RSD PTR ");
        let (_, xsdt) = table(u64_in(&rsdp, 24));
        let mut found: Vec<_> = xsdt[36..].chunks(8).map(|at| table(u64_in(at, 0))).collect();
        let (_, fadt) = found.iter().find(|(name, _)| name == b"FACP").expect("a FADT");
        let dsdt = u64_in(fadt, 140);
        found.push(table(dsdt));
        found
    }

    fn find(tables: &[([u8; 4], Vec<u8>)], name: [u8; 4]) -> &[u8] {
        &tables
            .iter()
            .find(|(found, _)| *found == name)
            .expect("the table")
            .1
    }

    #[test]
    fn tables_list_every_cpu_once() {
        for cpus in [1, 4, 32] {
            let tables = tables(cpus);
            let madt = find(&tables, *b"APIC");
            let mut rest = &madt[44..];
            let (mut ids, mut ioapics) = (Vec::new(), 0);
            while let [kind, len, ..] = *rest {
                match kind {
                    // Enabled: the flags' first bit.
                    0 if rest[4] & 1 == 1 => ids.push((rest[2], rest[3])),
                    1 => ioapics += 1,
                    _ => {}
                }
                rest = &rest[usize::from(len)..];
            }
            let wanted: Vec<_> = (0..cpus as u8).map(|cpu| (cpu, cpu)).collect();
            assert_eq!((ids, ioapics), (wanted, 1));
            let dsdt = find(&tables, *b"DSDT");
            let devices = dsdt.windows(8).filter(|bytes| bytes == b"ACPI0007").count();
            assert_eq!(devices, usize::from(cpus));
        }
    }

    #[test]
    fn tables_make_every_slot_but_the_bridges_ejectable() {
        let tables = tables(2);
        let dsdt = find(&tables, *b"DSDT");
        let count = |wanted: &[u8]| {
            dsdt.windows(wanted.len())
                .filter(|bytes| *bytes == wanted)
                .count()
        };
        assert_eq!(count(b"_EJ0"), 31);
        assert_eq!(count(b"_SUN"), 31);
        assert_eq!((count(b"ACPI0013"), count(b"_EVT")), (1, 1));
        assert_eq!(count(b"PWRB"), 2, "a button, and who presses it");
        // The pin of the event device: level, active high, ours alone, as a whole descriptor.
        assert_eq!(count(&[0x89, 6, 0, 1, 1, 5, 0, 0, 0]), 1);
        // Slot 31's address, and nobody has one beyond it.
        assert_eq!((count(b"S31_"), count(b"S32_"), count(b"S00_")), (3, 0, 0));
    }
}
