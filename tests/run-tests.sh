#!/usr/bin/env bash
# Runs every test of the workspace and says, at the end and loudly, what did not run here: run-tests.sh [STEP…] [-- STEP…]
#
# Each STEP is a target of the Makefile. Those before `--` are made first, in this order; the first that fails ends the
# run. Then the tests of the lab begin, whose guests wait now and then, and use one CPU or two; beside them the other steps are
# made, with what the guests leave of the CPUs, and the tests of the other packages run. The summary gives the time of each of
# them, of all together, of each suite, and of the slowest tests.
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
# and more than two of these fail the run. Needs the release build of `ringdisk`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

start=$(date +%s)
logs=$(mktemp -d)
steps=$logs/steps
: >"$steps"
lab=
trap '[ -z "$lab" ] || kill -- -"$lab" 2>/dev/null || true; rm -rf "$logs"' EXIT

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
cargo_test() { env --default-signal=HUP,INT,QUIT,TERM cargo test --workspace --no-fail-fast "$@"; }

# part NAME ARGUMENTS…: the tests of the packages that timed.sh counts to it. Both parts are of one build.
part() {
    local part=$1
    shift
    export "CARGO_TARGET_$(rustc -vV | sed -n 's/^host: //p' | tr 'a-z-' 'A-Z_')_RUNNER=$PWD/tests/timed.sh"
    PART=$part cargo_test "$@" -- --show-output 2>&1
}

while [ $# -gt 0 ] && [ "$1" != -- ]; do
    timed "$1" make --no-print-directory "$1"
    shift
done
[ $# = 0 ] || shift
timed tests-build cargo_test --no-run

status=0
echo "The tests of the lab have begun; what they say follows when all of them have ended."
# In a process group of its own, which goes with this script.
set -m
timed lab-tests part lab --tests >"$logs/lab" &
lab=$!
set +m
for step; do
    timed "$step" nice make --no-print-directory "$step" || failed="${failed:-}${failed:+, }$step"
done
timed other-tests part others | tee "$logs/others" || status=1
wait $lab || status=1
lab=
cat "$logs/lab"
cat "$logs/others" "$logs/lab" >"$logs/all"
echo "all $(($(date +%s) - start))" >>"$steps"
tests/summary.sh "$logs/all" "$steps" || status=1
if [ -n "${failed:-}" ]; then
    echo "!!! steps that failed: $failed; search for 'Error' above"
    status=1
fi
exit "$status"
