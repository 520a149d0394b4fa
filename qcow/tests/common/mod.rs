//! Helpers that the engine's tests share: images made by QEMU's tools, queues driven by hand, and a small seeded random
//! source.

#![allow(dead_code, unreachable_pub, reason = "each test uses its part of this module")]

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use block::file::{FileOptions, ImageFile};
use block::ring::RingKind;
use block::{AlignedBuf, Buffer, CompletionSink, Context, Disk, DiskQueue, Done, IoError, Op, Request};
use qcow::luks::Secret;
use qcow::{OpenOptions, QcowDisk};
use ringdisk_gen::Random;
use simulator::pages::Tags;

/// The bits of an L1 entry, or of an L2 entry's descriptor, that are an offset.
pub const OFFSET_MASK: u64 = 0x00FF_FFFF_FFFF_FE00;

/// The secret of encrypted images.
pub const SECRET: &str = "hunter2";

/// Returns the argument of `--object` that has QEMU's tools know [`SECRET`] as `key`.
pub fn qemu_secret() -> String {
    format!("secret,id=key,data={SECRET}")
}

/// The options of `qemu-img create -o` that encrypt an image with `key`, quickly opened.
pub const LUKS_OPTIONS: &str = "encrypt.format=luks,encrypt.key-secret=key,encrypt.iter-time=10";

/// Returns [`SECRET`] for options.
pub fn secret() -> Option<Secret> {
    Some(Secret::new(SECRET.into()))
}

/// A folder for images, gone with the test. On a real file system, so that direct I/O works there.
pub struct Folder(tempfile::TempDir);

impl Folder {
    pub fn new() -> Self {
        Self(tempfile::tempdir_in("/var/tmp").expect("a folder in /var/tmp"))
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Runs one of QEMU's tools here, which must succeed; returns what it printed.
    pub fn run(&self, tool: &str, args: &[&str]) -> String {
        let output = Command::new(tool).args(args).current_dir(self.0.path()).output();
        let output = output
            .unwrap_or_else(|error| panic!("cannot run {tool} ({error}): install the package qemu-utils"));
        let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{tool} {args:?}: {stdout}{stderr}");
        stdout
    }

    pub fn qemu_img(&self, args: &[&str]) -> String {
        self.run("qemu-img", args)
    }

    /// Makes an encrypted image with `qemu-img create -o options`, which [`SECRET`] opens.
    pub fn create_encrypted(&self, name: &str, options: &str, size: &str) {
        let (secret, options) = (qemu_secret(), format!("{options},{LUKS_OPTIONS}"));
        let args = ["create", "-q", "--object", &secret, "-f", "qcow2", "-o", &options];
        self.qemu_img(&[&args[..], &[name, size]].concat());
    }

    /// Makes an image with `qemu-img create -o options`; of empty ones without `-o`.
    pub fn qemu_create(&self, name: &str, options: &str, size: &str) {
        let mut args = vec!["create", "-q", "-f", "qcow2"];
        if !options.is_empty() {
            args.extend(["-o", options]);
        }
        args.extend([name, size]);
        self.qemu_img(&args);
    }

    /// Has `qemu-io` write, zero and discard at random places of an image's disk, which has so many bytes.
    pub fn scribble_by_qemu(&self, name: &str, disk_bytes: u64, random: &mut Random, commands: usize) {
        let sectors = disk_bytes / 512;
        let command = |random: &mut Random| {
            let first = random.below(sectors);
            let most = random.pick(&[1, 4, 40, 400]);
            let count = 1 + random.below(most).min(sectors - first - 1);
            let (at, len) = (first * 512, count * 512);
            match random.below(10) {
                0..=5 => format!("write -q -P {} {at} {len}", 1 + random.below(200)),
                6 => format!("write -q -z {at} {len}"),
                7 => format!("write -q -z -u {at} {len}"),
                _ => format!("discard -q {at} {len}"),
            }
        };
        let commands: Vec<String> = (0..commands).map(|_| command(random)).collect();
        let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
        self.qemu_io("qcow2", name, &commands);
    }

    /// The offset of the first L2 table of an image.
    pub fn first_table(&self, name: &str) -> u64 {
        let path = self.path(name);
        u64_at(&path, u64_at(&path, 40)) & OFFSET_MASK
    }

    /// `qemu-img check` finds no error and, unless `leaks` are allowed, no leak.
    #[track_caller]
    pub fn assert_flawless(&self, name: &str, leaks: bool) {
        let output = Command::new("qemu-img")
            .arg("check")
            .args(self.named("qcow2", name))
            .current_dir(self.0.path())
            .output()
            .expect("qemu-img was found before");
        let code = output.status.code();
        let text =
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(
            code == Some(0) || (leaks && code == Some(3)),
            "qemu-img check {name}: {code:?}\n{text}"
        );
    }

    /// Runs commands in `qemu-io` on an image of some format; each must succeed.
    #[track_caller]
    pub fn qemu_io(&self, format: &str, name: &str, commands: &[&str]) {
        let named = self.named(format, name);
        let mut args: Vec<&str> = named.iter().map(String::as_str).collect();
        commands.iter().for_each(|command| args.extend(["-c", command]));
        let said = self.run("qemu-io", &args);
        let wrong = said.contains("failed") || said.contains("rror");
        assert!(!wrong, "qemu-io {name} {commands:?}: {said}");
    }

    /// Has QEMU write an image's disk, or what the `options` want of it, to the file `raw`.
    #[track_caller]
    pub fn qemu_converts(&self, options: &[&str], name: &str, raw: &str) {
        let named = self.named("qcow2", name);
        let mut args = vec!["convert", "-O", "raw"];
        args.extend(options);
        args.extend(named.iter().map(String::as_str));
        args.push(raw);
        self.qemu_img(&args);
    }

    /// Returns the arguments that name an image to QEMU's tools; with [`SECRET`], if it is encrypted.
    pub fn named(&self, format: &str, name: &str) -> Vec<String> {
        let is_encrypted = format == "qcow2" && u64_at(&self.path(name), 28) as u32 != 0;
        if is_encrypted {
            let options = format!("driver=qcow2,encrypt.key-secret=key,file.filename={name}");
            ["--object", &qemu_secret(), "--image-opts", &options]
                .map(str::to_owned)
                .to_vec()
        } else {
            ["-f", format, name].map(str::to_owned).to_vec()
        }
    }

    /// Returns the whole disk as QEMU reads it from the image.
    pub fn qemu_reads(&self, name: &str) -> Vec<u8> {
        self.qemu_converts(&[], name, "as-raw.img");
        std::fs::read(self.path("as-raw.img")).expect("what qemu-img wrote")
    }
}

/// A queue on a ring of its own, turned by hand: several of them interleave in one thread.
pub struct Lane {
    pub cx: Context,
    pub queue: Box<dyn DiskQueue>,
    pub sink: std::rc::Rc<CompletionSink>,
    /// Pages that only the kernel reaches, for some requests.
    pub tags: Option<Tags>,
}

/// The number of places for requests in a lane with registered pages, and their size in bytes. Pinned memory is
/// limited.
pub const PLACES: u16 = 4;
pub const PLACE_BYTES: usize = 360 << 10;
/// The most time that tasks have to end after the last request.
const TASKS_END_WITHIN: Duration = Duration::from_secs(30);
/// The byte that fills a place beside a request's bytes.
const BESIDE: u8 = 0xA5;

/// A request's bytes: registered pages or memory.
pub struct Placed {
    place: Option<(u16, usize)>,
    bytes: Vec<u8>,
}

/// Lets tasks end that a timer began during the last request: they would be leaked, and the close of the image waits for them. A worker
/// waits for them too.
impl Drop for Lane {
    fn drop(&mut self) {
        let began = Instant::now();
        while self.cx.tasks() > 0 && !std::thread::panicking() {
            assert!(began.elapsed() < TASKS_END_WITHIN, "tasks of a queue do not end");
            self.turn(&mut Vec::new());
        }
    }
}

impl Lane {
    pub fn new(disk: &Arc<QcowDisk>, ring: RingKind) -> Self {
        let cx = Context::new(ring, 64).expect("these tests need io_uring: kernel.io_uring_disabled=0");
        let queue = Arc::clone(disk).open_queue(&cx).expect("a queue");
        Self {
            cx,
            queue,
            sink: CompletionSink::new(),
            tags: None,
        }
    }

    /// A queue some of whose requests have registered pages; with `short`, a seed, ops end short now and then.
    pub fn registered(disk: &Arc<QcowDisk>, ring: RingKind, short: Option<u64>) -> Self {
        let made = Tags::on_ring(ring, 64, PLACES, PLACE_BYTES, short);
        let (cx, tags) = made.expect("these tests need io_uring: kernel.io_uring_disabled=0");
        let queue = Arc::clone(disk).open_queue(&cx).expect("a queue");
        Self {
            cx,
            queue,
            sink: CompletionSink::new(),
            tags: Some(tags),
        }
    }

    /// A buffer that holds `bytes`: in registered pages, `skip` bytes into a place, if one is free.
    pub fn place(&self, skip: usize, bytes: &[u8]) -> (Buffer, Placed) {
        let align = if skip == 0 {
            4096
        } else {
            1 << skip.trailing_zeros().min(12)
        };
        let found = self.tags.as_ref().and_then(|tags| {
            (0..PLACES).find_map(|tag| {
                let buffer = tags.buffer(tag, skip, bytes.len(), align).ok()?;
                tags.write(tag, 0, &vec![BESIDE; PLACE_BYTES]);
                tags.write(tag, skip, bytes);
                Some((buffer, tag))
            })
        });
        let place = found.as_ref().map(|&(_, tag)| (tag, skip));
        let buffer = match found {
            Some((buffer, _)) => buffer,
            None => AlignedBuf::from_slice(bytes).into(),
        };
        let bytes = bytes.to_vec();
        (buffer, Placed { place, bytes })
    }

    /// Returns the contents of a buffer of [`Lane::place`] when its request has ended. Nothing beside them has changed,
    /// nor the bytes of a write.
    #[track_caller]
    pub fn placed(&self, placed: &Placed, buffer: Buffer, read: bool) -> Vec<u8> {
        assert_eq!(buffer.len(), placed.bytes.len(), "the buffer comes back");
        let bytes = match (&self.tags, placed.place) {
            (Some(tags), Some((tag, skip))) => {
                assert!(buffer.memory().is_none(), "the same buffer comes back");
                let mut place = vec![0; PLACE_BYTES];
                tags.read(tag, 0, &mut place);
                let bytes = place[skip..skip + buffer.len()].to_vec();
                place[skip..skip + buffer.len()].fill(BESIDE);
                assert!(
                    place.iter().all(|&byte| byte == BESIDE),
                    "beside the request's pages"
                );
                bytes
            }
            _ => buffer.into_owned().expect("our own buffer").to_vec(),
        };
        assert!(read || bytes == placed.bytes, "a write changed what it writes");
        bytes
    }

    pub fn submit(&self, op: Op, offset: u64, len: u64, buffer: Buffer, tag: u64) {
        self.queue
            .submit(Request::new(op, offset, len, buffer, &self.sink, tag));
    }

    pub fn turn(&self, done: &mut Vec<Done>) {
        self.cx.run_ready();
        self.cx.ring().turn(false).expect("the ring turns");
        self.cx.run_ready();
        self.sink.drain_into(done);
    }

    /// Submits one request and turns until it is answered.
    pub fn ask(&self, op: Op, offset: u64, len: u64, buffer: Buffer) -> Done {
        self.submit(op, offset, len, buffer, 0);
        let mut done = Vec::new();
        while done.is_empty() {
            self.turn(&mut done);
        }
        done.remove(0)
    }

    pub fn read(&self, offset: u64, len: u64) -> Vec<u8> {
        let done = self.ask(
            Op::Read,
            offset,
            len,
            AlignedBuf::from_slice(&vec![0xCC; len as usize]).into(),
        );
        done.result
            .unwrap_or_else(|error| panic!("read of {len} at {offset}: {error}"));
        done.buffer.into_owned().expect("our own buffer").to_vec()
    }

    pub fn write(&self, offset: u64, bytes: &[u8]) {
        let done = self.ask(
            Op::Write { fua: false },
            offset,
            bytes.len() as u64,
            AlignedBuf::from_slice(bytes).into(),
        );
        done.result
            .unwrap_or_else(|error| panic!("write of {} at {offset}: {error}", bytes.len()));
    }

    /// As [`Self::read`], but an error is an answer too.
    pub fn try_read(&self, offset: u64, len: u64) -> Result<Vec<u8>, IoError> {
        let buffer = AlignedBuf::from_slice(&vec![0xCC; len as usize]).into();
        let done = self.ask(Op::Read, offset, len, buffer);
        done.result
            .map(|()| done.buffer.into_owned().expect("our own buffer").to_vec())
    }

    pub fn discard(&self, offset: u64, len: u64) {
        let done = self.ask(Op::Discard, offset, len, Buffer::default());
        done.result
            .unwrap_or_else(|error| panic!("discard of {len} at {offset}: {error}"));
    }

    pub fn write_zeroes(&self, offset: u64, len: u64, unmap: bool) {
        let done = self.ask(
            Op::WriteZeroes { unmap, fua: false },
            offset,
            len,
            Buffer::default(),
        );
        done.result
            .unwrap_or_else(|error| panic!("zeroes of {len} at {offset}: {error}"));
    }

    /// Turns until nothing is left to do on this queue.
    pub fn settle(&self) {
        let mut done = Vec::new();
        while self.cx.tasks() > 0 || self.cx.ring().in_flight() > 0 {
            self.turn(&mut done);
        }
        assert!(done.is_empty(), "an answer nobody expected");
    }

    pub fn flush(&self) {
        let done = self.ask(Op::Flush, 0, 0, Buffer::default());
        done.result.unwrap_or_else(|error| panic!("flush: {error}"));
    }
}

pub fn open(path: &Path, options: &OpenOptions) -> Arc<QcowDisk> {
    QcowDisk::open(path, options).unwrap_or_else(|error| panic!("{}", chain(&error)))
}

/// An error and what it came from, in one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

/// Creates an image with this crate, in place of whatever is there.
pub fn create(path: &Path, options: &qcow::image::CreateOptions) {
    std::fs::write(path, b"").expect("an empty file");
    let cx = Context::syscalls();
    let write = FileOptions {
        write: true,
        direct: false,
    };
    let file = ImageFile::open(path, write).unwrap_or_else(|error| panic!("{}", chain(&error)));
    let view = file.view(&cx).expect("a descriptor");
    let made = cx.block_on(qcow::image::create(&view, options));
    made.expect("the ring turns")
        .unwrap_or_else(|error| panic!("{options:?}: {}", chain(&error)));
}

/// Compares two disks and names the first byte that differs.
#[track_caller]
pub fn assert_same(found: &[u8], expected: &[u8], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}: the length");
    if let Some(at) = (0..found.len()).find(|&at| found[at] != expected[at]) {
        let differing = found.iter().zip(expected).filter(|(a, b)| a != b).count();
        panic!(
            "{what}: byte {at:#x} is {:#04x}, expected {:#04x}; {differing} bytes differ",
            found[at], expected[at]
        );
    }
}

/// Puts bytes into a file.
pub fn patch(path: &Path, at: u64, bytes: &[u8]) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::OpenOptions::new().write(true).open(path);
    let file = file.expect("an image");
    file.write_all_at(bytes, at).expect("a patched image");
}

/// The big-endian number at a place of a file.
pub fn u64_at(path: &Path, at: u64) -> u64 {
    use std::os::unix::fs::FileExt;
    let mut bytes = [0; 8];
    let file = std::fs::File::open(path).expect("an image");
    file.read_exact_at(&mut bytes, at).expect("eight bytes");
    u64::from_be_bytes(bytes)
}

/// The big-endian number at a place of a file.
pub fn u32_at(path: &Path, at: u64) -> u32 {
    (u64_at(path, at) >> 32) as u32
}

/// Closes a disk whose lanes are gone.
pub fn close(disk: Arc<QcowDisk>) {
    let cx = Context::syscalls();
    cx.block_on(Arc::clone(&disk).close(&cx))
        .expect("the ring turns")
        .expect("a clean close");
    drain(&cx);
}

/// Lets the tasks of a context end: one that is dropped with them is leaked, as they hold it.
pub fn drain(cx: &Context) {
    while cx.tasks() > 0 {
        cx.run_ready();
        cx.ring().turn(false).expect("the ring turns");
    }
}

/// Waits for all of `futures`. Returns their outputs in the order in which they end.
pub async fn join<T>(futures: Vec<impl Future<Output = T> + 'static>) -> Vec<T> {
    let outputs = RefCell::new(Vec::new());
    let running = futures.into_iter().map(|future| {
        Box::pin(async {
            let output = future.await;
            outputs.borrow_mut().push(output);
            Ok(())
        })
    });
    block::join_all(running).await.expect("nothing that fails");
    outputs.into_inner()
}
