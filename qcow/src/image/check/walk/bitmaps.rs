//! The bitmap directory, the tables of bitmaps, and their data.

use super::Walk;
use crate::format::references::Entry;
use crate::format::{BitmapDirectoryEntry, BitmapTableEntry, ClusterUse};
use crate::image::bitmaps::{consistent_bitmaps, for_each_bitmap};
use crate::image::check::{Remedy, Subject};
use crate::image::references::{BITMAP_PART_ENTRIES, Table, for_each_reference};

impl Walk<'_> {
    pub(super) async fn walk_bitmaps(&mut self) {
        let Subject {
            file,
            header,
            geometry,
            file_len,
        } = *self.subject;
        let Some(extension) = consistent_bitmaps(header) else {
            return;
        };
        let structure = ClusterUse::BitmapDirectory;
        let directory_at = extension.directory_offset.bytes();
        let mut tables = Vec::new();
        let each = |entry_at: u64, entry: BitmapDirectoryEntry| match entry.validate(&geometry) {
            Ok(()) => tables.push((entry.table_offset, u64::from(entry.table_entries))),
            Err(error) => self.report(structure, entry_at, Remedy::None, || error.to_string()),
        };
        if let Err(error) = for_each_bitmap(file, header, &extension, file_len, each).await {
            self.report(structure, directory_at, Remedy::None, || error.to_string());
            return;
        }
        let len = extension.directory_size;
        self.claim(structure, directory_at, len, 1, Remedy::None);
        tables.sort_unstable();
        let mut read_until = 0;
        for (offset, entries) in tables {
            let table = Table {
                kind: ClusterUse::BitmapTable,
                offset,
                entries,
            };
            let inside = self.claim_table(&table, 1);
            if !inside || offset.bytes() < read_until {
                continue;
            }
            read_until = table.end();
            if self.is_over_budget() {
                return;
            }
            for first in (0..entries).step_by(BITMAP_PART_ENTRIES as usize) {
                let part = table.part(first, BITMAP_PART_ENTRIES);
                self.walk_bitmap_table(part).await;
            }
        }
    }

    async fn walk_bitmap_table(&mut self, part: Table) {
        let Subject { file, geometry, .. } = *self.subject;
        let each = |entry_at: u64, entry: BitmapTableEntry| {
            let referred = entry.referred(&geometry);
            if let Some(error) = referred.fault {
                self.report(part.kind, entry_at, Remedy::None, || error.to_string());
            }
            if let Some(data) = referred.reference
                && self.is_inside(part.kind, entry_at, data.host.bytes(), data.len, true)
            {
                self.claim(data.target, data.host.bytes(), data.len, 1, Remedy::None);
            }
        };
        if let Err(error) = for_each_reference(file, part, each).await {
            self.report_unreadable(part.kind, part.offset.bytes(), Remedy::None, || error.to_string());
        }
    }
}
