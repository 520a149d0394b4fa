//! The text against the format's grammar, and the server against clients that mean ill.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use ringdisk_gen::Random;
use virtio_devices::stats::{Latency, LatencyBucket, QueueSnapshot};

use super::http::{CLIENTS_MAX, HEAD_MAX, TIME_MAX, answer};
use super::process::Usage;
use super::*;

type Labels = Vec<(String, String)>;
/// The samples of a text: name and labels, value.
type Samples = BTreeMap<(String, Labels), f64>;

/// Parses a label set after its `{`, up to and with its `}`. Returns what follows.
fn parse_labels(mut text: &str) -> (Labels, &str) {
    let mut labels = Vec::new();
    loop {
        let (name, rest) = text.split_once("=\"").expect("a label");
        let mut value = String::new();
        let mut characters = rest.char_indices();
        let end = loop {
            match characters.next().expect("the end of a value") {
                (at, '"') => break at,
                (_, '\\') => value.push(match characters.next().expect("an escaped character").1 {
                    'n' => '\n',
                    same @ ('\\' | '"') => same,
                    other => panic!("\\{other} is no escape"),
                }),
                (_, other) => value.push(other),
            }
        };
        labels.push((name.to_owned(), value));
        text = &rest[end + 1..];
        match text.as_bytes().first() {
            Some(b',') => text = &text[1..],
            Some(b'}') => return (labels, &text[1..]),
            other => panic!("{other:?} after a label"),
        }
    }
}

fn is_name(text: &str) -> bool {
    let is_first = |byte: u8| byte.is_ascii_alphabetic() || byte == b'_';
    text.bytes().next().is_some_and(is_first)
        && text.bytes().all(|byte| is_first(byte) || byte.is_ascii_digit())
}

/// Parses a text of the format, version 0.0.4, and checks what Prometheus does: families are together, a series occurs once, a
/// histogram's buckets are cumulative and end with all.
fn parse(text: &str) -> Samples {
    assert!(text.ends_with('\n'));
    let mut samples = Samples::new();
    let mut families = BTreeMap::new();
    let mut family = (String::new(), String::new());
    for line in text.lines() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, words) = help.split_once(' ').expect("a help");
            assert!(is_name(name) && !words.is_empty(), "{line}");
            family = (name.to_owned(), String::new());
            continue;
        }
        if let Some(kind) = line.strip_prefix("# TYPE ") {
            let (name, kind) = kind.split_once(' ').expect("a type");
            assert_eq!(name, family.0, "{line}");
            assert!(["counter", "gauge", "histogram"].contains(&kind), "{line}");
            family.1 = kind.to_owned();
            assert_eq!(families.insert(name.to_owned(), kind.to_owned()), None, "{line}");
            continue;
        }
        let end = line.find(['{', ' ']).expect("a sample");
        let (name, rest) = line.split_at(end);
        let (labels, rest) = match rest.strip_prefix('{') {
            Some(rest) => parse_labels(rest),
            None => (Vec::new(), rest),
        };
        let value: f64 = rest.strip_prefix(' ').expect("a space").parse().expect("a value");
        let parts: &[&str] = if family.1 == "histogram" {
            &["_bucket", "_sum", "_count"]
        } else {
            &[""]
        };
        let part = name.strip_prefix(&*family.0).expect("the family's name");
        assert!(parts.contains(&part), "{line}");
        let names: BTreeSet<_> = labels.iter().map(|(name, _)| name).collect();
        assert!(
            names.len() == labels.len() && names.iter().all(|name| is_name(name)),
            "{line}"
        );
        let before = samples.insert((name.to_owned(), labels), value);
        assert_eq!(before, None, "{line}");
    }
    check_histograms(&samples, &families);
    samples
}

fn check_histograms(samples: &Samples, families: &BTreeMap<String, String>) {
    let histograms = families.iter().filter(|(_, kind)| *kind == "histogram");
    for (name, _) in histograms {
        let mut series: BTreeMap<Labels, Vec<(f64, f64)>> = BTreeMap::new();
        for ((sample, labels), &count) in samples {
            if *sample == format!("{name}_bucket") {
                let (le, others): (Vec<_>, Vec<_>) =
                    labels.iter().cloned().partition(|(name, _)| name == "le");
                let bound = le[0].1.replace("+Inf", "inf").parse().expect("a bound");
                series.entry(others).or_default().push((bound, count));
            }
        }
        for (labels, mut buckets) in series {
            buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
            assert!(buckets.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1), "{labels:?}");
            let all = buckets.last().expect("buckets");
            assert!(all.0.is_infinite());
            assert_eq!(samples[&(format!("{name}_count"), labels.clone())], all.1);
            assert!(samples.contains_key(&(format!("{name}_sum"), labels)));
        }
    }
}

/// Two disks, one with a name that needs escapes.
fn reports() -> Vec<DiskReport> {
    let mut queue = QueueSnapshot {
        in_flight: 3,
        ..QueueSnapshot::default()
    };
    queue.read.requests = 70;
    queue.read.bytes = 70 * 4096;
    queue.read.errors = 2;
    let bucket = |below_ns, count| LatencyBucket { below_ns, count };
    queue.read.latency = Latency {
        buckets: vec![
            bucket(640, 5),
            bucket(1024, 1),
            bucket(20480, 60),
            bucket(1 << 36, 4),
        ],
        sum_ns: 1_234_567_890,
    };
    let requests = DiskSnapshot {
        queues: vec![queue, QueueSnapshot::default()],
    };
    let mut odd = DiskReport::new("a \"b\"\\\nc".to_owned(), DiskSnapshot::default(), None);
    odd.labels.push(("device", "ublkb0".to_owned()));
    odd.requests.queues.push(QueueSnapshot::default());
    let engine = EngineCounts {
        l2_slices_read: 7,
        ..EngineCounts::default()
    };
    vec![DiskReport::new("root".to_owned(), requests, Some(engine)), odd]
}

fn sample(samples: &Samples, name: &str, labels: &[(&str, &str)]) -> f64 {
    let labels = labels
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    samples[&(name.to_owned(), labels.collect())]
}

#[test]
fn text_keeps_the_grammar_and_has_every_figure() {
    let usage = Usage {
        resident_bytes: Some(1 << 20),
        descriptors: Some(9),
        table_bytes: 8192,
        table_bytes_max: Some(1 << 20),
    };
    let samples = parse(&text::render(&reports(), &usage));
    let read = [("disk", "root"), ("queue", "0"), ("kind", "read")];
    assert_eq!(sample(&samples, "ringdisk_requests_total", &read), 70.0);
    assert_eq!(sample(&samples, "ringdisk_request_bytes_total", &read), 286_720.0);
    assert_eq!(sample(&samples, "ringdisk_request_errors_total", &read), 2.0);
    let queue = &read[..2];
    assert_eq!(sample(&samples, "ringdisk_requests_in_flight", queue), 3.0);
    let latency = |le| {
        let labels = [("disk", "root"), ("kind", "read"), ("le", le)];
        sample(&samples, "ringdisk_request_latency_seconds_bucket", &labels)
    };
    assert_eq!(latency("0.000001024"), 6.0);
    assert_eq!(latency("0.000016384"), 6.0);
    assert_eq!(latency("0.000024576"), 66.0);
    assert_eq!(latency("17.179869184"), 66.0);
    assert_eq!(latency("+Inf"), 70.0);
    let labels = [("disk", "root"), ("kind", "read")];
    let sum = sample(&samples, "ringdisk_request_latency_seconds_sum", &labels);
    assert!((sum - 1.234_567_89).abs() < 1e-9);
    let odd = [("disk", "a \"b\"\\\nc"), ("device", "ublkb0"), ("queue", "0")];
    assert_eq!(sample(&samples, "ringdisk_requests_in_flight", &odd), 0.0);
    assert_eq!(
        sample(&samples, "process_resident_memory_bytes", &[]),
        1_048_576.0
    );
    assert_eq!(sample(&samples, "process_open_fds", &[]), 9.0);
    assert_eq!(sample(&samples, "ringdisk_table_cache_bytes", &[]), 8192.0);
    assert_eq!(
        sample(&samples, "ringdisk_table_cache_limit_bytes", &[]),
        1_048_576.0
    );
    let root = [("disk", "root")];
    assert_eq!(sample(&samples, "ringdisk_l2_slices_read_total", &root), 7.0);
    assert_eq!(sample(&samples, "ringdisk_flush_rounds_total", &root), 0.0);
    parse(&text::render(&[], &Usage::default()));
}

/// A bound inside a bucket would leave the bucket's latencies out.
#[test]
fn bounds_are_those_of_buckets() {
    for bound in text::bounds_ns() {
        let steps = bound >> (bound.ilog2() - 3);
        assert_eq!(
            steps << (bound.ilog2() - 3),
            bound,
            "{bound} has an eighth of its power of two"
        );
    }
    assert_eq!(text::bounds_ns().count(), 49);
}

#[test]
fn process_counts_its_memory_and_descriptors() {
    let process = Process::open().expect("/proc");
    let before = process.read();
    assert!(before.resident_bytes.expect("statm") > 100_000);
    let files: Vec<_> = (0..200)
        .map(|_| std::fs::File::open("/dev/null").expect("a file"))
        .collect();
    // Other tests open and close some meanwhile.
    let more = process.read().descriptors.expect("a folder") - before.descriptors.expect("a folder");
    assert!((150..250).contains(&more), "{more} for {}", files.len());
}

#[test]
fn requests_are_answered_by_their_kind() {
    let long = format!("GET /{} HTTP/1.1", "a".repeat(4000));
    for (request, status) in [
        ("GET /metrics HTTP/1.1\r\nHost: x", "200"),
        ("GET /metrics?name=a HTTP/1.0", "200"),
        ("HEAD /metrics HTTP/1.1\r\n", "200"),
        ("GET / HTTP/1.1", "404"),
        ("GET /metrics/../etc/passwd HTTP/1.1", "404"),
        (&long, "404"),
        ("POST /metrics HTTP/1.1\r\nContent-Length: 5", "405"),
        ("GET /metrics HTTP/2.0", "505"),
        ("GET /metrics", "400"),
        ("GET  /metrics HTTP/1.1", "400"),
        ("get /metrics HTTP/1.1", "400"),
        ("GET http://x/metrics HTTP/1.1", "400"),
        ("", "400"),
    ] {
        let answer = String::from_utf8(answer(request.as_bytes(), || "text\n".to_owned()).bytes());
        let answer = answer.expect("text");
        let (head, body) = answer.split_once("\r\n\r\n").expect("an end of headers");
        assert!(
            head.starts_with(&format!("HTTP/1.1 {status} ")),
            "{request}: {head}"
        );
        assert!(head.contains("\r\nConnection: close"), "{head}");
        match request.starts_with("HEAD") {
            true => assert!(body.is_empty() && head.contains("Content-Length: 5"), "{head}"),
            false => assert!(
                head.contains(&format!("Content-Length: {}", body.len())),
                "{head}"
            ),
        }
    }
}

#[test]
fn random_requests_get_an_answer() {
    let mut random = Random::new(3);
    for _ in 0..20_000 {
        let mut request = b"GET /metrics HTTP/1.1\r\nHost: a\r\nAccept: */*".to_vec();
        for _ in 0..random.below(4) {
            let at = random.below(request.len() as u64) as usize;
            request[at] = random.below(256) as u8;
        }
        request.truncate(random.below(request.len() as u64 + 1) as usize);
        let answer = answer(&request, || "text".to_owned()).bytes();
        assert!(answer.starts_with(b"HTTP/1.1 "), "{request:?}");
    }
}

/// Sends a request and returns the whole answer, or nothing if the server hangs up.
fn ask(path: &Path, request: &[u8]) -> String {
    let mut stream = UnixStream::connect(path).expect("a server");
    // It may hang up before all of it is sent.
    stream.write_all(request).unwrap_or_default();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap_or_default();
    String::from_utf8(answer).expect("text")
}

const GET: &[u8] = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n";

fn start(path: &Path, takeover: bool) -> Result<Metrics, MetricsError> {
    Metrics::start(&Address::Unix(path.to_owned()), false, takeover)
}

#[test]
fn server_answers_while_clients_stall_and_drops_these() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("metrics");
    let metrics = start(&path, false).expect("a server");
    let mut text = ask(&path, GET);
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
    metrics.report(Arc::new(reports));
    text = ask(&path, GET);
    let (_, body) = text.split_once("\r\n\r\n").expect("an end of headers");
    assert!(sample(&parse(body), "process_open_fds", &[]) > 3.0);
    assert!(body.contains("disk=\"root\""), "{body}");

    let long = [GET[..GET.len() - 4].to_vec(), vec![b'a'; HEAD_MAX + 2048]].concat();
    assert!(ask(&path, &long).starts_with("HTTP/1.1 431 "));

    // They say nothing, or an incomplete request, bit by bit.
    let began = Instant::now();
    let mut silent: Vec<_> = (0..CLIENTS_MAX)
        .map(|_| UnixStream::connect(&path).expect("a server"))
        .collect();
    let mut refused = ask(&path, b"");
    while !refused.starts_with("HTTP/1.1 503 ") {
        assert!(began.elapsed() < TIME_MAX, "the seats are never taken: {refused}");
        refused = ask(&path, b"");
    }
    while !ask(&path, GET).starts_with("HTTP/1.1 200 OK\r\n") {
        assert!(began.elapsed() < 4 * TIME_MAX, "they keep their seats");
        silent
            .iter_mut()
            .for_each(|stream| stream.write_all(b"G").unwrap_or_default());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(began.elapsed() >= TIME_MAX / 2, "{:?}", began.elapsed());
}

#[test]
fn address_in_use_is_refused_unless_its_server_hands_over() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("metrics");
    let old = start(&path, false).expect("a server");
    let error = start(&path, false).expect_err("in use").to_string();
    let expected = format!("--metrics unix:{}: the address is in use", path.display());
    assert!(error.starts_with(&expected), "{error}");
    let new = start(&path, true).expect("it waits");
    std::thread::sleep(3 * TRY_AGAIN);
    assert!(new.listener.lock().is_none());
    // A process that exits closes it, and here it must be closed otherwise.
    if let Some(Listener::Unix(socket)) = old.listener.lock().take() {
        std::fs::remove_file(socket.path()).expect("a socket");
        socket.give_up();
    }
    let began = Instant::now();
    while new.listener.lock().is_none() {
        assert!(began.elapsed() < Duration::from_secs(10), "it is never taken");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(ask(&path, GET).starts_with("HTTP/1.1 200 OK\r\n"));
}

#[test]
fn port_in_use_is_refused() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = Address::Tcp(taken.local_addr().expect("an address"));
    let error = Metrics::start(&address, false, false).expect_err("in use");
    assert!(matches!(error, MetricsError::InUse { .. }), "{error}");
}

#[test]
fn address_parses_local_places_only() {
    for text in [
        "unix:/run/metrics",
        "unix:m",
        "127.0.0.1:9100",
        "[::1]:9100",
        "127.9.9.9:1",
    ] {
        assert_eq!(text.parse::<Address>().expect("an address").to_string(), text);
    }
    for text in [
        "",
        "9100",
        "localhost:9100",
        "unix:",
        "127.0.0.1:0",
        "127.0.0.1:99999",
        "/run/metrics",
    ] {
        let error = text.parse::<Address>().expect_err("no address").to_string();
        assert!(
            error.contains("expected unix:PATH") || text == "unix:",
            "{text}: {error}"
        );
    }
    let error = "0.0.0.0:9100"
        .parse::<Address>()
        .expect_err("for everybody")
        .to_string();
    assert!(error.contains("expected 127.0.0.1:PORT"), "{error}");
}
