//! Machines that boot from a disk with EFI, as those of a distribution's cloud image do: firmware, then shim, GRUB and Linux from the disk.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::prepare::newer_folder;
use crate::{Error, Lab, Scratch, initramfs, process};

/// Firmware and boot loaders, as Debian packages them.
#[derive(Debug)]
pub struct Efi {
    folder: PathBuf,
}

/// Returns the firmware and boot loaders. `None` where they cannot be had, which has been said as `tests/summary.sh` counts it.
///
/// # Panics
///
/// As [`require`](crate::require).
#[must_use]
#[expect(
    clippy::print_stdout,
    reason = "what cannot run here is counted by what it prints"
)]
pub fn require_efi() -> Option<Efi> {
    let why = match newer_folder(None) {
        Ok(folder) => match fs::read_to_string(folder.join("efi.unavailable")) {
            Ok(why) => why,
            Err(_) => {
                let folder = folder.join("efi");
                return Some(Efi { folder });
            }
        },
        Err(Error::NewerKernelUnavailable { why }) => why,
        Err(error) => panic!("{error}"),
    };
    println!("cannot run here: a boot by firmware, because {}", why.trim());
    None
}

/// Makes the image `$1` of a disk with a GPT and an EFI system partition, with the files of the folder `$2`.
const MAKE: &str = r#"
set -e
PATH=$PATH:/usr/sbin:/sbin
truncate -s 64M "$1"
printf 'label: gpt\nstart=2048, type=U\n' | sfdisk -q "$1"
# In sectors of the disk, and in KiB, up to the second table of partitions.
mkfs.vfat --offset 2048 "$1" $((62 << 10)) >/dev/null
mcopy -s -i "$1@@1M" "$2"/* ::
"#;

impl Efi {
    /// The firmware: EDK II as built for Cloud Hypervisor, an ELF file with a PVH note.
    #[must_use]
    pub fn firmware(&self) -> PathBuf {
        self.folder.join("CLOUDHV.fd")
    }

    /// Makes the raw image of a disk, `boot.raw`, from which the lab's Linux boots with this command line, to run `script`.
    ///
    /// # Errors
    ///
    /// [`Error`], if it cannot be made.
    pub fn disk(
        &self,
        lab: &Lab,
        scratch: &Scratch,
        script: &str,
        command_line: &str,
    ) -> Result<PathBuf, Error> {
        let (image, files) = (scratch.file("boot.raw"), scratch.file("boot"));
        // Where firmware looks on any disk; and where Debian's signed GRUB looks for what to do.
        let (loaders, settings) = (files.join("EFI/BOOT"), files.join("EFI/debian"));
        let failed = |action, path: &Path| {
            let path = path.to_owned();
            move |source| Error::File { action, path, source }
        };
        for folder in [&loaders, &settings] {
            fs::create_dir_all(folder).map_err(failed("create", folder))?;
        }
        let shim_and_grub =
            ["BOOTX64.EFI", "grubx64.efi"].map(|name| (self.folder.join(name), loaders.join(name)));
        let kernel = (lab.kernel().to_owned(), files.join("vmlinuz"));
        for (from, to) in shim_and_grub.into_iter().chain([kernel]) {
            fs::copy(&from, to).map_err(failed("copy", &from))?;
        }
        initramfs::with_script(lab.initramfs(), script, &files.join("initramfs"))?;
        let settings = settings.join("grub.cfg");
        let text = format!(
            "serial --speed=115200\nterminal_output serial\nsearch --no-floppy --file --set=root /vmlinuz\n\
             linux /vmlinuz {command_line}\ninitrd /initramfs\nboot\n"
        );
        fs::write(&settings, text).map_err(failed("write", &settings))?;
        let mut command = Command::new("sh");
        command.args(["-c", MAKE, "sh"]).arg(&image).arg(&files);
        process::run_ok(command)?;
        Ok(image)
    }
}
