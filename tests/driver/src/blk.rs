//! Numbers and structures of virtio-blk (virtio 1.2, "5.2").

/// Request type: read.
pub const IN: u32 = 0;
/// Request type: write.
pub const OUT: u32 = 1;
/// Request type: flush.
pub const FLUSH: u32 = 4;
/// Request type: read the serial number.
pub const GET_ID: u32 = 8;
/// Request type: discard.
pub const DISCARD: u32 = 11;
/// Request type: write zeroes.
pub const WRITE_ZEROES: u32 = 13;

/// Status: done.
pub const OK: u8 = 0;
/// Status: failed.
pub const IOERR: u8 = 1;
/// Status: not supported.
pub const UNSUPP: u8 = 2;
/// No status: the value of a status byte that the device has not written.
pub const NO_STATUS: u8 = 0xff;

/// Feature: the disk is read-only.
pub const F_RO: u64 = 1 << 5;
/// Feature: flush.
pub const F_FLUSH: u64 = 1 << 9;
/// Feature: the driver may choose the cache mode.
pub const F_CONFIG_WCE: u64 = 1 << 11;
/// Feature: several queues.
pub const F_MQ: u64 = 1 << 12;
/// Feature: discard.
pub const F_DISCARD: u64 = 1 << 13;
/// Feature: write zeroes.
pub const F_WRITE_ZEROES: u64 = 1 << 14;

/// Ring feature: indirect descriptors.
pub const F_INDIRECT_DESC: u64 = 1 << 28;
/// Ring feature: event indices.
pub const F_EVENT_IDX: u64 = 1 << 29;
/// The device is not a legacy device.
pub const F_VERSION_1: u64 = 1 << 32;

/// The offset of the cache mode in the configuration space.
pub const WRITEBACK_AT: u32 = 32;
/// The bytes of the configuration space up to the end of the write-zeroes fields.
pub const CONFIG_BYTES: usize = 60;
/// The bytes of a request's header.
pub const HEADER_BYTES: u32 = 16;
/// The bytes of a segment.
pub const SEGMENT_BYTES: u32 = 16;

/// Returns the header of a request.
#[must_use]
pub fn header(kind: u32, sector: u64) -> [u8; HEADER_BYTES as usize] {
    let mut bytes = [0; HEADER_BYTES as usize];
    bytes[..4].copy_from_slice(&kind.to_le_bytes());
    bytes[8..].copy_from_slice(&sector.to_le_bytes());
    bytes
}

/// Returns a segment of a discard or write-zeroes request: first sector, number of sectors, flags (1: unmap).
#[must_use]
pub fn segment(sector: u64, count: u32, flags: u32) -> [u8; SEGMENT_BYTES as usize] {
    let mut bytes = [0; SEGMENT_BYTES as usize];
    bytes[..8].copy_from_slice(&sector.to_le_bytes());
    bytes[8..12].copy_from_slice(&count.to_le_bytes());
    bytes[12..].copy_from_slice(&flags.to_le_bytes());
    bytes
}
