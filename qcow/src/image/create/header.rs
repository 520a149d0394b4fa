//! The header of a new image, by its options.

use super::options::{CreateError, CreateOptions, Preallocation};
use super::plan::{Plan, luks_bytes};
use crate::format::header::{BACKING_NAME_MAX, V2_HEADER_LENGTH, V3_HEADER_LENGTH, V3_HEADER_LENGTH_MIN};
use crate::format::{
    Autoclear, Compatible, CompressionType, CryptMethod, Extension, FeatureKind, FeatureName, Header,
    HostOffset, Incompatible, Version,
};

/// Checks the options about names, and makes the header.
pub(super) fn header(options: &CreateOptions, plan: &Plan) -> Result<Header, CreateError> {
    let mut extensions = Vec::new();
    match (&options.backing_file, &options.backing_format) {
        (None, None) => {}
        (None, Some(format)) => {
            return Err(CreateError::option(
                "backing_fmt",
                format,
                "none without backing_file",
            ));
        }
        (Some(name), _) if name.is_empty() || name.len() > BACKING_NAME_MAX as usize => {
            let expected = format!("a name of 1 to {BACKING_NAME_MAX} bytes");
            return Err(CreateError::option("backing_file", name, expected));
        }
        (Some(name), None) => {
            let expected = "backing_fmt=raw or backing_fmt=qcow2 with it; formats are never guessed";
            return Err(CreateError::option("backing_file", name, expected));
        }
        (Some(_), Some(format)) if !matches!(format.as_str(), "raw" | "qcow2") => {
            return Err(CreateError::option("backing_fmt", format, "raw or qcow2"));
        }
        (Some(name), Some(_)) if options.preallocation != Preallocation::Off => {
            return Err(CreateError::option(
                "backing_file",
                name,
                "no backing file with preallocation",
            ));
        }
        (Some(_), Some(format)) => extensions.push(Extension::BackingFormat(format.as_bytes().to_vec())),
    }
    let geometry = plan.geometry;
    let v3 = options.version == Version::V3;
    let mut incompatible = Incompatible::empty();
    incompatible.set(
        Incompatible::COMPRESSION_TYPE,
        options.compression != CompressionType::Deflate,
    );
    incompatible.set(Incompatible::EXTENDED_L2, options.extended_l2);
    incompatible.set(Incompatible::EXTERNAL_DATA, options.data_file.is_some());
    let mut autoclear = Autoclear::empty();
    if let Some(data) = &options.data_file {
        autoclear.set(Autoclear::RAW_EXTERNAL_DATA, data.raw);
        extensions.push(Extension::DataFile(data.name.as_bytes().to_vec()));
    }
    if options.luks_header.is_some() {
        extensions.push(Extension::CryptoHeader {
            offset: plan.offset(plan.luks_start()),
            len: luks_bytes(options),
        });
    }
    let mut header = Header {
        version: options.version,
        cluster_bits: geometry.cluster_bits(),
        virtual_size: geometry.virtual_size(),
        crypt_method: match options.luks_header {
            Some(_) => CryptMethod::Luks,
            None => CryptMethod::None,
        },
        l1_entries: plan.l1_entries as u32,
        l1_offset: if plan.l1_entries == 0 {
            HostOffset::new(0)
        } else {
            plan.offset(plan.l1_start())
        },
        refcount_table_offset: plan.offset(1),
        refcount_table_clusters: plan.table_clusters as u32,
        snapshot_count: 0,
        snapshot_table_offset: HostOffset::new(0),
        incompatible,
        compatible: if options.lazy_refcounts {
            Compatible::LAZY_REFCOUNTS
        } else {
            Compatible::empty()
        },
        autoclear,
        refcount_order: geometry.refcount_order(),
        header_length: if v3 { V3_HEADER_LENGTH } else { V2_HEADER_LENGTH },
        compression: options.compression,
        unknown_fields: vec![
            0;
            if v3 {
                (V3_HEADER_LENGTH - V3_HEADER_LENGTH_MIN - 1) as usize
            } else {
                0
            }
        ],
        extensions,
        backing_name: options.backing_file.as_ref().map(|name| name.as_bytes().to_vec()),
    };
    if v3 {
        header.extensions.push(Extension::FeatureNames(feature_names()));
        if header.encode().is_err() {
            // Small clusters have no room for names, which are only a courtesy.
            header.extensions.pop();
        }
    }
    Ok(header)
}

/// Returns the names of all features that this edition of the format defines.
fn feature_names() -> Vec<FeatureName> {
    let name = FeatureName::new;
    vec![
        name(FeatureKind::Incompatible, 0, "dirty bit"),
        name(FeatureKind::Incompatible, 1, "corrupt bit"),
        name(FeatureKind::Incompatible, 2, "external data file"),
        name(FeatureKind::Incompatible, 3, "compression type"),
        name(FeatureKind::Incompatible, 4, "extended L2 entries"),
        name(FeatureKind::Compatible, 0, "lazy refcounts"),
        name(FeatureKind::Autoclear, 0, "bitmaps"),
        name(FeatureKind::Autoclear, 1, "raw external data"),
    ]
}
