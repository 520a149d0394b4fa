//! Memory that outlives a server: the guest's, and the in-flight regions in which servers mark its requests.
//!
//! The guest sees its memory through one mapping and each server through another, so that [`Arena::check`] finds out
//! when a server has released its own. A real server would unmap it then. Here nothing is unmapped as long as an op
//! uses it; [`Arena::check`] fails instead.

use std::fs::File;
use std::sync::Arc;

use simulator::memory;
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap, MmapRegion, VolatileMemory,
};

use ringdisk_driver::Rings;
use virtio_devices::virtqueue::{InflightRegion, RingAddresses};

/// The guest address at which memory begins.
const BASE: u64 = 0x1_0000;
/// The number of places for requests in a queue.
pub const PLACES: usize = 16;
/// The bytes of a place: its first page is for what is not data.
const PLACE_BYTES: u64 = 0xC000;
const DATA_AT: u64 = 0x1000;
/// The most data of a request, in bytes.
pub const DATA_BYTES_MAX: u64 = PLACE_BYTES - DATA_AT;

/// The memory of a guest with a few queues.
#[derive(Debug)]
pub struct Arena {
    file: File,
    /// Two regions: the second begins in the middle of a request's data.
    sizes: [u64; 2],
    guest: GuestMemoryMmap,
    /// The mappings of servers, each until its server has released it.
    mappings: Vec<Vec<Arc<GuestRegionMmap>>>,
    marks: Arc<MmapRegion>,
    queues: u64,
    entries: u16,
}

impl Arena {
    /// Memory for `queues` queues of `entries`.
    ///
    /// # Panics
    ///
    /// If the host has no memory for it.
    #[must_use]
    pub fn new(queues: usize, entries: u16) -> Self {
        let queues = queues as u64;
        let first = queues * Rings::BYTES + DATA_AT + 0x1000;
        let whole = queues * (Rings::BYTES + PLACES as u64 * PLACE_BYTES);
        let sizes = [first, whole - first];
        let file = rustix::fs::memfd_create(c"guest", rustix::fs::MemfdFlags::CLOEXEC);
        let file = File::from(file.unwrap_or_else(|error| panic!("guest memory: {error}")));
        file.set_len(whole)
            .unwrap_or_else(|error| panic!("guest memory: {error}"));
        let guest = collect(&map(&file, sizes));
        let marks = MmapRegion::new(queues as usize * InflightRegion::bytes(entries));
        Self {
            file,
            sizes,
            guest,
            mappings: Vec::new(),
            marks: Arc::new(marks.unwrap_or_else(|error| panic!("memory for marks: {error}"))),
            queues,
            entries,
        }
    }

    /// The guest's view.
    #[must_use]
    pub fn guest(&self) -> GuestMemoryMmap {
        self.guest.clone()
    }

    /// Maps it all once more, for a server.
    pub fn map(&mut self) -> GuestMemoryMmap {
        self.mappings.push(map(&self.file, self.sizes));
        self.mappings
            .last()
            .map(|regions| collect(regions))
            .unwrap_or_default()
    }

    /// Returns the memory in which the requests of queue `index` are marked. With `recover`, the marks of a killed
    /// server count.
    #[must_use]
    pub fn marks(&self, index: usize, recover: bool) -> Option<InflightRegion> {
        InflightRegion::new(&self.marks, index, self.entries, recover)
    }

    /// Removes the mark of a chain of queue `index`, as a server does once its answer is published.
    pub(crate) fn unmark(&self, index: usize, head: u16) {
        // The vhost-user layout: a header of 16 bytes, and for each head 16 bytes that begin with the mark.
        let at = index * InflightRegion::bytes(self.entries) + 16 * (1 + usize::from(head));
        let mark = self.marks.get_ref::<u8>(at);
        mark.unwrap_or_else(|error| panic!("memory for marks: {error}"))
            .store(0);
    }

    /// Returns the addresses of a queue's rings.
    #[must_use]
    pub fn rings(queue: usize) -> Rings {
        Rings::at(BASE + queue as u64 * Rings::BYTES)
    }

    /// The same, for the device.
    #[must_use]
    pub fn ring_addresses(queue: usize) -> RingAddresses {
        let Rings {
            descriptors,
            available,
            used,
        } = Self::rings(queue);
        RingAddresses {
            descriptors,
            available,
            used,
        }
    }

    /// A place for a request: a page for what is not data, and where data goes.
    #[must_use]
    pub fn place(&self, queue: usize, number: usize) -> (u64, u64) {
        let number = (queue * PLACES + number) as u64;
        let start = BASE + self.queues * Rings::BYTES + number * PLACE_BYTES;
        (start, start + DATA_AT)
    }

    /// Forgets mappings that no server has any more.
    ///
    /// # Errors
    ///
    /// If an op still uses one of them.
    pub fn check(&mut self) -> Result<(), String> {
        let mut problem = None;
        self.mappings.retain(|regions| {
            let gone = regions.iter().all(|region| Arc::strong_count(region) == 1);
            if gone && problem.is_none() {
                problem = regions
                    .iter()
                    .find_map(|region| memory::holder(addresses(region)));
            }
            !gone
        });
        match problem {
            None => Ok(()),
            Some(op) => Err(format!(
                "guest memory of op {op} was unmapped while the op was in flight"
            )),
        }
    }

    /// Returns true if every server has released its mapping.
    #[must_use]
    pub fn is_let_go(&self) -> bool {
        self.mappings.is_empty()
    }

    /// The op that uses some of these bytes of the guest's memory, through whichever mapping.
    #[must_use]
    pub fn holder(&self, address: u64, len: u32) -> Option<u64> {
        let regions = self.mappings.iter().flatten();
        regions.into_iter().find_map(|region| {
            let (start, end) = (region.start_addr().0, region.start_addr().0 + region.len());
            let (from, to) = (address.max(start), (address + u64::from(len)).min(end));
            let host = addresses(region).start;
            (from < to)
                .then(|| memory::holder(host + (from - start) as usize..host + (to - start) as usize))
                .flatten()
        })
    }
}

fn addresses(region: &GuestRegionMmap) -> std::ops::Range<usize> {
    let start = region.as_ptr().addr();
    start..start + region.size()
}

fn map(file: &File, sizes: [u64; 2]) -> Vec<Arc<GuestRegionMmap>> {
    let mut at = 0;
    let regions = sizes.into_iter().map(|size| {
        let part = FileOffset::new(
            file.try_clone()
                .unwrap_or_else(|error| panic!("guest memory: {error}")),
            at,
        );
        let region = GuestRegionMmap::from_range(GuestAddress(BASE + at), size as usize, Some(part));
        at += size;
        Arc::new(region.unwrap_or_else(|error| panic!("guest memory: {error}")))
    });
    regions.collect()
}

fn collect(regions: &[Arc<GuestRegionMmap>]) -> GuestMemoryMmap {
    GuestMemoryMmap::from_arc_regions(regions.to_vec())
        .unwrap_or_else(|error| panic!("guest memory: {error}"))
}
