//! The images that scenarios and random runs begin with.
//!
//! An image is made by our own engine in a world where everything happens at once; snapshots and compressed
//! clusters, which our engine only reads, are put in by `qemu-img`. Beginnings that need it are kept, so
//! that a thousand runs start it a few times.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, UNIX_EPOCH};

use block::file::OpenFiles;
use block::{AlignedBuf, Context, Disk, IoError, Op, ask};
use qcow::format::header::at;
use qcow::format::{CompressionType, Incompatible, Version};
use qcow::image::{CreateOptions, NewDataFile, create, create_with_data_file};
use qcow::luks::{self, CipherKind, LuksOptions, Secret};
use qcow::{BitmapStorage, OpenOptions, QcowDisk};
use simulator::{Profile, Random, SECTOR, SimImage, SimWorld, Store};

use crate::bitmaps::{self, Bitmaps};
use crate::content::{ZERO, bytes_of, word};
use crate::oracle::{Found, Words};
use crate::snapshots;

/// The file that the image under test is in.
pub const DISK: &str = "disk";
/// The file below it.
pub const BASE: &str = "base";
/// The file with the guest's data, if it is not in the image.
pub const DATA: &str = "data";
/// The file below that.
pub const GROUND: &str = "ground";

/// The secret of encrypted images.
fn secret() -> Secret {
    Secret::new(b"open sesame".to_vec())
}

/// The header of encrypted images. It is another one in each process, which changes what they hold and nothing else.
static LUKS_HEADER: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let options = LuksOptions {
        cipher: CipherKind::Aes128Xts,
        iter_time: Duration::from_millis(1),
        ..LuksOptions::default()
    };
    luks::create(&secret(), &options).expect("random bytes").0
});

/// The files below the image.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Below {
    /// Nothing.
    Nothing,
    /// A raw image of so many bytes.
    Raw(u64),
    /// A QCOW2 image of so many bytes.
    Qcow(u64),
    /// A QCOW2 image of so many bytes, half of whose clusters are those of a raw image below it, which is somewhat shorter.
    Deep(u64),
}

impl Below {
    fn bytes(self) -> u64 {
        match self {
            Self::Nothing => 0,
            Self::Raw(bytes) | Self::Qcow(bytes) | Self::Deep(bytes) => bytes,
        }
    }
}

/// The properties of an image.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Shape {
    /// The cluster size is two to this.
    pub cluster_bits: u32,
    /// Clusters have subclusters: their size is at least two to 14 then.
    pub extended: bool,
    /// The refcount width.
    pub refcount_bits: u32,
    /// Version 2 of the format.
    pub v2: bool,
    /// The disk's size in bytes, whole sectors.
    pub bytes: u64,
    /// So many bytes of its last sector are behind its end all the same.
    pub ragged: u64,
    /// The files below it.
    pub below: Below,
    /// The compression of its clusters, all of them, if they are compressed.
    pub compressed: Option<CompressionType>,
    /// There is a snapshot, taken when `filled` of it was written.
    pub snapshot: bool,
    /// Refcounts may be postponed.
    pub lazy: bool,
    /// It was not closed cleanly, and its refcounts are wrong.
    pub dirty: bool,
    /// The share of clusters that hold data, in thousandths.
    pub filled: u32,
    /// The alignment that its file demands of I/O, in bytes; 1 for buffered I/O.
    pub alignment: u64,
    /// Its file is a block device with so many bytes behind the image; 0 for a file that grows.
    pub device: u64,
    /// Discards give space back.
    pub sparse: bool,
    /// Discarded clusters keep their place.
    pub no_unref: bool,
    /// The table cache in bytes.
    pub cache: u64,
    /// The guest's data is encrypted.
    pub encrypted: bool,
    /// The guest's data is in a file of its own.
    pub data_file: Option<DataFileKind>,
    /// There are persistent bitmaps.
    pub bitmaps: Option<Bitmaps>,
}

/// A kind of data file.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum DataFileKind {
    /// Only its image says which of its bytes are the disk's.
    Plain,
    /// It is the disk, byte by byte.
    Raw,
}

impl Shape {
    /// An empty disk of 32 KiB with clusters of 512 bytes.
    pub const PLAIN: Self = Self {
        cluster_bits: 9,
        extended: false,
        refcount_bits: 16,
        v2: false,
        bytes: 32 << 10,
        ragged: 0,
        below: Below::Nothing,
        compressed: None,
        snapshot: false,
        lazy: false,
        dirty: false,
        filled: 0,
        alignment: 1,
        device: 0,
        sparse: true,
        no_unref: false,
        cache: 1 << 20,
        encrypted: false,
        data_file: None,
        bitmaps: None,
    };

    /// A shape by chance.
    pub fn draw(random: &mut Random) -> Self {
        let cluster_bits = random.pick(&[9, 9, 9, 10, 12]);
        let v2 = random.one_in(6);
        let bytes = random.pick(&[16 << 10, 32 << 10, 48 << 10, 96 << 10, 128 << 10]);
        let kind = random.below(8);
        let mut shape = Self {
            cluster_bits,
            extended: false,
            refcount_bits: if v2 {
                16
            } else {
                random.pick(&[1, 2, 8, 16, 16, 32, 64, 64])
            },
            v2,
            bytes,
            ragged: 0,
            below: match kind {
                0 => Below::Raw(random.pick(&[bytes, bytes / 2 + 512, bytes + 8192])),
                1 => Below::Qcow(random.pick(&[bytes, bytes / 2 + 512, bytes + 8192])),
                _ => Below::Nothing,
            },
            compressed: None,
            snapshot: kind == 2,
            lazy: !v2 && random.one_in(8),
            dirty: !v2 && random.one_in(10),
            filled: random.pick(&[0, 200, 500, 1000]),
            alignment: random.pick(&[1, 1, 512, 4096]),
            device: 0,
            sparse: !random.one_in(5),
            no_unref: random.one_in(4),
            cache: random.pick(&[1 << 20, 1 << 20, 8 << 10]),
            encrypted: false,
            data_file: None,
            bitmaps: None,
        };
        if kind == 3 {
            let zstd = !v2 && random.one_in(3);
            shape.compressed = Some(if zstd {
                CompressionType::Zstd
            } else {
                CompressionType::Deflate
            });
            // Compressed clusters share host clusters.
            shape.refcount_bits = shape.refcount_bits.max(16);
        }
        if shape.snapshot {
            shape.refcount_bits = shape.refcount_bits.max(2);
        }
        // By what was drawn already: one in eight has hardly any room, one in eight has more than enough. A device that is
        // not closed cleanly needs room for a refcount structure of its own.
        if !shape.dirty {
            shape.device = match (shape.alignment, shape.filled) {
                (512, 200) | (4096, 500) => shape.cluster() * 12,
                (512, 500) | (4096, 200) => 1 << 20,
                _ => 0,
            };
        }
        shape
    }

    /// Draws what few images have: clusters as large as most images' outside, subclusters, more than one image below,
    /// encryption, a data file, and bitmaps.
    /// From a source of its own, so that other shapes stay what they are.
    pub fn draw_rare(&mut self, random: &mut Random) {
        match (random.below(16), self.below) {
            (0, _) => self.cluster_bits = 16,
            (1..=8, Below::Qcow(bytes)) => self.below = Below::Deep(bytes),
            (11, _) if !self.v2 => self.bitmaps = Some(Bitmaps::draw(random)),
            (13, _) => {
                self.encrypted = true;
                *self = self.sound();
            }
            (12, below) if !self.v2 => {
                self.data_file = Some(match below {
                    Below::Nothing if random.one_in(2) => DataFileKind::Raw,
                    _ => DataFileKind::Plain,
                });
                *self = self.sound();
            }
            (14.., _) if !self.v2 => {
                // Two sectors, or only one.
                self.cluster_bits = if random.one_in(4) { 14 } else { 15 };
                self.extended = true;
            }
            _ => {}
        }
    }

    /// The same shape without what does not go together.
    #[must_use]
    pub(crate) fn sound(mut self) -> Self {
        if self.snapshot || self.bytes < 1024 {
            // A snapshot is looked at in whole sectors; and a disk has one at least.
            self.ragged = 0;
        }
        if self.encrypted || self.data_file.is_some() {
            // Both come from QEMU, which has no secret and would look for the file elsewhere.
            self.compressed = None;
            self.snapshot = false;
        }
        if self.data_file.is_some() {
            (self.encrypted, self.device, self.ragged) = (false, 0, 0);
        }
        // A device needs room for a new refcount structure if it is not closed cleanly.
        if self.device > 0 {
            self.lazy = false;
        }
        self
    }

    /// The disk's size in bytes, as its header has it.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.bytes - self.ragged
    }

    /// Returns the size of the file below, in bytes.
    #[must_use]
    pub(crate) fn below_bytes(&self) -> u64 {
        self.below.bytes()
    }

    /// The cluster size in bytes.
    #[must_use]
    pub fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// The size in bytes of the least part of the disk with a mapping of its own: a subcluster, or a cluster without any.
    fn subcluster(&self) -> u64 {
        if self.extended {
            self.cluster() / 32
        } else {
            self.cluster()
        }
    }

    /// Returns the options that the image is opened with.
    #[must_use]
    pub fn options(&self) -> OpenOptions {
        OpenOptions {
            backing_files: true,
            data_files: true,
            secret: self.encrypted.then(secret),
            sparse: self.sparse,
            discard_no_unref: self.no_unref,
            l2_cache_bytes: Some(self.cache),
            bitmaps: match self.bitmaps {
                Some(bitmaps) if bitmaps.durable => BitmapStorage::Durable,
                _ => BitmapStorage::Close,
            },
            inflate_threads: 0,
            lock: None,
            ..OpenOptions::default()
        }
    }

    /// Returns true if a discard of whole clusters makes them read as zeros.
    #[must_use]
    pub fn discards(&self) -> bool {
        self.sparse && !(self.v2 && self.below != Below::Nothing)
    }

    fn create_options(&self, below: &str) -> CreateOptions {
        let mut options = CreateOptions::new(self.bytes);
        options.cluster_size = self.cluster();
        options.version = if self.v2 { Version::V2 } else { Version::V3 };
        options.refcount_bits = self.refcount_bits;
        options.extended_l2 = self.extended;
        options.lazy_refcounts = self.lazy;
        options.compression = self.compressed.unwrap_or(CompressionType::Deflate);
        options.luks_header = self.encrypted.then(|| LUKS_HEADER.clone());
        options.data_file = self.data_file.map(|kind| NewDataFile {
            name: DATA.to_owned(),
            raw: kind == DataFileKind::Raw,
            keep: false,
        });
        let format = match self.below {
            Below::Nothing => return options,
            Below::Raw(_) => "raw",
            Below::Qcow(_) | Below::Deep(_) => "qcow2",
        };
        options.backing_file = Some(below.to_owned());
        options.backing_format = Some(format.to_owned());
        options
    }
}

/// An image to begin with, and what it holds.
#[derive(Clone, Debug)]
pub struct Beginning {
    /// The shape it has.
    pub shape: Shape,
    /// The image file.
    pub image: Vec<u8>,
    /// The files below, the nearest first, and the data file.
    pub below: Vec<(&'static str, Vec<u8>)>,
    /// The guest's sectors.
    pub words: Vec<u64>,
    /// The snapshot's sectors, if there is one.
    pub snapshot: Option<Vec<u64>>,
}

impl Beginning {
    /// Returns the snapshots that the image has.
    ///
    /// # Panics
    ///
    /// If its snapshot table is malformed.
    #[must_use]
    pub fn snapshots(&self) -> Found {
        let Some(words) = &self.snapshot else {
            return Found::new();
        };
        let image = SimImage::from_bytes(&Store::default(), &self.image);
        let listed = snapshots::of_image(&image, self.shape.bytes);
        let listed = listed.unwrap_or_else(|error| panic!("{error}"));
        let words: Words = words.iter().map(|&word| Some(word)).collect();
        listed
            .into_iter()
            .map(|(name, _)| (name, words.clone()))
            .collect()
    }

    /// Puts the files into a world, a device with the size that it has from then on.
    pub fn install(&self, world: &SimWorld) {
        let store = world.store();
        let mut image = self.image.clone();
        if self.shape.device > 0 {
            // What is behind the image on a device is anything.
            let len = image.len().next_multiple_of(1 << self.shape.cluster_bits);
            image.resize(len, 0);
            let len = (len as u64 + self.shape.device).next_multiple_of(self.shape.alignment);
            image.resize(len as usize, 0xA5);
        }
        world.set_contents(DISK, SimImage::from_bytes(&store, &image));
        if self.shape.device > 0 {
            world.fix_size(DISK);
        }
        for (name, bytes) in &self.below {
            world.set_contents(name, SimImage::from_bytes(&store, bytes));
        }
    }
}

/// Writes these words from the disk's first sector on.
///
/// # Errors
///
/// If the request fails.
pub async fn write_words(queue: &dyn block::DiskQueue, first: u64, words: &[u64]) -> Result<(), IoError> {
    let buffer = AlignedBuf::from_slice(&bytes_of(words)).into();
    let (offset, len) = (first * SECTOR as u64, (words.len() * SECTOR) as u64);
    ask(queue, Op::Write { fua: false }, offset, len, buffer)
        .await
        .map(drop)
}

thread_local! {
    static KEPT: RefCell<HashMap<Shape, Rc<Beginning>>> = RefCell::default();
}

/// The image that every run of this shape begins with.
///
/// # Panics
///
/// If it cannot be made, which no fault excuses here.
#[must_use]
pub fn beginning(shape: Shape) -> Rc<Beginning> {
    // How an image is opened and aligned makes no other image.
    let key = Shape {
        alignment: 1,
        device: 0,
        sparse: true,
        no_unref: false,
        cache: 1 << 20,
        bitmaps: shape.bitmaps.map(Bitmaps::on_disk),
        ..shape
    };
    let kept = KEPT.with_borrow(|kept| kept.get(&key).cloned());
    let found = kept.unwrap_or_else(|| {
        let made = Rc::new(make(key));
        KEPT.with_borrow_mut(|kept| {
            if kept.len() > 400 {
                kept.clear();
            }
            kept.insert(key, Rc::clone(&made));
        });
        made
    });
    if shape == key {
        return found;
    }
    Rc::new(Beginning {
        shape,
        ..(*found).clone()
    })
}

fn make(shape: Shape) -> Beginning {
    let world = SimWorld::with_store(0, Profile::IMMEDIATE, &Store::default());
    let cx = world.context(64);
    let sectors = shape.bytes / SECTOR as u64;
    let mut words = vec![ZERO; sectors as usize];

    let below = make_below(&world, &cx, shape.below);
    for (word, below) in words.iter_mut().zip(&below) {
        *word = *below;
    }

    let mut random = Random::new(u64::from(shape.filled) << 8 | 1);
    let unit = shape.subcluster();
    let filled: Vec<bool> = (0..shape.bytes.div_ceil(unit))
        .map(|_| shape.compressed.is_some() || random.chance(shape.filled))
        .collect();
    let per_cluster = unit / SECTOR as u64;
    for (sector, place) in (0..sectors).zip(&mut words) {
        if filled[(sector / per_cluster) as usize] {
            *place = word(0, 1, sector);
        }
    }
    let is_filled = |sector: u64| filled[(sector / per_cluster) as usize];
    if let Some(kind) = shape.compressed {
        let image = compress(&shape, kind, &words);
        world.set_contents(DISK, SimImage::from_bytes(&world.store(), &image));
    } else {
        build(&world, &cx, DISK, &shape, &words, is_filled);
    }
    let mut snapshot = None;
    if shape.snapshot {
        snapshot = Some(words.clone());
        if shape.bitmaps.is_none() {
            let image = take_snapshot(&world.contents(DISK).to_bytes());
            world.set_contents(DISK, SimImage::from_bytes(&world.store(), &image));
        }
    }
    if let Some(bitmaps) = shape.bitmaps {
        add_bitmaps(&world, &cx, &shape, bitmaps, &mut words);
    }
    let mut image = world.contents(DISK).to_bytes();
    if shape.dirty {
        spoil(&mut image);
    }
    if shape.ragged > 0 {
        image[at::SIZE..][..8].copy_from_slice(&shape.size().to_be_bytes());
        words.truncate((shape.size() / SECTOR as u64) as usize);
    }
    let names: &[&'static str] = match shape.below {
        Below::Nothing => &[],
        Below::Deep(_) => &[BASE, GROUND],
        _ => &[BASE],
    };
    let names = names.iter().chain(shape.data_file.map(|_| &DATA));
    let files = names.map(|name| (*name, world.contents(name).to_bytes()));
    Beginning {
        shape,
        image,
        below: files.collect(),
        words,
        snapshot,
    }
}

/// Makes the files below an image. Returns what their sectors hold.
fn make_below(world: &SimWorld, cx: &Context, below: Below) -> Vec<u64> {
    let sectors = below.bytes() / SECTOR as u64;
    let mut words: Vec<u64> = (0..sectors).map(|sector| word(0, 2, sector)).collect();
    let plain = Shape {
        bytes: below.bytes(),
        ..Shape::PLAIN
    };
    match below {
        Below::Nothing => {}
        Below::Raw(_) => world.set_contents(BASE, SimImage::from_bytes(&world.store(), &bytes_of(&words))),
        Below::Qcow(_) => build(world, cx, BASE, &plain, &words, |_| true),
        Below::Deep(bytes) => {
            let end = sectors - sectors / 4;
            let ground: Vec<u64> = (0..end).map(|sector| word(0, 3, sector)).collect();
            world.set_contents(GROUND, SimImage::from_bytes(&world.store(), &bytes_of(&ground)));
            let own = |sector: u64| sector.is_multiple_of(2);
            for (sector, place) in (0..).zip(&mut words).filter(|(sector, _)| !own(*sector)) {
                *place = ground.get(sector as usize).copied().unwrap_or(ZERO);
            }
            let shape = Shape {
                below: Below::Raw(bytes),
                ..plain
            };
            build(world, cx, BASE, &shape, &words, own);
        }
    }
    words
}

/// Makes an image with our own engine and writes the sectors that `filled` names.
fn build(
    world: &SimWorld,
    cx: &Context,
    name: &str,
    shape: &Shape,
    words: &[u64],
    filled: impl Fn(u64) -> bool,
) {
    let done = cx.block_on(async {
        let view = world.file(name, true).view(cx)?;
        let below = if name == BASE { GROUND } else { BASE };
        let created = match shape.data_file {
            None => create(&view, &shape.create_options(below)).await,
            Some(kind) => {
                let data = world.file(DATA, true).view(cx)?;
                let created = create_with_data_file(&view, &data, &shape.create_options(below)).await;
                if kind == DataFileKind::Plain {
                    // What it had before is not the disk's.
                    let stale = vec![0xEE; shape.bytes as usize];
                    world.set_contents(DATA, SimImage::from_bytes(&world.store(), &stale));
                }
                created
            }
        };
        created.unwrap_or_else(|error| panic!("{shape:?}: {error}"));
        let disk = open(cx, world, name, &shape.options()).await;
        let queue = Arc::clone(&disk).open_queue(cx).map_err(|error| error.source)?;
        let mut sector = 0;
        while sector < words.len() as u64 {
            let end = (sector + 128).min(words.len() as u64);
            let run = (sector..end)
                .take_while(|&at| filled(at) == filled(sector))
                .count() as u64;
            if filled(sector) {
                write_words(&*queue, sector, &words[sector as usize..(sector + run) as usize]).await?;
            }
            sector += run;
        }
        drop(queue);
        disk.close(cx).await?;
        Ok::<(), std::io::Error>(())
    });
    done.and_then(|result| result)
        .unwrap_or_else(|error| panic!("{shape:?}: {error}"));
}

/// Adds bitmaps to an image. If it is to have a snapshot, that is taken before, and the disk is another then: to apply it is a change.
fn add_bitmaps(world: &SimWorld, cx: &Context, shape: &Shape, bitmaps: Bitmaps, words: &mut [u64]) {
    let done = cx.block_on(async {
        let disk = open(cx, world, DISK, &shape.options()).await;
        if shape.snapshot {
            let taken = disk.create_snapshot(cx, snapshots::BEFORE, UNIX_EPOCH).await;
            taken.map_err(std::io::Error::other)?;
            let queue = Arc::clone(&disk).open_queue(cx).map_err(|error| error.source)?;
            let (first, end) = (words.len() / 3, words.len() / 2);
            for (sector, place) in (0..).zip(words.iter_mut()).take(end).skip(first) {
                *place = word(0, 4, sector);
            }
            write_words(&*queue, first as u64, &words[first..end]).await?;
        }
        let added = bitmaps::add(&disk, cx, bitmaps).await;
        added.map_err(std::io::Error::other)?;
        disk.close(cx).await?;
        Ok::<(), std::io::Error>(())
    });
    done.and_then(|result| result)
        .unwrap_or_else(|error| panic!("{shape:?}: {error}"));
}

async fn open(cx: &Context, world: &SimWorld, name: &str, options: &OpenOptions) -> Arc<QcowDisk> {
    let files: &dyn OpenFiles = world;
    let opened = QcowDisk::open_on(cx, files, Path::new(name), options).await;
    opened.unwrap_or_else(|error| panic!("{name}: {}", chain(&error)))
}

/// An error and what it came from, in one line.
#[must_use]
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

fn qemu_img(folder: &Path, args: &[&str]) {
    let output = std::process::Command::new("qemu-img")
        .args(args)
        .current_dir(folder)
        .output()
        .unwrap_or_else(|error| panic!("cannot run qemu-img ({error}): run `make setup`"));
    assert!(
        output.status.success(),
        "qemu-img {args:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

fn in_folder(work: impl FnOnce(&Path) -> PathBuf) -> Vec<u8> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = work(folder.path());
    std::fs::read(path).expect("what qemu-img wrote")
}

fn compress(shape: &Shape, kind: CompressionType, words: &[u64]) -> Vec<u8> {
    in_folder(|folder| {
        std::fs::write(folder.join("plain"), bytes_of(words)).expect("a temporary file");
        let mut options = format!(
            "cluster_size={},compat={}",
            shape.cluster(),
            if shape.v2 { "0.10" } else { "1.1" }
        );
        if !shape.v2 {
            options += &format!(
                ",refcount_bits={},compression_type={},lazy_refcounts={},extended_l2={}",
                shape.refcount_bits,
                kind.name(),
                if shape.lazy { "on" } else { "off" },
                if shape.extended { "on" } else { "off" },
            );
        }
        let args = [
            "convert", "-c", "-f", "raw", "-O", "qcow2", "-o", &options, "plain", "image",
        ];
        qemu_img(folder, &args);
        folder.join("image")
    })
}

fn take_snapshot(image: &[u8]) -> Vec<u8> {
    let mut image = in_folder(|folder| {
        std::fs::write(folder.join("image"), image).expect("a temporary file");
        qemu_img(folder, &["snapshot", "-c", snapshots::BEFORE, "image"]);
        folder.join("image")
    });
    // The one thing in it that is different each time: when it was taken.
    let table = u64_at(&image, at::SNAPSHOTS_OFFSET) as usize;
    image[table + 16..table + 24].fill(0);
    image
}

/// The big-endian number at a place.
#[must_use]
pub fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..]
        .first_chunk()
        .map_or(0, |bytes| u64::from_be_bytes(*bytes))
}

/// Sets the dirty bit, and makes the counts of the file's second half wrong as lazy refcounts would.
fn spoil(image: &mut [u8]) {
    let features = u64_at(image, at::INCOMPATIBLE_FEATURES) | Incompatible::DIRTY.bits();
    image[at::INCOMPATIBLE_FEATURES..][..8].copy_from_slice(&features.to_be_bytes());
    let table = u64_at(image, at::REFCOUNT_TABLE_OFFSET) as usize;
    let block = u64_at(image, table) as usize;
    image[block + 64..block + 256].fill(0);
}
