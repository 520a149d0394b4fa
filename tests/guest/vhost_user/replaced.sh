# Works undisturbed, then for $seconds, in which the servers of its disks are replaced. The data disk grows to $larger bytes
# before, and to $largest after.
# grown BYTES: waits until the data disk has so many.
grown() {
    until [ "$(blockdev --getsize64 /dev/lab/data)" = "$1" ]; do sleep 0.2; done
    echo "grown to $1"
}
# work NAME SECONDS: verifies what it wrote a moment ago, and notes how long its requests took.
work() {
    job --filename=/dev/lab/data --size=64m --rw=randrw --bsrange=4k-32k --iodepth=8 --verify_backlog=64 --verify_dump=0 \
        --time_based --runtime=$2
    grep -E '^ +lat \([num]sec\)' /tmp/fio | sed "s/^ */$1 /" > /tmp/$1
}
work undisturbed 12
echo ready
grown $larger
work latency $seconds
grown $largest
cat /tmp/undisturbed /tmp/latency
dd if=/dev/urandom of=/root/after bs=64k count=16 conv=fsync status=none
sha256sum /dev/lab/data | sed 's/^/data /'
