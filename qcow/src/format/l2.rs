//! L2 tables and their entries: the places of guest clusters' bytes. Spec: "Cluster mapping", "L2 table entry",
//! "Standard Cluster Descriptor", "Compressed Clusters Descriptor".
//!
//! Only [`L2Table`] and [`L2TableMut`] know the offset of an entry in a table's bytes, and its width.
//! An [`L2Entry`] is a cluster descriptor and, in images with extended entries, the bitmap of its
//! [subclusters](super::subclusters). Entries whose subclusters are all alike decode as those of other images do.

use super::l1::{COPIED, OFFSET_MASK};
use super::{EntryError, Geometry, HostOffset, L2EntryWidth, SubclusterBitmap, Version};

const COMPRESSED: u64 = 1 << 62;
const ZERO: u64 = 1;
/// Bits a standard descriptor must not have.
const RESERVED: u64 = !(COPIED | COMPRESSED | OFFSET_MASK | ZERO);
/// Host offsets end below this bit.
const OFFSET_BITS: u32 = 56;
const SECTOR: u64 = 512;

/// An L2 entry as it is on disk, in native byte order.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct L2Entry {
    descriptor: u64,
    /// Empty in an entry of eight bytes.
    bitmap: SubclusterBitmap,
}

/// The source of one guest cluster's bytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum L2Mapping {
    /// Not in this image: the backing file's bytes, or zeros.
    Unallocated,
    /// Zeros, whatever the host cluster or the backing file hold.
    Zero {
        /// The host cluster kept for it, if any; a multiple of the cluster size, and 0 only in a data file.
        host: Option<HostOffset>,
        /// The kept host cluster's refcount is exactly one.
        copied: bool,
    },
    /// An uncompressed host cluster.
    Data {
        /// The offset of the cluster; a multiple of the cluster size, and 0 only in a data file.
        host: HostOffset,
        /// Its refcount is exactly one: it may be overwritten in place. This is reliable only in tables reached
        /// through the active L1.
        copied: bool,
    },
    /// Compressed bytes somewhere in the file; never to be overwritten in place.
    Compressed(CompressedExtent),
    /// Subclusters that are not all alike, or that are all unallocated although they have a host cluster. In images with
    /// extended L2 entries only.
    Subclusters {
        /// The host cluster that is kept for them, if any; a multiple of the cluster size, and 0 only in a data file. If
        /// any has data, there is one.
        host: Option<HostOffset>,
        /// The host cluster's refcount is exactly one.
        copied: bool,
        /// The source of each subcluster's bytes.
        bitmap: SubclusterBitmap,
    },
}

impl L2Mapping {
    /// Creates the mapping of a cluster by its subclusters.
    #[inline]
    pub const fn of_subclusters(host: Option<HostOffset>, copied: bool, bitmap: SubclusterBitmap) -> Self {
        const UNALLOCATED: u64 = SubclusterBitmap::UNALLOCATED.raw();
        const ZERO: u64 = SubclusterBitmap::ZERO.raw();
        const DATA: u64 = SubclusterBitmap::DATA.raw();
        match (bitmap.raw(), host) {
            (UNALLOCATED, None) => Self::Unallocated,
            (ZERO, _) => Self::Zero { host, copied },
            (DATA, Some(host)) => Self::Data { host, copied },
            _ => Self::Subclusters { host, copied, bitmap },
        }
    }

    /// Returns the host cluster that the entry refers to, and true if the cluster's refcount is exactly one. `None` for
    /// compressed clusters, which may be parts of several.
    #[inline]
    pub const fn cluster(&self) -> Option<(HostOffset, bool)> {
        match *self {
            Self::Data { host, copied } => Some((host, copied)),
            Self::Zero {
                host: Some(host),
                copied,
            }
            | Self::Subclusters {
                host: Some(host),
                copied,
                ..
            } => Some((host, copied)),
            Self::Unallocated
            | Self::Zero { host: None, .. }
            | Self::Subclusters { host: None, .. }
            | Self::Compressed(_) => None,
        }
    }

    /// Returns the host cluster that the entry alone refers to.
    #[inline]
    pub const fn owned(&self) -> Option<HostOffset> {
        match self.cluster() {
            Some((host, true)) => Some(host),
            _ => None,
        }
    }

    /// Returns the sources of the subclusters' bytes, all alike in a cluster without any. A compressed cluster counts as
    /// allocated.
    #[inline]
    pub const fn subclusters(&self) -> SubclusterBitmap {
        match self {
            Self::Unallocated => SubclusterBitmap::UNALLOCATED,
            Self::Zero { .. } => SubclusterBitmap::ZERO,
            Self::Data { .. } | Self::Compressed(_) => SubclusterBitmap::DATA,
            Self::Subclusters { bitmap, .. } => *bitmap,
        }
    }
}

/// The bytes of one compressed cluster. They may run into the next host cluster, and past the end of the file, where
/// there are none: the decompressor stops after one cluster of output.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct CompressedExtent {
    /// The first byte, of any alignment.
    pub host: HostOffset,
    /// The largest length of the compressed data, in bytes: up to the end of its last 512-byte sector.
    pub len_max: u32,
}

impl CompressedExtent {
    /// Returns the offset after the last byte that may belong to the data.
    #[inline]
    pub const fn end(&self) -> u64 {
        self.host.bytes().saturating_add(self.len_max as u64)
    }
}

impl L2Entry {
    /// The guest cluster is not in this image.
    pub const UNALLOCATED: Self = Self::from_raw(0);
    /// A refused entry: it replaces an exposed one in memory, and never on disk. It decodes to an error, as every
    /// reserved bit is set.
    pub const REFUSED: Self = Self::from_raw(RESERVED);

    /// Creates an entry from the 64 bits of its descriptor.
    #[inline]
    pub const fn from_raw(raw: u64) -> Self {
        Self {
            descriptor: raw,
            bitmap: SubclusterBitmap::UNALLOCATED,
        }
    }

    /// Returns the 64 bits of the entry's descriptor.
    #[inline]
    pub const fn raw(self) -> u64 {
        self.descriptor
    }

    /// Returns the same entry with another bitmap, which only an extended entry has.
    #[inline]
    #[must_use]
    pub const fn with_bitmap(self, bitmap: SubclusterBitmap) -> Self {
        Self { bitmap, ..self }
    }

    /// Returns the entry's bitmap, which is empty unless the entry is extended.
    #[inline]
    pub const fn bitmap(self) -> SubclusterBitmap {
        self.bitmap
    }

    /// Returns the entry of a data cluster at `host`, a multiple of the cluster size, and 0 only in a data file.
    #[inline]
    pub const fn data(host: HostOffset, copied: bool, geometry: &Geometry) -> Self {
        Self::of_cluster(Some(host), copied).with_kinds(SubclusterBitmap::DATA, 0, geometry)
    }

    /// Returns the entry of a cluster that reads as zeros, and keeps the host cluster at `host`, if any. Version 3 only.
    #[inline]
    pub const fn zero(host: Option<HostOffset>, copied: bool, geometry: &Geometry) -> Self {
        Self::of_cluster(host, copied).with_kinds(SubclusterBitmap::ZERO, ZERO, geometry)
    }

    /// Returns the extended entry of a cluster whose subclusters have the kinds in `bitmap`, and of the host cluster at
    /// `host`, if any.
    #[inline]
    pub const fn subclusters(host: Option<HostOffset>, copied: bool, bitmap: SubclusterBitmap) -> Self {
        Self::of_cluster(host, copied).with_bitmap(bitmap)
    }

    const fn of_cluster(host: Option<HostOffset>, copied: bool) -> Self {
        match host {
            Some(host) => Self::from_raw((host.bytes() & OFFSET_MASK) | if copied { COPIED } else { 0 }),
            None => Self::UNALLOCATED,
        }
    }

    /// Returns the entry with its kind in the bitmap if it has one, and otherwise in the descriptor's flags.
    #[inline]
    const fn with_kinds(self, bitmap: SubclusterBitmap, flags: u64, geometry: &Geometry) -> Self {
        if geometry.has_subclusters() {
            return self.with_bitmap(bitmap);
        }
        Self::from_raw(self.descriptor | flags)
    }

    /// Returns the entry of a compressed cluster whose data is the `len` bytes at `host`. `None` if the descriptor
    /// cannot express that: no bytes, more sectors than a cluster's worth and one, or too far into the file.
    pub const fn compressed(host: HostOffset, len: u32, geometry: &Geometry) -> Option<Self> {
        let shift = compressed_shift(geometry);
        let Some(last) = host.bytes().checked_add((len as u64).wrapping_sub(1)) else {
            return None;
        };
        if len == 0 || host.bytes().wrapping_shr(offset_bits(shift)) != 0 {
            return None;
        }
        let sectors_more = (last / SECTOR).wrapping_sub(host.bytes() / SECTOR);
        if sectors_more.wrapping_shr(62u32.wrapping_sub(shift)) != 0 {
            return None;
        }
        let descriptor = COMPRESSED | sectors_more.wrapping_shl(shift) | host.bytes();
        Some(Self::from_raw(descriptor))
    }

    /// Returns the entry for a mapping. `None` for a compressed extent that cannot be expressed, and for subclusters in
    /// an image that has none.
    pub const fn encode(mapping: L2Mapping, geometry: &Geometry) -> Option<Self> {
        match mapping {
            L2Mapping::Unallocated => Some(Self::UNALLOCATED),
            L2Mapping::Zero { host, copied } => Some(Self::zero(host, copied, geometry)),
            L2Mapping::Data { host, copied } => Some(Self::data(host, copied, geometry)),
            L2Mapping::Compressed(extent) => Self::compressed(extent.host, extent.len_max, geometry),
            L2Mapping::Subclusters { host, copied, bitmap } => {
                if geometry.has_subclusters() {
                    Some(Self::subclusters(host, copied, bitmap))
                } else {
                    None
                }
            }
        }
    }

    /// Returns the same entry with the COPIED flag set or cleared.
    #[inline]
    #[must_use]
    pub const fn with_copied(self, copied: bool) -> Self {
        let descriptor = self.descriptor & !COPIED;
        Self {
            descriptor: if copied { descriptor | COPIED } else { descriptor },
            ..self
        }
    }

    /// Returns true if the COPIED flag is set.
    #[inline]
    pub const fn is_copied(self) -> bool {
        self.descriptor & COPIED != 0
    }

    /// Returns true if the entry describes a compressed cluster.
    #[inline]
    pub const fn is_compressed(self) -> bool {
        self.descriptor & COMPRESSED != 0
    }

    /// Decodes the entry. COPIED without an offset is unallocated (or plain zero), as in QEMU; with a data file it is the
    /// disk's first cluster.
    ///
    /// # Errors
    ///
    /// [`EntryError`] if reserved bits are set, the offset is not cluster-aligned, a compressed cluster has COPIED or the image
    /// a data file, a version 2 image has the all-zeros flag, or the bitmap contradicts itself or the offset. As in QEMU, an
    /// extended entry's all-zeros flag and a compressed cluster's bitmap mean nothing.
    #[inline]
    pub const fn decode(self, geometry: &Geometry) -> Result<L2Mapping, EntryError> {
        if geometry.has_subclusters() {
            self.decode_extended(geometry)
        } else {
            self.decode_standard(geometry)
        }
    }

    /// Decodes an entry of an image without subclusters, as [`Self::decode`] does: for the hot path, where that is known.
    #[inline]
    pub(crate) const fn decode_standard(self, geometry: &Geometry) -> Result<L2Mapping, EntryError> {
        if self.is_compressed() {
            return self.decode_compressed(geometry);
        }
        let entry = self.descriptor;
        let offset = match self.offset(geometry) {
            Ok(offset) => offset,
            Err(error) => return Err(error),
        };
        let copied = self.is_copied();
        let host = HostOffset::new(offset);
        if entry & ZERO != 0 {
            if matches!(geometry.version(), Version::V2) {
                return Err(EntryError::ZeroFlagInVersion2 { entry });
            }
            return Ok(if offset == 0 && !self.is_first_in_data_file(geometry) {
                L2Mapping::Zero {
                    host: None,
                    copied: false,
                }
            } else {
                L2Mapping::Zero {
                    host: Some(host),
                    copied,
                }
            });
        }
        Ok(if offset == 0 && !self.is_first_in_data_file(geometry) {
            L2Mapping::Unallocated
        } else {
            L2Mapping::Data { host, copied }
        })
    }

    const fn decode_extended(self, geometry: &Geometry) -> Result<L2Mapping, EntryError> {
        if self.is_compressed() {
            return self.decode_compressed(geometry);
        }
        let offset = match self.offset(geometry) {
            Ok(offset) => offset,
            Err(error) => return Err(error),
        };
        let has_host = offset != 0 || self.is_first_in_data_file(geometry);
        let bitmap = match self.bitmap.validate(self.descriptor, has_host) {
            Ok(bitmap) => bitmap,
            Err(error) => return Err(error),
        };
        Ok(if has_host {
            L2Mapping::of_subclusters(Some(HostOffset::new(offset)), self.is_copied(), bitmap)
        } else {
            L2Mapping::of_subclusters(None, false, bitmap)
        })
    }

    /// Returns the host cluster of an extended entry whose subclusters from `first` to `last` have data, and whether its refcount is
    /// exactly one. `None` of any other entry, a wrong one among them: [`Self::decode`] says what that is.
    #[inline]
    pub(crate) const fn data_in(
        self,
        first: u32,
        last: u32,
        geometry: &Geometry,
    ) -> Option<(HostOffset, bool)> {
        if !self.bitmap.is_data(first, last) || self.is_compressed() {
            return None;
        }
        match self.offset(geometry) {
            Ok(offset) if offset != 0 || self.is_first_in_data_file(geometry) => {
                Some((HostOffset::new(offset), self.is_copied()))
            }
            _ => None,
        }
    }

    /// Returns true if an entry whose offset is 0 refers to the first cluster of the data file.
    #[inline]
    const fn is_first_in_data_file(self, geometry: &Geometry) -> bool {
        self.is_copied() && geometry.has_data_file()
    }

    /// Returns the offset of a standard descriptor's cluster; 0 for none.
    #[inline]
    const fn offset(self, geometry: &Geometry) -> Result<u64, EntryError> {
        let entry = self.descriptor;
        if entry & RESERVED != 0 {
            let bits = entry & RESERVED;
            return Err(EntryError::ReservedBits {
                structure: "L2 entry",
                entry,
                bits,
            });
        }
        let offset = entry & OFFSET_MASK;
        if geometry.offset_in_cluster(offset) != 0 {
            let cluster_size = geometry.cluster_size();
            return Err(EntryError::Unaligned {
                structure: "L2 entry",
                entry,
                offset,
                cluster_size,
            });
        }
        Ok(offset)
    }

    /// Returns the place of a compressed entry's bytes, whatever its COPIED flag; `None` if the entry is not
    /// compressed or its offset has reserved bits. For tools that check and repair.
    pub const fn compressed_extent(self, geometry: &Geometry) -> Option<CompressedExtent> {
        if !self.is_compressed() {
            return None;
        }
        match self.with_copied(false).decode_compressed(geometry) {
            Ok(L2Mapping::Compressed(extent)) => Some(extent),
            _ => None,
        }
    }

    const fn decode_compressed(self, geometry: &Geometry) -> Result<L2Mapping, EntryError> {
        let entry = self.descriptor;
        if geometry.has_data_file() {
            return Err(EntryError::CompressedInDataFile { entry });
        }
        let shift = compressed_shift(geometry);
        let descriptor = entry & !(COMPRESSED | COPIED);
        let offset = descriptor & 1u64.wrapping_shl(shift).wrapping_sub(1);
        if offset.wrapping_shr(OFFSET_BITS) != 0 {
            let bits = offset & u64::MAX.wrapping_shl(OFFSET_BITS);
            return Err(EntryError::ReservedBits {
                structure: "L2 entry",
                entry,
                bits,
            });
        }
        if entry & COPIED != 0 {
            return Err(EntryError::CompressedCopied { entry });
        }
        let sectors = descriptor.wrapping_shr(shift).saturating_add(1);
        // At most (2^13 sectors of 512 bytes): fits 32 bits with room.
        let len_max = sectors.saturating_mul(SECTOR).saturating_sub(offset % SECTOR) as u32;
        Ok(L2Mapping::Compressed(CompressedExtent {
            host: HostOffset::new(offset),
            len_max,
        }))
    }
}

/// The entries of an L2 table, or of a slice of one, as they are on disk.
#[derive(Clone, Copy, Debug)]
pub struct L2Table<'a> {
    bytes: &'a [u8],
    width: L2EntryWidth,
}

/// Returns the entry that `bytes` begin with; [`L2Entry::REFUSED`] if they are too few.
#[inline]
fn read(bytes: &[u8], width: L2EntryWidth) -> L2Entry {
    let word = |bytes: &[u8; 8]| u64::from_be_bytes(*bytes);
    let found = match width {
        L2EntryWidth::Standard => bytes
            .first_chunk::<8>()
            .map(|descriptor| L2Entry::from_raw(word(descriptor))),
        L2EntryWidth::Extended => bytes
            .as_chunks::<8>()
            .0
            .first_chunk::<2>()
            .map(|[descriptor, bitmap]| {
                L2Entry::from_raw(word(descriptor)).with_bitmap(SubclusterBitmap::from_raw(word(bitmap)))
            }),
    };
    found.unwrap_or(L2Entry::REFUSED)
}

/// Replaces the entry that `bytes` begin with. Returns false if they are too few.
#[inline]
fn write(bytes: &mut [u8], width: L2EntryWidth, entry: L2Entry) -> bool {
    let (descriptor, bitmap) = (entry.descriptor.to_be_bytes(), entry.bitmap.raw().to_be_bytes());
    match width {
        L2EntryWidth::Standard => {
            let place = bytes.first_chunk_mut::<8>();
            place.map(|place| *place = descriptor).is_some()
        }
        L2EntryWidth::Extended => {
            let place = bytes.as_chunks_mut::<8>().0.first_chunk_mut::<2>();
            place.map(|place| *place = [descriptor, bitmap]).is_some()
        }
    }
}

impl<'a> L2Table<'a> {
    /// Creates a view of a table's bytes, whose entries are as wide as those of `geometry`.
    #[inline]
    pub const fn new(bytes: &'a [u8], geometry: &Geometry) -> Self {
        Self {
            bytes,
            width: geometry.l2_entry_width(),
        }
    }

    /// Returns the number of entries.
    #[inline]
    pub const fn len(&self) -> usize {
        self.bytes.len().wrapping_shr(self.width.bits())
    }

    /// Returns true if there is no entry.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns entry `index`; past the last one [`L2Entry::REFUSED`], which decodes to an error.
    #[inline]
    pub fn get(&self, index: usize) -> L2Entry {
        self.get_as(self.width, index)
    }

    /// Returns entry `index` as [`Self::get`] does, of a table whose entries are known to be of that width.
    #[inline]
    pub(crate) fn get_as(&self, width: L2EntryWidth, index: usize) -> L2Entry {
        let bytes = self.bytes.get(index.wrapping_shl(width.bits())..);
        bytes.map_or(L2Entry::REFUSED, |bytes| read(bytes, width))
    }

    /// Returns the entries in order.
    pub fn iter(&self) -> impl Iterator<Item = L2Entry> + use<'a> {
        let width = self.width;
        let entries = self.bytes.chunks_exact(width.bytes());
        entries.map(move |entry| read(entry, width))
    }

    /// Returns the offset of entry `index` of a table, in bytes from the table's start.
    #[inline]
    pub const fn offset_of(geometry: &Geometry, index: usize) -> u64 {
        (index as u64).wrapping_shl(geometry.l2_entry_width().bits())
    }
}

/// The entries of an L2 table, or of a slice of one, to change.
#[derive(Debug)]
pub struct L2TableMut<'a> {
    bytes: &'a mut [u8],
    width: L2EntryWidth,
}

impl<'a> L2TableMut<'a> {
    /// Creates a view of a table's bytes, whose entries are as wide as those of `geometry`.
    #[inline]
    pub const fn new(bytes: &'a mut [u8], geometry: &Geometry) -> Self {
        Self {
            bytes,
            width: geometry.l2_entry_width(),
        }
    }

    /// Replaces entry `index`.
    ///
    /// # Panics
    ///
    /// In debug builds, if there is no such entry; in others, nothing changes then.
    #[inline]
    pub fn set(&mut self, index: usize, entry: L2Entry) {
        let at = index.wrapping_shl(self.width.bits());
        let place = self.bytes.get_mut(at..);
        let is_set = place.is_some_and(|bytes| write(bytes, self.width, entry));
        debug_assert!(is_set, "the table has no entry {index}");
    }

    /// Replaces each entry by the result of `change`. Returns true if that changed any.
    pub fn update(&mut self, change: impl Fn(L2Entry) -> L2Entry) -> bool {
        let mut changed = false;
        for bytes in self.bytes.chunks_exact_mut(self.width.bytes()) {
            let old = read(bytes, self.width);
            let new = change(old);
            changed |= new != old && write(bytes, self.width, new);
        }
        changed
    }
}

/// Returns `x` of the specification: the bit where the sector count starts in a compressed descriptor.
const fn compressed_shift(geometry: &Geometry) -> u32 {
    62u32.wrapping_sub(geometry.cluster_bits().get().wrapping_sub(8))
}

/// Returns the number of bits of a compressed descriptor's offset field that may be used.
const fn offset_bits(shift: u32) -> u32 {
    if shift < OFFSET_BITS { shift } else { OFFSET_BITS }
}
