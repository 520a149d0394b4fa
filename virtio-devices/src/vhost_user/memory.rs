//! The client's memory: which of its files is mapped where.
//!
//! Buffers are named by guest address, rings by the client's own virtual address, so each region has both.
//! The map is replaced, never changed: queues and requests hold the one they started with.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use super::sigbus::{FaultGuard, LossWatch};
use vm_memory::mmap::FromRangesError;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionCollectionError, GuestRegionMmap};

/// The most regions a client may have: as many as KVM has slots, less a few, as QEMU does.
pub(super) const REGIONS_MAX: usize = 509;
/// The most memory a client may show us, in bytes: more than the largest guests have, and little enough that
/// several clients fit into one address space of 128 TiB.
pub(super) const BYTES_MAX: u64 = 1 << 44;

/// A memory region that cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum MemoryError {
    #[error("the region at guest address {guest:#x}, {size} bytes, wraps around or is empty")]
    Range { guest: u64, size: u64 },
    #[error("the region at guest address {guest:#x} reaches to byte {end} of a file of {len}")]
    File { guest: u64, end: u64, len: u64 },
    #[error("cannot stat the file of the region at guest address {guest:#x}")]
    Stat {
        guest: u64,
        #[source]
        source: io::Error,
    },
    #[error("cannot map the region at guest address {guest:#x}: {source}")]
    Map {
        guest: u64,
        #[source]
        source: FromRangesError,
    },
    #[error("the regions are invalid together: {0}")]
    Overlap(#[from] GuestRegionCollectionError),
    #[error("more than {REGIONS_MAX} regions")]
    TooMany,
    #[error("the regions have {bytes} bytes together; expected at most {BYTES_MAX}")]
    TooLarge { bytes: u64 },
    #[error("there is no region at guest address {guest:#x} of {size} bytes")]
    Unknown { guest: u64, size: u64 },
}

/// A region as a message describes it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct RegionInfo {
    /// Its guest address.
    pub(super) guest: u64,
    /// Its length in bytes.
    pub(super) size: u64,
    /// Its address in the client's process.
    pub(super) user: u64,
    /// Its offset in the file.
    pub(super) file_offset: u64,
}

/// The size of the pages that a file is mapped in, in bytes.
pub(super) fn page_of(file: &Metadata) -> usize {
    let block = usize::try_from(file.blksize()).unwrap_or(0);
    block.next_power_of_two().max(4096)
}

#[derive(Clone, Debug)]
struct Region {
    info: RegionInfo,
    // Dropped before the mapping. Queues, which hold the mapping too, do not run any more then.
    guard: Arc<FaultGuard>,
    mapping: Arc<GuestRegionMmap>,
}

impl Region {
    fn map(info: RegionInfo, file: File) -> Result<Self, MemoryError> {
        let RegionInfo {
            guest,
            size,
            user,
            file_offset,
        } = info;
        let range = || MemoryError::Range { guest, size };
        let whole = |start: u64| size > 0 && start.checked_add(size).is_some();
        if !whole(guest) || !whole(user) {
            return Err(range());
        }
        let end = file_offset.checked_add(size).ok_or_else(range)?;
        let bytes = usize::try_from(size).map_err(|_| range())?;
        let stat = file
            .metadata()
            .map_err(|source| MemoryError::Stat { guest, source })?;
        // Touching a mapping beyond its file's end would kill this process.
        if stat.is_file() && end > stat.len() {
            let len = stat.len();
            return Err(MemoryError::File { guest, end, len });
        }
        let file = FileOffset::new(file, file_offset);
        let mapping = GuestRegionMmap::from_range(GuestAddress(guest), bytes, Some(file))
            .map_err(|source| MemoryError::Map { guest, source })?;
        let page = page_of(&stat);
        let guard = FaultGuard::new(mapping.as_ptr() as usize, bytes, page);
        Ok(Self {
            info,
            guard: Arc::new(guard),
            mapping: Arc::new(mapping),
        })
    }
}

/// The client's regions and the map made of them.
#[derive(Debug, Default)]
pub(super) struct ClientMemory {
    regions: Vec<Region>,
    map: GuestMemoryMmap,
}

impl ClientMemory {
    fn from_regions(mut regions: Vec<Region>) -> Result<Self, MemoryError> {
        if regions.is_empty() {
            return Ok(Self::default());
        }
        regions.sort_by_key(|region| region.info.guest);
        let mappings = regions.iter().map(|region| Arc::clone(&region.mapping));
        let map = GuestMemoryMmap::from_arc_regions(mappings.collect())?;
        Ok(Self { regions, map })
    }

    /// Checks, before anything is mapped, that these regions are neither too many nor too large.
    fn check(regions: impl Iterator<Item = RegionInfo>) -> Result<(), MemoryError> {
        let (mut count, mut bytes) = (0, 0u64);
        for region in regions {
            count += 1;
            bytes = bytes.saturating_add(region.size);
        }
        if count > REGIONS_MAX {
            return Err(MemoryError::TooMany);
        }
        if bytes > BYTES_MAX {
            return Err(MemoryError::TooLarge { bytes });
        }
        Ok(())
    }

    /// A memory of these regions.
    pub(super) fn new(regions: Vec<(RegionInfo, File)>) -> Result<Self, MemoryError> {
        Self::check(regions.iter().map(|(info, _)| *info))?;
        let regions = regions.into_iter().map(|(info, file)| Region::map(info, file));
        Self::from_regions(regions.collect::<Result<_, _>>()?)
    }

    /// This memory and one more region.
    pub(super) fn with(&self, info: RegionInfo, file: File) -> Result<Self, MemoryError> {
        Self::check(self.regions.iter().map(|region| region.info).chain([info]))?;
        let mut regions = self.regions.clone();
        regions.push(Region::map(info, file)?);
        Self::from_regions(regions)
    }

    /// This memory without one region, named by all but its file offset.
    pub(super) fn without(&self, gone: RegionInfo) -> Result<Self, MemoryError> {
        let same = |region: &Region| {
            let info = region.info;
            (info.guest, info.size, info.user) == (gone.guest, gone.size, gone.user)
        };
        let mut regions = self.regions.clone();
        let before = regions.len();
        regions.retain(|region| !same(region));
        if regions.len() == before {
            let RegionInfo { guest, size, .. } = gone;
            return Err(MemoryError::Unknown { guest, size });
        }
        Self::from_regions(regions)
    }

    /// Each region with its file, for another server.
    pub(super) fn describe(&self) -> io::Result<Vec<(RegionInfo, OwnedFd)>> {
        let described = self.regions.iter().map(|region| {
            let file = region.mapping.file_offset().ok_or(io::ErrorKind::NotFound)?;
            Ok((region.info, file.file().try_clone()?.into()))
        });
        described.collect()
    }

    /// Returns the map, to be held by its users.
    pub(super) fn map(&self) -> GuestMemoryMmap {
        self.map.clone()
    }

    /// Says whether a page of this memory, or of one more mapping, was lost, for a queue that runs on it.
    pub(super) fn watch(&self, other: Option<&FaultGuard>) -> LossWatch {
        LossWatch::new(self.regions.iter().map(|region| &*region.guard).chain(other))
    }

    /// The first guest address past all regions.
    pub(super) fn end(&self) -> u64 {
        // Sorted by guest address, and checked not to wrap around.
        let last = self.regions.last();
        last.map_or(0, |region| region.info.guest + region.info.size)
    }

    /// The number of regions and of their bytes.
    pub(super) fn extent(&self) -> (usize, u64) {
        let bytes = self.regions.iter().map(|region| region.info.size).sum();
        (self.regions.len(), bytes)
    }

    /// The guest address of a virtual address of the client's.
    pub(super) fn guest_address(&self, user: u64) -> Option<u64> {
        self.regions.iter().find_map(|region| {
            let offset = user.checked_sub(region.info.user)?;
            (offset < region.info.size).then(|| region.info.guest + offset)
        })
    }
}
