//! Unlocking: of images that QEMU made, of our own headers, and after changes of key slots.

use std::time::Duration;

use super::*;
use crate::image::testing::World;

const FAST: Duration = Duration::from_millis(1);

fn secret(text: &str) -> Secret {
    Secret::new(text.as_bytes().to_vec())
}

fn fast() -> LuksOptions {
    LuksOptions {
        iter_time: FAST,
        ..LuksOptions::default()
    }
}

/// Sixteen sectors' bytes under a cipher: equal for equal keys only.
fn sample(cipher: &SectorCipher) -> Vec<u8> {
    let mut bytes = vec![0x5a; 16 * SECTOR];
    cipher.encrypt(1 << 40, &mut bytes);
    bytes
}

/// Applies the first `steps` steps of a change.
fn apply(header: &mut [u8], change: &SlotChange, steps: usize) {
    for write in change.steps.iter().take(steps).flatten() {
        header[write.at..write.at + write.bytes.len()].copy_from_slice(&write.bytes);
    }
}

fn opens(header: &[u8], text: &str) -> bool {
    match unlock(header, &secret(text)) {
        Ok(_) => true,
        Err(LuksError::WrongSecret) => false,
        Err(error) => panic!("{error}"),
    }
}

/// QEMU encrypts; the first cluster of data decrypts to what was written, with the IV of its host offset.
#[test]
fn images_made_by_qemu_unlock_and_decrypt() {
    let cases = [("aes-256", "sha256"), ("aes-128", "sha1"), ("aes-256", "sha512")];
    for (cipher, hash) in cases {
        let world = World::new();
        let options = format!(
            "encrypt.format=luks,encrypt.key-secret=key,encrypt.iter-time=10,encrypt.cipher-alg={cipher},\
             encrypt.hash-alg={hash}"
        );
        let object = ["--object", "secret,id=key,data=sesame"];
        let create = [
            "create", "-q", "-f", "qcow2", object[0], object[1], "-o", &options, "disk", "4M",
        ];
        world.qemu_img(&create);
        let image = "driver=qcow2,encrypt.key-secret=key,file.filename=disk";
        let write = [
            "--image-opts",
            image,
            object[0],
            object[1],
            "-c",
            "write -P 0x61 0 64k",
        ];
        let output = world.tool("qemu-io", &write);
        assert!(output.status.success(), "{output:?}");

        let bytes = std::fs::read(world.path("disk")).unwrap();
        let header = crate::format::Header::decode(&bytes).unwrap();
        let (offset, len) = header.crypto_header().expect("a header");
        let luks = &bytes[offset.bytes() as usize..][..len as usize];
        assert_eq!(
            unlock(luks, &secret("sesame\n")).unwrap_err(),
            LuksError::WrongSecret
        );
        let opened = unlock(luks, &secret("sesame")).unwrap();
        let info = describe(luks).unwrap();
        assert_eq!((info.cipher_alg, info.hash_alg), (cipher, hash));

        // The first L1 entry leads to the L2 table, its first entry to the data.
        let entry = |at: u64| {
            u64::from_be_bytes(*bytes[at as usize..].first_chunk().unwrap()) & 0x00ff_ffff_ffff_fe00
        };
        let host = entry(entry(header.l1_offset.bytes()));
        let mut data = bytes[host as usize..][..65536].to_vec();
        assert_ne!(data[..512], [0x61; 512]);
        opened.decrypt(host / 512, &mut data);
        assert!(data.iter().all(|&byte| byte == 0x61), "{cipher} {hash}");
    }
}

/// Method 1: QEMU encrypts with the IV of the guest offset.
#[test]
fn method_1_image_made_by_qemu_decrypts() {
    let world = World::new();
    let object = ["--object", "secret,id=key,data=a passphrase of more than 16"];
    let options = "encrypt.format=aes,encrypt.key-secret=key";
    world.qemu_img(&[
        "create", "-q", "-f", "qcow2", object[0], object[1], "-o", options, "disk", "4M",
    ]);
    let image = "driver=qcow2,encrypt.key-secret=key,file.filename=disk";
    let write = [
        "--image-opts",
        image,
        object[0],
        object[1],
        "-c",
        "write -P 0x61 1M 64k",
    ];
    let output = world.tool("qemu-io", &write);
    assert!(output.status.success(), "{output:?}");
    let bytes = std::fs::read(world.path("disk")).unwrap();
    let header = crate::format::Header::decode(&bytes).unwrap();
    let entry =
        |at: u64| u64::from_be_bytes(*bytes[at as usize..].first_chunk().unwrap()) & 0x00ff_ffff_ffff_fe00;
    let host = entry(entry(header.l1_offset.bytes()) + 16 * 8);
    let mut data = bytes[host as usize..][..65536].to_vec();
    aes_cbc(&secret("a passphrase of more than 16")).decrypt((1 << 20) / 512, &mut data);
    assert!(data.iter().all(|&byte| byte == 0x61));
}

#[test]
fn new_header_unlocks_with_its_secret_alone_and_to_the_same_cipher() {
    for cipher in [CipherKind::Aes128Xts, CipherKind::Aes256Xts] {
        for hash in [HashKind::Sha1, HashKind::Sha256, HashKind::Sha512] {
            let options = LuksOptions {
                cipher,
                hash,
                iter_time: FAST,
            };
            let (header, made) = create(&secret("one"), &options).unwrap();
            let opened = unlock(&header, &secret("one")).unwrap();
            assert_eq!(sample(&opened), sample(&made), "{cipher:?} {hash:?}");
            assert!(!opens(&header, "two"));
        }
    }
}

#[test]
fn two_headers_have_different_keys_and_salts() {
    let (a, cipher_a) = create(&secret("one"), &fast()).unwrap();
    let (b, cipher_b) = create(&secret("one"), &fast()).unwrap();
    assert_ne!(sample(&cipher_a), sample(&cipher_b));
    assert_ne!(a[132..164], b[132..164], "salt of the digest");
    assert_ne!(a[168..204], b[168..204], "UUID");
    assert_ne!(a[216..248], b[216..248], "salt of the slot");
}

#[test]
fn secrets_that_other_tools_refuse_are_refused() {
    for bytes in [vec![], vec![0xff, 0xfe]] {
        let new = Secret::new(bytes);
        let refused = |error| matches!(error, LuksError::Secret { .. });
        assert!(refused(create(&new, &fast()).unwrap_err()));
        let (header, _) = create(&secret("one"), &fast()).unwrap();
        assert!(refused(
            add_key(&header, &secret("one"), &new, None, FAST).unwrap_err()
        ));
    }
}

#[test]
fn added_secret_opens_the_same_volume_and_each_cut_keeps_the_old_one() {
    let (header, made) = create(&secret("one"), &fast()).unwrap();
    for slot in [None, Some(6), Some(7)] {
        let change = add_key(&header, &secret("one"), &secret("two"), slot, FAST).unwrap();
        assert_eq!(change.slot, slot.unwrap_or(1));
        let mut cut = header.clone();
        apply(&mut cut, &change, 1);
        assert!(opens(&cut, "one") && !opens(&cut, "two"), "the state comes last");
        let mut whole = header.clone();
        apply(&mut whole, &change, 2);
        assert!(opens(&whole, "one"));
        assert_eq!(sample(&unlock(&whole, &secret("two")).unwrap()), sample(&made));
    }
}

#[test]
fn all_slots_can_be_filled_and_no_used_one_is_taken() {
    let (mut header, _) = create(&secret("0"), &fast()).unwrap();
    for slot in 1..SLOTS {
        let change = add_key(&header, &secret("0"), &secret(&slot.to_string()), None, FAST).unwrap();
        assert_eq!(change.slot, slot);
        apply(&mut header, &change, 2);
    }
    let add = |slot| add_key(&header, &secret("0"), &secret("x"), slot, FAST).unwrap_err();
    assert_eq!(add(None), LuksError::NoFreeSlot);
    assert_eq!(add(Some(3)), LuksError::SlotInUse { slot: 3 });
    assert_eq!(add(Some(8)), LuksError::NoSuchSlot { slot: 8 });
    assert!((0..SLOTS).all(|slot| opens(&header, &slot.to_string())));
}

#[test]
fn add_needs_a_secret_that_opens_the_image() {
    let (header, _) = create(&secret("one"), &fast()).unwrap();
    let error = add_key(&header, &secret("no"), &secret("two"), None, FAST).unwrap_err();
    assert_eq!(error, LuksError::WrongSecret);
}

#[test]
fn removed_secret_opens_nothing_and_its_material_is_gone() {
    let (mut header, _) = create(&secret("one"), &fast()).unwrap();
    let change = add_key(&header, &secret("one"), &secret("two"), None, FAST).unwrap();
    apply(&mut header, &change, 2);
    let before = header.clone();

    let removal = remove_key(&header, &Removal::Of(&secret("one"))).unwrap();
    assert_eq!(removal.slot, 0);
    for steps in 1..=2 {
        let mut cut = before.clone();
        apply(&mut cut, &removal, steps);
        assert!(!opens(&cut, "one") && opens(&cut, "two"), "{steps}");
        // One that says it is in use and opens for nobody would count as the other slot when the last good one goes.
        assert!(!describe(&cut).unwrap().slots[0].active, "{steps}");
    }
    apply(&mut header, &removal, 2);
    // Nothing of the old material is left: putting the slot's fields back does not open it.
    let same = header[4096..][..256_000]
        .iter()
        .zip(&before[4096..])
        .filter(|(a, b)| a == b);
    assert!(same.count() < 4000);
    header[208..256].copy_from_slice(&before[208..256]);
    assert!(!opens(&header, "one"));
}

#[test]
fn removal_leaves_a_secret_that_opens_the_image() {
    let (header, _) = create(&secret("one"), &fast()).unwrap();
    let remove = |header: &[u8], removal: Removal<'_>| remove_key(header, &removal).map(|change| change.slot);
    let (one, two) = (secret("one"), secret("two"));
    assert_eq!(
        remove(&header, Removal::Of(&one)),
        Err(LuksError::LastSlot { slot: 0 })
    );
    assert_eq!(
        remove(&header, Removal::Slot(0, &one)),
        Err(LuksError::LastSlot { slot: 0 })
    );
    assert_eq!(
        remove(&header, Removal::Slot(1, &one)),
        Err(LuksError::SlotNotInUse { slot: 1 })
    );
    assert_eq!(
        remove(&header, Removal::Slot(8, &one)),
        Err(LuksError::NoSuchSlot { slot: 8 })
    );

    let mut header = header;
    let change = add_key(&header, &one, &two, Some(4), FAST).unwrap();
    apply(&mut header, &change, 2);
    assert_eq!(
        remove(&header, Removal::Of(&secret("no"))),
        Err(LuksError::WrongSecret)
    );
    // Slot 4 is removed by whoever keeps slot 0, and not by whoever has no other.
    assert_eq!(
        remove(&header, Removal::Slot(4, &two)),
        Err(LuksError::NoOtherSlot { slot: 4 })
    );
    assert_eq!(remove(&header, Removal::Slot(4, &one)), Ok(4));
}
