//! The refcounts as they are on disk: refcount table and refcount blocks.

use super::super::read::{for_each_entry, read};
use super::{Remedy, Walk};
use crate::format::{ClusterUse, HostOffset, RefcountTableEntry};

/// Loads the refcounts of the window's clusters, and claims the clusters that hold refcounts. Counts of clusters past
/// the end of the file are left out, as in QEMU: no space is lost there.
pub(super) async fn load(walk: &mut Walk<'_>) {
    let subject = walk.subject;
    let geometry = subject.geometry;
    let table_at = subject.header.refcount_table_offset;
    let table_bytes = subject.header.refcount_table_bytes();
    if table_bytes == 0 {
        walk.refcounts_damaged = true;
        walk.report(ClusterUse::Header, 56, Remedy::Rebuild, || {
            "there is no refcount table".into()
        });
        return;
    }
    if !walk.claim(
        ClusterUse::RefcountTable,
        table_at.bytes(),
        table_bytes,
        1,
        Remedy::Rebuild,
    ) {
        walk.refcounts_damaged = true;
        return;
    }
    let blocks = list_blocks(walk, table_at, table_bytes / 8).await;
    walk.set_aside(blocks.capacity() * size_of::<(u64, HostOffset)>());
    for &(index, block_at) in &blocks {
        if walk.is_over_budget() {
            break;
        }
        let cluster_size = geometry.cluster_size();
        walk.claim(
            ClusterUse::RefcountBlock,
            block_at.bytes(),
            cluster_size,
            1,
            Remedy::Rebuild,
        );
        let first = index << geometry.refcount_block_bits();
        let end = first
            .saturating_add(geometry.refcount_block_entries() as u64)
            .min(subject.file_clusters());
        let counted = first.max(walk.window.start)..end.min(walk.window.end);
        if counted.is_empty() || walk.is_in_hole(block_at.bytes(), cluster_size) {
            continue;
        }
        let block = read(
            subject.file,
            ClusterUse::RefcountBlock,
            block_at.bytes(),
            cluster_size as usize,
        )
        .await;
        match block {
            Ok(block) if block.iter().all(|&byte| byte == 0) => {}
            Ok(block) => {
                for cluster in counted {
                    let at = (cluster - first) as usize;
                    let count = geometry.refcount_order().read(&block, at).unwrap_or_default();
                    if count != 0 {
                        walk.on_disk.set(cluster, count);
                    }
                }
            }
            Err(error) => {
                walk.refcounts_damaged = true;
                // A block is read in every pass that counts some of its clusters; it fails once.
                if walk.window.contains(&first) {
                    let (at, message) = (block_at.bytes(), || error.to_string());
                    walk.findings
                        .error(ClusterUse::RefcountBlock, at, Remedy::Rebuild, message);
                }
            }
        }
    }
    walk.blocks = blocks;
}

/// Lists the blocks that the refcount table points to, by table entry. A block that two entries point to counts for
/// the first alone.
async fn list_blocks(walk: &mut Walk<'_>, table_at: HostOffset, entries: u64) -> Vec<(u64, HostOffset)> {
    let subject = walk.subject;
    let geometry = subject.geometry;
    let mut blocks = Vec::new();
    let each = |index: u64, raw: u64| {
        let entry_at = table_at.bytes() + index * 8;
        let problem = match RefcountTableEntry::from_raw(raw).decode(&geometry) {
            Ok(None) => return,
            Ok(Some(block)) if geometry.host_cluster(block).index() >= subject.file_clusters() => {
                format!("refcount block {block} is outside the file")
            }
            Ok(Some(block)) => return blocks.push((index, block)),
            Err(error) => error.to_string(),
        };
        walk.refcounts_damaged = true;
        walk.report(ClusterUse::RefcountTable, entry_at, Remedy::Rebuild, || problem);
    };
    let table = for_each_entry(subject.file, ClusterUse::RefcountTable, table_at, entries, each).await;
    if let Err(error) = table {
        walk.refcounts_damaged = true;
        walk.report_unreadable(
            ClusterUse::RefcountTable,
            table_at.bytes(),
            Remedy::Rebuild,
            || error.to_string(),
        );
    }
    let listed = blocks.len();
    blocks.sort_unstable_by_key(|&(index, block)| (block, index));
    blocks.dedup_by_key(|&mut (_, block)| block);
    if blocks.len() < listed {
        walk.refcounts_damaged = true;
        let message = || {
            format!(
                "{} entries lead to the block of another entry",
                listed - blocks.len()
            )
        };
        walk.report(
            ClusterUse::RefcountTable,
            table_at.bytes(),
            Remedy::Rebuild,
            message,
        );
    }
    blocks.sort_unstable();
    blocks
}
