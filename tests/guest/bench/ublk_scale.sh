# One server with many devices, for each of $shapes (DEVICES x QUEUES x DEPTH): made, killed, recovered and closed, without I/O. What
# is measured is the driver's and the server's work on devices, queues and tags.
modprobe ublk_drv ublks_max=256
mount -o ro /dev/lab/tools /mnt
mkdir -p /tmp/work /run/lock
cd /tmp/work
milliseconds() { echo $(($(date +%s%N) / 1000000)); }
# took SHAPE FIGURE: the time since $begin.
took() { echo "@ $1 $2 $(($(milliseconds) - begin))"; }
available() { awk '/MemAvailable/ { print $2 }' /proc/meminfo; }
quiesced() { /mnt/ringdisk ublk list --json | tr '{' '\n' | grep -c -i quiesced || true; }
# serve COUNT ARGUMENTS…: starts a server and waits until it has told of all its devices.
serve() {
    count=$1
    shift
    : >out
    begin=$(milliseconds)
    /mnt/ringdisk ublk "$@" >out 2>err & server=$!
    until [ "$(wc -l <out)" = $count ]; do sleep 0.05; [ -d /proc/$server ] || { cat err; exit 1; }; done
}
# shape DEVICES QUEUES DEPTH
shape() {
    # Some 3 KiB of the kernel's and the server's memory for each tag.
    if [ $(($1 * $2 * $3 * 3)) -gt "$(available)" ]; then
        echo "@missing $1x$2x$3 does not fit into $(available) KiB"
        return 0
    fi
    disks=
    for n in $(seq $1); do
        [ -e m$n.qcow2 ] || /mnt/ringdisk image create m$n.qcow2 16M >/dev/null
        disks="$disks path=m$n.qcow2,num_queues=$2,queue_size=$3"
    done
    before=$(available)
    serve $1 add --disk $disks
    took $1x$2x$3 create-ms
    echo "@ $1x$2x$3 memory-kib $((before - $(available)))"
    # The driver makes no more queues than there may be CPUs.
    /mnt/ringdisk ublk info 0 --json | grep -q "\"queues\":$2[,}]" || { echo "not $2 queues"; exit 1; }
    begin=$(milliseconds)
    kill -9 $server
    wait $server || true
    took $1x$2x$3 exit-ms
    until [ "$(quiesced)" = $1 ]; do sleep 0.02; done
    took $1x$2x$3 quiesce-ms
    serve $1 recover --all
    took $1x$2x$3 recover-ms
    begin=$(milliseconds)
    kill $server
    wait $server
    took $1x$2x$3 close-ms
}
for one in $shapes; do
    shape ${one%%x*} "$(echo $one | cut -d x -f 2)" ${one##*x}
done
