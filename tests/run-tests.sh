#!/usr/bin/env bash
# Runs every test of the workspace and says, at the end and loudly, what did not run here.
#
# Nothing may be skipped in silence: a test that meets a machine without what it needs fails, and says
# what to install. Where no installing helps (say, a kernel that refuses io_uring), the test prints
#
#   cannot run here: WHAT, because WHY
#
# and is counted below, together with what cargo reports as ignored. Needs the release build of `ringdisk`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0
# A script's background jobs and `nohup` start with signals ignored, which servers under test would inherit.
env --default-signal=HUP,INT,QUIT,TERM cargo test --workspace --no-fail-fast -- --show-output 2>&1 | tee "$log" || status=$?

total() { awk -v word="$1" '/^test result:/ { for (i = 2; i <= NF; i++) if ($i ~ "^" word) sum += $(i - 1) } END { print sum + 0 }' "$log"; }

passed=$(total passed)
failed=$(total failed)
ignored=$(total ignored)
unrun=$(grep -c 'cannot run here: ' "$log" || true)

echo
echo "=================================================================="
echo "  $passed passed, $failed failed"
if [ $((ignored + unrun)) -gt 0 ]; then
    echo "  !!! $((ignored + unrun)) COULD NOT RUN HERE ($ignored ignored, $unrun for want of something):"
    grep -h 'cannot run here: ' "$log" | sort -u | sed 's/^/      /' || true
else
    echo "  0 could not run here: everything was tested"
fi
echo "=================================================================="
[ "$passed" -gt 0 ] || { echo "no test ran at all" >&2; exit 1; }
exit "$status"
