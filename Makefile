# One entry point, the same by hand and in continuous integration (.ci/run).
#
#   make setup   the lab: QEMU, a guest kernel, a root file system (root, Debian 12; at once if all is there)
#   make check   before a commit, in minutes: formatting, clippy, unit tests, the house rules, a short crash exploration
#   make test    all tests, with what they need: the tools, the lab, the build; says what could not run here
#   make demo    boot a stock Linux guest on a QCOW2 overlay served by Ringdisk, and check the image
#   make deb     the Debian package, in target/deb; lintian judges it, and a guest installs, uses, upgrades and removes it
#   make crates  each crate as a registry would have it, built from its package alone; uploads nothing
#   make semver  what an embedder of the crates would have to change since BASE, a commit or tag; fails if that is anything
#   make bench   Ringdisk beside its peers; writes target/bench/summary.json; ARGS=--help for what else it does
#   make bench-check  this tree beside a reference commit; fails if a row is more than 3 % worse
#   make counts  the instructions of the hot paths, each with its bound
#   make models  what threads share, under the model checkers loom and shuttle; RUNS times as many random orders
#   make asan    the suites of all crates under AddressSanitizer
#   make tsan    the workers and the stress tests under ThreadSanitizer, with an instrumented standard library
#   make coverage  how much of the format engine the suite reaches, and the lines it does not
#   make mutants  the engine broken in small ways, one at a time, for SECONDS seconds: which breaks no test notices
#   make soak    crash exploration of new seeds for SECONDS seconds (default 60); remembers where it was; and 1,000 disks in one process
#   make soak-ublk  block devices in the lab, made, worked on, killed and removed for SECONDS seconds on each kernel
#   make soak-crash  power cuts below servers in the lab, judged by the kernel's log and QEMU's tools, for SECONDS seconds
#   make fuzz    each fuzz target for SECONDS seconds (default 60)
#   make doc     the documentation of all crates, without warnings
#   make lint    rustfmt and clippy, without warnings

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
SECONDS ?= 60

RUNS ?= 1

.PHONY: check test compiler tools setup lint doc build deb counts models explore canaries asan tsan coverage crates semver demo bench bench-check peers mutants soak soak-ublk soak-crash fuzz

# Needs no lab; unit tests of qcow need the tools of QEMU.
check: lint
	env --default-signal=HUP,INT,QUIT,TERM cargo test --workspace --lib --bins --test tidy --test guest_scripts
	$(SIM) explore --states 8000 --seeds 40

# The steps before the tests are made by the script, which measures them.
test:
	tests/run-tests.sh compiler -- setup -- build -- counts models explore canaries

# One build of the explorer, with assertions and with rules that can be broken; unless they are, it does what any other does. No other
# program is built like this: cargo keeps what it builds with a feature apart.
SIM = cargo run --release -p ringdisk-sim --features assertions,canary --

# Half of the states are of the same seeds each time, half of new ones; those are printed, and `--from` repeats them.
explore:
	$(SIM) explore --states 160000 --seeds 800

# First it explores 40,000 states more, with nothing broken.
canaries:
	$(SIM) canaries

# What the first build needs; the other tools are installed beside it.
compiler:
	command -v cc >/dev/null || { apt-get -q update && apt-get -q install -y --no-install-recommends gcc libc6-dev; }

tools:
	tests/setup.sh --tools

setup:
	tests/setup.sh

lint:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --features ringdisk-bench/peers -- -D warnings

doc:
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps

build:
	cargo build --release -p ringdisk

# Built together with the binary, so that both have the same crates. valgrind counts; NAMES=… takes only some.
counts:
	cargo build --release -p ringdisk -p ringdisk-counts
	$${CARGO_TARGET_DIR:-target}/release/ringdisk-counts $(NAMES)

# Each checker wants our crates built its way, and only ours: their dependencies are those of the tests. Models of small parts run for
# seconds, and are built sooner without optimization; those of the engine would take ten minutes without it.
MODEL = RUSTC_WORKSPACE_WRAPPER=$(CURDIR)/tests/cfg-$(1) cargo test
UNOPTIMIZED = $(foreach crate,block simulator virtio-devices,--config profile.dev.package.ringdisk-$(crate).opt-level=0)
models:
	$(call MODEL,loom) $(UNOPTIMIZED) -p ringdisk-block --lib model::
	THREADS_RUNS=$(RUNS) $(call MODEL,shuttle) $(UNOPTIMIZED) -p ringdisk-block -p ringdisk-virtio-devices --lib model::
	THREADS_RUNS=$(RUNS) $(call MODEL,shuttle) -p ringdisk-qcow --test threads

# The sanitizer's runtime comes with rustc, the switch is not stable yet; --target leaves build scripts alone. C code is
# instrumented too, documentation examples are not; libdeflate compiles one template into two units, whose tables then look like one defined twice.
asan:
	RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=address" \
	ASAN_OPTIONS=detect_stack_use_after_return=1:detect_odr_violation=0:quarantine_size_mb=64 \
	LSAN_OPTIONS=suppressions=$(CURDIR)/tests/leaks.txt:print_suppressions=0 \
	env --default-signal=HUP,INT,QUIT,TERM cargo test --target x86_64-unknown-linux-gnu --target-dir target/asan \
	    -p ringdisk-block -p ringdisk-simulator -p ringdisk-qcow -p ringdisk-virtio-devices -p ringdisk --lib --bins --tests --examples --no-fail-fast

# A standard library that is not instrumented hides what its locks and channels order, so it is built anew.
TSAN = RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=thread" TSAN_OPTIONS=halt_on_error=1 \
	env --default-signal=HUP,INT,QUIT,TERM \
	cargo test -Zbuild-std --target x86_64-unknown-linux-gnu --target-dir target/tsan
tsan:
	@if [ ! -f "$$(rustc --print sysroot)/lib/rustlib/src/rust/library/Cargo.lock" ]; then \
	    echo "ThreadSanitizer needs the standard library's source: rustup component add rust-src" >&2; \
	    exit 1; \
	fi
	$(TSAN) -p ringdisk-block -p ringdisk-simulator --lib
	$(TSAN) -p ringdisk-qcow --test stress

coverage:
	tests/coverage.sh

# Goes on from where the last call on this commit ended. FILES="'qcow/src/engine/*.rs'" takes only some.
mutants:
	SECONDS_MAX=$(SECONDS) tests/mutants.sh $(FILES)

demo: setup build
	cargo run --release -p ringdisk-tests --bin demo

deb: setup build
	command -v lintian >/dev/null && command -v dh >/dev/null || apt-get install -y --no-install-recommends debhelper dpkg-dev lintian
	packaging/deb.sh target/deb
	cargo test -p ringdisk-tests --test package

crates:
	cargo publish --workspace --dry-run

# Not of the program's own library, which is for its tests and man pages.
semver:
	@: "$${BASE:?is the commit or tag to compare with, as in make semver BASE=v0.1.0}"
	command -v cargo-semver-checks >/dev/null || cargo install --locked cargo-semver-checks
	cargo semver-checks --workspace --exclude ringdisk --baseline-rev "$$BASE"

# rublk, a peer for block devices, generates bindings with libclang.
peers:
	if [ -z "$${RUBLK:-}" ] && [ ! -x target/bench/peers/bin/rublk ]; then \
	    compgen -G '/usr/lib/llvm-*/lib/libclang.so*' >/dev/null || apt-get install -y --no-install-recommends libclang-14-dev; \
	    cargo install --locked rublk --root target/bench/peers; \
	fi

bench: setup build peers
	cargo run --release -p ringdisk-bench --features peers -- $(ARGS)

# REFERENCE=… is another commit than docs/numbers.md names.
bench-check: setup
	tests/bench-check.sh $(REFERENCE)

soak:
	$(SIM) soak --seconds $(SECONDS)
	RINGDISK_DISKS=1000 env --default-signal=HUP,INT,QUIT,TERM cargo test --release -p ringdisk --test restart density -- --nocapture

soak-ublk: setup build
	RINGDISK_SOAK_SECONDS=$(SECONDS) env --default-signal=HUP,INT,QUIT,TERM \
	    cargo test --release -p ringdisk-tests --test ublk -- --nocapture soak::

# New seeds each time, which are printed; RINGDISK_CRASH_SEED=… begins with one of them. RINGDISK_LAB_KEEP=1 keeps devices and logs.
soak-crash: setup build
	RINGDISK_SOAK_SECONDS=$(SECONDS) env --default-signal=HUP,INT,QUIT,TERM \
	    cargo test --release -p ringdisk-tests --test ublk -- --nocapture crash::

# What is found goes to fuzz/corpus, which git ignores: the next run goes on from there.
FUZZ_LIMITS := -max_len=65536 -timeout=30 -rss_limit_mb=2048 -malloc_limit_mb=256 -print_final_stats=1

fuzz:
	rustup run nightly rustc --version >/dev/null 2>&1 || rustup toolchain install nightly --profile minimal
	command -v cargo-fuzz >/dev/null || cargo install --locked cargo-fuzz
	cd fuzz && cargo run --quiet --example seeds
	targets=$$(cargo +nightly fuzz list --fuzz-dir fuzz); \
	[ -n "$$targets" ] || { echo "fuzz/ has no target" >&2; exit 1; }; \
	for target in $$targets; do \
	    echo "=== $$target"; \
	    cargo +nightly fuzz run --fuzz-dir fuzz "$$target" -- -max_total_time=$(SECONDS) $(FUZZ_LIMITS); \
	done
