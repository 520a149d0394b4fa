//! Small worlds, one for each kind of metadata change, looked at whole: the power goes at every step, and
//! every subset of what was not synced is judged, up to a bound that is printed.

use qcow::format::CompressionType;
use simulator::{Profile, Random};

use crate::bitmaps::Bitmaps;
use crate::plan::{Ask, Case, Explore, Planned};
use crate::shape::{Below, Shape};

/// The most states of one instant that are all looked at; of more, as many by chance.
pub const ALL_UP_TO: u128 = 4096;

/// A small world and what changes in it.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The kind of change that it is about.
    pub name: &'static str,
    /// The image it begins with.
    pub shape: Shape,
    /// The requests made before the power can go.
    pub before: Vec<Planned>,
    /// The requests made then, one after the other.
    pub plan: Vec<Planned>,
    /// The most states of one instant that are all looked at.
    pub all_up_to: u128,
}

const WRITE: Ask = Ask::Write { fua: false };
const FUA: Ask = Ask::Write { fua: true };
const ZEROES: Ask = Ask::Zeroes {
    unmap: false,
    fua: false,
};
const UNMAP: Ask = Ask::Zeroes {
    unmap: true,
    fua: false,
};

const COMPACT: Ask = Ask::Compact {
    reports: 0,
    slow: false,
};

fn asks(list: &[(Ask, u64, u64)]) -> Vec<Planned> {
    list.iter()
        .map(|&(ask, first, count)| Planned::new(ask, first, count))
        .collect()
}

const FLUSH: (Ask, u64, u64) = (Ask::Flush, 0, 0);

impl Scenario {
    fn new(name: &'static str, shape: Shape, plan: &[(Ask, u64, u64)]) -> Self {
        Self {
            name,
            shape,
            before: Vec::new(),
            plan: asks(plan),
            all_up_to: ALL_UP_TO,
        }
    }

    fn after(mut self, before: &[(Ask, u64, u64)]) -> Self {
        self.before = asks(before);
        self
    }

    /// The run of this scenario in which things happen in the order that `schedule` gives: zero for the
    /// order they were asked for, one at a time.
    #[must_use]
    pub fn case(&self, schedule: u64) -> Case {
        let random = &mut Random::new(schedule);
        let orderly = schedule == 0;
        let profile = Profile {
            reorder: !orderly,
            piecewise: if orderly { 0 } else { random.pick(&[0, 300, 900]) },
            linger: if orderly { 0 } else { random.pick(&[0, 300, 900]) },
            ..Profile::default()
        };
        let mut plan = self.plan.clone();
        if !orderly {
            // Several at once, where the plan allows it.
            plan.iter_mut()
                .for_each(|planned| planned.alone = random.one_in(2));
        }
        Case {
            seed: schedule,
            schedule,
            shape: self.shape,
            before: self.before.clone(),
            profile,
            lanes: 1,
            depth: 4,
            worker_turns: if orderly { 900 } else { 400 },
            virtio: None,
            ublk: None,
            registered: None,
            paced: false,
            writes_on: false,
            space: None,
            plan,
            explore: Explore {
                all_up_to: self.all_up_to,
                draws: u64::try_from(self.all_up_to).unwrap_or(u64::MAX),
            },
        }
    }
}

/// Every scenario.
#[must_use]
pub fn all() -> Vec<Scenario> {
    let plain = Shape::PLAIN;
    let full = Shape {
        filled: 1000,
        ..plain
    };
    let coarse = Shape {
        cluster_bits: 10,
        ..plain
    };
    let over = |below| Shape { below, ..coarse };
    // 64 counts per block: a block is full after 32 KiB.
    let wide = Shape {
        refcount_bits: 64,
        bytes: 64 << 10,
        ..plain
    };
    // Of two sectors.
    let subclusters = Shape {
        cluster_bits: 15,
        extended: true,
        ..plain
    };
    let bitmaps = |durable| Shape {
        filled: 200,
        bitmaps: Some(Bitmaps {
            granularity: 512,
            durable,
        }),
        ..plain
    };
    vec![
        Scenario::new(
            "first allocation",
            plain,
            &[(WRITE, 0, 1), FLUSH, (WRITE, 1, 2), (FUA, 5, 1), FLUSH],
        ),
        Scenario::new(
            "new L2 tables",
            Shape {
                bytes: 128 << 10,
                ..plain
            },
            &[
                (WRITE, 0, 1),
                (WRITE, 64, 1),
                FLUSH,
                (WRITE, 128, 1),
                (FUA, 192, 2),
            ],
        ),
        Scenario::new(
            "overwrite",
            full,
            &[(WRITE, 3, 4), FLUSH, (WRITE, 4, 1), (FUA, 5, 1), FLUSH],
        ),
        Scenario::new(
            "L1 growth",
            plain,
            &[
                (WRITE, 0, 1),
                (Ask::Grow(2 << 20 | 32 << 10), 0, 0),
                (WRITE, 64, 1),
                (WRITE, 4096, 1),
                FLUSH,
            ],
        ),
        // 80 clusters of L1, and a refcount block counts 64: the table lies across two of its ranges at least.
        Scenario::new(
            "L1 growth across refcount blocks",
            wide,
            &[(WRITE, 0, 1), (Ask::Grow(160 << 20), 0, 0), (WRITE, 1, 1), FLUSH],
        ),
        Scenario::new(
            "growth over a longer backing file",
            over(Below::Raw(40 << 10)),
            &[(WRITE, 60, 2), (Ask::Grow(48 << 10), 0, 0), (WRITE, 66, 1), FLUSH],
        ),
        Scenario::new(
            "new refcount block",
            wide,
            &[(WRITE, 50, 8), FLUSH, (WRITE, 58, 4), FLUSH],
        )
        .after(&[(WRITE, 0, 50)]),
        Scenario {
            all_up_to: 256,
            ..Scenario::new(
                "refcount table growth",
                wide,
                &[(WRITE, 3980, 24), FLUSH, (WRITE, 4004, 24), FLUSH],
            )
            .after(&[
                (Ask::Grow(2 << 20), 0, 0),
                (WRITE, 0, 1024),
                (WRITE, 1024, 1024),
                (WRITE, 2048, 1024),
                (WRITE, 3072, 900),
            ])
        },
        Scenario::new(
            "copy-on-write from a raw backing file",
            over(Below::Raw(24 << 10)),
            &[(WRITE, 1, 1), FLUSH, (WRITE, 2, 3), (WRITE, 47, 2), FLUSH],
        ),
        Scenario::new(
            "copy-on-write from a QCOW2 backing file",
            over(Below::Qcow(24 << 10)),
            &[(WRITE, 1, 1), FLUSH, (WRITE, 2, 3), (FUA, 47, 2), FLUSH],
        ),
        // The index of the chain is built beside the first read, and found by what follows.
        Scenario::new(
            "copy-on-write from a chain",
            over(Below::Deep(24 << 10)),
            &[
                (Ask::Read, 0, 64),
                (WRITE, 1, 1),
                FLUSH,
                (Ask::Read, 0, 64),
                (WRITE, 2, 3),
                (FUA, 34, 4),
                (Ask::Read, 30, 30),
                FLUSH,
            ],
        ),
        Scenario::new(
            "copy-on-write from compressed clusters",
            Shape {
                compressed: Some(CompressionType::Deflate),
                bytes: 16 << 10,
                cluster_bits: 12,
                ..plain
            },
            &[
                (WRITE, 1, 1),
                FLUSH,
                (WRITE, 12, 3),
                FLUSH,
                FLUSH,
                (WRITE, 20, 1),
                FLUSH,
            ],
        ),
        Scenario::new(
            "copy-on-write from a snapshot",
            Shape {
                snapshot: true,
                filled: 500,
                ..coarse
            },
            &[(WRITE, 1, 1), FLUSH, (WRITE, 5, 2), (WRITE, 30, 1), FLUSH, FLUSH],
        ),
        Scenario {
            all_up_to: 256,
            ..Scenario::new(
                "snapshots created and deleted",
                Shape {
                    filled: 500,
                    bytes: 16 << 10,
                    ..coarse
                },
                &[
                    (WRITE, 1, 1),
                    (Ask::Snapshot(0), 0, 0),
                    (WRITE, 1, 1),
                    (Ask::Snapshot(1), 0, 0),
                    (Ask::Discard, 4, 4),
                    (Ask::Unsnapshot(0), 0, 0),
                    (WRITE, 2, 1),
                    (Ask::Unsnapshot(1), 0, 0),
                    (WRITE, 1, 1),
                    FLUSH,
                ],
            )
        },
        Scenario {
            all_up_to: 256,
            ..Scenario::new(
                "snapshots applied",
                Shape {
                    filled: 500,
                    bytes: 16 << 10,
                    ..coarse
                },
                &[
                    (WRITE, 1, 1),
                    (Ask::Snapshot(0), 0, 0),
                    (WRITE, 1, 1),
                    (WRITE, 20, 4),
                    (Ask::Apply(0), 0, 0),
                    (WRITE, 2, 1),
                    (WRITE, 24, 4),
                    FLUSH,
                    (Ask::Apply(0), 0, 0),
                    (Ask::Unsnapshot(0), 0, 0),
                    (WRITE, 1, 1),
                    FLUSH,
                ],
            )
        },
        Scenario::new(
            "subclusters over a backing file",
            Shape {
                below: Below::Raw(40 << 10),
                bytes: 64 << 10,
                ..subclusters
            },
            &[
                (WRITE, 1, 1),
                FLUSH,
                (WRITE, 4, 3),
                (ZEROES, 8, 4),
                (WRITE, 9, 1),
                FLUSH,
                (UNMAP, 0, 64),
                (WRITE, 3, 1),
                FLUSH,
                FLUSH,
            ],
        ),
        Scenario::new(
            "subclusters filled in any order",
            subclusters,
            &[(WRITE, 1, 2), (FUA, 7, 2), (ZEROES, 2, 4), (WRITE, 5, 1), FLUSH],
        )
        .after(&[(WRITE, 0, 1), FLUSH]),
        Scenario::new(
            "subclusters shared with a snapshot",
            Shape {
                snapshot: true,
                filled: 500,
                ..subclusters
            },
            &[(ZEROES, 4, 3), (WRITE, 1, 1), FLUSH, (WRITE, 20, 3), FLUSH, FLUSH],
        ),
        Scenario::new(
            "write-zeroes that keeps space",
            Shape {
                cluster_bits: 10,
                ..full
            },
            &[(ZEROES, 1, 4), FLUSH, (WRITE, 2, 1), FLUSH, (ZEROES, 8, 1), FLUSH],
        ),
        Scenario::new(
            "write-zeroes that gives space back",
            Shape {
                cluster_bits: 10,
                ..full
            },
            &[
                (UNMAP, 1, 6),
                FLUSH,
                FLUSH,
                (WRITE, 2, 2),
                FLUSH,
                (WRITE, 6, 1),
                FLUSH,
            ],
        ),
        Scenario::new(
            "write-zeroes over a backing file",
            over(Below::Raw(32 << 10)),
            &[(UNMAP, 1, 4), FLUSH, (ZEROES, 8, 2), (WRITE, 9, 1), FLUSH],
        ),
        Scenario::new(
            "write-zeroes over a backing file, version 2",
            Shape {
                v2: true,
                ..over(Below::Raw(32 << 10))
            },
            &[(UNMAP, 1, 4), FLUSH, (Ask::Discard, 2, 4), FLUSH],
        ),
        // QEMU, April 2026: the write's entry came back after the discard had given its cluster away. Two sectors make a
        // cluster, so that what the write does not cover is copied or zeroed.
        Scenario {
            all_up_to: 256,
            ..Scenario::new(
                "discard and write-zeroes of clusters being written",
                coarse,
                &[
                    (WRITE, 1, 1),
                    (Ask::Discard, 0, 4),
                    (WRITE, 2, 1),
                    (UNMAP, 2, 4),
                    (WRITE, 5, 1),
                    (ZEROES, 4, 2),
                    (WRITE, 6, 2),
                    FLUSH,
                    (WRITE, 20, 8),
                    (Ask::Discard, 20, 8),
                    (WRITE, 9, 1),
                    FLUSH,
                ],
            )
            .after(&[(WRITE, 0, 16), (ZEROES, 0, 12)])
        },
        Scenario::new(
            "discard and reuse",
            full,
            &[
                (Ask::Discard, 2, 4),
                FLUSH,
                FLUSH,
                (WRITE, 2, 1),
                FLUSH,
                (Ask::Discard, 10, 2),
                (WRITE, 10, 1),
                FLUSH,
                (WRITE, 3, 1),
                FLUSH,
            ],
        ),
        // Far more is discarded than may wait, so that the writes after it wait for rounds of the engine's own.
        Scenario {
            all_up_to: 256,
            ..Scenario::new(
                "discard and reuse without FLUSHes",
                full,
                &[
                    (Ask::Discard, 0, 24),
                    (WRITE, 0, 4),
                    (WRITE, 4, 20),
                    (UNMAP, 24, 24),
                    (WRITE, 30, 2),
                    (WRITE, 24, 18),
                    (Ask::Discard, 0, 40),
                    (FUA, 0, 3),
                    (WRITE, 3, 30),
                    FLUSH,
                ],
            )
        },
        Scenario::new(
            "discard that keeps the place",
            Shape {
                no_unref: true,
                cluster_bits: 10,
                ..full
            },
            &[(Ask::Discard, 2, 4), FLUSH, (WRITE, 2, 1), (WRITE, 5, 1), FLUSH],
        ),
        Scenario::new(
            "discard of an image with a snapshot",
            Shape {
                snapshot: true,
                filled: 1000,
                bytes: 8 << 10,
                ..plain
            },
            &[(Ask::Discard, 2, 3), FLUSH, FLUSH, (WRITE, 2, 1), FLUSH],
        ),
        Scenario::new(
            "lazy refcounts allowed",
            Shape { lazy: true, ..plain },
            &[(WRITE, 0, 2), FLUSH, (Ask::Discard, 0, 1), (WRITE, 3, 1), FLUSH],
        ),
        Scenario::new(
            "dirty open and rebuild",
            Shape {
                dirty: true,
                filled: 300,
                ..plain
            },
            &[(WRITE, 0, 2), FLUSH],
        ),
        Scenario::new(
            "dirty open and rebuild with a snapshot",
            Shape {
                dirty: true,
                snapshot: true,
                filled: 300,
                ..plain
            },
            &[(WRITE, 0, 2), FLUSH],
        ),
        Scenario::new(
            "close with everything dirty",
            plain,
            &[(WRITE, 0, 3), (WRITE, 9, 1)],
        ),
        Scenario::new(
            "close with drops pending",
            full,
            &[(WRITE, 0, 2), (Ask::Discard, 4, 3), (UNMAP, 12, 2)],
        ),
        // Room for an L2 table, a block of counts and few more: what is discarded is room again, without a FLUSH.
        Scenario {
            all_up_to: 256,
            ..Scenario::new(
                "a device that is full",
                Shape {
                    device: 20 << 9,
                    ..plain
                },
                &[
                    (WRITE, 0, 12),
                    (WRITE, 12, 12),
                    FLUSH,
                    (Ask::Discard, 2, 6),
                    (WRITE, 30, 4),
                    (WRITE, 3, 1),
                    FLUSH,
                ],
            )
        },
        // The cursor is behind all that is free, the run and the longer table come from the device's middle.
        Scenario {
            all_up_to: 256,
            ..Scenario::new(
                "tables that grow on a device",
                Shape {
                    device: 512 << 10,
                    ..wide
                },
                &[
                    (WRITE, 0, 1),
                    (Ask::Grow(160 << 20), 0, 0),
                    (WRITE, 1, 1),
                    FLUSH,
                    (Ask::Discard, 0, 1),
                    (Ask::Grow(320 << 20), 0, 0),
                    (WRITE, 3, 1),
                    FLUSH,
                ],
            )
        },
        Scenario {
            all_up_to: 256,
            ..Scenario::new(
                "durable bitmaps",
                bitmaps(true),
                &[
                    (WRITE, 0, 2),
                    FLUSH,
                    (WRITE, 1, 1),
                    (Ask::Discard, 4, 2),
                    (WRITE, 12, 2),
                    FLUSH,
                ],
            )
        },
        Scenario {
            all_up_to: 256,
            ..Scenario::new(
                "bitmaps that are stored at the close",
                bitmaps(false),
                &[(WRITE, 0, 2), FLUSH, (Ask::Bitmap(0), 0, 0), (WRITE, 3, 1)],
            )
        },
        // The end lies within a cluster, then within a table, then where there was one.
        Scenario {
            all_up_to: 256,
            ..Scenario::new(
                "a disk that becomes smaller and larger",
                Shape {
                    cluster_bits: 10,
                    filled: 1000,
                    ..wide
                },
                &[
                    (WRITE, 60, 8),
                    (Ask::Shrink(31 << 9), 0, 0),
                    (WRITE, 30, 1),
                    (Ask::Grow(40 << 9), 0, 0),
                    (WRITE, 31, 2),
                    (Ask::Shrink(8 << 9), 0, 0),
                    FLUSH,
                ],
            )
        },
        Scenario {
            all_up_to: 256,
            ..Scenario::new(
                "compaction of an image that is half free",
                Shape { filled: 1000, ..wide },
                &[(WRITE, 70, 2), (COMPACT, 0, 0), (WRITE, 71, 2), FLUSH],
            )
            .after(&[(Ask::Discard, 0, 40), (Ask::Discard, 80, 20)])
        },
        Scenario::new(
            "direct I/O with space reserved ahead",
            Shape {
                alignment: 512,
                ..coarse
            },
            &[
                (WRITE, 0, 3),
                FLUSH,
                (Ask::Discard, 0, 2),
                FLUSH,
                (WRITE, 1, 1),
                FLUSH,
            ],
        ),
    ]
}
