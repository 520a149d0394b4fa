//! The file with the process id of a server, for whoever has no other way to know it.
//!
//! It is opened before anything else is done, so that a wrong path ends the start, and written when the server is ready. A server that
//! takes over writes its own number into the same file before the one before it ends: that one finds it at its end, and leaves the
//! file alone. If the new one cannot take over after all, it puts the number back.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::process::{Pid, test_kill_process};

use crate::error::CommandFailure;

/// The most bytes of a process id, and more than any has.
const ID_BYTES_MAX: usize = 20;

/// The file. Removed when dropped, unless it has another server's number.
#[derive(Debug)]
pub(crate) struct PidFile {
    file: File,
    path: PathBuf,
    /// The number that it had, if it was there.
    before: Option<String>,
    state: State,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum State {
    Opened,
    /// It has this process's id, and another server may still go on.
    Written,
    Kept,
}

impl PidFile {
    /// Opens the file at `path`, or creates an empty one.
    ///
    /// # Errors
    ///
    /// If it cannot be opened, or has something else than a process id: then it is not ours.
    pub(crate) fn open(path: &Path) -> Result<Self, CommandFailure> {
        let failed =
            |error: io::Error| CommandFailure::about(format!("{} (--pidfile)", path.display()), error);
        let mut options = OpenOptions::new();
        options.read(true).write(true).mode(0o644);
        options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
        let (file, is_new) = match options.clone().create_new(true).open(path) {
            Ok(file) => (file, true),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                (options.open(path).map_err(failed)?, false)
            }
            Err(error) => return Err(failed(error)),
        };
        let mut content = [0; ID_BYTES_MAX + 1];
        let is_file = file.metadata().map_err(failed)?.is_file();
        let len = match is_file {
            true => file.read_at(&mut content, 0).map_err(failed)?,
            false => 0,
        };
        let content = std::str::from_utf8(&content[..len]).map(str::trim_end);
        match content {
            Ok(id) if is_file && len <= ID_BYTES_MAX && id.bytes().all(|byte| byte.is_ascii_digit()) => {
                Ok(Self {
                    file,
                    path: path.to_owned(),
                    before: (!is_new).then(|| id.to_owned()),
                    state: State::Opened,
                })
            }
            _ => {
                let wrong =
                    "it has something else than a process id; expected no file, or one with a process id";
                Err(failed(io::Error::other(wrong)))
            }
        }
    }

    /// Writes this process's id, for [`keep`](Self::keep). If the host fails that, an error is logged: what is served is served
    /// without it.
    pub(crate) fn write(&mut self) {
        if self.put(&std::process::id().to_string()) {
            self.state = State::Written;
        }
    }

    /// Writes this process's id, if it is not there yet. It stays until the end.
    pub(crate) fn keep(&mut self) {
        if self.state == State::Opened {
            self.write();
        }
        if self.state == State::Written {
            self.state = State::Kept;
        }
    }

    fn put(&self, id: &str) -> bool {
        let line = format!("{id}\n");
        let written = self.file.set_len(0);
        let written = written.and_then(|()| self.file.write_all_at(line.as_bytes(), 0));
        written
            .inspect_err(
                |error| tracing::error!(path = %self.path.display(), %error, "cannot write the process id"),
            )
            .is_ok()
    }

    /// Returns true if the file has this process's id. It is read where it is, once, as the sandbox permits.
    fn is_ours(&self) -> bool {
        let mut content = [0; ID_BYTES_MAX + 1];
        let len = (&self.file).read(&mut content).unwrap_or_default();
        let id = std::str::from_utf8(&content[..len]).unwrap_or_default();
        id.trim_end() == std::process::id().to_string()
    }
}

/// Returns true if there is a process of this number.
fn lives(id: &str) -> bool {
    let id = id.parse().ok().and_then(Pid::from_raw);
    id.is_some_and(|id| test_kill_process(id) != Err(rustix::io::Errno::SRCH))
}

impl Drop for PidFile {
    fn drop(&mut self) {
        let is_to_go = match (self.state, &self.before) {
            (State::Opened, before) => before.is_none(),
            (State::Written, Some(id)) if lives(id) => {
                self.put(id);
                false
            }
            (State::Written, _) => true,
            (State::Kept, _) => self.is_ours(),
        };
        if is_to_go && let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove the file with the process id");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_there(path: &Path) -> bool {
        path.exists()
    }

    #[test]
    fn file_has_the_id_until_the_end() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("pid");
        let mut file = PidFile::open(&path).expect("a file");
        assert_eq!(std::fs::read(&path).expect("a file"), b"");
        file.keep();
        let id = std::fs::read_to_string(&path).expect("a file");
        assert_eq!(id, format!("{}\n", std::process::id()));
        drop(file);
        assert!(!is_there(&path));
    }

    #[test]
    fn start_that_fails_leaves_what_was_there() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("pid");
        drop(PidFile::open(&path).expect("a file"));
        assert!(!is_there(&path), "it was not there before");
        std::fs::write(&path, "4711\n").expect("written");
        drop(PidFile::open(&path).expect("a file"));
        assert_eq!(std::fs::read(&path).expect("a file"), b"4711\n");
    }

    #[test]
    fn file_of_a_server_that_took_over_stays() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("pid");
        std::fs::write(&path, "123456789\n").expect("written");
        let mut file = PidFile::open(&path).expect("a file");
        file.write();
        file.keep();
        assert_eq!(
            std::fs::read_to_string(&path).expect("a file").trim_end(),
            std::process::id().to_string()
        );
        std::fs::write(&path, "4711\n").expect("written");
        drop(file);
        assert_eq!(std::fs::read(&path).expect("a file"), b"4711\n");
    }

    #[test]
    fn server_that_cannot_take_over_puts_the_id_back() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("pid");
        let init = "1\n";
        std::fs::write(&path, init).expect("written");
        let mut file = PidFile::open(&path).expect("a file");
        file.write();
        assert_ne!(std::fs::read_to_string(&path).expect("a file"), init);
        drop(file);
        assert_eq!(std::fs::read_to_string(&path).expect("a file"), init);
        // Of nobody who lives.
        std::fs::write(&path, "2147483647\n").expect("written");
        let mut file = PidFile::open(&path).expect("a file");
        file.write();
        drop(file);
        assert!(!is_there(&path));
    }

    #[test]
    fn path_of_something_else_is_refused_and_untouched() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("pid");
        for content in ["root:x:0:0", "123456789012345678901", "12 34x"] {
            std::fs::write(&path, content).expect("written");
            let failure = PidFile::open(&path).expect_err("not ours");
            let line = failure.line().expect("a line");
            assert!(
                line.contains("(--pidfile)") && line.contains("process id"),
                "{line}"
            );
            assert_eq!(std::fs::read_to_string(&path).expect("a file"), content);
        }
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&path, &link).expect("a link");
        PidFile::open(&link).expect_err("a link");
        PidFile::open(folder.path()).expect_err("a folder");
        let missing = PidFile::open(&folder.path().join("none/pid")).expect_err("no folder");
        assert!(missing.line().expect("a line").contains("none/pid"));
    }
}
