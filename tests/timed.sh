#!/bin/sh
# Runs a test binary so that it prints the time of each test: the runner that `run-tests.sh` gives to cargo.
#
# The option is of the test harness and not stable yet. Cargo itself must not know of it: it would build all crates anew.
case $1 in
*/deps/*) RUSTC_BOOTSTRAP=1 exec "$@" -Z unstable-options --report-time ;;
*) exec "$@" ;;
esac
