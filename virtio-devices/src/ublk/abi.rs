//! The ABI of `linux/ublk_cmd.h`: structures and numbers that the driver and a server share.
//!
//! Numbers are in host order. Sizes and offsets are checked when this is compiled; nothing here talks to the kernel.
//! Source: the kernel's UAPI header as of Linux 7.2, and `Documentation/block/ublk.rst`.

use std::mem::{offset_of, size_of};

use bitflags::bitflags;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The driver's control device.
pub const CONTROL_PATH: &str = "/dev/ublk-control";
/// The most requests a queue has.
pub const QUEUE_DEPTH_MAX: u16 = 4096;
/// The most queues a device has.
pub const QUEUES_MAX: u16 = 4096;
/// The most bytes a request moves: what the offsets of a user copy have room for.
pub const IO_BYTES_MAX: u32 = 1 << 25;
/// The bytes of a sector, the unit of the driver's lengths and positions.
pub const SECTOR_BYTES: u64 = 512;
/// The value for "no queue" in a control command, and for "any id" when a device is added.
pub const NO_QUEUE: u16 = u16::MAX;
/// Asks for an id of the driver's choice.
pub const ANY_DEVICE: u32 = u32::MAX;

bitflags! {
    /// The features that a device and its server use.
    #[derive(Clone, Copy, Debug, Eq, PartialEq)]
    pub struct Flags: u64 {
        /// Requests' pages can be registered in a ring (6.15).
        const SUPPORT_ZERO_COPY = 1 << 0;
        /// Answers come in task work; set by the driver.
        const COMPLETE_IN_TASK = 1 << 1;
        /// A write is fetched in two steps.
        const NEED_GET_DATA = 1 << 2;
        /// The device outlives its server (6.1).
        const USER_RECOVERY = 1 << 3;
        /// Requests in flight of a dead server are repeated for its successor (6.1).
        const USER_RECOVERY_REISSUE = 1 << 4;
        /// A user without rights owns the device (6.3).
        const UNPRIVILEGED_DEV = 1 << 5;
        /// Commands are numbered as ioctls are (6.4).
        const CMD_IOCTL_ENCODE = 1 << 6;
        /// The server reads and writes requests' data through the character device (6.5).
        const USER_COPY = 1 << 7;
        /// Zoned storage (6.6).
        const ZONED = 1 << 8;
        /// Without a server, I/O fails instead of waiting (6.13).
        const USER_RECOVERY_FAIL_IO = 1 << 9;
        /// The size can change (6.16).
        const UPDATE_SIZE = 1 << 10;
        /// Requests' pages are registered when they are fetched (6.16).
        const AUTO_BUF_REG = 1 << 11;
        /// The server can be detached from a device that remains (6.16).
        const QUIESCE = 1 << 12;
        /// Each tag has a thread of its own (6.17).
        const PER_IO_DAEMON = 1 << 13;
        /// Any thread registers pages (6.17).
        const BUF_REG_OFF_DAEMON = 1 << 14;
        /// Many tags in one command (7.0).
        const BATCH_IO = 1 << 15;
        /// Integrity metadata (7.0).
        const INTEGRITY = 1 << 16;
        /// A stop that spares a device in use (7.0).
        const SAFE_STOP_DEV = 1 << 17;
        /// The host does not look for partitions (7.0).
        const NO_AUTO_PART_SCAN = 1 << 18;
        /// Pages of shared memory arrive by their offset (7.1).
        const SHMEM_ZC = 1 << 19;
        /// Bits of drivers yet to come.
        const _ = !0;
    }
}

const fn code(direction: u32, number: u32, bytes: usize) -> u32 {
    direction << 30 | (bytes as u32) << 16 | (b'u' as u32) << 8 | number
}

const fn reads(number: u32) -> u32 {
    code(2, number, size_of::<ControlCommand>())
}

const fn changes(number: u32) -> u32 {
    code(3, number, size_of::<ControlCommand>())
}

/// A command to the control device.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u32)]
pub enum Command {
    /// The CPUs that submit to a queue.
    GetQueueAffinity = reads(0x01),
    /// Returns the information of a device, whether or not it has a path.
    GetDevInfo = reads(0x02),
    /// Makes a device.
    AddDev = changes(0x04),
    /// Removes a device.
    DelDev = changes(0x05),
    /// Makes the block device appear.
    StartDev = changes(0x06),
    /// Makes the block device go.
    StopDev = changes(0x07),
    /// Says what the block device is like.
    SetParams = changes(0x08),
    /// Asks what the driver took of that.
    GetParams = reads(0x09),
    /// Begins a new server's service of a device.
    StartUserRecovery = changes(0x10),
    /// Lets I/O flow to the new server.
    EndUserRecovery = changes(0x11),
    /// Returns the information of a device.
    GetDevInfo2 = reads(0x12),
    /// Returns the features of the driver.
    GetFeatures = reads(0x13),
    /// Removes a device without waiting for its users to close it (6.9).
    DelDevAsync = reads(0x14),
    /// Changes the size.
    UpdateSize = changes(0x15),
    /// Takes the server off, without its death.
    QuiesceDev = changes(0x16),
    /// Removes the block device if no process has it open.
    TryStopDev = changes(0x17),
}

impl Command {
    /// Its number for the kernel.
    #[must_use]
    pub fn code(self) -> u32 {
        self as u32
    }

    /// The command with this number.
    #[must_use]
    pub fn of_code(code: u32) -> Option<Self> {
        let all = [
            Self::GetQueueAffinity,
            Self::AddDev,
            Self::DelDev,
            Self::DelDevAsync,
            Self::GetDevInfo,
            Self::StartDev,
            Self::StopDev,
            Self::SetParams,
            Self::GetParams,
            Self::StartUserRecovery,
            Self::EndUserRecovery,
            Self::GetDevInfo2,
            Self::GetFeatures,
            Self::UpdateSize,
            Self::QuiesceDev,
            Self::TryStopDev,
        ];
        all.into_iter().find(|command| command.code() == code)
    }

    /// Its name in the kernel's documentation.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::GetQueueAffinity => "GET_QUEUE_AFFINITY",
            Self::GetDevInfo => "GET_DEV_INFO",
            Self::AddDev => "ADD_DEV",
            Self::DelDev => "DEL_DEV",
            Self::DelDevAsync => "DEL_DEV_ASYNC",
            Self::StartDev => "START_DEV",
            Self::StopDev => "STOP_DEV",
            Self::SetParams => "SET_PARAMS",
            Self::GetParams => "GET_PARAMS",
            Self::StartUserRecovery => "START_USER_RECOVERY",
            Self::EndUserRecovery => "END_USER_RECOVERY",
            Self::GetDevInfo2 => "GET_DEV_INFO2",
            Self::GetFeatures => "GET_FEATURES",
            Self::UpdateSize => "UPDATE_SIZE",
            Self::QuiesceDev => "QUIESCE_DEV",
            Self::TryStopDev => "TRY_STOP_DEV",
        }
    }
}

/// Waits for a request under a tag.
pub const IO_FETCH: u32 = code(3, 0x20, size_of::<IoCommand>());
/// Answers the request under a tag and waits for the next.
pub const IO_COMMIT_AND_FETCH: u32 = code(3, 0x21, size_of::<IoCommand>());

/// The most registered-buffer slots that a ring has, `IORING_MAX_REG_BUFFERS` of the kernel's io_uring.
pub const REGISTERED_BUFFERS_MAX: u16 = 1 << 14;

/// Returns the `addr` of a fetch with [`Flags::AUTO_BUF_REG`] (`struct ublk_auto_buf_reg`): the slot of the ring's
/// table for the request's pages, and the fallback that hands out a request whose pages cannot be registered with
/// [`op::FLAG_NEED_REG_BUF`]. Without the fallback such a request fails, and the server never sees it.
#[must_use]
pub fn auto_buf_reg(slot: u16) -> u64 {
    const FALLBACK: u64 = 1 << 0;
    u64::from(slot) | FALLBACK << 16
}

/// A request has come.
pub const IO_RES_OK: i32 = 0;
/// No request will come under this tag any more.
pub const IO_RES_ABORT: i32 = -libc::ENODEV;

/// `struct ublksrv_ctrl_cmd`: what goes with a control command.
#[derive(Clone, Copy, Debug, Default, FromBytes, Immutable, IntoBytes, KnownLayout)]
#[repr(C)]
pub struct ControlCommand {
    /// The device, or [`ANY_DEVICE`].
    pub dev_id: u32,
    /// The queue, or [`NO_QUEUE`].
    pub queue_id: u16,
    /// The bytes at `addr`.
    pub len: u16,
    /// The address of the command's buffer.
    pub addr: u64,
    /// A number that goes with some commands.
    pub data: u64,
    /// The bytes of the character device's path that the buffer begins with, its NUL included.
    pub dev_path_len: u16,
    /// Zero.
    pub pad: u16,
    /// Zero.
    pub reserved: u32,
}

/// `struct ublksrv_ctrl_dev_info`: what a device is.
#[derive(Clone, Copy, Debug, Default, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct DeviceInfo {
    /// Its queues; the driver gives no more than there are CPUs.
    pub nr_hw_queues: u16,
    /// Requests of each queue.
    pub queue_depth: u16,
    /// A [`DeviceState`].
    pub state: u16,
    /// Zero.
    pub pad0: u16,
    /// The most bytes a request moves.
    pub max_io_buf_bytes: u32,
    /// Its number.
    pub dev_id: u32,
    /// The server's process, once it is started.
    pub ublksrv_pid: i32,
    /// Zero.
    pub pad1: u32,
    /// [`Flags`].
    pub flags: u64,
    /// For the server's own use.
    pub ublksrv_flags: u64,
    /// Its owner.
    pub owner_uid: u32,
    /// Its owner.
    pub owner_gid: u32,
    /// Zero.
    pub reserved1: u64,
    /// Zero.
    pub reserved2: u64,
}

impl DeviceInfo {
    /// The flags, those included that this code does not know.
    #[must_use]
    pub fn flags(&self) -> Flags {
        Flags::from_bits_retain(self.flags)
    }

    /// Returns the state of the device.
    #[must_use]
    pub fn state(&self) -> DeviceState {
        match self.state {
            0 => DeviceState::Dead,
            1 => DeviceState::Live,
            2 => DeviceState::Quiesced,
            3 => DeviceState::FailIo,
            other => DeviceState::Unknown(other),
        }
    }
}

/// The state of a device.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum DeviceState {
    /// There is no block device.
    Dead,
    /// It is served.
    Live,
    /// Its server is gone and I/O waits for another.
    Quiesced,
    /// Its server is gone and I/O fails until there is another.
    FailIo,
    /// Something newer.
    Unknown(u16),
}

impl std::fmt::Display for DeviceState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Dead => f.write_str("dead"),
            Self::Live => f.write_str("live"),
            Self::Quiesced => f.write_str("quiesced"),
            Self::FailIo => f.write_str("failing"),
            Self::Unknown(number) => write!(f, "state {number}"),
        }
    }
}

/// `struct ublksrv_io_cmd`: what goes with a command of a queue.
#[derive(Clone, Copy, Debug, Default, FromBytes, Immutable, IntoBytes, KnownLayout)]
#[repr(C)]
pub struct IoCommand {
    /// The queue.
    pub q_id: u16,
    /// The tag.
    pub tag: u16,
    /// The answer: bytes, or minus the errno.
    pub result: i32,
    /// The tag's buffer, in copy mode; zero otherwise.
    pub addr: u64,
}

/// `struct ublksrv_io_desc`: one request, as the driver describes it in the shared map.
#[derive(Clone, Copy, Debug, Default, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct IoDescriptor {
    /// The operation in the low eight bits, flags above.
    pub op_flags: u32,
    /// The length.
    pub nr_sectors: u32,
    /// The position.
    pub start_sector: u64,
    /// The tag's buffer.
    pub addr: u64,
}

/// Operations of [`IoDescriptor::op_flags`].
pub mod op {
    /// Read.
    pub const READ: u8 = 0;
    /// Write.
    pub const WRITE: u8 = 1;
    /// Flush.
    pub const FLUSH: u8 = 2;
    /// Discard.
    pub const DISCARD: u8 = 3;
    /// Write zeroes.
    pub const WRITE_ZEROES: u8 = 5;
    /// Force unit access.
    pub const FLAG_FUA: u32 = 1 << 13;
    /// Zeroes are written, not deallocated.
    pub const FLAG_NOUNMAP: u32 = 1 << 15;
    /// The request's pages could not be registered.
    pub const FLAG_NEED_REG_BUF: u32 = 1 << 17;
}

/// Returns the distance between the queues' descriptors in the character device, whatever their depth.
#[must_use]
pub fn descriptors_stride(page_bytes: usize) -> usize {
    (usize::from(QUEUE_DEPTH_MAX) * size_of::<IoDescriptor>()).next_multiple_of(page_bytes)
}

/// The bytes of one queue's descriptors, as they are to be mapped.
#[must_use]
pub fn descriptors_bytes(depth: u16, page_bytes: usize) -> usize {
    (usize::from(depth) * size_of::<IoDescriptor>()).next_multiple_of(page_bytes)
}

/// Returns the position of a request's data in the character device.
#[must_use]
pub fn data_offset(queue: u16, tag: u16) -> u64 {
    0x8000_0000 + (u64::from(queue) << 41 | u64::from(tag) << 25)
}

/// Parts of [`Params`] that are there.
pub mod param {
    /// [`super::Basic`].
    pub const BASIC: u32 = 1 << 0;
    /// [`super::Discard`].
    pub const DISCARD: u32 = 1 << 1;
    /// The device numbers, set by the driver.
    pub const DEVT: u32 = 1 << 2;
    /// The alignment of buffers.
    pub const DMA_ALIGN: u32 = 1 << 4;
    /// The disk cannot be written.
    pub const READ_ONLY: u32 = 1 << 0;
    /// Writes may be lost without a flush.
    pub const VOLATILE_CACHE: u32 = 1 << 2;
    /// Writes can be durable by themselves.
    pub const FUA: u32 = 1 << 3;
}

/// `struct ublk_param_basic`.
#[derive(Clone, Copy, Debug, Default, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct Basic {
    /// Of [`param`].
    pub attrs: u32,
    /// Two to this is the smallest unit of a request, in bytes.
    pub logical_bs_shift: u8,
    /// Two to this is the unit that is written without reading first.
    pub physical_bs_shift: u8,
    /// Two to this is the best size of large requests.
    pub io_opt_shift: u8,
    /// Two to this is the best size of small requests.
    pub io_min_shift: u8,
    /// The longest request.
    pub max_sectors: u32,
    /// Zero: requests are not split.
    pub chunk_sectors: u32,
    /// The size.
    pub dev_sectors: u64,
    /// Zero.
    pub virt_boundary_mask: u64,
}

/// `struct ublk_param_discard`.
#[derive(Clone, Copy, Debug, Default, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct Discard {
    /// Bytes from the start to the first whole unit.
    pub alignment: u32,
    /// The unit that is freed, in bytes; not zero.
    pub granularity: u32,
    /// The longest discard; zero for none.
    pub max_discard_sectors: u32,
    /// The longest write of zeroes; zero for none.
    pub max_write_zeroes_sectors: u32,
    /// One: the driver knows no more.
    pub max_discard_segments: u16,
    /// Zero.
    pub reserved0: u16,
}

/// `struct ublk_params`, without the parts after `dma`, which are not used here.
#[derive(Clone, Copy, Debug, Default, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct Params {
    /// The bytes of this.
    pub len: u32,
    /// The parts that are present.
    pub types: u32,
    /// The parameters that every device has.
    pub basic: Basic,
    /// Discards and zeroes.
    pub discard: Discard,
    /// The numbers of the character device and of the disk: major, minor each.
    pub devt: [u32; 4],
    /// Zoned storage.
    pub zoned: [u32; 8],
    /// The alignment of buffers in memory, less one.
    pub dma_alignment: u32,
    /// Zero.
    pub dma_pad: u32,
    /// Up to the next part.
    pub tail: u32,
}

const _: () = {
    assert!(size_of::<ControlCommand>() == 32);
    assert!(offset_of!(ControlCommand, addr) == 8);
    assert!(offset_of!(ControlCommand, data) == 16);
    assert!(offset_of!(ControlCommand, dev_path_len) == 24);
    assert!(size_of::<DeviceInfo>() == 64);
    assert!(offset_of!(DeviceInfo, max_io_buf_bytes) == 8);
    assert!(offset_of!(DeviceInfo, ublksrv_pid) == 16);
    assert!(offset_of!(DeviceInfo, flags) == 24);
    assert!(offset_of!(DeviceInfo, owner_uid) == 40);
    assert!(size_of::<IoCommand>() == 16);
    assert!(offset_of!(IoCommand, result) == 4);
    assert!(offset_of!(IoCommand, addr) == 8);
    assert!(size_of::<IoDescriptor>() == 24);
    assert!(offset_of!(IoDescriptor, start_sector) == 8);
    assert!(size_of::<Basic>() == 32);
    assert!(offset_of!(Basic, dev_sectors) == 16);
    assert!(size_of::<Discard>() == 20);
    assert!(offset_of!(Params, basic) == 8);
    assert!(offset_of!(Params, discard) == 40);
    assert!(offset_of!(Params, devt) == 60);
    assert!(offset_of!(Params, zoned) == 76);
    assert!(offset_of!(Params, dma_alignment) == 108);
    assert!(size_of::<Params>() == 120);
};

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers as a C compiler makes them of the header's macros.
    #[test]
    fn command_codes_match_the_kernel_header() {
        assert_eq!(Command::AddDev.code(), 0xc020_7504);
        assert_eq!(Command::GetFeatures.code(), 0x8020_7513);
        assert_eq!(Command::UpdateSize.code(), 0xc020_7515);
        assert_eq!(IO_FETCH, 0xc010_7520);
        assert_eq!(auto_buf_reg(0x1234), 0x0001_1234);
        assert_eq!(IO_COMMIT_AND_FETCH, 0xc010_7521);
    }

    #[test]
    fn descriptor_and_data_offsets_follow_queue_and_tag() {
        assert_eq!(descriptors_stride(4096), 98_304);
        assert_eq!(descriptors_stride(65_536), 131_072);
        assert_eq!(descriptors_bytes(128, 4096), 4096);
        assert_eq!(descriptors_bytes(200, 4096), 8192);
        assert_eq!(data_offset(0, 0), 0x8000_0000);
        assert_eq!(data_offset(0, 1), 0x8200_0000);
        assert_eq!(data_offset(1, 0), (1 << 41) + 0x8000_0000);
    }
}
