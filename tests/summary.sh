#!/usr/bin/env bash
# The closing summary of a run of the suite, from the output of cargo: summary.sh LOG [STEPS]
#
# Prints the time of each step (the lines `NAME SECONDS [OF-CPU]` of the file STEPS), of each suite and of the slowest tests, the
# output of each failed test, where tests hung, what could not run, what was begun again, and the totals. Fails if no test ran, if one hung, or if
# more than two tests were begun again: an emulator fails rarely by itself, also beside builds.
set -euo pipefail

log=$1
steps=${2:-}
AGAIN_MAX=2
SLOWEST=15
FAILURE_LINES=60
HUNG_LINES=500

# A guest's console may have put any byte into the log.
count() { grep -ac "$1" "$log" || true; }
total() { awk -v word="$1" '/^test result:/ { for (i = 2; i <= NF; i++) if ($i ~ "^" word) sum += $(i - 1) } END { print sum + 0 }' "$log"; }

passed=$(total passed)
failed=$(total failed)
ignored=$(total ignored)
unrun=$(count 'cannot run here: ')
hung=$(count '^hung: .* has printed nothing for ')
again=$(grep -a '^begun again: ' "$log" | sed 's/, because .*//' | sort -u | grep -c . || true)

# Prefixes each line with the suite it belongs to and a tab, from `Running tests/run.rs (target/debug/deps/run-0123)` or
# `Doc-tests block` before it.
by_suite() {
    awk '
        /^ +Running / { suite = $NF; gsub(/[()]/, "", suite); sub(/.*\//, "", suite); sub(/-[0-9a-f]+$/, "", suite)
            suite = suite " (" ($2 == "unittests" ? $3 : $2) ")" }
        /^ +Doc-tests / { suite = $2 " (doc tests)" }
        suite != "" { print suite "\t" $0 }' "$log"
}

# `test result: ok. 5 passed; …; finished in 1.23s`
suites() {
    by_suite | awk -F '\t' '
        $2 ~ /^test result:/ {
            count = split($2, word, " "); tests = 0
            for (i = 2; i <= count; i++) if (word[i] ~ /^passed|^failed/) tests += word[i - 1]
            seconds = word[count]; sub(/s$/, "", seconds)
            if (tests > 0) printf "%9.1f s %5d tests  %s\n", seconds, tests, $1
            all += seconds
        }
        END { printf "%9.1f s              all suites\n", all }' | sort -rn
}

# `test unit::does_what ... ok <1.234s>`
slowest() {
    by_suite | awk -F '\t' '
        $2 ~ /^test .* <[0-9.]+s>$/ {
            count = split($2, word, " "); seconds = word[count]; gsub(/[<>s]/, "", seconds)
            suite = $1; sub(/ .*/, "", suite)
            printf "%9.1f s  %s: %s\n", seconds, suite, word[2]
        }' | sort -rn | awk -v most="$SLOWEST" 'NR <= most'
}

# The output of each failed test, at most so many lines of it: between `failures:` and the list of names under the second one.
failures() {
    by_suite | awk -F '\t' -v most="$FAILURE_LINES" '
        { line = substr($0, length($1) + 2); suite = $1; sub(/ .*/, "", suite) }
        line ~ /^     Running |^   Doc-tests |^test result:/ { lists = 0; next }
        line == "failures:" { lists++; next }
        lists != 1 || line == "" { next }
        line ~ /^---- .* stdout ----$/ { split(line, word, " "); print suite ": " word[2]; printed = 0; next }
        ++printed <= most { print "    " line; next }
        printed == most + 1 { print "    [...]" }'
}

echo
if [ -n "$steps" ]; then
    echo "=== steps"
    awk '{ cpu = NF > 2 ? sprintf(" (%.0f s of CPU)", $3) : ""; printf "%9.1f s  %s%s\n", $2, $1, cpu }' "$steps"
fi
echo "=== suites"
suites
echo "=== the slowest tests"
slowest
if [ "$failed" -gt 0 ]; then
    echo "=== output of failed tests"
    failures
fi
if [ "$hung" -gt 0 ]; then
    echo "=== where tests hung"
    grep -a '^hung: ' "$log" | awk -v most="$HUNG_LINES" 'NR <= most'
fi
echo "=================================================================="
echo "  $passed passed, $failed failed"
if [ $((ignored + unrun)) -gt 0 ]; then
    echo "  !!! $((ignored + unrun)) COULD NOT RUN HERE ($ignored ignored, $unrun for want of something):"
    grep -ah 'cannot run here: ' "$log" | sort -u | sed 's/^/      /' || true
else
    echo "  0 could not run here"
fi
if [ "$again" -gt 0 ]; then
    echo "  !!! $again TESTS BEGUN AGAIN, of at most $AGAIN_MAX:"
    grep -ah '^begun again: ' "$log" | sed 's/^/      /' || true
fi
echo "  not part of this: make asan, tsan, fuzz, coverage, mutants, soak, soak-ublk, soak-crash, bench, deb"
echo "=================================================================="
[ "$hung" -eq 0 ] || { echo "$hung test binaries hung" >&2; exit 1; }
[ "$passed" -gt 0 ] || { echo "no test ran at all" >&2; exit 1; }
[ "$again" -le "$AGAIN_MAX" ] || { echo "$again tests were begun again: more than known faults of the emulator and of kernels explain" >&2; exit 1; }
