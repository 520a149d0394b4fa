//! The 256 bytes of a PCI function's configuration space, with what a guest may change of them.

/// The bytes, and which bits of them a guest can write.
pub(super) struct ConfigSpace {
    bytes: [u8; 256],
    writable: [u8; 256],
    /// The offset of the next capability, and of the pointer to it.
    next: u8,
    link: u8,
}

impl std::fmt::Debug for ConfigSpace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ConfigSpace")
    }
}

/// Registers of a header of type 0.
pub(super) mod at {
    pub(crate) const COMMAND: u16 = 0x04;
    pub(crate) const STATUS: u16 = 0x06;
    pub(crate) const REVISION: u16 = 0x08;
    pub(crate) const BAR0: u16 = 0x10;
    pub(crate) const SUBSYSTEM: u16 = 0x2C;
    pub(crate) const CAPABILITIES: u16 = 0x34;
}

/// The command register's bit that lets the function answer memory accesses.
pub(super) const COMMAND_MEMORY: u16 = 1 << 1;
const COMMAND_WRITABLE: u16 = COMMAND_MEMORY | 1 << 2 | 1 << 10;
const STATUS_CAPABILITIES: u16 = 1 << 4;
const FIRST_CAPABILITY: u8 = 0x40;

impl ConfigSpace {
    /// A function of this vendor, device and class (base, sub, interface from the high byte down), with a 32-bit
    /// memory window of `window` bytes, a power of two, in its first base address register.
    pub(super) fn new(vendor: u16, device: u16, class: u32, window: u32) -> Self {
        let mut space = Self {
            bytes: [0; 256],
            writable: [0; 256],
            next: FIRST_CAPABILITY,
            link: at::CAPABILITIES as u8,
        };
        space.put(0, &vendor.to_le_bytes());
        space.put(2, &device.to_le_bytes());
        space.put(at::STATUS, &STATUS_CAPABILITIES.to_le_bytes());
        space.put(at::REVISION, &(class << 8 | 1).to_le_bytes());
        space.put(at::SUBSYSTEM, &vendor.to_le_bytes());
        space.put(at::SUBSYSTEM + 2, &device.to_le_bytes());
        space.allow(at::COMMAND, &COMMAND_WRITABLE.to_le_bytes());
        space.allow(at::BAR0, &(!(window - 1)).to_le_bytes());
        // The interrupt line is the guest's own note.
        space.allow(0x3C, &[0xFF]);
        space
    }

    /// Adds a capability: its identifier and what follows the link. Returns where it begins.
    pub(super) fn add(&mut self, id: u8, body: &[u8]) -> u16 {
        let offset = self.next;
        self.put(self.link.into(), &[offset]);
        self.put(offset.into(), &[id, 0]);
        self.put(u16::from(offset) + 2, body);
        self.link = offset + 1;
        self.next = (offset + 2 + body.len() as u8).next_multiple_of(4);
        offset.into()
    }

    /// Sets bytes, whatever a guest may.
    pub(super) fn put(&mut self, offset: u16, bytes: &[u8]) {
        let at = usize::from(offset);
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Lets a guest write these bits.
    pub(super) fn allow(&mut self, offset: u16, mask: &[u8]) {
        let at = usize::from(offset);
        self.writable[at..at + mask.len()].copy_from_slice(mask);
    }

    /// Reads for the guest. Bytes past the end are ones, as without a function.
    pub(super) fn read(&self, offset: u16, data: &mut [u8]) {
        for (at, byte) in (usize::from(offset)..).zip(data) {
            *byte = self.bytes.get(at).copied().unwrap_or(0xFF);
        }
    }

    /// Writes for the guest: only the bits that it may change.
    pub(super) fn write(&mut self, offset: u16, data: &[u8]) {
        for (at, new) in (usize::from(offset)..).zip(data) {
            if let (Some(byte), Some(mask)) = (self.bytes.get_mut(at), self.writable.get(at)) {
                *byte = *byte & !mask | new & mask;
            }
        }
    }

    pub(super) fn u16_at(&self, offset: u16) -> u16 {
        let mut bytes = [0; 2];
        self.read(offset, &mut bytes);
        u16::from_le_bytes(bytes)
    }

    pub(super) fn u32_at(&self, offset: u16) -> u32 {
        let mut bytes = [0; 4];
        self.read(offset, &mut bytes);
        u32::from_le_bytes(bytes)
    }
}
