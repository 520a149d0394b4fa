# Servers that follow each other under load, one device with every tag of its queues taken all the time.
# upgrade LOG ARGUMENTS…: has another server go on, and waits for the old one.
upgrade() {
    old=$server
    began=$(date +%s%N)
    add "$@"
    took=$((($(date +%s%N) - began) / 1000000))
    status=0
    wait $old || status=$?
    [ $status = 0 ] || { echo "the old server ended with $status"; cat *.err; exit 1; }
    sed -n 's/.*took over.* ms=\([0-9]*\).*/paused \1 ms/p' "$1.err"
}
# served: whether the server of the first device has answered requests.
served() { ringdisk ublk info 0 --json | grep -qE '"(zero_)?copied":[1-9]'; }
# The kernel's own way of handing over, with each of its transports' ways of naming pages.
case $own_transports in
zero-copy) relays=zero-copy:8 ;;
*) relays="copy:2 user-copy:5" ;;
esac
for relay in $relays; do
    transport=${relay%:*} rounds=${relay#*:}
    rm -f q.qcow2 r.raw
    ringdisk image create -o cluster_size=16k q.qcow2 192M >/dev/null
    truncate -s 64M r.raw
    add first add --disk path=q.qcow2,num_queues=2 path=r.raw,image_type=raw,num_queues=2,queue_size=8 --transport $transport
    fio --name=sparse --filename=/dev/ublkb0 --size=96m --numjobs=2 --offset_increment=96m --rw=randwrite --bsrange=4k-64k \
        --ioengine=libaio --iodepth=24 --direct=1 --fsync=64 --verify=xxhash --verify_backlog=200 --verify_fatal=1 --do_verify=1 \
        --time_based --runtime=300 --allow_file_create=0 --eta=never --output=/tmp/fio.0 & sparse=$!
    fio --name=full --filename=/dev/ublkb1 --size=24m --numjobs=2 --offset_increment=32m --rw=randwrite --bsrange=4k-128k \
        --ioengine=libaio --iodepth=24 --direct=1 --verify=xxhash --verify_backlog=100 --verify_fatal=1 --do_verify=1 \
        --time_based --runtime=300 --allow_file_create=0 --eta=never --output=/tmp/fio.1 & full=$!
    round=0
    while [ $round -lt $rounds ]; do
        round=$((round + 1))
        sleep 0.4
        [ -d /proc/$sparse ] && [ -d /proc/$full ] || { echo "no load"; cat /tmp/fio.*; cat *.err; exit 1; }
        case $round in
        1) upgrade next upgrade 0 1 --json && sed 's/^/made /' next.out ;;
        *) upgrade next upgrade --all ;;
        esac
        echo "upgraded $transport $round in $took ms"
    done
    # The load goes on with the last server, however slow the machine is.
    soon 60 served
    ringdisk ublk info 0 --json | sed "s/^/info $transport /"
    kill -INT $sparse $full
    for load in $sparse $full; do
        wait $load || [ $? = 128 ] || { echo "load failed: $?"; cat /tmp/fio.*; cat *.err; exit 1; }
    done
    ! grep -E 'err= *[1-9]|verify:|error' /tmp/fio.* || { cat /tmp/fio.*; exit 1; }
    echo "load $transport 0"
    sed -n "s/.* clat (\([mun]*sec\)): .*max= *\([0-9.kM]*\),.*/latency $transport \2 \1/p" /tmp/fio.0 /tmp/fio.1
    cat /sys/block/ublkb1/queue/io_timeout | sed "s/^/timeout $transport /"
    verify /dev/ublkb1
    kept /dev/ublkb0 kept.0
    kept /dev/ublkb1 kept.1
    kill $server
    wait $server && echo "server $transport 0"
    check q.qcow2
    same kept.0 q.qcow2 "$transport 0"
    same kept.1 r.raw "$transport 1"
done
ls /run/ringdisk/ublk | wc -l | sed 's/^/remembered /'
