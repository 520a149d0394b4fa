# What every script of a guest begins with. Scripts are for a POSIX shell; `set -eu` holds.

# soon SECONDS COMMAND…: waits until the command succeeds; fails if it does not for so long.
soon() {
    tries=$(($1 * 10))
    shift
    until "$@"; do
        tries=$((tries - 1))
        [ $tries -gt 0 ] || { echo "in vain: $*"; return 1; }
        sleep 0.1
    done
}
# quietly COMMAND…: what it says, only if it fails.
quietly() { "$@" >/tmp/said 2>&1 || { cat /tmp/said; return 1; }; }
# ended NAME COMMAND…: says how a command ended, with what it complained of.
ended() {
    name=$1
    shift
    status=0
    "$@" >/tmp/said 2>&1 || status=$?
    echo "$name $status $(tr '\n' ' ' </tmp/said)"
}
# job ARGUMENTS…: has fio write at random and verify what it wrote. By xxhash, as an emulated processor's instruction for
# crc32c goes bit by bit.
job() {
    fio --name=verified --ioengine=libaio --iodepth=16 --direct=1 --rw=randwrite --verify=xxhash --verify_fatal=1 --randseed=7 \
        --eta=never --output=/tmp/fio "$@" || { cat /tmp/fio; exit 1; }
}
# verify DEVICE ARGUMENTS…: a job on a block device.
verify() {
    target=$1
    shift
    job --filename="$target" --bsrange=4k-256k --size=16m --do_verify=1 "$@"
}
# verify_files FOLDER ARGUMENTS…: two jobs in files of their own, made durable now and then.
verify_files() {
    target=$1
    shift
    job --directory="$target" --bsrange=4k-64k --size=8m --numjobs=2 --fsync=64 --fallocate=none --do_verify=1 "$@"
}
