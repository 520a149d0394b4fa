//! Creation of an image: header, refcounts, L1, and as much of the disk as preallocation asks for.
//!
//! The image is laid out without gaps: header, refcount table, refcount blocks, L1, L2 tables, data. The header is
//! written last, after a sync, so a cut leaves no image or a whole one. The refcount table has room for the disk's
//! full size, so that it need not grow under a guest.

mod header;
mod options;
mod plan;

use block::AlignedBuf;
use block::file::FileView;

use crate::format::{
    Geometry, GuestCluster, Header, L1Entry, L2Entry, L2TableMut, L2TableRef, RefcountTableEntry,
};

use header::header;
pub use options::{CreateError, CreateOptions, NewDataFile, Preallocation};
use plan::Plan;

/// The size of one write, in bytes.
const PART: u64 = 1 << 20;

/// Creates an image in `file`, in place of its contents. Durable when it returns.
///
/// # Errors
///
/// [`CreateError`]; nothing was written if it is about an option.
pub async fn create(file: &FileView, options: &CreateOptions) -> Result<Header, CreateError> {
    if let Some(data) = &options.data_file {
        let expected = "none, as no such file was opened";
        return Err(CreateError::option("data_file", &data.name, expected));
    }
    create_in(file, None, options).await
}

/// Creates an image as [`create`] does, whose guest's bytes are in `data`: the file that `options.data_file` names. The
/// disk's bytes are those of the file if they are kept, or else zeros.
///
/// # Errors
///
/// [`CreateError`]; nothing was written if it is about an option.
pub async fn create_with_data_file(
    file: &FileView,
    data: &FileView,
    options: &CreateOptions,
) -> Result<Header, CreateError> {
    let Some(new) = &options.data_file else {
        let path = data.file().path().display();
        return Err(CreateError::option("data_file", path, "a name to record for it"));
    };
    create_in(file, Some((data, new)), options).await
}

async fn create_in(
    file: &FileView,
    data: Option<(&FileView, &NewDataFile)>,
    options: &CreateOptions,
) -> Result<Header, CreateError> {
    let plan = Plan::new(options)?;
    let header = header(options, &plan)?;
    let header_bytes = header.encode()?;
    header.validate()?;

    if let Some((data, new)) = data {
        prepare_data_file(data, new, options, &plan).await?;
    }
    let end = plan.offset(plan.total()).bytes();
    make_room(file, end).await?;
    write_refcounts(file, &plan).await?;
    if let Some(luks) = &options.luks_header {
        let offset = plan.offset(plan.luks_start()).bytes();
        write(file, "the LUKS header", offset, luks.clone()).await?;
    }
    write_mapping(file, &plan).await?;
    if data.is_none() {
        let start = plan.offset(plan.data_start()).bytes();
        let len = plan.offset(plan.total()).bytes() - start;
        fill_data(file, options, start, len).await?;
    }
    file.sync()
        .await
        .map_err(CreateError::io("everything (sync)", 0))?;
    write(file, "the header", 0, header_bytes).await?;
    file.sync()
        .await
        .map_err(CreateError::io("the header (sync)", 0))?;
    Ok(header)
}

/// Makes the file `end` bytes long and all zeros, as far as metadata goes.
async fn make_room(file: &FileView, end: u64) -> Result<(), CreateError> {
    let io = || CreateError::io("the file's length", 0);
    if !file.file().is_block_device() {
        file.set_len(0).await.map_err(io())?;
        return file.set_len(end).await.map_err(io());
    }
    let len = file.len().map_err(io())?;
    if len < end {
        let expected = format!("less: the image takes {end} bytes, the device has {len}");
        return Err(CreateError::option("size", end, expected));
    }
    file.zero(0, end).await.map_err(io())
}

async fn write_refcounts(file: &FileView, plan: &Plan) -> Result<(), CreateError> {
    let geometry = plan.geometry;
    let table = (0..plan.blocks).flat_map(|i| {
        RefcountTableEntry::encode(plan.offset(plan.blocks_start() + i))
            .raw()
            .to_be_bytes()
    });
    write(
        file,
        "the refcount table",
        plan.offset(1).bytes(),
        table.collect(),
    )
    .await?;
    let per_block = geometry.refcount_block_entries() as u64;
    let full = refcount_block(&geometry, per_block);
    let whole_blocks = plan.total() / per_block;
    let mut index = 0;
    while index < plan.blocks {
        let mut bytes = Vec::new();
        let offset = plan.offset(plan.blocks_start() + index).bytes();
        while index < plan.blocks && (bytes.len() as u64) < PART {
            if index < whole_blocks {
                bytes.extend_from_slice(&full);
            } else {
                bytes.extend_from_slice(&refcount_block(&geometry, plan.total() % per_block));
            }
            index += 1;
        }
        write(file, "the refcount blocks", offset, bytes).await?;
    }
    Ok(())
}

/// Returns a block whose first `used` clusters have one reference each.
fn refcount_block(geometry: &Geometry, used: u64) -> Vec<u8> {
    let mut block = vec![0; geometry.cluster_size() as usize];
    for index in 0..used as usize {
        let written = geometry.refcount_order().write(&mut block, index, 1);
        assert_eq!(written, Ok(()), "1 fits every refcount width");
    }
    block
}

/// Writes L1 and L2 tables, if anything is preallocated.
async fn write_mapping(file: &FileView, plan: &Plan) -> Result<(), CreateError> {
    if plan.l2_tables == 0 {
        return Ok(());
    }
    let l1 = (0..plan.l2_tables).flat_map(|i| {
        let host = plan.offset(plan.l2_start() + i);
        L1Entry::encode(L2TableRef { host, copied: true })
            .raw()
            .to_be_bytes()
    });
    write(
        file,
        "the L1 table",
        plan.offset(plan.l1_start()).bytes(),
        l1.collect(),
    )
    .await?;
    // The L2 tables are one run of entries: table `i` ends where table `i + 1` starts.
    let mut done = 0;
    while done < plan.mapped {
        let width = plan.geometry.l2_entry_width().bytes();
        let count = (plan.mapped - done).min(PART / width as u64);
        let mut bytes = vec![0; count as usize * width];
        let mut table = L2TableMut::new(&mut bytes, &plan.geometry);
        for index in 0..count {
            let data = if plan.geometry.has_data_file() {
                plan.geometry.data_file_offset(GuestCluster::new(done + index))
            } else {
                plan.offset(plan.data_start() + done + index)
            };
            table.set(index as usize, L2Entry::data(data, true, &plan.geometry));
        }
        let offset = plan.offset(plan.l2_start()).bytes() + done * width as u64;
        write(file, "the L2 tables", offset, bytes).await?;
        done += count;
    }
    Ok(())
}

/// Gives the data file the disk's length and, unless its bytes are kept, makes those that are mapped read as zeros. Durable
/// when it returns.
async fn prepare_data_file(
    data: &FileView,
    new: &NewDataFile,
    options: &CreateOptions,
    plan: &Plan,
) -> Result<(), CreateError> {
    let io = || CreateError::io("the data file", 0);
    let (size, name) = (plan.geometry.virtual_size(), &new.name);
    let len = data.len().map_err(io())?;
    let is_device = data.file().is_block_device();
    if is_device && len < size {
        let expected = format!("a block device of at least {size} bytes; it has {len}");
        return Err(CreateError::option("data_file", name, expected));
    }
    if !is_device && !new.keep && len > 0 {
        let expected =
            "a new or empty file; data_file_keep=on makes the bytes of one that is there the disk's";
        return Err(CreateError::option("data_file", name, expected));
    }
    if !is_device && len > size {
        let expected = format!("at least {len}, the data file's length");
        return Err(CreateError::option("size", size, expected));
    }
    if !is_device && len < size {
        data.set_len(size).await.map_err(io())?;
    }
    if !new.keep {
        if is_device && plan.mapped > 0 {
            data.zero(0, size).await.map_err(io())?;
        }
        fill_data(data, options, 0, size).await?;
    }
    data.sync().await.map_err(io())
}

/// Allocates `len` bytes from `start` on, as preallocation asks for.
async fn fill_data(
    file: &FileView,
    options: &CreateOptions,
    start: u64,
    len: u64,
) -> Result<(), CreateError> {
    match options.preallocation {
        _ if len == 0 => Ok(()),
        Preallocation::Off | Preallocation::Metadata => Ok(()),
        Preallocation::Falloc if file.file().is_block_device() => Ok(()),
        Preallocation::Falloc => file
            .preallocate(start, len)
            .await
            .map_err(CreateError::io("the data's space", start)),
        Preallocation::Full => {
            let mut done = 0;
            while done < len {
                let part = (len - done).min(PART);
                write(file, "the data", start + done, vec![0; part as usize]).await?;
                done += part;
            }
            Ok(())
        }
    }
}

async fn write(file: &FileView, what: &'static str, offset: u64, bytes: Vec<u8>) -> Result<(), CreateError> {
    let written = file.write_at(offset, AlignedBuf::from_slice(&bytes)).await;
    written.map_err(CreateError::io(what, offset))
}
