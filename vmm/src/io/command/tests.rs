//! Every command, flag and refusal of the language.

use super::*;

fn parse(line: &str) -> Command {
    Command::parse(line)
        .unwrap_or_else(|error| panic!("{line}: {error}"))
        .expect("a command")
}

fn refused(line: &str) -> String {
    Command::parse(line).map_or_else(|error| error.to_string(), |found| panic!("{line}: {found:?}"))
}

fn transfer(transfer: Transfer, offset: u64, len: u64) -> Command {
    let name = match transfer {
        Transfer::Read { .. } => "read",
        Transfer::Write { .. } => "write",
        Transfer::Discard => "discard",
    };
    Command::Transfer {
        name,
        transfer,
        range: Range { offset, len },
        quiet: false,
        background: false,
    }
}

const READ: Transfer = Transfer::Read {
    check: None,
    dump: false,
};
const PATTERN: Transfer = Transfer::Write {
    content: Content::Pattern(DEFAULT_PATTERN),
    fua: false,
};

#[test]
fn parse_reads_plain_commands() {
    assert_eq!(parse("read 0 64k"), transfer(READ, 0, 65536));
    assert_eq!(parse("  write\t0x200   1.5k "), transfer(PATTERN, 512, 1536));
    assert_eq!(
        parse("discard 1M 2G"),
        transfer(Transfer::Discard, 1 << 20, 2 << 30)
    );
    let readv = Command::Transfer {
        name: "readv",
        transfer: READ,
        range: Range { offset: 1, len: 9 },
        quiet: false,
        background: false,
    };
    assert_eq!(parse("readv 1 2 3 4"), readv);
    assert_eq!(parse("flush"), Command::Flush);
    assert_eq!(parse("aio_flush"), Command::AioFlush);
    assert_eq!(parse("length"), Command::Length);
    assert_eq!(parse("help read"), Command::Help);
    assert_eq!((parse("quit"), parse("q")), (Command::Quit, Command::Quit));
    assert_eq!(Command::parse("  "), Ok(None));
}

#[test]
fn parse_takes_joined_and_trailing_flags_with_values() {
    let expected = Command::Transfer {
        name: "write",
        transfer: Transfer::Write {
            content: Content::Zeroes { unmap: true },
            fua: true,
        },
        range: Range { offset: 0, len: 512 },
        quiet: true,
        background: false,
    };
    for line in [
        "write -z -u -f -q 0 512",
        "write -zufq 0 512",
        "write 0 -zq 512 -uf",
    ] {
        assert_eq!(parse(line), expected, "{line}");
    }
    let pattern = Transfer::Write {
        content: Content::Pattern(0xaa),
        fua: false,
    };
    for line in [
        "write -P 0xaa 0 4",
        "write -P0xaa 0 4",
        "write -P 170 0 4",
        "write 0 4 -P 1 -P 0xAA",
    ] {
        assert_eq!(parse(line), transfer(pattern, 0, 4), "{line}");
    }
}

#[test]
fn aio_commands_take_the_flags_of_read_and_write() {
    let expected = |name, transfer| Command::Transfer {
        name,
        transfer,
        range: Range { offset: 8, len: 3 },
        quiet: true,
        background: true,
    };
    let check = Some(Check {
        pattern: 5,
        start: 0,
        len: 3,
    });
    assert_eq!(
        parse("aio_read -qv -P 5 8 1 2"),
        expected("aio_read", Transfer::Read { check, dump: true })
    );
    let zeroes = Transfer::Write {
        content: Content::Zeroes { unmap: false },
        fua: true,
    };
    assert_eq!(parse("aio_write -qzf 8 3"), expected("aio_write", zeroes));
}

#[test]
fn read_verifies_a_part_inside_its_range() {
    let check = |start, len| {
        Some(Check {
            pattern: 1,
            start,
            len,
        })
    };
    let read = |check| transfer(Transfer::Read { check, dump: false }, 0, 100);
    assert_eq!(parse("read -P 1 0 100"), read(check(0, 100)));
    assert_eq!(parse("read -P 1 -s 10 0 100"), read(check(10, 90)));
    assert_eq!(parse("read -P 1 -s 10 -l 20 0 100"), read(check(10, 20)));
    assert_eq!(parse("read -P 1 -s 100 0 100"), read(check(100, 0)));
    for line in [
        "read -P 1 -s 101 0 100",
        "read -P 1 -s 10 -l 91 0 100",
        "read -P 1 -l 101 0 100",
    ] {
        assert_eq!(
            refused(line),
            "read: the range to verify lies outside what is read",
            "{line}"
        );
    }
    assert_eq!(
        refused("read -s 1 0 100"),
        "read: -s and -l are only for use with -P"
    );
}

#[test]
fn parse_error_says_what_would_be_valid() {
    for (line, message) in [
        ("frob 1", "command \"frob\" not found; `help` lists the commands"),
        (
            "read",
            "read: bad argument count 0; usage: read [-qv] [-P pattern [-s off] [-l len]] off len",
        ),
        ("flush 1", "flush: bad argument count 1; usage: flush"),
        (
            "discard 1 2 3",
            "discard: bad argument count 3; usage: discard [-q] off len",
        ),
        (
            "writev -z 0 1",
            "writev: unknown flag -z; usage: writev [-fq] [-P pattern] off len [len..]",
        ),
        (
            "discard -é 0 1",
            "discard: unknown flag -é; usage: discard [-q] off len",
        ),
        (
            "write 0 1 -P",
            "write: -P needs a value; usage: write [-fquz] [-P pattern] off len",
        ),
        (
            "discard -1 5",
            "discard: unknown flag -1; usage: discard [-q] off len",
        ),
        (
            "discard x 5",
            "discard: offset `x`: not a number of bytes with an optional K, M, G, T, P or E",
        ),
        (
            "discard 5 0.3",
            "discard: length `0.3`: not a whole number of bytes",
        ),
        (
            "write -z -P 1 0 1",
            "write: -z and -P cannot be specified at the same time",
        ),
        ("write -u 0 1", "write: -u requires -z to be specified"),
        (
            "aio_read 0 2G",
            "aio_read: length cannot exceed 2147483136, given 2147483648",
        ),
    ] {
        assert_eq!(refused(line), message);
    }
    for pattern in ["256", "0x100", "-1", "1k", "x", "0.5", "1b"] {
        let message =
            format!("read: `{pattern}` is not a valid pattern byte; -P takes 0 to 255 or 0x0 to 0xff");
        assert_eq!(refused(&format!("read -P {pattern} 0 1")), message);
    }
}

#[test]
fn parse_refuses_lengths_whose_sum_is_too_large() {
    assert!(refused("discard 7E 9E").contains("more bytes than a file can hold"));
    assert!(refused("aio_write -z 0 7E 7E 7E").contains("length cannot exceed"));
    // Zeros and discards are not held in memory.
    assert_eq!(parse("discard 0 4G"), transfer(Transfer::Discard, 0, 4 << 30));
}

#[test]
fn help_lists_every_command() {
    for spec in SPECS {
        assert!(help().contains(&format!("{} -- ", spec.usage)), "{}", spec.name);
    }
}
