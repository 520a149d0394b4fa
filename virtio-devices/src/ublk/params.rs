//! The disk's parameters for the driver, and the check that the driver has taken them.

use block::DiskInfo;

use super::abi::{Basic, Discard, Params, SECTOR_BYTES, param};

/// The alignment of memory that direct I/O on the image takes best, in bytes: that of our own buffers is larger.
pub(super) const DMA_ALIGN: u32 = 512;

/// A parameter that the driver has ignored.
#[derive(Debug, thiserror::Error)]
#[error("the driver ignored a parameter of the disk: {what}")]
pub struct ParamsError {
    what: String,
}

/// The logarithm of the largest power of two that is not above `bytes`, between those of 512 and of `max`.
fn shift(bytes: u32, max: u32) -> u8 {
    bytes.clamp(512, max).ilog2() as u8
}

/// Describes a disk whose requests move at most `io_bytes_max` each.
#[must_use]
pub(super) fn describe(info: &DiskInfo, io_bytes_max: u32) -> Params {
    const PAGE: u32 = 4096;
    // As large as a length in bytes may be for the block layer.
    let zeroes_max = u32::MAX >> 9;
    let physical = shift(info.physical_block_bytes, PAGE);
    let mut attrs = 0;
    if info.read_only {
        attrs |= param::READ_ONLY;
    } else {
        attrs |= param::VOLATILE_CACHE | param::FUA;
    }
    let offered = |yes: bool| if yes && !info.read_only { zeroes_max } else { 0 };
    Params {
        len: size_of::<Params>() as u32,
        types: param::BASIC | param::DISCARD | param::DMA_ALIGN,
        basic: Basic {
            attrs,
            logical_bs_shift: shift(512, PAGE),
            physical_bs_shift: physical,
            io_opt_shift: shift(info.preferred_io_bytes, 1 << 30).max(physical),
            io_min_shift: physical,
            max_sectors: io_bytes_max / SECTOR_BYTES as u32,
            dev_sectors: info.size_bytes / SECTOR_BYTES,
            ..Basic::default()
        },
        discard: Discard {
            granularity: info.discard_granularity_bytes.max(512),
            max_discard_sectors: offered(info.discard),
            max_write_zeroes_sectors: offered(info.write_zeroes),
            max_discard_segments: 1,
            ..Discard::default()
        },
        dma_alignment: DMA_ALIGN - 1,
        ..Params::default()
    }
}

/// Compares the driver's parameters with those sent. A driver that does not know the alignment of buffers is fine:
/// ours are aligned.
///
/// # Errors
///
/// [`ParamsError`], naming the difference.
pub(super) fn verify(asked: &Params, taken: &Params) -> Result<(), ParamsError> {
    let lost = |what: String| Err(ParamsError { what });
    for (name, part) in [("its size and limits", param::BASIC), ("discard", param::DISCARD)] {
        if taken.types & part == 0 {
            return lost(name.to_owned());
        }
    }
    if taken.basic != asked.basic {
        return lost(format!("{:?} became {:?}", asked.basic, taken.basic));
    }
    if taken.discard != asked.discard {
        return lost(format!("{:?} became {:?}", asked.discard, taken.discard));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const INFO: DiskInfo = DiskInfo {
        size_bytes: 10 << 20,
        read_only: false,
        preferred_io_bytes: 65536,
        physical_block_bytes: 4096,
        discard: true,
        discard_granularity_bytes: 65536,
        write_zeroes: true,
    };

    #[test]
    fn describe_follows_cluster_and_block_size() {
        let params = describe(&INFO, 1 << 20);
        assert_eq!(params.len, 120);
        let basic = params.basic;
        let shifts = (
            basic.logical_bs_shift,
            basic.physical_bs_shift,
            basic.io_opt_shift,
        );
        assert_eq!(shifts, (9, 12, 16));
        assert_eq!((basic.max_sectors, basic.dev_sectors), (2048, 20480));
        assert_eq!(basic.attrs, param::VOLATILE_CACHE | param::FUA);
        assert_eq!(params.discard.granularity, 65536);
        assert_eq!(params.discard.max_discard_sectors, u32::MAX >> 9);
    }

    #[test]
    fn describe_offers_no_writes_for_a_read_only_disk() {
        let info = DiskInfo {
            read_only: true,
            ..INFO
        };
        let params = describe(&info, 1 << 20);
        assert_eq!(params.basic.attrs, param::READ_ONLY);
        assert_eq!(params.discard.max_discard_sectors, 0);
        assert_eq!(params.discard.max_write_zeroes_sectors, 0);
    }

    #[test]
    fn verify_reports_lost_parameters_except_harmless_ones() {
        let asked = describe(&INFO, 1 << 20);
        let mut taken = asked;
        taken.types &= !param::DMA_ALIGN;
        taken.types |= param::DEVT;
        verify(&asked, &taken).expect("no loss");
        taken.types &= !param::DISCARD;
        let error = verify(&asked, &taken).expect_err("a loss");
        assert!(error.to_string().contains("discard"), "{error}");
        let mut taken = asked;
        taken.basic.max_sectors = 8;
        assert!(verify(&asked, &taken).is_err());
    }
}
