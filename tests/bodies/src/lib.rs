//! Fuzz bodies: for each kind of untrusted input, the assertions that hold for every byte sequence.
//!
//! ```text
//!  fuzz/ (cargo-fuzz) ──evolved bytes──┐
//!                                      ├──▶ Body::run ──▶ Ringdisk ──▶ label: how far the input came
//!  tests/smoke.rs ──fixed seeds────────┘       └ panics only if Ringdisk is wrong
//! ```
//!
//! A body builds its case from the bytes. It is deterministic as far as the kernel's scheduler permits. `tests/smoke.rs` feeds
//! each body some thousands of cases from fixed seeds, so `make test` notices a body that no longer reaches its target, or
//! a broken rule. A new body is an entry in [`BODIES`] and a target in `fuzz/fuzz_targets`:
//!
//! ```sh
//! cargo test -p ringdisk-bodies                # all bodies, fixed seeds
//! make fuzz SECONDS=60                         # every fuzz target, evolved inputs
//! ```
//!
//! Invariants: a body allocates and runs within bounds that its input cannot change, and touches only files that it created.

pub mod cursor;
pub mod device;
pub mod differential;
pub mod disk_config;
pub mod entries;
pub mod extensions;
pub mod guest;
pub mod header;
pub mod host;
pub mod inputs;
pub mod luks;
pub mod memory;
pub mod model;
pub mod mutate;
pub mod mutated;
pub mod rings;
pub mod seeds;
pub mod tables;
pub mod tools;
pub mod vhost_user;
pub mod virtqueue;
pub mod whole;

/// An input to start from: a file name, and bytes.
pub type Seed = (String, Vec<u8>);

/// A body, and how to feed it.
#[derive(Clone, Copy, Debug)]
pub struct Body {
    /// The name of its fuzz target.
    pub name: &'static str,
    /// Runs one input, and says how far it came. Panics if something is wrong.
    pub run: fn(&[u8]) -> &'static str,
    /// Longer inputs teach nothing new.
    pub bytes_max: usize,
    /// The number of cases that `make test` runs.
    pub cases: u64,
    /// The labels that those cases must reach: at least so many of 100,000 end with each; otherwise the body tests less
    /// than it says.
    pub reaches: &'static [(&'static str, u64)],
    /// Inputs to start from.
    pub seeds: fn() -> Vec<Seed>,
    /// True if any bytes do as well as those a fuzzer evolves, so that fresh random ones are the better test.
    pub takes_any: bool,
}

/// Every body there is.
pub const BODIES: &[Body] = &[
    Body {
        name: "header",
        run: header::body,
        bytes_max: 64 << 10,
        cases: 50_000,
        reaches: &[("no header", 15000), ("refused", 6000), ("understood", 50000)],
        seeds: seeds::headers,
        takes_any: false,
    },
    Body {
        name: "extensions",
        run: extensions::body,
        bytes_max: 4 << 10,
        cases: 50_000,
        reaches: &[
            ("refused", 5000),
            ("none", 500),
            ("unknown", 500),
            ("known", 30000),
        ],
        seeds: seeds::extensions,
        takes_any: false,
    },
    Body {
        name: "luks",
        run: luks::body,
        bytes_max: 8 << 10,
        cases: 1_500,
        reaches: &[
            ("refused", 20000),
            ("costly", 500),
            ("not opened", 5000),
            ("opened", 100),
            ("removed", 10000),
        ],
        seeds: seeds::luks_changes,
        takes_any: false,
    },
    Body {
        name: "tables",
        run: tables::body,
        bytes_max: 4 << 10,
        cases: 10_000,
        reaches: &[("damaged", 5000), ("sound", 5000)],
        seeds: seeds::table_changes,
        takes_any: false,
    },
    Body {
        name: "l2_entry",
        run: entries::body,
        bytes_max: 4 << 10,
        cases: 50_000,
        reaches: &[
            ("short", 15000),
            ("entry", 45000),
            ("snapshot", 5000),
            ("bitmap", 6000),
        ],
        seeds: seeds::entries,
        takes_any: false,
    },
    Body {
        name: "check",
        run: tools::body,
        bytes_max: 256 << 10,
        cases: 5_000,
        reaches: &[
            ("no image", 1000),
            ("not repaired", 12000),
            ("repaired", 6000),
            ("clean", 30000),
        ],
        seeds: seeds::images,
        takes_any: false,
    },
    Body {
        name: "whole",
        run: whole::body,
        bytes_max: 256 << 10,
        cases: 20_000,
        reaches: &[("refused", 1), ("read", 3000), ("written", 33000)],
        seeds: seeds::images,
        takes_any: false,
    },
    Body {
        name: "mutated",
        run: mutated::body,
        bytes_max: 4 << 10,
        cases: 8_000,
        reaches: &[
            ("refused", 1000),
            ("only read", 4500),
            ("written", 12000),
            ("written, sound", 37000),
        ],
        seeds: seeds::random,
        takes_any: true,
    },
    Body {
        name: "model",
        run: model::body,
        bytes_max: 4 << 10,
        cases: 10_000,
        reaches: &[("answered", 60000)],
        seeds: seeds::random,
        takes_any: true,
    },
    Body {
        name: "virtqueue",
        run: virtqueue::body,
        bytes_max: 4 << 10,
        cases: 100_000,
        reaches: &[("refused", 1), ("silent", 1), ("served", 4500), ("broken", 30000)],
        seeds: seeds::random,
        takes_any: true,
    },
    Body {
        name: "rings",
        run: rings::body,
        bytes_max: 4 << 10,
        cases: 60_000,
        reaches: &[
            ("refused", 12000),
            ("queue in two regions", 140),
            ("available index", 4000),
            ("descriptor index", 5000),
            ("loop", 1200),
            ("more than 1,024 descriptors", 8),
            ("indirect, not negotiated", 900),
            ("indirect in indirect", 350),
            ("next after indirect", 1100),
            ("indirect table of odd length", 250),
            ("indirect table outside memory", 200),
            ("empty buffer", 800),
            ("readable after writable", 700),
            ("buffer outside memory", 380),
            ("more than 2^32 bytes", 60),
            ("no interrupt", 1000),
            ("first answers", 4400),
            ("equal", 16000),
        ],
        seeds: seeds::random,
        takes_any: true,
    },
    Body {
        name: "vhost_user",
        run: vhost_user::body,
        bytes_max: 4 << 10,
        cases: 20_000,
        reaches: &[
            ("stranger", 1),
            ("introduced", 1),
            ("set up", 30000),
            ("served", 700),
            ("hung up on", 1),
        ],
        seeds: seeds::random,
        takes_any: true,
    },
    Body {
        name: "differential",
        run: differential::body,
        bytes_max: 4 << 10,
        cases: 600,
        reaches: &[
            ("we refuse", 1),
            ("only QEMU reads all", 1),
            ("only we read all", 1),
            ("equal", 45000),
        ],
        seeds: seeds::random,
        takes_any: true,
    },
    Body {
        name: "disk_config",
        run: disk_config::body,
        bytes_max: 4 << 10,
        cases: 50_000,
        reaches: &[("refused", 1), ("accepted", 170), ("printed", 6500)],
        seeds: seeds::disk_configs,
        takes_any: false,
    },
];

/// The body of this name.
///
/// # Panics
///
/// If there is none.
#[must_use]
pub fn body(name: &str) -> &'static Body {
    let body = BODIES.iter().find(|body| body.name == name);
    body.unwrap_or_else(|| panic!("there is no body {name:?}"))
}
