#!/usr/bin/env bash
# Runs a test binary so that it prints the time of each test, and ends it if it hangs: the runner that `run-tests.sh` gives to cargo.
#
# PART takes only some: `lab` those of the lab's package, `engine` those of the engine and its simulator, `others` the rest.
#
# A binary that has printed nothing for HUNG_SECONDS is killed with all that it started, after lines that begin with `hung: ` have told
# where its threads stand, unless HUNG_STACKS is `no`. It must print to a file.
#
# The option is of the test harness and not stable yet. Cargo itself must not know of it: it would build all crates anew.
case ${CARGO_PKG_NAME:-} in
ringdisk-tests) part=lab ;;
ringdisk-qcow | ringdisk-sim | ringdisk-simulator) part=engine ;;
*) part=others ;;
esac
case $1 in
*/deps/*) [ "${PART:-$part}" = "$part" ] || exit 0 ;;
*) exec "$@" ;;
esac

# processes PID: it and its descendants, the youngest generation last.
processes() {
    local parents=$1 children
    # shellcheck disable=SC2086,SC2116 # lists
    while [ -n "$parents" ]; do
        echo $parents
        children=
        for parent in $parents; do children+=" $(cat "/proc/$parent/task/"*/children 2>/dev/null || true)"; done
        parents=$(echo $children)
    done
}

# stacks PID: where the threads of it and its descendants stand, in the kernel and, of the first six processes, above it.
stacks() {
    local process thread told=0
    command -v gdb >/dev/null || apt-get -q install -y --no-install-recommends gdb >/dev/null 2>&1
    for process in $(processes "$1"); do
        echo "process $process: $(tr '\0' ' ' <"/proc/$process/cmdline" | head -c 300)"
        for thread in "/proc/$process/task/"*; do
            echo "  $(cat "$thread/comm"): $(tr '\n' ' ' <"$thread/stack" | sed 's/\[<0>\] //g; s/+0x[0-9a-f]*\/0x[0-9a-f]*//g')"
        done
        [ $((told++)) -lt 6 ] || continue
        timeout --kill-after=5 60 gdb -p "$process" -batch -nx -ex 'thread apply all backtrace 40' 2>&1 </dev/null \
            | grep -aE '^(Thread|#)|cannot|not permitted|not found' | head -n 150
    done 2>/dev/null
}

# watch PID PROGRAM: until the process runs that program no more.
watch() {
    local printed silent
    while sleep 5 && [ "/proc/$1/exe" -ef "$2" ]; do
        printed=$(stat -Lc %Y "/proc/$1/fd/1" 2>/dev/null) || return
        silent=$(($(date +%s) - printed))
        [ "$silent" -ge "$HUNG_SECONDS" ] || continue
        echo
        { echo "$2 has printed nothing for $silent s"; [ "${HUNG_STACKS:-}" = no ] || stacks "$1"; } | sed 's/^/hung: /'
        # shellcheck disable=SC2046 # a list
        kill -KILL $(processes "$1") 2>/dev/null
        return
    done
}

if [ -n "${BEGUN:-}" ]; then echo "$(date +%T) $part: ${1##*/}" >>"$BEGUN"; fi
# The watcher is no child of the tests, which count theirs.
if [ -f /dev/stdout ] && [ -n "${HUNG_SECONDS:-}" ]; then (watch $$ "$1" &); fi
RUSTC_BOOTSTRAP=1 exec "$@" -Z unstable-options --report-time
