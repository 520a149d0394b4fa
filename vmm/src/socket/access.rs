//! The mode and the group of a socket's file, which say who may connect.

use std::fs::{self, OpenOptions, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use nix::unistd::{Gid, Group};

/// The mode of a socket that is for its user only.
const PRIVATE: u32 = 0o600;
/// The mode of a socket that is for a group too.
const SHARED: u32 = 0o660;

/// The users who may connect to a socket: those who may write to its file (`unix(7)`). The default is the server's user.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Access {
    /// The permission bits of the file.
    mode: u32,
    /// Its group, if that is not the server's.
    group: Option<u32>,
}

impl Default for Access {
    fn default() -> Self {
        Self {
            mode: PRIVATE,
            group: None,
        }
    }
}

/// An invalid `--socket-mode` or `--socket-group`.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum AccessError {
    /// The mode is none.
    #[error("--socket-mode {found}: expected an octal mode from 600 to 777, such as 660")]
    Mode {
        /// The text.
        found: String,
    },
    /// There is no such group.
    #[error("--socket-group {found}: there is no such group; expected the name or number of a group")]
    Group {
        /// The text.
        found: String,
    },
}

impl Access {
    /// Parses the values of `--socket-mode` and `--socket-group`. A group without a mode may connect (660).
    ///
    /// # Errors
    ///
    /// [`AccessError`], with what was found and what would be right.
    pub fn parse(mode: Option<&str>, group: Option<&str>) -> Result<Self, AccessError> {
        let group = group.map(parse_group).transpose()?;
        let mode = match mode {
            None if group.is_some() => SHARED,
            None => PRIVATE,
            Some(text) => u32::from_str_radix(text, 8)
                .ok()
                // Its user, the server, must be able to open it.
                .filter(|mode| mode & PRIVATE == PRIVATE && *mode <= 0o777)
                .ok_or_else(|| AccessError::Mode {
                    found: text.to_owned(),
                })?,
        };
        Ok(Self { mode, group })
    }

    /// Gives the file at `path`, which has mode 0600, its group and its mode. Nobody can connect before the caller listens.
    ///
    /// # Errors
    ///
    /// The error of the system call; if the file was replaced meanwhile, it is left alone.
    pub(super) fn apply(self, path: &Path) -> io::Result<()> {
        if self == Self::default() {
            return Ok(());
        }
        // The file itself, whatever its name leads to later.
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_PATH | libc::O_NOFOLLOW)
            .open(path)?;
        let by_descriptor = format!("/proc/self/fd/{}", file.as_raw_fd());
        if let Some(group) = self.group {
            std::os::unix::fs::chown(&by_descriptor, None, Some(group))?;
        }
        fs::set_permissions(&by_descriptor, Permissions::from_mode(self.mode))?;
        let (now, then) = (fs::symlink_metadata(path)?, file.metadata()?);
        if (now.dev(), now.ino()) != (then.dev(), then.ino()) {
            return Err(io::Error::other("its file was replaced by another process"));
        }
        Ok(())
    }
}

fn parse_group(text: &str) -> Result<u32, AccessError> {
    let unknown = || AccessError::Group {
        found: text.to_owned(),
    };
    if let Ok(number) = text.parse() {
        return Ok(number);
    }
    let group = Group::from_name(text).map_err(|_| unknown())?;
    group.map(|group| Gid::as_raw(group.gid)).ok_or_else(unknown)
}

#[cfg(test)]
mod tests {
    use super::super::Socket;
    use super::*;

    #[test]
    fn parse_reads_modes_and_groups_and_names_wrong_ones() {
        let parse = Access::parse;
        assert_eq!(parse(None, None), Ok(Access::default()));
        let group = |mode, number| Access {
            mode,
            group: Some(number),
        };
        assert_eq!(parse(None, Some("4711")), Ok(group(0o660, 4711)));
        assert_eq!(parse(None, Some("root")), Ok(group(0o660, 0)));
        assert_eq!(parse(Some("0666"), Some("root")), Ok(group(0o666, 0)));
        for wrong in [
            "",
            "60",
            "0",
            "1660",
            "9",
            "-660",
            "rw-rw----",
            "460",
            "60000000000",
        ] {
            let error = parse(Some(wrong), None).expect_err(wrong).to_string();
            assert!(
                error.starts_with(&format!("--socket-mode {wrong}: expected an octal")),
                "{error}"
            );
        }
        for wrong in ["", "no-such-group", "-1", "4294967296"] {
            let error = parse(None, Some(wrong)).expect_err(wrong).to_string();
            assert!(
                error.starts_with(&format!("--socket-group {wrong}: there is no such group")),
                "{error}"
            );
        }
    }

    #[test]
    fn listen_for_sets_the_mode_whatever_the_umask_is() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("s");
        let access = Access::parse(Some("666"), None).expect("a mode");
        let _socket = Socket::listen_for(&path, access).expect("listen");
        let found = fs::metadata(&path).expect("stat").permissions().mode();
        assert_eq!(found & 0o777, 0o666);
    }

    #[test]
    fn listen_for_gives_the_file_to_the_group_or_leaves_none() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("s");
        let is_root = nix::unistd::geteuid().is_root();
        let access = Access::parse(None, Some("4711")).expect("a group");
        match Socket::listen_for(&path, access) {
            Ok(socket) => {
                assert!(is_root, "others cannot give their files away");
                let found = fs::metadata(socket.path()).expect("stat");
                assert_eq!((found.gid(), found.mode() & 0o777), (4711, 0o660));
            }
            Err(error) => {
                assert!(!is_root, "{error}");
                assert!(!path.exists(), "nothing is left");
            }
        }
    }
}
