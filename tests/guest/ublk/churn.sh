# Devices of many kinds, each removed under load.
ringdisk image create -o cluster_size=16k q.qcow2 256M >/dev/null
truncate -s 256M r.raw
loaded() { [ "$(awk '{ print ($1 > 100 && $5 > 100) }' /sys/block/$1/stat)" = 1 ]; }
# Each kind is forced and stopped, on one kernel or the other.
case $own_transports in
zero-copy) rounds="4 2 3 6" ;;
*) rounds="1 5 3" ;;
esac
for round in $rounds; do
    case $round in
    1 | 4) how="--transport copy --queues-per-worker 2" sizes=4k-64k ;;
    2 | 5) how="--transport user-copy --recovery off" sizes=4k-64k ;;
    *) how="--max-io 64K" sizes=4k-256k ;;
    esac
    add churn add --disk path=q.qcow2,num_queues=2 path=r.raw,image_type=raw,queue_size=32 $how
    for dev in /dev/ublkb0 /dev/ublkb1; do
        # Deeper than a queue, so that every tag is busy when the device goes.
        fio --name=load --filename=$dev --size=200m --rw=randrw --bsrange=$sizes --ioengine=libaio --iodepth=256 --direct=1 \
            --time_based --runtime=100 --allow_file_create=0 --eta=never --output=/tmp/fio.$(basename $dev) 2>/dev/null &
    done
    (while :; do blkdiscard -o 64M -l 32M /dev/ublkb0 2>/dev/null || exit 0; done) &
    for dev in ublkb0 ublkb1; do
        soon 60 loaded $dev || { cat /tmp/fio.*; exit 1; }
    done
    ended refused ringdisk ublk del 0 1
    began=$(date +%s%N)
    case $round in
    1 | 2 | 3) ended forced ringdisk ublk del --all --force ;;
    *) kill $server ;;
    esac
    wait $server && echo "server 0"
    echo "gone after $((($(date +%s%N) - began) / 1000000)) ms"
    wait
    test ! -e /dev/ublkb0 && test ! -e /dev/ublkc1
    check q.qcow2
done
ringdisk ublk list | wc -l | sed 's/^/left /'
ls /run/ringdisk/ublk | wc -l | sed 's/^/remembered /'
