//! `ringdisk image create`: creates an image, or leaves no file behind.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use block::Context;
use block::file::ImageFile;
use qcow::image::{self as tools, CreateError, CreateOptions};
use qcow::luks;

use super::create_options::{self, Given};
use super::{CreateArguments, on_image, open_to_read, open_to_write, write_json};
use crate::error::{CommandFailure, EXIT_OK};
use crate::saved_devices::claim::refuse_claimed;
use crate::secret_file::read_secret;
use crate::size::parse_bytes;

/// Creates the image and prints a description.
pub(super) fn run(arguments: &CreateArguments, out: &mut dyn Write) -> Result<u8, CommandFailure> {
    let usage = |error: &dyn std::fmt::Display| CommandFailure::Usage(error.to_string());
    let (mut options, given) =
        create_options::parse(arguments.options.iter().map(String::as_str)).map_err(|error| usage(&error))?;
    let size = match &arguments.size {
        None => None,
        Some(text) => Some(parse_bytes(text).map_err(|error| usage(&format!("size `{text}`: {error}")))?),
    };
    let backing_size = backing_disk_size(&arguments.path, &options)?;
    let cx = Context::syscalls();
    let data = DataFile::open(&arguments.path, &options)?;
    let kept_size = match &data {
        Some(data) if options.data_file.as_ref().is_some_and(|new| new.keep) => Some(data.len(&cx)?),
        _ => None,
    };
    options.size = size.or(backing_size).or(kept_size).ok_or_else(|| {
        CommandFailure::Usage(
            "the size is missing; pass one, such as 20G, or -o backing_file=… or data_file_keep=on"
                .to_owned(),
        )
    })?;

    options.luks_header = luks_header(arguments, &given)?;
    let created = NewFile::open(&arguments.path)?;
    let file = open_to_write(&arguments.path)?;
    let made = match &data {
        Some(data) => {
            let view = data.file.view(&cx);
            let view = view.map_err(|error| CommandFailure::about(data.file.path().display(), error))?;
            on_image(&file, &cx, async |image| {
                tools::create_with_data_file(&image, &view, &options).await
            })?
        }
        None => on_image(&file, &cx, async |view| tools::create(&view, &options).await)?,
    };
    if let Err(error) = made {
        return Err(match error {
            CreateError::Option { .. } => CommandFailure::Usage(error.to_string()),
            error => CommandFailure::about(format!("cannot create {}", arguments.path.display()), error),
        });
    }
    created.keep();
    if let Some(data) = data {
        data.created.keep();
    }

    if arguments.json {
        let info = on_image(&file, &cx, async |view| tools::info(&view).await)?
            .map_err(|error| CommandFailure::about(arguments.path.display(), error))?;
        write_json(out, &info)?;
    } else {
        writeln!(out, "{}", describe(&arguments.path, &options, &given))?;
    }
    Ok(EXIT_OK)
}

/// Makes the LUKS header of the new image, if it is to be encrypted. Takes about as long as opening the image will.
fn luks_header(arguments: &CreateArguments, given: &Given) -> Result<Option<Vec<u8>>, CommandFailure> {
    let usage = |message: &str| Err(CommandFailure::Usage(message.to_owned()));
    match (&given.encryption, &arguments.secret_file) {
        (None, None) => Ok(None),
        (Some(_), None) => {
            usage("-o encrypt.format=luks: --secret-file is missing, the file with the secret")
        }
        (None, Some(_)) => {
            usage("--secret-file is for encrypted images; pass -o encrypt.format=luks as well")
        }
        (Some(options), Some(path)) => {
            let made = luks::create(&read_secret(path)?, options);
            let (header, _) = made
                .map_err(|error| CommandFailure::about(format!("secret file {}", path.display()), error))?;
            Ok(Some(header))
        }
    }
}

/// The data file of the new image.
struct DataFile {
    file: Arc<ImageFile>,
    created: NewFile,
}

impl DataFile {
    /// Opens the data file that the options name, if they do. One whose bytes are kept must be there, and another one is
    /// made.
    fn open(image: &Path, options: &CreateOptions) -> Result<Option<Self>, CommandFailure> {
        let Some(new) = &options.data_file else {
            return Ok(None);
        };
        let name = &new.name;
        let path = tools::backing_path(image, name.as_bytes()).ok_or_else(|| {
            CommandFailure::Usage(format!(
                "-o: `data_file={name}`: expected the path of a local file, which may start with file:"
            ))
        })?;
        let about = |error: Box<dyn std::error::Error + Send + Sync>| {
            CommandFailure::about(format!("data file {}", path.display()), error)
        };
        refuse_claimed(&path, None).map_err(|error| about(error.into()))?;
        let created = if new.keep {
            NewFile { made: None }
        } else {
            NewFile::open(&path)?
        };
        let file = open_to_write(&path)?;
        // Both names may lead to the file that was just made.
        let backing = options.backing_file.as_ref();
        let backing = backing.and_then(|name| tools::backing_path(image, name.as_bytes()));
        let mut others = std::iter::once(image).chain(backing.as_deref());
        if others.any(|other| is_same_file(other, &path)) {
            let error = io::Error::new(
                io::ErrorKind::InvalidInput,
                "it is the new image itself or its backing file; choose another file",
            );
            return Err(about(error.into()));
        }
        Ok(Some(Self { file, created }))
    }

    /// Returns the length of the file, in bytes.
    fn len(&self, cx: &Context) -> Result<u64, CommandFailure> {
        on_image(&self.file, cx, async |view| view.len())?
            .map_err(|error| CommandFailure::about(self.file.path().display(), error))
    }
}

/// Returns true if both paths lead to one file.
fn is_same_file(a: &Path, b: &Path) -> bool {
    match (fs::metadata(a), fs::metadata(b)) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => false,
    }
}

/// Returns the size of the disk in the backing file, if one is given. Fails if the file is missing or not of the given
/// format. The file is not locked: an overlay is created while the guest still writes its base, and writes do not
/// change the size. Opening the overlay locks it.
fn backing_disk_size(path: &Path, options: &CreateOptions) -> Result<Option<u64>, CommandFailure> {
    let (Some(name), Some(format)) = (&options.backing_file, &options.backing_format) else {
        // `tools::create` reports that one is given without the other.
        return Ok(options.backing_file.as_ref().map(|_| 0));
    };
    let backing = tools::backing_path(path, name.as_bytes()).ok_or_else(|| {
        CommandFailure::Usage(format!(
            "-o: `backing_file={name}`: expected the path of a local file, which may start with file:"
        ))
    })?;
    let about = |error| CommandFailure::about(format!("backing file {}", backing.display()), error);
    if is_same_file(path, &backing) {
        let error = io::Error::new(
            io::ErrorKind::InvalidInput,
            "it is the new image itself; choose another file",
        );
        return Err(about(error.into()));
    }
    let cx = Context::syscalls();
    let file = open_to_read(&backing, true).map_err(about)?;
    let size = if format == "qcow2" {
        on_image(&file, &cx, async |view| tools::info(&view).await)?
            .map_err(|error| about(error.into()))?
            .virtual_size
    } else {
        on_image(&file, &cx, async |view| view.len())?.map_err(|error| about(error.into()))?
    };
    Ok(Some(size))
}

/// A new file, removed on drop unless it is kept. An existing file is never removed.
struct NewFile {
    made: Option<PathBuf>,
}

impl NewFile {
    /// Creates an empty file if none exists.
    fn open(path: &Path) -> Result<Self, CommandFailure> {
        match OpenOptions::new().write(true).create_new(true).open(path) {
            Ok(_) => Ok(Self {
                made: Some(path.to_owned()),
            }),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(Self { made: None }),
            Err(error) => Err(CommandFailure::about(
                format!("cannot create {}", path.display()),
                error,
            )),
        }
    }

    fn keep(mut self) {
        self.made = None;
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if let Some(path) = &self.made
            && let Err(error) = fs::remove_file(path)
        {
            tracing::warn!(path = %path.display(), %error, "cannot remove an incomplete image");
        }
    }
}

/// Returns the line that `qemu-img create` prints: all options with a default, `preallocation` and `compat` only if
/// given, and commas in names doubled.
fn describe(path: &Path, options: &CreateOptions, given: &Given) -> String {
    let mut line = format!("Formatting '{}', fmt=qcow2", path.display());
    let mut add = |name: &str, value: &dyn std::fmt::Display| line.push_str(&format!(" {name}={value}"));
    if given.encryption.is_some() {
        add("encrypt.format", &"luks");
    }
    for (option, value) in &given.encryption_values {
        add(option, value);
    }
    add("cluster_size", &options.cluster_size);
    add("extended_l2", &if options.extended_l2 { "on" } else { "off" });
    if let Some(preallocation) = &given.preallocation {
        add("preallocation", preallocation);
    }
    add("compression_type", &options.compression.name());
    add("size", &options.size);
    if let Some(compat) = &given.compat {
        add("compat", compat);
    }
    if let Some(file) = &options.backing_file {
        add("backing_file", &file.replace(',', ",,"));
    }
    if let Some(format) = &options.backing_format {
        add("backing_fmt", format);
    }
    if let Some(data) = &options.data_file {
        add("data_file", &data.name.replace(',', ",,"));
        if let Some(raw) = &given.data_file_raw {
            add("data_file_raw", raw);
        }
        if data.keep {
            add("data_file_keep", &"on");
        }
    }
    add(
        "lazy_refcounts",
        &if options.lazy_refcounts { "on" } else { "off" },
    );
    add("refcount_bits", &options.refcount_bits);
    line
}
