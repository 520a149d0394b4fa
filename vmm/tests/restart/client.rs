//! A vhost-user-blk client that outlives its server: one queue, a fixed table of requests, and a model of
//! what the disk holds.
//!
//! Requests in flight never overlap, so what each block must hold is known whatever order they end in. An
//! answer to a request that is not in flight fails the test: that is a request answered twice.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

use ringdisk_driver::{Driver, Rings, blk};
use ringdisk_gen::Random;
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserDirtyLogRegion, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestRegionMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

const MEMORY_BYTES: u64 = 4 << 20;
const QUEUE: u16 = 128;
/// Requests that can be in flight; each has three descriptors.
pub(crate) const SLOTS: usize = 32;
/// The unit of requests and of the model, in bytes.
pub(crate) const BLOCK: usize = 4096;

const RINGS: Rings = Rings::at(0);
const REQUESTS: u64 = Rings::BYTES;
const DATA: u64 = 0x10_0000;

const PROTOCOL_FEATURES: u64 = 1 << 30;

/// A request of a client.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Ask {
    Read,
    /// All words of the block hold this number.
    Write(u64),
    Flush,
    Discard,
    WriteZeroes,
}

/// The part of a client that outlives a connection: the memory, the rings in it, and what is in flight.
pub(crate) struct Client {
    driver: Driver,
    file: File,
    kick: EventFd,
    call: EventFd,
    inflight: Option<(VhostUserInflight, File)>,
    frontend: Option<Frontend>,
    /// By slot, which is a place for data: the head of the chain, what is asked, of which block.
    in_flight: [Option<(u16, Ask, usize)>; SLOTS],
    /// The contents of each block: the number written last, zero for zeros.
    pub(crate) model: Vec<u64>,
    pub(crate) answered: u64,
    /// True if a discarded block reads as zeros: clusters are blocks.
    discards: bool,
    /// True if the disk can only be read: changes are answered with an error.
    pub(crate) reads_only: bool,
    /// True if its guest may choose the cache mode.
    pub(crate) chooses_mode: bool,
    /// True if it reads the configuration when it connects, as a monitor does that starts.
    pub(crate) reads_config: bool,
}

/// The memory, as a VMM has it. A file of a disk would be read ahead, 17 ms at its first touch.
fn memory_file() -> File {
    let file = rustix::fs::memfd_create("ringdisk-guest", rustix::fs::MemfdFlags::CLOEXEC);
    let file = File::from(file.expect("a file in memory"));
    file.set_len(MEMORY_BYTES).expect("its length");
    file
}

impl Client {
    /// A client of a disk of `blocks` zeros, whose clusters are as large as blocks if it `discards`.
    pub(crate) fn new(blocks: usize, discards: bool) -> Self {
        let file = memory_file();
        let offset = FileOffset::new(file.try_clone().expect("a duplicate"), 0);
        let region = GuestRegionMmap::from_range(GuestAddress(0), MEMORY_BYTES as usize, Some(offset));
        let memory = GuestMemoryMmap::from_regions(vec![region.expect("a mapping")]).expect("one region");
        let event = || EventFd::new(EFD_NONBLOCK).expect("an eventfd");
        Self {
            driver: Driver::new(memory, RINGS, QUEUE, REQUESTS),
            file,
            kick: event(),
            call: event(),
            inflight: None,
            frontend: None,
            in_flight: [None; SLOTS],
            model: vec![0; blocks],
            answered: 0,
            discards,
            reads_only: false,
            chooses_mode: false,
            reads_config: false,
        }
    }

    /// Connects to the server at `path`, which may not listen yet, and goes on where the last one ended.
    pub(crate) fn connect(&mut self, path: &Path) {
        let deadline = Instant::now() + Duration::from_secs(20);
        let mut frontend = loop {
            match Frontend::connect(path, 1) {
                Ok(frontend) => break frontend,
                Err(error) => assert!(Instant::now() < deadline, "no connection: {error}"),
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        frontend.set_owner().expect("SET_OWNER");
        let hidden = if self.chooses_mode { 0 } else { blk::F_CONFIG_WCE };
        let features = frontend.get_features().expect("GET_FEATURES") & !hidden | PROTOCOL_FEATURES;
        frontend.set_features(features).expect("SET_FEATURES");
        let protocol = frontend.get_protocol_features().expect("GET_PROTOCOL_FEATURES");
        frontend
            .set_protocol_features(protocol)
            .expect("SET_PROTOCOL_FEATURES");
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        if self.reads_config {
            frontend
                .get_config(blk::WRITEBACK_AT, 1, VhostUserConfigFlags::WRITABLE, &[0])
                .expect("GET_CONFIG");
        }
        let base = self
            .driver
            .memory
            .find_region(GuestAddress(0))
            .expect("a region")
            .as_ptr() as u64;
        let region = VhostUserMemoryRegionInfo {
            guest_phys_addr: 0,
            memory_size: MEMORY_BYTES,
            userspace_addr: base,
            mmap_offset: 0,
            mmap_handle: self.file.as_raw_fd(),
        };
        frontend.set_mem_table(&[region]).expect("SET_MEM_TABLE");
        if protocol.contains(VhostUserProtocolFeatures::INFLIGHT_SHMFD) {
            if self.inflight.is_none() {
                let asked = VhostUserInflight::new(0, 0, 1, QUEUE);
                self.inflight = Some(frontend.get_inflight_fd(&asked).expect("GET_INFLIGHT_FD"));
            }
            let (shape, file) = self.inflight.as_ref().expect("just made");
            frontend
                .set_inflight_fd(shape, file.as_raw_fd())
                .expect("SET_INFLIGHT_FD");
        }
        frontend.set_vring_num(0, QUEUE).expect("SET_VRING_NUM");
        // As QEMU has it after a broken connection: what is in flight is not known.
        frontend
            .set_vring_base(0, self.driver.used_index())
            .expect("SET_VRING_BASE");
        let config = VringConfigData {
            queue_max_size: QUEUE,
            queue_size: QUEUE,
            flags: 0,
            desc_table_addr: base + RINGS.descriptors,
            used_ring_addr: base + RINGS.used,
            avail_ring_addr: base + RINGS.available,
            log_addr: None,
        };
        frontend.set_vring_addr(0, &config).expect("SET_VRING_ADDR");
        frontend.set_vring_kick(0, &self.kick).expect("SET_VRING_KICK");
        frontend.set_vring_call(0, &self.call).expect("SET_VRING_CALL");
        frontend.set_vring_enable(0, true).expect("SET_VRING_ENABLE");
        self.frontend = Some(frontend);
    }

    /// Has the server log the pages that it writes, as the migration of a guest begins.
    pub(crate) fn begin_migration(&mut self) {
        let log = memory_file();
        let region = VhostUserDirtyLogRegion {
            mmap_size: MEMORY_BYTES.div_ceil(8 * 4096),
            mmap_offset: 0,
            mmap_handle: log.as_raw_fd(),
        };
        let frontend = self.frontend.as_mut().expect("a connection");
        frontend.set_log_base(0, Some(region)).expect("SET_LOG_BASE");
    }

    /// Migrates the guest to the client of another server, at `path`: its queue is stopped here, and goes on there.
    pub(crate) fn migrate(&mut self, path: &Path) {
        assert!(self.leave(), "GET_VRING_BASE");
        self.take_answers();
        assert_eq!(self.in_flight(), 0, "a queue stops by draining");
        self.connect(path);
        // The kick may have been for requests that the other server answered.
        self.kick.write(1).expect("a kick");
    }

    /// Stops the queue of a guest that migrates, and disconnects. Returns whether the server let it go.
    pub(crate) fn leave(&mut self) -> bool {
        self.begin_migration();
        let frontend = self.frontend.take().expect("a connection");
        frontend.get_vring_base(0).is_ok()
    }

    /// Returns true if the server still answers messages.
    pub(crate) fn is_connected(&self) -> bool {
        self.frontend
            .as_ref()
            .is_some_and(|frontend| frontend.get_features().is_ok())
    }

    /// Has the guest choose a cache mode: 0 writethrough, 1 writeback.
    pub(crate) fn choose_mode(&mut self, mode: u8) {
        let frontend = self.frontend.as_mut().expect("a connection");
        let set = frontend.set_config(blk::WRITEBACK_AT, VhostUserConfigFlags::empty(), &[mode]);
        set.expect("SET_CONFIG");
    }

    /// The cache mode that the configuration shows.
    pub(crate) fn shown_mode(&mut self) -> u8 {
        let frontend = self.frontend.as_mut().expect("a connection");
        let flags = VhostUserConfigFlags::WRITABLE;
        let (_, shown) = frontend
            .get_config(blk::WRITEBACK_AT, 1, flags, &[0])
            .expect("GET_CONFIG");
        shown[0]
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.iter().flatten().count()
    }

    fn data(slot: usize) -> u64 {
        DATA + (slot * BLOCK) as u64
    }

    /// Makes a request available. `false` if all slots are in use or one in flight touches the block.
    pub(crate) fn submit(&mut self, ask: Ask, block: usize) -> bool {
        let touched = self
            .in_flight
            .iter()
            .flatten()
            .any(|(_, other, at)| *other != Ask::Flush && *at == block);
        let Some(slot) = self
            .in_flight
            .iter()
            .position(Option::is_none)
            .filter(|_| !touched)
        else {
            return false;
        };
        let sector = (block * BLOCK / 512) as u64;
        let data = Self::data(slot);
        let whole = BLOCK as u32;
        let segment = (data, blk::SEGMENT_BYTES, false);
        let (kind, sector, parts) = match ask {
            Ask::Read => (blk::IN, sector, vec![(data, whole, true)]),
            Ask::Write(_) => (blk::OUT, sector, vec![(data, whole, false)]),
            Ask::Flush => (blk::FLUSH, sector, vec![]),
            Ask::Discard => (blk::DISCARD, 0, vec![segment]),
            Ask::WriteZeroes => (blk::WRITE_ZEROES, 0, vec![segment]),
        };
        match ask {
            Ask::Write(value) => self.driver.write(data, &value.to_le_bytes().repeat(BLOCK / 8)),
            Ask::Discard | Ask::WriteZeroes => {
                // Unmap, where it may be asked for.
                let unmap = u32::from(ask == Ask::WriteZeroes);
                let segment = blk::segment((block * BLOCK / 512) as u64, whole / 512, unmap);
                self.driver.write(data, &segment);
            }
            Ask::Read | Ask::Flush => self.driver.write(data, &[0xEE; BLOCK]),
        }
        let head = self.driver.request(kind, sector, &parts);
        self.in_flight[slot] = Some((head, ask, block));
        self.driver.publish();
        self.kick.write(1).expect("a kick");
        true
    }

    /// Takes the answers that are there, and checks each. Returns how many.
    pub(crate) fn take_answers(&mut self) -> usize {
        let mut count = 0;
        while let Some((head, _)) = self.driver.take_used() {
            let is_asked =
                |slot: &Option<(u16, Ask, usize)>| slot.is_some_and(|(asked, _, _)| u32::from(asked) == head);
            let slot = self.in_flight.iter().position(is_asked);
            let asked = slot.and_then(|slot| Some((slot, self.in_flight[slot].take()?)));
            let (slot, (head, ask, block)) =
                asked.unwrap_or_else(|| panic!("head {head} was answered and is not in flight"));
            let is_refused = self.reads_only && !matches!(ask, Ask::Read | Ask::Flush);
            let expected = if is_refused { blk::IOERR } else { blk::OK };
            assert_eq!(self.driver.status(head), expected, "{ask:?} of block {block}");
            match ask {
                _ if is_refused => {}
                Ask::Read => {
                    let bytes = self.driver.read(Self::data(slot), BLOCK);
                    let expected = self.model[block].to_le_bytes().repeat(BLOCK / 8);
                    assert!(
                        bytes == expected,
                        "block {block} reads {:02x?}, expected {:#x}",
                        &bytes[..16],
                        self.model[block]
                    );
                }
                Ask::Write(value) => self.model[block] = value,
                Ask::Discard | Ask::WriteZeroes => self.model[block] = 0,
                Ask::Flush => {}
            }
            count += 1;
        }
        self.answered += count as u64;
        count
    }

    /// Fails the test unless `contents` are those of the model.
    pub(crate) fn assert_contents(&self, contents: &[u8]) {
        for (block, value) in self.model.iter().enumerate() {
            let found = &contents[block * BLOCK..][..BLOCK];
            assert!(
                found == value.to_le_bytes().repeat(BLOCK / 8),
                "block {block} is not {value:#x}"
            );
        }
    }

    /// Waits until nothing is in flight.
    pub(crate) fn drain(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while self.in_flight() > 0 {
            if self.take_answers() == 0 {
                assert!(Instant::now() < deadline, "never answered: {:?}", self.in_flight);
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    }

    /// Keeps the disk busy for a while with requests of all kinds, and checks the answers.
    pub(crate) fn work(&mut self, random: &mut Random, how_long: Duration) {
        let end = Instant::now() + how_long;
        while Instant::now() < end {
            let block = random.below(self.model.len() as u64) as usize;
            let ask = match random.below(16) {
                0..8 => Ask::Write(random.below(u64::MAX) | 1),
                8..13 => Ask::Read,
                13 if self.discards => Ask::Discard,
                13 | 14 => Ask::WriteZeroes,
                _ => Ask::Flush,
            };
            if !self.submit(ask, block) && self.take_answers() == 0 {
                std::thread::yield_now();
            }
        }
    }
}
