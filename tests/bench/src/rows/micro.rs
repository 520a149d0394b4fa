//! The micro-benchmarks of the crates, which live in the crates' own `benches/`.
//!
//! Each prints, besides what criterion prints, one line for every figure that a promise is made of:
//!
//! ```text
//! bench_result NAME VALUE UNIT
//! ```

use std::io;
use std::process::Command;
use std::time::Duration;

use super::{Bench, Row};
use crate::process;
use crate::report::{Better, Entry};

/// The longest time for a benchmark, the build included.
const LIMIT: Duration = Duration::from_secs(600);

/// The time that a cached lookup may take, in nanoseconds.
const LOOKUP_NS: f64 = 20.0;

/// The bytes that a processor is to encrypt or decrypt in a second, in GB.
const CIPHER_GB: f64 = 2.0;

/// One figure that a benchmark printed.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Figure {
    /// Its name, as printed.
    pub(crate) name: String,
    /// Its value.
    pub(crate) value: f64,
    /// The unit, as printed.
    pub(crate) unit: String,
}

/// The rows of this part.
#[must_use]
pub(crate) fn rows() -> Vec<Row> {
    let listed = |name, package, bench| Row {
        name,
        promises: Vec::new(),
        run: Box::new(move |row, _| listed(row, package, bench)),
    };
    vec![
        Row {
            name: "micro/mapping",
            promises: vec![("lookup-hit", 1.0.into()), ("lookup-two-threads", 1.8.into())],
            run: Box::new(mapping),
        },
        Row {
            name: "micro/cipher",
            promises: vec![
                ("cipher/aes-256-encrypt-piece", 1.0.into()),
                ("cipher/aes-256-decrypt-piece", 1.0.into()),
            ],
            run: Box::new(cipher),
        },
        listed("micro/chain", "ringdisk-qcow", "chain"),
        listed("micro/allocation", "ringdisk-qcow", "allocation"),
        listed("micro/round-trip", "ringdisk-block", "round_trip"),
        Row {
            name: "micro/block-queue",
            promises: Vec::new(),
            run: Box::new(block_queue),
        },
    ]
}

/// A cached mapping lookup: at most [`LOOKUP_NS`], and two threads do at least 1.8 times what one does.
/// Expects `lookup_hit_1_thread` (ns for one lookup) and `lookup_hit_2_threads` (ns for one lookup on
/// either thread, both at work).
fn mapping(row: &Row, _: &mut Bench) -> io::Result<Vec<Entry>> {
    let figures = run("ringdisk-qcow", "mapping", &[])?;
    let of = |name: &str| {
        let found = figures.iter().find(|figure| figure.name == name);
        found
            .map(|figure| figure.value)
            .ok_or_else(|| io::Error::other(format!("mapping printed no {name}")))
    };
    let (one, two) = (of("lookup_hit_1_thread")?, of("lookup_hit_2_threads")?);
    let rate = |threads: f64, ns: f64| threads * 1000.0 / ns;
    Ok(vec![
        row.entry("lookup-hit", "ns", Better::Lower, one, ("bound", LOOKUP_NS)),
        row.entry(
            "lookup-two-threads",
            "M/s",
            Better::Higher,
            rate(2.0, two),
            ("one thread", rate(1.0, one)),
        ),
    ])
}

/// A request through the block queue and a disk that does nothing: our rings beside those of `virtio-queue`.
fn block_queue(row: &Row, _: &mut Bench) -> io::Result<Vec<Entry>> {
    let (package, bench) = ("ringdisk-virtio-devices", "block_queue");
    let ours = run(package, bench, &[])?;
    let theirs = run(package, bench, &["--features", "virtio-queue"])?;
    Ok(ours
        .into_iter()
        .map(|figure| {
            let peer = theirs.iter().find(|peer| peer.name == figure.name);
            let peer = ("virtio-queue", peer.map_or(0.0, |peer| peer.value));
            row.entry(&figure.name, &figure.unit, Better::Lower, figure.value, peer)
        })
        .collect())
}

/// The ciphers of guest data on one processor: [`CIPHER_GB`] per second at least in pieces as the engine has them.
fn cipher(row: &Row, _: &mut Bench) -> io::Result<Vec<Entry>> {
    let figures = run("ringdisk-qcow", "cipher", &[])?;
    let entry = |figure: Figure| {
        row.entry(
            &figure.name,
            &figure.unit,
            Better::Higher,
            figure.value,
            ("bound", CIPHER_GB),
        )
    };
    Ok(figures.into_iter().map(entry).collect())
}

/// The figures of a benchmark that nothing is promised of.
fn listed(row: &Row, package: &str, bench: &str) -> io::Result<Vec<Entry>> {
    let figures = run(package, bench, &[])?;
    Ok(figures
        .into_iter()
        .map(|figure| row.alone(&figure.name, &figure.unit, Better::Lower, figure.value))
        .collect())
}

/// Runs `cargo bench -p package --bench bench`, with `more` arguments of cargo, and collects its `bench_result` lines.
///
/// # Errors
///
/// If there is no such benchmark, it fails, or it prints no figure.
pub(crate) fn run(package: &str, bench: &str, more: &[&str]) -> io::Result<Vec<Figure>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command
        .args(["bench", "-q", "-p", package, "--bench", bench])
        .args(more);
    let figures = parse(&process::output(command, LIMIT)?);
    if figures.is_empty() {
        return Err(io::Error::other(format!(
            "benchmark {bench} of {package} printed no bench_result line"
        )));
    }
    Ok(figures)
}

fn parse(text: &str) -> Vec<Figure> {
    text.lines()
        .filter_map(|line| {
            let mut words = line
                .trim()
                .strip_prefix("bench_result ")?
                .split_ascii_whitespace();
            let (name, value, unit) = (words.next()?, words.next()?, words.next()?);
            let value: f64 = value.parse().ok()?;
            value.is_finite().then(|| Figure {
                name: name.to_owned(),
                value,
                unit: unit.to_owned(),
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_picks_figures_from_criterion_output() {
        let text = "mapping  time: [41.1 ns 41.3 ns 41.5 ns]\nbench_result lookup_hit_1_thread 41.3 ns\n\
                    bench_result broken x ns\n";
        let expected = Figure {
            name: "lookup_hit_1_thread".into(),
            value: 41.3,
            unit: "ns".into(),
        };
        assert_eq!(parse(text), [expected]);
    }
}
