//! The script of a guest, appended to the lab's initramfs.
//!
//! The kernel unpacks any number of `newc` cpio archives, one after another, so a test's script is an
//! archive of one file behind the prepared one: no extra device, and it works under any VMM.

use std::fs;
use std::path::Path;

use crate::Error;

/// The kernel looks for the next archive at a multiple of this many bytes.
const ALIGNMENT_BYTES: usize = 4;

/// The beginning of every script.
const FUNCTIONS: &str = include_str!("../guest/functions.sh");

/// Writes to `target` the archive `base`, followed by one that holds `/script`: the shared functions and `script`.
pub(crate) fn with_script(base: &Path, script: &str, target: &Path) -> Result<(), Error> {
    let mut bytes = fs::read(base).map_err(|source| Error::File {
        action: "read",
        path: base.to_owned(),
        source,
    })?;
    pad(&mut bytes);
    let script = format!("{FUNCTIONS}{script}");
    entry(&mut bytes, "script", 0o100_644, script.as_bytes());
    entry(&mut bytes, "TRAILER!!!", 0, &[]);
    fs::write(target, bytes).map_err(|source| Error::File {
        action: "write",
        path: target.to_owned(),
        source,
    })
}

/// Appends one file in the `newc` format: a header of 13 hexadecimal fields, its name, its contents.
fn entry(archive: &mut Vec<u8>, name: &str, mode: u32, contents: &[u8]) {
    let name_bytes = name.len() + 1;
    let contents_bytes = contents.len();
    archive.extend_from_slice(b"070701");
    // inode, mode, uid, gid, links, time
    for field in [721, mode, 0, 0, 1, 0] {
        archive.extend_from_slice(format!("{field:08x}").as_bytes());
    }
    // size, device (major, minor), special device (major, minor), length of the name, checksum
    for field in [contents_bytes, 0, 0, 0, 0, name_bytes, 0] {
        archive.extend_from_slice(format!("{field:08x}").as_bytes());
    }
    archive.extend_from_slice(name.as_bytes());
    archive.push(0);
    pad(archive);
    archive.extend_from_slice(contents);
    pad(archive);
}

/// Fills up with zeros to the next aligned offset.
fn pad(archive: &mut Vec<u8>) {
    archive.resize(archive.len().next_multiple_of(ALIGNMENT_BYTES), 0);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Scratch;
    use std::process::Command;

    /// The reference reader is `cpio` itself.
    #[test]
    fn cpio_reads_the_script_back() {
        let scratch = Scratch::new().unwrap();
        let (base, target) = (scratch.file("base"), scratch.file("target"));
        fs::write(&base, []).unwrap();
        with_script(&base, "echo hello\n", &target).unwrap();

        let mut cpio = Command::new("cpio");
        cpio.args(["-i", "--quiet", "--to-stdout", "script"])
            .stdin(fs::File::open(&target).unwrap());
        let output = cpio.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        assert_eq!(
            String::from_utf8_lossy(&output.stdout),
            format!("{FUNCTIONS}echo hello\n")
        );
    }
}
