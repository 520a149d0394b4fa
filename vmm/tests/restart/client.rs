//! A vhost-user-blk client that outlives its server: one queue, a fixed table of requests, and a model of
//! what the disk holds.
//!
//! Requests in flight never overlap, so what each block must hold is known whatever order they end in. An
//! answer to a request that is not in flight fails the test: that is a request answered twice.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ringdisk_gen::Random;
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestRegionMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

const MEMORY_BYTES: u64 = 4 << 20;
const QUEUE: u16 = 128;
/// Requests that can be in flight; each has three descriptors.
pub(crate) const SLOTS: usize = 32;
/// The unit of requests and of the model, in bytes.
pub(crate) const BLOCK: usize = 4096;

const DESCRIPTORS: u64 = 0;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const HEADERS: u64 = 0x4000;
const STATUSES: u64 = 0x5000;
const DATA: u64 = 0x10_0000;

const PROTOCOL_FEATURES: u64 = 1 << 30;
const F_CONFIG_WCE: u64 = 1 << 11;
/// Where the configuration has the cache mode.
const WRITEBACK_AT: u32 = 32;

/// What a client asks for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Ask {
    Read,
    /// All words of the block hold this number.
    Write(u64),
    Flush,
    Discard,
    WriteZeroes,
}

/// What outlives a connection: the memory, the rings in it, and what is in flight.
pub(crate) struct Client {
    memory: GuestMemoryMmap,
    file: File,
    kick: EventFd,
    call: EventFd,
    inflight: Option<(VhostUserInflight, File)>,
    frontend: Option<Frontend>,
    available: u16,
    used: u16,
    /// By slot: what is asked, of which block.
    in_flight: [Option<(Ask, usize)>; SLOTS],
    /// What each block holds: the number written last, zero for zeros.
    pub(crate) model: Vec<u64>,
    pub(crate) answered: u64,
    /// Whether a discarded block reads as zeros: clusters are blocks.
    discards: bool,
    /// Whether its guest may choose the cache mode.
    pub(crate) chooses_mode: bool,
    /// Whether it reads the configuration when it connects, as a monitor does that starts.
    pub(crate) reads_config: bool,
}

/// The memory: a file of the temporary directory is shared memory too.
fn memory_file() -> File {
    let file = tempfile::tempfile().expect("a file");
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
            memory,
            file,
            kick: event(),
            call: event(),
            inflight: None,
            frontend: None,
            available: 0,
            used: 0,
            in_flight: [None; SLOTS],
            model: vec![0; blocks],
            answered: 0,
            discards,
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
        let hidden = if self.chooses_mode { 0 } else { F_CONFIG_WCE };
        let features = frontend.get_features().expect("GET_FEATURES") & !hidden | PROTOCOL_FEATURES;
        frontend.set_features(features).expect("SET_FEATURES");
        let protocol = frontend.get_protocol_features().expect("GET_PROTOCOL_FEATURES");
        frontend
            .set_protocol_features(protocol)
            .expect("SET_PROTOCOL_FEATURES");
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        if self.reads_config {
            frontend
                .get_config(WRITEBACK_AT, 1, VhostUserConfigFlags::WRITABLE, &[0])
                .expect("GET_CONFIG");
        }
        let base = self
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
            .set_vring_base(0, self.used_index())
            .expect("SET_VRING_BASE");
        let config = VringConfigData {
            queue_max_size: QUEUE,
            queue_size: QUEUE,
            flags: 0,
            desc_table_addr: base + DESCRIPTORS,
            used_ring_addr: base + USED,
            avail_ring_addr: base + AVAILABLE,
            log_addr: None,
        };
        frontend.set_vring_addr(0, &config).expect("SET_VRING_ADDR");
        frontend.set_vring_kick(0, &self.kick).expect("SET_VRING_KICK");
        frontend.set_vring_call(0, &self.call).expect("SET_VRING_CALL");
        frontend.set_vring_enable(0, true).expect("SET_VRING_ENABLE");
        self.frontend = Some(frontend);
    }

    /// Whether the server still answers messages.
    pub(crate) fn is_connected(&self) -> bool {
        self.frontend
            .as_ref()
            .is_some_and(|frontend| frontend.get_features().is_ok())
    }

    /// Has the guest choose a cache mode: 0 writethrough, 1 writeback.
    pub(crate) fn choose_mode(&mut self, mode: u8) {
        let frontend = self.frontend.as_mut().expect("a connection");
        let set = frontend.set_config(WRITEBACK_AT, VhostUserConfigFlags::empty(), &[mode]);
        set.expect("SET_CONFIG");
    }

    /// The cache mode that the configuration shows.
    pub(crate) fn shown_mode(&mut self) -> u8 {
        let frontend = self.frontend.as_mut().expect("a connection");
        let flags = VhostUserConfigFlags::WRITABLE;
        let (_, shown) = frontend
            .get_config(WRITEBACK_AT, 1, flags, &[0])
            .expect("GET_CONFIG");
        shown[0]
    }

    fn put(&self, address: u64, bytes: &[u8]) {
        self.memory
            .write_slice(bytes, GuestAddress(address))
            .expect("inside memory");
    }

    fn used_index(&self) -> u16 {
        self.memory
            .load(GuestAddress(USED + 2), Ordering::SeqCst)
            .expect("inside memory")
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
            .any(|(other, at)| *other != Ask::Flush && *at == block);
        let Some(slot) = self
            .in_flight
            .iter()
            .position(Option::is_none)
            .filter(|_| !touched)
        else {
            return false;
        };
        let sector = (block * BLOCK / 512) as u64;
        let (kind, data): (u32, Option<(u32, bool)>) = match ask {
            Ask::Read => (0, Some((BLOCK as u32, true))),
            Ask::Write(_) => (1, Some((BLOCK as u32, false))),
            Ask::Flush => (4, None),
            Ask::Discard => (11, Some((16, false))),
            Ask::WriteZeroes => (13, Some((16, false))),
        };
        let ranged = matches!(ask, Ask::Discard | Ask::WriteZeroes);
        match ask {
            Ask::Write(value) => self.put(Self::data(slot), &value.to_le_bytes().repeat(BLOCK / 8)),
            Ask::Discard | Ask::WriteZeroes => {
                let mut segment = sector.to_le_bytes().to_vec();
                segment.extend(((BLOCK / 512) as u32).to_le_bytes());
                // Unmap, where it may be asked for.
                segment.extend(u32::from(ask == Ask::WriteZeroes).to_le_bytes());
                self.put(Self::data(slot), &segment);
            }
            _ => self.put(Self::data(slot), &[0xEE; BLOCK]),
        }
        let header = HEADERS + 16 * slot as u64;
        self.put(
            header,
            &[
                u64::from(kind).to_le_bytes(),
                if ranged { [0; 8] } else { sector.to_le_bytes() },
            ]
            .concat(),
        );
        let status = STATUSES + slot as u64;
        self.put(status, &[0xff]);
        let head = 3 * slot as u16;
        let mut buffers = vec![(header, 16, false)];
        buffers.extend(data.map(|(len, writable)| (Self::data(slot), len, writable)));
        buffers.push((status, 1, true));
        for (index, (address, len, writable)) in (head..).zip(&buffers) {
            let last = usize::from(index - head) + 1 == buffers.len();
            let flags = u16::from(!last) | u16::from(*writable) << 1;
            let mut bytes = address.to_le_bytes().to_vec();
            bytes.extend(u32::to_le_bytes(*len));
            bytes.extend(flags.to_le_bytes());
            bytes.extend((index + 1).to_le_bytes());
            self.put(DESCRIPTORS + 16 * u64::from(index), &bytes);
        }
        self.put(
            AVAILABLE + 4 + 2 * u64::from(self.available % QUEUE),
            &head.to_le_bytes(),
        );
        self.available = self.available.wrapping_add(1);
        self.in_flight[slot] = Some((ask, block));
        self.memory
            .store(self.available, GuestAddress(AVAILABLE + 2), Ordering::SeqCst)
            .expect("inside memory");
        self.kick.write(1).expect("a kick");
        true
    }

    /// Takes the answers that are there, and checks each. Returns how many.
    pub(crate) fn take_answers(&mut self) -> usize {
        let end = self.used_index();
        let mut count = 0;
        while self.used != end {
            let at = USED + 4 + 8 * u64::from(self.used % QUEUE);
            let head: u32 = self.memory.read_obj(GuestAddress(at)).expect("inside memory");
            self.used = self.used.wrapping_add(1);
            let slot = head as usize / 3;
            let asked = self.in_flight.get_mut(slot).and_then(Option::take);
            let (ask, block) =
                asked.unwrap_or_else(|| panic!("head {head} was answered and is not in flight"));
            let status: u8 = self
                .memory
                .read_obj(GuestAddress(STATUSES + slot as u64))
                .expect("inside memory");
            assert_eq!(status, 0, "{ask:?} of block {block}");
            match ask {
                Ask::Read => {
                    let mut bytes = [0; BLOCK];
                    self.memory
                        .read_slice(&mut bytes, GuestAddress(Self::data(slot)))
                        .expect("inside memory");
                    let expected = self.model[block].to_le_bytes().repeat(BLOCK / 8);
                    assert!(
                        bytes == *expected,
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
