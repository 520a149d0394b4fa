//! Helpers that the tests share: temporary images, QEMU's tools, and a view on plain system calls.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use block::Context;
use block::file::{FileOptions, FileView, ImageFile};

use super::check::{Subject, Survey};
use super::read::read_header;

/// A folder of images that goes away with the test.
pub(crate) struct World {
    folder: tempfile::TempDir,
}

impl World {
    pub(crate) fn new() -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns the number of passes that a check of an image takes in so much memory.
    pub(crate) fn passes_within(&self, name: &str, memory_max_bytes: usize) -> usize {
        self.on(name, async |file| {
            let located = read_header(&file).await.expect("a header");
            let subject = Subject::new(&file, &located).expect("an image that can be checked");
            let mut survey = Survey::new(&subject, true, memory_max_bytes);
            let mut passes = 0;
            while let Some(walk) = survey.next().await {
                passes += 1;
                survey.done(walk);
            }
            passes
        })
    }

    /// Runs one of QEMU's tools in the folder.
    pub(crate) fn tool(&self, tool: &str, args: &[&str]) -> Output {
        let output = Command::new(tool)
            .args(args)
            .current_dir(self.folder.path())
            .output();
        output.unwrap_or_else(|error| panic!("cannot run {tool} ({error}): install the package qemu-utils"))
    }

    /// Runs `qemu-img`, which must succeed; returns what it printed.
    pub(crate) fn qemu_img(&self, args: &[&str]) -> String {
        let output = self.tool("qemu-img", args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "qemu-img {args:?}: {stderr}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs commands in `qemu-io` on an image; they must succeed.
    pub(crate) fn qemu_io(&self, image: &str, commands: &[&str]) {
        let mut args = vec!["-f", "qcow2", image];
        commands.iter().for_each(|command| args.extend(["-c", command]));
        let output = self.tool("qemu-io", &args);
        let stdout = String::from_utf8_lossy(&output.stdout);
        let failed = !output.status.success() || stdout.contains("failed");
        assert!(
            !failed,
            "qemu-io {commands:?}: {stdout}{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }

    /// Returns `qemu-img check`'s exit code, and its output.
    pub(crate) fn qemu_check(&self, image: &str) -> (i32, String) {
        let output = self.tool("qemu-img", &["check", "-f", "qcow2", image]);
        let text = [output.stdout, output.stderr].concat();
        (
            output.status.code().unwrap_or(-1),
            String::from_utf8_lossy(&text).into_owned(),
        )
    }

    #[track_caller]
    pub(crate) fn assert_flawless(&self, image: &str) {
        let (code, text) = self.qemu_check(image);
        assert_eq!(code, 0, "{text}");
    }

    /// Runs `work` on a file of the folder, which is made if it is missing.
    pub(crate) fn on<T, F: Future<Output = T>>(&self, name: &str, work: impl FnOnce(FileView) -> F) -> T {
        let path = self.path(name);
        if !path.exists() {
            std::fs::write(&path, b"").unwrap();
        }
        on_path(&path, work)
    }

    /// Replaces bytes of a file.
    pub(crate) fn patch(&self, name: &str, at: u64, bytes: &[u8]) {
        use std::os::unix::fs::FileExt;
        let file = std::fs::OpenOptions::new()
            .write(true)
            .open(self.path(name))
            .unwrap();
        file.write_all_at(bytes, at).unwrap();
    }

    /// Returns the big-endian 64 bits at an offset of a file.
    pub(crate) fn u64_at(&self, name: &str, at: u64) -> u64 {
        use std::os::unix::fs::FileExt;
        let mut bytes = [0; 8];
        let file = std::fs::File::open(self.path(name)).unwrap();
        file.read_exact_at(&mut bytes, at).unwrap();
        u64::from_be_bytes(bytes)
    }
}

/// Runs `work` on the file at `path`, on plain system calls.
pub(crate) fn on_path<T, F: Future<Output = T>>(path: &Path, work: impl FnOnce(FileView) -> F) -> T {
    let cx = Context::syscalls();
    let file = ImageFile::open(
        path,
        FileOptions {
            write: true,
            direct: false,
        },
    )
    .unwrap();
    let view = file.view(&cx).unwrap();
    cx.block_on(work(view)).unwrap()
}
