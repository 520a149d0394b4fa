//! The log of dm-log-writes: what reached a device, in the order in which it became durable.
//!
//! The kernel logs a write when a FLUSH that covers it has ended (a FUA write when it has itself ended), so each prefix
//! of the log that ends with a FLUSH is what a disk with a volatile cache must keep. On disk (`drivers/md/dm-log-writes.c`):
//! a super block, then for each entry a sector with its header, and the data behind it. All numbers are little-endian, and
//! count sectors of the size that the super block names.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use crate::Error;

const MAGIC: u64 = 0x006a_7366_7773_6872;
const VERSION: u64 = 1;

const FLUSH: u64 = 1 << 0;
const FUA: u64 = 1 << 1;
const DISCARD: u64 = 1 << 2;
const MARK: u64 = 1 << 3;

/// The bytes of an entry's header that mean something; a mark's text follows.
const HEADER_BYTES: usize = 32;
/// The mark that the kernel logs when the device is removed. A log without it has stopped before.
const END: &str = "dm-log-writes-end";

/// One thing that reached the device, or was said to the log.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Entry {
    /// Bytes written at a byte offset; `fua` if they were durable when the write ended.
    Write {
        /// The offset, in bytes.
        at: u64,
        /// The bytes written.
        data: Vec<u8>,
        /// True if the write was durable by itself.
        fua: bool,
    },
    /// A range whose contents do not matter any more, in bytes.
    Discard {
        /// The offset at which it begins.
        at: u64,
        /// Its length.
        len: u64,
    },
    /// A FLUSH that has ended: every entry before it is durable.
    Flush,
    /// The text of a `dmsetup message DEVICE 0 mark TEXT`.
    Mark(String),
}

/// The entries of a log, oldest first.
///
/// # Errors
///
/// [`Error::WriteLog`] if it is not a log, is cut off, or was not ended by removing the device; [`Error::File`].
pub fn read(path: &Path) -> Result<Vec<Entry>, Error> {
    let reader = Reader::open(path)?;
    let mut entries = Vec::new();
    let mut at = reader.sector;
    for _ in 0..reader.count {
        at = reader.entry(at, &mut entries)?;
    }
    match entries.pop() {
        Some(Entry::Mark(text)) if text == END => Ok(entries),
        last => Err(reader.wrong(
            at,
            format!("the last entry is {last:?}, not the mark {END:?}: the log ran out of room, or its device was not removed"),
        )),
    }
}

struct Reader<'a> {
    path: &'a Path,
    file: File,
    count: u64,
    sector: u64,
}

impl<'a> Reader<'a> {
    fn open(path: &'a Path) -> Result<Self, Error> {
        let file = File::open(path).map_err(|source| Error::File {
            action: "open",
            path: path.to_owned(),
            source,
        })?;
        let mut reader = Self {
            path,
            file,
            count: 0,
            sector: 0,
        };
        let head = reader.bytes(0, HEADER_BYTES)?;
        let (magic, version) = (word(&head, 0), word(&head, 8));
        if (magic, version) != (MAGIC, VERSION) {
            return Err(reader.wrong(
                0,
                format!("magic {magic:#x}, version {version}: a log has {MAGIC:#x}, {VERSION}"),
            ));
        }
        reader.count = word(&head, 16);
        reader.sector = word(&head, 24) & u64::from(u32::MAX);
        if !matches!(reader.sector, 512 | 1024 | 2048 | 4096) {
            return Err(reader.wrong(24, format!("sectors of {} bytes", reader.sector)));
        }
        Ok(reader)
    }

    /// Appends the entry whose header is at `at`, and returns where the next one is.
    fn entry(&self, at: u64, entries: &mut Vec<Entry>) -> Result<u64, Error> {
        let head = self.bytes(at, self.sector as usize)?;
        let [first, sectors, flags, text] = [0, 8, 16, 24].map(|field| word(&head, field));
        if flags & MARK != 0 {
            let end = usize::try_from(text).map_or(usize::MAX, |text| HEADER_BYTES.saturating_add(text));
            let Some(text) = head.get(HEADER_BYTES..end) else {
                return Err(self.wrong(
                    at,
                    format!("a mark of {text} bytes in a sector of {}", self.sector),
                ));
            };
            entries.push(Entry::Mark(String::from_utf8_lossy(text).into_owned()));
            return Ok(at + self.sector);
        }
        let (Some(begin), Some(len)) = (
            first.checked_mul(self.sector),
            sectors.checked_mul(self.sector).filter(|len| *len < 1 << 30),
        ) else {
            return Err(self.wrong(at, format!("{sectors} sectors from sector {first} on")));
        };
        // What a FLUSH with data covers came before the data.
        if flags & FLUSH != 0 {
            entries.push(Entry::Flush);
        }
        let mut next = at + self.sector;
        if flags & DISCARD != 0 {
            entries.push(Entry::Discard { at: begin, len });
        } else if len > 0 {
            entries.push(Entry::Write {
                at: begin,
                data: self.bytes(next, len as usize)?,
                fua: flags & FUA != 0,
            });
            next += len;
        }
        Ok(next)
    }

    fn bytes(&self, at: u64, len: usize) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; len];
        match self.file.read_exact_at(&mut bytes, at) {
            Ok(()) => Ok(bytes),
            Err(error) => Err(self.wrong(at, format!("{len} bytes cannot be read: {error}"))),
        }
    }

    fn wrong(&self, offset: u64, problem: String) -> Error {
        Error::WriteLog {
            path: self.path.to_owned(),
            offset,
            problem,
        }
    }
}

fn word(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Scratch;

    /// A log as the kernel writes it, with `count` in its super block.
    fn log(sector: u64, count: u64, entries: &[(u64, u64, u64, &[u8])]) -> (Scratch, Vec<u8>) {
        let mut bytes = Vec::new();
        let mut sectors = |words: &[u64], data: &[u8]| {
            let mut part: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            part.extend_from_slice(data);
            part.resize(part.len().next_multiple_of(sector as usize), 0);
            bytes.append(&mut part);
        };
        sectors(&[MAGIC, VERSION, count, sector], &[]);
        for &(first, length, flags, data) in entries {
            if flags & MARK != 0 {
                sectors(&[0, 0, flags, data.len() as u64], data);
            } else {
                sectors(&[first, length, flags, 0], &[]);
                sectors(&[], data);
            }
        }
        (Scratch::new().unwrap(), bytes)
    }

    fn parse(scratch: &Scratch, bytes: &[u8]) -> Result<Vec<Entry>, Error> {
        let path = scratch.file("log");
        std::fs::write(&path, bytes).unwrap();
        read(&path)
    }

    const END_MARK: (u64, u64, u64, &[u8]) = (0, 0, MARK, END.as_bytes());

    #[test]
    fn parse_reads_entries_in_order_with_byte_offsets() {
        for sector in [512_u64, 4096] {
            let data = vec![7; 2 * sector as usize];
            let (scratch, bytes) = log(
                sector,
                6,
                &[
                    (5, 2, 0, &data),
                    (8, 4, DISCARD, &[]),
                    (0, 0, FLUSH, &[]),
                    (1, 1, FLUSH | FUA, &data[..sector as usize]),
                    (0, 0, MARK, b"12"),
                    END_MARK,
                ],
            );
            let entries = parse(&scratch, &bytes).unwrap();
            let write = |at, len, fua| Entry::Write {
                at,
                data: vec![7; len as usize],
                fua,
            };
            let (at, len) = (8 * sector, 4 * sector);
            assert_eq!(
                entries,
                [
                    write(5 * sector, 2 * sector, false),
                    Entry::Discard { at, len },
                    Entry::Flush,
                    Entry::Flush,
                    write(sector, sector, true),
                    Entry::Mark("12".to_owned()),
                ]
            );
        }
    }

    #[test]
    fn parse_refuses_a_damaged_or_unfinished_log_with_its_offset() {
        let write: (u64, u64, u64, &[u8]) = (1, 1, 0, &[1; 512]);
        let (scratch, whole) = log(512, 2, &[write, END_MARK]);
        assert_eq!(parse(&scratch, &whole).unwrap().len(), 1);
        let refused = |bytes: &[u8], offset: u64, text: &str| {
            let message = parse(&scratch, bytes).unwrap_err().to_string();
            assert!(
                message.contains(&format!("offset {offset}:")) && message.contains(text),
                "{message}"
            );
        };
        refused(&whole[..1500], 1024, "cannot be read");
        refused(&log(512, 1, &[write, END_MARK]).1, 1536, "not the mark");
        refused(&[0; 512], 0, "magic");
        let mut sectors = whole.clone();
        sectors[24] = 1;
        refused(&sectors, 24, "sectors of");
        let mut long = whole.clone();
        long[512 + 14] = 1;
        refused(&long, 512, "sectors from sector 1 on");
        let (_, mut mark) = log(512, 1, &[END_MARK]);
        mark[512 + 25] = 2;
        refused(&mark, 512, "a mark of");
    }
}
