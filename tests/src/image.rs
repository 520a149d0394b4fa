//! QEMU's own tools as oracles: they make images for us to serve and judge what we leave behind.
//!
//! They are taken as they are. Each function runs one tool and turns a bad end into an [`Error`] with the
//! whole command and its output.

use std::path::Path;
use std::process::Command;

use crate::process::{describe, run, run_ok};
use crate::{Error, prepare};

/// A verdict of `qemu-img check` on an image.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Verdict {
    /// No error, no leak.
    Clean,
    /// Clusters that nothing uses, and nothing worse. Carries the report.
    Leaks(String),
    /// Metadata that contradicts itself. Carries the report.
    Errors(String),
}

/// Makes an image: `qemu-img create -f FORMAT -o OPTIONS PATH SIZE`. `options` may be empty; `size` is in
/// bytes.
///
/// # Errors
///
/// [`Error::Tool`] if `qemu-img` refuses.
pub fn create(path: &Path, format: &str, options: &str, size: u64) -> Result<(), Error> {
    let mut command = qemu_img(&["create", "-q", "-f", format]);
    if !options.is_empty() {
        command.args(["-o", options]);
    }
    command.arg(path).arg(size.to_string());
    run_ok(command).map(drop)
}

/// Makes a QCOW2 overlay, of the same size, over the QCOW2 image `backing`.
///
/// # Errors
///
/// [`Error::Tool`] if `qemu-img` refuses.
pub fn overlay(path: &Path, backing: &Path) -> Result<(), Error> {
    let mut command = qemu_img(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b"]);
    command.arg(backing).arg(path);
    run_ok(command).map(drop)
}

/// The most times that a check meets a lock before it gives up: the kernel ends a killed server's ring, and with it the
/// lock, a moment after the process.
const LOCKED_MAX: u32 = 100;

/// Returns the verdict of `qemu-img check` on the QCOW2 image at `path`.
///
/// # Errors
///
/// [`Error::Tool`] if it could not be checked at all.
pub fn check(path: &Path) -> Result<Verdict, Error> {
    check_named(|command| command.args(["-f", "qcow2"]).arg(path))
}

/// As [`check`], for an encrypted image and the file with its secret.
///
/// # Errors
///
/// As [`check`].
pub fn check_encrypted(path: &Path, secret_file: &Path) -> Result<Verdict, Error> {
    check_named(|command| name_encrypted(command, path, secret_file))
}

/// Adds the arguments that name an encrypted image to `qemu-img`.
fn name_encrypted<'a>(command: &'a mut Command, path: &Path, secret_file: &Path) -> &'a mut Command {
    let object = format!("secret,id=key,file={}", secret_file.display());
    let image = format!(
        "driver=qcow2,encrypt.key-secret=key,file.filename={}",
        path.display()
    );
    command.args(["--object", &object, "--image-opts", &image])
}

fn check_named(name: impl Fn(&mut Command) -> &mut Command) -> Result<Verdict, Error> {
    let mut tries = 0;
    let (text, status, output) = loop {
        let mut command = qemu_img(&["check"]);
        name(&mut command);
        let text = describe(&command);
        let (status, output) = run(command)?;
        tries += 1;
        if tries == LOCKED_MAX || !output.contains("Failed to get") {
            break (text, status, output);
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    };
    match status.code() {
        Some(0) => Ok(Verdict::Clean),
        Some(2) => Ok(Verdict::Errors(output)),
        Some(3) => Ok(Verdict::Leaks(output)),
        _ => Err(Error::Tool {
            command: text,
            status: status.to_string(),
            output,
        }),
    }
}

/// Returns the number of leaked clusters, by the report in [`Verdict::Leaks`]; `None` if it does not say.
#[must_use]
pub fn leaked(report: &str) -> Option<u64> {
    let said = report
        .lines()
        .find_map(|line| line.strip_suffix(" leaked clusters were found on the image."));
    said.and_then(|count| count.parse().ok())
}

/// Demands an image without errors and without leaks.
///
/// # Errors
///
/// [`Error::Unsound`] with the report if there is either.
pub fn check_flawless(path: &Path) -> Result<(), Error> {
    match check(path)? {
        Verdict::Clean => Ok(()),
        Verdict::Leaks(report) => Err(Error::Unsound {
            path: path.to_owned(),
            found: "leaks",
            report,
        }),
        Verdict::Errors(report) => Err(Error::Unsound {
            path: path.to_owned(),
            found: "errors",
            report,
        }),
    }
}

/// Demands an image without errors, as after a crash: leaks cost space, nothing else.
///
/// # Errors
///
/// [`Error::Unsound`] with the report if there are errors.
pub fn check_sound(path: &Path) -> Result<(), Error> {
    match check(path)? {
        Verdict::Clean | Verdict::Leaks(_) => Ok(()),
        Verdict::Errors(report) => Err(Error::Unsound {
            path: path.to_owned(),
            found: "errors",
            report,
        }),
    }
}

/// Demands that two images hold the same bytes, whatever their formats. Each image comes with its format.
///
/// # Errors
///
/// [`Error::Tool`] with the first differing offset.
pub fn compare(left: (&Path, &str), right: (&Path, &str)) -> Result<(), Error> {
    let mut command = qemu_img(&["compare", "-f", left.1, "-F", right.1]);
    command.arg(left.0).arg(right.0);
    run_ok(command).map(drop)
}

/// Returns the output of `qemu-img info` for an image, backing chain included.
///
/// # Errors
///
/// [`Error::Tool`] if the image cannot be opened.
pub fn info(path: &Path) -> Result<String, Error> {
    let mut command = qemu_img(&["info", "--backing-chain"]);
    command.arg(path);
    run_ok(command)
}

/// Copies what the QCOW2 image `source` reads as, backing chain included, into a new image.
///
/// # Errors
///
/// [`Error::Tool`] if either side fails.
pub fn convert(source: &Path, target: &Path, format: &str) -> Result<(), Error> {
    let mut command = qemu_img(&["convert", "-f", "qcow2", "-O", format]);
    command.arg(source).arg(target);
    run_ok(command).map(drop)
}

/// Copies what an encrypted QCOW2 image reads as into a new raw image.
///
/// # Errors
///
/// [`Error::Tool`] if either side fails, or the secret in the file does not open it.
pub fn convert_encrypted(source: &Path, secret_file: &Path, target: &Path) -> Result<(), Error> {
    let mut command = qemu_img(&["convert", "-O", "raw"]);
    name_encrypted(&mut command, source, secret_file).arg(target);
    run_ok(command).map(drop)
}

/// Copies what an internal snapshot of the QCOW2 image `source` reads as into a new raw image.
///
/// # Errors
///
/// [`Error::Tool`] if either side fails, or there is no such snapshot.
pub fn convert_snapshot(source: &Path, snapshot: &str, target: &Path) -> Result<(), Error> {
    let mut command = qemu_img(&["convert", "-f", "qcow2", "-O", "raw", "-l"]);
    command.arg(format!("snapshot.name={snapshot}"));
    command.arg(source).arg(target);
    run_ok(command).map(drop)
}

/// Makes an internal snapshot of the QCOW2 image at `path`.
///
/// # Errors
///
/// [`Error::Tool`] if `qemu-img` refuses.
pub fn snapshot(path: &Path, name: &str) -> Result<(), Error> {
    let mut command = qemu_img(&["snapshot", "-c", name]);
    command.arg(path);
    run_ok(command).map(drop)
}

/// Runs `qemu-io` commands (`write -P 0xaa 0 64k`) on the QCOW2 image at `path` and gives the output.
///
/// # Errors
///
/// [`Error::Tool`] if a command fails or a pattern read back differs.
pub fn qemu_io(path: &Path, commands: &[&str]) -> Result<String, Error> {
    let mut command = Command::new("qemu-io");
    command.args(["-f", "qcow2"]);
    for one in commands {
        command.args(["-c", one]);
    }
    command.arg(path);
    let text = describe(&command);
    let output = run_ok(command)?;
    if output.contains("Pattern verification failed") {
        return Err(Error::Tool {
            command: text,
            status: "a wrong pattern".to_owned(),
            output,
        });
    }
    Ok(output)
}

/// Runs our own binary (`ringdisk image check …`), which must exit with 0, and gives the output.
///
/// # Errors
///
/// [`Error::RingdiskNotBuilt`], or [`Error::Tool`] if it fails.
pub fn ringdisk(arguments: &[&str]) -> Result<String, Error> {
    let mut command = Command::new(prepare::ringdisk_binary()?);
    command.args(arguments);
    run_ok(command)
}

/// Checks the ext4 file system in a raw image, changing nothing; a journal not replayed counts as damage.
///
/// # Errors
///
/// [`Error::Tool`] with the report of `e2fsck`.
pub fn fsck(raw: &Path) -> Result<(), Error> {
    let mut command = sbin("e2fsck");
    command.arg("-fn").arg(raw);
    let text = describe(&command);
    let output = run_ok(command)?;
    if output.contains("skipping journal recovery") {
        return Err(Error::Tool {
            command: text,
            status: "an unclean journal".to_owned(),
            output,
        });
    }
    Ok(())
}

/// The contents of one file of the ext4 file system in a raw image.
///
/// # Errors
///
/// [`Error::Tool`] if `debugfs` fails; a file that does not exist reads as its complaint.
pub fn read_file(raw: &Path, file: &str) -> Result<String, Error> {
    let mut command = sbin("debugfs");
    command.arg("-R").arg(format!("cat {file}")).arg(raw);
    let text = run_ok(command)?;
    // `debugfs` greets on standard error, which follows the contents.
    Ok(text
        .lines()
        .filter(|line| !line.starts_with("debugfs "))
        .fold(String::new(), |all, line| all + line + "\n"))
}

/// Copies a file out of the ext4 file system in a raw image.
///
/// # Errors
///
/// [`Error::Tool`] if `debugfs` fails, or finds no such file.
pub fn extract(raw: &Path, file: &str, target: &Path) -> Result<(), Error> {
    let mut command = sbin("debugfs");
    command.arg("-R");
    command.arg(format!("dump {file} {}", target.display())).arg(raw);
    let text = describe(&command);
    let output = run_ok(command)?;
    if !target.exists() {
        return Err(Error::Tool {
            command: text,
            status: "no such file".to_owned(),
            output,
        });
    }
    Ok(())
}

/// The SHA-256 of a file, in hexadecimal.
///
/// # Errors
///
/// [`Error::Tool`] if the file cannot be read.
pub fn sha256(path: &Path) -> Result<String, Error> {
    let mut command = Command::new("sha256sum");
    command.arg(path);
    let text = run_ok(command)?;
    Ok(text
        .split_ascii_whitespace()
        .next()
        .unwrap_or_default()
        .to_owned())
}

fn qemu_img(arguments: &[&str]) -> Command {
    let mut command = Command::new("qemu-img");
    command.args(arguments);
    command
}

/// A program of the system folders, which an ordinary user's `$PATH` lacks.
fn sbin(program: &str) -> Command {
    let path = std::env::var("PATH").unwrap_or_default();
    let mut command = Command::new(program);
    command.env("PATH", format!("{path}:/usr/sbin:/sbin"));
    command
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Scratch;
    use std::fs::OpenOptions;
    use std::os::unix::fs::FileExt as _;

    const MIB: u64 = 1 << 20;
    const CLUSTER: u64 = 64 << 10;

    /// An image with two clusters of data.
    fn image(scratch: &Scratch) -> std::path::PathBuf {
        let path = scratch.file("image.qcow2");
        create(&path, "qcow2", "cluster_size=64k", MIB).unwrap();
        qemu_io(&path, &["write -P 0xaa 0 64k", "write -P 0xbb 64k 64k"]).unwrap();
        path
    }

    #[test]
    fn check_flawless_accepts_a_sound_image() {
        let scratch = Scratch::new().unwrap();
        check_flawless(&image(&scratch)).unwrap();
    }

    /// A cluster appended behind QEMU's back, with a refcount of one, belongs to nothing: a leak.
    #[test]
    fn leak_is_sound_but_flawed_and_lost_refcount_neither() {
        let scratch = Scratch::new().unwrap();
        let path = image(&scratch);
        let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        // QEMU puts the first refcount block of a fresh image into the third cluster.
        let refcount_block = 2 * CLUSTER;
        file.set_len(21 * CLUSTER).unwrap();

        file.write_all_at(&[0, 1], refcount_block + 20 * 2).unwrap();
        let Verdict::Leaks(report) = check(&path).unwrap() else {
            panic!("one cluster leaks");
        };
        assert_eq!(leaked(&report), Some(1));
        check_sound(&path).unwrap();
        check_flawless(&path).unwrap_err();

        file.write_all_at(&[0, 0], refcount_block + 5 * 2).unwrap();
        assert!(matches!(check(&path).unwrap(), Verdict::Errors(_)));
        check_sound(&path).unwrap_err();
    }

    #[test]
    fn qemu_io_reports_a_wrong_pattern() {
        let scratch = Scratch::new().unwrap();
        let path = image(&scratch);
        qemu_io(&path, &["read -P 0xaa 0 64k"]).unwrap();
        qemu_io(&path, &["read -P 0xab 0 64k"]).unwrap_err();
    }

    #[test]
    fn compare_finds_a_changed_copy() {
        let scratch = Scratch::new().unwrap();
        let path = image(&scratch);
        let copy = scratch.file("copy.raw");
        convert(&path, &copy, "raw").unwrap();
        compare((&path, "qcow2"), (&copy, "raw")).unwrap();
        OpenOptions::new()
            .write(true)
            .open(&copy)
            .unwrap()
            .write_all_at(&[0], 70_000)
            .unwrap();
        compare((&path, "qcow2"), (&copy, "raw")).unwrap_err();
    }
}
