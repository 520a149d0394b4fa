//! Power cuts under a disk, judged by others: the kernel's log of what reached the device, and QEMU's tools.
//!
//! An image lies on a device of dm-log-writes in a guest, and a client carries out a [`plan`]. The [`log`] tells what a
//! [`cut`] at any instant leaves. Whatever is left, `qemu-img check` finds nothing worse than leaks, and what `qemu-img`
//! reads is what the plan allows: all that an answered FLUSH covers, and nothing that was never asked for.

pub mod cut;
pub mod log;
pub mod plan;

use std::fs;
use std::path::{Path, PathBuf};

use crate::image::{self, Verdict};
use crate::{Error, Scratch};
use plan::Plan;

/// The size of the disk, in bytes.
pub const DISK: u64 = 8 << 20;
/// The size of the device that its image lies on, in bytes.
pub const DEVICE: u64 = 20 << 20;
/// The backing file's name: raw, beside the image.
pub const BACKING: &str = "backing.raw";
/// The image's internal snapshot.
const SNAPSHOT: &str = "kept";
/// The byte that fills a device that nobody wrote.
const GARBAGE: u8 = 0xA5;

/// An image to begin with, its disk's contents, and where its judge works.
#[derive(Debug)]
pub struct World {
    folder: PathBuf,
    name: String,
    device: PathBuf,
    before: Vec<u8>,
}

impl World {
    /// Makes an image with clusters of `cluster` bytes, as it lies on its device: a backing file, data of its own, plain
    /// and compressed, and a snapshot that shares it. Files in `scratch` begin with `name`, except for [`BACKING`].
    ///
    /// # Errors
    ///
    /// [`Error::Tool`] if QEMU's tools refuse; [`Error::File`].
    pub fn new(scratch: &Scratch, name: &str, cluster: u64) -> Result<Self, Error> {
        let folder = scratch.path().to_owned();
        let device = scratch.file(&format!("{name}.device"));
        write(&folder.join(BACKING), &tagged(1, 6 << 20))?;
        let layer = scratch.file(&format!("{name}.layer"));
        write(&layer, &tagged(2, 2 << 20))?;
        image::create(
            &device,
            "qcow2",
            &format!("cluster_size={cluster},backing_file={BACKING},backing_fmt=raw"),
            DISK,
        )?;
        let layer = layer.display();
        image::qemu_io(
            &device,
            &[
                &format!("write -q -s {layer} 2M 1M"),
                &format!("write -q -c -s {layer} 4M 512k"),
            ],
        )?;
        image::snapshot(&device, SNAPSHOT)?;
        let mut bytes = read(&device)?;
        bytes.resize(DEVICE as usize, GARBAGE);
        write(&device, &bytes)?;
        let mut world = Self {
            folder,
            name: name.to_owned(),
            device,
            before: Vec::new(),
        };
        world.before = world.reads(&world.device, None)?;
        Ok(world)
    }

    /// The device before anybody served it, as a file.
    #[must_use]
    pub fn device(&self) -> &Path {
        &self.device
    }

    /// Judges what a cut has left on the device, after this mark and before the next; answers how many clusters leaked.
    ///
    /// # Errors
    ///
    /// The fault, as a text.
    pub fn judge(&self, plan: &Plan, device: &[u8], mark: u32) -> Result<u64, String> {
        let cut = self.folder.join(format!("{}.cut", self.name));
        let told = |error: Error| format!("{error:?}");
        write(&cut, device).map_err(told)?;
        let leaks = match image::check(&cut).map_err(told)? {
            Verdict::Clean => 0,
            Verdict::Leaks(report) => image::leaked(&report).ok_or(report)?,
            Verdict::Errors(report) => return Err(report),
        };
        let found = self.reads(&cut, None).map_err(told)?;
        if let Some(difference) = plan.difference(&self.before, &found, mark) {
            return Err(difference);
        }
        let kept = self.reads(&cut, Some(SNAPSHOT)).map_err(told)?;
        // As slices first: byte by byte it takes longer than all of QEMU's tools.
        if kept == self.before {
            return Ok(leaks);
        }
        match kept.iter().zip(&self.before).position(|(a, b)| a != b) {
            Some(at) => Err(format!("the snapshot differs at {at}")),
            None => Err(format!("the snapshot has {} bytes", kept.len())),
        }
    }

    /// Returns the disk that QEMU reads from an image, or from a snapshot of it.
    fn reads(&self, image: &Path, snapshot: Option<&str>) -> Result<Vec<u8>, Error> {
        let raw = self.folder.join(format!("{}.raw", self.name));
        match snapshot {
            Some(snapshot) => image::convert_snapshot(image, snapshot, &raw)?,
            None => image::convert(image, &raw, "raw")?,
        }
        read(&raw)
    }
}

/// Bytes that tell their place, and the file they are from; they compress a little.
fn tagged(file: u64, len: u64) -> Vec<u8> {
    let words =
        (0..len / 8).map(|word| (word / 2).wrapping_mul(0x9E37_79B9_7F4A_7C15 ^ file << 7) >> 16 << 8 | file);
    words.flat_map(u64::to_le_bytes).collect()
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    fs::write(path, bytes).map_err(|source| Error::File {
        action: "write",
        path: path.to_owned(),
        source,
    })
}

fn read(path: &Path) -> Result<Vec<u8>, Error> {
    fs::read(path).map_err(|source| Error::File {
        action: "read",
        path: path.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// QEMU is the server: its image is right after the whole plan, and one wrong byte of data or metadata is reported.
    #[test]
    fn judge_accepts_a_whole_image_and_finds_a_lost_piece() {
        let scratch = Scratch::new().unwrap();
        let world = World::new(&scratch, "w", 16384).unwrap();
        let plan = Plan::new(3, DISK, 12);
        let device = fs::read(world.device()).unwrap();
        world.judge(&plan, &device, 0).unwrap();
        let served = scratch.file("served");
        fs::copy(world.device(), &served).unwrap();
        let text = plan.text();
        let commands: Vec<&str> = text.lines().filter(|line| !line.starts_with("mark")).collect();
        image::qemu_io(&served, &commands).unwrap();
        let device = fs::read(&served).unwrap();
        let last = plan.marks() - 1;
        world.judge(&plan, &device, last).unwrap();
        let told = world.judge(&plan, &device, 0).unwrap_err();
        assert!(
            told.contains("after mark 0 holds"),
            "nothing had been asked for: {told}"
        );

        let find = |from: &dyn Fn(&[u8]) -> bool| device.chunks(512).position(from).unwrap() * 512;
        // A sector of the plan's data, a sector that only the snapshot has, the L1 table.
        let data = find(&|sector| {
            sector[0] > 0 && sector[0] != GARBAGE && sector.iter().all(|&byte| byte == sector[0])
        });
        let now = world.reads(&served, None).unwrap();
        let both = now.chunks(512).zip(world.before.chunks(512)).skip(4096);
        let mut overwritten = both.filter(|(now, before)| now != before);
        let (_, layer) = overwritten.next().unwrap();
        let shared = find(&|sector| sector == layer);
        for (at, text) in [(data, "holds"), (shared, "differ"), (16384 * 3, "")] {
            let mut wrong = device.clone();
            wrong[at..at + 512].fill(0x77);
            let told = world.judge(&plan, &wrong, last).unwrap_err();
            assert!(told.contains(text), "{at}: {told}");
        }
    }
}
