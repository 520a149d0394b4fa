# One entry point, the same by hand and in continuous integration (.ci/run is `make test`).
#
#   make setup   the lab: QEMU, a guest kernel, a root file system (root, Debian 12; at once if all is there)
#   make test    everything that must hold: setup, lint, doc, and all tests; says what could not run here
#   make demo    boot a stock Linux guest on a QCOW2 overlay served by Ringdisk, and check the image
#   make bench   Ringdisk beside its peers; writes target/bench/summary.json
#   make fuzz    each fuzz target for SECONDS seconds (default 60)
#   make doc     the documentation of all crates, without warnings
#   make lint    rustfmt and clippy, without warnings

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
SECONDS ?= 60

.PHONY: test setup lint doc build demo bench fuzz

test: setup lint doc build
	tests/run-tests.sh

setup:
	tests/setup.sh

lint:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings

doc:
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps

build:
	cargo build --release -p ringdisk

demo: setup build
	cargo run --release -p ringdisk-tests --bin demo

bench: setup build
	cargo run --release -p ringdisk-bench

fuzz:
	rustup run nightly rustc --version >/dev/null 2>&1 || rustup toolchain install nightly --profile minimal
	command -v cargo-fuzz >/dev/null || cargo install --locked cargo-fuzz
	targets=$$(cargo +nightly fuzz list --fuzz-dir fuzz); \
	[ -n "$$targets" ] || { echo "fuzz/ has no target" >&2; exit 1; }; \
	for target in $$targets; do \
	    cargo +nightly fuzz run --fuzz-dir fuzz "$$target" -- -max_total_time=$(SECONDS); \
	done
