#!/bin/sh
# Runs a test binary so that it prints the time of each test: the runner that `run-tests.sh` gives to cargo.
#
# PART takes only some: `lab` those of the lab's package, `engine` those of the engine and its simulator, `others` the rest.
#
# The option is of the test harness and not stable yet. Cargo itself must not know of it: it would build all crates anew.
case ${CARGO_PKG_NAME:-} in
ringdisk-tests) part=lab ;;
ringdisk-qcow | ringdisk-sim | ringdisk-simulator) part=engine ;;
*) part=others ;;
esac
case $1 in
*/deps/*)
    [ "${PART:-$part}" = "$part" ] || exit 0
    RUSTC_BOOTSTRAP=1 exec "$@" -Z unstable-options --report-time
    ;;
*) exec "$@" ;;
esac
