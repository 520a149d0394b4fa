//! Results: one entry per figure, written as JSON, printed as a table.

use std::fs;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::target::{self, Either, Measured, Ratios, Target, Verdict, Way};

/// The reason for a row that more turns could decide.
const SPREAD: &str = "the spread of its turns covers the target";

/// One figure beside its peer's.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct Entry {
    /// The name of what was measured: place/kind/figure.
    pub(crate) row: String,
    /// Our figure.
    pub(crate) ours: f64,
    /// The peer's, or the bound that was promised.
    pub(crate) peer: Option<f64>,
    /// The peer's name.
    pub(crate) peer_name: Option<String>,
    /// The unit of both.
    pub(crate) unit: String,
    /// Ours against the peer's, so that larger is better.
    pub(crate) ratio: Option<f64>,
    /// The ratio to reach. Of two of which one is enough ([`Either`]), the one that the ratio is measured by.
    pub(crate) target: Option<f64>,
    /// True if the target is met; `None` if there is none, or if that is not decided.
    pub(crate) met: Option<bool>,
    /// The lowest and the highest ratio that the turns leave possible: see [`spread`].
    #[serde(default)]
    pub(crate) spread: Option<[f64; 2]>,
    /// The bound that was met where one of two is enough, or how far it is from both.
    #[serde(default)]
    pub(crate) by: Option<String>,
    /// The reason why the target is neither met nor missed.
    #[serde(default)]
    pub(crate) undecided: Option<String>,
    /// The reason why the peer, or whoever else it takes, was not measured.
    #[serde(default)]
    pub(crate) not_measured: Option<String>,
}

/// The direction in which figures are good.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Better {
    /// Large ones: operations per second.
    Higher,
    /// Small ones: latency, CPU time, memory.
    Lower,
}

impl Entry {
    /// Compares `ours` with a peer's figure.
    #[must_use]
    pub(crate) fn new(row: String, unit: &str, better: Better, ours: f64, peer: (&str, f64)) -> Self {
        let (peer_name, peer) = peer;
        let (above, below) = match better {
            Better::Higher => (ours, peer),
            Better::Lower => (peer, ours),
        };
        let ratio = (below > 0.0 && above > 0.0).then(|| above / below);
        Self {
            row,
            ours,
            peer: Some(peer),
            peer_name: Some(peer_name.to_owned()),
            unit: unit.to_owned(),
            ratio,
            target: None,
            met: None,
            spread: None,
            by: None,
            undecided: None,
            not_measured: None,
        }
    }

    /// An entry of our figure alone: `peer` was not measured, for this `reason`.
    #[must_use]
    pub(crate) fn without_peer(row: String, unit: &str, ours: f64, peer: &str, reason: &str) -> Self {
        Self {
            peer: None,
            not_measured: Some(reason.to_owned()),
            ..Self::new(row, unit, Better::Higher, ours, (peer, 0.0))
        }
    }

    /// Compares the medians of what both sides had in each turn.
    #[must_use]
    pub(crate) fn of_turns(
        row: String,
        unit: &str,
        better: Better,
        ours: &[f64],
        peer: (&str, &[f64]),
    ) -> Self {
        let middle = |figures: &[f64]| median(figures.iter().copied());
        let whole = Self::new(row, unit, better, middle(ours), (peer.0, middle(peer.1)));
        let ratios = ours
            .iter()
            .zip(peer.1)
            .filter_map(|(ours, peer)| Self::new(String::new(), unit, better, *ours, ("", *peer)).ratio);
        Self {
            spread: spread(ratios),
            ..whole
        }
    }

    /// Returns true if more turns could change whether the target is met.
    #[must_use]
    pub(crate) fn is_undecided(&self) -> bool {
        self.undecided.is_some()
    }

    /// Returns true if there is a target, and no figure to decide about it.
    #[must_use]
    pub(crate) fn lacks_measurement(&self) -> bool {
        self.target.is_some() && self.met.is_none() && self.undecided.is_none()
    }

    /// With the ratio to reach, if any.
    #[must_use]
    pub(crate) fn target(mut self, target: Option<f64>) -> Self {
        self.target = target;
        if let Some(target) = target {
            self.settle(target::decide(self.measured(), target));
        }
        self
    }

    /// Leaves a target open: what was measured decides nothing, for this `reason`.
    pub(crate) fn leave_undecided(&mut self, reason: &str) {
        if self.target.is_some() && !self.lacks_measurement() {
            self.met = None;
            self.undecided = Some(reason.to_owned());
        }
    }

    /// An entry for the target that `either` of two comparisons meets: `limit` with the device below, `peer` with the peer;
    /// `cpu` compares the CPU time of a request with the peer's. It has the figures of the comparison that met it, or of the one with
    /// the peer.
    #[must_use]
    pub(crate) fn either(
        row: String,
        either: &Either,
        limit: &Self,
        peer: &Self,
        cpu: Option<&Self>,
    ) -> Self {
        let ratios = Ratios {
            limit: limit.measured(),
            peer: peer.measured(),
            cpu: cpu.map_or(Measured::unknown(), Self::measured),
        };
        let way = either.way_met(&ratios);
        let (shown, target) = match way {
            Some(Way::Limit) => (limit, either.of_limit),
            _ => (peer, either.of_peer),
        };
        let name = |entry: &Self| entry.peer_name.clone().unwrap_or_default();
        let times = |entry: &Self| entry.ratio.map_or("–".to_owned(), |ratio| format!("{ratio:.2}"));
        let cpu_share = |entry: &&Self| {
            let ratio = entry.ratio.filter(|_| either.cpu_max.is_some())?;
            Some(format!(" with {:.2} of its CPU", 1.0 / ratio))
        };
        let of_limit = format!("{} of {}", times(limit), name(limit));
        let of_peer = format!(
            "{}× {}{}",
            times(peer),
            name(peer),
            cpu.as_ref().and_then(cpu_share).unwrap_or_default()
        );
        let by = match way {
            Some(Way::Limit) => of_limit,
            Some(Way::Peer) => of_peer,
            None => format!("neither: {of_limit}, {of_peer}"),
        };
        let mut missing: Vec<_> = [Some(limit), Some(peer), cpu]
            .into_iter()
            .flatten()
            .filter_map(|part| part.not_measured.clone())
            .collect();
        missing.dedup();
        let mut entry = Self {
            row,
            target: Some(target),
            by: Some(by),
            undecided: None,
            not_measured: None,
            ..shown.clone()
        };
        match either.decide(&ratios) {
            Verdict::NotMeasured => entry.not_measured = Some(missing.join("; ")),
            verdict => entry.settle(verdict),
        }
        entry
    }

    fn settle(&mut self, verdict: Verdict) {
        self.met = match verdict {
            Verdict::Met(met) => Some(met),
            Verdict::Undecided | Verdict::NotMeasured => None,
        };
        self.undecided = (verdict == Verdict::Undecided).then(|| SPREAD.to_owned());
    }

    /// Returns the ratio with its spread. A figure of zero, beside which nothing has a ratio, counts as the worst.
    fn measured(&self) -> Measured {
        match self.not_measured {
            Some(_) => Measured::unknown(),
            None => Measured::new(self.ratio.unwrap_or(0.0), self.spread),
        }
    }
}

/// The middle of some figures; of an even number the lower of the two.
#[must_use]
pub(crate) fn median(figures: impl IntoIterator<Item = f64>) -> f64 {
    let mut figures: Vec<f64> = figures.into_iter().collect();
    figures.sort_by(f64::total_cmp);
    figures
        .get(figures.len().saturating_sub(1) / 2)
        .copied()
        .unwrap_or_default()
}

/// Returns the bounds between which the true median of the ratios lies with a probability of 95 %; of fewer than six ratios, the
/// lowest and the highest. `None` for fewer than two.
///
/// The bounds are order statistics: a ratio lies below the true median as often as above it, whatever its distribution.
#[must_use]
pub(crate) fn spread(ratios: impl IntoIterator<Item = f64>) -> Option<[f64; 2]> {
    let mut ratios: Vec<f64> = ratios.into_iter().collect();
    ratios.sort_by(f64::total_cmp);
    let count = ratios.len();
    // The probability that at most so many of `count` fair coins show heads: outside 2.5 % on each side.
    let mut left_out = 0;
    let (mut exactly, mut at_most) = (0.5_f64.powi(i32::try_from(count).ok()?), 0.0);
    loop {
        at_most += exactly;
        if at_most > 0.025 {
            break;
        }
        exactly *= (count - left_out) as f64 / (left_out + 1) as f64;
        left_out += 1;
    }
    let first = left_out.saturating_sub(1);
    (count > 1).then(|| [ratios[first], ratios[count - 1 - first]])
}

/// A figure with as many digits as it deserves, thousands apart.
#[must_use]
pub(crate) fn figure(value: f64) -> String {
    let decimals = match value.abs() {
        v if v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        _ => 2,
    };
    let text = format!("{value:.decimals$}");
    let (whole, fraction) = text.split_once('.').unwrap_or((&text, ""));
    let mut grouped = String::new();
    for (index, digit) in whole.chars().enumerate() {
        if index > 0 && (whole.len() - index) % 3 == 0 && !grouped.ends_with('-') {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    if fraction.is_empty() {
        grouped
    } else {
        format!("{grouped}.{fraction}")
    }
}

const HEADS: [&str; 8] = ["row", "ours", "peer", "unit", "ratio", "spread", "target", "met"];

fn cells(entry: &Entry) -> [String; 8] {
    let peer = match (entry.peer, &entry.peer_name) {
        (Some(peer), Some(name)) => format!("{} ({name})", figure(peer)),
        (Some(peer), None) => figure(peer),
        (None, Some(name)) => format!("– ({name})"),
        (None, None) => "–".to_owned(),
    };
    let times = |ratio: Option<f64>| ratio.map_or("–".to_owned(), |ratio| format!("{ratio:.2}×"));
    let met = match (entry.met, entry.target) {
        (Some(true), _) => "yes",
        (Some(false), _) => "NO",
        (None, Some(_)) if entry.is_undecided() => "undecided",
        (None, Some(_)) => "not measured",
        (None, None) => "",
    };
    let met = match (&entry.by, entry.met) {
        (Some(by), Some(_)) => format!("{met}: {by}"),
        _ => met.to_owned(),
    };
    let spread = entry
        .spread
        .map_or(String::new(), |[low, high]| format!("{low:.2}–{high:.2}"));
    let target = entry
        .target
        .map_or(String::new(), |target| format!("≥ {target:.2}×"));
    let ratio = times(entry.ratio);
    [
        entry.row.clone(),
        figure(entry.ours),
        peer,
        entry.unit.clone(),
        ratio,
        spread,
        target,
        met,
    ]
}

/// The entries as an aligned table.
#[must_use]
pub(crate) fn table(entries: &[Entry]) -> String {
    let rows: Vec<[String; 8]> = entries.iter().map(cells).collect();
    let widths: Vec<usize> = HEADS
        .iter()
        .enumerate()
        .map(|(column, head)| {
            let widest = rows
                .iter()
                .map(|row| row[column].chars().count())
                .max()
                .unwrap_or(0);
            widest.max(head.chars().count())
        })
        .collect();
    let line = |row: &[String; 8]| {
        let padded: Vec<String> = row
            .iter()
            .zip(&widths)
            .enumerate()
            .map(|(column, (cell, &width))| match column {
                0 | 2 | 3 | 7 => format!("{cell:<width$}"),
                _ => format!("{cell:>width$}"),
            })
            .collect();
        padded.join("  ").trim_end().to_owned()
    };
    let mut lines = vec![line(&HEADS.map(str::to_owned))];
    lines.extend(rows.iter().map(line));
    lines.join("\n")
}

/// Returns the promises with what was measured of them, then all other figures, as Markdown. `promises` are the names
/// of figures and their targets; those without a figure are marked.
#[must_use]
pub(crate) fn markdown(promises: &[(String, Target)], entries: &[Entry]) -> String {
    let mut lines = vec![
        "| figure | promise | measured | spread | ours | beside | kept |".to_owned(),
        "|---|--:|--:|--:|--:|---|---|".to_owned(),
    ];
    for (name, promise) in promises {
        lines.push(match entries.iter().find(|entry| entry.row == *name) {
            Some(entry) => {
                let [_, ours, peer, unit, measured, spread, ..] = cells(entry);
                let kept = match entry.met {
                    Some(true) => "yes",
                    Some(false) => "**no**",
                    None if entry.is_undecided() => "*undecided*",
                    None => "*not measured*",
                };
                let kept = match (&entry.by, &entry.undecided, &entry.not_measured) {
                    (Some(reason), None, None) | (_, _, Some(reason)) => format!("{kept}: {reason}"),
                    (_, Some(reason), _) if reason != SPREAD => format!("{kept}: {reason}"),
                    _ => kept.to_owned(),
                };
                format!("| `{name}` | {promise} | {measured} | {spread} | {ours} {unit} | {peer} | {kept} |")
            }
            None => format!("| `{name}` | {promise} | – | – | – | – | *unproven* |"),
        });
    }
    lines.push(String::new());
    lines.push("| figure | ours | beside | unit | ratio |".to_owned());
    lines.push("|---|--:|---|---|--:|".to_owned());
    for entry in entries.iter().filter(|entry| entry.target.is_none()) {
        let [row, ours, peer, unit, ratio, ..] = cells(entry);
        lines.push(format!("| `{row}` | {ours} | {peer} | {unit} | {ratio} |"));
    }
    lines.join("\n")
}

/// Writes the entries to `path` as a JSON list; whoever reads it meanwhile sees the old or the new one.
///
/// # Errors
///
/// If the file cannot be written.
pub(crate) fn write(path: &Path, entries: &[Entry]) -> io::Result<()> {
    write_json(path, &entries)
}

/// Writes anything as JSON, in one step.
///
/// # Errors
///
/// If the file cannot be written.
pub(crate) fn write_json(path: &Path, what: &impl Serialize) -> io::Result<()> {
    let partial = path.with_extension("json.part");
    fs::write(&partial, serde_json::to_string_pretty(what)? + "\n")?;
    fs::rename(partial, path)
}

/// Reads what [`write()`] has written.
///
/// # Errors
///
/// If there is no such file, or it holds something else.
pub(crate) fn read(path: &Path) -> io::Result<Vec<Entry>> {
    Ok(serde_json::from_str(&fs::read_to_string(path)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratio_above_one_is_better_in_both_directions() {
        let faster = Entry::new("a".into(), "IOPS", Better::Higher, 300.0, ("x", 100.0)).target(Some(3.0));
        assert_eq!((faster.ratio, faster.met), (Some(3.0), Some(true)));
        let leaner = Entry::new("b".into(), "MiB", Better::Lower, 20.0, ("x", 10.0)).target(Some(1.0));
        assert_eq!((leaner.ratio, leaner.met), (Some(0.5), Some(false)));
        let plain = Entry::new("c".into(), "µs", Better::Lower, 20.0, ("x", 10.0)).target(None);
        assert_eq!((plain.target, plain.met), (None, None));
    }

    #[test]
    fn zero_figure_meets_no_target() {
        let none = Entry::new("a".into(), "IOPS", Better::Higher, 0.0, ("x", 100.0)).target(Some(0.1));
        assert_eq!((none.ratio, none.met), (None, Some(false)));
    }

    #[test]
    fn json_has_every_key_and_null_without_a_target() {
        let entry = Entry::new("a".into(), "IOPS", Better::Higher, 2.0, ("x", 1.0));
        let json = serde_json::to_string(&entry).unwrap_or_default();
        let keys = concat!(
            r#"{"row":"a","ours":2.0,"peer":1.0,"peer_name":"x","unit":"IOPS","ratio":2.0,"#,
            r#""target":null,"met":null,"spread":null,"by":null,"undecided":null,"not_measured":null}"#
        );
        assert_eq!(json, keys);
    }

    #[test]
    fn median_is_the_middle_value() {
        assert!((median([3.0, 1.0, 2.0]) - 2.0).abs() < 1e-9);
        assert!((median([4.0, 1.0]) - 1.0).abs() < 1e-9);
        assert!(median([]).abs() < 1e-9);
    }

    /// P(at most k of n fair coins): 6 → 1.6 % for none; 9 → 2.0 % for one; 12 → 1.9 % for two; 20 → 2.1 % for five.
    #[test]
    fn spread_narrows_with_the_number_of_turns() {
        let of = |count: usize| spread((1..=count).rev().map(|n| n as f64));
        assert_eq!([of(0), of(1)], [None, None]);
        for (count, low) in [(2, 1), (3, 1), (5, 1), (6, 1), (8, 1), (9, 2), (12, 3), (20, 6)] {
            let bounds = [low as f64, (count + 1 - low) as f64];
            assert_eq!(of(count), Some(bounds), "{count}");
        }
    }

    #[test]
    fn entry_is_undecided_while_its_spread_covers_the_target() {
        let entry = |ours: &[f64], target| {
            let turns = Entry::of_turns(
                "a".into(),
                "IOPS",
                Better::Higher,
                ours,
                ("x", &[100.0, 200.0, 100.0]),
            );
            turns.target(Some(target))
        };
        let noisy = entry(&[90.0, 260.0, 110.0], 1.2);
        assert_eq!((noisy.ratio, noisy.spread), (Some(1.1), Some([0.9, 1.3])));
        assert_eq!((noisy.met, noisy.is_undecided()), (None, true));
        assert!(table(std::slice::from_ref(&noisy)).contains("0.90–1.30  ≥ 1.20×  undecided"));
        for (target, met) in [(0.9, true), (1.31, false)] {
            let decided = entry(&[90.0, 260.0, 110.0], target);
            assert_eq!(
                (decided.met, decided.is_undecided()),
                (Some(met), false),
                "{target}"
            );
        }
        let lower = Entry::of_turns(
            "b".into(),
            "MiB",
            Better::Lower,
            &[50.0, 20.0],
            ("x", &[100.0, 10.0]),
        );
        assert_eq!(lower.spread, Some([0.5, 2.0]));
    }

    #[test]
    fn entry_of_two_ways_says_which_was_met() {
        let either = Either {
            of_limit: 0.97,
            of_peer: 1.25,
            cpu_max: Some(0.6),
            floor: 1.0,
        };
        let entry = |limit: f64, peer: f64, ours_cpu: f64| {
            let beside =
                |name, unit, better, theirs| Entry::new(String::new(), unit, better, 100.0, (name, theirs));
            let limit = beside("fio", "IOPS", Better::Higher, 100.0 / limit);
            let peer = beside("qsd", "IOPS", Better::Higher, 100.0 / peer);
            let cpu = beside("qsd", "CPU s/M", Better::Lower, 100.0 / ours_cpu);
            Entry::either("disk/reach".into(), &either, &limit, &peer, Some(&cpu))
        };
        let limit = entry(0.98, 1.02, 0.9);
        assert_eq!(
            (limit.met, limit.target, limit.by.as_deref()),
            (Some(true), Some(0.97), Some("0.98 of fio"))
        );
        let peer = entry(0.8, 1.5, 0.5);
        let by = "1.50× qsd with 0.50 of its CPU";
        assert_eq!(
            (peer.met, peer.target, peer.by.as_deref()),
            (Some(true), Some(1.25), Some(by))
        );
        let neither = entry(0.8, 1.5, 0.7);
        assert_eq!(neither.met, Some(false));
        let text = table(&[limit, neither]);
        assert!(text.contains("yes: 0.98 of fio"), "{text}");
        assert!(
            text.contains("NO: neither: 0.80 of fio, 1.50× qsd with 0.70 of its CPU"),
            "{text}"
        );
    }

    #[test]
    fn entry_of_two_ways_is_open_for_the_reason_of_its_parts() {
        let either = Either {
            of_limit: 0.97,
            of_peer: 1.25,
            cpu_max: None,
            floor: 0.0,
        };
        let turns = |name, theirs: &[f64]| {
            Entry::of_turns(
                String::new(),
                "IOPS",
                Better::Higher,
                &[100.0, 100.0],
                (name, theirs),
            )
        };
        let (limit, peer) = (turns("fio", &[100.0, 110.0]), turns("qsd", &[100.0, 100.0]));
        let noisy = Entry::either("a".into(), &either, &limit, &peer, None);
        assert_eq!((noisy.met, noisy.undecided.as_deref()), (None, Some(SPREAD)));
        let gone = Entry::without_peer(String::new(), "IOPS", 100.0, "fio", "fio is gone");
        let open = Entry::either("a".into(), &either, &gone, &peer, None);
        assert!(open.lacks_measurement());
        assert_eq!(open.not_measured.as_deref(), Some("fio is gone"));
        let text = markdown(&[("a".into(), either.into())], &[open]);
        assert!(text.contains("*not measured*: fio is gone"), "{text}");
    }

    #[test]
    fn promise_without_a_figure_is_unproven() {
        let kept = Entry::new("a/iops".into(), "IOPS", Better::Higher, 3.0, ("x", 1.0)).target(Some(2.0));
        let text = markdown(
            &[("a/iops".into(), 2.0.into()), ("b/iops".into(), 1.5.into())],
            &[kept],
        );
        let promised = |name: &str| {
            text.lines()
                .find(|line| line.contains(name))
                .unwrap_or_default()
                .to_owned()
        };
        assert!(promised("a/iops").ends_with("| yes |"));
        assert!(promised("b/iops").ends_with("| *unproven* |"));
    }

    #[test]
    fn figure_groups_thousands_and_shortens() {
        assert_eq!(figure(1_234_567.8), "1,234,568");
        assert_eq!(figure(999.6), "1,000");
        assert_eq!(figure(12.345), "12.3");
        assert_eq!(figure(0.1234), "0.12");
    }
}
