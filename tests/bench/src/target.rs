//! The targets of figures, and the verdict on a figure or on several of them together.

/// The bounds of a ratio of which nothing is known.
const UNKNOWN: [f64; 2] = [0.0, f64::INFINITY];

/// A target of a figure. All ratios are made so that larger is better.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Target {
    /// The ratio to the peer is this or more.
    Ratio(f64),
    /// One of two bounds is reached.
    Either(Either),
}

/// A target with two ways to meet it: to be at the limit of the device below, or so much better than the peer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Either {
    /// The share of the device's own rate that is enough.
    pub(crate) of_limit: f64,
    /// The ratio to the peer that is enough.
    pub(crate) of_peer: f64,
    /// The most CPU time of a request for that, as a share of the peer's, if it matters.
    pub(crate) cpu_max: Option<f64>,
    /// The least ratio to the peer in any case.
    pub(crate) floor: f64,
}

impl From<f64> for Target {
    fn from(ratio: f64) -> Self {
        Self::Ratio(ratio)
    }
}

impl From<Either> for Target {
    fn from(either: Either) -> Self {
        Self::Either(either)
    }
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Ratio(ratio) => write!(f, "≥ {ratio:.2}×"),
            Self::Either(either) => {
                write!(f, "≥ {:.2} of the limit, or ", either.of_limit)?;
                f.write_str(&either.beside_the_peer())?;
                match either.floor {
                    floor if floor > 0.0 => write!(f, "; ≥ {floor:.2}× anyway"),
                    _ => Ok(()),
                }
            }
        }
    }
}

/// A ratio that is measured: its bounds, and the ratio of the medians between them. Not measured: anything.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Measured {
    middle: Option<f64>,
    bounds: [f64; 2],
}

impl Measured {
    /// A ratio, with the spread of its turns if there is one.
    #[must_use]
    pub(crate) fn new(ratio: f64, spread: Option<[f64; 2]>) -> Self {
        Self {
            middle: Some(ratio),
            bounds: spread.unwrap_or([ratio; 2]),
        }
    }

    /// A ratio of which nothing is known.
    #[must_use]
    pub(crate) fn unknown() -> Self {
        Self {
            middle: None,
            bounds: UNKNOWN,
        }
    }
}

/// The ratios that decide an [`Either`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ratios {
    /// To the rate of the device below.
    pub(crate) limit: Measured,
    /// To the peer.
    pub(crate) peer: Measured,
    /// Of CPU time per request, the peer's over ours.
    pub(crate) cpu: Measured,
}

/// The outcome for a target.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Verdict {
    /// It is met, or not.
    Met(bool),
    /// More turns could change whether it is met.
    Undecided,
    /// A ratio that is not measured could change whether it is met.
    NotMeasured,
}

/// The bound of an [`Either`] that was reached.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Way {
    /// That of the device below.
    Limit,
    /// That of the peer.
    Peer,
}

/// Decides about a ratio that must reach `target`.
#[must_use]
pub(crate) fn decide(ratio: Measured, target: f64) -> Verdict {
    verdict(&[ratio], ratio.bounds.map(|bound| bound >= target))
}

/// Returns the verdict of a rule that grows with each of its `parts`, by what it says at all their lower bounds and at all
/// their upper bounds.
fn verdict(parts: &[Measured], [low, high]: [bool; 2]) -> Verdict {
    if low == high {
        Verdict::Met(low)
    } else if parts.iter().any(|part| part.middle.is_none()) {
        Verdict::NotMeasured
    } else {
        Verdict::Undecided
    }
}

impl Either {
    /// Decides about three ratios.
    #[must_use]
    pub(crate) fn decide(&self, ratios: &Ratios) -> Verdict {
        let holds = |bound: usize| {
            let at = |ratio: Measured| ratio.bounds[bound];
            self.way(at(ratios.limit), at(ratios.peer), at(ratios.cpu))
                .is_some()
        };
        let cpu = self.cpu_max.map(|_| ratios.cpu);
        let parts: Vec<_> = [ratios.limit, ratios.peer].into_iter().chain(cpu).collect();
        verdict(&parts, [holds(0), holds(1)])
    }

    /// Returns the bound that the medians reach, that of the limit first. `None` if they reach neither, or are below the floor.
    #[must_use]
    pub(crate) fn way_met(&self, ratios: &Ratios) -> Option<Way> {
        let middle = |ratio: Measured| ratio.middle.unwrap_or(ratio.bounds[0]);
        self.way(middle(ratios.limit), middle(ratios.peer), middle(ratios.cpu))
    }

    fn way(&self, limit: f64, peer: f64, cpu: f64) -> Option<Way> {
        let lean = self.cpu_max.is_none_or(|most| cpu * most >= 1.0);
        let way = if limit >= self.of_limit {
            Some(Way::Limit)
        } else {
            (peer >= self.of_peer && lean).then_some(Way::Peer)
        };
        way.filter(|_| peer >= self.floor)
    }

    /// Returns the second bound in words.
    #[must_use]
    pub(crate) fn beside_the_peer(&self) -> String {
        let cpu = self
            .cpu_max
            .map_or(String::new(), |most| format!(" with ≤ {most:.2} of its CPU"));
        format!("≥ {:.2}× the peer{cpu}", self.of_peer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISK: Either = Either {
        of_limit: 0.97,
        of_peer: 1.25,
        cpu_max: Some(0.6),
        floor: 1.0,
    };

    fn exact(limit: f64, peer: f64, cpu: f64) -> Ratios {
        let [limit, peer, cpu] = [limit, peer, cpu].map(|ratio| Measured::new(ratio, None));
        Ratios { limit, peer, cpu }
    }

    #[test]
    fn either_bound_meets_a_disk_target_and_the_floor_holds_for_both() {
        let cases = [
            ((0.98, 1.02, 1.0), Some(Way::Limit)),
            ((0.90, 1.30, 1.7), Some(Way::Peer)),
            ((0.98, 1.30, 1.7), Some(Way::Limit)),
            // Faster, but not with so much less CPU time.
            ((0.90, 1.30, 1.6), None),
            ((0.96, 1.20, 3.0), None),
            // At the disk's limit, and the peer is above it.
            ((0.99, 0.99, 3.0), None),
        ];
        for ((limit, peer, cpu), way) in cases {
            let ratios = exact(limit, peer, cpu);
            assert_eq!(DISK.way_met(&ratios), way, "{ratios:?}");
            assert_eq!(DISK.decide(&ratios), Verdict::Met(way.is_some()), "{ratios:?}");
        }
    }

    #[test]
    fn either_without_cpu_and_floor_asks_for_neither() {
        let flush = Either {
            cpu_max: None,
            floor: 0.0,
            of_peer: 1.3,
            ..DISK
        };
        assert_eq!(flush.decide(&exact(0.5, 1.31, 0.1)), Verdict::Met(true));
        assert_eq!(flush.decide(&exact(0.98, 0.9, 0.1)), Verdict::Met(true));
        assert_eq!(flush.decide(&exact(0.96, 1.29, 9.0)), Verdict::Met(false));
    }

    #[test]
    fn either_is_undecided_while_any_spread_could_change_it() {
        let spread = |ratio, low, high| Measured::new(ratio, Some([low, high]));
        let peer = spread(1.05, 1.02, 1.1);
        let cpu = spread(1.5, 1.4, 1.55);
        let decide = |limit, peer, cpu| DISK.decide(&Ratios { limit, peer, cpu });
        assert_eq!(decide(spread(0.98, 0.96, 1.0), peer, cpu), Verdict::Undecided);
        assert_eq!(decide(spread(0.99, 0.97, 1.0), peer, cpu), Verdict::Met(true));
        assert_eq!(decide(spread(0.94, 0.9, 0.96), peer, cpu), Verdict::Met(false));
        // Above the limit's bound, and perhaps slower than the peer.
        assert_eq!(
            decide(spread(0.99, 0.97, 1.0), spread(1.01, 0.98, 1.1), cpu),
            Verdict::Undecided
        );
        // The CPU time alone is open.
        let (fast, lean) = (spread(1.4, 1.3, 1.5), spread(1.7, 1.6, 1.8));
        assert_eq!(decide(spread(0.9, 0.8, 0.95), fast, lean), Verdict::Undecided);
    }

    #[test]
    fn missing_figure_leaves_open_only_what_it_could_change() {
        let known = |ratio| Measured::new(ratio, None);
        let nothing = Measured::unknown();
        let decide = |limit, peer, cpu| DISK.decide(&Ratios { limit, peer, cpu });
        assert_eq!(
            decide(nothing, known(1.3), known(1.7)),
            Verdict::Met(true),
            "no fio is needed"
        );
        assert_eq!(decide(nothing, known(1.1), known(1.7)), Verdict::NotMeasured);
        assert_eq!(
            decide(nothing, known(0.9), known(1.7)),
            Verdict::Met(false),
            "below the floor"
        );
        assert_eq!(
            decide(known(0.99), nothing, nothing),
            Verdict::NotMeasured,
            "no floor without a peer"
        );
        assert_eq!(super::decide(nothing, 3.0), Verdict::NotMeasured);
    }
}
