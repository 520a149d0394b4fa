//! The interface between one queue and the driver: requests, answers, and the data of both.
//!
//! [`Channel`] is the seam: behind it is the driver, on the worker's own ring, or in tests a model of it. The queue
//! above never sees a file descriptor, and this module never sees a disk.
//!
//! Invariants: a tag is fetched and answered only by the ring and thread that fetched it first. The driver owns the memory
//! that it may write from the fetch until its completion is taken. A tag's pages are in a slot of that ring's table that no
//! other tag has; the answer gives them back, when nothing names the slot any more.

#![expect(
    unsafe_code,
    reason = "maps the driver's descriptors and hands it addresses of buffers"
)]

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::rc::Rc;

use block::ring::{CommandSink, DeviceCommand, Direction, Door, FileHandle, LeaseError, NoSlot, Ring};
use block::{AlignedBuf, Buffer, Context, IoError, RegisteredSlot, Registration, RegistrationError};
use zerocopy::IntoBytes;

use super::abi::{self, DeviceInfo, Flags, IoCommand, IoDescriptor};
use super::params::DMA_ALIGN;

/// The transfer of a request's data to the server and back.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Transport {
    /// The driver copies to and from a buffer of the server's that each tag has.
    Copy,
    /// The server reads and writes the data through the character device.
    UserCopy,
    /// The kernel moves the data straight between the request's pages and the image; what is no file's bytes, and
    /// requests that are too small for it to pay, go as with [`Transport::UserCopy`].
    ZeroCopy,
}

impl Transport {
    /// Returns the flags that a device needs for it.
    #[must_use]
    pub fn flags(self) -> Flags {
        match self {
            Self::Copy => Flags::empty(),
            Self::UserCopy => Flags::USER_COPY,
            Self::ZeroCopy => Flags::USER_COPY | Flags::SUPPORT_ZERO_COPY | Flags::AUTO_BUF_REG,
        }
    }

    /// Returns the transport of a device with these flags.
    #[must_use]
    pub fn of(flags: Flags) -> Self {
        let best_first = [Self::ZeroCopy, Self::UserCopy];
        best_first
            .into_iter()
            .find(|transport| flags.contains(transport.flags()))
            .unwrap_or(Self::Copy)
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Copy => "copy",
            Self::UserCopy => "user-copy",
            Self::ZeroCopy => "zero-copy",
        })
    }
}

/// An error of leasing the pages of a request.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum PagesError {
    /// Its slot cannot.
    #[error(transparent)]
    Lease(#[from] LeaseError),
    /// They make no buffer.
    #[error(transparent)]
    Registration(#[from] RegistrationError),
}

/// One queue's end of the driver.
pub trait Channel: fmt::Debug {
    /// Waits for the first request under `tag`.
    ///
    /// # Errors
    ///
    /// [`NoSlot`], if the ring is full; nothing happened then.
    fn fetch(&mut self, tag: u16) -> Result<(), NoSlot>;

    /// Answers the request under `tag` and waits for the next one.
    ///
    /// # Errors
    ///
    /// [`NoSlot`], if the ring is full; nothing happened then.
    fn commit_and_fetch(&mut self, tag: u16, result: i32) -> Result<(), NoSlot>;

    /// Returns true if [`Channel::take_results`] has something to give.
    fn has_results(&self) -> bool;

    /// Moves what fetches have ended with to the end of `out`: the tag and the driver's answer.
    fn take_results(&mut self, out: &mut Vec<(u64, i32)>);

    /// The request under a tag whose fetch has ended well.
    fn descriptor(&self, tag: u16) -> IoDescriptor;

    /// A buffer with the `len` bytes of the write request under `tag`.
    ///
    /// # Errors
    ///
    /// The driver's error.
    fn data(&mut self, tag: u16, len: usize) -> Result<Buffer, IoError>;

    /// A buffer for the `len` bytes of the read request under `tag`.
    fn room(&mut self, tag: u16, len: usize) -> Buffer;

    /// Hands over what a read request asked for.
    ///
    /// # Errors
    ///
    /// The driver's error.
    fn deliver(&mut self, tag: u16, data: &Buffer) -> Result<(), IoError>;

    /// Takes a buffer back that [`Channel::data`] or [`Channel::room`] gave.
    fn give_back(&mut self, tag: u16, buffer: Buffer);

    /// The registered pages of the `len` bytes of the request under `tag`: there is nothing to fetch or to deliver.
    ///
    /// # Errors
    ///
    /// [`PagesError`]; the request is served by copies then.
    fn pages(&mut self, tag: u16, len: usize) -> Result<Buffer, PagesError>;

    /// Returns true if nothing names the pages of `tag` any more, so that an answer may give them back.
    fn is_free(&self, tag: u16) -> bool;
}

/// The slots of a queue's tags in the table of its ring.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TagSlots {
    /// The slot of the queue's first tag. Several queues share a worker's ring, and its table.
    pub(super) first: u16,
}

impl TagSlots {
    /// Returns the slot of a tag. If it is past the end of the table, the driver says so with each request.
    pub(super) fn of(self, tag: u16) -> u16 {
        self.first.saturating_add(tag)
    }

    /// Returns the address that a tag's fetches pass to the driver.
    pub(super) fn command(self, tag: u16) -> u64 {
        abi::auto_buf_reg(self.of(tag))
    }
}

/// The bytes of a page.
pub(crate) fn page_bytes() -> usize {
    // SAFETY: no memory is passed.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    // Every Linux knows it; x86-64 has no other.
    usize::try_from(bytes).unwrap_or(4096)
}

/// Lets the calling thread allocate memory without waiting for writes that it may have to execute itself
/// (`PR_SET_IO_FLUSHER`). It needs privileges; without them it has no effect.
pub(crate) fn become_io_flusher() {
    /// `PR_SET_IO_FLUSHER` of `linux/prctl.h` (Linux 5.6).
    const SET_IO_FLUSHER: libc::c_int = 57;
    // SAFETY: no memory is passed.
    let set = unsafe { libc::prctl(SET_IO_FLUSHER, 1, 0, 0, 0) };
    if set != 0 {
        let error = io::Error::last_os_error();
        tracing::debug!(%error, "a worker is no I/O flusher: it may stall when memory is short");
    }
}

/// A queue's descriptors, which the driver writes and we read.
#[derive(Debug)]
struct Descriptors {
    map: NonNull<IoDescriptor>,
    bytes: usize,
    depth: u16,
}

impl Descriptors {
    fn map(file: &OwnedFd, queue: u16, depth: u16) -> io::Result<Self> {
        let bytes = abi::descriptors_bytes(depth, page_bytes());
        let offset = usize::from(queue) * abi::descriptors_stride(page_bytes());
        let offset = libc::off_t::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        // SAFETY: a new mapping at an address of the kernel's choice, of an open file.
        let map = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ,
                flags,
                file.as_raw_fd(),
                offset,
            )
        };
        if map == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let map = NonNull::new(map.cast()).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self { map, bytes, depth })
    }

    fn get(&self, tag: u16) -> IoDescriptor {
        assert!(tag < self.depth, "tag {tag} of a queue of {}", self.depth);
        let descriptor = self.map.as_ptr().wrapping_add(usize::from(tag));
        // SAFETY: `tag < depth`, so the descriptor is inside the map, which is page-aligned and stays until this is
        // dropped. The driver writes it only while the tag is fetched for; volatile, because it is another's.
        unsafe { descriptor.read_volatile() }
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: the mapping was made with this length, and nothing of it is borrowed.
        let unmapped = unsafe { libc::munmap(self.map.as_ptr().cast(), self.bytes) };
        debug_assert_eq!(unmapped, 0);
    }
}

/// The memory of the tags.
#[derive(Debug)]
enum Memory {
    /// The driver copies here, for each tag.
    Copy(Vec<Rc<Buffer>>),
    /// The last buffer of each tag, as large as its requests have been.
    UserCopy(Vec<Option<AlignedBuf>>),
}

/// The driver itself.
#[derive(Debug)]
pub struct KernelChannel {
    ring: Ring,
    file: FileHandle,
    queue: u16,
    descriptors: Descriptors,
    memory: Memory,
    /// The slots into which the driver registers pages, if it does.
    slots: Option<TagSlots>,
    /// Those slots, by tag, from the first request with pages on.
    pages: Box<[Option<RegisteredSlot>]>,
    io_bytes_max: usize,
    sink: Rc<CommandSink>,
}

impl KernelChannel {
    /// The end of `queue` in the device that `file` is, on the worker of `cx`. With zero copy its tags have the slots
    /// from `first_slot` on in that worker's table; those past its end are served by copies.
    ///
    /// # Errors
    ///
    /// If the kernel refuses to map the descriptors or to register the file.
    pub fn open(
        cx: &Context,
        file: OwnedFd,
        queue: u16,
        depth: u16,
        transport: Transport,
        io_bytes_max: u32,
        first_slot: u16,
    ) -> io::Result<Self> {
        let descriptors = Descriptors::map(&file, queue, depth)?;
        let bytes = io_bytes_max as usize;
        let memory = match transport {
            // What no request needs is never there.
            Transport::Copy => Memory::Copy(
                (0..depth)
                    .map(|_| Ok(Rc::new(Buffer::from(AlignedBuf::untouched(bytes)?))))
                    .collect::<io::Result<_>>()?,
            ),
            Transport::UserCopy | Transport::ZeroCopy => Memory::UserCopy((0..depth).map(|_| None).collect()),
        };
        let slots = (transport == Transport::ZeroCopy).then_some(TagSlots { first: first_slot });
        Ok(Self {
            ring: cx.ring().clone(),
            file: cx.ring().register(file)?,
            queue,
            descriptors,
            memory,
            slots,
            pages: (0..depth).map(|_| None).collect(),
            io_bytes_max: bytes,
            sink: CommandSink::new(),
        })
    }

    /// Leases the slot of a tag, for all requests under it.
    #[cold]
    fn lease(&self, tag: u16) -> Result<RegisteredSlot, PagesError> {
        let slot = self.slots.unwrap_or_default().of(tag);
        Ok(RegisteredSlot::new(Registration {
            fixed: self.ring.lease_fixed(slot)?,
            // Registered pages are counted from zero.
            base: 0,
            len: self.io_bytes_max,
            // The same handle: a duplicate would keep the device from going.
            door: Door::new(self.file.clone()),
            door_offset: abi::data_offset(self.queue, tag),
            align: DMA_ALIGN as usize,
            hold: Rc::new(()),
        })?)
    }

    fn start(&mut self, code: u32, tag: u16, result: i32) -> Result<(), NoSlot> {
        let mut command = IoCommand {
            q_id: self.queue,
            tag,
            result,
            addr: 0,
        };
        let mut keep = None;
        if let Memory::Copy(buffers) = &self.memory
            && let Some(buffer) = buffers.get(usize::from(tag))
            && let Some(bytes) = buffer.as_owned()
        {
            command.addr = bytes.as_ptr().addr() as u64;
            keep = Some(Rc::clone(buffer));
        }
        let mut data = [0; 16];
        data.copy_from_slice(command.as_bytes());
        let command = DeviceCommand {
            code,
            data,
            address: self.slots.map_or(0, |slots| slots.command(tag)),
        };
        // SAFETY: in copy mode the driver reads and writes at `addr` at most as many bytes as the device's requests
        // may have, which is how long `keep` is; otherwise it touches no memory of ours, as what stands for the
        // command's address is the number of a slot. The queue gives the buffer out only between a fetch's
        // completion and the next.
        unsafe {
            self.ring
                .command(&self.file, command, keep, &self.sink, tag.into())
        }
    }
}

impl Channel for KernelChannel {
    fn fetch(&mut self, tag: u16) -> Result<(), NoSlot> {
        self.start(abi::IO_FETCH, tag, 0)
    }

    fn commit_and_fetch(&mut self, tag: u16, result: i32) -> Result<(), NoSlot> {
        self.start(abi::IO_COMMIT_AND_FETCH, tag, result)
    }

    fn has_results(&self) -> bool {
        !self.sink.is_empty()
    }

    fn take_results(&mut self, out: &mut Vec<(u64, i32)>) {
        self.sink.drain_into(out);
    }

    fn descriptor(&self, tag: u16) -> IoDescriptor {
        self.descriptors.get(tag)
    }

    fn data(&mut self, tag: u16, len: usize) -> Result<Buffer, IoError> {
        let buffer = self.room(tag, len);
        if let Memory::UserCopy(_) = self.memory {
            let offset = abi::data_offset(self.queue, tag);
            self.ring
                .transfer_now(&self.file, Direction::Read, offset, &buffer, len)?;
        }
        Ok(buffer)
    }

    fn room(&mut self, tag: u16, len: usize) -> Buffer {
        match &mut self.memory {
            Memory::Copy(buffers) => Buffer::part(&buffers[usize::from(tag)], 0, len),
            Memory::UserCopy(scratch) => {
                let kept = scratch[usize::from(tag)].take();
                let mut bytes = match kept.filter(|bytes| bytes.capacity() >= len) {
                    Some(bytes) => bytes,
                    None => AlignedBuf::zeroed(len.next_power_of_two()),
                };
                bytes.set_len(len);
                bytes.into()
            }
        }
    }

    fn deliver(&mut self, tag: u16, data: &Buffer) -> Result<(), IoError> {
        if let Memory::UserCopy(_) = self.memory {
            let offset = abi::data_offset(self.queue, tag);
            self.ring
                .transfer_now(&self.file, Direction::Write, offset, data, data.len())?;
        }
        Ok(())
    }

    fn give_back(&mut self, tag: u16, buffer: Buffer) {
        if let Memory::UserCopy(scratch) = &mut self.memory
            && let Some(bytes) = buffer.into_owned()
        {
            scratch[usize::from(tag)] = Some(bytes);
        }
    }

    fn pages(&mut self, tag: u16, len: usize) -> Result<Buffer, PagesError> {
        let index = usize::from(tag);
        if let Some(Some(slot)) = self.pages.get(index) {
            return Ok(slot.buffer(len)?);
        }
        let slot = self.lease(tag)?;
        let buffer = slot.buffer(len)?;
        self.pages[index] = Some(slot);
        Ok(buffer)
    }

    #[inline]
    fn is_free(&self, tag: u16) -> bool {
        // There is nothing to give back of a tag that has no slot.
        match self.pages.get(usize::from(tag)) {
            Some(Some(slot)) => slot.is_free(),
            _ => true,
        }
    }
}

/// Ends a recovery of the device `file` that stopped half way: each queue without a server gets one, which ends at once.
/// Returns how many queues had none. I/O of the device must wait for a recovery.
///
/// # Errors
///
/// If io_uring fails.
pub(super) fn end_half_recovery(file: OwnedFd, info: &DeviceInfo) -> io::Result<usize> {
    // Where the driver wants memory, it gets an address at which there never is any: nothing comes, so nothing is copied.
    let addr = match Transport::of(info.flags()) {
        Transport::Copy => 1,
        Transport::UserCopy | Transport::ZeroCopy => 0,
    };
    let fetches = |q_id: u16| {
        let fetch = |tag: u16| {
            let mut data = [0; 16];
            let command = IoCommand {
                q_id,
                tag,
                result: 0,
                addr,
            };
            data.copy_from_slice(command.as_bytes());
            data
        };
        // A queue has a server when all its tags are fetched for.
        (0..info.queue_depth).map(fetch).collect()
    };
    let queues = (0..info.nr_hw_queues).map(fetches).collect();
    // SAFETY: the commands name no memory of ours.
    let waited = unsafe { block::ring::start_and_end(file, abi::IO_FETCH, queues) }?;
    Ok(waited.into_iter().filter(|&waited| waited > 0).count())
}

#[cfg(test)]
mod tests {
    use block::ring::{FixedTable, RingKind};

    use super::*;

    #[test]
    fn tag_slots_of_a_ring_are_distinct_and_bounded() {
        let (first, second) = (TagSlots { first: 0 }, TagSlots { first: 128 });
        let mut places: Vec<u16> = (0..128).flat_map(|tag| [first.of(tag), second.of(tag)]).collect();
        places.sort_unstable();
        assert_eq!(places, (0..256).collect::<Vec<_>>());
        assert_eq!(second.command(3) & 0xffff, 131);
        let far = TagSlots { first: u16::MAX - 1 };
        assert!((0..4096).all(|tag| far.of(tag) >= abi::REGISTERED_BUFFERS_MAX));
    }

    #[test]
    fn pages_of_a_tag_are_one_requests_at_a_time() {
        let table = FixedTable::sparse(2);
        let ring = Ring::with_fixed(RingKind::Null, 16, &table).expect("a ring");
        let cx = Context::on(ring);
        let device = tempfile::tempfile().expect("a file");
        let open = KernelChannel::open(&cx, device.into(), 0, 2, Transport::ZeroCopy, 8192, 1);
        let mut channel = open.expect("a channel");
        assert!(channel.is_free(0) && channel.is_free(1));
        let first = channel.pages(0, 4096).expect("a slot");
        let in_use = PagesError::Lease(LeaseError::InUse { index: 1 });
        assert_eq!(channel.pages(0, 512).expect_err("a buffer names it"), in_use);
        assert!(!channel.is_free(0) && channel.is_free(1));
        channel.give_back(0, first);
        assert!(channel.is_free(0));
        assert_eq!(channel.pages(0, 8192).expect("it is free").len(), 8192);
        // The second tag's slot is past the end of the table.
        let none = PagesError::Lease(LeaseError::NoPlace { index: 2, places: 2 });
        assert_eq!(channel.pages(1, 512).expect_err("there is none"), none);
        assert!(channel.is_free(1), "there is nothing to give back");
    }

    #[test]
    fn transport_of_follows_the_device_flags() {
        for transport in [Transport::Copy, Transport::UserCopy, Transport::ZeroCopy] {
            let flags = transport.flags() | Flags::USER_RECOVERY;
            assert_eq!(Transport::of(flags), transport);
        }
        let half = Flags::SUPPORT_ZERO_COPY | Flags::USER_COPY;
        assert_eq!(Transport::of(half), Transport::UserCopy);
    }
}
