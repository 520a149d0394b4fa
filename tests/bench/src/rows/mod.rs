//! The rows of the benchmark: what each measures, beside whom, and what it must reach.

pub(crate) mod before;
mod bitmaps;
pub(crate) mod chain;
pub(crate) mod client;
pub(crate) mod engine;
mod features;
pub(crate) mod guest;
pub(crate) mod memory;
pub(crate) mod micro;
mod migration;
pub(crate) mod queues;
mod said;
pub(crate) mod space;
mod stall;
mod tools;
pub(crate) mod ublk;
mod ublk_scale;
pub(crate) mod vmm;

use std::io;
use std::path::PathBuf;

use crate::client::Connection;
use crate::client::drive::{self, Timing, Wait};
use crate::images::{self, Image, Images, Source};
use crate::peer;
use crate::report::{Better, Entry, median};
use crate::server::{Program, Serve, Server};
use crate::target::Target;
use crate::workload::{Pattern, Sample, Workload};
use crate::{cache, content};

/// The state that all rows share: images, servers, settings and problems.
#[derive(Debug)]
pub(crate) struct Bench {
    /// The images.
    pub(crate) images: Images,
    /// Our server, or what stands for it.
    pub(crate) ours: Program,
    /// The server it is compared with.
    pub(crate) peer: Program,
    /// The directory of an older build's programs.
    pub(crate) before: Option<PathBuf>,
    /// The number of measurements of each side; the sides take turns.
    pub(crate) pairs: u32,
    /// The most measurements of each side, while a target is undecided.
    pub(crate) pairs_max: u32,
    /// The clients' way to wait, if not as each row has it.
    pub(crate) wait: Option<Wait>,
    /// The durations of one measurement.
    pub(crate) timing: Timing,
    /// Problems with the rest of a row, where a part has been measured.
    pub(crate) problems: Vec<String>,
    /// Peers of a row that have failed, each with what is known of it.
    pub(crate) peers_failed: Vec<String>,
}

#[cfg(test)]
impl Bench {
    /// The state of a test: small images below `directory`, one turn of a moment, and QEMU's server on our side, too.
    pub(crate) fn of_test(directory: &std::path::Path, peer: Program) -> io::Result<Self> {
        let moment = std::time::Duration::from_millis(50);
        Ok(Self {
            images: Images::of_test(directory)?,
            ours: Program::storage_daemon(),
            peer,
            before: None,
            pairs: 1,
            pairs_max: 1,
            wait: Some(Wait::Sleep),
            timing: Timing {
                warm_up: moment,
                measure: moment,
            },
            problems: Vec::new(),
            peers_failed: Vec::new(),
        })
    }
}

/// Measures a row.
type Measure = dyn Fn(&Row, &mut Bench) -> io::Result<Vec<Entry>>;

/// A row: its name, and how to measure it.
pub(crate) struct Row {
    /// place/kind, as given on the command line and printed.
    pub(crate) name: &'static str,
    /// The targets of its figures, with the figures' names.
    pub(crate) promises: Vec<(&'static str, Target)>,
    run: Box<Measure>,
}

impl std::fmt::Debug for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Row")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl Row {
    /// A row of a test.
    #[cfg(test)]
    pub(crate) fn new(
        name: &'static str,
        promises: Vec<(&'static str, Target)>,
        run: impl Fn(&Self, &mut Bench) -> io::Result<Vec<Entry>> + 'static,
    ) -> Self {
        let run = Box::new(run);
        Self { name, promises, run }
    }

    /// Measures the row.
    ///
    /// # Errors
    ///
    /// If anything that takes part fails.
    pub(crate) fn measure(&self, bench: &mut Bench) -> io::Result<Vec<Entry>> {
        (self.run)(self, bench)
    }

    fn promised(&self, what: &str) -> Option<Target> {
        let promised = self.promises.iter().find(|(figure, _)| *figure == what);
        promised.map(|(_, target)| *target)
    }

    /// The ratio that a figure must reach. One with another kind of target is an entry of [`Row::either`].
    fn ratio_promised(&self, what: &str) -> Option<f64> {
        match self.promised(what)? {
            Target::Ratio(ratio) => Some(ratio),
            Target::Either(_) => None,
        }
    }

    fn entry(&self, what: &str, unit: &str, better: Better, ours: f64, peer: (&str, f64)) -> Entry {
        Entry::new(format!("{}/{what}", self.name), unit, better, ours, peer)
            .target(self.ratio_promised(what))
    }

    /// As [`Row::entry`], of what both sides had in each turn.
    fn compare<T>(
        &self,
        what: &str,
        unit: &str,
        better: Better,
        ours: &Turns<T>,
        peer: (&str, &Turns<T>),
        figure: fn(&T) -> f64,
    ) -> Entry {
        let of = |turns: &Turns<T>| turns.samples.iter().map(figure).collect::<Vec<_>>();
        match &peer.1.failure {
            Some(reason) => self.not_measured(what, unit, &of(ours), peer.0, reason),
            None => self.compare_figures(what, unit, better, &of(ours), (peer.0, &of(peer.1))),
        }
    }

    /// A figure of ours beside a peer that was not measured.
    fn not_measured(&self, what: &str, unit: &str, ours: &[f64], peer: &str, reason: &str) -> Entry {
        let ours = median(ours.iter().copied());
        Entry::without_peer(format!("{}/{what}", self.name), unit, ours, peer, reason)
            .target(self.ratio_promised(what))
    }

    /// The verdict on a figure with two ways to meet its target, by the comparisons with the device below, with the peer and, of CPU
    /// time, with the peer. `None` if the figure has no such target.
    fn either(&self, what: &str, limit: &Entry, peer: &Entry, cpu: Option<&Entry>) -> Option<Entry> {
        match self.promised(what)? {
            Target::Either(either) => {
                let name = format!("{}/{what}", self.name);
                Some(Entry::either(name, &either, limit, peer, cpu))
            }
            Target::Ratio(_) => None,
        }
    }

    /// As [`Row::compare`], of figures.
    fn compare_figures(
        &self,
        what: &str,
        unit: &str,
        better: Better,
        ours: &[f64],
        peer: (&str, &[f64]),
    ) -> Entry {
        Entry::of_turns(format!("{}/{what}", self.name), unit, better, ours, peer)
            .target(self.ratio_promised(what))
    }

    /// A figure that nobody else has.
    fn alone(&self, what: &str, unit: &str, better: Better, ours: f64) -> Entry {
        let entry = self.entry(what, unit, better, ours, ("", 0.0));
        Entry {
            peer: None,
            peer_name: None,
            ..entry
        }
    }
}

/// All rows, in the order they run: those on the same image together. With `before`, only those that compare with
/// an older build.
#[must_use]
pub(crate) fn all(before: bool) -> Vec<Row> {
    if before {
        return before::rows();
    }
    let mut rows = client::rows();
    rows.extend(guest::rows());
    rows.extend(queues::rows());
    rows.extend(engine::rows());
    rows.extend(chain::rows());
    rows.extend(features::rows());
    rows.extend(bitmaps::rows());
    rows.extend(stall::rows());
    rows.extend(tools::rows());
    rows.extend(memory::rows());
    rows.extend(space::rows());
    rows.extend(micro::rows());
    rows.extend(migration::rows());
    rows.extend(vmm::rows());
    rows.extend(ublk::rows());
    rows.extend(ublk_scale::rows());
    rows
}

/// The samples of one side of a row, one for each turn.
#[derive(Debug)]
pub(crate) struct Turns<T = Sample> {
    samples: Vec<T>,
    /// The failure of a peer, which is not measured then.
    failure: Option<String>,
}

impl<T> Turns<T> {
    /// The turns of a peer that has failed, or those before the first.
    fn none(failure: Option<String>) -> Self {
        let samples = Vec::new();
        Self { samples, failure }
    }

    /// The median of a figure.
    fn median(&self, figure: fn(&T) -> f64) -> f64 {
        median(self.samples.iter().map(figure))
    }
}

/// Measures all `sides` in turns, and returns the entries that `entries` makes of the samples of each side. The order is turned
/// round after each turn, and nothing that one side wrote is left to be written while another is measured. Turns are added up to
/// [`Bench::pairs_max`] while a target is undecided. A peer that has [failed](peer::failed) takes no more turns.
///
/// # Errors
///
/// If anything but a peer fails.
fn in_turns<S: Copy, T>(
    bench: &mut Bench,
    sides: &[S],
    mut measure: impl FnMut(&mut Bench, S) -> io::Result<T>,
    entries: impl Fn(&[Turns<T>]) -> Vec<Entry>,
) -> io::Result<Vec<Entry>> {
    let mut turns: Vec<Turns<T>> = sides.iter().map(|_| Turns::none(None)).collect();
    let mut order: Vec<usize> = (0..sides.len()).collect();
    for turn in 1.. {
        for &index in &order {
            if turns[index].failure.is_some() {
                continue;
            }
            bench.images.settle()?;
            match measure(bench, sides[index]) {
                Ok(sample) => turns[index].samples.push(sample),
                Err(error) => {
                    let failure = peer::failure(error)?;
                    bench.peers_failed.push(failure.clone());
                    turns[index] = Turns::none(Some(failure));
                }
            }
        }
        order.reverse();
        if turn < bench.pairs {
            continue;
        }
        let entries = entries(&turns);
        if turn >= bench.pairs_max || !entries.iter().any(Entry::is_undecided) {
            return Ok(entries);
        }
    }
    Ok(Vec::new())
}

/// The way to measure one side over vhost-user.
#[derive(Clone, Copy, Debug)]
struct Served {
    source: Source,
    direct: bool,
    queues: u16,
    workload: Workload,
    wait: Wait,
    /// The budget of the L2 table cache in KiB, if not the server's own choice.
    cache_kib: Option<u32>,
}

/// Starts `program`, runs the workload against it, stops it, and has the image checked if it was written.
fn measure_served(bench: &mut Bench, program: &Program, served: &Served) -> io::Result<Sample> {
    let image = bench.images.image(served.source)?;
    cache::prepare(&image, !served.direct)?;
    let serve = Serve {
        image: &image,
        direct: served.direct,
        queues: served.queues,
        l2_cache_kib: served.cache_kib,
        control: false,
    };
    let server = Server::start(program, &serve, bench.images.directory())?;
    let sample = drive_server(bench, &server, served)
        .map_err(|error| explained(program.name(), &error, &server.last_words()))?;
    server.stop()?;
    if served.workload.pattern.writes() {
        images::check(&image).map_err(|error| spoiled(program.name(), &image, &error))?;
    }
    Ok(sample)
}

fn drive_server(bench: &Bench, server: &Server, served: &Served) -> io::Result<Sample> {
    let block_bytes = served.workload.block_bytes;
    let mut connection = Connection::open(server.socket(), served.queues, block_bytes)?;
    if connection.disk_bytes != served.workload.disk_bytes {
        let (found, expected) = (connection.disk_bytes, served.workload.disk_bytes);
        return Err(io::Error::other(format!(
            "the disk has {found} bytes, {expected} were served"
        )));
    }
    if served.source.has_content() && block_bytes as usize >= content::BLOCK_BYTES {
        drive::verify(&mut connection, served.workload.disk_bytes, 64)?;
    }
    let wait = bench.wait.unwrap_or(served.wait);
    let mut sample = drive::run(connection, &served.workload, wait, bench.timing, &|| {
        server.cpu_seconds()
    })?;
    sample.resident_mib = server.resident_mib()?;
    Ok(sample)
}

/// As [`measure_served`], with a peer as the server. If it fails, an image that it wrote to is not used again.
fn measure_served_peer(bench: &mut Bench, program: &Program, served: &Served) -> io::Result<Sample> {
    let measured = measure_served(bench, program, served);
    if measured.is_err() && served.workload.pattern.writes() {
        bench.images.forget(served.source)?;
    }
    measured.map_err(|error| peer::failed(program.name(), &error))
}

fn explained(name: &str, error: &io::Error, words: &str) -> io::Error {
    let said = if words.is_empty() {
        String::new()
    } else {
        format!("; it printed: {words}")
    };
    io::Error::new(error.kind(), format!("{name}: {error}{said}"))
}

fn spoiled(name: &str, image: &Image, error: &io::Error) -> io::Error {
    io::Error::other(format!(
        "{name} left {} with errors: {error}",
        image.path.display()
    ))
}

/// A workload on all of an image.
fn workload(source: Source, pattern: Pattern, block_bytes: u32, depth: u16) -> Workload {
    Workload {
        pattern,
        block_bytes,
        depth,
        disk_bytes: source.disk_bytes(),
    }
}
