//! The configuration space, as bytes. Spec: virtio 1.2, 5.2.4.

use block::DiskInfo;

/// The bytes of `struct virtio_blk_config` up to and with `max_write_zeroes_seg` and what follows it.
pub(crate) const CONFIG_BYTES: usize = 60;
/// The offset of `writeback`.
pub(crate) const WRITEBACK_OFFSET: usize = 32;

/// The size of a sector, in bytes: the unit of every sector number in virtio-blk.
pub(super) const SECTOR_BYTES: u32 = 512;
/// The longest discard or write-zeroes segment, in sectors (512 MiB), so that one request stays short.
pub(super) const ZERO_SECTORS_MAX: u32 = 1 << 20;
/// The most segments of one discard or write-zeroes request.
pub(super) const ZERO_SEGMENTS_MAX: u32 = 32;
/// The most data segments of one request, so that header and status still fit a chain.
const SEGMENTS_MAX: u16 = crate::virtqueue::CHAIN_MAX - 2;

/// Lays the configuration out.
pub(super) fn layout(info: &DiskInfo, queues: u16, queue_size: u16, writeback: bool) -> [u8; CONFIG_BYTES] {
    let mut bytes = [0; CONFIG_BYTES];
    let mut put = |offset: usize, value: &[u8]| bytes[offset..offset + value.len()].copy_from_slice(value);
    let physical = info.physical_block_bytes.max(SECTOR_BYTES);
    put(0, &(info.size_bytes / u64::from(SECTOR_BYTES)).to_le_bytes()); // capacity
    let segments = queue_size.saturating_sub(2).clamp(1, SEGMENTS_MAX);
    put(12, &u32::from(segments).to_le_bytes()); // seg_max
    put(20, &SECTOR_BYTES.to_le_bytes()); // blk_size
    put(24, &[(physical / SECTOR_BYTES).ilog2() as u8]); // physical_block_exp
    let minimum = u16::try_from(physical / SECTOR_BYTES).unwrap_or(u16::MAX);
    put(26, &minimum.to_le_bytes()); // min_io_size
    put(28, &(info.preferred_io_bytes / SECTOR_BYTES).to_le_bytes()); // opt_io_size
    put(WRITEBACK_OFFSET, &[u8::from(writeback)]);
    put(34, &queues.to_le_bytes()); // num_queues
    if info.discard {
        let align = (info.discard_granularity_bytes / SECTOR_BYTES).max(1);
        put(36, &ZERO_SECTORS_MAX.to_le_bytes()); // max_discard_sectors
        put(40, &ZERO_SEGMENTS_MAX.to_le_bytes()); // max_discard_seg
        put(44, &align.to_le_bytes()); // discard_sector_alignment
    }
    if info.write_zeroes {
        put(48, &ZERO_SECTORS_MAX.to_le_bytes()); // max_write_zeroes_sectors
        put(52, &ZERO_SEGMENTS_MAX.to_le_bytes()); // max_write_zeroes_seg
        put(56, &[1]); // write_zeroes_may_unmap
    }
    bytes
}
