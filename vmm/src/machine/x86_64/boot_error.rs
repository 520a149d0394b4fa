//! Kernels, initramfs files and firmware that cannot be booted, and why.

use std::io;
use std::path::PathBuf;

/// Linux: `COMMAND_LINE_SIZE` of x86. A kernel cuts what is longer without a word.
pub(super) const COMMAND_LINE_MAX: usize = 2048;

/// A kernel, an initramfs or firmware that cannot be booted.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// A file cannot be read.
    #[error("cannot read the {what} {}", path.display())]
    Read {
        /// The file's role: kernel, initramfs or firmware.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The file is no kernel that can be started.
    #[error(
        "{} is not a bootable kernel: {why}; expected a bzImage with a 64-bit entry, or an ELF file with \
         a PVH note",
        path.display()
    )]
    Kernel {
        /// The file.
        path: PathBuf,
        /// The defect.
        why: String,
    },
    /// The file is no firmware that can be started.
    #[error(
        "{} is not firmware for this machine: {why}; expected an ELF file with a PVH note, such as EDK II's `CLOUDHV.fd` \
         (Debian: cloudhv-efi-x86-64)",
        path.display()
    )]
    Firmware {
        /// The file.
        path: PathBuf,
        /// The defect.
        why: String,
    },
    /// It does not fit.
    #[error("the {what} of {bytes} bytes does not fit into the guest's memory; raise --memory")]
    NoRoom {
        /// The object that does not fit.
        what: &'static str,
        /// Its size.
        bytes: u64,
    },
    /// The command line is too long.
    #[error("the kernel's command line has {bytes} bytes; at most {} fit", COMMAND_LINE_MAX - 1)]
    CommandLine {
        /// Its length.
        bytes: usize,
    },
}
