#!/usr/bin/env bash
# Runs every test of the workspace and says, at the end and loudly, what did not run here:
#
#   run-tests.sh FIRST… -- ASIDE… -- BUILD… -- BESIDE…
#
# Each word is a target of the Makefile. FIRST are made in this order, then BUILD, then the tests are built; ASIDE are made beside
# both builds, as they mostly wait for the network. The first that fails ends the run. Then the tests of the lab run, whose
# guests wait now and then, and use one CPU or two, and after them those of the other packages, the engine's and the rest side by side:
# neither keeps two CPUs busy. Beside all of them BESIDE are made, with what the tests leave of the CPUs. The summary gives the
# time of each of them and what of the CPUs it took, the time of all together, of each suite, and of the slowest tests.
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
#
# A test binary that prints nothing for ten minutes hangs: `timed.sh` says where, and ends it. A run that is ended from outside says what
# had begun.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

start=$(date +%s)
logs=$(mktemp -d)
steps=$logs/steps
: >"$steps"
# The process groups that run beside this script, which go with it.
beside=()
trap 'for group in "${beside[@]}"; do kill -- -"$group" 2>/dev/null || true; done; rm -rf "$logs"' EXIT
# The slowest test takes three minutes, on a slow machine with much beside it.
export HUNG_SECONDS=600
parts=()
trap 'unfinished; exit 143' HUP INT TERM

# Says what the parts that have begun said last, if they have not ended.
unfinished() {
    local part
    for part in "${parts[@]}"; do
        [ ! -e "$logs/ended-$part" ] || continue
        echo "!!! the tests of part '$part' had not ended; the end of what they said:"
        grep -a 'has been running for over' "$logs/$part" | tail -n 10 || true
        tail -n 15 "$logs/$part"
    done
}

# timed STEP COMMAND…: notes the step's seconds, and those of CPU that its processes took, whether or not it succeeds.
timed() {
    local step=$1 began status=0
    shift
    times >"$logs/before-$step"
    began=$(date +%s%N)
    "$@" || status=$?
    local ns=$(($(date +%s%N) - began))
    times >"$logs/after-$step"
    # The second line is that of processes that have ended: `1m2.003s 0m0.400s`.
    awk -v step="$step" -v ns="$ns" '
        FNR == 2 { for (i = 1; i <= 2; i++) { split($i, part, /[ms]/); cpu += (FNR == NR ? -1 : 1) * (60 * part[1] + part[2]) } }
        END { printf "%s %.1f %.1f\n", step, ns / 1e9, cpu }' "$logs/before-$step" "$logs/after-$step" >>"$steps"
    return "$status"
}

# A script's background jobs and `nohup` start with signals ignored, which servers under test would inherit.
cargo_test() { env --default-signal=HUP,INT,QUIT,TERM cargo test --workspace --no-fail-fast "$@"; }

# part NAME ARGUMENTS…: the tests of the packages that timed.sh counts to it. All parts are of one build.
part() {
    local part=$1
    shift
    export BEGUN=$logs/begun
    export "CARGO_TARGET_$(rustc -vV | sed -n 's/^host: //p' | tr 'a-z-' 'A-Z_')_RUNNER=$PWD/tests/timed.sh"
    local status=0
    PART=$part cargo_test "$@" -- --show-output 2>&1 || status=$?
    : >"$logs/ended-$part"
    return "$status"
}

# begin PART ARGUMENTS…: begins the tests of a part, in the process group $aside. What they say goes to a file.
begin() {
    parts+=("$1")
    aside timed "$1-tests" part "$@" >"$logs/$1"
}

# aside COMMAND…: begins it in a process group of its own, whose number it leaves in $aside.
aside() {
    set -m
    "$@" &
    aside=$!
    set +m
    beside+=("$aside")
}
# ended GROUP: waits for it.
ended() {
    local status=0
    wait "$1" || status=$?
    local group left=()
    for group in "${beside[@]}"; do [ "$group" = "$1" ] || left+=("$group"); done
    beside=("${left[@]}")
    return "$status"
}

steps() { for step; do timed "$step" make --no-print-directory "$step"; done; }

groups=("" "" "" "")
group=0
for word; do
    if [ "$word" = -- ]; then group=$((group + 1)); else groups[group]+=" $word"; fi
done

# shellcheck disable=SC2086 # lists
steps ${groups[0]}
# shellcheck disable=SC2086
aside steps ${groups[1]} >"$logs/aside" 2>&1
first=$aside
# shellcheck disable=SC2086
steps ${groups[2]}
timed tests-build cargo_test --no-run
ended "$first" || { cat "$logs/aside"; exit 1; }
cat "$logs/aside"

# Makes the targets with what the tests leave of the CPUs. All of them, whatever fails; their output is kept.
make_beside() {
    for step; do
        timed "$step" nice make --no-print-directory "$step" > >(tee "$logs/output-$step") 2>&1 || echo "$step" >>"$logs/failed"
    done
}

status=0
: >"$logs/failed" >"$logs/begun"
echo "The tests have begun; what they say follows when all of them have ended."
aside tail --pid=$$ -qf "$logs/begun"
begin lab --tests
lab=$aside
# shellcheck disable=SC2086 # a list
aside make_beside ${groups[3]}
made=$aside
ended "$lab" || status=1
begin engine --lib --bins --tests
engine=$aside
begin others
others=$aside
for group in "$engine" "$others" "$made"; do ended "$group" || status=1; done
cat "$logs/others" "$logs/engine" "$logs/lab" | tee "$logs/all"
echo "all $(($(date +%s) - start))" >>"$steps"
tests/summary.sh "$logs/all" "$steps" || status=1
while read -r step; do
    echo "!!! step '$step' failed; the end of what it said:"
    tail -n 40 "$logs/output-$step"
    status=1
done <"$logs/failed"
exit "$status"
