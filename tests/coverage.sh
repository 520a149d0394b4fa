#!/usr/bin/env bash
# How many lines of the format engine (qcow/src) the suite reaches: per file, the lines it does not, the total.
#
# Lines of tests do not count: neither whole files of them nor the modules at the end of a file. Fails below
# COVERAGE_MIN percent (default 90). Installs cargo-llvm-cov and the tools of rustc's own LLVM where they are missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools=$(rustc --print target-libdir)/../bin
[ -x "$tools/llvm-cov" ] || rustup component add llvm-tools
command -v cargo-llvm-cov >/dev/null || cargo install --locked cargo-llvm-cov

target=$PWD/target/coverage
log=$target/lcov.info
mkdir -p "$target"
export CARGO_TARGET_DIR=$target CARGO_LLVM_COV_TARGET_DIR=$target
if [ "${1:-}" != --report ]; then
    cargo llvm-cov clean --workspace
    # What runs the engine without a sandbox around it, which would keep the profile from being written.
    run() { env --default-signal=HUP,INT,QUIT,TERM cargo llvm-cov --no-report --no-fail-fast "$@"; }
    run -p ringdisk-qcow
    run -p ringdisk --test malformed
    run -p ringdisk --test cli -- bitmaps compact image_tools io_language resize snapshots
fi
cargo llvm-cov report --lcov --output-path "$log"

awk -v root="$PWD/" -v least="${COVERAGE_MIN:-90}" '
    function flush_range() {
        if (from == 0) return
        missed = missed " " (from == to ? from : from "-" to)
        from = 0
    }
    /^SF:/ {
        file = substr($0, 4); sub(root, "", file)
        wanted = file ~ /^qcow\/src\// && file !~ /(_tests|\/tests|\/testing)\.rs$/
        end = 0; number = 0; previous = ""
        if (wanted) {
            while ((getline line < (root file)) > 0) {
                number++
                if (!end && previous ~ /^#\[cfg\(test\)\]/ && line ~ /^mod .*\{/) end = number - 1
                previous = line
            }
            close(root file)
        }
        lines = 0; hit = 0; missed = ""; from = 0
    }
    wanted && /^DA:/ {
        split(substr($0, 4), part, ",")
        if (end && part[1] >= end) next
        lines++
        if (part[2] > 0) { hit++; flush_range(); next }
        if (from == 0) from = part[1]
        to = part[1]
    }
    wanted && /^end_of_record/ {
        flush_range()
        if (lines == 0) next
        printf "%6.2f %%  %4d of %4d  %s%s\n", 100 * hit / lines, hit, lines, file, (missed == "" ? "" : "\n            not reached:" missed)
        all += lines; reached += hit
    }
    END {
        if (all == 0) { print "no line of qcow/src was measured" > "/dev/stderr"; exit 1 }
        share = 100 * reached / all
        printf "%6.2f %%  %4d of %4d  all of qcow/src\n", share, reached, all
        if (share < least) { printf "below %s %%\n", least > "/dev/stderr"; exit 1 }
    }' "$log"
