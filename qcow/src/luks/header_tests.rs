//! Headers: round trips, and a refusal by name of every malformed field.

use super::header::{FIELDS_BYTES, LuksHeader};
use super::*;

/// A sound header with one slot in use, and room for all material.
fn sound() -> Vec<u8> {
    let mut header = LuksHeader::new(CipherKind::Aes256Xts, HashKind::Sha256);
    header.digest_iterations = 1000;
    header.slots[0].active = true;
    header.slots[0].iterations = 1000;
    header.slots[0].salt = [3; 32];
    header.uuid[..4].copy_from_slice(b"abcd");
    let mut bytes = header.encode();
    bytes.resize(header.total_bytes(), 0);
    bytes
}

#[test]
fn parse_undoes_encode() {
    for cipher in [CipherKind::Aes128Xts, CipherKind::Aes256Xts] {
        for hash in [HashKind::Sha1, HashKind::Sha256, HashKind::Sha512] {
            let mut header = LuksHeader::new(cipher, hash);
            header.digest = [1; 20];
            header.digest_salt = [2; 32];
            header.digest_iterations = 77;
            header.slots[7].active = true;
            header.slots[7].iterations = ITERATIONS_MAX;
            let mut bytes = header.encode();
            bytes.resize(header.total_bytes(), 0);
            assert_eq!(LuksHeader::parse(&bytes), Ok(header));
        }
    }
}

#[test]
fn new_header_lies_as_qemu_lays_it_out() {
    let header = LuksHeader::new(CipherKind::Aes256Xts, HashKind::Sha256);
    assert_eq!(header.total_bytes(), 2_068_480);
    assert_eq!(header.slots[0].material_start(), 4096);
    assert_eq!(header.slots[1].material_start(), 4096 + 504 * 512);
}

#[test]
fn every_malformed_field_is_refused_by_name() {
    let slot = |index: usize| 208 + 48 * index;
    let u32s = |value: u32| value.to_be_bytes().to_vec();
    let first_of_1 = u32::from_be_bytes(*sound()[slot(1) + 40..].first_chunk().unwrap());
    let cases: Vec<(usize, Vec<u8>, &str)> = vec![
        (0, b"LUKS\xba\xbf".to_vec(), "magic (byte 0)"),
        (6, vec![0, 2], "version (byte 6) is 2; expected 1"),
        (6, vec![0, 0], "version (byte 6) is 0"),
        (8, b"serpent".to_vec(), "cipher is `serpent`"),
        (8, vec![b'a'; 32], "name (byte 8)"),
        (8, vec![0xff; 4], "name (byte 8)"),
        (40, b"cbc-essiv:sha256".to_vec(), "mode is `cbc-essiv:sha256`"),
        (40, b"xts-plain\0".to_vec(), "mode is `xts-plain`"),
        (72, b"ripemd160".to_vec(), "hash is `ripemd160`"),
        (72, vec![0], "hash is ``"),
        (104, u32s(0), "payload sector (byte 104) is 0"),
        (104, u32s(4035), "material sector of key slot 7"),
        (104, u32s(4041), "payload sector (byte 104) is 4041"),
        (104, u32s(u32::MAX), "payload sector (byte 104)"),
        (108, u32s(0), "key bytes (byte 108) is 0"),
        (108, u32s(48), "key bytes (byte 108) is 48"),
        (108, u32s(u32::MAX), "key bytes (byte 108)"),
        (164, u32s(0), "iterations of the key's digest (byte 164) is 0"),
        (
            164,
            u32s(ITERATIONS_MAX + 1),
            "is 67108865; expected 1 to 67108864",
        ),
        (slot(0), u32s(1), "state of key slot 0 (byte 208) is 0x1"),
        (slot(0) + 4, u32s(0), "iterations of key slot 0 (byte 212) is 0"),
        (
            slot(0) + 4,
            u32s(u32::MAX),
            "iterations of key slot 0 (byte 212) is 4294967295; expected 1 to",
        ),
        (
            slot(5) + 44,
            u32s(3999),
            "stripes of key slot 5 (byte 492) is 3999; expected 4000",
        ),
        (slot(5) + 44, u32s(u32::MAX), "stripes of key slot 5"),
        (
            slot(0) + 40,
            u32s(0),
            "material sector of key slot 0 (byte 248) is 0",
        ),
        (
            slot(0) + 40,
            u32s(1),
            "material sector of key slot 0 (byte 248) is 1",
        ),
        (slot(7) + 40, u32s(u32::MAX), "material sector of key slot 7"),
        (
            slot(2) + 40,
            u32s(first_of_1),
            "a place apart from that of key slot 1",
        ),
        (
            slot(2) + 40,
            u32s(first_of_1 + 499),
            "a place apart from that of key slot 1",
        ),
        (slot(1) + 40, u32s(first_of_1 + 100), "of key slot 2 (byte 344)"),
    ];
    for (at, bytes, expected) in cases {
        let mut header = sound();
        header[at..at + bytes.len()].copy_from_slice(&bytes);
        let error = describe(&header).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}; expected {expected}");
        assert_eq!(
            unlock(&header, &Secret::new(vec![1]))
                .expect_err(expected)
                .to_string(),
            error
        );
    }
}

#[test]
fn header_cut_anywhere_is_refused() {
    let whole = sound();
    for len in (0..FIELDS_BYTES + 100).chain([whole.len() - 1]) {
        assert!(describe(&whole[..len]).is_err(), "{len}");
    }
    assert!(describe(&whole).is_ok());
}

#[test]
fn header_without_a_slot_in_use_opens_for_nobody() {
    let mut header = sound();
    header[208..212].copy_from_slice(&Slot::state(false));
    let error = unlock(&header, &Secret::new(vec![1])).expect_err("no slot");
    assert_eq!(error, LuksError::NoSlot);
}

/// A header whose slots in use want so many iterations each, with a digest of one.
fn wanting(cipher: CipherKind, hash: HashKind, iterations: &[(usize, u32)]) -> Vec<u8> {
    let mut header = LuksHeader::new(cipher, hash);
    header.digest_iterations = 1;
    for &(index, iterations) in iterations {
        header.slots[index].active = true;
        header.slots[index].iterations = iterations;
    }
    let mut bytes = header.encode();
    bytes.resize(header.total_bytes(), 0);
    bytes
}

/// Each slot alone is allowed; together they would keep a processor busy for many minutes.
#[test]
fn unlocking_stops_before_the_slot_that_costs_too_much() {
    let secret = Secret::new(vec![1]);
    // 2^26 iterations are four rounds each with SHA-1 and a key of 64 bytes: 2^28, and one for the digest.
    let slot_0 = wanting(CipherKind::Aes256Xts, HashKind::Sha1, &[(0, ITERATIONS_MAX)]);
    let error = unlock(&slot_0, &secret).expect_err("too much");
    let rounds = UNLOCK_ROUNDS_MAX + 1;
    let iterations = ITERATIONS_MAX;
    assert_eq!(
        error,
        LuksError::Cost {
            slot: 0,
            iterations,
            rounds
        }
    );
    let text = error.to_string();
    for part in [
        "67108864 iterations for key slot 0",
        "268435457 rounds",
        "at most 268435456",
    ] {
        assert!(text.contains(part), "{text}: {part}");
    }

    // Cheap slots are tried before one that is not; then nothing more is.
    let slots = [(1, 3), (4, 5), (5, ITERATIONS_MAX), (6, 7)];
    let started = std::time::Instant::now();
    let late = wanting(CipherKind::Aes256Xts, HashKind::Sha1, &slots);
    let rounds = 4 * (3 + 5 + u64::from(ITERATIONS_MAX)) + 3;
    assert_eq!(
        unlock(&late, &secret).expect_err("too much"),
        LuksError::Cost {
            slot: 5,
            iterations,
            rounds
        }
    );
    assert!(started.elapsed().as_secs() < 20, "an hour's work was begun");
    assert!(describe(&late).is_ok(), "its fields can be read");

    let cheap = wanting(CipherKind::Aes128Xts, HashKind::Sha512, &[(0, 3), (7, 5)]);
    assert_eq!(
        unlock(&cheap, &secret).expect_err("no key"),
        LuksError::WrongSecret
    );
}

/// A slot that could never be tried, or that would shut out those behind it, is not made.
#[test]
fn slot_that_makes_unlocking_cost_too_much_is_not_added() {
    let fast = LuksOptions {
        iter_time: std::time::Duration::from_millis(1),
        ..LuksOptions::default()
    };
    let secret = |text: &str| Secret::new(text.as_bytes().to_vec());
    let (mut header, _) = create(&secret("one"), &fast).expect("a header");
    let add = |header: &[u8]| add_key(header, &secret("one"), &secret("two"), Some(7), fast.iter_time);
    assert!(add(&header).is_ok());
    // Another slot is in use and costs nearly all there is.
    let costly = Slot::start(3);
    header[costly..costly + 4].copy_from_slice(&Slot::state(true));
    header[costly + 4..costly + 8].copy_from_slice(&ITERATIONS_MAX.to_be_bytes());
    assert!(add(&header).is_ok(), "two rounds for each iteration: half of all");
    header[costly - 48..costly - 44].copy_from_slice(&Slot::state(true));
    header[costly - 44..costly - 40].copy_from_slice(&ITERATIONS_MAX.to_be_bytes());
    let error = add(&header).expect_err("too much");
    assert!(matches!(error, LuksError::NewCost { slot: 7, rounds, .. } if rounds > UNLOCK_ROUNDS_MAX));
    assert!(error.to_string().contains("ask for a shorter time"), "{error}");
}
