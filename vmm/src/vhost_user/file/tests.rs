//! Configuration files: what they say, and the line that is named when something is wrong.

use ringdisk_gen::Random;

use super::*;
use crate::config_file::BYTES_MAX;
use crate::metrics::Address;

const WHOLE: &str = r#"# A comment
control = "disks.control"
metrics = "unix:run/metrics.sock"
pidfile = "/run/disks.pid"
images = ["images", "/srv/more"]
workers = [2, "1@0"]
socket_mode = "666"
restartable = true
sandbox = false
table_cache = "1G"
watchdog = 30

[[rate_limit_group]]
id = "slow"
ops_size = 500
ops_refill_time = 1_000

[[disk]]
socket = "images/a.sock"
path = "images/a,b.qcow2"
id = "a"
num_queues = 0x4
readonly = true
rate_limit_group = "slow"

[[disk]]
fd = 3
path = "/srv/more/b.qcow2"
bw_size = "10M"
bw_refill_time = 100
"#;

fn parse(text: &str) -> Result<ConfigFile, String> {
    ConfigFile::parse(Path::new("/etc/ringdisk/disks.toml"), text).map_err(|error| chain(&error))
}

#[test]
fn file_says_what_a_command_line_says() {
    let wanted = parse(WHOLE).expect("a file");
    let wanted = wanted.wanted(Start::default()).expect("a server");
    let Places {
        control,
        metrics,
        pid_file,
        images,
        takeover_from: None,
    } = wanted.places
    else {
        panic!("a file has no takeover");
    };
    let here = |path: &str| Path::new("/etc/ringdisk").join(path);
    assert_eq!(control, Some(here("disks.control")));
    assert_eq!(metrics, Some(Address::Unix(here("run/metrics.sock"))));
    assert_eq!(pid_file, Some("/run/disks.pid".into()));
    assert_eq!(images, [here("images"), "/srv/more".into()]);
    let workers = ["2", "1@0"].map(|text| text.parse::<SharedWorkers>().expect("workers"));
    assert_eq!(wanted.workers, workers);
    let options = wanted.options;
    assert_eq!(options.access, Access::parse(Some("666"), None).expect("a mode"));
    assert!(options.restartable && !options.sandbox && !options.takeover);
    assert_eq!(options.table_cache_bytes, Some(1 << 30));
    assert_eq!(options.watchdog, Some(Duration::from_secs(30)));

    let [(first, a), (second, b)] = &wanted.disks.served[..] else {
        panic!("two disks");
    };
    assert_eq!(
        (first, second),
        (&Place::Path(here("images/a.sock")), &Place::Descriptor(3))
    );
    let same = |text: &str| DiskConfig::parse(text).expect("a disk");
    assert_eq!(
        *a,
        same("path=\"/etc/ringdisk/images/a,b.qcow2\",id=a,num_queues=4,readonly=on,rate_limit_group=slow")
    );
    assert_eq!(*b, same("path=/srv/more/b.qcow2,bw_size=10M,bw_refill_time=100"));
}

#[test]
fn empty_file_is_a_server_without_disks() {
    let wanted = parse("")
        .expect("a file")
        .wanted(Start::default())
        .expect("a server");
    assert!(wanted.options.sandbox && wanted.disks.served.is_empty() && wanted.workers.is_empty());
}

/// One line is wrong in each, which is named with what would be right.
#[test]
fn wrong_line_is_named() {
    let disk = |more: &str| format!("[[disk]]\nsocket = \"s\"\npath = \"p\"\n{more}");
    let two = |more: &str| format!("{}\n[[disk]]\nsocket = \"t\"\npath = \"q\"\n{more}", disk(""));
    for (text, said) in [
        ("a = ".to_owned(), "disks.toml:1: "),
        (
            "control = \"a\"\ncontrol = \"b\"".to_owned(),
            "disks.toml:2: duplicate key",
        ),
        (
            "\n\nworker = 2".to_owned(),
            "disks.toml:3: unknown setting `worker`; expected one of control, images",
        ),
        (
            "[disk]\npath = \"p\"".to_owned(),
            "disks.toml:1: `disk` is no array of tables; expected [[disk]]",
        ),
        (
            "disk = [1]".to_owned(),
            "disks.toml:1: `disk` is no array of tables; expected [[disk]]",
        ),
        (
            "sandbox = 3".to_owned(),
            "disks.toml:1: `sandbox` takes true or false",
        ),
        (
            "sandbox = [true, true]".to_owned(),
            "`sandbox` takes true or false",
        ),
        ("control = 1.5".to_owned(), "`control` takes the path of a socket"),
        (
            "control = \"\"".to_owned(),
            "`control` takes the path of a socket",
        ),
        (
            format!("control = \"/{}\"", "x".repeat(200)),
            "disks.toml:1: socket path /xxx",
        ),
        (
            "images = [\"\"]".to_owned(),
            "`images` takes the path of a folder",
        ),
        (
            "metrics = \"0.0.0.0:80\"".to_owned(),
            "disks.toml:1: 0.0.0.0 is not an address of the loopback interface",
        ),
        (
            "\nworkers = 0".to_owned(),
            "disks.toml:2: `0` is no number of workers; expected 1 to 1024",
        ),
        (
            "\ntable_cache = \"10k\"".to_owned(),
            "disks.toml:2: `10k` is no size of a table cache; expected 1M or more",
        ),
        (
            "watchdog = 0".to_owned(),
            "disks.toml:1: `watchdog` takes seconds from 1 to 86400",
        ),
        (
            "\nsocket_mode = \"99\"".to_owned(),
            "disks.toml:2: socket-mode 99: expected an octal mode",
        ),
        (
            "\nsocket_group = \"no such\"".to_owned(),
            "disks.toml:2: socket-group no such: there is no such group",
        ),
        (
            disk("readonyl = true"),
            "disks.toml:4: unknown key `readonyl` (did you mean `readonly`?); --help lists the keys",
        ),
        (
            disk("\nnum_queues = 0"),
            "disks.toml:5: `num_queues=0`: num_queues takes a number from 1 to 256",
        ),
        (
            disk("direct = 1.5"),
            "disks.toml:4: the value of `direct` is neither text",
        ),
        (
            disk("pci_device_id = 3"),
            "disks.toml:4: `pci_device_id` does not apply here",
        ),
        (disk("vhost_user = true"), "disks.toml:"),
        (
            disk("rate_limit_group = \"g\""),
            "disks.toml:4: `rate_limit_group=g`: there is no --rate-limit-group",
        ),
        (
            disk("bw_size = 5"),
            "disks.toml:4: `bw_size` is given without `bw_refill_time`",
        ),
        (
            disk("fd = 4"),
            "disks.toml:4: `fd` contradicts `socket`; expected one of them",
        ),
        (
            "[[disk]]\nfd = -1\npath = \"p\"".to_owned(),
            "disks.toml:2: `fd` takes the number of a descriptor",
        ),
        (
            "[[disk]]\npath = \"p\"".to_owned(),
            "disks.toml:1: `socket` is missing",
        ),
        (
            "\n[[disk]]\nsocket = \"s\"".to_owned(),
            "disks.toml:2: `path` is missing; it takes the name of a file",
        ),
        (
            two("id = \"/etc/ringdisk/p\""),
            "disks.toml:8: the disk of line 1 is called /etc/ringdisk/p, too; expected another `id`",
        ),
        (
            two("").replace("\"t\"", "\"./s\""),
            "disks.toml:5: socket /etc/ringdisk/./s is given more than once",
        ),
        (
            format!("workers = 1\n{}", two("poll_us = 0")),
            "disks.toml:6: workers with poll_us of disk",
        ),
        (
            format!("restartable = true\n{}", two("overlay = \"temporary\"")),
            "disks.toml:6: `overlay=temporary` contradicts `--restartable`",
        ),
        (
            "[[rate_limit_group]]\nid = \"a\"\nops_size = 1".to_owned(),
            "disks.toml:3: `ops_size` is given without",
        ),
        (
            "[[rate_limit_group]]\nid = \"a\"".to_owned(),
            "disks.toml:1: `a` limits nothing",
        ),
    ] {
        let error = parse(&text).expect_err("it is wrong");
        assert!(error.contains(said), "{text}\nsays: {error}\nexpected: {said}");
        assert!(!error.contains('\n'), "{error}");
    }
}

#[test]
fn images_that_are_the_same_file_are_refused_at_the_second() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("image"), "").expect("a file");
    let disk =
        |name: &str| format!("[[disk]]\nsocket = \"{name}.sock\"\nid = \"{name}\"\npath = \"image\"\n");
    let text = [disk("a").replace("image", "other"), disk("b"), disk("c")].concat();
    let error = ConfigFile::parse(&folder.path().join("disks.toml"), &text).expect_err("one image");
    let error = chain(&error);
    assert!(
        error.contains("disks.toml:9: ") && error.contains("are the same file"),
        "{error}"
    );
}

#[test]
fn start_that_does_not_go_with_a_disk_is_refused() {
    let text = "[[disk]]\nsocket = \"s\"\npath = \"p\"\noverlay = \"temporary\"";
    let start = Start {
        takeover: true,
        ..Start::default()
    };
    let refused = parse(text).expect("a file").wanted(start);
    assert_eq!(refused.expect_err("it ends with its process").exit_code(), 2);
}

#[test]
fn file_that_cannot_be_read_is_named() {
    let read = |path: &Path| chain(&ConfigFile::read(path).expect_err("no file"));
    assert!(read(Path::new("/no/such.toml")).starts_with("cannot read /no/such.toml: No such file"));
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("x.toml");
    std::fs::write(&path, [0xff, 0xfe]).expect("a file");
    assert!(read(&path).contains("UTF-8"), "{}", read(&path));
    let large = std::fs::File::create(&path).expect("a file");
    large.set_len(BYTES_MAX + 1).expect("a hole");
    assert!(
        read(&path).contains("larger than 16777216 bytes"),
        "{}",
        read(&path)
    );
}

/// Files with bytes changed, left out and put in: each is understood, or refused with a line that it has.
#[test]
fn damaged_files_are_understood_or_refused_with_their_line() {
    let mut random = Random::new(18);
    let (mut good, mut bad) = (0, 0);
    for _ in 0..4000 {
        let mut bytes = WHOLE.as_bytes().to_vec();
        for _ in 0..=random.below(3) {
            let at = random.below(bytes.len() as u64) as usize;
            match random.below(3) {
                0 => _ = bytes.remove(at),
                1 => bytes[at] = b"[]={}\"'\n0a-,#"[random.below(13) as usize],
                _ => bytes.insert(at, b"[]={}\"'\n0a-,#"[random.below(13) as usize]),
            }
        }
        let text = String::from_utf8(bytes).expect("ASCII");
        match ConfigFile::parse(Path::new("x.toml"), &text) {
            Ok(_) => good += 1,
            Err(FileError::Line { line, problem, .. }) => {
                bad += 1;
                assert!(
                    (1..=text.lines().count() + 1).contains(&line),
                    "{text}\n{line}: {problem}"
                );
                assert!(
                    !problem.is_empty() && !problem.contains('\n'),
                    "{text}\n{problem}"
                );
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert!(good > 100 && bad > 1000, "{good} and {bad}");
}
