//! LUKS headers beside `cryptsetup`: it describes and opens ours, and we open its.

use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use crate::common::{Folder, create};
use qcow::format::Header;
use qcow::image::CreateOptions;
use qcow::luks::{
    self, CipherKind, HashKind, LuksInfo, LuksOptions, Removal, SECTOR, Secret, SlotChange, add_key,
    describe, remove_key, unlock,
};

/// Bytes of a volume behind a header: what opens it wants some.
const VOLUME: usize = 1 << 20;
const FAST: Duration = Duration::from_millis(1);

fn secret(text: &str) -> Secret {
    Secret::new(text.as_bytes().to_vec())
}

fn cryptsetup(folder: &Folder, args: &[&str]) -> Output {
    let output = Command::new("cryptsetup")
        .args(args)
        .current_dir(folder.path(""))
        .output();
    output
        .unwrap_or_else(|error| panic!("cannot run cryptsetup ({error}): install the package cryptsetup-bin"))
}

#[track_caller]
fn succeeds(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Returns the exit code of an attempt to open a slot, or any, of the volume `name` with a secret: 0 if it opens, 1 if the slot
/// is not in use, 2 for a wrong secret.
fn opens(folder: &Folder, name: &str, text: &str, slot: Option<usize>) -> Option<i32> {
    std::fs::write(folder.path("key"), text).expect("a key file");
    let slot = slot.map(|slot| slot.to_string());
    let mut args = vec!["open", "--test-passphrase", "--key-file", "key"];
    if let Some(slot) = &slot {
        args.extend(["--key-slot", slot]);
    }
    args.push(name);
    cryptsetup(folder, &args).status.code()
}

/// Returns the value behind a word that a line begins with, in what `cryptsetup luksDump` printed.
fn value<'a>(text: &'a str, word: &str) -> &'a str {
    let line = text
        .lines()
        .find_map(|line| line.trim_start().strip_prefix(word)?.strip_prefix(':'));
    line.unwrap_or_else(|| panic!("no {word} in {text}")).trim()
}

/// Checks that `cryptsetup luksDump` says of a header what we do.
fn assert_described_alike(folder: &Folder, name: &str, info: &LuksInfo) {
    let text = succeeds(&cryptsetup(folder, &["luksDump", name]));
    let key_bits = match info.cipher_alg {
        "aes-256" => "512",
        _ => "256",
    };
    let payload = (info.payload_offset / SECTOR as u64).to_string();
    let iterations = info.master_key_iters.to_string();
    for (word, expected) in [
        ("Version", "1"),
        ("Cipher name", "aes"),
        ("Cipher mode", "xts-plain64"),
        ("Hash spec", info.hash_alg),
        ("Payload offset", payload.as_str()),
        ("MK bits", key_bits),
        ("MK iterations", iterations.as_str()),
        ("UUID", info.uuid.as_str()),
    ] {
        assert_eq!(value(&text, word), expected, "{word} in {text}");
    }
    for (number, slot) in info.slots.iter().enumerate() {
        let word = format!("Key Slot {number}");
        let state = if slot.active { "ENABLED" } else { "DISABLED" };
        assert_eq!(value(&text, &word), state, "{word} in {text}");
        let (Some(iters), Some(stripes)) = (slot.iters, slot.stripes) else {
            continue;
        };
        let own = &text[text.find(&word).expect("it was found")..];
        assert_eq!(value(own, "Iterations"), iters.to_string());
        assert_eq!(value(own, "AF stripes"), stripes.to_string());
        let offset = (slot.key_offset / SECTOR as u64).to_string();
        assert_eq!(value(own, "Key material offset"), offset);
    }
}

fn apply(header: &mut [u8], change: &SlotChange) {
    for write in change.steps.iter().flatten() {
        header[write.at..write.at + write.bytes.len()].copy_from_slice(&write.bytes);
    }
}

/// Returns the LUKS header of an image of ours.
fn header_of(image: &Path) -> Vec<u8> {
    let bytes = std::fs::read(image).expect("an image");
    let header = Header::decode(&bytes).expect("a header");
    let (offset, len) = header.crypto_header().expect("a LUKS header");
    bytes[offset.bytes() as usize..][..len as usize].to_vec()
}

#[test]
fn headers_of_our_images_are_described_and_opened_by_cryptsetup() {
    let kinds = [
        (CipherKind::Aes256Xts, HashKind::Sha256),
        (CipherKind::Aes128Xts, HashKind::Sha1),
        (CipherKind::Aes256Xts, HashKind::Sha512),
    ];
    for (cipher, hash) in kinds {
        let folder = Folder::new();
        let options = LuksOptions {
            cipher,
            hash,
            iter_time: FAST,
        };
        let (made, _) = luks::create(&secret("one"), &options).expect("a header");
        let created = CreateOptions {
            luks_header: Some(made),
            ..CreateOptions::new(1 << 20)
        };
        create(&folder.path("disk.qcow2"), &created);
        let mut header = header_of(&folder.path("disk.qcow2"));
        let volume = |header: &[u8]| {
            let bytes = [header, &vec![0; VOLUME]].concat();
            std::fs::write(folder.path("volume"), bytes).expect("a volume");
            assert_described_alike(&folder, "volume", &describe(header).expect("sound"));
        };
        volume(&header);
        assert_eq!(
            opens(&folder, "volume", "one", None),
            Some(0),
            "{cipher:?} {hash:?}"
        );
        assert_eq!(opens(&folder, "volume", "one\n", None), Some(2));
        assert_eq!(opens(&folder, "volume", "two", None), Some(2));

        let added = add_key(&header, &secret("one"), &secret("two"), Some(6), FAST);
        apply(&mut header, &added.expect("a free slot"));
        volume(&header);
        assert_eq!(opens(&folder, "volume", "two", Some(6)), Some(0));
        assert_eq!(opens(&folder, "volume", "one", Some(6)), Some(2));

        let removed = remove_key(&header, &Removal::Of(&secret("one")));
        apply(&mut header, &removed.expect("another slot"));
        volume(&header);
        assert_eq!(opens(&folder, "volume", "one", None), Some(2));
        assert_eq!(opens(&folder, "volume", "two", None), Some(0));
    }
}

/// The volume's content, too: QEMU writes to it, through its own LUKS.
#[test]
fn volumes_made_by_cryptsetup_are_opened_by_us() {
    for (bits, hash, cipher) in [("512", "sha256", "aes-256"), ("256", "sha512", "aes-128")] {
        let folder = Folder::new();
        std::fs::write(folder.path("key"), "one").expect("a key file");
        std::fs::write(folder.path("other"), "two").expect("a key file");
        std::fs::write(folder.path("volume"), vec![0; 6 << 20]).expect("a file");
        let cheap = ["--pbkdf-force-iterations", "1000", "--key-file", "key"];
        let format = [
            "luksFormat",
            "-q",
            "--type",
            "luks1",
            "--cipher",
            "aes-xts-plain64",
            "--key-size",
            bits,
            "--hash",
            hash,
        ];
        succeeds(&cryptsetup(&folder, &[&format[..], &cheap, &["volume"]].concat()));
        let add = ["luksAddKey", "-q", "--key-slot", "5"];
        succeeds(&cryptsetup(
            &folder,
            &[&add[..], &cheap, &["volume", "other"]].concat(),
        ));

        let bytes = std::fs::read(folder.path("volume")).expect("a volume");
        let info = describe(&bytes).expect("what cryptsetup made is sound");
        assert_eq!((info.cipher_alg, info.hash_alg), (cipher, hash));
        assert!(info.slots[0].active && info.slots[5].active && !info.slots[1].active);
        assert_described_alike(&folder, "volume", &info);
        assert!(unlock(&bytes, &secret("three")).is_err());

        let object = "secret,id=key,data=one";
        let volume = "driver=luks,key-secret=key,file.filename=volume";
        let write = [
            "--object",
            object,
            "--image-opts",
            volume,
            "-c",
            "write -P 0x61 64k 64k",
        ];
        folder.run("qemu-io", &write);
        let bytes = std::fs::read(folder.path("volume")).expect("a volume");
        let payload = info.payload_offset as usize;
        for text in ["one", "two"] {
            let cipher = unlock(&bytes, &secret(text)).expect("a slot opens");
            let mut data = bytes[payload + (64 << 10)..][..64 << 10].to_vec();
            assert_ne!(data[..SECTOR], [0x61; SECTOR]);
            cipher.decrypt((64 << 10) / SECTOR as u64, &mut data);
            assert!(
                data.iter().all(|&byte| byte == 0x61),
                "{text}: decrypted to something else"
            );
        }
    }
}
