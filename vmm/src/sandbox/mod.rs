//! Confinement of a serving process after everything is open: Landlock, seccomp and `no_new_privs`.
//!
//! A guest, its VMM or an image that found a way to run code in this process should find nothing to do with
//! it. Four fences, each on where the kernel has it:
//!
//! - `no_new_privs`: no program that is started gains rights;
//! - Landlock: of all files, only the images and their backing files can be opened;
//! - seccomp: of all system calls, each thread has those of its task;
//! - ring restrictions: an io_uring carries out the ops of disk I/O and no others (the `block` crate sets these up
//!   itself, always).
//!
//! Invariants: the fences are up before the first byte of a guest or client is looked at, threads that are started
//! later are inside them, and nothing takes them down. What the kernel does not have is said once.

mod landlock;
mod seccomp;

use std::io;
use std::path::PathBuf;

pub use seccomp::Task;

/// The files that may be opened from now on, and the folders in which files may be removed.
#[derive(Clone, Debug, Default)]
pub struct AllowedFiles {
    /// To be opened for reading and writing.
    pub writable: Vec<PathBuf>,
    /// To be opened for reading.
    pub readable: Vec<PathBuf>,
    /// Folders whose files, at any depth, may be listed and opened for reading.
    pub readable_in: Vec<PathBuf>,
    /// Folders from which files, the sockets, are removed in the end.
    pub removable_in: Vec<PathBuf>,
    /// Folders whose files, at any depth, may be opened for reading and writing, and in which sockets may be made and removed.
    pub open: Vec<PathBuf>,
}

/// A part of the sandbox that could not be put up although the kernel has it.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// Landlock refused.
    #[error("cannot restrict file access; pass --sandbox off to run without the sandbox")]
    Landlock(#[source] ::landlock::RulesetError),
    /// A file that should stay accessible cannot be looked at.
    #[error("cannot allow {} in the sandbox", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The error of the system call.
        #[source]
        source: ::landlock::PathFdError,
    },
    /// Seccomp refused.
    #[error("cannot restrict system calls; pass --sandbox off to run without the sandbox")]
    Seccomp(#[from] seccompiler::Error),
}

impl From<SandboxError> for io::Error {
    fn from(error: SandboxError) -> Self {
        Self::other(error)
    }
}

/// Restricts the calling thread, and all that it starts from now on, to these files. Call it while it is the
/// only one.
///
/// # Errors
///
/// [`SandboxError`], if the kernel has Landlock and refused. One that does not have it, or not all of it, is no
/// error, and said in the log.
pub fn restrict_files(allowed: &AllowedFiles) -> Result<(), SandboxError> {
    landlock::restrict(allowed)
}

/// Restricts the calling thread, and all that it starts from now on, to the system calls of `task`.
///
/// # Errors
///
/// [`SandboxError`], if the kernel has seccomp and refused. One that does not have it is no error, and said in the
/// log, once.
pub fn restrict_calls(task: Task) -> Result<(), SandboxError> {
    seccomp::restrict(task)
}

/// Restricts the calling thread to the system calls of `task`, and to the files that it has open. For threads beside
/// others that stay unconfined.
///
/// # Errors
///
/// As [`restrict_files`] and [`restrict_calls`].
pub fn confine_thread(task: Task) -> Result<(), SandboxError> {
    // Asked for once in a process, in ways that are closed then.
    let _ = rustix::param::page_size();
    restrict_files(&AllowedFiles::default())?;
    restrict_calls(task)
}
