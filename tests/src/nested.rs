//! A machine inside a guest: what `ringdisk run` needs, on a disk for the guest that runs it.
//!
//! The guest is emulated, with AMD's virtualization extensions, so its KVM is a real one; a machine that it runs is
//! the second level. The lab's own initramfs and root serve there too: the disk carries the kernel, our binary and
//! an initramfs for each script, and the base image is a disk of its own, to be a backing file.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::{Error, Lab, Scratch, initramfs, prepare, process};

/// The memory a guest needs that runs a machine, in MiB.
pub const MEMORY_MIB: u32 = 2048;

/// The disk, before it is made.
#[derive(Debug)]
pub struct Toolbox {
    folder: PathBuf,
    image: PathBuf,
}

impl Toolbox {
    /// A disk with `vmlinuz` and `ringdisk`, to be made in `scratch`.
    ///
    /// # Errors
    ///
    /// [`Error::RingdiskNotBuilt`] or [`Error::File`].
    pub fn new(lab: &Lab, scratch: &Scratch) -> Result<Self, Error> {
        let folder = scratch.file("tools");
        let toolbox = Self {
            image: scratch.file("tools.raw"),
            folder,
        };
        let failed = |path: &PathBuf| {
            let path = path.clone();
            move |source| Error::File {
                action: "write",
                path,
                source,
            }
        };
        fs::create_dir(&toolbox.folder).map_err(failed(&toolbox.folder))?;
        for (from, name) in [
            (lab.kernel().to_owned(), "vmlinuz"),
            (prepare::ringdisk_binary()?, "ringdisk"),
        ] {
            let to = toolbox.folder.join(name);
            fs::copy(from, &to).map_err(failed(&to))?;
        }
        // What only a debugger reads.
        let mut strip = Command::new("strip");
        strip.arg(toolbox.folder.join("ringdisk"));
        process::run_ok(strip)?;
        Ok(toolbox)
    }

    /// Adds the initramfs `name` of an inner guest that runs `script`.
    ///
    /// # Errors
    ///
    /// [`Error::File`].
    pub fn script(self, lab: &Lab, name: &str, script: &str) -> Result<Self, Error> {
        initramfs::with_script(lab.initramfs(), script, &self.folder.join(name))?;
        Ok(self)
    }

    /// Makes the disk, with `bytes` of room, and answers its image: raw, with an ext4 file system.
    ///
    /// # Errors
    ///
    /// [`Error`], if `mke2fs` fails.
    pub fn make(&self, bytes: u64) -> Result<PathBuf, Error> {
        let mut command = Command::new("mke2fs");
        command.args(["-q", "-t", "ext4", "-d"]).arg(&self.folder);
        command.arg(&self.image).arg(format!("{}k", bytes / 1024));
        process::run_ok(command)?;
        Ok(self.image.clone())
    }
}
