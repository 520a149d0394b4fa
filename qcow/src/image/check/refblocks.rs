//! The refcounts as they are on disk: refcount table and refcount blocks.

use super::super::counts::CountMap;
use super::super::read::{for_each_entry, read};
use super::{CheckError, Remedy, Walk};
use crate::format::{HostCluster, RefcountTableEntry};

/// Loads the refcounts of the file's clusters, and claims the clusters that hold them. Counts of
/// clusters behind the end of the file are left out, as QEMU does: nothing is lost there.
pub(super) async fn load(walk: &mut Walk<'_>) -> Result<CountMap, CheckError> {
    let subject = walk.subject;
    let geometry = subject.geometry;
    let table_at = subject.header.refcount_table_offset;
    let table_bytes = subject.header.refcount_table_bytes();
    let mut counts = CountMap::default();
    if table_bytes == 0 {
        walk.findings.corruption("header", 56, Remedy::Rebuild, || {
            "there is no refcount table".into()
        });
        return Ok(counts);
    }
    if !walk.claim(
        "refcount table",
        table_at.bytes(),
        table_bytes,
        1,
        Remedy::Rebuild,
    ) {
        return Ok(counts);
    }
    let mut blocks = Vec::new();
    let findings = &mut walk.findings;
    let entries = table_bytes / 8;
    let each = |index: u64, raw: u64| {
        let entry_at = table_at.bytes() + index * 8;
        match RefcountTableEntry::from_raw(raw).decode(&geometry) {
            Ok(None) => {}
            Ok(Some(block)) if geometry.host_cluster(block).index() >= subject.file_clusters() => {
                findings.corruption("refcount table", entry_at, Remedy::Rebuild, || {
                    format!("refcount block {block} is outside the file")
                });
            }
            Ok(Some(block)) => blocks.push((index, block)),
            Err(error) => {
                findings.corruption("refcount table", entry_at, Remedy::Rebuild, || error.to_string());
            }
        }
    };
    let table = for_each_entry(subject.file, "the refcount table", table_at, entries, each).await;
    if let Err(error) = table {
        walk.findings
            .error("refcount table", table_at.bytes(), Remedy::Rebuild, || {
                error.to_string()
            });
    }
    for (index, block_at) in blocks {
        walk.claim(
            "refcount block",
            block_at.bytes(),
            geometry.cluster_size(),
            1,
            Remedy::Rebuild,
        );
        let block_len = geometry.cluster_size() as usize;
        let block = match read(subject.file, "a refcount block", block_at.bytes(), block_len).await {
            Ok(block) => block,
            Err(error) => {
                let message = || error.to_string();
                walk.findings
                    .error("refcount block", block_at.bytes(), Remedy::Rebuild, message);
                continue;
            }
        };
        let first = index << geometry.refcount_block_bits();
        for at in 0..geometry.refcount_block_entries() {
            let cluster = HostCluster::new(first + at as u64).index();
            if cluster >= subject.file_clusters() {
                break;
            }
            let count = geometry.refcount_order().read(&block, at).unwrap_or_default();
            counts.set(cluster, count);
        }
    }
    Ok(counts)
}
