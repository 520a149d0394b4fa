#!/usr/bin/env bash
# Runs every test of the workspace and says, at the end and loudly, what did not run here.
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
trap 'rm -f "$log"' EXIT
status=0
# A script's background jobs and `nohup` start with signals ignored, which servers under test would inherit.
env --default-signal=HUP,INT,QUIT,TERM cargo test --workspace --no-fail-fast -- --show-output 2>&1 | tee "$log" || status=$?
tests/summary.sh "$log" || status=1
exit "$status"
