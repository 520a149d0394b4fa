//! Parser of `image create -o opt=val,…`.
//!
//! The options are those of `qemu-img create -f qcow2`. Each value is parsed alone; [`qcow::image::create()`] checks
//! the combination before it writes anything.

use std::time::Duration;

use qcow::format::{CompressionType, Version};
use qcow::image::{CreateOptions, NewDataFile, Preallocation};
use qcow::luks::{CipherKind, HashKind, LuksOptions};

use crate::key_value::{self, SyntaxError};
use crate::size::parse_bytes;

/// An invalid `-o` option.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum CreateOptionsError {
    /// Not `option=value`.
    #[error("-o: {0}")]
    Syntax(SyntaxError),
    /// No such option.
    #[error("-o: unknown option `{option}`; expected one of {}", names())]
    Unknown {
        /// The option.
        option: String,
    },
    /// The option exists in QCOW2, but is not supported.
    #[error("-o: `{option}` is not supported; expected encrypt.format=luks, and the secret in --secret-file")]
    Unsupported {
        /// The option.
        option: String,
    },
    /// The option is there twice.
    #[error("-o: `{option}` is given more than once")]
    Duplicate {
        /// The option.
        option: &'static str,
    },
    /// The option is about a data file, and there is none.
    #[error("-o: `{option}=on` is given without `data_file`, the file that it is about")]
    WithoutDataFile {
        /// The option.
        option: &'static str,
    },
    /// The option is about encryption, and there is none.
    #[error("-o: `{option}` is given without `encrypt.format=luks`")]
    WithoutEncryption {
        /// The option.
        option: &'static str,
    },
    /// The value is not one the option takes.
    #[error("-o: `{option}={value}`: {option} takes {takes}")]
    Value {
        /// The option.
        option: &'static str,
        /// The value.
        value: String,
        /// Its permitted values.
        takes: &'static str,
    },
}

/// The options and their permitted values.
const OPTIONS: [(&str, &str); 16] = [
    ("cluster_size", "a power of two from 512 to 2M"),
    ("compat", "0.10 (version 2) or 1.1 (version 3)"),
    ("refcount_bits", "1, 2, 4, 8, 16, 32 or 64"),
    ("backing_file", "the path of a file"),
    ("backing_fmt", "raw or qcow2"),
    ("extended_l2", "on or off; on takes clusters of 16k or more"),
    ("lazy_refcounts", "on or off"),
    ("preallocation", "off, metadata, falloc or full"),
    ("compression_type", "zlib or zstd"),
    ("data_file", "the path of a file for the guest's data"),
    (
        "data_file_raw",
        "on or off; on makes the data file a raw image of the disk",
    ),
    (
        "data_file_keep",
        "on or off; on makes the bytes in the data file those of the disk",
    ),
    ("encrypt.format", "luks; the secret is in --secret-file"),
    ("encrypt.cipher-alg", "aes-256 or aes-128"),
    ("encrypt.hash-alg", "sha256, sha512 or sha1"),
    (
        "encrypt.iter-time",
        "the milliseconds that opening the image takes here, 1 or more",
    ),
];

/// Options of `qemu-img` that are refused as such rather than as unknown.
const UNSUPPORTED: [&str; 2] = ["encryption", "encrypt.key-secret"];

fn names() -> String {
    OPTIONS.map(|(name, _)| name).join(", ")
}

/// The table of options for `--help`.
#[must_use]
pub fn options_help() -> String {
    let lines: String = OPTIONS
        .iter()
        .map(|(name, takes)| format!("  {name:<18} {takes}\n"))
        .collect();
    format!("Options of -o (opt=val, separated by commas):\n{lines}")
}

/// Options whose values are printed as given, and only if given.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Given {
    /// `compat`.
    pub compat: Option<String>,
    /// `preallocation`.
    pub preallocation: Option<String>,
    /// `data_file_raw`.
    pub data_file_raw: Option<String>,
    /// The encryption, whose header is made later, with the secret.
    pub encryption: Option<LuksOptions>,
    /// The options of the encryption but its format.
    pub encryption_values: Vec<(&'static str, String)>,
}

/// Parses the values of all `-o` onto the defaults, and returns which were given. The size is left at zero.
///
/// # Errors
///
/// [`CreateOptionsError`], naming the option and what it takes.
pub fn parse<'a>(
    texts: impl IntoIterator<Item = &'a str>,
) -> Result<(CreateOptions, Given), CreateOptionsError> {
    let mut options = CreateOptions::new(0);
    let mut given = Given::default();
    let mut seen: Vec<&'static str> = Vec::new();
    let mut data = NewDataFile {
        name: String::new(),
        raw: false,
        keep: false,
    };
    let mut encryption = LuksOptions::default();
    for text in texts {
        for (name, value) in key_value::items(text).map_err(CreateOptionsError::Syntax)? {
            let Some(&(option, takes)) = OPTIONS.iter().find(|(known, _)| *known == name) else {
                let option = name.to_owned();
                return Err(if UNSUPPORTED.contains(&name) {
                    CreateOptionsError::Unsupported { option }
                } else {
                    CreateOptionsError::Unknown { option }
                });
            };
            if seen.contains(&option) {
                return Err(CreateOptionsError::Duplicate { option });
            }
            seen.push(option);
            let wrong = || CreateOptionsError::Value {
                option,
                value: value.to_owned(),
                takes,
            };
            match option {
                "data_file" => value.clone_into(&mut data.name),
                "data_file_raw" => data.raw = switch(value).ok_or_else(wrong)?,
                "data_file_keep" => data.keep = switch(value).ok_or_else(wrong)?,
                _ if option.starts_with("encrypt.") => {
                    set_encryption(&mut encryption, option, value).ok_or_else(wrong)?;
                }
                _ => set(&mut options, option, value).ok_or_else(wrong)?,
            }
            match option {
                "compat" => given.compat = Some(value.to_owned()),
                "preallocation" => given.preallocation = Some(value.to_owned()),
                "data_file_raw" => given.data_file_raw = Some(value.to_owned()),
                "encrypt.format" => {}
                _ if option.starts_with("encrypt.") => {
                    given.encryption_values.push((option, value.to_owned()));
                }
                _ => {}
            }
        }
    }
    if seen.contains(&"encrypt.format") {
        given.encryption = Some(encryption);
    } else if let Some(&(option, _)) = given.encryption_values.first() {
        return Err(CreateOptionsError::WithoutEncryption { option });
    }
    if seen.contains(&"data_file") {
        options.data_file = Some(data);
    } else if data.raw || data.keep {
        let option = if data.raw {
            "data_file_raw"
        } else {
            "data_file_keep"
        };
        return Err(CreateOptionsError::WithoutDataFile { option });
    }
    Ok((options, given))
}

/// Stores one value; `None` if the option does not take it.
fn set(options: &mut CreateOptions, option: &str, value: &str) -> Option<()> {
    match option {
        "cluster_size" => options.cluster_size = parse_bytes(value).ok()?,
        "compat" => {
            options.version = match value {
                "0.10" | "v2" => Version::V2,
                "1.1" | "v3" => Version::V3,
                _ => return None,
            };
        }
        "refcount_bits" => options.refcount_bits = value.parse().ok()?,
        "backing_file" => options.backing_file = Some(value.to_owned()),
        "backing_fmt" => {
            let known = matches!(value, "raw" | "qcow2");
            options.backing_format = Some(known.then(|| value.to_owned())?);
        }
        "extended_l2" => options.extended_l2 = switch(value)?,
        "lazy_refcounts" => options.lazy_refcounts = switch(value)?,
        "preallocation" => options.preallocation = Preallocation::from_name(value)?,
        "compression_type" => {
            options.compression = match value {
                "zlib" => CompressionType::Deflate,
                "zstd" => CompressionType::Zstd,
                _ => return None,
            };
        }
        _ => return None,
    }
    Some(())
}

/// Stores one value about encryption; `None` if the option does not take it.
fn set_encryption(options: &mut LuksOptions, option: &str, value: &str) -> Option<()> {
    match option {
        "encrypt.format" => (value == "luks").then_some(())?,
        "encrypt.cipher-alg" => options.cipher = CipherKind::from_name(value)?,
        "encrypt.hash-alg" => options.hash = HashKind::from_name(value)?,
        "encrypt.iter-time" => {
            let milliseconds = value.parse().ok().filter(|&ms: &u32| ms > 0)?;
            options.iter_time = Duration::from_millis(milliseconds.into());
        }
        _ => return None,
    }
    Some(())
}

/// Parses `on` or `off`.
fn switch(value: &str) -> Option<bool> {
    match value {
        "on" | "true" => Some(true),
        "off" | "false" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        parse([text]).map_or_else(|error| error.to_string(), |found| panic!("{text}: {found:?}"))
    }

    #[test]
    fn parse_sets_every_option_from_one_or_several_texts() {
        let (options, given) = parse([
            "cluster_size=4k,compat=0.10,refcount_bits=1",
            "backing_file=\"a,b.img\",backing_fmt=raw,lazy_refcounts=on,preallocation=falloc,compression_type=zstd",
            "extended_l2=on",
            "data_file=d.raw,data_file_raw=on,data_file_keep=off",
            "encrypt.format=luks,encrypt.cipher-alg=aes-128,encrypt.hash-alg=sha512,encrypt.iter-time=30",
        ])
        .expect("values");
        assert_eq!(
            (options.cluster_size, options.version, options.refcount_bits),
            (4096, Version::V2, 1)
        );
        assert_eq!(options.backing_file.as_deref(), Some("a,b.img"));
        assert_eq!(options.backing_format.as_deref(), Some("raw"));
        assert!(options.lazy_refcounts && options.extended_l2);
        assert_eq!(options.preallocation, Preallocation::Falloc);
        assert_eq!(
            (given.compat.as_deref(), given.preallocation.as_deref()),
            (Some("0.10"), Some("falloc"))
        );
        assert_eq!(options.compression, CompressionType::Zstd);
        let data = options.data_file.expect("a data file");
        assert!(data.name == "d.raw" && data.raw && !data.keep);
        let encryption = LuksOptions {
            cipher: CipherKind::Aes128Xts,
            hash: HashKind::Sha512,
            iter_time: Duration::from_millis(30),
        };
        assert_eq!(given.encryption, Some(encryption));
    }

    #[test]
    fn wrong_value_error_names_the_option_and_valid_values() {
        for (item, takes) in [
            ("cluster_size=x", "a power of two from 512 to 2M"),
            ("compat=2", "0.10 (version 2) or 1.1 (version 3)"),
            ("refcount_bits=a", "1, 2, 4, 8, 16, 32 or 64"),
            ("backing_fmt=vmdk", "raw or qcow2"),
            ("extended_l2=1", "on or off; on takes clusters of 16k or more"),
            ("lazy_refcounts=maybe", "on or off"),
            ("preallocation=some", "off, metadata, falloc or full"),
            ("compression_type=lz4", "zlib or zstd"),
            ("encrypt.format=aes", "luks; the secret is in --secret-file"),
            ("encrypt.cipher-alg=serpent-256", "aes-256 or aes-128"),
            ("encrypt.hash-alg=md5", "sha256, sha512 or sha1"),
            (
                "encrypt.iter-time=0",
                "the milliseconds that opening the image takes here, 1 or more",
            ),
            (
                "data_file_raw=1",
                "on or off; on makes the data file a raw image of the disk",
            ),
        ] {
            let option = item.split('=').next().expect("an option");
            assert_eq!(refused(item), format!("-o: `{item}`: {option} takes {takes}"));
        }
    }

    #[test]
    fn parse_tells_unknown_unsupported_and_repeated_apart() {
        assert!(
            refused("foo=1").starts_with("-o: unknown option `foo`; expected one of cluster_size, compat,")
        );
        assert_eq!(
            refused("encryption=on"),
            "-o: `encryption` is not supported; expected encrypt.format=luks, and the secret in --secret-file"
        );
        assert_eq!(
            refused("encrypt.hash-alg=sha1"),
            "-o: `encrypt.hash-alg` is given without `encrypt.format=luks`"
        );
        assert_eq!(
            refused("compat=1.1,compat=1.1"),
            "-o: `compat` is given more than once"
        );
        let twice = parse(["compat=1.1", "compat=0.10"]).expect_err("twice");
        assert_eq!(twice, CreateOptionsError::Duplicate { option: "compat" });
        assert_eq!(refused("compat"), "-o: `compat`: expected key=value");
        assert_eq!(
            refused("data_file_keep=on"),
            "-o: `data_file_keep=on` is given without `data_file`, the file that it is about"
        );
        for (option, _) in OPTIONS {
            assert!(options_help().contains(option), "{option} is not in the help");
        }
    }
}
