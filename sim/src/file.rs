//! One simulated file: the contents that readers see, the durable contents, and the versions in between.
//!
//! Each sector, and the length, has a list of versions written since its durable one, in the order in which
//! they took effect. A power cut leaves any one of them, independently for each sector. A sync makes durable,
//! sector by sector, the last version whose op had completed before the sync was submitted, and drops older
//! ones; younger versions stay open. After a failed sync the versions it covered may or may not have reached
//! the disk, and no later sync covers them. Readers still see them: a page that could not be written back is
//! clean again, as in Linux.
//!
//! Invariant: the durable version plus the open ones are all that a power cut can leave.

use std::collections::BTreeMap;

use super::image::{SECTOR, SectorId, SimImage, ZEROS};

/// A written version that is not known to be durable.
#[derive(Clone, Copy, Debug)]
pub(super) struct Version<T> {
    pub(super) value: T,
    op: u64,
    /// The time at which its op completed.
    completed: Option<u64>,
    /// A sync that covered it failed.
    forgotten: bool,
}

impl<T> Version<T> {
    fn new(value: T, op: u64) -> Self {
        Self {
            value,
            op,
            completed: None,
            forgotten: false,
        }
    }

    fn is_covered(&self, submitted: u64) -> bool {
        !self.forgotten && self.completed.is_some_and(|time| time < submitted)
    }
}

/// Removes the versions up to the last for which `durable` holds; returns that one's value.
fn settle<T: Copy>(versions: &mut Vec<Version<T>>, durable: impl Fn(&Version<T>) -> bool) -> Option<T> {
    let last = versions.iter().rposition(durable)?;
    let value = versions[last].value;
    versions.drain(..=last);
    Some(value)
}

/// The contents of a file and their history since they were durable.
#[derive(Debug)]
pub(super) struct Contents {
    pub(super) now: SimImage,
    pub(super) durable: SimImage,
    pub(super) sectors: BTreeMap<u64, Vec<Version<SectorId>>>,
    pub(super) lens: Vec<Version<u64>>,
    /// Sectors that have space on the host.
    reserved: Vec<bool>,
}

impl Contents {
    pub(super) fn new(image: SimImage) -> Self {
        let mut contents = Self {
            durable: image.clone(),
            now: image,
            sectors: BTreeMap::new(),
            lens: Vec::new(),
            reserved: Vec::new(),
        };
        contents.reserve(0, contents.now.len());
        contents
    }

    /// Makes everything written so far durable.
    pub(super) fn make_durable(&mut self) {
        self.sectors.clear();
        self.lens.clear();
        self.durable = self.now.clone();
    }

    fn put(&mut self, op: Option<u64>, sector: u64, id: SectorId) {
        self.now.set(sector, id);
        match op {
            Some(op) => {
                let versions = self.sectors.entry(sector).or_default();
                versions.push(Version::new(id, op));
            }
            None => self.durable.set(sector, id),
        }
    }

    fn lengthen(&mut self, op: Option<u64>, len: u64) {
        if len > self.now.len() {
            self.set_len(op, len);
        }
    }

    fn set_len(&mut self, op: Option<u64>, len: u64) {
        self.now.set_len(len);
        match op {
            Some(op) => self.lens.push(Version::new(len, op)),
            None => self.durable.set_len(len),
        }
    }

    /// Writes bytes for `op`; without an op, durably at once.
    pub(super) fn write(&mut self, op: Option<u64>, offset: u64, bytes: &[u8]) {
        self.reserve(offset, bytes.len() as u64);
        let mut done = 0;
        while done < bytes.len() {
            let at = offset + done as u64;
            let (sector, within) = (at / SECTOR as u64, (at % SECTOR as u64) as usize);
            let part = (SECTOR - within).min(bytes.len() - done);
            let mut new = [0; SECTOR];
            if part < SECTOR {
                new = self.now.store().sector(self.now.get(sector));
            }
            new[within..within + part].copy_from_slice(&bytes[done..done + part]);
            let id = self.now.store().intern(&new);
            self.put(op, sector, id);
            done += part;
        }
        let end = offset + bytes.len() as u64;
        let shorter = |version: &Version<u64>| version.value < end;
        if end > self.now.len() || op.is_some() && (end > self.durable.len() || self.lens.iter().any(shorter))
        {
            // A sync that covers the data covers the length needed to read it, whichever op set that; also if one before it makes a
            // length durable that the file had when it was shorter.
            self.set_len(op, end.max(self.now.len()));
        }
    }

    /// Makes a range read as zeros; the length stays.
    pub(super) fn zero(&mut self, op: Option<u64>, offset: u64, len: u64, keep_space: bool) {
        let end = (offset + len).min(self.now.len().next_multiple_of(SECTOR as u64));
        let mut at = offset;
        while at < end {
            let (sector, within) = (at / SECTOR as u64, (at % SECTOR as u64) as usize);
            let part = ((SECTOR - within) as u64).min(end - at);
            if part < SECTOR as u64 {
                let mut new = self.now.store().sector(self.now.get(sector));
                new[within..within + part as usize].fill(0);
                let id = self.now.store().intern(&new);
                self.put(op, sector, id);
            } else {
                self.put(op, sector, ZEROS);
                if !keep_space && let Some(place) = self.reserved.get_mut(sector as usize) {
                    *place = false;
                }
            }
            at += part;
        }
    }

    /// Reserves space and, unless `keep_size`, extends the file to the end of the range.
    pub(super) fn preallocate(&mut self, op: Option<u64>, offset: u64, len: u64, keep_size: bool) {
        self.reserve(offset, len);
        if !keep_size {
            self.lengthen(op, offset + len);
        }
    }

    /// Sets the length. Bytes cut off read as zeros if the file grows again.
    pub(super) fn truncate(&mut self, op: Option<u64>, len: u64) {
        let old = self.now.len();
        if len < old {
            self.zero(op, len, old.next_multiple_of(SECTOR as u64) - len, false);
        }
        self.set_len(op, len);
    }

    fn reserve(&mut self, offset: u64, len: u64) {
        let (first, end) = sectors_of(offset, len);
        if self.reserved.len() < end as usize {
            self.reserved.resize(end as usize, false);
        }
        self.reserved[first as usize..end as usize].fill(true);
    }

    /// Returns true if a range can be written without more space.
    pub(super) fn has_space(&self, offset: u64, len: u64) -> bool {
        let (first, end) = sectors_of(offset, len);
        (first..end).all(|sector| self.reserved.get(sector as usize) == Some(&true))
    }

    /// Records the completion of op `op`, which touched this range.
    pub(super) fn complete(&mut self, op: u64, offset: u64, len: u64, time: u64) {
        let (first, end) = sectors_of(offset, len);
        for (_, versions) in self.sectors.range_mut(first..end) {
            let own = versions.iter_mut().filter(|version| version.op == op);
            own.for_each(|version| version.completed = Some(time));
        }
        let own = self.lens.iter_mut().filter(|version| version.op == op);
        own.for_each(|version| version.completed = Some(time));
    }

    /// Marks the versions of all ops but these as completed, whatever their results were.
    pub(super) fn complete_ended(&mut self, in_flight: &[u64], time: u64) {
        let ended = |op: u64, completed: &mut Option<u64>| {
            if completed.is_none() && !in_flight.contains(&op) {
                *completed = Some(time);
            }
        };
        for version in self.sectors.values_mut().flatten() {
            ended(version.op, &mut version.completed);
        }
        for version in &mut self.lens {
            ended(version.op, &mut version.completed);
        }
    }

    /// Makes the range that op `op` wrote durable, and the length needed to read it back.
    pub(super) fn force(&mut self, op: u64, offset: u64, len: u64) {
        let (first, end) = sectors_of(offset, len);
        for (&sector, versions) in self.sectors.range_mut(first..end) {
            if let Some(id) = settle(versions, |version| version.op == op) {
                self.durable.set(sector, id);
            }
        }
        self.sectors.retain(|_, versions| !versions.is_empty());
        if self.durable.len() < offset + len
            && let Some(index) = self.lens.iter().position(|version| version.value >= offset + len)
        {
            self.durable.set_len(self.lens[index].value);
            self.lens.drain(..=index);
        }
    }

    /// Applies the success of a sync that was submitted at `submitted`, to the writes of ops that it `covers`.
    pub(super) fn sync(&mut self, submitted: u64, covers: impl Fn(u64) -> bool) {
        for (&sector, versions) in &mut self.sectors {
            let durable = |version: &Version<_>| version.is_covered(submitted) && covers(version.op);
            if let Some(id) = settle(versions, durable) {
                self.durable.set(sector, id);
            }
        }
        self.sectors.retain(|_, versions| !versions.is_empty());
        if let Some(len) = settle(&mut self.lens, |version| version.is_covered(submitted)) {
            self.durable.set_len(len);
        }
    }

    /// Applies the failure of a sync that was submitted at `submitted`: each version it covered is forgotten
    /// if `lost` returns true, and may still be written back otherwise.
    pub(super) fn fail_sync(&mut self, submitted: u64, mut lost: impl FnMut() -> bool) {
        for versions in self.sectors.values_mut() {
            for version in versions
                .iter_mut()
                .filter(|version| version.is_covered(submitted))
            {
                version.forgotten = lost();
            }
        }
        for version in self
            .lens
            .iter_mut()
            .filter(|version| version.is_covered(submitted))
        {
            version.forgotten = lost();
        }
    }
}

/// Returns the sectors that a range of bytes touches: the first, and the one after the last.
fn sectors_of(offset: u64, len: u64) -> (u64, u64) {
    let first = offset / SECTOR as u64;
    (first, (offset + len).div_ceil(SECTOR as u64).max(first))
}

#[cfg(test)]
mod tests {
    use super::super::image::Store;
    use super::*;

    const LEN: u64 = SECTOR as u64;

    /// The file was cut; what set its new length is in flight when a write inside that length is synced.
    #[test]
    fn sync_keeps_data_behind_an_older_cut() {
        let mut contents = Contents::new(SimImage::new(&Store::default()));
        contents.write(None, 0, &[1; 8 * SECTOR]);
        contents.truncate(Some(1), 2 * LEN);
        contents.complete(1, 2 * LEN, 6 * LEN, 1);
        contents.preallocate(Some(2), 3 * LEN, 9 * LEN, false);
        contents.write(Some(3), 2 * LEN, &[7; SECTOR]);
        contents.complete(3, 2 * LEN, LEN, 3);
        // The first was submitted before the write.
        contents.sync(2, |_| true);
        assert_eq!(contents.durable.len(), 2 * LEN);
        contents.sync(4, |_| true);
        assert!(contents.durable.len() >= 3 * LEN, "{}", contents.durable.len());
        let kept = contents.durable.store().sector(contents.durable.get(2));
        assert_eq!(kept, [7; SECTOR]);
    }
}
