#!/usr/bin/env bash
# Breaks the engine in small ways, one at a time (cargo-mutants), and lists the breaks that no test notices.
#
#   SECONDS_MAX=3600 tests/mutants.sh                 go on for an hour; the next call goes on from there
#   tests/mutants.sh 'qcow/src/engine/*.rs'           only these files (globs; cargo-mutants' own filters add files)
#   tests/mutants.sh --report                         what was found so far
#   COMMIT=0837836 tests/mutants.sh                   go on with an earlier commit
#
# .cargo/mutants.toml says what is broken, and which tests judge. The committed tree is judged, in a clone of its own
# (target/mutants/tree), so that the checkout can change meanwhile. The tests that are quick to build and to run judge first,
# all of them what those missed. A mutant that never ends is caught: its tests are ended when they have said nothing for five times
# as long as the slowest of them takes with nothing broken. Quick tests that go on saying something for five times as long as all of
# them take are run once more with twice that limit, as the machine may have been busy.
# Mutants come in shards of a few, each a sample over all files, and are taken in a random order.
# A shard that was cut short is repeated; finished ones are kept per commit and files. No shard begins after SECONDS_MAX seconds
# (default 600), not counting the first build. Mutants that cannot change what the engine does are listed with the reason in
# tests/mutants-equivalent.txt.
# Fails if any other survives.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

SECONDS_MAX=${SECONDS_MAX:-600}
# Mutants to a shard; what a call that is stopped loses.
SHARD=4
# Seconds that the judging tests may take. They need a fifth of it.
TIMEOUT=${MUTANTS_TIMEOUT:-300}
# The quick ones. Those of the image tools start QEMU's, which takes longer than all others; of the suite, those that take long are left out.
QUICK='"--lib", "--test", "model", "--test", "costs", "--test", "status", "--test", "snapshots", "--test", "suite"'
SKIPPED='"--", "--skip", "image::", "--skip", "shrink::", "--skip", "encryption::", "--skip", "reuse::", "--skip", "compact_snapshots::"'
SKIPPED+=', "--skip", "compact_threads::", "--skip", "block_devices::", "--skip", "interop::", "--skip", "worlds::", "--skip", "chains::"'
SKIPPED+=', "--skip", "bitmap_cuts::", "--skip", "shipped_bugs::", "--skip", "subclusters::", "--skip", "cryptsetup::"'

folder=$PWD/target/mutants
tree=$folder/tree
equivalent=$PWD/tests/mutants-equivalent.txt
report_only=
if [ "${1:-}" = --report ]; then report_only=yes; shift; fi
commit=$(git rev-parse --short "${COMMIT:-HEAD}")
run=$folder/$commit-$(printf '%s\n' "$@" | sha256sum | cut -c1-8)

report() {
    local kind shard
    for kind in caught missed timeout unviable; do
        # One line for each mutant: path:line:column: change
        for shard in "$run"/shard-*; do
            case $kind in caught | unviable) cat "$shard/quick/mutants.out/$kind.txt" 2>/dev/null || true ;; esac
            # cargo-mutants deletes fields whatever the names that it is to break.
            case $kind in caught | timeout) grep -sFxf "$shard/slow" "$shard/again/mutants.out/$kind.txt" || true ;; esac
            grep -sFxf "$shard/undecided" "$shard/all/mutants.out/$kind.txt" || true
        done | sort >"$run/$kind"
    done
    rm -f "$run/equivalent"
    # Places move: the list of equivalent ones has no lines and columns.
    sed -E 's/:[0-9]+:[0-9]+:/:/' "$run/missed" >"$run/missed.short"
    paste -d '\t' "$run/missed.short" "$run/missed" | awk -F'\t' '
        NR == FNR { if ($0 !~ /^#/ && NF > 1) reason[$1] = $2; next }
        $1 in reason { print $2 "\t" reason[$1] >equivalent; next }
        { print $2 }' equivalent="$run/equivalent" "$equivalent" - >"$run/survived"
    touch "$run/equivalent"
    local caught survived same hung unviable viable
    caught=$(wc -l <"$run/caught"); hung=$(wc -l <"$run/timeout"); survived=$(wc -l <"$run/survived")
    same=$(wc -l <"$run/equivalent"); unviable=$(wc -l <"$run/unviable"); viable=$((caught + hung + survived))
    echo "mutants of $commit: $(find "$run" -maxdepth 2 -name done | wc -l) of $shards shards judged"
    echo "  $caught caught, $hung caught by a timeout, $survived survived, $same equivalent, $unviable do not build"
    [ "$viable" = 0 ] || awk -v all="$viable" -v lived="$survived" \
        'BEGIN { printf "  %.1f %% of %d that change something are caught\n", 100 * (all - lived) / all, all }'
    sed 's/^/  survived: /' "$run/survived"
    [ "$survived" = 0 ]
}

if [ -n "$report_only" ]; then
    [ -f "$run/shards" ] || { echo "nothing was judged of $commit with these files" >&2; exit 1; }
    shards=$(cat "$run/shards")
    status=0
    report || status=1
    exit "$status"
fi

command -v cargo-mutants >/dev/null || cargo install --locked cargo-mutants
mkdir -p "$folder"
[ -d "$tree" ] || git clone -q --shared . "$tree"
git -C "$tree" fetch -q origin HEAD
# What a mutant left behind goes, too.
git -C "$tree" checkout -q --force --detach "$(git rev-parse "$commit")"
[ -z "$(git status --porcelain --untracked-files=no)" ] || echo "mutants: what is not committed is not judged" >&2

# Nobody debugs a mutant; its build takes a third less without.
export CARGO_PROFILE_DEV_DEBUG=0 CARGO_PROFILE_TEST_DEBUG=0
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$folder/target}
# It ends what hangs; where that stands is of no use here.
export HUNG_STACKS=no
export "CARGO_TARGET_$(rustc -vV | sed -n 's/^host: //p' | tr 'a-z-' 'A-Z_')_RUNNER=$PWD/tests/timed.sh"
# silence LOG: five times the seconds of the slowest test of a run, at least half a minute.
silence() { grep -oE '<[0-9.]+s>$' "$1" | tr -d '<s>' | awk '$1 > most { most = $1 } END { s = int(5 * most) + 1; print s < 30 ? 30 : s }'; }
mkdir -p "$run"
cd "$tree"
config=$run/mutants.toml
cp .cargo/mutants.toml "$config"
# only_files CONFIG GLOB…: has a configuration break only these files.
only_files() {
    sed -i '/^examine_globs = \[/,/^\]/d' "$1"
    printf 'examine_globs = [%s]\n' "$(printf '"%s", ' "${@:2}")" >>"$1"
}
[ $# = 0 ] || only_files "$config" "$@"
if [ ! -f "$run/shards" ]; then
    count=$(cargo mutants --list --config "$config" | wc -l)
    [ "$count" -gt 0 ] || { echo "there is no such mutant" >&2; exit 1; }
    # A judge that fails without a fault proves nothing.
    args=$(sed -nE 's/^(test_package|additional_cargo_test_args) = \[(.*)\]$/\1 \2/p' .cargo/mutants.toml | tr -d '",' |
        awk '$1 == "test_package" { for (i = 2; i <= NF; i++) printf "-p %s ", $i; next } { $1 = ""; printf "%s ", $0 }')
    # shellcheck disable=SC2086 # a list
    cargo test --quiet --no-run $args
    # shellcheck disable=SC2086
    timeout "$TIMEOUT" cargo test $args >"$folder/baseline.log" 2>&1 ||
        { tail -n 40 "$folder/baseline.log" >&2; echo "the tests that judge fail, or take $TIMEOUT s, with nothing broken" >&2; exit 1; }
    silence "$folder/baseline.log" >"$run/silence"
    # shellcheck disable=SC2086
    quick_args="-p ringdisk-block -p ringdisk-qcow $(tr -d '",' <<<"$QUICK") $(tr -d '",' <<<"$SKIPPED")"
    # shellcheck disable=SC2086
    cargo test --quiet --no-run $quick_args
    quick_begun=$(date +%s)
    # shellcheck disable=SC2086
    cargo test $quick_args >"$folder/baseline.log" 2>&1
    quick_seconds=$(($(date +%s) - quick_begun + 1))
    echo $((quick_seconds < 6 ? 30 : 5 * quick_seconds)) >"$run/quick-timeout"
    silence "$folder/baseline.log" >"$run/quick-silence"
    echo $(((count + SHARD - 1) / SHARD)) >"$run/shards"
fi
shards=$(cat "$run/shards")
QUICK_TIMEOUT=$(cat "$run/quick-timeout")
QUICK_SILENCE=$(cat "$run/quick-silence")
SILENCE=$(cat "$run/silence")

# judge CONFIG TIMEOUT SILENCE OUTPUT FILTER…: breaks what the filters leave; cargo-mutants' output goes to the folder OUTPUT.
judge() {
    local config=$1 timeout=$2 silence=$3 output=$4 status=0
    shift 4
    mkdir -p "$output"
    HUNG_SECONDS=$silence cargo mutants --in-place --baseline skip --timeout "$timeout" --build-timeout 1200 --colors never --no-times \
        --output "$output" --config "$config" "$@" >"$output/log" 2>&1 || status=$?
    # 2: some were missed; 3: some timed out. Both are findings, anything else is not.
    case $status in
    0 | 2 | 3) ;;
    *) tail -n 40 "$output/log" >&2; echo "cargo-mutants ended with $status" >&2; exit 1 ;;
    esac
    # It would pass for a mutant that does not build.
    if grep -l 'linking with .* failed' "$output"/mutants.out/log/*.log >&2; then
        echo "a mutant was not linked, as these logs say: empty $CARGO_TARGET_DIR" >&2
        exit 1
    fi
    git -C "$tree" checkout -q --force "$commit"
}

quick=$run/quick.toml
sed -E -e 's/^test_package = .*/test_package = ["ringdisk-block", "ringdisk-qcow"]/' \
    -e "s/^additional_cargo_test_args = .*/additional_cargo_args = [$QUICK]\nadditional_cargo_test_args = [$SKIPPED]/" "$config" >"$quick"
# judge_again LIST NAME CONFIG TIMEOUT SILENCE: judges the mutants of the file LIST of the shard in $out once more; the output goes to NAME.
judge_again() {
    local list=$1 config=$out/$2.toml names files
    [ -s "$list" ] || return 0
    # The names, each as a regular expression that matches nothing else.
    names=$(sed -E 's/[][\.*^$()+?{}|/&#~-]/\\&/g' "$list" | paste -sd '|')
    cp "$3" "$config"
    readarray -t files < <(cut -d: -f1 "$list" | sort -u)
    only_files "$config" "${files[@]}"
    judge "$config" "$4" "$5" "$out/$2" --re "^($names)\$"
}

begun=$SECONDS
# In an order of chance, the same each time: what a short run judges is a sample of all.
for shard in $(shuf -i "0-$((shards - 1))" --random-source=<(yes)); do
    out=$run/shard-$shard
    [ ! -f "$out/done" ] || continue
    [ $((SECONDS - begun)) -lt "$SECONDS_MAX" ] || break
    rm -rf "$out"
    judge "$quick" "$QUICK_TIMEOUT" "$QUICK_SILENCE" "$out/quick" --sharding round-robin --shard "$shard/$shards"
    cp "$out/quick/mutants.out/timeout.txt" "$out/slow"
    judge_again "$out/slow" again "$quick" $((2 * QUICK_TIMEOUT)) $((2 * QUICK_SILENCE))
    { cat "$out/quick/mutants.out/missed.txt"; grep -sFxf "$out/slow" "$out/again/mutants.out/missed.txt" || true; } >"$out/undecided"
    judge_again "$out/undecided" all "$config" "$TIMEOUT" "$SILENCE"
    touch "$out/done"
done
report
