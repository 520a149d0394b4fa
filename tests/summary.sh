#!/usr/bin/env bash
# The closing summary of a run of the suite, from the output of cargo: summary.sh LOG
#
# Prints the time of each suite, what could not run, what was begun again, and the totals. Fails if no test ran, or
# if more than one test was begun again: an emulator fails so rarely by itself.
set -euo pipefail

log=$1
AGAIN_MAX=1

# A guest's console may have put any byte into the log.
count() { grep -ac "$1" "$log" || true; }
total() { awk -v word="$1" '/^test result:/ { for (i = 2; i <= NF; i++) if ($i ~ "^" word) sum += $(i - 1) } END { print sum + 0 }' "$log"; }

passed=$(total passed)
failed=$(total failed)
ignored=$(total ignored)
unrun=$(count 'cannot run here: ')
again=$(count '^begun again: ')

# `Running tests/run.rs (target/debug/deps/run-0123)`, `Doc-tests block`, `test result: ok. 5 passed; …; finished in 1.23s`
times() {
    awk '
        /^ +Running / { suite = $NF; gsub(/[()]/, "", suite); sub(/.*\//, "", suite); sub(/-[0-9a-f]+$/, "", suite)
            suite = suite " (" ($2 == "unittests" ? $3 : $2) ")" }
        /^ +Doc-tests / { suite = $2 " (doc tests)" }
        /^test result:/ && suite != "" {
            for (i = 2; i <= NF; i++) if ($i ~ /^passed|^failed/) tests += $(i - 1)
            seconds = $NF; sub(/s$/, "", seconds)
            if (tests > 0) printf "%9.1f s %5d tests  %s\n", seconds, tests, suite
            all += seconds; tests = 0; suite = ""
        }
        END { printf "%9.1f s              all suites\n", all }' "$log" | sort -rn
}

echo
echo "=================================================================="
times
echo "=================================================================="
echo "  $passed passed, $failed failed"
if [ $((ignored + unrun)) -gt 0 ]; then
    echo "  !!! $((ignored + unrun)) COULD NOT RUN HERE ($ignored ignored, $unrun for want of something):"
    grep -ah 'cannot run here: ' "$log" | sort -u | sed 's/^/      /' || true
else
    echo "  0 could not run here"
fi
if [ "$again" -gt 0 ]; then
    echo "  !!! $again BEGUN AGAIN, of at most $AGAIN_MAX:"
    grep -ah '^begun again: ' "$log" | sed 's/^/      /' || true
fi
echo "  not part of this: make asan, tsan, fuzz, coverage, mutants, soak, soak-ublk, soak-crash, bench"
echo "=================================================================="
[ "$passed" -gt 0 ] || { echo "no test ran at all" >&2; exit 1; }
[ "$again" -le "$AGAIN_MAX" ] || { echo "$again tests were begun again: more than an emulator's failures explain" >&2; exit 1; }
