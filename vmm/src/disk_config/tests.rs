//! Every key, every kind of refusal, and the messages a person reads.

use super::*;
use crate::secret_file::SecretFile;
use block::lock::LockGranularity;
use block::throttle::Rate;

fn parse(text: &str) -> DiskConfig {
    DiskConfig::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn refused(text: &str) -> String {
    match DiskConfig::parse(text) {
        Ok(config) => panic!("{text}: accepted as {config:?}"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn workers_apply_the_disks_keys_over_the_base() {
    let base = WorkerConfig {
        poll_max: Duration::from_micros(7),
        registered_buffers: 3,
        ..WorkerConfig::default()
    };
    let config = parse("path=a,num_queues=2,queue_size=512,poll_us=20,queue_affinity=[1@[3,5]]");
    let seen: Vec<_> = config
        .workers(&base)
        .into_iter()
        .map(|worker| {
            (
                worker.name,
                worker.depth,
                worker.cpus,
                worker.poll_max.as_micros(),
                worker.registered_buffers,
            )
        })
        .collect();
    assert_eq!(
        seen,
        [
            ("queue 0".to_owned(), 1024, vec![], 20, 3),
            ("queue 1".to_owned(), 1024, vec![3, 5], 20, 3),
        ]
    );
    let plain = parse("path=a,queue_size=4").worker(300, &base);
    assert_eq!(
        (plain.poll_max, plain.depth, plain.cpus.is_empty()),
        (base.poll_max, 256, true),
        "without keys the base's time, and no fewer ops than a small queue needs"
    );
}

#[test]
fn parse_fills_in_the_documented_defaults() {
    let config = parse("path=/a/disk.qcow2");
    assert_eq!(config, DiskConfig::new("/a/disk.qcow2"));
    assert_eq!((config.num_queues, config.queue_size), (1, 128));
    assert!(config.sparse && !config.backing_files && !config.readonly && !config.direct);
    assert_eq!(
        (config.image_type, config.l2_cache_bytes, config.poll_us),
        (None, None, None)
    );
    assert_eq!(config.lock_granularity, LockGranularity::ByteRange);
    assert_eq!(config.name(), "/a/disk.qcow2");
}

#[test]
fn snapshot_is_selected_and_makes_the_disk_read_only() {
    let text = |text: &str| text.to_owned();
    for (value, which) in [
        ("before", SnapshotSelector::Any(text("before"))),
        ("id=1", SnapshotSelector::Id(text("1"))),
        ("name=a=b", SnapshotSelector::Name(text("a=b"))),
        ("\"name=a,b\"", SnapshotSelector::Name(text("a,b"))),
    ] {
        for readonly in ["", ",readonly=on"] {
            let config = parse(&format!("path=d,snapshot={value}{readonly}"));
            assert_eq!((config.snapshot.as_ref(), config.readonly), (Some(&which), true));
        }
    }
    for value in ["", "id=", "name="] {
        let error = refused(&format!("path=d,snapshot={value}"));
        assert_eq!(
            error,
            format!(
                "--disk: `snapshot={value}`: snapshot takes id=ID, name=NAME, or an ID or a name that means one snapshot only"
            )
        );
    }
    for (other, why) in [
        (
            "readonly=off",
            "a snapshot can only be read; apply it to the disk with",
        ),
        ("image_type=raw", "a raw disk has no snapshots"),
        ("werror=wait", "a read-only disk is never written"),
    ] {
        let error = refused(&format!("path=d,snapshot=s,{other}"));
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn overlay_takes_the_writes_in_place_of_the_image() {
    let plain = parse("path=d,overlay=temporary");
    assert_eq!(plain.overlay, Some(TemporaryOverlay::default()));
    assert!(!plain.readonly && !plain.writes_image());
    assert!(parse("path=d").writes_image() && !parse("path=d,readonly=on").writes_image());
    // In any order.
    let folder = parse("overlay_dir=/srv,path=d,overlay=temporary").overlay;
    assert_eq!(folder.map(|overlay| overlay.directory()), Some("/srv".into()));
    for text in [
        "path=d,overlay=temporary,snapshot=s",
        "path=d,overlay=temporary,snapshot=s,readonly=off,werror=wait",
        "path=d,overlay=temporary,image_type=raw,l2_cache=1M,discard_no_unref=on",
    ] {
        assert!(!parse(text).readonly, "{text}: the guest writes");
    }
    for (text, why) in [
        ("path=d,overlay=on", "`overlay=on`: overlay takes temporary"),
        (
            "path=d,overlay_dir=/srv",
            "`overlay_dir` is given without `overlay`",
        ),
        (
            "path=d,overlay=temporary,overlay_dir=",
            "overlay_dir takes a directory",
        ),
        (
            "path=d,overlay=temporary,readonly=on",
            "`overlay=temporary` contradicts `readonly=on`",
        ),
        (
            "path=d,overlay=temporary,snapshot=s,readonly=on",
            "`overlay=temporary` contradicts `readonly=on`",
        ),
        (
            "path=d,overlay=temporary,image_type=raw,backing_files=on",
            "a raw disk has no backing file",
        ),
        (
            "vhost_user=on,socket=s,overlay=temporary",
            "`overlay` contradicts `vhost_user=on`",
        ),
    ] {
        let error = refused(text);
        assert!(error.contains(why), "{text}: {error}");
    }
}

#[test]
fn overlay_does_not_outlive_its_process() {
    assert_eq!(parse("path=d").may_outlive_process("--restartable"), Ok(()));
    let error = parse("path=d,overlay=temporary").may_outlive_process("--restartable");
    let error = error.expect_err("refused").to_string();
    assert!(
        error.starts_with(
            "--disk: `overlay=temporary` contradicts `--restartable`: the overlay ends with its process"
        ),
        "{error}"
    );
}

#[test]
fn parse_sets_the_field_of_every_key() {
    let config = parse(
        "queue_affinity=[0@[1,3],1@[4-6,5]],path=d,image_type=qcow2,readonly=on,direct=on,num_queues=2,\
         queue_size=256,serial=root disk,id=d0,backing_files=on,data_file=on,sparse=off,lock_granularity=full,\
         l2_cache=4M,discard_no_unref=on,poll_us=50,secret_file=s",
    );
    let expected = DiskConfig {
        path: "d".into(),
        vhost_user: false,
        image_type: Some(ImageType::Qcow2),
        readonly: true,
        snapshot: None,
        overlay: None,
        secret_file: Some(SecretFile::new("s".into())),
        direct: true,
        num_queues: 2,
        queue_size: 256,
        id: Some("d0".to_owned()),
        serial: Some("root disk".to_owned()),
        queue_affinity: vec![
            QueueAffinity {
                queue: 0,
                cpus: vec![1, 3],
            },
            QueueAffinity {
                queue: 1,
                cpus: vec![4, 5, 6],
            },
        ],
        backing_files: true,
        data_file: true,
        sparse: false,
        lock_granularity: LockGranularity::Full,
        l2_cache_bytes: Some(4 << 20),
        discard_no_unref: true,
        werror: WriteErrors::Report,
        bitmaps: BitmapStorage::Close,
        pci: PciAddress::default(),
        poll_us: Some(50),
        rate_limits: RateLimits::default(),
        rate_limit_group: None,
    };
    assert_eq!(config, expected);
    assert_eq!(config.name(), "d0");
    assert_eq!((config.cpus_of(0), config.cpus_of(2)), (Some(&[1, 3][..]), None));
}

#[test]
fn werror_is_report_unless_set_to_wait() {
    assert_eq!(parse("path=d").werror, WriteErrors::Report);
    assert_eq!(parse("path=d,werror=report").werror, WriteErrors::Report);
    assert_eq!(
        parse("path=d,image_type=raw,werror=wait").werror,
        WriteErrors::Wait
    );
    assert_eq!(
        refused("path=d,werror=stop"),
        "--disk: `werror=stop`: werror takes report or wait"
    );
    assert_eq!(
        refused("path=d,werror=wait,readonly=on"),
        "--disk: `werror=wait` contradicts `readonly=on`: a read-only disk is never written"
    );
}

#[test]
fn bitmaps_are_stored_at_the_close_unless_durable() {
    assert_eq!(parse("path=d").bitmaps, BitmapStorage::Close);
    assert_eq!(parse("path=d,bitmaps=close").bitmaps, BitmapStorage::Close);
    assert_eq!(parse("path=d,bitmaps=durable").bitmaps, BitmapStorage::Durable);
    for (text, error) in [
        ("bitmaps=on", "`bitmaps=on`: bitmaps takes close or durable"),
        (
            "bitmaps=durable,readonly=on",
            "`bitmaps=durable` contradicts `readonly=on`: bitmaps record what is written to their image",
        ),
        (
            "bitmaps=durable,overlay=temporary",
            "`bitmaps=durable` contradicts `overlay=temporary`: bitmaps record what is written to their image",
        ),
        (
            "bitmaps=durable,image_type=raw",
            "`bitmaps=durable` contradicts `image_type=raw`: a raw disk has no bitmaps",
        ),
    ] {
        assert_eq!(refused(&format!("path=d,{text}")), format!("--disk: {error}"));
    }
}

fn rate(size: u64, refill_ms: u64, one_time_burst: u64) -> Option<Rate> {
    let refill = std::time::Duration::from_millis(refill_ms);
    Some(Rate {
        size,
        refill,
        one_time_burst,
    })
}

#[test]
fn rate_limits_need_a_size_and_a_refill_time() {
    let config = parse(
        "path=d,bw_size=100M,bw_refill_time=1000,bw_one_time_burst=1G,ops_size=18446744073709551615,ops_refill_time=1",
    );
    let expected = RateLimits {
        bandwidth: rate(100 << 20, 1000, 1 << 30),
        ops: rate(u64::MAX, 1, 0),
    };
    assert_eq!(config.rate_limits, expected);
    assert!(parse("path=d").rate_limits.is_empty());
    for (text, message) in [
        (
            "bw_size=1M",
            "`bw_size` is given without `bw_refill_time`, which takes milliseconds from 1 to 4294967295",
        ),
        (
            "bw_refill_time=1",
            "`bw_refill_time` is given without `bw_size`, which takes a number of bytes, at least 1, such as 100M",
        ),
        (
            "ops_one_time_burst=1",
            "`ops_one_time_burst` is given without `ops_size`, which takes a number, at least 1",
        ),
        (
            "ops_size=1,bw_size=1,bw_refill_time=1",
            "`ops_size` is given without `ops_refill_time`, which takes milliseconds from 1 to 4294967295",
        ),
        (
            "rate_limit_group=g,ops_size=1,ops_refill_time=1",
            "`ops_size` contradicts `rate_limit_group=g`: a disk has either its own limits or those of a group",
        ),
    ] {
        assert_eq!(refused(&format!("path=d,{text}")), format!("--disk: {message}"));
    }
}

#[test]
fn vhost_user_disk_takes_a_socket_and_few_other_keys() {
    let config = parse("vhost_user=on,socket=/run/s,num_queues=2,queue_size=256,id=d");
    let mut expected = DiskConfig::new("/run/s");
    (expected.vhost_user, expected.num_queues, expected.queue_size) = (true, 2, 256);
    expected.id = Some("d".to_owned());
    assert_eq!(config, expected);
    assert_eq!(parse("socket=s,vhost_user=on").name(), "s");
    assert!(!parse("path=d,vhost_user=off").vhost_user);
    let refusal = config.is_own().map_err(|error| error.to_string());
    assert!(refusal.is_err_and(|error| error.contains("pass a server its socket with --socket")));
    parse("path=d").is_own().expect("an image");
    let sees_to_it =
        "`vhost_user=on` is for `ringdisk run` only: another program serves the disk, so set this key there";
    for (text, message) in [
        (
            "vhost_user=on",
            "`vhost_user` is given without `socket`, which takes the path of a socket".to_owned(),
        ),
        (
            "path=d,socket=s",
            "`socket` is given without `vhost_user`, which takes on or off".to_owned(),
        ),
        (
            "path=d,socket=s,vhost_user=on",
            format!("`path` contradicts `vhost_user=on`: {sees_to_it}"),
        ),
        (
            "socket=s,vhost_user=on,bw_size=1M,bw_refill_time=1",
            format!("`bw_size` contradicts `vhost_user=on`: {sees_to_it}"),
        ),
        (
            "socket=s,rate_limit_group=g,vhost_user=on",
            format!("`rate_limit_group` contradicts `vhost_user=on`: {sees_to_it}"),
        ),
        (
            "socket=s,vhost_user=on,readonly=off",
            format!("`readonly` contradicts `vhost_user=on`: {sees_to_it}"),
        ),
        (
            "socket=,vhost_user=on",
            "`socket=`: socket takes the path of a socket".to_owned(),
        ),
    ] {
        assert_eq!(refused(text), format!("--disk: {message}"));
    }
}

fn groups(texts: &[&str]) -> Result<RateLimitGroups, String> {
    let texts: Vec<String> = texts.iter().map(|&text| text.to_owned()).collect();
    RateLimitGroups::parse(&texts).map_err(|error| error.to_string())
}

#[test]
fn join_shares_a_groups_limiter_and_refuses_unknown_groups() {
    let groups = groups(&[
        "id=a,ops_size=1,ops_refill_time=1",
        "bw_size=1M,bw_refill_time=10,id=b",
    ]);
    let groups = groups.expect("two groups");
    let joined = |text: &str| {
        let mut disk = parse(text);
        groups
            .join(&mut disk)
            .map(|()| disk)
            .map_err(|error| error.to_string())
    };
    let limiter = |text: &str| {
        let group = joined(text).expect("a group").rate_limit_group;
        group.and_then(|group| group.limiter().cloned())
    };
    let (one, two) = (
        limiter("path=d,rate_limit_group=a"),
        limiter("path=e,rate_limit_group=a"),
    );
    let (one, two) = (one.expect("its tokens"), two.expect("its tokens"));
    assert!(std::sync::Arc::ptr_eq(&one, &two));
    let other = limiter("path=d,rate_limit_group=b").expect("its tokens");
    assert!(!std::sync::Arc::ptr_eq(&one, &other));
    assert_eq!(
        joined("path=d,rate_limit_group=c").err().as_deref(),
        Some("--disk: `rate_limit_group=c`: there is no such --rate-limit-group; there are: a, b")
    );
    assert_eq!(
        RateLimitGroups::default()
            .join(&mut parse("path=d,rate_limit_group=c"))
            .map_err(|error| error.to_string()),
        Err("--disk: `rate_limit_group=c`: there is no --rate-limit-group".to_owned())
    );
    assert!(joined("path=d").is_ok_and(|disk| disk.rate_limit_group.is_none()));
}

#[test]
fn groups_refuse_an_invalid_group_by_name() {
    for (texts, message) in [
        (
            &["id=a"][..],
            "`a` limits nothing; expected bw_size with bw_refill_time, or ops_size with ops_refill_time",
        ),
        (
            &["ops_size=1,ops_refill_time=1"],
            "`id` is missing; it takes a name",
        ),
        (&["id=,ops_size=1"], "`id=`: id takes a name"),
        (
            &["id=a,ops_size=1"],
            "`ops_size` is given without `ops_refill_time`, which takes milliseconds from 1 to 4294967295",
        ),
        (&["id=a,id=b"], "`id` is given more than once"),
        (
            &["id=a,bw_size=x"],
            "`bw_size=x`: bw_size takes a number of bytes, at least 1, such as 100M",
        ),
        (
            &["id=a,path=b"],
            "unknown key `path`; the keys are id, bw_size, bw_one_time_burst, bw_refill_time, ops_size, \
             ops_one_time_burst, ops_refill_time",
        ),
        (
            &["id=a,"],
            "``: expected key=value, found nothing; a value with a comma goes in double quotes, key=\"a,b\"",
        ),
        (
            &[
                "id=a,ops_size=1,ops_refill_time=1",
                "id=a,ops_size=2,ops_refill_time=1",
            ],
            "two groups have the id `a`",
        ),
    ] {
        let refused = groups(texts).err();
        assert_eq!(
            refused,
            Some(format!("--rate-limit-group: {message}")),
            "{texts:?}"
        );
    }
}

#[test]
fn keys_table_matches_the_parser() {
    for key in KEYS {
        let text = format!("path=d,{}=\u{1}", key.name);
        let error = DiskConfig::parse(&text).err();
        match key.scope {
            Scope::Elsewhere(place) => {
                assert_eq!(error, Some(DiskConfigError::NotHere { key: key.name, place }));
            }
            // A path, an id, a snapshot or a secret file may be any text; `path` is there twice.
            Scope::Here if key.name == "path" => {
                assert_eq!(error, Some(DiskConfigError::Duplicate { key: "path" }));
            }
            Scope::Here if ["id", "rate_limit_group", "snapshot", "secret_file"].contains(&key.name) => {
                assert_eq!(error, None)
            }
            // Any text, too, but not beside a path, and not without an overlay.
            Scope::Here | Scope::Machine if ["socket", "overlay_dir"].contains(&key.name) => {
                assert!(
                    matches!(error, Some(DiskConfigError::Incomplete { .. })),
                    "{error:?}"
                );
            }
            Scope::Here | Scope::Machine => {
                let value = "\u{1}".to_owned();
                assert_eq!(
                    error,
                    Some(DiskConfigError::Value {
                        key: key.name,
                        value,
                        takes: key.takes
                    })
                );
                let line = format!("\n  {} ", key.name);
                assert!(
                    machine_keys_help().contains(&line),
                    "{} is not in the help",
                    key.name
                );
                assert_eq!(
                    keys_help().contains(&line),
                    key.scope == Scope::Here,
                    "{}",
                    key.name
                );
            }
        }
    }
}

#[test]
fn parse_takes_quotes_brackets_and_equals_signs_in_values() {
    assert_eq!(
        parse("path=\"a,b=c.img\",readonly=on").path,
        PathBuf::from("a,b=c.img")
    );
    assert_eq!(parse("path=a=b").path, PathBuf::from("a=b"));
    assert_eq!(parse("path=a[1].img,readonly=on").path, PathBuf::from("a[1].img"));
    assert_eq!(parse("path=a\"b").path, PathBuf::from("a\"b"));
    assert_eq!(parse("path=é,id=ü").path, PathBuf::from("é"));
}

#[test]
fn parse_names_the_malformed_item() {
    for (text, message) in [
        ("", "--disk: ``: expected key=value, found nothing"),
        ("disk.qcow2", "--disk: `disk.qcow2`: expected key=value"),
        (
            "path=a,",
            "--disk: ``: expected key=value, found nothing; a value with a comma goes in double quotes, key=\"a,b\"",
        ),
        (
            "path=a,,readonly=on",
            "--disk: ``: expected key=value, found nothing; a value with a comma goes in double quotes, key=\"a,b\"",
        ),
        (
            "path=a,readonly",
            "--disk: `readonly`: expected key=value; a value with a comma goes in double quotes, key=\"a,b\"",
        ),
        ("path=\"a", "--disk: `path=\"a`: the quote is not closed"),
        (
            "path=\"a\"b",
            "--disk: `path=\"a\"b`: expected a comma after the closing quote or bracket",
        ),
        (
            "path=a,queue_affinity=[0@[1]",
            "--disk: `queue_affinity=[0@[1]`: the bracket is not closed",
        ),
    ] {
        assert_eq!(refused(text), message);
    }
}

#[test]
fn parse_suggests_a_key_for_an_unknown_one() {
    let message = refused("path=a,sprase=on");
    assert_eq!(
        message,
        "--disk: unknown key `sprase` (did you mean `sparse`?); --help lists the keys"
    );
    assert_eq!(
        refused("path=a,frobnicate=on"),
        "--disk: unknown key `frobnicate`; --help lists the keys"
    );
    assert!(refused("path=a,PATH=b").starts_with("--disk: unknown key `PATH`"));
    assert!(refused("path=a,=b").starts_with("--disk: unknown key ``"));
    let long = "x".repeat(1 << 20);
    assert!(refused(&format!("{long}=1")).contains("unknown key"));
}

#[test]
fn keys_of_other_commands_are_refused_with_their_place() {
    for key in ["iommu=off", "pci_segment=0", "pci_device_id=31"] {
        let config = parse(&format!("path=a,{key}"));
        let message = config.is_own().expect_err("it has a place on a bus").to_string();
        let name = key.split('=').next().expect("a key");
        assert!(
            message.starts_with(&format!(
                "--disk: `{name}` does not apply here: it applies to disks of `ringdisk run`"
            )),
            "{message}"
        );
    }
    assert!(refused("path=a,cow=on").contains("`ringdisk image create` only"));
}

#[test]
fn parse_refuses_a_repeated_key_even_with_the_same_value() {
    assert_eq!(
        refused("path=a,readonly=on,readonly=on"),
        "--disk: `readonly` is given more than once"
    );
    assert_eq!(refused("path=a,path=a"), "--disk: `path` is given more than once");
}

#[test]
fn parse_refuses_a_missing_or_empty_path() {
    assert_eq!(
        refused("readonly=on"),
        "--disk: `path` is missing; it takes the name of a file"
    );
    assert_eq!(refused("path="), "--disk: `path=`: path takes the name of a file");
    assert_eq!(
        refused("path=\"\""),
        "--disk: `path=`: path takes the name of a file"
    );
}

#[test]
fn wrong_value_error_names_the_key_and_valid_values() {
    for (item, takes) in [
        ("image_type=vmdk", "raw or qcow2"),
        ("image_type=QCOW2", "raw or qcow2"),
        ("readonly=yes", "on or off"),
        ("direct=1", "on or off"),
        ("backing_files=", "on or off"),
        ("data_file=raw", "on or off"),
        ("sparse=ON", "on or off"),
        ("discard_no_unref=maybe", "on or off"),
        ("num_queues=0", "a number from 1 to 256"),
        ("num_queues=257", "a number from 1 to 256"),
        ("num_queues=-1", "a number from 1 to 256"),
        ("num_queues=+1", "a number from 1 to 256"),
        ("num_queues=99999999999999999999", "a number from 1 to 256"),
        ("queue_size=2", "a power of two from 4 to 32768"),
        ("queue_size=0", "a power of two from 4 to 32768"),
        ("queue_size=100", "a power of two from 4 to 32768"),
        ("queue_size=65536", "a power of two from 4 to 32768"),
        ("serial=", "1 to 20 printable ASCII characters"),
        (
            "serial=123456789012345678901",
            "1 to 20 printable ASCII characters",
        ),
        ("serial=é", "1 to 20 printable ASCII characters"),
        ("id=", "a name"),
        ("lock_granularity=none", "byte-range or full"),
        ("l2_cache=0", "a number of bytes, at least 64K, such as 4M"),
        ("l2_cache=63K", "a number of bytes, at least 64K, such as 4M"),
        ("l2_cache=4MB", "a number of bytes, at least 64K, such as 4M"),
        ("l2_cache=-4M", "a number of bytes, at least 64K, such as 4M"),
        ("l2_cache=99E", "a number of bytes, at least 64K, such as 4M"),
        ("bw_size=0", "a number of bytes, at least 1, such as 100M"),
        (
            "bw_one_time_burst=1x",
            "a number of bytes, at least 1, such as 100M",
        ),
        ("bw_refill_time=0", "milliseconds from 1 to 4294967295"),
        ("bw_refill_time=1s", "milliseconds from 1 to 4294967295"),
        ("ops_size=1K", "a number, at least 1"),
        ("ops_size=+1", "a number, at least 1"),
        ("ops_one_time_burst=18446744073709551616", "a number, at least 1"),
        ("ops_refill_time=4294967296", "milliseconds from 1 to 4294967295"),
        ("rate_limit_group=", "the id of a --rate-limit-group"),
        ("poll_us=10001", "microseconds from 0 to 10000"),
        ("poll_us=1ms", "microseconds from 0 to 10000"),
    ] {
        let key = item.split('=').next().expect("a key");
        assert_eq!(
            refused(&format!("path=a,{item}")),
            format!("--disk: `{item}`: {key} takes {takes}")
        );
    }
}

#[test]
fn parse_accepts_values_at_their_bounds() {
    assert_eq!(parse("path=a,num_queues=256").num_queues, 256);
    assert_eq!(parse("path=a,queue_size=4").queue_size, 4);
    assert_eq!(parse("path=a,queue_size=32768").queue_size, 32768);
    assert_eq!(
        parse("path=a,serial=12345678901234567890").serial.as_deref(),
        Some("12345678901234567890")
    );
    assert_eq!(parse("path=a,l2_cache=64K").l2_cache_bytes, Some(65536));
    assert_eq!(parse("path=a,l2_cache=1G").l2_cache_bytes, Some(1 << 30));
    assert_eq!(parse("path=a,poll_us=0").poll_us, Some(0));
    assert_eq!(parse("path=a,poll_us=10000").poll_us, Some(10_000));
    assert_eq!(
        parse("path=a,queue_affinity=[0@[1023]]").cpus_of(0),
        Some(&[1023][..])
    );
    assert!(!parse("path=a,readonly=true,sparse=false").sparse);
}

#[test]
fn parse_refuses_a_malformed_affinity() {
    for value in [
        "0@[1]",
        "[]",
        "[0]",
        "[0@1]",
        "[0@[]]",
        "[0@[1],]",
        "[@[1]]",
        "[0@[1],0@[2]]",
        "[0@[a]]",
        "[0@[-1]]",
        "[0@[3-1]]",
        "[0@[1024]]",
        "[0@[0-1024]]",
        "[256@[0]]",
        "[0@[1]x]",
        "[0@[[1]]]",
        "[0@[1]]]",
        "[0@[1],,1@[2]]",
        "[0@[1-2-3]]",
    ] {
        let message = refused(&format!("path=a,num_queues=256,queue_affinity={value}"));
        assert!(
            message.starts_with("--disk: `queue_affinity="),
            "{value}: {message}"
        );
    }
}

#[test]
fn contradiction_error_names_both_keys() {
    for (text, message) in [
        (
            "path=a,image_type=raw,backing_files=on",
            "--disk: `backing_files=on` contradicts `image_type=raw`: a raw disk has no backing file",
        ),
        (
            "path=a,image_type=raw,data_file=on",
            "--disk: `data_file=on` contradicts `image_type=raw`: a raw disk is its own data",
        ),
        (
            "path=a,l2_cache=1M,image_type=raw",
            "--disk: `l2_cache` contradicts `image_type=raw`: a raw disk has no tables to cache",
        ),
        (
            "path=a,discard_no_unref=on,image_type=raw",
            "--disk: `discard_no_unref=on` contradicts `image_type=raw`: a raw disk has no clusters to keep",
        ),
        (
            "path=a,secret_file=s,image_type=raw",
            "--disk: `secret_file` contradicts `image_type=raw`: a raw disk is not encrypted",
        ),
        (
            "path=a,secret_file=s,overlay=temporary",
            "--disk: `secret_file` contradicts `overlay=temporary`: the overlay would hold what the guest writes unencrypted",
        ),
        (
            "path=a,num_queues=2,queue_affinity=[2@[0]]",
            "--disk: `queue_affinity` contradicts `num_queues=2`: it names a queue the disk does not have",
        ),
    ] {
        assert_eq!(refused(text), message);
    }
    parse("path=a,image_type=raw,backing_files=off,discard_no_unref=off");
}

#[test]
fn parse_never_panics() {
    // Every string of up to five characters over the ones with a meaning, multi-byte included.
    let alphabet = [
        "path",
        "queue_affinity",
        "=",
        ",",
        "[",
        "]",
        "\"",
        "@",
        "0",
        "-",
        "é",
    ];
    let mut texts = vec![String::new()];
    for _ in 0..5 {
        texts = texts
            .iter()
            .flat_map(|text| alphabet.iter().map(move |piece| format!("{text}{piece}")))
            .collect();
        for text in &texts {
            drop(DiskConfig::parse(text));
        }
    }
}

#[test]
fn pci_keys_take_a_slot_of_segment_0_without_iommu() {
    let place = parse("path=a,pci_device_id=7,pci_segment=0,iommu=off").pci;
    assert_eq!(place.device_id, Some(7));
    parse("vhost_user=on,socket=s,pci_device_id=1");
    for (text, takes) in [
        ("pci_device_id=0", "takes a slot from 1 to 31"),
        ("pci_device_id=32", "takes a slot from 1 to 31"),
        ("pci_segment=1", "takes 0, the only segment"),
        ("iommu=on", "takes off, as the machine has no IOMMU"),
    ] {
        let message = refused(&format!("path=a,{text}"));
        assert!(
            message.contains(&format!("`{text}`")) && message.ends_with(takes),
            "{message}"
        );
    }
}
