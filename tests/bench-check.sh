#!/usr/bin/env bash
# Measures this tree beside a reference commit, in turns, and fails if a row is more than 3 % worse: bench-check.sh [COMMIT]
#
# Without COMMIT the reference is the one that docs/numbers.md names. Its programs are built once and kept. A row that the noise of
# this machine leaves undecided is named and fails nothing; PAIRS=30 has each row measured up to so often before that. While others
# use the machine, which is said loudly, every row is undecided.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

named=$(sed -n 's/^Reference for `make bench-check`: `\([0-9a-f]*\)`\.$/\1/p' docs/numbers.md)
reference=$(git rev-parse --verify "${1:-$named}^{commit}")
programs=(ringdisk ringdisk-bench)
built=target/bench/reference/$reference

if [ ! -d "$built" ]; then
    tree=$(mktemp -d)
    trap 'git worktree remove --force "$tree" 2>/dev/null || true; rm -rf "$tree" "$built.part"' EXIT
    git worktree add --quiet --detach "$tree" "$reference"
    CARGO_TARGET_DIR=$PWD/target/bench/reference/target cargo build --release --manifest-path "$tree/Cargo.toml" "${programs[@]/#/-p}"
    mkdir -p "$built.part"
    cp "${programs[@]/#/target/bench/reference/target/release/}" "$built.part"
    mv "$built.part" "$built"
fi
exec cargo run --release -p ringdisk-bench -- --before "$built" --strict --pairs 9 --until-decided "${PAIRS:-15}" --seconds 0.5
