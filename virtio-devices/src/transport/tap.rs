//! A tap interface of the host: what a guest sends comes out of it, and what the host sends there goes to the guest.
//!
//! Each frame has a virtio-net header before it, so that checksums and large segments are left to whoever can do them. Linux:
//! `Documentation/networking/tuntap.rst`, `include/uapi/linux/if_tun.h`.

#![expect(unsafe_code, reason = "a tap interface is set up by ioctls")]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;

use vmm_sys_util::ioctl::{ioctl_with_mut_ref, ioctl_with_ref, ioctl_with_val};

/// The device that makes tap interfaces.
const TUN: &str = "/dev/net/tun";
/// The bytes of the header before each frame: `struct virtio_net_hdr_v1`.
const HEADER_BYTES: libc::c_int = 12;
/// The most bytes of a name, without the zero behind it.
const NAME_MAX: usize = libc::IFNAMSIZ - 1;

/// A tap interface, attached to.
#[derive(Debug)]
pub struct Tap {
    file: File,
    name: String,
}

/// A tap interface that cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// No interface can have this name.
    #[error(
        "`{name}` is no name of a network interface; expected 1 to {NAME_MAX} characters without `/` and spaces"
    )]
    Name {
        /// The name.
        name: String,
    },
    /// There is no tap interface on this host.
    #[error("cannot open {TUN}, which makes tap interfaces (modprobe tun)")]
    Open(#[source] io::Error),
    /// It cannot be attached to.
    #[error(
        "cannot attach to the tap interface {name}; expected one of `ip tuntap add dev {name} mode tap user USER`, with one queue and \
         nobody attached, or the right to make it (CAP_NET_ADMIN)"
    )]
    Attach {
        /// The name.
        name: String,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// It has no headers.
    #[error("the tap interface {name} cannot have a virtio-net header before each frame")]
    Header {
        /// The name.
        name: String,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The descriptor is of something else.
    #[error(
        "descriptor {descriptor} is no tap interface with virtio-net headers (IFF_TAP, IFF_NO_PI, IFF_VNET_HDR)"
    )]
    Descriptor {
        /// Its number.
        descriptor: i32,
    },
}

impl Tap {
    /// Attaches to the tap interface `name`. If there is none, it is made and goes with the last who has it, which takes
    /// CAP_NET_ADMIN; it is down then.
    ///
    /// # Errors
    ///
    /// [`TapError`].
    pub fn open(name: &str) -> Result<Self, TapError> {
        let is_good = |byte: u8| byte.is_ascii_graphic() && byte != b'/';
        if name.is_empty() || name.len() > NAME_MAX || !name.bytes().all(is_good) {
            return Err(TapError::Name {
                name: name.to_owned(),
            });
        }
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_CLOEXEC | libc::O_NONBLOCK)
            .open(TUN)
            .map_err(TapError::Open)?;
        let mut request = request();
        for (place, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
            *place = byte as libc::c_char;
        }
        request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as libc::c_short;
        // SAFETY: the kernel reads and writes a `struct ifreq`, which is live and exclusive.
        let result = unsafe { ioctl_with_mut_ref(&file, libc::TUNSETIFF as libc::c_ulong, &mut request) };
        checked(result).map_err(|source| TapError::Attach {
            name: name.to_owned(),
            source,
        })?;
        Self::with_header(file, name.to_owned())
    }

    /// Takes a descriptor that is attached to a tap interface already, with virtio-net headers.
    ///
    /// # Errors
    ///
    /// [`TapError::Descriptor`], [`TapError::Header`].
    pub fn from_descriptor(descriptor: OwnedFd) -> Result<Self, TapError> {
        let file = File::from(descriptor);
        let wrong = || TapError::Descriptor {
            descriptor: file.as_raw_fd(),
        };
        let mut request = request();
        // SAFETY: the kernel writes a `struct ifreq`, which is live and exclusive.
        let result = unsafe { ioctl_with_mut_ref(&file, libc::TUNGETIFF as libc::c_ulong, &mut request) };
        checked(result).map_err(|_| wrong())?;
        // SAFETY: the kernel has just written the flags, and any bytes are a number.
        let flags = libc::c_int::from(unsafe { request.ifr_ifru.ifru_flags });
        let wanted = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
        if flags & wanted != wanted {
            return Err(wrong());
        }
        let name = request.ifr_name.iter().take_while(|&&byte| byte != 0);
        let name = name.map(|byte| char::from(*byte as u8)).collect();
        Self::with_header(file, name)
    }

    fn with_header(file: File, name: String) -> Result<Self, TapError> {
        // SAFETY: the kernel reads a number, which is live.
        let result = unsafe { ioctl_with_ref(&file, libc::TUNSETVNETHDRSZ as libc::c_ulong, &HEADER_BYTES) };
        match checked(result) {
            Ok(()) => Ok(Self { file, name }),
            Err(source) => Err(TapError::Header { name, source }),
        }
    }

    /// The name of the interface.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The descriptor to read frames from and to write them to.
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Says what the reader of frames can do: `TUN_F_…`.
    pub(super) fn set_offload(&self, flags: libc::c_uint) -> io::Result<()> {
        // SAFETY: numbers only.
        checked(unsafe { ioctl_with_val(&self.file, libc::TUNSETOFFLOAD as libc::c_ulong, flags.into()) })
    }
}

/// An empty `struct ifreq`.
fn request() -> libc::ifreq {
    libc::ifreq {
        ifr_name: [0; libc::IFNAMSIZ],
        ifr_ifru: libc::__c_anonymous_ifr_ifru { ifru_flags: 0 },
    }
}

fn checked(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_refuses_names_that_no_interface_has() {
        for name in ["", "a b", "a/b", "longer-than-fifteen", "tap\u{e9}"] {
            let error = Tap::open(name).expect_err("no name");
            assert!(matches!(error, TapError::Name { .. }), "{error}");
        }
    }

    #[test]
    fn from_descriptor_refuses_what_is_no_tap() {
        let file = tempfile::tempfile().expect("a file");
        let error = Tap::from_descriptor(file.into()).expect_err("no tap");
        assert!(matches!(error, TapError::Descriptor { .. }), "{error}");
    }
}
