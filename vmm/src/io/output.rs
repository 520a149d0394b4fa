//! The output of `ringdisk io`, in the format of `qemu-io`, so that scripts for one can read the other.

use std::time::Duration;

use super::command::{Check, Range};
use crate::size::{UNITS, human, in_unit};

/// The two lines after a finished transfer: what was moved, and how fast.
///
/// `verb` is `read`, `wrote` or `discard`.
#[must_use]
pub fn report(verb: &str, range: Range, took: Duration) -> String {
    // A clock that did not move is no reason to divide by zero.
    let seconds = took.as_secs_f64().max(1e-9);
    let rate = range.len as f64 / seconds;
    format!(
        "{verb} {len}/{len} bytes at offset {offset}\n{size}, 1 ops; {time} ({rate}/sec and {ops:.4} ops/sec)\n",
        len = range.len,
        offset = range.offset,
        size = human(range.len),
        time = clock(took),
        rate = human_rate(rate),
        ops = 1.0 / seconds,
    )
}

/// The line of `map` for a range that is allocated in the disk's own image, or that is not.
#[must_use]
pub fn mapped(range: Range, allocated: bool) -> String {
    format!(
        "{} ({:#x}) bytes {} at offset {} ({:#x})\n",
        human(range.len),
        range.len,
        if allocated {
            "    allocated"
        } else {
            "not allocated"
        },
        human(range.offset),
        range.offset,
    )
}

/// `00.25 sec` below a minute, `1:02:03.25` from then on.
fn clock(took: Duration) -> String {
    let (seconds, hundredths) = (took.as_secs(), took.subsec_millis() / 10);
    if seconds < 60 {
        return format!("{seconds:02}.{hundredths:02} sec");
    }
    format!(
        "{}:{:02}:{:02}.{hundredths:02}",
        seconds / 3600,
        seconds / 60 % 60,
        seconds % 60
    )
}

fn human_rate(bytes_per_second: f64) -> String {
    let (mut value, mut unit) = (bytes_per_second, 0);
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    in_unit(value, UNITS[unit])
}

/// Compares `data`, read from `range`, with `check`. Returns the line to print if it differs.
///
/// # Errors
///
/// The line, with its end, naming the first byte of the disk that was verified.
pub fn verify(data: &[u8], range: Range, check: Check) -> Result<(), String> {
    let found = usize::try_from(check.start)
        .ok()
        .zip(usize::try_from(check.len).ok())
        .and_then(|(start, len)| data.get(start..start.checked_add(len)?));
    if found.is_some_and(|part| part.iter().all(|byte| *byte == check.pattern)) {
        return Ok(());
    }
    let offset = range.offset.saturating_add(check.start);
    Err(format!(
        "Pattern verification failed at offset {offset}, {} bytes\n",
        check.len
    ))
}

/// The bytes in hexadecimal and as text, sixteen a line, with their offsets on the disk. Of the text only letters and
/// digits are shown.
#[must_use]
pub fn dump(data: &[u8], offset: u64) -> String {
    let mut text = String::new();
    for (at, line) in (0_u64..).step_by(16).zip(data.chunks(16)) {
        let hex: String = line.iter().map(|byte| format!("{byte:02x} ")).collect();
        let shown: String = line
            .iter()
            .map(|&byte| {
                if byte.is_ascii_alphanumeric() {
                    char::from(byte)
                } else {
                    '.'
                }
            })
            .collect();
        text += &format!("{:08x}:  {hex} {shown}\n", offset.saturating_add(at));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANGE: Range = Range {
        offset: 512,
        len: 65536,
    };

    #[test]
    fn report_matches_qemu_io() {
        assert_eq!(
            report("read", RANGE, Duration::from_millis(250)),
            "read 65536/65536 bytes at offset 512\n64 KiB, 1 ops; 00.25 sec (256 KiB/sec and 4.0000 ops/sec)\n"
        );
        assert!(report("wrote", RANGE, Duration::from_secs(3723)).contains(" 1:02:03.00 "));
        assert!(
            report("wrote", RANGE, Duration::ZERO).starts_with("wrote 65536/65536 bytes at offset 512\n")
        );
    }

    #[test]
    fn verify_checks_exactly_its_range() {
        let mut data = vec![7; 16];
        data[3] = 8;
        let check = |start, len| {
            verify(
                &data,
                RANGE,
                Check {
                    pattern: 7,
                    start,
                    len,
                },
            )
        };
        assert_eq!(check(4, 12), Ok(()));
        assert_eq!(check(0, 3), Ok(()));
        assert_eq!(check(0, 0), Ok(()));
        assert_eq!(
            check(0, 16),
            Err("Pattern verification failed at offset 512, 16 bytes\n".to_owned())
        );
        assert_eq!(
            check(2, 2),
            Err("Pattern verification failed at offset 514, 2 bytes\n".to_owned())
        );
        assert!(check(4, 13).is_err(), "beyond what was read");
    }

    #[test]
    fn dump_prints_16_bytes_per_line() {
        assert_eq!(
            dump(b"ABCDEFGHIJKLMNOP\x00\xaaq :/", 0x20),
            "00000020:  41 42 43 44 45 46 47 48 49 4a 4b 4c 4d 4e 4f 50  ABCDEFGHIJKLMNOP\n\
             00000030:  00 aa 71 20 3a 2f  ..q...\n"
        );
        assert_eq!(dump(b"", 0), "");
    }
}
