//! Kernel, initramfs and command line, or firmware, in the guest's memory: Linux's 64-bit boot protocol for a bzImage, PVH for an
//! ELF file.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

use linux_loader::loader::bootparam::{boot_e820_entry, boot_params};
use linux_loader::loader::bzimage::BzImage;
use linux_loader::loader::elf::{Elf, PvhBootCapability};
use linux_loader::loader::start_info::{hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info};
use linux_loader::loader::{KernelLoader, KernelLoaderResult};
use vm_memory::{ByteValued, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use super::boot_error::{BootError, COMMAND_LINE_MAX};
use super::{FOUR_GIB, HOLE, RESET_PORT, RESET_VALUE, acpi};
use crate::machine::Payload;

/// Addresses in low memory.
const START_INFO: u64 = 0x6000;
const MODULES: u64 = 0x6040;
const MEMORY_MAP: u64 = 0x6100;
const ZERO_PAGE: u64 = 0x7000;
const COMMAND_LINE: u64 = 0x2_0000;
/// The end of low memory; ACPI tables are above it, as firmware is on other machines.
const LOW_END: u64 = 0xA_0000;
const HIGH_MEMORY: u64 = 0x10_0000;
/// The first instruction of a machine with firmware.
const RESET_VECTOR: u64 = 0xF_FFF0;

const E820_RAM: u32 = 1;
const E820_RESERVED: u32 = 2;
/// The 64-bit entry is this far into the kernel.
const ENTRY_64: u64 = 0x200;
const XLF_KERNEL_64: u16 = 1;
const PVH_MAGIC: u32 = 0x336E_C578;

/// The CPU mode at the kernel's entry point.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Mode {
    /// 64 bits, the first GiBs mapped where they are.
    Long,
    /// 32 bits, not mapped.
    Protected,
}

/// The entry point of the first CPU, and the address of its parameters.
#[derive(Clone, Copy, Debug)]
pub(in crate::machine) struct Entry {
    pub(super) mode: Mode,
    pub(super) address: u64,
    pub(super) parameters: u64,
}

fn open(what: &'static str, path: &Path) -> Result<File, BootError> {
    File::open(path)
        .and_then(|file| {
            if file.metadata()?.is_file() {
                return Ok(file);
            }
            Err(io::Error::other("it is not a regular file"))
        })
        .map_err(|source| BootError::Read {
            what,
            path: path.to_owned(),
            source,
        })
}

/// The RAM of the first piece above 1 MiB ends here.
fn low_end(memory: &GuestMemoryMmap) -> u64 {
    memory.iter().next().map_or(0, |region| region.len().min(HOLE))
}

/// Returns the error for a kernel or firmware that cannot be started.
fn unfit(payload: &Payload, why: &str) -> BootError {
    let (path, why) = (payload.boot_file().1.to_owned(), why.to_owned());
    match payload {
        Payload::Kernel { .. } => BootError::Kernel { path, why },
        Payload::Firmware(_) => BootError::Firmware { path, why },
    }
}

/// Returns true if the kernel or firmware is an ELF file; leaves `file` at its start.
fn is_elf(payload: &Payload, file: &mut File) -> Result<bool, BootError> {
    let (what, path) = payload.boot_file();
    let mut magic = [0; 4];
    file.read_exact(&mut magic)
        .and_then(|()| file.seek(SeekFrom::Start(0)))
        .map_err(|source| BootError::Read {
            what,
            path: path.to_owned(),
            source,
        })?;
    Ok(magic == *b"\x7fELF")
}

/// Refuses a command line that kernels cut.
pub(in crate::machine) fn check_command_line(line: &str) -> Result<(), BootError> {
    let bytes = line.len();
    if bytes >= COMMAND_LINE_MAX {
        return Err(BootError::CommandLine { bytes });
    }
    Ok(())
}

/// Fails if there is nothing to boot, as far as that can be checked without a machine.
pub(in crate::machine) fn check(payload: &Payload) -> Result<(), BootError> {
    check_command_line(payload.command_line())?;
    let (what, path) = payload.boot_file();
    let mut file = open(what, path)?;
    if matches!(payload, Payload::Firmware(_)) && !is_elf(payload, &mut file)? {
        return Err(unfit(payload, "it is no ELF file"));
    }
    match payload.initramfs() {
        Some(path) => open("initramfs", path).map(drop),
        None => Ok(()),
    }
}

/// Puts all in memory.
pub(in crate::machine) fn load(
    memory: &GuestMemoryMmap,
    payload: &Payload,
    cpus: u16,
) -> Result<Entry, BootError> {
    check(payload)?;
    let (what, path) = payload.boot_file();
    let mut file = open(what, path)?;
    let is_elf = is_elf(payload, &mut file)?;
    let high = Some(GuestAddress(HIGH_MEMORY));
    let loaded = if is_elf {
        Elf::load(memory, None, &mut file, high)
    } else {
        BzImage::load(memory, None, &mut file, high)
    }
    .map_err(|error| unfit(payload, &error.to_string()))?;

    let line = payload.command_line().as_bytes();
    put(memory, "command line", &[line, &[0]].concat(), COMMAND_LINE)?;
    let initramfs = match payload.initramfs() {
        Some(path) => Some(load_initramfs(memory, path, unpacked_end(&loaded))?),
        None => None,
    };
    let tables = acpi::write(memory, cpus)?;
    put(memory, "reset vector", &reset_code(), RESET_VECTOR)?;
    if is_elf {
        let PvhBootCapability::PvhEntryPresent(entry) = loaded.pvh_boot_cap else {
            return Err(unfit(payload, "it has no PVH note"));
        };
        write_start_info(memory, initramfs, tables)?;
        return Ok(Entry {
            mode: Mode::Protected,
            address: entry.0,
            parameters: START_INFO,
        });
    }
    write_zero_page(memory, &loaded, line.len(), initramfs, tables).ok_or_else(|| {
        unfit(
            payload,
            "it is older than the boot protocol 2.12, or has no 64-bit entry",
        )
    })??;
    Ok(Entry {
        mode: Mode::Long,
        address: loaded.kernel_load.0 + ENTRY_64,
        parameters: ZERO_PAGE,
    })
}

/// Returns the code that a restart in real mode executes. Linux jumps to the reset vector of a machine that is
/// hardware-reduced and has no EFI.
fn reset_code() -> [u8; 9] {
    const MOV_DX: u8 = 0xBA;
    const MOV_AL: u8 = 0xB0;
    const OUT_DX_AL: u8 = 0xEE;
    const HLT: u8 = 0xF4;
    const JMP: u8 = 0xEB;
    let [low, high] = RESET_PORT.to_le_bytes();
    // Back to the HLT, should anybody wake it.
    [MOV_DX, low, high, MOV_AL, RESET_VALUE, OUT_DX_AL, HLT, JMP, 0xFD]
}

fn put(memory: &GuestMemoryMmap, what: &'static str, bytes: &[u8], at: u64) -> Result<(), BootError> {
    memory
        .write_slice(bytes, GuestAddress(at))
        .map_err(|_| BootError::NoRoom {
            what,
            bytes: bytes.len() as u64,
        })
}

/// Returns the end of the memory that a kernel uses before it reads its parameters. An ELF file stays where it is. A
/// bzImage unpacks itself at its preferred address or, if it was loaded higher, from there, and states how much
/// memory it takes. Linux: `Documentation/arch/x86/boot.rst`, `init_size`.
fn unpacked_end(loaded: &KernelLoaderResult) -> u64 {
    let Some(header) = loaded.setup_header else {
        return loaded.kernel_end;
    };
    let alignment = u64::from(header.kernel_alignment).max(1);
    let loaded_at = loaded.kernel_load.0.checked_next_multiple_of(alignment);
    let at = loaded_at.unwrap_or(u64::MAX).max(header.pref_address);
    at.saturating_add(header.init_size.into()).max(loaded.kernel_end)
}

/// Loads the initramfs as high as it may be, not below `floor`: where it is and its length.
fn load_initramfs(memory: &GuestMemoryMmap, path: &Path, floor: u64) -> Result<(u64, u64), BootError> {
    let what = "initramfs";
    let mut file = open(what, path)?;
    let read = |source| BootError::Read {
        what,
        path: path.to_owned(),
        source,
    };
    let bytes = file.metadata().map_err(read)?.len();
    let at = low_end(memory).checked_sub(bytes).map(|at| at & !0xFFF);
    let at = at.filter(|&at| at >= floor);
    let Some(at) = at else {
        return Err(BootError::NoRoom { what, bytes });
    };
    let len = usize::try_from(bytes).unwrap_or(usize::MAX);
    memory
        .read_exact_volatile_from(GuestAddress(at), &mut file, len)
        .map_err(|error| read(io::Error::other(error)))?;
    Ok((at, bytes))
}

/// The guest's memory map: address, length, kind.
fn memory_map(memory: &GuestMemoryMmap) -> Vec<(u64, u64, u32)> {
    let mut map = vec![
        (0, LOW_END, E820_RAM),
        (LOW_END, HIGH_MEMORY - LOW_END, E820_RESERVED),
    ];
    for region in memory.iter() {
        let (start, len) = (region.start_addr().0, region.len());
        if start == 0 {
            map.push((HIGH_MEMORY, len - HIGH_MEMORY, E820_RAM));
        } else {
            debug_assert!(start >= FOUR_GIB);
            map.push((start, len, E820_RAM));
        }
    }
    map
}

/// Writes the parameters of Linux's boot protocol. `None`: the kernel does not know it.
fn write_zero_page(
    memory: &GuestMemoryMmap,
    loaded: &KernelLoaderResult,
    line_bytes: usize,
    initramfs: Option<(u64, u64)>,
    tables: u64,
) -> Option<Result<(), BootError>> {
    let mut header = loaded.setup_header?;
    if header.version < 0x20C || header.xloadflags & XLF_KERNEL_64 == 0 {
        return None;
    }
    // A loader that is registered nowhere.
    header.type_of_loader = 0xFF;
    header.cmd_line_ptr = COMMAND_LINE as u32;
    header.cmdline_size = line_bytes as u32;
    if let Some((at, bytes)) = initramfs {
        header.ramdisk_image = at as u32;
        header.ramdisk_size = bytes as u32;
    }
    let mut params = boot_params {
        hdr: header,
        acpi_rsdp_addr: tables,
        ..Default::default()
    };
    let map = memory_map(memory);
    params.e820_entries = map.len() as u8;
    for (entry, (addr, size, kind)) in params.e820_table.iter_mut().zip(map) {
        *entry = boot_e820_entry {
            addr,
            size,
            r#type: kind,
        };
    }
    Some(put(memory, "parameters", params.as_slice(), ZERO_PAGE))
}

/// A structure as bytes, of which there are no gaps.
fn bytes_of(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Writes the parameters of PVH.
fn write_start_info(
    memory: &GuestMemoryMmap,
    initramfs: Option<(u64, u64)>,
    tables: u64,
) -> Result<(), BootError> {
    const _: () = assert!(size_of::<hvm_start_info>() == 56 && size_of::<hvm_modlist_entry>() == 32);
    const _: () = assert!(size_of::<hvm_memmap_table_entry>() == 24);
    let map = memory_map(memory);
    let modules = u64::from(initramfs.is_some());
    if let Some((at, bytes)) = initramfs {
        put(memory, "parameters", &bytes_of(&[at, bytes, 0, 0]), MODULES)?;
    }
    for (index, (at, bytes, kind)) in (0..).zip(&map) {
        let entry = bytes_of(&[*at, *bytes, u64::from(*kind)]);
        put(memory, "parameters", &entry, MEMORY_MAP + index * 24)?;
    }
    let words = [
        u64::from(PVH_MAGIC) | 1 << 32,
        modules << 32,
        if modules > 0 { MODULES } else { 0 },
        COMMAND_LINE,
        tables,
        MEMORY_MAP,
        map.len() as u64,
    ];
    put(memory, "parameters", &bytes_of(&words), START_INFO)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Debian's kernels have some 12 MiB, and use 64 MiB and more from 16 MiB on to unpack themselves.
    #[test]
    fn initramfs_lies_above_the_kernels_unpack_area() {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 128 << 20)]).expect("memory");
        let loaded = |load: u64, prefers: u64, takes: u64| {
            let mut header = linux_loader::loader::bootparam::setup_header::default();
            (header.pref_address, header.init_size) = (prefers * MIB, (takes * MIB) as u32);
            header.kernel_alignment = 2 << 20;
            KernelLoaderResult {
                kernel_load: GuestAddress(load * MIB),
                kernel_end: (load + 12) * MIB,
                setup_header: Some(header),
                ..Default::default()
            }
        };
        assert_eq!(unpacked_end(&loaded(1, 16, 79)), 95 * MIB);
        assert_eq!(unpacked_end(&loaded(33, 16, 64)), (34 + 64) * MIB);
        assert_eq!(unpacked_end(&loaded(1, 0, 0)), 13 * MIB, "nothing is said");
        let elf = KernelLoaderResult {
            kernel_end: 80 * MIB,
            ..Default::default()
        };
        assert_eq!(unpacked_end(&elf), 80 * MIB);

        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("initrd");
        std::fs::write(&path, vec![7; 33 << 20]).expect("a file");
        let floor = unpacked_end(&loaded(1, 16, 79));
        let placed = load_initramfs(&memory, &path, floor);
        assert_eq!(placed.expect("just enough room"), (95 * MIB, 33 * MIB));
        let refused = load_initramfs(&memory, &path, floor + 0x1000).expect_err("a page too much");
        assert!(
            matches!(
                refused,
                BootError::NoRoom {
                    what: "initramfs",
                    ..
                }
            ),
            "{refused}"
        );
    }
}
