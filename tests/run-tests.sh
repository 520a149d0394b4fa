#!/usr/bin/env bash
# Runs every test of the workspace and says, at the end and loudly, what did not run here: run-tests.sh [STEP…]
#
# Each STEP is a target of the Makefile to be made first, in this order; the first that fails ends the run. The summary
# gives the time of each of them, of each suite, and of the slowest tests.
#
# Nothing may be skipped in silence: a test that meets a machine without what it needs fails, and says
# what to install. Where no installing helps (say, a kernel that refuses io_uring), the test prints
#
#   cannot run here: WHAT, because WHY
#
# and is counted, together with what cargo reports as ignored. A test that starts over because its emulator failed prints
#
#   begun again: TEST, because WHY
#
# and more than one of these fails the run. Needs the release build of `ringdisk`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

log=$(mktemp)
steps=$(mktemp)
trap 'rm -f "$log" "$steps"' EXIT

# timed STEP COMMAND…: notes the step's seconds, whether or not it succeeds.
timed() {
    local step=$1 began status=0
    shift
    began=$(date +%s%N)
    "$@" || status=$?
    awk -v step="$step" -v ns="$(($(date +%s%N) - began))" 'BEGIN { printf "%s %.1f\n", step, ns / 1e9 }' >>"$steps"
    return "$status"
}

# A script's background jobs and `nohup` start with signals ignored, which servers under test would inherit.
tests() {
    export "CARGO_TARGET_$(rustc -vV | sed -n 's/^host: //p' | tr 'a-z-' 'A-Z_')_RUNNER=$PWD/tests/timed.sh"
    env --default-signal=HUP,INT,QUIT,TERM cargo test --workspace --no-fail-fast -- --show-output 2>&1 | tee "$log"
}

for step; do timed "$step" make --no-print-directory "$step"; done
status=0
timed tests tests || status=$?
tests/summary.sh "$log" "$steps" || status=1
exit "$status"
