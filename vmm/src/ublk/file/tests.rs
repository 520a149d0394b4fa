//! Configuration files of devices: what they say, and the line that is named when something is wrong.

use virtio_devices::ublk::{Recovery, Transport, TransportChoice};

use super::super::groups::Groups;
use super::*;
use crate::metrics::Address;

const WHOLE: &str = r#"control = "devices.control"
images = ["images", "/srv/more"]
metrics = "127.0.0.1:9100"
pidfile = "/run/devices.pid"
queues_per_worker = 2
sandbox = false
table_cache = "1G"

[[rate_limit_group]]
id = "slow"
ops_size = 500
ops_refill_time = 1_000

[[device]]
path = "images/a,b.qcow2"
id = "a"
number = 7
num_queues = 2
readonly = true
rate_limit_group = "slow"
transport = "copy"
recovery = "wait"
max_io = "64K"
zero_copy_from = "8K"
partitions = true

[[device]]
path = "/srv/more/b.qcow2"
recovery = "off"
overlay = "temporary"
"#;

fn parse(text: &str) -> Result<DevicesFile, String> {
    DevicesFile::parse(Path::new("/etc/ringdisk/devices.toml"), text).map_err(|error| chain(&error))
}

#[test]
fn file_says_what_a_command_line_says() {
    let file = parse(WHOLE).expect("a file");
    let here = |path: &str| Path::new("/etc/ringdisk").join(path);
    let arguments = &file.arguments;
    assert_eq!(arguments.control, Some(here("devices.control")));
    assert_eq!(arguments.images, [here("images"), "/srv/more".into()]);
    assert_eq!(arguments.metrics, "127.0.0.1:9100".parse::<Address>().ok());
    assert_eq!(arguments.pidfile, Some("/run/devices.pid".into()));
    assert_eq!(arguments.queues_per_worker, Some(2));
    assert_eq!(arguments.table_cache, Some(1 << 30));
    assert_eq!(arguments.registered_buffers, REGISTERED_BUFFERS_MAX);
    assert!(!arguments.is_confined());
    assert_eq!(
        arguments.rate_limit_group,
        ["id=slow,ops_refill_time=1000,ops_size=500"]
    );

    let [a, b] = &file.devices[..] else {
        panic!("two devices");
    };
    let text = "id=a,num_queues=2,path=\"/etc/ringdisk/images/a,b.qcow2\",rate_limit_group=slow,readonly=on";
    assert_eq!(a.text, text);
    assert_eq!(a.disk, DiskConfig::parse(text).expect("a disk"));
    assert_eq!((a.number, b.number), (Some(7), None));
    let mut groups = Groups::parse(&arguments.rate_limit_group).expect("a group");
    let wanted = a.wanted(&file, &mut groups).expect("a device");
    assert_eq!(wanted.config.id, Some(7));
    assert_eq!(wanted.config.queues_per_worker, 2);
    assert_eq!(wanted.config.transport, TransportChoice::Only(Transport::Copy));
    assert_eq!(
        (wanted.config.io_bytes_max, wanted.config.zero_copy_from),
        (64 << 10, 8 << 10)
    );
    assert!(wanted.config.partitions && wanted.partitions);
    assert_eq!(
        wanted.rate_limit_group.as_ref(),
        arguments.rate_limit_group.first()
    );
    assert_eq!(wanted.listed_in, Some(here("devices.toml")));
    let wanted = b.wanted(&file, &mut groups).expect("a device");
    assert_eq!((wanted.config.recovery, wanted.outlives), (Recovery::Off, false));
}

#[test]
fn device_without_keys_is_as_of_ublk_add() {
    let file = parse("[[device]]\npath = \"/a\"").expect("a file");
    let [device] = &file.devices[..] else {
        panic!("one device");
    };
    assert_eq!(device.new, NewDevices::default());
    assert!(parse("device = []").expect("a file").devices.is_empty());
}

/// One line is wrong in each, which is named with what would be right.
#[test]
fn wrong_line_is_named() {
    let device = |more: &str| format!("[[device]]\npath = \"p\"\n{more}");
    let two = |one: &str, two: &str| format!("{}\n[[device]]\npath = \"q\"\n{two}", device(one));
    for (text, said) in [
        (
            "watchdog = 3".to_owned(),
            "devices.toml:1: unknown setting `watchdog`; expected one of control, images, metrics, pidfile, queues_per_worker, sandbox, \
             table_cache, or [[device]] or [[rate_limit_group]]",
        ),
        (
            "queues_per_worker = 0".to_owned(),
            "devices.toml:1: `queues_per_worker` takes a number from 1",
        ),
        (
            device("socket = \"s\""),
            "devices.toml:3: `socket` is given without `vhost_user`",
        ),
        (
            device("number = -1"),
            "devices.toml:3: `number` takes N of /dev/ublkbN",
        ),
        (
            device("\ntransport = \"fast\""),
            "devices.toml:4: `transport` takes auto, zero-copy, user-copy or copy, not fast",
        ),
        (
            device("recovery = true"),
            "devices.toml:3: `recovery` takes reissue, wait, fail or off, not on",
        ),
        (
            device("max_io = \"5K\""),
            "devices.toml:3: `max_io` takes a power of two from 4K to 32M, not 5K",
        ),
        (
            device("zero_copy_from = \"x\""),
            "devices.toml:3: `zero_copy_from` takes a size such as 64K, below 4G, not x",
        ),
        (
            device("partitions = 1"),
            "devices.toml:3: `partitions` takes true or false",
        ),
        (
            device("overlay = \"temporary\""),
            "`overlay=temporary` contradicts `recovery = reissue`",
        ),
        (
            device("rate_limit_group = \"g\""),
            "devices.toml:3: `rate_limit_group=g`: there is no --rate-limit-group",
        ),
        (
            "[[device]]\nnumber = 1".to_owned(),
            "devices.toml:1: `path` is missing",
        ),
        (
            two("number = 1", "number = 1"),
            "devices.toml:4: `number` 1 is that of a device before, too; expected another one",
        ),
        (
            two("id = \"a\"", "id = \"a\""),
            "devices.toml:6: the disk of line 1 is called a, too; expected another `id`",
        ),
        (
            format!("control = \"/{}\"", "x".repeat(200)),
            "devices.toml:1: socket path /xxx",
        ),
    ] {
        let error = parse(&text).expect_err("it is wrong");
        assert!(error.contains(said), "{text}\nsays: {error}\nexpected: {said}");
        assert!(!error.contains('\n'), "{error}");
    }
}
