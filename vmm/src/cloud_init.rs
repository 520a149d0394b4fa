//! `--cloud-init`: the disk from which cloud-init in a guest learns who it is, its NoCloud data source.
//!
//! cloud-init looks for a file system with the label `cidata` and reads the files `user-data`, `meta-data` and `network-config` there
//! (cloud-init, "NoCloud"). It is made in memory, and goes with the machine.

use std::fs::File;
use std::io::{self, Cursor, Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use fatfs::{FileSystem, FormatVolumeOptions, FsOptions};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use sha2::{Digest as _, Sha256};

use crate::disk_config::{DiskConfig, DiskConfigError};

/// The id of the disk.
pub const ID: &str = "cloud-init";

/// The files that cloud-init reads; it needs the first two.
const FILES: [&str; 3] = ["user-data", "meta-data", "network-config"];
/// The label that cloud-init looks for.
const LABEL: [u8; 11] = *b"cidata     ";
/// The most bytes of a file.
const BYTES_MAX: u64 = 4 << 20;
/// The bytes of the file system beside the files.
const ROOM: usize = 1 << 20;

/// A disk for cloud-init cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum CloudInitError {
    /// A file cannot be read.
    #[error("--cloud-init: cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// A file has more bytes than one for cloud-init may have.
    #[error("--cloud-init: {} is larger than {BYTES_MAX} bytes; expected user data of cloud-init", path.display())]
    Large {
        /// The file.
        path: PathBuf,
    },
    /// There is nothing to do for cloud-init.
    #[error("--cloud-init: {} has no data; expected a file that begins with #cloud-config or #!", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// The file system cannot be made.
    #[error("--cloud-init: cannot make the file system in memory")]
    Make(#[from] io::Error),
    /// It is no disk. That is a fault of this program.
    #[error("--cloud-init: the file system is no disk")]
    Disk(#[from] DiskConfigError),
}

/// A disk for cloud-init, in memory.
#[derive(Debug)]
pub struct Seed {
    file: File,
}

impl Seed {
    /// Makes one of the file `path`, which is the user data, or of the files in the folder `path`.
    ///
    /// # Errors
    ///
    /// [`CloudInitError`].
    pub fn make(path: &Path) -> Result<Self, CloudInitError> {
        let image = image(&files(path)?)?;
        let memory = memfd_create(ID, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
        let mut file = File::from(memory.map_err(io::Error::from)?);
        file.write_all(&image)?;
        let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        fcntl_add_seals(&file, seals).map_err(io::Error::from)?;
        Ok(Self { file })
    }

    /// The disk, to be opened while this lives.
    ///
    /// # Errors
    ///
    /// [`CloudInitError::Disk`].
    pub fn disk(&self) -> Result<DiskConfig, CloudInitError> {
        // With the number of the process: `/proc/self/fd` names descriptors that were inherited.
        let (process, descriptor) = (std::process::id(), self.file.as_raw_fd());
        let text = format!("path=/proc/{process}/fd/{descriptor},id={ID},image_type=raw,readonly=on");
        Ok(DiskConfig::parse(&text)?)
    }
}

/// Reads the files of cloud-init at `path`. Without metadata the guest's instance is named after its user data: with other data it is
/// another one, on which cloud-init does all of it anew.
fn files(path: &Path) -> Result<Vec<(&'static str, Vec<u8>)>, CloudInitError> {
    let [user, meta, network] = FILES;
    let mut found = if path.is_dir() {
        let optional = [meta, network].map(|name| (name, path.join(name)));
        let mut found = vec![(user, read(&path.join(user))?)];
        for (name, path) in optional.iter().filter(|(_, path)| path.exists()) {
            found.push((name, read(path)?));
        }
        found
    } else {
        vec![(user, read(path)?)]
    };
    if found.iter().all(|(name, _)| *name != meta) {
        let mut hasher = Sha256::new();
        for (name, bytes) in &found {
            hasher.update(format!("{name} {}\n", bytes.len()));
            hasher.update(bytes);
        }
        let digest: String = hasher
            .finalize()
            .iter()
            .take(8)
            .map(|byte| format!("{byte:02x}"))
            .collect();
        found.push((meta, format!("instance-id: ringdisk-{digest}\n").into_bytes()));
    }
    Ok(found)
}

fn read(path: &Path) -> Result<Vec<u8>, CloudInitError> {
    let failed = |source| CloudInitError::Read {
        path: path.to_owned(),
        source,
    };
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(failed)?;
    file.take(BYTES_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
    let path = path.to_owned();
    if bytes.is_empty() {
        return Err(CloudInitError::Empty { path });
    }
    if bytes.len() as u64 > BYTES_MAX {
        return Err(CloudInitError::Large { path });
    }
    Ok(bytes)
}

/// Returns a FAT file system with these files.
fn image(files: &[(&str, Vec<u8>)]) -> io::Result<Vec<u8>> {
    let bytes: usize = files.iter().map(|(_, bytes)| bytes.len()).sum();
    let mut image = Cursor::new(vec![0; (bytes + ROOM).next_multiple_of(4096)]);
    fatfs::format_volume(&mut image, FormatVolumeOptions::new().volume_label(LABEL))?;
    let system = FileSystem::new(&mut image, FsOptions::new())?;
    for (name, bytes) in files {
        let mut file = system.root_dir().create_file(name)?;
        file.write_all(bytes)?;
        file.flush()?;
    }
    system.unmount()?;
    Ok(image.into_inner())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::Command;

    use super::*;
    use crate::open;

    const USER: &str = "#cloud-config\nhostname: one\n";

    /// Returns a file of an image, as another program that reads FAT does.
    fn content(image: &[u8], name: &str) -> Option<Vec<u8>> {
        let system = FileSystem::new(Cursor::new(image.to_vec()), FsOptions::new()).expect("a file system");
        let mut bytes = Vec::new();
        let mut file = system.root_dir().open_file(name).ok()?;
        file.read_to_end(&mut bytes).expect("its bytes");
        Some(bytes)
    }

    fn bytes(seed: &Seed) -> Vec<u8> {
        let path = format!("/proc/self/fd/{}", seed.file.as_raw_fd());
        fs::read(path).expect("the disk")
    }

    #[test]
    fn user_data_is_found_under_the_label_that_cloud_init_looks_for() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("one.yaml");
        fs::write(&path, USER).expect("a file");
        let seed = Seed::make(&path).expect("a disk");
        let image = bytes(&seed);
        assert_eq!(content(&image, "user-data").as_deref(), Some(USER.as_bytes()));
        let meta = content(&image, "meta-data").expect("metadata");
        assert!(meta.starts_with(b"instance-id: ringdisk-"));
        assert_eq!(content(&image, "network-config"), None);
        let copy = folder.path().join("copy");
        fs::write(&copy, &image).expect("a copy");
        let said = Command::new("/sbin/blkid")
            .args(["-p", "-o", "export"])
            .arg(&copy)
            .output();
        let said = said.expect("blkid is needed by this test (apt-get install util-linux)");
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        assert!(
            said.contains("LABEL=cidata\n") && said.contains("TYPE=vfat\n"),
            "{said}"
        );
        // Other data are another instance, the same ones the same.
        let again = bytes(&Seed::make(&path).expect("a disk"));
        assert_eq!(content(&again, "meta-data"), Some(meta.clone()));
        fs::write(&path, "#!/bin/sh\n").expect("a file");
        let other = bytes(&Seed::make(&path).expect("a disk"));
        assert_ne!(content(&other, "meta-data"), Some(meta));
        let disk = seed.disk().expect("a disk");
        assert_eq!(disk.name(), ID);
        let opened = open::open(&disk).expect("an image");
        drop(seed);
        assert_eq!(opened.disk().info().size_bytes, image.len() as u64);
    }

    #[test]
    fn folder_has_all_that_cloud_init_reads() {
        let folder = tempfile::tempdir().expect("a folder");
        for (name, text) in [
            ("user-data", USER),
            ("meta-data", "instance-id: i-1\n"),
            ("network-config", "version: 2\n"),
        ] {
            fs::write(folder.path().join(name), text).expect("a file");
        }
        let image = bytes(&Seed::make(folder.path()).expect("a disk"));
        assert_eq!(
            content(&image, "meta-data").as_deref(),
            Some(&b"instance-id: i-1\n"[..])
        );
        assert_eq!(
            content(&image, "network-config").as_deref(),
            Some(&b"version: 2\n"[..])
        );
    }

    #[test]
    fn large_user_data_fit_in() {
        let files = [("user-data", vec![7; BYTES_MAX as usize])];
        let image = image(&files).expect("a file system");
        assert_eq!(content(&image, "user-data").as_ref(), Some(&files[0].1));
    }

    #[test]
    fn error_names_the_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("user-data");
        let said = |path: &Path| Seed::make(path).expect_err("no data").to_string();
        assert!(said(&path).contains("cannot read") && said(&path).contains("user-data"));
        assert!(said(folder.path()).contains("user-data"), "a folder without it");
        fs::write(&path, "").expect("a file");
        assert!(said(&path).contains("has no data"));
        let file = File::create(&path).expect("a file");
        file.set_len(BYTES_MAX + 1).expect("its length");
        assert!(said(&path).contains("is larger than"));
    }
}
