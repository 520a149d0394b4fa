#!/bin/sh
# Runs a test binary so that it prints the time of each test: the runner that `run-tests.sh` gives to cargo.
#
# PART=lab takes only those of the lab's package, PART=others only those of the other packages.
#
# The option is of the test harness and not stable yet. Cargo itself must not know of it: it would build all crates anew.
package=others
[ "${CARGO_PKG_NAME:-}" != ringdisk-tests ] || package=lab
case $1 in
*/deps/*)
    [ "${PART:-$package}" = "$package" ] || exit 0
    RUSTC_BOOTSTRAP=1 exec "$@" -Z unstable-options --report-time
    ;;
*) exec "$@" ;;
esac
