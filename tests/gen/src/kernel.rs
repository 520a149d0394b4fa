//! Kernels for machines under test: a tiny one that obeys single letters, and the ELF file inside Debian's bzImage.
//!
//! Both begin by the PVH protocol: 32 bits, no paging, `ebx` at a `hvm_start_info`. Linux: `Documentation/arch/x86/boot.rst`
//! for what a bzImage says of its payload.

use std::io::Read;

/// The address at which the tiny kernel is loaded and begins.
const LOAD: u32 = 0x10_0000;
/// The line that it prints first.
pub const GREETING: &str = "tiny kernel\n";
/// The number of bytes it prints when it prints a lot.
pub const LOTS: usize = 32 << 10;
const HEADER_BYTES: usize = 64;
const SEGMENT_BYTES: usize = 56;

const SERIAL_DATA: u16 = 0x3F8;
const SERIAL_STATUS: u16 = 0x3FD;
const SLEEP_PORT: u16 = 0x600;
const RESET_PORT: u16 = 0x601;
const ASKED_PORT: u16 = 0x614;
const EJECT_PORT: u16 = 0x618;

/// The register of KVM's clock, the address that the clock writes to, and the offset of the flags there: `struct
/// pvclock_vcpu_time_info`.
const MSR_CLOCK: u32 = 0x4B56_4D01;
const CLOCK: u32 = 0x9000;
const CLOCK_FLAGS: u32 = 29;

/// Machine code with jumps to places that come later.
#[derive(Default)]
struct Code {
    bytes: Vec<u8>,
    /// The places where a distance of one byte is missing, and the label that each leads to.
    open: Vec<(usize, &'static str)>,
    labels: Vec<(&'static str, usize)>,
}

impl Code {
    fn put(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes.extend(bytes);
        self
    }

    fn label(&mut self, name: &'static str) -> &mut Self {
        self.labels.push((name, self.bytes.len()));
        self
    }

    /// An instruction whose last byte is how far `to` is from its end.
    fn jump(&mut self, opcode: u8, to: &'static str) -> &mut Self {
        self.put(&[opcode, 0]);
        self.open.push((self.bytes.len() - 1, to));
        self
    }

    /// `mov dx, port`, and an access to it.
    fn port(&mut self, port: u16, access: u8) -> &mut Self {
        let [low, high] = port.to_le_bytes();
        self.put(&[0x66, 0xBA, low, high, access])
    }

    fn at(&self, name: &str) -> usize {
        let found = self.labels.iter().find(|(label, _)| *label == name);
        found.map_or_else(|| panic!("no label {name}"), |(_, at)| *at)
    }

    fn finish(mut self) -> Vec<u8> {
        for (place, to) in std::mem::take(&mut self.open) {
            let distance = self.at(to) as isize - (place as isize + 1);
            self.bytes[place] = i8::try_from(distance).expect("a short jump").to_le_bytes()[0];
        }
        self.bytes
    }
}

const JMP: u8 = 0xEB;
const JZ: u8 = 0x74;
const JNZ: u8 = 0x75;
const IN_AL: u8 = 0xEC;
const IN_EAX: u8 = 0xED;
const OUT_AL: u8 = 0xEE;
const OUT_EAX: u8 = 0xEF;
const RET: u8 = 0xC3;

/// A kernel that prints [`GREETING`] on the serial port and then obeys the letters of its command line, and those
/// that come through the serial port: `q` switches off, `r` restarts, `e` lets the disk in slot 1 go, `w` is printed,
/// waits until that disk is asked for (once more, if it was) and lets it go, `h` stands still for good, `k` has KVM's
/// clock write to memory, `s` prints that clock's flags as a digit, `f` ends by a triple fault, `j` jumps to where no
/// memory is, `l` prints [`LOTS`] bytes; anything else is printed.
#[must_use]
pub fn tiny() -> Vec<u8> {
    let mut code = Code::default();
    // mov esp, 0x8000; mov esi, [ebx + 24]: the command line.
    code.put(&[0xBC, 0, 0x80, 0, 0, 0x8B, 0x73, 24]);
    // call the next instruction; pop edi: where we are. The greeting is so far from here, which is filled in below.
    code.put(&[0xE8, 0, 0, 0, 0]).label("here").put(&[0x5F]);
    // add edi, DISTANCE
    code.put(&[0x81, 0xC7, 0, 0, 0, 0]).label("added");
    code.label("greet")
        .put(&[0x8A, 0x07, 0x84, 0xC0])
        .jump(JZ, "line");
    code.port(SERIAL_DATA, OUT_AL).put(&[0x47]).jump(JMP, "greet");
    // mov al, [esi]; test al, al; inc esi
    code.label("line").put(&[0x8A, 0x06, 0x84, 0xC0]).jump(JZ, "poll");
    code.put(&[0x46]);
    // push the place to go on at, by a call whose distance is filled in below
    code.put(&[0xE8, 0, 0, 0, 0]).label("called 1").jump(JMP, "line");
    code.label("poll")
        .port(SERIAL_STATUS, IN_AL)
        .put(&[0xA8, 1])
        .jump(JZ, "poll");
    code.port(SERIAL_DATA, IN_AL);
    code.put(&[0xE8, 0, 0, 0, 0]).label("called 2").jump(JMP, "poll");

    code.label("obey").put(&[0x3C, b'q']).jump(JNZ, "not q");
    // The sleep type 5, and go.
    code.put(&[0xB0, 5 << 2 | 1 << 5])
        .port(SLEEP_PORT, OUT_AL)
        .put(&[RET]);
    code.label("not q").put(&[0x3C, b'r']).jump(JNZ, "not r");
    code.put(&[0xB0, 1]).port(RESET_PORT, OUT_AL).put(&[RET]);
    code.label("not r").put(&[0x3C, b'e']).jump(JNZ, "not e");
    code.put(&[0xB8, 1 << 1, 0, 0, 0])
        .port(EJECT_PORT, OUT_EAX)
        .put(&[RET]);
    code.label("not e").put(&[0x3C, b'w']).jump(JNZ, "not w");
    // What was asked before is heard; after the letter is printed, only what is asked later is seen.
    code.put(&[0xB8, 1 << 1, 0, 0, 0]).port(ASKED_PORT, OUT_EAX);
    code.put(&[0xB0, b'w']).port(SERIAL_DATA, OUT_AL);
    // test al, 2
    code.label("asked")
        .port(ASKED_PORT, IN_EAX)
        .put(&[0xA8, 1 << 1])
        .jump(JZ, "asked");
    code.put(&[0xB8, 1 << 1, 0, 0, 0])
        .port(EJECT_PORT, OUT_EAX)
        .put(&[RET]);
    code.label("not w").put(&[0x3C, b'h']).jump(JNZ, "not h");
    // cli; hlt
    code.label("halt").put(&[0xFA, 0xF4]).jump(JMP, "halt");
    code.label("not h").put(&[0x3C, b'k']).jump(JNZ, "not k");
    // mov ecx, MSR_KVM_SYSTEM_TIME_NEW; mov eax, CLOCK | 1; xor edx, edx; wrmsr
    code.put(&[0xB9]).put(&MSR_CLOCK.to_le_bytes());
    code.put(&[0xB8]).put(&(CLOCK | 1).to_le_bytes());
    code.put(&[0x31, 0xD2, 0x0F, 0x30, RET]);
    code.label("not k").put(&[0x3C, b's']).jump(JNZ, "not s");
    // mov al, [CLOCK + 29]; add al, '0'
    code.put(&[0xA0]).put(&(CLOCK + CLOCK_FLAGS).to_le_bytes());
    code.put(&[0x04, b'0']).port(SERIAL_DATA, OUT_AL).put(&[RET]);
    code.label("not s").put(&[0x3C, b'f']).jump(JNZ, "not f");
    // An interrupt table of no entries, and an invalid instruction.
    code.put(&[0x6A, 0, 0x6A, 0, 0x0F, 0x01, 0x1C, 0x24, 0x0F, 0x0B]);
    code.label("not f").put(&[0x3C, b'j']).jump(JNZ, "not j");
    // mov eax, 0xD0000000; jmp eax
    code.put(&[0xB8, 0, 0, 0, 0xD0, 0xFF, 0xE0]);
    code.label("not j").put(&[0x3C, b'l']).jump(JNZ, "not l");
    // mov ecx, LOTS
    code.put(&[0xB9]).put(&(LOTS as u32).to_le_bytes());
    code.label("more")
        .port(SERIAL_DATA, OUT_AL)
        .put(&[0x49])
        .jump(JNZ, "more")
        .put(&[RET]);
    code.label("not l").port(SERIAL_DATA, OUT_AL).put(&[RET]);
    code.label("greeting");

    let distances = [
        ("added", code.at("greeting") - code.at("here")),
        ("called 1", code.at("obey") - code.at("called 1")),
        ("called 2", code.at("obey") - code.at("called 2")),
    ];
    let ends: Vec<_> = distances.iter().map(|(label, _)| code.at(label)).collect();
    let mut bytes = code.finish();
    for (end, (_, distance)) in ends.into_iter().zip(distances) {
        bytes[end - 4..end].copy_from_slice(&(distance as u32).to_le_bytes());
    }
    bytes.extend(GREETING.as_bytes());
    bytes.push(0);
    elf(&bytes)
}

/// An ELF file of one segment at [`LOAD`], which begins with its first byte, and the note that says so.
fn elf(program: &[u8]) -> Vec<u8> {
    let note: Vec<u8> = [4u32, 4, 18]
        .iter()
        .flat_map(|word| word.to_le_bytes())
        .chain(*b"Xen\0")
        .chain(LOAD.to_le_bytes())
        .collect();
    let note_at = HEADER_BYTES + 2 * SEGMENT_BYTES;
    let program_at = note_at + note.len();
    let mut file = Vec::from(*b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    // An executable for x86-64, version 1.
    file.extend([2, 0, 62, 0, 1, 0, 0, 0]);
    file.extend(u64::from(LOAD).to_le_bytes());
    file.extend((HEADER_BYTES as u64).to_le_bytes());
    // No sections, no flags; the sizes of this header and of a segment's; two segments.
    file.extend([0; 12]);
    for half in [HEADER_BYTES as u16, SEGMENT_BYTES as u16, 2, 0, 0, 0] {
        file.extend(half.to_le_bytes());
    }
    // Kind, flags, and then offset, addresses, sizes, alignment: what is loaded, and the note.
    for (kind, flags, at, address, len) in [
        (1u32, 7u32, program_at, LOAD, program.len()),
        (4, 4, note_at, 0, note.len()),
    ] {
        file.extend([kind, flags].iter().flat_map(|word| word.to_le_bytes()));
        let address = u64::from(address);
        for word in [at as u64, address, address, len as u64, len as u64, 4] {
            file.extend(word.to_le_bytes());
        }
    }
    file.extend(note);
    file.extend(program);
    file
}

/// The ELF file in a bzImage whose payload is compressed with zstd, as Debian's is. `None`: there is none.
#[must_use]
pub fn vmlinux(bz_image: &[u8]) -> Option<Vec<u8>> {
    let word = |at: usize| {
        let bytes = bz_image.get(at..at + 4)?;
        Some(u32::from_le_bytes(bytes.try_into().ok()?) as usize)
    };
    // 0 sectors of set-up mean 4; one more is the boot sector.
    let setup = match *bz_image.get(0x1F1)? {
        0 => 5,
        sectors => usize::from(sectors) + 1,
    };
    let start = setup * 512 + word(0x248)?;
    let payload = bz_image.get(start..start + word(0x24C)?)?;
    let mut file = Vec::new();
    // The length of what comes out is behind the frame.
    let mut frame = zstd::stream::read::Decoder::new(payload).ok()?.single_frame();
    frame.read_to_end(&mut file).ok()?;
    file.starts_with(b"\x7fELF").then_some(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vmlinux_is_none_without_a_kernel() {
        assert_eq!(vmlinux(&[]), None);
        assert_eq!(vmlinux(&[0; 4096]), None);
        assert_eq!(vmlinux(&tiny()), None);
    }

    #[test]
    fn vmlinux_unpacks_a_payload_with_trailing_bytes() {
        let mut payload = zstd::encode_all(&tiny()[..], 1).expect("memory");
        payload.extend((tiny().len() as u32).to_le_bytes());
        let mut file = vec![0; 3 * 512 + 100];
        file[0x1F1] = 2;
        file[0x248..0x24C].copy_from_slice(&100u32.to_le_bytes());
        file[0x24C..0x250].copy_from_slice(&(payload.len() as u32).to_le_bytes());
        file.extend(payload);
        assert_eq!(vmlinux(&file), Some(tiny()));
    }
}
